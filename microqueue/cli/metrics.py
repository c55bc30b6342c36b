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
    """Reject a port that is out of range, or too high for one port per process."""
    last = LARGEST_PORT - processes + 1
    if port is None or 0 <= port <= last:
        return
    needed = "" if processes == 1 else f", because each of {processes} processes needs a port"
    raise InvalidArgument(
        f"--metrics-port {port} is not valid: give 1 to {last}{needed}",
        argument="metrics_port",
        value=port,
    )


@contextmanager
def serve_worker_metrics(
    host: str, port: int | None, process: str | None = None
) -> Iterator[list[Any]]:
    """Serve the metrics of this process if there is a port; yield the hooks for the worker.

    Each process of a supervisor uses its own port: the given one plus its number, minus one.
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
def serve_sweep_metrics(host: str, port: int | None, queue: Queue[Any]) -> Iterator[Any]:
    """Serve metrics of the queue and of sweeps; yield the function that records a report."""
    check_ports(port)
    if port is None:
        yield None
        return
    try:
        from prometheus_client import REGISTRY  # noqa: PLC0415 (an extra)

        from microqueue.metrics import (  # noqa: PLC0415 (as above)
            QueueCollector,
            ScheduleCollector,
            SweepMetrics,
        )
    except ImportError as exc:
        raise MicroqueueError(MISSING) from exc
    REGISTRY.register(QueueCollector(queue))
    REGISTRY.register(ScheduleCollector(queue))
    with _serving(host, port):
        yield SweepMetrics()


@contextmanager
def _serving(host: str, port: int) -> Iterator[None]:
    from prometheus_client import start_http_server  # noqa: PLC0415 (an extra)

    try:
        server, thread = start_http_server(port, addr=host)
    except (OSError, TypeError, ValueError) as exc:  # The last two: no host's name.
        reason = exc.strerror if isinstance(exc, OSError) else "this is no address"
        raise InvalidArgument(
            f"--metrics-port {port} cannot be used on {host}: {reason}",
            argument="metrics_port",
        ) from exc
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
