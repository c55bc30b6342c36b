"""Dedupe keys that last for a period, also after their task is done, failed or deleted.

``microqueue_dedupe_keys`` has a document for each such key: its task, and until when it is taken.
A task with a period is stored in three steps:

1. The task is inserted *reserved*: it is not delivered. The unique index of the keys of live tasks
   admits no second one, so no other task can take the key in between.
2. Its key is inserted.
3. The task is released. If another task holds the key, it is deleted instead.

A producer may die between any two. The next one that meets a reserved task performs the steps that
are left, except the deletion. If none comes within ``RESERVED``, the task expires: a dead letter
that was never delivered, and whose key is free. So a key never outlasts a task that was not
delivered, and a task is delivered only if it has its key. Every step is safe to repeat: the insert
token identifies the task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError

from microqueue.clock import later
from microqueue.operations import confirm, filters
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.operations.mongo_errors import only_duplicates
from microqueue.operations.paging import dead_letter_targets
from microqueue.settings import QueueSettings
from microqueue.task_ids import id_key

RESERVED = timedelta(minutes=5)
"""How long a reserved task waits for a producer that completes it."""
RESERVED_FIELDS = dict.fromkeys(
    ["status", "insert_token", "next_retry_at", "reserving", "dedupe_until"], 1
)


class Name(NamedTuple):
    """A dedupe key of a queue."""

    queue: str
    key: str


def name_of(document: Document) -> Name:
    """Return the dedupe key of a task."""
    return Name(document["queue"], document["dedupe_key"])


def key_id(collection: str, name: Name) -> Document:
    """Return the id of a key's document; the order of its fields counts."""
    return {"collection": collection, "queue": name.queue, "key": name.key}


def of_collection(collection: str) -> Document:
    """Match the keys of a collection of tasks."""
    return {"_id.collection": collection}


def has_period(document: Document) -> bool:
    """Return whether the key of a new task lasts for a period."""
    return "dedupe_until" in document


def reserved(document: Document, collection: str) -> Document:
    """Return the document of a task that is not delivered until it is released."""
    expires_at = later(document["created_at"], RESERVED)
    then: Document = {
        "key": key_id(collection, name_of(document)),
        "next_retry_at": document["next_retry_at"],
    }
    if "expires_at" in document:
        then["expires_at"] = document["expires_at"]
    return {
        **document,
        "next_retry_at": filters.FAR,
        "expires_at": expires_at,
        "deadline_at": expires_at,
        "reserving": then,
    }


def is_reserved(document: Document) -> bool:
    """Return whether a stored task was never released, whatever its status."""
    then = document.get("reserving")
    return isinstance(then, dict) and document.get("next_retry_at") == filters.FAR


def find_holders(
    collection: str,
    names: Iterable[Name],
    *,
    now: datetime,
    settings: QueueSettings,
    session: Any = None,
) -> Operation[dict[Name, Document]]:
    """Return the documents of the keys that are taken, as a majority has them.

    Keys whose period is over are deleted, and those of tasks that expired before they were
    released. A reserved task that has its key is released.
    """
    ids = [key_id(collection, name) for name in dict.fromkeys(names)]
    for _ in range(confirm.ROUNDS):
        keys: list[Document] = yield Call(
            "find", filters.any_of(ids), target=Target.DEDUPE_KEYS, session=session
        )
        taken = [key for key in keys if key["until"] > now]
        tasks = yield from _find_tasks(taken, settings, session)
        free = [key for key in keys if key["until"] <= now]
        free += [key for key in taken if _is_abandoned(key, tasks)]
        for key in free:
            these = {"_id": {"$eq": key["_id"]}, "token": key["token"]}
            yield Call("delete_one", these, target=Target.DEDUPE_KEYS, session=session)
        held = [key for key in taken if key not in free]
        if session is None:
            yield from _release([one for key in held if (one := _task_of(key, tasks))])
            proofs = [{"_id": {"$eq": key["_id"]}, "token": key["token"]} for key in held]
            if not (yield from confirm.all_hold(proofs, target=Target.DEDUPE_KEYS)):
                continue
        return {Name(key["_id"]["queue"], key["_id"]["key"]): key for key in held}
    raise confirm.keeps_changing()


def _find_tasks(
    keys: Sequence[Document], settings: QueueSettings, session: Any
) -> Operation[dict[Any, Document]]:
    """Return the tasks of some keys that exist, by their ids."""
    tasks: dict[Any, Document] = {}
    if not keys:
        return tasks
    these = filters.any_of(key["task_id"] for key in keys)
    for target in dict.fromkeys(dead_letter_targets(settings)):
        found = yield Call("find", these, RESERVED_FIELDS, target=target, session=session)
        tasks = {**{id_key(task["_id"]): task for task in found}, **tasks}
    return tasks


