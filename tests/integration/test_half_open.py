"""Connections that die in silence: every call ends by its deadline, and workers work on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pymongo
import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import PyMongoError

from microqueue import (
    AsyncQueue,
    AsyncSweeper,
    Queue,
    QueueSettings,
    ServerUnavailable,
    Sweeper,
    TaskStatus,
)
from microqueue.clock import as_utc
from microqueue.core import core_of
from microqueue.drivers.asynchronous import awaited
from microqueue.embedded import EmbeddedServer
from microqueue.operations import claim
from microqueue.task import Lease
from tests.integration.proxy import Proxy
from tests.integration.rig import Rig
from tests.waiting import wait_for

PATIENT_SEC = 60.0
"""For what takes a second or two, and would take forever."""

BRISK = QueueSettings(call_timeout=0.5, retry_deadline=30, poll_interval=0.1)


@pytest.fixture
def proxy(microqueue_server: EmbeddedServer) -> Iterator[Proxy]:
    with Proxy(microqueue_server.uri) as proxy:
        yield proxy


class Caller:
    """A queue of any driver behind a proxy, whose methods are called as if they were blocking."""

    def __init__(self, kind: str, uri: str, name: str, settings: QueueSettings) -> None:
        self._loop = asyncio.new_event_loop()
        self._kind = kind
        if kind == "blocking":
            self.client: Any = MongoClient(uri)
            self.queue: Any = Queue(self.client[name], settings=settings)
            self.sweeper: Any = Sweeper(self.queue)
        elif kind == "from_uri":
            self.queue = Queue.from_uri(uri.replace("/?", f"/{name}?"), settings=settings)
            self.client = self.queue
            self.sweeper = Sweeper(self.queue)
        else:
            asyncio.set_event_loop(self._loop)
            make: Any = AsyncIOMotorClient if kind == "motor" else AsyncMongoClient
            self.client = make(uri)
            self.queue = AsyncQueue(self.client[name], settings=settings)
            self.sweeper = AsyncSweeper(self.queue)

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Perform a call within the time that it has, or fail."""
        if self._kind not in {"blocking", "from_uri"}:
            return self._loop.run_until_complete(asyncio.wait_for(call(), PATIENT_SEC))
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append((call(), None))
            except Exception as exc:  # noqa: BLE001 (it is raised below)
                outcome.append((None, exc))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(PATIENT_SEC)
        assert outcome, "the call hangs"
        reply, error = outcome[0]
        if error is not None:
            raise error
        return reply

    def hasten(self, settings: QueueSettings) -> None:
        """Shorten the limit of all further calls, on the same connections."""
        self.queue = type(self.queue)(core_of(self.queue).collections.tasks, settings=settings)
        self.sweeper = type(self.sweeper)(self.queue)

    def close(self) -> None:
        async def close() -> None:
            await awaited(self.client.close())

        with pymongo.timeout(1):
            if self._kind in {"blocking", "from_uri"}:
                self.client.close()
            else:
                self._loop.run_until_complete(close())
        self._loop.close()


KINDS = ["blocking", "from_uri", "pymongo_async", "motor"]


@contextmanager
def calling(kind: str, proxy: Proxy, database: Any, settings: QueueSettings) -> Iterator[Caller]:
    caller = Caller(kind, proxy.uri, database.name, settings)
    try:
        yield caller
    finally:
        proxy.thaw()
        caller.close()
        asyncio.set_event_loop(None)


