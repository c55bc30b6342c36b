"""Change cursor: read tasks in the order in which they changed, from one cursor to the next.

A cursor is the place of a task in that order: when it last changed, and its id. Ids of different
types are compared by expressions, which order them as MongoDB sorts. A plain comparison would skip
ids of other types. Everything here is read-only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from bson.max_key import MaxKey
from bson.min_key import MinKey

from microqueue.operations import export, filters
from microqueue.operations.call import Call, Document, Operation, Span

CHANGE_ORDER = [("updated_at", 1), ("_id", 1)]
NEWEST_FIRST = [("updated_at", -1), ("_id", -1)]
FIELDS = {"updated_at": 1}
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class ChangeCursor:
    """A place in the order of changes; without an id, before all tasks of that instant."""

    at: datetime
    id: Any = MinKey()  # noqa: RUF009 (it has no state)

    @classmethod
    def behind(cls, instant: datetime) -> ChangeCursor:
        """Return the place behind all tasks of an instant."""
        return cls(instant, MaxKey())


@dataclass(frozen=True)
class ChangeRange:
    """The changes after one cursor, up to another, which is included."""

    start: ChangeCursor
    end: ChangeCursor


@dataclass(frozen=True)
class ChangeQuery:
    """Which tasks to read; ``None`` means all."""

    queues: Sequence[str] | None
    statuses: Sequence[str] | None
    query: Document


def changed_between(query: ChangeQuery, changes: ChangeRange) -> Document:
    """Match tasks whose last change is in a range."""
    start, end = changes.start, changes.end
    bounds = {"$gte": start.at, "$lte": end.at}
    names: Any = {"$gt": ""} if query.queues is None else {"$in": list(query.queues)}
    conditions: list[Document] = [
        {"$or": [{"updated_at": {"$gt": start.at}}, _id_is("$gt", start)]},
        {"$or": [{"updated_at": {"$lt": end.at}}, _id_is("$lte", end)]},
    ]
    if query.statuses is not None:
        kinds = [_changed(status, bounds) for status in query.statuses]
        conditions.append({"$or": [{"queue": names, **kind} for kind in kinds]})
    if query.query:
        conditions.append(query.query)
    return {"queue": names, "updated_at": bounds, "$and": conditions}


def _changed(status: str, bounds: Document) -> Document:
    # A done task no longer changes, so its deadline is the same instant, and has an index.
    if status == filters.DONE:
        return {"status": status, "deadline_at": {**filters.IS_DATE, **bounds}}
    return {"status": status, "updated_at": bounds}


def find_end(
    query: ChangeQuery, start: ChangeCursor, *, horizon: datetime, rows: int | None
) -> Operation[ChangeCursor | None]:
    """Return the cursor of the last task up to the horizon, at most ``rows`` further."""
    if horizon < start.at:
        return None
    reachable = changed_between(query, ChangeRange(start, ChangeCursor.behind(horizon)))
    found = []
    if rows is not None:
        found = yield Call(
            "find", reachable, FIELDS, sort=CHANGE_ORDER, skip=rows - 1, limit=1, span=Span.LONG
        )
    if not found:
        found = yield Call("find", reachable, FIELDS, sort=NEWEST_FIRST, limit=1, span=Span.LONG)
    return ChangeCursor(found[0]["updated_at"], found[0]["_id"]) if found else None


def split(query: ChangeQuery, changes: ChangeRange, parts: int) -> Operation[list[ChangeRange]]:
    """Split a range into about equal parts, by a random sample."""
    size = yield from export.sample_size(parts)
    if parts == 1 or size < parts:
        return [changes]
    pipeline: list[Document] = [
        {"$sample": {"size": size}},
        {"$match": changed_between(query, changes)},
        {"$project": FIELDS},
        {"$sort": dict(CHANGE_ORDER)},
    ]
    sample = yield Call("aggregate", pipeline)
    inner = export.boundaries(
        [ChangeCursor(one["updated_at"], one["_id"]) for one in sample], parts
    )
    cursors = [changes.start, *(cursor for cursor in inner if cursor != changes.end), changes.end]
    return [ChangeRange(start, end) for start, end in pairwise(cursors)]


def read_changes(
    query: ChangeQuery, fields: Iterable[str], changes: ChangeRange, *, batch_rows: int
) -> Operation[Any]:
    """Open a MongoDB cursor over the tasks of a range; it returns batches of raw BSON."""
    matching = changed_between(query, changes)
    wanted = export.projection(fields)
    return (yield Call("find_raw_batches", matching, wanted, batch_size=batch_rows))


def _id_is(operator: str, cursor: ChangeCursor) -> Document:
    return {"updated_at": cursor.at, "$expr": {operator: ["$_id", {"$literal": cursor.id}]}}
