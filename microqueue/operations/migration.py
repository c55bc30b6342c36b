"""Migration: bring a collection of schema version 1 to version 2.

Version 1 had nine indexes, and the end of a lease in ``lease_expires_at``. Version 2 has one
``deadline_at`` per task. Tasks are changed in batches in the order of their ids, and the place is
stored after each batch, so that a migration that was killed resumes there. Every step is safe to
repeat: a task that was changed no longer matches.

Until the last step the collection has version 1, and no process of version 2 works with it. Its old
indexes are dropped before that step: a TTL index that was left would delete tasks.

A process of version 1 that was not stopped works on, and leaves tasks that version 2 never reclaims
or promotes. A later migration changes them, beside processes of version 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pymongo.errors import OperationFailure

from microqueue.errors import SchemaTooNew
from microqueue.operations import filters, schema
from microqueue.operations.call import Call, Document, Operation, Span, Target
from microqueue.operations.export import BY_ID
from microqueue.operations.indexes import ensure_indexes, missing_indexes, task_indexes
from microqueue.operations.workers import list_workers

INDEX_NOT_FOUND = 27
PLACE = "migrating"
"""The field of the schema's document that exists during a migration."""


def _date(path: str) -> Document:
    return {"$cond": [{"$eq": [{"$type": path}, "date"]}, path, None]}


UNCHANGED: Document = {
    "$or": [
        {"lease_expires_at": {"$exists": True}},
        {"status": {"$in": [filters.PROCESSING, filters.DONE]}, "deadline_at": {"$exists": False}},
        {
            "status": filters.PENDING,
            "deadline_at": {"$exists": False},
            "$or": [{"next_retry_at": filters.IS_DATE}, {"expires_at": filters.IS_DATE}],
        },
    ]
}
"""Match what the migration has to change."""

CHANGE: list[Document] = [
    {
        "$set": {
            "deadline_at": {
                "$switch": {
                    "branches": [
                        {
                            "case": {"$eq": ["$status", filters.PROCESSING]},
                            # Version 2 may have claimed it since, and left the old lease.
                            "then": {"$max": [_date("$deadline_at"), _date("$lease_expires_at")]},
                        },
                        {
                            "case": {"$eq": ["$status", filters.DONE]},
                            "then": _date("$finished_at"),
                        },
                        {
                            "case": {"$eq": ["$status", filters.PENDING]},
                            "then": {"$min": [_date("$next_retry_at"), _date("$expires_at")]},
                        },
                    ],
                    "default": None,
                }
            }
        }
    },
    {"$unset": "lease_expires_at"},
]


@dataclass(frozen=True)
class Survey:
    """What a migration would do."""

    found: int
    tasks: int
    to_change: Mapping[str, int]
    create: Sequence[str]
    drop: Sequence[str]
    retention: timedelta | None
    workers: Sequence[str]
    resumed: bool

    @property
    def needed(self) -> bool:
        """Whether the collection has an older version, or indexes or tasks of one."""
        return self.found < schema.VERSION or bool(self.drop or self.to_change)


def survey(collection: str, now: datetime, retention: timedelta | None) -> Operation[Survey]:
    """Return what a migration would do. Read-only; it reads the whole collection.

    Raises:
        SchemaTooNew: A newer version of microqueue wrote the collection.
    """
    found = yield from schema.read(collection, retention)
    if found.version > schema.VERSION:
        raise SchemaTooNew(collection=collection, found=found.version, supported=schema.VERSION)
    existing = (yield Call("index_information")) or {}
    group = {"$group": {"_id": "$status", "count": {"$sum": 1}}}
    counted: list[Document] = yield Call(
        "aggregate", [{"$match": UNCHANGED}, group], span=Span.LONGEST
    )
    missing = yield from missing_indexes(task_indexes(dedupe=False))
    place = yield from _place(collection)
    alive = [one.id for one in (yield from list_workers(collection)) if one.gone_at() > now]
    return Survey(
        found=found.version,
        tasks=int((yield Call("estimated_document_count"))),
        to_change={str(one["_id"]): int(one["count"]) for one in counted},
        create=sorted(missing),
        drop=sorted(schema.FIRST_INDEXES & set(existing)),
        retention=found.retention,
        workers=sorted(alive),
        resumed=place is not None,
    )


