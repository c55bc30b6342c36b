"""Read an archive: each archived task once, as it was when it was archived."""

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
"""What follows the id of the run in the name of a file."""


WHOLE_HISTORY = """
    case
        when status = 'done' and started_at is not null
            and coalesce(try_element_at(history, -1).outcome, '') != 'done'
        then array_append(
            coalesce(history, array()),
            named_struct(
                'attempt', attempts,
                'worker_id', worker_id,
                'started_at', started_at,
                'ended_at', finished_at,
                'outcome', 'done',
                'error', cast(null as struct<message: string, code: string, at: timestamp>)
            )
        )
        else history
    end
"""
"""The history with the successful attempt, as ``microqueue.task.last_attempt`` derives it."""


def read_archive(
    spark: SparkSession,
    path: str | Path,
    *,
    queues: Sequence[str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> DataFrame:
    """Load the archived tasks that finished from ``since`` on and before ``until``.

    Only committed files are read, and only those of the days and queues in question. A version
    that was superseded before it could be deleted from MongoDB is left out.

    Args:
        spark: The session.
        path: The archive, as given to ``archive``.
        queues: The queues to read; by default all.
        since: The first instant to include; by default there is no limit.
        until: The first instant to leave out; by default there is no limit.

    Returns:
        One row per task: the columns to query, ``day``, and the whole task in ``document``.

    Raises:
        PipelineError: There is no archive at ``path``.
    """
    storage = Storage(spark, path)
    state = ArchiveLog.of_archive(storage).state
    frame = live_rows(spark, storage, state, _select(state, queues, since, until))
    if since is not None:
        frame = frame.where(f.unix_micros("finished_at") >= _micros(since))
    if until is not None:
        frame = frame.where(f.unix_micros("finished_at") < _micros(until))
    return frame.withColumn("history", f.expr(WHOLE_HISTORY))


def _select(
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
    """Load files without superseded versions.

    A version is superseded only in the files of the run that archived it: a dead letter whose
    replay was rejected stays in MongoDB unchanged, and the next run archives the same version
    again. Merged files hold no superseded versions.
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
    """Return a small DataFrame of versions, each with the run that archived it."""
    rows = [(run, one.id, one.id_type, one.updated_ms) for run, one in versions]
    return spark.createDataFrame(rows, "run string, id string, id_type string, updated_ms long")
