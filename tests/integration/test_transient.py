"""Connections that break, primaries that step down: what is repeated, and what surfaces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pymongo import MongoClient, monitoring
from pymongo.errors import AutoReconnect

from microqueue import (
    AsyncQueue,
    OperationFailed,
    Queue,
    QueueSettings,
    ServerUnavailable,
    TaskStatus,
)
from microqueue.core import core_of
from microqueue.drivers.retry import translate
from microqueue.embedded import EmbeddedServer


@contextmanager
def failing(client: MongoClient[Any], commands: list[str], **data: Any) -> Iterator[None]:
    """Make the server fail the next commands of these names."""
    mode = {"times": data.pop("times", 1)}
    point = {"failCommands": commands, "appName": "victim", **data}
    client.admin.command("configureFailPoint", "failCommand", mode=mode, data=point)
    try:
        yield
    finally:
        client.admin.command("configureFailPoint", "failCommand", mode="off")


class Commands(monitoring.CommandListener):
    """Counts what was sent, by name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.names.append(event.command_name)

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Count starts only."""

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Count starts only."""


@pytest.fixture
def commands() -> Commands:
    return Commands()


@pytest.fixture
def victim(
    microqueue_server: EmbeddedServer, microqueue_database: Any, commands: Commands
) -> Iterator[Queue[Any]]:
    """A queue whose commands can be failed, with the driver's own retries switched off."""
    with MongoClient[Any](
        microqueue_server.uri,
        appname="victim",
        retryWrites=False,
        retryReads=False,
        event_listeners=[commands],
    ) as client:
        queue: Queue[Any] = Queue(client[microqueue_database.name])
        queue.ensure_indexes()
        queue.now()
        yield queue


REPEATED: dict[str, tuple[str, Callable[[Queue[Any], Any], Any]]] = {
    "enqueue": ("insert", lambda queue, _: queue.enqueue({})),
    "enqueue_many": ("insert", lambda queue, _: queue.enqueue_many([{}, {}])),
    "mark_done": ("update", lambda queue, task: queue.mark_done(task)),
    "mark_retry": ("update", lambda queue, task: queue.mark_retry(task)),
    "mark_failure": ("update", lambda queue, task: queue.mark_failure(task, "x")),
    "release": ("update", lambda queue, task: queue.release(task)),
    "touch": ("update", lambda queue, task: queue.touch(task)),
    "get": ("find", lambda queue, task: queue.get(task.id)),
    "stats": ("aggregate", lambda queue, _: queue.stats()),
}


@pytest.mark.parametrize("fault", [{"closeConnection": True}, {"errorCode": 10107}])
@pytest.mark.parametrize("name", REPEATED)
def test_safe_calls_are_repeated_until_they_succeed(
    victim: Queue[Any], microqueue_client: MongoClient[Any], name: str, fault: dict[str, Any]
) -> None:
    victim.enqueue({})
    task = victim.pop()
    command, call = REPEATED[name]
    with failing(microqueue_client, [command], times=3, **fault):
        call(victim, task)


def test_repeating_ends_at_the_deadline(
    microqueue_server: EmbeddedServer, microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    with MongoClient[Any](microqueue_server.uri, appname="victim", retryWrites=False) as client:
        settings = QueueSettings(retry_deadline=0.3)
        queue: Queue[Any] = Queue(client[microqueue_database.name], settings=settings)
        queue.ensure_indexes()
        with failing(microqueue_client, ["insert"], times=10_000, errorCode=10107):
            started = time.monotonic()
            with pytest.raises(ServerUnavailable) as caught:
                queue.enqueue({})
        assert time.monotonic() - started < 5
        assert isinstance(caught.value.__cause__, AutoReconnect)


def test_without_a_deadline_nothing_is_repeated(
    victim: Queue[Any], microqueue_client: MongoClient[Any], commands: Commands
) -> None:
    settings = QueueSettings(retry_deadline=0)
    queue: Queue[Any] = Queue(core_of(victim).collections.tasks, settings=settings)
    queue.now()
    queue.ensure_indexes()
    commands.names.clear()
    with failing(microqueue_client, ["insert"], errorCode=10107), pytest.raises(ServerUnavailable):
        queue.enqueue({})
    assert commands.names == ["insert"]


def test_errors_that_do_not_pass_are_not_repeated(
    victim: Queue[Any], microqueue_client: MongoClient[Any], commands: Commands
) -> None:
    commands.names.clear()
    with (
        failing(microqueue_client, ["insert"], times=5, errorCode=13),
        pytest.raises(OperationFailed) as caught,
    ):
        victim.enqueue({})
    assert not isinstance(caught.value, ServerUnavailable)
    assert commands.names == ["insert"]


class ReplyLost:
    """Performs a method once without letting its reply through, as a broken connection does."""

    def __init__(self, collection: Any, method: str, *, performed: bool = True) -> None:
        self._collection = collection
        self._method = method
        self._performed = performed
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._collection, name)
        if name != self._method or self.lost:
            return value

        def lose(*arguments: Any, **options: Any) -> Any:
            self.lost += 1
            if self._performed:
                value(*arguments, **options)
            raise AutoReconnect("connection closed")

        return lose


