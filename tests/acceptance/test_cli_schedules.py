"""The commands about schedules: list, put, show, next, pause, resume, trigger, remove."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from microqueue import BackoffPolicy, Queue, Tasks, Worker
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from tests.acceptance.command_line import PROGRAM, Cli
from tests.waiting import wait_for

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "sweep.py")


def test_schedule_is_put_shown_and_removed(cli: Cli, queue: Queue[Any]) -> None:
    said = cli(
        "schedule", "put", "nightly", '{"n": 1, "password": "pa55"}', "--cron", "30 2 * * *",
        "--timezone", "Europe/Berlin", "--catch-up", "all", "--grace", "2h", "--overlap", "skip",
        "--jitter", "30s", "--task", "clean", "--priority", "4", "--max-attempts", "3",
        "--expires-in", "1h", "--header", "tenant=a", "--backoff", "base=7,max=60",
        "--visibility-timeout", "15m", "-q", "mail",
    )  # fmt: skip
    assert "30 2 * * * Europe/Berlin" in said
    mail: Queue[Any] = Queue(queue._core.collections.database, "mail")  # noqa: SLF001
    put = mail.schedules.get("nightly")
    assert put is not None
    assert put.payload == {"n": 1, "password": "pa55"}
    assert (put.catch_up, put.grace, put.overlap) == ("all", timedelta(hours=2), "skip")
    assert (put.jitter, put.task, put.priority) == (timedelta(seconds=30), "clean", 4)
    assert (put.max_attempts, put.headers) == (3, {"tenant": "a"})
    assert put.expires_in == timedelta(hours=1)
    assert put.backoff == BackoffPolicy(base_sec=7, max_sec=60)
    assert put.visibility_timeout == timedelta(minutes=15)

    (listed,) = cli.json("schedule", "list")
    assert (listed["name"], listed["queue"]) == ("nightly", "mail")
    assert "pa55" not in cli("schedule", "list", "--json")
    assert cli.json("schedule", "list", "--reveal")[0]["payload"]["password"] == "pa55"
    assert "nightly" in cli("schedule", "list", "-q", "mail")
    assert cli.json("schedule", "list", "-q", "other") == []
    shown = cli("schedule", "show", "nightly", "-q", "mail")
    assert "pa55" not in shown
    assert "clean" in shown
    assert "base=7,factor=2,max=60,jitter=full" in shown
    runs = cli.json("schedule", "next", "nightly", "-q", "mail", "-n", "3")
    assert len(runs) == 3
    assert all(re.search(r"T0[23]:[03]0:00\+0[12]:00$", one) for one in runs)

    assert cli.json("schedule", "remove", "nightly", "-q", "mail")["removed"] is True
    assert cli.json("schedule", "remove", "nightly", "-q", "mail")["removed"] is False
    assert cli.json("schedule", "list") == []


def test_schedule_is_paused_resumed_and_triggered(cli: Cli, queue: Queue[Any]) -> None:
    cli("schedule", "put", "often", "--every", "5m", "--paused")
    assert cli.json("schedule", "show", "often")["paused"] is True
    assert cli.json("schedule", "resume", "often")["paused"] is False
    assert cli.json("schedule", "pause", "often")["next_at"] is None
    assert "paused" in cli("schedule", "list")
    said = cli.json("schedule", "trigger", "often")
    (task,) = queue.peek()
    assert said == {"schedule": "often", "queue": "default", "task_id": str(task.id)}
    shown = cli.json("schedule", "show", "often")
    assert (shown["runs"], shown["last_run"]["status"]) == (1, "pending")
    assert "triggered" in cli("schedule", "show", "often")


def test_change_of_a_schedule_in_code_is_warned_of(cli: Cli, queue: Queue[Any]) -> None:
    declared = Tasks(app="billing")
    declared.task("ping", every=300)(lambda: None)
    Worker(queue, declared).run(burst=True)
    cli("schedule", "remove", "ping")
    assert "billing" in cli.stderr
    Worker(queue, declared).run(burst=True)
    assert cli.json("schedule", "put", "ping", "--every", "10m")["source"] == "api"
    assert "billing" in cli.stderr
    cli("schedule", "put", "ping", "--every", "20m")
    assert cli.stderr == ""
    cli("schedule", "remove", "ping")
    assert cli.stderr == ""


def test_malformed_schedule_can_be_put_again_and_removed(cli: Cli, queue: Queue[Any]) -> None:
    stored = core_of(queue).collections.database["microqueue_schedules"]
    for command in (["put", "broken", "--every", "5m"], ["remove", "broken"]):
        queue.schedules.put("broken", every=60)
        stored.update_one({"name": "broken"}, {"$unset": {"every_sec": 1}})
        cli("schedule", *command)
    assert stored.count_documents({}) == 0


def test_mistake_in_an_expression_is_one_line_with_its_place(cli: Cli) -> None:
    cli("schedule", "put", "bad", "--cron", "0 25 * * *", status=1)
    assert re.fullmatch(r"Error: .*character 3 \(hour\)\n", cli.stderr)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["put", "x"], 2),
        (["put", "x", "--cron", "@daily", "--every", "5m"], 2),
        (["put", "x", "--every", "5m", "--catch-up", "some"], 2),
        (["put", "x", "[1]", "--every", "5m"], 1),
        (["put", "x", "--every", "0.1s"], 1),
        (["put", "x", "--every", "5m", "--grace", "0s"], 1),
        (["put", "x", "--cron", "@daily", "--timezone", "Berlni"], 1),
        (["put", "x", "--every", "5m", "--timezone", "Europe/Berlin"], 1),
        (["show", "nothing"], 1),
        (["next", "nothing"], 1),
        (["pause", "nothing"], 1),
        (["resume", "nothing"], 1),
        (["trigger", "nothing"], 1),
    ],
)
def test_value_that_is_not_valid_changes_nothing(
    cli: Cli, queue: Queue[Any], arguments: list[str], status: int
) -> None:
    cli("schedule", *arguments, status=status)
    assert queue.schedules.list() == []


def test_each_command_tells_people_what_it_did(cli: Cli, queue: Queue[Any]) -> None:
    """The names and the outcome; their fields are in JSON."""
    assert cli.json("schedule", "put", "often", "--every", "5m", "--task", "ping")["task"] == "ping"
    assert "'often'" in cli("schedule", "pause", "often")
    assert queue.schedules.get("often").paused is True  # type: ignore[union-attr]  # It is there.
    assert "'often'" in cli("schedule", "resume", "often")
    assert queue.schedules.get("often").paused is False  # type: ignore[union-attr]  # It is there.
    runs = cli("schedule", "next", "often", "-n", "2").splitlines()
    expected = queue.schedules.next_runs("often", 2)
    assert [line.split()[1] for line in runs] == [one.isoformat() for one in expected]
    said = cli("schedule", "trigger", "often")
    (task,) = queue.peek()
    assert str(task.id) in said
    assert str(task.id) in cli("schedule", "show", "often")  # The last run.
    assert "'often'" in cli("schedule", "remove", "often")
    assert queue.schedules.list() == []
    assert "'often'" in cli("schedule", "remove", "often")  # There is none any more.


# Between two sweeps of a command


def fires_between_sweeps(queue: Queue[Any], command: list[str]) -> None:
    """Expect runs of a schedule from a command whose second sweep begins in an hour."""
    queue.schedules.put("often", every=1)
    process = subprocess.Popen([*command, "--every", "3600"], stdout=subprocess.DEVNULL)
    try:
        # One of them may be of the first sweep.
        wait_for(lambda: (found := queue.schedules.get("often")) and found.runs >= 3, 90)
    finally:
        process.terminate()
        process.wait(90)
    assert process.returncode == 0


@pytest.mark.measured
@pytest.mark.parametrize(
    "command", [[*PROGRAM, "sweep"], [sys.executable, SCRIPT]], ids=["command", "script"]
)
def test_repeated_sweep_fires_between_its_sweeps(
    database_uri: str, queue: Queue[Any], command: list[str]
) -> None:
    fires_between_sweeps(queue, [*command, "--uri", database_uri])


@pytest.mark.measured
def test_up_fires_between_its_sweeps(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path) as server, Queue[Any].from_uri(server.uri) as queue:
        fires_between_sweeps(
            queue, [*PROGRAM, "up", "--directory", str(tmp_path), "--no-dashboard"]
        )
