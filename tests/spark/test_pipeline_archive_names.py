"""Queues of any name find their place in an archive, and keep their name."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from microqueue.spark.pipelines import archive_direct
from microqueue.spark.pipelines.documents import to_batch
from tests.spark.past import encoded

NAMES = ["mail", "a/b=c %", "q'\"#*:?\\{[]^", "grün 日本", "a.b-c_d+e&f ~"]


def test_rows_are_placed_where_spark_would_place_them(spark: SparkSession, tmp_path: Path) -> None:
    at = datetime(2026, 5, 1, 23, 59, 59, 999000, tzinfo=UTC)
    later = at + timedelta(milliseconds=1)
    tasks = [
        {"_id": f"{day} {name}", "queue": name, "finished_at": day}
        for name in NAMES
        for day in (later, at)
    ]
    rows = pa.Table.from_batches([to_batch(b"".join(map(encoded, tasks)))])
    placed = dict(archive_direct.by_directory(rows))
    days = [(name, day) for name in NAMES for day in ("2026-05-01", "2026-05-02")]
    frame = spark.createDataFrame(days, "queue string, day string").selectExpr("*", "1 as n")
    frame.write.partitionBy("day", "queue").parquet(str(tmp_path / "spark"))
    files = (tmp_path / "spark").glob("*/*/*.parquet")
    assert set(placed) == {str(file.parent.relative_to(tmp_path / "spark")) for file in files}
    assert placed["day=2026-05-01/queue=mail"]["id"].to_pylist() == [f"{at} mail"]
    assert placed["day=2026-05-02/queue=mail"]["id"].to_pylist() == [f"{later} mail"]
