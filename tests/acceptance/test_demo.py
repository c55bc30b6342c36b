from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from microqueue.embedded import EmbeddedServer

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo.py"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment whose temporary files, and so the server's, are in a directory apart."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    yield {**os.environ, "TMPDIR": str(temporary), "COLUMNS": "80"}
    deadline = time.monotonic() + 60
    while processes_of(temporary) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(temporary) == []
    assert list(temporary.iterdir()) == []


def processes_of(temporary: Path) -> list[str]:
    """List the processes that were started with this temporary directory."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            environment = (process / "environ").read_bytes()
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue  # Not a process, not ours, or gone.
        if f"TMPDIR={temporary}\0".encode() in environment and command:
            found.append(f"{process.name} {command.decode(errors='replace')}")
    return found


def processor_sec() -> float:
    """Return the processor time of what this process has started: a busy machine takes longer."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_demo_loses_nothing_though_a_worker_is_killed(place: dict[str, str]) -> None:
    started = processor_sec()
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--tasks", "120"],
        capture_output=True,
        text=True,
        check=False,
        timeout=160,
        env=place,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    said = result.stdout
    assert "kill -9 worker-" in said
    assert "Nothing was lost" in said
    assert "= 120 enqueued" in said
    table = {
        cells[1].strip(): int(cells[2])
        for line in said.splitlines()
        if line.startswith("│") and (cells := line.split("│"))[2].strip().isdigit()
    }
    assert table["done"] + table["dead letters"] == 120
    assert table["retried after an error"] > 0
    assert table["reclaimed after the crash"] >= 1
    reasons = {name: count for name, count in table.items() if name.startswith("because of")}
    assert len(reasons) >= 2
    assert sum(reasons.values()) == table["dead letters"]
    assert "microqueue up" in said
    assert "\x1b" not in said
    assert len(said.splitlines()) < 80  # No flood of progress.
    assert processor_sec() - started < 60


@pytest.mark.parametrize(
    ("stop", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_interrupted_demo_leaves_nothing_behind(
    place: dict[str, str], stop: signal.Signals, status: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=place,
        start_new_session=True,
    )
    assert process.stdout is not None
    while "finished:" not in (line := process.stdout.readline()):
        assert line
    os.killpg(process.pid, stop)  # As a terminal does it: to the workers too.
    _, errors = process.communicate(timeout=90)
    assert process.returncode == status
    assert "Traceback" not in errors


def test_workers_end_with_a_demo_that_is_killed(place: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)], stdout=subprocess.PIPE, text=True, env=place
    )
    assert process.stdout is not None
    while "finished:" not in (line := process.stdout.readline()):
        assert line
    process.kill()
    process.communicate(timeout=90)


def test_demo_that_serves_keeps_its_dashboard_open_until_interrupted(
    place: dict[str, str],
) -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--tasks", "50", "--serve"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=place,
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("Dashboard: "))
        address = line.split()[1]
        with urllib.request.urlopen(f"{address}api/v1/queues", timeout=90) as reply:
            (orders,) = json.load(reply)["queues"]
        assert (orders["queue"], orders["ready"]) == ("orders", 0)
        assert orders["done_last_hour"] + orders["failed"] == 50
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 130
    finally:
        process.kill()
        process.communicate()


def test_demo_on_a_server_of_ones_own_leaves_no_database(
    place: dict[str, str], microqueue_server: EmbeddedServer, microqueue_client: MongoClient[Any]
) -> None:
    before = set(microqueue_client.list_database_names())
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--tasks", "50"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**place, "MICROQUEUE_URI": microqueue_server.uri},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "MICROQUEUE_URI" in result.stdout
    assert "= 50 enqueued" in result.stdout
    assert set(microqueue_client.list_database_names()) <= before
