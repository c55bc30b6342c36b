"""Acknowledged means majority: what a call says is stored outlives the primary that it spoke to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import DuplicateKeyError, PyMongoError

import microqueue
from microqueue import (
    AsyncQueue,
    DuplicateTask,
    Queue,
    QueueSettings,
    ServerUnavailable,
    WaitTimeout,
)
from microqueue.core import core_of
from microqueue.operations import dlq_collection, filters
from tests.integration.model import Steps, perform
from tests.integration.proxy import Proxy
from tests.integration.queues import popped
from tests.integration.replica_set import ONE, Member, ReplicaSet
from tests.waiting import wait_for

PRODUCER = """
import sys
from microqueue import Queue
Queue.from_uri(sys.argv[1], "invoices").enqueue({"n": 1}, task_id="march")
"""


@pytest.fixture(scope="module")
def set_of_three(own_server: None) -> Iterator[ReplicaSet]:
    # A new primary does not fetch what only the old one has, so that it is rolled back.
    with ReplicaSet.started(catch_up=False, election_timeout_sec=5) as trio:
        yield trio


@pytest.fixture
def trio(set_of_three: ReplicaSet) -> ReplicaSet:
    """A healthy set without tasks, and with indexes, as a service has had them for long."""
    set_of_three.heal()
    with MongoClient[Any](set_of_three.uri) as client:
        client.drop_database("test")
        for dead_letters in ("status", "collection"):
            settings = QueueSettings.model_validate({"dead_letters": dead_letters})
            Queue[Any](client.test, settings=settings).ensure_indexes()
    set_of_three.heal()
    return set_of_three


def begin(call: Callable[[], Any]) -> Future[Any]:
    """Make a call in a thread, and give its outcome to come."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as exc:  # noqa: BLE001 (the test looks at it)
            outcome.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def writes_under_way(member: Member, appname: str) -> list[Any]:
    """Return the ids of a client's writes that wait for other members, and hold no lock."""
    written = {"$or": [{f"command.{name}": {"$exists": True}} for name in ("insert", "update")]}
    match = {"appName": appname, "active": True, "waitingForLock": False, "locks": {}, **written}
    found = member.client.admin.aggregate([{"$currentOp": {}}, {"$match": match}])
    return [one["opid"] for one in found]


def waiting_write(member: Member, appname: str, other_than: Any = None) -> Any:
    """Wait until a write of a client waits for other members, and give its number."""

    def find() -> Any:
        return [one for one in writes_under_way(member, appname) if one != other_than]

    return wait_for(find, what="a write that waits")[0]


def stored(trio: ReplicaSet, **selection: Any) -> int:
    """Count tasks once the set is healthy again, whatever was rolled back."""
    trio.heal()
    count: int = trio.primary().client.test.tasks.count_documents(selection)
    return count


def hurried(queue: Queue[Any]) -> Queue[Any]:
    """Return the same queue with short limits."""
    options = {"call_timeout": timedelta(seconds=0.3), "retry_deadline": timedelta(0)}
    settings = queue.settings.model_copy(update=options)
    return Queue(core_of(queue).collections.tasks, queue.name, settings=settings)


def successor(kind: str, uri: str) -> Callable[[], Any]:
    """Return a call that adds the task that the call before was about to add."""
    options: dict[str, Any] = {"settings": QueueSettings(retry_deadline=60), "appname": "successor"}
    if kind == "blocking":

        def enqueue() -> Any:
            with Queue[Any].from_uri(uri, "invoices", **options) as queue:
                return queue.enqueue({"n": 2}, task_id="march")

        return enqueue

    async def enqueue_async() -> Any:
        client_class: Any = AsyncIOMotorClient if kind == "motor" else AsyncMongoClient
        client = client_class(uri, appname="successor", serverSelectionTimeoutMS=5000)
        queue = AsyncQueue[Any](client.test, "invoices", settings=options["settings"])
        try:
            return await queue.enqueue({"n": 2}, task_id="march")
        finally:
            closing = client.close()
            if closing is not None:
                await closing

    return lambda: asyncio.run(enqueue_async())


@pytest.mark.parametrize("kind", ["blocking", "pymongo_async", "motor"])
def test_a_task_whose_producer_died_is_not_a_duplicate_once_it_is_rolled_back(
    trio: ReplicaSet, kind: str
) -> None:
    package = str(Path(microqueue.__file__).parents[1])
    with trio.without_replication() as primary:
        producer = subprocess.Popen(
            [sys.executable, "-c", PRODUCER, trio.uri], env={**os.environ, "PYTHONPATH": package}
        )
        tasks = primary.client.test.tasks
        wait_for(lambda: tasks.count_documents({"_id": "march"}), what="the first insert")
        producer.kill()
        producer.wait()
        outcome = begin(successor(kind, trio.uri))
        waiting_write(primary, "successor")
        trio.step_down()
        assert trio.primary() is not primary
    with contextlib.suppress(DuplicateTask):
        outcome.result(90)
    assert stored(trio, _id="march") == 1


ADDING: dict[str, Callable[[Queue[Any]], Any]] = {
    "enqueue": lambda queue: queue.enqueue({"n": 1}, task_id="march"),
    "enqueue_many": lambda queue: queue.enqueue_many([{"n": 1}, {"n": 2}, {"n": 3}]),
}


