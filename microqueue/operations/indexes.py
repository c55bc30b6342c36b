"""Indexes: one small partial index per query of the queue.

A claim examines at most one key whatever the backlog of ready, delayed and done tasks, because
``ready`` has ready tasks only. Finished tasks are in no index that a claim or a sweep reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from pymongo import IndexModel
from pymongo.errors import OperationFailure

from microqueue.errors import DuplicatesStored, IndexConflict
from microqueue.operations import filters
from microqueue.operations.call import Call, Document, Operation, Span, Target
from microqueue.operations.mongo_errors import DUPLICATE_KEY

NEVER_SEC = 2**31 - 1
"""The longest expiry of a TTL index, 68 years. An index without one could not get one later."""

TOMBSTONE_SEC = 86_400
CONFLICTS = {85, 86}  # IndexOptionsConflict, IndexKeySpecsConflict


def task_indexes(retention: timedelta | None) -> list[IndexModel]:
    """Return the indexes of ``tasks``."""
    keep_sec = NEVER_SEC if retention is None else min(int(retention.total_seconds()), NEVER_SEC)
    return [
        _partial("ready", {"queue": 1, "priority": -1, "position": 1, "_id": 1}, filters.READY),
        _partial("due", {"queue": 1, "next_retry_at": 1}, filters.DELAYED),
        _partial("lease", {"lease_expires_at": 1}, {"status": filters.PROCESSING}),
        _partial("dedupe", {"queue": 1, "dedupe_key": 1}, filters.DEDUPED, unique=True),
        _partial("failed", {"queue": 1, "updated_at": -1, "_id": 1}, filters.DEAD),
        _partial("finished", {"finished_at": 1}, filters.FINISHED, expireAfterSeconds=keep_sec),
        _partial("expiring", {"expires_at": 1}, filters.EXPIRING),
        _partial("exhausted", {"max_attempts": 1, "attempts": -1}, filters.RETRIED),
        # Its keys never change, so it costs time at the insert only.
        _index("browse", {"queue": 1, "created_at": -1, "_id": -1}),
    ]


def retention_of(
    existing: Mapping[str, Mapping[str, Any]], otherwise: timedelta | None
) -> timedelta | None:
    """Return how long done tasks are kept, from the expiry of the index ``finished``."""
    seconds = existing.get("finished", {}).get("expireAfterSeconds")
    if seconds is None:
        return otherwise
    return None if seconds >= NEVER_SEC else timedelta(seconds=seconds)


def dead_letter_indexes() -> list[IndexModel]:
    """Return the indexes of ``tasks_dlq``."""
    return [
        _partial("failed", {"queue": 1, "updated_at": -1, "_id": 1}, filters.DEAD),
        _index("retired", {"retired_at": 1}, expireAfterSeconds=TOMBSTONE_SEC),
    ]


def ensure_indexes(
    wanted: Sequence[IndexModel],
    collection: str,
    *,
    target: Target = Target.TASKS,
    adjust: bool = True,
) -> Operation[list[str]]:
    """Create missing indexes, and adjust the retention with ``adjust``.

    Returns the names of the created indexes. Safe to repeat: existing indexes are left alone.
    """
    existing: dict[str, Document] = (yield Call("index_information", target=target)) or {}
    missing = []
    for model in wanted:
        expected = model.document
        found = existing.get(expected["name"])
        if found is None:
            missing.append(model)
        elif _shape(found) != _shape(expected):
            raise _conflict(expected, found, collection)
        elif adjust and found.get("expireAfterSeconds") != expected.get("expireAfterSeconds"):
            change = {
                "name": expected["name"],
                "expireAfterSeconds": expected["expireAfterSeconds"],
            }
            command = {"collMod": collection, "index": change}
            yield Call("command", command, target=Target.DATABASE, span=Span.LONGEST)
    if missing:
        try:
            yield Call("create_indexes", missing, target=target)
        except OperationFailure as exc:
            if exc.code == DUPLICATE_KEY:
                raise DuplicatesStored(
                    collection=collection, key=(exc.details or {}).get("keyValue")
                ) from exc
            if exc.code not in CONFLICTS:
                raise
            raise _find_conflict(missing, existing, collection) from exc
    return [model.document["name"] for model in missing]


def missing_indexes(wanted: Sequence[IndexModel]) -> Operation[set[str]]:
    """Return the names of the indexes that do not exist."""
    existing = (yield Call("index_information")) or {}
    return {model.document["name"] for model in wanted} - set(existing)


def index_names(plan: Mapping[str, Any]) -> list[str]:
    """Return the indexes that a query plan uses, outermost first; a full scan is ``COLLSCAN``."""
    names = [plan["indexName"]] if "indexName" in plan else []
    if plan.get("stage") == "COLLSCAN":
        names.append("COLLSCAN")
    stages = [plan[key] for key in ("inputStage", "queryPlan") if key in plan]
    for stage in [*stages, *plan.get("inputStages", ())]:
        names += index_names(stage)
    return names


def _index(name: str, keys: dict[str, int], **options: Any) -> IndexModel:
    return IndexModel(list(keys.items()), name=name, **options)


def _partial(name: str, keys: dict[str, int], only: Document, **options: Any) -> IndexModel:
    return _index(name, keys, partialFilterExpression=only, **options)


def _shape(index: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what makes two indexes equal, except the expiry, which can be changed."""
    key = index["key"]
    pairs = list(key.items()) if isinstance(key, Mapping) else [tuple(pair) for pair in key]
    partial = index.get("partialFilterExpression")
    return (
        [(field, _direction(direction)) for field, direction in pairs],
        bool(index.get("unique", False)),
        bool(index.get("hidden", False)),
        None if partial is None else _plain(partial),
        "expireAfterSeconds" in index,
    )


def _direction(value: Any) -> Any:
    """Return a direction, stored as 1 or 1.0; text and hashed indexes have a name instead."""
    return value if isinstance(value, str) else int(value)


def _plain(value: Any) -> Any:
    return (
        {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value
    )


def _conflict(
    expected: Mapping[str, Any], found: Mapping[str, Any], collection: str
) -> IndexConflict:
    return IndexConflict(
        index=expected["name"],
        collection=collection,
        found=_plain(found),
        expected=_plain(expected),
    )


def _find_conflict(
    missing: Sequence[IndexModel], existing: Mapping[str, Document], collection: str
) -> IndexConflict:
    for model in missing:
        expected = model.document
        for name, found in existing.items():
            if _shape(found)[0] == _shape(expected)[0]:
                return _conflict(expected, {"name": name, **found}, collection)
    return _conflict(missing[0].document, {"name": "unknown"}, collection)
