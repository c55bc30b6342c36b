"""All tasks, archived and live, each once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # It has no types.
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from microqueue.arguments import check_settings
from microqueue.errors import InvalidArgument
from microqueue.operations import export
from microqueue.settings import QueueSettings
from microqueue.spark import error_codes
from microqueue.spark.archive.log import ArchiveLog
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.frames import read_tasks
from microqueue.spark.location import LocationOptions, dead_letters_of
from microqueue.spark.storage import Storage
from microqueue.task import DEFAULT_QUEUE

COLUMNS = (
    "id",
    "id_type",
    "queue",
    "name",
    "status",
    "priority",
    "attempts",
    "max_attempts",
    "created_at",
    "updated_at",
    "started_at",
    "finished_at",
    "next_retry_at",
    "backoff_policy",
    "visibility_timeout_sec",
    "error",
    "history",
)
"""The columns that the pipelines use."""

Found = TypeVar("Found")

REPEATS = 2
TASK_KEY = ["id", "created_at"]
"""What identifies a task: an id may be used again later."""


def all_tasks(
    spark: SparkSession,
    *,
    live: LocationOptions | None,
    archive: str | Path | None,
    queues: Sequence[str] | None = None,
    statuses: Sequence[str] | None = None,
    since: datetime | None = None,
    settings: QueueSettings | None = None,
) -> DataFrame:
    """Load the tasks that changed since an instant, with a column ``archived``.

    Either source may be left out. A task that is archived and not yet deleted counts as live.
    """
    if live is None and archive is None:
        raise InvalidArgument(
            "there is nothing to read: give a MongoDB, an archive, or both",
            argument="archive",
            code=error_codes.NO_SOURCE,
        )
    frames = []
    if live is not None:
        frames.append(
            _live(spark, live, queues=queues, statuses=statuses, since=since, settings=settings)
        )
    if archive is not None:
        kept = read_archive(spark, archive, queues=queues, since=since)
        if statuses is not None:
            kept = kept.where(f.col("status").isin(list(statuses)))
        if live is not None and ArchiveLog(Storage(spark, archive)).state.unpurged:
            kept = kept.join(live_ids(spark, live, settings), TASK_KEY, "left_anti")
        frames.append(kept.select(*COLUMNS, f.lit(True).alias("archived")))  # noqa: FBT003 (a value)
    whole = frames[0]
    return whole if len(frames) == 1 else whole.unionByName(frames[1])


def ready_tasks(
    spark: SparkSession,
    location: LocationOptions,
    *,
    queues: Sequence[str] | None,
    created_before: datetime,
    due_by: datetime,
) -> DataFrame:
    """Load the tasks that wait for their first start, without those due after ``due_by``."""
    return _read(
        spark,
        location,
        queue=queues,
        status="pending",
        until=created_before,
        time="created_at",
        query=export.awaiting_first_start(due_by),
        columns=[*TASK_KEY, "queue"],
    ).fillna(DEFAULT_QUEUE, ["queue"])


def read_consistently(
    spark: SparkSession,
    work: Callable[[], Found],
    *,
    live: LocationOptions | None,
    archive: str | Path | None,
) -> Found:
    """Run ``work``, and again, at most twice, if the archive has changed while it ran.

    A task that is archived and deleted after ``work`` has read the log would be in neither source,
    and files that have been merged since no longer exist.
    """
    if live is None or archive is None:
        return work()
    storage = Storage(spark, archive)
    for _ in range(REPEATS):
        before = ArchiveLog(storage).state.number
        try:
            found = work()
        except (PySparkException, Py4JJavaError):
            if ArchiveLog(storage).state.number == before:
                raise
            continue
        if ArchiveLog(storage).state.number == before:
            return found
    return work()


def _live(
    spark: SparkSession,
    location: LocationOptions,
    *,
    queues: Sequence[str] | None,
    statuses: Sequence[str] | None,
    since: datetime | None,
    settings: QueueSettings | None,
) -> DataFrame:
    """Load tasks from MongoDB, including a separate collection of dead letters."""
    load = partial(
        _read,
        spark,
        queue=queues,
        status=statuses,
        since=since,
        time="updated_at",
        columns=COLUMNS,
    )
    frame = load(location)
    if check_settings(settings).separate_dlq:
        # A dead letter that is being moved is in both collections for a moment.
        dead_letters = load(dead_letters_of(location)).where("status = 'failed'")
        frame = frame.unionByName(dead_letters).dropDuplicates(TASK_KEY)
    frame = frame.fillna(DEFAULT_QUEUE, ["queue"])  # As in the archive.
    return frame.select(*COLUMNS, f.lit(False).alias("archived"))  # noqa: FBT003 (a value)


def live_ids(
    spark: SparkSession, location: LocationOptions, settings: QueueSettings | None
) -> DataFrame:
    """Load the keys of all tasks in MongoDB, whatever their queue and status are now."""
    frame = _read(spark, location, columns=TASK_KEY)
    if check_settings(settings).separate_dlq:
        return frame.unionByName(_read(spark, dead_letters_of(location), columns=TASK_KEY))
    return frame


def _read(spark: SparkSession, location: LocationOptions, **selection: Any) -> DataFrame:
    """Load tasks from a location; the selection is as in :func:`read_tasks`."""
    return read_tasks(
        spark,
        uri=location.uri,
        database=location.database,
        collection=location.collection,
        read_preference=location.read_preference,
        **selection,
    )


def attempts_of(tasks: DataFrame) -> DataFrame:
    """Return one row per entry of the tasks' histories, with some columns of the task."""
    columns = ["id", "queue", "name", "backoff_policy", "max_attempts"]
    entry = f.explode("history").alias("entry")
    return tasks.select(*columns, entry).select(*columns, "entry.*")
