from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from bson.binary import Binary, UuidRepresentation
from bson.codec_options import CodecOptions
from pyspark.sql import SparkSession

from microqueue import PipelineError, Queue, QueueSettings, RunConflict
from microqueue.core import core_of
from microqueue.operations import runs as run_notes
from microqueue.spark.archive.job import archive
from microqueue.spark.archive.purge import Purge
from microqueue.spark.replay import job as pipeline
from microqueue.spark.replay.job import replay
from tests.rejection import raising, rejecting
from tests.spark.past import Past

HOUR = timedelta(hours=1)


@pytest.fixture
def past(microqueue_database: Any) -> Past:
    return Past(microqueue_database, ago=3 * HOUR)


def filled(spark: SparkSession, past: Past, uri: str, path: Path) -> None:
    """Four archived dead letters, one archived done task, and three dead letters in MongoDB."""
    past.enqueue(5, priority=7, max_attempts=4, headers={"trace": "t"}, name="pay")
    past.fail(["boom"] * 4, code="E")
    past.work(1)
    archive(spark, path, uri=uri, older_than=2 * HOUR)
    past.wait(90 * 60)
    past.enqueue(3)
    past.fail(["boom"] * 3, code="E")


def test_selected_tasks_are_replayed_once_per_run_spread_over_the_period(
    spark: SparkSession, past: Past, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    filled(spark, past, database_uri, tmp_path)
    options: dict[str, Any] = {
        "where": "error.code = 'E' and get_json_object(payload, '$.n') < 3",
        "archive": tmp_path,
        "uri": database_uri,
        "spread": timedelta(minutes=30),
        "to": "again",
        "run": "monday",
    }
    looked = replay(spark, **options, dry_run=True)
    assert (looked.matched, looked.archived, looked.letters) == (6, 3, 3)
    assert microqueue_database.tasks.count_documents({"queue": "again"}) == 0

    sent = replay(spark, **options)
    assert (sent.archived, sent.letters, sent.skipped) == (3, 3, 0)
    tasks = list(core_of(past.queue).collections.tasks.find({"queue": "again"}))
    assert {task["status"] for task in tasks} == {"pending"}
    etas = [task["next_retry_at"] for task in tasks]
    assert len(set(etas)) == 6
    assert all(sent.begun_at <= eta <= sent.until + timedelta(seconds=1) for eta in etas)
    copies = [task for task in tasks if "headers" in task]
    assert len(copies) == 3
    for copy in copies:
        assert (copy["priority"], copy["max_attempts"], copy["attempts"]) == (7, 4, 0)
        assert copy["name"] == "pay"
        assert copy["headers"]["trace"] == "t"
        assert copy["headers"]["replay_run"] == "monday"

    again = replay(spark, **options)
    assert again.repeated
    assert (again.archived, again.letters) == (3, 3)
    assert microqueue_database.tasks.count_documents({"queue": "again"}) == 6
    differ: dict[str, Any] = {"before": {"to": "again"}, "given": {"to": "elsewhere"}}
    with rejecting("run", "replay:monday", code="other_options", kind=RunConflict, **differ):
        replay(spark, **{**options, "to": "elsewhere"})


def archived_with_errors(
    spark: SparkSession, past: Past, database: Any, uri: str, path: Path
) -> None:
    """Three archived done tasks and two archived dead letters, each with an error of an attempt.

    As versions before this one archived them: a task that was done kept its last error.
    """
    past.enqueue(5)
    past.retry(5, delay=0)
    past.fail(["busy"] * 2, code="Busy")
    past.work(3)
    error = {"message": "busy", "code": "Busy", "at": past.begin}
    database.tasks.update_many({"status": "done"}, {"$set": {"error": error}})
    assert archive(spark, path, uri=uri, older_than=HOUR).archived == 5


def test_archived_tasks_that_are_done_are_replayed_only_on_request(
    spark: SparkSession, past: Past, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    archived_with_errors(spark, past, microqueue_database, database_uri, tmp_path)
    options: dict[str, Any] = {"where": "error.code = 'Busy'", "archive": tmp_path}
    options |= {"uri": database_uri, "run": "r"}
    looked = replay(spark, **options, dry_run=True)
    assert (looked.matched, looked.archived, looked.done_left_out) == (2, 2, 3)
    assert looked.matched_by_status == {"failed": 2}
    whole = replay(spark, **options, include_done=True, dry_run=True)
    assert (whole.matched, whole.archived, whole.done_left_out) == (5, 5, 0)
    assert whole.matched_by_status == {"done": 3, "failed": 2}

    sent = replay(spark, **options)
    assert (sent.matched, sent.archived, sent.letters) == (2, 2, 0)
    assert microqueue_database.tasks.count_documents({}) == 2
    differ: dict[str, Any] = {"before": {"include_done": None}, "given": {"include_done": True}}
    with rejecting("run", "replay:r", code="other_options", kind=RunConflict, **differ):
        replay(spark, **options, include_done=True)
    more = replay(spark, **{**options, "run": "all"}, include_done=True)
    assert (more.matched, more.archived) == (5, 5)
    assert microqueue_database.tasks.count_documents({"status": "pending"}) == 7


def test_a_condition_that_only_done_tasks_meet_replays_nothing_and_counts_them(
    spark: SparkSession, past: Past, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past.enqueue(2)
    past.retry(2, delay=0)
    past.work(2)
    archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    failed_once = "exists(history, one -> one.error.code = 'Busy')"
    options: dict[str, Any] = {"archive": tmp_path, "uri": database_uri}
    sent = replay(spark, where=failed_once, **options)
    assert (sent.matched, sent.done_left_out) == (0, 2)
    assert microqueue_database.tasks.count_documents({}) == 0
    # The archive has them as they were: without an error.
    assert replay(spark, where="error is not null", **options, include_done=True).matched == 0
    assert replay(spark, where=failed_once, **options, include_done=True).archived == 2


def test_done_tasks_are_replayed_only_from_an_archive(
    spark: SparkSession, database_uri: str
) -> None:
    with rejecting("include_done", True, code="no_source", naming=["--archive"]):
        replay(spark, where="true", uri=database_uri, include_done=True)


def test_an_interrupted_run_is_resumed_without_repeating_anything(
    spark: SparkSession,
    past: Past,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filled(spark, past, database_uri, tmp_path)
    options: dict[str, Any] = {"where": "status = 'failed'", "archive": tmp_path}
    options |= {"uri": database_uri, "run": "r"}
    with monkeypatch.context() as dying:
        dying.setattr(pipeline, "finish_run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            replay(spark, **options)
    assert microqueue_database.tasks.count_documents({"status": "pending"}) == 7
    # Then two copies are done and archived, and a dead letter fails again.
    now = Past(microqueue_database, ago=timedelta(minutes=1))
    tasks = now.queue.pop_many(7)
    copies = [task for task in tasks if task.headers]
    letters = [task for task in tasks if not task.headers]
    now.queue.mark_done_many(copies[:2])
    now.queue.mark_failure(letters[0], "boom", code="E")
    archive(spark, tmp_path, uri=database_uri, older_than=0, statuses=["done"])
    assert microqueue_database.tasks.count_documents({}) == 5

    sent = replay(spark, **options)
    assert not sent.repeated
    assert microqueue_database.tasks.count_documents({}) == 5
    assert microqueue_database.tasks.count_documents({"status": "failed"}) == 1


@pytest.mark.parametrize("kept", [True, False])
def test_a_resumed_run_does_not_replay_again_what_failed_again(
    spark: SparkSession,
    past: Past,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: bool,
) -> None:
    past.enqueue(1)
    past.fail(["boom"])
    archive(spark, tmp_path, uri=database_uri, older_than=2 * HOUR)
    past.wait(90 * 60)
    past.enqueue(1)
    past.fail(["boom"])
    options: dict[str, Any] = {"where": "status = 'failed'", "archive": tmp_path}
    options |= {"uri": database_uri, "run": "r"}
    with monkeypatch.context() as dying:
        dying.setattr(pipeline, "finish_run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            replay(spark, **options)
    Past(microqueue_database, ago=timedelta(minutes=1)).fail(["boom"] * 2)
    if kept:
        archive(spark, tmp_path, uri=database_uri, older_than=0)
    before = list(microqueue_database.tasks.find())
    assert len(before) == (0 if kept else 2)

    sent = replay(spark, **options)
    assert (sent.archived, sent.letters, sent.skipped) == ((2, 0, 0) if kept else (1, 1, 0))
    assert list(microqueue_database.tasks.find()) == before


def test_a_dead_letter_archived_and_not_yet_deleted_is_replayed_once(
    spark: SparkSession,
    past: Past,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    past.enqueue(3)
    past.fail(["boom"] * 3)
    with monkeypatch.context() as dying:
        dying.setattr(Purge, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    past.queue.dead_letters.replay(past.queue.dead_letters.list()[0].id)
    sent = replay(spark, where="status = 'failed'", archive=tmp_path, uri=database_uri)
    assert (sent.archived, sent.letters) == (0, 2)
    assert microqueue_database.tasks.count_documents({"status": "pending"}) == 3


def test_a_dead_letter_whose_dedupe_key_is_taken_is_skipped(
    spark: SparkSession, past: Past, microqueue_database: Any, database_uri: str
) -> None:
    past.queue.enqueue({"n": 1}, dedupe_key="k")
    past.queue.enqueue({"n": 2})
    past.fail(["boom"] * 2)
    past.queue.enqueue({"n": 3}, dedupe_key="k")
    sent = replay(spark, where="true", uri=database_uri)
    assert (sent.letters, sent.skipped) == (1, 1)
    assert past.queue.dead_letters.stats().total == 1


@pytest.mark.parametrize("unnamed", [{"$unset": {"queue": ""}}, {"$set": {"queue": None}}])
def test_a_dead_letter_without_a_queue_is_replayed_to_the_default_one(
    spark: SparkSession, past: Past, microqueue_database: Any, database_uri: str, unnamed: Any
) -> None:
    past.enqueue(1)
    past.fail(["boom"])
    microqueue_database.tasks.update_one({}, unnamed)
    assert replay(spark, where="true", uri=database_uri).letters == 1
    task = Queue(microqueue_database).pop()
    assert task is not None
    assert task.queue == "default"


def test_dead_letters_in_a_separate_collection_are_replayed_once(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    settings = QueueSettings(retention=None, dead_letters="collection")
    past = Past(microqueue_database, ago=HOUR)
    past.enqueue(3)
    past.fail(["boom"])  # Still to be moved.
    core_of(past.queue).settings = settings
    past.fail(["boom"] * 2)
    assert microqueue_database.tasks_dlq.count_documents({}) == 2
    sent = replay(spark, where="queue = 'mail'", uri=database_uri, settings=settings)
    assert (sent.letters, sent.skipped) == (3, 0)
    assert past.queue.dead_letters.stats().total == 0
    assert past.queue.stats().pending == 3


@pytest.mark.parametrize("stored", [UuidRepresentation.STANDARD, UuidRepresentation.PYTHON_LEGACY])
def test_uuids_are_restored_as_stored_whatever_the_representation(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    stored: int,
) -> None:
    options = CodecOptions[Any](uuid_representation=stored)
    past = Past(microqueue_database.with_options(codec_options=options), ago=3 * HOUR)
    payload = {"standard": Binary(bytes(16), 4), "legacy": Binary(bytes(16), 3)}
    past.queue.enqueue(payload, task_id=UUID(int=1))
    past.fail(["boom"])
    uri = f"{database_uri}&uuidRepresentation=pythonLegacy"
    archive(spark, tmp_path, uri=uri, older_than=2 * HOUR)
    past.queue.enqueue(payload, task_id=UUID(int=2))
    past.fail(["boom"])

    sent = replay(spark, where="true", archive=tmp_path, uri=uri)

    assert (sent.archived, sent.letters, sent.skipped) == (1, 1, 0)
    # As the bytes are: without a representation, a UUID is what it is stored as.
    copy, letter = microqueue_database.tasks.find({}, sort=[("headers", -1)])
    assert copy["payload"] == letter["payload"] == payload
    assert letter["_id"] == Binary.from_uuid(UUID(int=2), stored)
    if stored == UuidRepresentation.PYTHON_LEGACY:
        assert copy["headers"]["replayed_from"] == str(UUID(int=1))


@pytest.mark.parametrize("where", ["no such column = 1", "selekt", "missing = 1"])
def test_a_condition_that_is_not_sql_is_rejected(
    spark: SparkSession, past: Past, database_uri: str, where: str
) -> None:
    with rejecting("where", where, code="not_sql"):
        replay(spark, where=where, uri=database_uri)


def test_a_run_too_old_to_be_resumed_is_rejected(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    past = Past(microqueue_database, ago=timedelta(days=8), settings=QueueSettings())
    past.queue.ensure_indexes()
    details = {"kind": "replay", "where": "true", "to": None, "over_sec": 0.0}
    details |= {"archive": None, "letters": True}
    core_of(past.queue).run(run_notes.begin("replay:old", details, past.begin))
    with raising(PipelineError, "run_too_old", run="replay:old"):
        replay(spark, where="true", uri=database_uri, run="old")
