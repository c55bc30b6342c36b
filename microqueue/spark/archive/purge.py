"""Take archived tasks out of MongoDB, by what the committed files hold.

A few columns say which version of which task was archived. Only where they do not say all of it,
the whole document is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

import pyarrow as pa
from bson.codec_options import CodecOptions
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from microqueue.operations import archive as operations
from microqueue.operations.call import Document
from microqueue.operations.filters import FAILED
from microqueue.positions import microseconds
from microqueue.spark.archive.log import ArchivedFile, ArchiveLog, Entry, Version
from microqueue.spark.archive.parquet import read_files
from microqueue.spark.ids import INTEGER, OBJECT_ID, STRING, id_type, typed_id
from microqueue.spark.location import location_of, server_now
from microqueue.spark.options import LocationOptions
from microqueue.spark.progress import Step, Tell
from microqueue.spark.storage import Storage
from microqueue.spark.whole_tasks import outlines

DELETE_ROWS = 1000
ROWS_PER_STEP = 250_000
"""How many archived tasks are taken out between two steps that can be seen."""

PLAIN_IDS = (OBJECT_ID, STRING, INTEGER)
"""Ids that are the same whoever reads them. A UUID may be stored in several ways."""

KNOWN = ("status", "created_at", "updated_at")
COLUMNS = ("id", "id_type", *KNOWN, "insert_token")
"""What tells a version of a task from all others."""

INSTANTS = ("created_at", "updated_at")
UTC_INSTANT = pa.timestamp("us", "UTC")

PURGED = pa.schema(
    [
        ("deleted", pa.int64()),
        ("left", pa.int64()),
        ("id", pa.string()),
        ("id_type", pa.string()),
        ("updated_ms", pa.int64()),
    ]
)
PURGED_DDL = "deleted long, left long, id string, id_type string, updated_ms long"

Reader: TypeAlias = Callable[[pa.RecordBatch, CodecOptions[Any]], list[Document]]
"""Makes documents of rows; it may leave some over."""


@dataclass(frozen=True)
class Purge:
    """Deletes what runs have archived, and notes it in the log."""

    spark: SparkSession
    storage: Storage
    log: ArchiveLog
    place: LocationOptions
    tell: Tell

    def run(self, archived: Entry) -> Entry:
        """Delete what one run has archived; safe to repeat, whoever was killed at it.

        Dead letters are deleted where that run found them, whatever the settings are now.
        """
        plain = _plain(letters=archived.dead_letters == "status")
        deleted = done = 0
        superseded: list[Version] = []
        rows = sum(file.rows for file in archived.files)
        for files in _groups(archived.files):
            self.tell(Step("purge", f"Deleting archived tasks ({done:,} of {rows:,})"))
            done += sum(file.rows for file in files)
            for row in self._purge(files, plain):
                deleted += row["deleted"]
                if row["updated_ms"] is not None:
                    superseded.append(Version(**{name: row[name] for name in Version.model_fields}))
        entry = Entry(
            kind="purged",
            run=archived.run,
            at=server_now(self.place),
            superseded=tuple(superseded),
            deleted=deleted,
        )
        self.tell(Step("note", "Noting what was deleted"))
        self.log.commit(entry)
        return entry

    def _purge(self, files: Sequence[ArchivedFile], plain: Column) -> list[Document]:
        """Delete by columns, and what they leave over by documents."""
        now = server_now(self.place)
        frame = read_files(self.spark, self.storage, files).withColumn("plain", plain)
        rows = self._run(frame.select("plain", *COLUMNS), now, _plain_documents)
        if any(row["left"] for row in rows):
            others = frame.where("not plain").select("document")
            rows += self._run(others, now, _whole_documents)
        return rows

    def _run(self, frame: DataFrame, now: datetime, read: Reader) -> list[Document]:
        purger = _Purger(self.place, now, read)
        return [row.asDict() for row in frame.mapInArrow(purger, PURGED_DDL).collect()]


def _plain(*, letters: bool) -> Column:
    """Say of which tasks the columns tell all: a value that did not fit is null there.

    Of dead letters they do only if none was in a collection of its own.
    """
    plain = f.col("id_type").isin(*PLAIN_IDS)
    for name in KNOWN:
        plain &= f.col(name).isNotNull()
    if not letters:
        plain &= f.col("status") != FAILED
    return f.coalesce(plain, f.lit(False))  # noqa: FBT003 (a value)


def _groups(files: Sequence[ArchivedFile]) -> Iterator[list[ArchivedFile]]:
    """Take so many files together that something can be seen to happen."""
    group: list[ArchivedFile] = []
    for file in files:
        if group and sum(one.rows for one in group) + file.rows > ROWS_PER_STEP:
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _plain_documents(batch: pa.RecordBatch, _options: CodecOptions[Any]) -> list[Document]:
    """Make of columns what a purge looks at, of the tasks of which they tell all."""
    plain = batch.filter(batch.column("plain")).select(COLUMNS)
    # Python says of an instant in a repeated hour that it equals none of another zone.
    for name in INSTANTS:
        number = plain.schema.get_field_index(name)
        plain = plain.set_column(number, name, plain.column(name).cast(UTC_INSTANT))
    return [{**row, "_id": typed_id(row["id"], row["id_type"])} for row in plain.to_pylist()]


def _whole_documents(batch: pa.RecordBatch, options: CodecOptions[Any]) -> list[Document]:
    return outlines(batch.column("document"), options)


class _Purger:
    """Deletes the tasks of the rows that it is given: what Spark sends to its executors."""

    def __init__(self, place: LocationOptions, now: datetime, read: Reader) -> None:
        self.place, self.now, self.read = place, now, read

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        here = location_of(self.place)
        # Ids are to be equal to those that the queue's own reads give, UUIDs above all.
        options = here.collections.codec_options
        for batch in batches:
            documents = self.read(batch, options)
            yield _batch(operations.Purged(), left=batch.num_rows - len(documents))
            for start in range(0, len(documents), DELETE_ROWS):
                some = documents[start : start + DELETE_ROWS]
                yield _batch(here.run(operations.purge(some, now=self.now)))


def _batch(purged: operations.Purged, *, left: int = 0) -> pa.RecordBatch:
    rows: list[Document] = [{"deleted": purged.deleted, "left": left}]
    rows += [{"deleted": 0, "left": 0, **_version(document)} for document in purged.superseded]
    return pa.RecordBatch.from_pylist(rows, schema=PURGED)


def _version(document: Document) -> Document:
    task_id = document["_id"]
    return {
        "id": str(task_id),
        "id_type": id_type(task_id),
        "updated_ms": microseconds(document["updated_at"]) // 1000,
    }
