"""Read an archive: every archived task once, as it was when it left MongoDB."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from microqueue.spark.archive.log import ArchivedFile, ArchiveLog, ArchiveState, Version
from microqueue.spark.archive.parquet import read_files
from microqueue.spark.storage import Storage

NUMBERED = r"-\d+\.parquet$"
"""What follows the run, or the merge, in the name of a file."""


def read_archive(
    spark: SparkSession,
    path: str | Path,
    *,
    queues: Sequence[str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> DataFrame:
    """Load the archived tasks that finished from ``since`` on and before ``until``.

    Only what was committed is read, and only the files of the days and queues that are asked
    for. The version of a task that lived on after it was archived is left out.
    """
    storage = Storage(spark, path)
    state = ArchiveLog.of_archive(storage).state
    frame = live_rows(spark, storage, state, _chosen(state, queues, since, until))
    if since is not None:
        frame = frame.where(f.unix_micros("finished_at") >= _micros(since))
    if until is not None:
        frame = frame.where(f.unix_micros("finished_at") < _micros(until))
    return frame


def _chosen(
    state: ArchiveState,
    queues: Sequence[str] | None,
    since: datetime | None,
    until: datetime | None,
) -> list[ArchivedFile]:
    first = "" if since is None else f"{since.astimezone(UTC):%Y-%m-%d}"
    last = "9999-12-31" if until is None else f"{until.astimezone(UTC):%Y-%m-%d}"
    return [
        file
        for file in state.files.values()
        if first <= file.day <= last and (queues is None or file.queue in queues)
    ]


def _micros(instant: datetime) -> int:
    return round(instant.timestamp() * 1_000_000)


def live_rows(
    spark: SparkSession, storage: Storage, state: ArchiveState, files: Iterable[ArchivedFile]
) -> DataFrame:
    """Load files without the versions of tasks that lived on after they were archived.

    A letter whose replay is refused lives on as the very version that it was: its next archive
    counts. Merged files have only rows that count, and are of no run that archived.
    """
    files = list(files)
    frame = read_files(spark, storage, files)
    if not state.superseded or not files:
        return frame
    versions = superseded_frame(spark, state.superseded)
    run = f.regexp_replace("_metadata.file_name", NUMBERED, "")
    frame = frame.withColumns({"run": run, "updated_ms": f.unix_millis("updated_at")})
    same = [frame[name].eqNullSafe(versions[name]) for name in versions.columns]
    return frame.join(f.broadcast(versions), same, "left_anti").drop("run", "updated_ms")


def superseded_frame(spark: SparkSession, versions: Iterable[tuple[str, Version]]) -> DataFrame:
    """Make a small frame of archived versions, each with the run that archived it."""
    rows = [(run, one.id, one.id_type, one.updated_ms) for run, one in versions]
    return spark.createDataFrame(rows, "run string, id string, id_type string, updated_ms long")
