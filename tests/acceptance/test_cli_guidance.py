"""Errors and hints after a mistake, and what the command then leaves unchanged."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import microqueue
from microqueue import Queue, QueueSettings, TaskStatus
from tests.acceptance.command_line import PROGRAM, Cli, bury
from tests.waiting import wait_for, wait_until_over

OF_ONE_TASK = [["cancel"], ["show"], ["dlq", "show"], ["dlq", "replay"], ["dlq", "discard"]]
PATIENCE_SEC = 85


@pytest.fixture
def mail(microqueue_database: Any) -> Queue[Any]:
    return Queue(microqueue_database, "mail")


@pytest.fixture
def handler(tmp_path: Path) -> str:
    """The name of a handler in the test's own directory."""
    (tmp_path / "guided_handlers.py").write_text("def handle(payload): ...\n", encoding="utf-8")
    return "guided_handlers:handle"


def add_for(command: list[str], queue: Queue[Any], task_id: Any) -> None:
    """Put a task into a queue that this command is for."""
    if command[0] == "dlq":
        bury(queue, task_id=task_id)
    else:
        queue.enqueue({}, task_id=task_id)


# Tasks of another queue than the one given


@pytest.mark.parametrize("command", OF_ONE_TASK, ids=" ".join)
def test_task_of_another_queue_than_the_one_given_is_left_alone(
    cli: Cli, mail: Queue[Any], microqueue_database: Any, command: list[str]
) -> None:
    add_for(command, mail, "mail-1")
    before = list(microqueue_database.tasks.find())
    refusal = (
        "Error: queue='other' is not valid: task 'mail-1' is in queue 'mail'; "
        "give that queue, or leave --queue out\n"
    )
    assert cli(*command, "mail-1", "-q", "other", status=1) == ""
    assert cli.stderr == refusal
    cli("-q", "other", *command, "mail-1", status=1)
    assert cli.stderr == refusal
    assert list(microqueue_database.tasks.find()) == before


@pytest.mark.parametrize("given", [[], ["-q", "mail"]], ids=["without -q", "with its queue"])
@pytest.mark.parametrize("command", OF_ONE_TASK, ids=" ".join)
def test_task_is_found_in_any_queue_unless_one_is_given(
    cli: Cli, mail: Queue[Any], command: list[str], given: list[str]
) -> None:
    add_for(command, mail, "mail-1")
    cli(*command, "mail-1", *given)
    outcomes = {
        "cancel": TaskStatus.FAILED,
        "show": TaskStatus.PENDING,
        "dlq show": TaskStatus.FAILED,
        "dlq replay": TaskStatus.PENDING,
        "dlq discard": None,
    }
    found = mail.get("mail-1")
    assert (found and found.status) == outcomes[" ".join(command)]


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_one_letter_of_another_queue_keeps_all_named_ones_where_they_are(
    cli: Cli, mail: Queue[Any], queue: Queue[Any], verb: str
) -> None:
    bury(mail, task_id="mail-1")
    bury(queue, task_id="stray")
    cli("dlq", verb, "mail-1", "stray", "-q", "mail", status=1)
    assert "task 'stray' is in queue 'default'" in cli.stderr
    assert (mail.dead_letters.stats().total, queue.dead_letters.stats().total) == (1, 1)


def test_given_queue_tells_two_ids_apart_that_are_typed_alike(
    cli: Cli, mail: Queue[Any], queue: Queue[Any]
) -> None:
    queue.enqueue({"stored": "as a number"}, task_id=17)
    mail.enqueue({"stored": "as text"}, task_id="17")
    assert cli.json("show", "17", "-q", "default")["payload"] == {"stored": "as a number"}
    assert cli.json("show", "17", "-q", "mail")["payload"] == {"stored": "as text"}


def test_unknown_id_is_not_said_to_be_in_another_queue(cli: Cli, mail: Queue[Any]) -> None:
    mail.enqueue({}, task_id="mail-1")
    cli("show", "mail-2", "-q", "other", status=1)
    assert cli.stderr == "Error: there is no task 'mail-2'\n"


