"""Idle workers cost little and wake in time: commands are counted as the server gets them."""

from __future__ import annotations

import asyncio
import inspect
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import OperationFailure
from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
)
from pymongo.synchronous.collection import Collection

from microqueue import AsyncQueue, Queue, TaskStatus
from microqueue.core import core_of
from microqueue.drivers import change_stream
from microqueue.embedded import EmbeddedServer
from microqueue.worker import AsyncWorker, Retry, Worker
from tests.integration.rig import KINDS, Rig
from tests.servers import fail_command
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("replica_set")

POLL, STREAM, CLAIM = "poll", "change stream", "claim"
APPLICATION = "watched-worker"
MOST_PER_INTERVAL = 1 / 0.8  # Intervals are shortened by up to a fifth, at random.
NO_STREAMS = 40573
HISTORY_LOST = 286


class Commands(CommandListener):
    """Writes down what a client asks the server for."""

    def __init__(self) -> None:
        self._asked: list[str] = []

    def started(self, event: CommandStartedEvent) -> None:
        name = event.command_name
        if name == "aggregate":
            name = STREAM if "$changeStream" in event.command["pipeline"][0] else POLL
        elif name in {"find", "findAndModify"}:
            name = CLAIM  # A batch is read before it is claimed; a single task is not.
        self._asked.append(name)

    def succeeded(self, event: CommandSucceededEvent) -> None:
        """Only what is asked for counts."""

    def failed(self, event: CommandFailedEvent) -> None:
        """Only what is asked for counts."""

    def __len__(self) -> int:
        return len(self._asked)

    def since(self, mark: int) -> list[str]:
        return self._asked[mark:]

    def count(self, name: str, *, since: int = 0) -> int:
        return self._asked[since:].count(name)

    def await_looks(self, count: int) -> None:
        """Wait for so many looks in a row with no try to claim in between: it is asleep."""
        mark = len(self)

        def are_there() -> bool:
            nonlocal mark
            asked = self.since(mark)
            if CLAIM in asked:
                mark += len(asked)
                return False
            return asked.count(POLL) >= count

        wait_for(are_there)


class Crew:
    """Workers of one kind on one client of this process, each with some queues."""

    def __init__(self, kind: str, uri: str, database: Any) -> None:
        self.kind = kind
        self.commands = Commands()
        self.seen: list[Any] = []
        self.uri = uri
        self._database = database
        self._options: dict[str, Any] = {
            "event_listeners": [self.commands],
            "appname": APPLICATION,
        }

    def queue(self, name: str = "default") -> Queue[Any]:
        """Return a queue of another client, whose commands are not counted."""
        return Queue(self._database, name)

    @contextmanager
    def working(
        self, *groups: Sequence[str], handler: Callable[[Any], Any] | None = None, **options: Any
    ) -> Iterator[None]:
        """Run a worker for each group of names, until the test has seen enough."""
        self.queue().ensure_indexes()
        run = self._threads if self.kind == "threads" else self._coroutines
        options = {"heartbeat": 600, "hot_poll_period": 0, **options}
        with run(groups or [["default"]], handler or self.seen.append, options):
            yield

    @contextmanager
    def _threads(self, groups: Any, handler: Any, options: dict[str, Any]) -> Iterator[None]:
        with MongoClient[Any](self.uri, **self._options) as client:
            database = client[self._database.name]
            workers = [
                Worker([Queue[Any](database, name) for name in names], handler, **options)
                for names in groups
            ]
            threads = [threading.Thread(target=worker.run) for worker in workers]
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                for worker in workers:
                    worker.stop()
                for thread in threads:
                    thread.join(30)
        assert not any(thread.is_alive() for thread in threads)

    @contextmanager
    def _coroutines(self, groups: Any, handler: Any, options: dict[str, Any]) -> Iterator[None]:
        started = threading.Event()
        workers: list[AsyncWorker] = []
        loops: list[asyncio.AbstractEventLoop] = []

        async def work() -> None:
            make: Any = AsyncIOMotorClient if self.kind == "motor" else AsyncMongoClient
            client = make(self.uri, **self._options)
            database = client[self._database.name]
            for names in groups:
                queues = [AsyncQueue[Any](database, name) for name in names]
                workers.append(AsyncWorker(queues, handler, **options))
            loops.append(asyncio.get_running_loop())
            started.set()
            await asyncio.gather(*(worker.run() for worker in workers))
            closing = client.close()
            if inspect.isawaitable(closing):
                await closing

        thread = threading.Thread(target=lambda: asyncio.run(work()))
        thread.start()
        assert started.wait(30)
        try:
            yield
        finally:
            for worker in workers:
                loops[0].call_soon_threadsafe(worker.stop)
            thread.join(30)
        assert not thread.is_alive()

    def open_streams(self) -> int:
        """Count the change streams on the tasks, as the server sees them."""
        found = self._database.client.admin.aggregate(
            [
                {"$currentOp": {"allUsers": True, "idleCursors": True}},
                {"$match": {"ns": f"{self._database.name}.tasks"}},
            ]
        )
        return sum("$changeStream" in str(one.get("cursor", "")) for one in found)

    def handle_one(self, **payload: Any) -> list[str]:
        """Enqueue a task, wait for its end, and return the commands of its worker."""
        mark = len(self.commands)
        task = self.queue().enqueue(payload)
        wait_for(lambda: self.status(task) is TaskStatus.DONE)
        return [name for name in self.commands.since(mark) if name != "getMore"]

    def status(self, task: Any) -> TaskStatus:
        found = self.queue().get(task.id)
        assert found is not None
        return found.status

    def is_woken_by_its_stream(self) -> bool:
        """Return whether a new task is claimed without a poll, as only a change stream allows."""
        for _ in range(10):  # A look may happen to come first.
            self.commands.await_looks(1)
            if self.handle_one()[0] == CLAIM:
                return True
        return False


