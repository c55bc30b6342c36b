"""Deliberate faults in the queue, which the harness must find.

Each is a function that replaces a part of microqueue with the help of ``patch``, which works like
``setattr``: a test gives ``monkeypatch.setattr``, a process of a run :func:`setattr` itself.

A guard that is removed matters only if something happens between a read and the write that it
guards. Real processes are fast, so these mutants also widen that window, as a slow machine would.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from typing import Any, TypeAlias

from pymongo.errors import BulkWriteError, WriteConcernError
from pymongo.results import InsertManyResult, InsertOneResult

from microqueue import clock
from microqueue.drivers import driver
from microqueue.operations import batches, confirm, deadlines, filters, settle
from microqueue.operations.call import Call
from microqueue.worker import lease_renewal, worker
from tests.chaos.verifier import Verdict

Patch: TypeAlias = Callable[[Any, str, Any], None]

EARLY = timedelta(seconds=2.4)
"""Of leases that last for three seconds, and are renewed after one."""
AHEAD = timedelta(seconds=2)
LOCK_LOST_SEC = 2.6
"""Longer than the lock of the harness's sweepers: another one takes over."""
MOMENT_SEC = 0.25


def no_fence(patch: Patch) -> None:
    """Settle and renew by the id alone, whichever worker holds the lease."""
    patch(filters, "claimed", lambda task: {"_id": task.id})
    patch(filters, "claimed_together", lambda tasks: filters.any_of(one.id for one in tasks))


def local_confirmation(patch: Patch) -> None:
    """Take a read from the primary as proof that a write is stored."""

    def holds(selection: Any, **options: Any) -> Any:
        return (yield Call("find_one", selection, {"_id": 1}, **options)) is not None

    def one(selection: Any, **options: Any) -> Any:
        return (yield Call("find_one", selection, **options))

    def some(selection: Any, fields: Any = None, **options: Any) -> Any:
        read = (selection,) if fields is None else (selection, fields)
        return (yield Call("find", *read, **options))

    def which(proofs: Sequence[Any], **options: Any) -> Any:
        answers = []
        for proof in proofs:
            answers.append((yield from holds(proof, **options)))  # noqa: PERF401 (it yields)
        return answers

    def all_hold(proofs: Sequence[Any], **options: Any) -> Any:
        return all((yield from which(proofs, **options)))

    for function in (holds, one, some, which, all_hold):
        patch(confirm, function.__name__, function)


def clock_ahead(patch: Patch) -> None:
    """Estimate the server's time too late, each process by its own amount."""
    now, ahead = clock.ServerClock.now, AHEAD * Random(os.getpid()).random()
    patch(clock.ServerClock, "now", lambda self: now(self) + ahead)


def unguarded_reclaim(patch: Patch) -> None:
    """Reclaim by the id alone, though the task may have changed since its lease was read."""
    settle_reclaimed = settle.settle_reclaimed

    def reclaim(ended: Sequence[Any], **options: Any) -> Any:
        time.sleep(LOCK_LOST_SEC)
        blind = [replace_fence(one, {"_id": one.task.id}) for one in ended]
        return (yield from settle_reclaimed(blind, **options))

    patch(settle, "settle_reclaimed", reclaim)


def early_reclaim(patch: Patch) -> None:
    """Reclaim tasks whose lease has not expired yet."""
    expired = filters.lease_expired
    patch(filters, "lease_expired", lambda now: expired(now + EARLY))


def skipped_renewal(patch: Patch) -> None:
    """Renew no lease, and report that the worker lives."""
    patch(lease_renewal.LeaseRenewer, "_renew", lambda _self, _tasks: None)


def reversed_claim(patch: Patch) -> None:
    """Claim the last task of a priority first."""
    patch(filters, "READY_ORDER", [("priority", -1), ("position", -1), ("_id", -1)])


def replace_fence(one: Any, fence: dict[str, Any]) -> Any:
    """Return a settlement with another fence."""
    return type(one)(one.task, one.settlement, fence)


def lost_wakeup(patch: Patch) -> None:
    """Put claimed tasks into the buffer of a worker, and wake no thread for them."""

    def extend(self: Any, tasks: Any) -> bool:
        self._waiting.extend(tasks)
        return not self._closed

    patch(worker.TaskBuffer, "extend", extend)


def short_loop(patch: Patch) -> None:
    """End a loop when a batch changed fewer documents than it may."""
    following, wrote = batches.Batches.next, batches.Batches.wrote

    def wrote_some(self: Any, count: int) -> None:
        wrote(self, count)
        self.is_over = count < self.wanted

    def following_unless_short(self: Any, limit: int) -> Any:
        self.wanted = limit
        if getattr(self, "is_over", False):
            return []
        found = yield from following(self, limit)
        time.sleep(MOMENT_SEC / 5 if found else 0)
        return found

    patch(batches.Batches, "wrote", wrote_some)
    patch(batches.Batches, "next", following_unless_short)


