"""What a ledger says, by task: its plan, its runs, and the faults of the whole run."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.ledger import Line

SETTLED_AS = {
    "done": "done",
    "failed": "failed",
    "fail": "failed",
    "retried": "retried",
    "retry": "retried",
    "raise": "retried",
    "timeout": "retried",
    "snoozed": "snoozed",
    "snooze": "snoozed",
    "released": "released",
    "release": "released",
    "cancelled": "failed",
}
"""The names that processes give to settlements, as the verifier knows them."""

ENDING_FAULTS = ("sigterm", "sigkill")
"""Kinds of faults that end a process."""

GRACEFUL = ("sigterm", "stopped", "exit 0")
"""Reasons of an end in which a worker settles what its handlers have finished."""

SERVERS = ("mongod-", "proxy-", "majority", "members")
"""How the names of targets begin that every process depends on."""
BEAT_SEC = 1.0
"""A process writes a line four times a second. One without a line for so long did not run."""
JOINED_SEC = 1.5
"""What goes wrong within so short a time is one trouble: a worker waits in between."""
CALL_SEC = 10.0
"""How long the server may work on a call whose process has ended."""

ENDS_PROCESS = {"exit", "killed"}
"""Outcomes of handlers that end their process, with all other tasks of it."""
WORKER_GRACE_SEC = 2.0
"""How long the handlers of a worker that stops may take to finish."""
HANDLER_STATUS = 3
"""The status with which a handler ends its process."""
EXHAUSTED = "handler_memory"
"""The kind of fault in which a handler uses up the memory of its process."""
EXHAUSTED_SEC = 10.0
"""How long after that a process may end because of it: its other threads get no memory."""


@dataclass(slots=True)
class Run:
    """One run of a handler under one lease."""

    token: str
    who: str
    pid: int
    attempt: int
    at: float
    lease_until: float
    starts: int = 1
    finished_at: float | None = None
    outcome: str | None = None
    retry_at: float | None = None
    settled_at: float | None = None
    settled_as: str | None = None
    released_at: float | None = None
    """When its worker decided to release the task."""
    lost_at: float | None = None
    asked: float | None = None
    """When the consumer asked for a task, if it did so by a call."""

    def over_by(self, instant: float) -> bool:
        """Return whether the handler had returned, or its task was settled or lost, by then."""
        ends = (self.finished_at, self.settled_at, self.lost_at)
        return any(end is not None and end <= instant for end in ends)


@dataclass(slots=True)
class Entry:
    """What is known of one task."""

    key: str
    queue: str | None = None
    planned_at: float | None = None
    due_at: float | None = None
    max_attempts: int | None = None
    priority: int = 0
    kind: str = ""
    how: str = ""
    """How it was enqueued."""
    expect: str | None = None
    dedupe: str | None = None
    expires: bool = False
    stored_at: float | None = None
    uncertain_at: float | None = None
    rejected_at: float | None = None
    runs: dict[str, Run] = field(default_factory=dict)
    unstarted: dict[str, str] = field(default_factory=dict)
    """Settlements of claims that no handler has seen: what they were settled as, by token."""
    reopened: list[tuple[float, float]] = field(default_factory=list)
    """When a replay of the dead letter, or of all of its queue, was under way."""
    replays: int | None = None
    """How often it was replayed, as the stored task says; None: it is not stored."""
    ended: list[float] = field(default_factory=list)
    """When a cancellation or a discard was confirmed."""
    discards: dict[str, str | None] = field(default_factory=dict)
    """Who asked for a discard, and what it was told: ``asked`` before that, None after an error."""
    asked_at: dict[str, float] = field(default_factory=dict)
    """When each of them last asked."""
    kept: list[tuple[str, float, float]] = field(default_factory=list)
    """Who was told that nothing was discarded: when it asked, and when it was told."""

    def in_order(self) -> list[Run]:
        """Return the runs in the order of their starts."""
        return sorted(self.runs.values(), key=lambda run: run.at)

    def reopened_between(self, begin: float, end: float) -> bool:
        """Return whether the dead letter may have been replayed in between."""
        if self.replays == 0:
            return False
        return any(one[0] <= end and one[1] >= begin for one in self.reopened)

    def replay_began_between(self, begin: float, end: float) -> bool:
        """Return whether a replay that may have hit the dead letter began in between."""
        return self.replays != 0 and any(begin <= one[0] <= end for one in self.reopened)


@dataclass(frozen=True, slots=True)
class Fault:
    """An injected fault, and how long it lasted."""

    kind: str
    target: str
    at: float
    until: float
    detail: Any = None

    @property
    def is_shared(self) -> bool:
        """Whether it hits every process: one of a server, or of the network."""
        return self.target.startswith(SERVERS)


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A call that failed, and how long it took."""

    method: str
    begin: float
    until: float


