"""Parts of a worker in rare situations: errors of user code, and events that come too late."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from microqueue import AsyncQueue, InvalidArgument, Queue, Task
from microqueue.core import core_of
from microqueue.hooks import HookList
from microqueue.task import Claimed, Lease
from microqueue.testing import FakeClock, memory_database, memory_queue
from microqueue.worker import AsyncWorker, Hooks, Tasks, Worker, WorkerOptions, in_flight
from microqueue.worker.completer import (
    AsyncSettlementBuffer,
    Completer,
    PendingSettlement,
    SettlementWriter,
)
from microqueue.worker.dispatcher import HookDispatcher, InlineDispatcher
from microqueue.worker.handlers import router_for
from microqueue.worker.in_flight import InFlight, LeasedTask
from microqueue.worker.lease_renewal import LeaseRenewer, TimeoutMonitor
from microqueue.worker.log import UnstartedTasks
from microqueue.worker.prefetch import PrefetchController
from microqueue.worker.shutdown import StopRequest, stopping_by_signal


def leased(number: int = 1) -> LeasedTask:
    now = FakeClock().now()
    lease = Lease(token="t", worker_id="w", started_at=now, expires_at=now)
    document = {"_id": number, "status": "processing", "attempts": 1, "max_attempts": 3}
    return LeasedTask(core_of(memory_queue()), Claimed(document, lease, {}), 0.0)


class Hands:
    """A completer, the table and the settlements that it fills, and the hooks that it calls."""

    def __init__(self) -> None:
        self.in_flight = InFlight()
        self.unstarted = UnstartedTasks()
        self.settled: list[PendingSettlement] = []
        self.called: list[str] = []
        hooks: Any = HookList([Recorder(self.called)])
        self.completer = Completer(
            WorkerOptions(),
            in_flight=self.in_flight,
            prefetch=PrefetchController(concurrency=1, prefetch=1, lease_sec=60),
            hooks=hooks,
            dispatcher=InlineDispatcher(),
            settlements=SimpleNamespace(put=self.settled.append),
            unstarted=self.unstarted,
        )

    def claim(self) -> LeasedTask:
        task = leased()
        self.in_flight.add([task])
        return task


class Recorder(Hooks):
    def __init__(self, called: list[str]) -> None:
        self.called = called

    def on_lease_lost(self, task: Task[Any]) -> None:
        self.called.append("on_lease_lost")

    def on_release(self, task: Task[Any]) -> None:
        self.called.append("on_release")


# Who decides first


def test_timeout_and_shutdown_that_come_after_the_handler_decide_nothing() -> None:
    hands = Hands()
    task = hands.claim()
    hands.completer.complete(task, None, None, None)
    hands.completer.time_out(task)
    assert not hands.completer.release(task)
    hands.completer.release_lapsed(task)
    assert [pending.task for pending in hands.settled] == [task]
    assert hands.called == []


def test_while_a_handler_commits_nothing_else_decides() -> None:
    hands = Hands()
    task = hands.claim()
    assert hands.in_flight.begin_commit(task)
    hands.completer.time_out(task)
    hands.completer.lose(task)
    assert not hands.completer.release(task)
    assert (task.concluded, task.interrupted, hands.settled, hands.called) == (False, False, [], [])
    task.committing = False  # It was aborted.
    hands.completer.time_out(task)
    assert (task.interrupted, [pending.task for pending in hands.settled]) == (True, [task])


def test_what_was_decided_is_not_committed() -> None:
    hands = Hands()
    task = hands.claim()
    hands.completer.time_out(task)
    assert not hands.in_flight.begin_commit(task)
    hands.completer.complete(task, None, None, None)
    assert [pending.task for pending in hands.settled] == [task]


def test_lease_that_is_lost_before_the_start_counts_as_unstarted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hands = Hands()
    hands.completer.lose(hands.claim())
    assert (hands.settled, hands.called) == ([], ["on_lease_lost"])
    with caplog.at_level(logging.INFO, "microqueue.worker"):
        hands.unstarted.log()
    assert len(caplog.records) == 1


# Errors in threads that serve all tasks


def test_interrupt_in_a_hook_ends_the_main_thread_and_no_other() -> None:
    class Interrupted(Hooks):
        def on_start(self, task: Task[Any]) -> None:
            raise KeyboardInterrupt

    hooks = HookList([Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        hooks.call("on_start", None)
    ended = threading.Event()

    def call() -> None:
        hooks.call("on_start", None)
        ended.set()

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert ended.is_set()


def test_hooks_are_dispatched_after_one_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = HookDispatcher()
    called: list[str] = []
    dispatcher.submit(lambda: called.append("one"))
    dispatcher.submit(lambda: called.remove("three"))
    dispatcher.submit(lambda: called.append("two"))
    dispatcher.close()
    dispatcher.thread.start()
    dispatcher.thread.join(60)
    assert called == ["one", "two"]
    (logged,) = caplog.records
    assert logged.exc_info is not None
    assert logged.exc_info[0] is ValueError


def test_timeouts_are_watched_after_one_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    table = InFlight()
    tasks = [leased(1), leased(2)]
    table.add(tasks)
    for task in tasks:
        task.deadline = time.monotonic() - 1
    reported: list[Any] = []
    done = threading.Event()

    def on_timeout(task: LeasedTask) -> None:
        reported.append(task.claimed.id)
        if len(reported) == 1:
            raise RuntimeError("a bug")
        done.set()

    monitor = TimeoutMonitor(table, on_timeout)
    monitor.start()
    assert done.wait(60)
    monitor.stop()
    monitor.join()
    assert reported == [1, 2]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_leases_are_renewed_after_an_unexpected_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = threading.Event()
    calls: list[int] = []

    def after_check() -> None:
        calls.append(1)
        if len(calls) == 2:
            twice.set()
        raise RuntimeError("a bug")

    registration: Any = SimpleNamespace(heartbeat_sec=3600.0)
    renewer = LeaseRenewer(
        InFlight(), {}, registration, on_lost=lambda _task: None, after_check=after_check
    )
    monkeypatch.setattr(renewer, "_wait_sec", lambda _tasks: 0.001)
    renewer.start()
    assert twice.wait(60)
    renewer.stop()
    renewer.join()
    assert {record.levelname for record in caplog.records} == {"ERROR"}


# Settlements whose write is cancelled


async def test_batch_whose_write_was_cancelled_is_taken_again_first() -> None:
    buffer = AsyncSettlementBuffer(wait_sec=60, limit=2)
    numbers: list[Any] = [1, 2, 3]
    for number in numbers:
        buffer.put(number)
    taken = await buffer.take()
    buffer.put_back(taken)
    buffer.close()
    batches: list[Any] = [await buffer.take() for _ in range(3)]
    assert batches == [[1, 2], [3], []]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit()])
def test_cancelled_write_keeps_its_tasks_in_flight(error: BaseException) -> None:
    hands = Hands()
    task = hands.claim()
    hands.completer.complete(task, None, None, None)
    writer = SettlementWriter(StopRequest(1), hands.in_flight, HookList([]), hands.unstarted)
    writing = writer.write(hands.settled)
    next(writing)
    with pytest.raises(type(error)):
        writing.throw(error)
    assert task in hands.in_flight


async def test_worker_waits_for_tasks_that_no_handler_runs() -> None:
    worker = AsyncWorker(AsyncQueue(memory_database()), print)
    worker._running = {}  # noqa: SLF001 (crash isolation delays all tasks in flight)
    started = time.monotonic()
    await worker._wait_for_handlers(0.01)  # noqa: SLF001 (one step of the shutdown)
    assert time.monotonic() - started >= 0.009


# Signals


def test_second_signal_stops_immediately() -> None:
    stopped: list[bool] = []
    before = signal.getsignal(signal.SIGTERM)
    with stopping_by_signal(lambda *, immediately: stopped.append(immediately)):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert stopped == [False, True, True]
    assert signal.getsignal(signal.SIGTERM) is before


# Values


def test_worker_needs_a_queue() -> None:
    with pytest.raises(InvalidArgument) as caught:
        Worker([], print)
    assert caught.value.argument == "queue"


def test_options_of_a_worker_can_be_read() -> None:
    queue: Queue[Any] = memory_queue()
    assert Worker(queue, print, concurrency=7).options.concurrency == 7


def test_single_function_handles_every_task() -> None:
    queue: Queue[Any] = memory_queue()
    handler = router_for(print).handler_for(queue.enqueue({}))
    assert handler.function is print


def test_named_task_is_shown_by_its_name() -> None:
    tasks = Tasks()

    @tasks.task("mail.send")
    def send() -> None: ...

    assert repr(send) == "NamedTask('mail.send')"


@pytest.mark.parametrize("known", [("CLOCK_MONOTONIC",), ()])
def test_leases_are_measured_where_the_kernel_has_no_such_clock(
    monkeypatch: pytest.MonkeyPatch, known: tuple[str, ...]
) -> None:
    usual = time.clock_gettime
    numbers = {getattr(time, name) for name in known}

    def clock_gettime(number: int) -> float:
        if number not in numbers:
            raise OSError("no such clock")
        return usual(number)

    monkeypatch.setattr(time, "clock_gettime", clock_gettime)
    clock = in_flight._find_lease_clock()  # noqa: SLF001 (chosen at the import)
    before = time.monotonic()
    assert before <= clock() <= time.monotonic()
