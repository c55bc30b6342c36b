"""Workers on a real server: each test runs with threads, PyMongo async and Motor."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from pymongo import MongoClient

from microqueue import (
    BackoffPolicy,
    Outcome,
    Queue,
    QueueSettings,
    Sweeper,
    TaskStatus,
)
from microqueue.embedded import EmbeddedServer
from microqueue.worker import Fail, Hooks, Retry, Snooze, Worker, shutdown
from tests.integration.rig import Rig, stored
from tests.rejection import rejecting
from tests.waiting import LEASE_SEC, wait_for, wait_for_renewals


def test_every_task_is_handled_once_and_done(rig: Rig) -> None:
    rig.queue.enqueue_many([{"n": n} for n in range(1200)])
    seen: list[int] = []
    assert rig.run(lambda payload: seen.append(payload["n"]), concurrency=4) == 1200
    assert sorted(seen) == list(range(1200))
    stats = rig.queue.stats()
    assert (stats.done, stats.pending, stats.processing) == (1200, 0, 0)
    assert {task.attempts for task in rig.queue.peek(1200)} == {1}


def test_without_retention_nothing_is_left_but_dead_letters(rig: Rig) -> None:
    rig.settings = rig.settings.model_copy(update={"retention": timedelta(0)})
    rig.queue.enqueue_many([{"n": n} for n in range(300)])

    def handle(payload: Any) -> Any:
        if payload["n"] % 100 == 7:
            raise Fail("bad")
        return payload["n"]

    assert rig.run(handle, concurrency=4, keep_result=True) == 300
    stats = rig.queue.stats()
    assert (stats.done, stats.failed, stats.pending, stats.processing) == (0, 3, 0, 0)
    assert {task.payload["n"] for task in rig.queue.peek(300)} == {7, 107, 207}


def test_one_handler_at_a_time_keeps_the_order_of_the_queue(rig: Rig) -> None:
    rig.queue.enqueue_many([{"n": n} for n in range(50)])
    rig.queue.enqueue({"n": "urgent"}, priority=9)
    seen: list[Any] = []
    rig.run(lambda payload: seen.append(payload["n"]), concurrency=1)
    assert seen == ["urgent", *range(50)]


class Boom(Exception):
    """What a handler of these tests raises."""


OUTCOMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "exception": (Boom("no"), {"status": "pending", "code": "Boom", "attempts": 1, "wait": 30}),
    "exit": (SystemExit(3), {"status": "pending", "code": "SystemExit", "attempts": 1, "wait": 30}),
    "retry": (Retry("soon", delay=7, code="c"),
              {"status": "pending", "code": "c", "attempts": 1, "wait": 7}),
    "retry with backoff": (Retry(), {"status": "pending", "code": None, "attempts": 1, "wait": 30}),
    "fail": (Fail("bad", code="bad_input"),
             {"status": "failed", "code": "bad_input", "attempts": 1, "wait": None}),
    "snooze": (Snooze(9), {"status": "pending", "code": None, "attempts": 0, "wait": 9}),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTCOMES)
def test_what_a_handler_raises_decides_what_becomes_of_its_task(rig: Rig, name: str) -> None:
    error, expected = OUTCOMES[name]
    task = rig.queue.enqueue({})

    def handler(_payload: Any) -> None:
        raise error

    assert rig.run(handler) == 1
    found = stored(rig, task)
    wait_sec = expected["wait"]
    assert {
        "status": found.status,
        "code": found.error.code if found.error else None,
        "attempts": found.attempts,
        "wait": None if found.next_retry_at is None else wait_sec,
    } == expected
    if found.next_retry_at is not None:
        # A slow machine knows the server's time less exactly, and writes the outcome later.
        delay_sec = (found.next_retry_at - found.updated_at).total_seconds()
        assert abs(delay_sec - wait_sec) < 20


def test_last_attempt_is_buried_with_its_error(rig: Rig) -> None:
    rig.settings = QueueSettings(max_attempts=3, backoff=BackoffPolicy(base_sec=0, max_sec=0))
    task = rig.queue.enqueue({})

    def handler(_payload: Any) -> None:
        raise Boom("always")

    assert rig.run(handler) == 3
    found = stored(rig, task)
    assert (found.status, found.attempts) == (TaskStatus.FAILED, 3)
    assert [entry.outcome for entry in found.history] == ["retried", "retried", "failed"]


def test_mixed_outcomes_of_one_batch_are_all_written(rig: Rig) -> None:
    rig.queue.enqueue_many([{"n": n} for n in range(60)])

    def handler(payload: Any) -> Any:
        if payload["n"] % 3 == 1:
            raise Boom("again")
        if payload["n"] % 3 == 2:
            raise Fail("never", code="never")
        return payload["n"]

    assert rig.run(handler, keep_result=True) == 60
    stats = rig.queue.stats()
    assert (stats.done, stats.delayed, stats.failed) == (20, 20, 20)
    assert {task.result for task in rig.queue.peek(60, status="done")} == set(range(0, 60, 3))


def test_results_are_kept_only_if_asked_for(rig: Rig) -> None:
    task = rig.queue.enqueue({})
    rig.run(lambda _payload: {"a": 1})
    assert stored(rig, task).result is None


def test_result_that_cannot_be_stored_buries_its_task(rig: Rig) -> None:
    task = rig.queue.enqueue({})
    rig.run(lambda _payload: object(), keep_result=True)
    assert stored(rig, task).error.code == "invalid_result"


def test_handler_that_asks_for_its_context_gets_it(rig: Rig) -> None:
    task = rig.queue.enqueue({"n": 1})
    seen: list[Any] = []

    def handler(payload: Any, context: Any) -> None:
        seen.append((payload, context.task.id, context.attempt, context.cancelled))

    rig.run(handler)
    assert seen == [({"n": 1}, task.id, 1, False)]


class Recorder(Hooks):
    """Records its calls."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_start(self, task: Any) -> None:
        self.events.append("start")

    def on_success(self, task: Any, *, took_sec: float) -> None:
        self.events.append("success")
        raise RuntimeError("a hook must not disturb the worker")

    def on_retry(self, task: Any, error: BaseException, *, took_sec: float) -> None:
        self.events.append(f"retry {type(error).__name__}")

    def on_failure(self, task: Any, error: BaseException, *, took_sec: float) -> None:
        self.events.append(f"failure {error}")


