"""Why a task ran again: each repeat needs a cause that the ledger names.

A fault explains that a lease was lost only if the worker of that lease noted trouble during it: a
call that failed or took long, or a time in which it did not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from tests.chaos.history import (
    ENDS_PROCESS,
    EXHAUSTED,
    EXHAUSTED_SEC,
    WORKER_GRACE_SEC,
    Entry,
    Fault,
    History,
    Run,
    Settings,
    Trouble,
)

TOLERANCE_SEC = 0.05
"""By how much instants of two processes, and of the server's clock, may differ."""

AGAIN = {"raise", "retry", "snooze", "unstorable"} | ENDS_PROCESS
"""Outcomes of a handler after which the task is delivered again."""

PAUSES = ("sigstop", "stall")
"""Kinds of faults that suspend a process."""

GRACE_SEC = {"cut": 1.0, "delay": 1.0, "half_open": 2.0, "drop_replies": 2.0}
"""How long the effects of a fault of connections last: reconnects and retries."""
SERVER_GRACE_SEC = 10.0
"""The same for faults of servers: elections."""
HEARTBEAT_SEC = 1.0
"""How often a worker reports that it lives."""
FORWARD_SEC = 0.1
"""How late a supervisor forwards a signal: until then, its processes start handlers."""


class Reason(StrEnum):
    """Why a task was delivered again."""

    OUTCOME = "retry by outcome"
    REPLAY = "replay"
    KILLED = "worker killed"
    RELEASED = "released by a worker that stops"
    TIMEOUT = "handler past its timeout"
    STOPPED = "worker stopped past its lease"
    OUTAGE = "lease lost in an outage"
    LOST_REPLY = "settlement without a reply"
    INSERT_REPEATED = "insert repeated after the task was done and deleted"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a task ran again, and the fault behind it, if there is one.

    Attributes:
        reason: Why.
        fault: The kind of the fault, or what else caused it.
        target: What the fault hit.
        begin: When it began.
        until: When it ended.
    """

    reason: Reason
    fault: str
    target: str | None = None
    begin: float | None = None
    until: float | None = None


def _cause(reason: Reason, fault: Fault) -> Cause:
    return Cause(reason, fault.kind, fault.target, fault.at, fault.until)


class Causes:
    """Finds the cause of each repeated run."""

    def __init__(self, history: History, settings: Settings) -> None:
        self.settings = settings
        self._history = history
        self._shared = [fault for fault in history.faults if fault.is_shared]
        self._stops = [fault for fault in history.faults if fault.kind == "sigstop"]

    def of_repeat(self, entry: Entry, before: Run, again_at: float) -> Cause | None:
        """Return why a task ran again at an instant after one of its runs; None: no one knows."""
        return (
            self._of_outcome(before, again_at)
            or _of_replay(entry, before, again_at)
            or self.of_repeat_without_replay(entry, before, again_at)
        )

    def of_repeat_without_replay(self, entry: Entry, before: Run, again_at: float) -> Cause | None:
        """Return the same, if the task was not replayed in between."""
        return (
            self._of_outcome(before, again_at)
            or self.of_death(before, again_at)
            or self._of_settlement(entry, before, again_at)
            or self._of_lease(before, again_at)
            or self._of_insert(entry, before)
        )

    def of_early_repeat(self, entry: Entry, before: Run, again_at: float) -> Cause | None:
        """Return why a task could run again while the lease of an earlier run had time left.

        A replay that began before that run found no dead letter.
        """
        if entry.replay_began_between(before.at - TOLERANCE_SEC, again_at):
            return Cause(Reason.REPLAY, "replay")
        if (cause := self.of_death(before, again_at)) is not None:
            return cause
        if self._timed_out(entry, before, again_at):
            return Cause(Reason.TIMEOUT, "handler: hang")
        return self._of_silence(before, again_at)

    def of_death(self, run: Run, until: float) -> Cause | None:
        """Return the end of the worker during a run or before its settlement.

        A worker that still ran when the lease was over has lost it in another way.
        """
        history = self._history
        _, beat = history.lived.get(run.who, (0.0, 0.0))
        if beat > run.lease_until + TOLERANCE_SEC:
            return None
        for death in history.deaths_of(run.who):
            during = run.at - TOLERANCE_SEC <= death.at <= until + TOLERANCE_SEC
            in_time = beat > 0 or death.at <= run.lease_until + TOLERANCE_SEC
            if during and in_time and not (death.graceful and run.outcome == "done"):
                return Cause(Reason.KILLED, death.reason, run.who, death.at, death.at)
        for fault in history.faults:
            # The injector notes the fault before it sends the signal, and the death after it.
            if fault.kind == "sigkill" and fault.target in history.names_of(run.who):
                during = run.at - TOLERANCE_SEC <= fault.at <= until
                if during or fault.at <= run.at <= fault.until:
                    return _cause(Reason.KILLED, fault)
        return None

    def of_trouble(self, who: str, one: Trouble) -> Fault | None:
        """Return the fault behind the trouble of a process.

        Where no fault was injected, the machine may have stalled: then time must have passed. A
        call that fails at once has another cause.
        """
        found = [fault for fault in self._candidates(who) if _reaches(fault, one)]
        if found:
            return max(
                found, key=lambda fault: min(fault.until, one.until) - max(fault.at, one.begin)
            )
        if one.idle_sec >= self.settings.lease_sec / 3:
            return Fault("stall", who, one.begin, one.until)
        return None

    def _candidates(self, who: str) -> Iterator[Fault]:
        names = self._history.names_of(who)
        yield from self._shared
        yield from (one for one in self._stops if one.target in names)

    def any_trouble(self, names: Iterable[str], begin: float, until: float) -> bool:
        """Return whether one of these processes died in this time, or a fault troubled it."""
        for who in names:
            if any(begin <= death.at <= until for death in self._history.deaths_of(who)):
                return True
            for one in self._history.troubles_in(who, begin, until):
                if self.of_trouble(who, one) is not None:
                    return True
        return False

    def explains_attempts(self, document: Mapping[str, Any]) -> bool:
        """Return whether each attempt that ended without an outcome has a cause at its worker."""
        for one in document.get("history") or ():
            if one["outcome"] not in {"lease_expired", "crashed"}:
                continue
            begin, until = self.instant(one["started_at"]), self.instant(one["ended_at"])
            prefix = f"{one['worker_id']}/"
            names = [
                one["worker_id"],
                *(who for who in self._history.lived if who.startswith(prefix)),
            ]
            if not self.any_trouble(names, begin - TOLERANCE_SEC, until + TOLERANCE_SEC):
                return False
        return True

    def instant(self, date: Mapping[str, Any]) -> float:
        """Convert a stored date to the clock of the ledger."""
        wall = datetime.fromisoformat(date["$date"]).timestamp()
        return wall - self.settings.wall_offset

    def excused(self, who: str) -> float:
        """Return how long a lease of this process could have ended with an excuse."""
        total, covered_until = 0.0, 0.0
        for one in self._history.troubles.get(who, ()):
            if self.of_trouble(who, one) is not None:
                until = one.until + self.settings.lease_sec
                total += until - max(one.begin, covered_until)
                covered_until = until
        return total

    def _of_outcome(self, before: Run, again_at: float) -> Cause | None:
        ended = before.finished_at is not None and before.finished_at <= again_at + TOLERANCE_SEC
        if ended and before.outcome in AGAIN and before.settled_as != "failed":
            return Cause(Reason.OUTCOME, f"handler: {before.outcome}")
        return None

    def _of_settlement(self, entry: Entry, before: Run, again_at: float) -> Cause | None:
        if before.settled_as == "released" and (cause := self._of_release(before)) is not None:
            return cause
        if self._timed_out(entry, before, again_at):
            return Cause(Reason.TIMEOUT, "handler: hang")
        return None

    def _of_release(self, run: Run) -> Cause | None:
        """Return why a worker released a task: it was asked to stop, or in trouble.

        It may start a handler after the signal: while that is on its way, and while it stops.
        """
        since = run.at - WORKER_GRACE_SEC - FORWARD_SEC
        since = max(since, self._history.births.get(run.who, since)) - TOLERANCE_SEC
        until = math.inf if run.settled_at is None else run.settled_at + TOLERANCE_SEC
        names = self._history.names_of(run.who)
        for at, target in self._history.signals:
            if target in names and since <= at <= until:
                return Cause(Reason.RELEASED, "worker stops", target, at, at)
        for one in self._history.troubles_in(run.who, run.at, until):
            if (fault := self.of_trouble(run.who, one)) is not None:
                return _cause(Reason.RELEASED, fault)
        for fault in self._history.faults:
            if (
                fault.kind == EXHAUSTED
                and fault.target == run.who
                and (fault.at <= until and run.at <= fault.until + EXHAUSTED_SEC)
            ):
                return _cause(Reason.RELEASED, fault)
        return None

    def _timed_out(self, entry: Entry, run: Run, again_at: float) -> bool:
        """Return whether the worker settled the task while its handler hung, after its timeout."""
        if again_at < run.at + self.settings.timeout_sec - TOLERANCE_SEC:
            return False
        late = run.finished_at is None or run.finished_at >= again_at
        if run.settled_as == "retried" and run.settled_at is not None:
            after = run.finished_at is not None and run.finished_at > run.settled_at
            return late or after or run.outcome == "cancelled"  # A coroutine is cancelled.
        return "hang" in entry.kind and late

    def _of_insert(self, entry: Entry, before: Run) -> Cause | None:
        if entry.queue in self.settings.deleted_when_done and _inserted_late(entry, before):
            return Cause(Reason.INSERT_REPEATED, "insert without a reply")
        return None

    def _of_lease(self, before: Run, again_at: float) -> Cause | None:
        """Return why a lease could end although its worker lived."""
        if again_at < before.lease_until - TOLERANCE_SEC:
            return self._of_silence(before, again_at)
        since = before.lease_until - self.settings.lease_sec
        return self._of_troubles(
            before, self._history.troubles_in(before.who, since, before.lease_until)
        )

    def _of_silence(self, before: Run, again_at: float) -> Cause | None:
        """Return why a worker could count as dead: it did not report for a while."""
        silent_sec = self.settings.dead_after_sec - HEARTBEAT_SEC - TOLERANCE_SEC
        found = self._history.troubles_in(before.who, before.at, again_at)
        return self._of_troubles(
            before, [one for one in found if again_at - one.begin > silent_sec]
        )

    def _of_troubles(self, run: Run, troubles: Iterable[Trouble]) -> Cause | None:
        for one in troubles:
            if (fault := self.of_trouble(run.who, one)) is not None:
                return _cause(_reason(run, fault), fault)
        return None


def _of_replay(entry: Entry, before: Run, again_at: float) -> Cause | None:
    replayed = entry.reopened_between(before.at, again_at)
    return Cause(Reason.REPLAY, "replay") if replayed else None


def _reaches(fault: Fault, trouble: Trouble) -> bool:
    """Return whether a fault, or what it leaves behind, overlaps the trouble of a process."""
    grace = GRACE_SEC.get(fault.kind, SERVER_GRACE_SEC if fault.is_shared else 0.0)
    return fault.at - TOLERANCE_SEC <= trouble.until and fault.until + grace >= trouble.begin


def _reason(run: Run, fault: Fault) -> Reason:
    if fault.kind in PAUSES:
        return Reason.STOPPED
    finished = run.outcome == "done" and run.finished_at is not None
    return Reason.LOST_REPLY if finished else Reason.OUTAGE


def _inserted_late(entry: Entry, before: Run) -> bool:
    """Return whether the insert may have been sent again after the task was done."""
    done_at = before.finished_at
    if before.outcome != "done" or done_at is None:
        return False
    replied_at = entry.stored_at or entry.uncertain_at
    return replied_at is None or replied_at >= done_at
