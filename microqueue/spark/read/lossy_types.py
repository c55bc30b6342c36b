"""pymongoarrow, imported quietly: it warns of a pyarrow that is newer than its own build."""

from __future__ import annotations

import re
import warnings

import pyarrow as pa
import pyarrow.compute as pc

from microqueue.spark.value_conversion import LARGEST_EXACT

with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    from pymongoarrow.context import PyMongoArrowContext
    from pymongoarrow.schema import Schema
    from pymongoarrow.types import ObjectIdType

__all__ = ["ObjectIdType", "PyMongoArrowContext", "Schema"]

MILLISECONDS = pa.timestamp("ms", tz="UTC")
FIRST_MS, LAST_MS = -62_135_596_800_000, 253_402_300_799_999
"""The years 1 to 9999, which is all that Python's and Spark's dates agree on."""

BSON_DOUBLE, BSON_STRING, BSON_DOCUMENT, BSON_ARRAY = 1, 2, 3, 4
BSON_OBJECT_ID, BSON_BOOLEAN, BSON_NULL = 7, 8, 10
BSON_TYPES = frozenset({*range(0x01, 0x14), 0x7F, 0xFF})
NOT_FINITE = rb".{6}[\xf0-\xff][\x7f\xff]"  # The last bytes of NaN, and of infinity.
REFERENCE = b"$ref\0"  # A document with this key is a DBRef in Python, and no document.


class LossyBatch(Exception):
    """The quick way could change something in this batch."""


def field_header(kind: int, name: str) -> bytes:
    """Write a field's type and name as they stand before its value."""
    return bytes([kind]) + name.encode() + b"\0"


def may_have_other_type(raw: bytes, name: str, expected: tuple[int, ...]) -> bool:
    """Tell whether a field may have another type. Text that ends in the name may look so, too."""
    key = name.encode() + b"\0"
    others = BSON_TYPES - set(expected)
    place = raw.find(key)
    while place > 0:
        if raw[place - 1] in others:
            return True
        place = raw.find(key, place + len(key))
    return False


def may_have_lost_nan(raw: bytes, name: str, column: pa.ChunkedArray) -> bool:
    """Tell whether a null may have been NaN, in a column or in the fields of a struct.

    Where no number should be, any double looks so.
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
    """Refuse doubles that may stand for integers which a double cannot hold.

    The first such integer is rounded to the largest that is exact.
    """
    largest = pc.max(pc.abs(array)).as_py()
    if largest is not None and largest >= LARGEST_EXACT:
        raise LossyBatch


def check_dates(array: pa.Array) -> None:
    """Refuse dates that Python or Spark cannot hold."""
    bounds = pc.min_max(array.cast(pa.int64())).as_py()
    if bounds["min"] is not None and (bounds["min"] < FIRST_MS or bounds["max"] > LAST_MS):
        raise LossyBatch
