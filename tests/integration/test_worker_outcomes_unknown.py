"""Errors after which it is unknown what was written: no task is lost, or reported twice."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

from microqueue import AsyncQueue, Queue, QueueSettings
from microqueue.worker import AsyncWorker, Hooks, Worker, shutdown
from microqueue.worker.completer import commit
from tests.integration.rig import KINDS, Rig, stored
from tests.servers import fail_command
from tests.waiting import LEASE_SEC, wait_for

UNCONFIRMED = {"code": 64, "errmsg": "waiting for replication timed out"}


@contextmanager
def failing(database: Any, collection: str, times: int, **how: Any) -> Iterator[None]:
    """Make some commands on a collection fail, a number of times."""
    how["namespace"] = f"{database.name}.{collection}"
    with fail_command(database.client, {"times": times}, **how):
        yield


@pytest.mark.parametrize("count", [1, 5])
def test_claim_that_was_written_and_not_confirmed_is_worked_off(rig: Rig, count: int) -> None:
    rig.queue.enqueue_many([{}] * count)
    commands = ["update", "findAndModify"]
    with failing(rig.database, "tasks", 1, failCommands=commands, writeConcernError=UNCONFIRMED):
        assert rig.run(lambda _payload: None) == count
    assert rig.queue.stats().done == count
    assert {task.attempts for task in rig.queue.peek(9, status="done")} == {1}


def test_what_a_claim_took_that_ended_in_an_error_is_worked_off(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"dead_letters": "collection", "retry_deadline": timedelta()}
    rig.settings = rig.settings.model_copy(update=changes)
    spent = rig.queue.enqueue({"n": -1}, max_attempts=1)
    rig.database.tasks.update_one({"_id": spent.id}, {"$set": {"attempts": 1}})
    rig.queue.enqueue_many([{"n": n} for n in range(9)])
    with failing(rig.database, "tasks_dlq", 1, failCommands=["update", "insert"], errorCode=50):
        thread = rig.start(lambda _payload: None)
        try:
            wait_for(lambda: rig.queue.stats().done == 9)
        finally:
            rig.stop()
            thread.join(60)
    assert {task.attempts for task in rig.queue.peek(9, status="done")} == {1}
    assert rig.queue.workers() == []
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    # Otherwise nothing had to be recovered.
    assert vars(warned[0]).get("claimed") is False


def test_worker_that_cannot_tell_what_it_claimed_stays_on_the_list(
    microqueue_database: Any,
) -> None:
    settings = QueueSettings(dead_letters="collection", retry_deadline=0)
    queue: Queue[Any] = Queue(microqueue_database, settings=settings)
    spent = queue.enqueue({}, max_attempts=1)
    microqueue_database.tasks.update_one({"_id": spent.id}, {"$set": {"attempts": 1}})
    queue.enqueue({})
    with (
        failing(
            microqueue_database, "tasks_dlq", 99, failCommands=["update", "insert"], errorCode=50
        ),
        pytest.raises(Exception, match="failpoint"),
    ):
        Worker(queue, lambda _payload: None, worker_id="w").run(burst=True)
    assert queue.stats().processing >= 1
    assert [worker.id for worker in queue.workers()] == ["w"]  # So the sweeper looks after it.


def test_worker_whose_claim_failed_before_its_write_leaves_the_list(rig: Rig) -> None:
    rig.settings = rig.settings.model_copy(update={"retry_deadline": timedelta()})
    rig.queue.enqueue_many([{}] * 2)
    with (
        failing(rig.database, "tasks", 99, failCommands=["find"], errorCode=50),
        pytest.raises(Exception, match="failpoint"),
    ):
        rig.run(lambda _payload: None)
    assert rig.queue.stats().processing == 0
    assert rig.queue.workers() == []


@pytest.mark.parametrize(
    "how",
    [
        {"errorCode": 13},
        {"blockConnection": True, "blockTimeMS": 8000},
    ],
    ids=["rejected", "late"],
)
def test_worker_that_cannot_leave_the_list_ends_in_time_and_says_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: Any
) -> None:
    monkeypatch.setattr(shutdown, "ENDING_SEC", 2.0)
    rig.queue.enqueue({})
    with failing(rig.database, "microqueue_workers", 1, failCommands=["delete"], **how):
        # With such a heartbeat, a call that is late is not soon made again.
        assert rig.run(lambda _payload: None, grace=0, heartbeat=30) == 1
    (warned,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert vars(warned)["deregistered"] is False
    assert vars(warned)["worker_id"] == rig.worker.worker_id
    assert rig.queue.stats().done == 1


@pytest.mark.parametrize("rig", KINDS[1:], indirect=True)  # Worker runs no coroutines.
def test_coroutine_of_a_plain_function_is_not_run_after_its_task_was_cancelled(rig: Rig) -> None:
    task = rig.queue.enqueue({})
    started, cancelled, ran = threading.Event(), threading.Event(), threading.Event()

    async def coroutine() -> None:
        ran.set()

    def handler(_payload: Any) -> Any:
        started.set()
        assert cancelled.wait(60)
        return coroutine()

    class Seen(Hooks):
        def on_cancel(self, task: Any) -> None:
            cancelled.set()

    thread = rig.start(handler, hooks=[Seen()])
    assert started.wait(60)
    rig.queue.cancel(task.id)
    assert cancelled.wait(60)
    rig.stop()
    thread.join(60)
    assert not ran.is_set()
    assert stored(rig, task).error.code == "cancelled"


def test_each_round_of_a_claim_has_its_own_token(rig: Rig) -> None:
    spent = [rig.queue.enqueue({}, max_attempts=1) for _ in range(2)]
    rig.database["tasks"].update_many({}, {"$set": {"attempts": 1}})
    lasting = rig.queue.enqueue({})
    held: set[Any] = set()

    def handler(_payload: Any) -> None:
        held.add(rig.database["tasks"].find_one({"_id": lasting.id})["lease_token"])

    assert rig.run(handler, concurrency=1) == 1
    stored_spent = rig.database["tasks"].find({"_id": {"$in": [one.id for one in spent]}})
    entries = [one["history"][-1] for one in stored_spent]
    first_round = {entry["lease_token"] for entry in entries}
    assert len(first_round) == len(held) == 1  # The first round took both.
    assert not first_round & held


def test_settlement_that_outlives_the_grace_is_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "ENDING_SEC", 20.0)
    rig.queue.enqueue({})
    handled = threading.Event()
    blocked = {"failCommands": ["update"], "blockConnection": True, "blockTimeMS": 4000}
    with failing(rig.database, "tasks", 1, **blocked):
        thread = rig.start(lambda _payload: handled.set(), grace=3.3)
        assert handled.wait(60)
        rig.stop()
        thread.join(60)
    assert rig.worker._writer.handled == 1  # noqa: SLF001 (run returned it)
    assert rig.queue.stats().done == 1
    assert rig.queue.workers() == []


def test_a_worker_that_is_full_makes_due_tasks_ready(rig: Rig) -> None:
    rig.queue.enqueue_many([{"n": n} for n in range(2500)])  # Enough for 25 seconds.
    rig.queue.enqueue({"n": "urgent"}, delay=0.5, priority=255)
    behind: list[int] = []

    def handler(payload: Any) -> None:
        if payload["n"] == "urgent":
            behind.append(rig.queue.stats().ready)
        time.sleep(0.02)

    thread = rig.start(handler, concurrency=2)
    try:
        wait_for(lambda: behind)
    finally:
        rig.stop(immediately=True)
        thread.join(60)
    assert behind[0] > 100


def test_trouble_with_one_queue_does_not_stop_the_renewals_of_another(
    microqueue_database: Any,
) -> None:
    settings = QueueSettings(visibility_timeout=LEASE_SEC, retry_deadline=0)
    bad, good = (
        Queue[Any](microqueue_database[name], settings=settings) for name in ("bad", "good")
    )
    for queue in (bad, good):
        queue.enqueue({})
    go = threading.Event()
    worker = Worker([bad, good], lambda _payload: go.wait(60), concurrency=2)
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_for(lambda: bad.stats().processing and good.stats().processing)
    (claimed,) = good.peek()
    assert claimed.lease is not None
    claimed_until = claimed.lease.expires_at
    try:
        with failing(microqueue_database, "bad", 999, failCommands=["update"], errorCode=50):
            wait_for(lambda: bad.stats().overdue and good.now() > claimed_until)
            assert good.stats().overdue == 0
    finally:
        go.set()
        worker.stop()
        thread.join(60)
    assert good.stats().done == 1


def test_progress_in_words_that_cannot_be_stored_reaches_people_and_stops_nothing(
    rig: Rig,
) -> None:
    task = rig.queue.enqueue({})
    cancelled = threading.Event()

    def handler(_payload: Any, context: Any) -> None:
        context.progress(0.5, "half \ud800 way")
        while not context.cancelled:
            time.sleep(0.01)
        cancelled.set()

    thread = rig.start(handler, poll_interval=0.2)
    try:
        wait_for(lambda: stored(rig, task).progress)
        assert stored(rig, task).progress.message == "half \\ud800 way"
        rig.queue.cancel(task.id)
        assert cancelled.wait(60)
    finally:
        rig.stop(immediately=True)
        thread.join(60)


class Exiting(Hooks):
    """Does what no hook should, in the thread that keeps the leases."""

    def __init__(self) -> None:
        self.ran = threading.Event()

    def on_cancel(self, task: Any) -> None:
        self.on_lease_lost(task)

    def on_lease_lost(self, task: Any) -> None:  # Told by whichever look comes first.
        self.ran.set()
        raise SystemExit(3)


def test_hook_that_exits_leaves_the_leases_kept(microqueue_database: Any) -> None:
    settings = QueueSettings(visibility_timeout=LEASE_SEC)
    queue: Queue[Any] = Queue(microqueue_database, settings=settings)
    first, second = queue.enqueue_many([{}, {}]).tasks
    go = threading.Event()
    hooks = Exiting()
    worker = Worker(queue, lambda _payload: go.wait(60), hooks=[hooks])
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        wait_for(lambda: queue.stats().processing == 2)
        queue.cancel(first.id)
        assert hooks.ran.wait(60)
        lease = queue.get(second.id).lease  # type: ignore[union-attr]  # It is there.
        assert lease is not None
        wait_for(lambda: queue.now() > lease.expires_at)
        assert queue.stats().overdue == 0
    finally:
        go.set()
        worker.stop()
        thread.join(60)


def test_a_child_that_a_handler_forked_is_no_worker(
    microqueue_database: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.enqueue_many([{"n": n} for n in range(50)])
    children: list[int] = []

    def handler(payload: Any) -> None:
        if payload["n"] == 0:
            child = os.fork()
            if not child:
                raise SystemExit(0)
            children.append(child)
        os.write(1, b"ran\n")

    assert Worker(queue, handler, concurrency=1).run(burst=True) == 50
    os.waitpid(children[0], 0)
    assert capfd.readouterr().out.count("ran") == 50


@pytest.mark.parametrize("make_client", [AsyncMongoClient, AsyncIOMotorClient])
def test_worker_whose_loop_ends_hands_back_what_it_holds(
    database_uri: str, microqueue_database: Any, make_client: Any
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.enqueue_many([{"n": n} for n in range(12)])
    running: list[int] = []

    async def handler(payload: Any) -> None:
        running.append(payload["n"])
        if payload["n"] > 3:
            await asyncio.sleep(60)

    async def application() -> None:
        client = make_client(database_uri)
        worker = AsyncWorker(
            AsyncQueue(client[microqueue_database.name]), handler, concurrency=3, flush_interval=30
        )
        task = asyncio.create_task(worker.run())
        closers.append(asyncio.create_task(close_after(task, client)))
        while len(running) < 7:
            assert not task.done()
            await asyncio.sleep(0.01)

    async def close_after(task: asyncio.Task[int], client: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.wait([task])
            closing = client.close()
            if inspect.isawaitable(closing):
                await closing

    closers: list[asyncio.Task[None]] = []
    asyncio.run(application())  # It cancels all that is left in its loop.
    found = queue.stats()
    assert (found.done, found.ready, found.processing) == (4, 8, 0)
    assert {task.attempts for task in queue.peek(12, status="pending")} == {0}
    assert queue.workers() == []


def test_settlement_that_is_cancelled_with_its_loop_is_written_again(
    database_uri: str, microqueue_database: Any
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.enqueue({})

    async def handler(_payload: Any) -> None:
        """Return at once."""

    async def application() -> None:
        client: AsyncMongoClient[Any]
        async with AsyncMongoClient(database_uri) as client:
            worker = AsyncWorker(AsyncQueue(client[microqueue_database.name]), handler)
            writing = asyncio.Event()
            usual = worker._queues[0].run  # noqa: SLF001 (to hold a write back)

            async def run(operation: Any) -> Any:
                if operation.gi_code is commit.__code__ and not writing.is_set():
                    writing.set()
                    await asyncio.sleep(60)
                return await usual(operation)

            worker._queues[0].run = run  # type: ignore[method-assign]  # noqa: SLF001
            running = asyncio.create_task(worker.run())
            await writing.wait()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(application())
    assert queue.stats().done == 1


def test_worker_cancelled_twice_leaves_no_thread_that_keeps_its_leases(
    database_uri: str, microqueue_database: Any
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.enqueue({})
    started = asyncio.Event()

    async def handler(_payload: Any) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)

    async def application() -> None:
        client: AsyncMongoClient[Any]
        async with AsyncMongoClient(database_uri) as client:
            worker = AsyncWorker(AsyncQueue(client[microqueue_database.name]), handler)
            task = asyncio.create_task(worker.run())
            await started.wait()
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(application())
    wait_for(lambda: not [one for one in threading.enumerate() if "leases" in one.name])
