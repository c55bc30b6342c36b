"""Ingest files or a table into a queue: good rows become tasks, bad rows a file with reasons.

Each row has an id of its own, by its key or by what it holds, so that a run that was killed
goes on where it was, and a run that is over is not repeated.
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

from microqueue.arguments import check_name, refused
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.model import Model
from microqueue.new_task import NewTask
from microqueue.queue import Queue
from microqueue.settings import QueueSettings
from microqueue.spark.ingest.rows import OUTCOME, Loader
from microqueue.spark.ingest.source import Format, guess_format, read_source
from microqueue.spark.location import locate, location_of, primary
from microqueue.spark.progress import Step, Tell, silent
from microqueue.spark.runs import begin_run, find_report, finish_run
from microqueue.spark.storage import Storage

SECRET = re.compile("secret|password|token|credential|key", re.IGNORECASE)
"""Options of Spark's reader that are how to get at a source, and not noted with a run."""


class IngestSummary(Model):
    """What was ingested; ``repeated`` says that the run was over before, and nothing was done."""

    run: str
    source: str
    queue: str
    added: int
    duplicates: int
    rejected: int
    rejects: str | None = None
    dry_run: bool = False
    repeated: bool = False


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
    run: str | None = None,
    uri: str | None = None,
    database: str | None = None,
    collection: str = DEFAULT_COLLECTION,
    settings: QueueSettings | None = None,
    dry_run: bool = False,
    tell: Tell = silent,
) -> IngestSummary:
    """Add a task for each row of CSV, JSON lines, Parquet or a table.

    ``model`` is a pydantic model, or ``"module:Model"``; rows that it refuses go to ``rejects``,
    one JSON object per line with the row and all reasons. ``key`` names the column that tells
    rows apart; without it, rows are told apart by all that they hold, and equal rows by their
    number. ``options`` go to Spark's reader. The run is named after source and queue unless
    ``run`` says otherwise, and is refused when it was begun with other options; a dry run
    validates, and writes nothing at all.
    """
    check_name(queue)
    NewTask(payload={}, priority=priority)
    kind = source_format or guess_format(source)
    found = read_source(spark, str(source), kind, options or {})
    rows = _numbered(found.rows, key, kind)
    target = None if rejects is None else RejectFile(spark, rejects, found.files)
    place = primary(locate(uri, database=database, collection=collection))
    name = run or hashlib.blake2b(f"{found.name}\n{queue}".encode(), digest_size=6).hexdigest()
    rules = (settings or QueueSettings.from_environment()).model_copy(
        update={"ensure_indexes": False}
    )
    shown = f"{kind}:{found.name}"
    loader = Loader(
        place,
        rules,
        queue=queue,
        model=model,
        key=key,
        run=name,
        priority=priority,
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
        "model": _named(model),
        "options": _noted(options or {}),
        "priority": priority,
    }
    if dry_run:
        report = find_report(place, f"ingest:{name}", details)
    else:
        begun = begin_run(place, f"ingest:{name}", details)
        report = begun.report
    if report is not None:
        return IngestSummary(**{**report, "dry_run": dry_run, "repeated": True})
    if not dry_run:
        tasks = location_of(place).collections.tasks
        Queue(tasks, queue, settings=rules).ensure_indexes(adjust=False)
    tell(Step("ingest", f"Reading {source}"))
    outcome = rows.mapInArrow(loader, OUTCOME).persist(StorageLevel.DISK_ONLY)
    try:
        sums = [f.sum(one).alias(one) for one in ("added", "duplicates", "rejected")]
        total = outcome.agg(*sums).collect()[0].asDict()
        counts = {one: int(value or 0) for one, value in total.items()}
        written = None
        if target is not None and not dry_run:
            tell(Step("rejects", f"Writing {counts['rejected']:,} rejects"))
            if counts["rejected"]:
                written = target.write(outcome)
            else:
                target.clear()
    finally:
        outcome.unpersist()
    summary = IngestSummary(
        run=name, source=shown, queue=queue, rejects=written, dry_run=dry_run, **counts
    )
    if not dry_run:
        finish_run(place, begun, summary.model_dump())
    return summary


def _named(model: str | type[Any] | None) -> str | None:
    """Name a model, by itself and by its name alike."""
    if model is None or isinstance(model, str):
        return model
    return f"{model.__module__}:{model.__qualname__}" if isinstance(model, type) else repr(model)


def _noted(options: Mapping[str, str]) -> list[str]:
    return sorted(f"{name}={value}" for name, value in options.items() if not SECRET.search(name))


def _numbered(rows: DataFrame, key: str | None, kind: str) -> DataFrame:
    """Give each row its identity: a hash of all that it holds, and its number among equals."""
    if key is not None and kind != "json" and key not in rows.columns:
        raise refused("key", key, f"give one of the columns {', '.join(rows.columns)}")
    # The same in every session, whatever its timezone.
    digest = f.sha2(f.to_json(f.struct("*"), {"timeZone": "UTC"}), 256)
    named = rows.select(f.struct("*").alias("row"), digest.alias("digest"))
    equal = Window.partitionBy("digest").orderBy("digest")
    return named.withColumn("number", f.row_number().over(equal))


class RejectFile:
    """One file, in the place of that of earlier runs.

    Made before anything is read: a path that cannot be a file, is a directory, or one of the
    ``sources`` is refused, so that nothing else is ever replaced.
    """

    def __init__(self, spark: SparkSession, path: str | Path, sources: Iterable[str]) -> None:
        try:
            self._storage, self._name = Storage.of_file(spark, path)
        except ValueError as exc:
            raise refused("rejects", str(path), f"give the name of a file; {exc}") from exc
        if self._storage.is_directory(self._name):
            raise refused("rejects", str(path), "it is a directory; give the name of a file")
        if self._storage.exists() and not self._storage.is_directory():
            reason = f"{self._storage.root} is no directory; give the name of a file in one"
            raise refused("rejects", str(path), reason)
        if self._storage.path(self._name) in sources:
            raise refused("rejects", str(path), "it is a file of the source; give another one")

    def write(self, outcome: DataFrame) -> str:
        """Write the rejects of a run, and give the path of the file."""
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