def test_hooks_are_told_and_cannot_disturb(rig: Rig) -> None:
    rig.queue.enqueue_many([{"do": "return"}, {"do": "raise"}, {"do": "fail"}])
    recorder = Recorder()

    def handler(payload: Any) -> None:
        if payload["do"] == "raise":
            raise Boom("x")
        if payload["do"] == "fail":
            raise Fail("bad")

    assert rig.run(handler, hooks=[recorder], concurrency=1) == 3
    assert recorder.events == ["start", "success", "start", "retry Boom", "start", "failure bad"]


def test_first_queue_with_a_task_goes_first(rig: Rig) -> None:
    for name in ("low", "high"):
        queue: Queue[Any] = Queue(rig.database, name, settings=rig.settings)
        queue.enqueue_many([{"queue": name}] * 3)
    seen: list[str] = []
    rig.run(lambda payload: seen.append(payload["queue"]), names=("high", "low"), concurrency=1)
    assert seen == ["high"] * 3 + ["low"] * 3


def test_delayed_task_wakes_an_idle_worker_on_time(rig: Rig) -> None:
    rig.queue.ensure_indexes()
    done = threading.Event()
    thread = rig.start(lambda _payload: done.set(), poll_interval=60)
    wait_for(lambda: rig.worker is not None)
    rig.queue.enqueue({}, delay=0.5)
    try:
        assert done.wait(30)
    finally:
        rig.stop()
        thread.join()


def test_new_task_wakes_an_idle_worker_through_the_change_stream(rig: Rig) -> None:
    rig.queue.ensure_indexes()
    done = threading.Event()
    thread = rig.start(lambda _payload: done.set(), poll_interval=60)
    wait_for(lambda: rig.worker is not None)
    time.sleep(0.5)  # Long enough to be asleep on the stream; the test holds without it too.
    rig.queue.enqueue({})
    try:
        assert done.wait(30)  # Polling alone would take a minute.
    finally:
        rig.stop()
        thread.join()


def test_stop_lets_running_handlers_finish_and_hands_the_rest_back(rig: Rig) -> None:
    rig.queue.enqueue_many([{"n": n} for n in range(20)])
    running, proceed = threading.Semaphore(0), threading.Event()

    def handler(_payload: Any) -> None:
        running.release()
        proceed.wait(60)

    thread = rig.start(handler, concurrency=2, prefetch=10)
    for _ in range(2):
        assert running.acquire(timeout=30)
    wait_for(lambda: rig.queue.stats().processing >= 2)
    rig.stop()
    wait_for(lambda: rig.queue.stats().ready == 18)  # What had not started is back at once.
    proceed.set()
    thread.join(30)
    stats = rig.queue.stats()
    assert (stats.done, stats.ready, stats.processing) == (2, 18, 0)
    assert {task.attempts for task in rig.queue.peek(20, status="pending")} == {0}


