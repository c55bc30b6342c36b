"""Handpick: what a person does to one task that waits, wherever it stands in line."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pymongo import ReturnDocument

from microqueue.errors import TaskNotFound, WrongStatus
from microqueue.operations import filters
from microqueue.operations.call import Call, Document, Operation
from microqueue.operations.claim import claim_update
from microqueue.task import Lease


def claim_one(task_id: Any, lease: Lease) -> Operation[Document]:
    """Claim one waiting task by its id, also before its time, as a pop would.

    Not repeated after a lost reply: the second try would find its own work as a wrong status.
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


def hasten(task_id: Any, now: datetime) -> Operation[Document]:
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
