"""Type checkers find a typo in an option and a value of the wrong type."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each line with a comment is an error, with the code of mypy and the rule of pyright.
SNIPPETS = """
from datetime import timedelta
from typing import Any

from microqueue import AsyncQueue, EnqueueOptions, NewTask, Queue, QueueSettings, Tasks, Worker
from microqueue import Wroker  # attr-defined reportAttributeAccessIssue


def add(queue: Queue[Any], options: EnqueueOptions) -> None:
    queue.enqueue({}, priority=3, delay=1.5, expires_in=timedelta(hours=1), headers={"a": 1})
    queue.enqueue({}, **options)
    queue.enqueue({}, prioritty=3)  # call-arg reportCallIssue
    queue.enqueue({}, visibility_timeout="x")  # arg-type reportArgumentType
    queue.enqueue_many([{}], priority=3)
    queue.enqueue_many([{}], prioritty=3)  # call-arg reportCallIssue
    queue.enqueue_many([{}], max_attempts="x")  # arg-type reportArgumentType
    queue.promote_due()  # attr-defined reportAttributeAccessIssue


async def add_async(queue: AsyncQueue[Any], options: EnqueueOptions) -> None:
    await queue.enqueue({}, **options)
    await queue.enqueue({}, prioritty=3)  # call-arg reportCallIssue
    await queue.enqueue_many([{}], priority="x")  # arg-type reportArgumentType


NewTask(payload={}, delay=1.5, dedupe_key="a")
NewTask(payload={}, dedup_key="a")  # call-arg reportCallIssue
NewTask(payload={}, delay="x")  # arg-type reportArgumentType
QueueSettings(max_attempts=3, visibility_timeout=60, retention=None)
QueueSettings(max_attempt=3)  # call-arg reportCallIssue
QueueSettings(visibility_timeout="x")  # arg-type reportArgumentType
QueueSettings.from_environment(max_attempts=3)
QueueSettings.from_environment(max_attempt=3)  # call-arg reportCallIssue

tasks = Tasks()


@tasks.task()
def send(to: str) -> None: ...


send.options(priority=3, session=None)
send.options(prioritty=3)  # call-arg reportCallIssue
send.options(expires_in="x")  # arg-type reportArgumentType


def work(queue: Queue[Any]) -> None:
    Worker(queue, tasks, concurrency=4, timeout=30).run(burst=True)
    Worker(queue, tasks, concurency=4)  # call-arg reportCallIssue
    Worker(queue, tasks, timeout="x")  # arg-type reportArgumentType
"""


@pytest.fixture
def snippets(tmp_path: Path) -> Path:
    path = tmp_path / "snippets.py"
    path.write_text(SNIPPETS)
    return path


def expected(which: int) -> dict[int, str]:
    marks = re.compile(r"  # ([a-z-]+) (report\w+)$")
    lines = enumerate(SNIPPETS.split("\n"), 1)
    return {number: mark[which] for number, line in lines if (mark := marks.search(line))}


def errors(command: list[str], pattern: str) -> dict[int, str]:
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {int(one[1]): one[2] for one in re.finditer(pattern, result.stdout)}


def test_mypy_finds_wrong_options(snippets: Path) -> None:
    found = errors(
        ["mypy", "--strict", str(snippets)], r"snippets\.py:(\d+): error: .*\[([a-z-]+)\]"
    )
    assert found == expected(1)


def test_pyright_finds_wrong_options(snippets: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("pyright needs node")
    (snippets.parent / "pyrightconfig.json").write_text("{}")
    command = ["pyright", "--pythonpath", sys.executable, "--project", str(snippets.parent)]
    found = errors(command, r"snippets\.py:(\d+):\d+ - error: (?:.*\n)*?.*\((report\w+)\)")
    assert found == expected(2)
