"""Commands that print tasks mask what the dashboard masks, unless told to reveal it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from microqueue import Queue
from microqueue.masking import MASK
from tests.acceptance.command_line import Cli

SECRET = "sesame"


@pytest.fixture
def letter(queue: Queue[Any]) -> str:
    """A dead letter that has secrets wherever a task may have one."""
    headers = {"authorization": f"Bearer {SECRET}", "trace": "abc"}
    queue.enqueue(
        {"user": "ada", "db": {"password": SECRET}, "list": [{"name": "token", "value": SECRET}]},
        task_id="secretive",
        headers=headers,
    )
    task = queue.pop()
    assert task is not None
    queue.mark_retry(task, f"login failed: password={SECRET}", delay=0)
    task = queue.pop()
    assert task is not None
    queue.mark_failure(task, f"no way to mongodb://ada:{SECRET}@db/", code="lost")
    return "secretive"


COMMANDS = [["show", "secretive"], ["dlq", "show", "secretive"], ["peek"], ["dlq", "list"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_secrets_are_masked_unless_revealed(cli: Cli, letter: str, command: list[str]) -> None:
    for form in ([], ["--json"]):
        masked = cli(*command, *form)
        assert SECRET not in masked + cli.stderr
        assert MASK in masked
        assert SECRET in cli(*command, *form, "--reveal")


def test_what_is_no_secret_is_shown(cli: Cli, letter: str) -> None:
    task = cli.json("show", letter)
    assert task["payload"]["user"] == "ada"
    assert task["payload"]["db"] == {"password": MASK}
    assert task["headers"] == {"authorization": MASK, "trace": "abc"}
    assert task["error"]["code"] == "lost"
    assert [one["error"]["message"] for one in task["history"]] == [
        f"login failed: password={MASK}",
        f"no way to mongodb://{MASK}@db/",
    ]
    revealed = cli.json("show", letter, "--reveal")
    assert revealed["payload"]["db"] == {"password": SECRET}


def test_results_progress_and_tokens_of_leases_are_masked(
    cli: Cli, queue: Queue[Any], microqueue_database: Any
) -> None:
    queue.enqueue({}, task_id="held")
    held = queue.pop()
    assert held is not None
    assert held.lease is not None
    progress = {"fraction": 0.5, "message": f"token={SECRET}", "at": held.created_at}
    microqueue_database.tasks.update_one({"_id": "held"}, {"$set": {"progress": progress}})
    assert cli.json("show", "held")["progress"]["message"] == f"token={MASK}"
    assert cli.json("show", "held")["lease"]["token"] == MASK
    assert cli.json("show", "held", "--reveal")["lease"]["token"] == held.lease.token
    queue.mark_done(held, result={"api_key": SECRET})
    assert cli.json("show", "held")["result"] == {"api_key": MASK}
    assert SECRET not in cli("show", "held")


def test_commands_that_change_a_task_print_no_secret(cli: Cli, queue: Queue[Any]) -> None:
    payload = json.dumps({"password": SECRET})
    added = cli.json("enqueue", payload, "--id", "one")
    again = cli.json("enqueue", payload, "--id", "one", "--if-absent")
    many = cli.json("enqueue", "--many", stdin=payload)
    cancelled = cli.json("cancel", "one")
    for task in (added, again, *many, cancelled):
        assert task["payload"] == {"password": MASK}
    stored = queue.get("one")
    assert stored is not None
    assert stored.payload == {"password": SECRET}


def test_show_prints_the_traceback_with_secrets_masked(cli: Cli, queue: Queue[Any]) -> None:
    queue.enqueue({}, task_id="failing")
    task = queue.pop()
    assert task is not None
    try:
        raise ValueError(f"\x1b[31mboom, token={SECRET}")
    except ValueError as exc:
        queue.mark_failure(task, exc)
    for command in ("show", "dlq show"):
        lines = cli(*command.split(), "failing", "--reveal").splitlines()
        start = lines.index("Traceback")
        assert lines[start + 1] == "Traceback (most recent call last):"
        end = lines.index("History") - 2
        assert lines[end] == f"ValueError: \\x1b[31mboom, token={MASK}"
    assert cli.json("show", "failing")["error"]["traceback"].endswith(f"token={MASK}")
    error = next(line for line in lines if line.startswith("error"))
    assert error.count("ValueError") == 1


def test_commands_mask_without_the_extra_of_the_dashboard(letter: str, database_uri: str) -> None:
    code = (
        "import sys; sys.modules['fastapi'] = sys.modules['uvicorn'] = None; "
        "from microqueue.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "show", letter, "--json", "--uri", database_uri]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["payload"]["db"] == {"password": MASK}
