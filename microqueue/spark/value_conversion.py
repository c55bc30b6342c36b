"""Convert single values between BSON and Spark's types, in both directions.

Reading is exact: no value is rounded, truncated or guessed. A value that does not fit its column
becomes null and is recorded as drift.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal, DecimalException
from typing import Any, TypeAlias
from uuid import UUID

from bson import Decimal128, ObjectId
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    IntegralType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from microqueue.arguments import invalid_argument
from microqueue.errors import InvalidArgument, SchemaDrift
from microqueue.model import shorten
from microqueue.spark import error_codes

LARGEST_EXACT = 2**53
"""A double holds every integer up to this one."""

FLOAT = struct.Struct("<f")

INTEGER_BITS: dict[type[DataType], int] = {
    ByteType: 8,
    ShortType: 16,
    IntegerType: 32,
    LongType: 64,
}


class Drift:
    """Counts the values of one task that do not fit their columns; raises if ``strict``."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self.task_id: Any = None
        self.count = 0

    def begin(self, task_id: Any) -> None:
        """Start the next task."""
        self.task_id, self.count = task_id, 0

    def record(self, path: str, reason: str, *, code: str, value: Any = None) -> None:
        """Count a value that does not fit.

        Raises:
            SchemaDrift: The read is strict.
        """
        if self._strict:
            raise SchemaDrift(
                task_id=self.task_id, column=path, reason=reason, code=code, value=value
            )
        self.count += 1


Reader: TypeAlias = Callable[[Any, Drift], Any]
"""Converts a value from BSON, and records it if it does not fit."""


def reader_of(kind: DataType, path: str, *, closed: bool = False) -> Reader:
    """Return the function that converts BSON values to a Spark type.

    Args:
        kind: The type.
        path: The column, or the path of a field in it, for errors.
        closed: Whether structs must have exactly the fields of the type.

    Raises:
        InvalidArgument: BSON has no such type.
    """
    if isinstance(kind, StructType):
        return _struct_reader(kind, path, closed=closed)
    if isinstance(kind, ArrayType):
        return _array_reader(kind, path, closed=closed)
    if isinstance(kind, MapType):
        return _map_reader(kind, path, closed=closed)
    convert = _scalar_reader(kind, path)

    def read(value: Any, drift: Drift) -> Any:
        if value is None:
            return None
        converted = convert(value)
        if converted is None:
            _record_type(drift, path, value, kind.simpleString())
        return converted

    return read


def _struct_reader(kind: StructType, path: str, *, closed: bool) -> Reader:
    fields = {
        field.name: reader_of(field.dataType, f"{path}.{field.name}", closed=closed)
        for field in kind.fields
    }

    def read(value: Any, drift: Drift) -> Any:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            _record_type(drift, path, value, "a document")
            return None
        if closed and value.keys() != fields.keys():
            for name in fields.keys() - value.keys():
                drift.record(f"{path}.{name}", "is missing", code=error_codes.MISSING)
            for name in value.keys() - fields.keys():
                reason = "is not in the schema"
                drift.record(f"{path}.{name}", reason, code=error_codes.UNKNOWN_FIELD)
        return {name: convert(value.get(name), drift) for name, convert in fields.items()}

    return read


def _array_reader(kind: ArrayType, path: str, *, closed: bool) -> Reader:
    convert = reader_of(kind.elementType, f"{path}[]", closed=closed)

    def read(value: Any, drift: Drift) -> Any:
        if value is None:
            return None
        if not isinstance(value, list):
            _record_type(drift, path, value, "an array")
            return None
        return [convert(item, drift) for item in value]

    return read


def _map_reader(kind: MapType, path: str, *, closed: bool) -> Reader:
    if not isinstance(kind.keyType, StringType):
        raise _unreadable(kind, path, "map keys in MongoDB are strings")
    convert = reader_of(kind.valueType, f"{path}.*", closed=closed)

    def read(value: Any, drift: Drift) -> Any:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            _record_type(drift, path, value, "a document")
            return None
        return [(key, convert(item, drift)) for key, item in value.items()]

    return read


def _scalar_reader(kind: DataType, path: str) -> Callable[[Any], Any]:
    """Return the function that converts a value, or returns None for one that does not fit."""
    if type(kind) in INTEGER_BITS:
        limit = 2 ** (INTEGER_BITS[type(kind)] - 1)
        return lambda value: _exact_integer(value, limit)
    if isinstance(kind, DecimalType):
        return lambda value: _exact_decimal(value, kind)
    found = _SCALARS.get(type(kind))
    if found is None:
        raise _unreadable(kind, path, "MongoDB has no such type; read the stored type and cast it")
    return found


def _unreadable(kind: DataType, path: str, reason: str) -> InvalidArgument:
    if path.split(".", maxsplit=1)[0] != "payload":
        return invalid_argument(
            "schema", f"{path} {kind.simpleString()}", reason, code=error_codes.UNSUPPORTED_TYPE
        )
    return invalid_argument(
        "payload",
        f"{path} {kind.simpleString()}",
        f"{reason}; or use payload=json",
        code=error_codes.UNSUPPORTED_TYPE,
    )


def _exact_text(value: Any) -> str | None:
    return value if isinstance(value, str) else _id_text(value)


