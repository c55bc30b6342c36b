"""Merging the small files of an archive."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from microqueue.spark.archive.job import archive, compact
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.progress import Step
from tests.spark.archived import HOUR, documents_of
from tests.spark.past import Past, encoded


def test_small_files_are_merged_into_one_with_the_same_rows(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=timedelta(hours=30))
    for _ in range(3):
        past.enqueue(3)
        past.work(3)
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR, compact=False)
    before = sorted(map(encoded, documents_of(spark, tmp_path)))
    assert len(list(tmp_path.glob("day=*/queue=mail/*.parquet"))) == 3
    summary = compact(spark, tmp_path)
    assert (summary.removed, summary.files) == (3, 1)
    assert len(list(tmp_path.glob("day=*/queue=mail/*.parquet"))) == 1
    assert sorted(map(encoded, documents_of(spark, tmp_path))) == before
    assert compact(spark, tmp_path).removed == 0


def test_small_files_with_only_superseded_tasks_are_removed(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(1)

    def meddle(step: Step) -> None:
        if step.name == "verify":
            past.wait(1)
            past.queue.dead_letters.replay([letter.id for letter in past.queue.dead_letters.list()])

    for _ in range(2):
        past.fail(["boom"])
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR, compact=False, progress=meddle)
    summary = compact(spark, tmp_path)
    assert (summary.removed, summary.files) == (2, 0)
    assert read_archive(spark, tmp_path).count() == 0
    assert past.queue.stats().pending == 1