def settlement_before_handler(patch: Patch) -> None:
    """Mark a task done, and run its handler afterwards."""
    handle = worker.Worker._handle  # noqa: SLF001 (that is the purpose)

    def settle_first(self: Any, task: Any) -> None:
        self._completer.complete(task, None, None, None)
        handle(self, task)

    patch(worker.Worker, "_handle", settle_first)


def double_promotion(patch: Patch) -> None:
    """Make due tasks ready by their ids alone, though another process may have done that."""

    def promote(due: Sequence[Any], now: Any) -> Any:
        if not due:
            return 0
        time.sleep(MOMENT_SEC)
        ready = {"next_retry_at": None, "updated_at": now, "deadline_at": None}
        these = filters.any_of(one["_id"] for one in due)
        return (yield Call("update_many", these, {"$set": ready})).modified_count

    patch(deadlines, "_promote", promote)


def dropped_write_concern_error(patch: Patch) -> None:
    """Report an insert as stored, though no majority has acknowledged it."""
    request = driver.SyncDriver._request  # noqa: SLF001 (that is the purpose)

    def lenient(self: Any, call: Any, limit_sec: float) -> Any:
        try:
            return request(self, call, limit_sec)
        except (WriteConcernError, BulkWriteError) as exc:
            details: Any = exc.details or {}
            if call.method == "insert_one":
                return InsertOneResult(call.arguments[0]["_id"], acknowledged=True)
            if call.method == "insert_many" and not details.get("writeErrors"):
                ids = [one["_id"] for one in call.arguments[0]]
                return InsertManyResult(ids, acknowledged=True)
            raise

    patch(driver.SyncDriver, "_request", lenient)


def missing_refund(patch: Patch) -> None:
    """Release a task, and let the attempt count."""
    released = settle.released
    patch(
        settle,
        "released",
        lambda *given, **options: replace(released(*given, **options), increments={}),
    )


@dataclass(frozen=True)
class Mutant:
    """A deliberate fault, and the short run that reveals it.

    Attributes:
        breaks: The verdicts of which there must be one.
        apply: Replaces a part of microqueue.
        faults: The faults of the run, as the plan names them: kind and target.
        server: The kind of server.
        operators: Whether dead letters are replayed and discarded.
        kinds: What handlers do more often than in the other runs.
        call_timeout_sec: The setting of this name, if the run needs a short one.
        minutes: How long tasks are enqueued.
        drain_sec: How long the queues may take to be empty.
    """

    breaks: set[Verdict]
    apply: Callable[[Patch], None]
    faults: tuple[str, ...] = ()
    server: str = "single"
    operators: bool = False
    kinds: tuple[tuple[str, float], ...] = ()
    call_timeout_sec: float | None = None
    minutes: float = 0.2
    drain_sec: float = 120.0


STOPS = ("sigstop worker",) * 4
KILLS = ("sigkill worker",) * 4
WITHOUT_MAJORITY: dict[str, Any] = {
    "faults": ("rollback",) * 2,
    "server": "replica-set",
    "call_timeout_sec": 2.0,
    "minutes": 0.4,
}

LONG = (("long", 12.0),)

MUTANTS: dict[str, Mutant] = {
    "no_fence": Mutant(
        {Verdict.NO_LEASE, Verdict.IMPOSSIBLE, Verdict.AFTER_SETTLEMENT},
        no_fence,
        STOPS[:2],
        kinds=LONG,
        minutes=0.3,
    ),
    "local_confirmation": Mutant({Verdict.LOST}, local_confirmation, **WITHOUT_MAJORITY),
    "clock_ahead": Mutant({Verdict.EARLY}, clock_ahead),
    "unguarded_reclaim": Mutant(
        {Verdict.AFTER_SETTLEMENT, Verdict.NO_LEASE, Verdict.OVERLAP},
        unguarded_reclaim,
        (*KILLS, *STOPS),
    ),
    "early_reclaim": Mutant({Verdict.OVERLAP, Verdict.UNEXPLAINED}, early_reclaim),
    "skipped_renewal": Mutant({Verdict.UNEXPLAINED}, skipped_renewal),
    "reversed_claim": Mutant({Verdict.ORDER}, reversed_claim),
    "lost_wakeup": Mutant({Verdict.NEVER_SETTLED}, lost_wakeup, drain_sec=30.0),
    "short_loop": Mutant({Verdict.LEFT}, short_loop, operators=True, kinds=(("fail", 20.0),)),
    "settlement_before_handler": Mutant({Verdict.STATUS}, settlement_before_handler),
    "double_promotion": Mutant({Verdict.IMPOSSIBLE, Verdict.OVERLAP}, double_promotion),
    "dropped_write_concern_error": Mutant(
        {Verdict.LOST}, dropped_write_concern_error, **WITHOUT_MAJORITY
    ),
    "missing_refund": Mutant(
        {Verdict.IMPOSSIBLE, Verdict.ATTEMPTS}, missing_refund, ("sigterm worker",) * 3
    ),
}


def apply(name: str) -> None:
    """Replace a part of microqueue in this process."""
    MUTANTS[name].apply(setattr)