@dataclass(slots=True)
class Trouble:
    """A time in which calls of a process failed or took long, or in which it did not run.

    Attributes:
        failed: The calls that failed.
        idle_sec: How long calls took, or it did not run.
    """

    begin: float
    until: float
    failed: tuple[FailedCall, ...]
    idle_sec: float

    def has_failed(self, calls: tuple[str, ...], begin: float, until: float) -> bool:
        """Return whether one of these calls failed in a time; beginnings of names are enough."""
        return any(
            one.method.startswith(calls) and one.begin <= until and one.until >= begin
            for one in self.failed
        )


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a process. ``graceful``: it was asked to stop, and settled what was finished."""

    at: float
    reason: str
    graceful: bool


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process of the fleet ended.

    Attributes:
        status: Its exit status; negative: the signal that ended it.
        sent: The signals that the harness has sent to it, without those that suspend it.
        ends: Whether it ends by itself when it has done its work.
    """

    at: float
    who: str
    status: int
    reason: str
    sent: frozenset[int]
    ends: bool


@dataclass
class History:
    """All tasks and faults of a run."""

    entries: dict[str, Entry] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    deaths: dict[str, list[Death]] = field(default_factory=lambda: defaultdict(list))
    endings: list[Ending] = field(default_factory=list)
    """How each process of the fleet ended."""
    unexpected: list[Ending] = field(default_factory=list)
    """Those that neither a signal of the harness nor a handler explains."""
    signals: list[tuple[float, str]] = field(default_factory=list)
    """When the harness has sent which process a signal to end, or its supervisor."""
    pids: dict[str, int] = field(default_factory=dict)
    """The ids of the processes of the fleet."""
    parents: dict[str, str] = field(default_factory=dict)
    births: dict[str, float] = field(default_factory=dict)
    """When each process was started, or wrote that it was."""
    troubles: dict[str, list[Trouble]] = field(default_factory=lambda: defaultdict(list))
    """What each process noted, in order; see :class:`Trouble`."""
    lived: dict[str, tuple[float, float]] = field(default_factory=dict)
    """When each process wrote its first line, and when it last showed that it runs."""
    others: dict[str, list[Line]] = field(default_factory=lambda: defaultdict(list))
    """Lines about anything but tasks, by their event."""
    lines: int = 0

    def names_of(self, who: str) -> set[str]:
        """Return the name of a process, and that of the process that started it."""
        return {who, self.parents.get(who, who), who.partition("/")[0]}

    def deaths_of(self, who: str) -> list[Death]:
        """Return the ends of a process, and of the process that started it."""
        return [death for name in self.names_of(who) for death in self.deaths.get(name, ())]

    def troubles_in(self, who: str, begin: float, until: float) -> list[Trouble]:
        """Return what a process noted that overlaps a time."""
        found = self.troubles.get(who, ())
        return [one for one in found if one.begin <= until and one.until >= begin]


