from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from microqueue import BackoffPolicy, PipelineError
from microqueue.cli.app import app
from microqueue.spark.analytics import simulate as pipeline
from microqueue.spark.analytics.queue_model import (
    ALWAYS,
    PastAttempt,
    PastTask,
    RecordedTask,
    Recording,
    Scenario,
    busiest,
    find_outages,
    quantile,
    record,
    run_scenario,
)
from microqueue.spark.analytics.simulate import simulate as run_pipeline
from microqueue.spark.analytics.simulate import simulate_all
from tests.rejection import raising, rejecting
from tests.spark.past import Past

NONE = BackoffPolicy(base_sec=10, factor=1, jitter="none")
FULL = BackoffPolicy(base_sec=10, factor=1, jitter="full")
OUTAGE = Recording(
    (RecordedTask(arrived_sec=0.0, run_sec=0.1, fail_sec=0.1, max_attempts=50),) * 100,
    outages=((0.0, 30.0),),
)


def scenario(policy: BackoffPolicy = NONE, workers: int = 100, **options: Any) -> Scenario:
    return Scenario(policy=policy, workers=workers, **options)


def test_without_jitter_all_tasks_of_an_outage_are_retried_in_one_second() -> None:
    result = run_scenario(OUTAGE, scenario(NONE))
    assert result.peak_retries_per_sec == 100
    assert (result.done, result.dead) == (100, 0)
    assert result.attempts == 400  # At 0, 10.1, 20.2 and 30.3 seconds.
    assert result.wasted_attempts == 300
    assert result.recovery_sec == pytest.approx(0.4)


def test_jitter_spreads_retries() -> None:
    result = run_scenario(OUTAGE, scenario(FULL))
    assert result.done == 100
    assert result.peak_retries_per_sec < 50


def test_the_same_seed_has_the_same_result_and_another_seed_another() -> None:
    one, same, other = (run_scenario(OUTAGE, scenario(FULL, seed=seed)) for seed in (1, 1, 2))
    assert one == same
    assert one.retries_by_sec != other.retries_by_sec


def test_a_task_without_attempts_left_is_dead() -> None:
    tasks = (RecordedTask(arrived_sec=0, run_sec=1, own_failures=ALWAYS, max_attempts=3),)
    result = run_scenario(Recording(tasks), scenario())
    assert (result.attempts, result.wasted_attempts, result.done, result.dead) == (3, 3, 0, 1)


def test_own_failures_happen_whenever_a_task_is_tried() -> None:
    tasks = (RecordedTask(arrived_sec=0, run_sec=1, own_failures=2),)
    result = run_scenario(Recording(tasks), scenario())
    assert (result.attempts, result.done) == (3, 1)
    assert result.makespan_sec == 21


def test_a_crash_costs_the_rest_of_the_lease() -> None:
    tasks = (RecordedTask(arrived_sec=0, run_sec=1, crashes=1),)
    quick, slow = (
        run_scenario(Recording(tasks), scenario(visibility_timeout_sec=timeout))
        for timeout in (60, 600)
    )
    assert (quick.makespan_sec, slow.makespan_sec) == (71, 611)


def test_with_few_workers_older_tasks_are_first() -> None:
    tasks = tuple(RecordedTask(arrived_sec=0, run_sec=1) for _ in range(10))
    one, five = (run_scenario(Recording(tasks), scenario(workers=number)) for number in (1, 5))
    assert (one.makespan_sec, five.makespan_sec) == (10, 2)
    assert one.peak_attempts_per_sec == 1
    urgent = RecordedTask(arrived_sec=0.5, run_sec=1, priority=9)
    latest = run_scenario(Recording((*tasks, urgent)), scenario(workers=1))
    assert latest.latency_p95_sec == 11  # Everybody else waits for it.


