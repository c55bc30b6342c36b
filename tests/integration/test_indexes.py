from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from microqueue import DuplicateTask, IndexConflict, NewTask, Queue, QueueSettings, Sweeper
from microqueue.testing import FakeClock


def expiry(database: Any) -> float | None:
    seconds: float | None = database.microqueue_locks.find_one("schema:tasks")["retention_sec"]
    return seconds


def test_changed_retention_is_applied_to_the_existing_collection(microqueue_database: Any) -> None:
    for retention, seconds in [
        (timedelta(days=7), 604_800),
        (timedelta(hours=1), 3600),
        (None, None),
        (timedelta(days=30_000), 30_000 * 86_400),
        (timedelta(0), 0),
        (timedelta(seconds=90), 90),
    ]:
        settings = QueueSettings(retention=retention)
        Queue(microqueue_database, settings=settings).ensure_indexes()
        assert expiry(microqueue_database) == seconds


def test_indexes_can_be_made_without_changing_the_retention(microqueue_database: Any) -> None:
    Queue(microqueue_database, settings=QueueSettings(retention=None)).ensure_indexes()
    microqueue_database.tasks.drop_index("ready")
    assert Queue(microqueue_database).ensure_indexes(adjust=False) == ["ready"]
    assert expiry(microqueue_database) is None


def test_first_write_of_another_service_leaves_the_retention_alone(
    microqueue_database: Any,
) -> None:
    Queue(microqueue_database, settings=QueueSettings(retention=None)).ensure_indexes()
    other: Queue[Any] = Queue(microqueue_database, "other")
    other.enqueue({})
    assert expiry(microqueue_database) is None


def test_sweeper_goes_by_the_retention_of_the_collection(
    microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    keeper: Queue[Any] = Queue(
        microqueue_database, settings=QueueSettings(retention=None), clock=microqueue_clock
    )
    keeper.ensure_indexes()
    keeper.enqueue({})
    task = keeper.pop()
    assert task is not None
    keeper.mark_done(task)
    microqueue_clock.advance(timedelta(days=365))
    stranger: Queue[Any] = Queue(microqueue_database, clock=microqueue_clock)
    assert Sweeper(stranger).run_once().purged == 0
    Queue(microqueue_database, settings=QueueSettings(retention=60)).ensure_indexes()
    assert Sweeper(keeper).run_once().purged == 1


@pytest.mark.parametrize("kind", ["text", "hashed"])
def test_index_of_another_kind_is_a_conflict(microqueue_database: Any, kind: str) -> None:
    microqueue_database.tasks.create_index([("payload", kind)], name="ready")
    with pytest.raises(IndexConflict):
        Queue(microqueue_database).ensure_indexes()


def test_index_of_another_shape_is_named_with_the_way_out(microqueue_database: Any) -> None:
    microqueue_database.tasks.create_index([("queue", 1), ("created_at", 1)], name="ready")
    with pytest.raises(IndexConflict) as caught:
        Queue(microqueue_database).ensure_indexes()
    assert caught.value.index == "ready"
    assert caught.value.collection == "tasks"
    assert "created_at" in str(caught.value.found)
    assert all(one in str(caught.value) for one in ("'ready'", "created_at", "ensure_indexes()"))


def test_same_keys_under_another_name_are_a_conflict_too(microqueue_database: Any) -> None:
    microqueue_database.tasks.create_index(
        [("queue", 1), ("created_at", -1), ("_id", -1)], name="x"
    )
    with pytest.raises(IndexConflict) as caught:
        Queue(microqueue_database).ensure_indexes()
    assert caught.value.index == "browse"
    assert caught.value.found["name"] == "x"


def test_indexes_of_the_callers_own_are_left_alone(microqueue_database: Any) -> None:
    microqueue_database.tasks.create_index([("payload.customer", 1)], name="by_customer")
    Queue(microqueue_database).ensure_indexes()
    assert "by_customer" in microqueue_database.tasks.index_information()


def test_first_write_creates_the_indexes_unless_told_not_to(microqueue_database: Any) -> None:
    settings = QueueSettings(ensure_indexes=False)
    Queue(microqueue_database.bare, settings=settings).enqueue({})
    assert list(microqueue_database.bare.index_information()) == ["_id_"]
    Queue(microqueue_database.tasks).enqueue({})
    assert "ready" in microqueue_database.tasks.index_information()


def test_index_of_dedupe_keys_is_created_when_the_first_key_is_used(
    microqueue_database: Any,
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.enqueue({})
    assert set(microqueue_database.tasks.index_information()) == {
        "_id_", "ready", "deadline", "failed", "browse",
    }  # fmt: skip
    queue.enqueue_many([{}, NewTask(payload={}, dedupe_key="k")])
    assert "dedupe" in microqueue_database.tasks.index_information()
    with pytest.raises(DuplicateTask):
        Queue[Any](microqueue_database).enqueue({}, dedupe_key="k")


def test_of_many_first_users_of_a_key_one_wins(microqueue_database: Any) -> None:
    Queue[Any](microqueue_database).enqueue_many([{}] * 2000)
    start = threading.Barrier(8)

    def add(_: int) -> bool:
        queue: Queue[Any] = Queue(microqueue_database)
        start.wait()
        try:
            queue.enqueue({}, dedupe_key="k")
        except DuplicateTask:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(add, range(8))) == [False] * 7 + [True]
    assert microqueue_database.tasks.count_documents({"dedupe_key": "k"}) == 1


def test_looking_creates_nothing(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.stats()
    queue.peek()
    queue.get("x")
    queue.dead_letters.list()
    queue.dead_letters.stats()
    assert microqueue_database.list_collection_names() == []


def test_dead_letter_collection_has_its_own_indexes(microqueue_database: Any) -> None:
    settings = QueueSettings(dead_letters="collection")
    created = Queue(microqueue_database.jobs, settings=settings).ensure_indexes()
    assert created[-2:] == ["failed", "retired"]
    assert "retired" in microqueue_database.jobs_dlq.index_information()
