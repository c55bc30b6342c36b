"""Tasks that change while they are archived, and concurrent runs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from microqueue import PipelineError
from microqueue.spark.analytics.task_source import all_tasks
from microqueue.spark.archive import purge
from microqueue.spark.archive.job import archive
from microqueue.spark.archive.log import ArchiveConflict, ArchiveLog, Entry
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.location import locate
from microqueue.spark.progress import Step
from microqueue.spark.storage import Storage
from tests.rejection import raising
from tests.spark.archived import HOUR, documents_of
from tests.spark.past import Past


def test_a_task_replayed_while_it_is_archived_is_kept_and_counts_once(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(6)
    past.fail(["boom"] * 6)
    letters = [task.id for task in past.queue.dead_letters.list()]

    def meddle(step: Step) -> None:
        if step.name == "verify":  # Written, and not yet deleted.
            past.queue.dead_letters.replay(letters[0])  # It is pending again.
            past.queue.dead_letters.replay(letters[1])
            again = past.queue.pop_many(2)
            past.wait(60)
            done = next(task for task in again if task.id == letters[1])
            past.queue.mark_failure(done, "boom again", code="E")  # As dead as before.

    summary = archive(spark, tmp_path, uri=database_uri, older_than=HOUR, progress=meddle)

    assert (summary.archived, summary.deleted, summary.superseded) == (6, 4, 2)
    assert {task["_id"] for task in microqueue_database.tasks.find()} == set(letters[:2])
    assert {one["_id"] for one in documents_of(spark, tmp_path)} == set(letters[2:])

    archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    kept = documents_of(spark, tmp_path)
    assert len(kept) == 5
    (letter,) = [one for one in kept if one["_id"] == letters[1]]
    assert letter["error"]["message"] == "boom again"


def test_a_later_task_with_the_same_id_is_another_task(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.queue.enqueue({"n": 1}, task_id="same")
    past.work(1)

    def meddle(step: Step) -> None:
        if step.name == "note":  # Deleted, and not yet noted.
            past.wait(1)
            past.queue.enqueue({"n": 2}, task_id="same")

    archive(spark, tmp_path, uri=database_uri, older_than=HOUR, progress=meddle)
    past.work(1)
    archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    assert sorted(one["payload"]["n"] for one in documents_of(spark, tmp_path)) == [1, 2]


def test_the_later_of_two_runs_takes_over_and_nothing_is_archived_twice(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(4)
    past.work(4)

    def overtake(step: Step) -> None:
        if step.name == "commit":
            archive(spark, tmp_path, uri=database_uri, older_than=HOUR)

    with raising(ArchiveConflict, "taken_over", path=Storage(spark, tmp_path).root):
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR, progress=overtake)
    assert len(documents_of(spark, tmp_path)) == 4
    assert microqueue_database.tasks.count_documents({}) == 0


def test_tasks_archived_and_not_yet_deleted_count_once_beside_live_ones(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(5)
    past.work(4)
    monkeypatch.setattr(purge.Purge, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    assert read_archive(spark, tmp_path).count() == 4
    assert all_tasks(spark, live=locate(database_uri), archive=tmp_path).count() == 5


def test_a_run_begun_in_one_database_is_not_finished_in_another(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    log = ArchiveLog(Storage(spark, tmp_path))
    log.commit(Entry(kind="archived", run="r", at=datetime.now(UTC), place="shop.tasks#1"))
    other = {"run": "r", "place": "shop.tasks#1"}
    with raising(PipelineError, "other_database", **other) as caught:
        archive(spark, tmp_path, uri=database_uri)
    assert caught.value.path == Storage(spark, tmp_path).root


def test_a_log_number_can_be_used_once(spark: SparkSession, tmp_path: Path) -> None:
    storage = Storage(spark, tmp_path)
    one, other = ArchiveLog(storage), ArchiveLog(storage)
    one.commit(Entry(kind="begun", run="one", at=datetime.now(UTC)))
    with pytest.raises(ArchiveConflict):
        other.commit(Entry(kind="begun", run="other", at=datetime.now(UTC)))
    (entry,) = (tmp_path / "_log").glob("*.json")
    assert json.loads(entry.read_text())["run"] == "one"
    assert not list((tmp_path / "_log").glob("*.draft"))
