"""Take archived tasks out of MongoDB, by what the committed files hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
from pyspark.sql import SparkSession

from microqueue.operations import archive as operations
from microqueue.operations.call import Document
from microqueue.positions import microseconds
from microqueue.settings import QueueSettings
from microqueue.spark.ids import id_type
from microqueue.spark.options import PlaceOptions
from microqueue.spark.pipelines.archive_log import ArchivedFile, ArchiveLog, Entry, Version
from microqueue.spark.pipelines.archive_reader import read_files
from microqueue.spark.pipelines.documents import outlines
from microqueue.spark.pipelines.files import Storage
from microqueue.spark.pipelines.place import server_now
from microqueue.spark.pipelines.steps import Step, Tell
from microqueue.spark.place import place_of

DELETE_ROWS = 1000
ROWS_PER_STEP = 250_000
"""How many archived tasks are taken out between two steps that can be seen."""

PURGED = pa.schema(
    [
        ("deleted", pa.int64()),
        ("id", pa.string()),
        ("id_type", pa.string()),
        ("updated_ms", pa.int64()),
    ]
)
PURGED_DDL = "deleted long, id string, id_type string, updated_ms long"


@dataclass(frozen=True)
class Purge:
    """Deletes what runs have archived, and notes it in the log."""

    spark: SparkSession
    storage: Storage
    log: ArchiveLog
    place: PlaceOptions
    settings: QueueSettings
    tell: Tell

    def run(self, archived: Entry) -> Entry:
        """Delete what one run has archived; safe to repeat, whoever was killed at it."""
        deleted = done = 0
        superseded: list[Version] = []
        rows = sum(file.rows for file in archived.files)
        for files in _groups(archived.files):
            self.tell(Step("purge", f"Deleting archived tasks ({done:,} of {rows:,})"))
            done += sum(file.rows for file in files)
            for row in self._purge(files):
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

    def _purge(self, files: Sequence[ArchivedFile]) -> Iterator[Document]:
        purger = _Purger(self.place, self.settings, server_now(self.place))
        documents = read_files(self.spark, self.storage, files).select("document")
        for row in documents.mapInArrow(purger, PURGED_DDL).collect():
            yield row.asDict()


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


class _Purger:
    """Deletes the documents that it is given: what Spark sends to its executors."""

    def __init__(self, place: PlaceOptions, settings: QueueSettings, now: datetime) -> None:
        self.place, self.settings, self.now = place, settings, now

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        here = place_of(self.place)
        # Ids are to be equal to those that the queue's own reads give, UUIDs above all.
        options = here.collections.codec_options
        for batch in batches:
            documents = outlines(batch.column("document"), options)
            for start in range(0, len(documents), DELETE_ROWS):
                some = documents[start : start + DELETE_ROWS]
                yield _batch(here.run(operations.purge(some, now=self.now, settings=self.settings)))


def _batch(purged: operations.Purged) -> pa.RecordBatch:
    rows: list[Document] = [{"deleted": purged.deleted}]
    rows += [{"deleted": 0, **_version(document)} for document in purged.superseded]
    return pa.RecordBatch.from_pylist(rows, schema=PURGED)


def _version(document: Document) -> Document:
    task_id = document["_id"]
    return {
        "id": str(task_id),
        "id_type": id_type(task_id),
        "updated_ms": microseconds(document["updated_at"]) // 1000,
    }
