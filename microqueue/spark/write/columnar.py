"""Make the documents of rows that differ in id, payload and place only, straight from columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, overload

import bson
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from bson import ObjectId
from bson.raw_bson import RawBSONDocument

from microqueue.operations.call import Document
from microqueue.payload import LARGEST_DOCUMENT
from microqueue.positions import microseconds
from microqueue.spark.ids import key_digests

PAYLOAD = "payload"
MAX_CHUNK_BYTES = 256 * 1024 * 1024
"""In bytes, of rows and of documents. Arrow counts those of a column by 32 bits."""


class ColumnarDocuments(Sequence[Document]):
    """Documents that are encoded. Each says what it is without its payload, when it is asked."""

    def __init__(self, pattern: Document, ids: list[bytes], stored: list[RawBSONDocument]) -> None:
        self._pattern = pattern
        self.ids = ids
        self.stored = stored

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, place: int) -> Document: ...
    @overload
    def __getitem__(self, place: slice) -> list[Document]: ...
    def __getitem__(self, place: int | slice) -> Document | list[Document]:
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        return {**self._pattern, "_id": ObjectId(self.ids[place])}


def columnar_documents(
    rows: pa.Table,
    pattern: Document,
    *,
    key: Sequence[str],
    explicit: bool,
    codec_options: Any,
) -> ColumnarDocuments | None:
    """Make the documents of rows like that of the first, ``pattern``.

    ``explicit`` says that the payload is a column, else it is the row. Gives nothing where a
    row needs a closer look: for a type that is not plain, or a value that may be refused.
    """
    if rows.nbytes > MAX_CHUNK_BYTES:
        return None
    (batch,) = rows.combine_chunks().to_batches()
    ids = _task_ids(batch, pattern["queue"], key)
    payload = _payload_field(batch, explicit=explicit)
    if ids is None or payload is None:
        return None
    first = pattern["position"]
    fields = {
        "_id": encode_object_ids("_id", ids),
        "payload": payload,
        "position": encode_integers("position", np.arange(first, first + len(ids))),
    }
    encoded = encode_document(
        fields.get(name) or encode_constant({name: value}, codec_options)
        for name, value in pattern.items()
    )
    lengths = np.broadcast_to(encoded.length, len(ids))
    if lengths.max() > LARGEST_DOCUMENT or lengths.sum() > MAX_CHUNK_BYTES:
        return None
    stored = [RawBSONDocument(raw) for raw in join_parts(encoded).to_pylist()]
    return ColumnarDocuments(pattern, ids, stored)


def _payload_field(batch: pa.RecordBatch, *, explicit: bool) -> Piece | None:
    if not explicit:
        return encode_subdocument(PAYLOAD, batch.schema.names, batch.columns)
    column = batch.column(PAYLOAD)
    return encode_column(PAYLOAD, column) if not column.null_count else None


def _task_ids(batch: pa.RecordBatch, queue: str, key: Sequence[str]) -> list[bytes] | None:
    columns = [batch.column(name) for name in key]
    if not columns:
        return [ObjectId().binary for _ in range(len(batch))]
    if any(column.null_count for column in columns) or not all(map(is_valid_text, columns)):
        return None
    if len(columns) == 1:
        keys = columns[0].cast(pa.string()).cast(pa.binary()).to_pylist()
    else:
        several = zip(*(column.to_pylist() for column in columns), strict=True)
        keys = [json.dumps(values).encode() for values in several]
    return list(key_digests(queue, keys))


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


def encode_constant(
    fields: Mapping[str, Any], codec_options: Any = bson.DEFAULT_CODEC_OPTIONS
) -> Piece:
    """Encode fields that are the same in all rows."""
    return _same(bson.encode(fields, codec_options=codec_options)[4:-1])


def encode_document(pieces: Iterable[Piece]) -> Piece:
    """Make a document in each row of the fields that pieces are."""
    inner = _chain(pieces)
    length = inner.length + 5  # Of itself too, and the zero at the end.
    return _chain([_numbers(length, "<i4"), inner, _same(ZERO)])


def encode_subdocument(
    name: str, names: Sequence[str], columns: Sequence[pa.Array]
) -> Piece | None:
    """Make a field that is a document of columns; nothing if one of them is not known here."""
    pieces = [encode_column(*one) for one in zip(names, columns, strict=True)]
    known = [piece for piece in pieces if piece is not None]
    if len(known) < len(pieces) or len(set(names)) < len(names):
        return None
    return _chain([_same(_head(DOCUMENT, name)), encode_document(known)])


def encode_object_ids(name: str, ids: list[bytes]) -> Piece:
    """Make a field of object ids."""
    head = _head(OBJECT_ID, name)
    return Piece([head, pa.array(ids, pa.binary())], len(head) + 12)


def encode_integers(name: str, values: Any) -> Piece:
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
    return _whole(pc.if_else(pa.array(fits), join_parts(short), join_parts(long)))


def encode_column(name: str, values: pa.Array) -> Piece | None:
    """Make the field that a column is; nothing if it has a type, or a value, not known here."""
    if ZERO in name.encode():
        return None
    absent = _head(NULL, name)
    if values.null_count == len(values):
        return _same(absent)
    piece = _filled(name, values)
    if piece is None or not values.null_count:
        return piece
    return _whole(pc.if_else(values.is_null(), pa.scalar(absent, pa.binary()), join_parts(piece)))


def join_parts(piece: Piece) -> pa.Array:
    """Give the bytes of each row."""
    parts = [pa.scalar(part, pa.binary()) if type(part) is bytes else part for part in piece.parts]
    return pc.binary_join_element_wise(*parts, NOTHING)


def is_valid_text(values: pa.Array) -> bool:
    """Tell whether text is text. Spark takes any bytes for it, and others read what is stored."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _filled(name: str, values: pa.Array) -> Piece | None:
    """Make the field of a column as if nulls were something."""
    for is_one, encode_filled in _KINDS:
        if is_one(values.type):
            return encode_filled(name, values)
    return None


def _text(name: str, values: pa.Array) -> Piece | None:
    if not is_valid_text(values):
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
    return encode_integers(name, pc.fill_null(values, 0).to_numpy().astype("<i8"))


def _doubles(name: str, values: pa.Array) -> Piece:
    return _field(DOUBLE, name, pc.fill_null(values, 0).to_numpy(), "<f8")


def _instants(name: str, values: pa.Array) -> Piece | None:
    instants = pc.fill_null(values.cast(pa.int64()), 0).to_numpy()
    if values.type.unit != "us" or instants.min() < FIRST or instants.max() > LAST:
        return None
    return _field(INSTANT, name, instants // 1000, "<i8")


def _struct(name: str, values: pa.Array) -> Piece | None:
    return encode_subdocument(name, [field.name for field in values.type], values.flatten())


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
