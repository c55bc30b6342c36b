"""A queue in miniature: what recorded tasks would have met under another policy.

Pure, and the same for the same seed. A recording says when tasks arrived, how long they ran,
and how they failed. Failures come in three kinds, because they answer differently to patience:

- an *outage*: whatever starts within the interval fails, whoever it is;
- a task's *own* failures: it fails so many times, whenever it is tried, or always;
- *crashes*: the worker dies, and the task is back only when its lease has expired.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from microqueue.backoff import BackoffPolicy
from microqueue.model import Model

ALWAYS = 10**9
"""As many failures of its own as a task that never succeeds has."""

OUTAGE_SHARE = 0.5
"""Where more attempts than this share fail, the tasks are hardly to blame one by one."""
OUTAGE_LEAST = 5
"""Fewer failures in a row are as likely tasks that fail on their own, one after the other."""
OUTAGE_GAP_SEC = 10
"""Retries come in waves: a short silence between failures does not end an outage."""

ARRIVES, ENDS = 0, 1
MINUTE = 60


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """One task of a recording; times are seconds from its beginning."""

    arrived_sec: float
    run_sec: float
    fail_sec: float = 0.0
    own_failures: int = 0
    crashes: int = 0
    priority: int = 0
    max_attempts: int = 10


@dataclass(frozen=True, slots=True)
class Recording:
    """What happened: the tasks, and the intervals in which everything failed.

    ``observed_sec`` is the last instant of which something is known: what a simulation does
    later has nothing to be compared with.
    """

    tasks: tuple[RecordedTask, ...]
    outages: tuple[tuple[float, float], ...] = ()
    observed_sec: float = math.inf

    def out_at(self, second: float) -> bool:
        """Tell whether an attempt that starts then meets an outage."""
        place = bisect_right(self.outages, (second, math.inf)) - 1
        return place >= 0 and second < self.outages[place][1]


class Scenario(Model):
    """What is tried: a policy, how many attempts run at a time, and how long leases last."""

    policy: BackoffPolicy
    workers: int
    visibility_timeout_sec: float = 600.0
    seed: int = 0

    @property
    def name(self) -> str:
        """The scenario in a few words, the same for all seeds."""
        policy = self.policy
        return (
            f"{policy.jitter} base {policy.base_sec:g}s factor {policy.factor:g} "
            f"max {policy.max_sec:g}s, {self.workers} workers, "
            f"lease {self.visibility_timeout_sec:g}s"
        )


class Retries(Model):
    """Retries that began: how many, in the worst second, and in the worst sixty seconds."""

    count: int
    peak_per_sec: int
    peak_per_min: int

    @classmethod
    def of(cls, seconds: Mapping[int, int]) -> Retries:
        """Add up the retries of seconds."""
        ending = within = 0
        worst = 0
        ordered = sorted(seconds)
        for second in ordered:
            within += seconds[second]
            while ordered[ending] <= second - MINUTE:
                within -= seconds[ordered[ending]]
                ending += 1
            worst = max(worst, within)
        return cls(
            count=sum(seconds.values()),
            peak_per_sec=max(seconds.values(), default=0),
            peak_per_min=worst,
        )


class Result(Model):
    """What came of a scenario.

    ``peak_retries_per_sec`` counts retries that came due in one second: the storm as the
    policy makes it. ``peak_attempts_per_sec`` counts attempts that began: as the workers let
    it through. ``recovery_sec`` is how long after the last outage its tasks were settled.
    ``observable`` are the retries that began while the recording lasted.
    """

    scenario: Scenario
    attempts: int
    wasted_attempts: int
    retries: int
    done: int
    dead: int
    peak_retries_per_sec: int
    peak_attempts_per_sec: int
    recovery_sec: float
    makespan_sec: float
    latency_p95_sec: float
    retries_by_sec: dict[int, int]
    observable: Retries


@dataclass(slots=True)
class _Life:
    """A task on its way."""

    recorded: RecordedTask
    number: int
    attempts: int = 0
    own_failures: int = 0
    crashes: int = 0
    delay: float | None = None
    met_outage: bool = False


@dataclass(slots=True)
class _Counters:
    wasted: int = 0
    attempts: int = 0
    done: int = 0
    dead: int = 0
    due: Counter[int] = field(default_factory=Counter)
    begun: Counter[int] = field(default_factory=Counter)
    observable: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    last_settled: float = 0.0
    last_recovered: float = 0.0


def simulate(recording: Recording, scenario: Scenario) -> Result:
    """Run one scenario to its end, event by event."""
    run = _Run(recording, scenario)
    while run.events:
        run.step()
    return run.result()


class _Run:
    """The state of one simulation: what will happen, who waits, and how many are free."""

    def __init__(self, recording: Recording, scenario: Scenario) -> None:
        self.recording, self.scenario = recording, scenario
        # S311: this is a dice, not a secret. A text as seed is the same in every process.
        self.random = random.Random(f"{scenario.seed}/{scenario.name}")  # noqa: S311 (as above)
        lives = [_Life(task, number) for number, task in enumerate(recording.tasks)]
        self.events: list[tuple[float, int, int, _Life | None]] = [
            (life.recorded.arrived_sec, ARRIVES, life.number, life) for life in lives
        ]
        heapq.heapify(self.events)
        self.ready: list[tuple[int, int, _Life]] = []
        self.free = scenario.workers
        self.counters = _Counters()

    def step(self) -> None:
        """Let the next event happen, and give free workers what is ready."""
        now, kind, _, life = heapq.heappop(self.events)
        if kind == ENDS:
            self.free += 1
        elif life is not None:
            if life.attempts:
                self.counters.due[math.floor(now)] += 1
            # Older tasks go first within a priority, as in the queue.
            heapq.heappush(self.ready, (-life.recorded.priority, life.number, life))
        while self.free and self.ready:
            self._begin(heapq.heappop(self.ready)[2], now)

    def _begin(self, life: _Life, now: float) -> None:
        self.free -= 1
        life.attempts += 1
        self.counters.attempts += 1
        self.counters.begun[math.floor(now)] += 1
        if life.attempts > 1 and now <= self.recording.observed_sec:
            self.counters.observable[math.floor(now)] += 1
        task = life.recorded
        if self.recording.out_at(now):
            life.met_outage = True
            self._fail(life, now, now + task.fail_sec)
        elif life.crashes < task.crashes:
            life.crashes += 1
            # The worker is replaced at once; the task waits for the end of its lease.
            self._fail(life, now, now + self.scenario.visibility_timeout_sec, busy_sec=0.0)
        elif life.own_failures < task.own_failures:
            life.own_failures += 1
            self._fail(life, now, now + task.fail_sec)
        else:
            self._occupy(now + task.run_sec)
            self.counters.done += 1
            self._settle(life, now + task.run_sec)

    def _fail(self, life: _Life, now: float, seen: float, *, busy_sec: float | None = None) -> None:
        """Send a task back to wait from when its failure is seen, or bury it."""
        self._occupy(seen if busy_sec is None else now + busy_sec)
        self.counters.wasted += 1
        if life.attempts >= life.recorded.max_attempts:
            self.counters.dead += 1
            self._settle(life, seen)
            return
        life.delay = self.scenario.policy.delay_seconds(
            life.attempts, previous=life.delay, rng=self.random
        )
        heapq.heappush(self.events, (seen + life.delay, ARRIVES, life.number, life))

    def _occupy(self, until: float) -> None:
        heapq.heappush(self.events, (until, ENDS, -1, None))

    def _settle(self, life: _Life, at: float) -> None:
        counters = self.counters
        counters.last_settled = max(counters.last_settled, at)
        counters.latencies.append(at - life.recorded.arrived_sec)
        if life.met_outage:
            counters.last_recovered = max(counters.last_recovered, at)

    def result(self) -> Result:
        """Add up what happened."""
        counters, outages = self.counters, self.recording.outages
        over = outages[-1][1] if outages else 0.0
        return Result(
            scenario=self.scenario,
            attempts=counters.attempts,
            wasted_attempts=counters.wasted,
            retries=counters.due.total(),
            done=counters.done,
            dead=counters.dead,
            peak_retries_per_sec=max(counters.due.values(), default=0),
            peak_attempts_per_sec=max(counters.begun.values(), default=0),
            recovery_sec=max(counters.last_recovered - over, 0.0) if outages else 0.0,
            makespan_sec=counters.last_settled,
            latency_p95_sec=quantile(counters.latencies, 0.95),
            retries_by_sec=dict(sorted(counters.due.items())),
            observable=Retries.of(counters.observable),
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Give the value below which a share of the values lies: the nearest one that there is."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(math.ceil(share * len(ordered)), len(ordered)) - 1]


def find_outages(attempts: Sequence[tuple[float, bool]]) -> tuple[tuple[float, float], ...]:
    """Find the intervals in which most attempts failed.

    ``attempts`` are starts, in seconds, and whether each failed. Seconds with failures that
    lie at most ``OUTAGE_GAP_SEC`` apart, with no success between them, are one interval; it
    counts as an outage if it holds ``OUTAGE_LEAST`` failures that are more than
    ``OUTAGE_SHARE`` of its attempts.
    """
    seconds: dict[int, list[int]] = {}
    for started, failed in attempts:
        seconds.setdefault(math.floor(started), [0, 0])[failed] += 1
    found: list[tuple[float, float]] = []
    begun: int | None = None
    last = failures = total = 0

    def close() -> None:
        if begun is not None and failures >= OUTAGE_LEAST and failures > OUTAGE_SHARE * total:
            found.append((float(begun), float(last + 1)))

    for second in sorted(seconds):
        succeeded, failed_now = seconds[second]
        bad = failed_now > OUTAGE_SHARE * (succeeded + failed_now)
        if begun is not None and (not bad or second - last > OUTAGE_GAP_SEC):
            close()
            begun = None
        if bad:
            if begun is None:
                begun, failures, total = second, 0, 0
            last = second
            failures += failed_now
            total += succeeded + failed_now
    close()
    return tuple(found)


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
