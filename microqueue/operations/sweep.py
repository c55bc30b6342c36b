"""Sweep: heal what crashes left behind. One function per duty.

Each duty reads a batch of ids on an index of its own and writes under a guard that repeats
what it read, so any number of sweepers can run at once, and a task that changed in between
is left alone. All are safe to repeat. ``queues`` limits a duty; ``None`` means all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias

from bson import Decimal128

from microqueue.operations import claim, endings, filters, indexes, settle
from microqueue.operations.call import Call, Document, Operation
from microqueue.operations.endings import Ending
from microqueue.operations.settle import Settlement
from microqueue.settings import QueueSettings
from microqueue.task import Outcome, Task, TaskError

WITHOUT_PAYLOAD = {"payload": 0, "result": 0}
"""A thousand documents of 15 MB each would not fit into memory."""

Queues: TypeAlias = Sequence[str] | None


def reclaim_stuck(
    now: datetime, settings: QueueSettings, queues: Queues = None
) -> Operation[tuple[int, int]]:
    """Take back tasks whose lease has expired: how many wait again, and how many were buried.

    Fenced by the token and the expiry that were read: a lease renewed meanwhile is kept.
    """
    selection = {**within(queues), **filters.lease_expired(now)}
    reclaimed = buried = 0
    while True:
        stuck: list[Document] = yield Call(
            "find",
            selection,
            WITHOUT_PAYLOAD,
            sort=[("lease_expires_at", 1)],
            limit=settings.batch_size,
        )
        ended: list[Ending] = []
        for document in stuck:
            task: Task[Any] = Task.from_document(document)
            fence = {**filters.claimed(task), "lease_expires_at": document["lease_expires_at"]}
            ended.append(Ending(task, _reclaim(task, now, settings), fence))
        back, out = yield from endings.take_back(ended, now=now, settings=settings)
        reclaimed += back
        buried += out
        if len(stuck) < settings.batch_size or not back + out:
            return reclaimed, buried


def _reclaim(task: Task[Any], now: datetime, settings: QueueSettings) -> Settlement:
    worker_id = task.lease.worker_id if task.lease else None
    error = TaskError.trusted(
        message=f"the lease of {worker_id} expired before the task was settled",
        code="lease_expired",
        at=now,
    )
    policy = task.backoff or settings.backoff
    delay_sec = policy.delay_seconds(task.attempts, previous=task.backoff_sec)
    settlement = settle.retried(
        task, now, error, delay_sec=delay_sec, outcome=Outcome.LEASE_EXPIRED
    )
    settlement.changes["redelivered"] = True
    return settlement


def promote_due(now: datetime, settings: QueueSettings, queues: Queues = None) -> Operation[int]:
    """Make every delayed task ready whose time has come, queue by queue.

    Each step reads the earliest task of the next queue in the index, so that a queue with
    nothing due costs one key, however many tasks it delays.
    """
    promoted = 0
    after = ""
    while True:
        names = {"$gt": after} if queues is None else {"$gt": after, "$in": list(queues)}
        found = yield Call(
            "find",
            {"queue": names, **filters.DELAYED},
            {"queue": 1, "next_retry_at": 1},
            sort=[("queue", 1), ("next_retry_at", 1)],
            limit=1,
        )
        if not found:
            return promoted
        after = found[0]["queue"]
        if found[0]["next_retry_at"] <= now:
            step = partial(claim.promote_due, after, now, limit=settings.batch_size)
            promoted += yield from _repeat(step, settings.batch_size)


def bury_exhausted(now: datetime, settings: QueueSettings, queues: Queues = None) -> Operation[int]:
    """Fail waiting tasks that have no attempt left: the backstop, which never meets a lease.

    Walks the few distinct ``max_attempts`` in the index, and looks at each one's highest count.
    """
    buried = 0
    max_attempts: Any = -1
    while True:
        found = yield Call(
            "find",
            {**filters.RETRIED, "max_attempts": {"$gt": max_attempts}},
            {"attempts": 1, "max_attempts": 1},
            sort=[("max_attempts", 1), ("attempts", -1)],
            limit=1,
        )
        if not found:
            return buried
        max_attempts = found[0]["max_attempts"]
        if _number(found[0]["attempts"]) >= _number(max_attempts):
            used_up = {"attempts": {"$gte": max_attempts, "$gt": 0}, "max_attempts": max_attempts}
            selection = {"status": filters.PENDING, **used_up, **within(queues)}
            message = f"all {max_attempts} attempts are used up"
            buried += yield from _bury(selection, message, "max_attempts", now, settings)


def expire_undelivered(
    now: datetime, settings: QueueSettings, queues: Queues = None
) -> Operation[int]:
    """Fail waiting tasks whose ``expires_at`` has passed."""
    selection = {**filters.undelivered(now), **within(queues)}
    return (
        yield from _bury(selection, "not delivered before it expired", "expired", now, settings)
    )


def purge_finished(now: datetime, settings: QueueSettings, queues: Queues = None) -> Operation[int]:
    """Delete done tasks older than the retention, as the server's TTL monitor also does.

    The retention is the one that the index says: a sweeper with settings of its own must not
    delete what another service keeps.
    """
    existing = yield Call("index_information")
    retention = indexes.retention_of(existing, settings.retention)
    if retention is None:
        return 0
    selection = {**filters.FINISHED, "finished_at": {"$lte": now - retention}}
    return (yield from delete_all({**selection, **within(queues)}, settings.batch_size))


def delete_all(selection: Document, batch_size: int) -> Operation[int]:
    """Delete what matches, a batch at a time, so that no single write runs for long."""

    def step() -> Operation[int]:
        found = yield Call("find", selection, {"_id": 1}, limit=batch_size)
        if not found:
            return 0
        ids = filters.any_of(document["_id"] for document in found)
        result = yield Call("delete_many", {"$and": [ids, selection]})
        return int(result.deleted_count)

    return (yield from _repeat(step, batch_size))


def _bury(
    selection: Document, message: str, code: str, now: datetime, settings: QueueSettings
) -> Operation[int]:
    changes = {
        "status": filters.FAILED,
        "updated_at": now,
        "finished_at": now,
        "error": {"message": message, "code": code, "at": now},
    }

    def step() -> Operation[int]:
        found = yield Call("find", selection, {"_id": 1}, limit=settings.batch_size)
        if not found:
            return 0
        ids = filters.any_of(document["_id"] for document in found)
        result = yield Call("update_many", {**selection, **ids}, {"$set": changes})
        return int(result.modified_count)

    return (yield from _repeat(step, settings.batch_size))


def _repeat(step: Callable[[], Operation[int]], batch_size: int) -> Operation[int]:
    """Take steps until one of them comes back with less than a whole batch."""
    total = 0
    while True:
        count = yield from step()
        total += count
        if count < batch_size:
            return total


def _number(value: Any) -> Any:
    """Read a number that MongoDB can compare, as one that Python can."""
    return value.to_decimal() if isinstance(value, Decimal128) else value


def within(queues: Queues) -> Document:
    """Match the tasks of some queues, or of all."""
    return {} if queues is None else {"queue": {"$in": list(queues)}}
