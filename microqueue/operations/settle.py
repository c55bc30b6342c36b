"""Settle: write the outcome of an attempt, for one task or for many at once.

A :class:`Settlement` says what an outcome changes. It is written under a fence: the write matches
the task only while the caller's claim holds it. Every write here is safe to repeat. A done task
keeps the token of its claim as a receipt. Other outcomes, such as a retry, add the attempt with its
token to the history. A settlement that matches nothing looks for that proof, by a write that a
majority acknowledges, and counts as success if it is there.

Without a retention, a done task is deleted. Then its absence is the proof.

In a caller's transaction, only what this transaction has written counts. A settlement that was
committed before had its own effects, and this transaction would store them a second time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple, cast

from pymongo import DeleteOne, UpdateOne
from pymongo.errors import BulkWriteError, OperationFailure

from microqueue import error_codes
from microqueue.clock import later
from microqueue.errors import LeaseLost
from microqueue.masking import place_to_cut
from microqueue.model import trusted
from microqueue.operations import burials, confirm, dlq_collection, filters, mongo_errors
from microqueue.operations.batches import SweepProgress
from microqueue.operations.call import Buried, Call, Document, Operation, Target
from microqueue.positions import front_position, original_position
from microqueue.run_ids import is_run_id
from microqueue.settings import QueueSettings
from microqueue.task import Claim, Outcome, Task, TaskError, TaskStatus
from microqueue.task_ids import id_key
from microqueue.tracebacks import format_traceback, text_of

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
    keep: bool = True
    """Whether the task is kept; otherwise it is deleted, and nothing else is written."""

    @property
    def status(self) -> TaskStatus:
        """The status of the task from now on."""
        return TaskStatus(self.changes["status"])

    def after_lost_worker(self, *, crashed: bool = False) -> Settlement:
        """Return the same, for a task whose worker was lost: it is isolated when it runs again.

        ``crashed`` counts the loss against the task.
        """
        increments = {**self.increments, "crashes": 1} if crashed else self.increments
        return replace(self, changes={**self.changes, "redelivered": True}, increments=increments)


def done(now: datetime, *, result: Any = None, keep: bool = True) -> Settlement:
    """Finish the task. The errors of earlier attempts stay in its history only.

    A task that is not kept is deleted.
    """
    changes: Document = {"status": filters.DONE, "finished_at": now, "deadline_at": now}
    if result is not None:
        changes["result"] = result
    return Settlement(Outcome.DONE, changes, keep=keep)


def failed(
    now: datetime,
    error: TaskError,
    *,
    outcome: Outcome = Outcome.FAILED,
    delivered: bool = True,
) -> Settlement:
    """Make the task a dead letter. If it never reached a handler, its attempt is refunded."""
    changes = {"status": filters.FAILED, "finished_at": now, "deadline_at": None}
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


def backoff_sec(task: Task[Any], settings: QueueSettings) -> float:
    """Return how long a task waits before its next attempt, unless the handler says otherwise."""
    policy = task.backoff or settings.backoff
    return policy.delay_seconds(task.attempts, previous=task.backoff_sec)


def waiting(task: Task[Any], now: datetime, delay_sec: float) -> Document:
    """Return the fields of a task that waits, at its original position."""
    delay = timedelta(seconds=delay_sec)
    next_retry_at = later(now, delay) if delay else None
    return {
        "status": filters.PENDING,
        "next_retry_at": next_retry_at,
        "deadline_at": filters.waiting_deadline(next_retry_at, task.expires_at),
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
        "deadline_at": filters.waiting_deadline(None, task.expires_at),
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

    Fenced by the lease token. Safe to repeat: if nothing matches, the task shows whether this
    settlement was written before.
    """
    if settlement.keep:
        result = yield from update_claimed(
            "update_one", task, settlement, now=now, settings=settings, session=session
        )
        settled = bool(result.matched_count)
    else:
        result = yield Call("delete_one", filters.claimed(task), session=session)
        settled = bool(result.deleted_count)
    if not settled:
        yield from _confirm(task, settlement, settings=settings, session=session)
    if session is None:  # A transaction may still be aborted.
        yield from _report_buried([(task, settlement)])


def _report_buried(settled: Iterable[tuple[Task[Any], Settlement]]) -> Operation[None]:
    """Report those of the written settlements that made dead letters."""
    letters = [
        burials.of_task(task, one.error, refund=-one.increments.get("attempts", 0))
        for task, one in settled
        if one.error is not None and one.status is TaskStatus.FAILED
    ]
    if letters:
        yield Buried(letters)


