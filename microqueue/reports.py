"""The models that read-only calls return: counts, latencies, workers, pauses and audit entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from microqueue.clock import later
from microqueue.model import Model
from microqueue.task import Progress, TaskId

MISSED_BEATS = 3


LATE_BEATS = 2


class QueueStats(Model):
    """How a queue stands at ``at``. Ages are in seconds.

    ``estimated`` names the fields that are estimates, because there are more than
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
    """How long the task that has been ready the longest has waited. An estimate is at most that."""
    next_due_at: datetime | None
    estimated: Sequence[str] = ()

    @property
    def exact(self) -> bool:
        """Whether nothing is an estimate."""
        return not self.estimated

    @property
    def pending(self) -> int:
        """Tasks that wait, ready or delayed."""
        return self.ready + self.delayed

    @property
    def in_flight(self) -> int:
        """Tasks that a worker holds; the overdue ones among them await the sweeper."""
        return self.processing


class QueueOverview(Model):
    """How one queue stands. Ages are in seconds.

    ``estimated`` names the fields that are estimates, because there are more than
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

    The last minute is the current one, which is not over yet. ``done_estimated`` and
    ``failed_estimated`` are the places, from 0, of the minutes whose counts are estimates.
    """

    first_at: datetime
    done: Mapping[str, Sequence[int]]
    failed: Mapping[str, Sequence[int]]
    done_estimated: Sequence[int] = ()
    failed_estimated: Sequence[int] = ()


class RunningTask(Model):
    """A task that a worker holds, and until when."""

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
    """What the done tasks of a queue took, in seconds: until they began, and to run.

    ``done`` is the number of tasks that were measured; ``estimated``: there were more.
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


class Pause(Model):
    """A queue from which nothing is claimed: since when, and why."""

    queue: str
    paused_at: datetime
    reason: str | None = None


class WorkerInfo(Model):
    """A worker that has registered, as of its last heartbeat.

    ``tasks`` are the names of the tasks that it serves, the first 500 of them; ``more_tasks``:
    there are others. ``None``: one function serves all of its tasks, whatever their names.
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
        """When it counts as gone: after three heartbeats that did not come."""
        return later(self.heartbeat_at, timedelta(seconds=self.heartbeat_sec * MISSED_BEATS))

    def late_at(self) -> datetime:
        """When it is to be noticed that it is silent: one heartbeat earlier."""
        return later(self.heartbeat_at, timedelta(seconds=self.heartbeat_sec * LATE_BEATS))


class ServedNames(Model):
    """The names of tasks that the living workers of a queue serve.

    ``any_name``: at least one of them may serve others, too.
    """

    queue: str
    names: Sequence[str]
    any_name: bool
    workers: int


class AuditEntry(Model):
    """One action. ``target`` names a task, or the filter; ``outcome`` is ``ok`` or an error."""

    id: str
    at: datetime
    who: str
    action: str
    queue: str | None = None
    target: str | None = None
    count: int = 0
    outcome: str = "ok"


class AuditPage(Model):
    """Some entries, newest first; ``next_cursor`` leads to the following page."""

    at: datetime
    items: Sequence[AuditEntry]
    next_cursor: str | None = None
