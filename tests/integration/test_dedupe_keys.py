"""Keys that last for a period, on a real server: races, producers that die, lost replies.

A producer makes several writes. Each test of a death stops it before each of its calls in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from pymongo import MongoClient

from microqueue import DuplicateTask, NewTask, Queue, QueueSettings, Sweeper, Task, TaskStatus
from microqueue.core import core_of
from microqueue.operations.dedupe_keys import RESERVED
from microqueue.testing import FakeClock
from tests.integration.model import Steps
from tests.integration.queues import popped
from tests.integration.test_duplicates import at_once
from tests.integration.test_transient import ReplyLost, losing

HOUR = 3600
NO_TRACE = QueueSettings(retention=0)


def add(queue: Queue[Any], n: int, **options: Any) -> Task[Any]:
    return queue.enqueue({"n": n}, dedupe_key="k", dedupe_for=HOUR, **options)


def drained(queue: Queue[Any]) -> list[Any]:
    """Deliver and finish everything; return the payloads."""
    found = []
    while (task := queue.pop()) is not None:
        found.append(task.payload["n"])
        queue.mark_done(task)
    return found


@pytest.fixture
def queue(microqueue_database: Any, microqueue_clock: FakeClock) -> Queue[Any]:
    queue = Queue[Any](microqueue_database, settings=NO_TRACE, clock=microqueue_clock)
    queue.ensure_indexes()
    add(queue, 0, delay=1)  # Creates the index of the keys, too.
    queue.purge(status="pending")
    microqueue_database.microqueue_dedupe_keys.delete_many({})
    return queue


# Races


@pytest.mark.parametrize("on_duplicate", ["raise", "return", "replace"])
def test_eight_producers_and_a_worker_make_one_task_in_a_period(
    queue: Queue[Any], microqueue_database: Any, on_duplicate: Any
) -> None:
    for _ in range(25):

        def act(number: int) -> Any:
            if number == 0:
                return drained(queue)
            try:
                task = add(queue, number, on_duplicate=on_duplicate)
            except DuplicateTask:
                return None
            return None if task.is_duplicate else task

        replies = at_once(act)
        added = [reply for reply in replies[1:] if reply is not None]
        assert len(added) == 1
        ran = replies[0] + drained(queue)
        assert len(ran) == 1
        if on_duplicate != "replace":
            assert ran == [added[0].payload["n"]]
        assert microqueue_database.tasks.count_documents({}) == 0
        microqueue_database.microqueue_dedupe_keys.delete_many({})


def test_eight_batches_and_a_worker_make_one_task_for_each_key(
    queue: Queue[Any], microqueue_database: Any
) -> None:
    items = [NewTask(payload={"n": n}, dedupe_key=str(n), dedupe_for=HOUR) for n in range(6)]
    for _ in range(15):
        replies = at_once(lambda number: queue.enqueue_many(items) if number else drained(queue))
        assert sum(report.added for report in replies[1:]) == len(items)
        assert sorted(replies[0] + drained(queue)) == list(range(6))
        assert microqueue_database.tasks.count_documents({}) == 0
        microqueue_database.microqueue_dedupe_keys.delete_many({})


def test_when_a_period_ends_one_of_eight_producers_adds_the_next_task(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    for _ in range(25):
        outcomes = at_once(lambda number: _tried(queue, number))
        assert sum(outcomes) == 1
        assert len(drained(queue)) == 1
        microqueue_clock.advance(HOUR)


def _tried(queue: Queue[Any], number: int) -> bool:
    with suppress(DuplicateTask):
        add(queue, number)
        return True
    return False


# Producers that die, or stall, before one of their calls


def calls_of(queue: Queue[Any], use: Callable[[Queue[Any]], object]) -> int:
    """Count the calls of an operation, and undo it."""
    steps = Steps(queue, use)
    for number in count():
        if steps.next is None:
            drained(queue)
            core_of(queue).collections.dedupe_keys.delete_many({})
            return number
        steps.step()
    raise AssertionError("unreachable")


def stopped(queue: Queue[Any], before: int, use: Callable[[Queue[Any]], object]) -> Steps:
    steps = Steps(queue, use)
    for _ in range(before):
        steps.step()
    return steps


def _many(queue: Queue[Any]) -> Task[Any]:
    report = queue.enqueue_many([NewTask(payload={"n": 2}, dedupe_key="k", dedupe_for=HOUR)])
    if not report.tasks:
        raise DuplicateTask(queue=queue.name, task_id=None, dedupe_key="k", existing_id=None)
    return report.tasks[0]


NEXT: dict[str, Callable[[Queue[Any]], Task[Any]]] = {
    "raise": lambda queue: add(queue, 2),
    "return": lambda queue: add(queue, 2, on_duplicate="return"),
    "replace": lambda queue: add(queue, 2, on_duplicate="replace"),
    "without a period": lambda queue: queue.enqueue({"n": 2}, dedupe_key="k"),
    "many": _many,
}


@pytest.mark.parametrize("following", NEXT)
def test_producer_that_dies_before_any_call_neither_loses_nor_doubles_the_task(
    queue: Queue[Any], microqueue_database: Any, following: str
) -> None:
    total = calls_of(queue, lambda twin: add(twin, 1))
    assert total >= 4
    outcomes = set()
    for before in range(total + 1):
        stopped(queue, before, lambda twin: add(twin, 1))
        try:
            task = NEXT[following](queue)
        except DuplicateTask:
            expected = [1]
        else:
            expected = [task.payload["n"]]
        outcomes.add(expected[0])
        assert drained(queue) == expected, f"stopped before call {before}"
        assert microqueue_database.tasks.count_documents({}) == 0
        if following != "without a period":
            with pytest.raises(DuplicateTask):
                add(queue, 3)
        microqueue_database.microqueue_dedupe_keys.delete_many({})
    assert outcomes >= ({2} if following == "replace" else {1, 2})


def test_producer_that_stalls_before_any_call_adds_no_second_task(
    queue: Queue[Any], microqueue_database: Any
) -> None:
    """Another producer adds the task, which is done and deleted before it resumes."""
    total = calls_of(queue, lambda twin: add(twin, 1))
    for before in range(total):
        stalled = stopped(queue, before, lambda twin: add(twin, 1))
        with suppress(DuplicateTask):
            add(queue, 2)
        ran = drained(queue)
        with suppress(DuplicateTask):
            stalled.finish()
        ran += drained(queue)
        assert len(ran) == 1, f"stalled before call {before}"
        assert microqueue_database.tasks.count_documents({}) == 0
        with pytest.raises(DuplicateTask):
            add(queue, 3)
        microqueue_database.microqueue_dedupe_keys.delete_many({})


def test_reserved_task_that_no_one_completes_is_a_dead_letter_and_frees_its_key(
    queue: Queue[Any], microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    total = calls_of(queue, lambda twin: add(twin, 1))
    codes = set()
    for before in range(total):
        stopped(queue, before, lambda twin: add(twin, 1))
        microqueue_clock.advance(RESERVED + timedelta(seconds=1))
        Sweeper(queue).run_once()
        letters = queue.dead_letters.list().tasks
        codes |= {letter.error.code for letter in letters if letter.error}
        assert drained(queue) == []
        assert add(queue, 2).payload == {"n": 2}
        assert drained(queue) == [2]
        queue.dead_letters.discard([letter.id for letter in letters])
        microqueue_database.microqueue_dedupe_keys.delete_many({})
    assert codes == {"expired"}


def test_replayed_task_that_was_never_released_is_delivered(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    stopped(queue, 0, lambda twin: add(twin, 1)).until("bulk_write")
    microqueue_clock.advance(RESERVED)
    Sweeper(queue).run_once()
    (letter,) = queue.dead_letters.list().tasks
    queue.dead_letters.replay(letter.id)
    with pytest.raises(DuplicateTask):
        add(queue, 2)
    task = popped(queue)
    assert task.payload == {"n": 1}
    queue.mark_failure(task, "no")
    with pytest.raises(DuplicateTask):  # By now it was delivered.
        add(queue, 3)


def test_producer_that_finds_the_key_taken_since_it_looked_takes_its_task_back(
    queue: Queue[Any], microqueue_database: Any
) -> None:
    late = stopped(queue, 0, lambda twin: add(twin, 1)).until("insert_one")
    add(queue, 2)
    assert drained(queue) == [2]
    with pytest.raises(DuplicateTask) as caught:
        late.finish()
    assert caught.value.held_until is not None
    assert microqueue_database.tasks.count_documents({}) == 0


# Lost replies


@pytest.mark.parametrize("method", ["insert_one", "bulk_write", "insert_many"])
def test_call_whose_reply_was_lost_is_repeated_and_is_no_duplicate(
    queue: Queue[Any], method: str
) -> None:
    collections = core_of(queue).collections
    if method == "insert_many":
        lossy = ReplyLost(collections.dedupe_keys, method)
        collections.dedupe_keys = lossy
    else:
        lossy = losing(queue, method)
    assert not add(queue, 1, on_duplicate="return").is_duplicate
    assert lossy.lost == 1
    assert drained(queue) == [1]
    with pytest.raises(DuplicateTask):
        add(queue, 2)


@pytest.mark.parametrize("method", ["insert_many", "bulk_write"])
def test_batch_whose_reply_was_lost_reports_no_duplicates(queue: Queue[Any], method: str) -> None:
    lossy = losing(queue, method)
    items = [NewTask(payload={"n": n}, dedupe_key=str(n), dedupe_for=HOUR) for n in range(5)]
    report = queue.enqueue_many(items)
    assert lossy.lost == 1
    assert (report.added, report.duplicates) == (5, [])
    assert drained(queue) == [0, 1, 2, 3, 4]
    assert queue.enqueue_many(items).added == 0


# Transactions


def test_key_and_task_of_a_transaction_are_stored_together(
    queue: Queue[Any], microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    with microqueue_client.start_session() as session:
        session.start_transaction()
        add(queue, 1, session=session)
        session.abort_transaction()
        assert microqueue_database.microqueue_dedupe_keys.count_documents({}) == 0
        with session.start_transaction():
            task = add(queue, 2, session=session)
            assert queue.pop() is None
    assert queue.get(task.id) == task
    assert drained(queue) == [2]
    with microqueue_client.start_session() as session, session.start_transaction():
        with pytest.raises(DuplicateTask) as caught:  # It does not abort the transaction.
            add(queue, 3, session=session)
        queue.enqueue({"n": 4}, session=session)
    assert caught.value.existing_id == task.id
    assert drained(queue) == [4]


def test_transaction_returns_the_holder_of_a_key_and_takes_over_an_old_key(
    microqueue_database: Any, microqueue_client: MongoClient[Any], microqueue_clock: FakeClock
) -> None:
    queue = Queue[Any](microqueue_database, clock=microqueue_clock)
    queue.ensure_indexes()
    first = add(queue, 1)
    queue.mark_done(popped(queue))
    with microqueue_client.start_session() as session, session.start_transaction():
        found = add(queue, 2, session=session, on_duplicate="return")
    assert (found.id, found.status) == (first.id, TaskStatus.DONE)
    microqueue_clock.advance(HOUR)
    with microqueue_client.start_session() as session, session.start_transaction():
        item = NewTask(payload={"n": 3}, dedupe_key="k", dedupe_for=HOUR)
        assert queue.enqueue_many([item], session=session).added == 1
    assert drained(queue) == [3]
    with pytest.raises(DuplicateTask):
        add(queue, 4)


# The server's part


def test_server_deletes_keys_after_their_period(
    queue: Queue[Any], microqueue_database: Any
) -> None:
    add(queue, 1)
    (index,) = [
        one
        for name, one in microqueue_database.microqueue_dedupe_keys.index_information().items()
        if name != "_id_"
    ]
    assert (index["key"], index["expireAfterSeconds"]) == ([("until", 1)], 0)
