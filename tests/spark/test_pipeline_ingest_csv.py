from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from microqueue.spark.ingest.job import ingest
from tests.rejection import rejecting

VALUES = [
    'say "hi"',
    'a "b", c',
    '{"k": "v"}',
    '"',
    '\\"',
    "path\\",
    "C:\\new\\dir",
    "first\nsecond",
    "\n",
    "a,b",
    " kept ",
    "#1",
    "",
]


@pytest.fixture
def options(database_uri: str) -> dict[str, Any]:
    return {"queue": "orders", "source_format": "csv", "uri": database_uri}


@pytest.mark.parametrize("end", ["\r\n", "\n"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_csv_written_by_python_is_read_unchanged(
    spark: SparkSession,
    microqueue_database: Any,
    options: dict[str, Any],
    tmp_path: Path,
    end: str,
    quoting: Any,
) -> None:
    source = tmp_path / "rows.csv"
    rows = [{"id": str(number), "value": value} for number, value in enumerate(VALUES)]
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "value"], lineterminator=end, quoting=quoting)
        writer.writeheader()
        writer.writerows(rows)
    done = ingest(spark, source, **options)
    assert (done.added, done.rejected) == (len(rows), 0)
    found = [task["payload"] for task in microqueue_database.tasks.find()]
    expected = [{name: value for name, value in row.items() if value} for row in rows]
    assert sorted(found, key=lambda row: int(row["id"])) == expected


def test_every_line_can_be_a_row(
    spark: SparkSession, microqueue_database: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    source = tmp_path / "rows.csv"
    source.write_text('id,text\n1,"a\n2,"b\\"c"\n')
    given = {"MultiLine": "false", "escape": "\\"}
    assert ingest(spark, source, **options, options=given).added == 2
    found = [task["payload"] for task in microqueue_database.tasks.find()]
    assert {"id": "2", "text": 'b"c'} in found


def test_unusual_names_in_a_header_are_kept(
    spark: SparkSession, microqueue_database: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    source = tmp_path / "rows.csv"
    source.write_bytes(b"\xef\xbb\xbfid,a`b,,c.d\n1,2,3,4\n")
    assert ingest(spark, source, **options).added == 1
    task = microqueue_database.tasks.find_one()
    assert task["payload"] == {"id": "1", "a`b": "2", "_c2": "3", "c.d": "4"}


@pytest.mark.parametrize("second", ["id,mail,name", '"id","mail",name', "id,name,mail,more", "id"])
def test_files_with_different_headers_are_rejected(
    spark: SparkSession,
    microqueue_database: Any,
    options: dict[str, Any],
    tmp_path: Path,
    second: str,
) -> None:
    (tmp_path / "a b.csv").write_text("id,name,mail\n1,ada,ada@x\n")
    (tmp_path / "b.csv").write_text(f"{second}\n2,bob@x,bob\n")
    naming = ["a b.csv", "id, name, mail", "/b.csv"]
    with rejecting("source", str(tmp_path), code="headers_differ", naming=naming):
        ingest(spark, tmp_path, **options)
    assert microqueue_database.microqueue_loads.count_documents({}) == 0


@pytest.mark.parametrize(
    ("first", "second", "given"),
    [
        ("# of ada\nid,name", "# of ada\nname,id", {"Comment": "#"}),
        ('"id\nnumber",name', '"id\nname",number', {}),
        ("\nid,name", "\nname,id", {}),
    ],
)
def test_headers_that_are_not_in_the_first_line_are_compared_too(
    spark: SparkSession,
    microqueue_database: Any,
    options: dict[str, Any],
    tmp_path: Path,
    first: str,
    second: str,
    given: dict[str, str],
) -> None:
    (tmp_path / "a.csv").write_text(f"{first}\n1,ada\n")
    (tmp_path / "b.csv").write_text(f"{second}\nbob,2\n")
    with rejecting("source", str(tmp_path), code="headers_differ"):
        ingest(spark, tmp_path, **options, options=given)


def test_files_with_the_same_header_are_read_together(
    spark: SparkSession, microqueue_database: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
    (tmp_path / "day=1" / "a.csv").write_text("id,name\n1,ada\n")
    (tmp_path / "day=1" / "empty.csv").write_text("")
    (tmp_path / "day=2" / "b.csv").write_text('"id","name"\r\n2,bob\r\n')
    with gzip.open(tmp_path / "day=2" / "c.csv.gz", "wt") as file:
        file.write("id,name\n3,cyd\n")
    done = ingest(spark, tmp_path, **options)
    assert (done.added, done.rejected) == (3, 0)
    found = [task["payload"] for task in microqueue_database.tasks.find()]
    assert sorted(row["id"] + row["day"] for row in found) == ["11", "22", "32"]


def test_file_names_may_look_like_patterns(
    spark: SparkSession, microqueue_database: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("a[1]{b}", "a%20 *"):
        (tmp_path / f"{name}.csv").write_text(f'"id",name\n{name},ada\n')
    (tmp_path / "b.csv").write_text("id,name\nb,bob\n")
    with rejecting("source", str(tmp_path), code="unreadable", naming=["a[1]"]):
        ingest(spark, tmp_path, **options)  # Spark takes it for one, where rows have many lines.
    assert ingest(spark, tmp_path, **options, options={"multiLine": "false"}).added == 3


def test_a_file_without_a_header_is_rejected(
    spark: SparkSession, microqueue_database: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("")
    with rejecting("source", str(source), code="empty"):
        ingest(spark, source, **options)