@pytest.mark.parametrize("hurry", [False, True])
def test_handler_that_outlasts_the_grace_is_told_and_its_task_handed_back(
    rig: Rig, hurry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "HURRY_SEC", 30.0)  # A slow machine writes the release in time.
    task = rig.queue.enqueue({})
    running, told = threading.Event(), threading.Event()

    def handler(_payload: Any, context: Any) -> None:
        running.set()
        while not context.cancelled:
            time.sleep(0.01)
        told.set()

    thread = rig.start(handler, grace=60 if hurry else 0.1)
    assert running.wait(30)
    rig.stop()
    if hurry:
        rig.stop(immediately=True)
    thread.join(30)
    assert not thread.is_alive()
    assert told.wait(30)
    found = stored(rig, task)
    assert (found.status, found.attempts) == (TaskStatus.PENDING, 0)
    assert found.history[0].outcome is Outcome.RELEASED


def test_leases_are_renewed_while_handlers_run(rig: Rig) -> None:
    rig.settings = QueueSettings(visibility_timeout=LEASE_SEC)
    rig.queue.enqueue_many([{}] * 3)

    def handler(_payload: Any, context: Any) -> None:
        wait_for_renewals(rig.queue, context.task.id, times=3)

    assert rig.run(handler, concurrency=3) == 3
    assert {len(task.history) for task in rig.queue.peek()} == {1}
    assert rig.queue.stats().done == 3


def test_task_that_waits_for_a_handler_keeps_its_lease_too(rig: Rig) -> None:
    rig.settings = QueueSettings(visibility_timeout=LEASE_SEC)
    rig.queue.enqueue_many([{}] * 3)
    sweeper = Sweeper(rig.queue)

    def handler(_payload: Any) -> None:
        time.sleep(0.4 * LEASE_SEC)
        assert sweeper.reclaim_stuck() == 0

    assert rig.run(handler, concurrency=1, prefetch=5) == 3
    assert rig.queue.stats().done == 3


