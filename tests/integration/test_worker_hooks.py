"""Hooks that take long, or raise what they should not, hold up nobody."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from microqueue import Queue, QueueSettings, TaskStatus
from microqueue.worker import Hooks, Worker, lease_renewal, shutdown
from tests.waiting import wait_for


class SlowHooks(Hooks):
    """Takes as long as the test wants, for what the handler has not brought about."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def on_retry(self, task: Any, error: BaseException, *, took_sec: float) -> None:
        self._wait()

    def on_cancel(self, task: Any) -> None:
        self._wait()

    def _wait(self) -> None:
        self.begun.set()
        self.go.wait(60)


@pytest.fixture
def queue(microqueue_database: Any) -> Queue[Any]:
    return Queue(microqueue_database, settings=QueueSettings(visibility_timeout=0.9))


def test_slow_hook_of_a_cancelled_task_delays_no_lease(
    queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_renewal, "CHECK_EVERY_SEC", 0.1)
    hooks = SlowHooks()
    doomed, other = queue.enqueue_many([{}, {}]).tasks
    worker = Worker(queue, lambda _payload: hooks.go.wait(60), hooks=[hooks])
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        wait_for(lambda: queue.stats().processing == 2)
        queue.cancel(doomed.id)
        assert hooks.begun.wait(30)
        seen: set[Any] = set()
        # Three renewals while the hook waits.
        wait_for(lambda: seen.add(queue.get(other.id).lease.expires_at) or len(seen) > 3)  # type: ignore[func-returns-value, union-attr]  # It is there.
    finally:
        hooks.go.set()
        worker.stop()
        thread.join(30)
    assert queue.stats().done == 1


def test_slow_hook_of_a_timeout_delays_no_other_and_changes_no_outcome(
    queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "ENDING_SEC", 0.2)
    hooks = SlowHooks()
    told: list[int] = []

    def handler(payload: Any, context: Any) -> None:
        wait_for(lambda: context.cancelled)
        told.append(payload["n"])  # It returns before its timeout can be told to the hook.

    tasks = queue.enqueue_many([{"n": 1}, {"n": 2}]).tasks
    worker = Worker(queue, handler, hooks=[hooks], timeout=0.2, grace=0.2)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        wait_for(lambda: sorted(told) == [1, 2], 20)
        assert hooks.begun.wait(30)
        worker.stop()
        thread.join(30)
        assert not thread.is_alive()  # Neither does it hold up the end.
    finally:
        hooks.go.set()
        worker.stop()
        thread.join(30)
    for task in tasks:
        found = queue.get(task.id)
        assert found is not None
        assert found.error is not None
        assert (found.status, found.error.code) == (TaskStatus.PENDING, "TimeoutError")
    assert queue.workers() == []


def test_interrupt_out_of_a_hook_leaves_no_task_behind(queue: Queue[Any]) -> None:
    class Interrupting(Hooks):
        def on_retry(self, task: Any, error: BaseException, *, took_sec: float) -> None:
            raise KeyboardInterrupt

    queue.enqueue({})
    worker = Worker(
        queue,
        lambda _payload, context: wait_for(lambda: context.cancelled),
        hooks=[Interrupting()],
        timeout=0.1,
    )
    worker.run(burst=True)
    assert queue.stats().delayed == 1


def test_handler_that_gives_up_as_the_worker_ends_has_not_done_its_task(queue: Queue[Any]) -> None:
    """The hook takes so long that all who were told have returned before it is through."""
    begun = threading.Semaphore(0)

    class Slow(Hooks):
        def on_release(self, task: Any) -> None:
            time.sleep(0.05)

    def handler(_payload: Any, context: Any) -> None:
        begun.release()
        while not context.cancelled:
            time.sleep(0.001)

    queue.enqueue_many([{}] * 4)
    worker = Worker(queue, handler, hooks=[Slow()], grace=0.1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    for _ in range(4):
        assert begun.acquire(timeout=30)
    worker.stop()
    thread.join(30)
    stats = queue.stats()
    assert (stats.ready, stats.done) == (4, 0)
