"""Encode columns as BSON documents, without a Python object per value.

It applies to rows whose tasks differ only in id, payload and position. The bytes are the same as
those of ``bson.encode`` for the same rows as dicts. Supported types are strings, numbers,
booleans, timestamps, binary, null, and structs of these. For all others the functions return
None, and the rows are encoded one by one.
"""

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
"""Limit for rows and for documents: Arrow's offsets in a column have 32 bits."""

EMPTY = pa.scalar(b"", pa.binary())
ZERO = b"\x00"
DOUBLE, TEXT, DOCUMENT, BINARY, OBJECT_ID, BOOLEAN, INSTANT, NULL, INT32, INT64 = (
    bytes([kind]) for kind in (0x01, 0x02, 0x03, 0x05, 0x07, 0x08, 0x09, 0x0A, 0x10, 0x12)
)
SMALLEST_INT32, LARGEST_INT32 = -(2**31), 2**31 - 1
FIRST = microseconds(datetime.min.replace(tzinfo=UTC))
LAST = microseconds(datetime.max.replace(tzinfo=UTC))
"""The range of Python's datetimes, in microseconds."""

Lengths = Any
"""The number of bytes per row: an array, or one number if it is the same for all rows."""


class ColumnarDocuments(Sequence[Document]):
    """Encoded documents. As a sequence it returns them without their payloads, made on demand."""

    def __init__(self, pattern: Document, ids: list[bytes], encoded: list[RawBSONDocument]) -> None:
        self._pattern = pattern
        self.ids = ids
        self.encoded = encoded

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        return {**self._pattern, "_id": ObjectId(self.ids[index])}


def columnar_documents(
    rows: pa.Table,
    pattern: Document,
    *,
    key: Sequence[str],
    has_payload_column: bool,
    codec_options: Any,
) -> ColumnarDocuments | None:
    """Return the documents of rows, or None if the rows must be encoded one by one.

    Args:
        rows: The rows.
        pattern: The document of the first row; the others differ in id, payload and position.
        key: The columns of the key.
        has_payload_column: Whether a column is the payload; otherwise the whole row is.
        codec_options: How to encode the other fields.
    """
    if rows.nbytes > MAX_CHUNK_BYTES:
        return None
    (batch,) = rows.combine_chunks().to_batches()
    ids = _task_ids(batch, pattern["queue"], key)
    payload = _payload_field(batch, has_payload_column=has_payload_column)
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


def _payload_field(batch: pa.RecordBatch, *, has_payload_column: bool) -> Piece | None:
    if not has_payload_column:
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
        values = zip(*(column.to_pylist() for column in columns), strict=True)
        keys = [json.dumps(row).encode() for row in values]
    return list(key_digests(queue, keys))


class Piece(NamedTuple):
    """Bytes of each row, as parts to be joined, and their total length.

    A part is an array with one value per row, or bytes that are the same for all rows.
    """

    parts: list[Any]
    length: Lengths


def encode_constant(
    fields: Mapping[str, Any], codec_options: Any = bson.DEFAULT_CODEC_OPTIONS
) -> Piece:
    """Return fields that are the same for all rows."""
    return _constant(bson.encode(fields, codec_options=codec_options)[4:-1])


def encode_document(pieces: Iterable[Piece]) -> Piece:
    """Return one document per row, made of the fields."""
    inner = _chain(pieces)
    length = inner.length + 5  # With the length itself and the final zero byte.
    return _chain([_numbers(length, "<i4"), inner, _constant(ZERO)])


def encode_subdocument(
    name: str, names: Sequence[str], columns: Sequence[pa.Array]
) -> Piece | None:
    """Return a field that is a document of columns; None if a type is not supported."""
    pieces = [encode_column(*one) for one in zip(names, columns, strict=True)]
    known = [piece for piece in pieces if piece is not None]
    if len(known) < len(pieces) or len(set(names)) < len(names):
        return None
    return _chain([_constant(_header(DOCUMENT, name)), encode_document(known)])


def encode_object_ids(name: str, ids: list[bytes]) -> Piece:
    """Return a field of object ids."""
    head = _header(OBJECT_ID, name)
    return Piece([head, pa.array(ids, pa.binary())], len(head) + 12)


