from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from bson import Decimal128
from pyspark.sql import SparkSession

from microqueue.spark import write_tasks
from microqueue.spark.ingest.job import ingest
from tests.rejection import rejecting

COLUMNS = """
select 1 as id, map('a', 1, 'b', 2) as counts, array(map('k', 1.5)) as list,
    named_struct('x', map('q', cast(null as int)), 'n', cast(null as int)) as inner,
    timestamp '2026-01-01 00:00:00.123' as at, cast(1.10 as decimal(10, 2)) as price,
    cast(null as string) as nothing, date '2026-01-01' as day, X'00ff' as raw,
    cast('infinity' as double) as most
"""
MODEL = "tests.spark.rows_model:Priced"


@pytest.mark.parametrize("source_format", ["parquet", "table"])
def test_columns_are_stored_as_by_the_sink(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    source_format: Any,
) -> None:
    frame, source = spark.sql(COLUMNS), str(tmp_path / "rows.parquet")
    frame.write.parquet(source)
    if source_format == "table":
        spark.read.parquet(source).createOrReplaceTempView("columns")
        source = "columns"
    ingest(spark, source, queue="ingested", source_format=source_format, uri=database_uri)
    write_tasks(frame, queue="written", key="id", uri=database_uri)
    ingested, written = (
        microqueue_database.tasks.find_one({"queue": queue})["payload"]
        for queue in ("ingested", "written")
    )
    assert ingested == written
    assert ingested == {
        "id": 1,
        "counts": {"a": 1, "b": 2},
        "list": [{"k": Decimal128("1.5")}],
        "inner": {"x": {"q": None}, "n": None},
        "at": datetime(2026, 1, 1, 0, 0, 0, 123000, tzinfo=written["at"].tzinfo),
        "price": Decimal128("1.10"),
        "nothing": None,
        "day": "2026-01-01",
        "raw": b"\x00\xff",
        "most": float("inf"),
    }


def test_a_model_gets_the_values_of_the_columns(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    rows = [
        (Decimal("1.10"), {1: "a"}, date(2026, 1, 1), b"\xff"),
        (Decimal("2.10"), None, None, b"\xff"),
    ]
    columns = "price decimal(10, 2), names map<int, string>, day date, raw binary"
    source, rejects = tmp_path / "rows.parquet", tmp_path / "bad.jsonl"
    spark.createDataFrame(rows, columns).write.parquet(str(source))
    done = ingest(spark, source, queue="q", model=MODEL, rejects=rejects, uri=database_uri)
    assert (done.added, done.rejected) == (1, 1)
    stored = {"price": "1.10", "names": {"1": "a"}, "day": "2026-01-01"}
    assert microqueue_database.tasks.find_one()["payload"] == stored
    assert '"field": "names"' in rejects.read_text()


def test_a_type_that_mongodb_lacks_is_rejected_before_anything_is_added(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    spark.sql("select 1 as id, map(1, 2) as counts").createOrReplaceTempView("malformed")
    with rejecting("counts", "map<int,int>", code="unsupported_type"):
        ingest(spark, "malformed", queue="q", source_format="table", uri=database_uri)
    assert microqueue_database.microqueue_loads.count_documents({}) == 0


def test_a_number_that_mongodb_cannot_store_is_rejected(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    large = "cast('12345678901234567890123456789012345678' as decimal(38, 0))"
    spark.sql(f"select {large} as n union all select 1").createOrReplaceTempView("large")
    rejects = tmp_path / "bad.jsonl"
    options: dict[str, Any] = {"queue": "q", "source_format": "table", "uri": database_uri}
    done = ingest(spark, "large", **options, rejects=rejects)
    assert (done.added, done.rejected) == (1, 1)
    assert "34 digits" in rejects.read_text()
