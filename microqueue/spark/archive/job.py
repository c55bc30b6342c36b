"""Archive finished tasks to Parquet, delete them from MongoDB, and merge small files.

The order makes it safe: write, read back and compare, commit, and only then delete, each task
only in the version that was archived. A run that was killed at any point is finished by the next
one, as the log shows what is unfinished: nothing is lost, and nothing is archived twice.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

from pydantic import Field
from pyspark.sql import Observation, SparkSession

from microqueue.arguments import check_names, invalid_argument
from microqueue.deprecation import renamed_arguments
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.durations import Duration, check_duration
from microqueue.errors import PipelineError
from microqueue.model import Model
from microqueue.operations import archive as operations
from microqueue.operations.call import Target
from microqueue.settings import QueueSettings
from microqueue.spark import error_codes
from microqueue.spark.archive import parquet
from microqueue.spark.archive.log import ArchivedFile, ArchiveLog, ArchiveState, Entry
from microqueue.spark.archive.purge import Purge
from microqueue.spark.archive.reader import live_rows
from microqueue.spark.location import LocationOptions, locate, location_of, primary, server_now
from microqueue.spark.progress import ProgressCallback, Step, no_progress
from microqueue.spark.storage import Storage
from microqueue.spark.whole_tasks import Part, parts_of, read_parts
from microqueue.task import DEFAULT_QUEUE

SMALL_BYTES = 64 * 1024 * 1024
"""Smaller files are merged."""

MOST_ROWS = 2_000_000
"""The largest number of tasks in one file."""

FEWEST_FILES = 2


class ArchiveSummary(Model):
    """What a run of the archive did; of a dry run, what it would do.

    Attributes:
        run: The id of the run, as in the log and in file names.
        path: The root of the archive.
        cutoff: Tasks that finished before this instant were archived.
        dry_run: Whether nothing was changed.
        found: Tasks to archive by ``queue/status``; only of a dry run.
        archived: Tasks written to the archive.
        deleted: Tasks deleted from MongoDB.
        superseded: Archived tasks that had changed and stayed in MongoDB.
        files: Files written.
        size: Their size in bytes.
        recovered: Tasks deleted that an earlier, interrupted run had archived.
        compacted: Small files that were merged into larger ones.
        write_sec: Seconds to write, verify and commit.
        purge_sec: Seconds to delete.
    """

    run: str
    path: str
    cutoff: datetime
    dry_run: bool = False
    found: dict[str, int] = Field(default_factory=dict)
    archived: int = 0
    deleted: int = 0
    superseded: int = 0
    files: int = 0
    size: int = 0
    recovered: int = 0
    compacted: int = 0
    write_sec: float = 0.0
    purge_sec: float = 0.0


@renamed_arguments(tell="progress")
def archive(
    spark: SparkSession,
    path: str | Path,
    *,
    uri: str | None = None,
    database: str | None = None,
    collection: str = DEFAULT_COLLECTION,
    queues: Sequence[str] | None = None,
    statuses: Sequence[str] = operations.FINISHED_STATUSES,
    older_than: Duration = timedelta(days=1),
    settings: QueueSettings | None = None,
    compact: bool = True,
    dry_run: bool = False,
    progress: ProgressCallback = no_progress,
) -> ArchiveSummary:
    """Move tasks that finished longer ago than ``older_than`` into an archive.

    Tasks that are replayed while this runs stay in MongoDB, and ``read_archive`` leaves their
    archived version out. Two runs at once are safe: the later one takes over.

    Args:
        spark: The session.
        path: The archive: any directory that Spark can write.
        uri: The address of MongoDB; by default ``MICROQUEUE_URI``, or the embedded server.
        database: The database; by default that of the address.
        collection: The collection of the tasks.
        queues: The queues to archive; by default all.
        statuses: ``done``, ``failed``, or both.
        older_than: How long ago a task must have finished.
        settings: The settings of the queues; by default those of the environment.
        compact: Whether to merge small files afterwards.
        dry_run: Whether to count only, and change nothing.
        progress: Called with each step that begins.

    Returns:
        What was archived and deleted.

    Raises:
        ArchiveConflict: Another run has taken over the archive.
        ArchiveDamaged: The files that were read back differ from what was written. Nothing
            was committed or deleted.
        PipelineError: The directory is not an archive, or belongs to another database.
    """
    check_names("queues", () if queues is None else queues)
    if not statuses or not set(statuses) <= set(operations.FINISHED_STATUSES):
        raise invalid_argument(
            "statuses", statuses, "give done, failed, or both: others are not finished"
        )
    location = locate(uri, database=database, collection=collection)
    storage = Storage(spark, path)
    job = _Job(
        spark=spark,
        storage=storage,
        log=ArchiveLog(storage),
        location=primary(location),
        settings=settings or QueueSettings.from_environment(),
        queues=queues,
        statuses=statuses,
        run_id=uuid4().hex[:12],
        cutoff=server_now(location) - check_duration("older_than", older_than),
        progress=progress,
    )
    return job.count() if dry_run else job.run(compact=compact)


@dataclass(frozen=True)
class _Job:
    """One run of the archive."""

    spark: SparkSession
    storage: Storage
    log: ArchiveLog
    location: LocationOptions
    settings: QueueSettings
    queues: Sequence[str] | None
    statuses: Sequence[str]
    run_id: str
    cutoff: datetime
    progress: ProgressCallback

    def count(self) -> ArchiveSummary:
        """Count the tasks that would be archived."""
        found: dict[str, int] = {}
        for target, statuses in self._sources():
            counting = operations.count_finished(
                self.queues, statuses=statuses, before=self.cutoff, target=target
            )
            for group in location_of(self.location).run(counting):
                name = f"{group.get('queue', DEFAULT_QUEUE)}/{group['status']}"
                found[name] = found.get(name, 0) + group["count"]
        return ArchiveSummary(
            run=self.run_id,
            path=self.storage.root,
            cutoff=self.cutoff,
            dry_run=True,
            found=found,
        )

    def run(self, *, compact: bool) -> ArchiveSummary:
        """Finish interrupted runs, archive, delete, and merge small files."""
        identity = self._identity()
        self._check_unpurged(identity)
        parquet.check_log(self.storage, self.log.state)
        self._step("begin", "Taking over the archive")
        begun = Entry(kind="begun", run=self.run_id, at=server_now(self.location), place=identity)
        self.log.commit(begun)
        parquet.delete_leftovers(self.storage, self.log.state)
        purge = Purge(self.spark, self.storage, self.log, self.location, self.progress)
        unpurged = list(self.log.state.unpurged.values())
        recovered = sum(purge.run(entry).deleted for entry in unpurged)

        started = time.monotonic()
        written = self._write(identity)
        committed = time.monotonic()
        purged = None if written is None else purge.run(written)
        ended = time.monotonic()
        compacted = 0
        if compact:
            now = server_now(self.location)
            compacted = compact_files(
                self.spark, self.storage, self.log, run=self.run_id, now=now, progress=self.progress
            )
        files = () if written is None else written.files
        return ArchiveSummary(
            run=self.run_id,
            path=self.storage.root,
            cutoff=self.cutoff,
            archived=sum(file.rows for file in files),
            deleted=purged.deleted if purged else 0,
            superseded=len(purged.superseded) if purged else 0,
            files=len(files),
            size=sum(file.size for file in files),
            recovered=recovered,
            compacted=compacted,
            write_sec=committed - started,
            purge_sec=ended - committed,
        )

    def _step(self, name: str, text: str) -> None:
        self.progress(Step(name, text))

    def _sources(self) -> list[tuple[Target, Sequence[str]]]:
        """Return which statuses to read from which collection."""
        if not self.settings.separate_dlq:
            return [(Target.TASKS, self.statuses)]
        sources: list[tuple[Target, Sequence[str]]] = []
        if in_tasks := [status for status in self.statuses if status != "failed"]:
            sources.append((Target.TASKS, in_tasks))
        if "failed" in self.statuses:
            sources.append((Target.DEAD_LETTERS, ["failed"]))
        return sources

    def _identity(self) -> str:
        """Return what identifies the collection among all databases and servers."""
        location = location_of(self.location)
        name = location.collections.name
        found = location.run(operations.identify_collection(name))
        return f"{location.collections.database.name}.{name}#{found}"

    def _check_unpurged(self, identity: str) -> None:
        """Raise if an interrupted run still has to delete tasks of another database."""
        for entry in self.log.state.unpurged.values():
            if entry.place != identity:
                raise PipelineError(
                    f"run {entry.run} archived tasks of {entry.place} and has not deleted all of "
                    f"them there yet; this is {identity}. Run the archive on that database first",
                    code=error_codes.OTHER_DATABASE,
                    path=self.storage.root,
                    run=entry.run,
                    place=entry.place,
                )

    def _write(self, identity: str) -> Entry | None:
        """Write, verify and commit; return None if there is nothing to archive."""
        self._step("write", "Writing finished tasks to Parquet")
        parts = self._finished_parts()
        disk = self.storage.disk
        files = self._write_by_spark(parts) if disk is None else self._write_directly(disk, parts)
        if not files:
            return None
        self._step("commit", "Committing")
        entry = Entry(
            kind="archived",
            run=self.run_id,
            at=server_now(self.location),
            place=identity,
            cutoff=self.cutoff,
            files=tuple(files),
            dead_letters=self.settings.dead_letters,
        )
        self.log.commit(entry)
        return entry

    def _finished_parts(self) -> list[Part]:
        parts = []
        for target, statuses in self._sources():
            name = getattr(location_of(self.location).collections, target).name
            parts += parts_of(
                self.spark,
                self.location.model_copy(update={"collection": name}),
                queues=self.queues,
                statuses=statuses,
                time="finished_at",
                until=self.cutoff,
            )
        return parts

    def _write_directly(self, disk: str, parts: Sequence[Part]) -> list[ArchivedFile]:
        """Let the executors write and read files on a shared disk themselves."""
        staging, written = parquet.write_directly(self.spark, disk, parts, self.run_id)
        if not written:
            return []
        staged = [file.name for file in written]
        parquet.check_shared(self.storage, staging, staged)
        names = self._move(staging, staged, sum(file.rows for file in written))
        moved = [replace(file, name=name) for file, name in zip(written, names, strict=True)]
        return parquet.verify_directly(self.spark, self.storage, disk, moved)

    def _write_by_spark(self, parts: Sequence[Part]) -> list[ArchivedFile]:
        """Let Spark write and read files, on any file system."""
        observed = Observation()
        frame = parquet.with_directories(read_parts(self.spark, parts))
        frame = frame.observe(observed, *parquet.totals())
        staging = parquet.write_by_spark(frame, self.storage, self.run_id)
        expected = parquet.Totals.of(observed.get)
        if not expected.rows:
            self.storage.delete(staging)
            return []
        staged = parquet.staged(self.storage, staging)
        names = self._move(staging, staged, expected.rows)
        return parquet.verify_by_spark(self.spark, self.storage, names, expected)

    def _move(self, staging: str, staged: Sequence[str], rows: int) -> list[str]:
        self._step("move", f"Moving the files of {rows:,} tasks into place")
        names = parquet.move(self.storage, staging, staged, self.run_id)
        self._step("verify", "Reading back what was written")
        return names


# Compaction
#
# The new files are staged, compared with the old ones and committed in one entry that lists both.
# Only then are the old files deleted. A run that is killed before the entry leaves the old files
# as they were; one that is killed after it leaves orphans, which the next run deletes.


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
    progress: ProgressCallback = no_progress,
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
        PipelineError: There is no archive at ``path``.
    """
    storage = Storage(spark, path)
    log = ArchiveLog.of_archive(storage)
    run, now = uuid4().hex[:12], datetime.now(UTC)
    before = len(log.state.files)
    if small_groups(log.state, small_bytes):
        log.commit(Entry(kind="begun", run=run, at=now))
        parquet.delete_leftovers(storage, log.state)
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
    progress: ProgressCallback,
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
    staging = parquet.write_by_spark(merged, storage, f"{run}-merged", most_rows=MOST_ROWS)
    found = parquet.staged(storage, staging)
    names = parquet.move(storage, staging, found, f"{run}-merged")
    progress(Step("compare", "Comparing the merged files with the small ones"))
    files = parquet.verify_by_spark(spark, storage, names, expected)
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
