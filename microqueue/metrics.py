"""Prometheus metrics of workers, queues and sweeps (extra ``metrics``).

    hooks = PrometheusHooks()
    REGISTRY.register(QueueCollector(queue))
    Worker(queue, tasks, hooks=[hooks])
    Sweeper(queue, on_report=SweepMetrics())

Create one of each per process and registry, and share it: a registry rejects duplicate names.
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
    """Counts and times handlers. Several workers may share one instance.

    - ``microqueue_tasks_total{queue,task,outcome}``: finished handler runs. The outcome is
      ``done``, ``retried``, ``snoozed``, ``failed``, ``released``, ``cancelled`` or
      ``lease_lost``. If the worker notices a lost lease only when it writes the result, the run
      counts under both outcomes.
    - ``microqueue_task_run_seconds{queue,task}``: run time of handlers.
    - ``microqueue_task_wait_seconds{queue}``: time from enqueue to the first claim, by the
      server's clock. It includes a requested delay. Later deliveries do not count, because they
      include backoff.
    - ``microqueue_tasks_in_progress{queue,task}``: handlers that are running.

    ``task`` is the name of a registered task of one of the workers, and empty for all others:
    producers may use any name, and each name would be a separate time series.

    Args:
        registry: The registry for the metrics. Default: the global one.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._ended = Counter(
            "microqueue_tasks",
            "Finished handler runs by outcome.",
            ["queue", "task", "outcome"],
            registry=registry,
        )
        self._wait = Histogram(
            "microqueue_task_wait_seconds",
            "Time from enqueue to the first claim.",
            ["queue"],
            registry=registry,
            buckets=WAIT_BUCKETS,
        )
        self._run = Histogram(
            "microqueue_task_run_seconds",
            "Run time of handlers.",
            ["queue", "task"],
            registry=registry,
            buckets=RUN_BUCKETS,
        )
        self._in_progress = Gauge(
            "microqueue_tasks_in_progress",
            "Handlers that are running.",
            ["queue", "task"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._running: set[Any] = set()
        self._knows: set[Callable[[str], bool]] = set()

    def on_attach(self, knows: Callable[[str], bool]) -> None:
        """Remember the names of a worker's registered tasks."""
        self._knows.add(knows)

    def on_start(self, task: Task[Any]) -> None:
        """Count the handler as running, and record how long its task waited."""
        self._running.add(claim_of(task))
        self._in_progress.labels(task.queue, self._name(task)).inc()
        if task.lease is not None and not task.history and not task.replays:
            waited = task.lease.started_at - task.created_at
            self._wait.labels(task.queue).observe(max(waited.total_seconds(), 0.0))

    def on_success(self, task: Task[Any], *, took_sec: float) -> None:
        """Count the run as done."""
        self._end(task, Outcome.DONE, took_sec)

    def on_retry(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:
        """Count the run as retried or snoozed."""
        outcome = Outcome.SNOOZED if isinstance(error, Snooze) else Outcome.RETRIED
        self._end(task, outcome, took_sec)

    def on_failure(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:  # noqa: ARG002 (the outcome is enough)
        """Count the run as failed."""
        self._end(task, Outcome.FAILED, took_sec)

    def on_cancel(self, task: Task[Any]) -> None:
        """Count the run as cancelled."""
        self._end(task, Outcome.CANCELLED)

    def on_lease_lost(self, task: Task[Any]) -> None:
        """Count the lost lease, whether or not the handler ran."""
        self._end(task, LEASE_LOST)

    def on_release(self, task: Task[Any]) -> None:
        """Count the run as released: the worker stopped before the handler finished."""
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
            return  # It never ran, or its end is already counted.
        self._in_progress.labels(task.queue, name).dec()

    def _name(self, task: Task[Any]) -> str:
        name = task.name
        return name if name and any(knows(name) for knows in list(self._knows)) else ""


class QueueCollector(Collector):
    """Reads the stats of queues when Prometheus scrapes.

    - ``microqueue_queue_depth{queue,status}``: tasks that are ``ready``, ``delayed``,
      ``processing``, ``done`` (within the retention) or ``failed`` (dead letters).
    - ``microqueue_queue_overdue{queue}``: processing tasks whose lease has expired.
    - ``microqueue_queue_oldest_ready_seconds{queue}``: age of the oldest ready task.
    - ``microqueue_queue_depth_estimated{queue,status}``: 1 if a depth, or ``overdue``, is an
      estimate because it exceeds ``settings.count_limit``; otherwise 0. If ``ready`` is an
      estimate, the oldest ready task may be older than reported.

    Use one collector for all queues of a registry: queues of the same collection are read
    together with few queries. If a server does not answer, its queues are logged and left out,
    and the other metrics of the process are still served.

    Args:
        *queues: The queues.
        cache: How long to reuse stats, in seconds or as a ``timedelta``.
        exact: Count everything on each read, which takes seconds with a million tasks.

    Raises:
        InvalidArgument: A queue is not a synchronous ``Queue``.
    """

    def __init__(self, *queues: Queue[Any], cache: Duration = 5.0, exact: bool = False) -> None:
        for queue in queues:
            if not isinstance(queue, Queue):
                raise refused("queue", queue, "give a Queue; Prometheus scrapes in a thread")
        given = duration_argument("cache", cache)
        self._cache_sec = given.total_seconds() if given else 0.0
        self._queues = queues
        self._exact = exact
        self._lock = threading.Lock()
        self._stats: list[QueueStats] = []
        self._read_at = float("-inf")

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the metrics without values, so that registering needs no server."""
        return queue_families([])

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return the metrics, and read the stats again if the cached ones are too old."""
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
                    logger.warning("could not read the stats of queue %s: %s", queue.name, exc)

    def _by_collection(self) -> Iterable[Sequence[Queue[Any]]]:
        """Group the queues that can be read together."""
        groups: dict[Any, dict[str, Queue[Any]]] = {}
        for queue in self._queues:
            tasks = core_of(queue).collections
            key = tasks.client, tasks.database.name, tasks.name, queue.settings.dead_letters
            groups.setdefault(key, {})[queue.name] = queue
        return [list(queues.values()) for queues in groups.values()]


def queue_families(stats: Iterable[QueueStats]) -> list[GaugeMetricFamily]:
    """Return the metrics for the stats of queues."""
    depth = GaugeMetricFamily(
        "microqueue_queue_depth", "Tasks by status.", labels=["queue", "status"]
    )
    overdue = GaugeMetricFamily(
        "microqueue_queue_overdue", "Processing tasks whose lease has expired.", labels=["queue"]
    )
    oldest = GaugeMetricFamily(
        "microqueue_queue_oldest_ready_seconds",
        "Age of the oldest ready task.",
        labels=["queue"],
    )
    estimated = GaugeMetricFamily(
        "microqueue_queue_depth_estimated",
        "1 if the depth is an estimate, otherwise 0.",
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
    """Counts sweeps and their actions: ``Sweeper(queue, on_report=SweepMetrics())``.

    - ``microqueue_sweeps_total{result}``: ``ok``, ``failed``, or ``skipped`` because another
      sweeper held the lock.
    - ``microqueue_swept_tasks_total{action}``: tasks ``reclaimed``, ``promoted``, ``buried``,
      ``expired``, ``purged`` and ``moved``.
    - ``microqueue_sweep_errors_total{job}``: sweep jobs that failed.
    - ``microqueue_sweep_seconds``: duration of sweeps, except skipped ones.

    Args:
        registry: The registry for the metrics. Default: the global one.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._sweeps = Counter(
            "microqueue_sweeps", "Sweeps by result.", ["result"], registry=registry
        )
        self._swept = Counter(
            "microqueue_swept_tasks",
            "Tasks changed by sweeps, by action.",
            ["action"],
            registry=registry,
        )
        self._errors = Counter(
            "microqueue_sweep_errors", "Sweep jobs that failed.", ["job"], registry=registry
        )
        self._took = Histogram("microqueue_sweep_seconds", "Duration of sweeps.", registry=registry)

    def __call__(self, report: SweepReport) -> None:
        """Count one report."""
        if report.skipped:
            self._sweeps.labels("skipped").inc()
            return
        self._sweeps.labels("ok" if report.ok else "failed").inc()
        self._took.observe(report.took_sec)
        for action in COUNTERS:
            self._swept.labels(action).inc(getattr(report, action))
        for job in report.errors:
            self._errors.labels(job).inc()
