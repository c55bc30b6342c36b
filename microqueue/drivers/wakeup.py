"""Sleep until there may be work: on a change stream where there is one, else by polling.

A change stream has no deadline, as it waits for what may never come, so no caller waits for it
beyond its own limit. A blocking stream is read by the thread of a :class:`Listener`, and one of
PyMongo's async client is given up when the server owes an answer.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from pymongo.errors import PyMongoError

from microqueue.drivers import listener, memory
from microqueue.drivers.asynchronous import bounded, settled
from microqueue.drivers.collections import Collections
from microqueue.drivers.listener import OPEN_SEC, REOPEN_SEC, SILENT_SEC, Listener, logger
from microqueue.drivers.transient import CLOSE_SEC
from microqueue.operations import watch

STREAM_WAIT_SEC = 0.2
LOOK_SEC = 0.5
"""How often to see whether the stream is still read."""

_random = random.Random()  # noqa: S311 (it only spreads pollers)


class _Wakeup:
    """What both kinds share: the listener of a blocking stream, and how long to sleep without."""

    def __init__(
        self, collections: Collections, queues: Sequence[str], *, poll_interval_sec: float
    ) -> None:
        self._collections = collections
        self._queues = list(queues)
        self._poll_interval_sec = memory.POLL_SEC if collections.in_memory else poll_interval_sec
        self._listener: Listener | None = None

    @property
    def _blocking(self) -> Any:
        """The collection of pymongo's blocking client; Motor wraps one."""
        tasks = self._collections.tasks
        return tasks.delegate if self._collections.is_motor else tasks

    def _acquire(self) -> None:
        self._listener = listener.acquire(self._blocking, STREAM_WAIT_SEC)

    def _release(self, wake: Callable[[], None]) -> None:
        """Leave the listener. Its thread ends by itself, when its last user has left."""
        if self._listener is not None:
            self._listener.part(wake)
            listener.release(self._blocking, self._listener)

    def _pause_sec(self, deadline: float) -> float:
        remaining = max(deadline - time.monotonic(), 0)
        return min(remaining, self._poll_interval_sec * _random.uniform(0.5, 1.0))

    def _wait_sec(self, deadline: float, poll_at: float) -> float:
        """Return how long to wait for news before looking at the time again; 0: no longer."""
        hears = self._listener is not None and self._listener.hears
        until = deadline if hears else min(deadline, poll_at)
        return min(max(until - time.monotonic(), 0.0), LOOK_SEC)


class SyncWakeup(_Wakeup):
    """For threads."""

    def __enter__(self) -> Self:
        self._news = threading.Event()
        if not self._collections.in_memory:
            self._acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._release(self._news.set)

    def sleep(self, limit_sec: float) -> None:
        """Return when something changed, or after ``limit_sec``.

        Without a stream it returns earlier, after the poll interval.
        """
        deadline = time.monotonic() + limit_sec
        poll_at = time.monotonic() + self._pause_sec(deadline)
        if self._listener is not None:
            self._listener.join(self._news.set, self._queues)
        while (wait_sec := self._wait_sec(deadline, poll_at)) and not self._news.wait(wait_sec):
            pass
        if self._news.is_set() and self._listener is not None:
            # The thread reads on only while somebody waits, and leaves the connections alone.
            self._listener.part(self._news.set)
        self._news.clear()


class AsyncWakeup(_Wakeup):
    """For coroutines."""

    async def __aenter__(self) -> Self:
        self._stream: Any = None
        self._tried_at: float | None = None
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._collections.is_motor:
            # Motor would take one of its few threads for as long as the stream is read.
            self._acquire()
        else:
            await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._release(self._wake)
        await self._close()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # The loop may have ended in between.
            self._loop.call_soon_threadsafe(self._news.set)

    async def sleep(self, limit_sec: float) -> None:
        """Return when something changed, or after ``limit_sec``."""
        deadline = time.monotonic() + limit_sec
        if self._listener is None:
            await self._sleep_on_stream(deadline)
        else:
            await self._sleep_on_listener(self._listener, deadline)

    async def _sleep_on_listener(self, heard: Listener, deadline: float) -> None:
        poll_at = time.monotonic() + self._pause_sec(deadline)
        heard.join(self._wake, self._queues)
        while wait_sec := self._wait_sec(deadline, poll_at):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), wait_sec)
                heard.part(self._wake)
                break
        self._news.clear()

    async def _sleep_on_stream(self, deadline: float) -> None:
        await self._open()
        # A wait shorter than the server's own would come back late.
        while self._stream is not None and deadline - time.monotonic() >= STREAM_WAIT_SEC:
            owed_sec = STREAM_WAIT_SEC + min(SILENT_SEC, deadline - time.monotonic())
            try:
                change = await _next_change(self._stream, owed_sec)
            except TimeoutError:
                logger.debug("the change stream is silent, polling instead")
                self._stream = None  # Who reads it closes it, too.
            except PyMongoError as exc:
                await self._gone(exc)
            else:
                if change is not None:
                    return
        await asyncio.sleep(self._pause_sec(deadline))

    async def _open(self) -> None:
        """Try for a stream: at first, and again some time after one ended."""
        lately = self._tried_at is not None and time.monotonic() - self._tried_at < REOPEN_SEC
        if self._stream is not None or self._collections.in_memory or lately:
            return
        self._tried_at = time.monotonic()
        try:
            async with bounded(OPEN_SEC):
                hello = await settled(self._collections.database.command("hello"))
                self._stream = await settled(
                    self._collections.tasks.watch(
                        watch.new_work(self._queues),
                        max_await_time_ms=int(STREAM_WAIT_SEC * 1000),
                        start_at_operation_time=watch.from_now_on(hello),
                    )
                )
        except PyMongoError as exc:
            await self._gone(exc)

    async def _gone(self, exc: Exception) -> None:
        logger.debug("no change stream, polling instead: %s", exc)
        await self._close()

    async def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(PyMongoError):
                async with bounded(CLOSE_SEC):
                    await stream.close()


_abandoned: set[asyncio.Task[Any]] = set()


async def _next_change(stream: Any, limit_sec: float) -> Any:
    """Return the next change, if there is one soon; a server that owes an answer is left behind.

    By a task of its own: when it is cancelled, PyMongo closes the stream on the server first, and
    that may take as long.
    """
    reading = asyncio.ensure_future(stream.try_next())
    try:
        await asyncio.wait({reading}, timeout=limit_sec)
    finally:
        if not reading.done():
            _abandoned.add(reading)
            reading.add_done_callback(_forget)
            reading.cancel()
    if not reading.done():
        raise TimeoutError
    return reading.result()


def _forget(reading: asyncio.Task[Any]) -> None:
    _abandoned.discard(reading)
    if not reading.cancelled():
        reading.exception()  # Nobody else asks for it.
