"""Make a recording, for simulations, of what tasks remember."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from microqueue.spark.pipelines.simulation import (
    ALWAYS,
    RecordedTask,
    Recording,
    Retries,
    find_outages,
)

FAILED = frozenset({"retried", "failed"})
CRASHED = frozenset({"lease_expired", "crashed"})
MOST_TASKS = 200_000
"""So many tasks every executor gets; of more, a sample is taken."""


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """One attempt, in seconds."""

    started_sec: float
    ended_sec: float
    outcome: str
    number: int = 1


@dataclass(frozen=True, slots=True)
class PastTask:
    """A task as it went, in seconds."""

    arrived_sec: float
    status: str
    priority: int
    max_attempts: int
    attempts: tuple[PastAttempt, ...]


@dataclass(frozen=True)
class Collected:
    """Tasks as they went: all there are, or a sample of them."""

    tasks: list[PastTask]
    total: int


def record(tasks: Sequence[PastTask]) -> Recording:
    """Separate what happened to everybody from what happened to single tasks.

    Failures within an outage say nothing of a task; those outside are its own. A task that
    failed for good outside of an outage is taken to fail always.
    """
    if not tasks:
        return Recording(())
    # A whole second, so that the simulation's seconds are those of the clock.
    first = math.floor(min(task.arrived_sec for task in tasks))
    begun = [
        (attempt.started_sec - first, attempt.outcome in FAILED)
        for task in tasks
        for attempt in task.attempts
        if attempt.outcome not in CRASHED
    ]
    whole = Recording((), find_outages(begun))
    usual_run = _median(_took(tasks, {"done"}))
    usual_fail = _median(_took(tasks, FAILED))
    recorded = [_recorded(task, first, whole, usual_run, usual_fail) for task in tasks]
    ordered = sorted(recorded, key=lambda task: task.arrived_sec)
    ended = [attempt.ended_sec - first for task in tasks for attempt in task.attempts]
    return replace(whole, tasks=tuple(ordered), observed_sec=max(ended, default=0.0))


def retries_of(tasks: Iterable[PastTask]) -> Retries:
    """Count the retries that tasks remember, as :class:`Result` counts those of a simulation."""
    begun = (attempt for task in tasks for attempt in task.attempts if attempt.number > 1)
    return Retries.of(Counter(math.floor(attempt.started_sec) for attempt in begun))


def _recorded(
    task: PastTask, first: float, whole: Recording, usual_run: float, usual_fail: float
) -> RecordedTask:
    own = [
        attempt
        for attempt in task.attempts
        if attempt.outcome in FAILED and not whole.out_at(attempt.started_sec - first)
    ]
    last = task.attempts[-1] if task.attempts else None
    hopeless = task.status == "failed" and last in own
    return RecordedTask(
        arrived_sec=task.arrived_sec - first,
        run_sec=_median(_took([task], {"done"}), usual_run),
        fail_sec=_median(_took([task], FAILED), usual_fail),
        own_failures=ALWAYS if hopeless else len(own),
        crashes=sum(attempt.outcome in CRASHED for attempt in task.attempts),
        priority=task.priority,
        max_attempts=task.max_attempts,
    )


def _took(tasks: Iterable[PastTask], outcomes: Iterable[str]) -> list[float]:
    return [
        max(attempt.ended_sec - attempt.started_sec, 0.0)
        for task in tasks
        for attempt in task.attempts
        if attempt.outcome in outcomes
    ]


def _median(values: Sequence[float], otherwise: float = 0.0) -> float:
    return median(values) if values else otherwise


def busiest(tasks: Iterable[PastTask]) -> int:
    """Count how many attempts ran at the same time at most: as many workers there were."""
    edges: list[tuple[float, int]] = []
    for task in tasks:
        for attempt in task.attempts:
            edges += [(attempt.started_sec, 1), (attempt.ended_sec, -1)]
    running = most = 0
    for _, change in sorted(edges):
        running += change
        most = max(most, running)
    return max(most, 1)


def collect(tasks: DataFrame, *, most: int) -> Collected:
    """Bring tasks to the driver as they went, all or a sample; the same one for the same tasks."""

    def seconds(name: str) -> str:
        return f"unix_micros({name}) / 1000000 as {name.rpartition('.')[2].replace('_at', '_sec')}"

    entry = f"struct({seconds('entry.started_at')}, {seconds('entry.ended_at')}, entry.outcome, "
    entry += "coalesce(entry.attempt, 1) as number)"
    known = "filter(history, e -> e.started_at is not null and e.ended_at is not null)"
    frame = tasks.selectExpr(
        "unix_micros(created_at) / 1000000 as arrived_sec",
        "coalesce(status, 'pending') as status",
        "coalesce(priority, 0) as priority",
        "greatest(coalesce(max_attempts, 10), 1) as max_attempts",
        f"transform(coalesce({known}, array()), entry -> {entry}) as attempts",
        "id",
    ).where("arrived_sec is not null")
    chosen = frame.orderBy(f.xxhash64("id")).limit(most)
    found = [
        PastTask(
            arrived_sec=row["arrived_sec"],
            status=row["status"],
            priority=row["priority"],
            max_attempts=row["max_attempts"],
            attempts=tuple(PastAttempt(*attempt) for attempt in row["attempts"]),
        )
        for row in chosen.collect()
    ]
    return Collected(found, len(found) if len(found) < most else frame.count())
