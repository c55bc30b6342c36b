"""Runs: remember what was begun under a name, so that it is done once however often it starts."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pymongo import ReturnDocument

from microqueue.operations import confirm
from microqueue.operations.call import Call, Document, Operation, Target


def begin(name: str, details: Document, now: datetime) -> Operation[Document]:
    """Note that a run begins, and give the note: that of the first time, if there is one."""
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
    """Read the note of a run, if it ever began, as a majority has it."""
    return (yield from confirm.one({"_id": name}, target=Target.LOADS))


def finish(name: str, report: dict[str, Any], now: datetime) -> Operation[None]:
    """Note that a run is through, and what it did. The first report stays."""
    done = {"$set": {"finished_at": now, "report": report}}
    yield Call("update_one", {"_id": name, "finished_at": None}, done, target=Target.LOADS)