@pytest.mark.parametrize("name", ADDING)
def test_a_write_concern_that_failed_after_cut_connections_is_raised(
    trio: ReplicaSet, name: str
) -> None:
    settings = QueueSettings(call_timeout=8, retry_deadline=16)
    with trio.without_replication() as primary, Proxy(f"mongodb://{primary.address}") as cable:
        uri = f"{cable.uri}/test?directConnection=true&appName=cut&heartbeatFrequencyMS=500"
        concern = "w=majority&wtimeoutMS=8000"
        with Queue[Any].from_uri(f"{uri}&{concern}", settings=settings) as queue:
            queue.now()
            outcome = begin(lambda: ADDING[name](queue))
            first = waiting_write(primary, "cut")
            cable.cut()
            waiting_write(primary, "cut", other_than=first)
            cable.cut()
            with pytest.raises(ServerUnavailable):
                outcome.result(60)


@pytest.mark.parametrize("known", [False, True], ids=["new", "inserted before"])
@pytest.mark.parametrize("name", ADDING)
def test_a_wait_that_an_operator_kills_is_raised(trio: ReplicaSet, name: str, known: bool) -> None:
    with (
        trio.without_replication() as primary,
        Queue[Any].from_uri(trio.uri, appname="killed") as queue,
    ):
        queue.now()
        if known:  # By a producer that was killed while it waited.
            document = {"_id": "march", "queue": "default", "status": "pending"}
            primary.client.test.tasks.with_options(write_concern=ONE).insert_one(document)
        add = ADDING[name]
        if known and name == "enqueue_many":
            new = microqueue.NewTask[Any](payload={}, task_id="march")
            add = lambda queue: queue.enqueue_many([new])  # noqa: E731
        outcome = begin(lambda: add(queue))

        def killed_until_it_ends() -> bool:
            for number in writes_under_way(primary, "killed"):
                primary.client.admin.command("killOp", op=number)
            return outcome.done()

        wait_for(killed_until_it_ends)
        with pytest.raises(ServerUnavailable):
            outcome.result()


@pytest.mark.parametrize("many", [False, True], ids=["mark_done", "mark_done_many"])
def test_a_settlement_is_known_again_only_where_a_majority_has_it(
    trio: ReplicaSet, many: bool
) -> None:
    with Queue[Any].from_uri(trio.uri) as queue:
        queue.enqueue({})
        task = popped(queue)
        queue.release(task)  # Lost: so nothing matches, and a majority has that.
        settle = (lambda twin: twin.mark_done_many([task])) if many else None
        steps = Steps(queue, settle or (lambda twin: twin.mark_done(task)))
        steps.until("update_many" if many else "update_one").step()
        steps.queue = hurried(queue)
        settled = {"status": "done", "lease_token": task.lease.token if task.lease else None}
        with trio.without_replication() as primary:
            # The settlement as the primary alone has it.
            tasks = primary.client.test.tasks.with_options(write_concern=ONE)
            assert tasks.update_one({}, {"$set": settled}).modified_count
            with pytest.raises(PyMongoError):
                steps.finish()
        assert steps.next is not None


def test_a_dead_letter_that_only_the_primary_has_is_not_taken_from_the_tasks(
    trio: ReplicaSet,
) -> None:
    settings = QueueSettings(dead_letters="collection", retry_deadline=60)
    with Queue[Any].from_uri(trio.uri, settings=settings) as queue:
        queue.enqueue({}, task_id="letter")
        task = popped(queue)
        Steps(queue, lambda twin: twin.mark_failure(task, "no")).until("update_one").step()
        (failed,) = core_of(queue).collections.tasks.find(filters.DEAD)
        with trio.without_replication() as primary:
            letters = primary.client.test.tasks_dlq.with_options(write_concern=ONE)
            letters.insert_one({**failed, "version": 0})  # By a mover that was killed then.
            quick = hurried(queue)
            moving = dlq_collection.move_out(failed)
            call: Any = next(moving)
            failed_over = False
            with contextlib.suppress(StopIteration, PyMongoError):
                while True:
                    if call.method == "delete_one" and not failed_over:
                        trio.step_down()
                        assert trio.primary() is not primary
                        trio.replicate()
                        failed_over = True
                    try:
                        reply = perform(queue if failed_over else quick, call)
                    except DuplicateKeyError as exc:
                        call = moving.throw(exc)
                    else:
                        call = moving.send(reply)
            if not failed_over:
                trio.step_down()
                assert trio.primary() is not primary
        trio.heal()
        assert [letter.id for letter in queue.dead_letters.list()] == ["letter"]


def test_result_that_only_the_primary_has_is_not_returned(trio: ReplicaSet) -> None:
    settings = QueueSettings(retry_deadline=60)
    with Queue[Any].from_uri(trio.uri, settings=settings) as queue:
        task = queue.enqueue({}, task_id="result")
        waiting = begin(lambda: queue.wait_for(task))
        claimed = popped(queue)
        with trio.without_replication() as primary:
            tasks = primary.client.test.tasks.with_options(write_concern=ONE)
            Queue[Any](tasks, settings=settings).mark_done(claimed, result="alone")
            seen = queue.get("result")
            assert seen is not None
            assert seen.result == "alone"
            with pytest.raises(WaitTimeout):
                queue.wait_for(task, timeout=1)
            assert not waiting.done()
        assert waiting.result(60).result == "alone"


def test_wait_survives_a_failover(trio: ReplicaSet) -> None:
    settings = QueueSettings(retry_deadline=60)
    with Queue[Any].from_uri(trio.uri, settings=settings) as queue:
        task = queue.enqueue({}, task_id="result")
        waiting = begin(lambda: queue.wait_for(task))
        claimed = popped(queue)
        former = trio.step_down()
        assert trio.primary() is not former
        queue.mark_done(claimed, result="later")
        assert waiting.result(90).result == "later"
