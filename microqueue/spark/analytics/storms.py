"""Detect retry storms, past and coming, and find the backoff that would have prevented them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import get_args

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from microqueue.arguments import check_count, invalid_argument
from microqueue.backoff import BackoffPolicy, Jitter
from microqueue.deprecation import renamed_arguments
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.model import Model
from microqueue.settings import QueueSettings
from microqueue.spark.analytics.fingerprint import normalised_column
from microqueue.spark.analytics.queue_model import (
    PastTask,
    RunResult,
    busiest,
    collect,
    record,
    retries_of,
)
from microqueue.spark.analytics.simulate import ScenarioResult, combine_runs, grid, simulate_all
from microqueue.spark.analytics.task_source import all_tasks, attempts_of, read_consistently
from microqueue.spark.location import locate, now_at
from microqueue.spark.progress import ProgressCallback, Step, no_progress

MINUTE = 60
GAP_MINUTES = 2
"""Storms that are at most so many minutes apart are one."""

LOOK_BACK_SEC = 600
"""How long before a storm the failures that caused it are searched."""

MOST_TASKS = 20_000
BASE_FACTORS = (1, 2, 4)
SEEDS = range(3)
PATIENCE = 1.5
"""How much longer the recovery may take under a policy with a lower peak."""

CLOSE_RATIO = 1.5
CLOSE_SLACK = 3
"""Two figures are close if the larger is at most the smaller times the ratio plus the slack."""

POLICY_FIELDS = ("base_sec", "factor", "max_sec", "jitter")


class Suggestion(Model):
    """A policy with a lower peak, found by simulating the same tasks.

    Attributes:
        policy: The policy.
        peak_retries_per_sec: The peak under this policy.
        instead_of_per_sec: The peak under the tasks' own policy.
        recovery_sec: The recovery under this policy.
        instead_of_sec: The recovery under the tasks' own policy.
        tasks: How many tasks were simulated: all, or a sample.
        tasks_total: How many tasks the storm affected.
    """

    policy: BackoffPolicy
    peak_retries_per_sec: int
    instead_of_per_sec: int
    recovery_sec: float
    instead_of_sec: float
    tasks: int = 0
    tasks_total: int = 0


class Reproduction(Model):
    """The retries that were observed, and those of a simulation under the tasks' own policy.

    The simulation of another policy is meaningful only if the two are close. They differ if
    something other than the policy set the pace: delays chosen by handlers, replays, or workers
    that were stopped.

    Attributes:
        reproduced: Whether the figures are close.
        retries: Observed retries.
        peak_per_sec: Observed retries in the worst second.
        peak_per_min: Observed retries in the worst sixty seconds.
        simulated_retries: Simulated retries; the mean over the seeds, as the next two.
        simulated_peak_per_sec: Simulated retries in the worst second.
        simulated_peak_per_min: Simulated retries in the worst sixty seconds.
        tasks: How many tasks were simulated: all, or a sample.
        tasks_total: How many tasks the storm affected.
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
    """A past storm.

    Attributes:
        queue: The queue.
        start: When it began, in whole minutes.
        end: When it ended.
        retries: Retries in all.
        peak_per_min: Retries in the worst sixty seconds.
        peak_per_sec: Retries in the worst second.
        baseline_per_min: The median of retries per minute in the period.
        synchrony: The share of the worst second in its sixty seconds.
        code: The most frequent error code.
        error: The most frequent error message, masked.
        error_share: The share of this error in all failures.
        policy: The backoff policy of the tasks.
        reproduction: How well a simulation under that policy matches.
        suggestion: A better policy, if the storm was reproduced and a tried policy is better.
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
    """The storms of a period, and those that are coming."""

    since: datetime
    until: datetime
    storms: tuple[Storm, ...]
    coming: tuple[ComingStorm, ...]
    dry_run: bool = False


@renamed_arguments(tell="progress", least="min_retries")
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
    min_retries: int = 30,
    top: int = 5,
    settings: QueueSettings | None = None,
    dry_run: bool = False,
    progress: ProgressCallback = no_progress,
) -> Storms:
    """Find retry storms, and the backoff that would have prevented them.

    A storm is where sixty seconds have ``factor`` times the usual retries, and at least
    ``min_retries``. Storms are simulated under their own policy and, if that reproduces what was
    observed, under others.

    Args:
        spark: The session.
        archive: An archive to read, besides MongoDB.
        live: Whether to read MongoDB.
        uri: The address of MongoDB; by default ``MICROQUEUE_URI``, or the embedded server.
        database: The database; by default that of the address.
        collection: The collection of the tasks.
        queues: The queues to read; by default all.
        since: The start of the period; by default one day before its end.
        until: The end of the period; by default now.
        factor: How many times the usual retries make a storm.
        min_retries: How many retries in sixty seconds a storm has at least.
        top: How many storms to describe, the largest first.
        settings: The settings of the queues; by default those of the environment.
        dry_run: Whether to leave out the simulations.
        progress: Called with each step that begins.

    Returns:
        Past and coming storms.

    Raises:
        InvalidArgument: An argument is not valid.
    """
    check_count("min_retries", min_retries)
    check_count("top", top)
    if not factor > 1:
        raise invalid_argument("factor", factor, "give a number above 1")
    queue_settings = settings or QueueSettings.from_environment()
    location = locate(uri, database=database, collection=collection) if live else None
    now = now_at(location)
    last = now if until is None else until
    first = last - timedelta(days=1) if since is None else since
    progress(Step("count", "Counting retries"))
    with ExitStack() as ending:

        def read() -> tuple[DataFrame, list[Minute]]:
            ending.close()  # What was read before the archive changed.
            tasks = all_tasks(
                spark,
                live=location,
                archive=archive,
                queues=queues,
                since=first,
                settings=queue_settings,
            ).cache()
            ending.callback(tasks.unpersist)
            retries = _within(attempts_of(tasks).where("attempt > 1"), "started_at", first, last)
            return tasks, _minutes(retries)

        # Counting reads all tasks; from then on they are in the cache.
        tasks, minutes = read_consistently(spark, read, live=location, archive=archive)
        found = find_storms(
            minutes,
            first_minute=int(first.timestamp()) // MINUTE,
            last_minute=int(last.timestamp()) // MINUTE,
            factor=factor,
            min_retries=min_retries,
        )
        described = []
        for number, storm in enumerate(found[:top], start=1):
            progress(Step("explain", f"Analysing storm {number} of {min(len(found), top)}"))
            described.append(_describe(spark, tasks, storm, queue_settings, simulated=not dry_run))
        coming = _coming(tasks, now, min_retries)
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
    spark: SparkSession,
    tasks: DataFrame,
    storm: DetectedStorm,
    queue_settings: QueueSettings,
    *,
    simulated: bool,
) -> Storm:
    """Find the error and the policy of a storm, and a better policy."""
    start, end = (datetime.fromtimestamp(at, UTC) for at in (storm.start_sec, storm.end_sec))
    in_queue = tasks.where(f.col("queue") == storm.queue)
    before = start - timedelta(seconds=LOOK_BACK_SEC)
    failed = _within(attempts_of(in_queue).where("error is not null"), "ended_at", before, end)
    kinds = (
        failed.groupBy("error.code", normalised_column(f.col("error.message")).alias("pattern"))
        .count()
        .orderBy(f.desc("count"), "pattern")
        .collect()
    )
    policy = _policy(failed, queue_settings)
    reproduction, suggestion = (
        _suggest(spark, in_queue, storm, policy, queue_settings) if simulated else (None, None)
    )
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
        reproduction=reproduction,
        suggestion=suggestion,
    )


def _policy(failed: DataFrame, queue_settings: QueueSettings) -> BackoffPolicy:
    """Return the policy of most failed tasks: their own, or that of the settings."""
    counted = failed.groupBy("backoff_policy").count().orderBy(f.desc("count")).take(1)
    own = counted[0]["backoff_policy"] if counted else None
    if own is None:
        return queue_settings.backoff
    return BackoffPolicy(**{name: own[name] for name in POLICY_FIELDS if own[name] is not None})


def _suggest(
    spark: SparkSession,
    in_queue: DataFrame,
    storm: DetectedStorm,
    policy: BackoffPolicy,
    queue_settings: QueueSettings,
) -> tuple[Reproduction, Suggestion | None]:
    """Simulate the tasks of a storm under their own policy and others, and choose the best.

    There is no suggestion if their own policy does not reproduce what was observed.
    """
    first, last = storm.start_sec - LOOK_BACK_SEC, storm.end_sec + LOOK_BACK_SEC
    affected = (f.unix_seconds("created_at") < last) & (f.unix_seconds("updated_at") >= first)
    collected = collect(in_queue.where(affected), most=MOST_TASKS)
    past = collected.tasks
    recording = record(past)
    timeout_sec = queue_settings.visibility_timeout.total_seconds()

    def results(policies: Sequence[BackoffPolicy]) -> list[RunResult]:
        scenarios = grid(policies, [busiest(past)], [timeout_sec], seeds=SEEDS)
        return simulate_all(spark, recording, scenarios)

    baseline = results([policy])
    reproduction = reproduce(past, baseline, total=collected.total)
    if not reproduction.reproduced:
        return reproduction, None
    outcomes = combine_runs([*baseline, *results(other_policies(policy))])
    chosen = choose_policy(policy, outcomes)
    if chosen is None:
        return reproduction, None
    counts = {"tasks": reproduction.tasks, "tasks_total": reproduction.tasks_total}
    return reproduction, chosen.model_copy(update=counts)


def reproduce(
    past: Sequence[PastTask], baseline: Sequence[RunResult], *, total: int
) -> Reproduction:
    """Compare the observed retries with simulations under the tasks' own policy."""
    observed = retries_of(past)
    figures = {
        name: fmean(getattr(result.observable, name) for result in baseline)
        for name in ("count", "peak_per_sec", "peak_per_min")
    }
    return Reproduction(
        reproduced=all(is_close(getattr(observed, name), figures[name]) for name in figures),
        retries=observed.count,
        peak_per_sec=observed.peak_per_sec,
        peak_per_min=observed.peak_per_min,
        simulated_retries=figures["count"],
        simulated_peak_per_sec=figures["peak_per_sec"],
        simulated_peak_per_min=figures["peak_per_min"],
        tasks=len(past),
        tasks_total=total,
    )


