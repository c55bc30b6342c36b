"""Perform calls on mongomock, with workarounds for what it lacks: a queue in memory.

It is for fast unit tests in one process. Races, indexes, failover and transactions are tested on
a real server only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from bson.binary import UUID_SUBTYPE, Binary

from microqueue.operations.call import CURSORS, Call, apply_each

POLL_SEC = 0.02
"""There is no change stream in memory, and a poll costs almost nothing."""
LOCK = threading.RLock()
"""mongomock's own ``find_one_and_update`` lets two threads claim one task."""


def is_in_memory(collection: Any) -> bool:
    """Return whether a collection is of mongomock or mongomock-motor.

    The type of the latter looks like Motor's, but that of a copy with other options does not.
    """
    return type(collection.with_options()).__module__.startswith("mongomock")


def perform(collections: Any, call: Call) -> Any:
    """Perform one call. Nothing waits in memory, so this serves both drivers."""
    with LOCK:
        if call.method == "command":
            return _command(*call.arguments)
        if call.method == "bulk_write":
            return _total([perform(collections, one) for one in _single_updates(call)])
        if call.method == "create_indexes":
            return [
                _create_index(collections.at(call.target), model) for model in call.arguments[0]
            ]
        method = getattr(collections.at(call.target), call.method)
        reply = method(*_convert(call.arguments, UUID, Binary.from_uuid), **call.options)
        found = _convert(list(reply) if call.method in CURSORS else reply, Binary, _as_uuid)
        return found if call.each is None else apply_each(found, call.each())


def _convert(value: Any, kind: type[Any], convert: Callable[[Any], Any]) -> Any:
    """Replace values of one type at any depth: mongomock cannot store UUIDs."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, dict):
        return {key: _convert(item, kind, convert) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_convert(item, kind, convert) for item in value)
    return value


def _as_uuid(value: Binary) -> Any:
    return value.as_uuid() if value.subtype == UUID_SUBTYPE else value


def _command(request: Any) -> dict[str, Any]:
    """Answer the two commands that a queue sends."""
    if request == "hello":
        return {"localTime": datetime.now(UTC)}
    return {}  # collMod: mongomock's expiry is only as of the first creation.


def _create_index(collection: Any, model: Any) -> str:
    """Create one index: mongomock drops the partial filter when it creates several."""
    options = dict(model.document)
    name: str = collection.create_index(list(options.pop("key").items()), **options)
    return name


def _single_updates(call: Call) -> list[Call]:
    """Split a bulk write into updates of one, as mongomock's bulk rejects pymongo's requests."""
    (updates,) = call.arguments
    # pymongo offers no public way to look into an UpdateOne.
    return [
        Call("update_one", update._filter, update._doc, target=call.target)  # noqa: SLF001 (as above)
        for update in updates
    ]


def _total(results: list[Any]) -> Any:
    """Add up the results of single updates as a bulk write reports them."""
    return SimpleNamespace(
        matched_count=sum(result.matched_count for result in results),
        modified_count=sum(result.modified_count for result in results),
    )
