"""Archiving tasks, and reading them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from bson import Decimal128, ObjectId, Regex
from pyspark.sql import SparkSession

from microqueue import QueueSettings
from microqueue.core import core_of
from microqueue.spark.archive.job import archive
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.progress import Step
from tests.rejection import rejecting
from tests.spark.archived import HOUR, documents_of
from tests.spark.past import Past, encoded


def test_archived_tasks_are_deleted_from_mongodb_and_read_back_unchanged(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, "a/b=c %", ago=2 * HOUR)
    past.enqueue(30)
    past.work(20)
    past.fail(["boom"] * 5)
    past.work(1)
    tasks = microqueue_database.tasks
    malformed = {
        "_id": UUID("12345678-1234-5678-1234-567812345678"),
        "queue": "malformed",
        "payload": {"deep": [Decimal128("1.10"), Regex("x"), {"id": ObjectId()}, None]},
        "status": "done",
        "priority": "high",  # Not what it should be.
        "created_at": past.begin,
        "updated_at": past.begin,
        "finished_at": past.begin,
        "attempts": 1,
    }
    core_of(past.queue).collections.tasks.insert_one(malformed)
    finished = list(
        core_of(past.queue).collections.tasks.find(
            {"status": {"$in": ["done", "failed"]}}, sort=[("_id", 1)]
        )
    )

    summary = archive(spark, tmp_path, uri=database_uri, older_than=HOUR)

    assert (summary.archived, summary.deleted, summary.superseded) == (27, 27, 0)
    assert {task["status"] for task in tasks.find()} == {"pending"}
    assert tasks.count_documents({}) == 4
    kept = documents_of(spark, tmp_path)
    assert sorted(map(encoded, kept)) == sorted(map(encoded, finished))
    rows = read_archive(spark, tmp_path)
    assert {(row["queue"], row["count"]) for row in rows.groupBy("queue").count().collect()} == {
        ("a/b=c %", 26),
        ("malformed", 1),
    }
    (drifted,) = rows.where("queue = 'malformed'").collect()
    assert drifted["priority"] is None
    assert (drifted["id"], drifted["id_type"]) == (str(malformed["_id"]), "uuid")
    days = {path.name for path in tmp_path.glob("day=*")}
    assert days == {f"day={row['finished_at']:%Y-%m-%d}" for row in finished}


def test_a_dry_run_counts_and_changes_nothing(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(5)
    past.work(3)
    summary = archive(spark, tmp_path / "new", uri=database_uri, older_than=HOUR, dry_run=True)
    assert summary.found == {"mail/done": 3}
    assert not (tmp_path / "new").exists()
    assert microqueue_database.tasks.count_documents({}) == 5


def test_only_selected_tasks_that_are_old_enough_are_archived(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    for name in ("mail", "other"):
        past = Past(microqueue_database, name, ago=2 * HOUR)
        past.enqueue(4)
        past.work(1)
        past.fail(["boom"])
        past.wait(90 * 60)
        past.work(1)  # Half an hour ago.
    archive(
        spark, tmp_path, uri=database_uri, older_than=HOUR, queues=["mail"], statuses=["failed"]
    )
    assert [one["queue"] for one in documents_of(spark, tmp_path)] == ["mail"]
    assert [one["status"] for one in documents_of(spark, tmp_path)] == ["failed"]
    assert microqueue_database.tasks.count_documents({}) == 7


def test_dead_letters_in_a_separate_collection_are_archived(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    settings = QueueSettings(retention=None, dead_letters="collection")
    past = Past(microqueue_database, ago=2 * HOUR, settings=settings)
    past.enqueue(4)
    past.work(1)
    past.fail(["boom"] * 3)
    assert past.queue.dead_letters.stats().total == 3
    replayed = past.queue.dead_letters.list()[0].id

    def meddle(step: Step) -> None:
        if step.name == "verify":
            past.queue.dead_letters.replay(replayed)

    summary = archive(
        spark, tmp_path, uri=database_uri, older_than=HOUR, settings=settings, progress=meddle
    )
    assert (summary.archived, summary.deleted, summary.superseded) == (4, 3, 1)
    assert past.queue.dead_letters.stats().total == 0
    assert past.queue.get(replayed) is not None
    statuses = sorted(one["status"] for one in documents_of(spark, tmp_path))
    assert statuses == ["done", "failed", "failed"]


@pytest.mark.parametrize("statuses", [["pending"], ["done", "processing"], []])
def test_only_finished_tasks_can_be_archived(
    spark: SparkSession, tmp_path: Path, database_uri: str, statuses: list[str]
) -> None:
    with rejecting("statuses"):
        archive(spark, tmp_path, uri=database_uri, statuses=statuses)
