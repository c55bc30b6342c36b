"""Follow: read tasks in the order in which they changed, from one mark to the next.

A mark is the place of a task in that order: when it last changed, and its id. Ids of several
types are compared as MongoDB orders them, which only expressions do; a plain comparison would
pass over the other types.
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
    """A place in the order of changes; without an id, before everything of that instant."""

    at: datetime
    id: Any = MinKey()  # noqa: RUF009 (it has no state)

    @classmethod
    def behind(cls, instant: datetime) -> ChangeCursor:
        """Give the place behind everything of an instant."""
        return cls(instant, MaxKey())


@dataclass(frozen=True)
class ChangeRange:
    """The changes behind one mark, up to another, which is among them."""

    start: ChangeCursor
    end: ChangeCursor


@dataclass(frozen=True)
class ChangeQuery:
    """Which tasks are followed; ``None`` means all."""

    queues: Sequence[str] | None
    statuses: Sequence[str] | None
    query: Document


def between(followed: ChangeQuery, changes: ChangeRange) -> Document:
    """Match followed tasks whose last change lies between two marks."""
    start, end = changes.start, changes.end
    bounds = {"$gte": start.at, "$lte": end.at}
    names: Any = {"$gt": ""} if followed.queues is None else {"$in": list(followed.queues)}
    conditions: list[Document] = [
        {"$or": [{"updated_at": {"$gt": start.at}}, _id_is("$gt", start)]},
        {"$or": [{"updated_at": {"$lt": end.at}}, _id_is("$lte", end)]},
    ]
    if followed.statuses is not None:
        kinds = [_changed(status, bounds) for status in followed.statuses]
        conditions.append({"$or": [{"queue": names, **kind} for kind in kinds]})
    if followed.query:
        conditions.append(followed.query)
    return {"queue": names, "updated_at": bounds, "$and": conditions}


def _changed(status: str, bounds: Document) -> Document:
    # A done task changes no more: when it finished says the same, and has an index.
    field = "finished_at" if status == filters.DONE else "updated_at"
    return {"status": status, field: bounds}


def find_end(
    followed: ChangeQuery, start: ChangeCursor, *, horizon: datetime, rows: int | None
) -> Operation[ChangeCursor | None]:
    """Find the mark of the last task up to the horizon, at most so many rows further on."""
    if horizon < start.at:
        return None
    reachable = between(followed, ChangeRange(start, ChangeCursor.behind(horizon)))
    found = []
    if rows is not None:
        found = yield Call(
            "find", reachable, FIELDS, sort=CHANGE_ORDER, skip=rows - 1, limit=1, span=Span.LONG
        )
    if not found:
        found = yield Call("find", reachable, FIELDS, sort=NEWEST_FIRST, limit=1, span=Span.LONG)
    return ChangeCursor(found[0]["updated_at"], found[0]["_id"]) if found else None


def split(followed: ChangeQuery, changes: ChangeRange, parts: int) -> Operation[list[ChangeRange]]:
    """Split many changes into about equal parts, by a sample that is taken first."""
    size = yield from export.sample_size(parts)
    if parts == 1 or size < parts:
        return [changes]
    pipeline: list[Document] = [
        {"$sample": {"size": size}},
        {"$match": between(followed, changes)},
        {"$project": FIELDS},
        {"$sort": dict(CHANGE_ORDER)},
    ]
    sample = yield Call("aggregate", pipeline)
    inner = export.boundaries(
        [ChangeCursor(one["updated_at"], one["_id"]) for one in sample], parts
    )
    marks = [changes.start, *(mark for mark in inner if mark != changes.end), changes.end]
    return [ChangeRange(start, end) for start, end in pairwise(marks)]


def read_changes(
    followed: ChangeQuery, fields: Iterable[str], changes: ChangeRange, *, batch_rows: int
) -> Operation[Any]:
    """Open a cursor over the tasks between two marks; it gives batches of raw BSON."""
    matching = between(followed, changes)
    wanted = dict.fromkeys(fields, 1)
    return (yield Call("find_raw_batches", matching, wanted, batch_size=batch_rows))


def _id_is(operator: str, mark: ChangeCursor) -> Document:
    return {"updated_at": mark.at, "$expr": {operator: ["$_id", {"$literal": mark.id}]}}
