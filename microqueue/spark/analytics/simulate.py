"""Simulate recorded tasks under other backoff policies, numbers of workers and timeouts.

Each scenario runs as a Spark task from its own seed: thousands can run on a cluster, and the same
seed always has the same result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from microqueue.arguments import check_count, invalid_argument
from microqueue.backoff import BackoffPolicy
from microqueue.deprecation import renamed_arguments, renamed_names
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.durations import Duration, check_duration
from microqueue.errors import PipelineError
from microqueue.model import Model
from microqueue.settings import QueueSettings
from microqueue.spark import error_codes
from microqueue.spark.analytics.pages import simulation_page
from microqueue.spark.analytics.queue_model import (
    MOST_TASKS,
    Collected,
    Recording,
    RunResult,
    Scenario,
    busiest,
    collect,
    record,
    run_scenario,
)
from microqueue.spark.analytics.task_source import all_tasks, read_consistently
from microqueue.spark.location import locate, now_at
from microqueue.spark.progress import ProgressCallback, Step, no_progress

MOST_SCENARIOS = 100_000

if not TYPE_CHECKING:
    __getattr__ = renamed_names(__name__, {"Outcome": "ScenarioResult"})


class ScenarioResult(Model):
    """The result of a scenario over all its seeds: means, and the highest peaks.

    ``retries_by_sec`` is that of the first seed, as a mean would hide the peaks in a chart. The
    other figures are explained at :class:`~microqueue.spark.analytics.queue_model.RunResult`.
    """

    name: str
    policy: BackoffPolicy
    workers: int
    visibility_timeout_sec: float
    seeds: int
    peak_retries_per_sec: int
    peak_attempts_per_sec: int
    recovery_sec: float
    wasted_attempts: float
    attempts: float
    done: float
    dead: float
    latency_p95_sec: float
    retries_by_sec: dict[int, int]


class Simulation(Model):
    """The outcomes of all scenarios: the lowest peak first, then the fastest recovery.

    Attributes:
        tasks: How many tasks were simulated: all, or a sample.
        tasks_total: How many tasks were recorded.
        outages: When the outages began and ended, in seconds since ``begun_at``.
        begun_at: When the recording begins.
        outcomes: One per scenario.
        scenarios: How many simulations there are, counting each seed.
        files: The files that were written.
        dry_run: Whether nothing was simulated.
    """

    tasks: int
    tasks_total: int
    outages: tuple[tuple[float, float], ...]
    begun_at: datetime | None
    outcomes: tuple[ScenarioResult, ...]
    scenarios: int
    files: tuple[str, ...] = ()
    dry_run: bool = False


@renamed_arguments(tell="progress")
def simulate(
    spark: SparkSession,
    *,
    policies: Sequence[BackoffPolicy] | None = None,
    workers: Sequence[int] | None = None,
    visibility_timeouts: Sequence[Duration] | None = None,
    repeat: int = 3,
    seed: int = 0,
    archive: str | Path | None = None,
    live: bool = True,
    uri: str | None = None,
    database: str | None = None,
    collection: str = DEFAULT_COLLECTION,
    queues: Sequence[str] | None = None,
    since: datetime | None = None,
    output: str | Path | None = None,
    settings: QueueSettings | None = None,
    dry_run: bool = False,
    progress: ProgressCallback = no_progress,
) -> Simulation:
    """Simulate recorded arrivals and failures under all combinations of the arguments.

    Args:
        spark: The session.
        policies: The backoff policies; by default that of the settings.
        workers: How many tasks run at the same time; by default as many as were recorded.
        visibility_timeouts: How long leases last; by default as in the settings.
        repeat: How many seeds to use for each combination.
        seed: The first seed.
        archive: An archive to read, besides MongoDB.
        live: Whether to read MongoDB.
        uri: The address of MongoDB; by default ``MICROQUEUE_URI``, or the embedded server.
        database: The database; by default that of the address.
        collection: The collection of the tasks.
        queues: The queues to read; by default all.
        since: The start of the recording; by default one day ago.
        output: A directory for ``simulation.html``, with a chart for each scenario.
        settings: The settings of the queues; by default those of the environment.
        dry_run: Whether to record only, and simulate nothing.
        progress: Called with each step that begins.

    Returns:
        The outcomes, and the files that were written.

    Raises:
        InvalidArgument: An argument is not valid, or there are too many combinations.
        PipelineError: There are no tasks since ``since``.
    """
    check_count("repeat", repeat)
    queue_settings = settings or QueueSettings.from_environment()
    location = locate(uri, database=database, collection=collection) if live else None
    now = now_at(location)
    first = now - timedelta(days=1) if since is None else since
    progress(Step("record", "Reading recorded tasks"))

    def read() -> Collected:
        tasks = all_tasks(
            spark,
            live=location,
            archive=archive,
            queues=queues,
            since=first,
            settings=queue_settings,
        )
        return collect(tasks, most=MOST_TASKS)

    collected = read_consistently(spark, read, live=location, archive=archive)
    past = collected.tasks
    if not past:
        raise PipelineError(
            f"there are no tasks since {first.isoformat()} to simulate; give an earlier --since",
            code=error_codes.NO_TASKS,
            since=first,
        )
    recording = record(past)
    timeouts = (
        [queue_settings.visibility_timeout] if visibility_timeouts is None else visibility_timeouts
    )
    scenarios = grid(
        policies or [queue_settings.backoff],
        workers or [busiest(past)],
        [check_duration("visibility_timeout", one).total_seconds() for one in timeouts],
        seeds=range(seed, seed + repeat),
    )
    begun_at = datetime.fromtimestamp(min(task.arrived_sec for task in past), UTC)
    outcomes: list[ScenarioResult] = []
    if not dry_run:
        progress(Step("simulate", f"Simulating {len(scenarios):,} runs of {len(past):,} tasks"))
        outcomes = combine_runs(simulate_all(spark, recording, scenarios))
    made = Simulation(
        tasks=len(past),
        tasks_total=collected.total,
        outages=recording.outages,
        begun_at=begun_at,
        outcomes=tuple(outcomes),
        scenarios=len(scenarios),
        dry_run=dry_run,
    )
    if output is None or dry_run:
        return made
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    page = directory / "simulation.html"
    page.write_text(simulation_page(made), encoding="utf-8")
    return made.model_copy(update={"files": (str(page),)})


def grid(
    policies: Sequence[BackoffPolicy],
    workers: Sequence[int],
    timeouts_sec: Sequence[float],
    *,
    seeds: Sequence[int],
) -> list[Scenario]:
    """Return all combinations."""
    for number in workers:
        check_count("workers", number)
    found = [
        Scenario(policy=policy, workers=number, visibility_timeout_sec=timeout, seed=one)
        for policy, number, timeout, one in product(policies, workers, timeouts_sec, seeds)
    ]
    if len(found) > MOST_SCENARIOS:
        raise invalid_argument(
            "scenarios", len(found), f"give at most {MOST_SCENARIOS:,} combinations"
        )
    return found


def simulate_all(
    spark: SparkSession, recording: Recording, scenarios: Sequence[Scenario]
) -> list[RunResult]:
    """Run scenarios as Spark tasks; return their results in the same order."""
    shared = spark.sparkContext.broadcast(recording)

    def run(text: str) -> str:
        scenario = Scenario.model_validate_json(text)
        return run_scenario(shared.value, scenario).model_dump_json()

    texts = [scenario.model_dump_json() for scenario in scenarios]
    slices = min(len(texts), 16 * spark.sparkContext.defaultParallelism)
    found = spark.sparkContext.parallelize(texts, slices).map(run)
    try:
        return [RunResult.model_validate_json(text) for text in found.collect()]
    finally:
        shared.unpersist()


def combine_runs(results: Sequence[RunResult]) -> list[ScenarioResult]:
    """Combine the results of all seeds of each scenario."""
    groups: defaultdict[str, list[RunResult]] = defaultdict(list)
    for result in results:
        groups[result.scenario.name].append(result)
    found = [_combine(name, group) for name, group in groups.items()]
    return sorted(found, key=lambda one: (one.peak_retries_per_sec, one.recovery_sec))


def _combine(name: str, group: Sequence[RunResult]) -> ScenarioResult:
    first = group[0]
    return ScenarioResult(
        name=name,
        policy=first.scenario.policy,
        workers=first.scenario.workers,
        visibility_timeout_sec=first.scenario.visibility_timeout_sec,
        seeds=len(group),
        peak_retries_per_sec=max(result.peak_retries_per_sec for result in group),
        peak_attempts_per_sec=max(result.peak_attempts_per_sec for result in group),
        recovery_sec=fmean(result.recovery_sec for result in group),
        wasted_attempts=fmean(result.wasted_attempts for result in group),
        attempts=fmean(result.attempts for result in group),
        done=fmean(result.done for result in group),
        dead=fmean(result.dead for result in group),
        latency_p95_sec=fmean(result.latency_p95_sec for result in group),
        retries_by_sec=first.retries_by_sec,
    )
