"""Tasks of all times: what the archive holds, and what is still in MongoDB, each task once."""

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
from microqueue.spark.archive.log import ArchiveLog
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.frames import read_tasks
from microqueue.spark.location import letters_of
from microqueue.spark.options import LocationOptions
from microqueue.spark.storage import Storage
from microqueue.task import DEFAULT_QUEUE

COLUMNS = (
    "id",
    "id_type",
    "queue",
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
"""What pipelines ask about tasks of all times."""

Found = TypeVar("Found")

REPEATS = 2
LIFE = ["id", "created_at"]
"""What tells a task from a later one that was added under the same id."""


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
    """Load the tasks that changed since an instant, with a column ``archived`` that says where.

    Either place may be left out. A task that is archived and not yet deleted counts as live.
    """
    if live is None and archive is None:
        raise InvalidArgument("give a MongoDB, an archive, or both: there is nothing to read")
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
            kept = kept.join(live_ids(spark, live, settings), LIFE, "left_anti")
        frames.append(kept.select(*COLUMNS, f.lit(True).alias("archived")))  # noqa: FBT003 (a value)
    whole = frames[0]
    return whole if len(frames) == 1 else whole.unionByName(frames[1])


def ready_tasks(
    spark: SparkSession,
    place: LocationOptions,
    *,
    queues: Sequence[str] | None,
    created_before: datetime,
    due_by: datetime,
) -> DataFrame:
    """Load the tasks that wait for their first start, however long they have.

    Of those with a delay, the ones that were due by an instant.
    """
    return _read(
        spark,
        place,
        queue=queues,
        status="pending",
        until=created_before,
        time="created_at",
        query=export.awaiting_first_start(due_by),
        columns=[*LIFE, "queue"],
    ).fillna(DEFAULT_QUEUE, ["queue"])


def steadily(
    spark: SparkSession,
    work: Callable[[], Found],
    *,
    live: LocationOptions | None,
    archive: str | Path | None,
) -> Found:
    """Do what reads both places, and once or twice again if an archive went on meanwhile.

    What is archived and deleted after the archive's log was read is else seen in neither, and
    files that were merged since are no longer there.
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
    place: LocationOptions,
    *,
    queues: Sequence[str] | None,
    statuses: Sequence[str] | None,
    since: datetime | None,
    settings: QueueSettings | None,
) -> DataFrame:
    """Load tasks from MongoDB; dead letters may have a collection of their own."""
    load = partial(
        _read,
        spark,
        queue=queues,
        status=statuses,
        since=since,
        time="updated_at",
        columns=COLUMNS,
    )
    frame = load(place)
    if check_settings(settings).separate_dlq:
        # A letter that is being moved is in both for a moment.
        letters = load(letters_of(place)).where("status = 'failed'")
        frame = frame.unionByName(letters).dropDuplicates(LIFE)
    frame = frame.fillna(DEFAULT_QUEUE, ["queue"])  # As the archive names it.
    return frame.select(*COLUMNS, f.lit(False).alias("archived"))  # noqa: FBT003 (a value)


def live_ids(
    spark: SparkSession, place: LocationOptions, settings: QueueSettings | None
) -> DataFrame:
    """Load what tells the tasks in MongoDB apart, whatever their queue and status are now."""
    frame = _read(spark, place, columns=LIFE)
    if check_settings(settings).separate_dlq:
        return frame.unionByName(_read(spark, letters_of(place), columns=LIFE))
    return frame


def _read(spark: SparkSession, place: LocationOptions, **selection: Any) -> DataFrame:
    """Load tasks from a place; what is selected is as in :func:`read_tasks`."""
    return read_tasks(
        spark,
        uri=place.uri,
        database=place.database,
        collection=place.collection,
        read_preference=place.read_preference,
        **selection,
    )


def attempts_of(tasks: DataFrame) -> DataFrame:
    """Give one row per finished attempt that tasks remember, beside the task's own columns."""
    columns = ["id", "queue", "backoff_policy", "max_attempts"]
    entry = f.explode("history").alias("entry")
    return tasks.select(*columns, entry).select(*columns, "entry.*")
