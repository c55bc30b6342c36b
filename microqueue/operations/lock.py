"""A lock that only saves work: every sweep is safe without it.

It is owned by a token and ends by itself, so a killed owner holds nobody up for long.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from microqueue.clock import later
from microqueue.operations.call import Call, Operation, Target


def acquire(
    name: str, *, token: str, owner: str, now: datetime, lifetime: timedelta
) -> Operation[bool]:
    """Take or renew the lock. Safe to repeat: the owner's token renews it."""
    free = {"_id": name, "$or": [{"token": token}, {"expires_at": {"$lte": now}}]}
    ends = later(now, lifetime)
    held = {"token": token, "owner": owner, "acquired_at": now, "expires_at": ends}
    try:
        document = yield Call(
            "find_one_and_update",
            free,
            {"$set": held},
            upsert=True,
            return_document=ReturnDocument.AFTER,
            target=Target.LOCKS,
        )
    except DuplicateKeyError:  # It exists, and is not free.
        return False
    return bool(document["token"] == token)


def release(name: str, *, token: str) -> Operation[None]:
    """Give the lock back, unless it ended and is another's by now."""
    yield Call("delete_one", {"_id": name, "token": token}, target=Target.LOCKS)
