"""Read whole tasks into Spark: columns to query, and the document itself as BSON.

The document has everything, whatever a payload contains. Archives store it, and replays restore it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import bson
import pyarrow as pa
import pyarrow.compute as pc
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]  # It has no stub.
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    NumericType,
    StringType,
    StructField,
    StructType,
)

from microqueue.extended_json import to_json
from microqueue.operations import export
from microqueue.operations.call import Document
from microqueue.operations.export import IdRange
from microqueue.spark.columns import ALL_COLUMNS
from microqueue.spark.ids import id_type
from microqueue.spark.location import LocationOptions, location_of
from microqueue.spark.read.lossy_types import (
    BSON_ARRAY,
    BSON_BOOLEAN,
    BSON_NULL,
    MILLISECONDS,
    REFERENCE,
    LossyBatch,
    check_dates,
    check_integers,
    may_have_other_type,
    to_table,
)
from microqueue.spark.read.raw_batches import unpack_once
from microqueue.spark.value_conversion import Drift, reader_of

FEW_ROWS = 100_000
"""Up to so many matches are one part: finding where to split would take longer."""

TASKS_PER_CORE = 4
"""More than one per core, so that a slow one does not delay the end."""

BATCH_ROWS = 20_000
LEFT_OUT = frozenset({"drifted", "headers", "result", "payload", "position", "backoff_sec"})
LEFT_OUT |= {"lease_token", "lease_expires_at", "expires_at"}
"""Columns that are rarely queried, as each one costs time; the document has them."""

COLUMNS = [name for name in ALL_COLUMNS if name not in LEFT_OUT]
SCHEMA = StructType(
    [
        *(StructField(name, ALL_COLUMNS[name]) for name in COLUMNS),
        StructField("document", BinaryType()),
    ]
)
ARROW_SCHEMA: pa.Schema = to_arrow_schema(SCHEMA, timezone="UTC")
IDENTITY = ("id", "id_type")

CODEC: CodecOptions[Any] = CodecOptions(
    tz_aware=True,
    uuid_representation=bson.binary.UuidRepresentation.STANDARD,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)
HISTORY = "history"
OBJECT_ID_FIRST = b"\x07_id\x00"
LENGTH = struct.Struct("<i")


def _numbers(kind: DataType, name: str) -> Iterator[str]:
    """Yield the names of fields that hold numbers, at any depth."""
    if isinstance(kind, StructType):
        for field in kind:
            yield from _numbers(field.dataType, field.name)
    elif isinstance(kind, ArrayType):
        yield from _numbers(kind.elementType, name)
    elif isinstance(kind, NumericType):
        yield name


FLAGS = re.compile(
    bytes([BSON_BOOLEAN]) + b"(?:%s)\0" % "|".join(sorted(set(_numbers(SCHEMA, "")))).encode()
)
"""A boolean in place of a number. Text may look the same."""


@dataclass(frozen=True)
class Part:
    """A part of the matching tasks, to be read by one executor."""

    location: LocationOptions
    matching: Document
    range: IdRange


def parts_of(
    spark: SparkSession,
    location: LocationOptions,
    *,
    queues: Sequence[str] | None = None,
    statuses: Sequence[str] | None = None,
    time: str = "created_at",
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[Part]:
    """Split the matching tasks into parts that can be read in parallel."""
    matching = export.selection(
        queues=queues, statuses=statuses, time=time, since=since, until=until
    )
    connected = location_of(location)
    few = connected.run(export.count_up_to(matching, FEW_ROWS + 1)) <= FEW_ROWS
    ranges = connected.run(export.split_by_id(matching, 1 if few else tasks_for(spark)))
    return [Part(location, matching, one) for one in ranges]


def read_parts(spark: SparkSession, parts: Sequence[Part]) -> DataFrame:
    """Load whole tasks."""
    return spread(spark, parts, batches_of, SCHEMA)


def batches_of(part: Part) -> Iterator[pa.RecordBatch]:
    """Read one part."""
    reading = export.read_part(part.matching, (), part.range, batch_rows=BATCH_ROWS)
    connected = location_of(part.location)
    with unpack_once(connected.run(reading)) as cursor:
        for raw in cursor:
            if raw:
                yield to_batch(raw, connected.collections.codec_options)


def to_batch(raw: bytes, codec_options: CodecOptions[Any] = CODEC) -> pa.RecordBatch:
    """Return concatenated documents as a batch of rows."""
    starts, documents = split(raw)
    ids = [identify(raw, start, codec_options) for start in starts]
    try:
        columns = fast_columns(raw)
    except (LossyBatch, ValueError, TypeError, OverflowError, pa.ArrowException):
        # A value does not fit its column: read one by one, and set such values to null.
        columns = exact_columns(documents.to_pylist())
    columns["id"] = pa.array([text for text, _ in ids], pa.string())
    columns["id_type"] = pa.array([kind for _, kind in ids], pa.string())
    columns["document"] = documents
    arrays = [columns[field.name].cast(field.type) for field in ARROW_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)


def split(raw: bytes) -> tuple[list[int], pa.BinaryArray]:
    """Return where each document starts, and the documents, without copying them."""
    offsets, end = [0], 0
    while end < len(raw):
        (length,) = LENGTH.unpack_from(raw, end)
        end += length
        offsets.append(end)
    starts_and_end = pa.array(offsets, pa.int32()).buffers()[1]
    buffers = [None, starts_and_end, pa.py_buffer(raw)]
    return offsets[:-1], pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def identify(raw: bytes, start: int, codec_options: CodecOptions[Any]) -> tuple[str, str | None]:
    """Return a task's id as text, and its type; decode the document only if necessary."""
    if raw[start + 4 : start + 9] == OBJECT_ID_FIRST:
        return raw[start + 9 : start + 21].hex(), "objectId"
    (length,) = LENGTH.unpack_from(raw, start)
    task_id = decode(raw[start : start + length], codec_options)["_id"]
    return str(task_id), id_type(task_id)


