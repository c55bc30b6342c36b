"""Bulk load: add many tasks so that a part that is written again changes nothing.

A held load is written with a ``next_retry_at`` in the far future, so that no task of it is
claimed, and released in one step. The field ``held`` has the values that a task gets at its
release, and the loads that hold it. A load that meets tasks of a load that died joins in holding
them, and releases them with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from microqueue.operations import confirm, enqueue, filters
from microqueue.operations.call import Call, Document, Operation, Span, Target
from microqueue.settings import QueueSettings

FAR = datetime(9999, 1, 1, tzinfo=UTC)
"""When a held task would come due by itself."""

HELD: Document = {"status": filters.PENDING, "next_retry_at": FAR}


def insert_chunk(
    documents: Sequence[Document],
    *,
    settings: QueueSettings,
    hold: str | None,
    stored: Sequence[Any] | None = None,
    ids: Sequence[Any] | None = None,
) -> Operation[tuple[int, int]]:
    """Insert tasks whose ids and tokens are fixed; return how many are new, and how many are not.

    Safe to repeat: what this load wrote before it was interrupted has its token, and counts as
    new. Of several rows with one id, the first counts.

    Args:
        documents: The tasks.
        settings: The settings of the queue.
        hold: The name of the load that holds the tasks, or None if they are claimable at once.
        stored: The encoded documents, if there are any.
        ids: The ids, if they are at hand, so that documents need not be decoded for them.
    """
    chosen: Sequence[Document] = documents
    encoded: Sequence[Any] = documents if stored is None else stored
    if ids is None:
        ids = [document["_id"] for document in documents]
    if len(set(ids)) < len(ids):
        backwards = reversed(list(enumerate(ids)))
        firsts = sorted({one: place for place, one in backwards}.values())
        chosen = [documents[place] for place in firsts]
        encoded = [encoded[place] for place in firsts]
    inserted = 0
    while chosen:
        left_out = yield from enqueue.enqueue_many(chosen, stored=encoded, settings=settings)
        inserted += len(chosen) - len(left_out)
        if hold is None or not left_out:
            break
        met = [chosen[place] for place in left_out]
        gone = yield from _join_hold(met, hold=hold, settings=settings)
        places = [place for place in sorted(left_out) if chosen[place]["_id"] in gone]
        chosen, encoded = [chosen[one] for one in places], [encoded[one] for one in places]
    return inserted, len(documents) - inserted


def _join_hold(
    documents: Sequence[Document], *, hold: str, settings: QueueSettings
) -> Operation[set[Any]]:
    """Hold the tasks that block these; return the ids of those that nothing blocks any more.

    A load that is abandoned deletes what it alone holds, at any time before this.
    """
    met = enqueue.blocking(documents)
    ours = {"$addToSet": {"held.by": hold}}
    yield Call("update_many", {**met, **HELD, "held": {"$exists": True}}, ours)
    # What another load inserted since then is not held by this one: it counts as gone.
    theirs = {**HELD, "held": {"$exists": True}, "held.by": {"$ne": hold}}
    found = yield from confirm.some({**met, "$nor": [theirs]}, {"queue": 1, "dedupe_key": 1})
    known = yield from enqueue.find_dead_letters(documents, settings)
    ids = {*known.taken, *(one["_id"] for one in found)}
    keys = {(one["queue"], one["dedupe_key"]) for one in found if "dedupe_key" in one}
    return {
        document["_id"]
        for document in documents
        if document["_id"] not in ids
        and (document["queue"], document.get("dedupe_key")) not in keys
    }


def held(document: Document, load: str) -> Document:
    """Return the document of a task that is held until its load is released."""
    later = {"by": [load], "next_retry_at": document["next_retry_at"]}
    if "expires_at" in document:
        later["expires_at"] = document.pop("expires_at")
    return {**document, "next_retry_at": FAR, "held": later}


def release(queues: Sequence[str] | None, load: str, now: datetime) -> Operation[int]:
    """Make every task of a load claimable, as it would be without the hold; return how many.

    Safe to repeat: a released task no longer matches.
    """
    restored = {
        "next_retry_at": "$held.next_retry_at",
        "expires_at": {"$ifNull": ["$held.expires_at", "$$REMOVE"]},
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
    # The index of delayed tasks has those of a queue side by side, at the far end.
    names = {"$gt": ""} if queues is None else {"$in": list(queues)}
    return {"queue": names, **HELD, "held.by": load}


def save_report(load: str, report: Document) -> Operation[None]:
    """Store the report of a load. Safe to repeat: it writes the same again."""
    yield Call("replace_one", {"_id": load}, report, upsert=True, target=Target.LOADS)


def take_report(load: str) -> Operation[Any]:
    """Return the report of a load, and delete it."""
    return (yield Call("find_one_and_delete", {"_id": load}, target=Target.LOADS, repeatable=False))
