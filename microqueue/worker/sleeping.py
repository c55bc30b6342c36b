"""Sleep until there may be work: on the process's change stream, or for the time given."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

from microqueue.drivers import listener, memory
from microqueue.drivers.listener import Listener
from microqueue.queue import Queue
from microqueue.worker.background import Background
from microqueue.worker.offload import run_in_thread
from microqueue.worker.stopping import SIGNAL_WAIT_SEC


class _Sleeper:
    """Joins the listener of each collection while it sleeps, on the blocking queues."""

    def __init__(self, twins: Mapping[Any, Queue[Any]]) -> None:
        queues = list(twins.values())
        self._in_memory = queues[0].collections.in_memory
        self._opened: list[tuple[Any, Listener]] = []
        self._listeners: dict[Listener, list[str]] = {}
        self._ending: list[threading.Thread] = []
        for queue in queues:
            if not queue.collections.in_memory:
                place = queue.collections.tasks
                found = listener.acquire(place)
                self._opened.append((place, found))
                self._listeners.setdefault(found, []).append(queue.name)

    def _close(self) -> None:
        for place, found in self._opened:
            if (thread := listener.release(place, found)) is not None:
                self._ending.append(thread)

    def wait_closed(self) -> None:
        """Wait until the stream is closed on the server, unless that does not answer."""
        while self._ending:
            self._ending.pop(0).join(listener.ENDS_WITHIN_SEC)

    def _join(self, wake: Callable[[], None]) -> None:
        for found, names in self._listeners.items():
            found.join(wake, names)

    def _part(self, wake: Callable[[], None]) -> None:
        for found in self._listeners:
            found.part(wake)


class SyncSleeper(_Sleeper):
    """For threads."""

    def __init__(self, twins: Mapping[Any, Queue[Any]]) -> None:
        super().__init__(twins)
        self._news = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._part(self._news.set)
        self._close()

    def sleep(self, seconds: float, *, until: Callable[[], bool]) -> bool:
        """Give whether there was news; return early when ``until`` says so."""
        if self._in_memory:
            time.sleep(min(seconds, memory.POLL_SEC))
            return True
        self._join(self._news.set)
        deadline = time.monotonic() + seconds
        while not until():
            remaining = deadline - time.monotonic()
            if self._news.wait(max(min(remaining, SIGNAL_WAIT_SEC), 0.0)):
                break
            if remaining <= 0:
                return False  # Still joined: the stream is read on while nothing happens.
        self._part(self._news.set)
        news = self._news.is_set()
        self._news.clear()
        return news


class AsyncSleeper(_Sleeper):
    """For coroutines; the listener has a thread of its own."""

    def __init__(self, twins: Mapping[Any, Queue[Any]]) -> None:
        super().__init__(twins)
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Leave the listener, beside the loop."""
        closing = Background(self._leave, name="microqueue-end")
        closing.start()
        self._ending.append(closing)

    def _leave(self) -> None:
        self._part(self.wake)
        self._close()

    def wake(self) -> None:
        """End a sleep, from any thread."""
        with suppress(RuntimeError):  # The loop may have ended in between.
            self._loop.call_soon_threadsafe(self._news.set)

    async def sleep(self, seconds: float) -> bool:
        """Give whether there was news."""
        if self._in_memory:
            await asyncio.sleep(min(seconds, memory.POLL_SEC))
            return True
        await run_in_thread(self._join, self.wake)
        try:
            await asyncio.wait_for(self._news.wait(), seconds)
        except TimeoutError:
            return False  # Still joined: the stream is read on while nothing happens.
        self._part(self.wake)
        self._news.clear()
        return True
