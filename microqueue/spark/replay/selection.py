"""Choose tasks to replay by a SQL condition, in the archive and among dead letters."""

from __future__ import annotations

from pathlib import Path

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from microqueue.arguments import refused
from microqueue.settings import QueueSettings
from microqueue.spark.analytics.fingerprint import fingerprinted
from microqueue.spark.analytics.history import LIFE, live_ids
from microqueue.spark.archive.log import ArchiveLog
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.location import letters_of
from microqueue.spark.options import LocationOptions
from microqueue.spark.storage import Storage
from microqueue.spark.whole_tasks import SCHEMA, parts_of, read_parts, with_payload
from microqueue.task import DEFAULT_QUEUE, TaskStatus


def choose(
    spark: SparkSession,
    place: LocationOptions,
    settings: QueueSettings,
    *,
    where: str,
    archive: str | Path | None,
    letters: bool,
) -> DataFrame:
    """Find the tasks that a condition chooses, in the archive and among dead letters.

    Archived tasks that are done are among them: see :func:`dead`.
    """
    frames = []
    if letters:
        found = _letters(spark, place, settings)
        frames.append(found.withColumn("archived", f.lit(False)))  # noqa: FBT003 (a value)
    if archive is not None:
        kept = read_archive(spark, archive).select(*SCHEMA.names)
        if ArchiveLog(Storage(spark, archive)).state.unpurged:
            kept = kept.join(live_ids(spark, place, settings), LIFE, "left_anti")
        frames.append(kept.withColumn("archived", f.lit(True)))  # noqa: FBT003 (a value)
    if not frames:
        raise refused("archive", archive, "give an archive, or allow dead letters")
    whole = frames[0] if len(frames) == 1 else frames[0].unionByName(frames[1])
    kind = fingerprinted(f.col("queue"), f.col("error.code"), f.col("error.message"))
    whole = with_payload(whole).withColumn("fingerprint", kind)
    try:
        return whole.where(where)
    except (AnalysisException, ParseException) as exc:
        reason = str(exc).strip().partition("\n")[0]
        raise refused("where", where, f"give a SQL condition over columns; {reason}") from exc


def dead() -> Column:
    """Match the dead letters among chosen tasks; the others are archived, and done."""
    return f.col("status") == TaskStatus.FAILED.value


def _letters(spark: SparkSession, place: LocationOptions, settings: QueueSettings) -> DataFrame:
    """Load dead letters; those that nobody has moved to a collection of their own yet, too."""
    parts = parts_of(spark, place, statuses=["failed"])
    if not settings.separate_dlq:
        found = read_parts(spark, parts)
    else:
        parts += parts_of(spark, letters_of(place), statuses=["failed"])
        # One that is being moved is in both for a moment.
        found = read_parts(spark, parts).dropDuplicates(LIFE)
    return found.fillna(DEFAULT_QUEUE, ["queue"])  # As the archive and triage name it.
