from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from microqueue import PipelineError
from microqueue.cli.app import app
from microqueue.spark.analytics import triage as pipeline
from microqueue.spark.analytics.triage import Cluster, Command, triage
from microqueue.spark.archive.job import archive
from tests.rejection import raising
from tests.spark.past import Past

HOUR = timedelta(hours=1)


def by_pattern(clusters: tuple[Cluster, ...]) -> dict[str, Cluster]:
    return {cluster.pattern: cluster for cluster in clusters}


def run(command: Command | None) -> int:
    """Run a command as a person would paste it; give how many tasks it sent back."""
    assert command is not None
    program, group, *arguments = shlex.split(command.line)
    assert program == "microqueue"
    assert "--uri" in arguments  # Otherwise it would use the server of the developer.
    more = ["--yes"] if group == "dlq" else []
    result = CliRunner().invoke(app, [group, *arguments, *more, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, int] = json.loads(result.stdout)
    return found["replayed"] if group == "dlq" else found["letters"] + found["archived"]


def failed(collection: Any) -> set[str]:
    """Return the error messages of the remaining dead letters."""
    return {letter["error"]["message"] for letter in collection.find({"status": "failed"})}


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
    assert orders.first_at is not None
    assert orders.last_at is not None
    assert orders.first_at < orders.last_at
    assert len(orders.samples) == 2
    clusters = {(one.queue, one.pattern): one for one in found.clusters}
    for cluster in found.clusters:
        assert cluster.replay is not None
        assert cluster.replay.line.startswith("microqueue dlq replay")
        assert run(cluster.replay) == cluster.live
    assert microqueue_database.tasks.count_documents({"status": "failed"}) == 0

    assert run(orders.replay_archived) == 4
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
    with raising(PipelineError, "not_a_state", path=str(state)):
        triage(spark, uri=database_uri, state=state)


def test_dead_letters_that_no_filter_separates_are_replayed_by_fingerprint(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    past = Past(microqueue_database, ago=HOUR)
    past.enqueue(5)
    # One instant, one code, and the text of the first is part of the others.
    past.fail(["disk 1", "disk 2", "disk 3 and more", "disk\n4", "disk \x1b[31m is full"])
    found = by_pattern(triage(spark, uri=database_uri).clusters)
    assert run(found["disk <n> and more"].replay) == 1
    assert run(found["disk <n>"].replay) == 3
    assert failed(microqueue_database.tasks) == {"disk \x1b[31m is full"}
    assert run(found["disk \x1b[<n>m is full"].replay) == 1


def test_a_kind_too_large_to_compare_is_replayed_by_fingerprint(
    spark: SparkSession,
    microqueue_database: Any,
    database_uri: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    past = Past(microqueue_database, ago=HOUR)
    past.enqueue(5)
    past.fail([f"order {n} not found" for n in range(3)] + [f"no order {n}" for n in range(2)])
    monkeypatch.setattr(pipeline, "MOST_COMPARED", 3)
    orders = by_pattern(triage(spark, uri=database_uri).clusters)["order <n> not found"]
    assert orders.live == 3
    assert run(orders.replay) == 3
    assert failed(microqueue_database.tasks) == {"no order 0", "no order 1"}


def test_commands_use_the_collection_of_the_triage(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    old = Past(microqueue_database.jobs, ago=3 * HOUR)
    old.enqueue(1)
    old.fail(["order 9 not found"])
    archive(spark, tmp_path, uri=database_uri, collection="jobs", older_than=2 * HOUR)
    for collection in (microqueue_database.jobs, microqueue_database.tasks):
        past = Past(collection, ago=HOUR)
        past.enqueue(3)
        past.fail(["order 1 not found", "order 2 not found", "boom"])
    found = triage(spark, uri=database_uri, collection="jobs", archive=tmp_path)
    orders = by_pattern(found.clusters)["order <n> not found"]
    assert (run(orders.replay), run(orders.replay_archived)) == (2, 1)
    assert failed(microqueue_database.jobs) == {"boom"}
    assert microqueue_database.jobs.count_documents({"status": "pending"}) == 3
    assert microqueue_database.tasks.count_documents({"status": "failed"}) == 3


def test_commands_leave_out_dead_letters_older_than_since(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    for hours in (9, 8, 3, 2):  # Two are archived; of each two, one is in the period.
        past = Past(microqueue_database, ago=hours * HOUR)
        past.enqueue(2)
        past.fail([f"order {hours} not found", f"order {hours} not found at all"])
        if hours == 8:
            archive(spark, tmp_path, uri=database_uri, older_than=7 * HOUR)
    recent = triage(spark, uri=database_uri, since=datetime.now(UTC) - 2.5 * HOUR)
    for cluster in recent.clusters:
        assert cluster.live == 1
        assert run(cluster.replay) == 1
    assert failed(microqueue_database.tasks) == {"order 3 not found", "order 3 not found at all"}

    since = datetime.now(UTC) - 8.5 * HOUR
    for cluster in triage(spark, archive=tmp_path, uri=database_uri, since=since).clusters:
        assert (cluster.live, cluster.archived) == (1, 1)
        assert run(cluster.replay_archived) == 1
    where = {"headers.replayed_from": {"$exists": True}}
    assert microqueue_database.tasks.count_documents(where) == 2


@pytest.mark.parametrize(
    ("uri", "database", "said", "hidden"),
    [
        (None, None, [], False),
        ("mongodb://h/db?tls=true", None, ["--uri", "mongodb://h/db?tls=true"], False),
        ("mongodb://u:pa@ss@a,b/db", None, ["--uri", "mongodb://***@a,b/db"], True),
        ("mongodb://h/db?tls=true", "other", ["--uri", "mongodb://h/other?tls=true"], False),
        ("mongodb://u:p@h", "o", ["--uri", "mongodb://***@h/o?authSource=admin"], True),
        ("mongodb://u:p@h/db", "o", ["--uri", "mongodb://***@h/o?authSource=db"], True),
    ],
)
def test_commands_have_the_address_without_the_password(
    uri: str | None, database: str | None, said: list[str], hidden: bool
) -> None:
    kind = Cluster(
        fingerprint="f", queue="q", code=None, pattern="", count=1, live=0, archived=1,
        first_at=datetime.now(UTC), last_at=datetime.now(UTC), new=True,
    )  # fmt: skip
    scope = pipeline.TriageScope(uri=uri, database=database)
    command = pipeline.replay_archived("/kept", kind, scope)
    where = ["--where", "fingerprint = 'f' and archived"]
    start = ["microqueue", "pipeline", "replay", "--archive", "/kept", "--no-dead-letters"]
    start.append("--all-queues")
    assert shlex.split(command.line) == [*start, *where, *said]
    assert (command.note is not None) == hidden


@pytest.mark.parametrize("updated_at", [None, "yesterday"])
def test_a_kind_without_any_valid_time_is_reported_and_can_be_replayed(
    spark: SparkSession, microqueue_database: Any, database_uri: str, updated_at: Any
) -> None:
    past = Past(microqueue_database, ago=HOUR)
    past.enqueue(3)
    past.fail(["order 1 not found", "order 2 not found"], code="NotFound")
    microqueue_database.tasks.update_many(
        {"status": "failed"}, {"$set": {"updated_at": updated_at}}
    )
    past.fail(["timed out"], code="Timeout")

    found = triage(spark, uri=database_uri)

    kinds = by_pattern(found.clusters)
    orders, timeout = kinds["order <n> not found"], kinds["timed out"]
    assert (orders.count, orders.first_at, orders.last_at) == (2, None, None)
    assert timeout.first_at == timeout.last_at is not None
    written = json.loads(orders.model_dump_json())
    assert (written["first_at"], written["last_at"]) == (None, None)
    assert orders.replay is not None
    result = CliRunner().invoke(app, ["pipeline", "triage", "--uri", database_uri])
    assert result.exit_code == 0, result.output
    assert "2 live, 0 archived, - to -" in result.output
    assert run(orders.replay) == 2
    assert failed(microqueue_database.tasks) == {"timed out"}


@pytest.mark.parametrize("updated_at", [None, "yesterday"])
def test_command_also_replays_those_of_a_kind_without_a_valid_time(
    spark: SparkSession, microqueue_database: Any, database_uri: str, updated_at: Any
) -> None:
    past = Past(microqueue_database, ago=HOUR)
    past.enqueue(3)
    past.fail(["order 1 not found", "order 2 not found"], code="NotFound")
    past.fail(["timed out"], code="Timeout")
    microqueue_database.tasks.update_one(
        {"error.code": "NotFound"}, {"$set": {"updated_at": updated_at}}
    )
    orders = by_pattern(triage(spark, uri=database_uri).clusters)["order <n> not found"]
    assert (orders.live, orders.first_at is None) == (2, False)
    assert run(orders.replay) == 2
    assert failed(microqueue_database.tasks) == {"timed out"}
