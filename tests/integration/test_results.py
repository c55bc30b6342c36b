"""Waiting for results: one change stream for all waiters, whatever happens to it."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from bson import decode_all
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import PyMongoError
from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
)

import microqueue
from microqueue import (
    AsyncQueue,
    OperationFailed,
    Queue,
    QueueSettings,
    TaskFailed,
    WaitTimeout,
)
from microqueue.core import core_of
from microqueue.drivers import result_watch
from microqueue.embedded import EmbeddedServer
from microqueue.operations import results
from tests.integration.half_open import KINDS, PATIENT_SEC, calling
from tests.integration.proxy import Proxy
from tests.integration.queues import popped
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("replica_set")

WAITERS = 500
MANY_SEC = 120.0
"""How long a slow machine may take to settle so many tasks, one by one."""
THREAD = "microqueue-results"


@pytest.fixture(autouse=True)
def never_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no task be found by the query that is repeated while the stream reports nothing."""
    monkeypatch.setattr(result_watch, "RECHECK_SEC", 3600.0)


@pytest.fixture
def never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no stream count as dead because the machine is slow."""
    monkeypatch.setattr(result_watch, "SILENT_SEC", 60.0)


class Commands(CommandListener):
    """Writes down the change streams and the queries for tasks that a client asks for."""

    def __init__(self) -> None:
        self.streams = 0
        self.queries: list[list[Any]] = []

    def started(self, event: CommandStartedEvent) -> None:
        if event.command_name == "aggregate" and "$changeStream" in event.command["pipeline"][0]:
            self.streams += 1
        if event.command.get("find") == "tasks" and "status" in event.command["filter"]:
            self.queries.append(list(event.command["filter"]["_id"]["$in"]))

    def succeeded(self, event: CommandSucceededEvent) -> None:
        """Only what is asked for counts."""

    def failed(self, event: CommandFailedEvent) -> None:
        """Only what is asked for counts."""


def registered() -> int:
    """Count the waiters of this process."""
    watches = list(result_watch._watches.values())  # noqa: SLF001 (to see who waits)
    return sum(len(several) for watch in watches for several in list(watch._waiters.values()))  # noqa: SLF001 (as above)


def open_streams(database: Any) -> list[Any]:
    """Return the cursors of change streams on the tasks, as the server sees them."""
    found = database.client.admin.aggregate(
        [
            {"$currentOp": {"allUsers": True, "idleCursors": True}},
            {"$match": {"ns": f"{database.name}.tasks"}},
        ]
    )
    cursors = [one.get("cursor", {}) for one in found]
    return [one["cursorId"] for one in cursors if "$changeStream" in str(one)]


def helper_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("microqueue")]


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return the threads that were started since, without those that PyMongo adds late."""
    new = set(threading.enumerate()) - before
    return [one for one in new if not one.name.startswith("pymongo")]


def own_tasks() -> Counter[str]:
    """Count the asyncio tasks that run code of this package, and not PyMongo's."""
    coroutines: list[Any] = [one.get_coro() for one in asyncio.all_tasks()]
    package = str(Path(microqueue.__file__).parent)
    return Counter(
        one.__qualname__ for one in coroutines if one.cr_code.co_filename.startswith(package)
    )


def nothing_is_left(database: Any) -> bool:
    return not (registered() or open_streams(database) or THREAD in helper_threads())


