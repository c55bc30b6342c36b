"""Read tasks as a batch: plan the parts on the driver, read each on an executor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from microqueue.arguments import invalid_argument
from microqueue.operations import export
from microqueue.operations.call import Document
from microqueue.operations.export import IdRange
from microqueue.spark import error_codes
from microqueue.spark.error_notes import noting
from microqueue.spark.location import Location, location_of
from microqueue.spark.options import SelectionOptions
from microqueue.spark.read.convert import BatchConverter
from microqueue.spark.read.raw_batches import unpack_once

SINGLE_PART_ROWS = 100_000
"""Up to this many matches, one part is faster than several."""
ROWS_PER_PART = 250_000
MAX_PARTS = 1_000


@dataclass
class IdPartition(InputPartition):
    """One part of a batch read."""

    part: IdRange


class TaskReader(DataSourceReader):
    """Reads the tasks that the options select.

    It deliberately has no ``pushFilters``: Spark keeps pushed filters with the relation, and
    would apply the filters of one query to another query of the same DataFrame.
    """

    def __init__(self, schema: StructType, options: SelectionOptions) -> None:
        for name in ("lag", "max_rows"):
            if (value := getattr(options, name)) is not None:
                raise invalid_argument(
                    name, value, "only streams have this option", code=error_codes.ONLY_STREAMS
                )
        self._schema = schema
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """Split the read into parts; only one if few tasks match."""
        location = location_of(self._options)
        selection = selection_of(self._options)
        parts = self._options.partitions or default_parts(location, selection)
        return [IdPartition(part) for part in location.run(export.split_by_id(selection, parts))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the tasks of one part as Arrow batches."""
        part = partition.part if isinstance(partition, IdPartition) else export.WHOLE
        location = location_of(self._options)
        converter = converter_for(self._schema, self._options, location)
        cursor = location.run(
            export.read_part(
                selection_of(self._options),
                converter.fields,
                part,
                batch_rows=self._options.batch_rows,
            )
        )
        yield from convert_cursor(cursor, converter)


def default_parts(location: Location, selection: Document) -> int:
    """Return 1 if few tasks match; otherwise a number by the size of the collection."""
    if location.run(export.count_up_to(selection, SINGLE_PART_ROWS + 1)) <= SINGLE_PART_ROWS:
        return 1
    total = location.run(export.estimate_count())
    return max(min(total // ROWS_PER_PART, MAX_PARTS), os.cpu_count() or 1)


def converter_for(
    schema: StructType, options: SelectionOptions, location: Location
) -> BatchConverter:
    """Return the converter for one part."""
    return BatchConverter(
        schema, location.collections.codec_options, strict=options.mode == "strict"
    )


def convert_cursor(cursor: Any, converter: BatchConverter) -> Iterator[pa.RecordBatch]:
    """Yield the converted batches of a cursor, and close it in the end."""
    with unpack_once(cursor), noting():
        for raw in cursor:
            yield from converter.convert(raw)


def selection_of(options: SelectionOptions) -> Document:
    """Return the filter for the options."""
    return export.selection(
        queues=options.queue,
        names=options.name,
        statuses=options.status,
        time=options.time,
        since=options.since,
        until=options.until,
        query=options.query_document,
    )
