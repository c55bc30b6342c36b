"""Listeners and wakeups on streams that end, fail or fall silent, without a server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from pymongo.errors import AutoReconnect, OperationFailure

from microqueue.drivers import change_stream
from microqueue.drivers.change_stream import AsyncWakeup, Listener, SyncWakeup, abandon
from microqueue.worker.waiting import WorkWaiter
from tests.waiting import wait_for

SILENCE = object()
"""An answer that never comes, until the test is over."""


class Server:
    """A collection whose streams give what the test puts into them."""

    def __init__(self, *opened: Any) -> None:
        self._opened = list(opened)
        self.over = threading.Event()
        self.streams: list[Stream] = []

    def watch(self, *_: Any, **_options: Any) -> Stream:
        given = self._opened.pop(0) if self._opened else None
        if given is SILENCE:
            self.over.wait()
        elif given is not None:
            raise given
        self.streams.append(Stream(self.over))
        return self.streams[-1]


class Stream:
    def __init__(self, over: threading.Event) -> None:
        self._over = over
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.closed = threading.Event()

    def try_next(self) -> Any:
        answer = self.answers.get(timeout=60)
        if answer is SILENCE:
            self._over.wait()
            return None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        self.closed.set()
        raise AutoReconnect("connection closed")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_stream, "SILENT_SEC", 0.02)
    monkeypatch.setattr(change_stream, "LATE_SEC", 0.01)


def stop(listener: Listener, server: Server) -> None:
    server.over.set()
    for stream in server.streams:
        stream.answers.put(None)
    thread = listener.release()
    if thread is not None:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("silent_at", ["open", "read"])
def test_silent_stream_is_replaced_by_the_next_subscriber(silent_at: str) -> None:
    server = Server(*([SILENCE] if silent_at == "open" else []))
    listener = Listener(server, await_sec=0.0)
    listener.acquire()
    first, second = threading.Event(), threading.Event()
    listener.subscribe(first.set, ["a"], 0)
    if silent_at == "read":
        assert first.wait(60)  # It was opened.
        server.streams[0].answers.put(SILENCE)
    wait_for(listener._is_silent)  # noqa: SLF001 (the next subscriber asks the same)
    assert not listener.is_live
    listener.subscribe(second.set, ["b"], listener.reports)
    assert second.wait(60)
    current = server.streams[-1]
    second.clear()
    current.answers.put({"change": 1})
    assert second.wait(60)
    stop(listener, server)
    if silent_at == "read":
        assert server.streams[0].closed.wait(60)  # By the thread that read it.
    else:
        wait_for(lambda: len(server.streams) == 2 and server.streams[-1].closed.wait(1))


def test_listener_whose_thread_cannot_start_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    listener = Listener(server, await_sec=0.0)
    usual = threading.Thread.start

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        listener.acquire()
    monkeypatch.setattr(threading.Thread, "start", usual)
    listener.acquire()
    woken = threading.Event()
    listener.subscribe(woken.set, ["a"], 0)
    assert woken.wait(60)
    stop(listener, server)


# What is reported while a caller checks for work


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """Replace the collection of the wakeups' listener, which has another subscriber, and reads."""
    server = Server()
    listener = Listener(server, await_sec=0.0)
    listener.subscribe(lambda: None, ["a"], 0)
    monkeypatch.setattr(change_stream, "acquire_listener", lambda *_: listener)
    monkeypatch.setattr(change_stream, "release_listener", lambda *_: None)
    listener.acquire()
    wait_for(lambda: listener.reports == 1)  # The stream is open.
    return server


def report_during_the_check(server: Server, listener: Any) -> None:
    """Let the stream report a change that only the other subscriber is woken for."""
    before = listener.reports
    server.streams[-1].answers.put({"change": 1})
    wait_for(lambda: listener.reports > before)


