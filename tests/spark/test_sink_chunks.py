"""Documents encoded by columns are byte for byte the same as those encoded row by row."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import bson
import pyarrow as pa
import pytest
from bson.codec_options import CodecOptions
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_schema

from microqueue import QueueSettings
from microqueue.spark.options import SinkOptions
from microqueue.spark.write import columnar
from microqueue.spark.write.documents import ChunkBuilder, Stamp

CODEC: Any = CodecOptions(tz_aware=True, uuid_representation=4)
STAMP = Stamp(datetime(2026, 1, 1, tzinfo=UTC), 1_700_000_000_000_000, "load:0")
EPOCH_US = st.integers(-(10**15), 10**15)
VALUES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "long": (pa.int64(), st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2**31, -(2**31)])),
    "short": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "share": (pa.float64(), st.floats()),
    "half": (pa.float32(), st.floats(width=32)),
    "text": (pa.string(), st.text()),
    "raw": (pa.binary(), st.binary()),
    "flag": (pa.bool_(), st.booleans()),
    "at": (pa.timestamp("us", "UTC"), EPOCH_US),
    "local": (pa.timestamp("us"), EPOCH_US),
    "inner": (
        pa.struct([("a", pa.int64()), ("b.c", pa.string())]),
        st.fixed_dictionaries({"a": st.none() | st.integers(0, 9), "b.c": st.none() | st.text()}),
    ),
}


@st.composite
def tables(draw: Any) -> pa.Table:
    """Draw a few rows with some of the columns and some nulls."""
    count = draw(st.integers(1, 6))
    names = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True))
    columns: dict[str, Any] = {"key": pa.array(range(count))}
    for name in names:
        kind, values = VALUES[name]
        rows = st.lists(st.none() | values, min_size=count, max_size=count)
        columns[name] = pa.array(draw(rows), kind)
    table = pa.table(columns)
    return table.slice(draw(st.integers(0, count - 1)))


def both_ways(table: pa.Table, **options: str) -> tuple[list[bytes], list[bytes]]:
    given = SinkOptions.of({"uri": "mongodb://nowhere", "queue": "orders", "key": "key", **options})
    builder = ChunkBuilder(
        from_arrow_schema(table.schema), given, settings=QueueSettings(), load="load"
    )
    by_columns = builder.build(table, STAMP, CODEC)
    assert isinstance(by_columns.documents, columnar.ColumnarDocuments)
    assert by_columns.encoded is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columnar, "columnar_documents", lambda *_, **__: None)
        by_rows = builder.build(table, STAMP, CODEC)
    written = [bson.encode(one, codec_options=CODEC) for one in by_rows.documents]
    return [one.raw for one in by_columns.encoded], written


@given(table=tables(), hold=st.booleans())
def test_rows_are_the_same_bytes_both_ways(table: pa.Table, hold: bool) -> None:
    options = {"hold": "true"} if hold else {"priority": "7", "delay": "60", "expires_in": "900"}
    columns, rows = both_ways(table, **options)
    assert columns == rows


@given(table=tables())
def test_payloads_in_a_column_are_the_same_bytes_both_ways(table: pa.Table) -> None:
    (batch,) = table.combine_chunks().to_batches()
    payload = pa.StructArray.from_arrays(batch.columns, names=batch.schema.names)
    columns, rows = both_ways(pa.table({"key": batch.column("key"), "payload": payload}))
    assert columns == rows
