"""Batch handlers on a real server: sizes, outcomes, leases, crashes and shutdowns."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from microqueue import (
    AsyncQueue,
    AsyncWorker,
    BackoffPolicy,
    Fail,
    NewTask,
    Queue,
    QueueSettings,
    Retry,
    Snooze,
    Sweeper,
    Task,
    TaskStatus,
)
from microqueue.embedded import EmbeddedServer
from microqueue.worker import BatchContext, Hooks, lease_renewal
from tests.integration.rig import Rig, stored
from tests.waiting import LEASE_SEC, wait_for

NO_BACKOFF = BackoffPolicy(base_sec=0, max_sec=0)
LONG = 3600
"""A wait that never ends: a batch starts because it is full."""


def batched(rig: Rig, function: Callable[[list[Task[Any]], Any], Any]) -> Any:
    """Make a batch handler of the rig's kind."""

    def plain(tasks: list[Task[Any]], context: Any) -> Any:
        return function(tasks, context)

    async def coroutine(tasks: list[Task[Any]], context: Any) -> Any:
        return await asyncio.to_thread(function, tasks, context)

    return plain if rig.kind == "threads" else coroutine


def numbers(tasks: list[Task[Any]]) -> list[int]:
    return [one.payload["n"] for one in tasks]


def fill(rig: Rig, count: int) -> list[Task[Any]]:
    return list(rig.queue.enqueue_many([{"n": n} for n in range(count)]).tasks)


class Recorder(Hooks):
    """Counts the hooks that were called, per task."""

    def __init__(self) -> None:
        self.called: Counter[tuple[str, int]] = Counter()

    def _note(self, hook: str, task: Task[Any]) -> None:
        self.called[hook, task.payload["n"]] += 1

    def on_start(self, task: Any) -> None:
        self._note("start", task)

    def on_success(self, task: Any, *, took_sec: float) -> None:
        self._note("success", task)

    def on_retry(self, task: Any, error: BaseException, *, took_sec: float) -> None:
        self._note("retry", task)

    def on_failure(self, task: Any, error: BaseException, *, took_sec: float) -> None:
        self._note("failure", task)

    def on_lease_lost(self, task: Any) -> None:
        self._note("lease lost", task)

    def on_cancel(self, task: Any) -> None:
        self._note("cancel", task)

    def on_release(self, task: Any) -> None:
        self._note("release", task)


def test_full_batches_start_at_once_in_the_order_of_the_queue(rig: Rig) -> None:
    fill(rig, 20)
    calls: list[list[int]] = []
    handler = batched(rig, lambda tasks, _context: calls.append(numbers(tasks)))
    assert rig.run(handler, concurrency=1, batch=10, batch_wait=LONG) == 20
    assert calls == [list(range(10)), list(range(10, 20))]
    assert rig.queue.stats().done == 20


def test_last_batch_is_smaller_after_its_wait(rig: Rig) -> None:
    fill(rig, 3)
    calls: list[list[int]] = []
    handler = batched(rig, lambda tasks, _context: calls.append(numbers(tasks)))
    assert rig.run(handler, batch=100, batch_wait=0.05) == 3
    assert calls == [[0, 1, 2]]


def test_batch_of_one_is_a_list_too(rig: Rig) -> None:
    fill(rig, 2)
    calls: list[list[int]] = []
    handler = batched(rig, lambda tasks, _context: calls.append(numbers(tasks)))
    assert rig.run(handler, batch=1, batch_wait=LONG) == 2
    assert sorted(calls) == [[0], [1]]


def test_tasks_that_come_one_by_one_share_a_batch(rig: Rig) -> None:
    rig.settings = QueueSettings(visibility_timeout=LONG)  # None is released as it waits long.
    calls: list[list[int]] = []
    handler = batched(rig, lambda tasks, _context: calls.append(numbers(tasks)))
    thread = rig.start(handler, batch=3, batch_wait=LONG)
    for n in range(3):
        assert calls == []
        rig.queue.enqueue({"n": n})
        wait_for(lambda: rig.queue.stats().ready == 0)
    wait_for(lambda: rig.queue.stats().done == 3)
    rig.stop()
    thread.join(30)
    assert calls == [[0, 1, 2]]


def test_concurrency_counts_batches(rig: Rig) -> None:
    fill(rig, 4)
    together = threading.Barrier(2, timeout=30)

    def handler(_tasks: Any, _context: Any) -> None:
        together.wait()

    assert rig.run(batched(rig, handler), concurrency=2, batch=2, batch_wait=LONG, prefetch=1) == 4
    assert rig.queue.stats().done == 4


