"""Glance: one cheap look that tells a worker whether and when to claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from microqueue.operations import control, filters
from microqueue.operations.call import PAUSES_COLLECTION, Call, Document, Operation, Span


@dataclass(frozen=True, slots=True)
class Glance:
    """What there is to do: something ready, a delayed task due in a while, queues that pause."""

    ready: bool
    due_sec: float | None
    paused: frozenset[str]


def glance(collection: str, queues: Sequence[str], *, now: datetime) -> Operation[Glance]:
    """Look at the head of each line with a single command, each part on its index."""
    here = {"queue": {"$in": list(queues)}}
    delayed = [
        {"$match": {**here, **filters.DELAYED}},
        {"$sort": {"next_retry_at": 1}},
        {"$limit": 1},
        {"$project": {"_id": 0, "due_at": "$next_retry_at"}},
    ]
    paused = [{"$match": {"collection": collection}}, {"$project": {"_id": 0, "paused": "$queue"}}]
    found: list[Document] = yield Call(
        "aggregate",
        [
            {"$match": {**here, **filters.READY}},
            {"$limit": 1},
            {"$project": {"_id": 0, "ready": {"$literal": True}}},
            {"$unionWith": {"coll": collection, "pipeline": delayed}},
            {"$unionWith": {"coll": PAUSES_COLLECTION, "pipeline": paused}},
        ],
        span=Span.BRIEF,  # Each part is one key of an index.
    )
    return Glance(
        ready=any("ready" in one for one in found),
        due_sec=_seconds(next((one["due_at"] for one in found if "due_at" in one), None), now),
        paused=frozenset(one["paused"] for one in found if "paused" in one),
    )


def glance_in_memory(collection: str, queues: Sequence[str], *, now: datetime) -> Operation[Glance]:
    """Look in single steps, for mongomock, which knows no ``$unionWith``."""
    here = {"queue": {"$in": list(queues)}}
    ready = yield Call("find_one", {**here, **filters.READY}, {"_id": 1})
    delayed = yield Call("find", {**here, **filters.DELAYED}, sort=[("next_retry_at", 1)], limit=1)
    pauses = yield from control.list_paused(collection)
    return Glance(
        ready=ready is not None,
        due_sec=_seconds(delayed[0]["next_retry_at"] if delayed else None, now),
        paused=frozenset(one.queue for one in pauses),
    )


def _seconds(due_at: datetime | None, now: datetime) -> float | None:
    return None if due_at is None else (due_at - now).total_seconds()
