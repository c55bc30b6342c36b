"""What Spark calls to write a DataFrame, and to write a stream."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from microqueue.arguments import refused
from microqueue.spark.options import SinkOptions
from microqueue.spark.sink import Sink, Written


class TaskWriter(DataSourceArrowWriter):
    """Writes a DataFrame."""

    def __init__(self, schema: StructType, options: SinkOptions) -> None:
        self._sink = Sink(schema, options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write one part; Spark may call this again for the same one, or twice at once."""
        return self._sink.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Finish, when every part is written."""
        self._sink.commit(_written(messages), name=self._sink.options.load)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002 (Spark gives them)
        """Give up, when a part has failed for good."""
        self._sink.abort()


class TaskStreamWriter(DataSourceStreamArrowWriter):
    """Writes a stream: a micro-batch that is written again finds its own tasks."""

    def __init__(self, schema: StructType, options: SinkOptions) -> None:
        if options.hold:
            raise refused("hold", value=True, instead="a stream has no end at which to let go")
        self._sink = Sink(schema, options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write one part of a micro-batch."""
        return self._sink.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (the name is Spark's)
        """Finish a micro-batch."""
        load = self._sink.options.load
        self._sink.commit(_written(messages), name=load and f"{load}-{batchId}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (the name is Spark's)
        """Give a micro-batch up; what was written stays, and is met again."""


def _written(messages: list[WriterCommitMessage | None]) -> list[Written]:
    return [message for message in messages if isinstance(message, Written)]
