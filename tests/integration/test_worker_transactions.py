"""``context.transaction``: what a handler writes, enqueues and settles is stored together."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from microqueue import (
    AsyncQueue,
    AsyncWorker,
    BackoffPolicy,
    LeaseLost,
    Outcome,
    Queue,
    QueueSettings,
    Sweeper,
    Tasks,
    TaskStatus,
    TransactionsUnsupported,
    WrongStatus,
)
from microqueue.core import core_of
from microqueue.drivers.transactions import run_in_transaction, run_in_transaction_async
from microqueue.embedded import EmbeddedServer
from microqueue.operations.leases import lease_states
from microqueue.operations.settle import settle_batch
from microqueue.testing import memory_queue
from microqueue.worker import Context, Hooks, Worker, completer, context, lease_renewal
from tests.integration.rig import Rig, stored
from tests.servers import fail_command
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("replica_set")

NO_BACKOFF = BackoffPolicy(base_sec=0, max_sec=0)
Steps = Generator[Any, Any, Any]
"""What a function of a transaction does, for all kinds of client: each step may be awaitable."""


class BusinessError(Exception):
    """What a handler raises."""


@pytest.fixture
def rig(rig: Rig) -> Rig:
    rig.settings = QueueSettings(visibility_timeout=60, backoff=NO_BACKOFF)
    rig.queue.ensure_indexes()
    rig.database.create_collection("orders")
    return rig


def transacting(
    rig: Rig,
    write: Callable[[Any, Any], Steps],
    *,
    before: Callable[[Any], object] = lambda _context: None,
    after: Callable[[Any], object] = lambda _context: None,
) -> Any:
    """Make a handler of the rig's kind whose transaction takes these steps."""

    def take(steps: Steps) -> Any:
        try:
            while True:
                next(steps)
        except StopIteration as stop:
            return stop.value

    async def take_async(steps: Steps) -> Any:
        try:
            step = next(steps)
            while True:
                try:
                    reply = await step if inspect.isawaitable(step) else step
                except WrongStatus as exc:
                    step = steps.throw(exc)
                else:
                    step = steps.send(reply)
        except StopIteration as stop:
            return stop.value

    def function(_payload: Any, context: Any) -> Any:
        before(context)
        result = context.transaction(lambda session: take(write(context, session)))
        after(context)
        return result

    async def coroutine(_payload: Any, context: Any) -> Any:
        await asyncio.to_thread(before, context)
        result = await context.transaction(lambda session: take_async(write(context, session)))
        await asyncio.to_thread(after, context)
        return result

    return function if rig.kind == "threads" else coroutine


def orders(rig: Rig, session: Any) -> Any:
    return session.client[rig.database.name].orders


def ship(rig: Rig) -> Callable[[Any, Any], Steps]:
    """Write an order and enqueue a task, if there is none of its kind yet."""

    def write(context: Any, session: Any) -> Steps:
        yield orders(rig, session).insert_one({"of": context.task.id}, session=session)
        yield context.enqueue({"child": True}, delay=3600, priority=7)
        return "shipped"

    return write


def counts(rig: Rig) -> tuple[int, int, int]:
    stats = rig.queue.stats()
    return rig.database.orders.count_documents({}), stats.delayed, stats.done


