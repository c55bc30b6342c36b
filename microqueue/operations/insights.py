"""Insights: what the views of all queues of a collection show, and what runs. Read-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from microqueue.model import Model
from microqueue.operations import filters
from microqueue.operations.call import Call, Document, Operation
from microqueue.task import DEFAULT_QUEUE, Progress, Task, TaskId, name_in

RUNNING_FIELDS = dict.fromkeys(
    (
        "queue", "headers", "worker_id", "attempts", "max_attempts", "started_at",
        "lease_expires_at",
        "progress",
    ),
    1,
)  # fmt: skip


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


def running(queue: str | None, now: datetime, *, limit: int) -> Operation[list[RunningTask]]:
    """Read the tasks that workers hold, those whose lease ends soonest first."""
    here = {} if queue is None else {"queue": queue}
    found = yield Call(
        "find",
        {**here, **filters.LEASED},
        RUNNING_FIELDS,
        sort=[("lease_expires_at", 1)],
        limit=limit,
    )
    return [_running_task(document, now) for document in found]


def _running_task(document: Document, now: datetime) -> RunningTask:
    get: Any = document.get
    expires_at = get("lease_expires_at")
    return RunningTask.trusted(
        id=document["_id"],
        queue=get("queue", DEFAULT_QUEUE),
        name=name_of(document),
        worker_id=get("worker_id"),
        attempt=get("attempts", 0),
        max_attempts=get("max_attempts", 0),
        started_at=get("started_at"),
        lease_expires_at=expires_at,
        overdue=expires_at is not None and expires_at <= now,
        progress=Task.from_document(document).progress,
    )


def name_of(document: Mapping[str, Any]) -> str | None:
    """Read the name of the function that a task of ``Tasks`` is for."""
    return name_in(document.get("headers"))