def decode(document: bytes, codec_options: CodecOptions[Any] = CODEC) -> dict[str, Any]:
    """Decode a document as the queue does."""
    return bson.decode(document, codec_options)


def outlines(documents: pa.BinaryArray, codec_options: CodecOptions[Any]) -> list[dict[str, Any]]:
    """Decode only the top-level fields of documents, which is twice as fast."""
    options = codec_options.with_options(document_class=RawBSONDocument)
    return [dict(RawBSONDocument(value.as_py(), options)) for value in documents]


def fast_columns(raw: bytes) -> dict[str, pa.Array]:
    """Read the columns by pymongoarrow; raise if a value does not fit."""
    # pymongoarrow would silently accept these as a number, an empty array or a document.
    if FLAGS.search(raw) or may_have_other_type(raw, HISTORY, (BSON_ARRAY, BSON_NULL)):
        raise LossyBatch
    if REFERENCE in raw:
        raise LossyBatch
    wanted = {
        field.name: _in_bson(field.type)
        for field in ARROW_SCHEMA
        if field.name not in {*IDENTITY, "document"}
    }
    table = to_table(raw, wanted, CODEC)
    columns = {name: _whole(table.column(name)) for name in wanted}
    for column in columns.values():
        _check_values(column)
    return {name: column.cast(ARROW_SCHEMA.field(name).type) for name, column in columns.items()}


def _in_bson(kind: pa.DataType) -> pa.DataType:
    """Return the type by which pymongoarrow reads a column of another type."""
    if pa.types.is_timestamp(kind):
        return MILLISECONDS
    if pa.types.is_integer(kind):
        return pa.float64()  # The cast then fails on fractions.
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _in_bson(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_in_bson(kind.value_type))
    return kind


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return _null_absent(pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([]))


def _null_absent(array: pa.Array) -> pa.Array:
    """Replace structs of nulls by null: pymongoarrow returns them for absent values."""
    if pa.types.is_struct(array.type):
        children = [_null_absent(child) for child in array.flatten()]
        absent = pc.is_null(children[0])
        for child in children[1:]:
            absent = pc.and_(absent, pc.is_null(child))
        names = [field.name for field in array.type]
        return pa.StructArray.from_arrays(children, names, mask=absent)
    if pa.types.is_list(array.type):
        values = _null_absent(array.flatten())
        lengths = pc.fill_null(pc.list_value_length(array), 0)
        offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
        return pa.ListArray.from_arrays(offsets.cast(pa.int32()), values, mask=pc.is_null(array))
    return array


def _check_values(array: pa.Array) -> None:
    """Raise if a double may have rounded a number, or if Spark does not support a date."""
    if pa.types.is_timestamp(array.type):
        check_dates(array)
    elif pa.types.is_floating(array.type):
        check_integers(array)
    elif pa.types.is_struct(array.type) or pa.types.is_list(array.type):
        inner = array.flatten()
        for child in inner if isinstance(inner, list) else [inner]:
            _check_values(child)


def exact_columns(documents: Sequence[bytes]) -> dict[str, pa.Array]:
    """Read the columns value by value; values that do not fit are null."""
    drift = Drift(strict=False)
    fields = [field for field in SCHEMA if field.name not in {*IDENTITY, "document"}]
    readers = [(field.name, reader_of(field.dataType, field.name)) for field in fields]
    decoded = [decode(document) for document in documents]
    columns = {}
    for name, read in readers:
        values = [read(document.get(name), drift) for document in decoded]
        # As pymongoarrow does: NaN is null, and so is a struct of nulls.
        array = pa.array(values, ARROW_SCHEMA.field(name).type, from_pandas=True)
        columns[name] = _null_absent(array)
    return columns


def with_payload(frame: DataFrame) -> DataFrame:
    """Add the payload as JSON text; it is computed only if it is used."""
    return frame.withColumn("payload", _payloads(frame["document"]))


@arrow_udf(StringType())  # type: ignore[untyped-decorator]  # As above.
def _payloads(documents: pa.Array) -> pa.Array:
    texts = (to_json(decode(value.as_py()).get("payload")) for value in documents)
    return pa.array(texts, pa.string())


# Work in the executors


def tasks_for(spark: SparkSession) -> int:
    """Return into how many Spark tasks to split work."""
    return TASKS_PER_CORE * spark.sparkContext.defaultParallelism


def spread(
    spark: SparkSession,
    items: Sequence[Any],
    work: Callable[[Any], Iterator[pa.RecordBatch]],
    schema: StructType | str,
    *,
    tasks: int | None = None,
) -> DataFrame:
    """Call ``work`` for each item, in the executors, and return the rows of all calls."""
    tasks = min(len(items), tasks or len(items))
    return spark.range(len(items), numPartitions=max(tasks, 1)).mapInArrow(
        _Each(items, work), schema
    )


class _Each:
    """Calls ``work`` for the items whose numbers Spark assigns to an executor."""

    def __init__(
        self, items: Sequence[Any], work: Callable[[Any], Iterator[pa.RecordBatch]]
    ) -> None:
        self.items, self.work = items, work

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from self.work(self.items[number])
