"""The command ``wait`` and ``enqueue --wait``: results on stdout, and what the exit status says."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from microqueue import Queue, Task
from microqueue.masking import MASK
from tests.acceptance.command_line import PROGRAM, Cli
from tests.integration.queues import popped

PATIENT_SEC = 60


@contextmanager
def working(queue: Queue[Any], settle: Callable[[Task[Any]], object]) -> Iterator[None]:
    """Settle the next task of a queue, beside what the test does."""

    def work() -> None:
        task = queue.pop(wait=PATIENT_SEC)
        assert task is not None
        settle(task)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_wait_prints_the_result(cli: Cli, queue: Queue[Any]) -> None:
    queue.enqueue({}, task_id="photo")
    queue.mark_done(popped(queue), result={"width": 3, "password": "s3cret"})
    assert json.loads(cli("wait", "photo")) == {"width": 3, "password": MASK}
    assert json.loads(cli("wait", "photo", "--reveal"))["password"] == "s3cret"
    assert cli.json("wait", "photo")["result"]["width"] == 3


@pytest.mark.usefixtures("cli")
def test_wait_ends_when_the_task_is_done(queue: Queue[Any]) -> None:
    queue.enqueue({}, task_id=17)
    command = [*PROGRAM, "wait", "17", "--timeout", "1m"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        queue.mark_done(popped(queue), result=[1])
        said, _ = process.communicate(timeout=PATIENT_SEC)
    assert (process.returncode, json.loads(said)) == (0, [1])


def test_failed_task_has_its_own_status(cli: Cli, queue: Queue[Any]) -> None:
    queue.enqueue({}, task_id="photo")
    queue.mark_failure(popped(queue), "no such photo", code="gone")
    assert cli("wait", "photo", status=3) == ""
    assert "gone: no such photo" in cli.stderr
    assert json.loads(cli("wait", "photo", "--json", status=3))["error"]["code"] == "gone"


def test_task_that_is_not_finished_has_its_own_status(cli: Cli, queue: Queue[Any]) -> None:
    queue.enqueue({}, task_id="photo")
    for timeout in ("0", "100ms"):
        assert cli("wait", "photo", "--timeout", timeout, status=4) == ""
    assert "photo" in cli.stderr
    cli("wait", "nothing", status=1)


def test_enqueue_may_wait_for_the_result(cli: Cli, queue: Queue[Any]) -> None:
    with working(queue, lambda task: queue.mark_done(task, result=task.payload["n"] + 1)):
        assert cli("enqueue", '{"n": 1}', "--wait", "--timeout", "1m") == "2\n"
    with working(queue, lambda task: queue.mark_failure(task, "no", code="gone")):
        cli("enqueue", "{}", "--wait", status=3)
    cli("enqueue", "{}", "--wait", "--timeout", "0", status=4)
    assert queue.stats().ready == 1


@pytest.mark.parametrize(
    "options", [["--timeout", "1"], ["--many", "--wait"], ["--wait", "--timeout", "soon"]]
)
def test_options_that_do_not_fit_are_wrong_usage(
    cli: Cli, queue: Queue[Any], options: list[str]
) -> None:
    cli("enqueue", *options, stdin="{}", status=2)
    assert queue.peek() == []
