"""Read tasks as a stream, in the order in which they changed.

An offset is a mark: the instant of a change and the task's id. A change becomes visible a moment
after its instant, so the stream stays a lag behind the server's clock. If a task changes twice
between two micro-batches, the stream returns only its latest state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from microqueue.arguments import invalid_argument
from microqueue.clock import ServerClock
from microqueue.extended_json import from_json, to_canonical_json
from microqueue.operations import change_cursor, export
from microqueue.operations.change_cursor import ChangeCursor, ChangeQuery, ChangeRange
from microqueue.operations.server_clock import read_clock
from microqueue.spark import error_codes
from microqueue.spark.location import location_of
from microqueue.spark.options import SelectionOptions
from microqueue.spark.read.batch import convert_cursor, converter_for, default_parts

DEFAULT_LAG = timedelta(seconds=3)
FINISHED = ("done", "failed")
EVERY_CHANGE = ("pending", "processing", *FINISHED)


@dataclass
class ChangePartition(InputPartition):
    """One part of a micro-batch."""

    changes: ChangeRange


class TaskStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads tasks when they finish, or when they change to one of the ``status`` option."""

    def __init__(self, schema: StructType, options: SelectionOptions) -> None:
        if options.until is not None:
            raise invalid_argument(
                "until",
                options.until,
                "a stream has no end; stop the query instead",
                code=error_codes.NO_STREAMS,
            )
        if options.time not in {"created_at", "updated_at"}:
            raise invalid_argument(
                "time",
                options.time,
                "a stream is ordered by updated_at",
                code=error_codes.NO_STREAMS,
            )
        self._schema = schema
        self._options = options
        self._lag = DEFAULT_LAG if options.lag is None else options.lag
        statuses = FINISHED if options.status is None else options.status
        self._followed = ChangeQuery(
            queues=options.queue,
            # All statuses need no condition, and can then use the index on changes.
            statuses=None if set(statuses) == set(EVERY_CHANGE) else statuses,
            query=export.selection(names=options.name, query=options.query_document),
        )
        self._target: datetime | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (the name is Spark's)
        """Return the start: ``since``, or the beginning."""
        return to_offset(ChangeCursor(self._options.since or change_cursor.BEGINNING))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (the name is Spark's)
        """Return the limit of a micro-batch: ``max_rows``, or none."""
        rows = self._options.max_rows
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (the name is Spark's)
        """Fix the end of the stream at the current horizon."""
        self._target = self._horizon()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 (the name is Spark's)
        """Return the last mark of the next micro-batch; ``start`` if nothing changed."""
        horizon = self._horizon() if self._target is None else self._target
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        operation = change_cursor.find_end(
            self._followed, to_mark(start), horizon=horizon, rows=rows
        )
        end = location_of(self._options).run(operation)
        return start if end is None else to_offset(end)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Split a micro-batch into parts; only one if it is small."""
        changes = ChangeRange(to_mark(start), to_mark(end))
        if changes.start == changes.end:
            return []
        location = location_of(self._options)
        matching = change_cursor.changed_between(self._followed, changes)
        parts = self._options.partitions or default_parts(location, matching)
        ranges = location.run(change_cursor.split(self._followed, changes, parts))
        return [ChangePartition(part) for part in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the tasks of one part as Arrow batches."""
        assert isinstance(partition, ChangePartition)  # noqa: S101 (partitions() made it)
        location = location_of(self._options)
        converter = converter_for(self._schema, self._options, location)
        rows = self._options.batch_rows
        cursor = location.run(
            change_cursor.read_changes(
                self._followed, converter.fields, partition.changes, batch_rows=rows
            )
        )
        yield from convert_cursor(cursor, converter)

    def _horizon(self) -> datetime:
        return location_of(self._options).run(read_clock(ServerClock())) - self._lag


def to_offset(mark: ChangeCursor) -> dict[str, Any]:
    """Return a mark as an offset, which Spark stores as JSON."""
    return {"at": mark.at.isoformat(timespec="milliseconds"), "id": to_canonical_json(mark.id)}


def to_mark(offset: dict[str, Any]) -> ChangeCursor:
    """Return the mark of an offset."""
    return ChangeCursor(
        datetime.fromisoformat(offset["at"]).astimezone(UTC), from_json(offset["id"])
    )
