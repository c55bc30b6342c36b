"""Messages for bound queues on a real server: all tasks or none, and each once, whatever fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient, monitoring

from microqueue import (
    AsyncTopic,
    InvalidArgument,
    MicroqueueError,
    Queue,
    QueueSettings,
    ServerUnavailable,
    Topic,
)
from microqueue.drivers.driver import awaited
from microqueue.embedded import EmbeddedServer
from tests.integration.proxy import Proxy
from tests.integration.replica_set import ReplicaSet
from tests.integration.test_transient import failing
from tests.servers import direct_uri
from tests.waiting import wait_for

QUEUES = ("audit", "mail")


def bound(database: Any, **options: Any) -> Topic:
    """Return a topic with two bound queues, whose clock and indexes are known."""
    topic = Topic(database, "orders", **options)
    for queue in QUEUES:
        topic.bind(queue)
    topic.publish({"n": 0}, message_id="first")
    return topic


def stored(database: Any, message_id: str) -> list[str]:
    """Return the queues that have the task of a message, sorted."""
    found = database.tasks.find({"headers.position": message_id})
    return sorted(one["queue"] for one in found)


def live(database: Any, message_id: str) -> int:
    return int(database.tasks_topic_orders.count_documents({"_id": message_id}))


class Listener(monitoring.CommandListener):
    """Calls a function before each command of a name is sent."""

    def __init__(self) -> None:
        self.before: dict[str, Callable[[], Any]] = {}
        self.names: list[str] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.names.append(event.command_name)
        if call := self.before.pop(event.command_name, None):
            call()

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...

    def failed(self, event: monitoring.CommandFailedEvent) -> None: ...


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def victim(
    microqueue_server: EmbeddedServer, microqueue_database: Any, listener: Listener
) -> Iterator[Topic]:
    """A topic whose commands can be failed, with the driver's own retries switched off."""
    options: dict[str, Any] = {"retryWrites": False, "retryReads": False}
    with MongoClient[Any](
        microqueue_server.uri, appname="victim", event_listeners=[listener], **options
    ) as client:
        yield bound(client[microqueue_database.name])


COMMITTED: dict[str, Any] = {"writeConcernError": {"code": 64, "errmsg": "waiting timed out"}}
FAULTS: list[dict[str, Any]] = [{"closeConnection": True}, {"errorCode": 10107}]


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        *[
            (name, one)
            for name in ("findAndModify", "insert", "commitTransaction")
            for one in FAULTS
        ],
        ("commitTransaction", COMMITTED),
    ],
)
def test_failed_commands_are_repeated_and_add_each_task_once(
    victim: Topic,
    microqueue_client: MongoClient[Any],
    microqueue_database: Any,
    command: str,
    fault: dict[str, Any],
) -> None:
    with failing(microqueue_client, [command], times=3, **fault):
        victim.publish({"n": 1}, message_id="m")
    assert stored(microqueue_database, "m") == [*QUEUES]
    assert live(microqueue_database, "m") == 1


@pytest.mark.parametrize("kind", ["motor", "pymongo_async"])
async def test_async_commands_are_repeated_as_well(
    microqueue_server: EmbeddedServer,
    microqueue_client: MongoClient[Any],
    microqueue_database: Any,
    kind: str,
) -> None:
    bound(microqueue_database)
    options: dict[str, Any] = {"appname": "victim", "retryWrites": False, "retryReads": False}
    client: Any = {"motor": AsyncIOMotorClient, "pymongo_async": AsyncMongoClient}[kind](
        microqueue_server.uri, **options
    )
    topic = AsyncTopic(client[microqueue_database.name], "orders")
    for command, fault in (("insert", FAULTS[0]), ("commitTransaction", COMMITTED)):
        with failing(microqueue_client, [command], times=3, **fault):
            await topic.publish({"n": 1}, message_id=command)
        assert stored(microqueue_database, command) == [*QUEUES]
        assert live(microqueue_database, command) == 1
    await awaited(client.close())


def test_publish_sends_one_transaction(victim: Topic, listener: Listener) -> None:
    listener.names.clear()
    victim.publish({"n": 1})
    assert listener.names == ["findAndModify", "insert", "commitTransaction", "insert"]
    victim.unbind("mail")
    listener.names.clear()
    victim.publish({"n": 2})
    assert listener.names == ["findAndModify", "insert", "insert"]  # One insert is atomic.


def test_rejected_insert_leaves_nothing_and_its_transaction_is_aborted(
    victim: Topic,
    listener: Listener,
    microqueue_client: MongoClient[Any],
    microqueue_database: Any,
) -> None:
    with (
        failing(microqueue_client, ["insert"], times=1, errorCode=8000),
        pytest.raises(MicroqueueError),
    ):
        victim.publish({"n": 1}, message_id="m")
    assert listener.names[-1] == "abortTransaction"
    assert stored(microqueue_database, "m") == []
    assert live(microqueue_database, "m") == 0