def update_claimed(
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
    update = {"$set": {"deadline_at": expires_at, "updated_at": now}}
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

    A success has no entry: ``microqueue.task.last_attempt`` derives it from the document.
    ``reset`` replaces the history and the counts, where the stored ones have the wrong type.
    """
    if settlement.outcome is Outcome.DONE:
        return {"$set": {**settlement.changes, "updated_at": now}, "$unset": {"error": ""}}
    lease = task.lease
    error = settlement.error.model_dump(exclude={"traceback"}) if settlement.error else None
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
    }
    if error:
        traceback = settlement.error.traceback if settlement.error else None
        changes["error"] = {**error, "traceback": traceback} if traceback else error
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
    return update


def describe_error(
    error: object,
    code: str | None,
    now: datetime,
    *,
    otherwise: str,
    settings: QueueSettings,
    raised: BaseException | None = None,
) -> TaskError:
    """Return the error to store for a message, or for an exception, whose type is the code.

    ``raised`` is an exception that had the message; its traceback is stored.
    """
    traceback = None if raised is None else format_traceback(raised, settings.traceback_limit)
    if isinstance(error, BaseException):
        name, text = type(error).__name__, text_of(error)
        code = code or name
        message = f"{name}: {text}" if text else name
        traceback = format_traceback(error, settings.traceback_limit)
    else:
        message = otherwise if error is None else text_of(error)
    return trusted(
        TaskError,
        message=storable_text(message, LONGEST_MESSAGE),
        code=code,
        at=now,
        traceback=traceback,
    )


def invalid_task(reason: str, now: datetime) -> TaskError:
    """Return the error of a stored document that cannot be run as a task."""
    return trusted(
        TaskError,
        message=storable_text(reason, LONGEST_IN_HISTORY),
        code=error_codes.INVALID_TASK,
        at=now,
        traceback=None,
    )


def storable_text(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """Return a text that BSON can hold, cut to ``longest`` bytes, but not inside a password."""
    encoded = text.encode("utf-8", "backslashreplace")
    storable = encoded.decode()
    if len(encoded) <= longest:
        return storable
    most = len(encoded[:longest].decode("utf-8", "ignore"))
    return storable[: place_to_cut(storable, most)]


def _confirm(
    task: Task[Any], settlement: Settlement, *, settings: QueueSettings, session: Any
) -> Operation[None]:
    """Return if this very settlement was written before; otherwise raise :class:`LeaseLost`."""
    if session is not None and session.in_transaction:
        if not (yield from _is_of_transaction(task, settlement, session)):
            raise (yield from explain_loss(task, session=session))
        return
    if not settlement.keep:
        if (yield from _still_exist([task], settings)):
            raise (yield from explain_loss(task))
        return
    settled = settled_as(task, settlement.outcome)
    for target in possible_targets(settings):
        if (yield from confirm.holds(settled, target=target)):
            return
    raise (yield from explain_loss(task))


def _is_of_transaction(task: Task[Any], settlement: Settlement, session: Any) -> Operation[bool]:
    """Return whether the open transaction of this session has written this very settlement.

    Then the transaction sees it, and the claim still holds the task for all others. A deleted task
    proves nothing: it was deleted before, or added after the snapshot of the transaction.
    """
    if not settlement.keep:
        return False
    seen = settled_as(task, settlement.outcome)
    if (yield Call("find_one", seen, {"_id": 1}, session=session)) is None:
        return False
    return (yield Call("find_one", filters.claimed(task), {"_id": 1})) is not None


def possible_targets(settings: QueueSettings) -> list[Target]:
    """Return where a settled task may be, in the order in which it moves."""
    return [Target.TASKS, Target.DEAD_LETTERS] if settings.separate_dlq else [Target.TASKS]


def settled_as(task: Claim, outcome: Outcome) -> Document:
    """Match the task if it shows this very settlement."""
    token = task.lease.token if task.lease else None
    if outcome is Outcome.DONE:
        return {
            "_id": filters.equal(task.id),
            "status": filters.DONE,
            "lease_token": filters.equal(token),
        }
    entry = {"lease_token": filters.equal(token), "outcome": outcome.value}
    return {"_id": filters.equal(task.id), "history": {"$elemMatch": entry}}


def _still_exist(tasks: Sequence[Claim], settings: QueueSettings) -> Operation[set[Hashable]]:
    """Return the keys of the ids that exist; a majority has either answer.

    A task may move to the dead letters in between, and is seen in one of the two collections.
    """
    ids = {id_key(task.id): task.id for task in tasks}
    existing: set[Hashable] = set()
    for target in possible_targets(settings):
        left = {key: one for key, one in ids.items() if key not in existing}
        if not left:
            break
        fences = [{"_id": filters.equal(one), "retired_at": None} for one in left.values()]
        there = yield from confirm.which(fences, target=target)
        existing |= {key for key, sure in zip(left, there, strict=True) if sure}
    return existing


def explain_loss(task: Claim, *, session: Any = None) -> Operation[LeaseLost]:
    """Return the error that says why a claim no longer holds its task."""
    held_by = task.lease.worker_id if task.lease else None
    fields = {"status": 1, "worker_id": 1, "lease_token": 1}
    document = yield Call("find_one", {"_id": filters.equal(task.id)}, fields, session=session)
    holder = None
    if document is None:
        reason = "the task is gone"
    elif document["status"] == filters.PROCESSING:
        holder = document.get("worker_id")
        reason = f"it expired, and {holder!r} holds the task now"
    else:
        reason = f"the task is {document['status']}"
    status = None if document is None else document["status"]
    return LeaseLost(
        task_id=task.id, worker_id=held_by, reason=reason, status=status, holder=holder
    )


# Many tasks


class FencedSettlement(NamedTuple):
    """A task, its settlement, and the fence under which that is written."""

    task: Claim
    settlement: Settlement
    fence: Document


class Rejection(NamedTuple):
    """A settlement that MongoDB did not write, because of the stored document."""

    fenced: FencedSettlement
    code: int
    message: str


def settle_all(
    settlements: Sequence[FencedSettlement], *, now: datetime, settings: QueueSettings
) -> Operation[int]:
    """Write settlements, and return how many tasks were still held.

    Each is fenced, and safe to repeat. The first rejection is raised after all are written.
    """
    matched, rejected = yield from _write_all(settlements, now=now, settings=settings)
    _raise_first(rejected)
    return matched


def settle_reclaimed(
    settlements: Sequence[FencedSettlement],
    *,
    now: datetime,
    settings: QueueSettings,
    progress: SweepProgress,
) -> Operation[int]:
    """Write the settlements of tasks reclaimed from their workers; return how many were written.

    Each is fenced by the lease that was read, and safe to repeat. A task whose settlement is
    rejected becomes a dead letter, or every sweep would meet it again. One that cannot be changed
    at all does not stop the others: ``progress`` keeps the first such rejection, to raise it last.
    """
    waits = [one for one in settlements if one.settlement.status is TaskStatus.PENDING]
    dead = [one for one in settlements if one.settlement.status is not TaskStatus.PENDING]
    reclaimed, rejected = yield from _write_all(waits, now=now, settings=settings)
    progress.counts["reclaimed"] += reclaimed
    buried, rejected_dead = yield from _write_all(dead, now=now, settings=settings)
    malformed = [_burial(one, now) for one in (*rejected, *rejected_dead)]
    more, unburied = yield from _write_once(malformed, now=now, settings=settings, reset=True)
    progress.counts["buried"] += buried + more
    gone = [*_without(dead, rejected_dead), *_without(malformed, unburied)]
    yield from _note_buried(gone, buried + more, now, progress)
    if unburied:
        progress.rejection = progress.rejection or _failure(unburied[0])
    return reclaimed + buried + more


def _without(
    settlements: Sequence[FencedSettlement], rejected: Sequence[Rejection]
) -> list[FencedSettlement]:
    left_out = {id(one.fenced) for one in rejected}
    return [one for one in settlements if id(one) not in left_out]


def _note_buried(
    dead: Sequence[FencedSettlement], count: int, now: datetime, progress: SweepProgress
) -> Operation[None]:
    """Note which tasks were buried. If fewer were written than given, ask which ones."""
    if count < len(dead):
        ids = yield from burials.find_buried([one.task.id for one in dead], now)
        known = set(map(id_key, ids))
        dead = [one for one in dead if id_key(one.task.id) in known]
    by_code: dict[str, list[Any]] = {}
    for one in dead:
        error = one.settlement.error
        by_code.setdefault(str(error.code if error else None), []).append(one.task.id)
    for code, ids in by_code.items():
        progress.bury(code, ids, len(ids))
    # Sweeps settle whole tasks.
    yield from _report_buried((cast("Task[Any]", one.task), one.settlement) for one in dead)


def _burial(rejection: Rejection, now: datetime) -> FencedSettlement:
    task, settlement, fence = rejection.fenced
    error = invalid_task(f"MongoDB rejects its settlement: {rejection.message}", now)
    return FencedSettlement(task, failed(now, error, outcome=settlement.outcome), fence)


def _write_all(
    settlements: Sequence[FencedSettlement], *, now: datetime, settings: QueueSettings
) -> Operation[tuple[int, list[Rejection]]]:
    """Write settlements; return how many matched, and the rejected ones.

    Those rejected for a field of the wrong type are written again, with that field reset.
    """
    matched, rejected = yield from _write_once(settlements, now=now, settings=settings)
    malformed = [one.fenced for one in rejected if one.code in mongo_errors.WRONG_TYPE]
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
        if settlement.keep
        else DeleteOne(fence)
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
        return int(details["nMatched"]) + int(details.get("nRemoved", 0)), [
            Rejection(settlements[error["index"]], error["code"], error["errmsg"])
            for error in errors
        ]
    return int(result.matched_count) + int(result.deleted_count), []


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
    keep_done: bool = True,
) -> Operation[list[LeaseLost]]:
    """Write settlements of any kind, with as few writes as possible.

    ``plain`` are done, without a result, and deleted unless ``keep_done``. Returns the leases that
    were lost; all other tasks are settled. Each write is fenced by lease tokens, and safe to
    repeat.
    """
    lost = yield from mark_all_done(plain, now=now, settings=settings, keep=keep_done)
    if others:
        ended = [
            FencedSettlement(task, settlement, filters.claimed(task)) for task, settlement in others
        ]
        if (yield from settle_all(ended, now=now, settings=settings)) != len(others):
            lost += yield from _find_lost(others, settings)
        if settings.separate_dlq:
            for task, settlement in others:
                if settlement.status is TaskStatus.FAILED:
                    yield from dlq_collection.move_out_by_id(task.id)
        lost_ids = {id_key(one.task_id) for one in lost}
        # At the end: until then, an error lets the caller repeat all of this.
        yield from _report_buried(one for one in others if id_key(one[0].id) not in lost_ids)
    return lost


def mark_all_done(
    tasks: Sequence[Claim], *, now: datetime, settings: QueueSettings, keep: bool = True
) -> Operation[list[LeaseLost]]:
    """Mark many tasks done, or delete them, with one write. Runs of schedules are kept.

    Returns the leases that were lost; the other tasks are done. Fenced by lease tokens, and safe
    to repeat: a task that was marked before has its token.
    """
    if not tasks:
        return []
    if not keep and (runs := [task for task in tasks if is_run_id(task.id)]):
        lost = yield from mark_all_done(runs, now=now, settings=settings)
        others = [task for task in tasks if not is_run_id(task.id)]
        return lost + (yield from mark_all_done(others, now=now, settings=settings, keep=False))
    settlement = done(now, keep=keep)
    fence = filters.claimed(tasks[0]) if len(tasks) == 1 else filters.claimed_together(tasks)
    if keep:
        limit = settings.history_limit
        update = settlement_update(tasks[0], settlement, now=now, history_limit=limit)
        count = (yield Call("update_many", fence, update)).matched_count
    else:
        count = (yield Call("delete_many", fence)).deleted_count
    if count == len(tasks) or count == len(set(map(filters.claim_of, tasks))):
        return []
    return (yield from _find_lost([(task, settlement) for task in tasks], settings))


def _find_lost(
    settled: Sequence[tuple[Claim, Settlement]], settings: QueueSettings
) -> Operation[list[LeaseLost]]:
    """Return the lost leases: no task that a majority has shows their settlements."""
    deleted = [task for task, one in settled if not one.keep]
    unproven = [one for one in settled if one[1].keep]
    for target in possible_targets(settings):
        if unproven:
            proofs = [settled_as(task, one.outcome) for task, one in unproven]
            proven = yield from confirm.which(proofs, target=target)
            unproven = [one for one, sure in zip(unproven, proven, strict=True) if not sure]
    without_lease = [task for task, _ in unproven]
    if deleted:
        existing = yield from _still_exist(deleted, settings)
        without_lease += [task for task in deleted if id_key(task.id) in existing]
    lost = []
    for one in without_lease:
        error = yield from explain_loss(one)
        lost.append(error)
    return lost