@contextmanager
def waiters(queue: Queue[Any], tasks: list[Any], timeout: float) -> Iterator[list[Future[Any]]]:
    """Wait for each task in its own thread."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        yield [pool.submit(queue.wait_for, task, timeout=timeout) for task in tasks]


def settle_all(queue: Queue[Any], count: int) -> None:
    """Finish all tasks: every tenth fails, and the others return their number."""
    for _ in range(count):
        task = popped(queue)
        if task.payload["n"] % 10:
            queue.mark_done(task, result=task.payload["n"])
        else:
            queue.mark_failure(task, f"no {task.payload['n']}", code="tenth")


def check_outcome(n: int, outcome: Callable[[], Any]) -> None:
    if n % 10:
        assert outcome().result == n
        return
    with pytest.raises(TaskFailed) as caught:
        outcome()
    assert (caught.value.code, caught.value.error.message) == ("tenth", f"no {n}")


@pytest.mark.usefixtures("never_silent")
def test_500_threads_wait_on_one_stream_and_one_thread(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    commands = Commands()
    with MongoClient[Any](microqueue_server.uri, event_listeners=[commands]) as client:
        queue: Queue[Any] = Queue(client[microqueue_database.name])
        tasks = queue.enqueue_many([{"n": n} for n in range(WAITERS)]).tasks
        before = set(threading.enumerate())
        with waiters(queue, list(tasks), MANY_SEC) as waits:
            wait_for(lambda: registered() == WAITERS)
            wait_for(lambda: open_streams(microqueue_database))
            new = [one.name for one in new_threads(before)]
            assert sorted(name for name in new if not name.startswith("ThreadPool")) == [THREAD]
            assert len(new) == WAITERS + 1
            settle_all(Queue(microqueue_database), WAITERS)
            for n, wait in enumerate(waits):
                check_outcome(n, wait.result)
            assert commands.streams == 1
        wait_for(lambda: nothing_is_left(microqueue_database))
        assert new_threads(before) == []


@pytest.mark.usefixtures("never_silent")
async def test_500_coroutines_wait_on_one_stream_and_one_task(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    commands = Commands()
    async with AsyncMongoClient[Any](microqueue_server.uri, event_listeners=[commands]) as client:
        queue: AsyncQueue[Any] = AsyncQueue(client[microqueue_database.name])
        tasks = (await queue.enqueue_many([{"n": n} for n in range(WAITERS)])).tasks
        before = set(threading.enumerate())
        waits = [asyncio.ensure_future(queue.wait_for(task, timeout=MANY_SEC)) for task in tasks]
        await asyncio.to_thread(wait_for, lambda: registered() == WAITERS)
        await asyncio.to_thread(wait_for, lambda: open_streams(microqueue_database))
        assert own_tasks() == {"AsyncQueue.wait_for": WAITERS, "LoopWatch._run": 1}
        assert [one for one in new_threads(before) if one.name.startswith("microqueue")] == []
        await asyncio.to_thread(settle_all, Queue(microqueue_database), WAITERS)
        await asyncio.wait(waits)
        for n, wait in enumerate(waits):
            check_outcome(n, wait.result)
        assert commands.streams == 1
        await asyncio.to_thread(wait_for, lambda: nothing_is_left(microqueue_database))
        while own_tasks():  # noqa: ASYNC110 (a task ends soon after its stream)
            await asyncio.sleep(0.01)


def test_waiters_that_gave_up_leave_nothing_behind(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    tasks = list(queue.enqueue_many([{} for _ in range(50)]).tasks)
    with waiters(queue, tasks, 0.5) as waits:
        for wait in waits:
            with pytest.raises(WaitTimeout):
                wait.result()
    wait_for(lambda: nothing_is_left(microqueue_database))
    assert queue.stats().ready == 50


async def test_cancelled_coroutine_leaves_nothing_behind(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    async with AsyncMongoClient[Any](microqueue_server.uri) as client:
        queue: AsyncQueue[Any] = AsyncQueue(client[microqueue_database.name])
        waiting = asyncio.ensure_future(queue.wait_for(await queue.enqueue({})))
        await asyncio.to_thread(wait_for, lambda: registered() == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.to_thread(wait_for, lambda: nothing_is_left(microqueue_database))


def test_event_loop_that_ends_closes_the_stream(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    other: Queue[Any] = Queue(microqueue_database)
    clients: list[AsyncMongoClient[Any]] = []

    async def wait() -> Any:
        clients.append(AsyncMongoClient(microqueue_server.uri))
        queue: AsyncQueue[Any] = AsyncQueue(clients[0][microqueue_database.name])
        waiting = asyncio.ensure_future(queue.wait_for(await queue.enqueue({})))
        await asyncio.to_thread(wait_for, lambda: open_streams(microqueue_database))
        await asyncio.to_thread(other.mark_done, popped(other), result=3)
        return (await waiting).result  # The stream is still open.

    with asyncio.Runner() as runner:
        assert runner.run(wait()) == 3
        runner.run(end_tasks())
        assert registered() == 0
        wait_for(lambda: not open_streams(microqueue_database))
        runner.run(clients[0].close())


async def end_tasks() -> None:
    """End the tasks of a program as the end of ``asyncio.run`` does."""
    for task in [one for one in asyncio.all_tasks() if one.get_name() == THREAD]:
        task.cancel()
        await asyncio.wait([task])


def test_closed_queue_has_closed_its_stream(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    other: Queue[Any] = Queue(microqueue_database)
    uri = microqueue_server.uri.replace("/?", f"/{microqueue_database.name}?")

    def finish() -> None:
        wait_for(lambda: open_streams(microqueue_database))
        other.mark_done(popped(other), result=3)

    async def wait() -> Any:
        async with AsyncQueue[Any].from_uri(uri) as queue:
            finishing = asyncio.to_thread(finish)
            found, _ = await asyncio.gather(queue.wait_for(await queue.enqueue({})), finishing)
            return found.result

    with Queue[Any].from_uri(uri) as queue, ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(finish)
        assert queue.wait_for(queue.enqueue({})).result == 3
        finishing.result()
    assert not open_streams(microqueue_database)
    assert asyncio.run(wait()) == 3
    assert not open_streams(microqueue_database)


def test_waits_that_follow_each_other_share_a_stream(
    microqueue_server: EmbeddedServer, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    linger_sec = result_watch.LINGER_SEC
    monkeypatch.setattr(result_watch, "LINGER_SEC", 60.0)  # A slow machine follows in time.
    commands = Commands()
    other: Queue[Any] = Queue(microqueue_database)
    with MongoClient[Any](microqueue_server.uri, event_listeners=[commands]) as client:
        queue: Queue[Any] = Queue(client[microqueue_database.name])
        with ThreadPoolExecutor(1) as pool:
            for n in range(5):
                wait = pool.submit(queue.wait_for, queue.enqueue({}))
                wait_for(lambda: registered() == 1)
                other.mark_done(popped(other), result=n)
                assert wait.result(PATIENT_SEC).result == n
        assert commands.streams < 5
        monkeypatch.setattr(result_watch, "LINGER_SEC", linger_sec)
        wait_for(lambda: THREAD not in helper_threads())


def test_stream_reports_only_tasks_that_end(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.ensure_indexes()
    hello = microqueue_database.command("hello")
    stream = microqueue_database.tasks.aggregate_raw_batches(
        results.settlements(hello), maxAwaitTimeMS=500
    )
    ids = [queue.enqueue({}).id for _ in range(4)]
    queue.mark_retry(popped(queue), "busy", delay=0)
    queue.release(queue.touch(popped(queue)))
    done, failed = queue.pop_many(2)
    queue.mark_done(done)
    queue.mark_failure(failed, "no")
    queue.cancel(ids[2])
    queue.purge(status="pending")
    queue.dead_letters.replay([failed.id])
    seen: list[Any] = []

    def read_to_the_end() -> bool:
        """Read what there is; a reply without changes may come before the last of them."""
        while batch := stream.try_next():
            changes = decode_all(batch)
            seen.extend(results.changed_ids(changes))
            assert all(set(change) == {"_id", "documentKey"} for change in changes)
        return ids[3] in seen

    wait_for(read_to_the_end)
    stream.close()
    assert seen == [done.id, failed.id, ids[2], ids[3]]


# Streams that die


def test_wait_survives_the_end_of_its_stream(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    task = queue.enqueue({})
    with waiters(queue, [task], PATIENT_SEC) as (wait,):
        for _ in range(3):
            (stream,) = wait_for(lambda: open_streams(microqueue_database))
            microqueue_database.command("killCursors", "tasks", cursors=[stream])
            wait_for(lambda: stream not in open_streams(microqueue_database))  # noqa: B023 (it is called within the round)
        queue.mark_done(popped(queue), result="found")
        assert wait.result().result == "found"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("disturbance", ["freeze", "cut"])
def test_wait_survives_dead_connections(
    kind: str,
    disturbance: str,
    proxy: Proxy,
    microqueue_database: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The task ends while the stream is dead, so only a query after that finds it."""
    monkeypatch.setattr(result_watch, "SILENT_SEC", 1.0)
    settings = QueueSettings(call_timeout=0.5, retry_deadline=30, poll_interval=0.2)
    other: Queue[Any] = Queue(microqueue_database)
    task = other.enqueue({})

    left_to_the_watch = threading.Event()
    for waiter in (result_watch.SyncWaiter, result_watch.AsyncWaiter):

        def wait(self: Any, deadline: Any, real: Any = waiter.wait) -> Any:
            left_to_the_watch.set()
            return real(self, deadline)

        monkeypatch.setattr(waiter, "wait", wait)

    def disturb() -> None:
        assert left_to_the_watch.wait(PATIENT_SEC)
        wait_for(lambda: open_streams(microqueue_database))
        getattr(proxy, disturbance)()
        other.mark_done(popped(other), result="found")

    with calling(kind, proxy, microqueue_database, settings) as caller:
        disturbing = threading.Thread(target=disturb)
        disturbing.start()
        found = caller(lambda: caller.queue.wait_for(task.id, timeout=50))
        disturbing.join()
        assert found.result == "found"
        if kind == "pymongo_async":
            caller(end_tasks)


