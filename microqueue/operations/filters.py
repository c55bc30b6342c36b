"""Filters: what each status means as a MongoDB filter, for queries and partial indexes.

A query uses a partial index only if it contains the filter of the index, so both are built from
the filters here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from microqueue.operations.call import Document
from microqueue.run_ids import PROOF_KEPT, RUN_ID
from microqueue.task import NAME_HEADER, Claim, TaskStatus
from microqueue.task_ids import id_key

PENDING = TaskStatus.PENDING.value
PROCESSING = TaskStatus.PROCESSING.value
DONE = TaskStatus.DONE.value
FAILED = TaskStatus.FAILED.value

IS_DATE = {"$type": "date"}

# "Greater than empty" means any string; mongomock takes "$type" to include what is missing.
IS_TEXT = {"$gt": ""}
NO_TEXT = {"$not": IS_TEXT}

NAME: Document = {"$ifNull": ["$name", f"$headers.{NAME_HEADER}"]}
"""The expression of a task's name; a document that was edited manually may have another value."""

Queues: TypeAlias = str | Sequence[str]
"""One queue by its name, or several."""

READY: Document = {"status": PENDING, "next_retry_at": None}
# The instant at which a claim or a sweep has to look at a task: the end of a delay, of its time to
# be delivered, or of a lease. Of a done task, its end, from which the retention counts.
TIMED: Document = {"deadline_at": IS_DATE}
WAITING: Document = {"status": PENDING, **TIMED}
DELAYED: Document = {**WAITING, "next_retry_at": IS_DATE}
LEASED: Document = {"status": PROCESSING, **TIMED}
SUCCEEDED: Document = {"status": DONE, **TIMED}
DEAD: Document = {"status": FAILED}
DEDUPED: Document = {"finished_at": None, "dedupe_key": IS_TEXT}

FAR = datetime(9999, 1, 1, tzinfo=UTC)
"""The ``next_retry_at`` of a task that is held: it would come due by itself then."""

READY_ORDER = [("priority", -1), ("position", 1), ("_id", 1)]


def of(queues: Queues) -> Document:
    """Match the tasks of one queue, or of several, in a form that every index can use."""
    return {"queue": queues if isinstance(queues, str) else {"$in": list(queues)}}


def equal(value: Any) -> Document:
    """Match this very value: alone, a document or a pattern would be a condition."""
    return {"$eq": value}


def named(name: str | Sequence[str] | None) -> Document:
    """Match the tasks with one of some names, the empty string those without; all for ``None``.

    As in :func:`microqueue.task.name_of`: the header counts only if there is no ``name``.
    """
    if name is None:
        return {}
    header = f"headers.{NAME_HEADER}"
    if name == "":
        return {"name": NO_TEXT, header: NO_TEXT}
    wanted = equal(name) if isinstance(name, str) else {"$in": list(name)}
    return {"$or": [{"name": wanted}, {"name": NO_TEXT, header: wanted}]}


def with_code(code: str | None) -> Document:
    """Match an error code, the empty string what has none; all for ``None``."""
    return {} if code is None else {"error.code": equal(code or None)}


def between(since: datetime | None, until: datetime | None) -> Document:
    """Match instants from ``since`` on and before ``until``; empty if neither is given."""
    bounds = {"$gte": since, "$lt": until}
    return {operator: instant for operator, instant in bounds.items() if instant is not None}


def due(now: datetime) -> Document:
    """Match waiting tasks whose delay is over, or whose time to be delivered."""
    return {"status": PENDING, "deadline_at": {**IS_DATE, "$lte": now}}


def lease_expired(now: datetime) -> Document:
    """Match claimed tasks whose worker did not settle or renew in time."""
    return {"status": PROCESSING, "deadline_at": {**IS_DATE, "$lte": now}}


def expired(now: datetime) -> Document:
    """Match waiting tasks whose ``expires_at`` has passed: their deadline is not later."""
    return {**due(now), "expires_at": {**IS_DATE, "$lte": now}}


def finished_by(instant: datetime) -> Document:
    """Match tasks that were done by an instant."""
    return {"status": DONE, "deadline_at": {**IS_DATE, "$lte": instant}}


def waiting_deadline(next_retry_at: Any, expires_at: Any) -> datetime | None:
    """Return the ``deadline_at`` of a waiting task: when it is due or expires, if it does."""
    instants = [one for one in (next_retry_at, expires_at) if isinstance(one, datetime)]
    return min(instants, default=None)


def proof_of_run(now: datetime) -> Document:
    """Match finished tasks that prove that a run of a schedule was added."""
    return {"_id": {"$regex": RUN_ID}, "finished_at": {"$gt": now - PROOF_KEPT}}


def claimed(task: Claim) -> Document:
    """Match the task only while this claim holds it: the fence of every settlement."""
    token = task.lease.token if task.lease else None
    return {"_id": equal(task.id), "status": PROCESSING, "lease_token": equal(token)}


def claimed_together(tasks: Sequence[Claim]) -> Document:
    """Match the tasks that these claims still hold.

    Claims of one batch share a token. So each token is matched with its own ids: otherwise a lost
    claim of a task would match if the task was claimed again in the batch of another.
    """
    ids: dict[str, list[Any]] = {}
    for task in tasks:
        if task.lease:
            ids.setdefault(task.lease.token, []).append(task.id)
    each = [
        {**any_of(some), "status": PROCESSING, "lease_token": equal(token)}
        for token, some in sorted(ids.items())
    ]
    return each[0] if len(each) == 1 else {"$or": each} if each else any_of(())


def claim_of(task: Claim) -> tuple[Any, str | None]:
    """Return what identifies one claim of a task."""
    return id_key(task.id), task.lease.token if task.lease else None


def any_of(ids: Iterable[Any]) -> Document:
    """Match any of these ids."""
    return {"_id": {"$in": list(ids)}}