def test_worker_registers_how_many_tasks_it_runs(rig: Rig) -> None:
    fill(rig, 1)
    seen: list[int] = []

    def look(_tasks: Any, _context: Any) -> None:
        seen.extend(one.concurrency for one in rig.queue.workers())

    rig.run(batched(rig, look), concurrency=3, batch=7, batch_wait=0)
    assert seen == [21]


def test_each_task_has_its_own_outcome(rig: Rig) -> None:
    tasks = fill(rig, 6)
    hooks = Recorder()
    outcomes = [
        None,
        {"letters": 3},
        Retry("later", delay=60, code="later"),
        Fail("never", code="never"),
        Snooze(60),
        ValueError("boom"),
    ]

    def handler(given: list[Task[Any]], _context: Any) -> list[Any]:
        return [outcomes[n] for n in numbers(given)]

    options: dict[str, Any] = {"batch": 6, "batch_wait": LONG, "keep_result": True}
    assert rig.run(batched(rig, handler), hooks=[hooks], **options) == 6
    found = [stored(rig, one) for one in tasks]
    assert [(one.status, one.attempts, one.error and one.error.code) for one in found] == [
        (TaskStatus.DONE, 1, None),
        (TaskStatus.DONE, 1, None),
        (TaskStatus.PENDING, 1, "later"),
        (TaskStatus.FAILED, 1, "never"),
        (TaskStatus.PENDING, 0, None),
        (TaskStatus.PENDING, 1, "ValueError"),
    ]
    assert [one.result for one in found[:2]] == [None, {"letters": 3}]
    ended = {0: "success", 1: "success", 2: "retry", 3: "failure", 4: "retry", 5: "retry"}
    assert hooks.called == Counter(
        [("start", n) for n in range(6)] + [(name, n) for n, name in ended.items()]
    )


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ValueError("boom"), TaskStatus.PENDING, "ValueError"),
        (Fail("no", code="broken"), TaskStatus.FAILED, "broken"),
        ("a text", TaskStatus.PENDING, "TypeError"),
    ],
    ids=["exception", "Fail", "a wrong value"],
)
def test_error_of_the_handler_is_that_of_every_task(
    rig: Rig, error: Any, status: TaskStatus, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = fill(rig, 3)

    def handler(_tasks: Any, _context: Any) -> Any:
        if isinstance(error, str):
            return error
        raise error

    assert rig.run(batched(rig, handler), batch=3, batch_wait=LONG) == 3
    found = [stored(rig, one) for one in tasks]
    assert {(one.status, one.attempts, one.error.code) for one in found} == {(status, 1, code)}
    logged = [record for record in caplog.records if hasattr(record, "dead_letter")]
    assert len(logged) == 3
    unexpected = not isinstance(error, Fail)
    assert sum(bool(record.exc_info) for record in logged) == unexpected  # Once, and not thrice.


def test_timeout_is_for_the_whole_batch(rig: Rig) -> None:
    tasks = fill(rig, 3)
    hooks = Recorder()
    seen: list[bool] = []

    def handler(given: list[Task[Any]], context: Any) -> None:
        wait_for(lambda: context.cancelled)
        seen.append(all(context.is_cancelled(one) for one in given))

    options: dict[str, Any] = {"batch": 3, "batch_wait": LONG, "timeout": 1.5}
    rig.run(batched(rig, handler), hooks=[hooks], **options)
    wait_for(lambda: seen)
    assert seen == [True]
    found = [stored(rig, one) for one in tasks]
    assert {(one.status, one.error.code) for one in found} == {("pending", "TimeoutError")}
    assert hooks.called == Counter(
        [("start", n) for n in range(3)] + [("retry", n) for n in range(3)]
    )


def test_cancelled_task_is_visible_and_does_not_stop_the_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_renewal, "CHECK_EVERY_SEC", 0.05)
    tasks = fill(rig, 3)
    hooks = Recorder()
    seen: list[Any] = []

    def handler(given: list[Task[Any]], context: Any) -> list[str]:
        rig.queue.cancel(given[1].id)
        wait_for(lambda: context.is_cancelled(given[1]))
        seen.append(([context.is_cancelled(one) for one in given], context.cancelled))
        return ["kept"] * 3

    options: dict[str, Any] = {"batch": 3, "batch_wait": LONG, "keep_result": True}
    rig.run(batched(rig, handler), hooks=[hooks], **options)
    assert seen == [([False, True, False], False)]
    found = [stored(rig, one) for one in tasks]
    assert [(one.status, one.result) for one in found] == [
        (TaskStatus.DONE, "kept"),
        (TaskStatus.FAILED, None),
        (TaskStatus.DONE, "kept"),
    ]
    assert found[1].error.code == "cancelled"
    assert hooks.called == Counter(
        [("start", n) for n in range(3)] + [("success", 0), ("cancel", 1), ("success", 2)]
    )


