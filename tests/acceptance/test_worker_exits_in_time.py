"""``microqueue worker`` ends in time, whatever its handlers and its server do."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from microqueue import Queue
from microqueue.embedded import EmbeddedServer
from microqueue.worker import AsyncWorker, Worker, shutdown
from tests.acceptance.test_processes import Program
from tests.integration.rig import KINDS, Rig
from tests.waiting import wait_for

# Far more than a slow machine needs; without a limit it takes longer than this, or for ever.
LIMIT_SEC = 25
LOGGED = ("--log-format", "json")
STOPS = (signal.SIGTERM, signal.SIGINT)
"""The first signal and the second one: two of a kind may arrive as one."""
BETWEEN_STOPS_SEC = 0.5
"""Python may handle a signal that comes just after another one only after a blocking call."""
ENDING_SEC = 0.7
# Each process of a worker waits for less time for a server that does not answer.
HANDLERS = f"""
import asyncio, time
from concurrent.futures import ThreadPoolExecutor

import microqueue.cli.worker, microqueue.worker.shutdown, microqueue.worker.waiting

for module in (microqueue.cli.worker, microqueue.worker.shutdown, microqueue.worker.waiting):
    module.ENDING_SEC = {ENDING_SEC}

pool = ThreadPoolExecutor(1)

def leave_work(payload):
    pool.submit(time.sleep, 100)

def plain(payload): pass

async def awaited(payload): pass

async def swallow(payload):
    print("begun", flush=True)
    until = time.monotonic() + 100
    while time.monotonic() < until:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            pass

async def block(payload):
    print("begun", flush=True)
    time.sleep(100)
