"""A model of a queue: what would have happened to recorded tasks under another policy.

Pure functions, with the same result for the same seed. A recording has when tasks arrived, how
long they ran, and how they failed. There are three kinds of failures, as a longer backoff has
different effects on them:

- an *outage*: every attempt that starts within the interval fails;
- a task's *own* failures: it fails a number of times, or always, whenever it is tried;
- *crashes*: the worker dies, and the task is redelivered when its lease has expired.
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
from microqueue.task import Outcome

ALWAYS = 10**9
"""The own failures of a task that never succeeds."""

OUTAGE_SHARE = 0.5
"""If a larger share of attempts fails, it is an outage, and not the tasks' own failures."""
OUTAGE_LEAST = 5
"""Fewer failures in a row may be the tasks' own."""
OUTAGE_GAP_SEC = 10
"""Retries come in waves: a shorter gap between failures does not end an outage."""

FAILED_OUTCOMES = frozenset({Outcome.RETRIED.value, Outcome.FAILED.value})
CRASHED = frozenset(one.value for one in Outcome if one.is_reclaimed)
MOST_TASKS = 200_000
"""The most tasks that are sent to each executor; of more, a sample is taken."""

ARRIVES, ENDS = 0, 1
MINUTE = 60


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """A task of a recording; times are seconds since its beginning."""

    arrived_sec: float
    run_sec: float
    fail_sec: float = 0.0
    own_failures: int = 0
    crashes: int = 0
    priority: int = 0
    max_attempts: int = 10


@dataclass(frozen=True, slots=True)
class Recording:
    """The recorded tasks, and the outages.

    ``observed_sec`` is the end of the recording: what a simulation does later cannot be compared
    with it.
    """

    tasks: tuple[RecordedTask, ...]
    outages: tuple[tuple[float, float], ...] = ()
    observed_sec: float = math.inf

    def out_at(self, second: float) -> bool:
        """Return whether there is an outage."""
        index = bisect_right(self.outages, (second, math.inf)) - 1
        return index >= 0 and second < self.outages[index][1]


class Scenario(Model):
    """A policy, how many attempts run at the same time, and how long leases last."""

    policy: BackoffPolicy
    workers: int
    visibility_timeout_sec: float = 600.0
    seed: int = 0

    @property
    def name(self) -> str:
        """The scenario in a few words, equal for all seeds."""
        policy = self.policy
        return (
            f"{policy.jitter} base {policy.base_sec:g}s factor {policy.factor:g} "
            f"max {policy.max_sec:g}s, {self.workers} workers, "
            f"lease {self.visibility_timeout_sec:g}s"
        )


class Retries(Model):
    """Retries that began: all, in the worst second, and in the worst sixty seconds."""

    count: int
    peak_per_sec: int
    peak_per_min: int

    @classmethod
    def of(cls, seconds: Mapping[int, int]) -> Retries:
        """Return the totals of retries by second."""
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


class RunResult(Model):
    """The result of one run of a scenario, from its seed.

    Attributes:
        scenario: The scenario.
        attempts: Attempts in all.
        wasted_attempts: Attempts that failed.
        retries: Retries that came due.
        done: Tasks that succeeded.
        dead: Tasks that became dead letters.
        peak_retries_per_sec: Retries that came due in the worst second, as the policy causes them.
        peak_attempts_per_sec: Attempts that began in the worst second, as the workers allow them.
        recovery_sec: How long after the last outage all its tasks were settled.
        makespan_sec: When the last task was settled.
        latency_p95_sec: The 95th percentile of the time from arrival to the end.
        retries_by_sec: Retries that came due, by second.
        observable: Retries that began within the recorded time.
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
class _SimulatedTask:
    """The state of a task in a simulation."""

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


def run_scenario(recording: Recording, scenario: Scenario) -> RunResult:
    """Run one scenario, event by event."""
    run = _Run(recording, scenario)
    while run.events:
        run.step()
    return run.result()


class _Run:
    """The state of one simulation: coming events, ready tasks, and free workers."""

    def __init__(self, recording: Recording, scenario: Scenario) -> None:
        self.recording, self.scenario = recording, scenario
        # A text as seed has the same effect in every process.
        self.random = random.Random(f"{scenario.seed}/{scenario.name}")  # noqa: S311 (no secret)
        tasks = [_SimulatedTask(task, number) for number, task in enumerate(recording.tasks)]
        self.events: list[tuple[float, int, int, _SimulatedTask | None]] = [
            (task.recorded.arrived_sec, ARRIVES, task.number, task) for task in tasks
        ]
        heapq.heapify(self.events)
        self.ready: list[tuple[int, int, _SimulatedTask]] = []
        self.free = scenario.workers
        self.counters = _Counters()

    def step(self) -> None:
        """Process the next event, and start ready tasks on free workers."""
        now, kind, _, task = heapq.heappop(self.events)
        if kind == ENDS:
            self.free += 1
        elif task is not None:
            if task.attempts:
                self.counters.due[math.floor(now)] += 1
            # Older tasks are first within a priority, as in the queue.
            heapq.heappush(self.ready, (-task.recorded.priority, task.number, task))
        while self.free and self.ready:
            self._begin(heapq.heappop(self.ready)[2], now)

    def _begin(self, task: _SimulatedTask, now: float) -> None:
        self.free -= 1
        task.attempts += 1
        self.counters.attempts += 1
        self.counters.begun[math.floor(now)] += 1
        if task.attempts > 1 and now <= self.recording.observed_sec:
            self.counters.observable[math.floor(now)] += 1
        recorded = task.recorded
        if self.recording.out_at(now):
            task.met_outage = True
            self._fail(task, now, now + recorded.fail_sec)
        elif task.crashes < recorded.crashes:
            task.crashes += 1
            # The worker is replaced at once; the task waits until its lease expires.
            self._fail(task, now, now + self.scenario.visibility_timeout_sec, busy_sec=0.0)
        elif task.own_failures < recorded.own_failures:
            task.own_failures += 1
            self._fail(task, now, now + recorded.fail_sec)
        else:
            self._occupy(now + recorded.run_sec)
            self.counters.done += 1
            self._settle(task, now + recorded.run_sec)

    def _fail(
        self, task: _SimulatedTask, now: float, seen: float, *, busy_sec: float | None = None
    ) -> None:
        """Schedule the retry of a failed task, or count it as a dead letter."""
        self._occupy(seen if busy_sec is None else now + busy_sec)
        self.counters.wasted += 1
        if task.attempts >= task.recorded.max_attempts:
            self.counters.dead += 1
            self._settle(task, seen)
            return
        task.delay = self.scenario.policy.delay_seconds(
            task.attempts, previous=task.delay, rng=self.random
        )
        heapq.heappush(self.events, (seen + task.delay, ARRIVES, task.number, task))

    def _occupy(self, until: float) -> None:
        heapq.heappush(self.events, (until, ENDS, -1, None))

    def _settle(self, task: _SimulatedTask, at: float) -> None:
        counters = self.counters
        counters.last_settled = max(counters.last_settled, at)
        counters.latencies.append(at - task.recorded.arrived_sec)
        if task.met_outage:
            counters.last_recovered = max(counters.last_recovered, at)

    def result(self) -> RunResult:
        """Return the totals."""
        counters, outages = self.counters, self.recording.outages
        over = outages[-1][1] if outages else 0.0
        return RunResult(
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
    """Return the quantile of some values, by the nearest rank."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(math.ceil(share * len(ordered)), len(ordered)) - 1]


