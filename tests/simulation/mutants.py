"""Deliberate faults in the queue. The simulation must find each of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest

from microqueue import clock, schedule, schedules
from microqueue.errors import DuplicateTask, MicroqueueError
from microqueue.operations import (
    batches,
    claim,
    confirm,
    deadlines,
    dedupe_keys,
    dlq_collection,
    duplicates,
    enqueue,
    filters,
    maintenance,
    replay,
    settle,
)
from microqueue.operations import schedules as schedule_operations
from microqueue.operations.call import Call, Target
from microqueue.operations.settle import FencedSettlement
from microqueue.topic import TopicCore
from tests.simulation import roles
from tests.simulation.ledger import key_of
from tests.simulation.runs import FAULTS
from tests.simulation.world import Wait, World

Patch = pytest.MonkeyPatch
FAILOVERS = {"failover": 0.03, "lost_reply": 0.05}
CRASHES = {"crash": 0.02, "pause": 0.01}
APART = 3
"""A seed with dead letters in their own collection; so are the two after it."""


@dataclass(frozen=True)
class Mutant:
    """A fault in the queue, the promises that it may break first, and how to find it."""

    breaks: set[str]
    apply: Callable[[Patch], None]
    faults: dict[str, float] = field(default_factory=lambda: FAULTS)
    first_seed: int = 1


# Leases and claims


def no_fence(patch: Patch) -> None:
    patch.setattr(filters, "claimed", lambda task: {"_id": task.id})
    patch.setattr(
        filters, "claimed_together", lambda tasks: filters.any_of(one.id for one in tasks)
    )


def early_reclaim(patch: Patch) -> None:
    before = filters.lease_expired
    patch.setattr(filters, "lease_expired", lambda now: before(now + timedelta(milliseconds=700)))


def unguarded_reclaim(patch: Patch) -> None:
    patch.setattr(
        maintenance,
        "FencedSettlement",
        lambda task, settlement, _fence: FencedSettlement(task, settlement, {"_id": task.id}),
    )


def clock_ahead(patch: Patch) -> None:
    now = clock.ServerClock.now
    patch.setattr(clock.ServerClock, "now", lambda self: now(self) + timedelta(milliseconds=600))


def uncounted_claim(patch: Patch) -> None:
    update = claim.claim_update
    patch.setattr(claim, "claim_update", lambda lease: {"$set": update(lease)["$set"]})


def unguarded_claim(patch: Patch) -> None:
    patch.setattr(claim, "_these", lambda window: filters.any_of([one["_id"] for one in window]))
    patch.setattr(filters, "READY", {})


def missing_refund(patch: Patch) -> None:
    released = settle.released
    patch.setattr(
        settle,
        "released",
        lambda *given, **options: replace(released(*given, **options), increments={}),
    )


def lost_release(patch: Patch) -> None:
    released = settle.released
    never = {"next_retry_at": filters.FAR, "deadline_at": filters.FAR}

    def lost(*given: Any, **options: Any) -> Any:
        found = released(*given, **options)
        return replace(found, changes={**found.changes, **never})

    patch.setattr(settle, "released", lost)


def kept_token(patch: Patch) -> None:
    update = settle.settlement_update

    def kept(*given: Any, **options: Any) -> Any:
        found = update(*given, **options)
        found["$set"].pop("lease_token", None)
        return found

    patch.setattr(settle, "settlement_update", kept)


def settlement_before_the_handler(patch: Patch) -> None:
    def handle(world: Any, actor: Any, one: Any) -> Any:
        yield actor.core.mark_done(one.task, None, None)
        key = key_of(one.document)
        yield Wait(200)
        world.ledger.start(
            one.document, actor.name, now=world.now(), ends_at=one.task.lease.expires_at
        )
        world.ledger.end(key, "done", 0)

    def careful(world: Any, actor: Any, one: Any) -> Any:
        try:
            yield from handle(world, actor, one)
        except MicroqueueError:
            return

    patch.setattr(roles, "handle", careful)


# Confirmations


def local_confirmation(patch: Patch) -> None:
    def holds(selection: Any, **options: Any) -> Any:
        found = yield Call("find_one", selection, {"_id": 1}, **options)
        return found is not None

    def all_hold(_proofs: Any, **_options: Any) -> Any:
        yield from ()
        return True

    patch.setattr(confirm, "holds", holds)
    patch.setattr(confirm, "all_hold", all_hold)


def dropped_write_concern_error(patch: Patch) -> None:
    def drop(world: Any, actor: Any, _roll: float) -> None:
        applied, actor.applied = actor.applied, None
        world._drive(actor, applied.reply, None)  # noqa: SLF001

    patch.setattr(World, "_write_concern", drop)


# Sweeps


def double_promotion(patch: Patch) -> None:
    def promote(due: Any, now: Any) -> Any:
        ready = {"next_retry_at": None, "updated_at": now, "deadline_at": None}
        these = filters.any_of(one["_id"] for one in due)
        reply = yield Call("update_many", these, {"$set": ready})
        return reply.modified_count

    patch.setattr(deadlines, "_promote", promote)


def short_loop(patch: Patch) -> None:
    following, wrote = batches.Batches.next, batches.Batches.wrote
    short: set[int] = set()

    def next_unless_short(self: Any, limit: int) -> Any:
        if id(self) in short:
            short.discard(id(self))
            return []
        return (yield from following(self, limit))

    def note(self: Any, count: int) -> None:
        if count < len(self._batch):
            short.add(id(self))
        wrote(self, count)

    patch.setattr(batches.Batches, "next", next_unless_short)
    patch.setattr(batches.Batches, "wrote", note)


# Producers


def ignored_delay(patch: Patch) -> None:
    patch.setattr(enqueue, "not_before", lambda _new, _now: None)


def ignored_retry_delay(patch: Patch) -> None:
    waiting = settle.waiting
    patch.setattr(settle, "waiting", lambda task, now, _delay_sec: waiting(task, now, 0))


def ignored_backoff(patch: Patch) -> None:
    patch.setattr(settle, "backoff_sec", lambda _task, _settings: 0.0)


def strange_payload(patch: Patch) -> None:
    new = enqueue.new_document

    def strange(*given: Any, payload: Any, **options: Any) -> Any:
        return new(*given, payload={"n": payload["n"] + 10**6}, **options)

    patch.setattr(enqueue, "new_document", strange)


def unexplained_duplicate(patch: Patch) -> None:
    def nothing(documents: Any, _settings: Any) -> Any:
        yield from ()
        return [None] * len(documents)

    patch.setattr(enqueue, "_find_blocking", nothing)


def period_without_key(patch: Patch) -> None:
    def complete(tasks: Any, **_options: Any) -> Any:
        yield from dedupe_keys._release(tasks)  # noqa: SLF001
        return [None] * len(tasks)

    patch.setattr(dedupe_keys, "complete", complete)


def success_as_duplicate(patch: Patch) -> None:
    insert = enqueue.enqueue

    def refused(document: Any, **options: Any) -> Any:
        yield from insert(document, **options)
        if "dedupe_key" in document:
            raise DuplicateTask(
                queue=document["queue"], task_id=document["_id"], dedupe_key=None, existing_id=None
            )

    patch.setattr(enqueue, "enqueue", refused)


def replaced_while_it_runs(patch: Patch) -> None:
    patch.setattr(duplicates, "REPLACEABLE", {})
    patch.setattr(duplicates, "_replaceable", lambda _document: True)


def forgotten_payload(patch: Patch) -> None:
    replacement = duplicates._replacement  # noqa: SLF001

    def without_payload(document: Any, token: str) -> Any:
        found = replacement(document, token)
        del found["$set"]["payload"]
        return found

    patch.setattr(duplicates, "_replacement", without_payload)


# Schedules and topics


def run_with_a_new_id(patch: Patch) -> None:
    run_id = schedule.run_id
    patch.setattr(schedules, "run_id", lambda *given: f"{run_id(*given)}:{secrets.token_hex(3)}")


def advance_before_insert(patch: Patch) -> None:
    add, advance = schedules._add_once, schedule_operations.advance  # noqa: SLF001
    waiting: dict[Any, Any] = {}

    def later(*given: Any) -> Any:
        yield from ()
        waiting[schedule.run_id(given[1], given[2])] = given

    def advance_first(*given: Any, run: Any, **options: Any) -> Any:
        found = yield from advance(*given, run=run, **options)
        if found is not None and run is not None:
            yield from add(*waiting[run.task_id])
        return found

    patch.setattr(schedules, "_add_once", later)
    patch.setattr(schedule_operations, "advance", advance_first)


def message_with_new_ids(patch: Patch) -> None:
    new_task = TopicCore._new_task  # noqa: SLF001

    def renamed(*given: Any) -> Any:
        found = new_task(*given)
        return found.model_copy(update={"task_id": f"{found.task_id}/{secrets.token_hex(3)}"})

    patch.setattr(TopicCore, "_new_task", renamed)


def message_without_transaction(patch: Patch) -> None:
    many = enqueue.enqueue_many

    def plain(*given: Any, **options: Any) -> Any:
        return many(*given, **{**options, "atomic": False})

    patch.setattr(enqueue, "enqueue_many", plain)


# Dead letters


def _copy(document: Any) -> Call:
    copy = {**document, "version": 0}
    key = {"_id": document["_id"]}
    return Call("replace_one", key, copy, upsert=True, target=Target.DEAD_LETTERS)


def delete_before_copy(patch: Patch) -> None:
    def delete_first(document: Any) -> Any:
        yield Call("delete_one", {"_id": document["_id"]})
        yield _copy(document)
        return True

    patch.setattr(dlq_collection, "move_out", delete_first)


def copy_without_delete(patch: Patch) -> None:
    def only_copy(document: Any) -> Any:
        yield _copy(document)
        return False

    patch.setattr(dlq_collection, "move_out", only_copy)


def pretended_discard(patch: Patch) -> None:
    def discard(queries: Any, **_options: Any) -> Any:
        yield Call("find", queries[0])
        return 1

    patch.setattr(replay, "discard", discard)


PAUSES = {"pause": 0.1}
MUTANTS = {
    "no fence": Mutant({"overlap", "impossible"}, no_fence),
    "early reclaim": Mutant({"overlap", "repeated"}, early_reclaim),
    "unguarded reclaim": Mutant({"repeated", "status"}, unguarded_reclaim, PAUSES),
    "clock ahead": Mutant({"early", "overlap", "period"}, clock_ahead),
    "uncounted claim": Mutant({"attempts", "impossible"}, uncounted_claim),
    "unguarded claim": Mutant({"early", "overlap"}, unguarded_claim),
    "missing refund": Mutant({"failed"}, missing_refund, {}),
    "lost release": Mutant({"stuck"}, lost_release, {}),
    "kept token": Mutant({"impossible"}, kept_token),
    "settlement before the handler": Mutant(
        {"unrun", "lost", "repeated"}, settlement_before_the_handler, CRASHES
    ),
    "local confirmation": Mutant({"lost"}, local_confirmation, FAILOVERS),
    "dropped write-concern error": Mutant(
        {"lost", "overlap", "repeated", "status"},
        dropped_write_concern_error,
        {"failover": 0.02, "write_concern": 0.3},
    ),
    "double promotion": Mutant({"impossible"}, double_promotion, PAUSES),
    "short loop": Mutant({"unswept"}, short_loop, PAUSES),
    "ignored delay": Mutant({"early"}, ignored_delay, {}),
    "ignored retry delay": Mutant({"early"}, ignored_retry_delay),
    "ignored backoff": Mutant({"early"}, ignored_backoff),
    "strange payload": Mutant({"unknown"}, strange_payload, {}),
    "unexplained duplicate": Mutant({"rejected"}, unexplained_duplicate, {}),
    "period without key": Mutant({"period"}, period_without_key),
    "success as duplicate": Mutant({"refused"}, success_as_duplicate, {}),
    "replaced while it runs": Mutant({"impossible", "lost", "unrun"}, replaced_while_it_runs),
    "forgotten payload": Mutant({"replaced"}, forgotten_payload, {}),
    "run with a new id": Mutant({"second run"}, run_with_a_new_id, PAUSES),
    "advance before insert": Mutant({"missed run"}, advance_before_insert, CRASHES),
    "message with new ids": Mutant(
        {"overlap", "repeated"}, message_with_new_ids, {"lost_reply": 0.2}
    ),
    "message without transaction": Mutant(
        {"torn"}, message_without_transaction, {"partial": 0.5, "crash": 0.02}
    ),
    "delete before copy": Mutant({"lost"}, delete_before_copy, {"crash": 0.08}, APART),
    "copy without delete": Mutant({"doubled"}, copy_without_delete, {}, APART),
    "pretended discard": Mutant({"discarded", "repeated"}, pretended_discard, {}),
}
"""By name. The model has no change streams, so a lost wake-up has no effect in it."""
