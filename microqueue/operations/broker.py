"""Broker: the declared queues, exchanges and bindings of a message transport, and its messages.

Declarations are documents in ``microqueue_broker``, so that every process routes by the same ones.
Messages are tasks, except those for transient queues of fanout and topic exchanges: these are in
the topic of the exchange, and the bindings of such queues are *live*. Names include the prefix of
the caller.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from pymongo import IndexModel, ReturnDocument
from pymongo.errors import ExecutionTimeout

from microqueue import error_codes
from microqueue.clock import later
from microqueue.operations import filters, maintenance, settle
from microqueue.operations.call import ENOUGH, Call, Document, Operation, Span, Target
from microqueue.operations.settle import Settlement
from microqueue.task import Claim, Outcome, Task, TaskError

QUEUE = "queue"
EXCHANGE = "exchange"
BINDING = "binding"

MOST_EXAMINED = 50_000
"""How many waiting messages with a deadline are examined at most to list the delayed ones."""
MOST_BYTES = 2_000_000
"""How many bytes of delayed messages are listed at most."""
LISTING_MS = 1000
"""How long the server may look for delayed messages."""

INDEXES = [
    IndexModel([("collection", 1), ("exchange", 1)], name="exchange"),
    IndexModel([("collection", 1), ("queue", 1)], name="queue"),
    IndexModel([("collection", 1), ("expires_at", 1)], name="expires"),
]


# Declarations


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a queue was declared with."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    expires: timedelta | None = None
    """After how long without a consumer the queue is deleted; None: never."""
    transient: bool = False
    """Whether the queue is exclusive or deleted automatically: no message outlives its use."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Messages of an exchange with a matching routing key go to a queue."""

    exchange: str
    queue: str
    routing_key: str
    live: bool = False
    """Whether the consumers read the messages from the topic of the exchange."""
    position: str | None = field(default=None, compare=False)
    """Of a live binding that no consumer has used yet: where the topic was when it was bound."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The type of an exchange, None if it was never declared, and its bindings."""

    type: str | None
    bindings: tuple[Binding, ...]


def ensure_indexes() -> Operation[None]:
    """Create the indexes of the declarations. Safe to repeat."""
    yield Call("create_indexes", INDEXES, target=Target.BROKER)


def declare_queue(
    collection: str, queue: str, declared: Declaration, *, now: datetime
) -> Operation[bool]:
    """Store a queue and its arguments; return whether it did not exist.

    Safe to repeat: the last declaration counts.
    """
    expires = declared.expires
    return (
        yield from _declare(
            _id(collection, QUEUE, queue),
            {
                "collection": collection,
                "kind": QUEUE,
                "queue": queue,
                "arguments": dict(declared.arguments),
                "transient": declared.transient,
                "expires_sec": None if expires is None else expires.total_seconds(),
                "expires_at": None if expires is None else later(now, expires),
                "declared_at": now,
            },
        )
    )


def declare_exchange(
    collection: str, exchange: str, exchange_type: str, *, now: datetime
) -> Operation[str]:
    """Store an exchange, and return its type: that of the first declaration. Safe to repeat."""
    key = _id(collection, EXCHANGE, exchange)
    document = {
        "collection": collection,
        "kind": EXCHANGE,
        "exchange": exchange,
        "declared_at": now,
    }
    found = yield Call(
        "find_one_and_update",
        {"_id": key},
        {"$set": document, "$setOnInsert": {"type": exchange_type}},
        upsert=True,
        return_document=ReturnDocument.AFTER,
        target=Target.BROKER,
    )
    return str(found["type"])


def bind(collection: str, binding: Binding, *, now: datetime) -> Operation[bool]:
    """Store a binding, and return whether it is new.

    Safe to repeat; a live binding keeps its first position.
    """
    return (
        yield from _declare(
            _binding_id(collection, binding),
            {
                "collection": collection,
                "kind": BINDING,
                "exchange": binding.exchange,
                "queue": binding.queue,
                "routing_key": binding.routing_key,
                "live": binding.live,
                "declared_at": now,
            },
            {"position": binding.position},
        )
    )