def test_lost_lease_fences_off_its_own_task_only(rig: Rig) -> None:
    tasks = fill(rig, 3)
    hooks = Recorder()
    calls: list[list[int]] = []

    def handler(given: list[Task[Any]], _context: Any) -> list[Any]:
        calls.append(numbers(given))
        if len(calls) == 1:
            rig.queue.release(given[1])  # As the dashboard does. The worker has not noticed.
        return [f"call {len(calls)}"] * len(given)

    options: dict[str, Any] = {"batch": 3, "batch_wait": 0.05, "keep_result": True}
    rig.run(batched(rig, handler), hooks=[hooks], concurrency=1, prefetch=1, **options)
    assert calls == [[0, 1, 2], [1]]
    found = [stored(rig, one) for one in tasks]
    assert [(one.status, one.result) for one in found] == [
        (TaskStatus.DONE, "call 1"),
        (TaskStatus.DONE, "call 2"),
        (TaskStatus.DONE, "call 1"),
    ]
    assert {n for hook, n in hooks.called if hook == "lease lost"} == {1}


def test_leases_of_all_tasks_are_renewed_while_the_handler_runs(rig: Rig) -> None:
    rig.settings = QueueSettings(visibility_timeout=LEASE_SEC)
    tasks = fill(rig, 3)

    def handler(_tasks: Any, _context: Any) -> None:
        def ends() -> list[Any]:
            return [stored(rig, one).lease.expires_at for one in tasks]

        seen = [set(ends())]
        wait_for(lambda: seen.append(set(ends())) or len(set.union(*seen)) > 4)  # type: ignore[func-returns-value]
        former = ends()
        wait_for(lambda: all(a < b for a, b in zip(former, ends(), strict=True)))
        assert Sweeper(rig.queue).reclaim_stuck() == 0

    assert rig.run(batched(rig, handler), batch=3, batch_wait=LONG) == 3
    assert [stored(rig, one).attempts for one in tasks] == [1, 1, 1]
    assert rig.queue.stats().done == 3


def test_batch_is_of_one_queue(rig: Rig) -> None:
    names = ("one", "two")
    for n in range(6):
        Queue[Any](rig.database, names[n % 2]).enqueue({"n": n})
    calls: list[Any] = []

    def handler(given: list[Task[Any]], context: Any) -> None:
        calls.append((context.queue.name, {one.queue for one in given}, numbers(given)))
        assert [one.id for one in context.tasks] == [one.id for one in given]

    assert rig.run(batched(rig, handler), names=names, batch=3, batch_wait=LONG) == 6
    assert sorted(calls) == [("one", {"one"}, [0, 2, 4]), ("two", {"two"}, [1, 3, 5])]


def test_pause_releases_tasks_that_wait_for_a_batch(rig: Rig) -> None:
    fill(rig, 2)
    handler = batched(rig, lambda _tasks, _context: None)
    thread = rig.start(handler, batch=3, batch_wait=LONG)
    wait_for(lambda: rig.queue.stats().processing == 2)
    rig.queue.pause()
    wait_for(lambda: rig.queue.stats().ready == 2)
    rig.stop()
    thread.join(30)
    assert [one.attempts for one in rig.queue.peek()] == [0, 0]


def test_stop_releases_what_waits_and_lets_the_batch_finish(rig: Rig) -> None:
    fill(rig, 3)
    running, go = threading.Event(), threading.Event()

    def handler(_tasks: Any, _context: Any) -> None:
        running.set()
        go.wait(30)

    options: dict[str, Any] = {"batch": 2, "batch_wait": LONG, "grace": LONG}
    thread = rig.start(batched(rig, handler), concurrency=1, **options)
    assert running.wait(30)
    wait_for(lambda: rig.queue.stats().processing == 3)
    rig.stop()
    wait_for(lambda: rig.queue.stats().ready == 1)  # At once: the handler still runs.
    go.set()
    thread.join(30)
    assert (rig.queue.stats().done, rig.queue.stats().ready) == (2, 1)
    assert rig.queue.workers() == []


def test_stop_without_grace_releases_the_running_batch(rig: Rig) -> None:
    tasks = fill(rig, 2)
    running, stopped = threading.Event(), threading.Event()
    hooks = Recorder()

    def handler(_tasks: Any, context: Any) -> None:
        running.set()
        wait_for(lambda: context.cancelled)
        stopped.set()

    options: dict[str, Any] = {"batch": 2, "batch_wait": LONG, "grace": 0}
    thread = rig.start(batched(rig, handler), hooks=[hooks], **options)
    assert running.wait(30)
    rig.stop()
    thread.join(30)
    assert stopped.wait(30)
    found = [stored(rig, one) for one in tasks]
    assert {(one.status, one.attempts) for one in found} == {("pending", 0)}
    assert hooks.called == Counter([(name, n) for name in ("start", "release") for n in range(2)])


