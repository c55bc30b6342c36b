"""Encode columns as BSON, a whole column at a time: no Python object is made for a value.

The bytes are those that ``bson.encode`` gives for the same rows as dicts. Only plain types are
known here: text, numbers, booleans, instants, bytes, nulls, and structs of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import bson
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from microqueue.positions import microseconds

NOTHING = pa.scalar(b"", pa.binary())
ZERO = b"\x00"
DOUBLE, TEXT, DOCUMENT, BINARY, OBJECT_ID, BOOLEAN, INSTANT, NULL, INT32, INT64 = (
    bytes([kind]) for kind in (0x01, 0x02, 0x03, 0x05, 0x07, 0x08, 0x09, 0x0A, 0x10, 0x12)
)
SMALLEST_INT32, LARGEST_INT32 = -(2**31), 2**31 - 1
FIRST = microseconds(datetime.min.replace(tzinfo=UTC))
LAST = microseconds(datetime.max.replace(tzinfo=UTC))
"""Python has no instants beyond these."""

Lengths = Any
"""How many bytes there are in each row: an array, or one number for all of them."""


class Piece(NamedTuple):
    """Bytes of each row: parts, which come one after the other, and their length together.

    A part is an array with a value for each row, or the bytes that are the same in all.
    """

    parts: list[Any]
    length: Lengths


def constant(fields: Mapping[str, Any], codec_options: Any = bson.DEFAULT_CODEC_OPTIONS) -> Piece:
    """Encode fields that are the same in all rows."""
    return _same(bson.encode(fields, codec_options=codec_options)[4:-1])


def document(pieces: Iterable[Piece]) -> Piece:
    """Make a document in each row of the fields that pieces are."""
    inner = _chain(pieces)
    length = inner.length + 5  # Of itself too, and the zero at the end.
    return _chain([_numbers(length, "<i4"), inner, _same(ZERO)])


def subdocument(name: str, names: Sequence[str], columns: Sequence[pa.Array]) -> Piece | None:
    """Make a field that is a document of columns; nothing if one of them is not known here."""
    pieces = [column(*one) for one in zip(names, columns, strict=True)]
    known = [piece for piece in pieces if piece is not None]
    if len(known) < len(pieces) or len(set(names)) < len(names):
        return None
    return _chain([_same(_head(DOCUMENT, name)), document(known)])


def object_ids(name: str, ids: list[bytes]) -> Piece:
    """Make a field of object ids."""
    head = _head(OBJECT_ID, name)
    return Piece([head, pa.array(ids, pa.binary())], len(head) + 12)


def integers(name: str, values: Any) -> Piece:
    """Make a field of integers: short where they fit, as ``bson`` does."""
    short, long = (
        _chain([_same(_head(kind, name)), _numbers(values, form)])
        for kind, form in ((INT32, "<i4"), (INT64, "<i8"))
    )
    fits = (values >= SMALLEST_INT32) & (values <= LARGEST_INT32)
    if fits.all():
        return short
    if not fits.any():
        return long
    return _whole(pc.if_else(pa.array(fits), joined(short), joined(long)))


def column(name: str, values: pa.Array) -> Piece | None:
    """Make the field that a column is; nothing if it has a type, or a value, not known here."""
    if ZERO in name.encode():
        return None
    absent = _head(NULL, name)
    if values.null_count == len(values):
        return _same(absent)
    piece = _filled(name, values)
    if piece is None or not values.null_count:
        return piece
    return _whole(pc.if_else(values.is_null(), pa.scalar(absent, pa.binary()), joined(piece)))


def joined(piece: Piece) -> pa.Array:
    """Give the bytes of each row."""
    parts = [pa.scalar(part, pa.binary()) if type(part) is bytes else part for part in piece.parts]
    return pc.binary_join_element_wise(*parts, NOTHING)


def is_valid(values: pa.Array) -> bool:
    """Tell whether text is text. Spark takes any bytes for it, and others read what is stored."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _filled(name: str, values: pa.Array) -> Piece | None:
    """Make the field of a column as if nulls were something."""
    for is_one, encode in _KINDS:
        if is_one(values.type):
            return encode(name, values)
    return None


