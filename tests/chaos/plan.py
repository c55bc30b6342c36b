"""What follows from the seed: the tasks, what their handlers do, and the faults with their times.

The plan says when a fault begins and on what, as a number among those that live at that time. What
the processes do with it follows from the wall clock, and differs from run to run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tests.chaos.profiles import Profile
from tests.chaos.setup import BATCHED, HOSTILE, MAIN, ORDERED, POPPED, queue_in

TASK_KINDS = {
    "ok": 88.0,
    "slow": 4.0,
    "flaky": 3.0,
    "retry": 1.5,
    "fail": 1.0,
    "snooze": 1.0,
    "raise": 0.6,
    "transaction": 0.5,
    "unstorable": 0.3,
    "long": 0.1,
    "hang": 0.05,
}
"""How often the handlers of the main queues do what."""
HOSTILE_KINDS = {"ok": 50.0, "fork": 20.0, "memory": 12.0, "exit": 12.0, "flaky": 6.0}
BATCH_KINDS = {"ok": 94.0, "flaky": 3.0, "retry": 1.0, "fail": 1.0, "raise": 1.0}
"""The same for tasks that end or exhaust their process, and for tasks that come in batches."""
WAYS = {
    "many": 50.0,
    "batched": 10.0,
    "singles": 14.0,
    "delayed": 6.0,
    "popped": 6.0,
    "ordered": 6.0,
    "hostile": 4.0,
    "transaction": 4.0,
    "aborted": 2.0,
    "dedupe": 4.0,
}
"""How often tasks are enqueued in which way."""
SIZES = {
    "many": (50, 200),
    "batched": (20, 100),
    "singles": (5, 15),
    "delayed": (50, 200),
    "popped": (10, 60),
    "ordered": (3, 12),
    "hostile": (3, 10),
    "transaction": (1, 4),
    "aborted": (1, 4),
    "dedupe": (2, 2),
}
"""How many tasks are drawn at a time."""


@dataclass(frozen=True)
class PlannedTask:
    """One task: where it goes, how it is enqueued, and what its handler will do."""

    key: str
    queue: str
    kind: str = "ok"
    how: str = "single"
    sec: float = 0.0
    times: int = 1
    delay: float | None = None
    priority: int = 0
    max_attempts: int | None = None
    dedupe_key: str | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of ``enqueue``."""
        given: dict[str, Any] = {"delay": self.delay, "max_attempts": self.max_attempts}
        given |= {"dedupe_key": self.dedupe_key}
        chosen: dict[str, Any] = {name: one for name, one in given.items() if one is not None}
        return {"priority": self.priority, **chosen} if self.priority else chosen


class _Chunk:
    """Draws the tasks of one chunk."""

    def __init__(
        self,
        rng: Random,
        number: int,
        database: str,
        lease_sec: float,
        kinds: Mapping[str, float],
    ) -> None:
        self._rng = rng
        self._kinds = kinds
        self._number = number
        self._database = database
        self._lease_sec = lease_sec
        self.count = 0

    def task(self, queue: str, kinds: Mapping[str, float], how: str, **options: Any) -> PlannedTask:
        rng = self._rng
        kind = pick(rng, kinds)
        sec = {"slow": rng.uniform(0.05, 0.4), "long": self._lease_sec * 1.5}.get(
            kind, rng.choice((0.0, 0.0, 0.002, 0.01))
        )
        if kind == "raise":
            options["max_attempts"] = rng.randint(1, 4)
        self.count += 1
        return PlannedTask(
            key=f"{self._number}-{self.count}",
            queue=queue_in(self._database, queue),
            kind=kind,
            how=how,
            sec=round(sec, 4),
            times=rng.randint(1, 2),
            **options,
        )

    def groups(self, way: str) -> list[list[PlannedTask]]:
        """Draw tasks that are enqueued in one way: a group for each call."""
        rng = self._rng
        count = rng.randint(*SIZES[way])
        if way == "singles":
            return [[self.task(MAIN, self._kinds, "single")] for _ in range(count)]
        if way == "dedupe":
            same = {"dedupe_key": f"{self._number}-{self.count}"}
            return [[self.task(MAIN, self._kinds, "single", **same)] for _ in range(count)]
        return [[self._one_of(way) for _ in range(count)]]

    def _one_of(self, way: str) -> PlannedTask:
        rng = self._rng
        if way in {"batched", "popped"}:
            return self.task(BATCHED if way == "batched" else POPPED, BATCH_KINDS, "many")
        if way == "ordered":
            task = self.task(ORDERED, {"ok": 1.0}, "many", priority=rng.randint(0, 3))
            return replace(task, sec=rng.choice((0.0, 0.01, 0.05)))  # So that some wait.
        if way == "hostile":
            return self.task(HOSTILE, HOSTILE_KINDS, "many")
        if way in {"transaction", "aborted"}:
            return self.task(MAIN, self._kinds, way)
        delay = round(rng.uniform(0.2, 8.0), 3) if way == "delayed" else None
        priority = rng.choice((0, 0, 0, 1, 5, 255))
        return self.task(MAIN, self._kinds, "many", delay=delay, priority=priority)


