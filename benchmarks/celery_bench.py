"""Celery on several brokers: how fast tasks are published, drained and picked up."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.brokers import Broker
from benchmarks.celery_worker import CONCURRENCY, POOL, PREFETCH, RECORD, create_app

DRAIN_SEC = 300.0
PICK_UP_SEC = 60.0
STOP_SEC = 15.0
POLL_SEC = 0.005
WARM_UP = 3
IDLE_SEC = (0.1, 1.1)
"""How long a worker is idle before each sample of the latency: random, between these."""
SETTINGS = (
    f"Worker: {POOL}, {CONCURRENCY} processes, worker_prefetch_multiplier {PREFETCH}, "
    "early acknowledgement, no results, no events"
)


class Record(NamedTuple):
    """One run of a task: its number, when it was sent and when it started."""

    number: int
    sent: float
    started: float


@dataclass
class Rates:
    """Tasks per second in each round."""

    publish: list[float] = field(default_factory=list)
    drain: list[float] = field(default_factory=list)


class Worker:
    """A Celery worker in its own group of processes, and what its tasks noted."""

    def __init__(self, process: subprocess.Popen[bytes], records: Path, log: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._records = records
        self._log = log

    def wait(self, count: int, limit_sec: float) -> list[Record]:
        """Wait until so many tasks have started; return what they noted, in that order.

        Raises:
            RuntimeError: The worker ended or was too slow, or a task ran twice.
        """
        deadline = time.monotonic() + limit_sec
        while (done := self._size() // RECORD.size) < count:
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the worker started {done} of {count} tasks:\n{log}")
            time.sleep(POLL_SEC)
        found = [Record(*values) for values in RECORD.iter_unpack(self._records.read_bytes())]
        if sorted(one.number for one in found) != list(range(count)):
            raise RuntimeError("a task is missing or ran twice")
        return sorted(found, key=lambda one: one.started)

    def _size(self) -> int:
        return self._records.stat().st_size if self._records.exists() else 0


@contextmanager
def running_worker(url: str) -> Iterator[Worker]:
    """Start a worker, and end all its processes."""
    with tempfile.TemporaryDirectory(prefix="microqueue-celery-") as directory:
        records, log = Path(directory, "records"), Path(directory, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.celery_worker", url, str(records)],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Worker(process, records, log)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SEC)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # Also what is left of its pool.
        process.wait()


@contextmanager
def _publisher(url: str) -> Iterator[Any]:
    """Yield the task, as a program that only publishes has it."""
    app, task = create_app(url)
    try:
        yield task
    finally:
        app.close()


def measure_rates(brokers: list[Broker], tasks: int, rounds: int) -> dict[str, Rates]:
    """Publish tasks, then drain them with a worker; on each broker in turn, several times."""
    found = {broker.name: Rates() for broker in brokers}
    for _ in range(rounds):
        for broker in brokers:
            with broker.fresh() as url:
                found[broker.name].publish.append(_publish(url, tasks))
                with running_worker(url) as worker:
                    records = worker.wait(tasks, DRAIN_SEC)
            took = records[-1].started - records[0].started
            found[broker.name].drain.append((tasks - 1) / took)
    return found


def _publish(url: str, tasks: int) -> float:
    with _publisher(url) as task:
        task.apply_async((0, time.monotonic()))  # It connects and declares the queue.
        began = time.monotonic()
        for number in range(1, tasks):
            task.apply_async((number, time.monotonic()))
        return (tasks - 1) / (time.monotonic() - began)


def measure_pick_up(brokers: list[Broker], samples: int) -> dict[str, list[float]]:
    """Send single tasks to idle workers, to each broker in turn; return sorted milliseconds.

    The time is from the call of ``apply_async`` to the start of the task.
    """
    with ExitStack() as stack:
        workers: dict[str, tuple[Any, Worker]] = {}
        for broker in brokers:
            url = stack.enter_context(broker.fresh())
            worker = stack.enter_context(running_worker(url))
            workers[broker.name] = (stack.enter_context(_publisher(url)), worker)
        for number in range(WARM_UP + samples):
            for task, worker in workers.values():
                time.sleep(random.uniform(*IDLE_SEC) if number else 0)
                task.apply_async((number, time.monotonic()))
                worker.wait(number + 1, PICK_UP_SEC)
        return {
            name: sorted(
                (one.started - one.sent) * 1000
                for one in worker.wait(WARM_UP + samples, PICK_UP_SEC)
                if one.number >= WARM_UP
            )
            for name, (_, worker) in workers.items()
        }


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile of sorted values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
