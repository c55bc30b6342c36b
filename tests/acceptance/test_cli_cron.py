"""What commands print without a terminal: in cron jobs and scripts."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import microqueue
from microqueue import BackoffPolicy, NewTask, Queue, QueueSettings
from microqueue import sweeper as sweeper_core
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from microqueue.operations import maintenance
from microqueue.operations.call import Operation
from tests.acceptance.command_line import PROGRAM, Cli, bury
from tests.waiting import wait_for, wait_until_over

REPORT = r"Swept in .*: 1 reclaimed\.\n"


@pytest.fixture
def stuck(microqueue_database: Any) -> Queue[Any]:
    """A queue with a task whose lease has expired."""
    queue: Queue[Any] = Queue(microqueue_database, settings=QueueSettings(visibility_timeout=0.001))
    queue.enqueue({}, backoff=BackoffPolicy(base_sec=600, jitter="none"))  # Not due in this test.
    queue.pop()
    wait_for(lambda: queue.stats().overdue == 1)
    return queue


# The embedded server


def embedded_note(home: Path) -> str:
    return (
        f"Neither --uri nor MICROQUEUE_URI is set: using the embedded MongoDB in "
        f"{home.resolve()}.\n"
    )


def test_use_of_the_embedded_server_is_told_where_there_is_no_terminal(home: Path) -> None:
    cli = Cli()
    assert "no changes" in cli("sweep", "--once")
    assert cli.stderr == embedded_note(home)
    assert cli.json("stats")["ready"] == 0
    assert cli.stderr == embedded_note(home)
    with EmbeddedServer.start(home) as server:  # One that runs is not the wanted one, either.
        cli("sweep", "--quiet")
        assert cli.stderr == embedded_note(home)
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
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(Path(microqueue.__file__).parents[1])},
    )
    first, *others = result.stderr.splitlines(keepends=True)
    assert first == embedded_note(home)
    assert "Neither" not in "".join(others)


def test_json_log_holds_the_use_of_the_embedded_server(home: Path) -> None:
    cli = Cli()
    cli("sweep", "--log-format", "json")
    line = json.loads(cli.stderr)
    assert (line["level"], line["message"]) == ("warning", embedded_note(home).strip())
    assert line["embedded"] == str(home.resolve())


def test_terminal_is_told_only_of_a_server_that_is_started(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # As at a terminal.
    cli = Cli()
    cli("stats")
    assert f"Starting the embedded MongoDB in {home.resolve()} for this command" in cli.stderr
    assert "Neither" not in cli.stderr
    with EmbeddedServer.start(home):
        cli("stats")
        assert cli.stderr == ""


# Buried tasks


def test_sweep_names_what_it_buried(cli: Cli, microqueue_database: Any) -> None:
    queue = Queue[Any](microqueue_database)
    queue.enqueue_many([NewTask(payload={}, task_id=n, expires_in=0.001) for n in range(12)])
    queue.enqueue({}, task_id="spent", max_attempts=2, delay=0.001)
    microqueue_database.tasks.update_one({"_id": "spent"}, {"$set": {"attempts": 2}})
    wait_until_over(queue)
    said = cli("sweep", "--lock-ttl", "20s")
    assert "max_attempts: spent" in said
    assert "2 more" in said
    assert "max_attempts: spent" in cli("doctor")
    queue.enqueue({}, task_id="late", max_attempts=2, delay=0.001)
    microqueue_database.tasks.update_one({"_id": "late"}, {"$set": {"attempts": 2}})
    wait_until_over(queue)
    report = cli.json("sweep")
    assert report["buried_tasks"] == {"max_attempts": {"count": 1, "ids": ["late"]}}


def test_sweep_holds_its_lock_for_as_long_as_told(
    cli: Cli, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifetimes: list[timedelta] = []
    acquire = maintenance.acquire_lock

    def acquired(*arguments: Any, lifetime: timedelta, **options: Any) -> Operation[bool]:
        lifetimes.append(lifetime)
        return acquire(*arguments, lifetime=lifetime, **options)

    monkeypatch.setattr(maintenance, "acquire_lock", acquired)
    cli("sweep", "--lock-ttl", "7s")
    monkeypatch.setenv("MICROQUEUE_LOCK_TTL", "8s")
    cli("sweep")
    assert lifetimes == [timedelta(seconds=7), timedelta(seconds=8)]
    cli("sweep", "--lock-ttl", "0", status=1)
    assert "lock_ttl" in cli.stderr


# Quiet sweeps


def test_quiet_sweep_prints_only_what_it_did(cli: Cli, stuck: Queue[Any]) -> None:
    assert re.fullmatch(REPORT, cli("sweep", "--quiet"))
    assert cli("sweep", "--quiet") == ""
    assert cli("sweep", "--quiet", "--json") == ""
    assert cli.stderr == ""


def test_quiet_sweep_tells_what_failed_on_stderr(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Operation[None]:
        raise microqueue.OperationFailed("out of order")
        yield

    jobs = {**sweeper_core.JOB_TABLE, "promote_due": sweeper_core.Job(("promoted",), broken)}
    monkeypatch.setattr(sweeper_core, "JOB_TABLE", jobs)
    cli("sweep", "--quiet", status=1)
    assert "Error: promote_due: out of order" in cli.stderr
    assert json.loads(cli("sweep", "--quiet", "--json", status=1))["errors"]


def test_quiet_sweep_tells_that_there_is_no_server(absent: str) -> None:
    cli = Cli()
    assert cli("sweep", "--quiet", "--uri", absent, status=1) == ""
    assert "no MongoDB server answered in time" in cli.stderr


def test_quiet_sweeper_repeats_without_output(database_uri: str, stuck: Queue[Any]) -> None:
    command = [*PROGRAM, "sweep", "--every", "0.05", "--quiet", "--uri", database_uri]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def has_idled() -> bool:
        last, last_active = core_of(stuck).run(maintenance.read_report("tasks"))
        return last_active is not None and last != last_active

    wait_for(has_idled, 90)
    process.terminate()
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 0
    assert re.fullmatch(REPORT, said)


# The same task from several machines


def recipe() -> list[str]:
    """Take the arguments of the documented recipe, with a date in place of today's."""
    text = (Path(microqueue.__file__).parents[1] / "docs" / "workers.md").read_text()
    found = re.search(r"^0 3 .*? microqueue (enqueue .*)$", text, re.MULTILINE)
    assert found is not None
    return shlex.split(re.sub(r"\$\(.*?\)", "2026-05-01", found[1]))


