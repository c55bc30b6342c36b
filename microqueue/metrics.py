"""Prometheus metrics of workers, queues, schedules and sweeps (extra ``metrics``).

    hooks = PrometheusHooks()
    REGISTRY.register(QueueCollector(queue))
    REGISTRY.register(ScheduleCollector(queue))
    Worker(queue, tasks, hooks=[hooks])
    Sweeper(queue, on_report=SweepMetrics())

Create one of each per process and registry, and share it: a registry rejects duplicate names.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter as Totals
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeAlias

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as exc:
    raise ImportError(
        "microqueue.metrics needs prometheus-client: pip install 'microqueue[metrics]'"
    ) from exc

from microqueue.arguments import check_count, invalid_argument
from microqueue.core import core_of
from microqueue.durations import Duration, duration_argument
from microqueue.errors import MicroqueueError
from microqueue.hooks import Hooks
from microqueue.insights import Insights
from microqueue.operations.filters import claim_of
from microqueue.queue import Queue
from microqueue.reports import QueueStats
from microqueue.schedule import Schedule
from microqueue.sweeper import COUNTERS, SweepReport
from microqueue.task import LARGEST_COUNT, Outcome, Task
from microqueue.worker.outcomes import LEASE_LOST, redelivery_outcome

STATUSES = ("ready", "delayed", "processing", "done", "failed")

WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
RUN_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)

logger = logging.getLogger("microqueue.metrics")


NameCounts: TypeAlias = dict[tuple[str, str], Totals[str]]
"""The counts of each status, by queue and name."""
MOST_SCHEDULES = 1000
"""How many schedules get their own time series."""
OTHER = "other"
"""The label of all names beyond the limit."""
NAME_STATUSES = ("waiting", "running", "done", "failed")


class _Names:
    """The names that get their own time series: the first ones that are seen, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit if limit == 0 else check_count("names", limit)
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def label(self, name: str | None) -> str:
        """Return the label of a name: empty for none, or without a limit."""
        if not name or not self.limit:
            return ""
        with self._lock:
            if len(self._known) < self.limit:
                self._known.add(name)
            return name if name in self._known else OTHER


