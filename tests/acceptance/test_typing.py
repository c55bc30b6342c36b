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

from pyspark.sql import DataFrame

from microqueue import AsyncQueue, EnqueueOptions, NewTask, Queue, QueueSettings, Tasks
from microqueue import Topic, Worker
from microqueue import Wroker  # attr-defined reportAttributeAccessIssue
from microqueue.dashboard import DashboardOptions, dashboard
from microqueue.dashboard.server import DashboardServer
from microqueue.spark import write_tasks
from microqueue.worker import WorkerOptions


def add(queue: Queue[Any], options: EnqueueOptions) -> None:
    queue.enqueue({}, priority=3, delay=1.5, expires_in=timedelta(hours=1), headers={"a": 1})
    queue.enqueue({}, **options)
    queue.enqueue({}, prioritty=3)  # call-arg reportCallIssue
    queue.enqueue({}, visibility_timeout="x")  # arg-type reportArgumentType
    queue.enqueue({}, task_id=1, on_duplicate="replace")
    queue.enqueue({}, task_id=1, on_duplicate="x")  # arg-type reportArgumentType
    queue.enqueue({}, dedupe_key="k", dedupe_for=timedelta(hours=1))
    queue.enqueue({}, dedupe_key="k", dedupe_for="1h")  # arg-type reportArgumentType
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
NewTask(payload={}, on_duplicate="x")  # arg-type reportArgumentType
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
send.options(dedupe_key="k", on_duplicate="return")
send.options(dedupe_key="k", on_duplicate="x")  # arg-type reportArgumentType


tasks.task(priority=3, schedule="@daily", timezone="Europe/Berlin")(send)
tasks.task(prioritty=3)  # call-arg reportCallIssue
tasks.task(catch_up="x")  # arg-type reportArgumentType


def plan(queue: Queue[Any], topic: Topic) -> None:
    queue.schedules.put("nightly", cron="@daily", overlap="skip", priority=3)
    queue.schedules.put("nightly", cronn="@daily")  # call-arg reportCallIssue
    queue.schedules.put("nightly", every="x")  # arg-type reportArgumentType
    topic.bind(queue, "a.*", priority=3, delay=1.5)
    topic.bind(queue, prioritty=3)  # call-arg reportCallIssue
    topic.bind(queue, delay="x")  # arg-type reportArgumentType


def write(frame: DataFrame) -> None:
    write_tasks(frame, queue="mail", key="id", priority=3)
    write_tasks(frame, queue="mail", key="id", prioritty=3)  # call-arg reportCallIssue
    write_tasks(frame, queue="mail", key="id", delay="x")  # arg-type reportArgumentType


def work(queue: Queue[Any]) -> None:
    Worker(queue, tasks, concurrency=4, timeout=30).run(burst=True)
    Worker(queue, tasks, concurency=4)  # call-arg reportCallIssue
    Worker(queue, tasks, timeout="x")  # arg-type reportArgumentType
    WorkerOptions(timeout=30, poll_interval=0.5, weights={"mail": 2}, batch=None)
    WorkerOptions(timeot=30)  # call-arg reportCallIssue
    WorkerOptions(timeout="x")  # arg-type reportArgumentType


def connect(uri: str) -> None:
    Queue[Any].from_uri(uri, settings=QueueSettings(), maxPoolSize=5, tlsCAFile="ca.pem")
    Queue[Any].from_uri(uri, setings=3)  # call-arg reportCallIssue
    Queue[Any].from_uri(uri, maxPoolSize="x")  # arg-type reportArgumentType
    AsyncQueue[Any].from_uri(uri, serverSelectionTimeoutMS=500)
    AsyncQueue[Any].from_uri(uri, setings=3)  # call-arg reportCallIssue


def show(queue: Queue[Any]) -> None:
    dashboard(queue, token="a-long-random-secret", login_period=timedelta(minutes=5), tasks=tasks)
    dashboard(queue, tokn="a-long-random-secret")  # call-arg reportCallIssue
    dashboard(queue, page_limit="x")  # arg-type reportArgumentType
    DashboardServer(queue, host="127.0.0.1", hosts=["localhost"], read_only=True)
    DashboardServer(queue, prot=8080)  # call-arg reportCallIssue
    DashboardServer(queue, cache_sec="x")  # arg-type reportArgumentType
    DashboardOptions(login_period=300, hosts=["localhost"], token="a-long-random-secret")
    DashboardOptions(login_periode=300)  # call-arg reportCallIssue
    DashboardOptions(login_period="x")  # arg-type reportArgumentType
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


PLUGIN = "[mypy]\nplugins = pydantic.mypy\n"


@pytest.mark.parametrize("config", ["[mypy]\n", PLUGIN], ids=["plain", "with pydantic's plugin"])
def test_mypy_finds_wrong_options(snippets: Path, config: str) -> None:
    (snippets.parent / "mypy.ini").write_text(config)
    # Each configuration has a cache: with other plugins, mypy uses nothing of it.
    cache = ROOT / ".mypy_cache" / ("plugin" if config == PLUGIN else "plain")
    options = ["--config-file", str(snippets.parent / "mypy.ini"), "--cache-dir", str(cache)]
    command = ["mypy", "--strict", *options]
    found = errors([*command, str(snippets)], r"snippets\.py:(\d+): error: .*\[([a-z-]+)\]")
    assert found == expected(1)


def test_pyright_finds_wrong_options(snippets: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("pyright needs node")
    (snippets.parent / "pyrightconfig.json").write_text("{}")
    command = ["pyright", "--pythonpath", sys.executable, "--project", str(snippets.parent)]
    found = errors(command, r"snippets\.py:(\d+):\d+ - error: (?:.*\n)*?.*\((report\w+)\)")
    assert found == expected(2)
