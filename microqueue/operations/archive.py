"""Archive: take tasks out that are safe elsewhere, and find those that lived on meanwhile."""

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
"""Where a task may live on, in an order that misses none which moves meanwhile."""

LIFE_CODEC = CodecOptions[Any](uuid_representation=UuidRepresentation.STANDARD)


@dataclass(frozen=True)
class Purged:
    """How many tasks were deleted, and the archived documents whose tasks live on."""

    deleted: int = 0
    superseded: list[Document] = field(default_factory=list)


def purge(archived: Sequence[Document], *, now: datetime) -> Operation[Purged]:
    """Delete tasks that are archived, each only as the very version that was archived.

    A letter of ``tasks_dlq`` says so by its ``version``, and is deleted there. A task that was
    replayed since has another status, and when it is finished again, another ``updated_at``:
    it stays. Safe to repeat: what is gone is no longer matched.
    """
    deleted = 0
    for document in filter(_is_apart, archived):
        deleted += yield from dlq_collection.discard(document, now)
    others = sorted(filterfalse(_is_apart, archived), key=_status)
    for status, group in groupby(others, key=_status):
        result = yield Call("delete_many", _versions(list(group), status))
        deleted += result.deleted_count
    return Purged(deleted, (yield from _superseded(archived)))


def _is_apart(document: Document) -> bool:
    return _status(document) == filters.FAILED and "version" in document


def _status(document: Document) -> str:
    return str(document.get("status"))


def _versions(documents: Sequence[Document], status: str) -> Document:
    """Match tasks as they were archived.

    The stamps are listed apart from the ids, because one delete of a thousand is three times
    as fast as a thousand deletes. They all lie before the archive was read, so that a task
    which changed since has none of them.
    """
    stamps = {document.get("updated_at") for document in documents}
    ids = filters.any_of(document["_id"] for document in documents)
    return {**ids, "status": status, "updated_at": {"$in": list(stamps)}}


def _superseded(archived: Sequence[Document]) -> Operation[list[Document]]:
    """Find the archived documents whose tasks are still there, in a later version.

    A task that was added later under the same id is another one, and does not count. Both that
    it is there and that it is not are what a majority has: the log keeps it for good.
    """
    alive: set[Any] = set()
    for target in PLACES:
        left = [document for document in archived if _life(document) not in alive]
        some = {**filters.any_of(document["_id"] for document in left), "retired_at": None}
        if left and (yield from confirm.holds(some, target=target)):  # Most often all are gone.
            fences = [{**_same_life(document), "retired_at": None} for document in left]
            there = yield from confirm.which(fences, target=target)
            alive |= {_life(one) for one, sure in zip(left, there, strict=True) if sure}
    return [document for document in archived if _life(document) in alive]


def _same_life(document: Document) -> Document:
    names = ("_id", "created_at", "insert_token")
    return {name: {"$eq": document.get(name)} for name in names}


def _life(document: Document) -> tuple[Any, ...] | bytes:
    life = document["_id"], document.get("created_at"), document.get("insert_token")
    try:
        hash(life)
    except TypeError:  # An id that is a document itself.
        return bson.encode({"life": life}, codec_options=LIFE_CODEC)
    return life


def count_finished(
    queues: Sequence[str] | None,
    *,
    statuses: Sequence[str],
    before: datetime,
    target: Target = Target.TASKS,
) -> Operation[list[Document]]:
    """Count the tasks that finished before an instant, by queue and status."""
    matching: Document = {"status": {"$in": list(statuses)}, "finished_at": {"$lt": before}}
    if queues is not None:
        matching["queue"] = {"$in": list(queues)}
    group = {"_id": {"queue": "$queue", "status": "$status"}, "count": {"$sum": 1}}
    pipeline = [{"$match": matching}, {"$group": group}, {"$sort": {"_id": 1}}]
    found: list[Document] = yield Call("aggregate", pipeline, target=target)
    return [{**one["_id"], "count": one["count"]} for one in found]


def identify_collection(name: str) -> Operation[str | None]:
    """Give what tells this collection from all others, on any server; nothing if there is none."""
    request = {"listCollections": 1, "filter": {"name": name}, "authorizedCollections": True}
    reply = yield Call("command", request, target=Target.DATABASE)
    found = reply["cursor"]["firstBatch"]
    uuid = found[0].get("info", {}).get("uuid") if found else None
    return None if uuid is None else str(uuid)