CALLS: dict[str, Callable[[Caller, Any], Awaitable[Any]]] = {
    "enqueue": lambda caller, _: caller.queue.enqueue({"n": 2}),
    "enqueue_many": lambda caller, _: caller.queue.enqueue_many([{"n": 2}, {"n": 3}]),
    "pop": lambda caller, _: caller.queue.pop(),
    "pop_many": lambda caller, _: caller.queue.pop_many(2),
    "pop and wait": lambda caller, _: caller.queue.pop(wait=30),
    "mark_done": lambda caller, task: caller.queue.mark_done(task),
    "touch": lambda caller, task: caller.queue.touch(task),
    "stats": lambda caller, _: caller.queue.stats(),
    "sweep": lambda caller, _: caller.sweeper.run_once(),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_call_on_a_dead_connection_is_made_again_on_another(
    kind: str, name: str, proxy: Proxy, microqueue_database: Any
) -> None:
    with calling(kind, proxy, microqueue_database, BRISK) as caller:
        caller(lambda: caller.queue.enqueue_many([{"n": n} for n in range(4)]))
        task = caller(caller.queue.pop)
        time.sleep(0.2)  # A connection that has just answered is not asked whether it lives.
        assert proxy.freeze() > 0
        try:
            caller(lambda: CALLS[name](caller, task))
        except ServerUnavailable:  # It was not performed, and is not repeated blindly.
            assert name.startswith("pop")
        # What works now does without the dead ones.
        assert caller(lambda: caller.queue.get(task.id)) is not None
        caller(lambda: caller.queue.release(task)) if name != "mark_done" else None


@pytest.mark.parametrize("name", ["enqueue", "pop", "pop and wait", "mark_done", "stats", "sweep"])
@pytest.mark.parametrize("kind", KINDS)
def test_call_ends_by_its_deadline_if_no_connection_works(
    kind: str, name: str, proxy: Proxy, microqueue_database: Any
) -> None:
    with calling(kind, proxy, microqueue_database, QueueSettings()) as caller:
        caller(lambda: caller.queue.enqueue_many([{"n": n} for n in range(4)]))
        task = caller(caller.queue.pop)
        caller.hasten(QueueSettings(call_timeout=0.2, retry_deadline=0.5, ensure_indexes=False))
        proxy.freeze(new=True)
        with pytest.raises(ServerUnavailable) as caught:
            caller(lambda: CALLS[name](caller, task))
        assert isinstance(caught.value.__cause__, PyMongoError)
        assert caught.value.__cause__.timeout


@pytest.mark.parametrize("kind", KINDS)
def test_without_repeats_an_attempt_is_bounded_too(
    kind: str, proxy: Proxy, microqueue_database: Any
) -> None:
    settings = QueueSettings(call_timeout=0.5, retry_deadline=0)
    with calling(kind, proxy, microqueue_database, settings) as caller:
        caller(lambda: caller.queue.enqueue({}))
        proxy.freeze()
        with pytest.raises(ServerUnavailable):
            caller(lambda: caller.queue.enqueue({}))
        caller(lambda: caller.queue.enqueue({}))


@pytest.mark.parametrize("kind", KINDS)
def test_several_dead_connections_cost_one_attempt(
    kind: str, proxy: Proxy, microqueue_database: Any
) -> None:
    settings = QueueSettings(call_timeout=2, retry_deadline=0)
    with calling(kind, proxy, microqueue_database, settings) as caller:
        caller(caller.queue.ensure_indexes)

        def sleep() -> Any:
            """Keep a connection busy, so that the next call opens another."""
            command = {"sleep": 1, "millis": 500, "lock": "none"}
            return core_of(caller.queue).collections.client.admin.command(command)

        if kind in {"blocking", "from_uri"}:
            crowd = [threading.Thread(target=sleep) for _ in range(6)]
            for one in crowd:
                one.start()
            for one in crowd:
                one.join()
        else:

            async def together() -> None:
                await asyncio.gather(*(sleep() for _ in range(6)))

            caller(together)
        assert proxy.freeze() > 2
        with pytest.raises(ServerUnavailable):
            caller(lambda: caller.queue.enqueue({}))
        caller(lambda: caller.queue.enqueue({}))


@pytest.mark.parametrize("kind", KINDS)
def test_short_deadline_leaves_time_for_a_repeat(
    kind: str, proxy: Proxy, microqueue_database: Any
) -> None:
    settings = QueueSettings(call_timeout=600, retry_deadline=3.5)
    with calling(kind, proxy, microqueue_database, settings) as caller:
        caller(lambda: caller.queue.enqueue({}))
        proxy.freeze()
        caller(lambda: caller.queue.enqueue({}))


@pytest.mark.parametrize("kind", KINDS)
def test_claim_whose_reply_never_came_is_found_by_its_token(
    kind: str, proxy: Proxy, microqueue_database: Any
) -> None:
    with calling(kind, proxy, microqueue_database, BRISK) as caller:
        task = caller(lambda: caller.queue.enqueue({"n": 1}))
        now = caller(caller.queue.now)
        later = now + timedelta(minutes=1)
        lease = Lease(token="t", worker_id="w", started_at=now, expires_at=later)
        assert proxy.drop_replies() > 0
        # The claim reaches the server, and is not repeated; the look for it is.
        document = caller(lambda: core_of(caller.queue).run(claim.pop("default", lease)))
        assert (document["_id"], document["attempts"]) == (task.id, 1)


@pytest.mark.parametrize("limit", ["around", "client"])
def test_shorter_limit_of_the_callers_own_holds(
    limit: str, proxy: Proxy, microqueue_database: Any
) -> None:
    settings = QueueSettings(call_timeout=600, retry_deadline=600)
    options: dict[str, Any] = {"timeoutMS": 1000} if limit == "client" else {}
    with MongoClient[Any](proxy.uri, **options) as client:
        queue: Queue[Any] = Queue(client[microqueue_database.name], settings=settings)
        queue.enqueue({})
        proxy.freeze(new=True)
        started = time.monotonic()
        around = pymongo.timeout(0.5) if limit == "around" else nullcontext()
        with around, pytest.raises(ServerUnavailable):
            queue.enqueue({})
        assert time.monotonic() - started < PATIENT_SEC
        proxy.thaw()
        proxy.cut()


def test_call_in_a_transaction_is_bounded_and_left_to_the_caller(
    proxy: Proxy, microqueue_database: Any
) -> None:
    settings = QueueSettings(call_timeout=0.5, retry_deadline=30)
    with MongoClient[Any](proxy.uri) as client, client.start_session() as session:
        queue: Queue[Any] = Queue(client[microqueue_database.name], settings=settings)
        queue.ensure_indexes()
        session.start_transaction()
        queue.enqueue({"n": 1}, session=session)
        proxy.freeze()
        with pytest.raises(PyMongoError) as caught:
            queue.enqueue({"n": 2}, session=session)
        assert caught.value.has_error_label("TransientTransactionError")
        with pymongo.timeout(1):
            session.abort_transaction()
        queue.enqueue({"n": 3})
        assert queue.stats().ready == 1


@contextmanager
def slow(client: MongoClient[Any], command: str, seconds: float, *, times: int) -> Iterator[None]:
    """Make the server take long for the next commands of a name."""
    data = {
        "failCommands": [command],
        "appName": "slow",
        "blockConnection": True,
        "blockTimeMS": int(seconds * 1000),
    }
    client.admin.command("configureFailPoint", "failCommand", mode={"times": times}, data=data)
    try:
        yield
    finally:
        client.admin.command("configureFailPoint", "failCommand", mode="off")


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_take_long_may_do_so(
    kind: str,
    microqueue_server: EmbeddedServer,
    microqueue_client: MongoClient[Any],
    proxy: Proxy,
    microqueue_database: Any,
) -> None:
    settings = QueueSettings(call_timeout=0.5, long_call_timeout=40, retry_deadline=1)
    proxy.uri = f"{proxy.uri}&appName=slow"
    with calling(kind, proxy, microqueue_database, settings) as caller:
        caller(caller.queue.ensure_indexes)
        with slow(microqueue_client, "aggregate", 2, times=1):
            assert caller(caller.queue.stats).ready == 0
        with slow(microqueue_client, "insert", 2, times=100), pytest.raises(ServerUnavailable):
            caller(lambda: caller.queue.enqueue({}))


def test_worker_works_on_after_its_connections_died(rig: Rig, proxy: Proxy) -> None:
    rig.uri = proxy.uri
    rig.settings = rig.settings.model_copy(update={"call_timeout": timedelta(seconds=1)})
    seen: list[int] = []

    def handler(payload: Any) -> None:
        seen.append(payload["n"])

    rig.queue.enqueue({"n": 0})
    running = rig.start(handler, heartbeat=1)
    try:
        for round_ in (1, 2, 3):
            wait_for(lambda: len(seen) == round_)  # noqa: B023 (it is called within the round)
            proxy.freeze()
            rig.queue.enqueue({"n": round_})
        wait_for(lambda: len(seen) == 4)
        wait_for(lambda: rig.queue.stats().done == 4)
    finally:
        rig.stop()
        running.join(PATIENT_SEC)
    assert not running.is_alive()
    assert sorted(seen) == [0, 1, 2, 3]


def test_worker_whose_connections_died_keeps_its_leases_and_its_name(
    rig: Rig, proxy: Proxy
) -> None:
    """It beats and renews on another connection before it counts as dead."""
    rig.uri = proxy.uri
    rig.settings = rig.settings.model_copy(update={"visibility_timeout": timedelta(seconds=6)})
    task = rig.queue.enqueue({"n": 0})
    started, let_go = threading.Event(), threading.Event()

    def handler(_payload: Any) -> None:
        started.set()
        let_go.wait(PATIENT_SEC)

    running = rig.start(handler, heartbeat=2)
    try:
        assert started.wait(PATIENT_SEC)
        before = rig.queue.get(task.id)
        assert before is not None
        assert before.lease is not None
        ends = before.lease.expires_at
        proxy.freeze()
        wait_for(lambda: rig.queue.now() > ends)
        Sweeper(rig.queue).run_once()
        held = rig.queue.get(task.id)
        assert held is not None
        assert (held.status, held.attempts) == (TaskStatus.PROCESSING, 1)
    finally:
        let_go.set()
        wait_for(lambda: rig.queue.get(task.id).status is TaskStatus.DONE)  # type: ignore[union-attr]  # It is there.
        rig.stop()
        running.join(PATIENT_SEC)
    assert not running.is_alive()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("new", [False, True])
def test_waiting_pop_ends_by_its_limit_when_the_stream_is_dead(
    kind: str, new: bool, proxy: Proxy, microqueue_database: Any
) -> None:
    settings = QueueSettings(call_timeout=0.5, retry_deadline=1, poll_interval=0.2)
    with calling(kind, proxy, microqueue_database, settings) as caller:
        caller(caller.queue.ensure_indexes)
        freezing = threading.Timer(1.0, lambda: proxy.freeze(new=new))
        freezing.start()
        try:
            assert caller(lambda: caller.queue.pop(wait=4)) is None
        except ServerUnavailable:
            assert new
        freezing.join()


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_pop_polls_when_its_stream_is_dead(
    kind: str, proxy: Proxy, microqueue_database: Any
) -> None:
    settings = QueueSettings(call_timeout=0.5, retry_deadline=30, poll_interval=0.2)
    other: Queue[Any] = Queue(microqueue_database)
    other.ensure_indexes()

    def disturb() -> None:
        proxy.freeze()
        other.enqueue({"n": 1})

    with calling(kind, proxy, microqueue_database, settings) as caller:
        caller(caller.queue.stats)
        disturbing = threading.Timer(1.0, disturb)
        disturbing.start()
        task = caller(lambda: caller.queue.pop(wait=50))
        disturbing.join()
        assert task is not None


# The clock


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delayed", ["request", "reply"])
def test_nothing_is_early_however_long_the_servers_time_took(
    kind: str, delayed: str, proxy: Proxy, microqueue_database: Any
) -> None:
    def server_time() -> Any:
        return as_utc(microqueue_database.command("hello")["localTime"])

    settings = QueueSettings(visibility_timeout=20)
    with calling(kind, proxy, microqueue_database, settings) as caller:
        caller(caller.queue.ensure_indexes)
        setattr(proxy, f"{delayed}_delay_sec", 0.3)
        caller.queue.clock.forget()
        called = server_time()
        task = caller(lambda: caller.queue.enqueue({}, delay=10))
        setattr(proxy, f"{delayed}_delay_sec", 0.0)
        # Not ahead, so that nothing comes due before its time.
        assert caller.queue.clock.now() <= server_time()
        assert task.next_retry_at >= called + timedelta(seconds=10)
        called = server_time()
        other = caller(lambda: caller.queue.enqueue({}))
        assert other.created_at <= server_time()
        popped = caller(caller.queue.pop)
        assert popped.id == other.id
        assert popped.lease.expires_at >= called + timedelta(seconds=20)
        assert caller(lambda: caller.queue.touch(popped)).lease.expires_at >= called + timedelta(
            seconds=20
        )