class Recorder(Hooks):
    """Notes the hooks that were called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def on_success(self, task: Any, *, took_sec: float) -> None:
        self.called.append("success")

    def on_retry(self, task: Any, error: BaseException, *, took_sec: float) -> None:
        self.called.append(f"retry {type(error).__name__}")

    def on_lease_lost(self, task: Any) -> None:
        self.called.append("lease lost")

    def on_release(self, task: Any) -> None:
        self.called.append("release")


def test_effect_child_and_settlement_are_stored_together_and_settled_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[Any] = []

    def write_settlements(plain: Any, others: Any, **options: Any) -> Any:
        settled.extend([*plain, *others])
        return settle_batch(plain, others, **options)

    monkeypatch.setattr(completer, "settle_batch", write_settlements)
    hooks = Recorder()
    task = rig.queue.enqueue({})
    assert rig.run(transacting(rig, ship(rig)), keep_result=True, hooks=[hooks]) == 1
    found = stored(rig, task)
    assert (found.status, found.attempts, found.result) == (TaskStatus.DONE, 1, "shipped")
    assert [attempt.outcome for attempt in found.history] == [Outcome.DONE]
    assert counts(rig) == (1, 1, 1)
    (child,) = rig.queue.peek(status="pending")
    assert (child.payload, child.priority) == ({"child": True}, 7)
    assert (settled, hooks.called) == ([], ["success"])
    assert rig.queue.workers() == []  # It left in order.


def test_named_task_is_added_in_the_transaction(rig: Rig) -> None:
    tasks = Tasks()

    @tasks.task(priority=7)
    def resize(width: int) -> None:
        """Do nothing."""

    def write(context: Any, _session: Any) -> Steps:
        width = context.task.payload["width"]
        yield context.enqueue(resize.options(delay=60).new(width=width))
        if width < 0:
            raise BusinessError

    rig.queue.enqueue_many([{"width": 3}, {"width": -1}], max_attempts=1)
    assert rig.run(transacting(rig, write)) == 2
    (child,) = rig.queue.peek(status="pending")
    assert (child.name, child.payload, child.priority) == ("resize", {"width": 3}, 7)


def test_result_is_not_stored_unless_it_is_kept(rig: Rig) -> None:
    task = rig.queue.enqueue({})
    rig.run(transacting(rig, ship(rig)))
    assert stored(rig, task).result is None


def test_function_that_raises_leaves_nothing_and_the_task_is_retried(rig: Rig) -> None:
    task = rig.queue.enqueue({})

    def write(context: Any, session: Any) -> Steps:
        yield from ship(rig)(context, session)
        if context.attempt == 1:
            assert counts(rig) == (0, 0, 0)
            raise BusinessError

    assert rig.run(transacting(rig, write)) == 2
    assert stored(rig, task).attempts == 2
    assert counts(rig) == (1, 1, 1)


def test_result_that_cannot_be_stored_leaves_nothing_but_a_dead_letter(rig: Rig) -> None:
    task = rig.queue.enqueue({})

    def write(context: Any, session: Any) -> Steps:
        yield from ship(rig)(context, session)
        return object()

    rig.run(transacting(rig, write), keep_result=True)
    assert (stored(rig, task).status, stored(rig, task).error.code) == ("failed", "invalid_result")
    assert counts(rig) == (0, 0, 0)


def test_lost_lease_aborts_the_transaction(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # No look finds that the lease is lost before the transaction does.
    monkeypatch.setattr(lease_renewal, "CHECK_EVERY_SEC", 3600.0)
    lost: list[LeaseLost] = []
    task = rig.queue.enqueue({})

    def write(context: Any, session: Any) -> Steps:
        yield from ship(rig)(context, session)

    def lose(context: Any) -> None:
        if not lost:
            lost.append(LeaseLost(task_id=task.id, worker_id=None, reason="soon"))
            rig.queue.release(context.task)  # As a sweep does; the task is delivered again.

    hooks = Recorder()
    rig.run(transacting(rig, write, before=lose), concurrency=1, prefetch=1, hooks=[hooks])
    assert sorted(hooks.called) == ["lease lost", "retry LeaseLost", "success"]
    assert counts(rig) == (1, 1, 1)


@pytest.mark.parametrize("retention", [None, 0])
@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
def test_effect_of_a_lost_lease_is_not_stored_after_another_worker_is_done(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, retention: int | None, checked: bool
) -> None:
    rig.settings = QueueSettings(retention=retention)
    rig.queue.ensure_indexes()
    checks = watch_checks(monkeypatch) if checked else []
    rig.queue.enqueue({})

    def finish(context: Any) -> None:
        """Let another worker do the task while this one is suspended."""
        rig.queue.release(context.task)  # As a sweep does.
        task = rig.queue.pop()
        assert task is not None
        rig.database.orders.insert_one({"of": task.id})
        rig.queue.mark_done(task)

    def write(context: Any, session: Any) -> Steps:
        yield from ship(rig)(context, session)
        if checked:
            checks.clear()
            # A worker that knows that the lease is lost may make no further check.
            wait_for(lambda: len(checks) > 2 or context.cancelled)

    hooks = Recorder()
    rig.run(transacting(rig, write, before=finish), hooks=[hooks])
    assert counts(rig) == (1, 0, 1 if retention is None else 0)
    assert "lease lost" in hooks.called
    assert "success" not in hooks.called


@pytest.mark.parametrize("retention", [None, 0])
def test_commit_whose_reply_is_lost_stores_the_effect_once(
    rig: Rig, microqueue_client: MongoClient[Any], retention: int | None
) -> None:
    rig.settings = QueueSettings(retention=retention, backoff=NO_BACKOFF)
    rig.queue.ensure_indexes()
    task = rig.queue.enqueue({})
    lost = {"code": 64, "errmsg": "waiting for replication timed out"}  # It is committed.
    commits = {"failCommands": ["commitTransaction"], "writeConcernError": lost}
    with fail_command(microqueue_client, {"times": 3}, **commits):
        assert rig.run(transacting(rig, ship(rig))) == 1
    assert counts(rig) == (1, 1, 1 if retention is None else 0)
    assert (rig.queue.get(task.id) is None) is (retention == 0)


def test_conflict_runs_the_function_again(rig: Rig) -> None:
    runs: list[int] = []
    rig.queue.enqueue({})

    def write(context: Any, session: Any) -> Steps:
        runs.append(1)
        yield from ship(rig)(context, session)  # It fixes the snapshot,
        if len(runs) == 1:
            rig.queue.touch(context.task, extend=77)  # which this invalidates.

    assert rig.run(transacting(rig, write)) == 1
    assert (len(runs), counts(rig)) == (2, (1, 1, 1))


@pytest.mark.parametrize("ending", ["error", "timeout", "stop"])
def test_committed_task_is_done_however_its_handler_ends(rig: Rig, ending: str) -> None:
    hooks = Recorder()
    task = rig.queue.enqueue({})
    committed, go = threading.Event(), threading.Event()

    def after(context: Any) -> None:
        committed.set()
        if ending == "error":
            raise BusinessError
        if ending == "timeout":
            context._leased_task.deadline = 0.0  # noqa: SLF001 (it is over)
            rig.worker._leases.expect_timeout(0.0)  # noqa: SLF001 (as above)
        wait_for(lambda: context.cancelled or go.is_set())

    handler = transacting(rig, ship(rig), after=after)
    thread = rig.start(handler, hooks=[hooks], grace=0, timeout=3600)
    assert committed.wait(30)
    if ending != "stop":
        wait_for(lambda: hooks.called)
    rig.stop()
    thread.join(30)
    go.set()
    assert stored(rig, task).status is TaskStatus.DONE
    assert counts(rig) == (1, 1, 1)
    assert hooks.called == ["success"]


def watch_checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let the worker check its leases often, and note each time."""
    monkeypatch.setattr(lease_renewal, "CHECK_EVERY_SEC", 0.05)
    checks: list[Any] = []

    def check(tasks: Any) -> Any:
        checks.append(tasks)
        return lease_states(tasks)

    monkeypatch.setattr(lease_renewal, "lease_states", check)
    return checks


