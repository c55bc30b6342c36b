"""The driver of the cluster tests, in its own process and directory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import slow_parts  # type: ignore[import-not-found]  # It lies beside this file when it runs.
from pyspark.sql import DataFrame, SparkSession

from microqueue import Queue
from microqueue.spark import read_tasks, session, whole_tasks, write_tasks
from microqueue.spark.analytics.triage import triage
from microqueue.spark.archive import parquet
from microqueue.spark.archive.job import archive
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.storage import Storage

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
CONFIG = {
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.executor.extraJavaOptions": QUICK,
    "spark.driver.extraJavaOptions": QUICK,
    # A copy of a part starts when it runs longer than a second, or half of the others are done.
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.task.duration.threshold": "1s",
}


def where(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.RecordBatch.from_pylist([{"executor": os.getppid(), "rows": batch.num_rows}])


def orders(spark: SparkSession) -> DataFrame:
    return spark.range(0, 400, numPartitions=4).selectExpr("id as order")


def find_all(spark: SparkSession, uri: str, place: Path) -> dict[str, Any]:
    """Write, read and run pipelines, for which executors need the whole package."""
    report = write_tasks(orders(spark), uri=uri, queue="orders", key="order")
    assert (report.inserted, report.duplicates) == (400, 0), report
    tasks = read_tasks(spark, uri=uri, columns="id", payload="order bigint", partitions=4)
    found = tasks.mapInArrow(where, "executor bigint, rows bigint").collect()
    assert sum(row["rows"] for row in found) == 400, found
    # Installed, the format is known without being registered.
    assert "status" in spark.newSession().read.format("microqueue").options(uri=uri).load().columns
    with Queue[Any].from_uri(uri, "orders") as queue:
        queue.mark_done_many(queue.pop_many(40))
        for task in queue.pop_many(5):
            queue.mark_failure(task, f"order {task.payload['order']} not found", code="E")
    summary = archive(spark, place, uri=uri, older_than=0.001)
    assert (summary.archived, summary.deleted) == (45, 45), summary
    assert read_archive(spark, place).count() == 45
    (kind,) = triage(spark, archive=place, uri=uri).clusters
    assert kind.count == 5, kind
    return {"executors": len({row["executor"] for row in found})}


def join_another_machine(spark: SparkSession, directory: Path) -> Any:
    """Add a worker with another address: Spark starts no copy of a part where it already runs."""
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 (there is no other way)
    context = spark.sparkContext._jsc.sc()  # noqa: SLF001 (as above)
    backend = context.schedulerBackend()
    masters = backend.getClass().getDeclaredField("masters")
    masters.setAccessible(True)
    worker = jvm.org.apache.spark.deploy.worker.Worker
    return worker.startRpcEnvAndEndpoint(
        "127.0.0.2",
        0,
        0,
        1,
        1024,
        masters.get(backend),
        str(directory),
        getattr(worker, "startRpcEnvAndEndpoint$default$8")(),
        context.conf(),
        getattr(worker, "startRpcEnvAndEndpoint$default$10")(),
    )


def write_twice(spark: SparkSession, uri: str, root: Path) -> dict[str, Any]:
    """Write to a queue and an archive with a part so slow that Spark starts a copy of it."""

    def attempts(name: str) -> Path:
        place = root / name
        place.mkdir()
        spark.sparkContext.setLocalProperty(slow_parts.ATTEMPTS, str(place))
        return place

    attempts("sink")
    model = "slow_parts:SlowOrder"
    report = write_tasks(
        orders(spark), uri=uri, queue="twice", key="order", model=model, batch_rows=10
    )
    facts: dict[str, Any] = {"report": [report.inserted, report.duplicates]}
    with Queue[Any].from_uri(uri, "twice") as queue:
        for name in ("direct", "spark"):
            queue.mark_done_many(queue.pop_many(30))
            attempts(name)
            if name == "direct":
                parquet.PartWriter = slow_parts.SlowWriter  # type: ignore[misc]  # A slow one instead.
            else:
                whole_tasks.batches_of = slow_parts.slow_batches
                Storage.disk = None  # type: ignore[assignment,method-assign]  # In place of a property.
            summary = archive(spark, root / "archive", uri=uri, older_than=0.001, compact=False)
            facts[name] = summary.archived
    facts["kept"] = sorted(
        json.loads(row["payload"])["order"]
        for row in whole_tasks.with_payload(read_archive(spark, root / "archive")).collect()
    )
    return facts


def main() -> None:
    uri, root = sys.argv[1], Path(sys.argv[2])
    spark = session(master="local-cluster[2,1,1024]", config=CONFIG)
    spark.sparkContext.setLogLevel("OFF")
    spark.sparkContext.addPyFile(slow_parts.__file__)
    facts = find_all(spark, uri, root / "plain")
    machine = join_another_machine(spark, root / "machine")
    facts |= write_twice(spark, uri, root)
    machine.shutdown()
    spark.stop()
    (root / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