@pytest.fixture
def quick_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers read their change stream in short turns, as they end after one."""
    monkeypatch.setattr(change_stream, "AWAIT_SEC", 0.1)


@pytest.fixture(params=["threads", "pymongo_async"])
def crew(
    request: pytest.FixtureRequest, microqueue_server: EmbeddedServer, microqueue_database: Any
) -> Crew:
    return Crew(request.param, microqueue_server.uri, microqueue_database)


@pytest.fixture(params=KINDS)
def any_crew(
    request: pytest.FixtureRequest, microqueue_server: EmbeddedServer, microqueue_database: Any
) -> Crew:
    return Crew(request.param, microqueue_server.uri, microqueue_database)


@pytest.fixture
def threads(microqueue_server: EmbeddedServer, microqueue_database: Any) -> Crew:
    return Crew("threads", microqueue_server.uri, microqueue_database)


# Idle workers


def test_idle_worker_asks_once_per_poll_interval_and_reads_its_stream(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stalled thread does not open its stream again.
    monkeypatch.setattr(change_stream, "LEFT_TOO_LONG_SEC", 3600.0)
    poll_sec = 0.2
    with crew.working(["some", "queues", "together"], poll_interval=poll_sec):
        crew.commands.await_looks(2)
        begun, mark = time.monotonic(), len(crew.commands)
        wait_for(lambda: crew.commands.count(POLL, since=mark) >= 7)
        asked = crew.commands.since(mark)
        took_sec = time.monotonic() - begun  # It spans all that was asked.
    assert set(asked) <= {POLL, "getMore"}
    assert asked.count(POLL) <= MOST_PER_INTERVAL * took_sec / poll_sec + 1
    assert asked.count("getMore") <= took_sec + 2  # The server holds each back for a second.


@pytest.mark.usefixtures("quick_ends")
def test_workers_of_one_process_share_one_change_stream(any_crew: Crew) -> None:
    with any_crew.working(["a", "b"], ["b", "c"], ["d", "a"], poll_interval=60):
        for name in "abcd":  # All are heard, the first and the last.
            any_crew.queue(name).enqueue({"queue": name})
            wait_for(lambda name=name: {"queue": name} in any_crew.seen)  # type: ignore[misc]  # A lambda has no types.
        assert len(any_crew.seen) == 4
        wait_for(lambda: any_crew.open_streams() == 1)


def test_worker_that_ended_leaves_no_stream_open(any_crew: Crew) -> None:
    with any_crew.working(poll_interval=60):
        wait_for(lambda: any_crew.open_streams() == 1)
    wait_for(lambda: any_crew.open_streams() == 0)  # Though its client was closed at once.


@pytest.mark.usefixtures("quick_ends")
@pytest.mark.parametrize(
    ("hot_sec", "fewest", "most"), [(0, 1, 8), (5, 9, 10_000)], ids=["never", "for a while"]
)
def test_worker_polls_fast_after_work_and_then_slows_down(
    crew: Crew, hot_sec: float, fewest: int, most: int
) -> None:
    with crew.working(poll_interval=0.2, hot_poll_period=hot_sec):
        crew.commands.await_looks(2)
        mark = len(crew.commands)
        crew.handle_one()
        crew.commands.await_looks(3)
        assert fewest <= crew.commands.count(CLAIM, since=mark) <= most


@pytest.mark.usefixtures("quick_ends")
def test_news_of_other_queues_cost_few_queries(threads: Crew) -> None:
    others = threads.queue("others")
    others.enqueue({})
    with threads.working(poll_interval=60):
        wait_for(lambda: threads.open_streams() == 1)
        begun, mark = time.monotonic(), len(threads.commands)
        for _ in range(150):
            task = others.pop()
            assert task is not None
            others.release(task)  # It is ready again: that is news for all.
        asked = threads.commands.since(mark)
        took_sec = time.monotonic() - begun
        # A claim and a look each time that it wakes, soon no more than five times a second.
        assert asked.count(CLAIM) + asked.count(POLL) <= 20 + 2 * 5 * took_sec
        threads.handle_one()  # It is not deaf.


# With a change stream that is away for a while


@pytest.mark.usefixtures("quick_ends")
def test_stream_that_was_refused_at_first_is_used_when_it_is_there(
    threads: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = 0
    allowed = threading.Event()
    original = Collection.watch

    def watch(collection: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal refused
        if allowed.is_set():
            return original(collection, *arguments, **options)
        refused += 1
        raise OperationFailure("no change streams here", NO_STREAMS)

    monkeypatch.setattr(Collection, "watch", watch)
    monkeypatch.setattr(change_stream, "REOPEN_SEC", 0.1)
    with threads.working(poll_interval=2):
        threads.handle_one()
        wait_for(lambda: refused >= 2)
        assert threads.open_streams() == 0
        allowed.set()
        wait_for(lambda: threads.open_streams() == 1)
        assert threads.is_woken_by_its_stream()


@pytest.mark.usefixtures("quick_ends")
def test_stream_that_the_server_ends_is_opened_anew(
    threads: Crew, microqueue_client: MongoClient[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_stream, "REOPEN_SEC", 0.1)
    with threads.working(poll_interval=2):
        wait_for(lambda: threads.open_streams() == 1)
        assert threads.is_woken_by_its_stream()
        opened = threads.commands.count(STREAM)
        ending: dict[str, Any] = {
            "failCommands": ["getMore"],
            "errorCode": HISTORY_LOST,  # An end from which a driver does not resume.
            "appName": APPLICATION,
        }
        with fail_command(microqueue_client, {"times": 1}, **ending):
            wait_for(lambda: threads.commands.count(STREAM) > opened)
        wait_for(lambda: threads.open_streams() == 1)
        assert threads.is_woken_by_its_stream()


# On a server that has no change streams


@pytest.fixture(scope="module")
def standalone(own_server: None) -> Iterator[EmbeddedServer]:
    memory_disk = Path("/dev/shm")
    place = memory_disk if os.access(memory_disk, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="microqueue-", dir=place) as directory,
        EmbeddedServer.start(directory, replica_set=False) as server,
    ):
        yield server


@pytest.fixture(params=["threads", "pymongo_async"])
def lone_crew(request: pytest.FixtureRequest, standalone: EmbeddedServer) -> Iterator[Crew]:
    with MongoClient[Any](standalone.uri) as client:
        yield Crew(request.param, standalone.uri, client[f"test_{request.param}"])
        client.drop_database(f"test_{request.param}")


@pytest.mark.usefixtures("quick_ends")
def test_worker_on_a_standalone_server_polls(lone_crew: Crew) -> None:
    poll_sec = 0.2
    with lone_crew.working(poll_interval=poll_sec):
        lone_crew.commands.await_looks(2)
        begun, mark = time.monotonic(), len(lone_crew.commands)
        wait_for(lambda: lone_crew.commands.count(POLL, since=mark) >= 7)
        asked = lone_crew.commands.since(mark)
        took_sec = time.monotonic() - begun
        assert set(asked) <= {POLL, STREAM, CLAIM}
        # It tries for a stream now and then, and looks once more after each try.
        tries = took_sec / change_stream.REOPEN_SEC + 1
        assert asked.count(STREAM) <= tries
        assert asked.count(POLL) <= MOST_PER_INTERVAL * took_sec / poll_sec + 1 + tries
        for _ in range(3):
            lone_crew.handle_one()
        late = lone_crew.queue().enqueue({"late": True}, delay=0.5)
        wait_for(lambda: lone_crew.status(late) is TaskStatus.DONE)
    assert len(lone_crew.seen) == 4


@pytest.mark.usefixtures("quick_ends")
def test_burst_on_a_standalone_server_drains_the_queue(lone_crew: Crew) -> None:
    lone_crew.queue().enqueue_many([{"n": n} for n in range(300)])
    seen: list[int] = []
    rig = Rig(lone_crew.kind, lone_crew.uri, core_of(lone_crew.queue()).collections.database)
    assert rig.run(lambda payload: seen.append(payload["n"])) == 300
    assert sorted(seen) == list(range(300))


# Delayed tasks


def lateness(crew: Crew, task: Any) -> timedelta:
    """Wait for a delayed task's end; give how long after its due date it was claimed."""
    wait_for(lambda: crew.status(task) is TaskStatus.DONE)
    stored = core_of(crew.queue()).collections.tasks.find_one({"_id": task.id})
    late: timedelta = stored["started_at"] - task.next_retry_at
    return late


