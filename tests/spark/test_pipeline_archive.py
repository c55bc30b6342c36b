from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from bson import DatetimeMS, Decimal128, ObjectId, Regex
from pyspark.sql import SparkSession

from microqueue import InvalidArgument, MicroqueueError, QueueSettings
from microqueue.spark.pipelines import archive_direct, archive_purge, documents
from microqueue.spark.pipelines.archive import archive
from microqueue.spark.pipelines.archive_files import ArchiveDamaged
from microqueue.spark.pipelines.archive_log import ArchiveConflict, ArchiveLog, Entry
from microqueue.spark.pipelines.archive_reader import read_archive
from microqueue.spark.pipelines.compaction import compact
from microqueue.spark.pipelines.documents import CODEC, decode, to_batch
from microqueue.spark.pipelines.files import Storage
from microqueue.spark.pipelines.history import all_tasks
from microqueue.spark.pipelines.place import locate
from microqueue.spark.pipelines.steps import Step
from tests.spark.faults import FailsAfterWriting
from tests.spark.past import Past, encoded

HOUR = timedelta(hours=1)


def documents_of(spark: SparkSession, path: Path) -> list[dict[str, Any]]:
    return [decode(row["document"]) for row in read_archive(spark, path).collect()]


def test_archived_tasks_leave_mongodb_and_are_read_back_as_they_were(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, "a/b=c %", ago=2 * HOUR)
    past.enqueue(30)
    past.work(20)
    past.fail(["boom"] * 5)
    past.work(1)
    tasks = microqueue_database.tasks
    odd = {
        "_id": UUID("12345678-1234-5678-1234-567812345678"),
        "queue": "odd",
        "payload": {"deep": [Decimal128("1.10"), Regex("x"), {"id": ObjectId()}, None]},
        "status": "done",
        "priority": "high",  # Not what it should be.
        "created_at": past.begin,
        "updated_at": past.begin,
        "finished_at": past.begin,
        "attempts": 1,
    }
    past.queue.collections.tasks.insert_one(odd)
    finished = list(
        past.queue.collections.tasks.find(
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
        ("odd", 1),
    }
    (drifted,) = rows.where("queue = 'odd'").collect()
    assert drifted["priority"] is None
    assert (drifted["id"], drifted["id_type"]) == (str(odd["_id"]), "uuid")
    days = {path.name for path in tmp_path.glob("day=*")}
    assert days == {f"day={row['finished_at']:%Y-%m-%d}" for row in finished}


NAMES = ["mail", "a/b=c %", "q'\"#*:?\\{[]^", "grün 日本", "a.b-c_d+e&f ~"]


def test_rows_are_placed_where_spark_would_place_them(spark: SparkSession, tmp_path: Path) -> None:
    at = datetime(2026, 5, 1, 23, 59, 59, 999000, tzinfo=UTC)
    later = at + timedelta(milliseconds=1)
    tasks = [
        {"_id": f"{day} {name}", "queue": name, "finished_at": day}
        for name in NAMES
        for day in (later, at)
    ]
    rows = pa.Table.from_batches([to_batch(b"".join(map(encoded, tasks)))])
    placed = dict(archive_direct.by_directory(rows))
    days = [(name, day) for name in NAMES for day in ("2026-05-01", "2026-05-02")]
    frame = spark.createDataFrame(days, "queue string, day string").selectExpr("*", "1 as n")
    frame.write.partitionBy("day", "queue").parquet(str(tmp_path / "spark"))
    files = (tmp_path / "spark").glob("*/*/*.parquet")
    assert set(placed) == {str(file.parent.relative_to(tmp_path / "spark")) for file in files}
    assert placed["day=2026-05-01/queue=mail"]["id"].to_pylist() == [f"{at} mail"]
    assert placed["day=2026-05-02/queue=mail"]["id"].to_pylist() == [f"{later} mail"]


def test_where_python_sees_no_disk_spark_writes_the_same_archive(
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
    tasks = past.queue.collections.tasks
    # A date that Spark cannot hold: the task is kept under a day of its own. It is also so old
    # that the server would delete it by itself, between the two runs.
    tasks.drop_index("finished")
    tasks.update_one({"status": "done"}, {"$set": {"finished_at": DatetimeMS(-(2**60))}})
    finished = list(tasks.with_options(codec_options=CODEC).find({"status": {"$ne": "pending"}}))
    directly, through_spark = tmp_path / "directly", tmp_path / "spark"
    monkeypatch.setattr(
        archive_purge.Purge, "run", lambda *_: Entry(kind="purged", run="", at=past.begin)
    )
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


def test_files_of_an_attempt_that_failed_are_left_aside(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(5)
    past.work(5)
    monkeypatch.setattr(archive_direct, "PartWriter", FailsAfterWriting)
    summary = archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    assert (summary.archived, summary.deleted, summary.files) == (5, 5, 1)
    assert len(documents_of(spark, tmp_path)) == 5
    assert len(list(tmp_path.glob("**/*.parquet"))) == 1


def test_a_large_part_is_written_in_several_goes(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Past(microqueue_database, ago=2 * HOUR).enqueue(10)
    monkeypatch.setattr(archive_direct, "BYTES_HELD", 1)
    monkeypatch.setattr(documents, "BATCH_ROWS", 4)
    (part,) = documents.parts_of(spark, locate(database_uri))
    batches = list(archive_direct.PartWriter(str(tmp_path), "aside")(part))
    written = [row for batch in batches for row in batch.to_pylist()]
    assert [row["rows"] for row in written] == [4, 4, 2]
    read = archive_direct.FileReader(str(tmp_path))
    assert [row for one in written for batch in read(one["name"]) for row in batch.to_pylist()] == (
        written
    )


def test_a_dry_run_counts_and_leaves_everything_as_it_is(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(5)
    past.work(3)
    summary = archive(spark, tmp_path / "new", uri=database_uri, older_than=HOUR, dry_run=True)
    assert summary.found == {"mail/done": 3}
    assert not (tmp_path / "new").exists()
    assert microqueue_database.tasks.count_documents({}) == 5


def test_only_what_is_old_enough_and_asked_for_is_archived(
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


def test_a_task_replayed_while_it_is_archived_survives_and_counts_once(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(6)
    past.fail(["boom"] * 6)
    letters = [task.id for task in past.queue.dead_letters.list()]

    def meddle(step: Step) -> None:
        if step.name == "verify":  # Written, and not yet deleted.
            past.queue.dead_letters.replay(letters[0])  # It waits again.
            past.queue.dead_letters.replay(letters[1])
            again = past.queue.pop_many(2)
            past.wait(60)
            done = next(task for task in again if task.id == letters[1])
            past.queue.mark_failure(done, "boom again", code="E")  # As dead as before.

    summary = archive(spark, tmp_path, uri=database_uri, older_than=HOUR, tell=meddle)

    assert (summary.archived, summary.deleted, summary.superseded) == (6, 4, 2)
    assert {task["_id"] for task in microqueue_database.tasks.find()} == set(letters[:2])
    assert {one["_id"] for one in documents_of(spark, tmp_path)} == set(letters[2:])

    archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    kept = documents_of(spark, tmp_path)
    assert len(kept) == 5
    (letter,) = [one for one in kept if one["_id"] == letters[1]]
    assert letter["error"]["message"] == "boom again"


def test_a_later_task_of_the_same_id_is_another_one(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.queue.enqueue({"n": 1}, task_id="same")
    past.work(1)

    def meddle(step: Step) -> None:
        if step.name == "note":  # Deleted, and not yet noted.
            past.wait(1)
            past.queue.enqueue({"n": 2}, task_id="same")

    archive(spark, tmp_path, uri=database_uri, older_than=HOUR, tell=meddle)
    past.work(1)
    archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    assert sorted(one["payload"]["n"] for one in documents_of(spark, tmp_path)) == [1, 2]


def test_dead_letters_of_their_own_collection_are_archived_from_there(
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
        spark, tmp_path, uri=database_uri, older_than=HOUR, settings=settings, tell=meddle
    )
    assert (summary.archived, summary.deleted, summary.superseded) == (4, 3, 1)
    assert past.queue.dead_letters.stats().total == 0
    assert past.queue.get(replayed) is not None
    statuses = sorted(one["status"] for one in documents_of(spark, tmp_path))
    assert statuses == ["done", "failed", "failed"]


def test_a_damaged_file_is_noticed_before_anything_is_deleted(
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

    with pytest.raises(ArchiveDamaged, match="nothing was deleted"):
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR, tell=lose)
    assert microqueue_database.tasks.count_documents({}) == 7
    assert read_archive(spark, tmp_path).count() == 0
    archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    assert read_archive(spark, tmp_path).count() == 7


def test_the_later_of_two_runs_takes_over_and_nothing_is_there_twice(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(4)
    past.work(4)

    def overtake(step: Step) -> None:
        if step.name == "commit":
            archive(spark, tmp_path, uri=database_uri, older_than=HOUR)

    with pytest.raises(ArchiveConflict, match="taken over"):
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR, tell=overtake)
    assert len(documents_of(spark, tmp_path)) == 4
    assert microqueue_database.tasks.count_documents({}) == 0


def test_small_files_become_one_and_say_the_same(
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


def test_small_files_of_tasks_that_all_lived_on_become_none(
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
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR, compact=False, tell=meddle)
    summary = compact(spark, tmp_path)
    assert (summary.removed, summary.files) == (2, 0)
    assert read_archive(spark, tmp_path).count() == 0
    assert past.queue.stats().pending == 1


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
    monkeypatch.setattr(archive_purge.Purge, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    assert read_archive(spark, tmp_path).count() == 4
    assert all_tasks(spark, live=locate(database_uri), archive=tmp_path).count() == 5


def test_what_was_begun_in_one_database_is_not_finished_in_another(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    log = ArchiveLog(Storage(spark, tmp_path))
    log.commit(Entry(kind="archived", run="r", at=datetime.now(UTC), place="shop.tasks#1"))
    with pytest.raises(MicroqueueError, match=r"shop\.tasks#1"):
        archive(spark, tmp_path, uri=database_uri)


def test_a_number_in_the_log_can_be_taken_once(spark: SparkSession, tmp_path: Path) -> None:
    storage = Storage(spark, tmp_path)
    one, other = ArchiveLog(storage), ArchiveLog(storage)
    one.commit(Entry(kind="begun", run="one", at=datetime.now(UTC)))
    with pytest.raises(ArchiveConflict):
        other.commit(Entry(kind="begun", run="other", at=datetime.now(UTC)))
    (entry,) = (tmp_path / "_log").glob("*.json")
    assert json.loads(entry.read_text())["run"] == "one"
    assert not list((tmp_path / "_log").glob("*.draft"))


@pytest.mark.parametrize("statuses", [["pending"], ["done", "processing"], []])
def test_only_finished_tasks_can_be_archived(
    spark: SparkSession, tmp_path: Path, database_uri: str, statuses: list[str]
) -> None:
    with pytest.raises(InvalidArgument, match="statuses"):
        archive(spark, tmp_path, uri=database_uri, statuses=statuses)
