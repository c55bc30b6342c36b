"""Audit: the log of manual actions: the user, the action, the time, and how many tasks."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from bson import ObjectId
from pymongo import IndexModel

from microqueue.arguments import invalid_argument
from microqueue.model import trusted
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.operations.indexes import NEVER_SEC, ensure_indexes
from microqueue.reports import AuditEntry, AuditPage


def prepare(retention: timedelta, *, adjust: bool) -> Operation[list[str]]:
    """Create the index that deletes entries after the retention, or adjust it. Safe to repeat.

    Without ``adjust``, an existing index stays as it is.
    """
    kept_sec = min(int(retention.total_seconds()), NEVER_SEC)
    index = IndexModel([("at", 1)], name="kept", expireAfterSeconds=kept_sec)
    place = "microqueue_audit"
    return (yield from ensure_indexes([index], place, target=Target.AUDIT, adjust=adjust))


def record(entry: AuditEntry, collection: str) -> Operation[None]:
    """Store an entry. Safe to repeat: its id is fixed before."""
    document = {**entry.model_dump(exclude={"id"}), "collection": collection}
    chosen = {"_id": ObjectId(entry.id)}
    yield Call("update_one", chosen, {"$set": document}, upsert=True, target=Target.AUDIT)


def page(collection: str, *, now: datetime, limit: int, cursor: str | None) -> Operation[AuditPage]:
    """Return one page of entries, newest first, by the index of their ids."""
    query: Document = {"collection": collection}
    if cursor is not None:
        if not ObjectId.is_valid(cursor):
            raise invalid_argument("cursor", cursor, "give the next_cursor of a page")
        query["_id"] = {"$lt": ObjectId(cursor)}
    found = yield Call("find", query, sort=[("_id", -1)], limit=limit + 1, target=Target.AUDIT)
    items = [_read(document) for document in found[:limit]]
    more = len(found) > limit
    return trusted(AuditPage, at=now, items=items, next_cursor=items[-1].id if more else None)


def newest(collection: str) -> Operation[str | None]:
    """Return the id of the newest entry, to notice a new one."""
    chosen = {"collection": collection}
    order = [("_id", -1)]
    found = yield Call("find", chosen, {"_id": 1}, sort=order, limit=1, target=Target.AUDIT)
    return str(found[0]["_id"]) if found else None


def _read(document: Document) -> AuditEntry:
    get: Any = document.get
    fields = {name: get(name) for name in AuditEntry.model_fields if name != "id"}
    return trusted(AuditEntry, id=str(document["_id"]), **fields)
