"""Commands see only the settings of the environment; a service may set others in its code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from microqueue import Queue, QueueSettings
from microqueue.cli import app as cli_app
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from tests.waiting import wait_until_over

HANDLERS = """
def handle(payload):
    raise RuntimeError("no")

async def handle_async(payload):
    raise RuntimeError("no")
"""


@pytest.fixture(autouse=True)
def service(database_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICROQUEUE_URI", database_uri)
    (tmp_path / "service_handlers.py").write_text(HANDLERS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(cli_app.app, list(arguments))
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout


def run_json(*arguments: str, status: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", status=status))


# The retention


def kept_sec(database: Any) -> float | None:
    seconds: float | None = database.microqueue_locks.find_one("schema:tasks")["retention_sec"]
    return seconds


@pytest.fixture
def keeper(microqueue_database: Any) -> Queue[Any]:
    """The queue of a service that keeps its done tasks for good."""
    queue: Queue[Any] = Queue(microqueue_database, settings=QueueSettings(retention=None))
    queue.ensure_indexes()
    return queue


@pytest.mark.parametrize(
    "command",
    [
        ("worker", "service_handlers:handle", "--burst"),
        ("worker", "service_handlers:handle_async", "--burst"),
        ("indexes",),
        ("sweep",),
        ("doctor",),
    ],
)
def test_command_leaves_the_retention_of_a_service_alone(
    keeper: Queue[Any], microqueue_database: Any, command: tuple[str, ...]
) -> None:
    run(*command)
    assert kept_sec(microqueue_database) is None


def test_supervisor_leaves_the_retention_alone(
    keeper: Queue[Any], microqueue_database: Any
) -> None:
    command = ("worker", "service_handlers:handle", "--burst", "--processes", "2")
    subprocess.run([sys.executable, "-m", "microqueue.cli", *command], check=True, timeout=150)
    assert kept_sec(microqueue_database) is None


def test_up_leaves_the_retention_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with EmbeddedServer.start(home) as server, Queue[Any].from_uri(server.uri) as queue:
        settings = QueueSettings(retention=None)
        Queue[Any](core_of(queue).collections.tasks, settings=settings).ensure_indexes()
        command = ["up", "--directory", str(home), "--no-dashboard", "--every", "0.1", "--json"]
        process = subprocess.Popen(
            [sys.executable, "-m", "microqueue.cli", *command], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["reused"] is True
            assert kept_sec(core_of(queue).collections.database) is None
        finally:
            process.terminate()
            process.communicate(timeout=90)


# Indexes


DEFAULT_INDEXES = {"_id_", "ready", "deadline", "failed", "browse"}


@pytest.mark.parametrize(
    "command",
    [
        ("worker", "service_handlers:handle", "--burst"),
        ("worker", "service_handlers:handle_async", "--burst"),
        ("worker", "service_handlers:handle", "--burst", "--processes", "2"),
        ("sweep",),
        ("enqueue", "{}"),
    ],
)
def test_command_creates_no_index_that_only_dedupe_keys_need(
    microqueue_database: Any, command: tuple[str, ...]
) -> None:
    subprocess.run([sys.executable, "-m", "microqueue.cli", *command], check=True, timeout=150)
    Queue[Any](microqueue_database).enqueue({})
    assert set(microqueue_database.tasks.index_information()) == DEFAULT_INDEXES
    assert "microqueue_dedupe_keys" not in microqueue_database.list_collection_names()


def test_up_creates_no_index_that_only_dedupe_keys_need(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with EmbeddedServer.start(home) as server, Queue[Any].from_uri(server.uri) as queue:
        command = ["up", "--directory", str(home), "--no-dashboard", "--every", "0.1", "--json"]
        process = subprocess.Popen(
            [sys.executable, "-m", "microqueue.cli", *command], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["reused"] is True
            database = core_of(queue).collections.database
            assert set(database.tasks.index_information()) == DEFAULT_INDEXES
            assert "microqueue_dedupe_keys" not in database.list_collection_names()
        finally:
            process.terminate()
            process.communicate(timeout=90)


def test_indexes_show_the_retention_and_change_it_when_told(
    keeper: Queue[Any], microqueue_database: Any
) -> None:
    assert "Done tasks are kept forever.\n" in run("indexes")
    told = run("indexes", "--retention", "30d")
    assert "Done tasks are kept for 30 days (before: forever).\n" in told
    assert kept_sec(microqueue_database) == timedelta(days=30).total_seconds()
    assert "Done tasks are kept for 30 days.\n" in run("indexes", "--retention", "30d")
    found = run_json("indexes", "--retention", "forever")
    assert (found["retention_sec"], found["former_retention_sec"]) == (None, 30 * 86_400)
    assert kept_sec(microqueue_database) is None
    run("indexes", "--retention", "-1", status=2)
    run("indexes", "--retention", "a while", status=2)
    assert kept_sec(microqueue_database) is None


def test_indexes_can_say_that_nothing_is_kept(keeper: Queue[Any]) -> None:
    assert "Done tasks are deleted at once (before: forever).\n" in run(
        "indexes", "--retention", "0"
    )
    found = run_json("indexes")
    assert found["retention_sec"] == 0
    keeper.enqueue({})
    same = Queue[Any](core_of(keeper).collections.tasks)
    task = same.pop()
    assert task is not None
    same.mark_done(task)
    assert same.get(task.id) is None


def test_indexes_that_are_new_have_the_retention_that_was_told(microqueue_database: Any) -> None:
    assert "Done tasks are kept for 2 hours.\n" in run("indexes", "--retention", "2h")
    assert kept_sec(microqueue_database) == 7200


def test_doctor_minds_only_a_retention_that_the_environment_says(
    keeper: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "✓ retention: done tasks are kept forever\n" in run("doctor")
    monkeypatch.setenv("MICROQUEUE_RETENTION", "5400")
    said = run("doctor", status=1)
    assert "✗ retention: done tasks are kept forever, but the settings say for 90 minutes\n" in said
    advice = re.search(r"run: microqueue (indexes --retention \S+)", said)
    assert advice is not None
    run(*advice.group(1).split())
    assert "✓ retention: done tasks are kept for 90 minutes\n" in run("doctor")


# The dead letters


@pytest.fixture
def letter(microqueue_database: Any) -> str:
    """The id of a dead letter that a service keeps apart."""
    settings = QueueSettings(dead_letters="collection")
    queue: Queue[Any] = Queue(microqueue_database, settings=settings)
    queue.enqueue({"n": 1}, task_id="letter")
    task = queue.pop()
    assert task is not None
    queue.mark_failure(task, "boom", code="boom")
    assert microqueue_database.tasks.count_documents({}) == 0
    return "letter"


def test_every_command_sees_letters_that_a_service_keeps_apart(letter: str) -> None:
    assert [task["id"] for task in run_json("dlq", "list")["tasks"]] == [letter]
    assert run_json("stats")["failed"] == 1
    assert run_json("show", letter)["status"] == "failed"
    assert run_json("top")["queues"][0]["failed"] == 1
    assert run_json("dlq", "replay", letter)["replayed"] == 1
    assert run_json("show", letter)["status"] == "pending"


def test_environment_that_says_where_letters_are_is_taken_by_its_word(
    letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICROQUEUE_DEAD_LETTERS", "status")
    assert run_json("stats")["failed"] == 0


def test_collection_without_letters_of_its_own_stays_without(microqueue_database: Any) -> None:
    run("worker", "service_handlers:handle", "--burst")
    run("sweep")
    run("doctor")
    assert "tasks_dlq" not in microqueue_database.list_collection_names()


@pytest.mark.parametrize("handler", ["handle", "handle_async"])
def test_worker_moves_the_letters_of_all_its_queues(
    letter: str, microqueue_database: Any, handler: str
) -> None:
    for name in ("one", "two"):
        Queue[Any](microqueue_database, name).enqueue({}, max_attempts=1)
    run("worker", f"service_handlers:{handler}", "--burst", "-q", "one", "-q", "two")
    assert microqueue_database.tasks.count_documents({}) == 0
    assert microqueue_database.tasks_dlq.count_documents({"queue": {"$in": ["one", "two"]}}) == 2


def test_sweep_moves_letters_from_then_on_when_a_service_keeps_them_apart(
    database_uri: str, microqueue_database: Any
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.enqueue({}, expires_in=0.001)
    wait_until_over(queue)
    command = ["sweep", "--every", "0.05", "--json", "--uri", database_uri]
    process = subprocess.Popen(
        [sys.executable, "-m", "microqueue.cli", *command], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert (first["expired"], first["moved"]) == (1, 0)
        settings = QueueSettings(dead_letters="collection")
        Queue[Any](microqueue_database, settings=settings).ensure_indexes()
        # Those of before may be many: the sweeper goes on while the indexes are made.
        reports = (json.loads(process.stdout.readline()) for _ in range(10_000))
        assert any(report["moved"] for report in reports)
    finally:
        process.terminate()
        process.communicate(timeout=90)


@pytest.mark.measured
def test_sweep_repeats_until_its_server_is_available() -> None:
    command = ["sweep", "--every", "0.01", "--uri", "mongodb://127.0.0.1:1/?directConnection=true"]
    process = subprocess.Popen(
        [sys.executable, "-m", "microqueue.cli", *command],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MICROQUEUE_SERVER_TIMEOUT": "0.1"},
    )
    try:
        assert process.stderr is not None
        for _ in range(2):
            assert "no MongoDB server answered in time" in process.stderr.readline()
    finally:
        process.terminate()
        process.communicate(timeout=90)


def test_doctor_says_where_letters_are_when_the_settings_do_not(
    letter: str, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run("doctor")
    assert "! dead letters: tasks_dlq exists, so commands use it; " in said
    assert "MICROQUEUE_DEAD_LETTERS=collection" in said
    assert "✓ indexes of tasks_dlq: all exist\n" in said
    monkeypatch.setenv("MICROQUEUE_DEAD_LETTERS", "status")
    assert "! dead letters: kept in tasks by the settings, but tasks_dlq exists too\n" in run(
        "doctor"
    )
    monkeypatch.setenv("MICROQUEUE_DEAD_LETTERS", "collection")
    assert "dead letters:" not in run("doctor")
