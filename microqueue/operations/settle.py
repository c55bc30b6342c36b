"""Settle: write the outcome of an attempt, fenced by the lease token.

Every write here matches the task only while the caller's claim holds it. All are safe to
repeat: an attempt that was already settled the same way under the same token is found in
the history, by a write that a majority acknowledges, and counts as success.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError, OperationFailure

from microqueue.clock import later
from microqueue.errors import LeaseLost
from microqueue.operations import confirm, dlq_collection, filters, id_order, mongo_errors
from microqueue.operations.batches import Progress
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.positions import front_position, original_position
from microqueue.settings import QueueSettings
from microqueue.task import Claim, Outcome, Task, TaskError

INVALID_TASK = "invalid_task"
LONGEST_MESSAGE = 4000
LONGEST_IN_HISTORY = 500
"""In bytes. A full history of a thousand attempts must fit beside the largest payload."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """What an outcome changes in the document."""

    outcome: Outcome
    changes: Document
    error: TaskError | None = None
    increments: Document = field(default_factory=dict)
    removals: Document = field(default_factory=dict)


def done(now: datetime, *, result: Any = None) -> Settlement:
    """Finish the task; the errors of earlier attempts are in its history alone."""
    changes: Document = {"status": filters.DONE, "finished_at": now}
    if result is not None:
        changes["result"] = result
    return Settlement(Outcome.DONE, changes, removals={"error": ""})


def failed(
    now: datetime,
    error: TaskError,
    *,
    outcome: Outcome = Outcome.FAILED,
    delivered: bool = True,
) -> Settlement:
    """Bury the task; a task that never reached a handler gets its attempt back."""
    changes = {"status": filters.FAILED, "finished_at": now}
    return Settlement(outcome, changes, error, {} if delivered else {"attempts": -1})


def retried(
    task: Task[Any],
    now: datetime,
    error: TaskError,
    *,
    delay_sec: float,
    outcome: Outcome = Outcome.RETRIED,
) -> Settlement:
    """Send the task back to wait out ``delay_sec``, or bury it if this was its last attempt."""
    if task.attempts >= task.max_attempts:
        return failed(now, error, outcome=Outcome.FAILED if outcome is Outcome.RETRIED else outcome)
    return Settlement(outcome, {**waiting(task, now, delay_sec), "backoff_sec": delay_sec}, error)


def waiting(task: Task[Any], now: datetime, delay_sec: float) -> Document:
    """Write the fields of a task that waits, in its rightful place."""
    delay = timedelta(seconds=delay_sec)
    return {
        "status": filters.PENDING,
        "next_retry_at": later(now, delay) if delay else None,
        "position": original_position(task.position, task.created_at),
    }


def snoozed(task: Task[Any], now: datetime, *, delay_sec: float) -> Settlement:
    """Send the task back to wait, without counting the attempt."""
    changes = waiting(task, now, delay_sec)
    return Settlement(Outcome.SNOOZED, changes, None, {"attempts": -1})


def released(task: Task[Any], now: datetime, *, front: bool) -> Settlement:
    """Hand the task back unharmed: its attempt is refunded, and it is ready at once."""
    rightful = original_position(task.position, task.created_at)
    changes = {
        "status": filters.PENDING,
        "next_retry_at": None,
        "position": front_position(now) if front else rightful,
    }
    return Settlement(Outcome.RELEASED, changes, None, {"attempts": -1})


def settle(
    task: Task[Any],
    settlement: Settlement,
    *,
    now: datetime,
    settings: QueueSettings,
    session: Any = None,
) -> Operation[None]:
    """Write a settlement, or raise :class:`LeaseLost` if the claim no longer holds the task."""
    result = yield from write(
        "update_one", task, settlement, now=now, settings=settings, session=session
    )
    if not result.matched_count:
        yield from _confirm(task, settlement.outcome, settings=settings, session=session)


def write(
    method: str,
    task: Task[Any],
    settlement: Settlement,
    *,
    now: datetime,
    settings: QueueSettings,
    session: Any = None,
    **options: Any,
) -> Operation[Any]:
    """Update the claimed task by a method of the collection, and give its reply."""
    fence, limit = filters.claimed(task), settings.history_limit
    update = settlement_update(task, settlement, now=now, history_limit=limit)
    try:
        return (yield Call(method, fence, update, session=session, **options))
    except OperationFailure as exc:
        # The caller's transaction is aborted, and nothing can be written in it any more.
        if exc.code not in mongo_errors.WRONG_TYPE or session is not None:
            raise
    update = settlement_update(task, settlement, now=now, history_limit=limit, anew=True)
    return (yield Call(method, fence, update, **options))


def touch(task: Task[Any], expires_at: datetime, now: datetime) -> Operation[None]:
    """Move the end of the lease. Safe to repeat: it sets the same instant again."""
    update = {"$set": {"lease_expires_at": expires_at, "updated_at": now}}
    result = yield Call("update_one", filters.claimed(task), update)
    if not result.matched_count:
        raise (yield from explain_loss(task))


def settlement_update(
    task: Claim,
    settlement: Settlement,
    *,
    now: datetime,
    history_limit: int,
    anew: bool = False,
) -> Document:
    """Write the update of a settlement: the new state, and the attempt's line in the history.

    ``anew`` replaces the history and the counts, for a task whose own cannot be added to.
    """
    lease = task.lease
    error = settlement.error.model_dump() if settlement.error else None
    entry: Document = {
        "attempt": task.attempts,
        "worker_id": lease.worker_id if lease else None,
        "started_at": lease.started_at if lease else None,
        "lease_token": lease.token if lease else None,
        "ended_at": now,
        "outcome": settlement.outcome.value,
    }
    changes = {
        **settlement.changes,
        "updated_at": now,
        "lease_token": None,
        "lease_expires_at": None,
    }
    if error:
        changes["error"] = error
        entry["error"] = {**error, "message": storable_text(error["message"], LONGEST_IN_HISTORY)}
    if anew:
        counts = {
            name: max(getattr(task, name) + step, 0) for name, step in settlement.increments.items()
        }
        update: Document = {"$set": {**changes, **counts, "history": [entry]}}
    else:
        update = {
            "$set": changes,
            "$push": {"history": {"$each": [entry], "$slice": -history_limit}},
        }
        if settlement.increments:
            update["$inc"] = settlement.increments
    if settlement.removals:
        update["$unset"] = settlement.removals
    return update


def describe_error(error: object, code: str | None, now: datetime, *, otherwise: str) -> TaskError:
    """Make an error to store: from a message, or from an exception, whose type is the code."""
    if isinstance(error, BaseException):
        code = code or type(error).__name__
        message = f"{type(error).__name__}: {_text(error)}"
    else:
        message = otherwise if error is None else _text(error)
    return TaskError.trusted(message=storable_text(message, LONGEST_MESSAGE), code=code, at=now)


def invalid_task(reason: str, now: datetime) -> TaskError:
    """Say why a stored document is no task that can be run."""
    return TaskError.trusted(
        message=storable_text(reason, LONGEST_IN_HISTORY), code=INVALID_TASK, at=now
    )


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 (an error whose text fails must still be told)
        return f"<{type(value).__name__} without a text>"


def storable_text(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """Make a text that BSON can hold, and cut it to a number of bytes."""
    return text.encode("utf-8", "backslashreplace")[:longest].decode("utf-8", "ignore")


def _confirm(
    task: Task[Any], outcome: Outcome, *, settings: QueueSettings, session: Any
) -> Operation[None]:
    """Accept that nothing matched only if this very settlement is already in the history."""
    settled = settled_as(task, outcome)
    for target in possible_targets(settings):
        if session is None:
            found = yield from confirm.holds(settled, target=target)
        else:
            found = yield Call("find_one", settled, {"_id": 1}, target=target, session=session)
        if found:
            return
    raise (yield from explain_loss(task, session=session))


def possible_targets(settings: QueueSettings) -> list[Target]:
    """Give where a task that was settled may be, in the order in which it moves."""
    return [Target.TASKS, Target.DEAD_LETTERS] if settings.separate_dlq else [Target.TASKS]


def settled_as(task: Claim, outcome: Outcome) -> Document:
    """Match the task if its history shows this very settlement."""
    token = task.lease.token if task.lease else None
    entry = {"lease_token": token, "outcome": outcome.value}
    return {"_id": {"$eq": task.id}, "history": {"$elemMatch": entry}}


def explain_loss(task: Claim, *, session: Any = None) -> Operation[LeaseLost]:
    """Find out why a claim no longer holds its task."""
    held_by = task.lease.worker_id if task.lease else None
    fields = {"status": 1, "worker_id": 1, "lease_token": 1}
    document = yield Call("find_one", {"_id": task.id}, fields, session=session)
    if task.lease is None:
        reason = "it was not popped; settle the task that pop returned"
    elif document is None:
        reason = "the task is gone"
    elif document["status"] == filters.PROCESSING:
        reason = f"it expired, and {document.get('worker_id')!r} holds the task now"
    else:
        reason = f"the task is {document['status']}"
    return LeaseLost(task_id=task.id, worker_id=held_by, reason=reason)


class FencedSettlement(NamedTuple):
    """A task, what becomes of it, and the fence under which that is written."""

    task: Claim
    settlement: Settlement
    fence: Document


class Rejection(NamedTuple):
    """An ending that MongoDB did not write, because of what the document is."""

    ending: FencedSettlement
    code: int
    message: str


def settle_all(
    endings: Sequence[FencedSettlement], *, now: datetime, settings: QueueSettings
) -> Operation[int]:
    """Write endings; give how many were still held. The first refusal is raised, after all."""
    matched, refused = yield from _write(endings, now=now, settings=settings)
    _raise_first(refused)
    return matched


def settle_reclaimed(
    endings: Sequence[FencedSettlement],
    *,
    now: datetime,
    settings: QueueSettings,
    progress: Progress,
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


def _without(
    endings: Sequence[FencedSettlement], refused: Sequence[Rejection]
) -> list[FencedSettlement]:
    left_out = {id(one.ending) for one in refused}
    return [one for one in endings if id(one) not in left_out]


def _name(
    dead: Sequence[FencedSettlement], count: int, now: datetime, progress: Progress
) -> Operation[None]:
    """Note which tasks were buried. Of those that changed meanwhile, some may not have been."""
    if count < len(dead):
        ids = yield from find_buried([one.task.id for one in dead], now)
        known = set(map(id_order.key, ids))
        dead = [one for one in dead if id_order.key(one.task.id) in known]
    by_code: dict[str, list[Any]] = {}
    for one in dead:
        error = one.settlement.error
        by_code.setdefault(str(error.code if error else None), []).append(one.task.id)
    for code, ids in by_code.items():
        progress.bury(code, ids, len(ids))


def find_buried(
    ids: Sequence[Any], now: datetime, *, code: str | None = None
) -> Operation[list[Any]]:
    """Find which of some tasks were buried at this instant."""
    buried = {**filters.any_of(ids), **filters.DEAD, "finished_at": now}
    if code is not None:
        buried["error.code"] = code
    return [document["_id"] for document in (yield Call("find", buried, {"_id": 1}))]


def _burial(refusal: Rejection, now: datetime) -> FencedSettlement:
    task, settlement, fence = refusal.ending
    error = invalid_task(f"MongoDB does not take it back: {refusal.message}", now)
    return FencedSettlement(task, failed(now, error, outcome=settlement.outcome), fence)


def _write(
    endings: Sequence[FencedSettlement], *, now: datetime, settings: QueueSettings
) -> Operation[tuple[int, list[Rejection]]]:
    """Write endings, those of broken records once more: how many matched, and the refused."""
    matched, refused = yield from _write_once(endings, now=now, settings=settings)
    broken = [one.ending for one in refused if one.code in mongo_errors.WRONG_TYPE]
    others = [one for one in refused if one.code not in mongo_errors.WRONG_TYPE]
    more, still = yield from _write_once(broken, now=now, settings=settings, anew=True)
    return matched + more, others + still


def _write_once(
    endings: Sequence[FencedSettlement],
    *,
    now: datetime,
    settings: QueueSettings,
    anew: bool = False,
) -> Operation[tuple[int, list[Rejection]]]:
    if not endings:
        return 0, []
    limit = settings.history_limit
    updates = [
        UpdateOne(
            fence,
            settlement_update(task, settlement, now=now, history_limit=limit, anew=anew),
        )
        for task, settlement, fence in endings
    ]
    try:
        result = yield Call("bulk_write", updates, ordered=False)
    except BulkWriteError as exc:
        details: Any = exc.details or {}
        errors = details.get("writeErrors") or []
        foreign = any(error["code"] not in mongo_errors.DOCUMENT_REJECTED for error in errors)
        if not errors or foreign or details.get("writeConcernErrors"):
            raise
        return int(details["nMatched"]), [
            Rejection(endings[error["index"]], error["code"], error["errmsg"]) for error in errors
        ]
    return int(result.matched_count), []


def _raise_first(refused: Sequence[Rejection]) -> None:
    if refused:
        raise _failure(refused[0])


def _failure(refusal: Rejection) -> OperationFailure:
    return OperationFailure(refusal.message, refusal.code)


def settle_batch(
    plain: Sequence[Claim],
    others: Sequence[tuple[Task[Any], Settlement]],
    *,
    now: datetime,
    settings: QueueSettings,
) -> Operation[list[LeaseLost]]:
    """Write settlements of any kind, with as few writes as there can be.

    ``plain`` are done and nothing more. Returns the leases that were lost; all others are
    settled.
    """
    lost = yield from mark_all_done(plain, now=now, settings=settings)
    if others:
        ended = [
            FencedSettlement(task, settlement, filters.claimed(task)) for task, settlement in others
        ]
        if (yield from settle_all(ended, now=now, settings=settings)) != len(others):
            lost += yield from _find_lost(others, settings)
        if settings.separate_dlq:
            for task, settlement in others:
                if settlement.changes["status"] == filters.FAILED:
                    yield from dlq_collection.move_out_by_id(task.id)
    return lost


def mark_all_done(
    tasks: Sequence[Claim], *, now: datetime, settings: QueueSettings
) -> Operation[list[LeaseLost]]:
    """Mark many tasks done: one write for those claimed together, one for all claimed singly.

    Returns the leases that were lost; the others are done.
    """
    groups: dict[tuple[Any, ...], list[Claim]] = defaultdict(list)
    for task in tasks:
        # The history entry is the same for every task of a group, so one update serves all.
        token = task.lease.token if task.lease else None
        groups[(token, task.attempts)].append(task)
    settlement = done(now)
    singly: list[Claim] = []
    matched = 0
    for group in groups.values():
        if len(group) == 1:
            singly += group
            continue
        fence = {**filters.claimed(group[0]), **filters.any_of({task.id: None for task in group})}
        update = settlement_update(
            group[0], settlement, now=now, history_limit=settings.history_limit
        )
        try:
            matched += (yield Call("update_many", fence, update)).matched_count
        except OperationFailure as exc:
            if exc.code not in mongo_errors.WRONG_TYPE:
                raise
            singly += group  # It ended at a broken one; those before it are found as done.
    ended = [FencedSettlement(task, settlement, filters.claimed(task)) for task in singly]
    matched += yield from settle_all(ended, now=now, settings=settings)
    if matched == len({(task.id, task.lease and task.lease.token) for task in tasks}):
        return []
    return (yield from _find_lost([(task, settlement) for task in tasks], settings))


def _find_lost(
    settled: Sequence[tuple[Claim, Settlement]], settings: QueueSettings
) -> Operation[list[LeaseLost]]:
    """Find the settlements that are in no history that a majority has: they were refused."""
    unproven = list(settled)
    for target in possible_targets(settings):
        if unproven:
            proofs = [settled_as(task, one.outcome) for task, one in unproven]
            proven = yield from confirm.which(proofs, target=target)
            unproven = [one for one, sure in zip(unproven, proven, strict=True) if not sure]
    lost = []
    for task, _ in unproven:
        lost.append((yield from explain_loss(task)))
    return lost