def test_lost_lease_is_logged_and_the_late_result_discarded(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.settings = QueueSettings(
        visibility_timeout=0.6, backoff=BackoffPolicy(base_sec=0, max_sec=0)
    )
    task = rig.queue.enqueue({})
    running, told = threading.Event(), threading.Event()

    def handler(_payload: Any, context: Any) -> None:
        running.set()
        while not context.cancelled:
            time.sleep(0.01)
        told.set()

    thread = rig.start(handler, concurrency=1, poll_interval=60)
    assert running.wait(30)
    rig.database.tasks.update_one({"_id": task.id}, {"$set": {"lease_token": "another"}})
    assert told.wait(30)
    rig.stop()
    thread.join(30)
    assert rig.database.tasks.find_one({"_id": task.id})["lease_token"] == "another"
    lost = [vars(one)["task_id"] for one in caplog.records if getattr(one, "lease_lost", False)]
    assert lost == [str(task.id)]


def test_handler_out_of_time_is_told_and_its_task_tried_again(rig: Rig) -> None:
    task = rig.queue.enqueue({})
    told = threading.Event()

    def handler(_payload: Any, context: Any) -> None:
        while not context.cancelled:
            time.sleep(0.01)
        told.set()

    rig.run(handler, timeout=timedelta(milliseconds=300))
    assert told.wait(30)
    found = stored(rig, task)
    assert (found.status, found.error.code) == (TaskStatus.PENDING, "TimeoutError")
    assert len(found.history) == 1


def test_no_more_is_held_than_the_handlers_can_start_in_time(rig: Rig) -> None:
    rig.queue.enqueue_many([{}] * 40)
    most = 0
    ended: set[Any] = set()  # What is finished may wait for its settlement.

    def handler(_payload: Any, context: Any) -> None:
        nonlocal most
        held = {task.id for task in rig.queue.peek(40, status="processing")}
        most = max(most, len(held - set(ended)))
        ended.add(context.task.id)

    rig.run(handler, concurrency=2, prefetch=1)
    assert most <= 2


def test_touch_through_the_context_moves_the_lease(rig: Rig) -> None:
    task = rig.queue.enqueue({})
    expiries: list[Any] = []

    def handler(_payload: Any, context: Any) -> None:
        context.touch(extend=1234)
        lease = stored(rig, task).lease
        expiries.append(lease.expires_at - rig.queue.now())

    rig.run(handler)
    assert expiries[0] > timedelta(seconds=1200)


# What only coroutines can do


@pytest.fixture(params=["pymongo_async", "motor"])
def loop_rig(
    request: pytest.FixtureRequest, microqueue_server: EmbeddedServer, microqueue_database: Any
) -> Rig:
    return Rig(request.param, microqueue_server.uri, microqueue_database)


def test_coroutines_run_side_by_side(loop_rig: Rig) -> None:
    loop_rig.queue.enqueue_many([{}] * 20)
    together = 0
    most = 0

    async def handler(_payload: Any) -> None:
        nonlocal together, most
        together += 1
        most = max(most, together)
        await asyncio.sleep(0.05)
        together -= 1

    assert loop_rig.run(handler, concurrency=10) == 20
    assert 2 <= most <= 10


def test_coroutine_whose_lease_is_lost_is_cancelled(loop_rig: Rig) -> None:
    loop_rig.settings = QueueSettings(visibility_timeout=0.6)
    task = loop_rig.queue.enqueue({})
    running, cancelled = threading.Event(), threading.Event()

    async def handler(_payload: Any) -> None:
        running.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    thread = loop_rig.start(handler, poll_interval=60)
    assert running.wait(30)
    loop_rig.database.tasks.update_one({"_id": task.id}, {"$set": {"lease_token": "another"}})
    assert cancelled.wait(30)
    loop_rig.stop()
    thread.join(30)
    assert not thread.is_alive()


def test_blocked_event_loop_keeps_its_leases(loop_rig: Rig) -> None:
    loop_rig.settings = QueueSettings(visibility_timeout=LEASE_SEC)
    task = loop_rig.queue.enqueue({})

    async def handler(_payload: Any) -> None:
        wait_for_renewals(loop_rig.queue, task.id, times=3)  # It blocks: the point of this test.

    assert loop_rig.run(handler) == 1
    assert loop_rig.queue.stats().done == 1
    assert len(stored(loop_rig, task).history) == 1


def test_context_of_a_coroutine_is_awaited(loop_rig: Rig) -> None:
    task = loop_rig.queue.enqueue({})
    leases: list[Any] = []

    async def handler(_payload: Any, context: Any) -> None:
        await context.touch(extend=1234)
        leases.append(stored(loop_rig, task).lease.expires_at - loop_rig.queue.now())

    loop_rig.run(handler)
    assert leases[0] > timedelta(seconds=1200)


def test_cancelled_worker_hands_its_tasks_back(loop_rig: Rig) -> None:
    task = loop_rig.queue.enqueue({})
    running = threading.Event()

    async def handler(_payload: Any) -> None:
        running.set()
        await asyncio.sleep(60)

    async def main() -> None:
        working = asyncio.create_task(loop_rig._run(handler, burst=False, names=("default",)))  # noqa: SLF001 (on this very loop)
        await asyncio.to_thread(running.wait, 30)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working

    asyncio.run(main())
    found = stored(loop_rig, task)
    assert (found.status, found.attempts) == (TaskStatus.PENDING, 0)


# What only threads can be asked


def test_threads_reject_a_coroutine_function(microqueue_queue: Queue[Any]) -> None:
    async def handler(_payload: Any) -> None:
        """Do nothing."""

    with rejecting("handler", handler, code="coroutine"):
        Worker(microqueue_queue, handler)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"concurrency": 0}, None),
        ({"prefetch": 0}, None),
        ({"grace": -1}, None),
        ({"colour": 1}, "unknown_option"),
    ],
)
def test_bad_options_are_rejected_by_name(
    microqueue_queue: Queue[Any], options: dict[str, Any], code: str | None
) -> None:
    ((option, value),) = options.items()
    with rejecting(option, value) as caught:
        Worker(microqueue_queue, print, **options)
    assert caught.value.code == code


@pytest.mark.parametrize("handler", [None, 5, "module:function"])
def test_something_that_is_no_handler_is_rejected(
    microqueue_queue: Queue[Any], handler: Any
) -> None:
    with rejecting("handler"):
        Worker(microqueue_queue, handler)


@pytest.mark.usefixtures("own_server")
def test_worker_goes_on_when_the_server_comes_back() -> None:
    with EmbeddedServer.start() as server, MongoClient[Any](server.uri) as client:
        queue: Queue[Any] = Queue(client.test)
        queue.ensure_indexes()
        hurried: Queue[Any] = Queue(client.test, settings=QueueSettings(retry_deadline=0.2))
        seen: list[int] = []
        worker = Worker(hurried, lambda payload: seen.append(payload["n"]), poll_interval=0.1)
        thread = threading.Thread(target=worker.run)
        thread.start()
        queue.enqueue({"n": 1})
        wait_for(lambda: seen == [1])
        command = {"replSetStepDown": 1, "secondaryCatchUpPeriodSecs": 0, "force": True}
        client.admin.command(command)

        def is_primary() -> bool:
            return bool(client.admin.command("hello")["isWritablePrimary"])

        wait_for(is_primary)
        queue.enqueue({"n": 2})
        wait_for(lambda: seen == [1, 2])
        worker.stop()
        thread.join(30)
        assert queue.stats().done == 2
