"""``session=``: the transactional outbox, and effects that happen exactly once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import OperationFailure

from microqueue import (
    AsyncQueue,
    BackoffPolicy,
    DuplicatesStored,
    DuplicateTask,
    InvalidArgument,
    LeaseLost,
    Queue,
    QueueSettings,
    Sweeper,
    TaskStatus,
)
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from microqueue.testing import FakeClock


class BusinessError(Exception):
    """What the caller's own code raises inside its transaction."""


@pytest.fixture
def queue(microqueue_queue: Queue[Any]) -> Queue[Any]:
    microqueue_queue.ensure_indexes()
    core_of(microqueue_queue).collections.database.create_collection("orders")
    return microqueue_queue


def test_task_and_business_write_commit_together(
    queue: Queue[Any], microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    with microqueue_client.start_session() as session, session.start_transaction():
        microqueue_database.orders.insert_one({"_id": 1}, session=session)
        queue.enqueue({"order": 1}, session=session)
        assert queue.pop() is None  # Nobody sees it before the commit.
    assert microqueue_database.orders.count_documents({}) == 1
    task = queue.pop()
    assert task is not None
    assert task.payload == {"order": 1}


def test_task_and_business_write_vanish_together(
    queue: Queue[Any], microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    with (
        pytest.raises(BusinessError),
        microqueue_client.start_session() as session,
        session.start_transaction(),
    ):
        microqueue_database.orders.insert_one({"_id": 1}, session=session)
        queue.enqueue({"order": 1}, session=session)
        queue.enqueue_many([{"order": 1}] * 3, session=session)
        raise BusinessError
    assert microqueue_database.orders.count_documents({}) == 0
    assert queue.stats().pending == 0


def test_effect_and_settlement_commit_together(
    queue: Queue[Any], microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    queue.enqueue({"order": 1})
    task = queue.pop()
    assert task is not None
    with microqueue_client.start_session() as session, session.start_transaction():
        microqueue_database.orders.insert_one({"_id": 1}, session=session)
        queue.mark_done(task, result="shipped", session=session)
    assert microqueue_database.orders.count_documents({}) == 1
    stored = queue.get(task.id)
    assert stored is not None
    assert (stored.status, stored.result) == (TaskStatus.DONE, "shipped")


def test_abort_leaves_the_task_leased_and_no_effect(
    queue: Queue[Any], microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    queue.enqueue({"order": 1})
    task = queue.pop()
    assert task is not None
    with (
        pytest.raises(BusinessError),
        microqueue_client.start_session() as session,
        session.start_transaction(),
    ):
        microqueue_database.orders.insert_one({"_id": 1}, session=session)
        queue.mark_done(task, session=session)
        raise BusinessError
    assert microqueue_database.orders.count_documents({}) == 0
    stored = queue.get(task.id)
    assert stored is not None
    assert stored.status is TaskStatus.PROCESSING
    queue.mark_done(task)


def test_late_worker_cannot_commit_its_effect(
    microqueue_client: MongoClient[Any], microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    settings = QueueSettings(visibility_timeout=5, backoff=BackoffPolicy(base_sec=0, max_sec=0))
    queue: Queue[Any] = Queue(microqueue_database, clock=microqueue_clock, settings=settings)
    microqueue_database.create_collection("orders")
    queue.enqueue({"order": 1})
    late = queue.pop()
    microqueue_clock.advance(5)
    Sweeper(queue).reclaim_stuck()
    current = queue.pop()
    assert late is not None
    assert current is not None
    with (
        pytest.raises(LeaseLost),
        microqueue_client.start_session() as session,
        session.start_transaction(),
    ):
        microqueue_database.orders.insert_one({"_id": "late"}, session=session)
        queue.mark_done(late, session=session)
    assert microqueue_database.orders.count_documents({}) == 0


def test_conflict_reaches_with_transaction_so_that_it_can_retry(
    queue: Queue[Any], microqueue_client: MongoClient[Any]
) -> None:
    queue.enqueue({"n": 1})
    task = queue.pop()
    assert task is not None
    runs = []

    def finish(session: Any) -> None:
        runs.append(1)
        # Read first: it fixes the snapshot, which the write outside then invalidates.
        core_of(queue).collections.tasks.find_one({"_id": task.id}, session=session)
        if len(runs) == 1:
            queue.touch(task, extend=77)
        queue.mark_done(task, session=session)

    with microqueue_client.start_session() as session:
        session.with_transaction(finish)
    assert len(runs) == 2
    assert queue.stats().done == 1


def test_duplicate_inside_a_transaction_is_reported(
    queue: Queue[Any], microqueue_client: MongoClient[Any]
) -> None:
    queue.enqueue({}, dedupe_key="k")
    with (
        pytest.raises(DuplicateTask, match="'k'"),
        microqueue_client.start_session() as session,
        session.start_transaction(),
    ):
        queue.enqueue({}, dedupe_key="k", session=session)
    assert queue.stats().ready == 1


def test_driver_errors_inside_a_transaction_are_not_wrapped(
    queue: Queue[Any], microqueue_client: MongoClient[Any]
) -> None:
    with microqueue_client.start_session() as session:
        session.start_transaction()
        session.abort_transaction()
        session.start_transaction()
        queue.enqueue({}, session=session)
        microqueue_client.admin.command("killSessions", [session.session_id])
        with pytest.raises(OperationFailure):
            queue.enqueue({}, session=session)


@pytest.fixture(params=["motor", "pymongo_async"])
async def async_database(
    request: pytest.FixtureRequest, microqueue_server: EmbeddedServer, microqueue_database: Any
) -> AsyncIterator[Any]:
    if request.param == "motor":
        motor: Any = AsyncIOMotorClient(microqueue_server.uri)
        yield motor[microqueue_database.name]
        motor.close()
        return
    client: AsyncMongoClient[Any] = AsyncMongoClient(microqueue_server.uri)
    yield client[microqueue_database.name]
    await client.close()


@pytest.mark.parametrize("abort", [False, True])
async def test_async_transactions_commit_or_vanish_whole(async_database: Any, abort: bool) -> None:
    queue: AsyncQueue[Any] = AsyncQueue(async_database)
    await queue.ensure_indexes()
    await async_database.create_collection("orders")
    await queue.enqueue({"n": 1})
    task = await queue.pop()
    assert task is not None
    started = async_database.client.start_session()
    session = await started if hasattr(started, "__await__") else started
    async with session:
        try:
            begun = session.start_transaction()
            async with await begun if hasattr(begun, "__await__") else begun:
                await async_database.orders.insert_one({"_id": 1}, session=session)
                await queue.mark_done(task, session=session)
                await queue.enqueue({"n": 2}, session=session)
                if abort:
                    raise BusinessError
        except BusinessError:
            pass
    stats = await queue.stats()
    orders = await async_database.orders.count_documents({})
    assert (orders, stats.done, stats.ready, stats.processing) == (
        (0, 0, 0, 1) if abort else (1, 1, 1, 0)
    )


@pytest.mark.parametrize("many", [False, True])
def test_dedupe_key_in_a_transaction_needs_the_indexes_first(
    microqueue_database: Any, microqueue_client: MongoClient[Any], many: bool
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    microqueue_database.create_collection("tasks")

    def add(session: Any) -> None:
        if many:
            queue.enqueue_many([{}], dedupe_key="k", session=session)
        else:
            queue.enqueue({}, dedupe_key="k", session=session)

    with microqueue_client.start_session() as session:
        with (
            pytest.raises(InvalidArgument, match=r"dedupe_key='k'.*call ensure_indexes"),
            session.start_transaction(),
        ):
            add(session)
        assert microqueue_database.tasks.count_documents({}) == 0
        Queue[Any](microqueue_database).ensure_indexes()  # By another process.
        with session.start_transaction():
            add(session)
        with pytest.raises(DuplicateTask), session.start_transaction():
            add(session)


def test_duplicates_that_were_stored_without_indexes_are_named(microqueue_database: Any) -> None:
    careless = QueueSettings(ensure_indexes=False)
    for _ in range(2):
        Queue[Any](microqueue_database, settings=careless).enqueue({}, dedupe_key="k")
    with pytest.raises(DuplicatesStored, match="cancel or delete the others") as caught:
        Queue[Any](microqueue_database).pop()
    assert caught.value.key == {"queue": "default", "dedupe_key": "k"}
    microqueue_database.tasks.delete_one({"dedupe_key": "k"})
    assert Queue[Any](microqueue_database).pop() is not None


def test_session_of_another_client_is_refused(
    queue: Queue[Any], microqueue_server: EmbeddedServer
) -> None:
    with (
        MongoClient[Any](microqueue_server.uri) as other,
        other.start_session() as session,
        session.start_transaction(),
        pytest.raises(InvalidArgument, match="the queue's own client"),
    ):
        queue.enqueue({}, session=session)
