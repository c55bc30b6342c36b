"""A worker that was stopped as a whole (SIGSTOP) and continued late starts nothing of others."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from microqueue import BackoffPolicy, Queue, QueueSettings, Sweeper
from microqueue.worker import Worker
from tests.acceptance.test_processes import Program
from tests.waiting import wait_for

# Long enough for a slow machine to renew it, short enough to wait for its end.
LEASE_SEC = 6
GATE = 20  # After so many quick ones a worker claims many ahead.
COUNT = 60
MARKER = 1000

HANDLERS = f"""
import asyncio, os, pathlib, time

def note(payload):
    with open("ledger", "ab", buffering=0) as ledger:
        ledger.write(f"{{os.getpid()}} {{payload['n']}}\\n".encode())
    return payload["n"] == {GATE} and not pathlib.Path("go").exists()

def plain(payload):
    if note(payload):
        while not pathlib.Path("go").exists():
            time.sleep(0.001)

async def awaited(payload):
    if note(payload):
        while not pathlib.Path("go").exists():
            await asyncio.sleep(0.001)
"""


@pytest.fixture
def program(tmp_path: Path, database_uri: str) -> Iterator[Program]:
    one = Program(tmp_path, database_uri)
    (tmp_path / "app.py").write_text(HANDLERS, encoding="utf-8")
    yield one
    one.end()


@pytest.mark.parametrize("handler", ["plain", "awaited"])
def test_prefetched_tasks_whose_leases_ended_are_not_started(
    program: Program, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch, handler: str
) -> None:
    monkeypatch.setenv("MICROQUEUE_VISIBILITY_TIMEOUT", str(LEASE_SEC))
    settings = QueueSettings(
        visibility_timeout=LEASE_SEC, backoff=BackoffPolicy(base_sec=0, max_sec=0)
    )
    queue: Queue[Any] = Queue(microqueue_database, settings=settings)
    queue.enqueue_many([{"n": n} for n in range(COUNT)])
    options = ("--concurrency", "1", "--log-format", "json")
    program.start("worker", f"app:{handler}", *options)
    wait_for(lambda: len(program.started()) == GATE + 1)
    wait_for(lambda: queue.stats().done == GATE)
    wait_for(lambda: queue.stats().processing > 5)  # Prefetched, beside the one that runs.

    program.signal(signal.SIGSTOP)
    sweeper, held = Sweeper(queue), 0

    def swept() -> bool:
        nonlocal held
        held += sweeper.reclaim_stuck()
        return queue.stats().processing == 0

    wait_for(swept)
    others: list[int] = []
    Worker(queue, lambda payload: others.append(payload["n"])).run(burst=True)
    assert queue.stats().done == COUNT
    program.go()
    program.signal(signal.SIGCONT)

    queue.enqueue({"n": MARKER})
    wait_for(lambda: queue.stats().done == COUNT + 1)  # It works on.
    started = [number for _, number in program.started()]
    assert started == [*range(GATE + 1), MARKER]
    assert sorted(others) == list(range(GATE, COUNT))
    program.signal(signal.SIGTERM)
    assert program.status() == 0
    assert (queue.stats().done, queue.stats().processing) == (COUNT + 1, 0)
    assert queue.workers() == []
    told = [json.loads(line) for line in program.errors()]
    assert sum(line.get("not_started", 0) for line in told) == held - 1
    # One line, or two where the worker looked while some were still in the buffer.
    assert len([line for line in told if "not_started" in line]) in {1, 2}
    assert not [line for line in told if line.get("task_id") and line["level"] == "warning"][1:]