def unbind(collection: str, binding: Binding) -> Operation[None]:
    """Delete a binding. Safe to repeat."""
    yield Call("delete_one", {"_id": _binding_id(collection, binding)}, target=Target.BROKER)


def _declare(key: str, document: Document, at_first: Document | None = None) -> Operation[bool]:
    """Store a declaration, and ``at_first`` if it is new; return whether it is."""
    update = {"$set": document} | ({"$setOnInsert": at_first} if at_first else {})
    result = yield Call("update_one", {"_id": key}, update, upsert=True, target=Target.BROKER)
    return result.upserted_id is not None


def declaration(collection: str, queue: str) -> Operation[Declaration | None]:
    """Return what a queue was declared with; None if it was never declared."""
    found = yield Call("find_one", {"_id": _id(collection, QUEUE, queue)}, target=Target.BROKER)
    if found is None:
        return None
    seconds = found.get("expires_sec")
    return Declaration(
        found["arguments"],
        None if seconds is None else timedelta(seconds=seconds),
        bool(found.get("transient")),
    )


def declared_queues(collection: str) -> Operation[list[str]]:
    """Return the names of all declared queues."""
    selection = {"collection": collection, "kind": QUEUE}
    found = yield Call("find", selection, {"queue": 1}, target=Target.BROKER)
    return [document["queue"] for document in found]


def routes(collection: str, exchange: str) -> Operation[Routes]:
    """Read how an exchange routes, with one query."""
    found = yield Call(
        "find", {"collection": collection, "exchange": exchange}, target=Target.BROKER
    )
    exchange_type = next((one["type"] for one in found if one["kind"] == EXCHANGE), None)
    return Routes(
        exchange_type,
        tuple(_binding(one) for one in found if one["kind"] == BINDING),
    )


def _binding(found: Document) -> Binding:
    return Binding(
        found["exchange"],
        found["queue"],
        found["routing_key"],
        live=bool(found.get("live")),
        position=found.get("position"),
    )


def take_live_bindings(collection: str, queue: str) -> Operation[list[Binding]]:
    """Return the live bindings of a queue for its consumer, each with its position.

    Only the first consumer gets the position: what was published before another one starts was
    delivered to the first.
    """
    selection = {"collection": collection, "queue": queue, "kind": BINDING, "live": True}
    found = yield Call("find", selection, {"_id": 1}, target=Target.BROKER)
    taken: list[Binding] = []
    for document in found:
        binding = yield Call(
            "find_one_and_update",
            {"_id": document["_id"]},
            {"$set": {"position": None}},
            return_document=ReturnDocument.BEFORE,
            target=Target.BROKER,
        )
        if binding is not None:
            taken.append(_binding(binding))
    return taken


def delete_exchange(collection: str, exchange: str) -> Operation[None]:
    """Delete an exchange and its bindings. Safe to repeat."""
    selection = {"collection": collection, "exchange": exchange}
    yield Call("delete_many", selection, target=Target.BROKER)


def delete_queue(collection: str, queue: str) -> Operation[None]:
    """Delete a queue's declaration and bindings. Safe to repeat."""
    yield Call("delete_many", {"collection": collection, "queue": queue}, target=Target.BROKER)


def keep_queues(collection: str, queues: Sequence[str], now: datetime) -> Operation[list[str]]:
    """Postpone the expiry of queues that are in use; return those that do not exist.

    Safe to repeat.
    """
    ids = {_id(collection, QUEUE, queue): queue for queue in queues}
    expires_at = {"$add": [now, {"$multiply": ["$expires_sec", 1000]}]}
    result = yield Call(
        "update_many",
        {**filters.any_of(ids), "expires_at": filters.IS_DATE},
        [{"$set": {"expires_at": expires_at}}],
        target=Target.BROKER,
    )
    if result.matched_count == len(ids):
        return []
    found = yield Call("find", filters.any_of(ids), {"_id": 1}, target=Target.BROKER)
    kept = {document["_id"] for document in found}
    return [queue for key, queue in ids.items() if key not in kept]


