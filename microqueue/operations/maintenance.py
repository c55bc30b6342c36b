"""Maintenance: the jobs of a sweep, the sweeper's lock, and the stored sweep reports.

A job repairs what crashes left behind. It reads a batch of ids on its own index, and each write
repeats the condition that was read. So any number of sweepers can run at once, a task that changed
in between is left alone, and every job is safe to repeat. The lock only saves work.

``queues`` limits a job to some queues; ``None`` means all. ``progress`` counts what was done, and
is asked before each batch whether to continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from bson import Decimal128
from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from microqueue.clock import later
from microqueue.operations import claim, filters, indexes, settle
from microqueue.operations.batches import Batches, Progress
from microqueue.operations.call import Call, Document, Operation, Span, Target
from microqueue.operations.settle import FencedSettlement, Settlement
from microqueue.settings import QueueSettings
from microqueue.task import Outcome, Task, TaskError

WITHOUT_PAYLOAD = {"payload": 0, "result": 0}
"""A thousand documents of 15 MB each would not fit into memory."""

ID = {"_id": 1}

Queues: TypeAlias = Sequence[str] | None


# Jobs


def reclaim_stuck(
    now: datetime,
    settings: QueueSettings,
    queues: Queues = None,
    progress: Progress | None = None,
) -> Operation[None]:
    """Reclaim tasks whose lease has expired: they wait again, or become dead letters.

    Fenced by the token and the expiry that were read: a lease renewed in between is kept.
    """
    progress = progress or Progress()
    selection = {**within(queues), **filters.lease_expired(now)}
    order = [("lease_expires_at", 1)]
    batches = Batches.of(selection, WITHOUT_PAYLOAD, sort=order, progress=progress)
    while stuck := (yield from batches.next(settings.batch_size)):
        ended: list[FencedSettlement] = []
        for document in stuck:
            task: Task[Any] = Task.from_document(document)
            fence = {**filters.claimed(task), "lease_expires_at": document["lease_expires_at"]}
            ended.append(FencedSettlement(task, _reclaim(task, now, settings), fence))
        count = yield from settle.settle_reclaimed(
            ended, now=now, settings=settings, progress=progress
        )
        batches.wrote(count)
    progress.raise_rejection()


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
    return settlement.after_lost_worker()


def promote_due(
    now: datetime,
    settings: QueueSettings,
    queues: Queues = None,
    progress: Progress | None = None,
) -> Operation[None]:
    """Make every due task ready, queue by queue.

    Each step reads the earliest task of the next queue in the index, so that a queue with nothing
    due costs one key, however many delayed tasks it has. Safe to repeat: a write matches only
    tasks that are still due.
    """
    progress = progress or Progress()
    after = ""
    while (yield from progress.proceed()):
        names = {"$gt": after} if queues is None else {"$gt": after, "$in": list(queues)}
        found = yield Call(
            "find",
            {"queue": names, **filters.DELAYED},
            {"queue": 1, "next_retry_at": 1},
            sort=[("queue", 1), ("next_retry_at", 1)],
            limit=1,
        )
        if not found:
            return
        after = found[0]["queue"]
        if found[0]["next_retry_at"] <= now:
            yield from _promote_queue(after, now, settings, progress)


def _promote_queue(
    queue: str, now: datetime, settings: QueueSettings, progress: Progress
) -> Operation[None]:
    selection = {"queue": queue, **filters.due(now)}
    batches = Batches.of(selection, ID, sort=claim.DUE_ORDER, progress=progress)
    while batch := (yield from batches.next(settings.batch_size)):
        count = yield from claim.promote(batch, selection, now)
        progress.counts["promoted"] += count
        batches.wrote(count)


def bury_exhausted(
    now: datetime,
    settings: QueueSettings,
    queues: Queues = None,
    progress: Progress | None = None,
) -> Operation[None]:
    """Fail waiting tasks that have no attempt left: a backstop, which never touches a lease.

    Steps through the few distinct ``max_attempts`` in the index, and reads the highest count of
    each. Safe to repeat: a write matches only waiting tasks that are used up.
    """
    progress = progress or Progress()
    max_attempts: Any = -1
    while (yield from progress.proceed()):
        found = yield Call(
            "find",
            {**filters.RETRIED, "max_attempts": {"$gt": max_attempts}},
            {"attempts": 1, "max_attempts": 1},
            sort=[("max_attempts", 1), ("attempts", -1)],
            limit=1,
        )
        if not found:
            return
        max_attempts = found[0]["max_attempts"]
        if _number(found[0]["attempts"]) >= _number(max_attempts):
            used_up = {"attempts": {"$gte": max_attempts, "$gt": 0}, "max_attempts": max_attempts}
            selection = {"status": filters.PENDING, **used_up, **within(queues)}
            message = f"all {max_attempts} attempts are used up"
            error = {"message": message, "code": "max_attempts", "at": now}
            count = yield from _bury(selection, error, now, settings, progress)
            progress.counts["buried"] += count


def expire_undelivered(
    now: datetime,
    settings: QueueSettings,
    queues: Queues = None,
    progress: Progress | None = None,
) -> Operation[None]:
    """Fail waiting tasks whose ``expires_at`` has passed.

    Safe to repeat: a write matches only tasks that still wait.
    """
    progress = progress or Progress()
    selection = {**filters.undelivered(now), **within(queues)}
    error = {"message": "not delivered before it expired", "code": "expired", "at": now}
    progress.counts["expired"] += yield from _bury(selection, error, now, settings, progress)


def purge_finished(
    now: datetime,
    settings: QueueSettings,
    queues: Queues = None,
    progress: Progress | None = None,
) -> Operation[None]:
    """Delete done tasks older than the retention, as the server's TTL monitor also does.

    The retention is that of the index: a sweeper with other settings must not delete what another
    service keeps.
    """
    progress = progress or Progress()
    existing = yield Call("index_information")
    retention = indexes.retention_of(existing, settings.retention)
    if retention is None:
        return
    finished = {**filters.FINISHED, "finished_at": {"$lte": now - retention}, **within(queues)}
    progress.counts["purged"] += yield from delete_all(finished, settings.batch_size, progress)


def delete_all(
    selection: Document, batch_size: int, progress: Progress | None = None
) -> Operation[int]:
    """Delete what matches, in batches, so that no single write runs for long.

    Each delete repeats the selection, so a task that no longer matches is kept.
    """
    deleted = 0
    batches = Batches.of(selection, ID, progress=progress, span=Span.LONG)
    while batch := (yield from batches.next(batch_size)):
        ids = filters.any_of(document["_id"] for document in batch)
        result = yield Call("delete_many", {"$and": [ids, selection]})
        deleted += int(result.deleted_count)
        batches.wrote(result.deleted_count)
    return deleted


def _bury(
    selection: Document, error: Document, now: datetime, settings: QueueSettings, progress: Progress
) -> Operation[int]:
    """Fail what matches, in batches, and note the ids in ``progress``."""
    buried = 0
    changes = {
        "status": filters.FAILED,
        "updated_at": now,
        "finished_at": now,
        "error": error,
    }
    batches = Batches.of(selection, ID, progress=progress)
    while batch := (yield from batches.next(settings.batch_size)):
        ids = [document["_id"] for document in batch]
        these = {"$and": [filters.any_of(ids), selection]}
        result = yield Call("update_many", these, {"$set": changes})
        count = int(result.modified_count)
        if count < len(ids) and progress.wants_names(error["code"]):
            ids = yield from settle.find_buried(ids, now, code=error["code"])
        progress.bury(error["code"], ids, count)
        buried += count
        batches.wrote(count)
    return buried


def _number(value: Any) -> Any:
    """Return a stored number as one that Python can compare."""
    return value.to_decimal() if isinstance(value, Decimal128) else value


def within(queues: Queues) -> Document:
    """Match the tasks of some queues, or of all queues."""
    return {} if queues is None else {"queue": {"$in": list(queues)}}


# The lock


def acquire_lock(
    name: str, *, token: str, owner: str, now: datetime, lifetime: timedelta
) -> Operation[bool]:
    """Acquire or renew the lock; return whether it is held.

    It matches only a lock that is free or has this token. Safe to repeat: the token renews it.
    """
    free = {"_id": name, "$or": [{"token": token}, {"expires_at": {"$lte": now}}]}
    ends = later(now, lifetime)
    held = {"token": token, "owner": owner, "acquired_at": now, "expires_at": ends}
    try:
        document = yield Call(
            "find_one_and_update",
            free,
            {"$set": held},
            upsert=True,
            return_document=ReturnDocument.AFTER,
            target=Target.LOCKS,
        )
    except DuplicateKeyError:  # It exists, and is not free.
        return False
    return bool(document["token"] == token)


def release_lock(name: str, *, token: str) -> Operation[None]:
    """Release the lock, unless it expired and another sweeper holds it."""
    yield Call("delete_one", {"_id": name, "token": token}, target=Target.LOCKS)


# Reports


def store_report(
    collection: str, report: Document, *, active: bool, last: bool = True
) -> Operation[None]:
    """Store the report of a sweep.

    Safe to repeat: it writes the same again.

    Args:
        collection: The name of the collection of tasks.
        report: The report as a document.
        active: Whether the sweep changed something: it is also stored as the last one that did.
        last: Whether it is the last report. It is not if another sweeper took over, whose report
            may be stored already.
    """
    changes = {**({"last": report} if last else {}), **({"last_active": report} if active else {})}
    if not changes:
        return
    yield Call(
        "update_one",
        {"_id": _report_id(collection)},
        {"$set": changes},
        upsert=True,
        target=Target.LOCKS,
    )


def read_report(collection: str) -> Operation[tuple[Document | None, Document | None]]:
    """Return the last report, and the last of a sweep that changed something."""
    document = yield Call("find_one", {"_id": _report_id(collection)}, target=Target.LOCKS)
    found = document or {}
    return found.get("last"), found.get("last_active")


def _report_id(collection: str) -> str:
    return f"report:{collection}"