def _id_text(value: Any) -> str | None:
    return str(value) if isinstance(value, ObjectId | UUID) else None


def _exact_integer(value: Any, limit: int) -> int | None:
    if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_EXACT:
        value = int(value)  # The mongo shell stores whole numbers as doubles.
    fits = isinstance(value, int) and not isinstance(value, bool) and -limit <= value < limit
    return value if fits else None


def _exact_double(value: Any) -> float | None:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_EXACT:
        return float(value)
    return value if isinstance(value, float) else None


def _exact_float(value: Any) -> float | None:
    found = _exact_double(value)
    if found is None or not math.isfinite(found):
        return found
    try:
        (rounded,) = FLOAT.unpack(FLOAT.pack(found))
    except OverflowError:
        return None
    return found if rounded == found else None


def _wall_clock(value: Any) -> datetime | None:
    """Return an instant as UTC without a timezone, which is how the sink stores such values."""
    return value.astimezone(UTC).replace(tzinfo=None) if isinstance(value, datetime) else None


def _exact_decimal(value: Any, kind: DecimalType) -> Decimal | None:
    if isinstance(value, Decimal128):
        value = value.to_decimal()
    elif isinstance(value, int) and not isinstance(value, bool):
        value = Decimal(value)
    if not isinstance(value, Decimal) or not value.is_finite():
        return None
    _, digits, exponent = value.normalize().as_tuple()
    if not isinstance(exponent, int) or -exponent > kind.scale:
        return None
    return value if len(digits) + exponent <= kind.precision - kind.scale else None


_SCALARS: dict[type[DataType], Callable[[Any], Any]] = {
    StringType: _exact_text,
    BooleanType: lambda value: value if isinstance(value, bool) else None,
    DoubleType: _exact_double,
    FloatType: _exact_float,
    TimestampType: lambda value: value if isinstance(value, datetime) else None,
    TimestampNTZType: _wall_clock,
    BinaryType: lambda value: bytes(value) if isinstance(value, bytes) else None,
}


def _record_type(drift: Drift, path: str, value: Any, expected: str) -> None:
    reason = f"is {shorten(value, 80)} ({type(value).__name__}) instead of {expected}"
    drift.record(path, reason, code=error_codes.WRONG_TYPE, value=value)


# From Spark to BSON.

UNCONVERTED = (
    StringType,
    IntegralType,
    FloatType,
    DoubleType,
    BooleanType,
    BinaryType,
    TimestampType,
    TimestampNTZType,
    NullType,
)

Converter = Callable[[Any], Any]


def check_column_names(path: str, kind: StructType) -> None:
    """Raise ``InvalidArgument`` if two columns, or two fields of a struct, have the same name."""
    if twice := [name for name, count in Counter(kind.names).items() if count > 1]:
        raise invalid_argument(
            path,
            ", ".join(twice),
            "several have this name; rename all but one",
            code=error_codes.REPEATED_NAME,
        )


def converter_of(path: str, kind: DataType, *, for_model: bool = False) -> Converter | None:
    """Return the function that converts Arrow's values to BSON's; None if they are the same.

    Args:
        path: The column, or the path of a field in it, for errors.
        kind: The type.
        for_model: Convert to Python's types instead, because a pydantic model may have dates,
            decimals, or maps with keys that are not strings.

    Raises:
        InvalidArgument: BSON has no such type.
    """
    if isinstance(kind, StructType):
        check_column_names(path, kind)
        fields = {
            field.name: convert
            for field in kind.fields
            if (
                convert := converter_of(f"{path}.{field.name}", field.dataType, for_model=for_model)
            )
            is not None
        }
        return _skipping_null(lambda value: convert_fields(value, fields)) if fields else None
    if isinstance(kind, ArrayType):
        convert = converter_of(f"{path}[]", kind.elementType, for_model=for_model)
        return convert and _skipping_null(lambda value: [convert(item) for item in value])
    if isinstance(kind, MapType) and (for_model or isinstance(kind.keyType, StringType)):
        inner = converter_of(f"{path}.*", kind.valueType, for_model=for_model)
        return _skipping_null(
            lambda pairs: {key: inner(item) if inner else item for key, item in pairs}
        )
    if for_model or isinstance(kind, UNCONVERTED):
        return None
    if isinstance(kind, DecimalType):
        return _skipping_null(lambda value: _to_decimal128(path, value))
    if isinstance(kind, DateType):
        return _skipping_null(lambda day: day.isoformat())
    raise invalid_argument(
        path,
        kind.simpleString(),
        "MongoDB has no such type; cast the column",
        code=error_codes.UNSUPPORTED_TYPE,
    )


def convert_fields(value: dict[str, Any], fields: dict[str, Converter]) -> dict[str, Any]:
    """Return a row or struct with the converters of its fields applied."""
    return {name: fields[name](item) if name in fields else item for name, item in value.items()}


def _to_decimal128(path: str, value: Decimal) -> Decimal128:
    try:
        return Decimal128(value)
    except DecimalException as exc:
        raise invalid_argument(
            path,
            value,
            "MongoDB's decimals have at most 34 digits; round it",
            code=error_codes.TOO_MANY_DIGITS,
        ) from exc


def _skipping_null(convert: Converter) -> Converter:
    return lambda value: None if value is None else convert(value)
