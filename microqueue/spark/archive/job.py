"""Archive finished tasks to Parquet, by day and queue, and take them out of MongoDB.

The order is what makes it safe: write, read back and compare, commit, and only then delete,
each task only as the very version that was archived. Killed at any point and run again, it
finishes what the log says is unfinished: nothing is lost, and nothing is there twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from uuid import uuid4

from pydantic import Field
from pyspark.sql import Observation, SparkSession

from microqueue.arguments import check_names, refused
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.durations import Duration, check_duration
from microqueue.errors import MicroqueueError
from microqueue.model import Model
from microqueue.operations import archive as operations
from microqueue.operations.call import Target
from microqueue.settings import QueueSettings
from microqueue.spark.archive import compaction, direct, parquet
from microqueue.spark.archive.log import ArchivedFile, ArchiveLog, Entry
from microqueue.spark.archive.purge import Purge
from microqueue.spark.location import locate, location_of, primary, server_now
from microqueue.spark.options import LocationOptions
from microqueue.spark.progress import Step, Tell, silent
from microqueue.spark.storage import Storage
from microqueue.spark.whole_tasks import Part, parts_of, read_parts
from microqueue.task import DEFAULT_QUEUE


class ArchiveSummary(Model):
    """What a run of the archive did, or in a dry run, what it would do."""

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


@dataclass(frozen=True)
class _Job:
    """What every step needs to know."""

    spark: SparkSession
    storage: Storage
    log: ArchiveLog
    place: LocationOptions
    settings: QueueSettings
    run: str
    cutoff: datetime
    tell: Tell


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
    tell: Tell = silent,
) -> ArchiveSummary:
    """Move tasks that finished longer ago than ``older_than`` into the archive at ``path``.

    ``path`` is any directory that Spark can write. Tasks that are replayed while this runs
    stay in MongoDB, and ``read_archive`` leaves their archived version out. Two runs at once
    are safe: the later one takes over, and the earlier one ends with ``ArchiveConflict``.
    """
    check_names("queues", () if queues is None else queues)
    _check_statuses(statuses)
    place = locate(uri, database=database, collection=collection)
    storage = Storage(spark, path)
    job = _Job(
        spark=spark,
        storage=storage,
        log=ArchiveLog(storage),
        place=primary(place),
        settings=settings or QueueSettings.from_environment(),
        run=uuid4().hex[:12],
        cutoff=server_now(place) - check_duration("older_than", older_than),
        tell=tell,
    )
    if dry_run:
        return _look(job, queues, statuses)
    return _run(job, queues, statuses, compact=compact)


def _check_statuses(statuses: Sequence[str]) -> None:
    if not statuses or not set(statuses) <= set(operations.FINISHED_STATUSES):
        raise refused("statuses", statuses, "give done, failed, or both: others are not finished")


def _look(job: _Job, queues: Sequence[str] | None, statuses: Sequence[str]) -> ArchiveSummary:
    """Count what would be archived."""
    found: dict[str, int] = {}
    for target, wanted in _sources(job.settings, statuses):
        counting = operations.count_finished(
            queues, statuses=wanted, before=job.cutoff, target=target
        )
        for one in location_of(job.place).run(counting):
            name = f"{one.get('queue', DEFAULT_QUEUE)}/{one['status']}"
            found[name] = found.get(name, 0) + one["count"]
    return ArchiveSummary(
        run=job.run, path=job.storage.root, cutoff=job.cutoff, dry_run=True, found=found
    )


def _sources(
    settings: QueueSettings, statuses: Sequence[str]
) -> list[tuple[Target, Sequence[str]]]:
    """Say where finished tasks are: dead letters may have a collection of their own."""
    if not settings.separate_dlq:
        return [(Target.TASKS, statuses)]
    in_tasks = [status for status in statuses if status != "failed"]
    sources: list[tuple[Target, Sequence[str]]] = [(Target.TASKS, in_tasks)] if in_tasks else []
    if "failed" in statuses:
        sources.append((Target.DEAD_LETTERS, ["failed"]))
    return sources


def _run(
    job: _Job, queues: Sequence[str] | None, statuses: Sequence[str], *, compact: bool
) -> ArchiveSummary:
    identity = _identity(job)
    _check_unpurged(job, identity)
    parquet.check_log(job.storage, job.log.state)
    job.tell(Step("begin", "Taking over the archive"))
    job.log.commit(Entry(kind="begun", run=job.run, at=server_now(job.place), place=identity))
    parquet.sweep(job.storage, job.log.state)
    purge = Purge(job.spark, job.storage, job.log, job.place, job.tell)
    recovered = sum(purge.run(entry).deleted for entry in list(job.log.state.unpurged.values()))

    begun = time.monotonic()
    written = _write(job, identity, queues, statuses)
    committed = time.monotonic()
    purged = None if written is None else purge.run(written)
    ended = time.monotonic()
    compacted = 0
    if compact:
        compacted = compaction.compact_files(
            job.spark, job.storage, job.log, run=job.run, now=server_now(job.place), tell=job.tell
        )
    files = written.files if written is not None else ()
    return ArchiveSummary(
        run=job.run,
        path=job.storage.root,
        cutoff=job.cutoff,
        archived=sum(file.rows for file in files),
        deleted=purged.deleted if purged else 0,
        superseded=len(purged.superseded) if purged else 0,
        files=len(files),
        size=sum(file.size for file in files),
        recovered=recovered,
        compacted=compacted,
        write_sec=committed - begun,
        purge_sec=ended - committed,
    )


def _identity(job: _Job) -> str:
    here = location_of(job.place)
    name = here.collections.name
    found = here.run(operations.identify_collection(name))
    return f"{here.collections.database.name}.{name}#{found}"


def _check_unpurged(job: _Job, identity: str) -> None:
    """Refuse to finish in one database what was begun in another."""
    for entry in job.log.state.unpurged.values():
        if entry.place != identity:
            raise MicroqueueError(
                f"run {entry.run} archived tasks of {entry.place} and has not deleted all of "
                f"them there yet; this is {identity}. Run the archive on that database first"
            )


def _write(
    job: _Job, identity: str, queues: Sequence[str] | None, statuses: Sequence[str]
) -> Entry | None:
    """Write, read back and compare, and commit; give nothing if there was nothing."""
    job.tell(Step("write", "Writing finished tasks to Parquet"))
    parts = _finished(job, queues, statuses)
    disk = job.storage.disk
    files = _through_spark(job, parts) if disk is None else _directly(job, disk, parts)
    if not files:
        return None
    job.tell(Step("commit", "Committing"))
    entry = Entry(
        kind="archived",
        run=job.run,
        at=server_now(job.place),
        place=identity,
        cutoff=job.cutoff,
        files=tuple(files),
        dead_letters=job.settings.dead_letters,
    )
    job.log.commit(entry)
    return entry


def _directly(job: _Job, disk: str, parts: Sequence[Part]) -> list[ArchivedFile]:
    """Have the executors write and read files on a disk themselves."""
    staging, written = direct.write(job.spark, disk, parts, job.run)
    if not written:
        return []
    found = [file.name for file in written]
    parquet.check_shared(job.storage, staging, found)
    job.tell(_moving(sum(file.rows for file in written)))
    names = parquet.move(job.storage, staging, found, job.run)
    job.tell(VERIFYING)
    placed = [replace(file, name=name) for file, name in zip(written, names, strict=True)]
    return direct.verify(job.spark, job.storage, disk, placed)


def _through_spark(job: _Job, parts: Sequence[Part]) -> list[ArchivedFile]:
    """Have Spark write and read files, wherever it can."""
    observed = Observation()
    frame = parquet.placed(read_parts(job.spark, parts))
    frame = frame.observe(observed, *parquet.totals())
    staging = parquet.write(frame, job.storage, job.run)
    expected = parquet.Totals.of(observed.get)
    if not expected.rows:
        job.storage.delete(staging)
        return []
    job.tell(_moving(expected.rows))
    found = parquet.staged(job.storage, staging)
    names = parquet.move(job.storage, staging, found, job.run)
    job.tell(VERIFYING)
    return parquet.verify(job.spark, job.storage, names, expected)


VERIFYING = Step("verify", "Reading back what was written")


def _moving(rows: int) -> Step:
    return Step("move", f"Putting {rows:,} tasks in place")


def _finished(job: _Job, queues: Sequence[str] | None, statuses: Sequence[str]) -> list[Part]:
    parts = []
    for target, wanted in _sources(job.settings, statuses):
        name = location_of(job.place).collections.at(target).name
        place = job.place.model_copy(update={"collection": name})
        parts += parts_of(
            job.spark,
            place,
            queues=queues,
            statuses=wanted,
            time="finished_at",
            until=job.cutoff,
        )
    return parts