def read_history(lines: Iterable[Line]) -> History:
    """Sort the lines of a ledger by task."""
    history = History()
    later: list[Line] = []  # They refer to starts, which may be in the file of another process.
    begun: dict[tuple[str, str], list[Line]] = defaultdict(list)
    ended: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        history.lines += 1
        if line.event == "fault":
            name = (str(line.fields["kind"]), str(line.fields["target"]))
            if line.fields.get("phase", "begin") == "begin":
                begun[name].append(line)
            else:
                ended[name].append(line)
        elif line.event in {"beat", "trouble"}:
            _note_life(history, line)
        elif line.event in {"born", "died"}:
            _process(history, line)
        elif line.event in _EVENTS:
            if not _of_task(history, line):
                later.append(line)
        else:
            history.others[line.event].append(line)
    for line in sorted(later, key=lambda one: one.at):
        _EVENTS[line.event](history.entries[line.fields["key"]], line)
    history.faults = _faults(begun, ended)
    _note_signals(history)
    for ending in history.endings:
        _note_ending(history, ending)
    for who, some in history.troubles.items():
        history.troubles[who] = _joined(some)
    _note_replays(history)
    return history


def _note_signals(history: History) -> None:
    """Note what should end processes: signals of the harness, and ends of supervisors."""
    history.signals = [
        (line.at, str(line.fields["target"])) for line in history.others.get("signal", ())
    ]
    history.signals += [
        (fault.at, fault.target) for fault in history.faults if fault.kind in ENDING_FAULTS
    ]
    history.signals.sort()


def _faults(
    begun: Mapping[tuple[str, str], list[Line]], ended: Mapping[tuple[str, str], list[Line]]
) -> list[Fault]:
    """Join the begins and ends of faults, by their kinds and targets; leave out aborted ones."""
    faults = []
    for (kind, target), some in begun.items():
        ends = sorted(ended.get((kind, target), ()), key=lambda one: one.at)
        for line in sorted(some, key=lambda one: one.at):
            at = bisect_left(ends, line.at, key=lambda one: one.at)
            end = ends.pop(at) if at < len(ends) else line
            if end.fields.get("phase") != "aborted":
                faults.append(Fault(kind, target, line.at, end.at, end.fields.get("detail")))
    return sorted(faults, key=lambda fault: fault.at)


def _note_life(history: History, line: Line) -> None:
    """Note what went wrong in a process, and when it did not run."""
    who = line.who
    if line.event == "trouble":
        until = line.fields["until"]
        call = FailedCall(str(line.fields["call"]), line.at, until)
        failed = () if line.fields["error"] is None else (call,)
        history.troubles[who].append(Trouble(line.at, until, failed, until - line.at))
        return
    born, last = history.lived.get(who, (line.at, line.at))
    if line.at - last > BEAT_SEC:
        history.troubles[who].append(Trouble(last, line.at, failed=(), idle_sec=line.at - last))
    history.lived[who] = born, line.at


def _joined(troubles: list[Trouble]) -> list[Trouble]:
    """Join those that overlap or follow each other closely."""
    joined: list[Trouble] = []
    for one in sorted(troubles, key=lambda one: one.begin):
        if not joined or one.begin > joined[-1].until + JOINED_SEC:
            joined.append(one)
            continue
        last = joined[-1]
        last.idle_sec += max(one.until - max(one.begin, last.until), 0.0)
        last.until = max(last.until, one.until)
        last.failed += one.failed
    return joined


def _note_replays(history: History) -> None:
    """Note the replays of whole queues at their tasks. One without an end may have gone on."""
    by_queue: dict[str, list[tuple[float, float]]] = defaultdict(list)
    begun: dict[tuple[str, str], float] = {}
    for line in history.others.get("replay", ()):
        name = (line.who, str(line.fields["queue"]))
        if line.fields["phase"] == "begin":
            if name in begun:
                by_queue[name[1]].append((begun[name], math.inf))
            begun[name] = line.at
        elif (begin := begun.pop(name, None)) is not None:
            by_queue[name[1]].append((begin, line.at))
    for (who, queue), begin in begun.items():
        died_at = [death.at + CALL_SEC for death in history.deaths_of(who)]
        by_queue[queue].append((begin, min(died_at, default=math.inf)))
    for entry in history.entries.values():
        if entry.queue in by_queue:
            entry.reopened += by_queue[entry.queue]


