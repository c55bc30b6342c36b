from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from microqueue import BackoffPolicy, QueueSettings
from microqueue.cli.app import app
from microqueue.spark.analytics import queue_model
from microqueue.spark.analytics import storms as pipeline
from microqueue.spark.analytics.queue_model import PastAttempt, PastTask, Scenario, record
from microqueue.spark.analytics.storms import (
    Minute,
    find_storms,
    is_close,
    other_policies,
    reproduce,
    storms,
)
from tests.rejection import rejecting
from tests.spark.past import Past

STIFF = BackoffPolicy(base_sec=60, factor=1, jitter="none")


def minutes(queue: str, counts: dict[int, int]) -> list[Minute]:
    return [Minute(queue, minute, count, count, count // 2) for minute, count in counts.items()]


def find(rows: list[Minute], **options: Any) -> list[tuple[str, int, int, int]]:
    options = {"first_minute": 0, "last_minute": 100, "factor": 5, "min_retries": 30, **options}
    return [
        (one.queue, one.start_sec, one.end_sec, one.retries) for one in find_storms(rows, **options)
    ]


def test_a_storm_is_far_above_the_usual_and_the_minimum() -> None:
    usual = dict.fromkeys(range(101), 10)
    assert find(minutes("a", usual)) == []
    assert find(minutes("a", {**usual, 50: 49})) == []
    assert find(minutes("a", {**usual, 50: 50})) == [("a", 3000, 3060, 50)]
    assert find(minutes("a", {50: 29})) == []
    assert find(minutes("a", {50: 30})) == [("a", 3000, 3060, 30)]
    assert find(minutes("a", {50: 29}), min_retries=20) == [("a", 3000, 3060, 29)]
    assert find(minutes("a", {**usual, 50: 49}), factor=4) == [("a", 3000, 3060, 49)]


def test_close_minutes_are_one_storm_and_the_largest_is_first() -> None:
    rows = [*minutes("a", {10: 40, 12: 50, 20: 60}), *minutes("b", {10: 500})]
    assert find(rows) == [("b", 600, 660, 500), ("a", 600, 780, 90), ("a", 1200, 1260, 60)]


def test_a_storm_is_found_in_any_sixty_seconds() -> None:
    halves = [Minute("a", 50, 20, busiest=40, peak_per_sec=20), Minute("a", 51, 20, 40, 20)]
    (storm,) = find_storms(halves, first_minute=0, last_minute=100, factor=5, min_retries=30)
    assert (storm.start_sec, storm.end_sec, storm.retries) == (3000, 3120, 40)
    assert (storm.peak_per_min, storm.synchrony) == (40, 0.5)


@pytest.mark.parametrize(("second", "ends_sec"), [(0, 120), (19, 120), (58, 120), (59, 180)])
def test_a_storm_is_found_at_whatever_second_it_begins(
    spark: SparkSession, microqueue_database: Any, database_uri: str, second: int, ends_sec: int
) -> None:
    past = Past(microqueue_database, "pay", ago=timedelta(hours=3))
    past.wait(second)
    past.enqueue(40)
    past.retry(40, took=0, delay=60)
    past.wait(60)
    past.work(20)
    past.work(20)
    (storm,) = storms(spark, uri=database_uri, dry_run=True).storms
    assert (storm.retries, storm.peak_per_min, storm.peak_per_sec) == (40, 40, 20)
    assert storm.start == past.begin + timedelta(seconds=60)
    assert storm.end == past.begin + timedelta(seconds=ends_sec)


def test_retries_more_than_a_minute_apart_are_not_counted_together(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    past = Past(microqueue_database, "pay", ago=timedelta(hours=3))
    past.enqueue(40)
    past.retry(40, took=0, delay=1)
    past.wait(1)
    past.work(20, took=60)
    past.work(20)
    assert not storms(spark, uri=database_uri, dry_run=True).storms
    (storm,) = storms(spark, uri=database_uri, dry_run=True, min_retries=20).storms
    assert (storm.retries, storm.peak_per_min) == (40, 20)


def test_a_storm_is_described_and_a_better_policy_found(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    settings = QueueSettings(retention=None, backoff=STIFF)
    past = Past(microqueue_database, "pay", ago=timedelta(hours=3), settings=settings)
    past.clock = past.queue.clock  # type: ignore[assignment]  # The same one.
    past.enqueue(60)
    for number in range(4):
        past.retry(60, f"gateway 10.0.0.{number} is down", took=0.5)
        past.wait(60)
    past.work(60, took=0.5)
    calm = Past(microqueue_database, "calm", ago=timedelta(hours=3))
    calm.enqueue(20)
    calm.work(20)
    found = storms(spark, uri=database_uri, settings=settings)
    (storm,) = found.storms
    assert storm.queue == "pay"
    assert storm.start <= past.begin + timedelta(seconds=61) <= storm.end
    assert (storm.retries, storm.peak_per_sec, storm.synchrony) == (240, 60, 1)
    assert (storm.code, storm.error) == ("Busy", "gateway <n> is down")
    assert storm.error_share == 1
    assert storm.policy == STIFF
    known = storm.reproduction
    assert known is not None
    assert known.reproduced
    assert (known.retries, known.peak_per_sec, known.peak_per_min) == (240, 60, 60)
    assert (known.simulated_retries, known.simulated_peak_per_sec) == (240, 60)
    assert known.simulated_peak_per_min == 60
    assert (known.tasks, known.tasks_total) == (60, 60)
    better = storm.suggestion
    assert better is not None
    assert better.policy.jitter != "none"
    assert better.instead_of_per_sec == 60
    assert better.peak_retries_per_sec < 30
    assert found.coming == ()
    looked = storms(spark, uri=database_uri, settings=settings, dry_run=True)
    assert looked.storms[0].suggestion is None
    assert looked.storms[0].reproduction is None


def test_a_storm_that_its_policy_does_not_explain_gets_no_recommendation(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    """The handlers named the delay, so the policy of the settings never applied."""
    past = Past(microqueue_database, "pay", ago=timedelta(hours=3))
    past.enqueue(90)
    past.retry(90, took=0.5, delay=60)
    past.wait(60)
    past.work(90, took=0.5)
    command = ["pipeline", "storms", "--uri", database_uri]
    told = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    (storm,) = json.loads(told.stdout)["storms"]
    assert storm["policy"] == BackoffPolicy().model_dump()
    known = storm["reproduction"]
    assert not known["reproduced"]
    assert (known["retries"], known["peak_per_sec"], known["peak_per_min"]) == (90, 90, 90)
    assert known["simulated_peak_per_sec"] < 45
    assert storm["suggestion"] is None
    said = CliRunner().invoke(app, command, catch_exceptions=False).stdout
    (line,) = [line for line in said.splitlines() if line.startswith("better")]
    assert "no recommendation" in line
    assert f"{known['simulated_peak_per_sec']:,.0f}/s" in line
    assert "90/s" in line


def test_a_storm_that_lasts_is_compared_within_the_recorded_time(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    settings = QueueSettings(retention=None, backoff=STIFF)
    past = Past(microqueue_database, "pay", ago=timedelta(minutes=3), settings=settings)
    past.enqueue(60)
    past.retry(60, took=0.5)
    past.wait(60)
    past.retry(60, took=0.5)  # They will come back once more.
    (storm,) = storms(spark, uri=database_uri, settings=settings).storms
    known = storm.reproduction
    assert known is not None
    assert (known.retries, known.simulated_retries, known.reproduced) == (60, 60, True)


@pytest.mark.parametrize(
    ("observed", "simulated", "expected"),
    [
        (60, 60.0, True),
        (60, 93.0, True),
        (60, 94.0, False),
        (94, 60.0, False),
        (90, 60.0, True),
        (1, 4.0, True),
        (1, 5.0, False),
        (30, 0.0, False),
    ],
)
def test_figures_are_close_within_ratio_and_slack(
    observed: int, simulated: float, expected: bool
) -> None:
    assert is_close(observed, simulated) is expected


def test_retries_of_all_seeds_are_compared_with_those_of_the_same_tasks() -> None:
    attempts = (PastAttempt(0, 1, "retried"), PastAttempt(10, 11, "done", number=2))
    # Released before it ran: the delivery that follows is no retry.
    released = (PastAttempt(0, 1, "released"), PastAttempt(10, 11, "done"))
    tasks = [PastTask(0.4, "done", 0, 10, one) for one in (attempts, attempts, released)]
    results = [
        queue_model.run_scenario(record(tasks), one) for one in scenarios_of(STIFF, workers=2)
    ]
    known = reproduce(tasks, results, total=3)
    assert (known.retries, known.peak_per_sec, known.peak_per_min) == (2, 2, 2)
    # In the simulation they come after the last instant that was observed.
    assert (known.simulated_retries, known.simulated_peak_per_sec) == (0, 0)
    quick = BackoffPolicy(base_sec=1, jitter="none")
    results = [
        queue_model.run_scenario(record(tasks), one) for one in scenarios_of(quick, workers=1)
    ]
    known = reproduce(tasks, results, total=3)
    assert (known.simulated_retries, known.simulated_peak_per_sec) == (2, 1)
    assert (known.simulated_peak_per_min, known.reproduced) == (2, True)


def scenarios_of(policy: BackoffPolicy, *, workers: int) -> list[Scenario]:
    return [Scenario(policy=policy, workers=workers, seed=seed) for seed in range(2)]


def test_a_storm_of_too_many_tasks_is_simulated_by_a_sample(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "MOST_TASKS", 40)
    past = Past(microqueue_database, "pay", ago=timedelta(hours=3))
    past.enqueue(60, backoff=STIFF)
    past.retry(60, took=0.5)
    past.wait(60)
    past.work(60, took=0.5)
    command = ["pipeline", "storms", "--uri", database_uri]
    said = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "by simulation of a sample of 40 of 60 tasks" in said.stdout
    monkeypatch.setattr(pipeline, "MOST_TASKS", 60)
    said = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "by simulation" in said.stdout
    assert "sample" not in said.stdout


def test_coming_retries_in_the_same_second_are_found(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    past = Past(microqueue_database, "pay", ago=timedelta(minutes=1))
    past.enqueue(40)
    past.enqueue(5, delay=3600)  # Delayed on purpose: no retries.
    past.retry(40, delay=600)
    (coming,) = storms(spark, uri=database_uri).coming
    assert (coming.queue, coming.tasks) == ("pay", 40)
    assert coming.at == (past.clock.now() + timedelta(seconds=600)).replace(microsecond=0)


def test_other_policies_vary_base_and_jitter_and_stay_valid() -> None:
    policy = BackoffPolicy(base_sec=5, max_sec=5, jitter="full")
    others = other_policies(policy)
    assert policy not in others
    assert len(others) == 14
    for other in others:
        BackoffPolicy(**other.model_dump())


def test_bad_thresholds_are_rejected(spark: SparkSession, database_uri: str) -> None:
    with rejecting("factor"):
        storms(spark, uri=database_uri, factor=1)
    with rejecting("min_retries"):
        storms(spark, uri=database_uri, min_retries=0)
