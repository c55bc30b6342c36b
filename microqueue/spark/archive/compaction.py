"""Compaction: merge many small files into a few large ones.

The new files are staged, compared with the old ones and committed in one entry that lists both.
Only then are the old files deleted. A run that is killed before the entry leaves the old files
as they were; one that is killed after it leaves orphans, which the next run deletes.
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
from microqueue.spark.deprecation import renamed_arguments
from microqueue.spark.progress import Progress, Step, no_progress
from microqueue.spark.storage import Storage

SMALL_BYTES = 64 * 1024 * 1024
MOST_ROWS = 2_000_000
"""The largest number of tasks in one file."""

FEWEST_FILES = 2


class CompactionSummary(Model):
    """How many files were removed, and how many replace them."""

    path: str
    removed: int
    files: int


@renamed_arguments(tell="progress")
def compact(
    spark: SparkSession,
    path: str | Path,
    *,
    small_bytes: int = SMALL_BYTES,
    progress: Progress = no_progress,
) -> CompactionSummary:
    """Merge the small files of each day and queue of an archive.

    Args:
        spark: The session.
        path: The archive.
        small_bytes: Files below this size are merged.
        progress: Called with each step that begins.

    Returns:
        How many files were merged.

    Raises:
        ArchiveConflict: Another run has taken over the archive.
        ArchiveDamaged: The merged files differ from the small ones, which are kept.
        MicroqueueError: There is no archive at ``path``.
    """
    storage = Storage(spark, path)
    log = ArchiveLog.of_archive(storage)
    run, now = uuid4().hex[:12], datetime.now(UTC)
    before = len(log.state.files)
    if small_groups(log.state, small_bytes):
        log.commit(Entry(kind="begun", run=run, at=now))
        parquet.sweep(storage, log.state)
    removed = compact_files(
        spark, storage, log, run=run, now=now, progress=progress, small_bytes=small_bytes
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
    progress: Progress,
    small_bytes: int = SMALL_BYTES,
) -> int:
    """Merge small files in a run that has begun; return how many were removed."""
    groups = small_groups(log.state, small_bytes)
    old = [file for group in groups for file in group]
    if not old:
        return 0
    progress(Step("compact", f"Merging {len(old):,} small files"))
    frame = parquet.with_directories(live_rows(spark, storage, log.state, old))
    row = frame.agg(*parquet.totals()).collect()[0]
    expected = parquet.Totals.of(row.asDict())
    merged = frame.repartition(min(len(groups), 200), *parquet.PARTITIONS)
    staging = parquet.write(merged, storage, f"{run}-merged", most_rows=MOST_ROWS)
    found = parquet.staged(storage, staging)
    names = parquet.move(storage, staging, found, f"{run}-merged")
    progress(Step("compare", "Comparing the merged files with the small ones"))
    files = parquet.verify(spark, storage, names, expected)
    removed = tuple(file.name for file in old)
    log.commit(Entry(kind="compacted", run=run, at=now, files=tuple(files), removed=removed))
    progress(Step("clean", "Deleting the small files"))
    for name in removed:
        storage.delete(name)
    return len(removed)


def small_groups(state: ArchiveState, small_bytes: int) -> list[Sequence[ArchivedFile]]:
    """Group small files by day and queue, without those whose tasks are not yet deleted."""
    busy = {file.name for entry in state.unpurged.values() for file in entry.files}
    groups: defaultdict[tuple[str, str], list[ArchivedFile]] = defaultdict(list)
    for file in state.files.values():
        if file.size < small_bytes and file.name not in busy:
            groups[file.day, file.queue].append(file)
    return [group for group in groups.values() if len(group) >= FEWEST_FILES]
