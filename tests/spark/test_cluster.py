"""On a cluster: a driver and two executors that are processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from microqueue.errors import JavaNotFound
from microqueue.spark import session

ROOT = Path(__file__).parents[2]

JOB = """
import sys

from microqueue import Queue
from microqueue.spark import read_tasks, session, write_tasks
from microqueue.spark.pipelines.archive import archive
from microqueue.spark.pipelines.archive_reader import read_archive
from microqueue.spark.pipelines.triage import triage

uri, done, place = sys.argv[1:]
spark = session(
    master="local-cluster[2,1,1024]",
    config={
        "spark.executor.memory": "512m",
        "spark.driver.memory": "512m",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    },
)
spark.sparkContext.setLogLevel("OFF")
frame = spark.range(0, 400, numPartitions=4).selectExpr("id as order")
report = write_tasks(frame, uri=uri, queue="orders", key="order")
assert (report.inserted, report.duplicates) == (400, 0), report


def where(batches):
    import os

    import pyarrow as pa

    for batch in batches:
        yield pa.RecordBatch.from_pylist([{"executor": os.getppid(), "rows": batch.num_rows}])


tasks = read_tasks(spark, uri=uri, columns="id", payload="order bigint", partitions=4)
found = tasks.mapInArrow(where, "executor bigint, rows bigint").collect()
assert sum(row.rows for row in found) == 400, found
executors = {row.executor for row in found}
# Installed, the format is known without being registered.
assert "status" in spark.newSession().read.format("microqueue").options(uri=uri).load().columns

# Pipelines: executors write the archive, delete from MongoDB, and read what was archived.
with Queue.from_uri(uri, "orders") as queue:
    queue.mark_done_many(queue.pop_many(40))
    for task in queue.pop_many(5):
        queue.mark_failure(task, f"order {task.payload['order']} not found", code="E")
summary = archive(spark, place, uri=uri, older_than=0.001)
assert (summary.archived, summary.deleted) == (45, 45), summary
assert read_archive(spark, place).count() == 45
(kind,) = triage(spark, archive=place, uri=uri).clusters
assert kind.count == 5, kind
open(done, "w").write(str(len(executors)))
spark.stop()
"""


@pytest.mark.timeout(600)  # Five JVMs start one after the other.
def test_executors_of_a_cluster_find_all_that_they_need(
    database_uri: str, make_queue: Any, tmp_path: Path
) -> None:
    script, done = tmp_path / "job.py", tmp_path / "done"
    script.write_text(JOB)
    environment = {name: value for name, value in os.environ.items() if "SPARK" not in name}
    result = subprocess.run(
        [sys.executable, str(script), database_uri, str(done), str(tmp_path / "archive")],
        cwd=tmp_path,  # Away from the code: executors must not find it by luck.
        env=environment,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert int(done.read_text()) == 2
    assert make_queue("orders").stats().ready == 355


def test_a_session_that_runs_already_is_taken(spark: SparkSession) -> None:
    assert session(master="local[7]") is spark


@pytest.mark.parametrize("home", [None, "/nowhere"])
def test_a_missing_java_is_said_in_one_sentence(
    home: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(SparkSession, "getActiveSession", classmethod(lambda _: None))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("JAVA_HOME", home)
    with pytest.raises(JavaNotFound, match=r"Java 17.*apt install openjdk-17-jre-headless") as said:
        session()
    assert "\n" not in str(said.value)
    assert said.value.java_home == home
