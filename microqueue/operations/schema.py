"""The schema of a collection: its version, and how long it keeps done tasks.

One document beside the sweeper's lock has both. A queue reads it when it opens, once. A collection
without it is new, or has the indexes or tasks of version 1, which had no such document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pymongo.errors import DuplicateKeyError, OperationFailure

from microqueue.errors import MicroqueueError, SchemaTooNew, SchemaTooOld
from microqueue.operations import filters
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.operations.indexes import ensure_indexes, task_indexes
from microqueue.operations.mongo_errors import UNAUTHORIZED

VERSION = 2
"""The version of documents and indexes that this code reads and writes."""

FIRST = 1
FIRST_INDEXES = frozenset({"due", "lease", "finished", "expiring", "exhausted"})
"""Indexes that only version 1 had."""
EXAMINED = 100
"""How many tasks of a collection without a schema are examined for fields of version 1."""


@dataclass(frozen=True, slots=True)
class Schema:
    """What a collection says about itself. ``retention`` of ``None`` means forever."""

    version: int
    retention: timedelta | None
    recorded: bool = True
    """Whether it is stored: a new collection has none yet."""


class SchemaCheck(Call):
    """The first call of :func:`check`: an operation that begins with it opens the collection."""

    __slots__ = ()


def read(collection: str, retention: timedelta | None) -> Operation[Schema]:
    """Return the schema of a collection; ``retention`` is that of a new one."""
    return (yield from _read(collection, retention, Call))


def _read(collection: str, retention: timedelta | None, kind: type[Call]) -> Operation[Schema]:
    document = yield kind("find_one", {"_id": schema_id(collection)}, target=Target.LOCKS)
    if document is not None:
        return _parse(document)
    existing = (yield Call("index_information")) or {}
    if not FIRST_INDEXES.isdisjoint(existing):
        return Schema(FIRST, first_retention(existing, retention), recorded=False)
    first = bool(existing) and (yield from _has_first_tasks())
    return Schema(FIRST if first else VERSION, retention, recorded=False)


def _has_first_tasks() -> Operation[bool]:
    """Return whether there are tasks of version 1: a restored dump may lack the indexes.

    It examines the first tasks only, by one read of bounded cost.
    """
    fields = ("status", "lease_expires_at", "deadline_at", "next_retry_at", "expires_at")
    try:
        found = yield Call("find", {}, dict.fromkeys(fields, 1), limit=EXAMINED)
    except OperationFailure as exc:
        if exc.code != UNAUTHORIZED:  # A producer may have the right to insert only.
            raise
        return False
    return any(_is_first(one) for one in found)


def _is_first(document: Document) -> bool:
    """Return whether a task has a field of version 1, or lacks one that version 2 writes."""
    if "lease_expires_at" in document:
        return True
    if "deadline_at" in document:
        return False
    if document.get("status") == filters.PENDING:
        return any(
            isinstance(document.get(one), datetime) for one in ("next_retry_at", "expires_at")
        )
    return document.get("status") in (filters.PROCESSING, filters.DONE)


def check(collection: str, retention: timedelta | None) -> Operation[Schema]:
    """Return the schema of a collection, or raise if this code cannot work with its version."""
    schema = yield from _read(collection, retention, SchemaCheck)
    if schema.version > VERSION:
        raise SchemaTooNew(collection=collection, found=schema.version, supported=VERSION)
    if schema.version < VERSION:
        raise SchemaTooOld(collection=collection, found=schema.version, supported=VERSION)
    return schema


def prepare_collection(
    collection: str, retention: timedelta | None, *, adjust: bool, dedupe: bool
) -> Operation[tuple[list[str], Schema]]:
    """Create missing indexes and the schema; return the names of the new indexes, and the schema.

    ``adjust`` changes the retention of an existing collection. ``dedupe`` also creates the index
    of dedupe keys. Safe to repeat.
    """
    known = yield from check(collection, retention)
    created = yield from ensure_indexes(task_indexes(dedupe=dedupe), collection, adjust=adjust)
    return created, (yield from _record(collection, known, retention, adjust=adjust))


def _record(
    collection: str, known: Schema, retention: timedelta | None, *, adjust: bool
) -> Operation[Schema]:
    """Store the schema of a new collection, and with ``adjust`` change the retention.

    Safe to repeat: it writes the same again.
    """
    if known.recorded and (not adjust or known.retention == retention):
        return known
    changes: Document = {"$setOnInsert": {"version": VERSION}}
    kept = {"retention_sec": seconds_of(retention)}
    if adjust:
        changes["$set"] = kept
    else:
        changes["$setOnInsert"] |= kept
    own = {"_id": schema_id(collection)}
    try:
        yield Call("update_one", own, changes, upsert=True, target=Target.LOCKS)
    except DuplicateKeyError:  # Another process stored it at the same time.
        yield Call("update_one", own, changes, upsert=True, target=Target.LOCKS)
    return (yield from check(collection, retention))


def read_retention(collection: str, otherwise: timedelta | None) -> Operation[timedelta | None]:
    """Return how long a collection keeps done tasks."""
    return (yield from read(collection, otherwise)).retention


def first_retention(
    existing: Mapping[str, Mapping[str, Any]], otherwise: timedelta | None
) -> timedelta | None:
    """Return the retention of version 1: the expiry of its TTL index, 68 years for forever."""
    seconds = existing.get("finished", {}).get("expireAfterSeconds")
    if seconds is None:
        return otherwise
    return None if seconds >= 2**31 - 1 else timedelta(seconds=seconds)


def schema_id(collection: str) -> str:
    """Return the id of the document."""
    return f"schema:{collection}"


def seconds_of(retention: timedelta | None) -> float | None:
    """Return a retention as it is stored."""
    return None if retention is None else retention.total_seconds()


def _parse(document: Mapping[str, Any]) -> Schema:
    seconds = document.get("retention_sec")
    retention = timedelta(seconds=seconds) if isinstance(seconds, int | float) else None
    return Schema(_read_version(document), retention)


def _read_version(document: Mapping[str, Any]) -> int:
    """Return the version; mongosh stores a number as a double."""
    version = document.get("version")
    if isinstance(version, float) and version.is_integer():
        return int(version)
    if isinstance(version, int) and not isinstance(version, bool):
        return version
    raise MicroqueueError(
        f"the version of {document['_id']!r} in microqueue_locks is {version!r}, no whole number: "
        f"set it to the schema version of the collection; microqueue writes {VERSION}"
    )
