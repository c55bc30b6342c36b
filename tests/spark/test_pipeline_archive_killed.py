from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from microqueue.core import core_of
from microqueue.spark.analytics.task_source import all_tasks
from microqueue.spark.archive import purge
from microqueue.spark.archive.job import archive
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.location import locate
from microqueue.spark.storage import Storage
from microqueue.spark.whole_tasks import decode
from tests.spark.archive_victim import DIRECTLY, THROUGH_SPARK
from tests.spark.past import Past, encoded

HOUR = timedelta(hours=1)
PATIENCE_SEC = 120


def filled(database: Any) -> tuple[Past, Past, list[bytes]]:
    """Two queues with finished tasks, over two days, and what they were."""
    mail = Past(database, "mail", ago=timedelta(hours=30))
    other = Past(database, "other", ago=2 * HOUR)
    for past in (mail, other):
        past.enqueue(8)
        past.work(4)
        past.fail(["boom"] * 3)
    finished = core_of(mail.queue).collections.tasks.find({"status": {"$ne": "pending"}})
    return mail, other, sorted(map(encoded, finished))


def kill_archive(
    spark: SparkSession, path: Path, uri: str, way: str, step: str, count: int
) -> None:
    """Run an archive in another process that joins this Java, until it is killed."""
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 (there is no other way)
    parameters = gateway.gateway_parameters
    environment = {
        **os.environ,
        "PYSPARK_GATEWAY_PORT": str(parameters.port),
        "PYSPARK_GATEWAY_SECRET": parameters.auth_token,
    }
    command = [sys.executable, "-m", "tests.spark.archive_victim"]
    command += [str(path), uri, way, step, str(count)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SEC, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr


STEPS = [
    ("begin", 1),
    ("write", 1),
    ("move", 1),
    ("verify", 1),
    ("commit", 1),
    ("purge", 1),
    ("note", 1),
    ("compare", 1),
    ("clean", 1),
]


ALL_STEPS = [(DIRECTLY, *one) for one in STEPS]
# The deletion is the same for both ways of writing.
ALL_STEPS += [(THROUGH_SPARK, *one) for one in STEPS[: STEPS.index(("purge", 1)) + 1]]


@pytest.fixture(params=[DIRECTLY, THROUGH_SPARK])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who writes the files, here as in the process that is killed."""
    if request.param == THROUGH_SPARK:
        monkeypatch.setattr(Storage, "disk", None)
    return str(request.param)


@pytest.mark.parametrize(("way", "step", "count"), ALL_STEPS, indirect=["way"])
def test_an_archive_killed_at_any_step_loses_and_duplicates_nothing(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    way: str,
    step: str,
    count: int,
) -> None:
    mail, other, finished = filled(microqueue_database)
    if step in {"compare", "clean"}:  # There must be something to merge.
        mail.enqueue(1)
        mail.work(1)
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR, queues=["mail"], compact=False)
        mail.enqueue(2)
        mail.work(2)
        new = core_of(mail.queue).collections.tasks.find({"queue": "mail", "status": "done"})
        old = read_archive(spark, tmp_path).collect()
        finished = sorted(
            [*(row["document"] for row in old), *map(encoded, new)]
            + [
                encoded(one)
                for one in core_of(mail.queue).collections.tasks.find(
                    {"queue": "other", "status": {"$ne": "pending"}}
                )
            ]
        )
    kill_archive(spark, tmp_path, database_uri, way, step, count)

    begun = None if step == "begin" else tmp_path  # Before its first entry, it is no archive.
    whole = all_tasks(spark, live=locate(database_uri), archive=begun)
    finished_ids = whole.where("status in ('done', 'failed')").select("id")
    assert finished_ids.count() == finished_ids.distinct().count() == len(finished)

    requeued = [letter.id for letter in other.queue.dead_letters.list(limit=1)]
    if requeued:  # One that is still in MongoDB comes back in between.
        other.queue.dead_letters.replay(requeued)

    archive(spark, tmp_path, uri=database_uri, older_than=HOUR)

    kept = sorted(bytes(row["document"]) for row in read_archive(spark, tmp_path).collect())
    expected = [one for one in finished if decode(one)["_id"] not in requeued]
    assert kept == expected
    left = {task["_id"]: task["status"] for task in microqueue_database.tasks.find()}
    assert set(left.values()) == {"pending"}
    assert set(requeued) <= set(left)
    files = {str(one.relative_to(tmp_path)) for one in tmp_path.glob("day=*/*/*.parquet")}
    assert len(files) == 2  # One for each queue, which has one day.
    assert not list(tmp_path.glob("_staging/*"))


def test_an_archive_killed_while_it_deletes_is_finished_by_the_next_run(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, _, finished = filled(microqueue_database)
    monkeypatch.setattr(purge, "ROWS_PER_STEP", 1)  # One file at a time.
    steps: list[str] = []

    def progress(step: Any) -> None:
        steps.append(step.name)
        if steps.count("purge") == 2:
            raise KeyboardInterrupt  # Half of the files are through.

    with pytest.raises(KeyboardInterrupt):
        archive(spark, tmp_path, uri=database_uri, older_than=HOUR, progress=progress)
    left = microqueue_database.tasks.count_documents({"status": {"$ne": "pending"}})
    assert 0 < left < len(finished)
    summary = archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    assert (summary.recovered, summary.archived) == (left, 0)
    kept = sorted(bytes(row["document"]) for row in read_archive(spark, tmp_path).collect())
    assert kept == finished


# It must not go on to the commit before it is killed, however slow this process is.
NEVER_MOVED = (
    "import time; from microqueue.spark.archive import parquet; "
    "parquet.move = lambda *_: time.sleep(3600); "
)
COMMANDS = {
    DIRECTLY: "from microqueue.cli import main; main()",
    THROUGH_SPARK: (
        "from microqueue.cli import main; from tests.spark.archive_victim import see_no_disk; "
        "see_no_disk(); main()"
    ),
}


def test_killing_spark_while_it_writes_leaves_a_valid_archive(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path, way: str
) -> None:
    _, _, finished = filled(microqueue_database)
    command = [sys.executable, "-c", NEVER_MOVED + COMMANDS[way], "pipeline", "archive"]
    command += [str(tmp_path)]
    command += ["--all-queues", "--older-than", "1h", "--uri", database_uri, "--master", "local[1]"]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + PATIENCE_SEC
        while not list(tmp_path.glob("_staging/*")) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert read_archive(spark, tmp_path).count() == 0
    archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    kept = sorted(bytes(row["document"]) for row in read_archive(spark, tmp_path).collect())
    assert kept == finished