def encode_integers(name: str, values: Any) -> Piece:
    """Return a field of integers: 32 bits where they fit, otherwise 64, as ``bson`` does."""
    short, long = (
        _chain([_constant(_header(kind, name)), _numbers(values, form)])
        for kind, form in ((INT32, "<i4"), (INT64, "<i8"))
    )
    fits = (values >= SMALLEST_INT32) & (values <= LARGEST_INT32)
    if fits.all():
        return short
    if not fits.any():
        return long
    return _variable(pc.if_else(pa.array(fits), join_parts(short), join_parts(long)))


def encode_column(name: str, values: pa.Array) -> Piece | None:
    """Return the field of a column; None if its type, or a value, is not supported."""
    if ZERO in name.encode():
        return None
    absent = _header(NULL, name)
    if values.null_count == len(values):
        return _constant(absent)
    piece = _filled(name, values)
    if piece is None or not values.null_count:
        return piece
    return _variable(
        pc.if_else(values.is_null(), pa.scalar(absent, pa.binary()), join_parts(piece))
    )


def join_parts(piece: Piece) -> pa.Array:
    """Return the bytes of each row."""
    parts = [pa.scalar(part, pa.binary()) if type(part) is bytes else part for part in piece.parts]
    return pc.binary_join_element_wise(*parts, EMPTY)


def is_valid_text(values: pa.Array) -> bool:
    """Return whether all strings are UTF-8. Spark does not check, but readers of BSON do."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _filled(name: str, values: pa.Array) -> Piece | None:
    """Return the field of a column, with any value in place of nulls."""
    for matches, encode in _ENCODERS:
        if matches(values.type):
            return encode(name, values)
    return None


def _text(name: str, values: pa.Array) -> Piece | None:
    if not is_valid_text(values):
        return None
    raw = pc.fill_null(values, "").cast(pa.binary())
    length = pc.binary_length(raw).to_numpy() + 1
    size = _numbers(length, "<i4")
    return _chain([_constant(_header(TEXT, name)), size, Piece([raw, ZERO], length)])


def _bytes(name: str, values: pa.Array) -> Piece:
    raw = pc.fill_null(values, b"")
    length = pc.binary_length(raw).to_numpy()
    size = _numbers(length, "<i4")
    return _chain([_constant(_header(BINARY, name)), size, _constant(ZERO), Piece([raw], length)])


def _booleans(name: str, values: pa.Array) -> Piece:
    no, yes = (_header(BOOLEAN, name) + value for value in (ZERO, b"\x01"))
    filled = pc.fill_null(values, False)  # noqa: FBT003 (Arrow's signature)
    raw = pc.if_else(filled, pa.scalar(yes, pa.binary()), pa.scalar(no, pa.binary()))
    return Piece([raw], len(no))


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


_ENCODERS: list[tuple[Callable[[pa.DataType], bool], Callable[[str, pa.Array], Piece | None]]] = [
    (pa.types.is_string, _text),
    (pa.types.is_binary, _bytes),
    (pa.types.is_boolean, _booleans),
    (pa.types.is_signed_integer, _integers),
    (pa.types.is_floating, _doubles),
    (pa.types.is_timestamp, _instants),
    (pa.types.is_struct, _struct),
]


def _field(kind: bytes, name: str, values: Any, form: str) -> Piece:
    return _chain([_constant(_header(kind, name)), _numbers(values, form)])


def _header(kind: bytes, name: str) -> bytes:
    return kind + name.encode() + ZERO


def _constant(raw: bytes) -> Piece:
    return Piece([raw], len(raw))


def _variable(raw: pa.Array) -> Piece:
    return Piece([raw], pc.binary_length(raw).to_numpy())


def _numbers(values: Any, form: str) -> Piece:
    """Return the bytes of numbers; ``values`` may be one number for all rows."""
    stored = np.ascontiguousarray(values, form)
    width = stored.dtype.itemsize
    if np.ndim(values) == 0:
        return _constant(stored.tobytes())
    fixed = pa.Array.from_buffers(pa.binary(width), len(stored), [None, pa.py_buffer(stored)])
    return Piece([fixed.cast(pa.binary())], width)


def _chain(pieces: Iterable[Piece]) -> Piece:
    """Join pieces, and merge adjacent parts that are the same for all rows."""
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
