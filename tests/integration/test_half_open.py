"""Connections that die in silence: every call ends by its deadline."""

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
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from microqueue import (
    Queue,
    QueueSettings,
    ServerUnavailable,
)
from microqueue.clock import as_utc
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from microqueue.operations import claim
from microqueue.task import Lease
from tests.integration.half_open import BRISK, KINDS, PATIENT_SEC, Caller, calling
from tests.integration.proxy import Proxy
from tests.servers import fail_command

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
    with calling(kind, proxy, microqueue_database, QueueSettings()) as caller:
        caller(lambda: caller.queue.enqueue_many([{"n": n} for n in range(4)]))
        task = caller(caller.queue.pop)
        caller.hasten(BRISK)
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
    with calling(kind, proxy, microqueue_database, QueueSettings()) as caller:
        caller(lambda: caller.queue.enqueue({}))
        caller.hasten(QueueSettings(call_timeout=0.3, retry_deadline=0, ensure_indexes=False))
        proxy.freeze()
        with pytest.raises(ServerUnavailable):
            caller(lambda: caller.queue.enqueue({}))
        caller.hasten(QueueSettings(retry_deadline=0))
        caller(lambda: caller.queue.enqueue({}))


@pytest.mark.parametrize("kind", KINDS)
def test_several_dead_connections_cost_one_attempt(
    kind: str, proxy: Proxy, microqueue_database: Any
) -> None:
    settings = QueueSettings(call_timeout=3, retry_deadline=0)
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
        caller.hasten(QueueSettings(retry_deadline=0))
        caller(lambda: caller.queue.enqueue({}))


@pytest.mark.parametrize("kind", KINDS)
def test_short_deadline_leaves_time_for_a_repeat(
    kind: str, proxy: Proxy, microqueue_database: Any
) -> None:
    settings = QueueSettings(call_timeout=600, retry_deadline=12)
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
    options: dict[str, Any] = {"timeoutMS": 5000} if limit == "client" else {}
    Queue[Any](microqueue_database).ensure_indexes()  # That may take longer.
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
        patient: Queue[Any] = Queue(client[microqueue_database.name])
        queue: Queue[Any] = Queue(client[microqueue_database.name], settings=settings)
        queue.ensure_indexes()
        queue.now()  # So that the next call is the one in the transaction.
        session.start_transaction()
        patient.enqueue({"n": 1}, session=session)
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
    data: dict[str, Any] = {
        "failCommands": [command],
        "appName": "slow",
        "blockConnection": True,
        "blockTimeMS": int(seconds * 1000),
    }
    with fail_command(client, {"times": times}, **data):
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_take_long_may_do_so(
    kind: str,
    microqueue_server: EmbeddedServer,
    microqueue_client: MongoClient[Any],
    proxy: Proxy,
    microqueue_database: Any,
) -> None:
    # Without repeats: a second attempt would find a server that is fast again.
    settings = QueueSettings(
        call_timeout=2, long_call_timeout=40, retry_deadline=0, ensure_indexes=False
    )
    proxy.uri = f"{proxy.uri}&appName=slow"
    with calling(kind, proxy, microqueue_database, QueueSettings()) as caller:
        caller(caller.queue.ensure_indexes)
        caller(caller.queue.now)
        caller.hasten(settings)
        with slow(microqueue_client, "aggregate", 3, times=1):
            assert caller(caller.queue.stats).ready == 0
        with slow(microqueue_client, "insert", 3, times=100), pytest.raises(ServerUnavailable):
            caller(lambda: caller.queue.enqueue({}))


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
        task = caller(lambda: caller.queue.enqueue({}, delay=600))
        setattr(proxy, f"{delayed}_delay_sec", 0.0)
        # Not ahead, so that nothing comes due before its time.
        assert caller.queue.clock.now() <= server_time()
        assert task.next_retry_at >= called + timedelta(seconds=600)
        called = server_time()
        other = caller(lambda: caller.queue.enqueue({}))
        assert other.created_at <= server_time()
        popped = caller(caller.queue.pop)
        assert popped.id == other.id
        assert popped.lease.expires_at >= called + timedelta(seconds=20)
        assert caller(lambda: caller.queue.touch(popped)).lease.expires_at >= called + timedelta(
            seconds=20
        )
