"""Write rows as tasks, exactly once however often Spark repeats a part.

The id of a task comes from its queue and key, so a part that is written again finds its own
tasks. The token of an insert names load, part and chunk: it tells a row that this very load
wrote before it was interrupted from one that was there already.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

import pyarrow as pa
from bson import ObjectId
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from microqueue.clock import ServerClock
from microqueue.operations import indexes, load
from microqueue.operations.call import Document
from microqueue.operations.produce import new_document
from microqueue.operations.time import read_clock
from microqueue.payload import codec_of, encode_all
from microqueue.positions import Positions
from microqueue.settings import QueueSettings
from microqueue.spark.options import SinkOptions
from microqueue.spark.place import place_of
from microqueue.spark.rows import RowReader, RowTask
from microqueue.task import NewTask
from microqueue.worker.loading import load_handler

BATCH_ID = "streaming.sql.batchId"
"""The property in which Spark keeps the number of a micro-batch."""


@dataclass
class Written(WriterCommitMessage):
    """What one part did."""

    queues: frozenset[str]
    inserted: int
    duplicates: int


class Sink:
    """Writes one DataFrame, or one micro-batch after the other."""

    def __init__(self, schema: StructType, options: SinkOptions) -> None:
        self.options = options
        self.settings = QueueSettings.from_environment()
        self.load = secrets.token_hex(6)
        self._schema = schema
        self._rows()  # Refuses in the driver what no executor could write.
        place = place_of(options)
        if self.settings.ensure_indexes:
            wanted = indexes.task_indexes(self.settings.retention)
            place.run(indexes.ensure_indexes(wanted, place.collections.name, adjust=False))

    def write(self, batches: Iterable[pa.RecordBatch]) -> Written:
        """Write the rows of one part, in chunks."""
        place = place_of(self.options)
        rows, clock, positions = self._rows(), ServerClock(), Positions()
        part = self._part()
        inserted = duplicates = 0
        queues: set[str] = set()
        tasks = (task for batch in batches for task in rows.read(batch))
        for number, chunk in enumerate(_chunks(tasks, self.options.batch_rows)):
            now = place.run(read_clock(clock))
            first = positions.take(now, len(chunk))
            documents = self._documents(chunk, now, first, f"{part}:{number}", rows.usual)
            stored = None
            if rows.unsure:
                stored = encode_all(documents, place.collections.codec_options)
            hold = self.load if self.options.hold else None
            new, known = place.run(
                load.insert_chunk(documents, stored=stored, settings=self.settings, hold=hold)
            )
            inserted += new
            duplicates += known
            queues.update(document["queue"] for document in documents)
        return Written(frozenset(queues), inserted, duplicates)

    def commit(self, written: list[Written], *, name: str | None) -> None:
        """Let workers see what was held, and leave the report under its name."""
        place = place_of(self.options)
        queues = sorted(set().union(*(one.queues for one in written)))
        report: Document = {
            "inserted": sum(one.inserted for one in written),
            "duplicates": sum(one.duplicates for one in written),
        }
        if self.options.hold:
            now = place.run(read_clock(ServerClock()))
            report["released"] = place.run(load.release(queues, self.load, now))
        if name is not None:
            place.run(load.save_report(name, report))

    def abort(self) -> None:
        """Take back what was held; what workers may have seen stays."""
        if self.options.hold:
            queues = None if self.options.queue is None else [self.options.queue]
            place_of(self.options).run(load.abandon(queues, self.load))

    def _rows(self) -> RowReader:
        model = None if self.options.model is None else load_handler(self.options.model)
        return RowReader(self._schema, self.options, codec_of(model))

    def _part(self) -> str:
        context = TaskContext.get()
        if context is None:
            return self.load
        batch = context.getLocalProperty(BATCH_ID) or ""
        return f"{self.load}:{batch}:{context.partitionId()}"

    def _documents(
        self, chunk: list[RowTask], now: datetime, first: int, token: str, usual: NewTask[Any]
    ) -> list[Document]:
        """Write the documents of a chunk; of those that are alike, all but one are copies."""
        patterns: dict[str, Document] = {}
        documents = []
        for position, task in enumerate(chunk, first):
            pattern = patterns.get(task.queue) if task.new is None else None
            if pattern is None:
                document = self._document(task, now, position, token, usual)
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

    def _document(
        self, task: RowTask, now: datetime, position: int, token: str, usual: NewTask[Any]
    ) -> Document:
        document = new_document(
            task.new or usual.model_copy(update={"task_id": task.task_id}),
            queue=task.queue,
            payload=task.payload,
            settings=self.settings,
            now=now,
            position=position,
            insert_token=token,
        )
        return load.held(document, self.load) if self.options.hold else document


def _chunks(tasks: Iterator[RowTask], size: int) -> Iterator[list[RowTask]]:
    while chunk := list(islice(tasks, size)):
        yield chunk
