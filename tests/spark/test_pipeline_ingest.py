from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

from microqueue import Queue, QueueSettings
from microqueue.clock import as_utc
from microqueue.spark.ingest import job as pipeline
from microqueue.spark.ingest.job import ingest
from microqueue.spark.ingest.source import guess_format
from tests.rejection import rejecting
from tests.spark.rows_model import Order

MODEL = "tests.spark.rows_model:Order"
CSV = """sku,count,due
a,1,2026-05-01
b,none,2026-05-02
c,0,not a day
d,4
e,5,
e,5,
f,6,2026-05-03,extra
"""


def payloads(database: Any, queue: str = "orders") -> list[Any]:
    found = database.tasks.find({"queue": queue}, {"payload": 1})
    return sorted((task["payload"] for task in found), key=repr)


def test_good_rows_of_csv_become_tasks_and_bad_rows_go_to_the_reject_file(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    source, rejects = tmp_path / "orders.csv", tmp_path / "out" / "rejects.jsonl"
    source.write_text(CSV)
    keeper: Queue[Any] = Queue(microqueue_database, settings=QueueSettings(retention=None))
    keeper.ensure_indexes()
    options: dict[str, Any] = {"queue": "orders", "model": MODEL, "uri": database_uri}
    looked = ingest(spark, source, **options, rejects=rejects, dry_run=True)
    assert (looked.added, looked.rejected) == (3, 4)
    assert payloads(microqueue_database) == []
    assert not rejects.exists()

    done = ingest(spark, source, **options, rejects=rejects, priority=3, name="import")

    assert (done.added, done.duplicates, done.rejected) == (3, 0, 4)
    assert payloads(microqueue_database) == [
        {"sku": "a", "count": 1, "due": "2026-05-01"},
        {"sku": "e", "count": 5, "due": None},
        {"sku": "e", "count": 5, "due": None},
    ]
    added = microqueue_database.tasks.find()
    assert {(task["priority"], task["name"]) for task in added} == {(3, "import")}
    schema = microqueue_database.microqueue_locks.find_one("schema:tasks")
    assert schema["retention_sec"] is None  # As the service said that made the collection.
    lines = [json.loads(line) for line in rejects.read_text().splitlines()]
    by_sku = {
        line["row"]["sku"]: line["reasons"] for line in lines if isinstance(line["row"], dict)
    }
    assert [reason["field"] for reason in by_sku["b"]] == ["count"]
    assert [reason["field"] for reason in by_sku["c"]] == ["count", "due"]
    whole = [line["row"] for line in lines if isinstance(line["row"], str)]
    assert sorted(whole) == ["d,4", "f,6,2026-05-03,extra"]

    again = ingest(spark, source, **options, rejects=rejects, priority=3, name="import")
    assert again.repeated
    other = ingest(spark, source, **options, run="another")
    assert (other.added, other.duplicates) == (0, 3)
    assert len(payloads(microqueue_database)) == 3


def test_an_interrupted_ingest_is_resumed(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tmp_path / "orders.jsonl"
    good = [json.dumps({"sku": "s", "count": number}) for number in range(1, 11)]
    source.write_text("\n".join([*good, "", "{not json", "[1]", '{"sku": 1}']))
    options: dict[str, Any] = {"queue": "orders", "model": Order, "uri": database_uri}
    with monkeypatch.context() as dying:
        dying.setattr(pipeline, "finish_run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ingest(spark, source, **options)
    some = [task["_id"] for task in microqueue_database.tasks.find(limit=4)]
    microqueue_database.tasks.delete_many({"_id": {"$in": some}})  # As if it had died earlier.
    done = ingest(spark, source, **options)
    assert (done.added, done.duplicates, done.rejected, done.repeated) == (10, 0, 3, False)
    assert len(payloads(microqueue_database)) == 10


def test_parquet_and_tables_are_ingested_by_key(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    rows = [(1, "x", date(2026, 5, 1)), (2, "y", None), (2, "z", None), (None, "w", None)]
    frame = spark.createDataFrame(rows, "number int, value string, day date")
    frame.write.parquet(str(tmp_path / "rows.parquet"))
    options: dict[str, Any] = {"queue": "orders", "key": "number", "uri": database_uri}
    done = ingest(spark, tmp_path / "rows.parquet", **options)
    assert (done.added, done.duplicates, done.rejected) == (2, 1, 1)
    first = payloads(microqueue_database)[0]
    assert first == {"number": 1, "value": "x", "day": "2026-05-01"}
    frame.select("value").where("number = 1").createOrReplaceTempView("only_values")
    table = ingest(spark, "only_values", queue="table", source_format="table", uri=database_uri)
    assert table.added == 1
    assert payloads(microqueue_database, "table") == [{"value": "x"}]


def test_options_of_the_caller_have_precedence(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("a;1\nb;2\nc\n")
    given = {"header": "false", "sep": ";", "columnNameOfCorruptRecord": "bad"}
    done = ingest(spark, source, queue="orders", uri=database_uri, options=given)
    assert (done.added, done.rejected) == (2, 1)
    assert payloads(microqueue_database) == [{"_c0": "a", "_c1": "1"}, {"_c0": "b", "_c1": "2"}]


@pytest.mark.parametrize("key", ["at", None])
def test_rows_with_times_are_recognized_in_a_session_of_another_timezone(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    in_zone: Callable[[str], None],
    key: str | None,
) -> None:
    repeated = [datetime(2025, 10, 26, hour, 30, tzinfo=UTC) for hour in (0, 1)]
    source = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pa.table({"at": repeated}), source)
    options: dict[str, Any] = {"queue": "orders", "key": key, "uri": database_uri}
    assert ingest(spark, source, **options).added == 2
    in_zone("Europe/Berlin")
    again = ingest(spark, source, **options, run="another")
    assert (again.added, again.duplicates) == (0, 2)
    found = [as_utc(payload["at"]) for payload in payloads(microqueue_database)]
    assert sorted(found) == repeated


@pytest.mark.parametrize(
    ("source", "kind"),
    [("a.csv", "csv"), ("b.JSONL", "json"), ("c/d.parquet/", "parquet"), ("e.csv.gz", "csv")],
)
def test_formats_are_derived_from_paths(source: str, kind: str) -> None:
    assert guess_format(source) == kind


def test_bad_input_is_rejected_before_anything_is_added(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    source = tmp_path / "x.csv"
    source.write_text("a\n1\n")
    options: dict[str, Any] = {"queue": "q", "uri": database_uri}
    with rejecting("source", "notes.txt", code="unknown_format"):
        ingest(spark, "notes.txt", **options)
    with rejecting("source", str(tmp_path / "missing.csv"), code="unreadable"):
        ingest(spark, tmp_path / "missing.csv", **options)
    with rejecting("model", "tests.nowhere:Order", code="import_failed"):
        ingest(spark, source, **options, model="tests.nowhere:Order")
    with rejecting("key", "b", code="unknown_column"):
        ingest(spark, source, **options, key="b")
    with rejecting("priority"):
        ingest(spark, source, **options, priority=999)
    assert microqueue_database.tasks.count_documents({}) == 0
