"""The verdict on a run: reads its folder, and nothing else. It imports nothing from microqueue.

Each verdict is one function over the :class:`Evidence`. A finding is something that no fault may
cause. A repeated run is allowed if a fault or the handler's own outcome explains it.

What the verdicts tolerate, or do not see:

- A repeat is noticed only if the settlement of the task was confirmed.
- Kombu's own repeat after an error may send a second message. So the sender publishes each once.
- When an outage of MongoDB ends a run of the archive, another run begins.
- MongoDB keeps the cursors of a killed process for ten minutes. Only cursors that were opened later
  than ten seconds after the last fault must be closed at the end. While processes live, each member
  may have up to 120 idle cursors.
- A process may have as many sockets as the pools of two clients allow, and 16 more.
- A process whose handler has used up the memory may end in any way within ten seconds.
- The last line of a process is missing if it is killed, if SIGTERM comes while it starts, or if its
  watchdog ends it because a handler still runs. Then no one looks for its threads.
- The delay after an exception, a timeout or a lost lease is random, between half of the backoff and
  all of it. Only a start before that half is noticed. The end of a lost lease is known from the
  stored task alone.
- A handler that hangs is cancelled at its timeout. The ledger has the start of the handler, and not
  when its worker began to count.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from itertools import combinations, pairwise
from math import inf
from pathlib import Path
from typing import Any

from tests.chaos import ledger
from tests.chaos.causes import TOLERANCE_SEC, Cause, Causes, Reason
from tests.chaos.history import Entry, History, Run, Settings, read_history
from tests.chaos.ledger import Line

WATCHDOG_SEC = 1.0
"""How long after its last slow call the watchdog of a stopping process may end it."""
YOUNG_SEC = 10.0
"""How long a process may take to start: until then, SIGTERM ends it at once."""
OF_HANDLERS = "handler_"
"""How the kinds of faults begin that handlers cause."""
DISCARDS = ("delete", "replace_one")
"""How the calls begin that may discard a dead letter: in ``tasks_dlq``, a tombstone replaces it."""
SCHEDULED = "schedule:"
"""How the ids of runs of schedules begin."""
SCHEDULE, TOPIC, CELERY_TASKS, ARCHIVE = "schedule", "topic", "celery", "archive"
"""The parts that a run can have: ``parts`` of its description names those that take part."""


class Verdict(StrEnum):
    """What can be wrong with a run."""

    LOST = "lost"
    NEVER_SETTLED = "never settled"
    EARLY = "ran before it was due"
    AFTER_SETTLEMENT = "ran after a confirmed settlement"
    NO_LEASE = "settled without the lease"
    OVERLAP = "overlapping leases"
    ATTEMPTS = "attempts above the limit"
    STATUS = "wrong final status"
    ORDER = "out of order"
    IMPOSSIBLE = "impossible document"
    UNKNOWN = "unknown task"
    DEDUPE = "dedupe key not kept"
    TRANSACTION = "half of a transaction"
    LEFT = "left by a replay of all"
    SCHEDULE = "missing run of a schedule"
    TOPIC = "message missing, repeated or out of order"
    ARCHIVE = "archived twice, kept or damaged"
    LEAK = "leak"
    ENDED = "process ended by itself"
    UNEXPLAINED = "unexplained repeat"
    LEDGER = "unusable ledger"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that no fault may cause."""

    verdict: Verdict
    key: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """A further run of a task, and its cause."""

    key: str
    before: Run
    after: Run
    cause: Cause

    def as_json(self) -> dict[str, Any]:
        """Return the key, both runs, and the fault that explains the second one."""
        return {
            "key": self.key,
            "before": asdict(self.before),
            "after": asdict(self.after),
            **asdict(self.cause),
        }


@dataclass(frozen=True)
class Stored:
    """A stored task and its collection."""

    collection: str
    document: Mapping[str, Any]


@dataclass
class Evidence:
    """All that the verifier reads."""

    run: Mapping[str, Any]
    settings: Settings
    history: History
    stored: dict[str, list[Stored]]
    """By key."""
    unkeyed: list[Stored]
    leaks: Mapping[str, Any]
    effects: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """What transactions wrote besides tasks, by collection and key; how often."""


@dataclass
class Verification:
    """The findings of a run, its repeats, and how much was looked at."""

    run: Mapping[str, Any]
    findings: list[Finding] = field(default_factory=list)
    repeats: list[Repeat] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    failed_writes: int = 0
    """How many full disks made writes fail."""
    excused: float = 0.0
    """The share of the workers' time in which a fault would explain the end of a lease."""

    @property
    def passed(self) -> bool:
        """Whether there is no finding."""
        return not self.findings


def verify(folder: Path | str) -> Verification:
    """Read the folder of a run, and judge it."""
    run = ledger.read_json(folder, ledger.RUN)
    try:
        history = read_history(ledger.read_lines(folder))
    except ledger.UnreadableLedger as exc:
        return Verification(run, [Finding(Verdict.LEDGER, None, str(exc))])
    stored: dict[str, list[Stored]] = defaultdict(list)
    unkeyed = []
    for collection, document in ledger.read_documents(folder):
        if "retired_at" in document and "status" not in document:
            continue  # The tombstone of a dead letter that was replayed or discarded.
        key = key_of(document)
        one = Stored(collection, document)
        if key is None:
            unkeyed.append(one)
        else:
            stored[key].append(one)
    for key, several in stored.items():
        if (entry := history.entries.get(key)) is not None:
            entry.replays = max(int(one.document.get("replays") or 0) for one in several)
    leaks = ledger.read_json(folder, ledger.LEAKS)
    effects = {}
    if (Path(folder) / ledger.EFFECTS).exists():
        effects = ledger.read_json(folder, ledger.EFFECTS)
    evidence = Evidence(run, Settings.of(run), history, dict(stored), unkeyed, leaks, effects)
    return judge(evidence)


