"""Claim: promote what is due, then take the head of the line under a lease."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from bson import Int64
from pymongo import ReturnDocument
from pymongo.errors import OperationFailure, PyMongoError

from microqueue.clock import LARGEST_SKEW, round_up
from microqueue.operations import confirm, filters, mongo_errors
from microqueue.operations.call import Call, Document, Operation
from microqueue.operations.settle import INVALID_TASK
from microqueue.task import Lease

WINDOWS = 16
DUE_ORDER = [("next_retry_at", 1)]
GOOD_IDS = "give an ObjectId, a string, an integer or a UUID"
MALFORMED: dict[str, Document] = {
    # A list of numbers has the type of a number, too.
    "attempts is not a number": {
        "$or": [{"attempts": {"$not": {"$type": "number"}}}, {"attempts": {"$type": "array"}}]
    },
    f"_id is a document: {GOOD_IDS}": {"_id": {"$type": "object"}},
}
_random = random.Random()  # noqa: S311 (it only spreads workers)


def promote_due(queue: str, now: datetime, *, limit: int) -> Operation[int]:
    """Make delayed tasks ready whose time has come. Safe to repeat: each is guarded.

    The ids are read first because an update of many cannot be limited.
    """
    selection = {"queue": queue, **filters.due(now)}
    found = yield Call("find", selection, {"_id": 1}, sort=DUE_ORDER, limit=limit)
    return (yield from promote(found, selection, now)) if found else 0


def promote(found: Iterable[Document], selection: Document, now: datetime) -> Operation[int]:
    """Make these tasks ready, as far as they still match; return how many."""
    result = yield Call(
        "update_many",
        {**filters.any_of(document["_id"] for document in found), **selection},
        {"$set": {"next_retry_at": None, "updated_at": now}},
    )
    return int(result.modified_count)


def pop(queue: str, lease: Lease) -> Operation[Document | None]:
    """Claim the first ready task with one atomic write.

    Not safe to repeat blindly: a claim whose reply was lost would stay leased to nobody.
    So after a lost connection, or a step-down, the token tells whether a majority has the claim;
    if it cannot be told, the error surfaces, and a claim that did go through comes back by its
    lease.
    """
    return (yield from _claim_one({"queue": queue, **filters.READY}, lease))


def _claim_one(selection: Document, lease: Lease) -> Operation[Document | None]:
    try:
        document: Document | None = yield Call(
            "find_one_and_update",
            selection,
            claim_update(lease),
            sort=filters.READY_ORDER,
            return_document=ReturnDocument.AFTER,
            repeatable=False,
        )
    except PyMongoError as exc:
        if mongo_errors.is_uncertain(exc):
            document = yield from confirm.one(claimed_under(lease))
            if document is None:
                raise
            return document
        if not isinstance(exc, OperationFailure) or exc.code != mongo_errors.TYPE_MISMATCH:
            raise
        yield from _bury_malformed(selection, lease.started_at)
        return (yield from _claim_one(selection, lease))
    return document


class Spread:
    """How far workers keep apart when several claim from the same line.

    Each reads a window of the line at random, among as many as there seem to be workers:
    more after a window that others had taken from, fewer after some that nobody had. Where a
    window starts is judged by the positions read last, and found by the index; skipping
    would read all that is skipped.
    """

    CALM = 8

    def __init__(self) -> None:
        self._windows = 1
        self._undisturbed = 0
        self._last: tuple[Any, int, int] | None = None

    def start(self) -> Document:
        """Draw where to read next: a filter, empty for the head of the line."""
        window = _random.randrange(self._windows)
        if window == 0 or self._last is None:
            return {}
        priority, position, span = self._last
        return {"priority": priority, "position": {"$gt": position + (window - 1) * span}}

    def read(self, window: list[Document], claimed: int) -> None:
        """Learn from a window, and from how much of it was still there."""
        first, last = window[0].get("position"), window[-1].get("position")
        if isinstance(first, int) and isinstance(last, int):
            self._last = window[-1].get("priority"), last, max(last - first, 0) + 1
        if claimed < len(window):
            self._windows = min(self._windows * 4, WINDOWS)
            self._undisturbed = 0
            return
        self._undisturbed += 1
        if self._undisturbed >= self.CALM:
            self._windows = max(self._windows // 2, 1)
            self._undisturbed = 0


def pop_many(
    queue: str,
    lease: Lease,
    *,
    limit: int,
    spread: Spread | None = None,
    one_reply: bool = False,
) -> Operation[list[Document]]:
    """Claim up to ``limit`` ready tasks under one token, with two or three round trips.

    Reads a window of the line, then claims it by a guarded update. When other workers won
    all of it, the next window starts further back, instead of fighting for the head. A
    single task is claimed with one write, and nothing is read before. ``one_reply`` claims no
    more than MongoDB puts into one reply: 16 MB.
    """
    if limit == 1:
        document = yield from pop(queue, lease)
        return [] if document is None else [document]
    spread = spread or Spread()
    start = spread.start()
    while True:
        window: list[Document] = yield Call(
            "find",
            {"queue": queue, **filters.READY, **start},
            sort=filters.READY_ORDER,
            limit=-limit if one_reply else limit,  # Below zero, nothing is fetched later.
            batch_size=limit,  # One round trip, where the default takes one per hundred.
        )
        if not window:
            if not start:
                return []
            start = {}  # The line is shorter than that.
            continue
        if any(isinstance(document["_id"], dict) for document in window):
            yield from _bury_malformed(_these(window), lease.started_at)
            continue
        try:
            claimed = yield from _claim_window(window, lease)
        except OperationFailure as exc:
            if exc.code != mongo_errors.TYPE_MISMATCH:
                raise
            yield from _bury_malformed(_these(window), lease.started_at)
            claimed = yield from _read_back(window, lease)
        else:
            spread.read(window, len(claimed))
            start = start if claimed else spread.start()
        if claimed:
            return claimed


def _claim_window(window: list[Document], lease: Lease) -> Operation[list[Document]]:
    if len(window) == 1:  # The reply to one write is the task, so nothing is read again.
        document = yield from _claim_one({**_these(window), **filters.READY}, lease)
        return [] if document is None else [document]
    # A task that went round since it was read has a newer stamp, and is not what we read.
    # Stamps of the last second do not tell, as clocks differ: then it is read once more.
    # Nor does a window with a stamp that is no date, or a count that is no whole number.
    newest = _newest_stamp(window)
    guard = {} if newest is None else {"updated_at": {"$lte": newest}}
    as_read = newest is not None and newest < lease.started_at - LARGEST_SKEW
    try:
        result = yield Call(
            "update_many",
            {**_these(window), **filters.READY, **guard},
            claim_update(lease),
            repeatable=False,
        )
        all_ours = result.modified_count == len(window)
        read = _read
    except PyMongoError as exc:
        if not mongo_errors.is_uncertain(exc):
            raise
        all_ours, read = False, confirm.some  # Perhaps it claimed, and no majority has it.
    if not as_read:
        return (yield from _read_back(window, lease, read))
    ours = window if all_ours else (yield from _won(window, lease, read))
    fields = _claim_fields(lease)
    for document in ours:
        document.update(fields)
        document["attempts"] += 1
    return ours


def _newest_stamp(window: list[Document]) -> datetime | None:
    """Tell when the last of a window was changed; nothing, if one of them is out of the usual."""
    stamps: list[Any] = [document.get("updated_at") for document in window]
    counts = [document.get("attempts") for document in window]
    if {*map(type, stamps)} != {datetime} or not {*map(type, counts)} <= {int, Int64}:
        return None
    newest: datetime = max(stamps)
    return newest


Read: TypeAlias = Callable[..., Operation[list[Document]]]


def _read(*query: Any, **options: Any) -> Operation[list[Document]]:
    """Read what a write matched that was acknowledged: a majority has it."""
    found: list[Document] = yield Call("find", *query, **options)
    return found


def _won(window: list[Document], lease: Lease, read: Read) -> Operation[list[Document]]:
    """Find out which of a window are ours; their ids tell, where nothing else has changed."""
    held = {**_these(window), **claimed_under(lease)}
    found = yield from read(held, {"_id": 1}, batch_size=len(window) + 1)
    ids = {document["_id"] for document in found}
    return [document for document in window if document["_id"] in ids]


def _read_back(
    window: list[Document], lease: Lease, read: Read = confirm.some
) -> Operation[list[Document]]:
    """Read what of a window is ours, in the order of the line."""
    held = {**_these(window), **claimed_under(lease)}
    found = yield from read(held, batch_size=len(window) + 1)
    stored = {document["_id"]: document for document in found}
    return [stored[one["_id"]] for one in window if one["_id"] in stored]


def _these(window: list[Document]) -> Document:
    return filters.any_of([document["_id"] for document in window])


def _bury_malformed(selection: Document, now: datetime) -> Operation[None]:
    """Fail ready tasks that nobody can claim: they would block the line."""
    for message, fault in MALFORMED.items():
        error = {"message": message, "code": INVALID_TASK, "at": now}
        changes = {"status": filters.FAILED, "attempts": 0, "error": error}
        yield Call(
            "update_many",
            {**filters.READY, "$and": [selection, fault]},
            {"$set": {**changes, "updated_at": now, "finished_at": now}},
        )


def claim_update(lease: Lease) -> Document:
    """Write the lease into a task, and count the delivery that starts with it."""
    return {"$set": _claim_fields(lease), "$inc": {"attempts": 1}}


def _claim_fields(lease: Lease) -> Document:
    return {
        "status": filters.PROCESSING,
        "updated_at": lease.started_at,
        "started_at": lease.started_at,
        "worker_id": lease.worker_id,
        "lease_token": lease.token,
        "lease_expires_at": lease.expires_at,
    }


def claimed_under(lease: Lease) -> Document:
    """Match what a claim took; the expiry makes it a look at a single key of ``lease``."""
    return {
        "status": filters.PROCESSING,
        "lease_expires_at": lease.expires_at,
        "lease_token": lease.token,
    }


def recover_claim(token: str, expires_at: datetime) -> Operation[list[Document]]:
    """Renew the leases that a failed claim took under ``token``; return the tasks in order.

    Safe to repeat: it sets the same instant again.
    """
    held = {**filters.LEASED, "lease_token": token}
    yield Call("update_many", held, {"$set": {"lease_expires_at": expires_at}})
    found: list[Document] = yield Call("find", held, sort=filters.READY_ORDER)
    return found


def apply_own_timeouts(
    documents: Iterable[Document], lease: Lease, granted_at: datetime
) -> Operation[None]:
    """Give tasks with a visibility timeout of their own the lease that they asked for.

    A claim is written before the task is known, so it carries the queue's timeout. Leases are
    counted from ``granted_at``, the latest that the time of the claim can be.
    """
    by_timeout: dict[float, list[Document]] = {}
    for document in documents:
        if (seconds := document.get("visibility_timeout_sec")) is not None:
            by_timeout.setdefault(seconds, []).append(document)
    for seconds, group in by_timeout.items():
        expires_at = round_up(granted_at + timedelta(seconds=seconds))
        ids = filters.any_of(document["_id"] for document in group)
        fence = {**ids, "status": filters.PROCESSING, "lease_token": lease.token}
        yield Call("update_many", fence, {"$set": {"lease_expires_at": expires_at}})
        for document in group:
            document["lease_expires_at"] = expires_at