def test_documented_recipe_exits_with_0_on_every_machine_and_adds_one_task(
    database_uri: str, microqueue_database: Any
) -> None:
    command = [*PROGRAM, *recipe(), "--uri", database_uri]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [one.communicate(timeout=90) for one in processes]
    assert [one.returncode for one in processes] == [0, 0, 0], said
    reports: Queue[Any] = Queue(microqueue_database, "reports")
    assert [task.id for task in reports.peek()] == ["nightly-2026-05-01"]
    assert sum(line.startswith("Enqueued nightly-2026-05-01") for line, _ in said) == 1
    assert all("nightly-2026-05-01" in line for line, _ in said)


def test_task_that_is_there_is_named_with_its_queue_and_status(cli: Cli, queue: Queue[Any]) -> None:
    again = ("enqueue", '{"n": 2}', "--id", "nightly", "--if-absent")
    first = cli.json(*again[:1], '{"n": 1}', *again[2:])
    assert (first["id"], first["added"]) == ("nightly", True)
    said = cli(*again)
    assert "nightly" in said
    assert "'default'" in said
    assert "pending" in said
    task = queue.pop()
    assert task is not None
    queue.mark_done(task)
    found = cli.json(*again)
    assert (found["id"], found["added"], found["status"]) == ("nightly", False, "done")
    assert found["payload"] == {"n": 1}
    cli("enqueue", '{"n": 2}', "--id", "nightly", status=1)


