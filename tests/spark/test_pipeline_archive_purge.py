"""Deleting archived tasks by as few columns as possible."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from bson import DatetimeMS, ObjectId
from pyspark.sql import DataFrame, SparkSession

from microqueue.core import core_of
from microqueue.spark.archive.job import archive
from microqueue.spark.archive.purge import Purge
from microqueue.spark.progress import Step
from tests.spark.archived import HOUR, documents_of
from tests.spark.past import Past


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The columns of each read of a purge."""
    found: list[set[str]] = []
    run = Purge._run  # noqa: SLF001 (what it reads is to be seen)

    def note(purge: Purge, frame: DataFrame, *rest: Any) -> Any:
        found.append(set(frame.columns))
        return run(purge, frame, *rest)

    monkeypatch.setattr(Purge, "_run", note)
    return found


def test_tasks_that_columns_identify_are_purged_without_reading_documents(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    read: list[set[str]],
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    for task_id in ("own", 7, ObjectId()):
        past.queue.enqueue({}, task_id=task_id)
    past.work(1)
    past.fail(["boom"] * 2)
    replayed = past.queue.dead_letters.list()[0].id

    def meddle(step: Step) -> None:
        if step.name == "verify":
            past.queue.dead_letters.replay(replayed)

    summary = archive(spark, tmp_path, uri=database_uri, older_than=HOUR, progress=meddle)
    assert (summary.deleted, summary.superseded) == (2, 1)
    assert [task["_id"] for task in microqueue_database.tasks.find()] == [replayed]
    assert len(documents_of(spark, tmp_path)) == 2
    (columns,) = read
    assert "document" not in columns


def test_a_superseded_task_counts_once_in_a_session_of_any_timezone(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    in_zone: Callable[[str], None],
) -> None:
    in_zone("Europe/Berlin")
    repeated = datetime(2025, 10, 26, 0, 30, tzinfo=UTC)  # An hour that clocks there show twice.
    past = Past(microqueue_database, ago=datetime.now(UTC) - repeated)
    past.enqueue(3)
    past.work(1)
    past.fail(["boom"] * 2)
    replayed = past.queue.dead_letters.list()[0].id

    def meddle(step: Step) -> None:
        if step.name == "verify":
            past.queue.dead_letters.replay(replayed)

    summary = archive(spark, tmp_path, uri=database_uri, older_than=HOUR, progress=meddle)
    assert (summary.deleted, summary.superseded) == (2, 1)
    assert len(documents_of(spark, tmp_path)) == 2
    past.work(1)
    assert archive(spark, tmp_path, uri=database_uri, older_than=HOUR).deleted == 1
    assert len(documents_of(spark, tmp_path)) == 3


def test_tasks_that_columns_do_not_identify_are_purged_by_their_documents(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    read: list[set[str]],
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(3)
    past.work(3)
    at = past.begin + timedelta(seconds=1)
    task = {"queue": "mail", "payload": {}, "status": "done", "attempts": 1, "created_at": at}
    task |= {"updated_at": at, "finished_at": at}
    malformed = [{**task, "_id": task_id} for task_id in (UUID(int=1), 1.5, {"a": 1})]
    malformed.append({**task, "_id": "late", "updated_at": DatetimeMS(2**60)})
    malformed.append({**task, "_id": "never", "updated_at": None})
    malformed.append({**task, "_id": "text", "created_at": "yesterday"})
    core_of(past.queue).collections.tasks.insert_many(malformed)
    summary = archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    assert (summary.archived, summary.deleted, summary.superseded) == (9, 9, 0)
    assert microqueue_database.tasks.count_documents({}) == 0
    assert len(documents_of(spark, tmp_path)) == 9
    _, columns = read
    assert columns == {"document"}
