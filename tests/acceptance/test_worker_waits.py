"""``microqueue worker`` and workers in code may be started before their MongoDB."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient

from microqueue import AsyncQueue, Queue
from microqueue.core import SyncCore
from microqueue.embedded import EmbeddedServer
from microqueue.errors import ServerUnavailable
from microqueue.worker import AsyncWorker, Worker
from tests.acceptance.test_processes import Program
from tests.integration.rig import KINDS, Rig
from tests.ports import free_port
from tests.waiting import wait_for

HANDLERS = """
def plain(payload): pass

async def awaited(payload): pass
"""
# Far more than a slow machine needs to start; less than two looks for a server take.
LIMIT_SEC = 25
WAYS = [("plain",), ("awaited",), ("plain", "--processes", "2")]


@pytest.fixture
def port() -> int:
    """Return a port at which no one listens."""
    return free_port()


@pytest.fixture
def uri(port: int) -> str:
    return f"mongodb://127.0.0.1:{port}/shop?directConnection=true"


@pytest.fixture
def start_server(port: int, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Start the MongoDB that is waited for."""
    started: list[EmbeddedServer] = []

    def start() -> None:
        started.append(EmbeddedServer.start(tmp_path / "data", port=port))

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def new_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def start(uri: str, handler: str, *options: str, timeout: str = "0.3") -> Program:
        monkeypatch.setenv("MICROQUEUE_SERVER_TIMEOUT", timeout)
        one = Program(tmp_path, uri)
        (tmp_path / "app.py").write_text(HANDLERS, encoding="utf-8")
        programs.append(one)
        one.start("worker", f"app:{handler}", "--log-format", "json", *options)
        return one

    yield start
    for one in programs:
        one.end()


def waits(program: Program) -> list[str]:
    """Return what the program waits for, in its words."""
    told = [json.loads(line) for line in program.errors() if line.endswith("}")]
    return [one["message"] for one in told if one.get("waits_for") == "mongodb"]


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_command_works_once_its_server_is_there(
    new_program: Callable[..., Program],
    start_server: Callable[[], None],
    uri: str,
    port: int,
    way: tuple[str, ...],
) -> None:
    program = new_program(uri, *way, timeout="3")  # The server may be slow when it is there.
    wait_for(lambda: len(waits(program)) >= 2, 90)
    assert f"127.0.0.1:{port}" in waits(program)[0]
    start_server()
    with Queue[Any].from_uri(uri) as queue:
        queue.enqueue({})
        wait_for(lambda: queue.stats().done == 1)
        program.signal(signal.SIGTERM)
        assert program.status() == 0
        assert queue.workers() == []


@pytest.mark.measured
@pytest.mark.parametrize(
    ("way", "stop", "answers"),
    [
        (("plain",), signal.SIGTERM, True),
        (("plain",), signal.SIGINT, False),
        (("awaited",), signal.SIGTERM, False),
        (("plain", "--processes", "2"), signal.SIGINT, True),
        (("plain", "--processes", "2"), signal.SIGTERM, False),
    ],
    ids=repr,
)
def test_command_that_waits_ends_at_once_when_told(
    new_program: Callable[..., Program],
    uri: str,
    port: int,
    way: tuple[str, ...],
    stop: signal.Signals,
    answers: bool,
) -> None:
    """The machine refuses connections, or takes them and keeps silent for ten minutes."""
    with_password = uri.replace("//", "//anna:sesame@")
    with socket.socket() as silent:
        if answers:
            program = new_program(with_password, *way)
            wait_for(lambda: waits(program), 90)
        else:
            silent.bind(("127.0.0.1", port))
            silent.listen()
            silent.settimeout(90)
            program = new_program(with_password, *way, timeout="600")
            silent.accept()  # An attempt is under way.
        program.signal(stop)
        began = time.monotonic()
        assert program.status() == 0
        assert time.monotonic() - began < LIMIT_SEC
    assert "sesame" not in program.said() + "".join(program.errors())


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_burst_does_not_wait(
    new_program: Callable[..., Program], uri: str, port: int, way: tuple[str, ...]
) -> None:
    program = new_program(uri, *way, "--burst")
    assert program.status() == 1
    assert f"127.0.0.1:{port}" in program.errors()[-1]
    assert waits(program) == []


# In code


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, uri: str) -> Iterator[Rig]:
    # A client that closes looks for its server.
    request.getfixturevalue("start_server")
    with MongoClient[Any](uri) as client:
        one = Rig(request.param, uri, client.shop)
        one.client_options = {"serverSelectionTimeoutMS": 200}
        yield one


def is_waiting(caplog: pytest.LogCaptureFixture) -> bool:
    return any(getattr(record, "waits_for", None) == "mongodb" for record in caplog.records)


def test_worker_works_once_its_server_is_there(
    rig: Rig, start_server: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    thread = rig.start(lambda _payload: None)
    wait_for(lambda: is_waiting(caplog))
    start_server()
    rig.queue.enqueue({})
    wait_for(lambda: rig.queue.stats().done == 1)
    rig.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert rig.queue.workers() == []


def test_worker_that_waits_can_be_stopped(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.client_options = {"serverSelectionTimeoutMS": 600_000}
    thread = rig.start(lambda _payload: None)
    wait_for(lambda: [one for one in threading.enumerate() if one.name == "microqueue-start"])
    rig.stop()
    thread.join(LIMIT_SEC)
    assert not thread.is_alive()
    assert not is_waiting(caplog)


def test_worker_in_a_burst_does_not_wait(rig: Rig) -> None:
    with pytest.raises(ServerUnavailable):
        rig.run(lambda _payload: None)


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return the threads of microqueue that were started since."""
    return [one for one in set(threading.enumerate()) - before if "microqueue-" in one.name]


async def test_worker_that_waits_can_be_cancelled(
    uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())  # Some of them may be left by other tests.
    client: Any = AsyncMongoClient(uri, serverSelectionTimeoutMS=200)
    worker = AsyncWorker(AsyncQueue[Any](client.shop), lambda _payload: None)
    running = asyncio.create_task(worker.run())
    await asyncio.to_thread(wait_for, lambda: is_waiting(caplog))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, LIMIT_SEC)
    await client.close()
    ended = len(caplog.records)
    wait_for(lambda: not new_threads(before))
    assert not any(getattr(one, "waits_for", None) for one in caplog.records[ended:])


def test_worker_that_is_stopped_while_it_registers_leaves_nothing_behind(
    microqueue_queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    asked, answered = threading.Event(), threading.Event()
    usual = SyncCore.run

    def run(core: SyncCore[Any], operation: Any) -> Any:
        if threading.current_thread().name == "microqueue-start":
            asked.set()
            answered.wait(30)
        return usual(core, operation)

    monkeypatch.setattr(SyncCore, "run", run)
    worker = Worker(microqueue_queue, lambda _payload: None)
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert asked.wait(30)
    worker.stop()
    thread.join(LIMIT_SEC)
    assert not thread.is_alive()
    answered.set()
    wait_for(lambda: not new_threads(before))
    assert microqueue_queue.workers() == []


def test_errors_that_no_waiting_helps_are_raised(
    microqueue_queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(Exception):
        pass

    def run(_core: SyncCore[Any], _operation: Any) -> Any:
        raise Refused

    monkeypatch.setattr(SyncCore, "run", run)
    with pytest.raises(Refused):
        Worker(microqueue_queue, lambda _payload: None).run()
