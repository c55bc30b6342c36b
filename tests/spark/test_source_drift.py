"""A value that does not fit its column is read as null and counted, or is an error."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import bson
import pyarrow as pa
import pytest
from bson import Binary, Decimal128, Int64, ObjectId
from bson.codec_options import CodecOptions
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 (the usual name)
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from microqueue.drivers.collections import codec_options_for
from microqueue.errors import SchemaDrift
from microqueue.spark import read_tasks, write_tasks
from microqueue.spark.columns import ALL_COLUMNS
from microqueue.spark.read.convert import BatchConverter, by_id_type
from microqueue.spark.source import MicroqueueSource
from tests.rejection import raising, rejecting
from tests.spark.rejection import crossing_spark

AT = datetime(2026, 3, 1, tzinfo=UTC)
CODEC = codec_options_for(CodecOptions())
GOOD: dict[str, Any] = {
    "queue": "mail",
    "status": "done",
    "priority": 1,
    "attempts": 2,
    "max_attempts": 3,
    "created_at": AT,
    "updated_at": AT,
    "replays": 1,
    "backoff_sec": 0.5,
    "redelivered": True,
    "worker_id": "w",
    "error": {"message": "m", "code": "c", "at": AT},
}
NAMES = ["id", *GOOD, "drifted"]


def schema_of(*names: str, payload: StructType | None = None) -> StructType:
    fields = [StructField(name, ALL_COLUMNS[name]) for name in names]
    return StructType([*fields, StructField("payload", payload)] if payload else fields)


def convert(
    documents: list[dict[str, Any]], schema: StructType, *, strict: bool = False
) -> list[dict[str, Any]]:
    raw = b"".join(bson.encode(document, codec_options=CODEC) for document in documents)
    converter = BatchConverter(schema, CODEC, strict=strict)
    rows: list[dict[str, Any]] = pa.Table.from_batches(list(converter.convert(raw))).to_pylist()
    return rows


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queue", 17),
        ("status", {"a": 1}),
        ("worker_id", 3.5),
        ("attempts", "two"),
        ("attempts", 2.7),
        ("attempts", True),
        ("attempts", 2**31),
        ("attempts", Int64(2**60)),
        ("attempts", float("inf")),
        ("replays", Decimal128("1")),
        ("replays", False),
        ("backoff_sec", "soon"),
        ("backoff_sec", True),
        ("redelivered", 1),
        ("created_at", "2026-03-01"),
        ("updated_at", 1_700_000_000),
        ("updated_at", bson.datetime_ms.DatetimeMS(2**60)),
        ("updated_at", bson.datetime_ms.DatetimeMS(253_402_300_800_000)),
        ("error", "a text"),
        ("error", ["a list"]),
        ("error.message", 5),
        ("error.at", "now"),
    ],
)
def test_a_value_of_another_type_is_null_and_counted_or_an_error(field: str, value: Any) -> None:
    name, _, inner = field.partition(".")
    odd = {**GOOD, name: {**GOOD["error"], inner: value} if inner else value}
    documents = [{"_id": ObjectId(), **GOOD}, {"_id": ObjectId(), **odd}]
    good, bad = convert(documents, schema_of(*NAMES))
    assert (good["drifted"], bad["drifted"]) == (0, 1)
    expected = {name: value for name, value in good.items() if name not in {"id", "drifted"}}
    if inner:
        expected["error"] = {**expected["error"], inner: None}
    else:
        expected[name] = None
    assert {name: bad[name] for name in expected} == expected
    drifted = {"task_id": documents[1]["_id"], "column": field}
    with raising(SchemaDrift, "wrong_type", **drifted, naming=["mode=permissive"]) as caught:
        convert(documents, schema_of(*NAMES), strict=True)
    stored = bson.decode(bson.encode({"value": value}), CODEC)["value"]
    assert repr(caught.value.value) == repr(stored)  # NaN equals nothing.


@pytest.mark.parametrize(
    ("field", "value", "read"),
    [
        ("attempts", 2.0, 2),  # The mongo shell stores whole numbers as doubles.
        ("attempts", Int64(2), 2),
        ("backoff_sec", 3, 3.0),
        ("worker_id", None, None),
        ("error", None, None),
        ("finished_at", AT, AT),
        ("position", Int64(2**60 + 1), 2**60 + 1),  # A double cannot hold it.
    ],
)
def test_a_value_that_fits_exactly_is_no_drift(field: str, value: Any, read: Any) -> None:
    names = list(dict.fromkeys([*NAMES, field]))
    (row,) = convert([{"_id": "a", **GOOD, field: value}], schema_of(*names), strict=True)
    assert (row[field], row["drifted"]) == (read, 0)


def test_a_missing_required_field_counts_as_drift() -> None:
    documents = [{"_id": 1, **GOOD}, {"_id": 2, "status": "done"}, {"_id": "3", "status": "done"}]
    assert [row["drifted"] for row in convert(documents, schema_of(*NAMES))] == [0, 6, 6]
    with raising(SchemaDrift, "missing", task_id=2, column="queue"):
        convert(documents, schema_of(*NAMES), strict=True)


def test_text_that_looks_like_a_drifted_field_changes_nothing() -> None:
    documents = [{"_id": ObjectId(), **GOOD, "worker_id": "\x02error"} for _ in range(3)]
    rows = convert(documents, schema_of(*NAMES), strict=True)
    assert [row["worker_id"] for row in rows] == ["\x02error"] * 3


def test_a_batch_is_split_by_the_type_of_its_ids() -> None:
    ids = [ObjectId(), 1, "a", ObjectId(), Binary(b"x", 0), "b"]
    documents = [{"_id": task_id, **GOOD} for task_id in ids]
    raw = b"".join(map(bson.encode, documents))
    assert [len(bson.decode_all(part)) for part in by_id_type(raw)] == [2, 1, 2, 1]
    rows = convert(documents, schema_of("id", "id_type", "queue"))
    assert sorted(row["id"] for row in rows) == sorted(map(str, ids))
    kinds = {row["id"]: row["id_type"] for row in rows}
    assert (kinds["a"], kinds["1"], kinds[str(ids[0])]) == ("string", "int", "objectId")
    assert kinds[str(ids[4])] is None


PAYLOAD_TYPES: list[tuple[DataType, Any, Any]] = [
    (StringType(), "text", 5),
    (StringType(), ObjectId("6650c0ffee0123456789abcd"), b"bytes"),
    (IntegerType(), 5, 5.5),
    (IntegerType(), 5.0, True),
    (LongType(), 2**62, 2.0**60),
    (DoubleType(), 2**53, 2**53 + 1),
    (FloatType(), 0.5, 0.1),  # 0.1 differs in 32 bits.
    (FloatType(), float("inf"), 1e300),
    (FloatType(), 2**24, 2**24 + 1),
    (BooleanType(), True, 1),
    (TimestampType(), AT, "2026-03-01"),
    (TimestampNTZType(), AT, "2026-03-01"),
    (DecimalType(5, 2), Decimal128("123.45"), Decimal128("1234.5")),
    (DecimalType(5, 2), 12, Decimal128("1.234")),
    (ArrayType(IntegerType()), [1, None], "1"),
    (StructType([StructField("a", IntegerType())]), {"a": 1}, [1]),
]


@pytest.mark.parametrize(("kind", "fits", "drifts"), PAYLOAD_TYPES)
def test_a_typed_payload_is_read_exactly(kind: DataType, fits: Any, drifts: Any) -> None:
    schema = schema_of("drifted", payload=StructType([StructField("x", kind)]))
    rows = convert(
        [{"_id": 1, "payload": {"x": fits}}, {"_id": 2, "payload": {"x": drifts}}], schema
    )
    assert [row["drifted"] for row in rows] == [0, 1]
    assert rows[0]["payload"]["x"] is not None
    assert rows[1]["payload"] == {"x": None}


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (DateType(), "payload.x date"),
        (ArrayType(StructType([StructField("y", DateType())])), "payload.x[].y date"),
        (MapType(IntegerType(), StringType()), "payload.x map<int,string>"),
    ],
)
def test_an_unsupported_type_is_rejected_before_the_job(kind: DataType, named: str) -> None:
    schema = schema_of("id", payload=StructType([StructField("x", kind)]))
    source = MicroqueueSource({"uri": "mongodb://127.0.0.1:1"})
    for reader in (source.reader, source.streamReader):
        with rejecting("payload", named, code="unsupported_type", naming=[named, "payload=json"]):
            reader(schema)
    own = StructType([StructField("created_at", DateType())])
    with rejecting("schema", "created_at date", code="unsupported_type"):
        source.reader(own)


def test_missing_and_extra_fields_of_a_typed_payload_count() -> None:
    fields = StructType([StructField("a", IntegerType()), StructField("b", StringType())])
    schema = schema_of("drifted", payload=fields)
    documents: list[dict[str, Any]] = [
        {"_id": 1, "payload": {"a": 1, "b": None}},
        {"_id": 2, "payload": {"a": 1}},
        {"_id": 3, "payload": {"a": 1, "b": "x", "c": 1, "d": 2}},
        {"_id": 4, "payload": None},
        {"_id": 5, "payload": "text"},
    ]
    rows = convert(documents, schema)
    assert [row["drifted"] for row in rows] == [0, 1, 2, 0, 1]
    assert [row["payload"] for row in rows[3:]] == [None, None]
    with raising(SchemaDrift, "missing", task_id=2, column="payload.b"):
        convert(documents, schema, strict=True)
    with raising(SchemaDrift, "unknown_field", task_id=3) as caught:
        convert(documents[2:], schema, strict=True)
    assert caught.value.column in {"payload.c", "payload.d"}


def test_spark_counts_drift_or_fails(
    spark: SparkSession, database_uri: str, microqueue_database: Any
) -> None:
    stored = {**GOOD, "deadline_at": AT}
    documents = [{"_id": n, **stored, "attempts": "x" if n % 4 else n} for n in range(20)]
    microqueue_database.tasks.insert_many(documents)
    frame = read_tasks(spark, uri=database_uri)
    (row,) = frame.agg(F.sum("drifted"), F.count("attempts"), F.count("id")).collect()
    assert tuple(row) == (15, 5, 20)
    strict = read_tasks(spark, uri=database_uri, mode="strict")
    with crossing_spark(SchemaDrift, "wrong_type", column="attempts", naming=["'x'"]):
        strict.collect()


def test_the_source_reads_what_the_sink_wrote(spark: SparkSession, database_uri: str) -> None:
    schema = "ratio float, at timestamp_ntz"
    written = (0.1, datetime(2026, 3, 1, 12, 30))  # noqa: DTZ001 (it has no zone)
    frame = spark.createDataFrame([written], schema)
    write_tasks(frame, uri=database_uri, queue="mail", keyless=True)
    read = read_tasks(spark, uri=database_uri, columns=["drifted"], payload=frame.schema)
    (row,) = read.select("drifted", "payload.*").collect()
    assert tuple(row) == (0, *frame.collect()[0])
