"""Filters: what each status means as a MongoDB filter, for queries and partial indexes.

A query uses a partial index only if it contains the filter of the index, so both are built from
the filters here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, TypeAlias

from microqueue.operations.call import Document
from microqueue.task import Claim, TaskStatus

PENDING = TaskStatus.PENDING.value
PROCESSING = TaskStatus.PROCESSING.value
DONE = TaskStatus.DONE.value
FAILED = TaskStatus.FAILED.value

IS_DATE = {"$type": "date"}

Queues: TypeAlias = str | Sequence[str]
"""One queue by its name, or several."""

READY: Document = {"status": PENDING, "next_retry_at": None}
DELAYED: Document = {"status": PENDING, "next_retry_at": IS_DATE}
EXPIRING: Document = {"status": PENDING, "expires_at": IS_DATE}
RETRIED: Document = {"status": PENDING, "attempts": {"$gt": 0}}
# The date is in no partial filter; it lets a count of the leased run on the lease index.
LEASED: Document = {"status": PROCESSING, "lease_expires_at": IS_DATE}
FINISHED: Document = {"status": DONE}
DEAD: Document = {"status": FAILED}
# "Greater than empty" means any string; mongomock takes "$type" to include what is missing.
DEDUPED: Document = {"finished_at": None, "dedupe_key": {"$gt": ""}}

READY_ORDER = [("priority", -1), ("position", 1), ("_id", 1)]


def of(queues: Queues) -> Document:
    """Match the tasks of one queue, or of several, in a form that every index can use."""
    return {"queue": queues if isinstance(queues, str) else {"$in": list(queues)}}


def between(since: datetime | None, until: datetime | None) -> Document:
    """Match instants from ``since`` on and before ``until``; empty if neither is given."""
    bounds = {"$gte": since, "$lt": until}
    return {operator: instant for operator, instant in bounds.items() if instant is not None}


def due(now: datetime) -> Document:
    """Match delayed tasks that are due."""
    return {"status": PENDING, "next_retry_at": {**IS_DATE, "$lte": now}}


def lease_expired(now: datetime) -> Document:
    """Match claimed tasks whose worker did not settle or renew in time."""
    return {"status": PROCESSING, "lease_expires_at": {**IS_DATE, "$lte": now}}


def undelivered(now: datetime) -> Document:
    """Match waiting tasks whose ``expires_at`` has passed."""
    return {"status": PENDING, "expires_at": {**IS_DATE, "$lte": now}}


def claimed(task: Claim) -> Document:
    """Match the task only while this claim holds it: the fence of every settlement."""
    token = task.lease.token if task.lease else None
    return {"_id": task.id, "status": PROCESSING, "lease_token": token}


def claimed_together(tasks: Sequence[Claim]) -> Document:
    """Match the tasks that these claims still hold: no two claims share a token."""
    tokens = {task.lease.token for task in tasks if task.lease}
    fence = {"status": PROCESSING, "lease_token": {"$in": sorted(tokens)}}
    return {**any_of(task.id for task in tasks), **fence}


def claim_of(task: Claim) -> tuple[Any, str | None]:
    """Return what identifies one claim of a task."""
    return task.id, task.lease.token if task.lease else None


def any_of(ids: Iterable[Any]) -> Document:
    """Match any of these ids."""
    return {"_id": {"$in": list(ids)}}
