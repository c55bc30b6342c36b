"""Measure how fast Spark reads, fills and archives a queue: ``python -m benchmarks.spark``.

Each figure is compared with the same work done by one plain pymongo process in the same run,
because machines differ and are noisy: it reads the same columns as rows, inserts the same documents
in batches of 5,000, and reads the same tasks whole. Spark is warmed up first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from bson import ObjectId
from pymongo.collection import Collection
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 (the usual name)

from benchmarks.spark_archive import archives
from benchmarks.spark_bench import TEXT, Bench, insert_all, timed
from microqueue import Queue, QueueSettings
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from microqueue.spark import key_id, read_tasks, session, write_tasks

FOUR_COLUMNS = ("id", "queue", "status", "attempts")
THIRTEEN_COLUMNS = (
    *FOUR_COLUMNS,
    "priority",
    "max_attempts",
    "created_at",
    "updated_at",
    "started_at",
    "finished_at",
    "next_retry_at",
    "worker_id",
    "error",
)
TARGETS = {FOUR_COLUMNS: 2.0, THIRTEEN_COLUMNS: 1.3}
LOAD_TARGET = 1.6
WARM_READS, WARM_LOADS, WARM_ROWS = 3, 2, 50_000
CACHE = ["--wiredTigerCacheSizeGB", "2"]


def documents(total: int, now: datetime, *, keyed: bool) -> Iterator[dict[str, Any]]:
    """Yield documents of new tasks. If ``keyed``, they are those that Spark would store."""
    token = {"insert_token": "0123456789ab:0:0"} if keyed else {}
    attempts = QueueSettings().max_attempts
    for n in range(total):
        yield {
            "_id": key_id("bench", str(n)) if keyed else ObjectId(),
            "queue": "bench",
            "payload": {"order": n, "text": TEXT},
            "status": "pending",
            "priority": 0,
            "position": n,
            "created_at": now,
            "updated_at": now,
            "attempts": 0,
            "max_attempts": attempts,
            "next_retry_at": None,
            "finished_at": None,
            "history": [],
            **token,
        }


def with_history(document: dict[str, Any], n: int) -> dict[str, Any]:
    """Return the document as done, failed or unchanged: 3, 1 and 1 of 5."""
    started_at = document["created_at"] + timedelta(seconds=n % 60)
    ended_at = started_at + timedelta(milliseconds=n % 5_000)
    settled = {"attempts": 1, "worker_id": "bench:1", "started_at": started_at}
    settled |= {"updated_at": ended_at, "finished_at": ended_at}
    if n % 5 < 3:  # noqa: PLR2004 (three of five)
        return {**document, **settled, "status": "done", "deadline_at": ended_at}
    if n % 5 == 3:  # noqa: PLR2004 (one of five)
        error = {"message": f"timeout after {n} ms", "code": "timeout", "at": ended_at}
        return {**document, **settled, "status": "failed", "error": error}
    return document


def loop(tasks: Collection[dict[str, Any]], columns: tuple[str, ...]) -> int:
    """Read the columns as rows with one pymongo process."""
    stored = [name for name in columns if name != "id"]
    total = 0
    for document in tasks.find({}, dict.fromkeys(stored, 1)):
        row = (str(document["_id"]), *[document.get(name) for name in stored])
        total += len(row) == len(columns)
    return total


def read_all(frame: DataFrame) -> None:
    """Read all rows and columns with Spark, and discard them."""
    frame.write.format("noop").mode("overwrite").save()


class SourceAndSink:
    """Measures full reads and bulk loads."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.spark, self.uri, self.tasks = bench.spark, bench.uri, bench.tasks

    def reads(self) -> None:
        """Measure full reads of few and of many columns."""
        with self.bench.queue("bench_read") as queue, self.bench.plain(queue) as tasks:
            core_of(queue).collections.tasks.drop()
            made = documents(self.tasks, queue.now(), keyed=False)
            insert_all(queue, (with_history(document, n) for n, document in enumerate(made)))
            for columns in (FOUR_COLUMNS, THIRTEEN_COLUMNS):
                plain, spark = [], []
                for _ in range(WARM_READS):  # Warms the caches of both, and Java's compiler.
                    self.read(columns)
                for _ in range(self.bench.rounds):
                    plain.append(timed(partial(loop, tasks, columns)))
                    spark.append(timed(partial(self.read, columns)))
                self.bench.record(
                    f"read {len(columns)} columns", plain, spark, ratio=TARGETS[columns]
                )
            core_of(queue).collections.tasks.drop()

    def read(self, columns: tuple[str, ...]) -> None:
        """Read all tasks."""
        frame = read_tasks(self.spark, uri=self.uri, collection="bench_read", columns=columns)
        read_all(frame)

    def loads(self) -> None:
        """Measure bulk loads into empty queues with all their indexes.

        One process inserts the same documents, and then documents with the driver's own ids. Those
        cost MongoDB less, but cannot identify a row that is written again.
        """
        keyed, plain, spark = [], [], []
        with self.bench.queue("bench_load") as queue:
            for _ in range(WARM_LOADS):
                self.load(queue, WARM_ROWS)
            for _ in range(self.bench.rounds):
                keyed.append(timed(partial(self.insert, queue, keyed=True)))
                spark.append(timed(partial(self.load, queue, self.tasks)))
                plain.append(timed(partial(self.insert, queue, keyed=False)))
            core_of(queue).collections.tasks.drop()
        self.bench.record("bulk enqueue", keyed, spark, ratio=LOAD_TARGET)
        self.bench.record("bulk enqueue, compared with plain ids", plain, spark)

    def insert(self, queue: Queue[Any], *, keyed: bool) -> None:
        """Insert with one process."""
        core_of(queue).collections.tasks.drop()
        insert_all(queue, documents(self.tasks, queue.now(), keyed=keyed))

    def load(self, queue: Queue[Any], total: int) -> None:
        """Write with Spark, with keys."""
        core_of(queue).collections.tasks.drop()
        frame = self.spark.range(total).select(
            F.col("id").alias("order"), F.lit(TEXT).alias("text")
        )
        report = write_tasks(
            frame, uri=self.uri, collection="bench_load", queue="bench", key="order"
        )
        assert (report.inserted, report.duplicates) == (total, 0)


def main() -> None:
    """Run the selected parts and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spark",
        description="Measure how fast Spark reads, fills and archives a queue, compared with one "
        "pymongo process in the same run.",
    )
    parser.add_argument("--uri", help="the MongoDB server; default: an embedded one")
    parser.add_argument("--tasks", type=int, default=1_000_000, help="tasks (%(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds, of which the median counts (%(default)s)"
    )
    parser.add_argument(
        "--only", choices=["reads", "loads", "archive"], help="the part to measure; default: all"
    )
    parser.add_argument("--master", help="the Spark master; default: local[*]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    server = None if options.uri else EmbeddedServer.start(arguments=CACHE)
    uri = options.uri or (server.uri if server else "")
    spark = session(master=options.master, name="benchmark")
    spark.sparkContext.setLogLevel("ERROR")
    try:
        bench = Bench(spark, uri, tasks=options.tasks, rounds=options.rounds)
        plain = SourceAndSink(bench)
        parts: dict[str, Callable[[], None]] = {
            "reads": plain.reads,
            "loads": plain.loads,
            "archive": partial(archives, bench),
        }
        for name, measure in parts.items():
            if options.only in {None, name}:
                measure()
    finally:
        spark.stop()
        if server is not None:
            server.stop()
    if options.json:
        print(json.dumps({"tasks": options.tasks, "results": bench.results}))
        return
    print(bench.table())


if __name__ == "__main__":
    main()
