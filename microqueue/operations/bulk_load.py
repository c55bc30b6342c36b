"""Bulk load: add many tasks so that a part that is written again changes nothing.

A held load is written with a ``next_retry_at`` in the far future, so that no task of it is
claimed, and released in one step. The field ``held`` has the values that a task gets at its
release, and the loads that hold it. A load that meets tasks of a load that died joins in holding
them, and releases them with its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from datetime import datetime
from typing import Any

from microqueue.operations import confirm, enqueue, filters
from microqueue.operations.call import Call, Document, Operation, Span, Target
from microqueue.settings import QueueSettings
from microqueue.task_ids import id_key

FAR = filters.FAR

HELD: Document = {
    "status": filters.PENDING,
    "deadline_at": {**filters.IS_DATE, "$eq": FAR},
    "next_retry_at": FAR,
}


def insert_chunk(
    documents: Sequence[Document],
    *,
    settings: QueueSettings,
    hold: str | None,
    encoded: Sequence[Any] | None = None,
    ids: Sequence[Any] | None = None,
) -> Operation[tuple[int, int]]:
    """Insert tasks whose ids and tokens are fixed; return how many are new, and how many are not.

    Safe to repeat: what this load wrote before it was interrupted has its token, and counts as
    new, even if it has failed since. Of several rows with one id, the first counts.

    Args:
        documents: The tasks.
        settings: The settings of the queue.
        hold: The name of the load that holds the tasks, or None if they are claimable at once.
        encoded: The encoded documents, if there are any.
        ids: The ids, if they are at hand, so that documents need not be decoded for them.
    """
    chosen: Sequence[Document] = documents
    encoded = documents if encoded is None else encoded
    if ids is None:
        ids = [document["_id"] for document in documents]
    keys = [id_key(task_id) for task_id in ids]
    if len(set(keys)) < len(keys):
        backwards = reversed(list(enumerate(keys)))
        firsts = sorted({key: index for index, key in backwards}.values())
        chosen = [documents[index] for index in firsts]
        encoded = [encoded[index] for index in firsts]
    inserted = 0
    while chosen:
        left_out = yield from enqueue.enqueue_many(chosen, encoded=encoded, settings=settings)
        inserted += len(chosen) - len(left_out)
        if hold is None or not left_out:
            break
        met = [chosen[index] for index in left_out]
        gone = yield from _join_hold(met, hold=hold, settings=settings)
        again = [index for index in sorted(left_out) if id_key(chosen[index]["_id"]) in gone]
        chosen, encoded = [chosen[index] for index in again], [encoded[index] for index in again]
    return inserted, len(documents) - inserted


def _join_hold(
    documents: Sequence[Document], *, hold: str, settings: QueueSettings
) -> Operation[set[Hashable]]:
    """Hold the tasks that block these; return the keys of the ids that nothing blocks any more.

    A load that is abandoned deletes what it alone holds, at any time before this.
    """
    met = enqueue.blocking(documents)
    ours = {"$addToSet": {"held.by": hold}}
    yield Call("update_many", {**met, **HELD, "held": {"$exists": True}}, ours)
    # What another load inserted since then is not held by this one: it counts as gone.
    theirs = {**HELD, "held": {"$exists": True}, "held.by": {"$ne": hold}}
    found = yield from confirm.some({**met, "$nor": [theirs]}, {"queue": 1, "dedupe_key": 1})
    known = yield from enqueue.find_dead_letters(documents, settings)
    ids = {*known.taken, *(id_key(one["_id"]) for one in found)}
    keys = {(one["queue"], one["dedupe_key"]) for one in found if "dedupe_key" in one}
    return {
        key
        for document in documents
        if (key := id_key(document["_id"])) not in ids
        and (document["queue"], document.get("dedupe_key")) not in keys
    }


def held(document: Document, load: str) -> Document:
    """Return the document of a task that is held until its load is released."""
    later = {"by": [load], "next_retry_at": document["next_retry_at"]}
    if "expires_at" in document:
        later["expires_at"] = document.pop("expires_at")
    return {**document, "next_retry_at": FAR, "deadline_at": FAR, "held": later}


def release(queues: Sequence[str] | None, load: str, now: datetime) -> Operation[int]:
    """Make every task of a load claimable, as it would be without the hold; return how many.

    Safe to repeat: a released task no longer matches.
    """
    restored = {
        "next_retry_at": "$held.next_retry_at",
        "expires_at": {"$ifNull": ["$held.expires_at", "$$REMOVE"]},
        "deadline_at": {"$min": ["$held.next_retry_at", "$held.expires_at"]},
        "updated_at": now,
    }
    update = [{"$set": restored}, {"$unset": "held"}]
    result = yield Call("update_many", _held_by(queues, load), update, span=Span.LONGEST)
    return int(result.modified_count)


def abandon(queues: Sequence[str] | None, load: str) -> Operation[int]:
    """Delete the tasks that only this load holds, and stop holding the others.

    Safe to repeat: the writes match only what this load still holds.
    """
    alone = {**_held_by(queues, load), "held.by": [load]}
    result = yield Call("delete_many", alone, span=Span.LONGEST)
    update = {"$pull": {"held.by": load}}
    yield Call("update_many", _held_by(queues, load), update, span=Span.LONGEST)
    return int(result.deleted_count)


def _held_by(queues: Sequence[str] | None, load: str) -> Document:
    # The index of deadlines has those of a queue side by side, at the far end.
    names = {"$gt": ""} if queues is None else {"$in": list(queues)}
    return {"queue": names, **HELD, "held.by": load}


def save_report(load: str, report: Document) -> Operation[None]:
    """Store the report of a load. Safe to repeat: it writes the same again."""
    yield Call("replace_one", {"_id": load}, report, upsert=True, target=Target.LOADS)


def take_report(load: str) -> Operation[Any]:
    """Return the report of a load, and delete it."""
    return (yield Call("find_one_and_delete", {"_id": load}, target=Target.LOADS, repeatable=False))
