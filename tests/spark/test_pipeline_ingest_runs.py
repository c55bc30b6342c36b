from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from microqueue import RunConflict
from microqueue.spark.ingest.job import ingest
from tests.rejection import rejecting
from tests.spark.rows_model import Order

ROWS = "sku,count\na,1\nb,2\n"


@pytest.fixture
def options(database_uri: str) -> dict[str, Any]:
    return {"queue": "orders", "uri": database_uri}


@pytest.fixture
def in_folder(spark: SparkSession) -> Iterator[Callable[[Path], None]]:
    """Have Spark take relative names from another folder, until the test is over."""
    context: Any = spark.sparkContext
    hadoop = context._jvm.org.apache.hadoop.fs  # noqa: SLF001 (Spark has no other way)
    system = hadoop.FileSystem.get(context._jsc.hadoopConfiguration())  # noqa: SLF001 (as above)
    before = system.getWorkingDirectory()
    yield lambda folder: system.setWorkingDirectory(hadoop.Path(str(folder)))
    system.setWorkingDirectory(before)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({}, {"priority": 9}, "priority"),
        ({"model": Order}, {}, "model"),
        ({}, {"key": "sku"}, "key"),
        ({"options": {"sep": ","}}, {"options": {"sep": ";"}}, "sep"),
        ({}, {"source_format": "json"}, "source"),
    ],
)
def test_a_run_with_other_options_is_rejected(
    spark: SparkSession,
    microqueue_database: Any,
    options: dict[str, Any],
    tmp_path: Path,
    first: dict[str, Any],
    second: dict[str, Any],
    named: str,
) -> None:
    source = tmp_path / "rows.csv"
    source.write_text(ROWS)
    assert ingest(spark, source, **options, **first).added == 2
    for dry_run in (True, False):
        naming = ["--run", named]
        with rejecting("run", code="other_options", kind=RunConflict, naming=naming) as caught:
            ingest(spark, source, **options, **second, dry_run=dry_run)
        assert isinstance(caught.value, RunConflict)
        before, given = caught.value.before, caught.value.given
        assert any(named in f"{name}={value}" for name, value in before.items())
        assert before.keys() == given.keys()
        assert all(before[name] != given[name] for name in before)
    assert ingest(spark, source, **options, **first).repeated


def test_a_run_is_the_same_with_a_model_by_name_and_other_credentials(
    spark: SparkSession, microqueue_database: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    source = tmp_path / "rows.csv"
    source.write_text(ROWS)
    given = {"fs.s3a.secret.key": "hidden", "sep": ","}
    ingest(spark, source, **options, model=Order, options=given)
    (note,) = microqueue_database.microqueue_loads.find()
    assert "hidden" not in str(note)
    given = {"sep": ",", "fs.s3a.secret.key": "another"}
    model = "tests.spark.rows_model:Order"
    assert ingest(spark, source, **options, model=model, options=given).repeated


def test_the_same_relative_name_in_another_folder_is_another_run(
    spark: SparkSession,
    microqueue_database: Any,
    options: dict[str, Any],
    tmp_path: Path,
    in_folder: Callable[[Path], None],
) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.csv").write_text(f"id\n{name}\n")
        in_folder(tmp_path / name)
        done = ingest(spark, "rows.csv", **options)
        assert (done.added, done.repeated) == (1, False)


def test_a_source_is_the_same_run_under_each_of_its_names(
    spark: SparkSession, microqueue_database: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    source = tmp_path / "rows.csv"
    source.write_text(ROWS)
    assert ingest(spark, source, **options).source == f"csv:file:{source}"
    for name in (os.path.relpath(source), f"file://{source}"):
        assert ingest(spark, name, **options).repeated


def test_a_dry_run_shows_that_the_run_is_finished(
    spark: SparkSession, microqueue_database: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    source = tmp_path / "rows.csv"
    source.write_text(ROWS)
    looked = ingest(spark, source, **options, dry_run=True)
    assert (looked.added, looked.dry_run, looked.repeated) == (2, True, False)
    ingest(spark, source, **options)
    again = ingest(spark, source, **options, dry_run=True)
    assert (again.dry_run, again.repeated) == (True, True)
    other = ingest(spark, source, **options, dry_run=True, run="another")
    assert (other.added, other.repeated) == (2, False)
