"""Read a batch of tasks: plan the parts in the driver, read each in an executor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from microqueue.arguments import refused
from microqueue.operations import export
from microqueue.operations.call import Document
from microqueue.operations.export import IdRange
from microqueue.spark.location import Location, location_of
from microqueue.spark.options import SelectionOptions
from microqueue.spark.read.convert import BatchConverter
from microqueue.spark.read.raw_batches import unpack_once

SINGLE_PART_ROWS = 100_000
"""Up to so many matches, one part is quicker than several."""
ROWS_PER_PART = 250_000
MAX_PARTS = 1_000


@dataclass
class IdPartition(InputPartition):
    """One part of a batch read."""

    part: IdRange


class TaskReader(DataSourceReader):
    """Reads what the options say. They cannot change, and nothing else is pushed down.

    There is no ``pushFilters`` on purpose: Spark keeps pushed filters with the relation, and
    would use those of one query for another one over the same DataFrame.
    """

    def __init__(self, schema: StructType, options: SelectionOptions) -> None:
        for name in ("lag", "max_rows"):
            if (value := getattr(options, name)) is not None:
                raise refused(name, value, "it is an option of streams")
        self._schema = schema
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """Split the read, or leave it whole when few tasks match."""
        place = location_of(self._options)
        selection = selection_of(self._options)
        parts = self._options.partitions or default_parts(place, selection)
        return [IdPartition(part) for part in place.run(export.split_by_id(selection, parts))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Give the tasks of one part as Arrow batches."""
        part = partition.part if isinstance(partition, IdPartition) else export.WHOLE
        place = location_of(self._options)
        converter = converter_for(self._schema, self._options, place)
        cursor = place.run(
            export.read_part(
                selection_of(self._options),
                converter.fields,
                part,
                batch_rows=self._options.batch_rows,
            )
        )
        yield from convert_cursor(cursor, converter)


def default_parts(place: Location, selection: Document) -> int:
    """Choose the number of parts by how many tasks match."""
    if place.run(export.count_up_to(selection, SINGLE_PART_ROWS + 1)) <= SINGLE_PART_ROWS:
        return 1
    return parts_of_collection(place)


def parts_of_collection(place: Location) -> int:
    """Choose the number of parts for all there is."""
    total = place.run(export.count_all())
    return max(min(total // ROWS_PER_PART, MAX_PARTS), os.cpu_count() or 1)


def converter_for(schema: StructType, options: SelectionOptions, place: Location) -> BatchConverter:
    """Make the converter of one part."""
    return BatchConverter(schema, place.collections.codec_options, strict=options.mode == "strict")


def convert_cursor(cursor: Any, converter: BatchConverter) -> Iterator[pa.RecordBatch]:
    """Convert what a cursor gives, and close it whatever comes."""
    with unpack_once(cursor):
        for raw in cursor:
            yield from converter.convert(raw)


def selection_of(options: SelectionOptions) -> Document:
    """Give the filter that the options ask for."""
    return export.selection(
        queues=options.queue,
        statuses=options.status,
        time=options.time,
        since=options.since,
        until=options.until,
        query=options.document,
    )
