"""Handlers that are not what they look like, or that end in unusual ways."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from microqueue import AsyncQueue, Queue, TaskStatus
from microqueue.embedded import EmbeddedServer
from microqueue.worker import AsyncWorker, Fail, Hooks, Retry, Snooze, Tasks, Worker, completer
from microqueue.worker.completer import Completer
from tests.integration.rig import Rig, stored
from tests.rejection import rejecting
from tests.waiting import wait_for


@pytest.fixture(params=["pymongo_async", "motor"])
def loop_rig(
    request: pytest.FixtureRequest, microqueue_server: EmbeddedServer, microqueue_database: Any
) -> Rig:
    return Rig(request.param, microqueue_server.uri, microqueue_database)


# Coroutines that do not look like it

ran: list[Any] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    ran.clear()


async def note(payload: Any, *, place: str = "") -> str:
    await asyncio.sleep(0)
    ran.append((payload["n"], place))
    return place


class Noter:
    """A callable whose call is a coroutine function."""

    async def __call__(self, payload: Any, place: str = "") -> str:
        return await note(payload, place=place)


def passed_on(function: Any) -> Any:
    """Decorate as people do who think of plain functions only."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


RECOGNISED = [functools.partial(note, place="here"), functools.partial(Noter(), place="here")]
HIDDEN = [lambda payload: note(payload, place="here"), passed_on(RECOGNISED[0].func)]


@pytest.mark.parametrize("handler", [*RECOGNISED, *HIDDEN, Noter()])
def test_whatever_gives_a_coroutine_is_awaited_before_its_task_is_done(
    loop_rig: Rig, handler: Any
) -> None:
    task = loop_rig.queue.enqueue({"n": 1})
    assert loop_rig.run(handler, keep_result=True) == 1
    assert [n for n, _ in ran] == [1]
    found = stored(loop_rig, task)
    assert (found.status, found.result) == (TaskStatus.DONE, ran[0][1])


@pytest.mark.parametrize("handler", [*RECOGNISED, Noter()])
def test_threads_reject_what_is_known_to_give_a_coroutine(
    microqueue_queue: Queue[Any], handler: Any
) -> None:
    with rejecting("handler", handler, code="coroutine"):
        Worker(microqueue_queue, handler)


@pytest.mark.parametrize(("handler", "name"), [(HIDDEN[0], "<lambda>"), (HIDDEN[1], "note")])
@pytest.mark.filterwarnings("error")  # A coroutine that is never awaited warns.
def test_coroutine_in_a_thread_never_passes_for_done(
    microqueue_queue: Queue[Any], handler: Any, name: str
) -> None:
    task = microqueue_queue.enqueue({"n": 1})
    Worker(microqueue_queue, handler).run(burst=True)
    found = microqueue_queue.get(task.id)
    assert found is not None
    assert found.error is not None
    assert (found.status, found.error.code, ran) == (TaskStatus.PENDING, "TypeError", [])
    assert name in found.error.message
    assert "AsyncWorker" in found.error.message


def decorated_tasks() -> Tasks:
    tasks = Tasks()

    @tasks.task("noted")
    @passed_on
    async def noted(n: int) -> None:
        await note({"n": n})

    return tasks


def test_named_task_under_a_plain_decorator_is_awaited(loop_rig: Rig) -> None:
    task = loop_rig.queue.enqueue({"n": 1}, headers={"task": "noted"})
    loop_rig.run(decorated_tasks())
    assert (stored(loop_rig, task).status, ran) == (TaskStatus.DONE, [(1, "")])


def test_named_task_under_a_plain_decorator_never_passes_for_done_in_a_thread(
    microqueue_queue: Queue[Any],
) -> None:
    task = microqueue_queue.enqueue({"n": 1}, headers={"task": "noted"})
    Worker(microqueue_queue, decorated_tasks()).run(burst=True)
    found = microqueue_queue.get(task.id)
    assert found is not None
    assert found.error is not None
    assert (found.status, ran) == (TaskStatus.PENDING, [])
    assert "noted" in found.error.message


def count_up(payload: Any) -> Iterator[int]:
    ran.append(payload)
    yield 1