def losing(queue: Queue[Any], method: str, *, performed: bool = True) -> ReplyLost:
    lossy = ReplyLost(core_of(queue).collections.tasks, method, performed=performed)
    core_of(queue).collections.tasks = lossy
    return lossy


def test_pop_finds_its_claim_again_when_the_reply_was_lost(microqueue_queue: Queue[Any]) -> None:
    microqueue_queue.enqueue_many([{"n": 1}, {"n": 2}])
    assert losing(microqueue_queue, "find_one_and_update").lost == 0
    task = microqueue_queue.pop()
    assert task is not None
    assert (task.payload, task.attempts) == ({"n": 1}, 1)
    assert microqueue_queue.stats().processing == 1
    microqueue_queue.mark_done(task)


def test_pop_that_claimed_nothing_says_so_and_can_be_called_again(
    microqueue_queue: Queue[Any],
) -> None:
    microqueue_queue.enqueue({"n": 1})
    losing(microqueue_queue, "find_one_and_update", performed=False)
    with pytest.raises(ServerUnavailable):
        microqueue_queue.pop()
    task = microqueue_queue.pop()
    assert task is not None
    assert task.attempts == 1


def test_batch_finds_its_claims_again_when_the_reply_was_lost(
    microqueue_queue: Queue[Any],
) -> None:
    microqueue_queue.enqueue_many([{"n": n} for n in range(5)])
    losing(microqueue_queue, "update_many")
    tasks = microqueue_queue.pop_many(5)
    assert [task.payload["n"] for task in tasks] == [0, 1, 2, 3, 4]
    assert {task.attempts for task in tasks} == {1}


@pytest.mark.parametrize("task_id", [None, "own"])
def test_insert_whose_reply_was_lost_is_not_taken_for_a_duplicate(
    microqueue_queue: Queue[Any], task_id: Any
) -> None:
    microqueue_queue.ensure_indexes()
    losing(microqueue_queue, "insert_one")
    microqueue_queue.enqueue({"n": 1}, task_id=task_id, dedupe_key="k")
    assert microqueue_queue.stats().ready == 1


def test_batch_insert_whose_reply_was_lost_reports_no_duplicates(
    microqueue_queue: Queue[Any],
) -> None:
    microqueue_queue.ensure_indexes()
    losing(microqueue_queue, "insert_many")
    report = microqueue_queue.enqueue_many([{"n": n} for n in range(10)])
    assert (report.added, report.duplicates) == (10, [])
    assert microqueue_queue.stats().ready == 10


@pytest.mark.parametrize("name", ["mark_done", "mark_retry", "mark_failure", "release"])
def test_settlement_whose_reply_was_lost_counts_once(
    microqueue_queue: Queue[Any], name: str
) -> None:
    microqueue_queue.enqueue({})
    task = microqueue_queue.pop()
    assert task is not None
    losing(microqueue_queue, "update_one")
    REPEATED[name][1](microqueue_queue, task)
    stored = microqueue_queue.get(task.id)
    assert stored is not None
    assert len(stored.history) == 1
    assert stored.attempts == (0 if name == "release" else 1)


def test_server_time_is_read_again_after_a_failover(
    victim: Queue[Any], microqueue_client: MongoClient[Any]
) -> None:
    assert not victim.clock.stale
    # The first repeat is immediate; the second waits, and forgets the time before.
    with failing(microqueue_client, ["insert"], times=2, errorCode=10107):
        victim.enqueue({})
    assert victim.clock.stale


def test_no_task_is_lost_or_doubled_while_the_primary_steps_down() -> None:
    with EmbeddedServer.start() as server, MongoClient[Any](server.uri) as client:
        queue: Queue[Any] = Queue(client.test)
        queue.ensure_indexes()
        stepped_down = threading.Event()

        def step_down() -> None:
            command = {"replSetStepDown": 1, "secondaryCatchUpPeriodSecs": 0, "force": True}
            client.admin.command(command)
            stepped_down.set()

        thread = threading.Thread(target=step_down)
        delivered = []
        for n in range(60):
            if n == 20:
                thread.start()
                stepped_down.wait(30)
            queue.enqueue({"n": n}, task_id=n)
            task = queue.pop()
            assert task is not None
            queue.mark_done(task)
            delivered.append(task.id)
        thread.join()
        assert delivered == list(range(60))
        assert queue.stats().done == 60
        assert {task.attempts for task in queue.peek(100)} == {1}


async def test_async_calls_are_repeated_as_well(
    database_uri: str, microqueue_client: MongoClient[Any]
) -> None:
    options: dict[str, Any] = {"appname": "victim", "retryWrites": False}
    async with AsyncQueue[Any].from_uri(database_uri, **options) as queue:
        await queue.enqueue({})
        task = await queue.pop()
        assert task is not None
        with failing(microqueue_client, ["insert", "update"], times=4, closeConnection=True):
            await queue.enqueue({})
            await queue.mark_done(task)
        stored = await queue.get(task.id)
        assert stored is not None
        assert stored.status is TaskStatus.DONE


def test_messages_name_no_password() -> None:
    error = AutoReconnect("mongodb://user:secret@host: connection closed")
    assert "secret" not in str(translate(error))
