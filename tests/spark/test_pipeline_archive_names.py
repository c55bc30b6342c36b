"""Queue names in the paths of an archive."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from microqueue.spark.archive import parquet
from microqueue.spark.archive.job import archive, compact
from microqueue.spark.archive.parquet import escaped, is_shortened, shortened, shortened_column
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.progress import Step, no_progress
from microqueue.spark.storage import Storage
from microqueue.spark.whole_tasks import decode, to_batch
from tests.spark.archived import HOUR
from tests.spark.past import Past, encoded

NAMES = ["mail", "a/b=c %", "q'\"#*:?\\{[]^", "grün 日本", "a.b-c_d+e&f ~"]
LONGEST = ["日" * 83, "/" * 83, "a" * 120]
"""They fit, and not a byte more would."""

TOO_LONG = ["日" * 83 + "a", "/" * 83 + "日", "日" * 120, "😀" * 120, "orders/" + "日" * 100]
LIKE_SHORT = shortened("日" * 120)
LIKE_NONE = "__HIVE_DEFAULT_PARTITION__"


@pytest.mark.parametrize("name", [*NAMES, *LONGEST])
def test_a_queue_name_that_fits_into_a_path_is_not_shortened(name: str) -> None:
    assert shortened(name) == name
    assert not is_shortened(name)


@pytest.mark.parametrize("name", [*TOO_LONG, LIKE_SHORT, LIKE_NONE, "nul\0"])
def test_a_queue_name_that_does_not_fit_is_shortened_uniquely(name: str) -> None:
    short = shortened(name)
    assert is_shortened(short)
    assert len(f"queue={escaped(short)}".encode()) <= 255
    assert short not in {shortened(other) for other in [*TOO_LONG, LIKE_SHORT] if other != name}


def test_rows_are_split_into_the_directories_that_spark_would_use(
    spark: SparkSession, tmp_path: Path
) -> None:
    names = [*NAMES, *LONGEST, *TOO_LONG, LIKE_SHORT, LIKE_NONE]
    at = datetime(2026, 5, 1, 23, 59, 59, 999000, tzinfo=UTC)
    later = at + timedelta(milliseconds=1)
    tasks = [
        {"_id": f"{day} {name}", "queue": name, "finished_at": day}
        for name in names
        for day in (later, at)
    ]
    rows = pa.Table.from_batches([to_batch(b"".join(map(encoded, tasks)))])
    placed = dict(parquet.by_directory(rows))
    days = [(name, day) for name in names for day in ("2026-05-01", "2026-05-02")]
    frame = spark.createDataFrame(days, "queue string, day string").selectExpr("*", "1 as n")
    frame = frame.withColumn("queue", shortened_column(frame["queue"]))
    frame.write.partitionBy("day", "queue").parquet(str(tmp_path / "spark"))
    files = (tmp_path / "spark").glob("*/*/*.parquet")
    assert set(placed) == {str(file.parent.relative_to(tmp_path / "spark")) for file in files}
    assert placed["day=2026-05-01/queue=mail"]["id"].to_pylist() == [f"{at} mail"]
    assert placed["day=2026-05-02/queue=mail"]["id"].to_pylist() == [f"{later} mail"]


@pytest.mark.parametrize("way", ["directly", "through spark"])
def test_a_queue_name_too_long_for_a_path_is_whole_in_the_archive(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    if way == "through spark":
        monkeypatch.setattr(Storage, "disk", None)
    names = ["日" * 120, LIKE_SHORT, "/" * 120, LIKE_NONE, "mail"]
    pasts = [Past(microqueue_database, name, ago=timedelta(hours=30)) for name in names]
    first = pasts[0].queue

    def meddle(step: Step) -> None:
        if step.name == "verify":
            first.dead_letters.replay([first.dead_letters.list()[0].id])

    for count, progress in ((3, meddle), (1, no_progress)):
        for past in pasts:
            past.enqueue(count)
            past.fail(["boom"] * count)
        archive(
            spark, tmp_path, uri=database_uri, older_than=HOUR, compact=False, progress=progress
        )

    for _ in range(2):  # Before its files are merged, and after.
        rows = read_archive(spark, tmp_path).groupBy("queue").count().collect()
        assert {row["queue"]: row["count"] for row in rows} == dict(
            zip(names, [3, 4, 4, 4, 4], strict=True)
        )
        for name in names:
            kept = read_archive(spark, tmp_path, queues=[name]).collect()
            assert {row["queue"] for row in kept} == {name}
            assert {decode(row["document"])["queue"] for row in kept} == {name}
        compact(spark, tmp_path)
    assert len(list(tmp_path.glob("day=*/*/*.parquet"))) == 5
    assert microqueue_database.tasks.count_documents({}) == 1
