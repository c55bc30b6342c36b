"""Compaction: a few large files in the place of many small ones, safe to kill as well.

The new files are written aside, compared with the old ones and committed in one entry that
names both; only then the old ones are deleted. Whoever dies before the entry leaves the old
files as they were, and after it, rubbish that the next run sweeps away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from pyspark.sql import SparkSession

from microqueue.model import Model
from microqueue.spark.archive import parquet
from microqueue.spark.archive.log import ArchivedFile, ArchiveLog, ArchiveState, Entry
from microqueue.spark.archive.reader import live_rows
from microqueue.spark.progress import Step, Tell, silent
from microqueue.spark.storage import Storage

SMALL_BYTES = 64 * 1024 * 1024
MOST_ROWS = 2_000_000
"""How many tasks one file holds at most."""

FEWEST_FILES = 2


class CompactionSummary(Model):
    """How many files there were, and how many stand for them now."""

    path: str
    removed: int
    files: int


def compact(
    spark: SparkSession,
    path: str | Path,
    *,
    small_bytes: int = SMALL_BYTES,
    tell: Tell = silent,
) -> CompactionSummary:
    """Merge the small files of each day and queue of an archive."""
    storage = Storage(spark, path)
    log = ArchiveLog.of_archive(storage)
    run, now = uuid4().hex[:12], datetime.now(UTC)
    before = len(log.state.files)
    if small_groups(log.state, small_bytes):
        log.commit(Entry(kind="begun", run=run, at=now))
        parquet.sweep(storage, log.state)
    removed = compact_files(
        spark, storage, log, run=run, now=now, tell=tell, small_bytes=small_bytes
    )
    files = len(log.state.files) - before + removed
    return CompactionSummary(path=storage.root, removed=removed, files=files)


def compact_files(
    spark: SparkSession,
    storage: Storage,
    log: ArchiveLog,
    *,
    run: str,
    now: datetime,
    tell: Tell,
    small_bytes: int = SMALL_BYTES,
) -> int:
    """Merge small files in a run that has begun; give how many are gone."""
    groups = small_groups(log.state, small_bytes)
    old = [file for group in groups for file in group]
    if not old:
        return 0
    tell(Step("compact", f"Merging {len(old):,} small files"))
    frame = parquet.placed(live_rows(spark, storage, log.state, old))
    row = frame.agg(*parquet.totals()).collect()[0]
    expected = parquet.Totals.of(row.asDict())
    spread = frame.repartition(min(len(groups), 200), *parquet.PARTITIONS)
    staging = parquet.write(spread, storage, f"{run}-merged", most_rows=MOST_ROWS)
    found = parquet.staged(storage, staging)
    names = parquet.move(storage, staging, found, f"{run}-merged")
    tell(Step("compare", "Comparing the merged files with the small ones"))
    files = parquet.verify(spark, storage, names, expected)
    removed = tuple(file.name for file in old)
    log.commit(Entry(kind="compacted", run=run, at=now, files=tuple(files), removed=removed))
    tell(Step("clean", "Deleting the small files"))
    for name in removed:
        storage.delete(name)
    return len(removed)


def small_groups(state: ArchiveState, small_bytes: int) -> list[Sequence[ArchivedFile]]:
    """Find the days and queues with several small files, but for those not yet purged."""
    busy = {file.name for entry in state.unpurged.values() for file in entry.files}
    groups: defaultdict[tuple[str, str], list[ArchivedFile]] = defaultdict(list)
    for file in state.files.values():
        if file.size < small_bytes and file.name not in busy:
            groups[file.day, file.queue].append(file)
    return [group for group in groups.values() if len(group) >= FEWEST_FILES]