def _task_of(key: Document, tasks: dict[Any, Document]) -> Document | None:
    task = tasks.get(id_key(key["task_id"]))
    return task if task is not None and task.get("insert_token") == key["token"] else None


def _is_abandoned(key: Document, tasks: dict[Any, Document]) -> bool:
    """Return whether the task of a key ended before it was released."""
    task = _task_of(key, tasks)
    return task is not None and is_reserved(task) and task.get("status") != filters.PENDING


def key_document(document: Document, collection: str) -> Document:
    """Return the document of the key of a task."""
    return {
        "_id": key_id(collection, name_of(document)),
        "task_id": document["_id"],
        "token": document["insert_token"],
        "until": document["dedupe_until"],
    }


def complete(
    tasks: Sequence[Document], *, now: datetime, settings: QueueSettings
) -> Operation[list[Document | None]]:
    """Take the keys of reserved tasks, and release those that got theirs.

    Returns for each task the key that another task holds, or None if it has its key.
    """
    holders: list[Document | None] = [None] * len(tasks)
    left = list(range(len(tasks)))
    for _ in range(confirm.ROUNDS):
        if not left:
            break
        keys = [_key_of(tasks[place]) for place in left]
        try:
            yield Call("insert_many", keys, ordered=False, target=Target.DEDUPE_KEYS)
            left = []
        except BulkWriteError as exc:
            left = [left[place] for place in only_duplicates(exc)]
        if not left:
            break
        collection = tasks[left[0]]["reserving"]["key"]["collection"]
        names = {place: _name_in(tasks[place]) for place in left}
        held = yield from find_holders(collection, names.values(), now=now, settings=settings)
        for place in left:
            key = held.get(names[place])
            if key is not None and not is_key_of(key, tasks[place]):
                holders[place] = key
        left = [place for place in left if names[place] not in held]
    if left:
        raise confirm.keeps_changing()
    yield from _release([task for task, key in zip(tasks, holders, strict=True) if key is None])
    return holders


def _key_of(task: Document) -> Document:
    return {
        "_id": task["reserving"]["key"],
        "task_id": task["_id"],
        "token": task["insert_token"],
        "until": task["dedupe_until"],
    }


def is_key_of(key: Document, task: Document) -> bool:
    """Return whether a key was taken for this very task."""
    same_id = id_key(key["task_id"]) == id_key(task["_id"])
    return same_id and key["token"] == task["insert_token"]


def _name_in(task: Document) -> Name:
    key = task["reserving"]["key"]
    return Name(key["queue"], key["key"])


def _release(tasks: Sequence[Document]) -> Operation[None]:
    """Let reserved tasks be delivered; others are left alone."""
    updates = []
    for task in tasks:
        if not is_reserved(task) or task.get("status") != filters.PENDING:
            continue
        then = task["reserving"]
        changes: Document = {
            "next_retry_at": then["next_retry_at"],
            "deadline_at": filters.waiting_deadline(then["next_retry_at"], then.get("expires_at")),
        }
        gone = {"reserving": ""}
        if "expires_at" in then:
            changes["expires_at"] = then["expires_at"]
        else:
            gone["expires_at"] = ""
        updates.append(UpdateOne(_still_reserved(task), {"$set": changes, "$unset": gone}))
    if updates:
        yield Call("bulk_write", updates, ordered=False)


def withdraw(task: Document) -> Operation[bool]:
    """Delete a reserved task that did not get its key; return whether it is gone.

    A helper may have released it already, because the other key's period ended: then it stays.
    """
    yield Call("delete_one", _still_reserved(task))
    stored = {"_id": {"$eq": task["_id"]}, "insert_token": task["insert_token"]}
    if (yield from confirm.holds(stored)):
        return False
    # A helper may have taken the key for it.
    ours = {"_id": {"$eq": task["reserving"]["key"]}, "token": task["insert_token"]}
    yield Call("delete_one", ours, target=Target.DEDUPE_KEYS)
    return True


def _still_reserved(task: Document) -> Document:
    return {
        "_id": {"$eq": task["_id"]},
        "insert_token": task["insert_token"],
        "status": filters.PENDING,
        "next_retry_at": filters.FAR,
    }


def forget(document: Document, collection: str) -> Operation[None]:
    """Free the key of a task that was cancelled. Safe to repeat: another task's key stays."""
    ours = {
        "_id": {"$eq": key_id(collection, name_of(document))},
        "token": document.get("insert_token"),
    }
    yield Call("delete_one", ours, target=Target.DEDUPE_KEYS)
