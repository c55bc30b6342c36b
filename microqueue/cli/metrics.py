"""Serve Prometheus metrics from a worker or a sweeper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from microqueue.embedded.probe import LARGEST_PORT
from microqueue.errors import InvalidArgument, MicroqueueError
from microqueue.queue import Queue

LOCAL = "127.0.0.1"
MISSING = "--metrics-port needs prometheus-client: run pip install 'microqueue[metrics]'"


def check_ports(port: int | None, processes: int = 1) -> None:
    """Refuse a port that does not exist, or after which there are too few for the processes."""
    last = LARGEST_PORT - processes + 1
    if port is None or 0 <= port <= last:
        return
    needed = "" if processes == 1 else f", for each of {processes} processes has one of its own"
    raise InvalidArgument(
        f"--metrics-port {port} cannot be used: give one of 1 to {last}{needed}",
        argument="metrics_port",
        value=port,
    )


@contextmanager
def metrics(host: str, port: int | None, process: str | None = None) -> Iterator[list[Any]]:
    """Serve the metrics of this process, if asked to; give the hooks that a worker needs.

    Processes of one supervisor each take a port of their own, counted up by their number.
    """
    if port is None:
        yield []
        return
    try:
        from microqueue.metrics import PrometheusHooks  # noqa: PLC0415 (an extra)
    except ImportError as exc:
        raise MicroqueueError(MISSING) from exc
    number = int(process.split(".")[-2]) if process else 1
    with _serving(host, port + number - 1):
        yield [PrometheusHooks()]


@contextmanager
def sweep_metrics(host: str, port: int | None, queue: Queue[Any]) -> Iterator[Any]:
    """Serve how the queue stands and what sweeps do; give what takes their reports."""
    check_ports(port)
    if port is None:
        yield None
        return
    try:
        from prometheus_client import REGISTRY  # noqa: PLC0415 (an extra)

        from microqueue.metrics import QueueCollector, SweepMetrics  # noqa: PLC0415 (as above)
    except ImportError as exc:
        raise MicroqueueError(MISSING) from exc
    REGISTRY.register(QueueCollector(queue))
    with _serving(host, port):
        yield SweepMetrics()


@contextmanager
def _serving(host: str, port: int) -> Iterator[None]:
    from prometheus_client import start_http_server  # noqa: PLC0415 (an extra)

    try:
        server, thread = start_http_server(port, addr=host)
    except OSError as exc:
        raise InvalidArgument(
            f"--metrics-port {port} cannot be used on {host}: {exc.strerror}",
            argument="metrics_port",
        ) from exc
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
