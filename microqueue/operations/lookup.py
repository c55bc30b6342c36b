"""Lookup: find tasks by id, and list the newest ones. Everything here is read-only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from microqueue.operations import filters, paging
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.settings import QueueSettings
from microqueue.task import DEFAULT_QUEUE, TaskStatus
from microqueue.task_ids import id_key, id_sort_key


def get(task_id: Any, settings: QueueSettings, session: Any = None) -> Operation[Document | None]:
    """Return one task by its id, also from the DLQ collection."""
    document: Document | None = yield Call("find_one", {"_id": {"$eq": task_id}}, session=session)
    if document is None and settings.separate_dlq:
        dead = {"_id": {"$eq": task_id}, "status": filters.FAILED}  # Not a tombstone.
        document = yield Call("find_one", dead, target=Target.DEAD_LETTERS, session=session)
    return document


def find_first(candidates: Sequence[Any], settings: QueueSettings) -> Operation[Document | None]:
    """Return the task of the first of these ids that exists."""
    for task_id in candidates:
        document = yield from get(task_id, settings)
        if document is not None:
            return document
    return None


def first_existing(
    candidates: Sequence[Sequence[Any]], settings: QueueSettings
) -> Operation[list[Any]]:
    """Return of each group of ids the first that exists, or the first if none does."""
    unclear = [one for several in candidates if len(several) > 1 for one in several]
    existing: set[Any] = set()
    for target in dict.fromkeys(paging.dead_letter_targets(settings)) if unclear else ():
        found = yield Call("find", filters.any_of(unclear), {"_id": 1}, target=target)
        existing |= {document["_id"] for document in found}
    return [next((one for one in several if one in existing), several[0]) for several in candidates]


def queues_of(ids: Iterable[Any], settings: QueueSettings) -> Operation[dict[Any, str]]:
    """Return the queue of each of these tasks that exists, by the key of its id.

    A dead letter may move between the two collections while they are read, any number of times.
    Each move leaves another version in ``tasks_dlq``. So a task that is not in ``tasks`` is missing
    only if the version is the same before and after.
    """
    found: dict[Any, str] = {}
    left = list(ids)
    versions: dict[Any, Any] | None = None
    while left:
        documents = yield Call("find", filters.any_of(left), {"queue": 1})
        found |= {id_key(one["_id"]): _queue_of(one) for one in documents}
        left = [one for one in left if id_key(one) not in found]
        if not left or not settings.separate_dlq:
            break
        fields = {"queue": 1, "status": 1, "version": 1}
        copies = yield Call("find", filters.any_of(left), fields, target=Target.DEAD_LETTERS)
        # A tombstone has no status.
        dead = [one for one in copies if one.get("status") == filters.FAILED]
        found |= {id_key(one["_id"]): _queue_of(one) for one in dead}
        before, versions = (
            versions,
            {id_key(one["_id"]): one.get("version") for one in copies},
        )
        left = [
            one
            for one in left
            if (key := id_key(one)) not in found
            and (before is None or before.get(key) != versions.get(key))
        ]
    return found


def _queue_of(document: Document) -> str:
    return str(document.get("queue", DEFAULT_QUEUE))


def peek(
    queue: filters.Queues,
    *,
    status: TaskStatus | None,
    name: str | None,
    limit: int,
    settings: QueueSettings,
) -> Operation[list[Document]]:
    """Return the newest tasks of some queues, also from the DLQ collection."""
    selection: Document = filters.of(queue) | filters.named(name)
    if status is TaskStatus.PROCESSING:
        selection |= filters.LEASED  # Few at any time, and they have their own index.
    elif status is not None:
        selection["status"] = status.value
    targets = [Target.TASKS]
    if status in {None, TaskStatus.FAILED}:
        targets = paging.dead_letter_targets(settings)
    order = [("created_at", -1), ("_id", -1)]
    found: dict[Any, Document] = {}
    for target in targets:
        # A tombstone in ``tasks_dlq`` has no queue, so it does not match.
        for document in (yield Call("find", selection, sort=order, limit=limit, target=target)):
            found[id_key(document["_id"])] = document
    if len(targets) == 1:
        return list(found.values())

    def age(document: Document) -> tuple[Any, ...]:
        created_at = document.get("created_at") or datetime.fromtimestamp(0, UTC)
        return created_at, *id_sort_key(document["_id"])

    return sorted(found.values(), key=age, reverse=True)[:limit]