async def count_later(payload: Any) -> Any:
    ran.append(payload)
    yield 1


@pytest.mark.parametrize("function", [count_up, count_later, functools.partial(count_up)])
def test_generator_function_is_rejected(microqueue_queue: Queue[Any], function: Any) -> None:
    with rejecting("handler", function, code="generator"):
        Worker(microqueue_queue, function)


@pytest.mark.parametrize("function", [count_up, count_later])
def test_generator_that_a_handler_gives_never_passes_for_done(rig: Rig, function: Any) -> None:
    task = rig.queue.enqueue({"n": 1})
    rig.run(lambda payload: function(payload))  # noqa: PLW0108 (it hides what is called)
    found = stored(rig, task)
    assert (found.status, found.error.code, ran) == (TaskStatus.PENDING, "TypeError", [])
    assert "generator" in found.error.message


def test_coroutine_that_a_plain_function_gave_is_cancelled_when_its_time_is_up(
    loop_rig: Rig,
) -> None:
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    task = loop_rig.queue.enqueue({})
    loop_rig.run(lambda _payload: hang(), timeout=2)
    assert cancelled.wait(30)
    assert stored(loop_rig, task).error.code == "TimeoutError"


# Outcomes that are not whole


class CarelessRetry(Retry):
    def __init__(self, number: int) -> None:
        self.number = number


class CarelessFail(Fail):
    def __init__(self, number: int) -> None:
        self.number = number


class CarelessSnooze(Snooze):
    def __init__(self, number: int) -> None:
        self.number = number


class BrokenFail(Fail):
    @property
    def code(self) -> str:  # type: ignore[override]  # The point.
        raise RuntimeError("no code today")


@pytest.mark.parametrize(
    ("error", "status", "attempts"),
    [
        (CarelessRetry(3), TaskStatus.PENDING, 1),
        (CarelessFail(3), TaskStatus.FAILED, 1),
        (CarelessSnooze(3), TaskStatus.PENDING, 0),
        (BrokenFail.__new__(BrokenFail, "x"), TaskStatus.PENDING, 1),
    ],
)
def test_outcome_that_is_not_whole_settles_its_task_and_ends_no_handler(
    rig: Rig, error: Exception, status: TaskStatus, attempts: int
) -> None:
    first, second = rig.queue.enqueue_many([{"n": 0}, {"n": 1}]).tasks

    def handler(payload: Any) -> None:
        if payload["n"] == 0:
            raise error

    thread = rig.start(handler, concurrency=1)
    try:
        wait_for(lambda: stored(rig, second).status is TaskStatus.DONE)
        wait_for(lambda: stored(rig, first).status is not TaskStatus.PROCESSING)
    finally:
        rig.stop()
        thread.join(60)
    found = stored(rig, first)
    assert (found.status, found.attempts) == (status, attempts)
    assert found.status is not TaskStatus.PENDING or found.next_retry_at is not None


class ExitingHooks(Hooks):
    """Does what no hook should."""

    def on_success(self, task: Any, *, took_sec: float) -> None:
        if task.payload["n"] == 0:
            raise SystemExit(3)


@pytest.mark.parametrize("kind", [ValueError, Fail, Retry])
def test_traceback_is_stored_for_unexpected_errors_only(rig: Rig, kind: Any) -> None:
    task = rig.queue.enqueue({})

    def handler(payload: Any) -> None:
        raise kind("boom")

    rig.run(handler)
    found = stored(rig, task).error
    assert found is not None
    if kind is ValueError:
        assert found.traceback is not None
        first, *_, source, last = found.traceback.splitlines()
        assert first == "Traceback (most recent call last):"
        assert (source.strip(), last) == ('raise kind("boom")', "ValueError: boom")
        assert "microqueue/worker" not in found.traceback
    else:
        assert found.traceback is None


