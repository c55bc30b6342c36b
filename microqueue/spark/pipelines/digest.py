"""A digest of rows that is the same before they are written and after they are read back.

Arrow may keep equal rows in memory in different ways: with or without a bitmap of nulls, with
anything in the place of a null, in one piece or in several. So what is hashed is what the rows
say: of each column which values are there, how long they are, and the values.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.compute as pc

DIGEST_BYTES = 16


def digest(rows: pa.Table) -> str:
    """Hash all columns of some rows, in their order."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for column in rows.columns:
        _add(hasher, pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([]))
    return hasher.hexdigest()


def _add(hasher: Any, array: pa.Array) -> None:
    kind = array.type
    hasher.update(len(array).to_bytes(8))
    _add_numbers(hasher, array.is_valid().cast(pa.uint8()))
    if pa.types.is_struct(kind):
        for child in array.flatten():
            _add(hasher, child)
    elif pa.types.is_list(kind):
        _add_numbers(hasher, pc.fill_null(pc.list_value_length(array), 0))
        _add(hasher, array.flatten())
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        _add_texts(hasher, array)
    elif pa.types.is_boolean(kind):
        _add_numbers(hasher, pc.fill_null(array.cast(pa.uint8()), 0))
    elif pa.types.is_timestamp(kind):
        _add_numbers(hasher, pc.fill_null(array.cast(pa.int64()), 0))
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        _add_numbers(hasher, pc.fill_null(array, 0))
    else:
        raise TypeError(f"no digest is made of {kind}")


def _add_numbers(hasher: Any, array: pa.Array) -> None:
    hasher.update(numpy.ascontiguousarray(array.to_numpy(zero_copy_only=False)))


def _add_texts(hasher: Any, array: pa.Array) -> None:
    full = pc.fill_null(array, b"" if pa.types.is_binary(array.type) else "")
    if not len(full):
        return
    _, places, data = full.buffers()
    edges = numpy.frombuffer(places, numpy.int32)[full.offset : full.offset + len(full) + 1]
    hasher.update(numpy.diff(edges))
    if data is not None:
        hasher.update(data[int(edges[0]) : int(edges[-1])])