def is_close(observed: float, simulated: float) -> bool:
    """Return whether an observed and a simulated figure are close; both depend on chance."""
    less, more = sorted((observed, simulated))
    return more <= CLOSE_RATIO * less + CLOSE_SLACK


def other_policies(policy: BackoffPolicy) -> list[BackoffPolicy]:
    """Return policies with another base or jitter."""
    found = []
    for times, jitter in product(BASE_FACTORS, get_args(Jitter)):
        base_sec = max(policy.base_sec, 0.5) * times
        changed = {"base_sec": base_sec, "jitter": jitter}
        changed["max_sec"] = max(policy.max_sec, base_sec)
        other = policy.model_copy(update=changed)
        if other != policy:
            found.append(other)
    return found


def choose_policy(policy: BackoffPolicy, outcomes: Sequence[ScenarioResult]) -> Suggestion | None:
    """Return the lowest peak among policies that recover about as fast; None if it is their own."""
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


def _coming(tasks: DataFrame, now: datetime, min_retries: int) -> list[ComingStorm]:
    """Find the seconds in which many retries will come due together."""
    waiting = tasks.where("status = 'pending' and attempts > 0 and next_retry_at is not null")
    later = _within(waiting, "next_retry_at", now, now + timedelta(days=3650))
    counted = later.groupBy("queue", "second").count().where(f.col("count") >= min_retries)
    return [
        ComingStorm(
            queue=row["queue"], at=datetime.fromtimestamp(row["second"], UTC), tasks=row["count"]
        )
        for row in counted.orderBy(f.desc("count"), "second").limit(20).collect()
    ]


