"""What a run leaves open on its servers is found."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from microqueue.embedded import EmbeddedServer
from tests.chaos import leaks
from tests.integration.replica_set import APP_NAME

pytestmark = pytest.mark.usefixtures("own_server")
NAME = next(iter(leaks.OWN))


@dataclass
class OneMember:
    """A server as the harness knows it."""

    client: MongoClient[Any]
    port: int = 1


@pytest.fixture
def member(microqueue_server: EmbeddedServer) -> Any:
    with MongoClient[Any](microqueue_server.uri, appname=APP_NAME) as client:
        yield OneMember(client)


def test_cursor_left_open(member: Any, microqueue_server: EmbeddedServer) -> None:
    with MongoClient[Any](microqueue_server.uri) as client:
        client[NAME].tasks.insert_many([{"n": n} for n in range(10)])
        try:
            with client[NAME].tasks.find(batch_size=2) as cursor:
                next(cursor)
                (found,) = leaks.cursors(member)
                assert f"{NAME}.tasks" in found
                hello = member.client.admin.command("hello")
                assert leaks.cursors(member, hello["localTime"] + timedelta(seconds=1)) == []
                assert leaks.connections(member) != []
            assert leaks.cursors(member) == []
        finally:
            client.drop_database(NAME)


def test_cursor_of_another_database(member: Any, microqueue_database: Any) -> None:
    microqueue_database.tasks.insert_many([{"n": n} for n in range(10)])
    with microqueue_database.tasks.find(batch_size=2) as cursor:
        next(cursor)
        assert leaks.cursors(member) == []


def test_many_open_cursors_of_living_processes(
    member: Any, microqueue_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "MOST_CURSORS", 0)
    monkeypatch.setattr(leaks, "CLOSED_SEC", 0.1)
    with MongoClient[Any](microqueue_server.uri) as client:
        client[NAME].tasks.insert_many([{"n": n} for n in range(10)])
        try:
            with client[NAME].tasks.find(batch_size=2) as cursor:
                next(cursor)
                assert leaks.find_in_living({}, [member])["idle cursors"] != []
            assert leaks.find_in_living({}, [member])["idle cursors"] == []
        finally:
            client.drop_database(NAME)


HOLDER = """
import socket, sys

held = []
for _ in range(2):
    held.append(socket.socket())
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_open_sockets_of_living_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a process of its own: clients of other tests open and close theirs in this one.
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER], **pipes) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline()
        before = leaks.count_sockets(holder.pid)
        holder.stdin.write("more\n")
        holder.stdin.flush()
        assert holder.stdout.readline()
        assert leaks.count_sockets(holder.pid) == before + 1
        monkeypatch.setattr(leaks, "OTHER_SOCKETS", before)
        assert len(leaks.find_in_living({"w": holder.pid}, [])["open sockets"]) == 1


PROGRAMS = {
    "nothing": ("", "left", []),
    "an executor": (
        "keep = Threads(1); keep.submit(int); import time; time.sleep(0.1)",
        "left",
        [],
    ),
    "a daemon thread": ("start('stray')", "left", ["stray"]),
    "a thread of an executor": (
        "start('ThreadPoolExecutor-0_0')",
        "left",
        ["ThreadPoolExecutor-0_0"],
    ),
    "a thread that ends with the process": ("start('microqueue-watchdog')", "left", []),
    "the watchdog": ("os._exit(1)", "exited", None),
}
PROGRAM = """
import os, sys, threading
from concurrent.futures import ThreadPoolExecutor as Threads
from tests.chaos import leaving
from tests.chaos.ledger import Ledger

def start(name):
    wait = threading.Event().wait
    threading.Thread(target=wait, name=name, daemon=True).start()

leaving.THREADS_SEC = 0.2
leaving.leave_at_exit(Ledger(sys.argv[1], "w"))
{does}
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_last_line_of_a_process(tmp_path: Path, name: str) -> None:
    does, event, threads = PROGRAMS[name]
    command = [sys.executable, "-c", PROGRAM.format(does=does), str(tmp_path)]
    subprocess.run(command, check=False, cwd=Path(__file__).parents[2])
    (file,) = (tmp_path / "ledger").iterdir()
    (line,) = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert (line["event"], line.get("threads")) == (event, threads)