def delete_unused_queues(
    collection: str, now: datetime, *, batch_size: int
) -> Operation[list[str]]:
    """Delete queues that were not used for their ``x-expires``, with bindings and messages.

    The first delete repeats the condition, so a queue that is used again in between is kept.
    """
    expired = {
        "collection": collection,
        "kind": QUEUE,
        "expires_at": {**filters.IS_DATE, "$lte": now},
    }
    found = yield Call("find", expired, {"queue": 1}, limit=batch_size, target=Target.BROKER)
    deleted: list[str] = []
    for document in found:
        fence = {"_id": document["_id"], **expired}
        result = yield Call("delete_one", fence, target=Target.BROKER)
        if result.deleted_count:
            queue = document["queue"]
            older = {"queue": queue, "declared_at": {"$lte": now}}
            yield Call("delete_many", {"collection": collection, **older}, target=Target.BROKER)
            waiting = {"queue": queue, "status": filters.PENDING, "created_at": {"$lte": now}}
            yield from maintenance.delete_all(waiting, batch_size)
            deleted.append(queue)
    return deleted


def _id(collection: str, *names: str) -> str:
    return json.dumps([collection, *names], ensure_ascii=False)


def _binding_id(collection: str, binding: Binding) -> str:
    return _id(collection, BINDING, binding.exchange, binding.queue, binding.routing_key)


# Messages


def count_waiting(queue: str, *, limit: int) -> Operation[int]:
    """Count the waiting messages of a queue, up to a limit."""
    selection = {"queue": queue, "status": filters.PENDING}
    return int((yield Call("count_documents", selection, limit=limit)))


def delayed(queues: Sequence[str], *, limit: int) -> Operation[list[Document]]:
    """Return delayed messages of some queues, the next ones first.

    A message with a time to live also has a deadline, and the index does not say which ones are
    delayed. So only the first messages with a deadline are examined. The list ends at a limit of
    messages, bytes or time.
    """
    pipeline: list[Document] = [
        {"$match": {**filters.WAITING, **filters.of(queues)}},
        {"$sort": {"deadline_at": 1}},
        {"$limit": MOST_EXAMINED},
        {"$match": filters.DELAYED},
        {"$limit": limit},
        {"$project": {"payload": 1, "attempts": 1, "size": {"$bsonSize": {"of": "$payload"}}}},
    ]
    found: list[Document] = []

    def begin() -> Callable[[Document], Any]:
        found.clear()
        left = MOST_BYTES

        def keep(document: Document) -> Any:
            nonlocal left
            left -= document["size"]
            if found and left < 0:
                return ENOUGH
            return found.append(document)

        return keep

    try:
        yield Call("aggregate", pipeline, each=begin, span=Span.BRIEF, maxTimeMS=LISTING_MS)
    except ExecutionTimeout:
        if not found:
            raise
    return found


def drop_expired(queues: Sequence[str], now: datetime, *, batch_size: int) -> Operation[int]:
    """Delete waiting messages whose time to live is over. Safe to repeat."""
    selection = {**filters.expired(now), **maintenance.within(queues)}
    return (yield from maintenance.delete_all(selection, batch_size))


def drop(claims: Iterable[Claim]) -> Operation[None]:
    """Delete claimed messages. Fenced by the lease tokens, and safe to repeat."""
    yield Call("delete_many", filters.claimed_together(list(claims)))


def requeued(task: Task[Any], now: datetime) -> Settlement:
    """Return a message to its original position, counted as a delivery.

    After the last delivery that its limit allows, it becomes a dead letter.
    """
    if task.attempts >= task.max_attempts:
        message = f"it was requeued after delivery {task.attempts}, the last one allowed"
        return settle.failed(now, TaskError(message=message, code=error_codes.POISON, at=now))
    return Settlement(Outcome.RETRIED, settle.waiting(task, now, 0.0))


def rejected(now: datetime) -> Settlement:
    """Make a rejected message a dead letter."""
    error = TaskError(
        message="the consumer rejected the message", code=error_codes.REJECTED, at=now
    )
    return settle.failed(now, error)
