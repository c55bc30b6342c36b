from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from microqueue.spark.ingest.job import ingest
from microqueue.spark.storage import Storage
from tests.rejection import rejecting


@pytest.fixture
def options(database_uri: str) -> dict[str, Any]:
    return {"queue": "orders", "uri": database_uri}


@pytest.mark.parametrize("end", ["", "/", "/."])
def test_a_directory_as_reject_file_is_rejected_and_unchanged(
    spark: SparkSession,
    microqueue_database: Any,
    options: dict[str, Any],
    tmp_path: Path,
    end: str,
) -> None:
    source, kept = tmp_path / "rows.csv", tmp_path / "kept" / "precious.txt"
    source.write_text("a\n1\n")
    kept.parent.mkdir()
    kept.write_text("precious")
    for dry_run in (True, False):
        with rejecting("rejects", f"{kept.parent}{end}", code="not_a_file"):
            ingest(spark, source, **options, rejects=f"{kept.parent}{end}", dry_run=dry_run)
    assert kept.read_text() == "precious"
    assert microqueue_database.tasks.count_documents({}) == 0
    assert microqueue_database.microqueue_loads.count_documents({}) == 0


@pytest.mark.parametrize(
    "name", ["{}/new/", "{}/rows.csv/bad.jsonl", "a:b.jsonl", "{}/a:b.jsonl", ""]
)
def test_a_path_that_cannot_be_a_reject_file_is_rejected(
    spark: SparkSession, options: dict[str, Any], tmp_path: Path, name: str
) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("a\n1\n")
    with rejecting("rejects", name.format(tmp_path), code="not_a_file"):
        ingest(spark, source, **options, rejects=name.format(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


@pytest.mark.parametrize("source", ["some rows.csv", "", "some*"])
def test_the_source_cannot_be_the_reject_file(
    spark: SparkSession, options: dict[str, Any], tmp_path: Path, source: str
) -> None:
    file = tmp_path / "some rows.csv"
    file.write_text("a\n1\n")
    with rejecting("rejects", str(file), code="is_source"):
        ingest(spark, tmp_path / source, **options, source_format="csv", rejects=file)
    assert file.read_text() == "a\n1\n"


def test_a_reject_file_replaces_that_of_an_earlier_run(
    spark: SparkSession, options: dict[str, Any], tmp_path: Path
) -> None:
    source, rejects = tmp_path / "rows.jsonl", tmp_path / "bad 1%.jsonl"
    for run, line in enumerate(["[1]", "[2]"]):
        source.write_text(line)
        ingest(spark, source, **options, rejects=rejects, run=str(run))
        assert json.loads(rejects.read_text())["row"] == json.loads(line)
    source.write_text("{}")
    assert ingest(spark, source, **options, rejects=rejects, run="good").rejects is None
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_files_may_be_in_the_root_directory(spark: SparkSession) -> None:
    top, name = Storage.of_file(spark, "/bad.jsonl")
    assert (top.root, top.path(name)) == ("file:/", "file:/bad.jsonl")
    here, name = Storage.of_file(spark, "bad.jsonl")
    assert here.path(name) == f"file:{Path.cwd()}/bad.jsonl"


def test_a_number_that_would_become_infinite_is_rejected(
    spark: SparkSession, microqueue_database: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    source, rejects = tmp_path / "rows.jsonl", tmp_path / "bad.jsonl"
    source.write_text('{"n": 1}\n{"n": 1e400}\n')
    summary = ingest(spark, source, **options, source_format="json", rejects=rejects)
    assert (summary.added, summary.rejected) == (1, 1)
    assert [task["payload"] for task in microqueue_database.tasks.find()] == [{"n": 1}]
    assert "1e400 is too large a number" in rejects.read_text()
