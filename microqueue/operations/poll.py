"""Poll: one cheap query that tells a worker whether and when to claim.

Also the pipeline of the change stream that wakes a worker between polls. Everything here is
read-only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bson import Timestamp

from microqueue.operations import filters, pauses
from microqueue.operations.call import (
    PAUSES_COLLECTION,
    SCHEDULES_COLLECTION,
    Call,
    Document,
    Operation,
    Span,
)


@dataclass(frozen=True, slots=True)
class PollResult:
    """Whether a task is ready, when the next one is due or expires, and the paused queues.

    ``scheduled_sec`` is when the next schedule of the collection is due, for whatever queue.
    """

    ready: bool
    due_sec: float | None
    paused: frozenset[str]
    scheduled_sec: float | None = None


def poll(collection: str, queues: Sequence[str], *, now: datetime) -> Operation[PollResult]:
    """Read the head of each line with a single command, each part by its index."""
    here = {"queue": {"$in": list(queues)}}
    delayed = [
        {"$match": {**here, **filters.WAITING}},
        {"$sort": {"deadline_at": 1}},
        {"$limit": 1},
        {"$project": {"_id": 0, "due_at": "$deadline_at"}},
    ]
    paused = [{"$match": {"collection": collection}}, {"$project": {"_id": 0, "paused": "$queue"}}]
    scheduled = [
        {"$match": {"collection": collection, "next_at": filters.IS_DATE}},
        {"$sort": {"next_at": 1}},
        {"$limit": 1},
        {"$project": {"_id": 0, "next_at": 1}},
    ]
    found: list[Document] = yield Call(
        "aggregate",
        [
            {"$match": {**here, **filters.READY}},
            {"$limit": 1},
            {"$project": {"_id": 0, "ready": {"$literal": True}}},
            {"$unionWith": {"coll": collection, "pipeline": delayed}},
            {"$unionWith": {"coll": PAUSES_COLLECTION, "pipeline": paused}},
            {"$unionWith": {"coll": SCHEDULES_COLLECTION, "pipeline": scheduled}},
        ],
        span=Span.BRIEF,  # Each part is one key of an index.
    )
    return PollResult(
        ready=any("ready" in one for one in found),
        due_sec=_seconds(next((one["due_at"] for one in found if "due_at" in one), None), now),
        paused=frozenset(one["paused"] for one in found if "paused" in one),
        scheduled_sec=_seconds(
            next((one["next_at"] for one in found if "next_at" in one), None), now
        ),
    )


def poll_in_memory(
    collection: str, queues: Sequence[str], *, now: datetime
) -> Operation[PollResult]:
    """Poll with several calls, for mongomock, which has no ``$unionWith``."""
    from microqueue.operations import schedules  # noqa: PLC0415 (producers need none)

    here = {"queue": {"$in": list(queues)}}
    ready = yield Call("find_one", {**here, **filters.READY}, {"_id": 1})
    delayed = yield Call("find", {**here, **filters.WAITING}, sort=[("deadline_at", 1)], limit=1)
    paused = yield from pauses.list_paused(collection)
    scheduled = yield from schedules.next_due(collection)
    return PollResult(
        ready=ready is not None,
        due_sec=_seconds(delayed[0]["deadline_at"] if delayed else None, now),
        paused=frozenset(one.queue for one in paused),
        scheduled_sec=_seconds(scheduled, now),
    )


def _seconds(due_at: datetime | None, now: datetime) -> float | None:
    return None if due_at is None else (due_at - now).total_seconds()


def new_work(queues: Sequence[str]) -> list[dict[str, Any]]:
    """Return the pipeline of a change stream for new work in these queues.

    It selects inserts into the queues, and updates that make any task ready. An update does not
    have the queue, so some wake a worker for nothing, and its next pop finds no task.
    """
    changed = "updateDescription.updatedFields"
    return [
        {
            "$match": {
                "$or": [
                    {"operationType": "insert", "fullDocument.queue": {"$in": list(queues)}},
                    {f"{changed}.status": filters.PENDING},
                    {f"{changed}.next_retry_at": {"$type": "null"}},
                ]
            }
        },
        {"$project": {"_id": 1}},
    ]


def from_now_on(hello: Mapping[str, Any]) -> Timestamp | None:
    """Return where a change stream starts that is opened later; None without change streams.

    Motor opens a stream when it is first read, and would miss what happened before.
    """
    last = hello.get("operationTime")
    return Timestamp(last.time, last.inc + 1) if isinstance(last, Timestamp) else None


def next_due(queue: str) -> Operation[datetime | None]:
    """Return when the next waiting task of a queue is due, or expires."""
    found = yield Call(
        "find",
        {"queue": queue, **filters.WAITING},
        {"deadline_at": 1},
        sort=[("deadline_at", 1)],
        limit=1,
    )
    return found[0]["deadline_at"] if found else None
