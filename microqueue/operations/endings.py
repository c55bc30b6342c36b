"""Endings: the settlements of many tasks in one write, none of which holds up the others."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError, OperationFailure

from microqueue.operations import filters, refusals, settle
from microqueue.operations.call import Call, Document, Operation
from microqueue.operations.settle import Settlement
from microqueue.settings import QueueSettings
from microqueue.task import Claim


class Ending(NamedTuple):
    """A task, what becomes of it, and the fence under which that is written."""

    task: Claim
    settlement: Settlement
    fence: Document


class Refusal(NamedTuple):
    """An ending that MongoDB did not write, because of what the document is."""

    ending: Ending
    code: int
    message: str


def write(endings: Sequence[Ending], *, now: datetime, settings: QueueSettings) -> Operation[int]:
    """Write endings; give how many were still held. The first refusal is raised, after all."""
    matched, refused = yield from _write(endings, now=now, settings=settings)
    _raise_first(refused)
    return matched


def take_back(
    endings: Sequence[Ending], *, now: datetime, settings: QueueSettings
) -> Operation[tuple[int, int]]:
    """Write what becomes of tasks taken from their workers: how many wait, and are buried.

    What is refused is buried instead, or every sweep would meet it again.
    """
    waits = [one for one in endings if one.settlement.changes["status"] == filters.PENDING]
    dead = [one for one in endings if one.settlement.changes["status"] != filters.PENDING]
    reclaimed, refused = yield from _write(waits, now=now, settings=settings)
    buried, refused_too = yield from _write(dead, now=now, settings=settings)
    burials = [_burial(one, now) for one in (*refused, *refused_too)]
    more, refused = yield from _write_once(burials, now=now, settings=settings, anew=True)
    _raise_first(refused)
    return reclaimed, buried + more


def _burial(refusal: Refusal, now: datetime) -> Ending:
    task, settlement, fence = refusal.ending
    error = settle.invalid_task(f"MongoDB does not take it back: {refusal.message}", now)
    return Ending(task, settle.failed(now, error, outcome=settlement.outcome), fence)


def _write(
    endings: Sequence[Ending], *, now: datetime, settings: QueueSettings
) -> Operation[tuple[int, list[Refusal]]]:
    """Write endings, those of broken records once more: how many matched, and the refused."""
    matched, refused = yield from _write_once(endings, now=now, settings=settings)
    broken = [one.ending for one in refused if one.code in refusals.BROKEN]
    others = [one for one in refused if one.code not in refusals.BROKEN]
    more, still = yield from _write_once(broken, now=now, settings=settings, anew=True)
    return matched + more, others + still


def _write_once(
    endings: Sequence[Ending], *, now: datetime, settings: QueueSettings, anew: bool = False
) -> Operation[tuple[int, list[Refusal]]]:
    if not endings:
        return 0, []
    limit = settings.history_limit
    updates = [
        UpdateOne(
            fence,
            settle.settlement_update(task, settlement, now=now, history_limit=limit, anew=anew),
        )
        for task, settlement, fence in endings
    ]
    try:
        result = yield Call("bulk_write", updates, ordered=False)
    except BulkWriteError as exc:
        details: Any = exc.details or {}
        errors = details.get("writeErrors") or []
        foreign = any(error["code"] not in refusals.AT_FAULT for error in errors)
        if not errors or foreign or details.get("writeConcernErrors"):
            raise
        return int(details["nMatched"]), [
            Refusal(endings[error["index"]], error["code"], error["errmsg"]) for error in errors
        ]
    return int(result.matched_count), []


def _raise_first(refused: Sequence[Refusal]) -> None:
    if refused:
        raise OperationFailure(refused[0].message, refused[0].code)
