"""Pauses: pause a queue, so that nothing is claimed from it until it is resumed."""

from __future__ import annotations

from datetime import datetime

from microqueue.model import trusted
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.reports import Pause


def pause(collection: str, queue: str, *, reason: str | None, now: datetime) -> Operation[Pause]:
    """Pause a queue. Safe to repeat: the start stays, and so does the reason if none is given."""
    yield Call(
        "update_one",
        {"_id": _key(collection, queue)},
        {
            "$set": {
                "collection": collection,
                "queue": queue,
                **({} if reason is None else {"reason": reason}),
            },
            "$setOnInsert": {"paused_at": now},
        },
        upsert=True,
        target=Target.PAUSES,
    )
    found = yield from paused(collection, queue)
    return found or Pause(queue=queue, paused_at=now, reason=reason)


def resume(collection: str, queue: str) -> Operation[bool]:
    """Resume a queue; return whether it was paused. Safe to repeat: it deletes at most once."""
    result = yield Call("delete_one", {"_id": _key(collection, queue)}, target=Target.PAUSES)
    return bool(result.deleted_count)


def paused(collection: str, queue: str) -> Operation[Pause | None]:
    """Return the pause of a queue, or None."""
    document = yield Call("find_one", {"_id": _key(collection, queue)}, target=Target.PAUSES)
    return _read(document) if document else None


def list_paused(collection: str) -> Operation[list[Pause]]:
    """Return the paused queues of a collection; there are few."""
    found = yield Call("find", {"collection": collection}, target=Target.PAUSES)
    return [_read(document) for document in found]


def key_prefix(collection: str) -> str:
    """Return what the ids of the pauses of a collection begin with."""
    return f"{collection}/"


def _key(collection: str, queue: str) -> str:
    return f"{key_prefix(collection)}{queue}"


def _read(document: Document) -> Pause:
    return trusted(
        Pause,
        queue=document["queue"],
        paused_at=document["paused_at"],
        reason=document.get("reason"),
    )
