"""Report throughput, waits, run times and rates of archived and live tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from pyspark.sql import Column, DataFrame, GroupedData, SparkSession
from pyspark.sql import functions as f

from microqueue.arguments import invalid_argument
from microqueue.deprecation import renamed_arguments
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.durations import Duration, check_duration
from microqueue.model import Model
from microqueue.settings import QueueSettings
from microqueue.spark.analytics.pages import report_page
from microqueue.spark.analytics.task_source import (
    TASK_KEY,
    all_tasks,
    attempts_of,
    read_consistently,
    ready_tasks,
)
from microqueue.spark.location import locate, now_at
from microqueue.spark.progress import ProgressCallback, Step, no_progress
from microqueue.task import Outcome

Bucket: TypeAlias = Literal["minute", "hour", "day"]

MOST_BUCKETS = 200
"""The most points that a chart can show; longer periods get coarser buckets."""

RATES = ("throughput_per_sec", "success_rate", "failure_rate", "retry_rate", "target_kept")
BUCKETS: dict[str, int] = {"minute": 60, "hour": 3600, "day": 86_400}
"""The seconds of a bucket; it begins at a multiple of them, in UTC."""

Level: TypeAlias = Literal["bucket", "queue", "name", "total"]

MOST_NAMES = 200
"""The most names that have their own rows."""
OTHERS = "others"
LEVELS: tuple[list[str], ...] = (["queue", "bucket"], ["queue"], ["name"], [])
"""The columns that make the rows of each level."""

KEY = ("queue", "bucket", "name")
Key: TypeAlias = tuple[Any, ...]
"""The values of these columns in a row; those that its level does not have are None."""
SHARES = (0.5, 0.95, 0.99)
ACCURACY = 10_000
RETRIED_OUTCOMES = [one.value for one in Outcome if one.is_reclaimed or one is Outcome.RETRIED]
REFUNDED = [one.value for one in Outcome if one.is_refunded]


class ReportRow(Model):
    """The figures of one queue in one bucket, of one queue, of one name, or of everything.

    A wait is the time from enqueueing to the first start, and counts in the bucket of that start.
    A run time is that of one attempt, and counts in the bucket of its end. Times are in seconds.

    Attributes:
        queue: The queue; None for a name and for the total.
        start: The start of the bucket; None for the whole period.
        name: The name of the tasks, empty for tasks without one; None for other levels.
        enqueued: Tasks that were enqueued.
        done: Tasks that succeeded.
        failed: Tasks that became dead letters.
        attempts: Attempts that ended.
        retries: Attempts that had to be repeated.
        started: Tasks that were started for the first time.
        kept: Those of them that started within the target.
        waiting_past_target: Tasks that had waited longer than the target at the end of the
            period; not counted by bucket and by name.
        wait_p50: The median wait.
        wait_p95: The 95th percentile.
        wait_p99: The 99th percentile.
        run_p50: The median run time.
        run_p95: The 95th percentile.
        run_p99: The 99th percentile.
        seconds: How much of the period is in the bucket.
    """

    queue: str | None
    start: datetime | None
    name: str | None = None
    enqueued: int = 0
    done: int = 0
    failed: int = 0
    attempts: int = 0
    retries: int = 0
    started: int = 0
    kept: int = 0
    waiting_past_target: int = 0
    wait_p50: float | None = None
    wait_p95: float | None = None
    wait_p99: float | None = None
    run_p50: float | None = None
    run_p95: float | None = None
    run_p99: float | None = None
    seconds: float = 0.0

    @property
    def level(self) -> Level:
        """What the row covers. Each level counts everything once."""
        if self.queue is None:
            return "total" if self.name is None else "name"
        return "queue" if self.start is None else "bucket"

    @property
    def throughput_per_sec(self) -> float:
        """Tasks done per second."""
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def success_rate(self) -> float | None:
        """The share of finished tasks that were done."""
        return share(self.done, self.done + self.failed)

    @property
    def failure_rate(self) -> float | None:
        """The share of finished tasks that failed."""
        return share(self.failed, self.done + self.failed)

    @property
    def retry_rate(self) -> float | None:
        """The share of attempts that had to be repeated."""
        return share(self.retries, self.attempts)

    @property
    def target_kept(self) -> float | None:
        """The share of tasks that started within the target; those still waiting past it count."""
        return share(self.kept, self.started + self.waiting_past_target)


class Report(Model):
    """A report: rows for each queue and bucket, for each queue, for each name, and for everything.

    Attributes:
        since: The start of the period.
        until: The end of the period.
        bucket: ``minute``, ``hour`` or ``day``.
        target_wait_sec: The longest wait that a task should have, if one was given.
        rows: The figures.
        files: The files that were written.
    """

    since: datetime
    until: datetime
    bucket: Bucket
    target_wait_sec: float | None
    rows: tuple[ReportRow, ...]
    files: tuple[str, ...] = ()

    @property
    def bucket_sec(self) -> int:
        """The seconds of a bucket."""
        return BUCKETS[self.bucket]

    @property
    def total(self) -> ReportRow:
        """The row for everything."""
        whole = (self.until - self.since).total_seconds()
        empty = ReportRow(queue=None, start=None, seconds=whole)
        return next((row for row in self.rows if row.level == "total"), empty)

    @property
    def queues(self) -> list[ReportRow]:
        """One row per queue."""
        return [row for row in self.rows if row.level == "queue"]

    @property
    def names(self) -> list[ReportRow]:
        """One row per task name, the one with the most tasks first; empty: tasks without a name.

        The rarest of more than 200 names are together in one row, ``others``.
        """
        named = [row for row in self.rows if row.level == "name"]
        return sorted(named, key=lambda row: -(row.enqueued + row.done + row.failed))

    @property
    def buckets(self) -> list[ReportRow]:
        """One row per queue and bucket in which something happened."""
        return [row for row in self.rows if row.level == "bucket"]


@renamed_arguments(tell="progress")
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
    progress: ProgressCallback = no_progress,
) -> Report:
    """Measure the tasks of a period.

    Args:
        spark: The session.
        output: A directory for ``report.html``, ``report.parquet`` and ``report.csv``.
        archive: An archive to read, besides MongoDB.
        live: Whether to read MongoDB.
        uri: The address of MongoDB; by default ``MICROQUEUE_URI``, or the embedded server.
        database: The database; by default that of the address.
        collection: The collection of the tasks.
        queues: The queues to read; by default all.
        since: The start of the period; by default one day before its end.
        until: The end of the period; by default now.
        bucket: ``minute``, ``hour`` or ``day``; by default what a chart can show.
        target_wait: The longest that a task should wait for its first start.
        settings: The settings of the queues; by default those of the environment.
        progress: Called with each step that begins.

    Returns:
        The figures, and the files that were written.

    Raises:
        InvalidArgument: An argument is not valid, or there is nothing to read.
    """
    location = locate(uri, database=database, collection=collection) if live else None
    now = now_at(location)
    # In UTC every day has 24 hours, and no hour repeats.
    last = now if until is None else until.astimezone(UTC)
    first = last - timedelta(days=1) if since is None else since.astimezone(UTC)
    if first >= last:
        raise invalid_argument("since", first.isoformat(), f"give a time before {last.isoformat()}")
    chosen = bucket or fitting_bucket(last - first)
    if chosen not in BUCKETS:
        raise invalid_argument("bucket", chosen, f"give one of {', '.join(BUCKETS)}")
    target = None if target_wait is None else check_duration("target_wait", target_wait)
    target_sec = None if target is None else target.total_seconds()
    progress(Step("measure", "Measuring tasks and attempts"))

    def work() -> list[ReportRow]:
        tasks = all_tasks(
            spark, live=location, archive=archive, queues=queues, since=first, settings=settings
        )
        ready = None
        if location is not None and target is not None:
            ended = min(last, now)
            ready = ready_tasks(
                spark, location, queues=queues, created_before=ended - target, due_by=ended
            )
        return measure(
            tasks,
            since=first,
            until=last,
            bucket_sec=BUCKETS[chosen],
            target_wait_sec=target_sec,
            ready=ready,
        )

    rows = read_consistently(spark, work, live=location, archive=archive)
    made = Report(
        since=first, until=last, bucket=chosen, target_wait_sec=target_sec, rows=tuple(rows)
    )
    if output is None:
        return made
    progress(Step("draw", "Drawing the report"))
    return made.model_copy(update={"files": tuple(_save(made, Path(output), now))})


def fitting_bucket(period: timedelta) -> Bucket:
    """Return the finest bucket with which a chart can show the whole period."""
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
    """Return a row with its level and rates, as it is written to files."""
    values = row.model_dump()
    if row.level in {"bucket", "name"}:
        values["waiting_past_target"] = None  # It is counted for queues and in total.
    return {"level": row.level, **values, **{name: getattr(row, name) for name in RATES}}


def as_document(made: Report) -> dict[str, Any]:
    """Return a report as a document, with the level and the rates of each row."""
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


# Measuring


def share(part: int, whole: int) -> float | None:
    """Return a share, or None if the whole is zero."""
    return part / whole if whole else None


def measure(
    tasks: DataFrame,
    *,
    since: datetime,
    until: datetime,
    bucket_sec: int,
    target_wait_sec: float | None,
    ready: DataFrame | None = None,
) -> list[ReportRow]:
    """Compute the rows of each queue and bucket, of each queue, of each name, and of everything.

    ``ready`` has the tasks that should have been started by the end of the period, and were not.
    """
    window = _Window(since, until, bucket_sec)
    tasks = tasks.cache()  # Queried several times, and read once.
    try:
        found: dict[Key, dict[str, Any]] = {}
        named = _with_few_names(tasks)
        frames = [
            _enqueued(named, window),
            _finished(named, window),
            _started(named, window, target_wait_sec),
            _attempts(named, window),
        ]
        if target_wait_sec is not None:
            frames.append(_waiting(tasks, ready, until, target_wait_sec))
        for frame in frames:
            for row in frame.collect():
                values = {name: value for name, value in row.asDict().items() if value is not None}
                key = tuple(values.pop(column, None) for column in KEY)
                found.setdefault(key, {}).update(values)
    finally:
        tasks.unpersist()
    return sorted(_rows(found, window), key=_order)


def _order(row: ReportRow) -> tuple[str, float, str]:
    return row.queue or "", row.start.timestamp() if row.start else 0.0, row.name or ""


def _with_few_names(tasks: DataFrame) -> DataFrame:
    """Replace the rarest of many names by one, and a missing name by the empty string."""
    name = f.coalesce("name", f.lit(""))
    counted = tasks.groupBy(name.alias("name")).count()
    most = counted.orderBy(f.desc("count"), "name").limit(MOST_NAMES + 1).collect()
    if len(most) > MOST_NAMES:
        known = [row["name"] for row in most[:MOST_NAMES]]
        name = f.when(name.isin(known), name).otherwise(OTHERS)
    return tasks.withColumn("name", name)


def _by_level(frame: DataFrame) -> GroupedData:
    return frame.groupingSets([[f.col(one) for one in level] for level in LEVELS], *KEY)


class _Window:
    """The period of a report, in buckets."""

    def __init__(self, since: datetime, until: datetime, bucket_sec: int) -> None:
        self.since, self.until, self.bucket_sec = since, until, bucket_sec

    def of(self, frame: DataFrame, instant: str | Column) -> DataFrame:
        """Return the rows within the period, with their bucket."""
        micros = f.unix_micros(instant)
        first, last = (round(at.timestamp() * 1_000_000) for at in (self.since, self.until))
        size = self.bucket_sec
        bucket = f.floor(micros / 1_000_000 / size) * size
        return frame.where((micros >= first) & (micros < last)).withColumn("bucket", bucket)

    def seconds(self, bucket: int | None) -> float:
        """Return how much of the period is in a bucket; without a bucket, how long it is."""
        since, until = self.since.timestamp(), self.until.timestamp()
        if bucket is None:
            return (self.until - self.since).total_seconds()
        return min(until, bucket + self.bucket_sec) - max(since, bucket)


def _rows(found: dict[Key, dict[str, Any]], window: _Window) -> Iterator[ReportRow]:
    for (queue, bucket, name), values in found.items():
        waits, runs = values.pop("waits", None) or (), values.pop("runs", None) or ()
        yield ReportRow(
            queue=queue,
            start=None if bucket is None else datetime.fromtimestamp(bucket, UTC),
            name=name,
            seconds=window.seconds(bucket),
            **values,
            **dict(zip(("wait_p50", "wait_p95", "wait_p99"), waits, strict=False)),
            **dict(zip(("run_p50", "run_p95", "run_p99"), runs, strict=False)),
        )


def _enqueued(tasks: DataFrame, window: _Window) -> DataFrame:
    counted = f.count(f.lit(1)).alias("enqueued")
    return _by_level(window.of(tasks, "created_at")).agg(counted)


def _finished(tasks: DataFrame, window: _Window) -> DataFrame:
    finished = window.of(tasks.where("status in ('done', 'failed')"), "finished_at")
    return _by_level(finished).agg(
        f.count_if(f.col("status") == "done").alias("done"),
        f.count_if(f.col("status") == "failed").alias("failed"),
    )


def _started(tasks: DataFrame, window: _Window, target_wait_sec: float | None) -> DataFrame:
    started = window.of(_with_start(tasks).where("began is not null"), "began")
    wait = (f.unix_micros("began") - f.unix_micros("created_at")) / 1_000_000
    in_time = f.lit(True) if target_wait_sec is None else wait <= target_wait_sec  # noqa: FBT003 (a value)
    return _by_level(started).agg(
        f.count(f.lit(1)).alias("started"),
        f.count_if(in_time).alias("kept"),
        f.percentile_approx(wait, list(SHARES), ACCURACY).alias("waits"),
    )


def _with_start(tasks: DataFrame) -> DataFrame:
    """Add when a task was first started, if that is known."""
    first = f.try_element_at("history", f.lit(1))
    # A task on its first attempt has no history yet; a long history has lost its first entry.
    began = f.when(first["attempt"] == 1, first["started_at"]).when(
        f.col("attempts") == 1, f.col("started_at")
    )
    return tasks.withColumn("began", began)


def _waiting(
    tasks: DataFrame, ready: DataFrame | None, until: datetime, target_wait_sec: float
) -> DataFrame:
    """Count the tasks that had waited too long at the end of the period.

    They are still waiting, or were started later.
    """
    end = round(until.timestamp() * 1_000_000)
    known = [*TASK_KEY, "queue"]
    late = _with_start(tasks).where(f.unix_micros("began") >= end).select(*known)
    if ready is not None:
        late = late.unionByName(ready.select(*known)).dropDuplicates(TASK_KEY)
    late = late.where(f.unix_micros("created_at") < end - round(target_wait_sec * 1_000_000))
    return late.rollup("queue").agg(f.count(f.lit(1)).alias("waiting_past_target"))


def _attempts(tasks: DataFrame, window: _Window) -> DataFrame:
    ended = window.of(attempts_of(tasks), "ended_at").where(~f.col("outcome").isin(*REFUNDED))
    run = (f.unix_micros("ended_at") - f.unix_micros("started_at")) / 1_000_000
    return _by_level(ended).agg(
        f.count(f.lit(1)).alias("attempts"),
        f.count_if(f.col("outcome").isin(*RETRIED_OUTCOMES)).alias("retries"),
        f.percentile_approx(run, list(SHARES), ACCURACY).alias("runs"),
    )
