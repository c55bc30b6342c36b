"""The public entry of the pipelines, and the modules that it replaced."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from microqueue import InvalidArgument
from microqueue.deprecation import renamed_arguments
from microqueue.spark import pipelines
from microqueue.spark.analytics import simulate, storms
from tests.spark.past import Past

HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("archive", "archive"),
        ("archive_reader", "read_archive"),
        ("compaction", "compact"),
        ("ingest", "ingest"),
        ("replay", "replay"),
        ("report", "report"),
        ("simulate", "simulate"),
        ("storms", "storms"),
        ("triage", "triage"),
    ],
)
def test_the_old_module_of_a_pipeline_still_works_and_warns(module: str, name: str) -> None:
    old = import_module(f"microqueue.spark.pipelines.{module}")
    with pytest.warns(DeprecationWarning, match=f"use microqueue.spark.pipelines.{name}$"):
        found = getattr(old, name)
    assert found is getattr(pipelines, name)
    assert callable(found)


def test_outcome_of_a_scenario_is_scenario_result() -> None:
    with pytest.warns(DeprecationWarning, match=r"simulate\.ScenarioResult$"):
        assert simulate.Outcome is simulate.ScenarioResult  # type: ignore[attr-defined]


def test_all_exported_names_exist() -> None:
    assert all(hasattr(pipelines, name) for name in pipelines.__all__)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        *(
            (name, "tell", "progress")
            for name in (
                "archive",
                "compact",
                "ingest",
                "replay",
                "report",
                "simulate",
                "storms",
                "triage",
            )
        ),
        ("replay", "letters", "dead_letters"),
        ("replay", "over", "spread"),
        ("storms", "least", "min_retries"),
    ],
)
def test_the_old_name_of_an_argument_still_works_and_warns(name: str, old: str, new: str) -> None:
    function = getattr(pipelines, name)
    # The call itself ends at the unknown argument, before anything is read.
    with (
        pytest.warns(DeprecationWarning, match=f"^{old} is deprecated; use {new}$"),
        pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"),
    ):
        function(**{old: print, "unknown": 1})
    assert new in signature(function).parameters
    assert old not in signature(function).parameters


def test_the_value_of_an_old_argument_is_passed_under_its_new_name() -> None:
    @renamed_arguments(old="new")
    def echo(*, new: int = 0) -> int:
        return new

    with pytest.warns(DeprecationWarning, match="^old is deprecated; use new$"):
        assert echo(old=3) == 3  # type: ignore[call-arg]  # The old name.
    assert echo(new=4) == 4
    with pytest.raises(InvalidArgument):
        echo(old=3, new=4)  # type: ignore[call-arg]  # As above.


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(("module", "first_use"), [(simulate, "collect"), (storms, "attempts_of")])
def test_tasks_archived_while_a_pipeline_reads_are_not_missing(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    first_use: str,
    merged: bool,
) -> None:
    past = Past(microqueue_database, ago=3 * HOUR)
    past.enqueue(41)
    past.work(1)
    pipelines.archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    past.retry(40, delay=60)
    past.wait(60)
    past.work(40)
    use, asked = getattr(module, first_use), 0

    def meddle(*arguments: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:  # The log was read, and MongoDB not yet.
            pipelines.archive(spark, tmp_path, uri=database_uri, older_than=HOUR, compact=merged)
        return use(*arguments, **options)

    monkeypatch.setattr(module, first_use, meddle)
    options: dict[str, Any] = {"archive": tmp_path, "uri": database_uri, "dry_run": True}
    if module is simulate:
        assert pipelines.simulate(spark, **options).tasks_total == 41
    else:
        assert [one.retries for one in pipelines.storms(spark, **options).storms] == [40]
