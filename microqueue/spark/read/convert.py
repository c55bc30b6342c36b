"""Convert batches of raw BSON to Arrow batches of Spark's types.

Flat columns go through pymongoarrow. It silently truncates a fraction in an integer column, and
reads NaN, or text in place of a sub-document, as null. A batch with any value that it could have
changed (see ``lossy_types``) is converted again value by value (see ``value_conversion``). Both
ways return the same rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import bson
import numpy
import pyarrow as pa
import pyarrow.compute as pc
from bson.codec_options import CodecOptions
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from microqueue.extended_json import to_json
from microqueue.spark import error_codes, ids
from microqueue.spark.columns import (
    COMPUTED_COLUMNS,
    DEFAULT_VALUES,
    ERROR,
    JSON_COLUMNS,
    REQUIRED_COLUMNS,
)
from microqueue.spark.read.lossy_types import (
    BSON_BOOLEAN,
    BSON_DOCUMENT,
    BSON_NULL,
    BSON_OBJECT_ID,
    BSON_STRING,
    MILLISECONDS,
    OBJECT_ID_TYPE,
    REFERENCE,
    LossyBatch,
    check_dates,
    check_integers,
    field_header,
    may_have_lost_nan,
    may_have_other_type,
    to_table,
)
from microqueue.spark.value_conversion import Drift, Reader, reader_of

MICROSECONDS = pa.timestamp("us", tz="UTC")

# Integers are read as doubles, so that a fraction is noticed.
FLAT: dict[DataType, pa.DataType] = {
    StringType(): pa.string(),
    BooleanType(): pa.bool_(),
    IntegerType(): pa.float64(),
    LongType(): pa.float64(),
    DoubleType(): pa.float64(),
    TimestampType(): MILLISECONDS,
    ERROR: pa.struct({"message": pa.string(), "code": pa.string(), "at": MILLISECONDS}),
}

ID_TYPE_AT = 4  # After the document's length: MongoDB stores _id first.
FAST_IDS = {
    BSON_STRING: (pa.string(), ids.STRING),
    BSON_OBJECT_ID: (OBJECT_ID_TYPE, ids.OBJECT_ID),
}


class BatchConverter:
    """Converts the batches of one read."""

    def __init__(
        self, schema: StructType, codec_options: CodecOptions[Any], *, strict: bool
    ) -> None:
        self._names = [field.name for field in schema.fields]
        self._types = {field.name: field.dataType for field in schema.fields}
        self._arrow = to_arrow_schema(schema, timezone="UTC")
        self._codec_options = codec_options
        self._drift = Drift(strict=strict)
        stored = [name for name in self._names if name not in COMPUTED_COLUMNS]
        self._flat = [
            name for name in stored if self._types[name] in FLAT and name not in JSON_COLUMNS
        ]
        self._readers = {name: self._reader(name) for name in stored}
        self._nested_readers = {
            name: read for name, read in self._readers.items() if name not in self._flat
        }

    @property
    def fields(self) -> list[str]:
        """The fields of the document to read."""
        return ["_id", *(name for name in self._names if name not in COMPUTED_COLUMNS)]

    def convert(self, raw: bytes) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one batch from the server."""
        try:
            yield self.convert_columns(raw)
        except LossyBatch:
            parts = by_id_type(raw)
            if len(parts) == 1:
                yield self.convert_values(raw)
            else:
                for part in parts:
                    yield from self.convert(part)

    def _reader(self, name: str) -> Reader:
        kind = self._types[name]
        if name in JSON_COLUMNS and isinstance(kind, StringType):
            return lambda value, _drift: None if value is None else to_json(value)
        if kind == ERROR and name not in JSON_COLUMNS:
            return _null_if_empty(reader_of(kind, name))
        return reader_of(kind, name, closed=name == "payload")

    def convert_columns(self, raw: bytes) -> pa.RecordBatch:
        """Convert whole columns with pymongoarrow.

        Raises:
            LossyBatch: pymongoarrow could change a value.
        """
        id_kind = FAST_IDS.get(raw[ID_TYPE_AT])
        if id_kind is None or self._may_be_lossy(raw):
            raise LossyBatch
        kinds = {"_id": id_kind[0], **{name: FLAT[self._types[name]] for name in self._flat}}
        try:
            table = to_table(raw, kinds)
            columns = {
                name: self._cast(name, table.column(name).combine_chunks()) for name in self._flat
            }
            if any(may_have_lost_nan(raw, name, table.column(name)) for name in self._flat):
                raise LossyBatch
        except (TypeError, ValueError, OverflowError) as exc:  # Arrow's errors are among these.
            raise LossyBatch from exc
        columns["drifted"] = pa.repeat(pa.scalar(0, pa.int32()), table.num_rows)
        columns["id_type"] = pa.repeat(id_kind[1], table.num_rows)
        if "id" in self._types:
            columns["id"] = _id_texts(table.column("_id").combine_chunks())
        if self._nested_readers:
            nested, drifted = self._read_values(self._decode(raw), self._nested_readers)
            columns |= {**nested, "drifted": pa.array(drifted, pa.int32())}
        return self._batch(columns)

    def _may_be_lossy(self, raw: bytes) -> bool:
        """Return whether there may be types that pymongoarrow would silently accept."""
        for name in self._flat:
            kind = self._types[name]
            if kind == ERROR and (
                may_have_other_type(raw, name, (BSON_DOCUMENT, BSON_NULL)) or REFERENCE in raw
            ):
                return True
            numeric = isinstance(kind, IntegerType | LongType | DoubleType)
            if numeric and field_header(BSON_BOOLEAN, name) in raw:
                return True
        return False

    def _cast(self, name: str, array: pa.Array) -> pa.Array:
        """Return a column in its final type, or raise ``LossyBatch``."""
        kind = self._types[name]
        if name in REQUIRED_COLUMNS and array.null_count:
            raise LossyBatch
        if kind == ERROR:
            children = [
                _microseconds(child) if child.type == MILLISECONDS else child
                for child in array.flatten()
            ]
            absent = functools.reduce(pc.and_, map(pc.is_null, children))
            return pa.StructArray.from_arrays(
                children, fields=list(self._arrow.field(name).type), mask=absent
            )
        if isinstance(kind, TimestampType):
            return _microseconds(array)
        if pa.types.is_floating(array.type):
            check_integers(array)
        column = array.cast(self._arrow.field(name).type)
        return pc.fill_null(column, DEFAULT_VALUES[name]) if name in DEFAULT_VALUES else column

    def convert_values(self, raw: bytes) -> pa.RecordBatch:
        """Convert value by value: slower, for any input."""
        documents = self._decode(raw)
        columns, drifted = self._read_values(documents, self._readers)
        task_ids = [document["_id"] for document in documents]
        columns["id"] = pa.array([str(task_id) for task_id in task_ids], pa.string())
        columns["id_type"] = pa.array([ids.id_type(task_id) for task_id in task_ids], pa.string())
        columns["drifted"] = pa.array(drifted, pa.int32())
        return self._batch(columns)

    def _read_values(
        self, documents: list[dict[str, Any]], readers: dict[str, Reader]
    ) -> tuple[dict[str, pa.Array], list[int]]:
        """Return a column per reader, and the number of drifted values per document."""
        drift = self._drift
        values: dict[str, list[Any]] = {name: [] for name in readers}
        drifted = []
        required = [name for name in readers if name in REQUIRED_COLUMNS]
        for document in documents:
            drift.begin(document["_id"])
            for name, read in readers.items():
                value = document.get(name)
                # Null counts as absent, for required fields as well.
                values[name].append(
                    read(DEFAULT_VALUES.get(name) if value is None else value, drift)
                )
            for name in required:
                if document.get(name) is None:
                    drift.record(name, "is missing", code=error_codes.MISSING)
            drifted.append(drift.count)
        return {
            name: pa.array(column, self._arrow.field(name).type) for name, column in values.items()
        }, drifted

    def _decode(self, raw: bytes) -> list[dict[str, Any]]:
        return bson.decode_all(raw, self._codec_options)

    def _batch(self, columns: dict[str, Any]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [columns[name] for name in self._names], schema=self._arrow
        )


