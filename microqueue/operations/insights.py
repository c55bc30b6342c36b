"""Insights: how all queues of a collection stand, read without a trace.

Each question is one aggregation on the index that holds its answer, for all queues at once,
so that the number of queries does not grow with the number of queues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from microqueue.model import Model
from microqueue.operations import dead_letters, filters
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.operations.inspect import QueueStats
from microqueue.settings import QueueSettings
from microqueue.task import DEFAULT_QUEUE, Progress, Task, TaskId, name_in

# A range on the first key of an index lets a query over all queues run on that index.
ANY_QUEUE: Document = {"queue": {"$gt": ""}}
NOTHING: Document = {
    **dict.fromkeys(("ready", "delayed", "processing", "overdue", "failed"), 0),
    "oldest_ready_age_sec": None,
    "next_due_at": None,
}
MINUTE = timedelta(minutes=1)
MINUTES = 60
RUNNING_FIELDS = dict.fromkeys(
    (
        "queue", "headers", "worker_id", "attempts", "max_attempts", "started_at",
        "lease_expires_at",
        "progress",
    ),
    1,
)  # fmt: skip


class QueueOverview(Model):
    """How one queue stands. Ages are in seconds."""

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


class MinuteCounts(Model):
    """Tasks done and failed in each of the last 60 minutes, by queue, the oldest first.

    The last minute is the current one, which is not over yet.
    """

    first_at: datetime
    done: Mapping[str, Sequence[int]]
    failed: Mapping[str, Sequence[int]]


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


def counts(
    now: datetime, settings: QueueSettings, names: Sequence[str] | None = None
) -> Operation[dict[str, Document]]:
    """Count what waits, runs and is dead in every queue: by queue, the fields of an overview.

    With ``names`` these queues alone are looked at.
    """
    found: dict[str, Document] = {}
    here = ANY_QUEUE if names is None else _named(names)

    def note(group: Document, **values: Any) -> None:
        found.setdefault(str(group["_id"]), {}).update(values)

    since = {"$min": "$updated_at"}
    for group in (yield from _by_queue({**here, **filters.READY}, at=since)):
        age = None if group["at"] is None else max((now - group["at"]).total_seconds(), 0.0)
        note(group, ready=group["count"], oldest_ready_age_sec=age)
    soonest = {"$min": "$next_retry_at"}
    for group in (yield from _by_queue({**here, **filters.DELAYED}, at=soonest)):
        note(group, delayed=group["count"], next_due_at=group["at"])
    late = {"$sum": {"$cond": [{"$lte": ["$lease_expires_at", now]}, 1, 0]}}
    for group in (yield from _by_queue({**_named(names), **filters.LEASED}, overdue=late)):
        note(group, processing=group["count"], overdue=group["overdue"])
    dead: dict[str, int] = {}
    for target in dict.fromkeys(dead_letters.targets(settings)):
        for group in (yield from _by_queue({**here, **filters.DEAD}, target=target)):
            name = str(group["_id"])
            dead[name] = dead.get(name, 0) + group["count"]
    for name, count in dead.items():
        found.setdefault(name, {})["failed"] = count
    return found


def stats(
    names: Sequence[str], now: datetime, settings: QueueSettings
) -> Operation[list[QueueStats]]:
    """Tell how these queues stand, with as many queries as one of them would need."""
    counted = yield from counts(now, settings, names)
    finished = {**_named(names), **filters.FINISHED, "finished_at": filters.IS_DATE}
    done = {str(group["_id"]): group["count"] for group in (yield from _by_queue(finished))}
    return [
        QueueStats(
            **{
                "queue": name,
                "at": now,
                **NOTHING,
                "done": done.get(name, 0),
                **counted.get(name, {}),
            }
        )
        for name in names
    ]


def _named(names: Sequence[str] | None) -> Document:
    return {} if names is None else {"queue": {"$in": list(names)}}


def _by_queue(
    selection: Document, *, target: Target = Target.TASKS, **more: Any
) -> Operation[list[Document]]:
    group = {"_id": "$queue", "count": {"$sum": 1}, **more}
    reply: list[Document] = yield Call(
        "aggregate", [{"$match": selection}, {"$group": group}], target=target
    )
    return reply


def finished_by_minute(
    since: datetime, settings: QueueSettings
) -> Operation[dict[str, dict[tuple[str, datetime], int]]]:
    """Count tasks done and failed since an instant, by queue and minute."""
    window = {"$gte": since}
    done = {**filters.FINISHED, "finished_at": window}
    counted: dict[str, dict[tuple[str, datetime], int]] = {
        "done": (yield from _by_minute(done, "$finished_at", since, Target.TASKS)),
        "failed": {},
    }
    dead = {**ANY_QUEUE, **filters.DEAD, "updated_at": window}
    for target in dict.fromkeys(dead_letters.targets(settings)):
        for key, count in (yield from _by_minute(dead, "$updated_at", since, target)).items():
            counted["failed"][key] = counted["failed"].get(key, 0) + count
    return counted


def _by_minute(
    selection: Document, field: str, since: datetime, target: Target
) -> Operation[dict[tuple[str, datetime], int]]:
    minute = {"$floor": {"$divide": [{"$subtract": [field, since]}, 60_000]}}
    group = {"_id": {"queue": "$queue", "minute": minute}, "count": {"$sum": 1}}
    reply = yield Call("aggregate", [{"$match": selection}, {"$group": group}], target=target)
    return {
        (str(one["_id"]["queue"]), since + int(one["_id"]["minute"]) * MINUTE): one["count"]
        for one in reply
    }


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