def test_empty_list_of_dead_letters_names_the_other_queues(
    cli: Cli, queue: Queue[Any], mail: Queue[Any]
) -> None:
    queue.enqueue({})
    bury(mail)
    mistyped = "No dead letters in queue 'mial'. Other queues: default, mail (use -q).\n"
    assert cli("dlq", "list", "-q", "mial") == mistyped
    empty = "No dead letters in queue 'default'. Other queues: mail (use -q).\n"
    assert cli("dlq", "list", "-q", "default") == empty
    assert "Other queues" not in cli("dlq", "list", "-q", "mail")
    nothing = {"tasks": [], "next_cursor": None, "queues": ["mial"]}
    assert cli.json("dlq", "list", "-q", "mial") == nothing


# Pauses


def test_pause_prints_the_command_that_resumes(cli: Cli, mail: Queue[Any]) -> None:
    assert "Run `microqueue resume -q mail` to resume it." in cli("pause", "-q", "mail")
    assert cli("resume", "-q", "mail") == "Queue 'mail' resumed.\n"
    assert mail.paused() is None
    assert "Run `microqueue resume -q default` to resume it." in cli("pause")
    assert "Run `microqueue resume -q 'my mail'` to resume it." in cli("pause", "-q", "my mail")


def test_pause_keeps_its_start_and_its_reason_until_another_is_given(
    cli: Cli, mail: Queue[Any]
) -> None:
    first = cli.json("pause", "-q", "mail", "--reason", "moving house")
    again = cli.json("pause", "-q", "mail")
    assert again == first
    assert again["reason"] == "moving house"
    other = cli.json("pause", "-q", "mail", "--reason", "moved")
    assert other == {**first, "reason": "moved"}
    cli("resume", "-q", "mail")
    assert cli.json("pause", "-q", "mail")["reason"] is None


def test_stats_tell_that_a_queue_is_paused_since_when_and_why(
    cli: Cli, mail: Queue[Any], microqueue_database: Any
) -> None:
    mail.enqueue({})
    assert cli.json("stats", "-q", "mail")["paused"] is None
    assert "paused" not in cli("stats", "-q", "mail")
    pause = cli.json("pause", "-q", "mail", "--reason", "moving\nhouse")
    assert cli.json("stats", "-q", "mail")["paused"] == pause
    assert set(pause) == {"queue", "paused_at", "reason"}
    later = {"$dateSubtract": {"startDate": "$paused_at", "unit": "hour", "amount": 2}}
    microqueue_database.microqueue_pauses.update_one({}, [{"$set": {"paused_at": later}}])
    heading = cli("stats", "-q", "mail").splitlines()[0]
    assert re.fullmatch(r"queue mail +tasks +paused 2 h ago: moving house *", heading)
    assert "paused" not in cli("stats", "-q", "default")  # Of another queue.
    cli("resume", "-q", "mail")
    cli("pause", "-q", "mail")
    heading = cli("stats", "-q", "mail").splitlines()[0]
    assert re.fullmatch(r"queue mail +tasks +paused (now|[^:]* ago) *", heading)


@pytest.mark.measured
def test_watched_stats_tell_that_a_queue_is_paused(database_uri: str, mail: Queue[Any]) -> None:
    mail.pause()
    command = [*PROGRAM, "stats", "--watch", "--every", "0.05", "-q", "mail", "--uri", database_uri]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(" failed=0 paused\n")
        mail.resume()
        while process.stdout.readline().endswith(" paused\n"):
            assert process.poll() is None
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_SEC)
    assert process.returncode == 0