def judge(evidence: Evidence) -> Verification:
    """Apply every verdict."""
    result = Verification(evidence.run)
    repeats = list(_repeats(evidence))
    result.repeats = [one for one in repeats if isinstance(one, Repeat)]
    result.findings = [one for one in repeats if isinstance(one, Finding)]
    for check in CHECKS:
        result.findings += check(evidence)
    entries = evidence.history.entries.values()
    result.counts = {
        "tasks": len(evidence.history.entries),
        "acknowledged": sum(entry.stored_at is not None for entry in entries),
        "runs": sum(len(entry.runs) for entry in entries),
        "documents": sum(map(len, evidence.stored.values())) + len(evidence.unkeyed),
        "archived": _count_archived(evidence),
        "celery": sum(entry.how == "celery" for entry in entries),
        "faults": len(evidence.history.faults),
        "wrong clocks": len(evidence.history.others.get("clock", ())),
        "repeats": len(repeats),
        "lines": evidence.history.lines,
    }
    result.faults = Counter(fault.kind for fault in evidence.history.faults)
    details = [fault.detail for fault in evidence.history.faults if fault.detail]
    result.failed_writes = sum(bool(one.get("writes_failed")) for one in details)
    result.excused = _excused(evidence)
    return result


def _excused(evidence: Evidence) -> float:
    """Return the share of the time of those that ran tasks in which a lease may have ended."""
    history, causes = evidence.history, Causes(evidence.history, evidence.settings)
    workers = {run.who for entry in history.entries.values() for run in entry.runs.values()}
    lived = {who: history.lived[who] for who in workers & history.lived.keys()}
    total = sum(until - begin for begin, until in lived.values())
    return sum(map(causes.excused, lived)) / total if total else 0.0


def key_of(document: Mapping[str, Any]) -> str | None:
    """Return the key of a stored task: of its payload, with its queue for a message of a topic.

    The run of a schedule is known by its id, which names the schedule and the instant, and the
    message of a Celery task by the id of that task.
    """
    payload, headers = document.get("payload"), document.get("headers") or {}
    if "schedule" in headers:
        return str(document["_id"])
    key = payload.get("key") if isinstance(payload, Mapping) else None
    if isinstance(payload, Mapping) and isinstance(payload.get("headers"), Mapping):
        key = payload["headers"].get("id")
    if "topic" in headers and isinstance(key, str):
        return f"{key}>{document['queue']}"
    return key if isinstance(key, str) else None


# Runs


def _repeats(evidence: Evidence) -> Iterator[Repeat | Finding]:
    """Name the cause of each repeated run."""
    causes = Causes(evidence.history, evidence.settings)
    for entry in evidence.history.entries.values():
        for run in entry.runs.values():
            if run.starts > 1:
                detail = f"{run.starts} starts under one lease of {run.who}"
                yield Finding(Verdict.UNEXPLAINED, entry.key, detail)
        if len(entry.runs) < 2:
            continue
        for before, after, cause in _caused(causes, entry):
            if cause is None:
                detail = f"{_describe(before)}, then {_describe(after)}"
                yield Finding(Verdict.UNEXPLAINED, entry.key, detail)
            else:
                yield Repeat(entry.key, before, after, cause)


def _caused(causes: Causes, entry: Entry) -> Iterator[tuple[Run, Run, Cause | None]]:
    """Yield each repeat of a task with its cause: no more replays than the stored task counts.

    Those that have no other cause come first.
    """
    pairs = list(pairwise(entry.in_order()))
    found = [causes.of_repeat(entry, before, after.at) for before, after in pairs]
    replayed = [number for number, one in enumerate(found) if _is_replay(one)]
    others = {
        number: causes.of_repeat_without_replay(entry, pairs[number][0], pairs[number][1].at)
        for number in replayed
    }
    replayed.sort(key=lambda number: others[number] is not None)
    for number in replayed[entry.replays :] if entry.replays is not None else ():
        found[number] = others[number]
    for (before, after), cause in zip(pairs, found, strict=True):
        yield before, after, cause


def _is_replay(cause: Cause | None) -> bool:
    return cause is not None and cause.reason is Reason.REPLAY


def _early(evidence: Evidence) -> Iterator[Finding]:
    for entry in evidence.history.entries.values():
        runs = entry.in_order()
        for run in runs:
            if entry.due_at is not None and run.at < entry.due_at - TOLERANCE_SEC:
                detail = f"{entry.due_at - run.at:.3f} s early: {_describe(run)}"
                yield Finding(Verdict.EARLY, entry.key, detail)
        for before, after in pairwise(runs):
            told = before.settled_as in {"retried", "snoozed"} and before.retry_at is not None
            if not told or entry.reopened_between(before.at, after.at):
                continue
            missing = (before.retry_at or 0.0) - after.at
            if missing > TOLERANCE_SEC:
                detail = f"{missing:.3f} s before its retry: {_describe(after)}"
                yield Finding(Verdict.EARLY, entry.key, detail)
        if entry.how != "celery":  # Kombu has no backoff.
            yield from _before_backoff(evidence, entry, runs)


