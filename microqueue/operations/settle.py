"""Settle: write the outcome of an attempt, for one task or for many at once.

A :class:`Settlement` says what an outcome changes. It is written under a fence: the write matches
the task only while the caller's claim holds it. Every write here is safe to repeat: an attempt
that was already settled the same way under the same token is found in the history, by a write
that a majority acknowledges, and counts as success.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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


# Settlements


@dataclass(frozen=True, slots=True)
class Settlement:
    """What an outcome changes in the document."""

    outcome: Outcome
    changes: Document
    error: TaskError | None = None
    increments: Document = field(default_factory=dict)
    removals: Document = field(default_factory=dict)

    def after_lost_worker(self, *, crashed: bool = False) -> Settlement:
        """Return the same, for a task whose worker was lost: it is isolated when it runs again.

        ``crashed`` counts the loss against the task.
        """
        increments = {**self.increments, "crashes": 1} if crashed else self.increments
        return replace(self, changes={**self.changes, "redelivered": True}, increments=increments)


def done(now: datetime, *, result: Any = None) -> Settlement:
    """Finish the task. The errors of earlier attempts stay in its history only."""
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
    """Make the task a dead letter. If it never reached a handler, its attempt is refunded."""
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
    """Retry the task after ``delay_sec``, or make it a dead letter after its last attempt."""
    if task.attempts >= task.max_attempts:
        return failed(now, error, outcome=Outcome.FAILED if outcome is Outcome.RETRIED else outcome)
    return Settlement(outcome, {**waiting(task, now, delay_sec), "backoff_sec": delay_sec}, error)


def waiting(task: Task[Any], now: datetime, delay_sec: float) -> Document:
    """Return the fields of a task that waits, at its original position."""
    delay = timedelta(seconds=delay_sec)
    return {
        "status": filters.PENDING,
        "next_retry_at": later(now, delay) if delay else None,
        "position": original_position(task.position, task.created_at),
    }


def snoozed(task: Task[Any], now: datetime, *, delay_sec: float) -> Settlement:
    """Deliver the task again after ``delay_sec``, without counting this attempt."""
    changes = waiting(task, now, delay_sec)
    return Settlement(Outcome.SNOOZED, changes, None, {"attempts": -1})


def released(task: Task[Any], now: datetime, *, front: bool) -> Settlement:
    """Release the task: its attempt is refunded, and it is ready at once."""
    original = original_position(task.position, task.created_at)
    changes = {
        "status": filters.PENDING,
        "next_retry_at": None,
        "position": front_position(now) if front else original,
    }
    return Settlement(Outcome.RELEASED, changes, None, {"attempts": -1})


# One task


def settle(
    task: Task[Any],
    settlement: Settlement,
    *,
    now: datetime,
    settings: QueueSettings,
    session: Any = None,
) -> Operation[None]:
    """Write a settlement, or raise :class:`LeaseLost` if the claim no longer holds the task.

    Fenced by the lease token. Safe to repeat: if nothing matches, the history shows whether this
    settlement was written before.
    """
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
    """Update the claimed task by a method of the collection, and return the reply.

    A task whose history or counts have the wrong type gets new ones.
    """
    fence, limit = filters.claimed(task), settings.history_limit
    update = settlement_update(task, settlement, now=now, history_limit=limit)
    try:
        return (yield Call(method, fence, update, session=session, **options))
    except OperationFailure as exc:
        # The caller's transaction is aborted, and nothing can be written in it any more.
        if exc.code not in mongo_errors.WRONG_TYPE or session is not None:
            raise
    update = settlement_update(task, settlement, now=now, history_limit=limit, reset=True)
    return (yield Call(method, fence, update, **options))


def touch(task: Task[Any], expires_at: datetime, now: datetime) -> Operation[None]:
    """Move the end of the lease, fenced by its token.

    Safe to repeat: it sets the same instant again.
    """
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
    reset: bool = False,
) -> Document:
    """Return the update of a settlement: the new state, and the attempt's entry in the history.

    ``reset`` replaces the history and the counts, where the stored ones have the wrong type.
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
    if reset:
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
    """Return the error to store for a message, or for an exception, whose type is the code."""
    if isinstance(error, BaseException):
        code = code or type(error).__name__
        message = f"{type(error).__name__}: {_text(error)}"
    else:
        message = otherwise if error is None else _text(error)
    return TaskError.trusted(message=storable_text(message, LONGEST_MESSAGE), code=code, at=now)


