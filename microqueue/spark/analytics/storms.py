"""Detect retry storms, past and coming, and find the backoff that would have smoothed them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import get_args

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from microqueue.arguments import check_count, refused
from microqueue.backoff import BackoffPolicy, Jitter
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.model import Model
from microqueue.settings import QueueSettings
from microqueue.spark.analytics.fingerprint import normalised
from microqueue.spark.analytics.history import all_tasks, attempts_of
from microqueue.spark.analytics.simulate import Outcome, grid, outcomes_of, simulate_all
from microqueue.spark.analytics.simulation import (
    PastTask,
    Result,
    busiest,
    collect,
    record,
    retries_of,
)
from microqueue.spark.location import locate, now_at
from microqueue.spark.progress import Step, Tell, silent

LOOK_BACK_SEC = 600
"""How long before a storm the failures lie that made it."""

MOST_TASKS = 20_000
BASE_FACTORS = (1, 2, 4)
SEEDS = range(3)
PATIENCE = 1.5
"""How much longer than now the recovery may take for a calmer policy."""

ALIKE = 1.5
ALIKE_SLACK = 3
"""Figures are alike if the larger is at most so many times the smaller, and so many more."""

POLICY_FIELDS = ("base_sec", "factor", "max_sec", "jitter")


class Suggestion(Model):
    """A policy that would have been calmer, by simulation of the very same tasks.

    ``tasks`` were simulated, of ``tasks_total`` that the storm touched: all, or a sample.
    """

    policy: BackoffPolicy
    peak_retries_per_sec: int
    instead_of_per_sec: int
    recovery_sec: float
    instead_of_sec: float
    tasks: int = 0
    tasks_total: int = 0


class Reproduction(Model):
    """The retries of the storm's tasks, beside a simulation of them under their own policy.

    Only where the two are alike does the simulation of another policy say anything. They
    differ where something else than the policy set the pace: delays that handlers gave,
    replays, workers that were away. ``simulated_*`` are means over the seeds; ``tasks`` were
    compared, of ``tasks_total`` that the storm touched.
    """

    reproduced: bool
    retries: int
    peak_per_sec: int
    peak_per_min: int
    simulated_retries: float
    simulated_peak_per_sec: float
    simulated_peak_per_min: float
    tasks: int
    tasks_total: int


class Storm(Model):
    """A storm that was: where, when, how bad, by which error, under which policy.

    ``reproduction`` and ``suggestion`` are of a simulation. There is no suggestion where the
    storm was not reproduced, and where no policy that was tried is calmer.
    """

    queue: str
    start: datetime
    end: datetime
    retries: int
    peak_per_min: int
    peak_per_sec: int
    baseline_per_min: float
    synchrony: float
    code: str | None = None
    error: str | None = None
    error_share: float = 0.0
    policy: BackoffPolicy
    reproduction: Reproduction | None = None
    suggestion: Suggestion | None = None


class ComingStorm(Model):
    """Retries that will come due in the same second."""

    queue: str
    at: datetime
    tasks: int


class Storms(Model):
    """What was found in a period."""

    since: datetime
    until: datetime
    storms: tuple[Storm, ...]
    coming: tuple[ComingStorm, ...]
    dry_run: bool = False


def storms(
    spark: SparkSession,
    *,
    archive: str | Path | None = None,
    live: bool = True,
    uri: str | None = None,
    database: str | None = None,
    collection: str = DEFAULT_COLLECTION,
    queues: Sequence[str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    factor: float = 5.0,
    least: int = 30,
    top: int = 5,
    settings: QueueSettings | None = None,
    dry_run: bool = False,
    tell: Tell = silent,
) -> Storms:
    """Look for sixty seconds with ``factor`` times the usual retries, and at least ``least``.

    The ``top`` storms are simulated under their own policy, and if that reproduces what was
    observed, under others; a dry run leaves that out.
    """
    check_count("least", least)
    check_count("top", top)
    if not factor > 1:
        raise refused("factor", factor, "give a number above 1")
    rules = settings or QueueSettings.from_environment()
    place = locate(uri, database=database, collection=collection) if live else None
    now = now_at(place)
    last = now if until is None else until
    first = last - timedelta(days=1) if since is None else since
    tell(Step("count", "Counting retries"))
    tasks = all_tasks(
        spark, live=place, archive=archive, queues=queues, since=first, settings=rules
    ).cache()
    try:
        retries = _within(attempts_of(tasks).where("attempt > 1"), "started_at", first, last)
        found = find_storms(
            _minutes(retries),
            first_minute=int(first.timestamp()) // MINUTE,
            last_minute=int(last.timestamp()) // MINUTE,
            factor=factor,
            least=least,
        )
        described = []
        for number, storm in enumerate(found[:top], start=1):
            tell(Step("explain", f"Explaining storm {number} of {min(len(found), top)}"))
            described.append(_describe(spark, tasks, storm, rules, simulated=not dry_run))
        coming = _coming(tasks, now, least)
    finally:
        tasks.unpersist()
    return Storms(
        since=first,
        until=last,
        storms=tuple(described),
        coming=tuple(coming),
        dry_run=dry_run,
    )


def _within(frame: DataFrame, instant: str, first: datetime, last: datetime) -> DataFrame:
    seconds = f.unix_micros(instant) / 1_000_000
    bounded = (seconds >= first.timestamp()) & (seconds < last.timestamp())
    return frame.where(bounded).withColumn("second", f.floor(seconds))


def _minutes(retries: DataFrame) -> list[Minute]:
    seconds = retries.groupBy("queue", "second").agg(f.count(f.lit(1)).alias("retries"))
    line = Window.partitionBy("queue").orderBy("second")
    ending = seconds.withColumn("ending", f.sum("retries").over(line.rangeBetween(1 - MINUTE, 0)))
    touching = ending.withColumn("busiest", f.max("ending").over(line.rangeBetween(0, MINUTE - 1)))
    minutes = touching.groupBy("queue", f.floor(f.col("second") / MINUTE).alias("minute")).agg(
        f.sum("retries").alias("retries"),
        f.max("busiest").alias("busiest"),
        f.max("retries").alias("peak_per_sec"),
    )
    return [Minute(**row.asDict()) for row in minutes.collect()]


def _describe(
    spark: SparkSession, tasks: DataFrame, storm: Found, rules: QueueSettings, *, simulated: bool
) -> Storm:
    """Name the error and the policy of a storm, and what would have been better."""
    start, end = (datetime.fromtimestamp(at, UTC) for at in (storm.start_sec, storm.end_sec))
    own = tasks.where(f.col("queue") == storm.queue)
    before = start - timedelta(seconds=LOOK_BACK_SEC)
    failed = _within(attempts_of(own).where("error is not null"), "ended_at", before, end)
    kinds = (
        failed.groupBy("error.code", normalised(f.col("error.message")).alias("pattern"))
        .count()
        .orderBy(f.desc("count"), "pattern")
        .collect()
    )
    policy = _policy(failed, rules)
    known, better = _suggest(spark, own, storm, policy, rules) if simulated else (None, None)
    worst = kinds[0] if kinds else None
    return Storm(
        queue=storm.queue,
        start=start,
        end=end,
        retries=storm.retries,
        peak_per_min=storm.peak_per_min,
        peak_per_sec=storm.peak_per_sec,
        baseline_per_min=storm.baseline_per_min,
        synchrony=storm.synchrony,
        code=worst["code"] if worst else None,
        error=worst["pattern"] if worst else None,
        error_share=worst["count"] / sum(kind["count"] for kind in kinds) if worst else 0.0,
        policy=policy,
        reproduction=known,
        suggestion=better,
    )


def _policy(failed: DataFrame, rules: QueueSettings) -> BackoffPolicy:
    """Find the policy that most of the failed tasks had: their own, or that of the settings."""
    counted = failed.groupBy("backoff_policy").count().orderBy(f.desc("count")).take(1)
    own = counted[0]["backoff_policy"] if counted else None
    if own is None:
        return rules.backoff
    return BackoffPolicy(**{name: own[name] for name in POLICY_FIELDS if own[name] is not None})


def _suggest(
    spark: SparkSession, own: DataFrame, storm: Found, policy: BackoffPolicy, rules: QueueSettings
) -> tuple[Reproduction, Suggestion | None]:
    """Simulate the storm's own tasks under their policy and others, and choose the calmest.

    Nothing is chosen if their own policy does not bring about what was observed.
    """
    first, last = storm.start_sec - LOOK_BACK_SEC, storm.end_sec + LOOK_BACK_SEC
    touched = (f.unix_seconds("created_at") < last) & (f.unix_seconds("updated_at") >= first)
    collected = collect(own.where(touched), most=MOST_TASKS)
    past = collected.tasks
    recording = record(past)
    timeout_sec = rules.visibility_timeout.total_seconds()

    def results(policies: Sequence[BackoffPolicy]) -> list[Result]:
        scenarios = grid(policies, [busiest(past)], [timeout_sec], seeds=SEEDS)
        return simulate_all(spark, recording, scenarios)

    baseline = results([policy])
    known = reproduce(past, baseline, total=collected.total)
    if not known.reproduced:
        return known, None
    outcomes = outcomes_of([*baseline, *results(other_policies(policy))])
    chosen = choose(policy, outcomes)
    if chosen is None:
        return known, None
    counts = {"tasks": known.tasks, "tasks_total": known.tasks_total}
    return known, chosen.model_copy(update=counts)


def reproduce(past: Sequence[PastTask], baseline: Sequence[Result], *, total: int) -> Reproduction:
    """Compare what tasks remember with simulations of them under the policy that they had."""
    observed = retries_of(past)
    figures = {
        name: fmean(getattr(result.observable, name) for result in baseline)
        for name in ("count", "peak_per_sec", "peak_per_min")
    }
    return Reproduction(
        reproduced=all(alike(getattr(observed, name), figures[name]) for name in figures),
        retries=observed.count,
        peak_per_sec=observed.peak_per_sec,
        peak_per_min=observed.peak_per_min,
        simulated_retries=figures["count"],
        simulated_peak_per_sec=figures["peak_per_sec"],
        simulated_peak_per_min=figures["peak_per_min"],
        tasks=len(past),
        tasks_total=total,
    )


def alike(observed: float, simulated: float) -> bool:
    """Return whether a simulation came close to a figure, which depends on chance."""
    less, more = sorted((observed, simulated))
    return more <= ALIKE * less + ALIKE_SLACK


def other_policies(policy: BackoffPolicy) -> list[BackoffPolicy]:
    """Vary what can be varied without thinking twice: the base and the jitter."""
    found = []
    for times, jitter in product(BASE_FACTORS, get_args(Jitter)):
        base_sec = max(policy.base_sec, 0.5) * times
        changed = {"base_sec": base_sec, "jitter": jitter}
        changed["max_sec"] = max(policy.max_sec, base_sec)
        other = policy.model_copy(update=changed)
        if other != policy:
            found.append(other)
    return found


def choose(policy: BackoffPolicy, outcomes: Sequence[Outcome]) -> Suggestion | None:
    """Choose the lowest peak among policies that recover about as soon; nothing, if it is ours."""
    now = next(one for one in outcomes if one.policy == policy)
    patience_sec = max(now.recovery_sec * PATIENCE, now.recovery_sec + MINUTE)
    allowed = [one for one in outcomes if one.recovery_sec <= patience_sec and one.dead <= now.dead]
    best = min(allowed, key=lambda one: (one.peak_retries_per_sec, one.recovery_sec))
    if best.peak_retries_per_sec >= now.peak_retries_per_sec:
        return None
    return Suggestion(
        policy=best.policy,
        peak_retries_per_sec=best.peak_retries_per_sec,
        instead_of_per_sec=now.peak_retries_per_sec,
        recovery_sec=best.recovery_sec,
        instead_of_sec=now.recovery_sec,
    )


def _coming(tasks: DataFrame, now: datetime, least: int) -> list[ComingStorm]:
    """Find the seconds in which many retries will come due together."""
    waiting = tasks.where("status = 'pending' and attempts > 0 and next_retry_at is not null")
    later = _within(waiting, "next_retry_at", now, now + timedelta(days=3650))
    counted = later.groupBy("queue", "second").count().where(f.col("count") >= least)
    return [
        ComingStorm(
            queue=row["queue"], at=datetime.fromtimestamp(row["second"], UTC), tasks=row["count"]
        )
        for row in counted.orderBy(f.desc("count"), "second").limit(20).collect()
    ]


MINUTE = 60
GAP_MINUTES = 2
"""Storms that are so close are one."""


@dataclass(frozen=True)
class Minute:
    """The retries of a queue in one minute of the clock, and in its busiest second.

    ``busiest`` are those of the busiest sixty seconds that touch it: a storm does not begin
    when the clock's minute does.
    """

    queue: str
    minute: int
    retries: int
    busiest: int
    peak_per_sec: int


@dataclass(frozen=True)
class Found:
    """A storm: from its first second to its last, against what is usual in a minute."""

    queue: str
    start_sec: int
    end_sec: int
    retries: int
    peak_per_min: int
    peak_per_sec: int
    baseline_per_min: float
    synchrony: float


def find_storms(
    minutes: Iterable[Minute], *, first_minute: int, last_minute: int, factor: float, least: int
) -> list[Found]:
    """Find where a queue retries ``factor`` times as much in sixty seconds as is usual.

    Usual is the median of all minutes of the period, those without retries included. Fewer
    than ``least`` retries in sixty seconds are no storm, however unusual.
    """
    queues: defaultdict[str, list[Minute]] = defaultdict(list)
    for one in minutes:
        queues[one.queue].append(one)
    found = []
    for own in queues.values():
        quiet = max(last_minute - first_minute + 1 - len(own), 0)
        baseline = float(median([*(one.retries for one in own), *([0] * quiet)]))
        threshold = max(least, factor * baseline)
        stormy = sorted(
            (one for one in own if one.busiest >= threshold), key=lambda one: one.minute
        )
        found += [_storm(group, baseline) for group in _together(stormy)]
    return sorted(found, key=lambda storm: -storm.retries)


def _together(minutes: Sequence[Minute]) -> list[list[Minute]]:
    groups: list[list[Minute]] = []
    for one in minutes:
        if groups and one.minute - groups[-1][-1].minute <= GAP_MINUTES:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _storm(minutes: Sequence[Minute], baseline: float) -> Found:
    """Describe a storm; ``synchrony`` is the share of the worst second in its sixty."""
    wildest = max(minutes, key=lambda one: one.peak_per_sec)
    return Found(
        queue=minutes[0].queue,
        start_sec=minutes[0].minute * MINUTE,
        end_sec=(minutes[-1].minute + 1) * MINUTE,
        retries=sum(one.retries for one in minutes),
        peak_per_min=max(one.busiest for one in minutes),
        peak_per_sec=wildest.peak_per_sec,
        baseline_per_min=baseline,
        synchrony=wildest.peak_per_sec / wildest.busiest,
    )