def _before_backoff(evidence: Evidence, entry: Entry, runs: list[Run]) -> Iterator[Finding]:
    """A task waits after an exception, a timeout, or when its lease was lost."""
    for token, begin in _waits(evidence, entry):
        attempt = entry.runs[token].attempt if token in entry.runs else 1
        due_at = begin + evidence.settings.least_backoff(attempt)
        for run in runs:
            if run.token == token or not begin - TOLERANCE_SEC < run.at < due_at - TOLERANCE_SEC:
                continue
            if not entry.reopened_between(begin, run.at):
                detail = f"{due_at - run.at:.3f} s before its backoff is over: {_describe(run)}"
                yield Finding(Verdict.EARLY, entry.key, detail)


def _waits(evidence: Evidence, entry: Entry) -> Iterator[tuple[str, float]]:
    """Yield the leases after which a task waits for its backoff, and the earliest begin of that.

    A handler that raises is in the ledger. The end of a lost lease is only in the stored task.
    """
    timeout_sec = evidence.settings.timeout_sec
    for run in entry.runs.values():
        if run.settled_as != "retried" or run.settled_at is None or run.retry_at is not None:
            continue
        if run.outcome == "raise" and run.finished_at is not None:
            in_time = run.finished_at <= run.settled_at
            yield run.token, run.finished_at if in_time else run.at + timeout_sec
    causes = Causes(evidence.history, evidence.settings)
    for one in evidence.stored.get(entry.key, ()):
        for attempt in one.document.get("history") or ():
            if attempt.get("outcome") in {"lease_expired", "crashed"} and "lease_token" in attempt:
                yield str(attempt["lease_token"]), causes.instant(attempt["ended_at"])


def _after_settlement(evidence: Evidence) -> Iterator[Finding]:
    """A task that was settled for good does not run again, and the settlement was not stale."""
    deleting = evidence.settings.deleted_when_done
    causes = Causes(evidence.history, evidence.settings)
    for entry in evidence.history.entries.values():
        runs = entry.in_order()
        for number, before in enumerate(runs):
            if before.settled_at is None:
                continue
            for after in runs[number + 1 :]:
                if before.settled_as != "done" and entry.reopened_between(before.at, after.at):
                    break
                if before.settled_as in {"done", "failed"}:
                    if entry.queue in deleting and (
                        _finished_done(after) or causes.of_repeat(entry, before, after.at)
                    ):
                        continue
                    detail = f"{_describe(before)}, then {_describe(after)}"
                    yield Finding(Verdict.AFTER_SETTLEMENT, entry.key, detail)
                elif _settled_late(before, after):
                    detail = f"{_describe(before)} was settled after {_describe(after)}"
                    yield Finding(Verdict.NO_LEASE, entry.key, detail)
        for ended_at in entry.ended:
            for run in runs:
                if run.at > ended_at and not entry.reopened_between(ended_at, run.at):
                    detail = f"cancelled or discarded at {ended_at:.3f}, then {_describe(run)}"
                    yield Finding(Verdict.AFTER_SETTLEMENT, entry.key, detail)


def _finished_done(run: Run) -> bool:
    return run.outcome == "done"


def _settled_late(before: Run, after: Run) -> bool:
    """Return whether a run was settled by its handler's outcome after another one had begun."""
    finished_at = before.finished_at
    settled_at = before.settled_at
    return (
        finished_at is not None
        and settled_at is not None
        and after.at + TOLERANCE_SEC < finished_at <= settled_at
    )


def _overlap(evidence: Evidence) -> Iterator[Finding]:
    causes = Causes(evidence.history, evidence.settings)
    for entry in evidence.history.entries.values():
        runs = entry.in_order()
        for number, before in enumerate(runs):
            for after in runs[number + 1 :]:
                left = before.lease_until - after.at
                if left <= TOLERANCE_SEC or before.over_by(after.at):
                    continue
                if any(before.at <= ended_at <= after.at for ended_at in entry.ended):
                    continue
                if causes.of_early_repeat(entry, before, after.at) is None:
                    detail = f"{left:.3f} s left of {_describe(before)}, and {_describe(after)}"
                    yield Finding(Verdict.OVERLAP, entry.key, detail)


def _attempts(evidence: Evidence) -> Iterator[Finding]:
    for entry in evidence.history.entries.values():
        if entry.max_attempts is None:
            continue
        counted = 0
        previous: Run | None = None
        for run in entry.in_order():
            if previous is not None and entry.reopened_between(previous.at, run.at):
                counted = 0
            counted += not _refunded(run)
            previous = run
            number = max(run.attempt, counted)
            if number > entry.max_attempts and entry.queue not in (
                evidence.settings.deleted_when_done
            ):
                detail = f"attempt {run.attempt}, run {counted} of at most {entry.max_attempts}"
                yield Finding(Verdict.ATTEMPTS, entry.key, detail)


def _refunded(run: Run) -> bool:
    """Return whether the queue gives the attempt back: the worker stopped, or it was snoozed.

    A handler that had returned before the release was decided had its attempt. It may return while
    the release is being written.
    """
    if run.settled_as == "released" and run.outcome not in {None, "cancelled"}:
        decided_at = inf if run.settled_at is None else run.settled_at
        if run.released_at is not None:
            decided_at = run.released_at - TOLERANCE_SEC
        return run.finished_at is None or run.finished_at > decided_at
    return run.settled_as in {"released", "snoozed"} or run.outcome == "snooze"


