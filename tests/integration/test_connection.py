from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path
from typing import Any

import mongomock
import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import PyMongoError

from microqueue import AsyncQueue, InvalidArgument, Queue, QueueSettings, ServerUnavailable
from microqueue.core import core_of
from microqueue.drivers.change_stream import AsyncWakeup
from microqueue.drivers.driver import awaited
from microqueue.embedded import EmbeddedServer, probe, running
from tests.ports import free_port
from tests.rejection import rejecting


def test_missing_server_is_a_clear_error_within_the_timeout() -> None:
    settings = QueueSettings(server_timeout=0.3)
    uri = f"mongodb://user:secret@127.0.0.1:{free_port()}"
    started = time.monotonic()
    with (
        Queue[Any].from_uri(uri, settings=settings) as queue,
        pytest.raises(ServerUnavailable) as caught,
    ):
        queue.enqueue({})
    assert time.monotonic() - started < 25, "it was not repeated until the deadline"
    assert isinstance(caught.value.__cause__, PyMongoError)
    waited = re.search(r"Timeout: ([\d.]+)s", str(caught.value.__cause__))
    assert waited is not None
    assert float(waited[1]) <= 0.3
    assert "MICROQUEUE_URI" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_missing_server_is_a_clear_error_for_asyncio_too() -> None:
    settings = QueueSettings(server_timeout=0.3)
    uri = f"mongodb://127.0.0.1:{free_port()}"
    async with AsyncQueue[Any].from_uri(uri, settings=settings) as queue:
        with pytest.raises(ServerUnavailable):
            await queue.pop()


def test_timeouts_of_the_uri_win_over_the_settings() -> None:
    settings = QueueSettings(server_timeout=120)
    options = "serverselectiontimeoutms=200&connectTimeoutMS=200&appName=shop"
    uri = f"mongodb://127.0.0.1:{free_port()}/?{options}"
    with Queue[Any].from_uri(uri, settings=settings) as queue:
        assert core_of(queue).collections.client.options.pool_options.appname == "shop"
        assert core_of(queue).collections.client.options.pool_options.connect_timeout == 0.2
        with pytest.raises(ServerUnavailable):
            queue.pop()


def test_own_clients_give_up_on_what_has_no_limit_of_its_own() -> None:
    settings = QueueSettings(long_call_timeout=7)
    with Queue[Any].from_uri("mongodb://127.0.0.1/", settings=settings, connect=False) as queue:
        assert core_of(queue).collections.client.options.pool_options.socket_timeout == 7
    uri = "mongodb://127.0.0.1/?socketTimeoutMS=300"
    with Queue[Any].from_uri(uri, settings=settings, connect=False) as queue:
        assert core_of(queue).collections.client.options.pool_options.socket_timeout == 0.3
        second = core_of(queue).collections.second_client()
        assert second is not None
        assert second.options.pool_options.socket_timeout == 0.3
        second.close()
    with MongoClient[Any]("mongodb://127.0.0.1/", connect=False) as client:
        second = core_of(Queue[Any](client.test)).collections.second_client()
        assert second is not None
        assert second.options.pool_options.socket_timeout == 60
        second.close()


