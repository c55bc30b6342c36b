from __future__ import annotations

import re
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from bson import Binary, Decimal128, Int64, ObjectId
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 (the usual name)
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from microqueue import BackoffPolicy, InvalidArgument
from microqueue.extended_json import from_json
from microqueue.spark import columns, read_tasks, typed_id
from microqueue.worker import Worker
from tests.rejection import rejecting
from tests.spark.rejection import crossing_spark

AT = datetime(2026, 3, 1, 12, 30, 15, 123000, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return AT + timedelta(seconds=seconds)


FULL: dict[str, Any] = {
    "_id": ObjectId("6650c0ffee0123456789abcd"),
    "queue": "mail",
    "name": "send_email",
    "payload": {"to": "ada", "n": 1},
    "status": "processing",
    "priority": 7,
    "position": 1_800_000_000_000_000,
    "created_at": at(0),
    "updated_at": at(1),
    "started_at": at(2),
    "finished_at": at(3),
    "next_retry_at": at(4),
    "expires_at": at(5),
    "deadline_at": at(6),
    "lease_token": "token",
    "insert_token": "insert",
    "worker_id": "host:1",
    "attempts": 3,
    "max_attempts": 5,
    "redelivered": True,
    "replays": 2,
    "crashes": 1,
    "dedupe_key": "key",
    "backoff_sec": 2.5,
    "visibility_timeout_sec": 60,
    "backoff_policy": BackoffPolicy(base_sec=1, jitter="none").model_dump(),
    "error": {"message": "no", "code": None, "at": at(7)},
    "history": [
        {
            "attempt": 1,
            "worker_id": "host:1",
            "started_at": at(2),
            "ended_at": at(3),
            "outcome": "retried",
            "error": {"message": "no", "code": "x", "at": at(3)},
            "lease_token": "not a column",
        },
        {"attempt": 2, "worker_id": None, "started_at": None, "ended_at": at(3), "outcome": "done"},
    ],
    "headers": {"trace": "abc"},
    "result": [1, "two"],
}

ODD: dict[str, Any] = {
    "uuid": UUID("12345678123456781234567812345678"),
    "object_id": ObjectId("6650c0ffee0123456789abcd"),
    "long": Int64(2**60),
    "decimal": Decimal128("1.50"),
    "bytes": Binary(b"\x00\xff"),
    "date": at(0),
    "not_a_number": float("nan"),
    "infinite": float("inf"),
    "nothing": None,
    "text": "ü\u0000€😀",
    "deep": {"a": [{"b": [1, 2]}, []]},
}


def test_every_field_comes_back_as_it_is_stored(
    spark: SparkSession, database_uri: str, microqueue_database: Any
) -> None:
    microqueue_database.tasks.insert_one(FULL)
    frame = read_tasks(spark, uri=database_uri, columns="*")
    assert set(frame.columns) == set(columns.ALL_COLUMNS)
    row = frame.collect()[0].asDict(recursive=True)
    assert (row.pop("id"), row.pop("id_type")) == ("6650c0ffee0123456789abcd", "objectId")
    assert row.pop("drifted") == 0
    for name in ("payload", "headers", "result"):
        assert from_json(row.pop(name)) == FULL[name]
    expected = {name: value for name, value in FULL.items() if name in row}
    expected["lease_expires_at"] = FULL["deadline_at"]
    first, second = FULL["history"]
    first = {name: value for name, value in first.items() if name != "lease_token"}
    expected["history"] = [first, {**second, "error": None}]
    for instant in [name for name in row if name.endswith("_at")]:
        assert row.pop(instant).astimezone(UTC) == expected.pop(instant)
    row["error"]["at"] = row["error"]["at"].astimezone(UTC)
    for attempt in row["history"]:
        for name in ("started_at", "ended_at"):
            attempt[name] = attempt[name] and attempt[name].astimezone(UTC)
        if attempt["error"]:
            attempt["error"]["at"] = attempt["error"]["at"].astimezone(UTC)
    assert row == expected


def test_tasks_are_read_with_their_names_and_by_name(
    spark: SparkSession, database_uri: str, make_queue: Any, microqueue_database: Any
) -> None:
    queue = make_queue()
    for name in ("pay", "ship", None, "a,b"):
        queue.enqueue({}, name=name)
    microqueue_database.tasks.insert_one({**FULL, "name": None, "headers": {"task": "pay"}})

    def names(**options: Any) -> list[Any]:
        frame = read_tasks(spark, uri=database_uri, columns=["name"], **options)
        return sorted((row.name for row in frame.collect()), key=str)

    assert names() == [None, "a,b", "pay", "pay", "ship"]
    assert names(name="pay") == ["pay", "pay"]
    assert names(name=["a,b", "ship"], status="pending") == ["a,b", "ship"]
    with pytest.raises(InvalidArgument):
        names(name="a\nb")


def test_ids_and_payloads_of_every_type_come_back(
    spark: SparkSession, database_uri: str, make_queue: Any
) -> None:
    queue = make_queue()
    ids = [ObjectId(), "text", 17, -(2**40), UUID(int=5), ObjectId()]
    for task_id in ids:
        queue.enqueue(ODD, task_id=task_id)
    wanted = ["id", "id_type", "error", "redelivered", "replays", "crashes", "payload"]
    rows = read_tasks(spark, uri=database_uri, columns=wanted).collect()
    assert {typed_id(row.id, row.id_type) for row in rows} == set(ids)
    for row in rows:
        assert (row.error, row.redelivered, row.replays, row.crashes) == (None, False, 0, 0)
        assert repr(from_json(row.payload)) == repr({**ODD, "bytes": b"\x00\xff"})


def test_a_typed_payload_has_the_requested_types(
    spark: SparkSession, database_uri: str, make_queue: Any
) -> None:
    payload = {
        "to": "ada",
        "n": 2**40,
        "share": 2,
        "price": Decimal128("12.50"),
        "seen": at(0),
        "raw": b"\x01",
        "tags": ["a", None],
        "address": {"city": "Bern"},
        "scores": {"a": 1.5},
        "off": None,
    }
    make_queue().enqueue(payload)
    schema = (
        "to string, n bigint, share double, price decimal(10,2), seen timestamp, raw binary, "
        "tags array<string>, address struct<city: string>, scores map<string, double>, off boolean"
    )
    frame = read_tasks(spark, uri=database_uri, columns=["drifted"], payload=schema)
    (row,) = frame.selectExpr("drifted", "payload.*", "payload.address.city").collect()
    assert (row.drifted, row.to, row.n, row.share, str(row.price)) == (
        0,
        "ada",
        2**40,
        2.0,
        "12.50",
    )
    assert (row.seen.astimezone(UTC), bytes(row.raw), row.tags) == (at(0), b"\x01", ["a", None])
    assert (row.city, row.scores, row.off) == ("Bern", {"a": 1.5}, None)


def test_typed_payload_may_have_any_names(
    spark: SparkSession, database_uri: str, make_queue: Any
) -> None:
    make_queue().enqueue({"a`b": 1, "in": {"c-d": [{"e f": "x"}]}})
    inner = StructType([StructField("c-d", ArrayType(StructType().add("e f", StringType())))])
    schema = StructType().add("a`b", LongType()).add("in", inner)
    frame = read_tasks(spark, uri=database_uri, columns="drifted", payload=schema)
    (row,) = frame.collect()
    assert (row.drifted, row.payload.asDict(recursive=True)) == (
        0,
        {"a`b": 1, "in": {"c-d": [{"e f": "x"}]}},
    )


def test_options_select_what_is_read(
    spark: SparkSession, database_uri: str, microqueue_database: Any
) -> None:
    base = {"attempts": 0, "max_attempts": 1, "priority": 0, "updated_at": at(0)}
    base["deadline_at"] = at(6)
    microqueue_database.tasks.insert_many(
        [
            {**base, "_id": "a", "queue": "mail", "status": "done", "created_at": at(0)},
            {**base, "_id": "b", "queue": "mail", "status": "failed", "created_at": at(10)},
            {**base, "_id": "c", "queue": "sms", "status": "done", "created_at": at(20)},
            {
                **base,
                "_id": "d",
                "queue": "post",
                "status": "pending",
                "created_at": at(30),
                "finished_at": at(99),
            },
            {**base, "_id": "e", "queue": "mail,sms", "status": "pending", "created_at": at(5)},
        ]
    )

    def ids(**options: Any) -> str:
        frame = read_tasks(spark, uri=database_uri, columns="id", **options)
        return "".join(sorted(row.id for row in frame.collect()))

    assert ids(queue="mail") == "ab"
    assert ids(queue=["mail", "sms"], status="done") == "ac"
    assert ids(queue="mail, sms", status="done") == "ac"
    assert ids(queue=["mail,sms"]) == "e"
    assert ids(status="done,failed", since=at(10)) == "bc"
    assert ids(since=at(10), until=at(20)) == "b"
    assert ids(time="finished_at", since=at(90)) == "d"
    assert ids(queue="mail", query={"created_at": {"$gt": at(5)}}) == "b"
    assert ids(query='{"_id": {"$in": ["a", "d"]}}') == "ad"
    assert ids(collection="elsewhere") == ""
    frame = spark.read.format("microqueue").options(uri=database_uri, queue="sms")
    assert [row.status for row in frame.schema("status string").load().collect()] == ["done"]


@pytest.mark.parametrize(
    ("options", "code", "naming"),
    [
        ({"status": "finished"}, None, ["pending, processing, done, failed"]),
        ({"queue": "a\nb"}, None, []),
        ({"since": "yesterday"}, "not_an_instant", ["2026-01-31T12:00:00"]),
        ({"since": "2026-01-01T00:00:00"}, "no_timezone", []),
        ({"time": "birthday"}, None, ["created_at"]),
        ({"query": "{"}, "not_json", []),
        ({"query": "[1]"}, "not_an_object", []),
        ({"columns": "id,colour"}, "unknown_column", ["id, queue"]),
        ({"columns": "id,id"}, "repeated_name", []),
        ({"payload": "off", "columns": "payload"}, "conflicting_options", ["payload=off"]),
        ({"partitions": "0"}, None, ["1"]),
        ({"mode": "loose"}, None, ["permissive"]),
        ({"collection": "$x"}, None, []),
        ({"read_preference": "somewhere"}, None, ["secondaryPreferred"]),
    ],
)
def test_invalid_options_are_rejected_before_any_job(
    options: dict[str, Any], code: str | None, naming: list[str]
) -> None:
    no_session: Any = None
    (argument, value), *_ = options.items()
    with rejecting(argument, value, code=code, naming=naming):
        read_tasks(no_session, uri="mongodb://localhost", **options)


def test_a_misspelt_option_is_rejected(spark: SparkSession, database_uri: str) -> None:
    reading = spark.read.format("microqueue").options(uri=database_uri, colums="id")
    with crossing_spark(InvalidArgument, "unknown_option", argument="colums"):
        reading.load()


def test_a_missing_uri_is_rejected_with_the_ways_to_set_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("MICROQUEUE_HOME", str(tmp_path))
    no_session: Any = None
    with rejecting("uri", None, naming=["MICROQUEUE_URI", "microqueue up"]):
        read_tasks(no_session)


def test_an_empty_uri_is_rejected_instead_of_using_another_server(
    monkeypatch: pytest.MonkeyPatch, database_uri: str
) -> None:
    monkeypatch.setenv("MICROQUEUE_URI", database_uri)
    no_session: Any = None
    with rejecting("uri", ""):
        read_tasks(no_session, uri="")


def test_parts_together_are_the_whole_for_ids_of_all_types(
    spark: SparkSession, database_uri: str, microqueue_database: Any
) -> None:
    base = {"queue": "mail", "status": "done", "attempts": 0, "max_attempts": 1, "priority": 0}
    base |= {"created_at": at(0), "updated_at": at(0), "deadline_at": at(0)}
    ids: list[Any] = [maker(n) for n in range(500) for maker in (int, str, lambda _: ObjectId())]
    ids += [Binary.from_uuid(UUID(int=n)) for n in range(500)]
    microqueue_database.tasks.insert_many([{**base, "_id": task_id} for task_id in ids])
    frame = read_tasks(spark, uri=database_uri, columns="id,id_type", partitions=5)
    rows = frame.withColumn("part", F.spark_partition_id()).collect()
    assert len(rows) == len({(row.id, row.id_type) for row in rows}) == len(ids)
    sizes = [sum(row.part == part for row in rows) for part in {row.part for row in rows}]
    assert len(sizes) == 5
    assert max(sizes) < len(ids) / 2


def test_reading_and_draining_do_not_affect_each_other(
    spark: SparkSession, database_uri: str, make_queue: Any
) -> None:
    queue = make_queue()
    queue.enqueue_many([{"n": n} for n in range(3_000)])
    reads = 0
    seen: list[int] = []
    half, resume = threading.Event(), threading.Event()

    def handle(payload: dict[str, Any]) -> None:
        seen.append(payload["n"])
        if len(seen) == 1_500:
            half.set()
            resume.wait(60)  # Until one read has seen a half-drained queue.

    worker = Worker(queue, handle, concurrency=2)
    thread = threading.Thread(target=worker.run, kwargs={"burst": True})
    thread.start()
    half.wait(60)
    while thread.is_alive() or not reads:
        frame = read_tasks(spark, uri=database_uri, columns="id,status", partitions=4)
        counted = frame.groupBy("status").agg(F.count("id"), F.count_distinct("id")).collect()
        assert sum(row[1] for row in counted) == sum(row[2] for row in counted) == 3_000
        reads += 1
        resume.set()
    thread.join()
    assert sorted(seen) == list(range(3_000))
    assert queue.stats(exact=True).done == 3_000


def test_the_example_of_the_readme_runs(
    spark: SparkSession,
    database_uri: str,
    make_queue: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_queue("thumbnails").enqueue_many([{"n": n} for n in range(41)])
    monkeypatch.setenv("MICROQUEUE_URI", database_uri)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = re.findall(r"```py\n(.*?)```", readme, flags=re.DOTALL)
    exec(compile(block, "README", "exec"), {})
    assert re.search(r"pending\|.*\|\s*41\|", capsys.readouterr().out)
