from __future__ import annotations

import json
import shlex
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from microqueue import MicroqueueError
from microqueue.cli.app import app
from microqueue.spark.pipelines.archive import archive
from microqueue.spark.pipelines.triage import Cluster, triage
from tests.spark.past import Past

HOUR = timedelta(hours=1)


def by_pattern(clusters: tuple[Cluster, ...]) -> dict[str, Cluster]:
    return {cluster.pattern: cluster for cluster in clusters}


def run(line: str, uri: str, *more: str) -> dict[str, Any]:
    """Run a printed command as a person would paste it."""
    program, *arguments = shlex.split(line)
    assert program == "microqueue"
    arguments = [*arguments, *more, "--json", "--uri", uri]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_dead_letters_are_grouped_and_each_command_replays_its_own_kind(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    archived = Past(microqueue_database, ago=3 * HOUR)
    archived.enqueue(4)
    archived.fail([f"order {n} not found" for n in range(4)], code="NotFound")
    archive(spark, tmp_path / "archive", uri=database_uri, older_than=2 * HOUR)
    past = Past(microqueue_database, ago=HOUR)
    past.enqueue(12)
    past.fail([f"order {n} not found" for n in range(3)], code="NotFound")
    past.fail(["user 'ada' not found", "user 'bob' not found"], code="NotFound")
    past.fail([f"connect to 10.0.0.{n}:80 timed out" for n in range(4)], code="Timeout")
    past.fail(['--weird $(text) "quoted" 7'], code=None)
    other = Past(microqueue_database, "other", ago=HOUR)
    other.enqueue(1)
    other.fail(["order 9 not found"], code="NotFound")

    state = tmp_path / "state" / "triage.json"
    found = triage(spark, uri=database_uri, archive=tmp_path / "archive", state=state, samples=2)

    assert (found.total, found.kinds, found.new) == (15, 5, 5)
    orders = found.clusters[0]
    assert (orders.pattern, orders.code, orders.queue) == (
        "order <n> not found",
        "NotFound",
        "mail",
    )
    assert (orders.count, orders.live, orders.archived) == (7, 3, 4)
    assert orders.first_at < orders.last_at
    assert len(orders.samples) == 2
    clusters = {(one.queue, one.pattern): one for one in found.clusters}
    for cluster in found.clusters:
        assert cluster.replay is not None
        assert cluster.replay.others == 0, cluster
        replayed = run(cluster.replay.line, database_uri, "--yes")
        assert (replayed["matched"], replayed["replayed"]) == (cluster.live, cluster.live)
    assert microqueue_database.tasks.count_documents({"status": "failed"}) == 0

    assert orders.replay_archived is not None
    sent = run(orders.replay_archived.line, database_uri)
    assert (sent["archived"], sent["letters"]) == (4, 0)
    assert clusters["other", "order <n> not found"].fingerprint != orders.fingerprint


def test_only_kinds_that_no_triage_has_seen_are_new(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    past = Past(microqueue_database, ago=HOUR)
    past.enqueue(4)
    past.fail(["one 1", "one 2"])
    state = tmp_path / "seen.json"
    assert triage(spark, uri=database_uri, state=state, dry_run=True).new == 1
    assert not state.exists()
    assert triage(spark, uri=database_uri, state=state).new == 1
    past.fail(["one 3", "another"])
    found = by_pattern(triage(spark, uri=database_uri, state=state).clusters)
    assert {pattern: cluster.new for pattern, cluster in found.items()} == {
        "one <n>": False,
        "another": True,
    }
    assert triage(spark, uri=database_uri, state=state).new == 0
    state.write_text("[]")
    with pytest.raises(MicroqueueError, match="earlier triage"):
        triage(spark, uri=database_uri, state=state)


def test_a_command_that_cannot_be_exact_says_so(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    past = Past(microqueue_database, ago=HOUR)
    past.enqueue(3)
    # One instant, one code, and the text of the first is part of the second.
    past.fail(["disk 1", "disk 2", "disk 3 and more"])
    found = by_pattern(triage(spark, uri=database_uri).clusters)
    short, long = found["disk <n>"].replay, found["disk <n> and more"].replay
    assert short is not None
    assert short.others == 1
    assert long is not None
    assert long.others == 0