def test_task_that_ends_before_the_stream_opens_is_found(
    microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settlement is in neither the stream nor the reads of the caller."""
    queue: Queue[Any] = Queue(microqueue_database)
    task = queue.enqueue({})
    opened = result_watch.ThreadWatch._open_cursor  # noqa: SLF001 (as the watch calls it)

    def open_late(watch: Any) -> None:
        wait_for(queried.is_set)
        queue.mark_done(popped(queue), result="early")
        opened(watch)

    queried = threading.Event()
    monkeypatch.setattr(result_watch.ThreadWatch, "_open_cursor", open_late)
    monkeypatch.setattr(results, "_majority_had", lambda _hello: None)  # From now on.
    with waiters(queue, [task], PATIENT_SEC) as (wait,):
        wait_for(lambda: registered() == 1)
        queried.set()
        assert wait.result().result == "early"


async def test_stream_is_not_read_in_the_context_of_a_waiter(
    microqueue_server: EmbeddedServer,
    microqueue_database: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A time limit that a caller has set with ``pymongo.timeout`` is a context variable."""
    limit: ContextVar[int | None] = ContextVar("limit", default=None)
    seen: list[int | None] = []
    settlements = results.settlements

    def recorded(hello: Any) -> Any:
        seen.append(limit.get())
        return settlements(hello)

    monkeypatch.setattr(results, "settlements", recorded)
    async with AsyncMongoClient[Any](microqueue_server.uri) as client:
        queue: AsyncQueue[Any] = AsyncQueue(client[microqueue_database.name])
        task = await queue.enqueue({})
        limit.set(1)
        with pytest.raises(WaitTimeout):
            await queue.wait_for(task, timeout=0.5)
        await asyncio.to_thread(wait_for, lambda: nothing_is_left(microqueue_database))
    assert set(seen) <= {None}


async def test_cancelled_watch_ends_its_waits_with_an_error(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    async with AsyncMongoClient[Any](microqueue_server.uri) as client:
        queue: AsyncQueue[Any] = AsyncQueue(client[microqueue_database.name])
        task = await queue.enqueue({})
        waiting = asyncio.ensure_future(queue.wait_for(task))
        await asyncio.to_thread(wait_for, lambda: open_streams(microqueue_database))
        await end_tasks()
        with pytest.raises(OperationFailed):
            await waiting
        # The next wait has another one.
        again = asyncio.ensure_future(queue.wait_for(task))
        await asyncio.to_thread(wait_for, lambda: registered() == 1)
        await queue.mark_done_many([await queue.pop()])  # type: ignore[list-item]
        assert (await again).status == "done"


async def test_watch_ends_though_a_call_swallows_its_cancellation(
    microqueue_server: EmbeddedServer, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, open_cursor = asyncio.Event(), result_watch.LoopWatch._open_cursor  # noqa: SLF001

    async def swallow(watch: result_watch.LoopWatch) -> None:
        opening.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(PATIENT_SEC)
        await open_cursor(watch)

    monkeypatch.setattr(result_watch.LoopWatch, "_open_cursor", swallow)
    async with AsyncMongoClient[Any](microqueue_server.uri) as client:
        queue: AsyncQueue[Any] = AsyncQueue(client[microqueue_database.name])
        waiting = asyncio.ensure_future(queue.wait_for(await queue.enqueue({})))
        await opening.wait()
        await end_tasks()
        with pytest.raises(OperationFailed):
            await waiting


async def test_wait_ends_though_a_call_swallows_its_cancellation(
    microqueue_server: EmbeddedServer, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncMongoClient[Any](microqueue_server.uri) as client:
        queue: AsyncQueue[Any] = AsyncQueue(client[microqueue_database.name])
        task = await queue.enqueue({})
        asked, run = asyncio.Event(), core_of(queue).run

        async def swallow(operation: Any) -> Any:
            if registered():  # The last look before the wait.
                asked.set()
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(PATIENT_SEC)
            return await run(operation)

        monkeypatch.setattr(core_of(queue), "run", swallow)
        waiting = asyncio.ensure_future(queue.wait_for(task))
        await asked.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, PATIENT_SEC)
        await asyncio.to_thread(wait_for, lambda: nothing_is_left(microqueue_database))


def test_unexpected_error_ends_all_waits(
    microqueue_database: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_watch: Any, _effect: Any) -> None:
        raise LookupError("a bug")

    queue: Queue[Any] = Queue(microqueue_database)
    tasks = list(queue.enqueue_many([{}, {}]).tasks)
    monkeypatch.setattr(result_watch.ThreadWatch, "_perform", fail)
    with waiters(queue, tasks, PATIENT_SEC) as waits:
        for wait in waits:
            with pytest.raises(OperationFailed) as caught:
                wait.result()
            assert isinstance(caught.value.__cause__, LookupError)
    logged = {one.exc_info[0] for one in caplog.records if one.exc_info}
    assert logged == {LookupError}
    monkeypatch.undo()
    with pytest.raises(WaitTimeout):
        queue.wait_for(tasks[0], timeout=0.1)
    wait_for(lambda: nothing_is_left(microqueue_database))


async def test_unexpected_error_ends_all_waits_of_an_event_loop(
    microqueue_server: EmbeddedServer, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_watch: Any, _effect: Any) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(result_watch.LoopWatch, "_perform", fail)
    async with AsyncMongoClient[Any](microqueue_server.uri) as client:
        queue: AsyncQueue[Any] = AsyncQueue(client[microqueue_database.name])
        with pytest.raises(OperationFailed) as caught:
            await queue.wait_for(await queue.enqueue({}), timeout=PATIENT_SEC)
        assert isinstance(caught.value.__cause__, LookupError)
    assert registered() == 0


def test_task_that_the_stream_does_not_report_is_found_later(
    microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settlements = results.settlements
    nothing = {"$match": {"operationType": "nothing"}}
    monkeypatch.setattr(results, "settlements", lambda hello: [*settlements(hello), nothing])
    monkeypatch.setattr(result_watch, "RECHECK_SEC", 1.0)
    queue: Queue[Any] = Queue(microqueue_database)
    with waiters(queue, [queue.enqueue({})], PATIENT_SEC) as (wait,):
        wait_for(lambda: open_streams(microqueue_database))
        queue.mark_done(popped(queue), result="late")
        assert wait.result().result == "late"


def test_closed_client_ends_the_wait_with_an_error(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    client: MongoClient[Any] = MongoClient(microqueue_server.uri)
    queue: Queue[Any] = Queue(client[microqueue_database.name])
    with waiters(queue, [queue.enqueue({})], PATIENT_SEC) as (wait,):
        wait_for(lambda: registered() == 1)
        wait_for(lambda: open_streams(microqueue_database))
        client.close()
        with pytest.raises((OperationFailed, PyMongoError)):
            wait.result()
    # The server closes the cursor later: a closed client cannot.
    wait_for(lambda: not registered() and THREAD not in helper_threads())


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


def test_waiters_on_a_standalone_server_share_one_query(standalone: EmbeddedServer) -> None:
    commands = Commands()
    with MongoClient[Any](standalone.uri, event_listeners=[commands]) as client:
        settings = QueueSettings(poll_interval=0.3)
        queue: Queue[Any] = Queue(client.test_results, settings=settings)
        tasks = list(queue.enqueue_many([{"n": n} for n in range(50)]).tasks)
        with waiters(queue, tasks, PATIENT_SEC) as waits:
            wait_for(lambda: registered() == 50)
            # The callers read their own task first.
            wait_for(lambda: [len(query) for query in commands.queries[-5:]] == [50] * 5)
            settle_all(Queue(client.test_results), 50)
            for n, wait in enumerate(waits):
                check_outcome(n, wait.result)
        wait_for(lambda: not registered() and THREAD not in helper_threads())


async def test_coroutine_on_a_standalone_server_polls(standalone: EmbeddedServer) -> None:
    async with AsyncMongoClient[Any](standalone.uri) as client:
        queue: AsyncQueue[Any] = AsyncQueue(client.test_results_async)
        task = await queue.enqueue({})
        waiting = asyncio.ensure_future(queue.wait_for(task, timeout=PATIENT_SEC))
        await asyncio.to_thread(wait_for, lambda: registered() == 1)
        claimed = await queue.pop()
        assert claimed is not None
        await queue.mark_done(claimed, result=1)
        assert (await waiting).result == 1
