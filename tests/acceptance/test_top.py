from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from microqueue import Queue, QueueSettings, Sweeper
from microqueue.cli import app as cli_app
from microqueue.core import core_of
from microqueue.operations.workers import beat
from microqueue.reports import WorkerInfo

PATIENCE_SEC = 80


@pytest.fixture
def uri(database_uri: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MICROQUEUE_URI", database_uri)
    return database_uri


@pytest.fixture
def queue(microqueue_database: Any, uri: str) -> Queue[Any]:
    queue: Queue[Any] = Queue(microqueue_database, "mail")
    queue.enqueue_many([{"n": n} for n in range(3)])
    queue.enqueue({}, delay=3600)
    running = queue.pop(worker_id="host:1:abc")
    assert running is not None
    dead = queue.pop()
    assert dead is not None
    queue.mark_failure(dead, "boom")
    core_of(queue).run(beat(worker_info(queue, "host:1:abc", ["mail"])))
    return queue


def worker_info(queue: Queue[Any], worker_id: str, queues: list[str]) -> WorkerInfo:
    now = queue.now()
    return WorkerInfo(
        id=worker_id, collection="tasks", host="host", pid=1, queues=queues, concurrency=4,
        running=1, handled=17, started_at=now, heartbeat_at=now, heartbeat_sec=30.0,
    )  # fmt: skip


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli_app.app, list(arguments))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_top_prints_once_where_there_is_no_terminal(queue: Queue[Any]) -> None:
    printed = run("top")
    row = next(line.split() for line in printed.splitlines() if line.startswith("mail"))
    assert (row[1], row[-1]) == ("1", "1")
    assert "Workers: 1" in printed
    assert "host:1:abc" in printed
    assert "1 of 4" in printed
    assert "Running: 1" in printed
    assert "1 of 10" in printed
    assert "No sweep yet" in printed


def test_top_marks_estimates_and_counts_everything_on_request(
    queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICROQUEUE_COUNT_LIMIT", "10")
    queue.enqueue_many([{}] * 39)
    queue.mark_done_many(queue.pop_many(12))
    row = next(line.split() for line in run("top").splitlines() if line.startswith("mail"))
    assert row[1].startswith("~")
    assert "~" not in row[-1]
    (mail,) = json.loads(run("top", "-q", "mail", "--json"))["queues"]
    assert set(mail["estimated"]) == {"ready", "oldest_ready_age_sec", "done_last_hour"}
    (mail,) = json.loads(run("top", "-q", "mail", "--exact", "--json"))["queues"]
    assert (mail["estimated"], mail["ready"], mail["done_last_hour"]) == ([], 28, 12)


def test_top_tells_the_last_sweep(queue: Queue[Any]) -> None:
    sweeper = Sweeper(queue)
    sweeper.run_once()
    assert f"by {sweeper.sweeper_id}: no changes" in run("top", "--once")


def test_top_as_json_has_queues_rates_workers_and_what_runs(queue: Queue[Any]) -> None:
    document = json.loads(run("top", "--json"))
    mail = next(one for one in document["queues"] if one["queue"] == "mail")
    counts = {name: mail[name] for name in ("ready", "delayed", "processing", "failed")}
    assert counts == {"ready": 1, "delayed": 1, "processing": 1, "failed": 1}
    assert mail["failed_last_hour"] == 1
    assert {"done_per_minute", "failed_per_minute"} <= set(mail)
    assert document["workers"][0]["holds"][0]["queue"] == "mail"
    assert document["running"][0]["worker_id"] == "host:1:abc"


@pytest.fixture
def other(queue: Queue[Any]) -> Queue[Any]:
    """A queue beside the one of mails, in which something runs, is done and has failed."""
    soonest = QueueSettings(visibility_timeout=20)
    other: Queue[Any] = Queue(core_of(queue).collections.tasks, "other", settings=soonest)
    other.enqueue_many([{"n": n} for n in range(3)])
    for settle in (other.mark_done, lambda task: other.mark_failure(task, "boom")):
        task = other.pop()
        assert task is not None
        settle(task)
    assert other.pop(worker_id="host:2:def") is not None
    core_of(other).run(beat(worker_info(other, "host:2:def", ["other"])))
    core_of(other).run(beat(worker_info(other, "host:3:ghi", ["mail", "other"])))
    return other


def test_top_of_one_queue_shows_that_queue_alone(other: Queue[Any]) -> None:
    everything = run("top", "--once")
    assert "other" in everything
    assert "host:2:def" in everything
    printed = run("top", "--once", "-q", "mail")
    assert [line.split()[0] for line in printed.splitlines()[:2]] == ["queue", "mail"]
    assert "Workers: 2" in printed
    assert "Running: 1" in printed
    assert "host:1:abc" in printed
    assert "mail, other" in printed  # A worker of both is one of this queue, too.
    assert "host:2:def" not in printed
    assert not [line for line in printed.splitlines() if line.startswith("other")]


def test_top_of_one_queue_as_json_has_nothing_of_others(other: Queue[Any]) -> None:
    document = json.loads(run("top", "--once", "-q", "mail", "--json"))
    assert [one["queue"] for one in document["queues"]] == ["mail"]
    assert {one["id"] for one in document["workers"]} == {"host:1:abc", "host:3:ghi"}
    assert [one["queue"] for one in document["running"]] == ["mail"]
    assert list(document["minutes"]["done"]) == []
    assert list(document["minutes"]["failed"]) == ["mail"]
    assert document["queues"][0]["failed_last_hour"] == 1


def test_top_of_one_queue_shows_what_runs_there_however_much_runs_elsewhere(
    other: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microqueue.insights.MOST_RUNNING", 1)
    assert [one["queue"] for one in json.loads(run("top", "--json"))["running"]] == ["other"]
    running = json.loads(run("top", "-q", "mail", "--json"))["running"]
    assert [one["worker_id"] for one in running] == ["host:1:abc"]


def test_former_name_of_every_is_hidden_and_deprecated(uri: str) -> None:
    shown = run("top", "--help")
    assert "--every" in shown
    assert "--interval" not in shown
    result = CliRunner().invoke(cli_app.app, ["top", "--once", "--interval", "5"])
    assert result.exit_code == 0
    assert result.stderr == "Warning: --interval is deprecated; use --every.\n"
    result = CliRunner().invoke(cli_app.app, ["top", "--once", "--interval", "0"])
    assert (result.exit_code, "every=0 s is not valid" in result.stderr) == (1, True)


@pytest.mark.measured
@pytest.mark.parametrize("option", ["--every", "--interval"])
def test_top_at_a_terminal_refreshes_until_interrupted(queue: Queue[Any], option: str) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "microqueue.cli", "top", option, "0.1"]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "COLUMNS": "200"}
    )
    os.close(slave)
    try:
        shown = read_until(master, b"Press Ctrl-C to quit")
        assert b"host:1:abc" in shown
        queue.enqueue_many([{"n": n} for n in range(1321)])
        read_until(master, b"1,322")  # It looks again by itself.
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SEC) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def read_until(descriptor: int, wanted: bytes) -> bytes:
    deadline = time.monotonic() + PATIENCE_SEC
    shown = b""
    while wanted not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([descriptor], [], [], 0.2)[0]:
            shown += os.read(descriptor, 65536)
    return shown