@pytest.mark.parametrize("command", ["findAndModify", "insert", "commitTransaction"])
def test_lost_reply_neither_loses_nor_doubles_a_task(
    microqueue_server: EmbeddedServer, microqueue_database: Any, listener: Listener, command: str
) -> None:
    with (
        Proxy(direct_uri(microqueue_server)) as proxy,
        MongoClient[Any](proxy.uri, event_listeners=[listener]) as client,
    ):
        settings = QueueSettings(call_timeout=1, retry_deadline=30)
        topic = bound(client[microqueue_database.name], settings=settings)
        listener.before[command] = proxy.drop_replies
        topic.publish({"n": 1}, message_id="m")
        assert not listener.before
    assert stored(microqueue_database, "m") == [*QUEUES]
    assert live(microqueue_database, "m") == 1


PUBLISHER = """
import os, signal, sys
from pymongo import MongoClient, monitoring
from microqueue import Topic

class Killer(monitoring.CommandListener):
    left = None
    def started(self, event):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    def succeeded(self, event): pass
    def failed(self, event): pass

killer = Killer()
uri, database, commands = sys.argv[1:]
topic = Topic(MongoClient(uri, event_listeners=[killer])[database], "orders")
topic.publish({"n": 0}, message_id="before")
killer.left = int(commands)
topic.publish({"n": 1}, message_id="m")
"""


@pytest.fixture
def short_transactions(own_server: None, microqueue_client: MongoClient[Any]) -> Iterator[None]:
    """Let the server abort the open transaction of a killed client soon; by default after 60 s."""
    set_limit = {"setParameter": 1, "transactionLifetimeLimitSeconds": 5}
    before = microqueue_client.admin.command(set_limit)["was"]
    yield
    microqueue_client.admin.command({**set_limit, "transactionLifetimeLimitSeconds": before})


@pytest.mark.usefixtures("short_transactions")
@pytest.mark.parametrize("commands", range(6))
def test_killed_publisher_leaves_all_tasks_or_none_and_a_repeat_completes_them(
    microqueue_server: EmbeddedServer, microqueue_database: Any, commands: int
) -> None:
    topic = bound(microqueue_database)
    arguments = [microqueue_server.uri, microqueue_database.name, str(commands)]
    process = subprocess.run(
        [sys.executable, "-c", PUBLISHER, *arguments], cwd=Path(__file__).parents[2], check=False
    )
    # It looks for the message, reads the bindings, inserts, commits, and inserts the message.
    assert process.returncode == (-signal.SIGKILL if commands < 5 else 0)
    written = commands >= 4
    assert stored(microqueue_database, "m") == ([*QUEUES] if written else [])
    assert live(microqueue_database, "m") == (1 if commands == 5 else 0)
    wait_for(lambda: topic.publish({"n": 1}, message_id="m"), ignoring=(ServerUnavailable,))
    assert stored(microqueue_database, "m") == [*QUEUES]
    assert live(microqueue_database, "m") == 1


def test_binding_counts_for_every_message_that_is_published_after_it(
    microqueue_database: Any,
) -> None:
    topic = bound(microqueue_database)
    times: dict[str, tuple[float, float]] = {}
    ended = threading.Event()

    def publish(publisher: int) -> None:
        for n in range(10_000):
            if ended.is_set():
                break
            began = time.monotonic()
            topic.publish({}, message_id=f"{publisher}-{n}")
            times[f"{publisher}-{n}"] = began, time.monotonic()

    def some_more() -> None:
        before = len(times)
        wait_for(lambda: len(times) >= before + 15)

    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(publish, publisher) for publisher in range(3)]
        some_more()
        marks = [time.monotonic()]
        topic.bind("late")
        marks.append(time.monotonic())
        some_more()
        marks.append(time.monotonic())
        topic.unbind("late")
        marks.append(time.monotonic())
        some_more()
        ended.set()
        for one in running:
            one.result()
    found = {
        one["headers"]["position"] for one in microqueue_database.tasks.find({"queue": "late"})
    }
    bind_began, bind_ended, unbind_began, unbind_ended = marks
    for message_id, (began, finished) in times.items():
        if finished < bind_began or began > unbind_ended:
            assert message_id not in found
        if began > bind_ended and finished < unbind_began:
            assert message_id in found
    assert found


# The caller's transaction


@pytest.fixture
def quiet(microqueue_database: Any) -> Topic:
    return bound(microqueue_database, live=False)


