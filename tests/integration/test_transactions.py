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
    LeaseLost,
    Outcome,
    Queue,
    QueueSettings,
    Sweeper,
    Task,
    TaskStatus,
    Worker,
)
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from microqueue.testing import FakeClock
from microqueue.worker import Context, lease_renewal
from tests.rejection import rejecting
from tests.servers import fail_command

pytestmark = pytest.mark.usefixtures("replica_set")


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


def test_without_retention_the_task_disappears_with_the_commit(
    microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    queue = Queue[Any](microqueue_database, settings=QueueSettings(retention=0))
    queue.enqueue_many([{"order": 1}, {"order": 2}])
    first, second = queue.pop_many(2)
    with microqueue_client.start_session() as session, session.start_transaction():
        queue.mark_done(first, session=session)
        assert queue.get(first.id) is not None
    assert queue.get(first.id) is None
    with (
        pytest.raises(BusinessError),
        microqueue_client.start_session() as session,
        session.start_transaction(),
    ):
        queue.mark_done(second, session=session)
        raise BusinessError
    assert queue.get(second.id) is not None
    with (
        pytest.raises(LeaseLost, match="gone"),
        microqueue_client.start_session() as session,
        session.start_transaction(),
    ):
        queue.mark_done(first, session=session)
    queue.mark_done(first)  # Outside a transaction there is no effect to store a second time.


@pytest.mark.parametrize("retention", [None, 0])
def test_effect_of_a_lost_lease_is_not_stored_beside_that_of_the_next_worker(
    microqueue_client: MongoClient[Any],
    microqueue_database: Any,
    microqueue_clock: FakeClock,
    retention: int | None,
) -> None:
    settings = QueueSettings(
        retention=retention,
        visibility_timeout=5,
        backoff=BackoffPolicy(base_sec=0, max_sec=0),
    )
    queue: Queue[Any] = Queue(microqueue_database, clock=microqueue_clock, settings=settings)
    queue.ensure_indexes()
    microqueue_database.create_collection("orders")

    def ship(task: Task[Any], by: str) -> None:
        def write(session: Any) -> None:
            microqueue_database.orders.insert_one({"_id": by}, session=session)
            queue.mark_done(task, session=session)

        with microqueue_client.start_session() as session:
            session.with_transaction(write)

    queue.enqueue({"order": 1})
    late = queue.pop()
    microqueue_clock.advance(5)
    Sweeper(queue).reclaim_stuck()
    current = queue.pop()
    assert late is not None
    assert current is not None
    ship(current, "in time")
    with pytest.raises(LeaseLost):
        ship(late, "late")
    assert [order["_id"] for order in microqueue_database.orders.find()] == ["in time"]


@pytest.mark.parametrize("retention", [None, 0])
def test_transaction_repeated_after_its_commit_is_not_stored_twice(
    microqueue_client: MongoClient[Any], microqueue_database: Any, retention: int | None
) -> None:
    queue = Queue[Any](microqueue_database, settings=QueueSettings(retention=retention))
    queue.enqueue({"order": 1})
    microqueue_database.create_collection("orders")
    task = queue.pop()
    assert task is not None

    def ship() -> None:
        with microqueue_client.start_session() as session, session.start_transaction():
            microqueue_database.orders.insert_one({}, session=session)
            queue.mark_done(task, session=session)

    ship()
    with pytest.raises(LeaseLost):
        ship()  # As after a commit whose reply was lost.
    assert microqueue_database.orders.count_documents({}) == 1


@pytest.mark.parametrize("retention", [None, 0])
def test_commit_whose_reply_was_lost_is_repeated_and_not_its_transaction(
    microqueue_client: MongoClient[Any], microqueue_database: Any, retention: int | None
) -> None:
    queue = Queue[Any](microqueue_database, settings=QueueSettings(retention=retention))
    queue.enqueue({"order": 1})
    microqueue_database.create_collection("orders")
    task = queue.pop()
    assert task is not None
    runs = []

    def ship(session: Any) -> None:
        runs.append(1)
        microqueue_database.orders.insert_one({}, session=session)
        queue.mark_done(task, session=session)

    lost = {"code": 64, "errmsg": "waiting for replication timed out"}  # It is committed.
    with (
        fail_command(
            microqueue_client,
            {"times": 3},
            failCommands=["commitTransaction"],
            writeConcernError=lost,
        ),
        microqueue_client.start_session() as session,
    ):
        session.with_transaction(ship)
    assert runs == [1]
    assert microqueue_database.orders.count_documents({}) == 1
    assert queue.stats().processing == 0


def test_task_settled_twice_in_one_transaction_is_settled_once(
    queue: Queue[Any], microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    queue.enqueue({"order": 1})
    task = queue.pop()
    assert task is not None
    with microqueue_client.start_session() as session, session.start_transaction():
        microqueue_database.orders.insert_one({}, session=session)
        queue.mark_done(task, result=1, session=session)
        queue.mark_done(task, result=2, session=session)
    stored = queue.get(task.id)
    assert stored is not None
    assert (stored.status, stored.result, len(stored.history)) == (TaskStatus.DONE, 1, 1)


@pytest.mark.parametrize("retention", [None, 0])
def test_task_that_the_snapshot_does_not_have_is_not_taken_for_done(
    microqueue_client: MongoClient[Any], microqueue_database: Any, retention: int | None
) -> None:
    queue = Queue[Any](microqueue_database, settings=QueueSettings(retention=retention))
    queue.ensure_indexes()
    microqueue_database.create_collection("orders")
    task = None
    with (
        pytest.raises(LeaseLost),
        microqueue_client.start_session() as session,
        session.start_transaction(),
    ):
        microqueue_database.orders.find_one({}, session=session)  # It fixes the snapshot.
        queue.enqueue({"order": 1})
        task = queue.pop()
        assert task is not None
        microqueue_database.orders.insert_one({}, session=session)
        queue.mark_done(task, session=session)
    assert microqueue_database.orders.count_documents({}) == 0
    assert task is not None
    queue.mark_done(task)


@pytest.mark.parametrize("retention", [None, 0])
def test_session_without_a_transaction_lets_a_settlement_be_repeated(
    microqueue_client: MongoClient[Any], microqueue_database: Any, retention: int | None
) -> None:
    queue = Queue[Any](microqueue_database, settings=QueueSettings(retention=retention))
    queue.enqueue({"order": 1})
    task = queue.pop()
    assert task is not None
    with microqueue_client.start_session() as session:
        queue.mark_done(task, session=session)
        queue.mark_done(task, session=session)
    assert queue.stats().processing == 0


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
            rejecting("dedupe_key", "k", code="no_index"),
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
    with pytest.raises(DuplicatesStored) as caught:
        Queue[Any](microqueue_database).enqueue({}, dedupe_key="other")
    assert caught.value.key == {"queue": "default", "dedupe_key": "k"}
    microqueue_database.tasks.delete_one({"dedupe_key": "k"})
    assert Queue[Any](microqueue_database).pop() is not None


def test_session_of_another_client_is_rejected(
    queue: Queue[Any], microqueue_server: EmbeddedServer
) -> None:
    with (
        MongoClient[Any](microqueue_server.uri) as other,
        other.start_session() as session,
        session.start_transaction(),
        rejecting("session", session),
    ):
        queue.enqueue({}, session=session)


def test_handler_settles_its_task_in_its_own_transaction(
    queue: Queue[Any],
    microqueue_client: MongoClient[Any],
    microqueue_database: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No look finds the task done before its handler has returned.
    monkeypatch.setattr(lease_renewal, "CHECK_EVERY_SEC", 3600.0)

    def ship(payload: dict[str, Any], context: Context) -> str:
        def write(session: Any) -> None:
            microqueue_database.orders.insert_one(payload, session=session)
            queue.mark_done(context.task, result="shipped", session=session)

        with microqueue_client.start_session() as session:
            session.with_transaction(write)
        return "returned"

    task = queue.enqueue({"order": 1})
    Worker(queue, ship, keep_result=True).run(burst=True)
    stored = queue.get(task.id)
    assert stored is not None
    assert (stored.status, stored.attempts, stored.result) == (TaskStatus.DONE, 1, "shipped")
    assert [attempt.outcome for attempt in stored.history] == [Outcome.DONE]
    assert microqueue_database.orders.count_documents({"order": 1}) == 1
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


@pytest.mark.parametrize("failing", ["before the settlement", "after it", "after the commit"])
def test_handler_that_fails_writes_effect_and_settlement_or_neither(
    queue: Queue[Any],
    microqueue_client: MongoClient[Any],
    microqueue_database: Any,
    microqueue_clock: FakeClock,
    failing: str,
) -> None:
    def ship(payload: dict[str, Any], context: Context) -> None:
        def fail(moment: str) -> None:
            if moment == failing and context.attempt == 1:
                raise BusinessError

        with microqueue_client.start_session() as session, session.start_transaction():
            microqueue_database.orders.insert_one(payload, session=session)
            fail("before the settlement")
            queue.mark_done(context.task, session=session)
            fail("after it")
        fail("after the commit")

    def state() -> tuple[TaskStatus, int, int]:
        stored = queue.get(task.id)
        assert stored is not None
        orders = microqueue_database.orders.count_documents({"order": 1})
        return stored.status, len(stored.history), orders

    task = queue.enqueue({"order": 1}, backoff=BackoffPolicy(base_sec=600, jitter="none"))
    Worker(queue, ship).run(burst=True)
    committed = failing == "after the commit"
    assert state() == ((TaskStatus.DONE, 1, 1) if committed else (TaskStatus.PENDING, 1, 0))
    microqueue_clock.advance(600)
    Worker(queue, ship).run(burst=True)
    assert state() == (TaskStatus.DONE, 1 if committed else 2, 1)


def test_handler_that_lost_its_lease_cannot_commit_its_effect(
    queue: Queue[Any], microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    lost: list[LeaseLost] = []

    def ship(payload: dict[str, Any], context: Context) -> None:
        if not lost:
            queue.release(context.task)  # As the dashboard does; the task is delivered again.
        try:
            with microqueue_client.start_session() as session, session.start_transaction():
                microqueue_database.orders.insert_one(payload, session=session)
                queue.mark_done(context.task, session=session)
        except LeaseLost as error:
            lost.append(error)
            raise

    task = queue.enqueue({"order": 1})
    Worker(queue, ship, concurrency=1, prefetch=1).run(burst=True)
    assert [error.task_id for error in lost] == [task.id]
    assert microqueue_database.orders.count_documents({}) == 1
    assert queue.stats().done == 1