class PrometheusHooks(Hooks):
    """Counts and times handlers. Several workers may share one instance.

    - ``microqueue_tasks_total{queue,task,outcome}``: finished handler runs. The outcome is
      ``done``, ``retried``, ``snoozed``, ``failed``, ``released``, ``cancelled`` or
      ``lease_lost``. If the worker notices a lost lease only when it writes the result, the run
      counts under both outcomes.
    - ``microqueue_task_run_seconds{queue,task}``: run time of handlers.
    - ``microqueue_task_wait_seconds{queue,task}``: time from enqueue to the first claim, by the
      server's clock. It includes a requested delay. Later deliveries do not count, because they
      include backoff.
    - ``microqueue_tasks_in_progress{queue,task}``: handlers that are running.

    ``task`` is the name of a registered task of one of the workers, and empty for all others:
    producers may use any name, and each name would be a separate time series. With ``names``, the
    first so many other names that are run have their own series, and ``task`` of further ones is
    ``other``.

    Args:
        registry: The registry for the metrics. Default: the global one.
        names: How many names that no worker has registered get their own time series.

    Raises:
        InvalidArgument: ``names`` is not a count.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, names: int = 0) -> None:
        self._names = _Names(names)
        self._ended = Counter(
            "microqueue_tasks",
            "Finished handler runs by outcome.",
            ["queue", "task", "outcome"],
            registry=registry,
        )
        self._wait = Histogram(
            "microqueue_task_wait_seconds",
            "Time from enqueue to the first claim.",
            ["queue", "task"],
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
        name = self._name(task)
        self._running.add(claim_of(task))
        self._in_progress.labels(task.queue, name).inc()
        if task.lease is not None and not task.history and not task.replays:
            waited = task.lease.started_at - task.created_at
            self._wait.labels(task.queue, name).observe(max(waited.total_seconds(), 0.0))

    def on_success(self, task: Task[Any], *, took_sec: float) -> None:
        """Count the run as done."""
        self._end(task, Outcome.DONE, took_sec)

    def on_retry(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:
        """Count the run as retried or snoozed."""
        self._end(task, redelivery_outcome(error), took_sec)

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
        if name and any(knows(name) for knows in list(self._knows)):
            return name
        return self._names.label(name)


class QueueCollector(Collector):
    """Reads the stats of queues when Prometheus scrapes.

    - ``microqueue_queue_depth{queue,status}``: tasks that are ``ready``, ``delayed``,
      ``processing``, ``done`` (within the retention) or ``failed`` (dead letters).
    - ``microqueue_queue_overdue{queue}``: processing tasks whose lease has expired.
    - ``microqueue_queue_oldest_ready_seconds{queue}``: age of the oldest ready task.
    - ``microqueue_queue_depth_estimated{queue,status}``: 1 if a depth, or ``overdue``, is an
      estimate because it exceeds ``settings.count_limit``; otherwise 0. If ``ready`` is an
      estimate, the oldest ready task may be older than reported.

    - ``microqueue_name_tasks{queue,name,status}``, with ``names``: tasks by name that are
      ``waiting`` or ``running``, and those that were ``done`` or ``failed`` in the last hour. The
      first names that are seen have their own series; further ones are together ``other``. The
      name of tasks without one is empty.

    Use one collector for all queues of a registry: queues of the same collection are read
    together with few queries. If a server does not answer, its queues are logged and left out,
    and the other metrics of the process are still served.

    Args:
        *queues: The queues.
        cache: How long to reuse stats, in seconds or as a ``timedelta``.
        exact: Count everything on each read, which takes seconds with a million tasks.
        names: How many task names get their own time series; 0: no metrics by name. Reading them
            takes some milliseconds per queue.

    Raises:
        InvalidArgument: A queue is not a synchronous ``Queue``, or ``names`` is not a count.
    """

    def __init__(
        self,
        *queues: Queue[Any],
        cache: Duration = 5.0,
        exact: bool = False,
        names: int = 0,
    ) -> None:
        for queue in queues:
            if not isinstance(queue, Queue):
                raise invalid_argument(
                    "queue", queue, "give a Queue; Prometheus scrapes in a thread"
                )
        given = duration_argument("cache", cache)
        self._cache_sec = given.total_seconds() if given else 0.0
        self._queues = queues
        self._exact = exact
        self._names = _Names(names)
        self._lock = threading.Lock()
        self._stats: list[QueueStats] = []
        self._named: NameCounts = {}
        self._read_at = float("-inf")

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the metrics without values, so that registering needs no server."""
        return [*queue_families([]), *self._name_families()]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return the metrics, and read the stats again if the cached ones are too old."""
        with self._lock:
            if time.monotonic() - self._read_at >= self._cache_sec:
                self._named = {}
                self._stats = list(self._read())
                self._read_at = time.monotonic()
            return [*queue_families(self._stats), *self._name_families()]

    def _name_families(self) -> list[GaugeMetricFamily]:
        return [name_family(self._named)] if self._names.limit else []

    def _read(self) -> Iterator[QueueStats]:
        for queues in self._by_collection():
            try:
                names = [queue.name for queue in queues]
                insights = Insights(queues[0])
                yield from insights.stats(names, exact=self._exact)
                for name in names if self._names.limit else ():
                    self._read_names(insights, name)
            except MicroqueueError as exc:
                for queue in queues:
                    logger.warning(
                        "could not read the stats of queue %s: %s",
                        queue.name,
                        exc,
                        extra={"queue": queue.name},
                    )

    def _read_names(self, insights: Insights, queue: str) -> None:
        found = insights.by_name(queue, limit=LARGEST_COUNT, exact=self._exact)
        for row in found.names:
            counts = self._named.setdefault((queue, self._names.label(row.name)), Totals())
            counts.update({status: getattr(row, status) for status in NAME_STATUSES})

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


def name_family(named: NameCounts) -> GaugeMetricFamily:
    """Return the metric of tasks by name."""
    family = GaugeMetricFamily(
        "microqueue_name_tasks",
        "Tasks by name: waiting and running, done and failed in the last hour.",
        labels=["queue", "name", "status"],
    )
    for (queue, name), counts in named.items():
        for status in NAME_STATUSES:
            family.add_metric([queue, name, status], counts[status])
    return family


class ScheduleCollector(Collector):
    """Reads the schedules of a queue's collection when Prometheus scrapes.

    - ``microqueue_schedules{queue,state}``: schedules that are ``active`` or ``paused``.
    - ``microqueue_schedule_runs_total{queue,schedule}``: tasks that a schedule added.
    - ``microqueue_schedule_late_seconds{queue,schedule}``: how late its last run was added. A run
      that was triggered is never late, and has no value.
    - ``microqueue_schedule_overdue_seconds{queue,schedule}``: for how long its next run is due and
      not added; 0 if it is not due.
    - ``microqueue_schedule_next_run_timestamp_seconds{queue,schedule}``: its next run, if it is
      not paused.

    The first thousand schedules, by queue and name, have their own series. If the server does not
    answer, that is logged, and the other metrics of the process are still served.

    Args:
        queue: A queue of the collection.
        cache: How long to reuse what was read, in seconds or as a ``timedelta``.

    Raises:
        InvalidArgument: The queue is not a synchronous ``Queue``.
    """

    def __init__(self, queue: Queue[Any], *, cache: Duration = 5.0) -> None:
        if not isinstance(queue, Queue):
            raise invalid_argument("queue", queue, "give a Queue; Prometheus scrapes in a thread")
        given = duration_argument("cache", cache)
        self._cache_sec = given.total_seconds() if given else 0.0
        self._queue = queue
        self._lock = threading.Lock()
        self._families = schedule_families([], None)
        self._read_at = float("-inf")

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, so that registering needs no server."""
        return schedule_families([], None)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, and read the schedules again if the cached ones are too old."""
        with self._lock:
            if time.monotonic() - self._read_at >= self._cache_sec:
                try:
                    found = self._queue.schedules.list(all_queues=True)
                    self._families = schedule_families(found, self._queue.now())
                except MicroqueueError as exc:
                    logger.warning("could not read the schedules: %s", exc)
                    self._families = schedule_families([], None)
                self._read_at = time.monotonic()
            return self._families


def schedule_families(schedules: Sequence[Schedule], now: datetime | None) -> list[Metric]:
    """Return the metrics of schedules at an instant."""
    labels = ["queue", "schedule"]
    count = GaugeMetricFamily(
        "microqueue_schedules", "Schedules by state.", labels=["queue", "state"]
    )
    runs = CounterMetricFamily(
        "microqueue_schedule_runs", "Tasks that a schedule added.", labels=labels
    )
    late = GaugeMetricFamily(
        "microqueue_schedule_late_seconds", "How late the last run was added.", labels=labels
    )
    overdue = GaugeMetricFamily(
        "microqueue_schedule_overdue_seconds",
        "For how long the next run is due and not added.",
        labels=labels,
    )
    next_run = GaugeMetricFamily(
        "microqueue_schedule_next_run_timestamp_seconds", "The next run.", labels=labels
    )
    states = Totals((one.queue, "paused" if one.paused else "active") for one in schedules)
    for (queue, state), number in sorted(states.items()):
        count.add_metric([queue, state], number)
    for one in schedules[:MOST_SCHEDULES]:
        names = [one.queue, one.name]
        runs.add_metric(names, one.runs)
        if one.last_run is not None and not one.last_run.triggered:
            late.add_metric(names, one.last_run.late_sec)
        if one.next_at is not None and now is not None:
            next_run.add_metric(names, one.next_at.timestamp())
            overdue.add_metric(names, max((now - one.next_at).total_seconds(), 0.0))
    return [count, runs, late, overdue, next_run]


class SweepMetrics:
    """Counts sweeps and their actions: ``Sweeper(queue, on_report=SweepMetrics())``.

    - ``microqueue_sweeps_total{result}``: ``ok``, ``failed``, or ``skipped`` because another
      sweeper held the lock.
    - ``microqueue_swept_tasks_total{action}``: tasks ``reclaimed``, ``promoted``, ``buried``,
      ``expired``, ``purged`` and ``moved``, and tasks of schedules that were ``fired``.
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