def begin(collection: str, retention: timedelta | None) -> Operation[None]:
    """Note that a migration has begun, and the retention, which an index had. Safe to repeat."""
    fields: Document = {
        "version": schema.FIRST,
        "retention_sec": schema.seconds_of(retention),
        PLACE: {},
    }
    own = {"_id": schema.schema_id(collection)}
    yield Call("update_one", own, {"$setOnInsert": fields}, upsert=True, target=Target.LOCKS)


@dataclass(frozen=True)
class Batch:
    """One batch: how many tasks were read and changed, and whether it was the last one."""

    read: int
    changed: int
    last: bool
    ended: bool = False
    """Whether the collection is not of version 1 any more: another migration has finished."""


def change_batch(collection: str, size: int) -> Operation[Batch]:
    """Change the next tasks, and store the place. Safe to repeat, and beside another migration."""
    own = {"_id": schema.schema_id(collection), "version": schema.FIRST}
    document = yield Call("find_one", own, target=Target.LOCKS)
    if document is None:
        return Batch(0, 0, last=True, ended=True)
    batch, place = yield from change_from(document.get(PLACE) or {}, size)
    # At the end, the next batch begins with the first task of all: a process of version 1 that was
    # not stopped may have added tasks.
    stored = yield Call("update_one", own, {"$set": {PLACE: place}}, target=Target.LOCKS)
    ended = not stored.matched_count
    return replace(batch, last=ended or batch.last, ended=ended)


def change_from(place: Document, size: int) -> Operation[tuple[Batch, Document]]:
    """Change the tasks from a place on; return the place of the next ones, empty at the end.

    Safe to repeat, and beside processes of version 2.
    """
    options: Document = {"hint": BY_ID, "limit": size + 1}
    if "at" in place:
        options["min"] = {"_id": place["at"]}
    found: list[Document] = yield Call("find", {}, {"_id": 1}, **options)
    batch, following = found[:size], found[size:]
    changed = 0
    if batch:
        these = {**filters.any_of(one["_id"] for one in batch), **UNCHANGED}
        result = yield Call("update_many", these, CHANGE, span=Span.LONGEST)
        changed = int(result.modified_count)
    at = {"at": following[0]["_id"]} if following else {}
    return Batch(len(batch), changed, last=not following), at


def has_unchanged() -> Operation[bool]:
    """Return whether there is a task left to change. It may read the whole collection."""
    found = yield Call("find", UNCHANGED, {"_id": 1}, limit=1, span=Span.LONGEST)
    return bool(found)


def finish(collection: str) -> Operation[None]:
    """Create the new indexes, drop the old ones, and set the version. Safe to repeat."""
    yield from ensure_indexes(task_indexes(dedupe=False), collection, adjust=False)
    yield from drop_old_indexes()
    own = {"_id": schema.schema_id(collection), "version": schema.FIRST}
    update = {"$set": {"version": schema.VERSION}, "$unset": {PLACE: ""}}
    yield Call("update_one", own, update, target=Target.LOCKS)


def drop_old_indexes() -> Operation[list[str]]:
    """Drop the indexes that only version 1 had. Safe to repeat."""
    existing = (yield Call("index_information")) or {}
    dropped = sorted(schema.FIRST_INDEXES & set(existing))
    for name in dropped:
        try:
            yield Call("drop_index", name)
        except OperationFailure as exc:
            if exc.code != INDEX_NOT_FOUND:  # A repeat finds it dropped.
                raise
    return dropped


def _place(collection: str) -> Operation[Document | None]:
    own = {"_id": schema.schema_id(collection)}
    document = yield Call("find_one", own, target=Target.LOCKS)
    place: Document | None = (document or {}).get(PLACE)
    return place
