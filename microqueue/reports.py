"""The models that read-only calls return: counts, latencies, workers, pauses and audit entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from microqueue.clock import later
from microqueue.model import Model
from microqueue.task import Progress, TaskId

MISSED_BEATS = 3
"""After so many missed heartbeats a worker counts as gone."""
LATE_BEATS = 2
"""After so many missed heartbeats a worker is late."""


class QueueStats(Model):
    """The counts of a queue at ``at``, by the server's clock.

    ``estimated`` names the fields that are estimates because their count is above
    ``settings.count_limit``. All other fields are exact.
    """

    queue: str
    at: datetime
    ready: int
    delayed: int
    processing: int
    overdue: int
    done: int
    failed: int
    oldest_ready_age_sec: float | None
    """How long the oldest ready task has waited, in seconds. An estimate is never larger."""
    next_due_at: datetime | None
    estimated: Sequence[str] = ()

    @property
    def exact(self) -> bool:
        """Whether no field is an estimate."""
        return not self.estimated

    @property
    def pending(self) -> int:
        """How many tasks are waiting, ready or delayed."""
        return self.ready + self.delayed

    @property
    def in_flight(self) -> int:
        """How many tasks workers hold; the overdue ones among them wait for the sweeper."""
        return self.processing


class QueueOverview(Model):
    """The counts of one queue in an overview, with those of the last hour.

    ``estimated`` names the fields that are estimates because their count is above
    ``settings.count_limit``. All other fields are exact.
    """

    queue: str
    ready: int = 0
    delayed: int = 0
    processing: int = 0
    overdue: int = 0
    failed: int = 0
    done_last_hour: int = 0
    failed_last_hour: int = 0
    oldest_ready_age_sec: float | None = None
    next_due_at: datetime | None = None
    paused: bool = False
    estimated: Sequence[str] = ()


class MinuteCounts(Model):
    """Tasks done and failed in each of the last 60 minutes, by queue, the oldest first.

    The last minute is the current one, and incomplete. ``done_estimated`` and
    ``failed_estimated`` are the indexes, from 0, of the minutes whose counts are estimates.
    """

    first_at: datetime
    done: Mapping[str, Sequence[int]]
    failed: Mapping[str, Sequence[int]]
    done_estimated: Sequence[int] = ()
    failed_estimated: Sequence[int] = ()


class RunningTask(Model):
    """A task that a worker holds, with its lease."""

    id: TaskId
    queue: str
    name: str | None
    worker_id: str | None
    attempt: int
    max_attempts: int
    started_at: datetime | None
    lease_expires_at: datetime | None
    overdue: bool
    progress: Progress | None = None


class Latency(Model):
    """Wait and run times of the done tasks of a queue, in seconds, as percentiles.

    ``done`` is the number of tasks that were measured. If ``estimated``, there were more.
    """

    queue: str
    done: int
    wait_p50: float
    wait_p95: float
    wait_p99: float
    run_p50: float
    run_p95: float
    run_p99: float
    estimated: bool = False


class NameStats(Model):
    """The tasks with one name: those that wait and run, and those that ended in a period.

    ``name`` is ``None`` for the tasks without a name. The wait is from enqueue to the first start,
    the run time that of the last attempt, of tasks that were done, in seconds. ``estimated`` names
    the fields that are estimates because there are more tasks than ``settings.count_limit``.
    """

    name: str | None
    waiting: int = 0
    """Ready and delayed tasks."""
    running: int = 0
    done: int = 0
    failed: int = 0
    failure_rate: float | None = None
    """The share of dead letters among the tasks that ended; ``None`` if none ended."""
    wait_p50: float | None = None
    wait_p95: float | None = None
    run_p50: float | None = None
    run_p95: float | None = None
    estimated: Sequence[str] = ()


class NameList(Model):
    """The names with the most tasks, of ``total`` that were seen; what ended since ``since``."""

    at: datetime
    since: datetime
    names: Sequence[NameStats]
    total: int


class Pause(Model):
    """The pause of a queue: since when, and why."""

    queue: str
    paused_at: datetime
    reason: str | None = None


class WorkerInfo(Model):
    """A registered worker, as of its last heartbeat.

    ``tasks`` are the names of the tasks that it serves, at most 500; if ``more_tasks``, there are
    others. ``None`` means that one function serves all tasks, whatever their names.
    """

    id: str
    collection: str
    host: str
    pid: int
    queues: Sequence[str]
    concurrency: int
    running: int
    handled: int
    started_at: datetime
    heartbeat_at: datetime
    heartbeat_sec: float
    tasks: Sequence[str] | None = None
    more_tasks: bool | None = False

    def gone_at(self) -> datetime:
        """Return when the worker counts as gone: after three missed heartbeats."""
        return later(self.heartbeat_at, timedelta(seconds=self.heartbeat_sec * MISSED_BEATS))

    def late_at(self) -> datetime:
        """Return when the worker counts as late: after two missed heartbeats."""
        return later(self.heartbeat_at, timedelta(seconds=self.heartbeat_sec * LATE_BEATS))


class ServedNames(Model):
    """The names of the tasks that the live workers of a queue serve.

    If ``any_name``, at least one of the workers serves other names, too.
    """

    queue: str
    names: Sequence[str]
    any_name: bool
    workers: int


class AuditEntry(Model):
    """An entry of the audit log.

    ``target`` is a task or a filter. ``outcome`` is ``ok`` or an error.
    """

    id: str
    at: datetime
    who: str
    action: str
    queue: str | None = None
    target: str | None = None
    count: int = 0
    outcome: str = "ok"


class AuditPage(Model):
    """A page of the audit log, newest first, with the cursor of the next page."""

    at: datetime
    items: Sequence[AuditEntry]
    next_cursor: str | None = None
