"""Producers with one id or dedupe key, on a real server: races, lost replies, transactions.

Where a race must go one certain way, an operation is stopped between two of its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from pymongo import MongoClient

from microqueue import DuplicateTask, NewTask, Queue, QueueSettings, TaskStatus
from microqueue.operations.bulk_load import FAR
from tests.integration.model import Steps
from tests.integration.queues import popped
from tests.integration.test_transient import losing
from tests.rejection import raising

EIGHT = 8
ROUNDS = 40
SAME: dict[str, dict[str, Any]] = {"id": {"task_id": "a"}, "key": {"dedupe_key": "k"}}


def at_once(action: Callable[[int], Any]) -> list[Any]:
    """Let eight threads do something at the same time; return what each returned."""
    barrier = Barrier(EIGHT)

    def run(number: int) -> Any:
        barrier.wait()
        return action(number)

    with ThreadPoolExecutor(EIGHT) as pool:
        return list(pool.map(run, range(EIGHT)))


# Races


@pytest.mark.parametrize("same", SAME)
@pytest.mark.parametrize("on_duplicate", ["return", "replace"])
def test_eight_producers_make_one_task(
    microqueue_database: Any, same: str, on_duplicate: Any
) -> None:
    queue = Queue[Any](microqueue_database)
    queue.ensure_indexes()
    for _ in range(ROUNDS):
        tasks = at_once(
            lambda number: queue.enqueue({"n": number}, on_duplicate=on_duplicate, **SAME[same])
        )
        assert len({task.id for task in tasks}) == 1
        assert sum(not task.is_duplicate for task in tasks) == 1
        (stored,) = microqueue_database.tasks.find()
        if on_duplicate == "return":
            (first,) = [task for task in tasks if not task.is_duplicate]
            assert stored["payload"] == first.payload
            assert {task.payload["n"] for task in tasks} == {first.payload["n"]}
        microqueue_database.tasks.delete_many({})


def test_worker_runs_the_last_payload_that_a_producer_was_promised(
    microqueue_database: Any,
) -> None:
    """Four producers replace one task while four workers claim it, one by one and in batches.

    Each payload that a producer wrote runs, unless a later one replaced it.
    """
    queue = Queue[Any](microqueue_database)
    queue.ensure_indexes()
    for _ in range(ROUNDS):
        queue.enqueue_many([{"filler": n} for n in range(3)])
        queue.enqueue({"n": -1}, dedupe_key="k")

        def act(number: int) -> Any:
            if number % 2:
                return queue.pop_many(10) if number % 4 == 1 else [queue.pop()]
            try:
                return queue.enqueue({"n": number}, dedupe_key="k", on_duplicate="replace")
            except DuplicateTask:
                return None

        replies = at_once(act)
        delivered = [task for reply in replies[1::2] for task in reply if task is not None]
        for task in delivered:
            assert task.payload == found(microqueue_database, task.id)["payload"]
        replaced = [task for task in replies[::2] if task is not None]
        ran = [task.payload["n"] for task in delivered if "n" in task.payload]
        waiting = [
            one["payload"]["n"]
            for one in microqueue_database.tasks.find({"dedupe_key": "k", "status": "pending"})
        ]
        # One task in all: it waits, or it was claimed and no other was added.
        assert len(ran) + len(waiting) == 1
        if replaced:
            assert (*ran, *waiting)[0] in {task.payload["n"] for task in replaced}
        microqueue_database.tasks.delete_many({})


def found(database: Any, task_id: Any) -> Any:
    return database.tasks.find_one({"_id": task_id})


def finish(queue: Queue[Any]) -> None:
    queue.mark_done(popped(queue))


# The first call meets a duplicate, and is stopped before it reads that task.
GONE: dict[str, Callable[[Queue[Any]], object]] = {
    "done": finish,
    "deleted": lambda queue: queue.purge(status="pending"),
}


@pytest.mark.parametrize("gone", GONE)
@pytest.mark.parametrize("on_duplicate", ["return", "replace"])
def test_task_that_ends_before_it_is_read_makes_room_for_another(
    microqueue_queue: Queue[Any], gone: str, on_duplicate: Any
) -> None:
    microqueue_queue.enqueue({"n": 1}, dedupe_key="k")
    call = Steps(
        microqueue_queue,
        lambda twin: twin.enqueue({"n": 2}, dedupe_key="k", on_duplicate=on_duplicate),
    ).until("insert_one")
    call.step()
    call.until("find_one")
    GONE[gone](microqueue_queue)
    task = call.finish()
    assert (task.payload, task.is_duplicate) == ({"n": 2}, False)
    assert popped(microqueue_queue).payload == {"n": 2}


@pytest.mark.parametrize("same", SAME)
def test_task_that_is_claimed_before_it_is_replaced_keeps_its_payload(
    microqueue_queue: Queue[Any], microqueue_database: Any, same: str
) -> None:
    microqueue_queue.enqueue({"n": 1}, **SAME[same])
    call = Steps(
        microqueue_queue,
        lambda twin: twin.enqueue({"n": 2}, on_duplicate="replace", **SAME[same]),
    ).until("find_one_and_update")
    task = popped(microqueue_queue)
    before = found(microqueue_database, task.id)
    with pytest.raises(DuplicateTask) as caught:
        call.finish()
    assert caught.value.existing_id == task.id
    assert found(microqueue_database, task.id) == before


def test_task_that_is_replaced_before_a_batch_claims_it_has_the_new_payload(
    microqueue_database: Any, microqueue_clock: Any
) -> None:
    queue = Queue[Any](microqueue_database, clock=microqueue_clock)
    queue.enqueue_many([NewTask(payload={"n": n}, task_id=n) for n in (1, 2)])
    microqueue_clock.advance(60)  # So that the claim trusts what it has read.
    claim = Steps(queue, lambda twin: twin.pop_many(2)).until("update_many")
    queue.enqueue({"n": 3}, task_id=1, on_duplicate="replace")
    delivered = {task.id: task.payload for task in claim.finish()}
    assert delivered.get(1, {"n": 3}) == {"n": 3}
    assert delivered[2] == {"n": 2}
    assert found(microqueue_database, 1)["payload"] == {"n": 3}


def test_task_of_a_held_load_is_not_replaced(
    microqueue_queue: Queue[Any], microqueue_database: Any
) -> None:
    microqueue_queue.enqueue({"n": 1}, task_id="a")
    held = {"next_retry_at": FAR, "deadline_at": FAR, "held": {"by": ["load"]}}
    microqueue_database.tasks.update_one({"_id": "a"}, {"$set": held})
    with raising(DuplicateTask, "held", existing_id="a"):
        microqueue_queue.enqueue({"n": 2}, task_id="a", on_duplicate="replace")
    assert found(microqueue_database, "a")["payload"] == {"n": 1}


# Lost replies


@pytest.mark.parametrize("on_duplicate", ["return", "replace"])
@pytest.mark.parametrize("same", SAME)
def test_insert_whose_reply_was_lost_is_not_its_own_duplicate(
    microqueue_queue: Queue[Any], same: str, on_duplicate: Any
) -> None:
    microqueue_queue.ensure_indexes()
    lossy = losing(microqueue_queue, "insert_one")
    task = microqueue_queue.enqueue({"n": 1}, on_duplicate=on_duplicate, **SAME[same])
    assert lossy.lost == 1
    assert not task.is_duplicate
    assert microqueue_queue.stats().ready == 1


def retry(queue: Queue[Any]) -> None:
    queue.mark_retry(popped(queue), "again", delay=0)


def fail(queue: Queue[Any]) -> None:
    queue.mark_failure(popped(queue), "no")


# What a worker does between a replacement whose reply was lost and its repeat; the attempts since.
SINCE: dict[str, tuple[Callable[[Queue[Any]], object], TaskStatus, int]] = {
    "nothing": (lambda _: None, TaskStatus.PENDING, 0),
    "claimed": (popped, TaskStatus.PROCESSING, 1),
    "retried": (retry, TaskStatus.PENDING, 1),
    "done": (finish, TaskStatus.DONE, 1),
    "failed": (fail, TaskStatus.FAILED, 1),
    "moved": (fail, TaskStatus.FAILED, 1),
}


@pytest.mark.parametrize("since", SINCE)
@pytest.mark.parametrize("same", SAME)
def test_replacement_whose_reply_was_lost_is_recognised(
    microqueue_database: Any, same: str, since: str
) -> None:
    settings = QueueSettings(dead_letters="collection" if since == "moved" else "status")
    queue, other = (Queue[Any](microqueue_database, settings=settings) for _ in range(2))
    queue.ensure_indexes()
    first = queue.enqueue({"n": 1}, **SAME[same])
    act, status, attempts = SINCE[since]
    lossy = losing(queue, "find_one_and_update", in_between=lambda: act(other))
    task = queue.enqueue({"n": 2}, on_duplicate="replace", **SAME[same])
    assert lossy.lost == 1
    assert (task.id, task.payload, task.is_duplicate) == (first.id, {"n": 2}, True)
    assert (task.status, task.attempts) == (status, attempts)
    stored = [*microqueue_database.tasks.find(), *microqueue_database.tasks_dlq.find()]
    assert [one["payload"] for one in stored] == [{"n": 2}]


# Transactions


def test_duplicate_in_a_transaction_is_returned_or_replaced_without_aborting_it(
    microqueue_queue: Queue[Any], microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    queue = microqueue_queue
    queue.ensure_indexes()
    microqueue_database.create_collection("orders")
    first = queue.enqueue({"n": 1}, dedupe_key="k")
    with microqueue_client.start_session() as session, session.start_transaction():
        microqueue_database.orders.insert_one({"_id": 1}, session=session)
        same = queue.enqueue({"n": 2}, dedupe_key="k", on_duplicate="return", session=session)
        new = queue.enqueue({"n": 3}, task_id="a", on_duplicate="replace", session=session)
        report = queue.enqueue_many(
            [
                NewTask(payload={"n": 4}, task_id="a", on_duplicate="replace"),
                NewTask(payload={"n": 5}),
            ],
            session=session,
        )
        assert (same.id, same.is_duplicate, new.is_duplicate) == (first.id, True, False)
        assert [task.is_duplicate for task in report.tasks] == [True, False]
        assert queue.get("a") is None  # No one else sees it before the commit.
    payloads = [task.payload["n"] for task in queue.pop_many(10)]
    assert payloads == [1, 4, 5]
    assert microqueue_database.orders.count_documents({}) == 1


def test_replacement_in_a_transaction_that_aborts_leaves_the_task(
    microqueue_queue: Queue[Any], microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    queue = microqueue_queue
    queue.ensure_indexes()
    queue.enqueue({"n": 1}, task_id="a")
    before = found(microqueue_database, "a")
    with microqueue_client.start_session() as session:
        session.start_transaction()
        queue.enqueue({"n": 2}, task_id="a", on_duplicate="replace", session=session)
        session.abort_transaction()
    assert found(microqueue_database, "a") == before
    popped(queue)
    with (
        microqueue_client.start_session() as session,
        pytest.raises(DuplicateTask),
        session.start_transaction(),
    ):
        queue.enqueue({"n": 2}, task_id="a", on_duplicate="replace", session=session)


def test_dead_letter_in_its_collection_is_returned_in_a_transaction(
    microqueue_database: Any, microqueue_client: MongoClient[Any]
) -> None:
    queue = Queue[Any](microqueue_database, settings=QueueSettings(dead_letters="collection"))
    queue.ensure_indexes()
    queue.enqueue({"n": 1}, task_id="a")
    queue.mark_failure(popped(queue), "no")
    with microqueue_client.start_session() as session, session.start_transaction():
        task = queue.enqueue({"n": 2}, task_id="a", on_duplicate="return", session=session)
    assert (task.status, task.payload) == (TaskStatus.FAILED, {"n": 1})


# Cost


def test_call_without_a_duplicate_costs_one_insert(
    microqueue_queue: Queue[Any],
) -> None:
    microqueue_queue.ensure_indexes()
    options: list[dict[str, Any]] = [
        {},
        {"dedupe_key": "a"},
        {"dedupe_key": "b", "on_duplicate": "return"},
        {"task_id": "a", "on_duplicate": "replace"},
    ]
    made: list[list[str]] = []
    for one in options:
        steps = Steps(microqueue_queue, lambda twin, some=one: twin.enqueue({}, **some))  # type: ignore[misc]
        made.append([])
        while steps.next is not None:
            made[-1].append(steps.next.method)
            steps.step()
    assert made[0][-1] == "insert_one"
    assert made == [made[0]] * len(options)
