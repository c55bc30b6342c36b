"""Use pymongoarrow, and detect values that it silently changes: types, rounding, lost NaN.

The checks are fast: they search the bytes of a whole batch, or whole columns. They may report a
batch that is fine, but never miss one that is not.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from bson.codec_options import CodecOptions

from microqueue.spark.value_conversion import LARGEST_EXACT

with warnings.catch_warnings():
    # pymongoarrow warns of a pyarrow that is newer than the one it was built with.
    warnings.simplefilter("ignore", RuntimeWarning)
    from pymongoarrow.context import PyMongoArrowContext
    from pymongoarrow.schema import Schema
    from pymongoarrow.types import ObjectIdType

OBJECT_ID_TYPE: pa.DataType = ObjectIdType()
MILLISECONDS = pa.timestamp("ms", tz="UTC")
FIRST_MS, LAST_MS = -62_135_596_800_000, 253_402_300_799_999
"""The years 1 to 9999: the range that both Python and Spark support."""

BSON_DOUBLE, BSON_STRING, BSON_DOCUMENT, BSON_ARRAY = 1, 2, 3, 4
BSON_OBJECT_ID, BSON_BOOLEAN, BSON_NULL = 7, 8, 10
BSON_TYPES = frozenset({*range(0x01, 0x14), 0x7F, 0xFF})
NOT_FINITE = rb".{6}[\xf0-\xff][\x7f\xff]"  # The last bytes of NaN, and of infinity.
REFERENCE = b"$ref\0"  # A document with this key is decoded as a DBRef.


class LossyBatch(Exception):
    """pymongoarrow could change a value of this batch."""


def to_table(
    raw: bytes, types: Mapping[str, pa.DataType], codec_options: CodecOptions[Any] | None = None
) -> pa.Table:
    """Convert a batch of raw BSON with pymongoarrow; absent fields become null."""
    context = PyMongoArrowContext(Schema(types), codec_options=codec_options)
    context.process_bson_stream(raw)
    return context.finish()


def field_header(kind: int, name: str) -> bytes:
    """Return a field's type and name as BSON stores them before the value."""
    return bytes([kind]) + name.encode() + b"\0"


def may_have_other_type(raw: bytes, name: str, expected: tuple[int, ...]) -> bool:
    """Return whether a field may have an unexpected type.

    Text that ends in the field's name can cause a false positive.
    """
    key = name.encode() + b"\0"
    others = BSON_TYPES - set(expected)
    found = raw.find(key)
    while found > 0:
        if raw[found - 1] in others:
            return True
        found = raw.find(key, found + len(key))
    return False


def may_have_lost_nan(raw: bytes, name: str, column: pa.ChunkedArray) -> bool:
    """Return whether a null of a column, or of a struct's fields, may have been NaN.

    In a column that is not numeric, any double counts.
    """
    if pa.types.is_struct(column.type):
        return any(
            may_have_lost_nan(raw, field.name, child)
            for field, child in zip(column.type, column.flatten(), strict=True)
        )
    key = field_header(BSON_DOUBLE, name)
    if not column.null_count or key not in raw:
        return False
    if not pa.types.is_floating(column.type):
        return True
    return re.search(re.escape(key) + NOT_FINITE, raw, re.DOTALL) is not None


def check_integers(array: pa.Array) -> None:
    """Raise ``LossyBatch`` if a double may be a rounded integer.

    The first integer that a double cannot hold is rounded to the largest exact one.
    """
    largest = pc.max(pc.abs(array)).as_py()
    if largest is not None and largest >= LARGEST_EXACT:
        raise LossyBatch


def check_dates(array: pa.Array) -> None:
    """Raise ``LossyBatch`` for dates that Python or Spark cannot hold."""
    bounds = pc.min_max(array.cast(pa.int64())).as_py()
    if bounds["min"] is not None and (bounds["min"] < FIRST_MS or bounds["max"] > LAST_MS):
        raise LossyBatch
