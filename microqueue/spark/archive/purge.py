"""Delete archived tasks from MongoDB, by what the committed files hold.

A few columns identify the version of a task that was archived. The whole document is read only
where these columns are not enough.
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
from microqueue.spark.location import LocationOptions, location_of, server_now
from microqueue.spark.progress import ProgressCallback, Step
from microqueue.spark.storage import Storage
from microqueue.spark.whole_tasks import outlines

DELETE_ROWS = 1000
ROWS_PER_STEP = 250_000
"""How many archived tasks are deleted between two progress reports."""

PLAIN_IDS = (OBJECT_ID, STRING, INTEGER)
"""Ids that are read in only one way. A UUID may be stored in several representations."""

REQUIRED = ("status", "created_at", "updated_at")
COLUMNS = ("id", "id_type", *REQUIRED, "insert_token")
"""What distinguishes a version of a task from all others."""

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
"""Makes documents of rows; it may leave some rows out."""


@dataclass(frozen=True)
class Purge:
    """Deletes the tasks that runs have archived, and commits that to the log."""

    spark: SparkSession
    storage: Storage
    log: ArchiveLog
    location: LocationOptions
    progress: ProgressCallback

    def run(self, archived: Entry) -> Entry:
        """Delete the tasks that one run has archived, and return the committed entry.

        Safe to repeat after a kill. Dead letters are deleted from the collection where that run
        found them, whatever the settings are now.
        """
        plain = _is_plain(dead_letters_in_tasks=archived.dead_letters == "status")
        deleted = done = 0
        superseded: list[Version] = []
        rows = sum(file.rows for file in archived.files)
        for files in _groups(archived.files):
            self.progress(Step("purge", f"Deleting archived tasks ({done:,} of {rows:,})"))
            done += sum(file.rows for file in files)
            for row in self._purge(files, plain):
                deleted += row["deleted"]
                if row["updated_ms"] is not None:
                    superseded.append(Version(**{name: row[name] for name in Version.model_fields}))
        entry = Entry(
            kind="purged",
            run=archived.run,
            at=server_now(self.location),
            superseded=tuple(superseded),
            deleted=deleted,
        )
        self.progress(Step("note", "Committing what was deleted"))
        self.log.commit(entry)
        return entry

    def _purge(self, files: Sequence[ArchivedFile], plain: Column) -> list[Document]:
        """Delete by columns first, and then the rest by whole documents."""
        now = server_now(self.location)
        frame = read_files(self.spark, self.storage, files).withColumn("plain", plain)
        rows = self._run(frame.select("plain", *COLUMNS), now, _plain_documents)
        if any(row["left"] for row in rows):
            others = frame.where("not plain").select("document")
            rows += self._run(others, now, _whole_documents)
        return rows

    def _run(self, frame: DataFrame, now: datetime, read: Reader) -> list[Document]:
        purger = _Purger(self.location, now, read)
        return [row.asDict() for row in frame.mapInArrow(purger, PURGED_DDL).collect()]


def _is_plain(*, dead_letters_in_tasks: bool) -> Column:
    """Return the condition for tasks that ``COLUMNS`` identify: values that do not fit are null.

    Dead letters are among them only if none was in a separate collection.
    """
    plain = f.col("id_type").isin(*PLAIN_IDS)
    for name in REQUIRED:
        plain &= f.col(name).isNotNull()
    if not dead_letters_in_tasks:
        plain &= f.col("status") != FAILED
    return f.coalesce(plain, f.lit(False))  # noqa: FBT003 (a value)


def _groups(files: Sequence[ArchivedFile]) -> Iterator[list[ArchivedFile]]:
    """Group files, so that progress is reported now and then."""
    group: list[ArchivedFile] = []
    for file in files:
        if group and sum(one.rows for one in group) + file.rows > ROWS_PER_STEP:
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _plain_documents(batch: pa.RecordBatch, _options: CodecOptions[Any]) -> list[Document]:
    """Return the fields that a purge compares, of the plain tasks only."""
    plain = batch.filter(batch.column("plain")).select(COLUMNS)
    # In Python, an instant in a repeated hour is not equal to the same one in another timezone.
    for name in INSTANTS:
        number = plain.schema.get_field_index(name)
        plain = plain.set_column(number, name, plain.column(name).cast(UTC_INSTANT))
    return [{**row, "_id": typed_id(row["id"], row["id_type"])} for row in plain.to_pylist()]


def _whole_documents(batch: pa.RecordBatch, options: CodecOptions[Any]) -> list[Document]:
    return outlines(batch.column("document"), options)


class _Purger:
    """Deletes the tasks of the rows it gets; runs in the executors."""

    def __init__(self, location: LocationOptions, now: datetime, read: Reader) -> None:
        self.location, self.now, self.read = location, now, read

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        location = location_of(self.location)
        # Ids, UUIDs above all, must be equal to those that the queue itself reads.
        options = location.collections.codec_options
        for batch in batches:
            documents = self.read(batch, options)
            yield _batch(operations.Purged(), left=batch.num_rows - len(documents))
            for start in range(0, len(documents), DELETE_ROWS):
                some = documents[start : start + DELETE_ROWS]
                yield _batch(location.run(operations.delete_archived(some, now=self.now)))


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
