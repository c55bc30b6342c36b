"""Load: add tasks in bulk so that a part that is written again changes nothing.

A held load is written with a far ``next_retry_at``, so that nobody claims it, and released in
one step. What it will have then is in ``held``, with the loads that hold it: a load that met
tasks of one that died takes part in holding them, and releases them with its own.
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
    """Insert tasks whose ids and tokens are fixed; give how many are new, and how many not.

    ``stored`` are the documents as they are encoded, if they are already, and ``ids`` what tells
    them apart, if it is at hand: documents are then looked at only where one is refused. What
    this load wrote itself, before it was interrupted, counts as new: the token tells. Of several
    rows with one id, the first counts.
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
        gone = yield from _take_part(met, hold=hold, settings=settings)
        places = [place for place in sorted(left_out) if chosen[place]["_id"] in gone]
        chosen, encoded = [chosen[one] for one in places], [encoded[one] for one in places]
    return inserted, len(documents) - inserted


def _take_part(
    documents: Sequence[Document], *, hold: str, settings: QueueSettings
) -> Operation[set[Any]]:
    """Hold what stands in the way of tasks; give the ids for which nothing is left to hold.

    A load that is given up takes away what it alone holds, at any time before this.
    """
    met = enqueue.in_the_way(documents)
    ours = {"$addToSet": {"held.by": hold}}
    yield Call("update_many", {**met, **HELD, "held": {"$exists": True}}, ours)
    # What another load has put there since then is not ours yet: it counts as gone.
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
    """Hold a task back until its load is released."""
    later = {"by": [load], "next_retry_at": document["next_retry_at"]}
    if "expires_at" in document:
        later["expires_at"] = document.pop("expires_at")
    return {**document, "next_retry_at": FAR, "held": later}


def release(queues: Sequence[str] | None, load: str, now: datetime) -> Operation[int]:
    """Make every task of a load claimable, as it would have been without being held."""
    restored = {
        "next_retry_at": "$held.next_retry_at",
        "expires_at": {"$ifNull": ["$held.expires_at", "$$REMOVE"]},
        "updated_at": now,
    }
    update = [{"$set": restored}, {"$unset": "held"}]
    result = yield Call("update_many", _held_by(queues, load), update, span=Span.LONGEST)
    return int(result.modified_count)


def abandon(queues: Sequence[str] | None, load: str) -> Operation[int]:
    """Delete what only this load holds, and let go of the rest."""
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
    """Write down what a load did; a second time changes nothing."""
    yield Call("replace_one", {"_id": load}, report, upsert=True, target=Target.LOADS)


def take_report(load: str) -> Operation[Any]:
    """Read what a load did, and forget it."""
    return (yield Call("find_one_and_delete", {"_id": load}, target=Target.LOADS, repeatable=False))
