"""What producers, handlers and operators did, and whether it keeps the promises of the queue.

The ledger knows tasks by what their producer called them: the number in the payload, with the queue
for a message of a topic, or the id of a run of a schedule. It shares no code with the queue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

Key = int | str
NEVER = 9999
"""The year in which a reserved task is due."""

PROMISES = {
    "unknown": "a handler gets only tasks that someone enqueued",
    "early": "a task does not start before it is due",
    "overlap": "two handlers do not have a task at once, while the lease of the first lasts",
    "attempts": "a task starts at most max_attempts times, and again after each replay",
    "repeated": "a task does not start after its settlement was confirmed",
    "refused": "a task that was reported as a duplicate is not stored",
    "replaced": "a payload that was replaced is not delivered",
    "period": "of the tasks with one key, one is delivered per period of dedupe_for",
    "impossible": "a stored task has a state that the queue can continue from",
    "lost": "a confirmed task is stored",
    "doubled": "a task is stored once: in tasks, or in tasks_dlq",
    "stuck": "without faults, every task ends",
    "status": "a task has the status that its worker was told",
    "unrun": "a task that is done has run",
    "failed": "without faults, a task does not fail before its last attempt",
    "discarded": "a dead letter that was discarded is gone",
    "second run": "one run of a schedule adds one task",
    "missed run": "with catch_up='all', each run of a schedule adds a task",
    "torn": "a message is in all bound queues, or in none",
    "unswept": "a sweep handles all that was due when it began",
    "rejected": "the server rejects no call of an operation",
}
"""The promises, by the kind of their violation."""


class Violation(AssertionError):
    """A broken promise. ``kind`` names it, ``key`` is the task."""

    def __init__(self, kind: str, key: Any, details: str) -> None:
        super().__init__(f"{kind}: task {key}: {details} (promise: {PROMISES[kind]})")
        self.kind = kind
        self.key = key


@dataclass
class Run:
    """One run of a handler, under a lease."""

    worker: str
    began: datetime
    ends_at: datetime
    over: bool = False


@dataclass
class Entry:
    """What is known of one task."""

    key: Key
    not_before: datetime
    max_attempts: int
    can_expire: bool = False
    retry_at: datetime | None = None
    """When its retry is due, if a worker was told that it waits for it."""
    planned_as: int = 0
    """How many events the ledger had noted when it was planned."""
    confirmed_as: int | None = None
    """The same when a caller was told that it is stored; None if no one was."""
    runs: list[Run] = field(default_factory=list)
    claims: int = 0
    refunds: int = 0
    failures: int = 0
    """How often a handler asked to fail the task."""
    repeatable: bool = False
    """Whether its insert or replacement may be performed twice: it was repeated, or is late."""
    late: bool = False
    """Whether its insert or replacement may be performed after its producer got an answer."""
    replays: int = 0
    """How often an operator asked to replay it, or a replay may be performed again."""
    replaying: bool = False
    """Whether a replay may still be performed: it is not known to be over."""
    discard_asked: bool = False
    refused: bool = False
    may_be_replaced: bool = False
    replaced: bool = False
    ended: str | None = None
    """What a caller was told: ``done``, ``failed`` or ``discarded``."""


@dataclass
class Timetable:
    """What is known of one schedule."""

    every: timedelta
    all_runs: bool
    """Whether each run is added, however late."""
    instants: set[datetime] = field(default_factory=set)


def key_of(document: Mapping[str, Any]) -> Key:
    """Return what the producer calls a task."""
    headers = document.get("headers") or {}
    if "schedule" in headers:
        return str(document["_id"])
    number: int = document["payload"]["n"]
    return f"{number}@{document['queue']}" if "topic" in headers else number


class Ledger:
    """The entries of all tasks.

    Args:
        kept: Whether done tasks are kept. If not, nothing shows that a task was stored, done and
            deleted before its insert was sent again: then it runs again.
        moved: Whether dead letters have their own collection. Nothing keeps an insert that is
            performed again from adding a task that has become a dead letter there since.
        now: Returns the server's time.
    """

    def __init__(self, *, kept: bool, moved: bool, now: Callable[[], datetime]) -> None:
        self.kept = kept
        self._moved = moved
        self._now = now
        self.entries: dict[Key, Entry] = {}
        self.starts = 0
        self.numbers = 0
        self._events = 0
        self.schedules: dict[str, Timetable] = {}
        self._keys: defaultdict[Any, set[Key]] = defaultdict(set)
        self._last_keys: dict[Any, Key] = {}
        self._run_ids: dict[tuple[str, datetime], Any] = {}
        self._periods: defaultdict[tuple[str, str], dict[Key, tuple[datetime, datetime]]] = (
            defaultdict(dict)
        )
        self._released: dict[Any, datetime] = {}
        self._messages: dict[int, list[Key]] = {}
        self.replaceable: set[Key] = set()
        """The tasks with a dedupe key with which producers replace tasks."""

    # Producers

    def number(self) -> int:
        """Return the number of a new task or message."""
        self.numbers += 1
        return self.numbers

    def plan(
        self, key: Key, *, not_before: datetime, max_attempts: int, can_expire: bool = False
    ) -> Entry:
        """Note that a producer is about to enqueue a task."""
        self._events += 1
        entry = Entry(key, not_before, max_attempts, can_expire, planned_as=self._events)
        self.entries[key] = entry
        return entry

    def confirm(self, key: Key) -> None:
        """Note that a producer was told that its task is stored."""
        self._events += 1
        self.entries[key].confirmed_as = self._events

    def refuse(self, key: Key, existing_id: Any = None) -> None:
        """Note that a producer was told that another task is stored instead."""
        self.entries[key].refused = True
        # The other one is confirmed, if there is only one that it can be.
        others = self._entries([existing_id])
        if len(others) == 1:
            self.confirm(others[0].key)

    def replace(self, key: Key, task_id: Any) -> None:
        """Note that a producer was told that its task has replaced the waiting one of this id.

        Of two replacements at once, either may be the last.
        """
        began = self.entries[key].planned_as
        for entry in self._entries([task_id]):
            if entry.confirmed_as is not None and entry.confirmed_as < began:
                entry.replaced = True
        self.confirm(key)

    def publish(self, number: int, keys: list[Key]) -> None:
        """Note that a message goes to these queues: all of them are bound."""
        self._messages[number] = keys

    def may_repeat(self, call: Any, *, late: bool = False) -> None:
        """Note that a call may be performed twice; ``late``: after its client has given up."""
        documents: list[Any] = []
        if call.method == "insert_one":
            documents = [call.arguments[0]]
        elif call.method == "insert_many":
            documents = list(call.arguments[0])
        if call.method == "find_one_and_update" and "payload" in call.arguments[1].get("$set", ()):
            documents = [{**call.arguments[1]["$set"], "queue": None}]
        for one in documents:
            if "payload" in one and (entry := self.entries.get(key_of(one))) is not None:
                entry.repeatable = True
                entry.late |= late
        if call.method == "update_many" and "replays" in call.arguments[1].get("$inc", ()):
            self.replay(call.arguments[0]["_id"]["$in"])

    # Workers

    def claim(self, key: Key) -> None:
        """Note that a worker holds a task, which may not start before its lease ends."""
        if key in self.entries:
            self.entries[key].claims += 1

    def start(
        self, document: Mapping[str, Any], worker: str, *, now: datetime, ends_at: datetime
    ) -> Run:
        """Note that a handler starts, or raise what that violates."""
        key = key_of(document)
        entry = self.entries.get(key)
        if entry is None:
            raise Violation("unknown", key, "nobody enqueued it")
        due = _due(entry)
        if now < due:
            raise Violation("early", key, f"started at {now}, due at {due}")
        if entry.ended is not None and self._may_return(entry):
            entry.ended = None
            entry.refunds = len(entry.runs)
        if entry.refused and not entry.late:
            raise Violation("refused", key, "started after it was reported as a duplicate")
        if entry.replaced and not entry.late:
            raise Violation("replaced", key, "started after it was replaced")
        if entry.ended is not None:
            raise Violation("repeated", key, f"started after it was {entry.ended}")
        for run in entry.runs:
            if not run.over and run.ends_at > now:
                raise Violation(
                    "overlap", key, f"{worker} started, {run.worker} has until {run.ends_at}"
                )
        # A replay that keeps the count makes room for one more, also for later replays.
        most = (entry.max_attempts + entry.replays) * (1 + entry.replays) + entry.refunds
        if len(entry.runs) >= most:
            raise Violation("attempts", key, f"run {len(entry.runs) + 1}, see max_attempts")
        self._check_period(key, document)
        run = Run(worker, now, ends_at)
        entry.runs.append(run)
        self.starts += 1
        return run

    def _may_return(self, entry: Entry) -> bool:
        """Return whether a task that has ended may be inserted again: nothing in tasks shows it."""
        gone = {"done": not self.kept, "failed": self._moved, "discarded": True}
        return entry.repeatable and entry.ended is not None and gone[entry.ended]

    def _check_period(self, key: Key, document: Mapping[str, Any]) -> None:
        until = document.get("dedupe_until")
        if until is None or self.entries[key].replays:  # A replay ignores the period.
            return
        began = self._released.get(document["_id"], self._now())
        others = self._periods[document["queue"], document["dedupe_key"]]
        for other, (other_began, other_until) in others.items():
            if other != key and (
                other_began <= began < other_until or began <= other_began < until
            ):
                raise Violation("period", key, f"added at {began}, and {other} at {other_began}")
        others[key] = began, until

    def end(self, key: Key, status: str, replays: int) -> None:
        """Note that a worker was told that its settlement is stored.

        ``replays`` is how often a replay was asked for when the worker sent it: a task that failed
        may wait again since.
        """
        entry = self.entries[key]
        if status == "done" or (entry.replays == replays and not entry.replaying):
            entry.ended = status

    def retry(self, key: Key, *, asked_at: datetime, delay: timedelta, replays: int) -> None:
        """Note that a worker was told that its task waits at least so long since it asked.

        ``replays`` is as for :meth:`end`. Until the reply arrived, the task may have started again.
        """
        entry = self.entries[key]
        if entry.replays != replays or entry.replaying:
            return
        entry.retry_at = asked_at + delay
        due = _due(entry)
        for run in entry.runs:
            if asked_at <= run.began < due:
                raise Violation("early", key, f"started at {run.began}, its retry is due at {due}")

    def refund(self, key: Key) -> None:
        """Note that a worker asks for an attempt to be refunded."""
        self.entries[key].refunds += 1

    def fail(self, key: Key) -> None:
        """Note that a worker asks to fail a task."""
        self.entries[key].failures += 1

    # Operators

    def replay(self, ids: Iterable[Any]) -> None:
        """Note that an operator asks to replay dead letters, or that this may happen again."""
        for entry in self._entries(ids):
            entry.replays += 1
            entry.replaying = True
            if entry.can_expire:  # Only such a task may be a dead letter before it is due.
                entry.not_before, entry.retry_at = self._now(), None
            if entry.ended == "failed":
                entry.ended = None

    def replays_of(self, ids: Iterable[Any]) -> list[int]:
        """Return how often replays of these tasks were asked for."""
        return [entry.replays for entry in self._entries(ids)]

    def end_replay(self, ids: Iterable[Any], asked: list[int]) -> None:
        """Note that a replay is over, unless it may be performed again since it was asked for."""
        for entry, replays in zip(self._entries(ids), asked, strict=False):
            if entry.replays == replays:
                entry.replaying = False

    def ask_discard(self, ids: Iterable[Any]) -> None:
        """Note that an operator asks to discard dead letters."""
        for entry in self._entries(ids):
            entry.discard_asked = True

    def discard(self, task_id: Any) -> None:
        """Note that an operator was told that a dead letter is discarded."""
        for entry in self._entries([task_id]):
            entry.ended = "discarded"

    def _entries(self, ids: Iterable[Any]) -> list[Entry]:
        keys = [key for one in ids for key in sorted(self._keys.get(one, ()), key=str)]
        return [self.entries[key] for key in keys if key in self.entries]

    # Documents

    def check_document(self, document: Mapping[str, Any]) -> None:
        """Raise what a stored document violates, at any time."""
        key = key_of(document)
        task_id = document["_id"]
        if (before := self._last_keys.get(task_id)) != key:
            self._keys[task_id].add(key)
            self._last_keys[task_id] = key
            if before in self.replaceable:
                self.entries[before].may_be_replaced = True
        if "dedupe_until" in document:
            self._note_reserved(document)
        headers = document.get("headers")
        if headers and "schedule" in headers:
            self._note_run(key, document)
        if fault := _impossible(document):
            raise Violation("impossible", key, fault)

    def _note_reserved(self, document: Mapping[str, Any]) -> None:
        """Note when a task that was reserved for its key is added for good."""
        task_id, due = document["_id"], document["next_retry_at"]
        if due is not None and due.year == NEVER:
            self._released.pop(task_id, None)
        else:
            self._released.setdefault(task_id, self._now())

    def _note_run(self, key: Key, document: Mapping[str, Any]) -> None:
        name, at = document["headers"]["schedule"], document["headers"]["scheduled_at"]
        if self._run_ids.setdefault((name, at), document["_id"]) != document["_id"]:
            raise Violation("second run", key, f"{name} has one for {at}")
        if key not in self.entries:
            self.plan(key, not_before=at, max_attempts=document["max_attempts"])
            self.schedules[name].instants.add(at)

    def check_swept(self, key: Key, *, unchanged: bool) -> None:
        """Raise if a sweep left what was due when it began."""
        if unchanged:
            raise Violation("unswept", key, "the sweep has ended, and it is as before")

    def check_end(
        self,
        tasks: Iterable[Mapping[str, Any]],
        dead_letters: Iterable[Mapping[str, Any]],
        *,
        faultless: bool,
    ) -> None:
        """Raise what the final state violates, after all tasks could end without faults.

        Args:
            tasks: The stored tasks.
            dead_letters: The dead letters in their own collection.
            faultless: Whether there were no faults at all: then every claim is known.
        """
        stored: dict[Key, Mapping[str, Any]] = {}
        for document in [*tasks, *dead_letters]:
            key = key_of(document)
            if key in stored:
                if not self._may_be_in_both(key, stored[key], document):
                    raise Violation("doubled", key, f"{document['_id']} and {stored[key]['_id']}")
                continue
            stored[key] = document
        for entry in self.entries.values():
            found = stored.get(entry.key)
            if found is None:
                self._check_absent(entry)
            else:
                self._check_present(entry, found, faultless=faultless)
        for name, one in self.schedules.items():
            self._check_schedule(name, one, stored)
        for number, keys in self._messages.items():
            seen = [key in stored or self._was_there(key) for key in keys]
            if any(seen) and not all(seen):
                raise Violation("torn", number, f"{keys}: {seen}")

    def _was_there(self, key: Key) -> bool:
        entry = self.entries[key]
        return bool(entry.runs) or entry.discard_asked

    def _check_absent(self, entry: Entry) -> None:
        may_be_gone = (
            entry.refused
            or entry.discard_asked
            or entry.may_be_replaced
            or (entry.runs and not self.kept)
        )
        if entry.confirmed_as is not None and not may_be_gone:
            raise Violation("lost", entry.key, "it was confirmed, and is not stored")

    def _may_be_in_both(
        self, key: Key, task: Mapping[str, Any], dead_letter: Mapping[str, Any]
    ) -> bool:
        """Return whether a task may be in both collections.

        Its insert was performed again after it had moved. Or it is a run of a schedule: a move of
        its dead letter that was interrupted is continued an hour later.
        """
        if not self._moved or task["_id"] != dead_letter["_id"]:
            return False
        is_run = str(key).startswith("schedule:")
        return self.entries[key].repeatable or (is_run and task["status"] == "failed")

    def _check_present(self, entry: Entry, document: Mapping[str, Any], *, faultless: bool) -> None:
        key, status = entry.key, document["status"]
        if status not in {"done", "failed"}:
            raise Violation("stuck", key, f"it is still {status}")
        if entry.ended is not None and self._may_return(entry):
            return
        if entry.ended == "discarded":
            raise Violation("discarded", key, f"it is {status}")
        if entry.refused and not entry.late:
            raise Violation("refused", key, "it is stored, and was reported as a duplicate")
        if entry.ended is not None and status != entry.ended:
            raise Violation("status", key, f"it was {entry.ended}, and is {status}")
        if status == "done" and not entry.runs:
            raise Violation("unrun", key, "it is done, and no handler has run")
        used = entry.claims - entry.refunds
        in_vain = status == "failed" and not (entry.failures or entry.can_expire or entry.replays)
        if faultless and in_vain and used < entry.max_attempts:
            raise Violation("failed", key, f"after {used} of {entry.max_attempts}")

    def _check_schedule(self, name: str, one: Timetable, stored: Mapping[Key, Any]) -> None:
        there = [at for at in one.instants if self._is_run_there(name, at, stored)]
        if not one.all_runs or not there:
            return
        at, last = min(there), max(there)
        while at < last:
            at += one.every
            if at not in there:
                raise Violation("missed run", name, f"none at {at}, the last one at {last}")

    def _is_run_there(self, name: str, at: datetime, stored: Mapping[Key, Any]) -> bool:
        key = str(self._run_ids[name, at])
        return key in stored or self._was_there(key)


def _due(entry: Entry) -> datetime:
    """Return when a task may start: its retry counts unless its insert may be performed again."""
    if entry.retry_at is None or entry.repeatable:
        return entry.not_before
    return max(entry.not_before, entry.retry_at)


def _impossible(document: Mapping[str, Any]) -> str | None:
    status, attempts = document["status"], document["attempts"]
    if attempts < 0:
        return f"attempts={attempts}"
    if status == "processing" and not (document.get("lease_token") and document.get("deadline_at")):
        return "it is claimed, without a lease"
    if status == "pending" and document.get("lease_token"):
        return "it waits, with a lease"
    if status in {"done", "failed"} and document.get("finished_at") is None:
        return f"it is {status}, and has no end"
    if status == "pending" and document.get("next_retry_at") and not document.get("deadline_at"):
        return "it is delayed, and no sweep would find it"
    return None
