"""Races on a real server: many processes at one queue, and workers that wake up too late.

Where a race must go one certain way, an operation is stopped between its read and its write,
so that the other always comes in between. Nothing here waits for time to pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import Any, ClassVar, TypeVar

import pytest
from bson.raw_bson import RawBSONDocument

from microqueue import (
    BackoffPolicy,
    DuplicateTask,
    NewTask,
    Queue,
    QueueSettings,
    Sweeper,
    SweepReport,
    Task,
    TaskStatus,
)
from microqueue.embedded import EmbeddedServer
from microqueue.operations.call import Operation
from microqueue.testing import FakeClock
from tests.integration.model import Steps
from tests.integration.queues import popped
from tests.integration.race_worker import Process
from tests.tapping import tap

T = TypeVar("T")

EIGHT = 8
AT_ONCE = QueueSettings(backoff=BackoffPolicy(base_sec=0, jitter="none"))


@pytest.fixture(scope="module")
def drainers(microqueue_server: EmbeddedServer) -> Iterator[list[Process]]:
    """Eight processes that stand ready to empty a queue."""
    processes = [Process("drain", uri=microqueue_server.uri) for _ in range(EIGHT)]
    try:
        for process in processes:
            assert process.hear() == "ready"
        yield processes
    finally:
        for process in processes:
            process.end()


def found(queue: Queue[Any], task_id: Any) -> Task[Any]:
    task = queue.get(task_id)
    assert task is not None
    return task


def stored_bytes(database: Any, task_id: Any) -> bytes:
    """Read a task as the very bytes that are stored."""
    options = database.codec_options.with_options(document_class=RawBSONDocument)
    task = database.get_collection("tasks", codec_options=options).find_one({"_id": task_id})
    return bytes(task.raw)


def at_once(action: Callable[[int], Any]) -> list[Any]:
    """Let eight threads do something at the same time; give what each came back with."""
    barrier = Barrier(EIGHT)

    def run(number: int) -> Any:
        barrier.wait()
        return action(number)

    with ThreadPoolExecutor(EIGHT) as pool:
        return list(pool.map(run, range(EIGHT)))


# Many at one queue


@pytest.mark.parametrize(
    ("tasks", "batch"), [(2_500, None), (EIGHT * 2_500, 100)], ids=["singly", "in batches"]
)
def test_eight_processes_deliver_every_task_exactly_once(
    tasks: int, batch: int | None, drainers: list[Process], microqueue_database: Any
) -> None:
    queue = Queue[Any](microqueue_database)
    queue.enqueue_many([NewTask(payload={}, task_id=number) for number in range(tasks)])

    for process in drainers:
        process.tell({"database": microqueue_database.name, "batch": batch})
    reports = [process.hear() for process in drainers]

    delivered = Counter(task_id for report in reports for task_id, _ in report)
    assert delivered == Counter(range(tasks))
    assert {attempts for report in reports for _, attempts in report} == {1}
    assert microqueue_database.tasks.count_documents({"status": "done", "attempts": 1}) == tasks
    assert sum(map(bool, reports)) > 1, "one process took all: this was no race"


def test_eight_threads_that_share_a_queue_deliver_every_task_exactly_once(
    microqueue_database: Any,
) -> None:
    queue = Queue[Any](microqueue_database)
    added = queue.enqueue_many([{}] * 800)

    def drain(number: int) -> list[Task[Any]]:
        mine: list[Task[Any]] = []
        while True:
            # Half of them one by one, the others in batches.
            tasks = queue.pop_many(10) if number % 2 else [t for t in [queue.pop()] if t]
            if not tasks:
                return mine
            assert queue.mark_done_many(tasks) == []
            mine += tasks

    delivered = [task for mine in at_once(drain) for task in mine]

    assert Counter(task.id for task in delivered) == Counter(task.id for task in added.tasks)
    assert {task.attempts for task in delivered} == {1}
    assert queue.stats().done == 800


def test_a_dedupe_key_that_eight_threads_enqueue_at_once_is_added_once(
    microqueue_database: Any,
) -> None:
    queues = [Queue[Any](microqueue_database) for _ in range(EIGHT)]

    def enqueue(number: int) -> bool:
        try:
            queues[number].enqueue({}, dedupe_key="only one")
        except DuplicateTask:
            return False
        return True

    assert sorted(at_once(enqueue)) == [False] * 7 + [True]
    assert queues[0].stats().pending == 1


def test_two_producers_of_one_id_in_one_millisecond_are_not_taken_for_one(
    microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    # A repeat after a lost connection is recognised by the insert token; another process
    # that adds the same id in the same millisecond must not bear the same ones.
    first = Queue[Any](microqueue_database, clock=microqueue_clock)
    second = Queue[Any](microqueue_database, clock=microqueue_clock)
    first.enqueue({"by": "first"}, task_id="invoice")

    with pytest.raises(DuplicateTask):
        second.enqueue({"by": "second"}, task_id="invoice")
    report = Queue[Any](microqueue_database, clock=microqueue_clock).enqueue_many(
        [NewTask(payload={"by": "third"}, task_id="invoice")]
    )

    assert [duplicate.task_id for duplicate in report.duplicates] == ["invoice"]


# A worker that wakes up too late


@pytest.mark.parametrize("in_between", ["finished", "held"])
def test_a_worker_that_slept_past_its_lease_changes_nothing(
    in_between: str,
    microqueue_server: EmbeddedServer,
    microqueue_database: Any,
    microqueue_clock: FakeClock,
) -> None:
    queue = Queue[Any](microqueue_database, clock=microqueue_clock, settings=AT_ONCE)
    queue.enqueue({}, task_id="task", visibility_timeout=30)
    sleeper = Process("oversleep", uri=microqueue_server.uri, database=microqueue_database.name)
    try:
        assert sleeper.hear() == "task"
        sleeper.suspend()

        microqueue_clock.advance(timedelta(minutes=5))
        assert Sweeper(queue).reclaim_stuck() == 1
        task = popped(queue, worker_id="another")
        if in_between == "finished":
            queue.mark_done(task, result="in time")
        before = stored_bytes(microqueue_database, "task")

        sleeper.tell("continue")
        sleeper.wake()
        outcomes = sleeper.hear()
    finally:
        sleeper.end()

    assert len(outcomes) == 8
    assert outcomes == dict.fromkeys(outcomes, "LeaseLost")
    assert stored_bytes(microqueue_database, "task") == before
    assert found(queue, "task").history[0].outcome == "lease_expired"


# Sweepers


def test_eight_sweepers_at_once_reclaim_each_stuck_task_once(
    microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    settings = QueueSettings(batch_size=250)
    queues = [
        Queue[Any](microqueue_database, clock=microqueue_clock, settings=settings)
        for _ in range(EIGHT)
    ]
    queues[0].enqueue_many([{}] * 2_000)
    assert len(queues[0].pop_many(2_000)) == 2_000
    microqueue_clock.advance(timedelta(hours=1))

    counts = at_once(lambda number: Sweeper(queues[number]).reclaim_stuck())

    assert sum(counts) == 2_000
    once = {"status": "pending", "redelivered": True, "attempts": 1, "history": {"$size": 1}}
    expired = {**once, "history.0.outcome": "lease_expired"}
    assert microqueue_database.tasks.count_documents(expired) == 2_000


IN_BETWEEN: dict[str, Callable[[Queue[Any], Task[Any]], object]] = {
    "renewed": lambda queue, task: queue.touch(task),
    "done": lambda queue, task: queue.mark_done(task),
    "released": lambda queue, task: queue.release(task),
    "retried": lambda queue, task: queue.mark_retry(task, delay=0),
    "reclaimed and popped again": lambda queue, task: (
        Sweeper(queue).reclaim_stuck(),
        popped(queue),
    ),
}


@pytest.mark.parametrize("in_between", IN_BETWEEN)
def test_a_sweeper_leaves_a_task_alone_that_changed_since_it_looked(
    in_between: str, microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    queue = Queue[Any](microqueue_database, clock=microqueue_clock, settings=AT_ONCE)
    queue.enqueue({}, task_id="task")
    task = popped(queue)
    microqueue_clock.advance(timedelta(hours=1))
    sweep = Steps(queue, lambda twin: Sweeper(twin).reclaim_stuck()).until("bulk_write")

    IN_BETWEEN[in_between](queue, task)
    before = stored_bytes(microqueue_database, "task")
    count = sweep.finish()

    assert count == 0
    assert stored_bytes(microqueue_database, "task") == before


def test_a_sweeper_that_finds_the_lock_taken_is_skipped(
    microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    class Interrupted(Queue[Any]):
        """Lets another sweeper come in after this one has the lock."""

        others: ClassVar[list[SweepReport]] = []

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            tap(self, self._run)

        def _run(self, usual: Callable[..., T], operation: Operation[T]) -> T:
            result = usual(operation)
            if not self.others:
                self.others.append(Sweeper(stuck).run_once())
            return result

    stuck = Queue[Any](microqueue_database, clock=microqueue_clock)
    stuck.enqueue({})
    popped(stuck)
    microqueue_clock.advance(timedelta(hours=1))

    report = Sweeper(Interrupted(microqueue_database, clock=microqueue_clock)).run_once()

    (other,) = Interrupted.others
    assert (other.skipped, other.reclaimed) == (True, 0)
    assert (report.skipped, report.reclaimed) == (False, 1)
    assert not Sweeper(stuck).run_once().skipped, "the lock was not given back"


def test_the_lock_of_a_dead_sweeper_is_taken_over_when_it_expires(
    microqueue_queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    # The first thing that a sweep does is to take the lock; this one does nothing more.
    Steps(microqueue_queue, lambda twin: Sweeper(twin).run_once()).finish()
    microqueue_queue.enqueue({})
    popped(microqueue_queue)

    microqueue_clock.advance(microqueue_queue.settings.lock_ttl - timedelta(milliseconds=1))
    assert Sweeper(microqueue_queue).run_once().skipped
    microqueue_clock.advance(timedelta(milliseconds=1))
    assert not Sweeper(microqueue_queue).run_once().skipped


def test_a_sweeper_that_outlived_its_lock_does_not_free_the_next_ones(
    microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    class Slow(Queue[Any]):
        """Takes longer for its first call than the lock lasts, and is overtaken."""

        overtaken = False

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            tap(self, self._run)

        def _run(self, usual: Callable[..., T], operation: Operation[T]) -> T:
            result = usual(operation)
            if not self.overtaken:
                self.overtaken = True
                microqueue_clock.advance(self.settings.lock_ttl)
                Steps(self, lambda twin: Sweeper(twin).run_once()).finish()
            return result

    slow = Slow(microqueue_database, clock=microqueue_clock)

    assert not Sweeper(slow).run_once().skipped
    assert Sweeper(Queue[Any](microqueue_database, clock=microqueue_clock)).run_once().skipped


# Batch claims, stopped between the look at the line and the claim


# What happens in between, which tasks the batch must then have, and which it may have.
BETWEEN: dict[str, tuple[Callable[[Queue[Any]], object], str, str]] = {
    "nothing": (lambda queue: None, "abc", ""),
    "another takes the first": (popped, "bc", ""),
    "another takes all": (lambda queue: queue.pop_many(3), "", ""),
    "another finishes the first": (lambda queue: queue.mark_done(popped(queue)), "bc", ""),
    "the first is cancelled": (lambda queue: queue.cancel("a"), "bc", ""),
    "the first is delayed": (lambda queue: queue.mark_retry(popped(queue), delay=60), "bc", ""),
    "the first goes round": (lambda queue: queue.mark_retry(popped(queue), delay=0), "bc", "a"),
    "the first is released": (lambda queue: queue.release(popped(queue)), "bc", "a"),
}


@pytest.mark.parametrize(
    ("age", "later"),
    [(0, 0), (0, 1), (3_600_000, 0), (3_600_000, 1)],
    ids=["new, at once", "new, a millisecond later", "old, at once", "old, a millisecond later"],
)
@pytest.mark.parametrize("between", BETWEEN)
def test_a_batch_holds_what_is_still_there_and_as_it_is(
    between: str, age: int, later: int, microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    queue = Queue[Any](microqueue_database, clock=microqueue_clock, settings=AT_ONCE)
    for name in "abc":
        queue.enqueue({}, task_id=name)
    microqueue_clock.advance(timedelta(milliseconds=age))
    claim = Steps(queue, lambda twin: twin.pop_many(3, worker_id="batch")).until("update_many")

    microqueue_clock.advance(timedelta(milliseconds=later))
    action, surely, possibly = BETWEEN[between]
    action(queue)
    batch: list[Task[Any]] = claim.finish()

    ids = {task.id for task in batch}
    assert set(surely) <= ids <= {*surely, *possibly}
    for task in batch:
        stored = found(queue, task.id)
        assert (stored.status, stored.lease) == (TaskStatus.PROCESSING, task.lease)
        assert stored.attempts == task.attempts
    assert queue.mark_done_many(batch) == []