def _text(name: str, values: pa.Array) -> Piece | None:
    if not is_valid(values):
        return None
    raw = pc.fill_null(values, "").cast(pa.binary())
    length = pc.binary_length(raw).to_numpy() + 1
    size = _numbers(length, "<i4")
    return _chain([_same(_head(TEXT, name)), size, Piece([raw, ZERO], length)])


def _bytes(name: str, values: pa.Array) -> Piece:
    raw = pc.fill_null(values, b"")
    length = pc.binary_length(raw).to_numpy()
    size = _numbers(length, "<i4")
    return _chain([_same(_head(BINARY, name)), size, _same(ZERO), Piece([raw], length)])


def _booleans(name: str, values: pa.Array) -> Piece:
    no, yes = (_head(BOOLEAN, name) + value for value in (ZERO, b"\x01"))
    filled = pc.fill_null(values, False)  # noqa: FBT003 (as Arrow has it)
    chosen = pc.if_else(filled, pa.scalar(yes, pa.binary()), pa.scalar(no, pa.binary()))
    return Piece([chosen], len(no))


def _integers(name: str, values: pa.Array) -> Piece:
    return integers(name, pc.fill_null(values, 0).to_numpy().astype("<i8"))


def _doubles(name: str, values: pa.Array) -> Piece:
    return _field(DOUBLE, name, pc.fill_null(values, 0).to_numpy(), "<f8")


def _instants(name: str, values: pa.Array) -> Piece | None:
    instants = pc.fill_null(values.cast(pa.int64()), 0).to_numpy()
    if values.type.unit != "us" or instants.min() < FIRST or instants.max() > LAST:
        return None
    return _field(INSTANT, name, instants // 1000, "<i8")


def _struct(name: str, values: pa.Array) -> Piece | None:
    return subdocument(name, [field.name for field in values.type], values.flatten())


_KINDS: list[tuple[Callable[[pa.DataType], bool], Callable[[str, pa.Array], Piece | None]]] = [
    (pa.types.is_string, _text),
    (pa.types.is_binary, _bytes),
    (pa.types.is_boolean, _booleans),
    (pa.types.is_signed_integer, _integers),
    (pa.types.is_floating, _doubles),
    (pa.types.is_timestamp, _instants),
    (pa.types.is_struct, _struct),
]


def _field(kind: bytes, name: str, values: Any, form: str) -> Piece:
    return _chain([_same(_head(kind, name)), _numbers(values, form)])


def _head(kind: bytes, name: str) -> bytes:
    return kind + name.encode() + ZERO


def _same(raw: bytes) -> Piece:
    return Piece([raw], len(raw))


def _whole(raw: pa.Array) -> Piece:
    return Piece([raw], pc.binary_length(raw).to_numpy())


def _numbers(values: Any, form: str) -> Piece:
    """Give numbers as their bytes; one number, if it is the same in all rows."""
    stored = np.ascontiguousarray(values, form)
    width = stored.dtype.itemsize
    if np.ndim(values) == 0:
        return _same(stored.tobytes())
    fixed = pa.Array.from_buffers(pa.binary(width), len(stored), [None, pa.py_buffer(stored)])
    return Piece([fixed.cast(pa.binary())], width)


def _chain(pieces: Iterable[Piece]) -> Piece:
    """Put pieces one after the other; what is the same in all rows becomes one part."""
    parts: list[Any] = []
    length: Lengths = 0
    for piece in pieces:
        length = length + piece.length
        for part in piece.parts:
            if parts and type(part) is bytes and type(parts[-1]) is bytes:
                parts[-1] += part
            else:
                parts.append(part)
    return Piece(parts, length)
