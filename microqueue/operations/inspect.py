"""Inspect: read-only views. Looking claims nothing and leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from microqueue.model import Model
from microqueue.operations import dead_letters, filters, id_order
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.settings import QueueSettings
from microqueue.task import TaskStatus


class QueueStats(Model):
    """How a queue stands at ``at``. Ages are in seconds."""

    queue: str
    at: datetime
    ready: int
    delayed: int
    processing: int
    overdue: int
    done: int
    failed: int
    oldest_ready_age_sec: float | None
    """How long the task that has been ready the longest has waited."""
    next_due_at: datetime | None

    @property
    def pending(self) -> int:
        """Tasks that wait, ready or delayed."""
        return self.ready + self.delayed

    @property
    def in_flight(self) -> int:
        """Tasks that a worker holds; the overdue ones among them await the sweeper."""
        return self.processing


def get(task_id: Any, settings: QueueSettings) -> Operation[Document | None]:
    """Find one task by its id, wherever dead letters are kept."""
    document: Document | None = yield Call("find_one", {"_id": {"$eq": task_id}})
    if document is None and settings.letters_apart:
        alive = {"_id": {"$eq": task_id}, "status": filters.FAILED}
        document = yield Call("find_one", alive, target=Target.DEAD_LETTERS)
    return document


def find_first(candidates: Sequence[Any], settings: QueueSettings) -> Operation[Document | None]:
    """Find the task of the first of these ids that there is one of."""
    for task_id in candidates:
        document = yield from get(task_id, settings)
        if document is not None:
            return document
    return None


def first_existing(
    candidates: Sequence[Sequence[Any]], settings: QueueSettings
) -> Operation[list[Any]]:
    """Choose the first id of each that there is a task of; the first if there is none."""
    unclear = [one for several in candidates if len(several) > 1 for one in several]
    existing: set[Any] = set()
    for target in dict.fromkeys(dead_letters.targets(settings)) if unclear else ():
        found = yield Call("find", filters.any_of(unclear), {"_id": 1}, target=target)
        existing |= {document["_id"] for document in found}
    return [next((one for one in several if one in existing), several[0]) for several in candidates]


def peek(
    queue: str, *, status: TaskStatus | None, limit: int, settings: QueueSettings
) -> Operation[list[Document]]:
    """Read the newest tasks of a queue, wherever dead letters are kept."""
    selection: Document = {"queue": queue}
    if status is TaskStatus.PROCESSING:
        selection |= filters.LEASED  # Few at any time, and in an index of their own.
    elif status is not None:
        selection["status"] = status.value
    targets = [Target.TASKS]
    if status in {None, TaskStatus.FAILED}:
        targets = dead_letters.targets(settings)
    order = [("created_at", -1), ("_id", -1)]
    found: dict[Any, Document] = {}
    for target in targets:
        # What has left the dead letters again is a tombstone there, and has no queue.
        for document in (yield Call("find", selection, sort=order, limit=limit, target=target)):
            found[id_order.key(document["_id"])] = document
    if len(targets) == 1:
        return list(found.values())

    def age(document: Document) -> tuple[Any, ...]:
        created_at = document.get("created_at") or datetime.fromtimestamp(0, UTC)
        return created_at, *id_order.place(document["_id"])

    return sorted(found.values(), key=age, reverse=True)[:limit]


def stats(queue: str, now: datetime, settings: QueueSettings) -> Operation[QueueStats]:
    """Count the queue's tasks, each status on the index that holds it."""
    here = {"queue": queue}
    ready, ready_since = yield from _count_ready(here)
    counts = {"ready": ready}
    for name, selection in {
        "delayed": filters.DELAYED,
        "processing": filters.LEASED,
        "overdue": filters.lease_expired(now),
        "done": {**filters.FINISHED, "finished_at": filters.IS_DATE},
    }.items():
        counts[name] = yield Call("count_documents", {**here, **selection})
    counts["failed"] = yield from dead_letters.count({**here, **filters.DEAD}, settings)
    age = None if ready_since is None else max((now - ready_since).total_seconds(), 0.0)
    due_at = yield from next_due(queue)
    return QueueStats(queue=queue, at=now, oldest_ready_age_sec=age, next_due_at=due_at, **counts)


def next_due(queue: str) -> Operation[datetime | None]:
    """Read when the queue's next delayed task comes due."""
    found = yield Call(
        "find",
        {"queue": queue, **filters.DELAYED},
        {"next_retry_at": 1},
        sort=[("next_retry_at", 1)],
        limit=1,
    )
    return found[0]["next_retry_at"] if found else None


def _count_ready(here: Document) -> Operation[tuple[int, datetime | None]]:
    """Count ready tasks, and find since when the oldest has been ready: its last update."""
    group = {"_id": None, "count": {"$sum": 1}, "since": {"$min": "$updated_at"}}
    found = yield Call("aggregate", [{"$match": {**here, **filters.READY}}, {"$group": group}])
    return (found[0]["count"], found[0]["since"]) if found else (0, None)
