"""Writes through Spark, with its own retries, reruns and commits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as is usual)

from microqueue import InvalidArgument, Queue
from microqueue.core import core_of
from microqueue.spark import read_tasks, write_tasks
from tests.rejection import rejecting
from tests.spark.rejection import crossing_spark

TOTAL = 1_000
FAILS_AT_FIRST = "tests.spark.faults:FailsAtFirst"
FAILS = "tests.spark.faults:Fails"


def orders(spark: SparkSession, total: int = TOTAL) -> DataFrame:
    frame = spark.range(0, total, numPartitions=2)
    return frame.select(F.col("id").alias("order"), F.lit("x").alias("text"))


def stored(queue: Queue[Any]) -> list[int]:
    return sorted(task["payload"]["order"] for task in core_of(queue).collections.tasks.find())


def test_written_rows_can_be_read(spark: SparkSession, database_uri: str, make_queue: Any) -> None:
    frame = orders(spark, 10)
    report = write_tasks(frame, uri=database_uri, queue="orders", key="order", priority=3)
    assert (report.inserted, report.duplicates, report.released) == (10, 0, None)
    again = read_tasks(
        spark, uri=database_uri, columns="priority,drifted", payload="order bigint, text string"
    )
    rows = again.selectExpr("priority", "drifted", "payload.*").exceptAll(
        frame.selectExpr("3 as priority", "0 as drifted", "*")
    )
    assert (again.count(), rows.count()) == (10, 0)
    queue = make_queue("orders")
    assert core_of(queue).collections.loads.count_documents({}) == 0
    assert len(queue.pop_many(20)) == 10


def test_retried_parts_and_a_rerun_return_exact_counts(
    spark: SparkSession, database_uri: str, make_queue: Any
) -> None:
    options: dict[str, Any] = {
        "uri": database_uri,
        "queue": "orders",
        "key": "order",
        "batch_rows": 100,
    }
    report = write_tasks(orders(spark), model=FAILS_AT_FIRST, **options)
    queue = make_queue("orders")
    assert stored(queue) == list(range(TOTAL))
    assert (report.inserted, report.duplicates) == (TOTAL, 0)
    rerun = write_tasks(orders(spark, TOTAL + 100), **options)
    assert (rerun.inserted, rerun.duplicates) == (100, TOTAL)
    assert stored(queue) == list(range(TOTAL + 100))


@contextmanager
def refusing(queue: Queue[Any]) -> Iterator[None]:
    """Make the server reject one row of each part until the rest of its chunk is stored."""
    tasks = core_of(queue).collections.tasks
    database = tasks.database
    database.command("collMod", tasks.name, validator={"payload.order": {"$nin": [150, 850]}})

    def relent() -> None:
        beside = {"payload.order": {"$in": [151, 851]}}
        while tasks.count_documents(beside) < 2 and not ended.wait(0.02):
            pass
        database.command("collMod", tasks.name, validator={})

    ended = threading.Event()
    with ThreadPoolExecutor() as threads:
        relenting = threads.submit(relent)
        try:
            yield
            assert relenting.done(), "nothing was refused"
        finally:
            ended.set()


@pytest.mark.parametrize("hold", [False, True])
def test_rows_of_plain_columns_are_written_once_too(
    spark: SparkSession, database_uri: str, make_queue: Any, hold: bool
) -> None:
    queue = make_queue("orders")
    queue.ensure_indexes()
    with refusing(queue):
        report = write_tasks(
            orders(spark),
            uri=database_uri,
            queue="orders",
            key="order",
            batch_rows=100,
            hold=hold,
        )
    assert stored(queue) == list(range(TOTAL))
    assert (report.inserted, report.duplicates) == (TOTAL, 0)
    assert queue.stats().ready == TOTAL


def test_without_keys_a_repeated_part_is_written_twice(
    spark: SparkSession, database_uri: str, make_queue: Any
) -> None:
    options: dict[str, Any] = {"uri": database_uri, "queue": "orders", "batch_rows": 100}
    with rejecting("key", (), code="no_key", naming=["keyless=true"]):
        write_tasks(orders(spark), **options)
    write_tasks(orders(spark), keyless=True, model=FAILS_AT_FIRST, **options)
    assert len(stored(make_queue("orders"))) == TOTAL + 400  # One chunk and three chunks.


def test_a_job_that_fails_is_finished_by_running_it_again(
    spark: SparkSession, database_uri: str, make_queue: Any
) -> None:
    writing = orders(spark).write.format("microqueue").mode("append")
    writing = writing.options(uri=database_uri, queue="orders", key="order", batch_rows="100")
    with pytest.raises(Exception, match="every attempt dies here"):
        writing.option("model", FAILS).save()
    queue = make_queue("orders")
    assert 0 < len(stored(queue)) < TOTAL
    writing.option("model", "tests.spark.faults:Order").save()
    assert stored(queue) == list(range(TOTAL))


def test_workers_see_none_of_a_held_job_that_fails_and_all_of_one_that_succeeds(
    spark: SparkSession, database_uri: str, make_queue: Any
) -> None:
    queue = make_queue("orders")
    options: dict[str, Any] = {
        "uri": database_uri,
        "queue": "orders",
        "key": "order",
        "batch_rows": 100,
    }
    with pytest.raises(Exception, match="every attempt dies here"):
        write_tasks(orders(spark), hold=True, model=FAILS, **options)
    # A part that Spark stops late may leave held tasks, which no worker sees.
    assert (queue.stats().ready, queue.pop()) == (0, None)
    report = write_tasks(orders(spark), hold=True, **options)
    assert (report.inserted + report.duplicates, report.released) == (TOTAL, TOTAL)
    assert len(queue.pop_many(2 * TOTAL)) == TOTAL


@pytest.mark.parametrize(
    ("mode", "options", "code", "argument", "named"),
    [
        ("overwrite", {"key": "order"}, "append_only", "mode", "mode='overwrite'"),
        ("append", {}, "no_key", "key", "keyless=true"),
        ("append", {"key": "colour"}, "unknown_column", "key", "key='colour'"),
    ],
)
def test_invalid_writes_are_rejected_before_anything_is_written(
    spark: SparkSession,
    database_uri: str,
    microqueue_database: Any,
    mode: str,
    options: dict[str, str],
    code: str,
    argument: str,
    named: str,
) -> None:
    writing = orders(spark).write.format("microqueue").mode(mode)
    with crossing_spark(InvalidArgument, code, argument=argument, naming=[named]):
        writing.options(uri=database_uri, queue="orders", **options).save()
    assert microqueue_database.list_collection_names() == []
