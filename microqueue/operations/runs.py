"""Runs: record a named run, so that its work is done once however often it is started."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pymongo import ReturnDocument

from microqueue.operations import confirm
from microqueue.operations.call import Call, Document, Operation, Target


def begin(name: str, details: Document, now: datetime) -> Operation[Document]:
    """Record the start of a run; return the record, the first one if there are several starts.

    Safe to repeat: only the first call writes.
    """
    note = {"details": details, "begun_at": now, "finished_at": None}
    found: Document = yield Call(
        "find_one_and_update",
        {"_id": name},
        {"$setOnInsert": note},
        upsert=True,
        return_document=ReturnDocument.AFTER,
        target=Target.LOADS,
    )
    return found


def find(name: str) -> Operation[Document | None]:
    """Return the record of a run as a majority has it, or None if it never started."""
    return (yield from confirm.one({"_id": name}, target=Target.LOADS))


def finish(name: str, report: dict[str, Any], now: datetime) -> Operation[None]:
    """Record that a run is finished, with its report. Safe to repeat: the first report stays."""
    done = {"$set": {"finished_at": now, "report": report}}
    yield Call("update_one", {"_id": name, "finished_at": None}, done, target=Target.LOADS)