async def wakeup_of(kind: str) -> tuple[Any, Callable[[], Any]]:
    """Return a wakeup on a listener, and how to sleep on it without a time limit."""
    some: Any = SimpleNamespace(
        in_memory=False, is_motor=True, tasks=SimpleNamespace(delegate=None)
    )
    if kind == "thread":
        sync = SyncWakeup(some, ["a"], poll_interval_sec=60)
        sync.__enter__()
        return sync, lambda: asyncio.to_thread(sync.sleep, 600)
    wakeup = AsyncWakeup(some, ["a"], poll_interval_sec=60)
    await wakeup.__aenter__()
    return wakeup, lambda: wakeup.sleep(600)


@pytest.mark.parametrize("kind", ["thread", "coroutine"])
async def test_change_that_comes_during_a_check_ends_the_next_sleep(
    kind: str, server: Server
) -> None:
    wakeup, sleep = await wakeup_of(kind)
    listener = wakeup._listener  # noqa: SLF001 (its reports say what it has seen)
    async with asyncio.timeout(60):
        for _ in range(3):  # Before the first sleep, too.
            await asyncio.to_thread(report_during_the_check, server, listener)
            await sleep()
    stop(listener, server)


def test_worker_does_not_miss_what_is_reported_while_it_claims(server: Server) -> None:
    tasks: Any = SimpleNamespace(collections=SimpleNamespace(in_memory=False, tasks=None), name="a")
    waiter = WorkWaiter({"a": tasks})
    (listener,) = waiter._listeners  # noqa: SLF001
    for _ in range(3):
        report_during_the_check(server, listener)
        assert waiter.wait(60, stopping=lambda: False)
    stop(listener, server)


# PyMongo's async client


class AsyncStream:
    def __init__(self, answer: BaseException | None) -> None:
        self._answer = answer
        self.closed = False

    async def try_next(self) -> Any:
        if self._answer is not None:
            raise self._answer
        await asyncio.sleep(60)

    async def close(self) -> None:
        self.closed = True


def collections(watch: Callable[..., Any]) -> Any:
    async def hello(_name: str) -> dict[str, Any]:
        return {}

    return SimpleNamespace(
        in_memory=False,
        is_motor=False,
        database=SimpleNamespace(command=hello),
        tasks=SimpleNamespace(watch=watch),
    )


async def test_stream_that_ends_is_closed_and_the_queue_polled() -> None:
    stream = AsyncStream(OperationFailure("the change stream is gone", 286))

    async def watch(*_: Any, **_options: Any) -> Any:
        return stream

    async with AsyncWakeup(collections(watch), ["a"], poll_interval_sec=0.01) as wakeup:
        await wakeup.sleep(5)
        assert stream.closed
        await wakeup.sleep(0.001)  # It is not opened again at once.


async def test_stream_that_was_opened_again_ends_the_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_stream, "REOPEN_SEC", 0.0)
    streams = [AsyncStream(AutoReconnect("lost")), AsyncStream(AssertionError("read too early"))]

    async def watch(*_: Any, **_options: Any) -> Any:
        return streams.pop(0)

    async with AsyncWakeup(collections(watch), ["a"], poll_interval_sec=0.01) as wakeup:
        await wakeup.sleep(600)  # It polls, because the stream was lost.
        await wakeup.sleep(600)  # What came before the second stream is not in it: check again.
    assert streams == []


async def test_server_without_streams_is_polled() -> None:
    tries: list[float] = []

    async def watch(*_: Any, **_options: Any) -> Any:
        tries.append(time.monotonic())
        raise OperationFailure("only on replica sets", 40573)

    async with AsyncWakeup(collections(watch), ["a"], poll_interval_sec=0.01) as wakeup:
        await wakeup.sleep(5)
    assert len(tries) == 1


async def test_abandoned_read_is_forgotten_however_it_ends() -> None:
    loop = asyncio.get_running_loop()
    reported: list[Any] = []
    loop.set_exception_handler(lambda _loop, context: reported.append(context))
    failed, cancelled = loop.create_future(), loop.create_future()
    for reading in (failed, cancelled):
        abandon(reading)
    failed.set_exception(AutoReconnect("lost"))
    cancelled.cancel()
    await asyncio.sleep(0)
    assert not change_stream._abandoned & {failed, cancelled}  # noqa: SLF001 (kept until it ends)
    del failed, cancelled, reading
    await asyncio.sleep(0)
    assert reported == []