def test_deleted_task_is_not_taken_for_lost_while_its_handler_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.settings = QueueSettings(retention=0)
    rig.queue.ensure_indexes()
    checks = watch_checks(monkeypatch)
    seen: list[bool] = []

    def after(context: Any) -> None:
        checks.clear()
        wait_for(lambda: len(checks) > 2)
        seen.append(context.cancelled)

    hooks = Recorder()
    task = rig.queue.enqueue({})
    rig.run(transacting(rig, ship(rig), after=after), hooks=[hooks])
    assert (seen, hooks.called, rig.queue.get(task.id)) == ([False], ["success"], None)


@pytest.mark.parametrize("retention", [None, 0])
def test_task_is_not_taken_for_lost_before_the_reply_to_its_commit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, retention: int | None
) -> None:
    rig.settings = QueueSettings(retention=retention)
    rig.queue.ensure_indexes()
    checks = watch_checks(monkeypatch)

    def checked() -> bool:
        return len(checks) > 2

    def late(*arguments: Any) -> Any:
        result = run_in_transaction(*arguments)
        checks.clear()
        wait_for(checked)
        return result

    async def late_async(*arguments: Any) -> Any:
        result = await run_in_transaction_async(*arguments)
        checks.clear()
        await asyncio.to_thread(wait_for, checked)
        return result

    monkeypatch.setattr(context, "run_in_transaction", late)
    monkeypatch.setattr(context, "run_in_transaction_async", late_async)
    hooks = Recorder()
    rig.queue.enqueue({})
    rig.run(transacting(rig, ship(rig)), hooks=[hooks])
    assert hooks.called == ["success"]