"""


def was_killed_by_watchdog(line: str) -> bool:
    """Return whether a line of stderr is the log record of the watchdog."""
    return line.startswith("{") and json.loads(line).get("killed_by") == "watchdog"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start() as one:
        yield one


@pytest.fixture
def server(shared_server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """Return an empty server that may be stopped, and that is started again."""
    with MongoClient[Any](shared_server.uri) as client:
        for name in client.list_database_names():
            if name not in {"admin", "config", "local"}:
                client.drop_database(name)
    yield shared_server
    os.kill(shared_server.pid, signal.SIGCONT)


@pytest.fixture
def program(tmp_path: Path, server: EmbeddedServer) -> Iterator[Program]:
    one = Program(tmp_path, server.uri)
    (tmp_path / "app.py").write_text(HANDLERS, encoding="utf-8")
    yield one
    one.end()


@pytest.fixture
def queue(server: EmbeddedServer) -> Iterator[Queue[Any]]:
    # A client that closes looks for its server, which may be gone.
    with Queue[Any].from_uri(f"{server.uri}&serverSelectionTimeoutMS=1000") as one:
        yield one
        os.kill(server.pid, signal.SIGCONT)


def stop(program: Program, signals: int = 2) -> None:
    """Send signals that stop the program."""
    for count, number in enumerate(STOPS[:signals]):
        time.sleep(BETWEEN_STOPS_SEC if count else 0)
        program.signal(number)


def ends(program: Program) -> int:
    """Wait for the end of the program, but not for long."""
    began = time.monotonic()
    status = program.status()
    assert time.monotonic() - began < LIMIT_SEC
    return status


@pytest.mark.parametrize(
    ("handler", "grace", "signals"),
    [("plain", "200ms", 1), ("awaited", "200ms", 1), ("awaited", "5m", 2)],
)
def test_idle_worker_ends_in_time_although_its_server_does_not_answer(
    program: Program,
    server: EmbeddedServer,
    queue: Queue[Any],
    handler: str,
    grace: str,
    signals: int,
) -> None:
    queue.enqueue({})
    program.start("worker", f"app:{handler}", "--grace", grace)
    wait_for(lambda: queue.stats().done == 1)
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(1.5)  # So that it has noticed, and waits for an answer.
    stop(program, signals)
    assert ends(program) == 0


def test_idle_worker_ends_in_time_although_its_server_is_gone(tmp_path: Path) -> None:
    with (
        EmbeddedServer.start() as server,
        Queue[Any].from_uri(f"{server.uri}&serverSelectionTimeoutMS=1000") as queue,
    ):
        program = Program(tmp_path, server.uri)
        (tmp_path / "app.py").write_text(HANDLERS, encoding="utf-8")
        try:
            queue.enqueue({})
            program.start("worker", "app:plain", "--grace", "200ms")
            wait_for(lambda: queue.stats().done == 1)
            os.kill(server.pid, signal.SIGKILL)
            program.signal(signal.SIGTERM)
            assert ends(program) == 0
        finally:
            program.end()


def test_coroutine_that_swallows_its_cancellation_does_not_keep_the_process(
    program: Program, queue: Queue[Any]
) -> None:
    queue.enqueue({})
    program.start("worker", "app:swallow", "--grace", "200ms")
    wait_for(lambda: "begun" in program.said())
    program.signal(signal.SIGTERM)
    assert ends(program) == 0
    assert (queue.stats().ready, queue.workers()) == (1, [])


@pytest.mark.measured
@pytest.mark.parametrize("options", [(), ("--processes", "2")], ids=repr)
def test_work_that_a_handler_left_in_a_pool_does_not_keep_the_process(
    program: Program, queue: Queue[Any], options: tuple[str, ...]
) -> None:
    queue.enqueue({})
    program.start("worker", "app:leave_work", "--grace", "200ms", *LOGGED, *options)
    wait_for(lambda: queue.stats().done == 1)
    program.signal(signal.SIGTERM)
    assert ends(program) == 0
    assert "Handled 1 task." in program.said()
    assert any(was_killed_by_watchdog(line) for line in program.errors())
    assert queue.workers() == []


def test_second_signal_ends_a_process_whose_loop_is_blocked(
    program: Program, queue: Queue[Any]
) -> None:
    queue.enqueue({})
    program.start("worker", "app:block", "--grace", "5m", *LOGGED)
    wait_for(lambda: "begun" in program.said())
    stop(program)
    assert ends(program) == 1
    assert was_killed_by_watchdog(program.errors()[-1])
    assert queue.stats().processing == 1  # Nobody could hand it back.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("immediately", [False, True])
def test_worker_of_a_program_of_ones_own_ends_in_time_too(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, kind: str, immediately: bool
) -> None:
    with MongoClient[Any](server.uri) as client:
        rig = Rig(kind, server.uri, client.test)
        ended = watch_end(monkeypatch)
        monkeypatch.setattr(shutdown, "ENDING_SEC", ENDING_SEC)
        monkeypatch.setattr(shutdown, "HURRY_SEC", ENDING_SEC)
        rig.queue.enqueue({})
        thread = rig.start(
            lambda _payload: None, grace=300 if immediately else 0.2, poll_interval=0.05
        )
        wait_for(lambda: rig.queue.stats().done == 1)
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(0.5)  # So that it has noticed.
        rig.stop(immediately=immediately)
        in_time = ended.wait(LIMIT_SEC)
        os.kill(server.pid, signal.SIGCONT)
        thread.join(60)
        assert in_time


def watch_end(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set when a worker has ended; closing its client is not its own."""
    ended = threading.Event()
    run, run_async = Worker.run, AsyncWorker.run

    def run_threads(worker: Worker, **options: Any) -> int:
        try:
            return run(worker, **options)
        finally:
            ended.set()

    async def run_loop(worker: AsyncWorker, **options: Any) -> int:
        try:
            return await run_async(worker, **options)
        finally:
            ended.set()

    monkeypatch.setattr(Worker, "run", run_threads)
    monkeypatch.setattr(AsyncWorker, "run", run_loop)
    return ended