@pytest.mark.parametrize(
    "uri",
    ["http://x", "mongodb://", "mongodb://u:se@cret@h", "mongodb://u:cret@h:port"],
)
def test_wrong_uri_is_rejected_without_showing_a_password(uri: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Queue.from_uri(uri)
    assert caught.value.argument == "uri"
    assert "cret" not in str(caught.value)


@pytest.mark.usefixtures("own_server")
def test_rejected_queue_leaves_no_client_and_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICROQUEUE_HOME", str(tmp_path))
    with rejecting("name"):
        Queue.from_uri(None, "")
    with pytest.raises(InvalidArgument) as caught:
        AsyncQueue.from_uri(None, "q", w=0)
    assert caught.value.argument == "write_concern"
    assert running(tmp_path) is None


def test_uri_names_the_database_else_it_is_microqueue(microqueue_server: EmbeddedServer) -> None:
    with Queue[Any].from_uri(microqueue_server.uri) as queue:
        assert repr(queue) == "Queue('default', microqueue.tasks)"
    named = microqueue_server.uri.replace("/?", "/shop?")
    with Queue[Any].from_uri(named, "mail", collection="jobs") as queue:
        assert repr(queue) == "Queue('mail', shop.jobs)"


def test_uri_comes_from_the_environment(
    microqueue_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICROQUEUE_URI", microqueue_server.uri.replace("/?", "/fromenv?"))
    with Queue[Any].from_uri() as queue:
        assert "fromenv" in repr(queue)


@pytest.mark.usefixtures("own_server")
def test_without_any_uri_the_embedded_server_is_used_and_keeps_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICROQUEUE_HOME", str(tmp_path))
    monkeypatch.setattr(probe, "PROBE_MILLISECONDS", 30_000)
    with Queue[Any].from_uri() as queue:
        task = queue.enqueue({"n": 1})
        assert running(tmp_path) is not None
    with Queue[Any].from_uri() as queue:
        assert queue.get(task.id) == task
    assert running(tmp_path) is None


def test_blocking_queue_rejects_an_async_client_and_the_other_way_round() -> None:
    clients: list[Any] = [AsyncMongoClient(connect=False), AsyncIOMotorClient(connect=False)]
    for client in clients:
        with pytest.raises(InvalidArgument, match="AsyncQueue") as caught:
            Queue(client.test)
        assert caught.value.code == "async_client"
    with MongoClient[Any](connect=False) as blocking:
        with pytest.raises(InvalidArgument) as caught:
            AsyncQueue(blocking.test)
        assert caught.value.code == "blocking_client"
        for wrong in (blocking, "mongodb://x", None):
            with pytest.raises(InvalidArgument, match="from_uri") as caught:
                Queue(wrong)
            assert (caught.value.code, caught.value.value) == ("no_database", wrong)


def test_mongomock_serves_both_kinds() -> None:
    database: Any = mongomock.MongoClient().test
    Queue[Any](database).enqueue({"n": 1})
    task = asyncio.run(AsyncQueue[Any](database).pop())
    assert task is not None
    assert task.payload == {"n": 1}


SLOW_POLL = QueueSettings(poll_interval=60)


def test_waiting_pop_is_woken_by_the_change_stream(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=SLOW_POLL)
    queue.ensure_indexes()
    producer = threading.Timer(0.5, lambda: queue.enqueue({"n": 1}))
    producer.start()
    task = queue.pop(wait=30)  # Polling alone would take a minute.
    producer.join()
    assert task is not None


def test_waiting_pop_wakes_for_released_replayed_and_promoted_tasks(
    microqueue_database: Any,
) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=SLOW_POLL)
    queue.enqueue({"n": 1})
    task = queue.pop()
    assert task is not None
    for bring_back in (queue.release, queue.dead_letters.replay):
        timer = threading.Timer(0.4, bring_back, [task])
        timer.start()
        woken = queue.pop(wait=30)
        timer.join()
        assert woken is not None
        task = woken
        queue.mark_failure(task, "for the replay")


def test_waiting_pop_takes_a_delayed_task_on_time(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=SLOW_POLL)
    task = queue.enqueue({"n": 1}, delay=0.7)
    popped = queue.pop(wait=40)  # Polling alone would take a minute.
    assert popped is not None
    assert popped.id == task.id


async def test_waiting_pop_is_woken_in_asyncio(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    motor: Any = AsyncIOMotorClient(microqueue_server.uri)
    client: AsyncMongoClient[Any] = AsyncMongoClient(microqueue_server.uri)
    for database in (motor[microqueue_database.name], client[microqueue_database.name]):
        queue: AsyncQueue[Any] = AsyncQueue(database, settings=SLOW_POLL)
        await queue.ensure_indexes()
        waiting = asyncio.create_task(queue.pop(wait=30))
        await asyncio.sleep(0.4)
        await queue.enqueue({"n": 1})
        task = await waiting
        assert task is not None
        await queue.mark_done(task)
    motor.close()
    await client.close()


@pytest.mark.parametrize("make", [AsyncMongoClient, AsyncIOMotorClient])
async def test_task_that_comes_after_the_last_look_and_before_the_wait_ends_it(
    make: Any, microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    client = make(microqueue_server.uri)
    queue: AsyncQueue[Any] = AsyncQueue(client[microqueue_database.name])
    wakeup = AsyncWakeup(core_of(queue).collections, [queue.name], poll_interval_sec=60)
    async with asyncio.timeout(40), wakeup:
        await queue.enqueue({"n": 1})
        await wakeup.sleep(60)
    await awaited(client.close())


@pytest.mark.usefixtures("own_server")
def test_standalone_server_without_change_streams_is_polled() -> None:
    with (
        EmbeddedServer.start(replica_set=False) as server,
        MongoClient[Any](server.uri) as client,
    ):
        queue: Queue[Any] = Queue(client.test, settings=QueueSettings(poll_interval=0.05))
        queue.ensure_indexes()
        producer = threading.Timer(0.3, lambda: queue.enqueue({"n": 1}))
        producer.start()
        task = queue.pop(wait=30)
        producer.join()
        assert task is not None
        queue.mark_done(task)
        assert queue.stats().done == 1
