"""The public entry of the pipelines, and the modules that it replaced."""

from __future__ import annotations

from importlib import import_module

import pytest

from microqueue.spark import pipelines


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
def test_the_former_module_of_a_pipeline_still_works_and_warns(module: str, name: str) -> None:
    former = import_module(f"microqueue.spark.pipelines.{module}")
    with pytest.warns(DeprecationWarning, match=f"import {name} from microqueue.spark.pipelines"):
        found = getattr(former, name)
    assert found is getattr(pipelines, name)
    assert callable(found)


def test_all_exported_names_exist() -> None:
    assert all(hasattr(pipelines, name) for name in pipelines.__all__)