def by_id_type(raw: bytes) -> list[bytes]:
    """Split a batch by the type of ``_id``, because pymongoarrow cannot mix types."""
    groups: dict[int, list[bytes]] = {}
    start = 0
    while start < len(raw):
        end = start + int.from_bytes(raw[start : start + 4], "little")
        groups.setdefault(raw[start + ID_TYPE_AT], []).append(raw[start:end])
        start = end
    return [b"".join(documents) for documents in groups.values()]


def _null_if_empty(read: Reader) -> Reader:
    """Return a reader that returns null for a struct of nulls, as pymongoarrow does."""

    def read_struct(value: Any, drift: Drift) -> Any:
        found = read(value, drift)
        empty = found is not None and all(inner is None for inner in found.values())
        return None if empty else found

    return read_struct


def _microseconds(array: pa.Array) -> pa.Array:
    check_dates(array)
    return array.cast(MICROSECONDS)


def _id_texts(array: pa.Array) -> pa.Array:
    """Return ids as text. Arrow cannot convert to hexadecimal digits, but Python can."""
    if array.type != OBJECT_ID_TYPE:
        return array
    storage = array.storage
    width = storage.type.byte_width
    start = storage.offset * width
    digits = storage.buffers()[1][start : start + len(storage) * width].to_pybytes().hex()
    offsets = pa.array(numpy.arange(0, len(digits) + 1, 2 * width, dtype=numpy.int32))
    return pa.StringArray.from_buffers(
        len(storage), offsets.buffers()[1], pa.py_buffer(digits.encode())
    )
