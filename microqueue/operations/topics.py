"""Topics: publish messages, and find out where a subscriber is.

The messages of a topic are in a capped collection: MongoDB deletes the oldest when a new one does
not fit. Its natural order is the order in which messages were committed, on every member of a
replica set. So a tailable cursor delivers each message once and in order, and the id of the last
message is a position from which another cursor can resume.

A subscriber sees a message only when a majority has it: otherwise a failover could roll back what
was delivered. A tailable cursor with read concern ``majority`` is no way to do that: MongoDB wakes
it when a message is inserted, the majority does not have it yet, and the cursor sleeps until the
next one. So the cursor reads the primary, and :mod:`.confirm` waits for the majority, once for each
batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import unquote

from bson import ObjectId
from pymongo.errors import DuplicateKeyError, OperationFailure

from microqueue.clock import as_utc
from microqueue.errors import OperationFailed, TopicConflict
from microqueue.message import Message
from microqueue.model import trusted
from microqueue.operations import confirm
from microqueue.operations.call import Call, Document, Operation, Target, topic_collection_name

NAMESPACE_NOT_FOUND = 26
NAMESPACE_EXISTS = 48
MOST_TOPICS = 10_000
"""How many collections one list has."""
NEWEST_FIRST = [("$natural", -1)]

# Collections


def topic_of(tasks: str, collection: str) -> str | None:
    """Return the topic of a collection, or None if it belongs to no topic of these tasks."""
    prefix = topic_collection_name(tasks, "")
    return unquote(collection.removeprefix(prefix)) if collection.startswith(prefix) else None


def create(tasks: str, topic: str, *, max_messages: int, max_bytes: int) -> Operation[None]:
    """Create the collection of a topic, unless it exists. Safe to repeat.

    The collection is never empty: a tailable cursor on an empty one ends at once, and there would
    be no position before the first message. So it starts with a document that is no message.

    Raises:
        TopicConflict: The collection exists, and is not capped.
    """
    collection = topic_collection_name(tasks, topic)
    limits = {"capped": True, "size": max_bytes, "max": max_messages}
    try:
        yield Call("command", {"create": collection, **limits}, target=Target.DATABASE)
    except OperationFailure as exc:
        if exc.code != NAMESPACE_EXISTS:
            raise
        found = yield from _list(collection)
        if found and not found[0].get("options", {}).get("capped"):
            raise TopicConflict(topic=topic, collection=collection) from exc
    if (yield Call("find_one", {}, {"_id": 1}, target=Target.TOPIC)) is None:
        start = {"_id": ObjectId(), "start": True}
        with suppress(DuplicateKeyError):  # The reply to the first attempt was lost.
            yield Call("insert_one", start, target=Target.TOPIC)


def _list(name: Any) -> Operation[list[Document]]:
    request = {"listCollections": 1, "filter": {"name": name}, "cursor": {"batchSize": MOST_TOPICS}}
    reply = yield Call("command", request, target=Target.DATABASE)
    found: list[Document] = reply["cursor"]["firstBatch"]
    return found


# Publish


def new_document(
    message_id: Any, *, key: str, body: Any, headers: Document, now: datetime
) -> Document:
    """Return the document of a new message."""
    document: Document = {"_id": message_id, "key": key, "body": body, "published_at": now}
    return {**document, "headers": headers} if headers else document


def publish(message_id: Any, stored: Any) -> Operation[None]:
    """Insert a message, once. ``stored`` is the encoded document.

    Safe to repeat: a message with this id is this message.
    """
    for _ in range(confirm.ROUNDS):
        try:
            yield Call("insert_one", stored, target=Target.TOPIC)
        except DuplicateKeyError:
            if (yield from confirm.holds({"_id": message_id}, target=Target.TOPIC)):
                return
        else:
            return
    raise OperationFailed(f"message {message_id!r} was inserted and replaced repeatedly; try again")


def trim(max_messages: int) -> Operation[None]:
    """Delete the oldest messages of a topic in memory, which has no capped collections."""
    found = yield Call("find", {}, {"_id": 1}, target=Target.TOPIC)
    for document in found[:-max_messages]:
        yield Call("delete_one", {"_id": document["_id"]}, target=Target.TOPIC)


# Read


def position_of(message_id: Any) -> str:
    """Return the position of a message, as text."""
    return str(message_id)


def id_of(position: str) -> Any:
    """Return the id of the message at a position."""
    return ObjectId(position) if ObjectId.is_valid(position) else position


def latest(*, in_memory: bool) -> Operation[Any]:
    """Return the id of the newest message that a majority has; None if there is none."""
    for _ in range(confirm.ROUNDS):
        if in_memory:
            found = (yield Call("find", {}, {"_id": 1}, target=Target.TOPIC))[-1:]
        else:
            order: Any = NEWEST_FIRST
            found = yield Call("find", {}, {"_id": 1}, sort=order, limit=1, target=Target.TOPIC)
        if not found:
            return None
        if (yield from holds(found[0]["_id"])):
            return found[0]["_id"]
    raise confirm.keeps_changing()


def holds(message_id: Any) -> Operation[bool]:
    """Return whether a topic has a message; a majority has either answer.

    It also confirms all messages before it.
    """
    return (yield from confirm.holds({"_id": message_id}, target=Target.TOPIC))


def newest(
    limit: int, *, in_memory: bool, convert: Callable[[Message], Any] | None
) -> Operation[list[Any]]:
    """Return the newest messages, the newest first, as the primary has them. Read-only.

    ``convert`` is applied to each as it arrives, so that few are in memory at a time.
    """

    def each(document: Document) -> Any:
        if not is_message(document):
            return None
        message = to_message(document)
        return message if convert is None else convert(message)

    if in_memory:
        documents = (yield Call("find", {}, target=Target.TOPIC))[-limit:]
        found = [each(document) for document in reversed(documents)]
    else:
        order: Any = NEWEST_FIRST
        found = yield Call(
            "find", {}, sort=order, limit=limit, each=lambda: each, target=Target.TOPIC
        )
    return [one for one in found if one is not None]


def find(position: str) -> Operation[Message | None]:
    """Return the message at a position, as the primary has it; None if there is none. Read-only."""
    found = yield Call("find_one", {"_id": id_of(position)}, target=Target.TOPIC)
    return to_message(found) if found is not None and is_message(found) else None


def is_message(document: Document) -> bool:
    """Return whether a document is a message, and not the start of the collection."""
    return "start" not in document


def to_message(document: Document) -> Message:
    """Return a stored document as a message; it may have been edited manually."""
    get: Any = document.get
    published_at, headers = get("published_at"), get("headers")
    return trusted(
        Message,
        position=position_of(document["_id"]),
        key=str(get("key") or ""),
        body=get("body"),
        headers=headers if isinstance(headers, dict) else {},
        published_at=published_at if isinstance(published_at, datetime) else None,
    )


def to_messages(documents: Sequence[Document]) -> list[Message]:
    """Return those of the documents that are messages."""
    return [to_message(document) for document in documents if is_message(document)]


# List


class Counts(NamedTuple):
    """How much a topic keeps. The limits are None if it keeps nothing."""

    messages: int = 0
    bytes: int = 0
    max_messages: int | None = None
    max_bytes: int | None = None
    oldest_at: datetime | None = None
    newest_at: datetime | None = None


def names(tasks: str) -> Operation[list[str]]:
    """Return the names of the topics that keep messages beside a collection of tasks."""
    prefix = re.escape(topic_collection_name(tasks, ""))
    found = yield from _list({"$regex": f"^{prefix}"})
    topics = (topic_of(tasks, one["name"]) for one in found)
    return sorted(topic for topic in topics if topic)


def counts(tasks: str, topic: str) -> Operation[Counts]:
    """Count the messages of a topic, without reading them. Read-only."""
    collection = topic_collection_name(tasks, topic)
    try:
        reply = yield from _command(
            {"aggregate": collection, "pipeline": [{"$collStats": {"storageStats": {}}}]}
        )
    except OperationFailure as exc:
        if exc.code != NAMESPACE_NOT_FOUND:
            raise
        return Counts()
    (stats,) = (one["storageStats"] for one in reply)
    two = {"find": collection, "projection": {"published_at": 1, "start": 1}, "limit": 2}
    oldest = yield from _command(two)  # The start of the collection, perhaps, and a message.
    newest = yield from _command({**two, "sort": {"$natural": -1}})
    return Counts(
        messages=stats["count"] - sum(not is_message(one) for one in oldest),
        bytes=stats["size"],
        max_messages=stats.get("max"),
        max_bytes=stats.get("maxSize"),
        oldest_at=_first_instant(oldest),
        newest_at=_first_instant(newest),
    )


def _command(request: Document) -> Operation[list[Document]]:
    cursor: Document = {"cursor": {}} if "aggregate" in request else {"singleBatch": True}
    reply = yield Call("command", {**request, **cursor}, target=Target.DATABASE)
    found: list[Document] = reply["cursor"]["firstBatch"]
    return found


def _first_instant(documents: Sequence[Document]) -> datetime | None:
    instants = (one.get("published_at") for one in documents if is_message(one))
    return next((as_utc(one) for one in instants if isinstance(one, datetime)), None)