VARIABLE: ContextVar[int] = ContextVar("VARIABLE", default=-1)


def test_what_a_hook_sets_for_a_task_does_not_reach_the_others(rig: Rig) -> None:
    class Setting(Hooks):
        def on_start(self, task: Any) -> None:
            seen.append(VARIABLE.get())
            VARIABLE.set(task.payload["n"])

    seen: list[int] = []
    fill(rig, 3)
    handler = batched(rig, lambda _tasks, _context: seen.append(VARIABLE.get()))
    rig.run(handler, hooks=[Setting()], batch=3, batch_wait=LONG)
    assert seen == [-1] * 4


def test_batch_handler_adds_tasks_to_its_queue(rig: Rig) -> None:
    def plain(_tasks: list[Task[Any]], context: Any) -> None:
        context.enqueue({"n": 1}, delay=60)
        context.enqueue(NewTask(payload={"n": 2}, delay=60, name="resize"))

    async def coroutine(_tasks: list[Task[Any]], context: Any) -> None:
        await context.enqueue({"n": 1}, delay=60)
        await context.enqueue(NewTask(payload={"n": 2}, delay=60, name="resize"))

    fill(rig, 2)
    rig.run(plain if rig.kind == "threads" else coroutine, batch=2)
    added = rig.queue.peek(status="pending")
    assert {(one.payload["n"], one.name) for one in added} == {(1, None), (2, "resize")}


def test_progress_is_that_of_every_task(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_renewal, "CHECK_EVERY_SEC", 0.05)
    tasks = fill(rig, 2)

    def handler(_tasks: Any, context: Any) -> None:
        context.progress(0.5, "half")
        wait_for(lambda: all(stored(rig, one).progress for one in tasks))

    assert rig.run(batched(rig, handler), batch=2, batch_wait=LONG) == 2
    assert {stored(rig, one).progress.message for one in tasks} == {"half"}


@pytest.mark.parametrize("kind", ["function", "returns a coroutine"])
async def test_async_worker_runs_plain_functions_in_threads(
    microqueue_server: EmbeddedServer, microqueue_database: Any, kind: str
) -> None:
    seen: list[Any] = []

    def handler(tasks: list[Task[Any]], context: BatchContext) -> Any:
        seen.append((len(tasks), type(context.queue), threading.current_thread().name))
        context.queue.enqueue({"n": 3}, delay=60)

        async def later() -> list[str]:
            await asyncio.sleep(0)
            return ["a", "b"]

        return ["a", "b"] if kind == "function" else later()

    uri = microqueue_server.uri.replace("/?", f"/{microqueue_database.name}?")
    async with AsyncQueue[Any].from_uri(uri) as queue:
        await queue.enqueue_many([{"n": 1}, {"n": 2}])
        worker = AsyncWorker(queue, handler, batch=2, batch_wait=LONG, keep_result=True)
        assert await worker.run(burst=True) == 2
        results = [one.result for one in await queue.peek(status="done")]
        assert (await queue.stats()).delayed == 1
    assert sorted(results) == ["a", "b"]
    assert seen[0][:2] == (2, Queue)
    assert seen[0][2] != threading.current_thread().name


POISON = """
import os, signal, sys
from microqueue import BackoffPolicy, Queue, QueueSettings
from microqueue.worker import Worker

def handler(tasks):
    if any(task.payload["n"] == 4 for task in tasks):
        os.kill(os.getpid(), signal.SIGKILL)

settings = QueueSettings(backoff=BackoffPolicy(base_sec=0, max_sec=0), visibility_timeout=3600)
with Queue.from_uri(sys.argv[1], settings=settings) as queue:
    Worker(queue, handler, concurrency=1, batch=4, batch_wait=0.01, heartbeat=0.2).run(burst=True)
"""


def test_poison_task_is_found_and_the_others_of_its_batches_are_done(
    database_uri: str, microqueue_database: Any
) -> None:
    settings = QueueSettings(backoff=NO_BACKOFF)
    queue: Queue[Any] = Queue(microqueue_database, settings=settings)
    queue.enqueue_many([{"n": n} for n in range(10)])
    root = Path(__file__).parents[2]
    sweeper = Sweeper(queue)
    crashes = 0
    while subprocess.run(
        [sys.executable, "-c", POISON, database_uri], cwd=root, check=False
    ).returncode:
        crashes += 1
        wait_for(sweeper.reclaim_orphaned, what="the end of the worker")
        assert crashes <= settings.max_crashes + 1
    (dead,) = queue.peek(status="failed")
    assert dead.payload == {"n": 4}
    assert dead.error is not None
    assert dead.error.code == "poison"
    assert sorted(one.payload["n"] for one in queue.peek(status="done", limit=20)) == [
        n for n in range(10) if n != 4
    ]