def _order(evidence: Evidence) -> Iterator[Finding]:
    """A single consumer gets the first task in the order of the queue that was stored in time.

    The order is that of priorities, then of positions: the first task of a call goes first. A task
    was stored in time if that was confirmed before the consumer asked. It may be overtaken if it
    was claimed before: by a consumer that noted trouble, or has died.
    """
    causes = Causes(evidence.history, evidence.settings)
    for queue in evidence.settings.ordered_queues:
        entries = [
            entry
            for entry in evidence.history.entries.values()
            if entry.queue == queue and entry.due_at is None and entry.runs
        ]
        consumers = _consumers(evidence, entries)
        first = {entry.key: entry.in_order()[0] for entry in entries}
        places = {entry.key: _place(evidence, entry) for entry in entries}
        arriving = deque(
            sorted(
                (entry.stored_at, entry.key, entry)
                for entry in entries
                if entry.stored_at is not None
                and not _claimed_before(causes, consumers, entry, first[entry.key])
            )
        )
        waiting: list[tuple[tuple[int, int], str]] = []
        for entry in sorted(entries, key=lambda one: first[one.key].asked or first[one.key].at):
            run = first[entry.key]
            while arriving and arriving[0][0] < (run.asked or run.at):
                key = arriving.popleft()[1]
                heapq.heappush(waiting, (places[key], key))
            while waiting and first[waiting[0][1]].at <= run.at:
                heapq.heappop(waiting)
            if waiting and waiting[0][0] < places[entry.key]:
                overtaken = waiting[0][1]
                detail = f"{_describe(run)} overtook {overtaken}, {_describe(first[overtaken])}"
                yield Finding(Verdict.ORDER, entry.key, detail)
        yield from _order_of_calls(evidence, entries, causes, consumers)


def _place(evidence: Evidence, entry: Entry) -> tuple[int, int]:
    """Return where a task stood in its queue."""
    documents = [one.document for one in evidence.stored.get(entry.key, ())]
    position = next((one.get("position") for one in documents), None)
    return -entry.priority, position if isinstance(position, int) else 0


def _consumers(evidence: Evidence, entries: list[Entry]) -> list[str]:
    """Return the processes that replaced each other as the consumer of a queue."""
    slots = {run.who.rpartition("-")[0] for entry in entries for run in entry.runs.values()}
    names = evidence.history.lived.keys() | evidence.history.deaths.keys()
    names |= {run.who for entry in entries for run in entry.runs.values()}
    return [who for who in names if who.rpartition("-")[0] in slots]


def _claimed_before(causes: Causes, consumers: list[str], entry: Entry, run: Run) -> bool:
    """Return whether a task may have been claimed before its first run, by a call that failed."""
    return run.attempt > 1 and causes.any_trouble(consumers, entry.planned_at or 0.0, run.at)


