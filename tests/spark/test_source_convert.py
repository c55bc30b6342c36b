"""Converting columns and converting values return the same rows for any stored value."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import bson
import pytest
from bson import (
    Binary,
    Code,
    DatetimeMS,
    DBRef,
    Decimal128,
    Int64,
    MaxKey,
    MinKey,
    ObjectId,
    Regex,
    Timestamp,
)
from bson.codec_options import CodecOptions
from pyspark.sql.types import StructField, StructType

from microqueue.drivers.collections import codec_options_for
from microqueue.errors import SchemaDrift
from microqueue.spark import whole_tasks
from microqueue.spark.columns import ALL_COLUMNS, COMPUTED_COLUMNS, DEFAULT_VALUES, JSON_COLUMNS
from microqueue.spark.read.convert import BatchConverter
from microqueue.spark.read.lossy_types import LossyBatch
from tests.rejection import raising

AT = datetime(2026, 3, 1, tzinfo=UTC)
CODEC = codec_options_for(CodecOptions())
NAN = float("nan")
TASK: dict[str, Any] = {
    "_id": ObjectId(),
    "queue": "mail",
    "status": "done",
    "priority": 1,
    "attempts": 1,
    "max_attempts": 3,
    "created_at": AT,
    "updated_at": AT,
}
NAMES = [name for name in ALL_COLUMNS if name not in COMPUTED_COLUMNS | JSON_COLUMNS]
SCHEMA = StructType([StructField(name, ALL_COLUMNS[name]) for name in [*NAMES, "drifted"]])
ABSENT = object()

PLAIN: list[Any] = [ABSENT, None, True, False, "x", "", "5", b"b", Binary(b"q", 5)]
NUMBERS: list[Any] = [1, -1, 2**31, 2**40, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, Int64(5)]
NUMBERS += [-(2**53) - 1, 1.0, 1.5, -0.0, 2.0**53, 1e300, NAN, -NAN, float("inf")]
NUMBERS += [Decimal128("1.5"), Decimal128("2"), Decimal128("NaN")]
OTHERS: list[Any] = [uuid.UUID(int=5), ObjectId(), AT, DatetimeMS(2**60), Regex("x"), Code("x")]
OTHERS += [Code("x", {"a": 1}), MinKey(), MaxKey(), Timestamp(1, 1), DBRef("a", 1)]
NESTED: list[Any] = [{}, {"a": 1}, [], [1], {"message": 1}, {"message": "m", "code": None}]
NESTED += [{"message": None, "code": None, "at": None}, {"message": "m", "at": "x"}]
NESTED += [{"message": "m", "code": 5, "at": AT}, {"message": "m", "extra": 1}, {"code": True}]
NESTED += [
    {"message": NAN, "code": "c"},
    {"message": "m", "at": NAN},
    {"message": "m", "code": NAN},
]
NESTED += [DBRef("a", 1, message="m"), {"base_sec": True}, {"base_sec": 2**53 + 1}]
NESTED += [{"base_sec": NAN}, {"jitter": 1}, {"jitter": "full", "factor": 2}]
ATTEMPTS: list[Any] = [[None], [{}], ["x"], [{"attempt": 1.5}], [{"attempt": True}]]
ATTEMPTS += [[{"attempt": "1"}], [{"attempt": 2**53 + 1}], [{"attempt": NAN}], [{"error": "x"}]]
ATTEMPTS += [[{"error": {"message": 1}}], [{"started_at": 5}], [{"worker_id": NAN}]]
VALUES = [*PLAIN, *NUMBERS, *OTHERS, *NESTED, *ATTEMPTS]


def stored(name: str, value: Any) -> bytes:
    task = {key: old for key, old in TASK.items() if key != name}
    return bson.encode(task if value is ABSENT else {**task, name: value}, codec_options=CODEC)


def old_types(name: str) -> Sequence[bytes]:
    """Return values of types that the driver no longer writes: a symbol, and undefined."""
    text = stored(name, "x").replace(b"\x02%s\0" % name.encode(), b"\x0e%s\0" % name.encode())
    null = stored(name, None).replace(b"\x0a%s\0" % name.encode(), b"\x06%s\0" % name.encode())
    return text, null


@pytest.mark.parametrize("name", NAMES)
def test_both_ways_return_the_same_row_and_drift(name: str) -> None:
    converter = BatchConverter(SCHEMA, CODEC, strict=False)
    differ, by_columns = [], 0
    for raw in [*(stored(name, value) for value in VALUES), *old_types(name)]:
        exact = converter.convert_values(raw).to_pylist()
        try:
            found = converter.convert_columns(raw).to_pylist()
        except LossyBatch:
            continue
        by_columns += 1
        if repr(found) != repr(exact):  # In a repr, NaN equals NaN.
            differ.append((bson.decode(raw, CODEC).get(name), found[0][name], exact[0][name]))
    assert differ == []
    assert by_columns


@pytest.mark.parametrize("name", [name for name in NAMES if name in whole_tasks.COLUMNS])
def test_whole_documents_are_the_same_both_ways(name: str) -> None:
    differ = []
    for raw in [*(stored(name, value) for value in VALUES), *old_types(name)]:
        exact = whole_tasks.exact_columns([raw])[name].to_pylist()
        try:
            found = whole_tasks.fast_columns(raw)[name].to_pylist()
        except (LossyBatch, ValueError, TypeError, OverflowError):
            continue
        if repr(found) != repr(exact):
            differ.append((bson.decode(raw, CODEC).get(name), found, exact))
    assert differ == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backoff_sec", 2**53 + 1),
        ("visibility_timeout_sec", 2**63 - 1),
        ("position", NAN),
        ("replays", NAN),
        ("redelivered", NAN),
        ("worker_id", NAN),
        ("finished_at", NAN),
        ("error", MaxKey()),
        ("error", DBRef("a", 1)),
        ("error", {"message": "m", "at": NAN}),
    ],
)
def test_a_strict_read_detects_drift(name: str, value: Any) -> None:
    with raising(SchemaDrift, "wrong_type", task_id=TASK["_id"]) as caught:
        list(BatchConverter(SCHEMA, CODEC, strict=True).convert(stored(name, value)))
    assert caught.value.column.partition(".")[0] == name
    assert caught.value.column in str(caught.value)


@pytest.mark.parametrize("name", list(DEFAULT_VALUES))
@pytest.mark.parametrize("value", [ABSENT, None])
def test_null_counts_as_absent(name: str, value: Any) -> None:
    converter = BatchConverter(SCHEMA, CODEC, strict=True)
    for read in (converter.convert_columns, converter.convert_values):
        (row,) = read(stored(name, value)).to_pylist()
        assert row[name] == DEFAULT_VALUES[name]


def test_ordinary_values_are_converted_by_columns() -> None:
    error = {"message": "m", "code": None, "at": AT}
    other = {"backoff_sec": 1.5, "attempts": 2.0, "error": error, "finished_at": AT, "crashes": 1}
    tasks = [TASK, {**TASK, **other}, {**TASK, "worker_id": None, "backoff_sec": 3}]
    raw = b"".join(bson.encode(task) for task in tasks)
    converter = BatchConverter(SCHEMA, CODEC, strict=True)
    assert converter.convert_columns(raw).to_pylist() == converter.convert_values(raw).to_pylist()