@pytest.mark.parametrize(
    ("attempts", "outages"),
    [
        ([], ()),
        ([(second, True) for second in range(10)], ((0.0, 10.0),)),
        ([(second, False) for second in range(10)], ()),
        ([(0.0, True), (1.0, True)], ()),  # Too few.
        ([(s, True) for s in range(5)] + [(s, True) for s in range(60, 65)], ((0, 5), (60, 65))),
        ([(s, s % 2 == 0) for s in range(20)], ()),  # Every other one: no outage.
    ],
)
def test_outages_are_found(attempts: list[tuple[float, bool]], outages: Any) -> None:
    assert find_outages(attempts) == outages


def past(arrived: float, *attempts: tuple[float, float, str], status: str = "done") -> PastTask:
    return PastTask(arrived, status, 0, 10, tuple(PastAttempt(*one) for one in attempts))


def test_a_recording_separates_outages_from_own_failures() -> None:
    broken = [past(100.0, (101, 102, "retried"), (130, 131, "done")) for _ in range(6)]
    own = past(200.0, (200, 201, "retried"), (210, 212, "done"))
    poison = past(220.0, (220, 221, "retried"), (230, 231, "failed"), status="failed")
    crashed = past(250.0, (250, 310, "lease_expired"), (320, 321, "done"))
    calm = [past(float(at), (at, at + 1, "done")) for at in range(200, 330)]
    recording = record([*broken, own, poison, crashed, *calm])
    assert recording.outages == ((1.0, 2.0),)
    by_arrival = {task.arrived_sec: task for task in recording.tasks if task.own_failures}
    assert by_arrival[100.0].own_failures == 1
    assert by_arrival[120.0].own_failures == ALWAYS
    assert sum(task.crashes for task in recording.tasks) == 1
    assert busiest(broken) == 6


def test_quantiles_are_existing_values() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([3, 1, 2], 0.99) == 3
    assert quantile([], 0.5) == 0


def test_spark_has_the_same_results_as_one_process(spark: SparkSession) -> None:
    scenarios = [scenario(policy, seed=seed) for policy in (NONE, FULL) for seed in range(5)]
    expected = [run_scenario(OUTAGE, one) for one in scenarios]
    assert simulate_all(spark, OUTAGE, scenarios) == expected


def test_recorded_tasks_are_simulated_and_drawn(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    history = Past(microqueue_database, ago=timedelta(hours=1))
    history.enqueue(40)
    history.retry(40, delay=30)
    history.wait(60)
    history.work(40)
    made = run_pipeline(
        spark,
        uri=database_uri,
        policies=[NONE, FULL],
        workers=[10, 40],
        visibility_timeouts=[60],
        repeat=2,
        output=tmp_path,
    )
    assert made.tasks == 40
    assert len(made.outages) == 1
    assert (made.scenarios, len(made.outcomes)) == (8, 4)
    assert made.outcomes[0].policy == FULL
    assert made.outcomes[-1].policy == NONE
    assert made.outcomes[-1].peak_retries_per_sec > made.outcomes[0].peak_retries_per_sec
    page = (tmp_path / "simulation.html").read_text()
    assert page.count("<svg") == 4
    looked = run_pipeline(spark, uri=database_uri, policies=[NONE], dry_run=True)
    assert (looked.scenarios, looked.outcomes) == (3, ())


def test_a_simulation_of_a_sample_shows_it(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "MOST_TASKS", 30)
    history = Past(microqueue_database, ago=timedelta(hours=1))
    history.enqueue(40)
    history.work(40)
    command = ["pipeline", "simulate", "--uri", database_uri, "--output", str(tmp_path)]
    said = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "A sample of 30 of 40 tasks and 0 outages recorded" in said.stdout
    assert "a sample of 40 recorded tasks" in (tmp_path / "simulation.html").read_text()


def test_a_simulation_without_tasks_is_rejected(spark: SparkSession, database_uri: str) -> None:
    with raising(PipelineError, "no_tasks") as caught:
        run_pipeline(spark, uri=database_uri)
    assert caught.value.since is not None
    assert caught.value.since.isoformat() in str(caught.value)
    with rejecting("repeat"):
        run_pipeline(spark, uri=database_uri, repeat=0)