def _of_task(history: History, line: Line) -> bool:
    """Note a line about a task; return whether its run, if it is about one, is known."""
    fields = line.fields
    key = fields["key"]
    if (entry := history.entries.get(key)) is None:
        entry = history.entries[key] = Entry(key)
    if line.event == "finish" and fields["outcome"] in ENDS_PROCESS:
        reason = f"its handler: {fields['outcome']}"
        history.deaths[line.who].append(Death(line.at, reason, graceful=False))
    if line.event in _OF_A_RUN and str(fields["token"]) not in entry.runs:
        return False
    _EVENTS[line.event](entry, line)
    return True


def _process(history: History, line: Line) -> None:
    target = str(line.fields["target"])
    if parent := line.fields.get("parent"):
        history.parents[target] = str(parent)
    if (pid := line.fields.get("of")) is not None:
        history.pids[target] = pid
    if line.event == "born":
        history.births.setdefault(target, line.at)
        return
    reason, status = str(line.fields.get("reason", "")), line.fields.get("status")
    if status is None:  # A child of a supervisor, which the harness has sent a signal.
        history.deaths[target].append(Death(line.at, reason, _is_graceful(reason)))
        return
    sent, ends = frozenset(line.fields.get("sent") or ()), bool(line.fields.get("ends"))
    history.endings.append(Ending(line.at, target, status, reason, sent, ends))


def _is_graceful(reason: str) -> bool:
    return any(word in reason.lower() for word in GRACEFUL)


def _note_ending(history: History, ending: Ending) -> None:
    """Note how a process ended. If nothing explains that, it explains nothing itself."""
    if ending.status == 0:
        expected = bool(ending.sent) or ending.ends
        death = Death(ending.at, ending.reason, graceful=True)
    else:
        expected = -ending.status in ending.sent or _by_handler(history, ending)
        death = Death(ending.at, ending.reason, _is_graceful(ending.reason))
    if expected:
        history.deaths[ending.who].append(death)
    else:
        history.unexpected.append(ending)


def _by_handler(history: History, ending: Ending) -> bool:
    """Return whether a handler of the process noted that it ends it, or uses up its memory."""
    if ending.status == HANDLER_STATUS:
        return any(death.at <= ending.at for death in history.deaths.get(ending.who, ()))
    return any(
        fault.kind == EXHAUSTED
        and fault.target == ending.who
        and fault.at <= ending.at <= fault.until + EXHAUSTED_SEC
        for fault in history.faults
    )


def _plan(entry: Entry, line: Line) -> None:
    get = line.fields.get
    entry.planned_at = line.at
    entry.queue, entry.due_at, entry.max_attempts = get("queue"), get("due_at"), get("max_attempts")
    entry.priority, entry.kind = get("priority") or 0, get("kind") or ""
    entry.how, entry.dedupe = get("how") or "", get("dedupe")
    entry.expect, entry.expires = get("expect"), bool(get("expires"))


def _stored(entry: Entry, line: Line) -> None:
    entry.stored_at = line.at


def _uncertain(entry: Entry, line: Line) -> None:
    entry.uncertain_at = line.at


def _rejected(entry: Entry, line: Line) -> None:
    entry.rejected_at = line.at


def _start(entry: Entry, line: Line) -> None:
    token = str(line.fields["token"])
    if (run := entry.runs.get(token)) is not None:
        run.starts += 1
        return
    until = line.fields.get("lease_until")
    if entry.due_at is None:
        entry.due_at = line.fields.get("due_at")
    entry.runs[token] = Run(
        token,
        line.who,
        line.pid,
        int(line.fields.get("attempt") or 0),
        line.at,
        line.at if until is None else float(until),
        asked=line.fields.get("asked"),
    )


def _renewed(entry: Entry, line: Line) -> None:
    if (run := entry.runs.get(str(line.fields["token"]))) is not None:
        run.lease_until = max(run.lease_until, float(line.fields["lease_until"]))


