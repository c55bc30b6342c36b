"""The scheduler: one thread, virtual time, and a seed that decides everything."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    NotPrimaryError,
    PyMongoError,
    WTimeoutError,
)

from microqueue.clock import ServerClock
from microqueue.core import QueueCore
from microqueue.drivers.error_translation import translate
from microqueue.errors import MicroqueueError, ServerUnavailable
from microqueue.operations.call import Buried, Call, Operation, RepeatDue, Target, Timed
from microqueue.settings import QueueSettings
from tests.simulation.ledger import Ledger, Violation
from tests.simulation.mongodb import CODEC, MULTIPLE, READS, Interrupted, Server

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
QUEUES = ("default", "other")
SINGLE_WRITES = frozenset(
    {"insert_one", "update_one", "replace_one", "find_one_and_update", "delete_one"}
)
"""What the driver itself repeats after a failover, by retryable writes."""
EXPIRY_STEPS = 400
"""How often the server deletes expired keys."""
LARGEST_DRIFT = 0.9e-4
HOUR_SEC = 3600
WTIMEOUT = 64
NEVER_MS = 10**15

FAULT_KINDS = {
    "crash": "a process ends between two calls, and starts again later",
    "pause": "a process stands still, for up to two leases",
    "clock_jump": "the wall clock of a process jumps by up to an hour",
    "lost_request": "the server never gets a request",
    "late_request": "the client gives up, and the server performs the request later",
    "lost_reply": "the server performs a request, and the client does not know",
    "write_concern": "a write is made, and its reply says that no majority has acknowledged it",
    "partial": "the primary steps down in the middle of a write to several documents",
    "failover": "another primary is elected, without some of what no majority has",
}
"""The kinds of faults."""


@dataclass(frozen=True)
class Wait:
    """Be idle for some milliseconds."""

    ms: int


class Step(NamedTuple):
    """A step: who, when, and with which fault. ``roll`` decides the details of the fault."""

    actor: int
    at_ms: int
    fault: str | None = None
    roll: float = 0.0


class Applied(NamedTuple):
    """What the server has done for a call, and the client does not know yet."""

    reply: Any
    write: int
    error: PyMongoError | None = None


class Late(NamedTuple):
    """A request that the server performs after its client has given up."""

    at_ms: int
    call: Call


Script = Generator["Operation[Any] | Wait", Any, None]
Role = Callable[["World", "Actor"], Script]


@dataclass(eq=False, slots=True)
class Actor:
    """One process. Its wall clock is wrong, and its monotonic clock drifts."""

    name: str
    index: int
    role: Role
    choices: random.Random
    wall_offset_sec: float
    rate: float
    clock: ServerClock = field(default_factory=ServerClock)
    cores: dict[str, QueueCore[Any]] = field(default_factory=dict)
    script: Script = field(init=False)
    operation: Operation[Any] | None = None
    call: Call | None = None
    applied: Applied | None = None
    sent_ms: int = 0
    wakes_ms: int = 0
    runs: list[Any] = field(default_factory=list)

    @property
    def core(self) -> QueueCore[Any]:
        """The core of the first queue."""
        return self.cores[QUEUES[0]]


class World:
    """A server, actors, and the faults that a seed chooses.

    Args:
        seed: Decides everything.
        settings: The settings of the queues.
        roles: The role of each actor.
        faults: How likely each kind of fault is, per step.
        trace: Called with a line about each step.
    """

    def __init__(
        self,
        seed: int,
        settings: QueueSettings,
        roles: Mapping[str, Role],
        *,
        faults: Mapping[str, float],
        trace: Callable[[str], object] | None = None,
    ) -> None:
        self.settings = settings
        self.ledger = Ledger(
            kept=settings.retention is None or settings.retention > HOUR,
            moved=settings.separate_dlq,
            now=self.now,
        )
        self.server = Server(self.now, self.ledger.check_document)
        self.calm_from: int | None = None
        """The step from which on there are no faults and no new tasks."""
        self.steps: list[Step] = []
        self.fault_counts: Counter[str] = Counter()
        self.undone = 0
        """How many writes failovers have undone."""
        self.repeats = 0
        """How many calls were performed again after the server had performed them."""
        self._seed = seed
        self._schedule = random.Random(f"schedule {seed}")
        self._faults = _thresholds(faults)
        self._trace = trace
        self._now_ms = 0
        self._late: list[Late] = []
        self._born: Counter[str] = Counter()
        self._actor: Actor | None = None
        self.actors: list[Actor] = []
        for index, (name, role) in enumerate(roles.items()):
            self.actors.append(self._new_actor(name, index, role))

    @property
    def calm(self) -> bool:
        """Whether there are no more faults and no new tasks."""
        return self.calm_from is not None

    def calm_down(self) -> None:
        """End faults, and add no more tasks."""
        self.calm_from = len(self.steps)

    def now(self) -> datetime:
        """Return the server's time."""
        return EPOCH + timedelta(milliseconds=self._now_ms)

    # The clocks of the process that runs, as of the module ``time``.

    def monotonic(self) -> float:
        """Return the monotonic clock of the process that runs."""
        return self._monotonic(self._now_ms)

    def _monotonic(self, at_ms: int) -> float:
        return at_ms / 1000 * (self._actor.rate if self._actor else 1.0)

    def time(self) -> float:
        """Return the wall clock of the process that runs."""
        return self.monotonic() + (self._actor.wall_offset_sec if self._actor else 0.0)

    # Run

    def run(self, steps: int) -> None:
        """Make so many steps, as the seed decides."""
        draw = self._schedule.random
        for _ in range(steps):
            pick, luck = draw(), draw()
            now_ms = self._now_ms
            awake = [one for one in self.actors if one.wakes_ms <= now_ms]
            if not awake:
                now_ms = min(one.wakes_ms for one in self.actors)
                if now_ms >= NEVER_MS:
                    return
                awake = [one for one in self.actors if one.wakes_ms <= now_ms]
            fault = None if self.calm else self._fault(luck)
            roll = 0.0 if fault is None else draw()
            actor = awake[int(pick * len(awake))]
            self._make(Step(actor.index, now_ms + 1, fault, roll))

    def replay(self, steps: Iterable[Step]) -> None:
        """Make these steps. A process that is idle then is waited for."""
        for one in steps:
            wakes_ms = self.actors[one.actor].wakes_ms
            if wakes_ms < NEVER_MS:
                self._make(one._replace(at_ms=max(one.at_ms, self._now_ms + 1, wakes_ms)))

    def tasks(self) -> list[dict[str, Any]]:
        """Return the stored tasks."""
        return list(self.server.tasks.documents.values())

    def dead_letters(self) -> list[dict[str, Any]]:
        """Return what is in the DLQ collection, without tombstones."""
        found = self.server.dead_letters.documents.values()
        return [one for one in found if "retired_at" not in one]

    @property
    def has_late(self) -> bool:
        """Whether a request is still to be performed."""
        return bool(self._late)

    def _fault(self, luck: float) -> str | None:
        if luck >= self._faults[-1][1]:
            return None
        return next(kind for kind, limit in self._faults if luck < limit)

    def _make(self, step: Step) -> None:
        self._now_ms = step.at_ms
        actor = self._actor = self.actors[step.actor]
        if self._late:
            self._perform_late()
        if len(self.steps) % EXPIRY_STEPS == 0:
            expired = {"until": {"$lte": self.now()}}
            self.server.perform(Call("delete_many", expired, target=Target.DEDUPE_KEYS))
        fault = step.fault
        if fault is not None:
            if self._happens(actor, fault):
                self.fault_counts[fault] += 1
                if self._trace:
                    self._trace(f"{len(self.steps)} {actor.name} {fault}: {actor.call}")
            else:
                fault, step = None, step._replace(fault=None)
        self.steps.append(step)
        if fault is not None:
            getattr(self, f"_{fault}")(actor, step.roll)
        elif actor.operation is None:
            self._continue(actor, None, None)
        elif actor.applied is None:
            self._apply(actor)
        else:
            self._reply(actor)

    def _new_actor(self, name: str, index: int, role: Role) -> Actor:
        self._born[name] += 1
        # Each process has its own choices: a fault of one does not change those of the others.
        choices = random.Random(f"{self._seed} {name} {self._born[name]}")
        offset_sec = choices.uniform(-HOUR_SEC, HOUR_SEC)
        rate = 1 + choices.uniform(-LARGEST_DRIFT, LARGEST_DRIFT)
        actor = Actor(f"{name}.{self._born[name]}", index, role, choices, offset_sec, rate)
        collections: Any = SimpleNamespace(
            name="tasks",
            database=SimpleNamespace(name="simulation"),
            client=None,
            codec_options=CODEC,
            in_memory=False,
        )
        for queue in QUEUES:
            actor.cores[queue] = QueueCore(
                None,  # type: ignore[arg-type]  # The scheduler performs the calls.
                collections,
                queue,
                settings=self.settings,
                payload_model=None,
                clock=actor.clock,
            )
        actor.script = role(self, actor)
        actor.wakes_ms = self._now_ms
        return actor

    # Faults

    def _happens(self, actor: Actor, fault: str) -> bool:
        """Return whether a fault is possible now."""
        call = actor.call
        waiting = call is not None and actor.applied is None
        match fault:
            case "lost_request":
                return waiting
            case "late_request":
                return waiting and call is not None and call.method not in READS
            case "partial":
                return waiting and call is not None and call.method in MULTIPLE and not call.atomic
            case "lost_reply":
                return actor.applied is not None
            case "write_concern":
                applied = actor.applied
                return applied is not None and applied.error is None and applied.write > 0
        return True

    def _crash(self, actor: Actor, roll: float) -> None:
        """End a process where it is, and start it again later."""
        for run in actor.runs:
            run.over = True
        actor.script.close()
        if actor.operation is not None:
            actor.operation.close()
        again = self._new_actor(actor.name.partition(".")[0], actor.index, actor.role)
        again.wakes_ms += int(roll * 500)
        self.actors[actor.index] = again

    def _pause(self, actor: Actor, roll: float) -> None:
        actor.wakes_ms = max(actor.wakes_ms, self._now_ms) + int(roll * 4000)

    def _clock_jump(self, actor: Actor, roll: float) -> None:
        actor.wall_offset_sec += (2 * roll - 1) * HOUR_SEC

    def _lost_request(self, actor: Actor, _roll: float) -> None:
        self._fail(actor, AutoReconnect("connection closed"))

    def _late_request(self, actor: Actor, roll: float) -> None:
        if actor.call is not None:
            self._late.append(Late(self._now_ms + int(roll * 1500), actor.call))
            self.ledger.may_repeat(actor.call, late=True)
        self._fail(actor, AutoReconnect("connection closed"))

    def _lost_reply(self, actor: Actor, _roll: float) -> None:
        actor.applied = None
        self._fail(actor, AutoReconnect("connection closed"), performed=True)

    def _write_concern(self, actor: Actor, _roll: float) -> None:
        """Tell the client that no majority has its write: a failover may undo it."""
        actor.applied = None
        failed = {"code": WTIMEOUT, "errmsg": "waiting for replication timed out"}
        error: PyMongoError = WTimeoutError(str(failed["errmsg"]), WTIMEOUT)
        if actor.call is not None and actor.call.method in {"bulk_write", "insert_many"}:
            error = BulkWriteError(
                {"writeErrors": [], "writeConcernErrors": [failed], "nInserted": 0,
                 "nMatched": 0, "nModified": 0, "nRemoved": 0}
            )  # fmt: skip
        self._fail(actor, error, performed=True)

    def _partial(self, actor: Actor, roll: float) -> None:
        if actor.call is None:
            raise AssertionError
        with suppress(Interrupted, PyMongoError):
            self.server.perform(actor.call, most=int(roll * 997) % 4)
        self._failover(actor, roll)
        self._fail(actor, NotPrimaryError("stepped down"), performed=True)

    def _failover(self, _actor: Actor, roll: float) -> None:
        """Undo what no majority has, and close every connection."""
        survives = int((roll * 3 % 1) * (self.server.uncommitted + 1)) if roll < 2 / 3 else 0
        committed, undone = self.server.fail_over(survives)
        self.undone += undone
        self._late.clear()
        for actor in self.actors:
            if actor.applied is None or actor.call is None:
                continue
            applied = actor.applied
            if actor.call.method in SINGLE_WRITES and actor.choices.random() < 0.5:
                # The driver sends it again. A majority has the number of a write that it has, so
                # the new primary answers as the old one would have.
                if applied.error is not None or applied.write > committed:
                    actor.applied = None
                continue
            actor.applied = None
            self._actor = actor
            self._fail(actor, NotPrimaryError("not primary"), performed=True)

    def _fail(self, actor: Actor, error: PyMongoError, *, performed: bool = False) -> None:
        """Do what a driver does after an error: repeat the call, or throw the error."""
        call = actor.call
        if call is None:
            raise AssertionError
        patient = actor.choices.random() < 0.7
        if patient and (call.recheck or call.repeatable):
            self.ledger.may_repeat(call)
            actor.clock.forget()  # Another server may answer.
        if patient and call.recheck:
            self._drive(actor, None, RepeatDue(error, None))
        elif patient and call.repeatable:
            self.repeats += performed
            actor.sent_ms = self._now_ms
        else:
            self._drive(actor, None, error)

    def _perform_late(self) -> None:
        due = [one for one in self._late if one.at_ms <= self._now_ms]
        if due:
            self._late = [one for one in self._late if one.at_ms > self._now_ms]
        for one in due:
            if self._trace:
                self._trace(f"{len(self.steps)} late: {one.call}")
            with suppress(PyMongoError):
                self.server.perform(one.call)

    # Calls

    def _apply(self, actor: Actor) -> None:
        call = actor.call
        if call is None:
            raise AssertionError
        if self._trace:
            self._trace(f"{len(self.steps)} {actor.name} {call!r}")
        try:
            reply, write = self.server.perform(call)
            actor.applied = Applied(reply, write)
        except BulkWriteError as exc:  # It waits for the majority, too.
            actor.applied = Applied(None, self.server.last_write, exc)
        except PyMongoError as exc:
            actor.applied = Applied(None, 0, exc)

    def _reply(self, actor: Actor) -> None:
        applied, call = actor.applied, actor.call
        if applied is None or call is None:
            raise AssertionError
        actor.applied = None
        self.server.commit(applied.write)
        if applied.error is not None:
            self._drive(actor, None, applied.error)
            return
        reply = applied.reply
        if call.timed:
            reply = Timed(reply, self._monotonic(actor.sent_ms), self.monotonic())
        self._drive(actor, reply, None)

    def _drive(self, actor: Actor, reply: Any, error: Exception | None) -> None:
        """Let an operation continue, and its script when it ends."""
        self._actor = actor
        operation = actor.operation
        if operation is None:
            raise AssertionError
        try:
            call = operation.send(reply) if error is None else operation.throw(error)
            while type(call) is Buried:
                call = operation.send(None)  # A note for hooks, which is not sent.
        except StopIteration as stop:
            self._continue(actor, stop.value, None)
        except PyMongoError as exc:
            translated = translate(exc)
            if not isinstance(translated, ServerUnavailable):
                raise Violation("rejected", None, f"{actor.name}: {exc!r}") from exc
            self._continue(actor, None, translated)
        except MicroqueueError as exc:
            self._continue(actor, None, exc)
        else:
            actor.call = call
            actor.sent_ms = self._now_ms

    def _continue(self, actor: Actor, result: Any, error: Exception | None) -> None:
        """Let a script continue with the result of its operation."""
        actor.operation = actor.call = None
        script = actor.script
        try:
            following = script.send(result) if error is None else script.throw(error)
        except StopIteration:
            actor.wakes_ms = NEVER_MS  # It has done its work.
            return
        if type(following) is Wait:
            actor.wakes_ms = self._now_ms + following.ms
            return
        actor.operation = following  # type: ignore[assignment]  # It is no Wait.
        self._drive(actor, None, None)


HOUR = timedelta(hours=1)


def _thresholds(faults: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the kinds of fault with the sums of their likelihoods."""
    total = 0.0
    found = [("none", 0.0)]
    for kind, likely in faults.items():
        if kind not in FAULT_KINDS:
            raise ValueError(kind)
        total += likely
        found.append((kind, total))
    return found
