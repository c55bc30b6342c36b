"""Indexes: as few as possible, because an update of a task visits each of them.

A claim examines at most one key whatever the backlog of ready, delayed and done tasks, because
``ready`` has ready tasks only. Everything that happens at an instant is found by ``deadline``: it
has the tasks of a status and queue in the order of their deadlines. A query over all queues skips
from one queue to the next, and examines one key of a queue that has nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def task_indexes(*, dedupe: bool = True) -> list[IndexModel]:
    """Return the indexes of ``tasks``; without ``dedupe``, those that every collection needs.

    The first write creates these, and the first task with a dedupe key the index of the keys.
    """
    wanted = [
        _partial("ready", {"queue": 1, "priority": -1, "position": 1, "_id": 1}, filters.READY),
        _partial("deadline", {"status": 1, "queue": 1, "deadline_at": 1}, filters.TIMED),
        _partial("failed", {"queue": 1, "updated_at": -1, "_id": 1}, filters.DEAD),
        # Its keys never change, so it costs time at the insert only.
        _index("browse", {"queue": 1, "created_at": -1, "_id": -1}),
    ]
    return [*wanted, dedupe_index()] if dedupe else wanted


def dedupe_index() -> IndexModel:
    """Return the index of dedupe keys: each live task of a queue has another one."""
    return _partial("dedupe", {"queue": 1, "dedupe_key": 1}, filters.DEDUPED, unique=True)


def dedupe_key_index() -> IndexModel:
    """Return the index of ``microqueue_dedupe_keys``, which deletes keys after their period."""
    return _index("until", {"until": 1}, expireAfterSeconds=0)


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
    """Create missing indexes, and adjust the expiry of others with ``adjust``.

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
        yield from _create(missing, existing, collection, target)
    return [model.document["name"] for model in missing]


def ensure_dedupe(collection: str) -> Operation[None]:
    """Create the index of dedupe keys, or wait until another process has built it.

    An index that is being built is listed, and does not reject a second task with a key yet. So
    the index is created whether it is listed or not. Safe to repeat.
    """
    wanted = dedupe_index()
    existing: dict[str, Document] = (yield Call("index_information")) or {}
    found = existing.get(wanted.document["name"])
    if found is not None and _shape(found) != _shape(wanted.document):
        raise _conflict(wanted.document, found, collection)
    yield from _create([wanted], existing, collection, Target.TASKS)


def _create(
    missing: Sequence[IndexModel],
    existing: Mapping[str, Document],
    collection: str,
    target: Target,
) -> Operation[None]:
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