def find_outages(attempts: Sequence[tuple[float, bool]]) -> tuple[tuple[float, float], ...]:
    """Return the intervals in which most attempts failed.

    ``attempts`` has the start of each attempt, in seconds, and whether it failed. Seconds in which
    most attempts failed form one interval if they are at most ``OUTAGE_GAP_SEC`` apart. It is an
    outage if it has ``OUTAGE_LEAST`` failures, and these are more than ``OUTAGE_SHARE`` of its
    attempts.
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


# Recording: the histories of real tasks, as input for a simulation


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """An attempt of a real task; times are seconds since 1970."""

    started_sec: float
    ended_sec: float
    outcome: str
    number: int = 1


@dataclass(frozen=True, slots=True)
class PastTask:
    """A real task and its attempts; times are seconds since 1970."""

    arrived_sec: float
    status: str
    priority: int
    max_attempts: int
    attempts: tuple[PastAttempt, ...]


@dataclass(frozen=True)
class Collected:
    """Real tasks: all ``total``, or a sample of them."""

    tasks: list[PastTask]
    total: int


def record(tasks: Sequence[PastTask]) -> Recording:
    """Make a recording of real tasks: separate outages from the tasks' own failures.

    Failures within an outage are not attributed to tasks; others are their own. A task that
    became a dead letter by its own failure is assumed to fail always.
    """
    if not tasks:
        return Recording(())
    # A whole second, so that seconds of the simulation are seconds of the clock.
    first = math.floor(min(task.arrived_sec for task in tasks))
    begun = [
        (attempt.started_sec - first, attempt.outcome in FAILED_OUTCOMES)
        for task in tasks
        for attempt in task.attempts
        if attempt.outcome not in CRASHED
    ]
    whole = Recording((), find_outages(begun))
    usual_run = _median(_took(tasks, {"done"}))
    usual_fail = _median(_took(tasks, FAILED_OUTCOMES))
    recorded = [_recorded(task, first, whole, usual_run, usual_fail) for task in tasks]
    ordered = sorted(recorded, key=lambda task: task.arrived_sec)
    ended = [attempt.ended_sec - first for task in tasks for attempt in task.attempts]
    return replace(whole, tasks=tuple(ordered), observed_sec=max(ended, default=0.0))


def retries_of(tasks: Iterable[PastTask]) -> Retries:
    """Count the retries of real tasks, as :class:`RunResult` counts those of a simulation."""
    begun = (attempt for task in tasks for attempt in task.attempts if attempt.number > 1)
    return Retries.of(Counter(math.floor(attempt.started_sec) for attempt in begun))


def _recorded(
    task: PastTask, first: float, whole: Recording, usual_run: float, usual_fail: float
) -> RecordedTask:
    own = [
        attempt
        for attempt in task.attempts
        if attempt.outcome in FAILED_OUTCOMES and not whole.out_at(attempt.started_sec - first)
    ]
    last = task.attempts[-1] if task.attempts else None
    hopeless = task.status == "failed" and last in own
    return RecordedTask(
        arrived_sec=task.arrived_sec - first,
        run_sec=_median(_took([task], {"done"}), usual_run),
        fail_sec=_median(_took([task], FAILED_OUTCOMES), usual_fail),
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
    """Return the most attempts that ran at the same time: as many as there were workers."""
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
    """Collect real tasks in the driver: all, or a sample that is always the same."""

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