@pytest.mark.parametrize("kept", ["status", "collection"])
def test_task_that_failed_is_there(cli: Cli, microqueue_database: Any, kept: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=QueueSettings(dead_letters=kept))
    bury(queue, task_id="nightly")
    found = cli.json("enqueue", "{}", "--id", "nightly", "--if-absent")
    assert (found["added"], found["status"]) == (False, "failed")


def test_dedupe_key_of_a_live_task_is_there_until_the_task_is_done(
    cli: Cli, queue: Queue[Any]
) -> None:
    add = ("enqueue", "{}", "--dedupe-key", "k", "--if-absent")
    first = cli.json(*add)
    found = cli.json(*add)
    assert (found["id"], found["added"]) == (first["id"], False)
    task = queue.pop()
    assert task is not None
    queue.mark_done(task)
    assert cli.json(*add)["added"] is True


def test_id_that_another_queue_has_is_an_error(cli: Cli, queue: Queue[Any]) -> None:
    queue.enqueue({}, task_id="nightly")
    cli("enqueue", "{}", "--id", "nightly", "--if-absent", "-q", "mail", status=1)
    assert "'nightly' is already taken" in cli.stderr


def test_duplicate_is_replaced_while_it_waits(cli: Cli, queue: Queue[Any]) -> None:
    replace = ("enqueue", "--dedupe-key", "k", "--on-duplicate", "replace", "--delay", "1h")
    first = cli.json(*replace, '{"n": 1}')
    assert first["added"] is True
    assert f"Replaced {first['id']}" in cli(*replace, '{"n": 2}')
    found = cli.json(*replace, '{"n": 3}', "--priority", "4")
    assert (found["id"], found["added"], found["payload"]) == (first["id"], False, {"n": 3})
    assert "is_duplicate" not in found
    task = queue.get(first["id"])
    assert task is not None
    assert (task.payload, task.priority) == ({"n": 3}, 4)
    cli("enqueue", "{}", "--dedupe-key", "k", "--on-duplicate", "raise", status=1)
    claimed = cli.json("enqueue", "{}", "--id", "running")
    assert "added" not in claimed
    running = queue.pop()
    assert running is not None
    cli("enqueue", "{}", "--id", "running", "--on-duplicate", "replace", status=1)
    assert "already taken" in cli.stderr


def test_dedupe_key_stays_taken_after_the_task_is_done(cli: Cli, queue: Queue[Any]) -> None:
    add = ("enqueue", "{}", "--dedupe-key", "k", "--dedupe-for", "1h")
    first = cli.json(*add)
    task = queue.pop()
    assert task is not None
    queue.mark_done(task)
    cli(*add, status=1)
    assert first["id"] in cli.stderr
    assert cli.json(*add, "--if-absent")["status"] == "done"
    assert "key taken until" in cli("show", first["id"])
    queue.purge(status="done")
    held = cli.json(*add, "--if-absent")
    assert (held["id"], held["added"]) == (first["id"], False)
    assert held["dedupe_until"] == first["dedupe_until"]
    assert first["id"] in cli(*add, "--if-absent")
    assert queue.stats().pending == 0


def test_period_needs_a_key_and_a_single_task(cli: Cli, queue: Queue[Any]) -> None:
    cli("enqueue", "{}", "--dedupe-for", "1h", status=1)
    assert "dedupe_for needs a dedupe_key" in cli.stderr
    cli("enqueue", "--many", "--dedupe-for", "1h", stdin="{}\n", status=1)
    assert queue.stats().pending == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--on-duplicate", "replace"],
        ["--id", "a", "--on-duplicate", "repalce"],
        ["--id", "a", "--on-duplicate", "replace", "--if-absent"],
    ],
    ids=["alone", "unknown", "both"],
)
def test_wrong_use_of_on_duplicate_is_rejected(
    cli: Cli, queue: Queue[Any], options: list[str]
) -> None:
    cli("enqueue", "{}", *options, status=2)
    assert queue.stats().pending == 0
