"""Results: which tasks are finished, for callers that wait for them. Everything here is read-only.

A task counts as finished once a majority has its last write: a failover could undo it before. So
finished tasks are read as a majority has them, and the change stream reports them as a majority
gets them. The stream starts with the last write that a majority had before the first read. What
comes earlier is in the read, and what comes later is in the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bson import Timestamp

from microqueue.operations import filters, lookup
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.settings import QueueSettings
from microqueue.task_ids import id_key

FINISHED: Document = {"status": {"$in": [filters.DONE, filters.FAILED]}}


@dataclass(frozen=True, slots=True)
class Checked:
    """The tasks that are finished, and the ids of those that no longer exist."""

    finished: list[Document]
    missing: list[Any]


def check(ids: Sequence[Any], settings: QueueSettings) -> Operation[Checked]:
    """Find the finished tasks among these, also in the DLQ collection.

    A task that moves between the two collections at the same time is not missing, but it may be
    in neither list. The change stream reports its move, and it is checked again.
    """
    finished: list[Document] = yield Call(
        "find", {**filters.any_of(ids), **FINISHED}, target=Target.COMMITTED
    )
    if not (left := _others(ids, finished)):
        return Checked(finished, [])
    if settings.separate_dlq:
        dead = {**filters.any_of(left), **filters.DEAD}
        finished += yield Call("find", dead, target=Target.COMMITTED_DEAD_LETTERS)
        left = _others(ids, finished)
    existing = yield from lookup.queues_of(left, settings)
    return Checked(finished, [one for one in left if id_key(one) not in existing])


def _others(ids: Sequence[Any], documents: Sequence[Document]) -> list[Any]:
    found = {id_key(document["_id"]) for document in documents}
    return [one for one in ids if id_key(one) not in found]


def settlements(hello: Mapping[str, Any]) -> list[Document]:
    """Return the pipeline of a change stream for tasks that finish or are deleted.

    It has no tasks and no filter for ids: waiters come and go without opening it again.

    Args:
        hello: The server's reply to ``hello``, from before the stream is opened.
    """
    start = _majority_had(hello)
    options: Document = {} if start is None else {"startAtOperationTime": start}
    changed = "updateDescription.updatedFields.status"
    return [
        {"$changeStream": options},
        {
            "$match": {
                "$or": [
                    {changed: FINISHED["status"]},
                    {"operationType": "delete"},
                    {"operationType": "replace", "fullDocument.status": FINISHED["status"]},
                ]
            }
        },
        {"$project": {"documentKey._id": 1}},
    ]


def _majority_had(hello: Mapping[str, Any]) -> Timestamp | None:
    """Return the time of the last write that a majority has; None if the server does not say."""
    found: Any = hello
    for name in ("lastWrite", "majorityOpTime", "ts"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Timestamp) else None


def changed_ids(changes: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the ids of the tasks that changes of the stream are about."""
    keys = (change.get("documentKey") for change in changes)
    return [key["_id"] for key in keys if isinstance(key, Mapping) and "_id" in key]
