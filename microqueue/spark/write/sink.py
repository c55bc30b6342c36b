"""Write rows as tasks, exactly once even if Spark retries a part.

The id of a task is derived from its queue and key, so a retried part finds the tasks that it wrote
before. The insert token names load, part and chunk. It distinguishes a task that this load wrote
before it was interrupted from one that existed already.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from microqueue.arguments import invalid_argument
from microqueue.clock import ServerClock
from microqueue.operations import bulk_load
from microqueue.operations.call import Document
from microqueue.operations.schema import prepare_collection
from microqueue.operations.server_clock import read_clock
from microqueue.positions import Positions
from microqueue.settings import QueueSettings
from microqueue.spark import error_codes
from microqueue.spark.error_notes import noting
from microqueue.spark.location import location_of
from microqueue.spark.options import SinkOptions
from microqueue.spark.write.documents import ChunkBuilder, Stamp, chunks_of

DEDUPE_KEY = "dedupe_key"
BATCH_ID = "streaming.sql.batchId"
"""The Spark property with the number of a micro-batch."""


@dataclass
class Written(WriterCommitMessage):
    """The result of one part."""

    queues: frozenset[str]
    inserted: int
    duplicates: int


class Sink:
    """Writes one DataFrame, or the micro-batches of one stream."""

    def __init__(self, schema: StructType, options: SinkOptions) -> None:
        self.options = options
        self.settings = QueueSettings.from_environment()
        self.load = secrets.token_hex(6)
        self._schema = schema
        self._builder()  # Fail on the driver if the frame cannot be written.
        location = location_of(options)
        if self.settings.ensure_indexes:
            name, retention = location.collections.name, self.settings.retention
            dedupe = DEDUPE_KEY in schema.names
            location.run(prepare_collection(name, retention, adjust=False, dedupe=dedupe))

    @noting()
    def write(self, batches: Iterable[pa.RecordBatch]) -> Written:
        """Write the rows of one part in chunks."""
        location = location_of(self.options)
        builder, clock, positions = self._builder(), ServerClock(), Positions()
        part, codec_options = self._part(), location.collections.codec_options
        hold = self.load if self.options.hold else None
        inserted = duplicates = 0
        queues: set[str] = set()
        for number, rows in enumerate(chunks_of(batches, self.options.batch_rows)):
            now = location.run(read_clock(clock))
            stamp = Stamp(now, positions.take(now, len(rows)), f"{part}:{number}")
            chunk = builder.build(rows, stamp, codec_options)
            new, known = location.run(
                bulk_load.insert_chunk(
                    chunk.documents,
                    ids=chunk.ids,
                    encoded=chunk.encoded,
                    settings=self.settings,
                    hold=hold,
                )
            )
            inserted += new
            duplicates += known
            queues |= chunk.queues
        return Written(frozenset(queues), inserted, duplicates)

    def commit(self, written: list[Written], *, name: str | None) -> None:
        """Release held tasks to workers, and store the report under ``name``."""
        location = location_of(self.options)
        queues = sorted(set().union(*(one.queues for one in written)))
        report: Document = {
            "inserted": sum(one.inserted for one in written),
            "duplicates": sum(one.duplicates for one in written),
        }
        if self.options.hold:
            now = location.run(read_clock(ServerClock()))
            report["released"] = location.run(bulk_load.release(queues, self.load, now))
        if name is not None:
            location.run(bulk_load.save_report(name, report))

    def abort(self) -> None:
        """Delete held tasks. Tasks that workers may have seen stay."""
        if self.options.hold:
            queues = None if self.options.queue is None else [self.options.queue]
            location_of(self.options).run(bulk_load.abandon(queues, self.load))

    def _builder(self) -> ChunkBuilder:
        return ChunkBuilder(self._schema, self.options, settings=self.settings, load=self.load)

    def _part(self) -> str:
        context = TaskContext.get()
        if context is None:
            return self.load
        batch = context.getLocalProperty(BATCH_ID) or ""
        return f"{self.load}:{batch}:{context.partitionId()}"


class TaskWriter(DataSourceArrowWriter):
    """Writes a DataFrame, as Spark calls it."""

    def __init__(self, schema: StructType, options: SinkOptions) -> None:
        self._sink = Sink(schema, options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write one part. Spark may call this again for the same part, even concurrently."""
        return self._sink.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Finish the write after all parts."""
        self._sink.commit(_written(messages), name=self._sink.options.load)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002 (Spark's signature)
        """Abort the write after a part has failed for good."""
        self._sink.abort()


class TaskStreamWriter(DataSourceStreamArrowWriter):
    """Writes a stream. A micro-batch that is written again finds its own tasks."""

    def __init__(self, schema: StructType, options: SinkOptions) -> None:
        if options.hold:
            raise invalid_argument(
                "hold",
                value=True,
                instead="a stream has no end at which to release tasks",
                code=error_codes.NO_STREAMS,
            )
        self._sink = Sink(schema, options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write one part of a micro-batch."""
        return self._sink.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (the name is Spark's)
        """Finish a micro-batch."""
        load = self._sink.options.load
        self._sink.commit(_written(messages), name=load and f"{load}-{batchId}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (the name is Spark's)
        """Do nothing: tasks that were written stay, and the retry finds them."""


def _written(messages: list[WriterCommitMessage | None]) -> list[Written]:
    return [message for message in messages if isinstance(message, Written)]
