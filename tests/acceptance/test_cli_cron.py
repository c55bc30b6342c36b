"""What commands say where nobody looks on: from cron, and in scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import microqueue
from microqueue import Queue, QueueSettings
from microqueue.embedded import EmbeddedServer
from microqueue.operations import sweep_report
from microqueue.operations.call import Operation
from microqueue.sweeper import core as sweeper_core
from tests.acceptance.command_line import PROGRAM, Cli
from tests.waiting import wait_for

REPORT = r"Swept in .*: 1 reclaimed\.\n"


@pytest.fixture
def stuck(microqueue_database: Any) -> Queue[Any]:
    """A queue with a task whose lease has expired."""
    queue: Queue[Any] = Queue(microqueue_database, settings=QueueSettings(visibility_timeout=0.001))
    queue.enqueue({})
    queue.pop()
    wait_for(lambda: queue.stats().overdue == 1)
    return queue


# The embedded server


def told(home: Path) -> str:
    return (
        f"Neither --uri nor MICROQUEUE_URI is given: using the embedded MongoDB of "
        f"{home.resolve()}.\n"
    )


def test_use_of_the_embedded_server_is_told_where_there_is_no_terminal(home: Path) -> None:
    cli = Cli()
    assert "nothing to do" in cli("sweep", "--once")
    assert cli.stderr == told(home)
    assert cli.json("stats")["ready"] == 0
    assert cli.stderr == told(home)
    with EmbeddedServer.start(home) as server:  # One that runs is not the wanted one, either.
        cli("sweep", "--quiet")
        assert cli.stderr == told(home)
        cli("sweep", "--uri", server.uri)
        assert cli.stderr == ""


def test_variable_with_an_address_leaves_nothing_to_tell(cli: Cli) -> None:
    cli("sweep")
    assert cli.stderr == ""


@pytest.mark.parametrize("processes", ["1", "2"])
def test_worker_tells_of_the_embedded_server_once(
    home: Path, tmp_path: Path, processes: str
) -> None:
    (tmp_path / "cron_handlers.py").write_text("def handle(payload): ...\n", encoding="utf-8")
    result = subprocess.run(
        [*PROGRAM, "worker", "cron_handlers:handle", "--burst", "--processes", processes],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(microqueue.__file__).parents[1])},
    )
    told_first, *others = result.stderr.splitlines(keepends=True)
    assert told_first == told(home)
    assert "Neither" not in "".join(others)


def test_json_log_holds_the_use_of_the_embedded_server(home: Path) -> None:
    cli = Cli()
    cli("sweep", "--log-format", "json")
    line = json.loads(cli.stderr)
    assert (line["level"], line["message"]) == ("warning", told(home).strip())


def test_terminal_is_told_only_of_a_server_that_is_started(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # As at a terminal.
    cli = Cli()
    cli("stats")
    assert f"Starting the embedded MongoDB of {home.resolve()} for this command" in cli.stderr
    assert "Neither" not in cli.stderr
    with EmbeddedServer.start(home):
        cli("stats")
        assert cli.stderr == ""


# Quiet sweeps


def test_quiet_sweep_prints_only_what_it_did(cli: Cli, stuck: Queue[Any]) -> None:
    assert re.fullmatch(REPORT, cli("sweep", "--quiet"))
    assert cli("sweep", "--quiet") == ""
    assert cli("sweep", "--quiet", "--json") == ""
    assert cli.stderr == ""


def test_quiet_sweep_tells_what_failed_on_stderr(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Operation[int]:
        raise microqueue.OperationFailed("out of order")
        yield

    jobs = {**sweeper_core.SIMPLE_JOBS, "promote_due": ("promoted", broken)}
    monkeypatch.setattr(sweeper_core, "SIMPLE_JOBS", jobs)
    cli("sweep", "--quiet", status=1)
    assert "Error: promote_due: out of order" in cli.stderr
    assert json.loads(cli("sweep", "--quiet", "--json", status=1))["errors"]


def test_quiet_sweep_tells_that_there_is_no_server(absent: str) -> None:
    cli = Cli()
    assert cli("sweep", "--quiet", "--uri", absent, status=1) == ""
    assert "no MongoDB server answered in time" in cli.stderr


def test_quiet_sweeper_goes_on_in_silence(database_uri: str, stuck: Queue[Any]) -> None:
    command = [*PROGRAM, "sweep", "--every", "0.05", "--quiet", "--uri", database_uri]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def has_idled() -> bool:
        last, last_active = stuck.run(sweep_report.read("tasks"))
        return last_active is not None and last != last_active

    wait_for(has_idled)
    process.terminate()
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert re.fullmatch(REPORT, said)
