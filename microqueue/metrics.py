"""Metrics for Prometheus (extra ``metrics``): of workers, queues and sweeps.

    hooks = PrometheusHooks()
    REGISTRY.register(QueueCollector(queue))
    Worker(queue, tasks, hooks=[hooks])
    Sweeper(queue, on_report=SweepMetrics())

Make one of each per process and registry, and share it: a registry refuses a name twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as exc:
    raise ImportError(
        "microqueue.metrics needs prometheus-client: pip install 'microqueue[metrics]'"
    ) from exc

from microqueue.arguments import refused
from microqueue.core import core_of
from microqueue.durations import Duration, duration_argument
from microqueue.errors import MicroqueueError
from microqueue.insights import Insights
from microqueue.operations.filters import claim_of
from microqueue.queue import Queue
from microqueue.reports import QueueStats
from microqueue.sweeper import COUNTERS, SweepReport
from microqueue.task import Outcome, Task
from microqueue.worker.hooks import LEASE_LOST, Hooks
from microqueue.worker.outcomes import Snooze

STATUSES = ("ready", "delayed", "processing", "done", "failed")

WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
RUN_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)

logger = logging.getLogger("microqueue.metrics")


class PrometheusHooks(Hooks):
    """Counts and times what workers do. Any number of them may share one.

    - ``microqueue_tasks_total{queue,task,outcome}``: handlers that ended, by what became of
      the task: ``done``, ``retried``, ``snoozed``, ``failed``, ``released``, ``cancelled`` or
      ``lease_lost``.
      A lease found lost only when the result was to be written counts as both.
    - ``microqueue_task_run_seconds{queue,task}``: how long handlers ran.
    - ``microqueue_task_wait_seconds{queue}``: from enqueue to the first claim, by the server's
      clock. A delay that was asked for is part of it; later deliveries are left out, because
      their backoff would drown it.
    - ``microqueue_tasks_in_progress{queue,task}``: handlers that run now.

    ``task`` is the name of a task of ``Tasks`` that one of the workers has, and empty for others:
    a producer may write any name into a task, and each would be a series of its own.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._ended = Counter(
            "microqueue_tasks",
            "Handlers that ended, by what became of the task.",
            ["queue", "task", "outcome"],
            registry=registry,
        )
        self._wait = Histogram(
            "microqueue_task_wait_seconds",
            "From enqueue to the first claim.",
            ["queue"],
            registry=registry,
            buckets=WAIT_BUCKETS,
        )
        self._run = Histogram(
            "microqueue_task_run_seconds",
            "How long handlers ran.",
            ["queue", "task"],
            registry=registry,
            buckets=RUN_BUCKETS,
        )
        self._in_progress = Gauge(
            "microqueue_tasks_in_progress",
            "Handlers that run now.",
            ["queue", "task"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._running: set[Any] = set()
        self._knows: set[Callable[[str], bool]] = set()

    def on_attach(self, knows: Callable[[str], bool]) -> None:
        """Learn the names of a worker's tasks."""
        self._knows.add(knows)

    def on_start(self, task: Task[Any]) -> None:
        """Count the handler as running, and note how long its task waited."""
        self._running.add(claim_of(task))
        self._in_progress.labels(task.queue, self._name(task)).inc()
        if task.lease is not None and not task.history and not task.replays:
            waited = task.lease.started_at - task.created_at
            self._wait.labels(task.queue).observe(max(waited.total_seconds(), 0.0))

    def on_success(self, task: Task[Any], *, took_sec: float) -> None:
        """Count it as done."""
        self._end(task, Outcome.DONE, took_sec)

    def on_retry(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:
        """Count it as retried, or as snoozed."""
        outcome = Outcome.SNOOZED if isinstance(error, Snooze) else Outcome.RETRIED
        self._end(task, outcome, took_sec)

    def on_failure(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:  # noqa: ARG002 (why is in the task)
        """Count it as failed."""
        self._end(task, Outcome.FAILED, took_sec)

    def on_cancel(self, task: Task[Any]) -> None:
        """Count it as cancelled."""
        self._end(task, Outcome.CANCELLED)

    def on_lease_lost(self, task: Task[Any]) -> None:
        """Count it as lost, whether or not it ran."""
        self._end(task, LEASE_LOST)

    def on_release(self, task: Task[Any]) -> None:
        """Count it as released: the worker ended before the handler did."""
        if claim_of(task) in self._running:
            self._end(task, Outcome.RELEASED)

    def _end(self, task: Task[Any], outcome: str, took_sec: float | None = None) -> None:
        name = self._name(task)
        self._ended.labels(task.queue, name, str(outcome)).inc()
        if took_sec is not None:
            self._run.labels(task.queue, name).observe(took_sec)
        try:
            self._running.remove(claim_of(task))
        except KeyError:
            return  # It never ran, or its end was told before.
        self._in_progress.labels(task.queue, name).dec()

    def _name(self, task: Task[Any]) -> str:
        name = task.name
        return name if name and any(knows(name) for knows in list(self._knows)) else ""


class QueueCollector(Collector):
    """Reads how queues stand when Prometheus asks, at most once per ``cache`` (5 seconds).

    - ``microqueue_queue_depth{queue,status}``: tasks that are ``ready``, ``delayed``,
      ``processing``, ``done`` (within the retention) and ``failed``, the dead letters.
    - ``microqueue_queue_overdue{queue}``: those of ``processing`` whose lease has expired.
    - ``microqueue_queue_oldest_ready_seconds{queue}``: how long the oldest ready task waits.
    - ``microqueue_queue_depth_estimated{queue,status}``: 1 if a depth, or ``overdue``, is an
      estimate, because it is above ``settings.count_limit``; else 0. While that of ``ready`` is
      one, the oldest ready task may wait longer than is told. With ``exact`` everything is
      counted at each reading, which takes seconds with a million tasks.

    One collector takes all queues of a registry; those of one collection are read together, with
    few queries for all of them. A queue whose server is away is logged and
    left out, and the other metrics of the process are still served.
    """

    def __init__(self, *queues: Queue[Any], cache: Duration = 5.0, exact: bool = False) -> None:
        for queue in queues:
            if not isinstance(queue, Queue):
                raise refused("queue", queue, "give a Queue; Prometheus asks in a thread")
        given = duration_argument("cache", cache)
        self._cache_sec = given.total_seconds() if given else 0.0
        self._queues = queues
        self._exact = exact
        self._lock = threading.Lock()
        self._stats: list[QueueStats] = []
        self._read_at = float("-inf")

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Name the metrics, so that registering asks no server."""
        return queue_families([])

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Give the metrics, read anew if the last ones are too old."""
        with self._lock:
            if time.monotonic() - self._read_at >= self._cache_sec:
                self._stats = list(self._read())
                self._read_at = time.monotonic()
            return queue_families(self._stats)

    def _read(self) -> Iterator[QueueStats]:
        for queues in self._by_collection():
            try:
                names = [queue.name for queue in queues]
                yield from Insights(queues[0]).stats(names, exact=self._exact)
            except MicroqueueError as exc:
                for queue in queues:
                    logger.warning("queue %s has no metrics now: %s", queue.name, exc)

    def _by_collection(self) -> Iterable[Sequence[Queue[Any]]]:
        """Put queues together that are read at once."""
        found: dict[Any, dict[str, Queue[Any]]] = {}
        for queue in self._queues:
            place = core_of(queue).collections
            key = place.client, place.database.name, place.name, queue.settings.dead_letters
            found.setdefault(key, {})[queue.name] = queue
        return [list(queues.values()) for queues in found.values()]


def queue_families(stats: Iterable[QueueStats]) -> list[GaugeMetricFamily]:
    """Give the metrics of some queues."""
    depth = GaugeMetricFamily(
        "microqueue_queue_depth", "Tasks by status.", labels=["queue", "status"]
    )
    overdue = GaugeMetricFamily(
        "microqueue_queue_overdue", "Tasks whose lease has expired.", labels=["queue"]
    )
    oldest = GaugeMetricFamily(
        "microqueue_queue_oldest_ready_seconds",
        "How long the oldest ready task waits.",
        labels=["queue"],
    )
    estimated = GaugeMetricFamily(
        "microqueue_queue_depth_estimated",
        "1 if a depth is an estimate.",
        labels=["queue", "status"],
    )
    for one in stats:
        for status in STATUSES:
            depth.add_metric([one.queue, status], getattr(one, status))
        for status in (*STATUSES, "overdue"):
            estimated.add_metric([one.queue, status], float(status in one.estimated))
        overdue.add_metric([one.queue], one.overdue)
        oldest.add_metric([one.queue], one.oldest_ready_age_sec or 0.0)
    return [depth, overdue, oldest, estimated]


class SweepMetrics:
    """Counts what sweeps do: ``Sweeper(queue, on_report=SweepMetrics())``.

    - ``microqueue_sweeps_total{result}``: ``ok``, ``failed``, or ``skipped`` because another
      sweeper was at it.
    - ``microqueue_swept_tasks_total{action}``: tasks ``reclaimed``, ``promoted``, ``buried``,
      ``expired``, ``purged`` and ``moved``.
    - ``microqueue_sweep_errors_total{job}``: jobs that failed.
    - ``microqueue_sweep_seconds``: how long sweeps took; skipped ones are left out.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._sweeps = Counter(
            "microqueue_sweeps", "Sweeps, by how they ended.", ["result"], registry=registry
        )
        self._swept = Counter(
            "microqueue_swept_tasks", "Tasks that sweeps moved.", ["action"], registry=registry
        )
        self._errors = Counter(
            "microqueue_sweep_errors", "Jobs of sweeps that failed.", ["job"], registry=registry
        )
        self._took = Histogram(
            "microqueue_sweep_seconds", "How long sweeps took.", registry=registry
        )

    def __call__(self, report: SweepReport) -> None:
        """Take one report into account."""
        if report.skipped:
            self._sweeps.labels("skipped").inc()
            return
        self._sweeps.labels("ok" if report.ok else "failed").inc()
        self._took.observe(report.took_sec)
        for action in COUNTERS:
            self._swept.labels(action).inc(getattr(report, action))
        for job in report.errors:
            self._errors.labels(job).inc()
