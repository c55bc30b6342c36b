"""Ingest files or a table into a queue: good rows become tasks, bad rows go to a reject file.

The id of a task is derived from the key of its row, or from the whole row. So a killed run can be
resumed, and a finished run is not repeated.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from microqueue.arguments import check_name, invalid_argument
from microqueue.core import core_of
from microqueue.deprecation import renamed_arguments
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.model import Model
from microqueue.new_task import NewTask
from microqueue.queue import Queue
from microqueue.settings import QueueSettings
from microqueue.spark import error_codes
from microqueue.spark.ingest.rows import OUTCOME, Loader
from microqueue.spark.ingest.source import Format, guess_format, read_source
from microqueue.spark.location import locate, location_of, primary
from microqueue.spark.progress import ProgressCallback, Step, no_progress
from microqueue.spark.runs import begin_run, find_report, finish_run
from microqueue.spark.storage import Storage

SECRET = re.compile("secret|password|token|credential|key", re.IGNORECASE)
"""Options of Spark's reader that are credentials, and not recorded with a run."""


class IngestSummary(Model):
    """What was ingested.

    Attributes:
        run: The name of the run.
        source: The format and the full name of the source.
        queue: The queue.
        added: Tasks that were added.
        duplicates: Rows whose task another run or producer had added before.
        rejected: Rows that are not valid.
        rejects: The reject file, if one was written.
        dry_run: Whether nothing was changed.
        repeated: Whether the run had finished before, and nothing was done.
    """

    run: str
    source: str
    queue: str
    added: int
    duplicates: int
    rejected: int
    rejects: str | None = None
    dry_run: bool = False
    repeated: bool = False


@renamed_arguments(tell="progress")
def ingest(
    spark: SparkSession,
    source: str | Path,
    *,
    queue: str,
    source_format: Format | None = None,
    model: str | type[Any] | None = None,
    key: str | None = None,
    rejects: str | Path | None = None,
    options: Mapping[str, str] | None = None,
    priority: int = 0,
    name: str | None = None,
    run: str | None = None,
    uri: str | None = None,
    database: str | None = None,
    collection: str = DEFAULT_COLLECTION,
    settings: QueueSettings | None = None,
    dry_run: bool = False,
    progress: ProgressCallback = no_progress,
) -> IngestSummary:
    """Add a task for each row of CSV, JSON lines, Parquet or a table.

    Args:
        spark: The session.
        source: A path, or the name of a table.
        queue: The queue that gets the tasks.
        source_format: ``csv``, ``json``, ``parquet`` or ``table``; by default taken from the
            end of the path.
        model: A pydantic model that validates the rows, or ``"module:Model"``.
        key: The column that identifies a row. By default the whole row does, and equal rows are
            numbered.
        rejects: The file for rows that are not valid: one JSON object per line, with the row and
            all reasons.
        options: Options of Spark's reader.
        priority: The priority of the tasks.
        name: The name of the tasks.
        run: The name of the run; by default derived from source and queue.
        uri: The address of MongoDB; by default ``MICROQUEUE_URI``, or the embedded server.
        database: The database; by default that of the address.
        collection: The collection of the tasks.
        settings: The settings of the queue; by default those of the environment.
        dry_run: Whether to validate only, and write nothing.
        progress: Called with each step that begins.

    Returns:
        How many tasks were added and how many rows rejected.

    Raises:
        InvalidArgument: An argument is not valid, Spark cannot read the source, or the run was
            begun with other options.
        PipelineError: The run is too old to be resumed.
    """
    check_name(queue)
    NewTask(payload={}, priority=priority, name=name)
    kind = source_format or guess_format(source)
    found = read_source(spark, str(source), kind, options or {})
    rows = _numbered(found.rows, key, kind)
    target = None if rejects is None else RejectFile(spark, rejects, found.files)
    location = primary(locate(uri, database=database, collection=collection))
    chosen = run or hashlib.blake2b(f"{found.name}\n{queue}".encode(), digest_size=6).hexdigest()
    queue_settings = (settings or QueueSettings.from_environment()).model_copy(
        update={"ensure_indexes": False}
    )
    shown = f"{kind}:{found.name}"
    loader = Loader(
        location,
        queue_settings,
        queue=queue,
        model=model,
        key=key,
        run=chosen,
        priority=priority,
        name=name,
        kind=kind,
        columns=found.rows.schema,
        write=not dry_run,
    )
    loader.check()
    details = {
        "kind": "ingest",
        "source": shown,
        "queue": queue,
        "key": key,
        "model": _model_name(model),
        "options": _public_options(options or {}),
        "priority": priority,
        "name": name,
    }
    if dry_run:
        report = find_report(location, f"ingest:{chosen}", details)
    else:
        begun = begin_run(location, f"ingest:{chosen}", details)
        report = begun.report
    if report is not None:
        return IngestSummary(**{**report, "dry_run": dry_run, "repeated": True})
    if not dry_run:
        tasks = location_of(location).collections.tasks
        core = core_of(Queue(tasks, queue, settings=queue_settings))
        core.run(core.prepare())
    progress(Step("ingest", f"Reading {source}"))
    outcome = rows.mapInArrow(loader, OUTCOME).persist(StorageLevel.DISK_ONLY)
    try:
        sums = [f.sum(one).alias(one) for one in ("added", "duplicates", "rejected")]
        total = outcome.agg(*sums).collect()[0].asDict()
        counts = {one: int(value or 0) for one, value in total.items()}
        written = None
        if target is not None and not dry_run:
            progress(Step("rejects", f"Writing {counts['rejected']:,} rejected rows"))
            if counts["rejected"]:
                written = target.write(outcome)
            else:
                target.clear()
    finally:
        outcome.unpersist()
    summary = IngestSummary(
        run=chosen, source=shown, queue=queue, rejects=written, dry_run=dry_run, **counts
    )
    if not dry_run:
        finish_run(location, begun, summary.model_dump())
    return summary