def _finish(entry: Entry, line: Line) -> None:
    if (run := entry.runs.get(str(line.fields["token"]))) is not None:
        run.finished_at, run.outcome = line.at, str(line.fields["outcome"])
        run.retry_at = line.fields.get("retry_at")


def _settled(entry: Entry, line: Line) -> None:
    token, outcome = str(line.fields["token"]), str(line.fields["outcome"])
    settled_as = SETTLED_AS.get(outcome, outcome)
    if (run := entry.runs.get(token)) is None:
        entry.unstarted[token] = settled_as
    elif run.settled_at is None:
        run.settled_at, run.settled_as = line.at, settled_as


def _releasing(entry: Entry, line: Line) -> None:
    if (run := entry.runs.get(str(line.fields["token"]))) is not None:
        run.released_at = line.at


def _lost(entry: Entry, line: Line) -> None:
    if (run := entry.runs.get(str(line.fields["token"]))) is not None and run.lost_at is None:
        run.lost_at = line.at


def _reopened(entry: Entry, line: Line) -> None:
    entry.reopened.append((line.at, line.at))


def _discarding(entry: Entry, line: Line) -> None:
    entry.asked_at[line.who] = line.at
    if entry.discards.get(line.who, "") is not None:
        entry.discards[line.who] = "asked"


def _kept(entry: Entry, line: Line) -> None:
    entry.kept.append((line.who, entry.asked_at.get(line.who, line.at), line.at))
    if entry.discards.get(line.who) is not None:
        entry.discards[line.who] = "kept"


def _perhaps_discarded(entry: Entry, line: Line) -> None:
    entry.discards[line.who] = None


def _ended(entry: Entry, line: Line) -> None:
    entry.ended.append(line.at)


_OF_A_RUN = {"renewed", "finish", "settled", "releasing", "lost"}
_EVENTS = {
    "plan": _plan,
    "stored": _stored,
    "uncertain": _uncertain,
    "rejected": _rejected,
    "start": _start,
    "renewed": _renewed,
    "finish": _finish,
    "settled": _settled,
    "releasing": _releasing,
    "lost": _lost,
    "replaying": _reopened,
    "cancelled": _ended,
    "discarding": _discarding,
    "discarded": _ended,
    "kept": _kept,
    "perhaps discarded": _perhaps_discarded,
}


@dataclass(frozen=True)
class Settings:
    """What the verifier has to know of a run, from ``run.json``.

    Attributes:
        lease_sec: The length of a lease.
        dead_after_sec: How long a worker may be silent before its tasks are taken from it.
        timeout_sec: How long a handler may run.
        backoff_sec: The delay after the first attempt, before the jitter; it doubles.
        max_backoff_sec: The longest delay.
        wall_offset: The wall clock minus the clock of the ledger.
        deleted_when_done: Queues whose done tasks are deleted at once.
        ordered_queues: Queues with a single consumer that takes one task after the other.
        history_limit: How many attempts a document keeps.
        max_crashes: After how many ends of its worker a task is a dead letter, by queue.
        schedule_sec: The period of the schedules.
    """

    lease_sec: float = 3.0
    dead_after_sec: float = math.inf
    timeout_sec: float = 0.0
    backoff_sec: float = 0.0
    max_backoff_sec: float = 0.0
    wall_offset: float = 0.0
    deleted_when_done: frozenset[str] = frozenset()
    ordered_queues: frozenset[str] = frozenset()
    history_limit: int = 20
    max_crashes: Mapping[str, int] = field(default_factory=dict)
    schedule_sec: float = 1.0

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> Settings:
        """Read them; what is missing has its default."""
        given = run.get("settings", {})
        known = {name: given[name] for name in cls.__dataclass_fields__ if name in given}
        for name in ("deleted_when_done", "ordered_queues"):
            if name in known:
                known[name] = frozenset(known[name])
        return cls(**known)

    def least_backoff(self, attempt: int) -> float:
        """Return the shortest delay after an attempt: the jitter takes at most half of it."""
        return min(self.backoff_sec * 2.0 ** max(attempt - 1, 0), self.max_backoff_sec) / 2
