"""Turn the values of Arrow into those that tasks carry, by the types of their columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from decimal import Decimal, DecimalException
from typing import Any

from bson import Decimal128
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    MapType,
    NullType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from microqueue.arguments import refused

AS_THEY_ARE = (
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


def check_names(path: str, kind: StructType) -> None:
    """Refuse columns, or fields of one, with the same name: one would take the other's place."""
    if twice := [name for name, count in Counter(kind.names).items() if count > 1]:
        raise refused(path, ", ".join(twice), "there are several of that name; rename all but one")


def converter_of(path: str, kind: DataType, *, for_model: bool = False) -> Converter | None:
    """Make what turns Arrow's values of a type into BSON's; nothing where they are the same.

    For a model they become Python's: it may ask for a date, a decimal, or keys that are numbers.
    """
    if isinstance(kind, StructType):
        check_names(path, kind)
        fields = {
            field.name: convert
            for field in kind.fields
            if (
                convert := converter_of(f"{path}.{field.name}", field.dataType, for_model=for_model)
            )
            is not None
        }
        return _skipping_null(lambda value: converted(value, fields)) if fields else None
    if isinstance(kind, ArrayType):
        convert = converter_of(f"{path}[]", kind.elementType, for_model=for_model)
        return convert and _skipping_null(lambda value: [convert(item) for item in value])
    if isinstance(kind, MapType) and (for_model or isinstance(kind.keyType, StringType)):
        inner = converter_of(f"{path}.*", kind.valueType, for_model=for_model)
        return _skipping_null(
            lambda pairs: {key: inner(item) if inner else item for key, item in pairs}
        )
    if for_model or isinstance(kind, AS_THEY_ARE):
        return None
    if isinstance(kind, DecimalType):
        return _skipping_null(lambda value: _decimal(path, value))
    if isinstance(kind, DateType):
        return _skipping_null(lambda day: day.isoformat())
    raise refused(path, kind.simpleString(), "MongoDB has no such type; cast the column")


def converted(value: dict[str, Any], fields: dict[str, Converter]) -> dict[str, Any]:
    """Turn those fields of a row, or of a struct, that have a converter."""
    return {name: fields[name](item) if name in fields else item for name, item in value.items()}


def _decimal(path: str, value: Decimal) -> Decimal128:
    try:
        return Decimal128(value)
    except DecimalException as exc:
        raise refused(path, value, "MongoDB's decimals have 34 digits; round it") from exc


def _skipping_null(convert: Converter) -> Converter:
    return lambda value: None if value is None else convert(value)