def _model_name(model: str | type[Any] | None) -> str | None:
    """Return the name of a model that was given as a class or by name."""
    if model is None or isinstance(model, str):
        return model
    return f"{model.__module__}:{model.__qualname__}" if isinstance(model, type) else repr(model)


def _public_options(options: Mapping[str, str]) -> list[str]:
    return sorted(f"{name}={value}" for name, value in options.items() if not SECRET.search(name))


def _numbered(rows: DataFrame, key: str | None, kind: str) -> DataFrame:
    """Add the identity of each row: a hash of the whole row, and its number among equal rows."""
    if key is not None and kind != "json" and key not in rows.columns:
        raise invalid_argument(
            "key",
            key,
            f"give one of the columns {', '.join(rows.columns)}",
            code=error_codes.UNKNOWN_COLUMN,
        )
    # In UTC, so that the hash does not depend on the timezone of the session.
    digest = f.sha2(f.to_json(f.struct("*"), {"timeZone": "UTC"}), 256)
    named = rows.select(f.struct("*").alias("row"), digest.alias("digest"))
    equal = Window.partitionBy("digest").orderBy("digest")
    return named.withColumn("number", f.row_number().over(equal))


class RejectFile:
    """The file of rejected rows: one JSON object per line. It replaces that of an earlier run.

    The path is checked before anything is read: it must be the name of a file, and neither a
    directory nor one of the ``sources``.
    """

    def __init__(self, spark: SparkSession, path: str | Path, sources: Iterable[str]) -> None:
        try:
            self._storage, self._name = Storage.of_file(spark, path)
        except ValueError as exc:
            raise invalid_argument(
                "rejects",
                str(path),
                f"give the name of a file; {exc}",
                code=error_codes.NOT_A_FILE,
            ) from exc
        if self._storage.is_directory(self._name):
            raise invalid_argument(
                "rejects",
                str(path),
                "it is a directory; give the name of a file",
                code=error_codes.NOT_A_FILE,
            )
        if self._storage.exists() and not self._storage.is_directory():
            reason = f"{self._storage.root} is not a directory; give the name of a file in one"
            raise invalid_argument("rejects", str(path), reason, code=error_codes.NOT_A_FILE)
        if self._storage.path(self._name) in sources:
            raise invalid_argument(
                "rejects",
                str(path),
                "it is a file of the source; give another one",
                code=error_codes.IS_SOURCE,
            )

    def write(self, outcome: DataFrame) -> str:
        """Write the rejected rows, and return the path of the file."""
        staging = f".{self._name}.staging"
        lines = outcome.where("reject is not null").select(f.col("reject").alias("value"))
        lines.coalesce(1).write.mode("overwrite").text(self._storage.path(staging))
        (part,) = (one.name for one in self._storage.list(staging) if one.name.endswith(".txt"))
        self.clear()
        self._storage.move(part, self._name)
        self._storage.delete(staging)
        return self._storage.path(self._name)

    def clear(self) -> None:
        """Delete the file of an earlier run, if there is one."""
        self._storage.delete_file(self._name)