@pytest.mark.measured
@pytest.mark.parametrize("processes", ["1", "2"])
def test_worker_of_a_paused_queue_says_at_a_terminal_why_it_idles(
    cli: Cli, mail: Queue[Any], handler: str, tmp_path: Path, processes: str
) -> None:
    def work() -> str:
        command = ["worker", handler, "--burst", "--processes", processes]
        result = subprocess.run(
            [*PROGRAM, *command, "-q", "mail", "-q", "other"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_SEC,
            env={
                **os.environ,
                "FORCE_COLOR": "1",  # As at a terminal.
                "PYTHONPATH": str(Path(microqueue.__file__).parents[1]),
            },
        )
        return result.stderr

    mail.enqueue({})
    cli("pause", "-q", "mail", "--reason", "moving house")
    cli("pause", "-q", "elsewhere")
    said = work()
    hint = "Queue 'mail' is paused (moving house); run `microqueue resume -q mail`."
    assert said.count(hint) == 1
    assert "elsewhere" not in said
    assert mail.stats().ready == 1
    cli("resume", "-q", "mail")
    assert "is paused" not in work()
    assert mail.stats().done == 1


# Options without effect are rejected


@pytest.mark.parametrize(
    "command",
    [
        ["stats"],
        ["doctor"],
        ["sweep"],
        ["top"],
        ["enqueue", "{}"],
        ["worker", "builtins:print", "--burst"],
    ],
    ids=" ".join,
)
def test_empty_address_is_rejected_instead_of_using_another_server(
    cli: Cli, queue: Queue[Any], command: list[str], microqueue_database: Any
) -> None:
    cli(*command, "--uri", "", status=1)
    assert cli.stderr == (
        "Error: uri='' is not valid: give a string, as in 'mongodb://localhost:27017'\n"
    )
    assert microqueue_database.list_collection_names() == []


def test_up_takes_no_empty_uri_either(tmp_path: Path) -> None:
    cli = Cli()
    later = ["--every", "0"]  # This would be refused later on.
    cli("up", "--uri", "", "--directory", str(tmp_path / "home"), *later, status=1)
    assert "leave --uri out" in cli.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["backoff"],
        ["dashboard", "--port", "70000"],  # A port that would be refused later on.
        ["up", "--every", "0"],  # As would be this pause.
    ],
    ids=lambda command: command[0],
)
def test_queue_is_rejected_where_it_would_have_no_effect(cli: Cli, command: list[str]) -> None:
    for arguments in ([*command, "-q", "x"], ["-q", "x", *command]):
        cli(*arguments, status=1)
        assert re.fullmatch(r"Error: queue='x' is not valid: .*; leave --queue out\n", cli.stderr)


# The sweeper


def test_doctor_misses_the_sweeper_and_fails_once_a_lease_has_expired(
    cli: Cli, microqueue_database: Any
) -> None:
    settings = QueueSettings(visibility_timeout=0.001)
    queue = Queue[Any](microqueue_database, settings=settings)
    queue.enqueue({})
    advised = cli("doctor")
    assert "! sweeper: no sweep so far\n  keep one running (microqueue sweep --every" in advised
    assert queue.pop() is not None
    wait_until_over(queue)
    failed = cli("doctor", status=1)
    assert "✗ sweeper: no sweep so far; expired leases: 1\n  keep one running" in failed
    cli("sweep")
    assert re.search(r"^✓ sweeper: last sweep \d+ s ago$", cli("doctor"), re.MULTILINE)


# As a separate process


@pytest.mark.measured
def test_package_can_be_run_as_a_module() -> None:
    command = [sys.executable, "-m", "microqueue", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"microqueue {microqueue.__version__}\n"


@pytest.mark.measured
def test_up_ends_with_an_error_when_its_server_is_killed_and_keeps_the_tasks(home: Path) -> None:
    cli = Cli()
    process = subprocess.Popen(
        [*PROGRAM, "up", "--every", "1h", "--dashboard-port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        announced = json.loads(process.stdout.readline())
        cli("enqueue", "{}", "--id", "kept")
        wait_for(lambda: cli.json("top")["last_sweep"], what="the first sweep")
        os.kill(announced["pid"], signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_SEC)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1
    assert errors == (
        f"Error: MongoDB has stopped; see its log in {home.resolve()}. The tasks are kept: "
        "run `microqueue up` again\n"
    )
    assert cli.json("show", "kept")["status"] == "pending"
