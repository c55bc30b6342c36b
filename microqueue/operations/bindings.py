"""Bindings of topics to queues: store them, and read them as a majority has them.

All bindings of a topic are one document of ``microqueue_bindings``. So one write that changes
nothing reads all of them from the primary, and confirms the answer. A plain read could miss a
binding: a primary that has just been replaced does not know it yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from pymongo.errors import DuplicateKeyError

from microqueue.backoff import BackoffPolicy
from microqueue.binding import Binding
from microqueue.errors import InvalidArgument, OperationFailed
from microqueue.operations import confirm
from microqueue.operations.call import Call, Document, Operation, Target

MOST_BINDINGS = 1000
"""Of one topic: each publish writes a task for each of them."""
MOST_BOUND_TOPICS = 1000
"""How many topics one list has."""
DURATIONS = ("delay", "visibility_timeout", "expires_in")


def bind(tasks: str, binding: Binding) -> Operation[Binding]:
    """Store a binding, or replace the filter and options of the one that exists. Safe to repeat."""
    key, queue, stored = _key(tasks, binding.topic), binding.queue, _to_stored(binding)
    fields = {f"bindings.$.{name}": value for name, value in stored.items() if name != "bound_at"}
    for _ in range(confirm.ROUNDS):
        existing = {"_id": key, "bindings.queue": queue}
        result = yield Call("update_one", existing, {"$set": fields}, target=Target.BINDINGS)
        if not result.matched_count:
            last_place = f"bindings.{MOST_BINDINGS - 1}"
            missing = {"_id": key, "bindings.queue": {"$ne": queue}, last_place: {"$exists": False}}
            added = {
                "$setOnInsert": {"collection": tasks, "topic": binding.topic},
                "$push": {"bindings": stored},
            }
            with suppress(DuplicateKeyError):  # The queue is bound by now, or there is no room.
                yield Call("update_one", missing, added, upsert=True, target=Target.BINDINGS)
        found = yield from of_topic(tasks, binding.topic)
        mine = [one for one in found if one.queue == queue]
        if mine:
            return mine[0]
        if len(found) >= MOST_BINDINGS:
            raise InvalidArgument(
                f"topic {binding.topic!r} has {len(found):,} bindings, which is the limit; "
                "unbind queues that need it no longer",
                argument="queue",
                value=queue,
            )
    raise confirm.keeps_changing()


def unbind(tasks: str, topic: str, queue: str) -> Operation[bool]:
    """Delete a binding; return whether there was one. Safe to repeat: it deletes at most once."""
    key = _key(tasks, topic)
    existing = {"_id": key, "bindings.queue": queue}
    pulled = {"$pull": {"bindings": {"queue": queue}}}
    result = yield Call("update_one", existing, pulled, target=Target.BINDINGS)
    if result.matched_count:
        yield Call("delete_one", {"_id": key, "bindings": []}, target=Target.BINDINGS)
    return bool(result.matched_count)


def of_topic(tasks: str, topic: str, *, session: Any = None) -> Operation[list[Binding]]:
    """Return the bindings of a topic as a majority has them, or as a transaction sees them."""
    key = {"_id": _key(tasks, topic)}
    if session is None:
        found = yield from confirm.one(key, target=Target.BINDINGS)
    else:
        found = yield Call("find_one", key, session=session, target=Target.BINDINGS)
    return _to_bindings(topic, found or {})


def of_all_topics(tasks: str) -> Operation[dict[str, list[Binding]]]:
    """Return the bindings of at most ``MOST_BOUND_TOPICS`` topics, unconfirmed. Read-only.

    Bindings that were edited and are not valid are left out.
    """
    selection = {"collection": tasks, "topic": {"$type": "string"}}
    found = yield Call("find", selection, limit=MOST_BOUND_TOPICS, target=Target.BINDINGS)
    return {one["topic"]: _to_bindings(one["topic"], one, lenient=True) for one in found}


def is_malformed(document: Document) -> bool:
    """Return whether the bindings of a topic were edited and cannot all be read."""
    topic = document.get("topic")
    if not isinstance(topic, str) or not isinstance(document.get("bindings", []), list):
        return True
    try:
        _to_bindings(topic, document)
    except OperationFailed:
        return True
    return False


def _key(tasks: str, topic: str) -> str:
    return json.dumps([tasks, topic], ensure_ascii=False)


def _to_stored(binding: Binding) -> Document:
    # A field of a condition may have dots, which a name in a document may not have.
    conditions = (
        [[path, value] for path, value in binding.filter.items()]
        if isinstance(binding.filter, Mapping)
        else None
    )
    return {
        "queue": binding.queue,
        "key": binding.filter if isinstance(binding.filter, str) else None,
        "conditions": conditions,
        "bound_at": binding.bound_at,
        "max_attempts": binding.max_attempts,
        "backoff_policy": binding.backoff.model_dump(),
        "priority": binding.priority,
        **{f"{name}_sec": _seconds(getattr(binding, name)) for name in DURATIONS},
    }


def _to_bindings(topic: str, document: Document, *, lenient: bool = False) -> list[Binding]:
    stored = document.get("bindings", [])
    bindings: list[Binding] = []
    for one in stored if isinstance(stored, list) else []:
        try:
            bindings.append(_to_binding(topic, one))
        except (InvalidArgument, KeyError, TypeError, ValueError, OverflowError) as exc:
            if not lenient:
                raise OperationFailed(
                    f"a binding of topic {topic!r} in microqueue_bindings was edited and is not "
                    f"valid; unbind its queue and bind it again ({exc})"
                ) from exc
    return sorted(bindings, key=lambda one: one.queue)


def _to_binding(topic: str, stored: Document) -> Binding:
    conditions = stored["conditions"]
    found: dict[str, Any] = {name: stored[f"{name}_sec"] for name in DURATIONS}
    return Binding(
        topic=topic,
        queue=stored["queue"],
        filter=stored["key"] if conditions is None else dict(conditions),
        bound_at=stored["bound_at"],
        max_attempts=stored["max_attempts"],
        backoff=BackoffPolicy(**stored["backoff_policy"]),
        priority=stored["priority"],
        **{name: None if sec is None else timedelta(seconds=sec) for name, sec in found.items()},
    )


def _seconds(period: timedelta | None) -> float | None:
    return None if period is None else period.total_seconds()