@pytest.mark.parametrize("kind", [Fail, Retry])
@pytest.mark.parametrize("link", ["cause", "context", "none"])
def test_traceback_of_what_led_to_an_outcome_is_stored(rig: Rig, kind: Any, link: str) -> None:
    task = rig.queue.enqueue({})

    def handler(payload: Any) -> None:
        try:
            int("abc")
        except ValueError as exc:
            if link == "cause":
                raise kind("bad order", code="bad") from exc
            if link == "none":
                raise kind("bad order", code="bad") from None
            raise kind("bad order", code="bad")  # noqa: B904 (the context is what is tested)

    rig.run(handler)
    found = stored(rig, task).error
    assert found is not None
    assert (found.message, found.code) == ("bad order", "bad")
    if link == "none":
        assert found.traceback is None
    else:
        assert found.traceback is not None
        assert 'int("abc")' in found.traceback
        assert found.traceback.splitlines()[-1].endswith(f"{kind.__name__}: bad order")


def test_timeout_has_no_traceback(rig: Rig) -> None:
    task = rig.queue.enqueue({})
    released = threading.Event()

    def handler(payload: Any) -> None:
        released.wait(30)

    try:
        rig.run(handler, timeout=0.05)
    finally:
        released.set()
    found = stored(rig, task).error
    assert found is not None
    assert (found.code, found.traceback) == ("TimeoutError", None)


def test_hook_that_would_exit_changes_nothing(rig: Rig) -> None:
    rig.queue.enqueue_many([{"n": 0}, {"n": 1}])
    assert rig.run(lambda _payload: None, concurrency=1, hooks=[ExitingHooks()]) == 2
    assert rig.queue.stats().done == 2


def test_task_that_cannot_be_completed_is_left_to_its_lease_and_the_next_one_runs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Completer._complete  # noqa: SLF001 (to make it fail)

    def complete(self: Completer, task: Any, *how: Any) -> Any:
        if task.claimed.payload["n"] == 0:
            raise SystemExit(3)
        return usual(self, task, *how)

    monkeypatch.setattr(Completer, "_complete", complete)
    first, second = rig.queue.enqueue_many([{"n": 0}, {"n": 1}]).tasks
    thread = rig.start(lambda _payload: None, concurrency=1)
    try:
        wait_for(lambda: stored(rig, second).status is TaskStatus.DONE)
        wait_for(lambda: len(rig.worker._in_flight) == 0)  # noqa: SLF001 (nothing renews it)
    finally:
        rig.stop()
        thread.join(60)
    assert stored(rig, first).status is TaskStatus.PROCESSING


