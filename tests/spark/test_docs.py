"""The Python blocks of the documents about Spark run."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.past import Past

DOCS = Path(__file__).parents[2] / "docs"

Run = Callable[[str], dict[str, Any]]


@pytest.fixture
def run(database_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run all Python blocks of a document, with its paths below the test's directory."""
    monkeypatch.setenv("MICROQUEUE_URI", database_uri)

    def run_blocks(name: str) -> dict[str, Any]:
        namespace: dict[str, Any] = {}
        found = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), flags=re.DOTALL)
        assert found
        for number, block in enumerate(found):
            # The Java process was started without this test's environment.
            text = block.replace(".options(queue=", f".options(uri={database_uri!r}, queue=")
            for path in ("/data/archive", "orders.parquet", "done", "done-offsets"):
                for opening in ("(", "(spark, ", "path=", "checkpointLocation="):
                    real = tmp_path / path.removeprefix("/")
                    text = text.replace(f'{opening}"{path}"', f'{opening}"{real}"')
            exec(compile(text, f"{name} block {number}", "exec"), namespace)
        return namespace

    return run_blocks


def test_the_blocks_about_the_source_and_the_sink_run(
    spark: SparkSession, make_queue: Any, run: Run, tmp_path: Path
) -> None:
    spark.sql("select * from values (1, 'a'), (2, 'b') as t(order_id, sku)").write.parquet(
        str(tmp_path / "orders.parquet")
    )
    queue = make_queue("mail")
    queue.enqueue({"n": 1})
    queue.mark_done_many(queue.pop_many(1))
    names = run("spark.md")
    try:
        assert names["tasks"].count() == 1
        assert (names["report"].inserted, names["report"].duplicates) == (2, 0)
        assert make_queue("orders").stats(exact=True).pending == 2
        assert names["query"].isActive
    finally:
        names["query"].stop()


def test_the_block_about_pipelines_runs(
    microqueue_database: Any, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    past = Past(microqueue_database, ago=timedelta(days=3))
    past.enqueue(2)
    past.work(2)
    names = run("pipelines.md")
    assert (names["summary"].archived, names["summary"].deleted) == (2, 2)
    shown = capsys.readouterr().out
    assert "Step(name='commit'" in shown
    assert re.search(r"done\|\s*2\|", shown)
