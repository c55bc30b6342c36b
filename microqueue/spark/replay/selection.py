"""Select tasks to replay by a SQL condition, from the dead letters and an archive."""

from __future__ import annotations

from pathlib import Path

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from microqueue.arguments import invalid_argument
from microqueue.settings import QueueSettings
from microqueue.spark import error_codes
from microqueue.spark.analytics.fingerprint import fingerprint_column
from microqueue.spark.analytics.task_source import TASK_KEY, live_ids
from microqueue.spark.archive.log import ArchiveLog
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.location import LocationOptions, dead_letters_of
from microqueue.spark.storage import Storage
from microqueue.spark.whole_tasks import SCHEMA, parts_of, read_parts, with_payload
from microqueue.task import DEFAULT_QUEUE, TaskStatus


def select(
    spark: SparkSession,
    location: LocationOptions,
    settings: QueueSettings,
    *,
    where: str,
    archive: str | Path | None,
    dead_letters: bool,
) -> DataFrame:
    """Return the dead letters and archived tasks that meet a condition.

    Archived tasks that are done are among them; :func:`is_dead_letter` tells them apart.

    Raises:
        InvalidArgument: The condition is not valid, or there is nothing to select from.
    """
    frames = []
    if dead_letters:
        found = _dead_letters(spark, location, settings)
        frames.append(found.withColumn("archived", f.lit(False)))  # noqa: FBT003 (a value)
    if archive is not None:
        kept = read_archive(spark, archive).select(*SCHEMA.names)
        if ArchiveLog(Storage(spark, archive)).state.unpurged:
            kept = kept.join(live_ids(spark, location, settings), TASK_KEY, "left_anti")
        frames.append(kept.withColumn("archived", f.lit(True)))  # noqa: FBT003 (a value)
    if not frames:
        raise invalid_argument(
            "archive",
            archive,
            "give an archive, or allow dead letters",
            code=error_codes.NO_SOURCE,
        )
    whole = frames[0] if len(frames) == 1 else frames[0].unionByName(frames[1])
    kind = fingerprint_column(f.col("queue"), f.col("error.code"), f.col("error.message"))
    whole = with_payload(whole).withColumn("fingerprint", kind)
    try:
        return whole.where(where)
    except (AnalysisException, ParseException) as exc:
        reason = str(exc).strip().partition("\n")[0]
        raise invalid_argument(
            "where",
            where,
            f"give a SQL condition over columns; {reason}",
            code=error_codes.NOT_SQL,
        ) from exc


def is_dead_letter() -> Column:
    """Return the condition for dead letters; the other selected tasks are archived and done."""
    return f.col("status") == TaskStatus.FAILED.value


def _dead_letters(
    spark: SparkSession, location: LocationOptions, settings: QueueSettings
) -> DataFrame:
    """Load dead letters, also those that are still to be moved to their own collection."""
    parts = parts_of(spark, location, statuses=["failed"])
    if not settings.separate_dlq:
        found = read_parts(spark, parts)
    else:
        parts += parts_of(spark, dead_letters_of(location), statuses=["failed"])
        # A dead letter that is being moved is in both collections for a moment.
        found = read_parts(spark, parts).dropDuplicates(TASK_KEY)
    return found.fillna(DEFAULT_QUEUE, ["queue"])  # As in the archive and in triage.
