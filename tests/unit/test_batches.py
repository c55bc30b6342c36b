"""Batches: which tasks form one, when it is due, and what its handler's outcomes mean."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from microqueue import Fail, InvalidArgument, Retry, Snooze, Tasks
from microqueue.model import trusted
from microqueue.task import Claimed, Lease
from microqueue.testing import memory_queue
from microqueue.worker import Worker, WorkerOptions, batches
from microqueue.worker.batches import Batch, BatchBuffer, BatchCollector
from microqueue.worker.handlers import make_handler
from microqueue.worker.in_flight import LeasedTask
from microqueue.worker.prefetch import PrefetchController
from tests.rejection import rejecting

LEASE = trusted(Lease, token="t", worker_id="w", started_at=None, expires_at=None)


def leased(number: int, queue: str = "a", *, redelivered: bool = False) -> LeasedTask:
    document = {"_id": number, "attempts": 1, "redelivered": redelivered}
    any_queue: Any = queue
    return LeasedTask(any_queue, Claimed(document, LEASE, {}), 0.0)


def ids(tasks: Any) -> list[int]:
    return [one.claimed.id for one in tasks]


class Clock:
    """The time by which batches wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(batches, "now_sec", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_full_batch_is_due_at_once_and_the_rest_after_its_wait(clock: Clock) -> None:
    collector = BatchCollector(size=3, wait_sec=5)
    assert collector.due_at(0) == inf
    collector.add([leased(n) for n in range(7)])
    assert ids(collector.take(0)) == [0, 1, 2]
    assert ids(collector.take(0)) == [3, 4, 5]
    assert collector.take(0) == []
    assert collector.due_at(0) == 105
    clock.now = 104.9
    collector.add([leased(7)])
    assert collector.take(0) == []
    clock.now = 105
    assert ids(collector.take(0)) == [6, 7]


def test_a_batch_waits_for_more_once_a_handler_is_free(clock: Clock) -> None:
    collector = BatchCollector(size=3, wait_sec=5)
    collector.add([leased(0)])
    clock.now = 150  # All handlers were busy until now.
    assert collector.take(150) == []
    assert collector.due_at(150) == 155
    assert ids(collector.take(145)) == [0]


@pytest.mark.usefixtures("clock")
def test_redelivered_task_is_a_batch_of_its_own_and_nothing_overtakes_it() -> None:
    collector = BatchCollector(size=3, wait_sec=5)
    tasks = [leased(n, redelivered=n in {1, 2}) for n in range(4)]
    collector.add(tasks)
    assert [ids(collector.take(0)) for _ in range(4)] == [[0], [1], [2], []]
    assert collector.due_at(0) == 105  # That of the last one.


def test_batches_are_of_one_queue_each_and_the_longest_wait_goes_first(clock: Clock) -> None:
    collector = BatchCollector(size=2, wait_sec=5)
    collector.add([leased(0, "a"), leased(1, "b")])
    clock.now = 101
    collector.add([leased(2, "b")])
    assert ids(collector.take(0)) == [1, 2]
    clock.now = 104
    collector.add([leased(3, "b"), leased(4, "a"), leased(5, "b")])
    assert [ids(collector.take(0)) for _ in range(3)] == [[0, 4], [3, 5], []]


@pytest.mark.usefixtures("clock")
def test_lost_and_unwanted_tasks_are_in_no_batch() -> None:
    collector = BatchCollector(size=2, wait_sec=5)
    tasks = [leased(n) for n in range(4)]
    collector.add(tasks)
    tasks[1].concluded = True  # Its lease was lost.
    assert ids(collector.withdraw(lambda task: task is tasks[2])) == [2]
    assert ids(collector.take(0)) == [0, 3]
    collector.add([leased(5)])
    assert ids(collector.take_all()) == [5]
    assert collector.due_at(0) == inf


def test_closed_buffer_returns_what_waits_and_takes_no_more() -> None:
    buffer = BatchBuffer(size=2, wait_sec=0)
    assert buffer.extend([leased(0)])
    assert ids(buffer.take()) == [0]
    buffer.extend([leased(1)])
    assert ids(buffer.withdraw(lambda _task: False)) == []
    assert ids(buffer.close()) == [1]
    assert not buffer.extend([leased(2)])
    assert buffer.take() == []


class Outcomes:
    """The calls of a completer."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def complete(
        self, task: Any, handler: Any, result: Any, error: Any, *, with_traceback: bool = True
    ) -> None:
        del task, handler, with_traceback
        self.told.append(result if error is None else error)


HANDLER = make_handler(lambda tasks: tasks)
ERRORS = [Retry(), Fail("no"), Snooze(1), ValueError("x")]


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (None, [None, None]),
        (["a", None], ["a", None]),
        (({"n": 1}, [1]), [{"n": 1}, [1]]),
        (ERRORS[:2], ERRORS[:2]),
        (ERRORS[2:], ERRORS[2:]),
    ],
    ids=["nothing", "results", "tuple", "outcomes", "errors"],
)
def test_each_task_has_the_outcome_in_its_place(result: Any, told: list[Any]) -> None:
    outcomes: Any = Outcomes()
    Batch([leased(0), leased(1)]).complete(outcomes, HANDLER, result, None)
    assert outcomes.told == told


@pytest.mark.parametrize(
    "result",
    ["ab", {"a": 1, "b": 2}, [None], [None] * 3, [None, Retry], (n for n in range(2))],
    ids=["text", "mapping", "too few", "too many", "a class", "a generator"],
)
def test_anything_else_fails_all_tasks(result: Any) -> None:
    outcomes: Any = Outcomes()
    Batch([leased(0), leased(1)]).complete(outcomes, HANDLER, result, None)
    assert [type(one) for one in outcomes.told] == [TypeError, TypeError]


def test_a_call_is_interrupted_when_the_last_task_is() -> None:
    first, second = tasks = [leased(0), leased(1)]
    batch = Batch(tasks)
    calls: list[int] = []
    batch.on_interrupt = lambda: calls.append(1)
    first.interrupt()
    assert (batch.interrupted, calls) == (False, [])
    assert [batch.is_interrupted(one.task) for one in tasks] == [True, False]
    second.interrupt()
    assert (batch.interrupted, calls) == (True, [1])


def test_no_more_is_claimed_than_can_run_beside_small_batches() -> None:
    controller = PrefetchController(concurrency=2 * 10, prefetch=1, lease_sec=60)
    assert controller.limit() == 20
    controller.unused = 7  # A batch of 3 runs.
    assert controller.limit() == controller.can_run == 13


def handle(tasks: Any) -> None:
    del tasks


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"batch": 0}, "batch"),
        ({"batch": 10_001}, "batch"),
        ({"batch": "many"}, "batch"),
        ({"batch": 5, "batch_wait": -1}, "batch_wait"),
        ({"batch_wait": 1}, "batch_wait"),
    ],
    ids=str,
)
def test_bad_options_are_named(options: Any, argument: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Worker(memory_queue(), handle, **options)
    assert caught.value.argument == argument


def test_named_tasks_have_no_batches() -> None:
    with pytest.raises(InvalidArgument) as caught:
        Worker(memory_queue(), Tasks(), batch=5)
    assert caught.value.argument == "batch"


def test_handler_without_parameters_is_rejected() -> None:
    with rejecting("handler", code="wrong_parameters"):
        Worker(memory_queue(), lambda: None, batch=5)


def test_a_worker_runs_a_batch_per_handler() -> None:
    assert WorkerOptions(concurrency=3).max_running == 3
    assert WorkerOptions(concurrency=3, batch=20).max_running == 60
