"""How fast finished tasks are archived: ``python -m benchmarks.spark_archive``.

Archives tasks with a history and a payload: read whole, written to Parquet, read back and
compared, committed, and then deleted. Beside it, in the same run, one process that reads with
pymongo and writes Parquet with pyarrow, without reading back. Spark is warm before the clock runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from bson import ObjectId
from pymongo import MongoClient

from microqueue import Queue, QueueSettings
from microqueue.embedded import EmbeddedServer
from microqueue.spark import session
from microqueue.spark.pipelines.archive import ArchiveSummary, archive
from microqueue.spark.pipelines.archive_reader import read_archive

CHUNK = 5_000
WARM_UP = 20_000
TEXT = "x" * 200
CACHE = ["--wiredTigerCacheSizeGB", "2"]
GOAL_PER_SEC = 40_000
FIELDS = ("queue", "status", "attempts", "created_at", "updated_at", "finished_at", "worker_id")


def finished(total: int, now: datetime) -> Iterator[dict[str, Any]]:
    """Make tasks that were done over the last days, one in ten after a retry."""
    for n in range(total):
        created_at = now - timedelta(days=2, seconds=n % 200_000)
        started_at = created_at + timedelta(seconds=1)
        ended_at = started_at + timedelta(milliseconds=n % 5_000)
        attempt = {"attempt": 1, "worker_id": "bench:1", "started_at": started_at}
        attempt |= {"lease_token": "0" * 32, "ended_at": ended_at, "outcome": "done"}
        error = {"message": f"timeout after {n} ms", "code": "timeout", "at": started_at}
        retried = {**attempt, "outcome": "retried", "error": error}
        history = [attempt] if n % 10 else [retried, {**attempt, "attempt": 2}]
        yield {
            "_id": ObjectId(),
            "queue": f"bench-{n % 2}",
            "payload": {"order": n, "text": TEXT},
            "status": "done",
            "priority": 0,
            "position": n,
            "created_at": created_at,
            "updated_at": ended_at,
            "attempts": len(history),
            "max_attempts": 10,
            "next_retry_at": None,
            "finished_at": ended_at,
            "history": history,
            "worker_id": "bench:1",
            "started_at": started_at,
        }


def fill(tasks: Any, total: int) -> None:
    """Insert tasks in chunks."""
    chunk: list[dict[str, Any]] = []
    for document in finished(total, datetime.now(UTC)):
        chunk.append(document)
        if len(chunk) == CHUNK:
            tasks.insert_many(chunk, ordered=False)
            chunk = []
    if chunk:
        tasks.insert_many(chunk, ordered=False)


def plain_loop(tasks: Any, directory: Path) -> float:
    """Export with one process, and give the rows per second."""
    started, rows, batch = time.perf_counter(), 0, []
    for document in tasks.find():
        row = {name: document.get(name) for name in FIELDS}
        row |= {"id": str(document["_id"]), "history": document["history"]}
        row["payload"] = json.dumps(document["payload"])
        batch.append(row)
        if len(batch) == CHUNK:
            table = pa.Table.from_pylist(batch)
            pyarrow.parquet.write_table(table, directory / f"{rows}.parquet", compression="zstd")
            rows += len(batch)
            batch = []
    return rows / (time.perf_counter() - started)


def measure(total: int) -> tuple[ArchiveSummary, float]:
    """Warm up, and measure both on the same tasks."""
    spark = session(config={"spark.log.level": "ERROR"})
    with (
        tempfile.TemporaryDirectory(prefix="microqueue-") as directory,
        EmbeddedServer.start(f"{directory}/mongodb", arguments=CACHE) as server,
        MongoClient[Any](server.uri) as client,
    ):
        database = client.get_database("microqueue")
        Queue(database, settings=QueueSettings(retention=None)).ensure_indexes()
        options: dict[str, Any] = {"uri": server.uri, "older_than": 3600, "compact": False}
        fill(database.tasks, WARM_UP)
        archive(spark, f"{directory}/warm", **options)
        fill(database.tasks, total)
        plain = Path(directory, "plain")
        plain.mkdir()
        plain_per_sec = plain_loop(database.tasks, plain)
        summary = archive(spark, f"{directory}/archive", **options)
        if read_archive(spark, f"{directory}/archive").count() != total:
            raise SystemExit("the archive does not hold what was archived")
    spark.stop()
    return summary, plain_per_sec


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    total = parser.parse_args().tasks
    summary, plain_per_sec = measure(total)
    written = summary.archived / summary.write_sec
    purged = summary.deleted / summary.purge_sec
    together = summary.archived / (summary.write_sec + summary.purge_sec)
    print(f"{'tasks':32}{total:>12,}")
    print(f"{'archived and read back':32}{written:>12,.0f} /s   goal {GOAL_PER_SEC:,} /s")
    print(f"{'one process, not read back':32}{plain_per_sec:>12,.0f} /s")
    print(f"{'ratio':32}{written / plain_per_sec:>12.1f}")
    print(f"{'deleted':32}{purged:>12,.0f} /s")
    print(f"{'all together':32}{together:>12,.0f} /s")
    print(f"{'bytes per task':32}{summary.size / summary.archived:>12.0f}")


if __name__ == "__main__":
    main()
