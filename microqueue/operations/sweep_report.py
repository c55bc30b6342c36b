"""Keep the last report of a sweep beside the sweeper's lock, for those who look on."""

from __future__ import annotations

from microqueue.operations.call import Call, Document, Operation, Target


def store(collection: str, report: Document, *, active: bool, last: bool = True) -> Operation[None]:
    """Store a report as the last one, and as the last that moved something if it did.

    Not as the ``last`` one if another sweeper took over, as its report may be there already.
    Safe to repeat: it writes the same again.
    """
    changes = {**({"last": report} if last else {}), **({"last_active": report} if active else {})}
    if not changes:
        return
    yield Call(
        "update_one",
        {"_id": _name(collection)},
        {"$set": changes},
        upsert=True,
        target=Target.LOCKS,
    )


def read(collection: str) -> Operation[tuple[Document | None, Document | None]]:
    """Read the last report, and the last of a sweep that moved something."""
    document = yield Call("find_one", {"_id": _name(collection)}, target=Target.LOCKS)
    found = document or {}
    return found.get("last"), found.get("last_active")


def _name(collection: str) -> str:
    return f"report:{collection}"
