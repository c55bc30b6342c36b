"""Claim: promote due tasks, then claim the head of the queue under a lease.

A claim is one guarded write that sets the lease and counts the attempt. It is never repeated
blindly. After a lost reply, the lease token shows which tasks the claim holds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from bson import Int64
from pymongo import ReturnDocument
from pymongo.errors import OperationFailure, PyMongoError

from microqueue import error_codes
from microqueue.clock import LARGEST_SKEW, add_zones, as_utc, round_up
from microqueue.durations import to_positive_timedelta
from microqueue.model import shorten
from microqueue.operations import burials, confirm, deadlines, filters, mongo_errors, settle
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.operations.settle import Settlement
from microqueue.task import Lease, TaskError, read_task
from microqueue.task_ids import id_key

WINDOWS = 16
DEADLINE_ORDER = [("deadline_at", 1)]
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
    """Make due tasks ready, and fail those that expired; return how many are ready.

    Safe to repeat: a write matches only tasks that are still due. The ids are read first because
    an update of many cannot be limited.
    """
    selection = {"queue": queue, **filters.due(now)}
    found = yield Call("find", selection, deadlines.FIELDS, sort=DEADLINE_ORDER, limit=limit)
    return (yield from deadlines.process(found, now)).promoted if found else 0


def pop(queue: str, lease: Lease) -> Operation[Document | None]:
    """Claim the first ready task with one atomic write.

    Not safe to repeat blindly: a claim whose reply was lost would stay leased without a worker.
    So after a lost connection or a step-down, the token shows whether a majority has the claim. If
    that is unknown, the error is raised, and a claim that was made ends with its lease.
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
    """Keeps workers apart that claim from the same queue.

    Each worker reads a random window of the queue. The number of windows grows after a window from
    which other workers had claimed, and shrinks after several without a collision. The start of a
    window is estimated from the positions read last, and found by the index: a skip would read
    everything before it.
    """

    CALM = 8

    def __init__(self) -> None:
        self._windows = 1
        self._undisturbed = 0
        self._last: tuple[Any, int, int] | None = None

    def start(self) -> Document:
        """Return a filter for the next window, empty for the head of the queue."""
        window = _random.randrange(self._windows)
        if window == 0 or self._last is None:
            return {}
        priority, position, span = self._last
        return {"priority": priority, "position": {"$gt": position + (window - 1) * span}}

    def adapt(self, window: list[Document], claimed: int) -> None:
        """Adapt to a window, and to how many of its tasks could be claimed."""
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
    before_write: Callable[[], object] | None = None,
) -> Operation[list[Document]]:
    """Claim up to ``limit`` ready tasks under one token, with two or three round trips.

    Reads a window of the queue, then claims it by a guarded update. If other workers claimed all
    of it, the next window starts further back. A single task is claimed with one write, without
    a read before it. ``one_reply`` claims no more than fits into one reply of MongoDB: 16 MB.
    Never repeated blindly: after a lost reply, the token shows what was claimed. ``before_write``
    is called before each write that claims.
    """
    if limit == 1:
        if before_write is not None:
            before_write()
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
            target=Target.CLAIMS,
        )
        if not window:
            if not start:
                return []
            start = {}  # The queue is shorter than that.
            continue
        if any(isinstance(document["_id"], dict) for document in window):
            yield from _bury_malformed(_these(window), lease.started_at)
            continue
        if before_write is not None:
            before_write()
        try:
            claimed = yield from _claim_window(window, lease)
        except OperationFailure as exc:
            if exc.code != mongo_errors.TYPE_MISMATCH:
                raise
            yield from _bury_malformed(_these(window), lease.started_at)
            claimed = yield from _read_back(window, lease)
        else:
            spread.adapt(window, len(claimed))
            start = start if claimed else spread.start()
        if claimed:
            return claimed


def _claim_window(window: list[Document], lease: Lease) -> Operation[list[Document]]:
    if len(window) == 1:  # The reply to one write is the task, so nothing is read again.
        document = yield from _claim_one({**_these(window), **filters.READY}, lease)
        return [] if document is None else [document]
    # A task that was claimed and came back since it was read has a newer stamp. Stamps of the
    # last second prove nothing, as clocks differ: then the tasks are read again after the claim.
    # The same goes for a window with a stamp that is no date, or a count that is no integer.
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
        all_ours, read = False, confirm.some  # A majority may not have the claim.
    if not as_read:
        return (yield from _read_back(window, lease, read))
    ours = window if all_ours else (yield from _won(window, lease, read))
    fields = _claim_fields(lease)
    for document in ours:
        # Handlers see the payload. The other dates get their zone when the task is built.
        if type(payload := document.get("payload")) in {dict, list}:
            add_zones(payload)
        document.update(fields)
        document["attempts"] += 1
    return ours


def _newest_stamp(window: list[Document]) -> datetime | None:
    """Return the latest stamp of a window, or None if a stamp or count has another type."""
    stamps: list[Any] = [document.get("updated_at") for document in window]
    counts = [document.get("attempts") for document in window]
    if {*map(type, stamps)} != {datetime} or not {*map(type, counts)} <= {int, Int64}:
        return None
    newest: datetime = max(stamps)
    return as_utc(newest)


Read: TypeAlias = Callable[..., Operation[list[Document]]]


def _read(*query: Any, **options: Any) -> Operation[list[Document]]:
    """Read what an acknowledged write matched: a majority has it."""
    found: list[Document] = yield Call("find", *query, **options)
    return found


def _won(window: list[Document], lease: Lease, read: Read) -> Operation[list[Document]]:
    """Return the tasks of a window that this lease holds, by their ids."""
    held = {**_these(window), **claimed_under(lease)}
    found = yield from read(held, {"_id": 1}, batch_size=len(window) + 1)
    ids = {id_key(document["_id"]) for document in found}
    return [document for document in window if id_key(document["_id"]) in ids]


