"""Deadlines: what happens to waiting tasks whose ``deadline_at`` has passed.

A task that is due becomes ready. One that expired, or has no attempt left, becomes a dead letter.
A claim and a sweep look at all of them in one pass, in the order of the index, so that none stays
in front of another. Each write repeats the condition it was decided on, and is safe to repeat.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from typing import Any

from bson import Decimal128
from pymongo import UpdateOne

from microqueue import error_codes
from microqueue.operations import burials, filters
from microqueue.operations.call import Call, Document, Operation

FIELDS = burials.FIELDS | dict.fromkeys(["next_retry_at", "expires_at", "max_attempts"], 1)


class Verdict(Enum):
    """What happens to a waiting task whose deadline has passed."""

    READY = auto()
    """Its delay is over."""
    EXPIRED = auto()
    """It was not delivered in time."""
    EXHAUSTED = auto()
    """It has no attempt left: a backstop, for tasks that were edited manually."""
    LATER = auto()
    """Its stored deadline was wrong: it was edited manually."""


@dataclass(frozen=True, slots=True)
class BuriedBatch:
    """Tasks that became dead letters with one code: how many, and their ids."""

    code: str
    ids: list[Any]
    count: int


@dataclass
class Processed:
    """How many tasks became ready, which became dead letters, and how many changed at all."""

    promoted: int = 0
    changed: int = 0
    burials: Sequence[BuriedBatch] = ()


def verdict_on(document: Document, now: datetime) -> Verdict:
    """Return what happens to a task."""
    expires_at, next_retry_at = document.get("expires_at"), document.get("next_retry_at")
    if isinstance(expires_at, datetime) and expires_at <= now:
        return Verdict.EXPIRED
    if isinstance(next_retry_at, datetime) and next_retry_at > now:
        return Verdict.LATER
    attempts, most = _number(document.get("attempts")), _number(document.get("max_attempts"))
    if attempts is not None and most is not None and attempts >= max(most, 1):
        return Verdict.EXHAUSTED
    return Verdict.READY


def process(
    found: Sequence[Document], now: datetime, verdicts: Collection[Verdict] = tuple(Verdict)
) -> Operation[Processed]:
    """Promote, fail or reschedule tasks that were read with :data:`FIELDS`, if still due.

    ``verdicts`` limits it to some of these.
    """
    groups: dict[Verdict, list[Document]] = {one: [] for one in Verdict}
    for document in found:
        groups[verdict_on(document, now)].append(document)
    processed, buried = Processed(), []
    if Verdict.READY in verdicts:
        processed.promoted = yield from _promote(groups[Verdict.READY], now)
    if Verdict.EXPIRED in verdicts and groups[Verdict.EXPIRED]:
        error = {
            "message": "not delivered before it expired",
            "code": error_codes.EXPIRED,
            "at": now,
        }
        buried.append((yield from _bury(groups[Verdict.EXPIRED], filters.expired(now), error)))
    if Verdict.EXHAUSTED in verdicts:
        buried += yield from _bury_exhausted(groups[Verdict.EXHAUSTED], now)
    moved = 0
    if Verdict.LATER in verdicts and groups[Verdict.LATER]:
        moved = yield from _reschedule(groups[Verdict.LATER], now)
    processed.burials = buried
    processed.changed = processed.promoted + moved + sum(one.count for one in buried)
    return processed


def _promote(due: Sequence[Document], now: datetime) -> Operation[int]:
    """Make tasks ready. One that may still expire keeps that as its deadline."""
    ready = {"next_retry_at": None, "updated_at": now, "deadline_at": None}
    lasting = [one for one in due if not isinstance(one.get("expires_at"), datetime)]
    expiring = [one for one in due if isinstance(one.get("expires_at"), datetime)]
    promoted = 0
    if lasting:
        these = filters.any_of(one["_id"] for one in lasting)
        no_expiry = {"expires_at": {"$not": filters.IS_DATE}} if len(lasting) < len(due) else {}
        result = yield Call(
            "update_many", {**these, **filters.due(now), **no_expiry}, {"$set": ready}
        )
        promoted += int(result.modified_count)
    if expiring:
        updates = [
            UpdateOne(
                {"_id": one["_id"], **filters.due(now), "expires_at": one["expires_at"]},
                {"$set": {**ready, "deadline_at": one["expires_at"]}},
            )
            for one in expiring
        ]
        result = yield Call("bulk_write", updates, ordered=False)
        promoted += int(result.modified_count)
    return promoted


def _bury_exhausted(used_up: Sequence[Document], now: datetime) -> Operation[list[BuriedBatch]]:
    by_limit: dict[Any, list[Document]] = {}
    for document in used_up:
        by_limit.setdefault(document["max_attempts"], []).append(document)
    buried = []
    for most, group in by_limit.items():
        still = {**filters.due(now), "max_attempts": most, "attempts": {"$gte": most}}
        error = {
            "message": f"all {most} attempts are used up",
            "code": error_codes.MAX_ATTEMPTS,
            "at": now,
        }
        buried.append((yield from _bury(group, still, error)))
    return buried


def _bury(group: Sequence[Document], still: Document, error: Document) -> Operation[BuriedBatch]:
    ids = [one["_id"] for one in group]
    now = error["at"]
    changes = {
        "status": filters.FAILED,
        "updated_at": now,
        "finished_at": now,
        "deadline_at": None,
        "error": error,
    }
    result = yield Call("update_many", {**filters.any_of(ids), **still}, {"$set": changes})
    count = int(result.modified_count)
    buried = yield from burials.report_documents(group, error, count)
    return BuriedBatch(error["code"], buried, count)


def _reschedule(group: Sequence[Document], now: datetime) -> Operation[int]:
    updates = [
        UpdateOne(
            {"_id": one["_id"], **filters.due(now), "next_retry_at": one["next_retry_at"]},
            {"$set": {"deadline_at": _deadline(one)}},
        )
        for one in group
    ]
    return int((yield Call("bulk_write", updates, ordered=False)).modified_count)


def _deadline(document: Document) -> datetime | None:
    return filters.waiting_deadline(document.get("next_retry_at"), document.get("expires_at"))


def _number(value: Any) -> Any:
    """Return a stored number as one that Python can compare, and None for anything else."""
    if isinstance(value, Decimal128):
        number = value.to_decimal()
        return None if number.is_nan() else number
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
