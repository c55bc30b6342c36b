"""Administration: manual actions on tasks (cancel, purge, claim one by id, run now).

Each write matches the status that the action needs, so that a task that a worker or a sweeper
changed in between is left alone.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pymongo import ReturnDocument
from pymongo.errors import PyMongoError

from microqueue import error_codes
from microqueue.errors import TaskNotFound, WrongStatus
from microqueue.operations import (
    burials,
    confirm,
    dead_letters,
    filters,
    lookup,
    mongo_errors,
    replay,
    settle,
)
from microqueue.operations.batches import not_after
from microqueue.operations.call import Buried, Call, Document, Operation
from microqueue.operations.claim import claim_update
from microqueue.operations.maintenance import delete_all
from microqueue.operations.settle import Settlement
from microqueue.settings import QueueSettings
from microqueue.task import Lease, Outcome, TaskError, TaskStatus, read_task

ONCE: Document = {"return_document": ReturnDocument.AFTER, "repeatable": False}


def cancel(task_id: Any, now: datetime, settings: QueueSettings) -> Operation[Document]:
    """Fail a waiting or running task with code ``cancelled``; it can be replayed like any other.

    The same write revokes the lease of a running task: the result of its handler is discarded, and
    the worker notifies the handler. Not repeated after a lost reply: the repeat would report its
    own write as a wrong status. Instead, the task shows whether it was cancelled.
    """
    while True:
        try:
            cancelled = yield from _cancel_once(task_id, now, settings)
        except PyMongoError as exc:
            cancelled = (
                (yield from _find_cancelled(task_id, now, settings))
                if mongo_errors.is_uncertain(exc)
                else None
            )
            if cancelled is None:
                raise
        if cancelled is not None:
            yield Buried([burials.of_document(cancelled, cancelled["error"])])
            return cancelled
        # It was popped, settled or reclaimed in between: read it again.


def _cancel_once(
    task_id: Any, now: datetime, settings: QueueSettings
) -> Operation[Document | None]:
    document = yield from lookup.get(task_id, settings)
    if document is None:
        raise TaskNotFound(task_id=task_id)
    status = document.get("status")
    cancelled: Document | None
    if status == filters.PENDING:
        seen = {"_id": {"$eq": task_id}, "status": status}
        cancelled = yield Call("find_one_and_update", seen, _cancel_waiting(now), **ONCE)
    elif status == filters.PROCESSING:
        task = read_task(document)
        cancelled = yield from settle.update_claimed(
            "find_one_and_update",
            task,
            _cancel_running(now),
            now=now,
            settings=settings,
            **ONCE,
        )
    else:
        needed = f"{filters.PENDING} or {filters.PROCESSING}"
        raise WrongStatus(task_id=task_id, status=str(status), needed=needed)
    return cancelled


def _find_cancelled(
    task_id: Any, now: datetime, settings: QueueSettings
) -> Operation[Document | None]:
    """Return the task if a majority has it as cancelled at this instant."""
    this = {"_id": {"$eq": task_id}, "finished_at": now, "error.code": error_codes.CANCELLED}
    for target in settle.possible_targets(settings):
        found = yield from confirm.one({**this, **filters.DEAD}, target=target)
        if found is not None:
            return found
    return None


def _cancel_waiting(now: datetime) -> Document:
    error = {
        "message": "cancelled before it was delivered",
        "code": error_codes.CANCELLED,
        "at": now,
    }
    changes = {"status": filters.FAILED, "updated_at": now, "finished_at": now, "error": error}
    return {"$set": {**changes, "deadline_at": None}}


def _cancel_running(now: datetime) -> Settlement:
    error = TaskError(message="cancelled while it ran", code=error_codes.CANCELLED, at=now)
    return settle.failed(now, error, outcome=Outcome.CANCELLED)


def purge(
    queue: str,
    *,
    status: TaskStatus,
    before: datetime | None,
    now: datetime,
    settings: QueueSettings,
    dry_run: bool = False,
) -> Operation[int]:
    """Delete tasks of one status, optionally only those last changed before an instant.

    With ``dry_run``, only count them. Safe to repeat: each delete repeats the selection.
    """
    selection: Document = {"queue": queue, "status": status.value}
    if before is not None:
        selection["updated_at"] = {"$lt": before}
    if dry_run and status is TaskStatus.FAILED:
        return (yield from dead_letters.count(selection, settings))
    if dry_run:
        return int((yield Call("count_documents", selection)))
    if status is TaskStatus.FAILED and settings.separate_dlq:
        return (yield from replay.discard([selection], now=now, limit=None, settings=settings))
    if before is None:  # Producers and workers may add more, and this must end.
        selection |= not_after("updated_at", now)
    return (yield from delete_all(selection, settings.batch_size))


def claim_one(task_id: Any, lease: Lease) -> Operation[Document]:
    """Claim one waiting task by its id, even if it is delayed.

    Not repeated after a lost reply: the repeat would report its own write as a wrong status.
    """
    update = claim_update(lease)
    update["$set"] = {**update["$set"], "next_retry_at": None}
    document: Document | None = yield Call(
        "find_one_and_update",
        {"_id": {"$eq": task_id}, "status": filters.PENDING},
        update,
        return_document=ReturnDocument.AFTER,
        repeatable=False,
    )
    if document is None:
        raise (yield from _explain(task_id, filters.PENDING))
    return document


def run_now(task_id: Any, now: datetime) -> Operation[Document]:
    """Make one delayed task ready now. Safe to repeat: a ready one stays so."""
    document: Document | None = yield Call(
        "find_one_and_update",
        {"_id": {"$eq": task_id}, "status": filters.PENDING},
        {"$set": {"next_retry_at": None, "updated_at": now}},
        return_document=ReturnDocument.AFTER,
    )
    if document is None:
        raise (yield from _explain(task_id, filters.PENDING))
    return document


def _explain(task_id: Any, needed: str) -> Operation[TaskNotFound | WrongStatus]:
    found = yield Call("find_one", {"_id": {"$eq": task_id}}, {"status": 1})
    if found is None:
        return TaskNotFound(task_id=task_id)
    return WrongStatus(task_id=task_id, status=str(found.get("status")), needed=needed)