def _read_back(
    window: list[Document], lease: Lease, read: Read = confirm.some
) -> Operation[list[Document]]:
    """Read the tasks of a window that this lease holds, in the order of the queue."""
    held = {**_these(window), **claimed_under(lease)}
    found = yield from read(held, batch_size=len(window) + 1)
    stored = {id_key(document["_id"]): document for document in found}
    keys = (id_key(document["_id"]) for document in window)
    return [stored[key] for key in keys if key in stored]


def _these(window: list[Document]) -> Document:
    return filters.any_of([document["_id"] for document in window])


def _bury_malformed(selection: Document, now: datetime) -> Operation[None]:
    """Fail ready tasks that cannot be claimed: they would block the queue. Safe to repeat."""
    for message, fault in MALFORMED.items():
        error = {"message": message, "code": error_codes.INVALID_TASK, "at": now}
        changes = {"status": filters.FAILED, "attempts": 0, "error": error}
        faulty = {**filters.READY, "$and": [selection, fault]}
        found = yield Call("find", faulty, burials.FIELDS)
        if found:
            result = yield Call(
                "update_many",
                {**faulty, **filters.any_of(one["_id"] for one in found)},
                {"$set": {**changes, "updated_at": now, "finished_at": now, "deadline_at": None}},
            )
            reset = [{**one, "attempts": 0} for one in found]
            yield from burials.report_documents(reset, error, int(result.modified_count))


def claim_update(lease: Lease) -> Document:
    """Return the update of a claim: it sets the lease and counts the delivery."""
    return {"$set": _claim_fields(lease), "$inc": {"attempts": 1}}


def _claim_fields(lease: Lease) -> Document:
    return {
        "status": filters.PROCESSING,
        "updated_at": lease.started_at,
        "started_at": lease.started_at,
        "worker_id": lease.worker_id,
        "lease_token": lease.token,
        "deadline_at": lease.expires_at,
    }


def claimed_under(lease: Lease) -> Document:
    """Match the tasks of a claim; the expiry makes that one key of the index ``deadline``."""
    return {
        "status": filters.PROCESSING,
        "deadline_at": {**filters.IS_DATE, "$eq": lease.expires_at},
        "lease_token": lease.token,
    }


def recover_claim(token: str, expires_at: datetime) -> Operation[list[Document]]:
    """Renew the leases that a failed claim took under ``token``; return the tasks in order.

    Safe to repeat: it sets the same instant again.
    """
    held = {**filters.LEASED, "lease_token": token}
    yield Call("update_many", held, {"$set": {"deadline_at": expires_at}})
    found: list[Document] = yield Call("find", held, sort=filters.READY_ORDER)
    return found


def apply_own_timeouts(
    documents: Iterable[Document], lease: Lease, granted_at: datetime
) -> Operation[None]:
    """Set the leases of tasks that have their own visibility timeout.

    A claim is written before the task is known, so it has the queue's timeout. Leases count from
    ``granted_at``, the latest possible time of the claim. Fenced by the token; safe to repeat.
    """
    by_timeout: dict[float, list[Document]] = {}
    for document in documents:
        if (seconds := document.get("visibility_timeout_sec")) is not None:
            by_timeout.setdefault(seconds, []).append(document)
    for seconds, group in by_timeout.items():
        expires_at = round_up(granted_at + timedelta(seconds=seconds))
        ids = filters.any_of(document["_id"] for document in group)
        fence = {**ids, "status": filters.PROCESSING, "lease_token": lease.token}
        yield Call("update_many", fence, {"$set": {"deadline_at": expires_at}})
        for document in group:
            document["deadline_at"] = expires_at


def settlement_if_undeliverable(document: Document, now: datetime) -> Settlement | None:
    """Return how to settle a claimed task that must not run; ``None`` if it may run."""
    if _clearly_deliverable(document):
        return None
    add_zones(document)
    if reason := _malformed(document):
        return settle.failed(now, settle.invalid_task(reason, now), delivered=False)
    task = read_task(document)
    if task.expires_at is not None and task.expires_at <= now:
        message, code = "not delivered before it expired", error_codes.EXPIRED
    elif task.attempts > task.max_attempts:
        message, code = f"all {task.max_attempts} attempts are used up", error_codes.MAX_ATTEMPTS
    else:
        return None
    return settle.failed(now, TaskError(message=message, code=code, at=now), delivered=False)


def _clearly_deliverable(document: Document) -> bool:
    """Return whether a task is certainly deliverable: a quick check that most tasks pass."""
    get, attempts, most = document.get, document["attempts"], document.get("max_attempts")
    return (
        type(attempts) is int
        and type(most) is int
        and attempts <= most
        and get("expires_at") is None
        and get("visibility_timeout_sec") is None
        and type(document["_id"]) is not dict
    )


def _malformed(document: Document) -> str | None:
    """Return which field of a claimed task is malformed and why; ``None`` if none is."""
    attempts, expires_at = document["attempts"], document.get("expires_at")
    own_sec = document.get("visibility_timeout_sec")
    if isinstance(document["_id"], dict):
        return f"_id={shorten(document['_id'])} is not valid: {GOOD_IDS}"
    if not isinstance(attempts, int | float) or not math.isfinite(attempts):
        return f"attempts={shorten(attempts)} is not valid: give a number"
    if expires_at is not None and not isinstance(expires_at, datetime):
        return f"expires_at={shorten(expires_at)} is not valid: give a date up to the year 9999"
    if own_sec is not None:
        try:
            to_positive_timedelta(own_sec)
        except ValueError as exc:
            return f"visibility_timeout_sec={shorten(own_sec)} is not valid: {exc}"
    return None
