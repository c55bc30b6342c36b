"""Commands use the database and collection that are given, and print which."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from microqueue import Queue, QueueSettings, Sweeper
from microqueue.embedded import running
from tests.acceptance.command_line import PROGRAM, Cli
from tests.acceptance.test_processes import Program
from tests.waiting import wait_for

JOBS = ("--collection", "jobs")


@pytest.fixture
def jobs(microqueue_database: Any) -> Queue[Any]:
    """A queue in another collection than the usual one."""
    return Queue(microqueue_database.jobs)


def test_tasks_are_added_and_looked_at_in_the_collection_that_is_named(
    cli: Cli, jobs: Queue[Any], queue: Queue[Any]
) -> None:
    cli("enqueue", "{}", "--id", "one", *JOBS)
    cli("--collection", "jobs", "enqueue", "{}", "--id", "two", "--max-attempts", "1")
    assert [task.id for task in jobs.peek()] == ["two", "one"]
    assert queue.peek() == []
    assert [task["id"] for task in cli.json("peek", *JOBS)] == ["two", "one"]
    assert cli.json("show", "one", *JOBS)["id"] == "one"
    assert cli.json("stats", *JOBS)["ready"] == 2
    assert [one["ready"] for one in cli.json("top", *JOBS)["queues"]] == [2]
    cli("cancel", "one", *JOBS)
    assert [one["id"] for one in cli.json("dlq", "list", *JOBS)["tasks"]] == ["one"]
    cli("dlq", "replay", "one", *JOBS)
    assert jobs.stats().ready == 2


def test_pause_holds_for_the_collection_that_is_named(
    cli: Cli, jobs: Queue[Any], queue: Queue[Any]
) -> None:
    said = cli("pause", *JOBS)
    assert "Run `microqueue resume -q default --collection jobs` to resume it." in said
    assert jobs.paused() is not None
    assert queue.paused() is None
    cli("resume", *JOBS)
    assert jobs.paused() is None


def test_sweep_heals_the_collection_that_is_named(cli: Cli, microqueue_database: Any) -> None:
    brief = QueueSettings(visibility_timeout=0.001)
    for collection in (microqueue_database.jobs, microqueue_database.tasks):
        queue: Queue[Any] = Queue(collection, settings=brief)
        queue.enqueue({})
        queue.pop()
        wait_for(lambda queue=queue: queue.stats().overdue == 1)  # type: ignore[misc]  # A lambda has no types.
    assert cli.json("sweep", *JOBS)["reclaimed"] == 1
    assert Queue[Any](microqueue_database).stats().overdue == 1


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_worker_works_on_all_its_queues_in_the_collection_that_is_named(
    tmp_path: Path, database_uri: str, microqueue_database: Any, kind: str
) -> None:
    program = Program(tmp_path, database_uri)
    program.path("app.py").write_text(f"{kind} handle(payload): ...\n", encoding="utf-8")
    names = ("mail", "bulk")
    queues: list[Queue[Any]] = [Queue(microqueue_database.jobs, name) for name in names]
    for queue in queues:
        queue.enqueue({})
    program.start("worker", "app:handle", "--burst", "-q", "mail", "-q", "bulk", *JOBS)
    assert program.status() == 0
    assert [queue.stats().done for queue in queues] == [1, 1]


def test_indexes_are_made_for_the_collection_that_is_named(
    cli: Cli, microqueue_database: Any
) -> None:
    cli("indexes", *JOBS)
    assert "ready" in microqueue_database.jobs.index_information()
    assert "tasks" not in microqueue_database.list_collection_names()


def test_up_sweeps_the_collection_that_is_named_and_names_it_in_commands(home: Path) -> None:
    command = [*PROGRAM, "up", "--every", "50ms", "--no-dashboard", *JOBS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        assert '{"hello": "world"}\' --collection jobs ' in lines[-1]
        with Queue[Any].from_uri(running(home), collection="jobs") as queue:
            queue.enqueue({}, task_id="brief", expires_in=0.01)
            wait_for(lambda: queue.stats().failed == 1)
    finally:
        process.terminate()
        process.communicate(timeout=90)
    assert process.returncode == 0


@pytest.mark.parametrize("name", ["", "a$b", "system.jobs"])
def test_name_that_no_collection_can_have_is_rejected(cli: Cli, name: str) -> None:
    cli("stats", "--collection", name, status=1)
    assert f"collection={name!r} is not valid: give the name of a collection" in cli.stderr


def test_doctor_says_first_where_it_looks(
    cli: Cli, jobs: Queue[Any], microqueue_database: Any, database_uri: str
) -> None:
    jobs.ensure_indexes()
    Sweeper(jobs).run_once()
    host = re.search(r"//([^/]+)/", database_uri)
    assert host is not None
    first = cli("doctor", *JOBS).splitlines()[0]
    place = f"collection 'jobs' of database {microqueue_database.name!r} at {host[1]}"
    assert first == f"✓ place: {place}"
    assert cli.json("doctor", *JOBS)["checks"][0]["detail"] == place
    assert "collection 'tasks' of" in cli("doctor").splitlines()[0]


def test_help_tells_which_database_and_collection_are_used(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = re.sub(r"[\s│]+", " ", cli("peek", "--help"))
    assert (
        "path names the database, as in mongodb://host/shop; without a path, it is microqueue."
        in (shown)
    )
    assert "Collection that holds the tasks. [default: tasks]" in shown
