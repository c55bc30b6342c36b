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
from pymongo import DeleteOne

from microqueue.clock import whole_milliseconds
from microqueue.operations.call import CURSORS, Call, apply_each

POLL_SEC = 0.02
"""There is no change stream in memory, and a poll costs almost nothing."""
LOCK = threading.RLock()
"""mongomock's own ``find_one_and_update`` lets two threads claim one task."""


def perform_call(collections: Any, call: Call) -> Any:
    """Perform one call. Nothing waits in memory, so this serves both drivers."""
    with LOCK:
        if call.method == "command":
            return _command(collections.database, *call.arguments)
        if call.method == "bulk_write":
            return _total([perform_call(collections, one) for one in _single_updates(call)])
        collection = getattr(collections, call.target)
        if call.method == "create_indexes":
            return [_create_index(collection, model) for model in call.arguments[0]]
        method = getattr(collection, call.method)
        arguments = _exclude_missing(_convert(call.arguments, UUID, Binary.from_uuid))
        arguments = tuple(map(_set_current_dates, arguments))
        reply = method(*arguments, **call.options)
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


def _exclude_missing(value: Any) -> Any:
    """Let a filter by type exclude what is missing, which mongomock includes."""
    if isinstance(value, list | tuple):
        return type(value)(map(_exclude_missing, value))
    if not isinstance(value, dict):
        return value
    found = {key: _exclude_missing(item) for key, item in value.items()}
    return {**found, "$exists": True} if found.get("$type") == "date" else found


def _set_current_dates(argument: Any) -> Any:
    """Write the current time in milliseconds, where mongomock stores microseconds."""
    if not isinstance(argument, dict) or "$currentDate" not in argument:
        return argument
    now = dict.fromkeys(argument["$currentDate"], whole_milliseconds(datetime.now(UTC)))
    update = {key: value for key, value in argument.items() if key != "$currentDate"}
    return {**update, "$set": {**update.get("$set", {}), **now}}


def _as_uuid(value: Binary) -> Any:
    return value.as_uuid() if value.subtype == UUID_SUBTYPE else value


def _command(database: Any, request: Any) -> dict[str, Any]:
    """Answer the commands that queues and topics send."""
    if request == "hello":
        return {"localTime": datetime.now(UTC)}
    if "listCollections" in request:
        found = [{"name": name} for name in database.list_collection_names()]
    elif "aggregate" in request:
        count = database[request["aggregate"]].count_documents({})
        found = [{"storageStats": {"count": count, "size": 0}}]
    elif "find" in request:
        found = list(database[request["find"]].find())
        found = (found[::-1] if "sort" in request else found)[: request["limit"]]
    else:
        return {}  # collMod: mongomock's expiry is only as of the first creation.
    return {"cursor": {"firstBatch": found}}


def _create_index(collection: Any, model: Any) -> str:
    """Create one index: mongomock drops the partial filter when it creates several."""
    options = dict(model.document)
    keys = list(options.pop("key").items())
    others = []
    if options.get("unique") and "partialFilterExpression" in options:
        # mongomock compares all documents at first, also those that the index leaves out.
        inside = [one["_id"] for one in collection.find(options["partialFilterExpression"])]
        others = list(collection.find({"_id": {"$nin": inside}}))
        collection.delete_many({"_id": {"$nin": inside}})
    try:
        name: str = collection.create_index(keys, **options)
    finally:
        if others:
            collection.insert_many(others)
    return name


def _single_updates(call: Call) -> list[Call]:
    """Split a bulk write into single writes, as mongomock's bulk rejects pymongo's requests."""
    (writes,) = call.arguments
    # pymongo offers no public way to look into an UpdateOne.
    return [
        Call("delete_one", write._filter, target=call.target)  # noqa: SLF001 (as above)
        if isinstance(write, DeleteOne)
        else Call("update_one", write._filter, write._doc, target=call.target)  # noqa: SLF001 (as above)
        for write in writes
    ]


def _total(results: list[Any]) -> Any:
    """Add up the results of single updates as a bulk write reports them."""
    return SimpleNamespace(
        matched_count=sum(getattr(one, "matched_count", 0) for one in results),
        modified_count=sum(getattr(one, "modified_count", 0) for one in results),
        deleted_count=sum(getattr(one, "deleted_count", 0) for one in results),
    )
