"""Maintenance: the jobs of a sweep, the sweeper's lock, and the stored sweep reports.

A job repairs what crashes left behind. It reads a batch of ids on its own index, and each write
repeats the condition that was read. So any number of sweepers can run at once, a task that changed
in between is left alone, and every job is safe to repeat. The lock only saves work.

``queues`` limits a job to some queues; ``None`` means all. ``progress`` counts what was done, and
is asked before each batch whether to continue.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from microqueue import error_codes
from microqueue.clock import later
from microqueue.model import trusted
from microqueue.operations import deadlines, filters, schema, settle
from microqueue.operations.batches import Batches, SweepProgress
from microqueue.operations.call import Call, Document, Operation, Span, Target
from microqueue.operations.deadlines import Verdict
from microqueue.operations.settle import FencedSettlement, Settlement
from microqueue.run_ids import PROOF_KEPT
from microqueue.settings import QueueSettings
from microqueue.task import Outcome, Task, TaskError, read_task

WITHOUT_PAYLOAD = {"payload": 0, "result": 0}
"""A thousand documents of 15 MB each would not fit into memory."""

ID = {"_id": 1}
BURIED_AS = {error_codes.EXPIRED: "expired", error_codes.MAX_ATTEMPTS: "buried"}
"""The counter of a report for each code."""

QueueNames: TypeAlias = Sequence[str] | None


# Jobs


def reclaim_stuck(
    now: datetime,
    settings: QueueSettings,
    queues: QueueNames = None,
    progress: SweepProgress | None = None,
) -> Operation[None]:
    """Reclaim tasks whose lease has expired: they wait again, or become dead letters.

    Fenced by the token and the expiry that were read: a lease renewed in between is kept.
    """
    progress = progress or SweepProgress()
    selection = {**within(queues), **filters.lease_expired(now)}
    batches = Batches.of(selection, WITHOUT_PAYLOAD, progress=progress)
    while stuck := (yield from batches.next(settings.batch_size)):
        ended: list[FencedSettlement] = []
        for document in stuck:
            task = read_task(document)
            fence = {**filters.claimed(task), "deadline_at": document["deadline_at"]}
            ended.append(FencedSettlement(task, _reclaimed(task, now, settings), fence))
        count = yield from settle.settle_reclaimed(
            ended, now=now, settings=settings, progress=progress
        )
        batches.wrote(count)
    progress.raise_rejection()


def _reclaimed(task: Task[Any], now: datetime, settings: QueueSettings) -> Settlement:
    worker_id = task.lease.worker_id if task.lease else None
    error = trusted(
        TaskError,
        message=f"the lease of {worker_id} expired before the task was settled",
        code=error_codes.LEASE_EXPIRED,
        at=now,
        traceback=None,
    )
    delay_sec = settle.backoff_sec(task, settings)
    settlement = settle.retried(
        task, now, error, delay_sec=delay_sec, outcome=Outcome.LEASE_EXPIRED
    )
    return settlement.after_lost_worker()


def promote_all_due(
    now: datetime,
    settings: QueueSettings,
    queues: QueueNames = None,
    progress: SweepProgress | None = None,
) -> Operation[None]:
    """Make every due task ready, and fail those that expired or have no attempt left.

    A queue with nothing due costs one key of the index, however many delayed tasks it has. Safe to
    repeat: a write matches only tasks that are still due.
    """
    selection = {**within(queues), **filters.due(now)}
    yield from _process_deadlines(selection, tuple(Verdict), now, settings, progress)


def bury_exhausted(
    now: datetime,
    settings: QueueSettings,
    queues: QueueNames = None,
    progress: SweepProgress | None = None,
) -> Operation[None]:
    """Fail due tasks that have no attempt left: a backstop, which never touches a lease.

    A ready task without an attempt left fails when it is claimed. Safe to repeat: a write matches
    only waiting tasks that are used up.
    """
    used_up = {"$expr": {"$gte": ["$attempts", "$max_attempts"]}}
    selection = {**within(queues), **filters.due(now), **used_up}
    yield from _process_deadlines(selection, (Verdict.EXHAUSTED,), now, settings, progress)


def expire_undelivered(
    now: datetime,
    settings: QueueSettings,
    queues: QueueNames = None,
    progress: SweepProgress | None = None,
) -> Operation[None]:
    """Fail waiting tasks whose ``expires_at`` has passed.

    Safe to repeat: a write matches only tasks that still wait.
    """
    selection = {**within(queues), **filters.expired(now)}
    yield from _process_deadlines(selection, (Verdict.EXPIRED,), now, settings, progress)


def _process_deadlines(
    selection: Document,
    verdicts: Collection[Verdict],
    now: datetime,
    settings: QueueSettings,
    progress: SweepProgress | None,
) -> Operation[None]:
    """Look at the waiting tasks whose deadline has passed, in batches, queue by queue."""
    progress = progress or SweepProgress()
    batches = Batches.of(selection, deadlines.FIELDS, progress=progress)
    while batch := (yield from batches.next(settings.batch_size)):
        processed = yield from deadlines.process(batch, now, verdicts)
        progress.counts["promoted"] += processed.promoted
        for one in processed.burials:
            progress.counts[BURIED_AS[one.code]] += one.count
            progress.bury(one.code, one.ids, one.count)
        batches.wrote(processed.changed)


def purge_finished(
    collection: str,
    now: datetime,
    settings: QueueSettings,
    queues: QueueNames = None,
    progress: SweepProgress | None = None,
) -> Operation[None]:
    """Delete done tasks older than the retention.

    The retention is that of the collection: a sweeper with other settings must not delete what
    another service keeps.
    """
    progress = progress or SweepProgress()
    retention = yield from schema.read_retention(collection, settings.retention)
    if retention is None:
        return
    finished = {**within(queues), **filters.finished_by(now - retention)}
    if retention < PROOF_KEPT:
        finished["$nor"] = [filters.proof_of_run(now)]
    progress.counts["purged"] += yield from delete_all(finished, settings.batch_size, progress)


def delete_all(
    selection: Document, batch_size: int, progress: SweepProgress | None = None
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


def within(queues: QueueNames) -> Document:
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
