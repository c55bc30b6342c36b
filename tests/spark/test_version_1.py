"""What schema version 1 wrote, read by Spark; and one history wherever it is derived."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from microqueue import Queue
from microqueue.core import core_of
from microqueue.errors import SchemaTooOld
from microqueue.spark import read_tasks
from microqueue.spark.pipelines import archive, read_archive, replay
from microqueue.task import read_task
from tests.fixtures.version_1 import ARCHIVE, restore


def outcomes(rows: Any) -> dict[str, list[str]]:
    return {row["id"]: [one["outcome"] for one in row["history"] or ()] for row in rows}


def test_archive_of_version_1_is_read_and_replayed(
    spark: SparkSession, make_queue: Any, database_uri: str, tmp_path: Path
) -> None:
    kept = tmp_path / "archive"
    shutil.copytree(ARCHIVE, kept)
    rows = read_archive(spark, kept).collect()
    assert {row["id"]: row["status"] for row in rows} == {
        "done": "done",
        "done-after-retry": "done",
        "failed": "failed",
        "cancelled": "failed",
    }
    assert outcomes(rows) == {
        "done": ["done"],
        "done-after-retry": ["retried", "done"],
        "failed": ["failed"],
        "cancelled": [],
    }
    queue: Queue[Any] = make_queue("again")
    queue.ensure_indexes()
    sent = replay(
        spark,
        where="status = 'failed'",
        archive=kept,
        uri=database_uri,
        to="again",
        spread=timedelta(minutes=1),
        run="once",
        dead_letters=False,
    )
    assert sent.archived == 2
    tasks = list(core_of(queue).collections.tasks.find({"queue": "again"}))
    assert [task["deadline_at"] for task in tasks] == [task["next_retry_at"] for task in tasks]
    assert {task["payload"]["n"] for task in tasks} == {3, 4}


def test_new_tasks_join_an_archive_of_version_1(
    spark: SparkSession, make_queue: Any, database_uri: str, tmp_path: Path
) -> None:
    kept = tmp_path / "archive"
    shutil.copytree(ARCHIVE, kept)
    queue: Queue[Any] = make_queue("mail")
    queue.enqueue({"n": 1}, task_id="new")
    task = queue.pop()
    assert task is not None
    queue.mark_done(task)
    summary = archive(spark, kept, uri=database_uri, older_than=0)
    assert summary.archived == 1
    found = outcomes(read_archive(spark, kept).collect())
    assert found["new"] == found["done"] == ["done"]
    assert len(found) == 5


def test_live_tasks_of_version_1_are_rejected(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    restore(microqueue_database, "status", datetime.now(UTC))
    with pytest.raises(SchemaTooOld):
        archive(spark, tmp_path / "archive", uri=database_uri)


FAILED = {"attempt": 1, "outcome": "retried", "worker_id": "w"}
AT = datetime(2026, 3, 1, tzinfo=UTC)
HISTORIES: dict[str, dict[str, Any]] = {
    "lean": {"history": []},
    "no history": {},
    "null": {"history": None},
    "after a retry": {"history": [{**FAILED, "started_at": AT, "ended_at": AT}]},
    "as version 1 stored it": {
        "history": [{**FAILED, "outcome": "done", "started_at": AT, "ended_at": AT}]
    },
    "never started": {"history": [], "started_at": None},
    "failed": {"history": [{**FAILED, "outcome": "failed", "ended_at": AT}], "status": "failed"},
    "pending": {"history": [], "status": "pending", "finished_at": None},
}


def test_task_source_and_archive_derive_the_same_history(
    spark: SparkSession, make_queue: Any, database_uri: str, tmp_path: Path
) -> None:
    queue: Queue[Any] = make_queue("mail")
    queue.ensure_indexes()
    whole: dict[str, Any] = {
        "queue": "mail", "status": "done", "payload": {}, "priority": 0, "attempts": 2,
        "max_attempts": 5, "created_at": AT, "updated_at": AT, "started_at": AT,
        "finished_at": AT + timedelta(seconds=1), "worker_id": "w", "position": 1,
    }  # fmt: skip
    documents = [{"_id": name, **whole, **fields} for name, fields in HISTORIES.items()]
    core_of(queue).collections.tasks.insert_many(documents)
    tasks = {one["_id"]: read_task(one) for one in documents}
    expected = {
        name: [(one.attempt, str(one.outcome), one.worker_id, one.ended_at) for one in task.history]
        for name, task in tasks.items()
    }
    assert expected["lean"] == [(2, "done", "w", AT + timedelta(seconds=1))]
    assert [len(expected[name]) for name in HISTORIES] == [1, 1, 1, 2, 1, 0, 1, 0]

    def histories(frame: Any) -> dict[str, Any]:
        return {
            row["id"]: [
                (one["attempt"], one["outcome"], one["worker_id"], one["ended_at"].astimezone(UTC))
                for one in row["history"] or ()
            ]
            for row in frame.select("id", "history").collect()
        }

    assert histories(read_tasks(spark, uri=database_uri, columns="id,history")) == expected
    archive(spark, tmp_path / "archive", uri=database_uri)
    finished = {name: one for name, one in expected.items() if name != "pending"}
    assert histories(read_archive(spark, tmp_path / "archive")) == finished