def test_settling_goes_on_after_an_error_that_nobody_foresaw(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual = completer.commit

    def commit(queue: Any, batch: Any) -> Any:
        if any(task.claimed.payload["n"] == 0 for task, _ in batch):
            raise RuntimeError("unforeseen")
        return usual(queue, batch)

    monkeypatch.setattr(completer, "commit", commit)
    first = rig.queue.enqueue({"n": 0})
    thread = rig.start(lambda _payload: None)
    try:
        wait_for(
            lambda: RuntimeError in [one.exc_info[0] for one in caplog.records if one.exc_info]
        )
        second = rig.queue.enqueue({"n": 1})
        wait_for(lambda: stored(rig, second).status is TaskStatus.DONE)
        wait_for(lambda: len(rig.worker._in_flight) == 0)  # noqa: SLF001 (nothing renews it)
    finally:
        rig.stop()
        thread.join(60)
    assert stored(rig, first).status is TaskStatus.PROCESSING


# Handlers that continue after their timeout


def test_plain_functions_beside_a_loop_keep_their_place_after_their_time(loop_rig: Rig) -> None:
    loop_rig.queue.enqueue_many([{}] * 6)
    go, lock = threading.Event(), threading.Lock()
    running = most = started = 0

    def handler(_payload: Any) -> None:
        nonlocal running, most, started
        with lock:
            started += 1
            running += 1
            most = max(most, running)
        go.wait(60)
        with lock:
            running -= 1

    thread = loop_rig.start(handler, concurrency=2, timeout=0.2)
    try:
        wait_for(lambda: loop_rig.queue.stats().delayed == 2)
        wait_for(lambda: started == 2)
        time.sleep(1)
        assert started == 2
        go.set()
        wait_for(lambda: started == 6)
    finally:
        go.set()
        loop_rig.stop()
        thread.join(60)
    assert most == 2


def test_end_does_not_wait_for_handlers_whose_tasks_are_settled(rig: Rig) -> None:
    rig.queue.enqueue({}, max_attempts=1)
    go = threading.Event()
    began = time.monotonic()
    try:
        rig.run(lambda _payload: go.wait(100), timeout=0.2, grace=90)
        assert time.monotonic() - began < 60
    finally:
        go.set()
    assert rig.queue.stats().failed == 1


def test_end_sleeps_while_it_waits_for_a_handler(microqueue_queue: Queue[Any]) -> None:
    microqueue_queue.enqueue({})
    began, go = threading.Event(), threading.Event()

    def handler(_payload: Any) -> None:
        began.set()
        go.wait(60)

    worker = Worker(microqueue_queue, handler, grace=1)
    in_flight = worker._in_flight  # noqa: SLF001 (to count the waits)
    waits: list[float] = []
    wait_until_empty = in_flight.wait_until_empty

    def counted(timeout_sec: float) -> None:
        waits.append(timeout_sec)
        wait_until_empty(timeout_sec)

    in_flight.wait_until_empty = counted  # type: ignore[method-assign]  # To come in between.
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert began.wait(30)
    worker.stop()
    thread.join(60)
    go.set()
    assert not thread.is_alive()
    assert 1 <= len(waits) <= 100


def test_what_a_handler_sets_in_its_context_no_other_sees(rig: Rig) -> None:
    user: ContextVar[str] = ContextVar("user", default="nobody")
    seen: list[str] = []

    def handler(payload: Any) -> None:
        seen.append(user.get())
        user.set(f"of task {payload['n']}")

    rig.queue.enqueue_many([{"n": n} for n in range(3)])
    user.set("whoever runs the worker")
    assert rig.run(handler, concurrency=1) == 3
    assert seen == ["whoever runs the worker"] * 3


# Handlers that share an asyncio task

TRACE: ContextVar[str] = ContextVar("TRACE", default="none")


def run_async(database: Any, uri: str, handler: Any, **options: Any) -> int:
    async def run() -> int:
        async with AsyncMongoClient[Any](uri) as client:
            queue: AsyncQueue[Any] = AsyncQueue(client[database.name])
            return await AsyncWorker(queue, handler, **options).run(burst=True)

    return asyncio.run(run())


def test_coroutines_do_not_see_what_others_left_in_context_variables(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    Queue[Any](microqueue_database).enqueue_many([{"n": n} for n in range(20)])
    seen: list[str] = []

    async def handler(payload: Any) -> None:
        seen.append(TRACE.get())
        if payload["n"] % 3 == 0:
            TRACE.set(f"left by {payload['n']}")

    assert run_async(microqueue_database, microqueue_server.uri, handler, concurrency=1) == 20
    assert seen == ["none"] * 20


def test_coroutine_that_swallowed_a_cancellation_does_not_cancel_the_next(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    Queue[Any](microqueue_database).enqueue_many([{"n": n} for n in range(4)], max_attempts=1)
    requests: list[int] = []

    async def handler(payload: Any) -> None:
        running = asyncio.current_task()
        assert running is not None
        requests.append(running.cancelling())
        if payload["n"] == 1:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        await asyncio.sleep(0)

    uri = microqueue_server.uri
    handled = run_async(microqueue_database, uri, handler, concurrency=1, timeout=0.2)
    assert handled == 4
    assert requests == [0] * 4


def test_coroutines_that_never_wait_let_others_run(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    Queue[Any](microqueue_database).enqueue_many([{"n": n} for n in range(60)])
    turns: list[int] = []
    handled: list[int] = []

    async def tick() -> None:
        while True:
            turns.append(len(handled))
            await asyncio.sleep(0)

    async def handler(payload: Any) -> None:
        if payload["n"] == 0:
            ticking.append(asyncio.create_task(tick()))
        until = time.monotonic() + 0.002
        while time.monotonic() < until:
            pass
        handled.append(payload["n"])

    ticking: list[asyncio.Task[None]] = []
    assert run_async(microqueue_database, microqueue_server.uri, handler, concurrency=1) == 60
    # Each handler takes longer than a turn, so there is one after each of them.
    assert set(range(1, 60)) <= set(turns)
