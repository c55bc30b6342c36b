"""Columns are encoded as BSON with the same bytes as the driver's for the same rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import bson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microqueue.spark.write import columnar

INSTANTS = st.datetimes(timezones=st.just(UTC))
TYPES: dict[str, tuple[Any, Any]] = {
    "text": (pa.string(), st.text()),
    "bytes": (pa.binary(), st.binary()),
    "yes or no": (pa.bool_(), st.booleans()),
    "long": (
        pa.int64(),
        st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-(2**31), -(2**31) - 1, 2**31]),
    ),
    "int": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "byte": (pa.int8(), st.integers(-128, 127)),
    "double": (pa.float64(), st.floats()),
    "float": (pa.float32(), st.floats(width=32)),
    "instant": (pa.timestamp("us", "UTC"), INSTANTS),
    "local": (pa.timestamp("us"), st.datetimes()),
    "nothing": (pa.null(), st.none()),
    "größe": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
}
STRUCT = pa.struct([("n", pa.int64()), ("deep", pa.struct([("text", pa.string())]))])
STRUCTS = st.fixed_dictionaries(
    {
        "n": st.none() | st.integers(0, 2**40),
        "deep": st.none() | st.fixed_dictionaries({"text": st.none() | st.text()}),
    }
)
SCHEMA = pa.schema({**{name: kind for name, (kind, _) in TYPES.items()}, "struct": STRUCT})
VALUES = {name: values for name, (_, values) in TYPES.items()} | {"struct": STRUCTS}
FULL = st.lists(st.fixed_dictionaries(VALUES), min_size=1)
WITH_NULLS = st.lists(
    st.fixed_dictionaries({name: st.none() | values for name, values in VALUES.items()}),
    min_size=1,
)


def encoded(batch: pa.RecordBatch) -> list[bytes]:
    fields = [
        columnar.encode_column(name, column)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    made = columnar.join_parts(
        columnar.encode_document(field for field in fields if field is not None)
    )
    if isinstance(made, pa.Scalar):  # The same for all rows.
        return [made.as_py()] * len(batch)
    return list(made.to_pylist())


def by_the_driver(rows: list[dict[str, Any]]) -> list[bytes]:
    ordered = [{name: row[name] for name in SCHEMA.names} for row in rows]
    for row in ordered:
        if row["struct"] is not None:
            row["struct"] = {name: row["struct"][name] for name in ("n", "deep")}
    return [bson.encode(row) for row in ordered]


@given(FULL | WITH_NULLS)
def test_every_plain_value_is_encoded_as_the_driver_does(rows: list[dict[str, Any]]) -> None:
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    assert encoded(batch) == by_the_driver(rows)


@given(WITH_NULLS, st.data())
def test_slices_of_a_batch_are_encoded_as_the_driver_does(
    rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(rows) - 1))
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA).slice(start)
    assert encoded(batch) == by_the_driver(rows[start:])


TOO_LATE = datetime.max.replace(tzinfo=UTC)


def beyond_python() -> pa.Array:
    last = pa.scalar(TOO_LATE, pa.timestamp("us", "UTC")).cast(pa.int64()).as_py()
    return pa.array([last + 1]).cast(pa.timestamp("us", "UTC"))


@pytest.mark.parametrize(
    "column",
    [
        pa.array([["a"]]),
        pa.array([timedelta(1)]),
        pa.array(["x"]).dictionary_encode(),
        pa.array(["x"], pa.large_string()),
        pa.array([datetime(2026, 1, 1, tzinfo=UTC)], pa.timestamp("ns", "UTC")),
        pa.array([{"x": ["a"]}]),
        pa.array([b"\xff"]).view(pa.string()),
        beyond_python(),
        pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["same", "same"]),
    ],
    ids=["list", "interval", "dictionary", "large", "nanoseconds", "list within", "no text",
         "late", "names"],
)  # fmt: skip
def test_unsupported_columns_return_none(column: pa.Array) -> None:
    assert columnar.encode_column("x", column) is None


def test_a_name_that_bson_rejects_returns_none() -> None:
    assert columnar.encode_column("a\0b", pa.array([1])) is None
