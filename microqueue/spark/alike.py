"""Make the documents of rows that differ in id, payload and place only, straight from columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa
from bson import ObjectId
from bson.raw_bson import RawBSONDocument

from microqueue.operations.call import Document
from microqueue.payload import LARGEST_DOCUMENT
from microqueue.spark import encode
from microqueue.spark.ids import key_digests

PAYLOAD = "payload"
LARGEST_CHUNK = 256 * 1024 * 1024
"""In bytes, of rows and of documents. Arrow counts those of a column by 32 bits."""


class Alike(Sequence[Document]):
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


def documents(
    rows: pa.Table,
    pattern: Document,
    *,
    key: Sequence[str],
    explicit: bool,
    codec_options: Any,
) -> Alike | None:
    """Make the documents of rows like that of the first, ``pattern``.

    ``explicit`` says that the payload is a column, else it is the row. Gives nothing where a
    row needs a closer look: for a type that is not plain, or a value that may be refused.
    """
    if rows.nbytes > LARGEST_CHUNK:
        return None
    (batch,) = rows.combine_chunks().to_batches()
    ids = _ids(batch, pattern["queue"], key)
    payload = _payload(batch, explicit=explicit)
    if ids is None or payload is None:
        return None
    first = pattern["position"]
    fields = {
        "_id": encode.object_ids("_id", ids),
        "payload": payload,
        "position": encode.integers("position", np.arange(first, first + len(ids))),
    }
    document = encode.document(
        fields.get(name) or encode.constant({name: value}, codec_options)
        for name, value in pattern.items()
    )
    lengths = np.broadcast_to(document.length, len(ids))
    if lengths.max() > LARGEST_DOCUMENT or lengths.sum() > LARGEST_CHUNK:
        return None
    encoded = encode.joined(document).to_pylist()
    return Alike(pattern, ids, [RawBSONDocument(raw) for raw in encoded])


def _payload(batch: pa.RecordBatch, *, explicit: bool) -> encode.Piece | None:
    if not explicit:
        return encode.subdocument(PAYLOAD, batch.schema.names, batch.columns)
    column = batch.column(PAYLOAD)
    return encode.column(PAYLOAD, column) if not column.null_count else None


def _ids(batch: pa.RecordBatch, queue: str, key: Sequence[str]) -> list[bytes] | None:
    columns = [batch.column(name) for name in key]
    if not columns:
        return [ObjectId().binary for _ in range(len(batch))]
    if any(column.null_count for column in columns) or not all(map(encode.is_valid, columns)):
        return None
    if len(columns) == 1:
        keys = columns[0].cast(pa.string()).cast(pa.binary()).to_pylist()
    else:
        several = zip(*(column.to_pylist() for column in columns), strict=True)
        keys = [json.dumps(values).encode() for values in several]
    return list(key_digests(queue, keys))
