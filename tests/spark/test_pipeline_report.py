from __future__ import annotations

import csv
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

from microqueue import Snooze, Worker
from microqueue.spark.analytics import report as pipeline
from microqueue.spark.analytics.html import Chart, draw
from microqueue.spark.analytics.pages import charts_of
from microqueue.spark.analytics.report import (
    Report,
    ReportRow,
    as_document,
    fitting_bucket,
    measure,
    report,
)
from microqueue.spark.archive.job import archive
from tests.rejection import rejecting
from tests.spark.past import Past

HOUR = timedelta(hours=1)


def hour_of(instant: datetime) -> datetime:
    return instant.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def test_a_report_measures_archive_and_live_tasks_together(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    old = Past(microqueue_database, ago=5 * HOUR)
    old.enqueue(10)
    old.wait(10)
    old.work(8, took=2)  # Waited 10 s, ran 2 s.
    old.fail(["boom"] * 2, took=4)
    archive(spark, tmp_path / "archive", uri=database_uri, older_than=4 * HOUR)
    assert microqueue_database.tasks.count_documents({}) == 0

    new = Past(microqueue_database, ago=HOUR)
    new.enqueue(10)
    new.wait(100)
    new.retry(2, took=6, delay=0)  # Waited 100 s.
    new.work(2, took=2)
    new.work(4, took=2)
    # Four tasks have waited for an hour, until now.

    made = report(
        spark,
        archive=tmp_path / "archive",
        uri=database_uri,
        since=old.begin - HOUR,
        bucket="hour",
        target_wait=30,
        output=tmp_path / "out",
    )

    total = made.total
    assert (total.enqueued, total.done, total.failed) == (20, 14, 2)
    assert (total.attempts, total.retries) == (18, 2)
    assert total.success_rate == 14 / 16
    assert total.retry_rate == 2 / 18
    assert (total.started, total.kept, total.waiting_past_target) == (16, 10, 4)
    assert total.target_kept == 10 / 20
    assert total.wait_p50 == 10
    assert total.wait_p99 == pytest.approx(108, abs=10)
    assert (total.run_p50, total.run_p99) == (2, 6)
    (queue,) = made.queues
    assert queue.model_copy(update={"queue": None}) == total
    done = {row.start: row.done for row in made.buckets if row.done}
    assert done == {hour_of(old.clock.now()): 8, hour_of(new.clock.now()): 6}

    table = pyarrow.parquet.read_table(tmp_path / "out" / "report.parquet")
    assert table.num_rows == len(made.rows)
    (whole,) = [row for row in table.to_pylist() if row["level"] == "total"]
    assert whole["target_kept"] == 0.5
    rows = list(csv.DictReader((tmp_path / "out" / "report.csv").read_text().splitlines()))
    assert [row["done"] for row in rows if row["queue"] == "mail" and not row["start"]] == ["14"]
    assert next(iter(rows[0])) == "level"
    for level in ("total", "queue", "name", "bucket"):  # Each of them sums to the same.
        own = [row for row in rows if row["level"] == level]
        assert sum(int(row["done"]) for row in own) == 14
        assert sum(int(row["enqueued"]) for row in own) == 20
    assert [row["level"] for row in rows] == [row.level for row in made.rows]
    assert [row["level"] for row in rows] == [row["level"] for row in as_document(made)["rows"]]
    late = {row["level"]: row["waiting_past_target"] for row in rows}
    assert late == {"total": "4", "queue": "4", "bucket": "", "name": ""}  # Counted by queue only.

    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 6
    assert "50.0%" in page
    loaded = re.findall(r'(?:src|href)\s*=\s*"([^"#]*)"|url\((?!#)|@import', page)
    assert not [one for one in loaded if one]
    assert "<script" not in page


def test_a_report_can_read_only_the_archive_or_only_mongodb(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=3 * HOUR)
    past.enqueue(3)
    past.work(3)
    archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    kept = report(spark, archive=tmp_path, live=False)
    assert kept.total.done == 3
    assert kept.total.target_kept == 1  # Without a target, whatever started was in time.
    assert report(spark, uri=database_uri).total.done == 0
    with rejecting("archive", None, code="no_source"):
        report(spark, live=False)
    with rejecting("bucket"):
        report(spark, archive=tmp_path, live=False, bucket="week")  # type: ignore[arg-type]  # The point.
    now = datetime.now(UTC)
    with rejecting("since"):
        report(spark, archive=tmp_path, live=False, since=now, until=now)


def test_a_stopped_queue_misses_the_target(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    past = Past(microqueue_database, ago=30 * HOUR)
    past.enqueue(6)
    past.queue.enqueue({}, delay=timedelta(days=9))  # On purpose.
    past.wait(3600)
    past.work(1)
    past.wait(28 * 3600)
    past.work(2)

    made = report(spark, uri=database_uri, target_wait=60)
    assert (made.total.started, made.total.waiting_past_target) == (2, 3)
    assert made.total.target_kept == 0
    (queue,) = made.queues
    assert queue.waiting_past_target == 3

    then = past.begin + 2 * HOUR  # Those that were started later waited, too.
    made = report(spark, uri=database_uri, target_wait=60, until=then)
    assert (made.total.started, made.total.waiting_past_target) == (1, 5)
    then = past.begin + timedelta(seconds=30)
    made = report(spark, uri=database_uri, target_wait=60, until=then)
    assert made.total.waiting_past_target == 0
    assert report(spark, uri=database_uri).total.waiting_past_target == 0  # No target is missed.


def test_snoozed_and_released_attempts_do_not_count(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    past = Past(microqueue_database, ago=timedelta(hours=1))
    past.enqueue(1)

    def snooze(_payload: dict[str, Any]) -> None:
        raise Snooze(30)

    Worker(past.queue, snooze).run(burst=True)
    past.wait(30)
    (task,) = past.queue.pop_many(1)
    past.queue.release(task)
    past.work(1)
    (stored,) = past.queue.peek(1)
    assert [attempt.outcome for attempt in stored.history] == ["snoozed", "released", "done"]
    total = report(spark, uri=database_uri, bucket="hour").total
    assert (total.done, total.attempts, total.retries) == (1, 1, 0)


def test_delayed_tasks_wait_from_when_they_are_due(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    past = Past(microqueue_database, ago=3 * HOUR)
    for delay in (timedelta(minutes=1), HOUR, timedelta(days=9)):
        past.queue.enqueue({}, delay=delay)
    assert report(spark, uri=database_uri, target_wait=30).total.waiting_past_target == 2
    then = past.begin + HOUR / 2
    made = report(spark, uri=database_uri, target_wait=30, until=then)
    assert made.total.waiting_past_target == 1


def test_a_bucket_cut_by_the_period_counts_only_its_part(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    begin = hour_of(datetime.now(UTC)) - 5 * HOUR + timedelta(minutes=50)
    past = Past(microqueue_database, ago=datetime.now(UTC) - begin)
    past.enqueue(12)
    past.work(6)
    past.wait(3600)
    past.work(3)
    past.wait(1200)
    past.work(3)
    options: dict[str, Any] = {"since": begin, "until": begin + HOUR + timedelta(minutes=30)}
    made = report(spark, uri=database_uri, bucket="hour", **options)
    assert [row.seconds for row in made.buckets] == [600, 3600, 1200]
    assert [row.throughput_per_sec for row in made.buckets] == [6 / 600, 3 / 3600, 3 / 1200]
    assert made.total.seconds == sum(row.seconds for row in made.buckets)


def test_a_chart_shows_where_nothing_happened() -> None:
    at = datetime(2026, 5, 1, 5, 50, tzinfo=UTC)
    hours = [datetime(2026, 5, 1, hour, tzinfo=UTC) for hour in range(13)]
    rows = [
        ReportRow(queue="mail", start=hours[6], done=60, attempts=60, wait_p95=1.0, started=60),
        ReportRow(queue="mail", start=hours[12], done=30, attempts=30, wait_p95=2.0, started=30),
        ReportRow(queue="post", start=hours[7], done=5, attempts=5),
    ]
    until = datetime(2026, 5, 1, 12, 10, tzinfo=UTC)
    made = Report(since=at, until=until, bucket="hour", target_wait_sec=None, rows=tuple(rows))
    charts = {chart.title: chart.series for chart in charts_of(made)}
    done = [(hours[5], 0), (hours[6], 60), (hours[7], 0), (hours[11], 0), (hours[12], 30)]
    assert charts["Done"]["mail"] == done
    all_done = {5: 0, 6: 60, 7: 5, 8: 0, 11: 0, 12: 30}
    assert charts["Enqueued and finished"]["done"] == [
        (hours[hour], count) for hour, count in all_done.items()
    ]
    waits = {60: 1.0, 30: 2.0}
    assert charts["Wait, p95"]["mail"] == [(start, waits.get(count)) for start, count in done]


def test_the_chart_of_a_year_by_minutes_stays_small() -> None:
    until = datetime(2026, 5, 1, tzinfo=UTC)
    row = ReportRow(queue="mail", start=until - HOUR, done=1, attempts=1)
    since = until - timedelta(days=365)
    made = Report(since=since, until=until, bucket="minute", target_wait_sec=None, rows=(row,))
    assert all(len(line) <= 5 for chart in charts_of(made) for line in chart.series.values())


def test_an_isolated_point_is_visible() -> None:
    at = datetime(2026, 5, 1, tzinfo=UTC)
    values = [None, 0.5, None, None, 0.5, 0.7, 0.6]
    points = [(at + number * HOUR, value) for number, value in enumerate(values)]
    joined = [(at + number * HOUR, 0.5) for number in range(7)]
    assert draw(Chart("c", {"a": points})).count("<use") == (
        draw(Chart("c", {"a": joined})).count("<use") + 1
    )


def test_tasks_without_a_queue_are_not_the_total(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    past = Past(microqueue_database, ago=HOUR)
    ids = past.enqueue(5)
    microqueue_database.tasks.update_many({"_id": {"$in": ids[:2]}}, {"$unset": {"queue": 1}})
    made = report(spark, uri=database_uri, target_wait=60)
    assert (made.total.enqueued, made.total.waiting_past_target) == (5, 5)
    assert {row.queue: row.enqueued for row in made.queues} == {"mail": 3, "default": 2}
    assert {row.queue: row.waiting_past_target for row in made.queues} == {"mail": 3, "default": 2}


@pytest.mark.parametrize("merged", [False, True])
def test_tasks_archived_during_a_report_are_counted(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    merged: bool,
) -> None:
    past = Past(microqueue_database, ago=3 * HOUR)
    past.enqueue(4)
    past.work(1)
    archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    past.work(3)
    asked = 0

    def meddle(*arguments: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:  # The log was read, and MongoDB not yet.
            archive(spark, tmp_path, uri=database_uri, older_than=HOUR, compact=merged)
        return measure(*arguments, **options)

    monkeypatch.setattr(pipeline, "measure", meddle)
    assert report(spark, archive=tmp_path, uri=database_uri).total.done == 4
    assert asked == 2


def test_a_report_measures_each_name(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = Past(microqueue_database, ago=5 * HOUR)
    old.enqueue(4, name="pay")
    old.wait(10)
    old.work(3, took=2)
    old.fail(["boom"], took=2)
    archive(spark, tmp_path / "archive", uri=database_uri, older_than=4 * HOUR)
    new = Past(microqueue_database, "other", ago=HOUR)
    new.enqueue(3, name="pay")
    new.enqueue(2, headers={"task": "ship"})
    new.enqueue(1)
    new.wait(10)
    new.retry(3, took=6, delay=3600)
    new.work(2, took=4)
    # As earlier versions stored it.
    microqueue_database.tasks.update_many({"name": "ship"}, {"$unset": {"name": ""}})
    options: dict[str, Any] = {"archive": tmp_path / "archive", "uri": database_uri}
    options["since"] = old.begin - HOUR
    made = report(spark, **options, target_wait=30, output=tmp_path / "out")
    pay, ship, nameless = made.names
    assert [row.name for row in made.names] == ["pay", "ship", ""]
    assert (pay.queue, pay.start, pay.level) == (None, None, "name")
    assert (pay.enqueued, pay.done, pay.failed, pay.retries) == (7, 3, 1, 3)
    assert (ship.enqueued, ship.done, nameless.enqueued) == (2, 2, 1)
    assert (pay.failure_rate, pay.wait_p50, pay.run_p99, ship.run_p50) == (0.25, 10, 6, 4)
    assert pay.seconds == made.total.seconds
    for field in ("enqueued", "done", "failed", "attempts", "retries", "started", "kept"):
        assert sum(getattr(row, field) for row in made.names) == getattr(made.total, field)
    with (tmp_path / "out" / "report.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["level"] == "name"]
    assert {row["name"]: row["done"] for row in rows} == {"pay": "3", "ship": "2", "": "0"}
    assert {row["waiting_past_target"] for row in rows} == {""}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Names" in page
    assert "no name" in page

    monkeypatch.setattr(pipeline, "MOST_NAMES", 1)
    few = report(spark, **options)
    assert [(row.name, row.enqueued) for row in few.names] == [("pay", 7), ("others", 3)]


def test_a_report_is_the_same_in_a_session_of_any_timezone(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    in_zone: Callable[[str], None],
) -> None:
    begin = datetime(2025, 10, 26, tzinfo=UTC)
    past = Past(microqueue_database, ago=datetime.now(UTC) - begin)
    past.enqueue(8)
    for _ in range(4):
        past.work(1)
        past.wait(1800)
    archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    past.work(2)
    berlin = ZoneInfo("Europe/Berlin")
    options: dict[str, Any] = {
        "archive": tmp_path,
        "uri": database_uri,
        "since": datetime(2025, 10, 26, tzinfo=berlin),
        "until": datetime(2025, 10, 27, tzinfo=berlin),
        "bucket": "hour",
        "target_wait": 60,
    }
    expected = report(spark, **options)
    in_zone("Europe/Berlin")
    made = report(spark, **options)
    assert made == expected
    assert (made.total.done, made.total.waiting_past_target) == (6, 2)
    assert made.total.seconds == 25 * 3600
    assert sum(row.done > 0 for row in made.buckets) == 3


@pytest.mark.parametrize(
    ("period", "bucket"),
    [
        (timedelta(hours=2), "minute"),
        (timedelta(hours=4), "hour"),
        (timedelta(days=7), "hour"),
        (timedelta(days=30), "day"),
    ],
)
def test_buckets_fit_the_period(period: timedelta, bucket: str) -> None:
    assert fitting_bucket(period) == bucket


def test_a_chart_is_deterministic_and_has_no_script() -> None:
    at = datetime(2026, 5, 1, tzinfo=UTC)
    lines = {"<b>&": [(at, 1.0), (at + HOUR, None), (at + 2 * HOUR, 3.0)]}
    chart = Chart("Waits", lines, "seconds", target=2)
    assert draw(chart) == draw(chart)
    assert "<b>" not in draw(chart)
