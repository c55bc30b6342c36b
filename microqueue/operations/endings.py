"""Endings: the settlements of many tasks in one write, none of which holds up the others."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError, OperationFailure

from microqueue.operations import filters, id_order, refusals, settle
from microqueue.operations.batches import Progress
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
    endings: Sequence[Ending], *, now: datetime, settings: QueueSettings, progress: Progress
) -> Operation[int]:
    """Write what becomes of tasks reclaimed from their workers; return how many were written.

    What is refused is buried instead, or every sweep would meet it again. What cannot even be
    buried holds up no other: ``progress`` has the first of such refusals, to be raised after all.
    """
    waits = [one for one in endings if one.settlement.changes["status"] == filters.PENDING]
    dead = [one for one in endings if one.settlement.changes["status"] != filters.PENDING]
    reclaimed, refused = yield from _write(waits, now=now, settings=settings)
    progress.counts["reclaimed"] += reclaimed
    buried, refused_too = yield from _write(dead, now=now, settings=settings)
    burials = [_burial(one, now) for one in (*refused, *refused_too)]
    more, unburied = yield from _write_once(burials, now=now, settings=settings, anew=True)
    progress.counts["buried"] += buried + more
    gone = [*_without(dead, refused_too), *_without(burials, unburied)]
    yield from _name(gone, buried + more, now, progress)
    if unburied:
        progress.refused = progress.refused or _failure(unburied[0])
    return reclaimed + buried + more


def _without(endings: Sequence[Ending], refused: Sequence[Refusal]) -> list[Ending]:
    left_out = {id(one.ending) for one in refused}
    return [one for one in endings if id(one) not in left_out]


def _name(dead: Sequence[Ending], count: int, now: datetime, progress: Progress) -> Operation[None]:
    """Note which tasks were buried. Of those that changed meanwhile, some may not have been."""
    if count < len(dead):
        ids = yield from buried_of([one.task.id for one in dead], now)
        known = set(map(id_order.key, ids))
        dead = [one for one in dead if id_order.key(one.task.id) in known]
    by_code: dict[str, list[Any]] = {}
    for one in dead:
        error = one.settlement.error
        by_code.setdefault(str(error.code if error else None), []).append(one.task.id)
    for code, ids in by_code.items():
        progress.bury(code, ids, len(ids))


def buried_of(
    ids: Sequence[Any], now: datetime, *, code: str | None = None
) -> Operation[list[Any]]:
    """Find which of some tasks were buried at this instant."""
    buried = {**filters.any_of(ids), **filters.DEAD, "finished_at": now}
    if code is not None:
        buried["error.code"] = code
    return [document["_id"] for document in (yield Call("find", buried, {"_id": 1}))]


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
        raise _failure(refused[0])


def _failure(refusal: Refusal) -> OperationFailure:
    return OperationFailure(refusal.message, refusal.code)
