"""How fast Spark reads and fills a queue, beside one process: ``python -m benchmarks.spark``.

Every figure stands beside the same work done by one pymongo process in the same run, as one
would write it by hand: the same columns as rows, the same documents inserted in batches of
5,000. Machines differ, and grow slow for a moment, but both then do. Spark is warm before the
clock runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from bson import ObjectId
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as everybody does)

from microqueue import Queue, QueueSettings
from microqueue.embedded import EmbeddedServer
from microqueue.spark import key_id, read_tasks, session, write_tasks

FOUR = ("id", "queue", "status", "attempts")
THIRTEEN = (
    *FOUR,
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
TEXT = "x" * 200
CHUNK = 5_000
WARM_READS, WARM_LOADS, WARM_ROWS = 3, 2, 50_000
CACHE = ["--wiredTigerCacheSizeGB", "2"]


def documents(total: int, now: datetime, *, keyed: bool) -> Iterator[dict[str, Any]]:
    """Make the documents of new tasks by hand, with ids made of keys or without.

    With keys they are the very documents that Spark stores.
    """
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


def with_a_past(document: dict[str, Any], n: int) -> dict[str, Any]:
    """Make most tasks done, some failed; the rest waits."""
    started_at = document["created_at"] + timedelta(seconds=n % 60)
    ended_at = started_at + timedelta(milliseconds=n % 5_000)
    settled = {"attempts": 1, "worker_id": "bench:1", "started_at": started_at}
    settled |= {"updated_at": ended_at, "finished_at": ended_at}
    if n % 5 < 3:  # noqa: PLR2004 (three of five)
        return {**document, **settled, "status": "done"}
    if n % 5 == 3:  # noqa: PLR2004 (one of five)
        error = {"message": f"timeout after {n} ms", "code": "timeout", "at": ended_at}
        return {**document, **settled, "status": "failed", "error": error}
    return document


def insert_all(queue: Queue[Any], made: Iterator[dict[str, Any]]) -> int:
    """Insert with one pymongo process, a chunk at a time."""
    queue.ensure_indexes()
    total, chunk = 0, []
    for document in made:
        chunk.append(document)
        if len(chunk) == CHUNK:
            queue.collections.tasks.insert_many(chunk, ordered=False)
            total, chunk = total + len(chunk), []
    if chunk:
        queue.collections.tasks.insert_many(chunk, ordered=False)
    return total + len(chunk)


def loop(queue: Queue[Any], columns: tuple[str, ...]) -> int:
    """Read with one pymongo process: the same columns, as rows."""
    stored = [name for name in columns if name != "id"]
    total = 0
    for document in queue.collections.tasks.find({}, dict.fromkeys(stored, 1)):
        row = (str(document["_id"]), *[document.get(name) for name in stored])
        total += len(row) == len(columns)
    return total


def read_all(frame: DataFrame) -> None:
    """Read every row and column with Spark, to nowhere."""
    frame.write.format("noop").mode("overwrite").save()


def timed(work: Callable[[], Any]) -> float:
    """Time a piece of work in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Bench:
    """One server, one session, and the figures that come of them."""

    def __init__(self, spark: SparkSession, uri: str, *, tasks: int, rounds: int) -> None:
        self.spark = spark
        self.uri = uri
        self.tasks = tasks
        self.rounds = rounds
        self.results: list[dict[str, Any]] = []

    def queue(self, collection: str) -> Queue[Any]:
        """Open a collection."""
        return Queue[Any].from_uri(self.uri, "bench", collection=collection)

    def record(self, name: str, plain: list[float], spark: list[float]) -> None:
        """Keep the rates of both, and the ratio: the median of each round's own."""
        ratios = [one / other for one, other in zip(plain, spark, strict=True)]
        self.results.append(
            {
                "what": name,
                "pymongo_per_sec": round(self.tasks / statistics.median(plain)),
                "spark_per_sec": round(self.tasks / statistics.median(spark)),
                "ratio": round(statistics.median(ratios), 2),
            }
        )

    def reads(self) -> None:
        """Measure full reads of few and of many columns."""
        with self.queue("bench_read") as queue:
            queue.collections.tasks.drop()
            made = documents(self.tasks, queue.now(), keyed=False)
            insert_all(queue, (with_a_past(document, n) for n, document in enumerate(made)))
            for columns in (FOUR, THIRTEEN):
                plain, spark = [], []
                for _ in range(WARM_READS):  # The caches of both, and Java's compiler.
                    self.read(columns)
                for _ in range(self.rounds):
                    plain.append(timed(partial(loop, queue, columns)))
                    spark.append(timed(partial(self.read, columns)))
                self.record(f"read {len(columns)} columns", plain, spark)
            queue.collections.tasks.drop()

    def read(self, columns: tuple[str, ...]) -> None:
        """Read all tasks."""
        frame = read_tasks(self.spark, uri=self.uri, collection="bench_read", columns=columns)
        read_all(frame)

    def loads(self) -> None:
        """Measure bulk loads into empty queues with all their indexes.

        One process inserts the same documents, and once more with ids of the driver's own,
        which cost MongoDB less, but do not know a row again.
        """
        keyed, plain, spark = [], [], []
        with self.queue("bench_load") as queue:
            for _ in range(WARM_LOADS):
                self.load(queue, WARM_ROWS)
            for _ in range(self.rounds):
                keyed.append(timed(partial(self.insert, queue, keyed=True)))
                spark.append(timed(partial(self.load, queue, self.tasks)))
                plain.append(timed(partial(self.insert, queue, keyed=False)))
            queue.collections.tasks.drop()
        self.record("bulk enqueue", keyed, spark)
        self.record("bulk enqueue, against plain ids", plain, spark)

    def insert(self, queue: Queue[Any], *, keyed: bool) -> None:
        """Load with one process."""
        queue.collections.tasks.drop()
        insert_all(queue, documents(self.tasks, queue.now(), keyed=keyed))

    def load(self, queue: Queue[Any], total: int) -> None:
        """Load with Spark, with keys: exactly once."""
        queue.collections.tasks.drop()
        frame = self.spark.range(total).select(
            F.col("id").alias("order"), F.lit(TEXT).alias("text")
        )
        report = write_tasks(
            frame, uri=self.uri, collection="bench_load", queue="bench", key="order"
        )
        assert (report.inserted, report.duplicates) == (total, 0)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uri", help="a MongoDB server; without it, the embedded one")
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["reads", "loads"])
    parser.add_argument("--master", help="a Spark master; without it, local[*]")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    server = None if options.uri else EmbeddedServer.start(arguments=CACHE)
    uri = options.uri or (server.uri if server else "")
    spark = session(master=options.master, name="benchmark")
    spark.sparkContext.setLogLevel("ERROR")
    try:
        bench = Bench(spark, uri, tasks=options.tasks, rounds=options.rounds)
        if options.only != "loads":
            bench.reads()
        if options.only != "reads":
            bench.loads()
    finally:
        spark.stop()
        if server is not None:
            server.stop()
    if options.json:
        print(json.dumps({"tasks": options.tasks, "results": bench.results}))
        return
    print(f"| {options.tasks:,} tasks | one pymongo process | Spark | ratio |")
    print("|---|---|---|---|")
    for one in bench.results:
        print(
            f"| {one['what']} | {one['pymongo_per_sec']:,}/s "
            f"| {one['spark_per_sec']:,}/s | {one['ratio']} |"
        )


if __name__ == "__main__":
    main()
