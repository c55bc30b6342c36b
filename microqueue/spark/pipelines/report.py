"""Report throughput, waits, run times and rates, over archive and live tasks together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from pyspark.sql import SparkSession

from microqueue.arguments import refused
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.durations import Duration, check_duration
from microqueue.model import Model
from microqueue.settings import QueueSettings
from microqueue.spark.pipelines.history import all_tasks, ready_tasks, steadily
from microqueue.spark.pipelines.place import locate, now_at
from microqueue.spark.pipelines.report_page import report_page
from microqueue.spark.pipelines.report_rows import BUCKETS, ReportRow, measure
from microqueue.spark.pipelines.steps import Step, Tell, silent

Bucket: TypeAlias = Literal["minute", "hour", "day"]

MOST_BUCKETS = 200
"""So many points a chart can show; a longer period is cut into coarser buckets."""

RATES = ("throughput_per_sec", "success_rate", "failure_rate", "retry_rate", "target_kept")


class Report(Model):
    """A report: the rows of each queue and bucket, of each queue, and of everything."""

    since: datetime
    until: datetime
    bucket: Bucket
    target_wait_sec: float | None
    rows: tuple[ReportRow, ...]
    files: tuple[str, ...] = ()

    @property
    def total(self) -> ReportRow:
        """The row of everything."""
        whole = (self.until - self.since).total_seconds()
        empty = ReportRow(queue=None, start=None, seconds=whole)
        return next((row for row in self.rows if row.level == "total"), empty)

    @property
    def queues(self) -> list[ReportRow]:
        """One row for each queue."""
        return [row for row in self.rows if row.level == "queue"]

    @property
    def buckets(self) -> list[ReportRow]:
        """One row for each queue and bucket in which something happened."""
        return [row for row in self.rows if row.level == "bucket"]


def report(
    spark: SparkSession,
    *,
    output: str | Path | None = None,
    archive: str | Path | None = None,
    live: bool = True,
    uri: str | None = None,
    database: str | None = None,
    collection: str = DEFAULT_COLLECTION,
    queues: Sequence[str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    bucket: Bucket | None = None,
    target_wait: Duration | None = None,
    settings: QueueSettings | None = None,
    tell: Tell = silent,
) -> Report:
    """Measure a period, by default the last day, and write it down in ``output``.

    The directory gets ``report.html``, which needs nothing else, ``report.parquet`` and
    ``report.csv``; their column ``level`` tells buckets, queues and the total apart.
    ``target_wait`` is the longest that a task should wait for its first start.
    """
    place = locate(uri, database=database, collection=collection) if live else None
    now = now_at(place)
    # In UTC, where a day has 24 hours, and no hour comes twice.
    last = now if until is None else until.astimezone(UTC)
    first = last - timedelta(days=1) if since is None else since.astimezone(UTC)
    if first >= last:
        raise refused("since", first.isoformat(), f"give a time before {last.isoformat()}")
    chosen = bucket or fitting_bucket(last - first)
    if chosen not in BUCKETS:
        raise refused("bucket", chosen, f"give one of {', '.join(BUCKETS)}")
    target = None if target_wait is None else check_duration("target_wait", target_wait)
    target_sec = None if target is None else target.total_seconds()
    tell(Step("measure", "Measuring tasks and attempts"))

    def work() -> list[ReportRow]:
        tasks = all_tasks(
            spark, live=place, archive=archive, queues=queues, since=first, settings=settings
        )
        ready = None
        if place is not None and target is not None:
            ended = min(last, now)
            ready = ready_tasks(
                spark, place, queues=queues, created_before=ended - target, due_by=ended
            )
        return measure(
            tasks,
            since=first,
            until=last,
            bucket_sec=BUCKETS[chosen],
            target_wait_sec=target_sec,
            ready=ready,
        )

    rows = steadily(spark, work, live=place, archive=archive)
    made = Report(
        since=first, until=last, bucket=chosen, target_wait_sec=target_sec, rows=tuple(rows)
    )
    if output is None:
        return made
    tell(Step("draw", "Drawing the report"))
    return made.model_copy(update={"files": tuple(_save(made, Path(output), now))})


def fitting_bucket(period: timedelta) -> Bucket:
    """Choose the finest bucket of which a chart can show the whole period."""
    for name in ("minute", "hour"):
        if period.total_seconds() / BUCKETS[name] <= MOST_BUCKETS:
            return name
    return "day"


def _save(made: Report, directory: Path, now: datetime) -> list[str]:
    directory.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([as_record(row) for row in made.rows], schema=_schema())
    pyarrow.parquet.write_table(table, directory / "report.parquet")
    pyarrow.csv.write_csv(table, directory / "report.csv")
    (directory / "report.html").write_text(report_page(made, now), encoding="utf-8")
    return [str(directory / f"report.{kind}") for kind in ("html", "parquet", "csv")]


def as_record(row: ReportRow) -> dict[str, Any]:
    """Write a row with its level and its rates, flat, as files and programs want it."""
    values = row.model_dump()
    if row.level == "bucket":
        values["waiting_past_target"] = None  # Not none: it is of no bucket.
    return {"level": row.level, **values, **{name: getattr(row, name) for name in RATES}}


def as_document(made: Report) -> dict[str, Any]:
    """Write a whole report for programs, with the level and the rates of each row."""
    rows = [as_record(row) for row in made.rows]
    return {**made.model_dump(exclude={"rows"}), "rows": rows}


def _schema() -> pa.Schema:
    kinds: dict[Any, pa.DataType] = {int: pa.int64(), str | None: pa.string()}
    kinds[datetime | None] = pa.timestamp("ms", tz="UTC")
    fields = [
        (name, kinds.get(info.annotation, pa.float64()))
        for name, info in ReportRow.model_fields.items()
    ]
    rates = ((name, pa.float64()) for name in RATES)
    return pa.schema([("level", pa.string()), *fields, *rates])
