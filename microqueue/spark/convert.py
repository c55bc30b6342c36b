"""Turn batches of raw BSON into Arrow batches of Spark's types.

Flat columns go through pymongoarrow. It takes some liberties: a fraction in an integer
column is cut off, text in place of a sub-document is null. So what it could have changed is
looked for, and a batch with anything odd in it is read again by ``exact``, value by value.
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

from microqueue.spark import ids
from microqueue.spark.columns import COMPUTED, DEFAULTS, ERROR, JSON_COLUMNS, REQUIRED
from microqueue.spark.exact import LARGEST_EXACT, Drift, Reader, reader_of
from microqueue.spark.extended import to_json
from microqueue.spark.mongoarrow import ObjectIdType, PyMongoArrowContext, Schema

MILLISECONDS = pa.timestamp("ms", tz="UTC")
MICROSECONDS = pa.timestamp("us", tz="UTC")
FIRST_MS, LAST_MS = -62_135_596_800_000, 253_402_300_799_999
"""The years 1 to 9999, which is all that Python's and Spark's dates agree on."""

# Integers are read as doubles: a fraction then shows.
FLAT: dict[DataType, pa.DataType] = {
    StringType(): pa.string(),
    BooleanType(): pa.bool_(),
    IntegerType(): pa.float64(),
    LongType(): pa.float64(),
    DoubleType(): pa.float64(),
    TimestampType(): MILLISECONDS,
    ERROR: pa.struct({"message": pa.string(), "code": pa.string(), "at": MILLISECONDS}),
}

BSON_STRING, BSON_DOCUMENT, BSON_ARRAY, BSON_OBJECT_ID, BSON_BOOLEAN, BSON_NULL = 2, 3, 4, 7, 8, 10
ID_TYPE_AT = 4  # Behind the document's length: MongoDB keeps _id in front.
FAST_IDS = {
    BSON_STRING: (pa.string(), ids.STRING),
    BSON_OBJECT_ID: (ObjectIdType(), ids.OBJECT_ID),
}


class Unfit(Exception):
    """The quick way could change something in this batch."""


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
        stored = [name for name in self._names if name not in COMPUTED]
        self._flat = [
            name for name in stored if self._types[name] in FLAT and name not in JSON_COLUMNS
        ]
        self._nested = {name: self._reader(name) for name in stored if name not in self._flat}
        self._exact = {name: self._reader(name) for name in stored}

    @property
    def fields(self) -> list[str]:
        """The fields of the document that are needed."""
        return ["_id", *(name for name in self._names if name not in COMPUTED)]

    def convert(self, raw: bytes) -> Iterator[pa.RecordBatch]:
        """Give the rows of one batch from the server."""
        try:
            yield self._quickly(raw)
        except Unfit:
            groups = by_id_type(raw)
            for part in groups:
                try:
                    yield self._exactly(part) if len(groups) == 1 else self._quickly(part)
                except Unfit:
                    yield self._exactly(part)

    def _reader(self, name: str) -> Reader:
        kind = self._types[name]
        if name in JSON_COLUMNS and isinstance(kind, StringType):
            return lambda value, _drift: None if value is None else to_json(value)
        return reader_of(kind, name, closed=name == "payload")

    # The quick way

    def _quickly(self, raw: bytes) -> pa.RecordBatch:
        id_kind = FAST_IDS.get(raw[ID_TYPE_AT])
        if id_kind is None or self._looks_odd(raw):
            raise Unfit
        kinds = {"_id": id_kind[0], **{name: FLAT[self._types[name]] for name in self._flat}}
        context = PyMongoArrowContext(Schema(kinds))
        try:
            context.process_bson_stream(raw)
            table = context.finish()
            columns = {
                name: self._fitted(name, table.column(name).combine_chunks()) for name in self._flat
            }
        except (TypeError, ValueError, OverflowError) as exc:  # Arrow's errors are among these.
            raise Unfit from exc
        columns["drifted"] = pa.repeat(pa.scalar(0, pa.int32()), table.num_rows)
        columns["id_type"] = pa.repeat(id_kind[1], table.num_rows)
        if "id" in self._types:
            columns["id"] = _id_texts(table.column("_id").combine_chunks())
        if self._nested:
            nested, drifted = self._read_exactly(raw, self._nested)
            columns |= {**nested, "drifted": pa.array(drifted, pa.int32())}
        return self._batch(columns)

    def _looks_odd(self, raw: bytes) -> bool:
        """Look for types that pymongoarrow would accept in silence. May be wrong to say yes."""
        for name in self._flat:
            kind = self._types[name]
            if kind == ERROR and has_other_type(raw, name, (BSON_DOCUMENT, BSON_NULL)):
                return True
            numeric = isinstance(kind, IntegerType | LongType | DoubleType)
            if numeric and raw.find(bytes([BSON_BOOLEAN]) + name.encode() + b"\0") >= 0:
                return True
        return False

    def _fitted(self, name: str, array: pa.Array) -> pa.Array:
        kind = self._types[name]
        if name in REQUIRED and array.null_count:
            raise Unfit
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
        if isinstance(kind, IntegerType | LongType):
            largest = pc.max(pc.abs(array)).as_py()
            if largest is not None and largest > LARGEST_EXACT:
                raise Unfit
        fitted = array.cast(self._arrow.field(name).type)
        return pc.fill_null(fitted, DEFAULTS[name]) if name in DEFAULTS else fitted

    # The exact way

    def _exactly(self, raw: bytes) -> pa.RecordBatch:
        columns, drifted = self._read_exactly(raw, self._exact)
        found = [document["_id"] for document in self._documents(raw)]
        columns["id"] = pa.array([str(task_id) for task_id in found], pa.string())
        columns["id_type"] = pa.array([ids.id_type(task_id) for task_id in found], pa.string())
        columns["drifted"] = pa.array(drifted, pa.int32())
        return self._batch(columns)

    def _read_exactly(
        self, raw: bytes, readers: dict[str, Reader]
    ) -> tuple[dict[str, pa.Array], list[int]]:
        drift = self._drift
        values: dict[str, list[Any]] = {name: [] for name in readers}
        drifted = []
        required = [name for name in readers if name in REQUIRED]
        for document in self._documents(raw):
            drift.begin(document["_id"])
            for name, read in readers.items():
                values[name].append(read(document.get(name, DEFAULTS.get(name)), drift))
            for name in required:
                if document.get(name) is None:
                    drift.note(name, "is missing")
            drifted.append(drift.count)
        return {
            name: pa.array(column, self._arrow.field(name).type) for name, column in values.items()
        }, drifted

    def _documents(self, raw: bytes) -> list[dict[str, Any]]:
        return bson.decode_all(raw, self._codec_options)

    def _batch(self, columns: dict[str, Any]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [columns[name] for name in self._names], schema=self._arrow
        )


def by_id_type(raw: bytes) -> list[bytes]:
    """Split a batch into one per type of ``_id``, which pymongoarrow cannot mix."""
    groups: dict[int, list[bytes]] = {}
    start = 0
    while start < len(raw):
        end = start + int.from_bytes(raw[start : start + 4], "little")
        groups.setdefault(raw[start + ID_TYPE_AT], []).append(raw[start:end])
        start = end
    return [b"".join(documents) for documents in groups.values()]


def has_other_type(raw: bytes, name: str, expected: tuple[int, ...]) -> bool:
    """Tell whether a field may have another type. Text that ends in the name may look so, too."""
    key = name.encode() + b"\0"
    known = {0x01, 0x02, 0x03, 0x04, 0x05, 0x07, 0x08, 0x09, 0x0A, 0x10, 0x12, 0x13} - set(expected)
    place = raw.find(key)
    while place > 0:
        if raw[place - 1] in known:
            return True
        place = raw.find(key, place + len(key))
    return False


def check_dates(array: pa.Array) -> None:
    """Refuse dates that Python or Spark cannot hold."""
    bounds = pc.min_max(array.cast(pa.int64())).as_py()
    if bounds["min"] is not None and (bounds["min"] < FIRST_MS or bounds["max"] > LAST_MS):
        raise Unfit


def _microseconds(array: pa.Array) -> pa.Array:
    check_dates(array)
    return array.cast(MICROSECONDS)


def _id_texts(array: pa.Array) -> pa.Array:
    """Write ids as text; Arrow has no function for hexadecimal digits, but Python has."""
    if not isinstance(array.type, ObjectIdType):
        return array
    storage = array.storage
    width = storage.type.byte_width
    start = storage.offset * width
    digits = storage.buffers()[1][start : start + len(storage) * width].to_pybytes().hex()
    offsets = pa.array(numpy.arange(0, len(digits) + 1, 2 * width, dtype=numpy.int32))
    return pa.StringArray.from_buffers(
        len(storage), offsets.buffers()[1], pa.py_buffer(digits.encode())
    )
