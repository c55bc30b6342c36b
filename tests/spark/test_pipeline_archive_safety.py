from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pyspark.sql import SparkSession

from microqueue import PipelineError, QueueSettings, Sweeper
from microqueue.core import core_of
from microqueue.spark import storage
from microqueue.spark.archive import parquet
from microqueue.spark.archive.job import archive, compact
from microqueue.spark.archive.log import ArchiveLog, Entry
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.progress import Step
from microqueue.spark.storage import Storage
from tests.rejection import raising
from tests.spark.faults import WritesElsewhere
from tests.spark.past import Past

HOUR = timedelta(hours=1)


def test_a_run_that_stalls_before_it_sweeps_keeps_the_files_of_a_later_one(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(4)
    past.work(4)
    delete_leftovers = parquet.delete_leftovers

    def stall(storage: Storage, state: Any) -> int:
        monkeypatch.setattr(parquet, "delete_leftovers", delete_leftovers)
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
        return delete_leftovers(storage, state)

    monkeypatch.setattr(parquet, "delete_leftovers", stall)
    archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    assert read_archive(spark, tmp_path).count() == 4
    assert microqueue_database.tasks.count_documents({}) == 0


def test_only_files_of_killed_runs_are_swept(spark: SparkSession, tmp_path: Path) -> None:
    storage = Storage(spark, tmp_path)
    log = ArchiveLog(storage)
    log.commit(Entry(kind="begun", run="killed", at=datetime.now(UTC)))
    ours = [
        "day=1/queue=q/killed-00000.parquet",
        "_staging/killed/day=1/x",
        "_staging/killed-merged/x",
    ]
    others = ["notes.txt", "day=1/queue=q/part-00000.parquet", "day=1/queue=q/later-00000.parquet"]
    others += ["_staging/later/day=1/x"]
    for name in [*ours, *others]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    parquet.delete_leftovers(storage, log.state)
    left = {info.name for info in storage.list() if not info.name.startswith("_log/")}
    assert left == set(others)


def test_an_archive_without_its_log_is_rejected_and_unchanged(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(1)
    past.work(1)
    (tmp_path / "day=2026-01-01").mkdir()
    foreign = tmp_path / "day=2026-01-01" / "x.parquet"
    foreign.write_text("mine")
    naming = ["day=2026-01-01/x.parquet", "_log"]
    with raising(PipelineError, "no_log", path=Storage(spark, tmp_path).root, naming=naming):
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    assert foreign.read_text() == "mine"
    assert not (tmp_path / "_log").exists()
    assert microqueue_database.tasks.count_documents({}) == 1


def test_files_and_directories_are_flushed_before_the_log_lists_them(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    past = Past(microqueue_database, ago=timedelta(hours=30))
    synced: set[Path] = set()
    unsafe: list[str] = []
    sync, commit = storage.sync, ArchiveLog.commit

    def note(path: Path) -> None:
        synced.add(path)
        sync(path)

    def check(log: ArchiveLog, entry: Entry) -> None:
        for file in entry.files:
            place = tmp_path / file.name
            ways = {place, *place.parents[:4]}  # The queue's, the day's, the root, and above.
            unsafe.extend(map(str, ways - synced))
        synced.clear()
        commit(log, entry)

    monkeypatch.setattr(storage, "sync", note)
    monkeypatch.setattr(ArchiveLog, "commit", check)
    for _ in range(2):
        past.enqueue(2)
        past.work(2)
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR, compact=False)
    assert compact(spark, tmp_path).removed == 2
    assert not unsafe


def test_a_dead_letter_whose_replay_is_rejected_is_archived_by_the_next_run(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    settings = QueueSettings(retention=None, dead_letters="collection")
    past = Past(microqueue_database, ago=2 * HOUR, settings=settings)
    past.queue.enqueue({}, task_id="letter", dedupe_key="key")
    past.enqueue(1)
    past.fail(["boom"] * 2)

    def meddle(step: Step) -> None:
        if step.name == "verify":
            past.queue.enqueue({}, dedupe_key="key")
            assert past.queue.dead_letters.replay("letter").replayed == 0

    first = archive(
        spark, tmp_path, uri=database_uri, older_than=HOUR, settings=settings, progress=meddle
    )
    assert (first.archived, first.deleted, first.superseded) == (2, 1, 1)
    Sweeper(past.queue).move_dead_letters()
    again = archive(
        spark, tmp_path, uri=database_uri, older_than=HOUR, settings=settings, compact=False
    )
    assert (again.archived, again.deleted, again.superseded) == (1, 1, 0)
    assert read_archive(spark, tmp_path).where("id = 'letter'").count() == 1
    assert compact(spark, tmp_path).removed == 2
    assert read_archive(spark, tmp_path).where("id = 'letter'").count() == 1
    assert read_archive(spark, tmp_path).count() == 2


def test_a_superseded_task_hides_no_task_whose_id_has_the_same_text(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.queue.enqueue({}, task_id=5)
    past.queue.enqueue({}, task_id="5")
    past.fail(["boom"] * 2)  # At the same instant.

    def meddle(step: Step) -> None:
        if step.name == "verify":
            past.queue.dead_letters.replay(5)

    archive(spark, tmp_path, uri=database_uri, older_than=HOUR, progress=meddle)
    (row,) = read_archive(spark, tmp_path).collect()
    assert (row["id"], row["id_type"]) == ("5", "string")


def test_a_disk_that_machines_do_not_share_is_rejected(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(2)
    past.work(2)
    monkeypatch.setattr(parquet, "PartWriter", WritesElsewhere)
    with raising(PipelineError, "disk_not_shared", path=Storage(spark, tmp_path).root):
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    assert microqueue_database.tasks.count_documents({}) == 2


def test_a_superseded_task_with_a_legacy_uuid_is_recognized(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    options = CodecOptions[Any](uuid_representation=UuidRepresentation.PYTHON_LEGACY)
    past = Past(microqueue_database.with_options(codec_options=options), ago=2 * HOUR)
    stays, goes = UUID(int=1), UUID(int=2)
    for task_id in (stays, goes):
        past.queue.enqueue({}, task_id=task_id)
    past.fail(["boom"] * 2)

    def meddle(step: Step) -> None:
        if step.name == "verify":
            past.queue.dead_letters.replay(stays)

    uri = f"{database_uri}&uuidRepresentation=pythonLegacy"
    summary = archive(spark, tmp_path, uri=uri, older_than=HOUR, progress=meddle)
    assert (summary.archived, summary.deleted, summary.superseded) == (2, 1, 1)
    (row,) = read_archive(spark, tmp_path).collect()
    assert (row["id"], row["id_type"]) == (str(goes), "uuid")
    assert past.queue.get(stays) is not None


def kept_by(dead_letters: Any) -> QueueSettings:
    return QueueSettings(retention=None, dead_letters=dead_letters)


def archive_until_purge(spark: SparkSession, path: Path, uri: str, settings: QueueSettings) -> None:
    """Archive, and die before anything is deleted."""

    def die(step: Step) -> None:
        if step.name == "purge":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        archive(spark, path, uri=uri, older_than=HOUR, settings=settings, progress=die)


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize(("first", "then"), [("collection", "status"), ("status", "collection")])
def test_an_interrupted_archive_is_finished_where_it_found_dead_letters(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    first: str,
    then: str,
    noted: bool,
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR, settings=kept_by(first))
    past.enqueue(2)
    past.work(1)
    past.fail(["boom"])
    archive_until_purge(spark, tmp_path, database_uri, kept_by(first))
    if not noted:  # As entries were written once.
        for file in (tmp_path / "_log").glob("*.json"):
            entry = json.loads(file.read_text())
            entry.pop("dead_letters", None)
            file.write_text(json.dumps(entry))
    options: dict[str, Any] = {"uri": database_uri, "older_than": HOUR}

    again = archive(spark, tmp_path, settings=kept_by(then), **options)
    assert (again.recovered, again.archived) == (2, 0)
    assert microqueue_database.tasks.count_documents({}) == 0
    assert microqueue_database.tasks_dlq.count_documents({"status": "failed"}) == 0
    assert archive(spark, tmp_path, settings=kept_by(first), **options).archived == 0
    assert read_archive(spark, tmp_path).count() == 2


def test_a_dead_letter_that_moved_after_an_interrupted_archive_is_archived_once(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=2 * HOUR)
    past.enqueue(1)
    past.fail(["boom"])
    archive_until_purge(spark, tmp_path, database_uri, kept_by("status"))
    core_of(past.queue).settings = kept_by("collection")
    Sweeper(past.queue).move_dead_letters()
    for settings in (kept_by("status"), kept_by("collection")):
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR, settings=settings)
    assert read_archive(spark, tmp_path).count() == 1
    assert microqueue_database.tasks_dlq.count_documents({"status": "failed"}) == 0
