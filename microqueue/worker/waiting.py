"""Sleep until there may be work: on the process's change stream, or for the time given."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Self

from microqueue.core import SyncCore
from microqueue.drivers import change_stream, mongomock
from microqueue.drivers.change_stream import Listener
from microqueue.errors import ServerUnavailable
from microqueue.worker.shutdown import ENDING_SEC, SIGNAL_WAIT_SEC
from microqueue.worker.threads import DaemonThread, run_in_thread


class _WorkWaiter:
    """Joins the listener of each collection while it sleeps, on the blocking queues."""

    def __init__(self, lease_queues: Mapping[Any, SyncCore[Any]]) -> None:
        queues = list(lease_queues.values())
        self._in_memory = queues[0].collections.in_memory
        self._opened: list[tuple[Any, Listener]] = []
        self._listeners: dict[Listener, list[str]] = {}
        self._ending: list[threading.Thread] = []
        for queue in queues:
            if not queue.collections.in_memory:
                place = queue.collections.tasks
                found = change_stream.acquire(place)
                self._opened.append((place, found))
                self._listeners.setdefault(found, []).append(queue.name)

    def _close(self) -> None:
        for place, found in self._opened:
            if (thread := change_stream.release(place, found)) is not None:
                self._ending.append(thread)

    def wait_closed(self) -> None:
        """Wait until the stream is closed on the server, unless that does not answer."""
        while self._ending:
            self._ending.pop(0).join(change_stream.ENDS_WITHIN_SEC)

    def _join(self, wake: Callable[[], None]) -> None:
        for found, names in self._listeners.items():
            found.join(wake, names)

    def _part(self, wake: Callable[[], None]) -> None:
        for found in self._listeners:
            found.part(wake)


class WorkWaiter(_WorkWaiter):
    """For threads."""

    def __init__(self, lease_queues: Mapping[Any, SyncCore[Any]]) -> None:
        super().__init__(lease_queues)
        self._news = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._part(self._news.set)
        self._close()

    def sleep(self, seconds: float, *, until: Callable[[], bool]) -> bool:
        """Give whether there was news; return early when ``until`` says so."""
        if self._in_memory:
            time.sleep(min(seconds, mongomock.POLL_SEC))
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


class AsyncWorkWaiter(_WorkWaiter):
    """For coroutines; the listener has a thread of its own."""

    def __init__(self, lease_queues: Mapping[Any, SyncCore[Any]]) -> None:
        super().__init__(lease_queues)
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Leave the listener, beside the loop."""
        closing = DaemonThread(self._leave, name="microqueue-end")
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
            await asyncio.sleep(min(seconds, mongomock.POLL_SEC))
            return True
        await run_in_thread(self._join, self.wake)
        try:
            await asyncio.wait_for(self._news.wait(), seconds)
        except TimeoutError:
            return False  # Still joined: the stream is read on while nothing happens.
        self._part(self.wake)
        self._news.clear()
        return True


FIRST_PAUSE_SEC = 0.5
LONGEST_PAUSE_SEC = 5.0
JITTER = (0.8, 1.0)  # So that many workers do not ask at once.

logger = logging.getLogger("microqueue.worker")
_random = random.Random()  # noqa: S311 (it only spreads attempts)


def pauses() -> Iterator[float]:
    """Yield how long to wait after each attempt: twice as long each time, up to a limit."""
    pause_sec = FIRST_PAUSE_SEC
    while True:
        yield pause_sec * _random.uniform(*JITTER)
        pause_sec = min(2 * pause_sec, LONGEST_PAUSE_SEC)


def await_server(
    attempt: Callable[[], object],
    *,
    who: str,
    stopping: Callable[[], bool],
    abandon: Callable[..., object] | None = None,
) -> bool:
    """Make an attempt again and again until MongoDB answers.

    Args:
        attempt: What needs the server. Each try runs in its own thread, because a server that
            does not answer must not delay a stop.
        who: What waits, for the log.
        stopping: Whether to give up; asked several times a second.
        abandon: Called if this is given up, when the attempt under way has ended, or some seconds
            later, with ``succeeded``: whether that attempt did after all.

    Returns:
        Whether it succeeded; not if it was given up.

    Raises:
        MicroqueueError: The attempt failed for another reason than a missing server.
    """
    waited = False
    for pause_sec in pauses():
        trial = DaemonThread(attempt, name="microqueue-start")
        trial.start()
        while trial.is_alive() and not stopping():
            trial.join(SIGNAL_WAIT_SEC)
        if not trial.is_alive() and trial.error is None:
            if waited:
                logger.info("MongoDB is there: %s starts", who)
            return True
        if isinstance(trial.error, ServerUnavailable) and not stopping():
            logger.warning(
                "%s waits for MongoDB; next attempt in %.1f s: %s",
                who,
                pause_sec,
                trial.error,
                extra={"waits_for": "mongodb"},
            )
            waited = True
            _sleep(pause_sec, stopping)
        elif trial.error is not None and not isinstance(trial.error, ServerUnavailable):
            raise trial.error
        if stopping():
            _abandon(trial, abandon)
            return False
    raise AssertionError  # There is always another pause.


def _sleep(seconds: float, stopping: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while not stopping() and (rest_sec := until - time.monotonic()) > 0:
        time.sleep(min(rest_sec, SIGNAL_WAIT_SEC))


def _abandon(trial: DaemonThread, abandon: Callable[..., object] | None) -> None:
    def end() -> None:
        trial.join(ENDING_SEC)
        if abandon is not None:
            abandon(succeeded=not trial.is_alive() and trial.error is None)

    DaemonThread(end, name="microqueue-end").start()