# A poll of thirty seconds would be later by twenty at least.
IN_TIME = timedelta(seconds=20)
POLL_SEC = 30
CLOCKS_DIFFER = timedelta(milliseconds=100)


@pytest.mark.usefixtures("quick_ends")
def test_delayed_task_that_waits_already_starts_on_time(crew: Crew) -> None:
    crew.queue().enqueue({}, delay=3600)
    task = crew.queue().enqueue({}, delay=0.7)
    with crew.working(poll_interval=POLL_SEC):
        assert -CLOCKS_DIFFER < lateness(crew, task) < IN_TIME


@pytest.mark.usefixtures("quick_ends")
def test_delayed_task_that_comes_while_the_worker_sleeps_starts_on_time(crew: Crew) -> None:
    crew.queue().enqueue({}, delay=3600)
    with crew.working(poll_interval=POLL_SEC):
        wait_for(lambda: crew.open_streams() == 1)
        for delay_sec in (0.7, 0.3):
            task = crew.queue().enqueue({}, delay=delay_sec)
            assert -CLOCKS_DIFFER < lateness(crew, task) < IN_TIME


@pytest.mark.usefixtures("quick_ends")
def test_retried_task_starts_on_time(threads: Crew) -> None:
    """It is not enqueued again: the worker itself sent it back."""
    attempts: list[float] = []

    def handler(_payload: Any) -> None:
        attempts.append(time.monotonic())
        if len(attempts) == 1:
            raise Retry(delay=0.5)

    with threads.working(poll_interval=POLL_SEC, handler=handler):
        wait_for(lambda: threads.open_streams() == 1)
        threads.queue().enqueue({})
        wait_for(lambda: len(attempts) == 2, 60)
    assert 0.4 < attempts[1] - attempts[0] < IN_TIME.total_seconds()
