"""Three members, and the primary is killed: calls wait for the election, then succeed."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from microqueue import Queue, QueueSettings, Sweeper
from microqueue.core import core_of
from microqueue.embedded import find_mongod
from tests.ports import free_port
from tests.waiting import wait_for


def connect(port: int) -> MongoClient[Any]:
    """Connect to this member alone."""
    uri = f"mongodb://127.0.0.1:{port}/?directConnection=true"
    return MongoClient(uri, serverSelectionTimeoutMS=60_000)


@pytest.fixture
def trio(own_server: None, tmp_path: Path) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """Three mongods in one replica set, by their ports."""
    members: dict[int, subprocess.Popen[bytes]] = {}
    with contextlib.ExitStack() as running:
        while len(members) < 3:
            port = free_port()
            if port in members:
                continue
            place = tmp_path / str(port)
            place.mkdir()
            command = [str(find_mongod()), "--replSet", "trio", "--bind_ip", "127.0.0.1"]
            command += ["--port", str(port), "--dbpath", str(place), "--nounixsocket", "--quiet"]
            command += ["--wiredTigerCacheSizeGB", "0.25", "--oplogSize", "64"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            running.callback(process.wait)
            running.callback(process.kill)
            members[port] = process
        for port in members:  # All must answer before the set is initiated.
            with connect(port) as client:
                client.admin.command("ping")
        with connect(port) as client:
            hosts = [{"_id": n, "host": f"127.0.0.1:{port}"} for n, port in enumerate(members)]
            config = {"_id": "trio", "members": hosts, "settings": {"electionTimeoutMillis": 5000}}
            client.admin.command("replSetInitiate", config)
        yield members


def test_killed_primary_costs_no_run_of_a_schedule(
    trio: dict[int, subprocess.Popen[bytes]],
) -> None:
    hosts = ",".join(f"127.0.0.1:{port}" for port in trio)
    settings = QueueSettings(server_timeout=0.5, retry_deadline=60)
    uri = f"mongodb://{hosts}/test?replicaSet=trio"
    with Queue[Any].from_uri(uri, settings=settings) as queue:
        collections = core_of(queue).collections
        client = collections.client
        wait_for(lambda: client.primary is not None, 60, ignoring=(PyMongoError,))
        put = queue.schedules.put("often", every=1, catch_up="all")
        sweepers = [Sweeper(queue) for _ in range(2)]
        threads = [
            threading.Thread(target=one.run_forever, kwargs={"every": 0.2}) for one in sweepers
        ]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: queue.schedules.get("often").runs >= 2, 60)  # type: ignore[union-attr]
            assert client.primary is not None
            trio[client.primary[1]].kill()
            before = queue.schedules.get("often").runs  # type: ignore[union-attr]
            wait_for(lambda: queue.schedules.get("often").runs >= before + 3, 60)  # type: ignore[union-attr]
        finally:
            for one in sweepers:
                one.stop()
            for thread in threads:
                thread.join()
        count = queue.schedules.pause("often").runs
        added = [task.headers["scheduled_at"] for task in queue.peek(1000)]
        step = timedelta(seconds=1)
        assert sorted(added) == [put.starts_at + step * n for n in range(1, count + 1)]


def test_killed_primary_costs_a_wait_and_no_task(
    trio: dict[int, subprocess.Popen[bytes]],
) -> None:
    hosts = ",".join(f"127.0.0.1:{port}" for port in trio)
    # The server is looked for less long than an election takes, as it is by default.
    settings = QueueSettings(server_timeout=0.5, retry_deadline=60)
    uri = f"mongodb://{hosts}/test?replicaSet=trio"
    with Queue[Any].from_uri(uri, settings=settings) as queue:
        client = core_of(queue).collections.client
        wait_for(lambda: client.primary is not None, 60, ignoring=(PyMongoError,))
        queue.ensure_indexes()
        for n in range(5):
            queue.enqueue({"n": n}, task_id=n)
        held = queue.pop()
        assert held is not None
        assert client.primary is not None
        trio[client.primary[1]].kill()
        queue.mark_done(held)
        queue.enqueue({"n": 5}, task_id=5)
        rest = [task for _ in range(5) if (task := queue.pop())]
        assert [task.id for task in rest] == [1, 2, 3, 4, 5]
        assert queue.mark_done_many(rest) == []
        assert queue.stats().done == 6