def tasks_of_chunk(
    seed: int,
    chunk: int,
    size: int,
    *,
    database: str,
    lease_sec: float,
    transactions: bool,
    kinds: Mapping[str, float] | None = None,
) -> Iterator[list[PlannedTask]]:
    """Yield the tasks of a chunk, in groups that one call enqueues.

    ``kinds`` replaces what the handlers of the main queues do.
    """
    rng = Random(f"{seed}/{chunk}")
    drawn = _Chunk(rng, chunk, database, lease_sec, kinds or TASK_KINDS)
    ways = dict(WAYS)
    if database != "chaos":
        ways.pop("ordered")  # It has a single consumer.
    if not transactions:
        ways = {way: one for way, one in ways.items() if way not in {"transaction", "aborted"}}
    while drawn.count < size:
        # Each chunk has some tasks for the single consumer.
        way = pick(rng, ways) if drawn.count or "ordered" not in ways else "ordered"
        for group in drawn.groups(way):
            yield group if transactions else [_without_transaction(task) for task in group]


def _without_transaction(task: PlannedTask) -> PlannedTask:
    if task.kind != "transaction":
        return task
    return PlannedTask(**{**vars(task), "kind": "ok"})


def pick(rng: Random, weights: Mapping[str, float]) -> str:
    """Draw a name by its weight."""
    return rng.choices(list(weights), list(weights.values()))[0]


@dataclass(frozen=True)
class PlannedFault:
    """One fault: when it begins after the start, how long it lasts, and on what."""

    at: float
    lane: str
    kind: str
    target: str
    choice: int
    lasts: float


LASTS = {
    "sigstop": (1.2, 1.8),  # In leases; everything else in seconds.
    "clock": (3.0, 8.0),
    "twenty_sweepers": (4.0, 8.0),
    "cut": (0.0, 0.0),
    "delay": (2.0, 5.0),
    "drop_replies": (2.0, 4.0),
    "half_open": (2.0, 5.0),
    "mongod_kill": (0.2, 2.0),
    "mongod_freeze": (1.0, 5.0),
    "primary_freeze": (3.0, 6.0),
    "primary_kill": (1.0, 4.0),
    "majority_lost": (2.0, 5.0),
    "disk_full": (1.0, 4.0),
    "rollback": (3.0, 5.0),
}


def faults_of(profile: Profile, seed: int, server_faults: Sequence[str]) -> list[PlannedFault]:
    """Plan the faults of a run: each lane has its own rhythm, and goes through all its kinds."""
    rng = Random(f"{seed}/faults")
    lanes = {
        "processes": (profile.process_faults, [*profile.process_kinds]),
        "network": (profile.network_faults, ["cut", "delay", "drop_replies", "half_open"]),
        "server": (profile.server_faults, [*(profile.server_kinds or server_faults)]),
    }
    planned: list[PlannedFault] = []
    for lane, (count, kinds) in lanes.items():
        deck: list[str] = []
        gap = (profile.minutes * 60 - profile.calm_sec) / max(count, 1)
        for number in range(count if kinds else 0):
            if not deck:
                deck = rng.sample(kinds, len(kinds))
            kind, _, target = deck.pop().partition(" ")
            lasts = rng.uniform(*LASTS.get(kind, (0.0, 0.0)))
            planned.append(
                PlannedFault(
                    at=round(profile.calm_sec + gap * (number + rng.uniform(0, 0.8)), 2),
                    lane=lane,
                    kind=kind,
                    target=target or lane,
                    choice=rng.randrange(1000),
                    lasts=round(lasts * (profile.lease_sec if kind == "sigstop" else 1), 2),
                )
            )
    return sorted(planned, key=lambda one: one.at)
