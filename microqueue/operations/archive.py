"""Archive: delete tasks that are archived, and find those that changed since.

Each delete matches only the version that was archived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import filterfalse, groupby
from typing import Any

import bson
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions

from microqueue.operations import confirm, dlq_collection, filters
from microqueue.operations.call import Call, Document, Operation, Target

FINISHED_STATUSES = (filters.DONE, filters.FAILED)
PLACES = (Target.TASKS, Target.DEAD_LETTERS, Target.TASKS)
"""Where a task may be, in an order that misses none that moves in between."""

LIFE_CODEC = CodecOptions[Any](uuid_representation=UuidRepresentation.STANDARD)


@dataclass(frozen=True)
class Purged:
    """How many tasks were deleted, and the archived documents whose tasks still exist."""

    deleted: int = 0
    superseded: list[Document] = field(default_factory=list)


def delete_archived(archived: Sequence[Document], *, now: datetime) -> Operation[Purged]:
    """Delete tasks that are archived, each only in the version that was archived.

    A dead letter of ``tasks_dlq`` has a ``version``, and is deleted there. A task that was replayed
    since has another status or, finished again, another ``updated_at``: it stays. Safe to repeat:
    what is deleted no longer matches.
    """
    deleted = 0
    for document in filter(_is_in_dlq, archived):
        deleted += yield from dlq_collection.discard(document, now)
    others = sorted(filterfalse(_is_in_dlq, archived), key=_status)
    for status, group in groupby(others, key=_status):
        result = yield Call("delete_many", _versions(list(group), status))
        deleted += result.deleted_count
    return Purged(deleted, (yield from _superseded(archived)))


def _is_in_dlq(document: Document) -> bool:
    return _status(document) == filters.FAILED and "version" in document


def _status(document: Document) -> str:
    return str(document.get("status"))


def _versions(documents: Sequence[Document], status: str) -> Document:
    """Match tasks as they were archived.

    Ids and stamps are two lists, because one delete of a thousand tasks is three times as fast as
    a thousand deletes. All stamps are older than the archive, so a task that changed since has
    none of them.
    """
    stamps = {document.get("updated_at") for document in documents}
    ids = filters.any_of(document["_id"] for document in documents)
    return {**ids, "status": status, "updated_at": {"$in": list(stamps)}}


def _superseded(archived: Sequence[Document]) -> Operation[list[Document]]:
    """Return the archived documents whose tasks still exist, in a later version.

    A later task with the same id is another one, and does not count. A majority has either
    answer, because the archive's log is final.
    """
    alive: set[Any] = set()
    for target in PLACES:
        left = [document for document in archived if _life(document) not in alive]
        some = {**filters.any_of(document["_id"] for document in left), "retired_at": None}
        if left and (yield from confirm.holds(some, target=target)):  # Most often all are gone.
            proofs = [{**_same_life(document), "retired_at": None} for document in left]
            there = yield from confirm.which(proofs, target=target)
            alive |= {_life(one) for one, sure in zip(left, there, strict=True) if sure}
    return [document for document in archived if _life(document) in alive]


def _same_life(document: Document) -> Document:
    names = ("_id", "created_at", "insert_token")
    return {name: {"$eq": document.get(name)} for name in names}


def _life(document: Document) -> bytes:
    """Return a key of one task, whatever its id: a later task may have the same id."""
    life = document["_id"], document.get("created_at"), document.get("insert_token")
    return bson.encode({"life": life}, codec_options=LIFE_CODEC)


def count_finished(
    queues: Sequence[str] | None,
    *,
    statuses: Sequence[str],
    before: datetime,
    target: Target = Target.TASKS,
) -> Operation[list[Document]]:
    """Count tasks that finished before an instant, by queue and status."""
    matching: Document = {"status": {"$in": list(statuses)}, "finished_at": {"$lt": before}}
    if queues is not None:
        matching["queue"] = {"$in": list(queues)}
    group = {"_id": {"queue": "$queue", "status": "$status"}, "count": {"$sum": 1}}
    pipeline = [{"$match": matching}, {"$group": group}, {"$sort": {"_id": 1}}]
    found: list[Document] = yield Call("aggregate", pipeline, target=target)
    return [{**one["_id"], "count": one["count"]} for one in found]


def identify_collection(name: str) -> Operation[str | None]:
    """Return the UUID of a collection, or None if it does not exist."""
    request = {"listCollections": 1, "filter": {"name": name}, "authorizedCollections": True}
    reply = yield Call("command", request, target=Target.DATABASE)
    found = reply["cursor"]["firstBatch"]
    uuid = found[0].get("info", {}).get("uuid") if found else None
    return None if uuid is None else str(uuid)
