"""Export: read a whole collection in parts that do not overlap.

Everything here is read-only. Replies are raw BSON, which pymongoarrow reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from pymongo.errors import ExecutionTimeout

from microqueue.operations import filters
from microqueue.operations.call import Call, Document, Operation

BY_ID = [("_id", 1)]
SAMPLES_PER_PART = 100
LARGEST_SAMPLED_SHARE = 0.04
"""From 5 % of a collection on, ``$sample`` reads all of it."""
COUNTING_MS = 2_000


def _history() -> Document:
    """Return the history with the successful attempt, as ``microqueue.task.last_attempt`` does.

    A history of another type is returned as it is stored.
    """
    last: Document = {
        "attempt": "$attempts",
        "worker_id": "$worker_id",
        "started_at": "$started_at",
        "ended_at": "$finished_at",
        "outcome": {"$literal": filters.DONE},
    }
    stored: Document = {"$ifNull": ["$history", []]}
    outcomes: Document = {"$ifNull": ["$history.outcome", []]}
    is_done = {
        "$and": [
            {"$eq": ["$status", filters.DONE]},
            {"$eq": [{"$type": "$started_at"}, "date"]},
            {"$isArray": [stored]},
        ]
    }
    is_stored = {"$eq": [{"$arrayElemAt": [outcomes, -1]}, filters.DONE]}
    whole = {"$cond": [is_stored, "$history", {"$concatArrays": [stored, [last]]}]}
    return {"$cond": [is_done, whole, "$history"]}


DERIVED: Document = {
    "name": filters.NAME,
    "history": _history(),
    "lease_expires_at": {
        "$cond": [{"$eq": ["$status", filters.PROCESSING]}, "$deadline_at", "$$REMOVE"]
    },
}
"""Columns that are not stored under their name, as MongoDB computes them."""


@dataclass(frozen=True)
class IdRange:
    """A part of a collection: from the first id, up to the last one, which is excluded.

    ``None`` is the start, or the end. Ids of different types are in MongoDB's order.
    """

    first: Any = None
    last: Any = None

    @property
    def whole(self) -> bool:
        """Whether this is the whole collection."""
        return self.first is None and self.last is None


WHOLE = IdRange()


def selection(
    *,
    queues: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    statuses: Sequence[str] | None = None,
    time: str = "created_at",
    since: datetime | None = None,
    until: datetime | None = None,
    query: Document | None = None,
) -> Document:
    """Match tasks by queue, name, status and time, and by an additional query."""
    matching: Document = {}
    if queues is not None:
        matching["queue"] = _one_of(queues)
    if names is not None:
        matching |= filters.named(names)
    if statuses is not None:
        matching["status"] = _one_of(statuses)
    if window := filters.between(since, until):
        matching[time] = window
    if not query:
        return matching
    return {"$and": [matching, query]} if matching else query


def awaiting_first_start(due_by: datetime) -> Document:
    """Match tasks that were never delivered, and were due by an instant or not delayed."""
    return {"attempts": 0, "$or": [{"next_retry_at": None}, {"next_retry_at": {"$lte": due_by}}]}


def read_part(
    selection: Document, fields: Iterable[str], part: IdRange, *, batch_rows: int
) -> Operation[Any]:
    """Open a MongoDB cursor over the tasks of one part; it returns batches of raw BSON.

    Bounds of the index, unlike comparisons, work for ids of any type. An id never changes, so a
    task whose status changes while it is read is in one part only, and once.
    """
    options: Document = {"batch_size": batch_rows}
    if not part.whole:
        options["hint"] = BY_ID
    if part.first is not None:
        options["min"] = {"_id": part.first}
    if part.last is not None:
        options["max"] = {"_id": part.last}
    return (yield Call("find_raw_batches", selection, projection(fields), **options))


def projection(fields: Iterable[str]) -> Document:
    """Return the projection of fields, of which some are derived."""
    return {name: DERIVED.get(name, 1) for name in fields}


def count_up_to(selection: Document, limit: int) -> Operation[int]:
    """Count the tasks that match, up to a limit; return the limit if that takes too long."""
    total = yield from estimate_count()
    if total <= limit or not selection:
        return min(total, limit)
    try:
        found = yield Call("count_documents", selection, limit=limit, maxTimeMS=COUNTING_MS)
    except ExecutionTimeout:
        return limit
    return int(found)


def estimate_count() -> Operation[int]:
    """Return how many tasks there are, from the collection's metadata."""
    return int((yield Call("estimated_document_count")))


def sample_size(parts: int) -> Operation[int]:
    """Return how many tasks to sample for a split."""
    total = yield from estimate_count()
    return min(SAMPLES_PER_PART * parts, int(total * LARGEST_SAMPLED_SHARE))


def split_by_id(selection: Document, parts: int) -> Operation[list[IdRange]]:
    """Split a large collection into about equal parts of what matches.

    The sample is taken first, because that is fast, and then filtered, so that the parts are about
    equal in what will be read.
    """
    size = yield from sample_size(parts)
    if parts == 1 or size < parts:
        return [WHOLE]
    pipeline: list[Document] = [{"$sample": {"size": size}}]
    if selection:
        pipeline.append({"$match": selection})
    pipeline += [{"$project": {"_id": 1}}, {"$sort": {"_id": 1}}]
    sample = [document["_id"] for document in (yield Call("aggregate", pipeline))]
    return ranges(boundaries(sample, parts))


def boundaries(sample: Sequence[Any], parts: int) -> list[Any]:
    """Return the ids at which parts start, from a sorted sample."""
    step = len(sample) / parts
    if step < 1:
        return list(dict.fromkeys(sample))
    return list(dict.fromkeys(sample[round(step * part)] for part in range(1, parts)))


def ranges(starts: Sequence[Any]) -> list[IdRange]:
    """Return the ranges before, between and after these ids."""
    edges = [None, *starts, None]
    return [IdRange(first, last) for first, last in pairwise(edges)]


def _one_of(values: Sequence[str]) -> Any:
    return values[0] if len(values) == 1 else {"$in": list(values)}
