"""Measure how fast finished tasks are archived and deleted, and how fast files are merged.

The tasks have a history and a payload. An archive reads them whole, writes Parquet, reads the
files back, compares them and commits. The baselines are one process that reads the same tasks with
pymongo, and one that also writes Parquet with pyarrow, without reading back.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from bson import ObjectId
from pymongo.collection import Collection

from benchmarks.spark_bench import CHUNK, TEXT, Bench, insert_all, timed
from microqueue import QueueSettings
from microqueue.spark.archive.job import archive, compact
from microqueue.spark.archive.reader import read_archive

COLLECTION = "bench_archive"
WARM_ROWS = 20_000
TARGET_PER_SEC = 40_000
KEPT = QueueSettings(retention=None)
"""MongoDB must not delete old tasks during the benchmark."""

FIELDS = ("queue", "status", "attempts", "created_at", "updated_at", "finished_at", "worker_id")


def finished(total: int, now: datetime) -> Iterator[dict[str, Any]]:
    """Yield tasks that finished over the last days, one in ten after a retry."""
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
            "deadline_at": ended_at,
            "history": history,
            "worker_id": "bench:1",
            "started_at": started_at,
        }


def loop(tasks: Collection[dict[str, Any]]) -> int:
    """Read with one process."""
    return sum("payload" in document for document in tasks.find())


def export(tasks: Collection[dict[str, Any]], directory: Path) -> None:
    """Read and write Parquet with one process."""
    directory.mkdir()
    found, number = iter(tasks.find()), 0
    while documents := list(islice(found, CHUNK)):
        rows = [_row(document) for document in documents]
        file = directory / f"{number}.parquet"
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file, compression="zstd")
        number += 1


def _row(document: dict[str, Any]) -> dict[str, Any]:
    row = {name: document.get(name) for name in FIELDS}
    row |= {"id": str(document["_id"]), "history": document["history"]}
    return {**row, "payload": json.dumps(document["payload"])}


def archives(bench: Bench) -> None:
    """Measure the steps of an archive, with new tasks in each round."""
    options: dict[str, Any] = {"uri": bench.uri, "collection": COLLECTION, "older_than": 3600}
    options |= {"settings": KEPT, "compact": False}
    reads, exports, writes, purges, merges = [], [], [], [], []
    with (
        tempfile.TemporaryDirectory(prefix="microqueue-") as directory,
        bench.queue(COLLECTION, KEPT) as queue,
        bench.plain(queue) as tasks,
    ):
        tasks.drop()
        insert_all(queue, finished(WARM_ROWS, queue.now()))
        archive(bench.spark, f"{directory}/warm", **options)
        compact(bench.spark, f"{directory}/warm")
        for number in range(bench.rounds):
            path = f"{directory}/archive-{number}"
            insert_all(queue, finished(bench.tasks, queue.now()))
            assert tasks.estimated_document_count() == bench.tasks
            reads.append(timed(partial(loop, tasks)))
            exports.append(timed(partial(export, tasks, Path(directory, f"plain-{number}"))))
            summary = archive(bench.spark, path, **options)
            writes.append(summary.write_sec)
            purges.append(summary.purge_sec)
            begun = time.perf_counter()
            merged = compact(bench.spark, path)
            merges.append(time.perf_counter() - begun)
            kept = read_archive(bench.spark, path).count()
            assert (kept, summary.deleted) == (bench.tasks, bench.tasks)
        tasks.drop()
    bench.record("archive, compared with reading", reads, writes, per_sec=TARGET_PER_SEC)
    bench.record("archive, compared with reading and writing", exports, writes)
    bench.record("delete archived tasks", None, purges)
    if merged.removed:  # A small archive already has one file per day and queue.
        bench.record("merge archive files", None, merges)