@pytest.mark.parametrize("abort", [False, True])
def test_publish_joins_the_callers_transaction(
    quiet: Topic, microqueue_client: MongoClient[Any], microqueue_database: Any, abort: bool
) -> None:
    with microqueue_client.start_session() as session:
        session.start_transaction()
        quiet.publish({"n": 1}, message_id="m", session=session)
        assert stored(microqueue_database, "m") == []
        session.abort_transaction() if abort else session.commit_transaction()
    assert stored(microqueue_database, "m") == ([] if abort else [*QUEUES])


def test_repeated_message_does_not_abort_the_callers_transaction(
    quiet: Topic, microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    quiet.publish({"n": 1}, message_id="m")
    quiet.bind("third")
    with microqueue_client.start_session() as session, session.start_transaction():
        quiet.publish({"n": 1}, message_id="m", session=session)
        quiet.publish({"n": 2}, message_id="other", session=session)
    assert stored(microqueue_database, "m") == [*QUEUES, "third"]
    assert stored(microqueue_database, "other") == [*QUEUES, "third"]


def test_live_message_cannot_join_a_transaction(
    microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    topic = bound(microqueue_database)
    with (
        microqueue_client.start_session() as session,
        session.start_transaction(),
        pytest.raises(InvalidArgument) as raised,
    ):
        topic.publish({"n": 1}, message_id="m", session=session)
    assert raised.value.argument == "session"
    assert stored(microqueue_database, "m") == []


async def test_async_publish_joins_the_callers_transaction(
    microqueue_server: EmbeddedServer, microqueue_database: Any, quiet: Topic
) -> None:
    async with AsyncMongoClient[Any](microqueue_server.uri) as client:
        topic = AsyncTopic(client[microqueue_database.name], quiet.name, live=False)
        async with client.start_session() as session, await session.start_transaction():
            await topic.publish({"n": 1}, message_id="m", session=session)
    assert stored(microqueue_database, "m") == [*QUEUES]


# Without transactions


class CrashError(BaseException):
    """Stands for the end of the process: nothing handles it."""


@pytest.mark.usefixtures("own_server")
def test_standalone_server_has_the_tasks_before_the_live_message() -> None:
    memory_disk = Path("/dev/shm")
    place = memory_disk if os.access(memory_disk, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="microqueue-", dir=place) as directory,
        EmbeddedServer.start(directory, replica_set=False) as server,
        MongoClient[Any](server.uri) as client,
    ):
        topic = bound(client.test)
        inserts: list[str] = []

        def before_call(call: Any) -> None:
            if call.method.startswith("insert"):
                inserts.append(call.target)
                if len(inserts) == 2:
                    raise CrashError

        topic._driver.before_call = before_call  # noqa: SLF001 (its fault point)
        with pytest.raises(CrashError):
            topic.publish({"n": 1}, message_id="m")
        assert inserts == ["tasks", "topic"]
        assert stored(client.test, "m") == [*QUEUES]
        assert live(client.test, "m") == 0
        topic.publish({"n": 1}, message_id="m")
        assert stored(client.test, "m") == [*QUEUES]
        assert live(client.test, "m") == 1


# While members of a replica set fail


@pytest.fixture(scope="module")
def trio(own_server: None) -> Iterator[ReplicaSet]:
    with ReplicaSet.started() as trio:
        yield trio


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["step down", "kill", "restart all"])
def test_no_message_is_lost_or_doubled_by_a_failover(trio: ReplicaSet, fault: str) -> None:
    with MongoClient[Any](trio.uri, serverSelectionTimeoutMS=3000) as client:
        database = client[f"test_{fault.replace(' ', '_')}"]
        topic = bound(database, settings=QueueSettings(call_timeout=3))
        published = Counter[str]()

        def publish(publisher: int) -> None:
            for n in range(60):
                message_id = f"{publisher}-{n}"
                again = partial(topic.publish, {"n": n}, message_id=message_id)
                wait_for(again, 90, ignoring=(ServerUnavailable,))
                published[message_id] += 1

        with (
            topic.subscribe("start", timeout=60) as subscription,
            ThreadPoolExecutor(3) as threads,
        ):
            running = [threads.submit(publish, publisher) for publisher in range(3)]
            wait_for(lambda: len(published) >= 30)
            if fault == "step down":
                trio.step_down(for_sec=5)
            elif fault == "kill":
                trio.primary().kill()
            else:
                for member in trio.members:
                    member.kill()
            trio.heal()
            for one in running:
                one.result()
            seen = Counter[str]()
            for message in subscription:
                seen[message.position] += 1
                if len(seen) == 181:
                    break
            assert subscription.gaps == []
        everything = {"first", *published}
        assert set(seen.values()) == {1}
        assert set(seen) == everything
        for name in QUEUES:
            queue: Queue[Any] = Queue(database, name)
            ids = [task.headers["position"] for task in queue.pop_many(500)]
            assert len(ids) == 181
            assert set(ids) == everything
