"""Streams from a queue and into a queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from bson import ObjectId
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StringType, StructField, StructType

from microqueue import InvalidArgument
from microqueue.core import core_of
from microqueue.operations import change_cursor
from microqueue.operations.change_cursor import ChangeCursor, ChangeQuery, ChangeRange
from microqueue.spark.options import SelectionOptions
from microqueue.spark.read.stream import TaskStreamReader, to_mark, to_offset
from tests.rejection import rejecting
from tests.spark.rejection import crossing_spark

AT = datetime(2026, 3, 1, tzinfo=UTC)
IDS = StructType([StructField("id", StringType())])


def task(task_id: Any, seconds: float, *, status: str = "done", **fields: Any) -> dict[str, Any]:
    at = AT + timedelta(seconds=seconds)
    document = {"_id": task_id, "queue": "mail", "status": status, "priority": 0, "attempts": 1}
    document |= {"max_attempts": 3, "created_at": AT, "updated_at": at, "position": 0}
    document |= {"finished_at": at if status in {"done", "failed"} else None, **fields}
    return {**document, "deadline_at": document["finished_at"] if status == "done" else None}


def follow_to(
    frame: DataFrame,
    checkpoint: Path,
    handle: Callable[[DataFrame, int], None],
) -> None:
    """Process all current changes, and end."""
    query = (
        frame.writeStream.option("checkpointLocation", str(checkpoint))
        .foreachBatch(handle)
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination()
    finally:
        query.stop()


def stream(spark: SparkSession, uri: str, **options: Any) -> DataFrame:
    given = {"uri": uri, "columns": "id,status", "lag": "0", **options}
    return spark.readStream.format("microqueue").options(**given).load()


def test_a_stream_crashes_recovers_and_sees_each_task_once(
    spark: SparkSession, database_uri: str, microqueue_database: Any, tmp_path: Path
) -> None:
    tasks = microqueue_database.tasks
    # Many changes of one instant, with ids of several types: marks must separate them.
    ids: list[Any] = [ObjectId(), "a", 7, UUID(int=3), ObjectId(), "b", 8, UUID(int=4)]
    tasks = tasks.with_options(
        codec_options=tasks.codec_options.with_options(uuid_representation=4)
    )
    tasks.insert_many([task(task_id, 0) for task_id in ids])
    tasks.insert_many([task(n + 100, n, status="failed") for n in range(4)])
    tasks.insert_many([task("waiting", 1, status="pending"), task("busy", 1, status="processing")])
    batches: dict[int, list[str]] = {}

    def handle(frame: DataFrame, batch: int) -> None:
        batches[batch] = [row.id for row in frame.collect()]

    def crash(frame: DataFrame, batch: int) -> None:
        if batch == 2:
            raise RuntimeError("the machine is on fire")
        handle(frame, batch)

    frame = stream(spark, database_uri, max_rows=3)
    with pytest.raises(Exception, match="on fire"):
        follow_to(frame, tmp_path, crash)
    assert sorted(batches) == [0, 1]
    tasks.insert_one(task("late", 50))
    follow_to(frame, tmp_path, handle)
    assert [len(batches[batch]) for batch in sorted(batches)] == [3, 3, 3, 3, 1]
    seen = [task_id for batch in sorted(batches) for task_id in batches[batch]]
    assert sorted(seen) == sorted([*map(str, ids), "100", "101", "102", "103", "late"])
    assert seen[-1] == "late"
    follow_to(frame, tmp_path, handle)
    assert len(batches) == 5  # Without changes there is no batch.


def test_a_stream_into_a_queue_enqueues_each_row_once_across_a_crash(
    spark: SparkSession, database_uri: str, make_queue: Any, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    frame = spark.range(0, 300, numPartitions=3).selectExpr("id as order")
    frame.write.json(str(source))

    def run(model: str) -> None:
        rows = spark.readStream.schema("order bigint").option("maxFilesPerTrigger", 1)
        options = {"uri": database_uri, "queue": "orders", "key": "order", "model": model}
        query = (
            rows.json(str(source))
            .writeStream.format("microqueue")
            .options(
                **options,
                batch_rows=30,
                load="night",
                checkpointLocation=str(tmp_path / "checkpoint"),
            )
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        finally:
            query.stop()

    with pytest.raises(Exception, match="every attempt dies here"):
        run("tests.spark.faults:Fails")
    queue = make_queue("orders")
    assert 0 < queue.stats().ready < 300
    run("tests.spark.faults:Order")
    orders = sorted(task["payload"]["order"] for task in core_of(queue).collections.tasks.find())
    assert orders == list(range(300))
    reports = {one["_id"]: one for one in core_of(queue).collections.loads.find()}
    assert set(reports) == {"night-0", "night-1", "night-2"}
    assert sum(one["inserted"] + one["duplicates"] for one in reports.values()) == 300


def reader(uri: str, **options: str) -> TaskStreamReader:
    return TaskStreamReader(IDS, SelectionOptions.of({"uri": uri, **options}))


def test_a_stream_stays_behind_by_its_lag(
    database_uri: str, make_queue: Any, microqueue_database: Any
) -> None:
    queue = make_queue()
    now = queue.now()
    microqueue_database.tasks.insert_one(task("fresh", 0, updated_at=now, finished_at=now))
    patient, hasty = reader(database_uri, lag="3600"), reader(database_uri, lag="0")
    start = patient.initialOffset()
    assert patient.latestOffset(start, ReadAllAvailable()) == start
    assert patient.partitions(start, start) == []
    assert to_mark(hasty.latestOffset(start, ReadAllAvailable())).id == "fresh"
    assert reader(database_uri).latestOffset(start, ReadAllAvailable()) == start  # 3 s.


def test_available_now_ends_at_the_changes_before_its_start(
    database_uri: str, microqueue_database: Any, make_queue: Any
) -> None:
    one = reader(database_uri, lag="0", max_rows="2")
    assert one.getDefaultReadLimit() == ReadMaxRows(2)
    microqueue_database.tasks.insert_many([task(n, n) for n in range(3)])
    one.prepareForTriggerAvailableNow()
    queue = make_queue()
    later = queue.now() + timedelta(seconds=1)  # More than the clocks on a busy machine differ.
    microqueue_database.tasks.insert_one(task("x", 0, updated_at=later, finished_at=later))
    while queue.now() <= later:
        time.sleep(0.005)
    first = one.latestOffset(one.initialOffset(), ReadMaxRows(2))
    second = one.latestOffset(first, ReadMaxRows(2))
    assert (to_mark(first).id, to_mark(second).id) == (1, 2)
    assert one.latestOffset(second, ReadAllAvailable()) == second


@pytest.mark.parametrize("task_id", [ObjectId(), "text", 5, 2**40, UUID(int=9)])
def test_an_offset_is_a_mark_in_json(task_id: Any) -> None:
    mark = ChangeCursor(AT + timedelta(milliseconds=5), task_id)
    again = to_mark(to_offset(mark))
    assert again == mark
    assert type(again.id) is type(task_id) or isinstance(again.id, int)


def test_parts_of_a_batch_are_the_whole(database_uri: str, microqueue_database: Any) -> None:
    tasks = microqueue_database.tasks
    tasks.insert_many([task(maker(n), n // 100) for n in range(700) for maker in (int, str)])
    one = reader(database_uri, lag="0", partitions="4", status="done")
    start, end = (
        to_offset(ChangeCursor(AT, 50)),
        to_offset(ChangeCursor(AT + timedelta(seconds=5), "xyz")),
    )
    parts = one.partitions(start, end)
    assert len(parts) == 4
    read = [row["id"] for part in parts for batch in one.read(part) for row in batch.to_pylist()]
    # At the first instant: integers from 51 on and all strings, which sort after numbers.
    expected = [*range(51, 600), *range(600)]
    assert sorted(read) == sorted(map(str, expected))


def test_options_select_what_a_stream_reads(database_uri: str, microqueue_database: Any) -> None:
    microqueue_database.tasks.insert_many(
        [
            task("done", 1),
            task("failed", 2, status="failed", queue="sms"),
            task("pending", 3, status="pending"),
        ]
    )

    def ids(**options: str) -> list[str]:
        one = reader(database_uri, lag="0", **options)
        whole = one.partitions(
            one.initialOffset(), to_offset(ChangeCursor.behind(AT + timedelta(days=1)))
        )
        return [
            row["id"] for part in whole for batch in one.read(part) for row in batch.to_pylist()
        ]

    assert sorted(ids()) == ["done", "failed"]
    assert ids(queue="mail") == ["done"]
    assert sorted(ids(status="pending,processing,done,failed")) == ["done", "failed", "pending"]
    assert ids(query='{"_id": "failed"}') == ["failed"]
    assert ids(since=(AT + timedelta(seconds=2)).isoformat()) == ["failed"]


@pytest.mark.parametrize(
    ("options", "argument", "value", "code", "naming"),
    [
        ({"until": AT.isoformat()}, "until", AT, "no_streams", []),
        ({"time": "finished_at"}, "time", "finished_at", "no_streams", ["updated_at"]),
        ({"max_rows": "0"}, "max_rows", "0", None, ["1"]),
        ({"lag": "-1"}, "lag", -1.0, None, []),
    ],
)
def test_invalid_stream_options_are_rejected(
    options: dict[str, str], argument: str, value: Any, code: str | None, naming: list[str]
) -> None:
    with rejecting(argument, value, code=code, naming=naming):
        reader("mongodb://localhost", **options)


def test_a_batch_read_rejects_options_of_streams(spark: SparkSession, database_uri: str) -> None:
    frame = spark.read.format("microqueue").options(uri=database_uri, max_rows=5).load()
    with crossing_spark(
        InvalidArgument, "only_streams", argument="max_rows", naming=["max_rows=5"]
    ):
        frame.count()


def test_reading_finished_tasks_uses_indexes(make_queue: Any) -> None:
    queue = make_queue()
    queue.ensure_indexes()
    core_of(queue).collections.tasks.insert_many([task(n, n) for n in range(500)])
    core_of(queue).collections.tasks.insert_many(
        [task(f"f{n}", n, status="failed") for n in range(500)]
    )
    changes = ChangeRange(
        ChangeCursor(AT + timedelta(seconds=490)), ChangeCursor.behind(AT + timedelta(seconds=600))
    )
    followed = ChangeQuery(queues=["mail"], statuses=["done", "failed"], query={})
    found = core_of(queue).collections.tasks.find(change_cursor.changed_between(followed, changes))
    stats = found.explain()["executionStats"]
    assert stats["nReturned"] == 20
    assert stats["totalDocsExamined"] <= 40