# Detection: pure functions over counts per minute


@dataclass(frozen=True)
class Minute:
    """The retries of a queue in one minute of the clock, and in its worst second.

    ``busiest`` counts those of the busiest sixty seconds that overlap it, as storms do not begin
    on the minute.
    """

    queue: str
    minute: int
    retries: int
    busiest: int
    peak_per_sec: int


@dataclass(frozen=True)
class DetectedStorm:
    """A storm, as found in the counts."""

    queue: str
    start_sec: int
    end_sec: int
    retries: int
    peak_per_min: int
    peak_per_sec: int
    baseline_per_min: float
    synchrony: float


def find_storms(
    minutes: Iterable[Minute],
    *,
    first_minute: int,
    last_minute: int,
    factor: float,
    min_retries: int,
) -> list[DetectedStorm]:
    """Find where a queue has ``factor`` times the usual retries in sixty seconds.

    The usual number is the median of all minutes of the period, including those without retries.
    Fewer than ``min_retries`` retries in sixty seconds are no storm.
    """
    queues: defaultdict[str, list[Minute]] = defaultdict(list)
    for one in minutes:
        queues[one.queue].append(one)
    found = []
    for in_queue in queues.values():
        quiet = max(last_minute - first_minute + 1 - len(in_queue), 0)
        baseline = float(median([*(one.retries for one in in_queue), *([0] * quiet)]))
        threshold = max(min_retries, factor * baseline)
        stormy = sorted(
            (one for one in in_queue if one.busiest >= threshold), key=lambda one: one.minute
        )
        found += [_storm(group, baseline) for group in _group_adjacent(stormy)]
    return sorted(found, key=lambda storm: -storm.retries)


def _group_adjacent(minutes: Sequence[Minute]) -> list[list[Minute]]:
    groups: list[list[Minute]] = []
    for one in minutes:
        if groups and one.minute - groups[-1][-1].minute <= GAP_MINUTES:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _storm(minutes: Sequence[Minute], baseline: float) -> DetectedStorm:
    """Describe a storm; ``synchrony`` is the share of the worst second in its sixty."""
    wildest = max(minutes, key=lambda one: one.peak_per_sec)
    return DetectedStorm(
        queue=minutes[0].queue,
        start_sec=minutes[0].minute * MINUTE,
        end_sec=(minutes[-1].minute + 1) * MINUTE,
        retries=sum(one.retries for one in minutes),
        peak_per_min=max(one.busiest for one in minutes),
        peak_per_sec=wildest.peak_per_sec,
        baseline_per_min=baseline,
        synchrony=wildest.peak_per_sec / wildest.busiest,
    )
