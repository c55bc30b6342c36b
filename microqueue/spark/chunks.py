"""Make the documents of a chunk of rows: from columns where rows are plain, else row by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa
from bson import ObjectId
from bson.codec_options import CodecOptions
from pyspark.sql.types import StructType

from microqueue.operations import bulk_load
from microqueue.operations.call import Document
from microqueue.operations.enqueue import new_document
from microqueue.payload import codec_of, encode_all
from microqueue.settings import QueueSettings
from microqueue.spark import alike
from microqueue.spark.options import SinkOptions
from microqueue.spark.rows import RowReader, RowTask
from microqueue.worker.handlers import load_model


class Stamp(NamedTuple):
    """What the documents of a chunk have in common, and the place of the first of them."""

    now: datetime
    position: int
    token: str


class Chunk(NamedTuple):
    """Documents, what tells them apart, and what they are as they are stored, if known."""

    documents: Sequence[Document]
    ids: Sequence[Any]
    stored: Sequence[Any] | None
    queues: set[str]


class ChunkMaker:
    """Makes the documents of one frame's rows. Refuses frames that do not fit."""

    def __init__(
        self, schema: StructType, options: SinkOptions, *, settings: QueueSettings, load: str
    ) -> None:
        self._options = options
        self._settings = settings
        self._load = load
        model = None if options.model is None else load_model(options.model)
        self._rows = RowReader(schema, options, codec_of(model))

    def make(self, rows: pa.Table, stamp: Stamp, codec_options: CodecOptions[Any]) -> Chunk:
        """Make the documents of some rows."""
        if self._rows.alike:
            made = self._from_columns(rows, stamp, codec_options)
            if made is not None:
                return Chunk(made, made.ids, made.stored, {str(self._options.queue)})
        tasks = [task for batch in rows.to_batches() for task in self._rows.read(batch)]
        documents = self._documents(tasks, stamp)
        stored = encode_all(documents, codec_options) if self._rows.unsure else None
        ids = [document["_id"] for document in documents]
        return Chunk(documents, ids, stored, {document["queue"] for document in documents})

    def _from_columns(
        self, rows: pa.Table, stamp: Stamp, codec_options: CodecOptions[Any]
    ) -> alike.Alike | None:
        task_id = ObjectId() if self._options.key else None
        pattern = RowTask(str(self._options.queue), task_id, {}, None)
        return alike.documents(
            rows,
            self._document(pattern, stamp, stamp.position),
            key=self._options.key,
            explicit=self._rows.explicit,
            codec_options=codec_options,
        )

    def _documents(self, tasks: list[RowTask], stamp: Stamp) -> list[Document]:
        """Write documents; of those that are alike, all but one are copies."""
        patterns: dict[str, Document] = {}
        documents = []
        for position, task in enumerate(tasks, stamp.position):
            pattern = patterns.get(task.queue) if task.new is None else None
            if pattern is None:
                document = self._document(task, stamp, position)
                if task.new is None:
                    patterns[task.queue] = document
            else:
                document = {
                    **pattern,
                    "_id": task.task_id or ObjectId(),
                    "payload": task.payload,
                    "position": position,
                }
            documents.append(document)
        return documents

    def _document(self, task: RowTask, stamp: Stamp, position: int) -> Document:
        document = new_document(
            task.new or self._rows.usual.model_copy(update={"task_id": task.task_id}),
            queue=task.queue,
            payload=task.payload,
            settings=self._settings,
            now=stamp.now,
            position=position,
            insert_token=stamp.token,
        )
        return bulk_load.held(document, self._load) if self._options.hold else document


def chunks_of(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    """Cut batches, whatever their sizes, into chunks of so many rows; the last may have less."""
    waiting: list[pa.RecordBatch] = []
    missing = size
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            part = batch.slice(start, missing)
            waiting.append(part)
            start, missing = start + part.num_rows, missing - part.num_rows
            if not missing:
                yield pa.Table.from_batches(waiting)
                waiting, missing = [], size
    if waiting:
        yield pa.Table.from_batches(waiting)
