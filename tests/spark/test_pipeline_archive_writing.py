"""Writing and verifying the files of an archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bson import DatetimeMS
from pyspark.sql import SparkSession

from microqueue.core import core_of
from microqueue.spark import whole_tasks
from microqueue.spark.archive import parquet, purge
from microqueue.spark.archive.job import archive
from microqueue.spark.archive.log import Entry
from microqueue.spark.archive.parquet import ArchiveDamaged
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.location import locate
from microqueue.spark.progress import Step
from microqueue.spark.storage import Storage
from microqueue.spark.whole_tasks import CODEC
from tests.rejection import raising
from tests.spark.archived import HOUR, documents_of
from tests.spark.faults import FailsAfterWriting
from tests.spark.past import Past, encoded


def test_without_a_disk_spark_writes_the_same_archive(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    past = Past(microqueue_database, "a/b=c %", ago=2 * HOUR)
    past.enqueue(9)
    past.work(6)
    past.fail(["boom"] * 2)
    tasks = core_of(past.queue).collections.tasks
    # A date that Spark cannot hold: the task is stored under a separate day.
    tasks.update_one({"status": "done"}, {"$set": {"finished_at": DatetimeMS(-(2**60))}})
    finished = list(tasks.with_options(codec_options=CODEC).find({"status": {"$ne": "pending"}}))
    directly, through_spark = tmp_path / "directly", tmp_path / "spark"
    monkeypatch.setattr(purge.Purge, "run", lambda *_: Entry(kind="purged", run="", at=past.begin))
    archive(spark, directly, uri=database_uri, older_than=HOUR, compact=False)
    with monkeypatch.context() as patched:
        patched.setattr(Storage, "disk", None)
        # A log that the file system's own rename keeps: no link on a disk.
        archive(spark, through_spark, uri=database_uri, older_than=HOUR, compact=False)
    one, other = (read_archive(spark, path).orderBy("id") for path in (directly, through_spark))
    assert one.schema == other.schema
    assert one.collect() == other.collect()
    assert one.filter("finished_at is null").count() == 1
    assert sorted(bytes(row["document"]) for row in other.collect()) == sorted(
        map(encoded, finished)
    )


def test_files_of_a_failed_attempt_are_not_committed(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(5)
    past.work(5)
    monkeypatch.setattr(parquet, "PartWriter", FailsAfterWriting)
    summary = archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    assert (summary.archived, summary.deleted, summary.files) == (5, 5, 1)
    assert len(documents_of(spark, tmp_path)) == 5
    assert len(list(tmp_path.glob("**/*.parquet"))) == 1


def test_a_large_part_is_written_in_several_files(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Past(microqueue_database, ago=2 * HOUR).enqueue(10)
    monkeypatch.setattr(parquet, "BUFFER_BYTES", 1)
    monkeypatch.setattr(whole_tasks, "BATCH_ROWS", 4)
    (part,) = whole_tasks.parts_of(spark, locate(database_uri))
    batches = list(parquet.PartWriter(str(tmp_path), "aside")(part))
    written = [row for batch in batches for row in batch.to_pylist()]
    assert [row["rows"] for row in written] == [4, 4, 2]
    read = parquet.FileReader(str(tmp_path))
    assert [row for one in written for batch in read(one["name"]) for row in batch.to_pylist()] == (
        written
    )


def test_a_damaged_file_is_detected_before_anything_is_deleted(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(4)
    past.work(4)
    other = Past(microqueue_database, "other", ago=2 * HOUR)
    other.enqueue(3)
    other.work(3)

    def lose(step: Step) -> None:
        if step.name == "verify":
            (file,) = tmp_path.glob("day=*/queue=other/*.parquet")
            (replacement,) = tmp_path.glob("day=*/queue=mail/*.parquet")
            file.write_bytes(replacement.read_bytes())
            for checksum in tmp_path.glob("day=*/queue=other/.*.crc"):
                checksum.unlink()

    with raising(ArchiveDamaged, "files_differ", naming=["/queue=other/"]) as caught:
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR, progress=lose)
    assert caught.value.path is not None
    assert caught.value.path in str(caught.value)
    assert microqueue_database.tasks.count_documents({}) == 7
    assert read_archive(spark, tmp_path).count() == 0
    archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    assert read_archive(spark, tmp_path).count() == 7