def invalid_task(reason: str, now: datetime) -> TaskError:
    """Return the error of a stored document that cannot be run as a task."""
    return TaskError.trusted(
        message=storable_text(reason, LONGEST_IN_HISTORY), code=INVALID_TASK, at=now
    )


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 (an error whose text fails must still be stored)
        return f"<{type(value).__name__} without a text>"


def storable_text(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """Return a text that BSON can hold, cut to ``longest`` bytes."""
    return text.encode("utf-8", "backslashreplace")[:longest].decode("utf-8", "ignore")


def _confirm(
    task: Task[Any], outcome: Outcome, *, settings: QueueSettings, session: Any
) -> Operation[None]:
    """Return if this very settlement is in the history; otherwise raise :class:`LeaseLost`."""
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
    """Return where a settled task may be, in the order in which it moves."""
    return [Target.TASKS, Target.DEAD_LETTERS] if settings.separate_dlq else [Target.TASKS]


def settled_as(task: Claim, outcome: Outcome) -> Document:
    """Match the task if its history shows this very settlement."""
    token = task.lease.token if task.lease else None
    entry = {"lease_token": token, "outcome": outcome.value}
    return {"_id": {"$eq": task.id}, "history": {"$elemMatch": entry}}


def explain_loss(task: Claim, *, session: Any = None) -> Operation[LeaseLost]:
    """Return the error that says why a claim no longer holds its task."""
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


# Many tasks


class FencedSettlement(NamedTuple):
    """A task, its settlement, and the fence under which that is written."""

    task: Claim
    settlement: Settlement
    fence: Document


class Rejection(NamedTuple):
    """A settlement that MongoDB did not write, because of the stored document."""

    settlement: FencedSettlement
    code: int
    message: str


def settle_all(
    settlements: Sequence[FencedSettlement], *, now: datetime, settings: QueueSettings
) -> Operation[int]:
    """Write settlements, and return how many tasks were still held.

    Each is fenced, and safe to repeat. The first rejection is raised after all are written.
    """
    matched, rejected = yield from _write(settlements, now=now, settings=settings)
    _raise_first(rejected)
    return matched


def settle_reclaimed(
    settlements: Sequence[FencedSettlement],
    *,
    now: datetime,
    settings: QueueSettings,
    progress: Progress,
) -> Operation[int]:
    """Write the settlements of tasks reclaimed from their workers; return how many were written.

    Each is fenced by the lease that was read, and safe to repeat. A task whose settlement is
    rejected becomes a dead letter, or every sweep would meet it again. One that cannot be changed
    at all does not stop the others: ``progress`` keeps the first such rejection, to raise it last.
    """
    waits = [one for one in settlements if one.settlement.changes["status"] == filters.PENDING]
    dead = [one for one in settlements if one.settlement.changes["status"] != filters.PENDING]
    reclaimed, rejected = yield from _write(waits, now=now, settings=settings)
    progress.counts["reclaimed"] += reclaimed
    buried, rejected_dead = yield from _write(dead, now=now, settings=settings)
    burials = [_burial(one, now) for one in (*rejected, *rejected_dead)]
    more, unburied = yield from _write_once(burials, now=now, settings=settings, reset=True)
    progress.counts["buried"] += buried + more
    gone = [*_without(dead, rejected_dead), *_without(burials, unburied)]
    yield from _note_buried(gone, buried + more, now, progress)
    if unburied:
        progress.rejection = progress.rejection or _failure(unburied[0])
    return reclaimed + buried + more


def _without(
    settlements: Sequence[FencedSettlement], rejected: Sequence[Rejection]
) -> list[FencedSettlement]:
    left_out = {id(one.settlement) for one in rejected}
    return [one for one in settlements if id(one) not in left_out]


def _note_buried(
    dead: Sequence[FencedSettlement], count: int, now: datetime, progress: Progress
) -> Operation[None]:
    """Note which tasks were buried. If fewer were written than given, ask which ones."""
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
    """Return which of these tasks became dead letters at this instant."""
    buried = {**filters.any_of(ids), **filters.DEAD, "finished_at": now}
    if code is not None:
        buried["error.code"] = code
    return [document["_id"] for document in (yield Call("find", buried, {"_id": 1}))]


def _burial(rejection: Rejection, now: datetime) -> FencedSettlement:
    task, settlement, fence = rejection.settlement
    error = invalid_task(f"MongoDB rejects its settlement: {rejection.message}", now)
    return FencedSettlement(task, failed(now, error, outcome=settlement.outcome), fence)


def _write(
    settlements: Sequence[FencedSettlement], *, now: datetime, settings: QueueSettings
) -> Operation[tuple[int, list[Rejection]]]:
    """Write settlements; return how many matched, and the rejected ones.

    Those rejected for a field of the wrong type are written again, with that field reset.
    """
    matched, rejected = yield from _write_once(settlements, now=now, settings=settings)
    malformed = [one.settlement for one in rejected if one.code in mongo_errors.WRONG_TYPE]
    others = [one for one in rejected if one.code not in mongo_errors.WRONG_TYPE]
    more, still = yield from _write_once(malformed, now=now, settings=settings, reset=True)
    return matched + more, others + still


def _write_once(
    settlements: Sequence[FencedSettlement],
    *,
    now: datetime,
    settings: QueueSettings,
    reset: bool = False,
) -> Operation[tuple[int, list[Rejection]]]:
    if not settlements:
        return 0, []
    limit = settings.history_limit
    updates = [
        UpdateOne(
            fence,
            settlement_update(task, settlement, now=now, history_limit=limit, reset=reset),
        )
        for task, settlement, fence in settlements
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
            Rejection(settlements[error["index"]], error["code"], error["errmsg"])
            for error in errors
        ]
    return int(result.matched_count), []


def _raise_first(rejected: Sequence[Rejection]) -> None:
    if rejected:
        raise _failure(rejected[0])


def _failure(rejection: Rejection) -> OperationFailure:
    return OperationFailure(rejection.message, rejection.code)


def settle_batch(
    plain: Sequence[Claim],
    others: Sequence[tuple[Task[Any], Settlement]],
    *,
    now: datetime,
    settings: QueueSettings,
) -> Operation[list[LeaseLost]]:
    """Write settlements of any kind, with as few writes as possible.

    ``plain`` are done, without a result. Returns the leases that were lost; all other tasks are
    settled. Each write is fenced by lease tokens, and safe to repeat.
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
    """Mark many tasks done: one write per batch claimed together, one for all others.

    Returns the leases that were lost; the other tasks are done. Fenced by lease tokens, and safe
    to repeat: tasks that were marked before are found in their history.
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
            # It stopped at a malformed task; those before it are found to be done.
            singly += group
    ended = [FencedSettlement(task, settlement, filters.claimed(task)) for task in singly]
    matched += yield from settle_all(ended, now=now, settings=settings)
    if matched == len({(task.id, task.lease and task.lease.token) for task in tasks}):
        return []
    return (yield from _find_lost([(task, settlement) for task in tasks], settings))


def _find_lost(
    settled: Sequence[tuple[Claim, Settlement]], settings: QueueSettings
) -> Operation[list[LeaseLost]]:
    """Return the lost leases: their settlements are in no history that a majority has."""
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
