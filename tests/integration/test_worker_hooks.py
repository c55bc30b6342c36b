"""Hooks that take long, or raise what they should not, delay nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from microqueue import (
    AsyncQueue,
    BackoffPolicy,
    DeadLetter,
    Fail,
    Queue,
    QueueSettings,
    Tasks,
    TaskStatus,
)
from microqueue.embedded import EmbeddedServer
from microqueue.worker import AsyncWorker, Hooks, Worker, lease_renewal, shutdown
from tests.integration.rig import Rig, stored
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
    # No task is tried again during a test.
    later = BackoffPolicy(base_sec=600, jitter="none")
    settings = QueueSettings(visibility_timeout=3, backoff=later)
    return Queue(microqueue_database, settings=settings)


def test_slow_hook_of_a_cancelled_task_delays_no_lease(
    queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_renewal, "CHECK_EVERY_SEC", 0.1)
    hooks = SlowHooks()
    doomed, other = queue.enqueue_many([{}, {}]).tasks
    begun = threading.Semaphore(0)

    def handler(_payload: Any) -> None:
        begun.release()
        hooks.go.wait(60)

    worker = Worker(queue, handler, hooks=[hooks])
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        for _ in range(2):
            assert begun.acquire(timeout=30)
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
    monkeypatch.setattr(shutdown, "ENDING_SEC", 3.0)
    hooks = SlowHooks()
    told: list[int] = []

    def handler(payload: Any, context: Any) -> None:
        wait_for(lambda: context.cancelled)
        told.append(payload["n"])  # It returns before the hook can be called for its timeout.

    tasks = queue.enqueue_many([{"n": 1}, {"n": 2}]).tasks
    worker = Worker(queue, handler, hooks=[hooks], timeout=0.2, grace=0.2)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        wait_for(lambda: sorted(told) == [1, 2])
        assert hooks.begun.wait(30)
        wait_for(lambda: queue.stats().delayed == 2)
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
    wait_for(lambda: queue.workers() == [])


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


class Recorder(Hooks):
    """Keeps the dead letters that it is notified of, and what was called before each."""

    def __init__(self) -> None:
        self.letters: list[DeadLetter] = []
        self.failures: list[Any] = []

    def on_failure(self, task: Any, error: BaseException, *, took_sec: float) -> None:
        self.failures.append(task.id)

    def on_dead_letter(self, letter: DeadLetter) -> None:
        self.letters.append(letter)


def fails(payload: Any) -> None:
    raise Fail("no", code="own")


def raises(payload: Any) -> None:
    raise ValueError("boom")


def returns(payload: Any) -> Any:
    return {"not": object()}


def blocks(payload: Any, context: Any) -> None:
    wait_for(lambda: context.cancelled)


HANDLERS: list[tuple[Any, str, dict[str, Any]]] = [
    (fails, "own", {}),
    (raises, "ValueError", {}),
    (returns, "invalid_result", {"keep_result": True}),
    (blocks, "TimeoutError", {"timeout": 0.05}),
    (Tasks(), "unknown_task", {}),
]


@pytest.mark.parametrize(("handler", "code", "options"), HANDLERS, ids=lambda one: str(one)[:20])
def test_every_dead_letter_of_a_worker_reaches_a_hook(
    rig: Rig, handler: Any, code: str, options: dict[str, Any]
) -> None:
    rig.settings = rig.settings.model_copy(update={"max_attempts": 1})
    task = rig.queue.enqueue({}, headers={"task": "mail"})
    recorder = Recorder()
    rig.run(handler, hooks=[recorder], **options)
    (letter,) = recorder.letters
    assert (letter.id, letter.name, letter.attempts) == (task.id, "mail", 1)
    assert (letter.error.code, letter.source) == (code, "worker")
    assert recorder.failures == [task.id]


def test_dead_letters_that_a_worker_finds_when_it_claims_reach_a_hook(rig: Rig) -> None:
    gone = rig.queue.enqueue({}, expires_in=0.001)
    used_up = rig.queue.enqueue({})
    rig.database.tasks.update_one({"_id": used_up.id}, {"$set": {"attempts": 99}})
    wait_for(lambda: gone.expires_at is not None and rig.queue.now() > gone.expires_at)
    recorder = Recorder()
    rig.run(lambda _payload: None, hooks=[recorder])
    found = {one.id: (one.error.code, one.source) for one in recorder.letters}
    assert found == {gone.id: ("expired", "worker"), used_up.id: ("max_attempts", "worker")}
    assert len(recorder.letters) == 2
    assert recorder.failures == []


def test_a_retry_and_a_lost_lease_are_no_dead_letters(rig: Rig) -> None:
    recorder = Recorder()
    first, second = rig.queue.enqueue({"n": 1}), rig.queue.enqueue({"n": 2})

    def handler(payload: Any) -> None:
        if payload["n"] == 1:
            raise ValueError("boom")
        rig.queue.cancel(second.id)
        raise Fail("too late")

    rig.run(handler, hooks=[recorder])
    assert stored(rig, first).status == TaskStatus.PENDING
    assert stored(rig, second).error.code == "cancelled"
    assert recorder.letters == []


@pytest.mark.parametrize("kind", ["threads", "coroutine", "plain"])
@pytest.mark.parametrize("batch", [None, 1])
async def test_queue_of_a_handler_reaches_its_hooks(
    microqueue_server: EmbeddedServer, microqueue_database: Any, kind: str, batch: int | None
) -> None:
    def plain(_payload: Any, context: Any) -> None:
        context.queue.cancel("doomed")

    async def coroutine(_payload: Any, context: Any) -> None:
        await context.queue.cancel("doomed")

    recorder = Recorder()
    uri = microqueue_server.uri.replace("/?", f"/{microqueue_database.name}?")
    with Queue[Any].from_uri(uri, hooks=[recorder]) as queue:
        queue.enqueue({}, task_id="doomed", delay=60)
        queue.enqueue({})
        if kind == "threads":
            await asyncio.to_thread(Worker(queue, plain, batch=batch).run, burst=True)
        else:
            handler = coroutine if kind == "coroutine" else plain
            async with AsyncQueue[Any].from_uri(uri, hooks=[recorder]) as async_queue:
                await AsyncWorker(async_queue, handler, batch=batch).run(burst=True)
    (letter,) = recorder.letters
    assert (letter.id, letter.error.code, letter.source) == ("doomed", "cancelled", "queue")
