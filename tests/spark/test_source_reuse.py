"""Each use of one DataFrame returns its own rows.

Spark keeps filters that were pushed into a Python source with the relation, and applies those
of one use to another. Options cannot be mixed up, whatever is made of the frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as is usual)
from pyspark.sql.datasource import DataSourceReader

from microqueue import Queue
from microqueue.embedded import EmbeddedServer
from microqueue.spark import read_tasks
from microqueue.spark.read.batch import TaskReader

DONE, FAILED, PENDING = 3, 2, 5
TOTAL = DONE + FAILED + PENDING


@pytest.fixture(scope="module")
def shared_uri(microqueue_server: EmbeddedServer, microqueue_client: Any) -> Any:
    """One small queue for all tests, which only read it."""
    database = microqueue_client["spark_reuse"]
    queue: Queue[Any] = Queue(database)
    queue.enqueue_many([{"n": n} for n in range(TOTAL)])
    queue.mark_done_many(queue.pop_many(DONE))
    for task in queue.pop_many(FAILED):
        queue.mark_failure(task, "no", code="x")
    yield microqueue_server.uri.replace("/?", "/spark_reuse?")
    microqueue_client.drop_database("spark_reuse")


@pytest.fixture
def frame(spark: SparkSession, shared_uri: str) -> DataFrame:
    return read_tasks(spark, uri=shared_uri, columns="id,status,attempts", partitions=2)


def done(frame: DataFrame) -> DataFrame:
    return frame.where("status = 'done'")


def failed(frame: DataFrame) -> DataFrame:
    return frame.where("status = 'failed'")


def used(first: DataFrame, *, then: DataFrame) -> DataFrame:
    first.count()
    return then


def as_view(frame: DataFrame, sql: str) -> DataFrame:
    frame.createOrReplaceTempView("tasks_view")
    return frame.sparkSession.sql(sql)


MATRIX: dict[str, tuple[Callable[[DataFrame], DataFrame], int]] = {
    "bare after a filter": (lambda one: used(done(one), then=one), TOTAL),
    "one filter after another": (lambda one: used(done(one), then=failed(one)), FAILED),
    "union of two filters": (lambda one: done(one).union(failed(one)), DONE + FAILED),
    "union with itself": (lambda one: one.union(one), 2 * TOTAL),
    "union of a filter and all": (lambda one: done(one).union(one), DONE + TOTAL),
    "self join": (lambda one: done(one).alias("a").join(one.alias("b"), "id"), DONE),
    "join of two filters": (lambda one: done(one).join(failed(one), "id"), 0),
    "left join of all with a filter": (
        lambda one: one.alias("a").join(done(one).select("id", F.lit(1)), "id", "left"),
        TOTAL,
    ),
    "anti join": (lambda one: one.join(failed(one), "id", "left_anti"), TOTAL - FAILED),
    "subtraction": (lambda one: one.subtract(done(one)), TOTAL - DONE),
    "view filtered twice": (
        lambda one: as_view(
            one,
            "select id from tasks_view where status = 'done' union all "
            "select id from tasks_view where status = 'failed' union all "
            "select id from tasks_view",
        ),
        DONE + FAILED + TOTAL,
    ),
    "subquery over the same view": (
        lambda one: as_view(
            one,
            "select id from tasks_view where id not in "
            "(select id from tasks_view where status = 'done')",
        ),
        TOTAL - DONE,
    ),
    "filter on a chosen column": (
        lambda one: one.select("status").where("status = 'done'").union(one.select("status")),
        DONE + TOTAL,
    ),
}


@pytest.mark.parametrize("name", MATRIX)
def test_each_use_of_a_frame_has_its_own_rows(frame: DataFrame, name: str) -> None:
    make, expected = MATRIX[name]
    assert make(frame).count() == expected


def test_a_filter_over_an_option_narrows_it(spark: SparkSession, shared_uri: str) -> None:
    two = read_tasks(spark, uri=shared_uri, status="done,failed", columns="id,status")
    assert (done(two).count(), two.count()) == (DONE, DONE + FAILED)


def test_frames_of_different_options_do_not_mix(spark: SparkSession, shared_uri: str) -> None:
    one = read_tasks(spark, uri=shared_uri, status="done", columns="id")
    other = read_tasks(spark, uri=shared_uri, status="failed", columns="id")
    assert one.union(other).count() == DONE + FAILED
    assert one.join(other, "id").count() == 0


def test_a_frame_reads_tasks_that_were_added_after_it_was_created(
    spark: SparkSession, database_uri: str, make_queue: Any
) -> None:
    queue = make_queue()
    frame = read_tasks(spark, uri=database_uri, columns="id")
    for expected in (1, 2):
        queue.enqueue({})
        assert frame.count() == expected


def test_filters_are_not_pushed_into_the_source() -> None:
    assert TaskReader.pushFilters is DataSourceReader.pushFilters
