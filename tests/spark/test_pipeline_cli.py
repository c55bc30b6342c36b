from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner, Result

from microqueue import BackoffPolicy, InvalidArgument, Queue, QueueSettings
from microqueue.cli.app import PIPELINE_COMMANDS, app
from microqueue.cli.spark_runner import explain
from microqueue.cli.values import read_backoff
from microqueue.embedded import running
from microqueue.spark import session
from microqueue.spark.archive.log import ArchiveLog, Entry
from microqueue.spark.storage import Storage
from tests.spark.past import Past

ALL = ["--all-queues"]


class Shell:
    """Runs commands in this process, where Spark is running already."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def run(self, *arguments: str) -> Result:
        command = ["pipeline", *arguments, "--uri", self._uri]
        return CliRunner().invoke(app, command, catch_exceptions=False)

    def json(self, *arguments: str) -> Any:
        result = self.run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        assert result.stderr == ""
        return json.loads(result.stdout)


def test_a_running_session_is_used(spark: SparkSession) -> None:
    assert session(master="local[7]") is spark


@pytest.fixture
def shell(spark: SparkSession, database_uri: str) -> Shell:
    return Shell(database_uri)


@pytest.fixture
def past(microqueue_database: Any) -> Past:
    past = Past(microqueue_database, ago=timedelta(hours=2))
    past.enqueue(45)
    past.retry(40, "gateway 7 is down", delay=30)
    past.wait(60)
    past.work(38)
    past.fail(["order 1 not found", "order 2 not found"], code="NotFound")
    return past


def test_each_pipeline_has_a_dry_run(
    shell: Shell, past: Past, microqueue_database: Any, tmp_path: Path
) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("a,b\n1,2\n")
    before = list(microqueue_database.tasks.find())
    said = {
        "archive": shell.run(
            "archive", str(tmp_path / "kept"), *ALL, "--older-than", "1h", "--dry-run"
        ),
        "ingest": shell.run("ingest", str(source), "-q", "rows", "--dry-run"),
        "report": shell.run("report", str(tmp_path / "out"), "--target-wait", "30s", "--dry-run"),
        "triage": shell.run("triage", "--state", str(tmp_path / "seen"), "--dry-run"),
        "replay": shell.run("replay", "--where", "attempts > 0", "-q", "mail", "--dry-run"),
        "storms": shell.run("storms", "--dry-run"),
        "simulate": shell.run("simulate", "--policy", "base=1,jitter=none", "--dry-run"),
    }
    expected = {
        "archive": "40 tasks that finished before",
        "ingest": "1 task would be added to queue 'rows'",
        "report": "in 30 s",
        "triage": "2 x order <n> not found",
        "replay": "2 tasks would be replayed",
        "storms": "gateway <n> is down (95% of failures)",
        "simulate": "45 tasks and 1 outage recorded; 3 runs to simulate",
    }
    assert set(said) == set(PIPELINE_COMMANDS)
    for name, result in said.items():
        assert result.exit_code == 0, result.output
        assert expected[name] in result.stdout, (name, result.stdout)
        assert result.stderr or name in {"archive", "replay"}, name  # What it is doing.
    assert "microqueue dlq replay --queue mail --code=NotFound" in said["triage"].stdout
    assert list(microqueue_database.tasks.find()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv"]


def test_each_pipeline_prints_one_json_document(shell: Shell, past: Past, tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("1,2\n")
    ingested = shell.json("ingest", str(source), "-q", "rows", "--option", "header=false")
    assert (ingested["added"], ingested["rejected"]) == (1, 0)
    triage = shell.json("triage", "--state", str(tmp_path / "seen"))
    assert (triage["total"], triage["kinds"], triage["new"]) == (2, 1, 1)
    storms = shell.json("storms")
    assert [storm["retries"] for storm in storms["storms"]] == [40]
    simulated = shell.json("simulate", "--policy", "base=1,jitter=none", "-q", "mail")
    assert (simulated["tasks"], len(simulated["outages"])) == (45, 1)
    assert simulated["outcomes"]
    report = shell.json("report", str(tmp_path / "out"), "--since", "3h", "--bucket", "hour")
    (total,) = [row for row in report["rows"] if row["level"] == "total"]
    assert {row["level"] for row in report["rows"]} == {"total", "queue", "name", "bucket"}
    assert (total["done"], total["failed"]) == (38, 2)
    assert total["success_rate"] == 0.95
    assert Path(report["files"][0]).read_text().startswith("<!DOCTYPE html>")
    archived = shell.json("archive", str(tmp_path / "kept"), *ALL, "--older-than", "1h")
    assert (archived["archived"], archived["deleted"]) == (40, 40)
    assert shell.run("archive", str(tmp_path / "kept"), *ALL).exit_code == 0
    kept = ["--archive", str(tmp_path / "kept"), "--where", "status = 'failed'"]
    assert shell.json("replay", *ALL, *kept)["archived"] == 2


@pytest.mark.parametrize(("option", "warned"), [("--min-retries", False), ("--least", True)])
def test_least_is_a_deprecated_name_of_min_retries(
    shell: Shell, past: Past, option: str, *, warned: bool
) -> None:
    result = shell.run("storms", option, "1000", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["storms"] == []
    warning = "Warning: --least is deprecated; use --min-retries.\n"
    assert result.stderr == (warning if warned else "")


@pytest.mark.parametrize(("option", "warned"), [("--spread", False), ("--over", True)])
def test_over_is_a_deprecated_name_of_spread(
    shell: Shell, past: Past, option: str, *, warned: bool
) -> None:
    before = datetime.now(UTC)
    result = shell.run("replay", *ALL, "--where", "status = 'failed'", option, "5h", "--json")
    assert result.exit_code == 0, result.output
    until = datetime.fromisoformat(json.loads(result.stdout)["until"])
    assert timedelta(hours=4) < until - before < timedelta(hours=6)
    warning = "Warning: --over is deprecated; use --spread.\n"
    assert result.stderr == (warning if warned else "")


@pytest.mark.parametrize(
    ("option", "warned"), [("--no-dead-letters", False), ("--no-letters", True)]
)
def test_letters_is_a_deprecated_name_of_dead_letters(
    shell: Shell, past: Past, tmp_path: Path, option: str, *, warned: bool
) -> None:
    shell.json("archive", str(tmp_path), *ALL, "--older-than", "1h")
    past.fail(["order 3 not found"], code="NotFound")
    where = ("--archive", str(tmp_path), "--where", "status = 'failed'")
    assert shell.json("replay", *ALL, *where, "--dry-run")["matched"] == 3
    result = shell.run("replay", *ALL, *where, option, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["matched"] == 2
    warning = "Warning: --letters/--no-letters is deprecated; use --dead-letters or "
    assert result.stderr.startswith(warning) is warned


def test_done_tasks_are_replayed_only_on_request(
    shell: Shell, past: Past, microqueue_database: Any, tmp_path: Path
) -> None:
    shell.json("archive", str(tmp_path), *ALL, "--older-than", "1h")
    microqueue_database.tasks.delete_many({})
    kept = ("--archive", str(tmp_path), "--where", "attempts = 2")
    looked = shell.json("replay", *ALL, *kept, "--dry-run")
    assert (looked["matched"], looked["done_left_out"]) == (2, 38)
    assert looked["matched_by_status"] == {"failed": 2}
    whole = shell.json("replay", *ALL, *kept, "--include-done", "--dry-run")
    assert (whole["matched"], whole["done_left_out"]) == (40, 0)
    assert whole["matched_by_status"] == {"done": 38, "failed": 2}
    said = shell.run("replay", *ALL, *kept, "--dry-run").stdout
    assert "--include-done" in said
    assert "38 done tasks" in said
    said = shell.run("replay", *ALL, *kept, "--include-done", "--dry-run").stdout
    assert [line.split() for line in said.splitlines() if "mail" in line] == [
        ["mail/archived", "done", "38"],
        ["mail/archived", "failed", "2"],
    ]
    nothing = shell.run(
        "replay", *ALL, "--archive", str(tmp_path), "--where", "status = 'done'"
    ).stdout
    assert "--include-done" in nothing
    assert shell.json("replay", *ALL, *kept)["archived"] == 2
    assert shell.json("replay", *ALL, *kept, "--include-done")["archived"] == 40
    refused = shell.run("replay", *ALL, "--where", "true", "--include-done")
    assert refused.exit_code == 1
    assert "--archive" in refused.stderr


def test_pipelines_read_the_collection_that_is_given(
    shell: Shell, microqueue_database: Any, tmp_path: Path
) -> None:
    past = Past(microqueue_database.jobs, ago=timedelta(hours=2))
    past.enqueue(3)
    past.work(3)
    options = ("--older-than", "1h", "--dry-run", "--collection", "jobs")
    assert (
        "3 tasks that finished before" in shell.run("archive", str(tmp_path), *ALL, *options).stdout
    )


def test_a_finished_ingest_is_reported_as_finished(shell: Shell, tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("a,b\n1,2\n")
    assert "1 task added" in shell.run("ingest", str(source), "-q", "rows").stdout
    for options, told in (([], "nothing was added"), (["--dry-run"], "nothing would be added")):
        said = shell.run("ingest", str(source), "-q", "rows", *options).stdout
        assert "is finished already" in said
        assert told in said
        assert "1 task added to queue 'rows'" in said
    other = shell.run("ingest", str(source), "-q", "rows", "--priority", "9")
    assert other.exit_code == 1
    for part in ("was begun with priority=0", "not with priority=9", "--run"):
        assert part in other.stderr


def test_without_an_address_the_embedded_server_runs_for_the_command(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.delenv("MICROQUEUE_URI", raising=False)
    monkeypatch.setenv("MICROQUEUE_HOME", str(home))
    source = tmp_path / "rows.csv"
    source.write_text("a,b\n1,2\n3,4\n")
    command = ["pipeline", "ingest", str(source), "-q", "rows", "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["added"] == 2
    assert running(home) is None
    with Queue[Any].from_uri(name="rows") as queue:
        assert queue.stats(exact=True).ready == 2


def test_pipeline_that_reads_only_an_archive_starts_no_server(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.delenv("MICROQUEUE_URI", raising=False)
    monkeypatch.setenv("MICROQUEUE_HOME", str(home))
    command = ["pipeline", "storms", "--no-live", "--archive", str(tmp_path / "missing")]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 1
    assert not home.exists()


def test_errors_are_one_line(shell: Shell, tmp_path: Path) -> None:
    result = shell.run("replay", *ALL, "--where", "selekt", "--dry-run")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: where='selekt' is not valid: give a SQL condition")
    assert result.stderr.count("\n") == 1
    result = shell.run("replay", *ALL, "--where", "status = ", "--dry-run")
    assert "over columns; [PARSE_SYNTAX_ERROR] Syntax error" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        ("report", "--dry-run"),
        ("triage",),
        ("storms",),
        ("simulate",),
        ("replay", *ALL, "--where", "true"),
    ],
)
def test_a_path_without_an_archive_is_rejected(
    shell: Shell, tmp_path: Path, command: tuple[str, ...]
) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for path in (tmp_path / "typo", tmp_path, file):
        said = shell.run(*command, "--archive", str(path))
        assert said.exit_code == 1
        last = said.stderr.splitlines()[-1]
        assert last.startswith(f"Error: there is no archive at file:{path}")
        assert said.stdout == ""


def test_an_unwritable_path_is_reported_in_one_line(
    shell: Shell, past: Past, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    said = {
        "archive": shell.run("archive", str(file / "kept"), *ALL, "--older-than", "1h"),
        "report": shell.run("report", str(file)),
        "triage": shell.run("triage", "--state", str(file / "seen.json")),
    }
    for name, result in said.items():
        assert result.exit_code == 1, name
        error = result.stderr.splitlines()[-1]
        assert error.startswith("Error: "), name
        assert str(file) in error, error
        assert "An error occurred" not in error
        assert "Errno" not in error


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("base=1", BackoffPolicy(base_sec=1)),
        ("base=2,factor=3,max=60,jitter=equal",
         BackoffPolicy(base_sec=2, factor=3, max_sec=60, jitter="equal")),
    ],
)  # fmt: skip
def test_policies_are_parsed(text: str, policy: BackoffPolicy) -> None:
    assert read_backoff(text) == policy


@pytest.mark.parametrize("text", ["", "base", "base=x", "speed=1", "jitter=wild"])
def test_invalid_policies_are_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument):
        read_backoff(text)


def test_an_error_of_microqueue_is_found_in_an_error_of_spark() -> None:
    told = (
        "An exception was thrown from the Python worker:\n"
        "  File x\nmicroqueue.errors.ServerUnavailable: MongoDB cannot be reached\n"
    )
    assert explain(told) == "MongoDB cannot be reached (ServerUnavailable, in a Spark task)"
    assert explain("first\nsecond") == "Spark failed: first"


def test_dead_letters_in_a_separate_collection_are_detected(
    shell: Shell, microqueue_database: Any, tmp_path: Path
) -> None:
    settings = QueueSettings(dead_letters="collection")
    queue: Queue[Any] = Queue(microqueue_database, settings=settings)
    queue.enqueue({})
    task = queue.pop()
    assert task is not None
    queue.mark_failure(task, "boom")
    assert shell.json("triage", "--dry-run")["total"] == 1
    assert shell.json("replay", *ALL, "--where", "true", "--dry-run")["letters"] == 1
    kept = shell.json("archive", str(tmp_path), *ALL, "--older-than", "0s", "--dry-run")
    assert kept["found"] == {"default/failed": 1}


def test_pipeline_over_the_archive_alone_needs_no_server(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MICROQUEUE_SERVER_TIMEOUT", "0.3")
    absent = Shell("mongodb://127.0.0.1:1/?directConnection=true")
    begun = Entry(kind="begun", run="r", at=datetime.now(UTC))
    ArchiveLog(Storage(spark, tmp_path)).commit(begun)
    said = absent.run("triage", "--no-live", "--archive", str(tmp_path), "--dry-run")
    assert said.exit_code == 0, said.stderr
    assert "No dead letters" in said.stdout