@pytest.mark.parametrize("ending", ["time_out", "release"])
def test_timeout_and_stop_before_the_reply_to_the_commit_change_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    tried = threading.Event()
    decide = getattr(completer.Completer, ending)

    def noting(*arguments: Any) -> Any:
        try:
            return decide(*arguments)
        finally:
            tried.set()

    def end() -> None:
        if ending == "time_out":
            (leased,) = rig.worker._in_flight.snapshot()  # noqa: SLF001 (its time is over)
            leased.deadline = 0.0
            rig.worker._leases.expect_timeout(0.0)  # noqa: SLF001 (as above)
        else:
            rig.stop()

    def late(*arguments: Any) -> Any:
        result = run_in_transaction(*arguments)
        end()
        assert tried.wait(30)
        return result

    async def late_async(*arguments: Any) -> Any:
        result = await run_in_transaction_async(*arguments)
        end()
        assert await asyncio.to_thread(tried.wait, 30)
        return result

    monkeypatch.setattr(completer.Completer, ending, noting)
    monkeypatch.setattr(context, "run_in_transaction", late)
    monkeypatch.setattr(context, "run_in_transaction_async", late_async)
    hooks = Recorder()
    task = rig.queue.enqueue({})
    rig.run(transacting(rig, ship(rig)), burst=ending == "time_out", hooks=[hooks], grace=0)
    assert (stored(rig, task).status, hooks.called) == (TaskStatus.DONE, ["success"])
    assert rig.queue.workers() == []


@pytest.mark.parametrize("when", ["inside", "after"])
def test_task_has_one_transaction(rig: Rig, when: str) -> None:
    rejected: list[WrongStatus] = []
    rig.queue.enqueue({})
    write = ship(rig)

    def again(context: Any) -> Steps:
        try:
            yield context.transaction(lambda _session: rejected.append(None))  # type: ignore[arg-type]
        except WrongStatus as exc:
            rejected.append(exc)

    if when == "inside":

        def nested(context: Any, session: Any) -> Steps:
            yield from ship(rig)(context, session)
            yield from again(context)

        write = nested

    def after(context: Any) -> None:
        for step in again(context) if when == "after" else ():
            with pytest.raises(WrongStatus) as caught:
                asyncio.run(step)
            rejected.append(caught.value)

    assert rig.run(transacting(rig, write, after=after)) == 1
    assert [one.status for one in rejected] == ["in a transaction" if when == "inside" else "done"]
    assert counts(rig) == (1, 1, 1)


def test_outside_a_transaction_enqueue_adds_to_the_queue_of_the_task(rig: Rig) -> None:
    rig.queue.enqueue({"n": 1})
    found: list[Any] = []

    def function(payload: Any, context: Any) -> None:
        found.append(context.queue)
        if payload["n"] == 1:
            context.enqueue({"n": 2}, headers={"by": "1"})
            assert rig.queue.stats().ready == 1

    async def coroutine(payload: Any, context: Any) -> None:
        found.append(context.queue)
        if payload["n"] == 1:
            await context.enqueue({"n": 2}, headers={"by": "1"})

    handler = function if rig.kind == "threads" else coroutine
    assert rig.run(handler, concurrency=1, prefetch=1) == 2
    assert {type(one) for one in found} == {Queue if rig.kind == "threads" else AsyncQueue}
    done = {one.payload["n"]: one.headers for one in rig.queue.peek(status="done")}
    assert done == {1: {}, 2: {"by": "1"}}


