from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from microqueue import Queue, QueueSettings
from tests.ports import free_port
from tests.waiting import wait_for, wait_until_over

SCRIPT = Path(__file__).parents[2] / "scripts" / "sweep.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        # Without jitter, no reclaimed task is due within the same sweep.
        env={**os.environ, "MICROQUEUE_BACKOFF": '{"jitter": "none"}', **environment},
    )


def abandon(database: Any, *names: str) -> None:
    """Leave a task with an expired lease in each queue, and one that is due."""
    settings = QueueSettings(visibility_timeout=0.001)
    for name in names:
        queue = Queue[Any](database, name, settings=settings)
        queue.enqueue({})
        assert queue.pop() is not None
        queue.enqueue({}, delay=0.001)
    wait_until_over(queue)


def test_one_run_sweeps_all_queues_with_one_log_line_and_a_json_report(
    database_uri: str, microqueue_database: Any
) -> None:
    abandon(microqueue_database, "one", "two")
    result = run("--json", MICROQUEUE_URI=database_uri)
    assert result.returncode == 0
    report = json.loads(result.stdout)
    assert (report["reclaimed"], report["promoted"], report["skipped"]) == (2, 2, False)
    (line,) = result.stderr.splitlines()
    assert "INFO sweep: reclaimed=2 promoted=2 buried=0" in line


def test_buried_tasks_are_named_in_the_one_line(
    database_uri: str, microqueue_database: Any
) -> None:
    queue = Queue[Any](microqueue_database)
    queue.enqueue({}, task_id="spent", max_attempts=2, delay=0.001)
    wait_for(lambda: (due := queue.stats().next_due_at) is not None and due <= queue.now())
    microqueue_database.tasks.update_one({"_id": "spent"}, {"$set": {"attempts": 2}})
    result = run("--json", "--lock-ttl", "3", "--uri", database_uri)
    assert json.loads(result.stdout)["buried_tasks"]["max_attempts"]["ids"] == ["spent"]
    (line,) = result.stderr.splitlines()
    assert "max_attempts: spent" in line


def test_jobs_and_queues_limit_a_run(database_uri: str, microqueue_database: Any) -> None:
    abandon(microqueue_database, "one", "two", "three")
    limits = ("--job", "reclaim_stuck", "--job", "purge_finished")
    result = run("--once", "--uri", database_uri, *limits, "--queue", "one", "--queue", "two")
    assert result.returncode == 0
    assert result.stdout == ""
    assert "reclaimed=2 promoted=0" in result.stderr
    assert Queue[Any](microqueue_database, "three").stats().overdue == 1


def test_second_sweep_at_once_skips_its_turn(database_uri: str, microqueue_database: Any) -> None:
    abandon(microqueue_database, "one")
    later = datetime.now(UTC) + timedelta(minutes=10)
    lock = {"_id": "sweeper:tasks", "token": "other", "expires_at": later}
    microqueue_database.microqueue_locks.insert_one(lock)
    result = run("--uri", database_uri)
    assert result.returncode == 0
    (line,) = result.stderr.splitlines()
    assert line.endswith("skipped: another sweeper is running")
    assert Queue[Any](microqueue_database, "one").stats().overdue == 1


def test_failed_job_is_in_the_one_line_and_the_status(
    database_uri: str, microqueue_database: Any, microqueue_client: Any
) -> None:
    # The collection's validator refuses what the sweeper writes for this one job.
    abandon(microqueue_database, "one")
    validator = {"$expr": {"$eq": ["$status", "processing"]}}
    microqueue_database.command("collMod", "tasks", validator=validator)
    result = run("--uri", database_uri, "--job", "reclaim_stuck")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "ERROR sweep: reclaimed=0" in line
    assert "reclaim_stuck failed: MongoDB rejected the call" in line


def test_letters_go_where_a_service_keeps_them(database_uri: str, microqueue_database: Any) -> None:
    settings = QueueSettings(dead_letters="collection")
    Queue[Any](microqueue_database, settings=settings).ensure_indexes()
    queue = Queue[Any](microqueue_database)
    queue.enqueue({}, expires_in=0.001)
    wait_until_over(queue)
    assert "expired=1 purged=0 moved=1" in run("--uri", database_uri).stderr
    assert microqueue_database.tasks.count_documents({}) == 0


def test_missing_server_is_one_line_without_the_password_and_status_1() -> None:
    uri = f"mongodb://anna:sesame@127.0.0.1:{free_port()}/"
    result = run("--uri", uri, MICROQUEUE_SERVER_TIMEOUT="0.3")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "no MongoDB server answered in time" in line
    assert "sesame" not in line


def test_unknown_job_is_a_usage_error() -> None:
    result = run("--job", "nonsense")
    assert result.returncode == 2
    assert "nonsense" in result.stderr


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_every_sweeps_until_a_signal_and_ends_with_status_0(
    database_uri: str, stop: signal.Signals
) -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--uri", database_uri, "--every", "0.05", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(3):
        assert json.loads(process.stdout.readline())["errors"] == {}
    process.send_signal(stop)
    rest, log = process.communicate(timeout=90)
    assert process.returncode == 0
    assert len(log.splitlines()) == 3 + len(rest.splitlines())


def test_script_needs_no_extra(database_uri: str, tmp_path: Path) -> None:
    for name in ("typer", "rich"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed')\n", "utf-8")
    path = os.pathsep.join([str(tmp_path), str(SCRIPT.parents[1])])
    assert run("--uri", database_uri, PYTHONPATH=path).returncode == 0


def test_sweep_of_the_embedded_server_is_told(tmp_path: Path) -> None:
    # A mongod that is not there: what matters is what was said before.
    result = run(MICROQUEUE_URI="", MICROQUEUE_HOME=str(tmp_path), MICROQUEUE_MONGOD="/nowhere")
    assert result.returncode == 1
    assert "neither --uri nor MICROQUEUE_URI is set" in result.stderr.splitlines()[0]
