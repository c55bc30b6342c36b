"""Commands that make dead letters call the hooks of ``--hooks``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from microqueue import Queue
from microqueue.core import core_of
from tests.acceptance.command_line import Cli
from tests.waiting import wait_until_over

MODULE = """
from microqueue import Fail, Hooks, Tasks

class Noting(Hooks):
    def __init__(self, name="class"):
        self.name = name

    def on_dead_letter(self, letter):
        with open("letters", "a") as letters:
            print(self.name, letter.id, letter.error.code, letter.source, file=letters)

hooks = Noting("instance")
several = [Noting("first"), Noting]
number = 5

def fail(payload):
    raise Fail("no", code="own")

async def fail_async(payload):
    raise Fail("no", code="own")

tasks = Tasks()

@tasks.task()
def plain(context):
    context.queue.cancel(context.queue.enqueue({}, delay=60).id)

mixed = Tasks()

@mixed.task(name="plain")
def plain_too(context):
    context.queue.cancel(context.queue.enqueue({}, delay=60).id)

@mixed.task()
async def coroutine(context):
    await context.queue.cancel((await context.queue.enqueue({}, delay=60)).id)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with a module of hooks."""
    (tmp_path / "alerts.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("alerts", None)


def letters(project: Path) -> list[str]:
    file = project / "letters"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def test_cancel(cli: Cli, queue: Queue[Any], project: Path) -> None:
    queue.enqueue({}, task_id="one")
    cli("cancel", "one", "--hooks", "alerts:hooks")
    assert letters(project) == ["instance one cancelled command"]


def test_repair(cli: Cli, queue: Queue[Any], project: Path) -> None:
    queue.enqueue({}, task_id="one")
    core_of(queue).collections.tasks.update_one({"_id": "one"}, {"$set": {"expires_at": "soon"}})
    cli("doctor", "--repair", "--apply", "--yes", "--hooks", "alerts:hooks")
    assert letters(project) == ["instance one invalid_task command"]


def test_sweep(cli: Cli, queue: Queue[Any], project: Path) -> None:
    queue.enqueue({}, task_id="one", max_attempts=1, visibility_timeout=0.001)
    assert queue.pop() is not None
    wait_until_over(queue)
    cli("sweep", "--hooks", "alerts:Noting")
    assert letters(project) == ["class one lease_expired sweeper"]


@pytest.mark.parametrize("handler", ["fail", "fail_async"])
def test_worker(cli: Cli, queue: Queue[Any], project: Path, handler: str) -> None:
    queue.enqueue({}, task_id="one")
    cli("worker", f"alerts:{handler}", "--burst", "--hooks", "alerts:several")
    assert letters(project) == ["first one own worker", "class one own worker"]


@pytest.mark.parametrize(
    ("handler", "name"), [("tasks", "plain"), ("mixed", "plain"), ("mixed", "coroutine")]
)
@pytest.mark.parametrize("place", ["first", "second"])
def test_queue_of_a_handler(
    cli: Cli, queue: Queue[Any], project: Path, handler: str, name: str, place: str
) -> None:
    tasks = core_of(queue).collections.tasks
    Queue[Any](tasks, place).enqueue({}, name=name)
    queues = ("--queue", "first", "--queue", "second")
    cli("worker", f"alerts:{handler}", "--burst", *queues, "--hooks", "alerts:hooks")
    (letter,) = letters(project)
    assert letter.split()[2:] == ["cancelled", "command"]


def test_the_variable(
    cli: Cli, queue: Queue[Any], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICROQUEUE_HOOKS", "alerts:hooks")
    queue.enqueue({}, task_id="one")
    cli("cancel", "one")
    assert letters(project) == ["instance one cancelled command"]
    assert "MICROQUEUE_HOOKS" not in cli.stderr


@pytest.mark.parametrize("reference", ["alerts", "alerts:missing", "alerts:number", "gone:hooks"])
@pytest.mark.parametrize("command", ["sweep", "cancel one", "worker alerts:fail --burst"])
def test_hooks_that_cannot_be_used_are_rejected_before_anything_is_done(
    cli: Cli, queue: Queue[Any], reference: str, command: str
) -> None:
    queue.enqueue({}, task_id="one")
    cli(*command.split(), "--hooks", reference, status=1)
    assert cli.stderr.startswith(f"Error: hooks={reference!r} is not valid: ")
    assert queue.stats().ready == 1