async def test_plain_function_of_an_async_worker_has_a_blocking_queue(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    microqueue_database.create_collection("orders")  # Not by two transactions at once.
    seen: list[Any] = []

    def handler(_payload: Any, context: Context) -> None:
        seen.append((context.queue, context.queue.settings.history_limit))
        context.touch(extend=99)

        def write(session: Any) -> None:
            session.client[microqueue_database.name].orders.insert_one({}, session=session)
            context.enqueue({"child": True}, delay=60)

        context.transaction(write)

    settings = QueueSettings(history_limit=7)
    uri = microqueue_server.uri.replace("/?", f"/{microqueue_database.name}?")
    async with AsyncQueue[Any].from_uri(uri, settings=settings) as queue:
        await queue.ensure_indexes()
        await queue.enqueue_many([{}, {}])
        assert await AsyncWorker(queue, handler).run(burst=True) == 2
        stats = await queue.stats()
    assert (stats.done, stats.delayed) == (2, 2)
    assert microqueue_database.orders.count_documents({}) == 2
    first, second = seen
    assert first[0] is second[0]
    assert isinstance(first[0], Queue)
    assert first[1] == 7


def test_coroutine_function_in_a_plain_transaction_stores_nothing(
    microqueue_database: Any,
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    task = queue.enqueue({}, max_attempts=1)

    async def write(session: Any) -> None:
        raise AssertionError(session)

    Worker(queue, lambda _payload, context: context.transaction(write)).run(burst=True)
    found = queue.get(task.id)
    assert found is not None
    assert found.error is not None
    assert (found.status, found.error.code) == (TaskStatus.FAILED, "TypeError")


def test_error_of_the_server_reaches_the_handler_as_it_is(
    microqueue_database: Any, microqueue_client: MongoClient[Any]
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.enqueue({}, max_attempts=1)
    caught: list[BaseException] = []

    def handler(_payload: Any, context: Context) -> None:
        def write(session: Any) -> None:
            orders = microqueue_client[microqueue_database.name].orders
            orders.insert_one({"_id": 1}, session=session)
            orders.update_one({"_id": 1}, {"$inc": {"_id": 1}}, session=session)

        try:
            context.transaction(write)
        except OperationFailure as exc:
            caught.append(exc)
            raise

    Worker(queue, handler).run(burst=True)
    assert len(caught) == 1
    assert microqueue_database.orders.count_documents({}) == 0


KILLED = """
import os, signal, sys
from microqueue import Queue
from microqueue.worker import Worker

def handler(payload, context):
    def write(session):
        session.client.get_default_database().orders.insert_one({}, session=session)
        context.enqueue({"child": True})
        queue.mark_done(context.task, session=session)  # What would have followed.
        os.kill(os.getpid(), signal.SIGKILL)
    context.transaction(write)

with Queue.from_uri(sys.argv[1]) as queue:
    Worker(queue, handler, worker_id="victim", heartbeat=0.2).run()
"""


@pytest.fixture
def brief_transactions(own_server: None, microqueue_client: MongoClient[Any]) -> Iterator[None]:
    """Let the server abort soon what a killed process left open; a minute is usual."""
    name = "transactionLifetimeLimitSeconds"
    former = microqueue_client.admin.command({"getParameter": 1, name: 1})[name]
    microqueue_client.admin.command({"setParameter": 1, name: 1})
    yield
    microqueue_client.admin.command({"setParameter": 1, name: former})


@pytest.mark.usefixtures("brief_transactions")
def test_handler_killed_before_the_commit_leaves_nothing(
    database_uri: str, microqueue_database: Any
) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=QueueSettings(backoff=NO_BACKOFF))
    queue.ensure_indexes()
    microqueue_database.create_collection("orders")
    task = queue.enqueue({})
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, database_uri], cwd=Path(__file__).parents[2], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    wait_for(lambda: Sweeper(queue).reclaim_orphaned())
    found = queue.get(task.id)
    assert found is not None
    assert (found.status, found.crashes) == (TaskStatus.PENDING, 1)
    assert microqueue_database.orders.count_documents({}) == 0
    assert queue.stats().pending == 1  # No child.


@pytest.mark.parametrize("kind", ["threads", "pymongo_async"])
@pytest.mark.usefixtures("own_server")
def test_standalone_server_is_a_clear_error(kind: str, tmp_path: Path) -> None:
    with (
        EmbeddedServer.start(tmp_path / "data", replica_set=False) as server,
        MongoClient[Any](server.uri) as client,
    ):
        rig = Rig(kind, server.uri, client.lone)
        task = rig.queue.enqueue({}, max_attempts=1)

        def write(_context: Any, _session: Any) -> Steps:
            raise AssertionError
            yield

        rig.run(transacting(rig, write))
        found = stored(rig, task)
        assert (found.status, found.error.code) == ("failed", TransactionsUnsupported.__name__)


def test_memory_queue_has_no_transactions() -> None:
    queue = memory_queue()
    rejected: list[TransactionsUnsupported] = []

    def handler(payload: Any, context: Context) -> None:
        try:
            context.transaction(lambda _session: None)
        except TransactionsUnsupported as exc:
            rejected.append(exc)
            if "child" not in payload:
                context.enqueue({"child": True})

    queue.enqueue({})
    Worker(queue, handler, concurrency=1).run(burst=True)
    assert [one.server for one in rejected] == ["a database in memory"] * 2
    assert queue.stats().done == 2


def test_renewal_and_progress_do_not_disturb_a_transaction(
    microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=QueueSettings(visibility_timeout=30))
    queue.ensure_indexes()
    checks = watch_checks(monkeypatch)
    runs: list[int] = []
    task = queue.enqueue({})

    def handler(_payload: Any, context: Context) -> None:
        def write(session: Any) -> None:
            runs.append(1)
            microqueue_database.orders.insert_one({}, session=session)
            context.progress(0.5)
            checks.clear()
            wait_for(lambda: len(checks) > 2)

        context.transaction(write)

    Worker(queue, handler).run(burst=True)
    assert runs == [1]
    assert core_of(queue).collections.tasks.count_documents({"_id": task.id, "status": "done"}) == 1
