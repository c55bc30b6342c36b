"""What the hot operations cost with a large backlog, counted in index keys by the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import MongoClient

from microqueue import Queue, Sweeper
from microqueue.core import core_of
from microqueue.new_task import NewTask
from microqueue.operations.enqueue import new_document
from microqueue.settings import QueueSettings
from microqueue.testing import FakeClock
from tests.integration.queues import profiled

EACH = 100_000
MOST_KEYS = 2


@pytest.fixture(scope="module")
def large_queue(microqueue_client: MongoClient[Any]) -> Iterator[Queue[Any]]:
    """100,000 tasks each that are ready, delayed after a failure, and done."""
    database = microqueue_client["large"]
    queue: Queue[Any] = Queue(database, clock=FakeClock())
    queue.ensure_indexes()
    now = queue.now() - timedelta(hours=1)  # What is fresh is read once more by a batch claim.
    settings = QueueSettings()
    for kind in range(3):
        documents = []
        for n in range(EACH):
            document = new_document(
                NewTask.model_construct(payload={}, priority=n % 3),
                queue="default",
                payload={"n": n},
                settings=settings,
                now=now,
                position=n,
            )
            if kind == 1:
                document |= {"next_retry_at": now + timedelta(hours=2, seconds=n), "attempts": 1}
                document |= {"expires_at": now + timedelta(days=1)}
            if kind == 2:
                document |= {"status": "done", "finished_at": now, "attempts": 1}
            documents.append(document)
        database.tasks.insert_many(documents, ordered=False)
    yield queue
    database.drop_collection("tasks")


HOT: dict[str, Callable[[Queue[Any]], Any]] = {
    "pop": lambda queue: queue.pop(),
    "promote_due": lambda queue: Sweeper(queue).promote_due(),
    "reclaim_stuck": lambda queue: Sweeper(queue).reclaim_stuck(),
    "bury_exhausted": lambda queue: Sweeper(queue).bury_exhausted(),
    "expire_undelivered": lambda queue: Sweeper(queue).expire_undelivered(),
    "purge_finished": lambda queue: Sweeper(queue).purge_finished(),
    "dead_letters.list": lambda queue: queue.dead_letters.list(),
    "peek processing": lambda queue: queue.peek(status="processing"),
}


@pytest.mark.parametrize("name", HOT)
def test_examines_at_most_two_keys_whatever_the_backlog(large_queue: Queue[Any], name: str) -> None:
    with profiled(core_of(large_queue).collections.database) as recorded:
        HOT[name](large_queue)
    assert recorded, "the profiler saw nothing"
    plans = {str(entry.get("planSummary")) for entry in recorded}
    assert "COLLSCAN" not in plans
    assert sum(entry.get("keysExamined", 0) for entry in recorded) <= MOST_KEYS
    assert sum(entry.get("docsExamined", 0) for entry in recorded) <= MOST_KEYS


def test_batch_claim_examines_only_what_it_claims(large_queue: Queue[Any]) -> None:
    with profiled(core_of(large_queue).collections.database) as recorded:
        assert len(large_queue.pop_many(100)) == 100
    keys = {entry["op"]: entry["keysExamined"] for entry in recorded if entry["keysExamined"]}
    assert keys["query"] == 100
    # The update looks the ids up one by one: a key to find each, and one to pass it.
    assert keys["update"] <= 201


def test_settling_finds_the_task_by_its_id(large_queue: Queue[Any]) -> None:
    task = large_queue.pop()
    assert task is not None
    with profiled(core_of(large_queue).collections.database) as recorded:
        large_queue.mark_done(task)
    assert [entry["planSummary"] for entry in recorded] == ["IDHACK"] or all(
        entry["keysExamined"] == 1 for entry in recorded
    )


def test_duplicate_is_found_by_its_key(large_queue: Queue[Any]) -> None:
    large_queue.enqueue({}, dedupe_key="k", eta=datetime.now(UTC) + timedelta(days=1))
    with profiled(core_of(large_queue).collections.database) as recorded:
        report = large_queue.enqueue_many([{}], dedupe_key="k")
        assert len(report.duplicates) == 1
    assert "COLLSCAN" not in {str(entry.get("planSummary")) for entry in recorded}