def _order_of_calls(
    evidence: Evidence, entries: list[Entry], causes: Causes, consumers: list[str]
) -> Iterator[Finding]:
    """Tasks of one call get their positions, and start, in its order: they are stored at once."""
    calls: dict[float | None, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.how == "many" and entry.stored_at is not None and entry.key in evidence.stored:
            calls[entry.planned_at].append(entry)
    for call in calls.values():
        for before, after in combinations(call, 2):
            place, run = _place(evidence, before), before.in_order()[0]
            if place[1] >= _place(evidence, after)[1]:
                yield Finding(Verdict.ORDER, after.key, f"its position is before {before.key}")
            elif (
                place < _place(evidence, after)
                and after.in_order()[0].at < run.at
                and not _claimed_before(causes, consumers, before, run)
            ):
                detail = f"{_describe(after.in_order()[0])} overtook {before.key}, {_describe(run)}"
                yield Finding(Verdict.ORDER, after.key, detail)


# Documents


def _lost(evidence: Evidence) -> Iterator[Finding]:
    for entry in evidence.history.entries.values():
        if entry.stored_at is None or entry.key in evidence.stored:
            continue
        done = any(_finished_done(run) for run in entry.runs.values())
        if done and entry.queue in evidence.settings.deleted_when_done:
            continue
        if _may_be_discarded(evidence.history, entry):
            continue
        runs = "; ".join(map(_describe, entry.in_order())) or "no handler has seen it"
        yield Finding(
            Verdict.LOST, entry.key, f"acknowledged at {entry.stored_at:.3f}, not stored: {runs}"
        )


def _may_be_discarded(history: History, entry: Entry) -> bool:
    """Return whether a discard was confirmed, or it is not known what became of one.

    A task that was done is no dead letter: nothing can have discarded it. If the reply to a delete
    was lost, its repeat finds nothing, and the discard counts none. Other calls delete nothing.
    """
    if entry.ended:
        return True
    if _last_settled(entry) == "done":
        return False
    unknown = any(
        answer is None or (answer == "asked" and history.deaths_of(who))
        for who, answer in entry.discards.items()
    )
    return unknown or any(
        trouble.has_failed(DISCARDS, begin, until)
        for who, begin, until in entry.kept
        for trouble in history.troubles_in(who, begin, until)
    )


def _last_settled(entry: Entry) -> str | None:
    """Return what the last confirmed settlement of a task has made of it."""
    settled = [run for run in entry.runs.values() if run.settled_at is not None]
    last = max(settled, key=lambda run: run.settled_at or 0.0, default=None)
    return None if last is None else last.settled_as


def _unknown(evidence: Evidence) -> Iterator[Finding]:
    for key, entry in evidence.history.entries.items():
        if entry.planned_at is None and not key.startswith(SCHEDULED):
            yield Finding(Verdict.UNKNOWN, key, "no producer planned it")
        if entry.rejected_at is not None and (entry.runs or key in evidence.stored):
            yield Finding(Verdict.UNKNOWN, key, "its producer was told that it is not stored")
    for key in evidence.stored.keys() - evidence.history.entries.keys():
        if key.startswith(SCHEDULED):
            continue
        yield Finding(Verdict.UNKNOWN, key, "it is stored, and no producer planned it")


def _never_settled(evidence: Evidence) -> Iterator[Finding]:
    for key, one in _documents(evidence):
        status = one.document.get("status")
        if status not in {"done", "failed"}:
            entry = evidence.history.entries.get(key or "")
            runs = "; ".join(map(_describe, entry.in_order())) if entry else ""
            yield Finding(
                Verdict.NEVER_SETTLED, key, f"{status} in {one.collection} at the end; {runs}"
            )


def _status(evidence: Evidence) -> Iterator[Finding]:
    causes = Causes(evidence.history, evidence.settings)
    for key, several in evidence.stored.items():
        entry = evidence.history.entries.get(key)
        if entry is None or len(several) != 1:
            continue
        status = several[0].document.get("status")
        if status in {"done", "failed"} and (wrong := _wrong(entry, several[0], causes)):
            yield Finding(Verdict.STATUS, key, f"{status}, but {wrong}")


def _wrong(entry: Entry, one: Stored, causes: Causes) -> str | None:
    status = one.document.get("status")
    runs = entry.in_order()
    told = [run for run in runs if run.settled_as in {"done", "failed"}]
    for run in told[-1:] if entry.replays else told:
        if run.settled_as != status:
            return f"{_describe(run)} was told that it is {run.settled_as}"
    other = entry.expect is not None and status != entry.expect and not entry.replays
    if other and status == "done":
        return f"a task of the kind {entry.kind} ends {entry.expect}"
    if status == "done":
        for run in runs:
            early = run.settled_as == "done" and run.settled_at is not None
            if early and (run.finished_at or float("inf")) > (run.settled_at or 0.0):
                return f"it was settled before its handler finished: {_describe(run)}"
        finished = any(map(_finished_done, runs)) or _committed(entry, one)
        return None if finished else "no handler finished it"
    code = _code(one.document)
    ended = (code == "cancelled" and entry.ended) or (code == "expired" and entry.expires)
    if ended or _in_vain(entry, runs, one, causes):
        return None
    return f"nothing explains it: {'; '.join(map(_describe, runs)) or 'no handler has seen it'}"


def _committed(entry: Entry, one: Stored) -> bool:
    """Return whether a run has committed its task, and was killed or cancelled before it ended.

    What else the transaction wrote is compared by :func:`_transactions`.
    """
    return entry.kind == "transaction" and one.document.get("lease_token") in entry.runs


def _in_vain(entry: Entry, runs: list[Run], one: Stored, causes: Causes) -> bool:
    """Return whether handlers or faults explain that a task is a dead letter.

    Its handler said so; or all of its attempts are used up, and each of them has a cause.
    """
    if any(run.outcome in {"fail", "unstorable"} for run in runs):
        return True
    attempts, code = one.document.get("attempts"), _code(one.document)
    most = entry.max_attempts or one.document.get("max_attempts") or 1
    if code == "poison":
        died = sum(causes.of_death(run, float("inf")) is not None for run in runs)
        return died >= causes.settings.max_crashes.get(entry.queue or "", most)
    if not isinstance(attempts, int) or attempts < most:
        return False
    if not runs or runs[-1].outcome is None:
        return causes.explains_attempts(one.document)
    return True


def _code(document: Mapping[str, Any]) -> Any:
    error = document.get("error")
    return error.get("code") if isinstance(error, Mapping) else None


def _impossible(evidence: Evidence) -> Iterator[Finding]:
    for key, one in _documents(evidence):
        for fault in _contradictions(one.document, evidence.settings):
            yield Finding(Verdict.IMPOSSIBLE, key, f"{fault}; in {one.collection}")
        entry = evidence.history.entries.get(key or "")
        if entry is not None and entry.planned_at is not None:
            for fault in _not_as_planned(entry, one.document):
                yield Finding(Verdict.IMPOSSIBLE, key, f"{fault}; in {one.collection}")
    for key, several in evidence.stored.items():
        if len(several) > 1 and not any(map(_is_archived, several)):
            places = ", ".join(f"{one.collection} ({one.document['status']})" for one in several)
            yield Finding(Verdict.IMPOSSIBLE, key, f"stored {len(several)} times: {places}")


def _not_as_planned(entry: Entry, document: Mapping[str, Any]) -> Iterator[str]:
    """Compare what never changes with the plan. Celery and topics make their own payloads."""
    payload = document.get("payload")
    found = {name: document.get(name) for name in ("queue", "priority", "max_attempts")}
    planned = {
        "queue": entry.queue,
        "priority": entry.priority,
        "max_attempts": entry.max_attempts,
    }
    if isinstance(payload, Mapping) and (entry.how or "kind" in payload):
        found["kind"], planned["kind"] = payload.get("kind"), entry.kind
    if entry.how == "celery":
        found, planned = {"queue": found["queue"]}, {"queue": entry.queue}
    for name, value in planned.items():
        if found[name] != value:
            yield f"{name} {found[name]!r}, and its plan was {value!r}"


def _contradictions(document: Mapping[str, Any], settings: Settings) -> Iterator[str]:
    get = document.get
    status, attempts, most = get("status"), get("attempts"), get("max_attempts")
    if status not in {"pending", "processing", "done", "failed"}:
        yield f"status {status!r}"
    if not isinstance(attempts, int) or attempts < 0:
        yield f"attempts {attempts!r}"
    elif isinstance(most, int) and attempts > most:
        yield f"{attempts} attempts of at most {most}"
    if status == "processing" and not (get("lease_token") and get("deadline_at")):
        yield "claimed, without a lease"
    if status in {"pending", "failed"} and get("lease_token"):
        yield f"{status}, with a lease"
    if status in {"done", "failed"} and get("finished_at") is None:
        yield f"{status}, without an end"
    if status in {"pending", "processing"} and get("finished_at") is not None:
        yield f"{status}, with an end"
    if status == "pending" and get("next_retry_at") and not get("deadline_at"):
        yield "delayed, and no sweep would find it"
    if status == "done" and not get("deadline_at"):
        yield "done, and no purge would find it"
    if status == "failed" and not isinstance(get("error"), Mapping):
        yield "a dead letter without an error"
    yield from _miscounted(document, settings)


def _miscounted(document: Mapping[str, Any], settings: Settings) -> Iterator[str]:
    """Compare the attempts with those in the history: releases and snoozes are refunded."""
    get = document.get
    status, attempts = get("status"), get("attempts")
    history = get("history")
    if not isinstance(history, list):
        yield f"history {history!r}"
    elif isinstance(attempts, int) and not get("replays") and len(history) < settings.history_limit:
        ended = [one.get("outcome") for one in history if isinstance(one, Mapping)]
        used = sum(one not in {"released", "snoozed"} for one in ended)
        used += status == "processing" or (status == "done" and "done" not in ended)
        if used != attempts:
            yield f"attempts {attempts}, and its history shows {used}: {ended}"


def _documents(evidence: Evidence) -> Iterator[tuple[str | None, Stored]]:
    for key, several in evidence.stored.items():
        for one in several:
            yield key, one
    for one in evidence.unkeyed:
        yield None, one


# The run itself


def _transactions(evidence: Evidence) -> Iterator[Finding]:
    """What a transaction wrote is there once if its task is, or was done by it; else not at all.

    ``orders`` are written by producers with the task, ``effects`` by handlers that settle it.
    """
    for name, entries in (
        ("orders", [one for one in evidence.history.entries.values() if one.how == "transaction"]),
        (
            "effects",
            [one for one in evidence.history.entries.values() if one.kind == "transaction"],
        ),
    ):
        if name not in evidence.effects:
            continue
        written = evidence.effects[name]
        expected = {
            one.key: _stored_once(evidence, one.key, done=name == "effects") for one in entries
        }
        for key in expected.keys() | written.keys():
            count, right = written.get(key, 0), expected.get(key, 0)
            entry = evidence.history.entries.get(key)
            if count != right and not (
                entry is not None and _may_be_discarded(evidence.history, entry)
            ):
                detail = f"{count} in {name}, and it should be {right}"
                yield Finding(Verdict.TRANSACTION, key, detail)


def _stored_once(evidence: Evidence, key: str, *, done: bool) -> int:
    several = evidence.stored.get(key, ())
    return int(any(not done or one.document.get("status") == "done" for one in several))


def _left(evidence: Evidence) -> Iterator[Finding]:
    """A replay of all dead letters leaves none that was there when it began."""
    for line in evidence.history.others.get("replay", ()):
        for key in line.fields.get("left") or ():
            detail = f"{line.who} replayed all of {line.fields['queue']} by {line.at:.3f}"
            yield Finding(Verdict.LEFT, key, detail)
        for key in line.fields.get("skipped") or ():
            if not _has_twin(evidence.history, key, line):
                detail = f"{line.who} skipped it by {line.at:.3f}, and no live task has its key"
                yield Finding(Verdict.LEFT, key, detail)


def _has_twin(history: History, key: str, replayed: Line) -> bool:
    """Return whether another task with the dedupe key of this one may have lived in a replay."""
    entry = history.entries.get(key)
    if entry is None or entry.dedupe is None:
        return False
    began = float(replayed.fields.get("began", replayed.at))
    return any(
        one is not entry
        and one.dedupe == entry.dedupe
        and one.rejected_at is None
        and (one.planned_at or 0.0) <= replayed.at
        and _may_live(one, began)
        for one in history.entries.values()
    )


def _schedules(evidence: Evidence) -> Iterator[Finding]:
    """A schedule that catches up has one task for each instant from its start to its end.

    That there is only one is checked with the other stored tasks: an instant has one key.
    """
    period = evidence.settings.schedule_sec
    runs: dict[str, list[float]] = defaultdict(list)
    for key in evidence.stored:
        if key.startswith(SCHEDULED):
            _, queue, name, instant = key.split(":", 3)
            runs[f"{queue}:{name}"].append(datetime.fromisoformat(instant).timestamp())
    for name, begin, end in _scheduled(evidence):
        instants = [one for one in sorted(runs[name]) if begin - period < one <= end + period]
        # The first run is a period after the next whole second, and the end is between two runs.
        for before, after in pairwise([begin + period, *instants, end]):
            if after - before > period * 1.25:
                yield Finding(Verdict.SCHEDULE, name, f"no run from {before:.2f} to {after:.2f}")


def _scheduled(evidence: Evidence) -> Iterator[tuple[str, float, float]]:
    """Yield when schedules were put and removed, by the wall clock; another put changes nothing."""
    since: dict[str, float] = {}
    for line in sorted(evidence.history.others.get("schedule", ()), key=lambda line: line.at):
        name, wall = line.fields["name"], line.fields["wall"]
        if line.fields["phase"] == "put":
            since.setdefault(name, wall)
        elif (begin := since.pop(name, None)) is not None:
            yield name, begin, wall


def _topics(evidence: Evidence) -> Iterator[Finding]:
    """A subscriber gets each message of each publisher once and in order, or reports a gap.

    A subscriber that was killed is replaced by one that resumes where it was.
    """
    others = evidence.history.others
    published: dict[str, list[int]] = defaultdict(list)
    for line in sorted(others.get("published", ()), key=lambda line: line.at):
        published[line.who].append(line.fields["number"])
    received: dict[str, list[Line]] = {}
    for line in others.get("subscribed", ()):
        received[_slot(line)] = []
    for line in sorted(others.get("received", ()), key=lambda line: line.at):
        received.setdefault(_slot(line), []).append(line)
    gaps: dict[str, list[Line]] = defaultdict(list)
    for line in others.get("gap", ()):
        gaps[_slot(line)].append(line)
    for slot, lines in received.items():
        places = {line.fields.get("position"): place for place, line in enumerate(lines)}
        lost = [
            (places.get(gap.fields["after"], -1), places.get(gap.fields["first"], len(lines)))
            for gap in gaps[slot]
        ]
        for publisher in sorted({*published, *(line.fields["publisher"] for line in lines)}):
            came = [
                (line.fields["number"], place)
                for place, line in enumerate(lines)
                if line.fields["publisher"] == publisher
            ]
            for wrong in _wrong_messages(published[publisher], came, lost):
                yield Finding(Verdict.TOPIC, f"{publisher} to {slot}", wrong)


def _slot(line: Line) -> str:
    """Return the name that a process and those that replace it share."""
    return line.who.rpartition("-")[0] or line.who


def _wrong_messages(
    published: list[int], came: list[tuple[int, int]], lost: list[tuple[int, int]]
) -> Iterator[str]:
    """Compare what was published with what came, with its place among all messages."""
    numbers = [number for number, _ in came]
    if len(set(numbers)) < len(numbers):
        yield "a message came twice"
    if numbers != sorted(numbers):
        yield "messages came out of order"
    missing = []
    for number in published:
        if number in numbers:
            continue
        before = max((place for one, place in came if one < number), default=-1)
        after = min((place for one, place in came if one > number), default=inf)
        if not any(begin < after and before < end for begin, end in lost):
            missing.append(number)
    if missing:
        yield f"missing, and no gap was reported: {missing[:10]}"


def _dedupe(evidence: Evidence) -> Iterator[Finding]:
    """Of the tasks with one key, one at a time is unfinished; another one is rejected only then."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in evidence.history.entries.values():
        if entry.dedupe is not None and entry.planned_at is not None:
            groups[entry.dedupe].append(entry)
    for group in groups.values():
        group.sort(key=lambda one: one.planned_at or 0.0)
        for number, entry in enumerate(group):
            others = [one for one in group[:number] if one.rejected_at is None]
            if entry.rejected_at is not None and not any(
                _may_live(one, entry.planned_at or 0.0) for one in others
            ):
                detail = "it was rejected as a duplicate, and no task had its key"
                yield Finding(Verdict.DEDUPE, entry.key, detail)
            if entry.stored_at is None:
                continue
            for other in others:
                if other.stored_at is not None and _lives(other, entry.stored_at):
                    detail = f"{other.key} has the same key, and was not finished"
                    yield Finding(Verdict.DEDUPE, entry.key, detail)


def _may_live(entry: Entry, instant: float) -> bool:
    """Return whether a task may have been unfinished at an instant: its end was not confirmed."""
    ends = [
        run.settled_at
        for run in entry.runs.values()
        if run.settled_at is not None and run.settled_as in {"done", "failed"}
    ]
    return bool(entry.replays or entry.reopened) or not any(end < instant for end in ends)


def _lives(entry: Entry, instant: float) -> bool:
    """Return whether a task was unfinished at an instant: its last run ended later."""
    if entry.replays or entry.reopened or not entry.runs:
        return False
    finished_at = entry.in_order()[-1].finished_at
    return finished_at is not None and finished_at > instant


def _archive(evidence: Evidence) -> Iterator[Finding]:
    """An archived task is in the archive once, and no longer in MongoDB, when the last run ended.

    That none is missing from both is checked with all other tasks.
    """
    for key, several in evidence.stored.items():
        copies = sum(map(_is_archived, several))
        if copies and len(several) > 1:
            detail = f"{copies} times in the archive, {len(several) - copies} times in MongoDB"
            yield Finding(Verdict.ARCHIVE, key, detail)
    runs = sorted(evidence.history.others.get("archive", ()), key=lambda line: line.at)
    for line in runs:
        if "ArchiveDamaged" in str(line.fields.get("error")):
            yield Finding(Verdict.ARCHIVE, None, f"at {line.at:.3f}: {line.fields['error']}")
    if runs and runs[-1].fields["phase"] != "end":
        error = runs[-1].fields.get("error")
        yield Finding(Verdict.ARCHIVE, None, f"its last run did not end: {error}")


def _is_archived(one: Stored) -> bool:
    return one.collection == ledger.ARCHIVED


def _leaks(evidence: Evidence) -> Iterator[Finding]:
    for kind, left in evidence.leaks.items():
        if left:
            yield Finding(Verdict.LEAK, None, f"{kind}: {left}")


def _ended(evidence: Evidence) -> Iterator[Finding]:
    """A process ends by a signal of the harness, by its handler, or because its work is done.

    One that ends without an error writes a last line, with the threads that it leaves.
    """
    history = evidence.history
    others = history.others
    crashed = {line.who: line.fields["error"] for line in others.get("crashed", ())}
    left = {line.who for line in others.get("left", ())}
    exited = {line.who: line for line in others.get("exited", ())}
    parents = {name.partition("/")[0] for name in left}
    unexpected = {one.who: one for one in history.unexpected}
    for one in history.endings:
        if one.who in unexpected:
            detail = f"status {one.status} at {one.at:.3f}; {crashed.get(one.who) or 'no error'}"
            yield Finding(Verdict.ENDED, one.who, detail)
        elif one.status == 0 and one.who not in parents:
            yield Finding(Verdict.ENDED, one.who, f"it wrote no last line before {one.at:.3f}")
    for child, parent in history.parents.items():
        own_pid = history.pids.get(parent)
        if own_pid is None or child == f"{parent}/{own_pid}" or child in left:
            continue
        if not _may_end(history, child, parent, exited.get(child)):
            yield Finding(Verdict.ENDED, child, "it wrote no last line")


def _may_end(history: History, child: str, parent: str, exited: Line | None) -> bool:
    """Return whether a supervised process may have ended without its last line.

    It was killed, or asked to end before it could handle that, or its watchdog ended it: a handler
    still ran, or a call of the worker had taken long until shortly before.
    """
    if exited is not None:
        if history.troubles_in(child, exited.at - WATCHDOG_SEC, exited.at):
            return True
        return any(
            run.who in {child, parent} and (run.finished_at is None or run.finished_at > exited.at)
            for entry in history.entries.values()
            for run in entry.runs.values()
        )
    if any(fault.kind == "sigkill" and fault.target == child for fault in history.faults):
        return True
    born, last = history.lived.get(child, (0.0, 0.0))
    return last - born < YOUNG_SEC and bool(history.deaths_of(child))


def injected_kinds(faults: Iterable[str]) -> set[str]:
    """Return the kinds of faults that the harness injects: handlers cause the others."""
    return {kind for kind in faults if not kind.startswith(OF_HANDLERS)}


def _usable(evidence: Evidence) -> Iterator[Finding]:
    """A run in which little happened shows little."""
    entries = evidence.history.entries.values()
    faults = Counter(fault.kind for fault in evidence.history.faults)
    kinds = injected_kinds(faults)
    for name, count, what in (
        ("least", sum(entry.stored_at is not None for entry in entries), "tasks acknowledged"),
        ("least_faults", sum(faults[kind] for kind in kinds), "faults"),
        ("least_kinds", len(kinds), "kinds of faults"),
    ):
        if count < (least := evidence.run.get(name, 0)):
            yield Finding(Verdict.LEDGER, None, f"{count:,} {what}, of at least {least:,}")
    if not any(entry.stored_at is not None for entry in entries):
        yield Finding(Verdict.LEDGER, None, "no task was acknowledged")
    if not any(run.outcome == "done" for entry in entries for run in entry.runs.values()):
        yield Finding(Verdict.LEDGER, None, "no handler has finished")
    if not any(run.settled_at is not None for entry in entries for run in entry.runs.values()):
        yield Finding(Verdict.LEDGER, None, "no settlement was confirmed")
    for missing in _missing_parts(evidence):
        yield Finding(Verdict.LEDGER, None, missing)


def _missing_parts(evidence: Evidence) -> Iterator[str]:
    """Yield what no line shows of the parts that take part, or have begun to."""
    parts, others = set(evidence.run.get("parts", ())), evidence.history.others
    sent = [one for one in evidence.history.entries.values() if one.how == "celery"]
    ended = any(line.fields["phase"] == "end" for line in others.get("archive", ()))
    for takes_part, is_shown, missing in (
        (SCHEDULE in parts, any(_scheduled(evidence)), "no schedule was judged"),
        (TOPIC in parts, "published" in others, "nothing was published"),
        (
            TOPIC in parts or "published" in others,
            "subscribed" in others,
            "no one subscribed to the topic",
        ),
        (
            CELERY_TASKS in parts or sent,
            any(run.outcome == "done" for one in sent for run in one.runs.values()),
            "no Celery task has finished",
        ),
        (ARCHIVE in parts, ended, "no run of the archive has ended"),
        ("archive" in others, _count_archived(evidence), "nothing was archived"),
    ):
        if takes_part and not is_shown:
            yield missing


def _count_archived(evidence: Evidence) -> int:
    return sum(_is_archived(one) for _, one in _documents(evidence))


CHECKS: list[Callable[[Evidence], Iterator[Finding]]] = [
    _lost,
    _unknown,
    _never_settled,
    _early,
    _after_settlement,
    _overlap,
    _attempts,
    _status,
    _order,
    _impossible,
    _dedupe,
    _transactions,
    _left,
    _schedules,
    _topics,
    _archive,
    _leaks,
    _ended,
    _usable,
]


def _describe(run: Run) -> str:
    parts = [f"{run.who} attempt {run.attempt} at {run.at:.3f}"]
    if run.finished_at is not None:
        parts.append(f"{run.outcome} at {run.finished_at:.3f}")
    if run.settled_at is not None:
        parts.append(f"settled {run.settled_as} at {run.settled_at:.3f}")
    if run.lost_at is not None:
        parts.append(f"lost at {run.lost_at:.3f}")
    return "[" + ", ".join(parts) + "]"
