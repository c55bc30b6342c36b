"""Change streams: wake workers and waiting pops when there may be work.

A :class:`Listener` reads one stream per process and collection, for all that wait there. Its
thread reads only while someone is subscribed: a busy worker needs no news, and a stream that is
not read falls behind. So a stream that was left for a while is opened again.

A stream has no deadline, because the next change may never come. If its connection dies silently,
only this thread waits for it. The next subscriber notices the silence, abandons the stream, and
starts another thread.

:class:`SyncWakeup` and :class:`AsyncWakeup` are what a pop with ``wait`` sleeps on. Without change
streams they poll. PyMongo's async client reads its stream on the event loop, without a listener.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from pymongo.errors import PyMongoError

from microqueue.drivers import driver, mongomock
from microqueue.drivers.collections import Collections
from microqueue.drivers.driver import CLOSE_SEC, awaited, bounded
from microqueue.operations import poll

AWAIT_SEC = 1.0
LEFT_TOO_LONG_SEC = 1.0
REOPEN_SEC = 5.0
"""How long to poll before the next attempt to open a stream: a server may have none."""
YIELD_SEC = 0.05
OPEN_SEC = 5.0
LATE_SEC = 1.0
SILENT_SEC = 5.0
"""How much longer than asked the server may take to reply, before a stream counts as dead."""
ENDS_WITHIN_SEC = AWAIT_SEC + CLOSE_SEC + 1.0
"""How long a released thread takes to end, unless the server does not answer."""

STREAM_WAIT_SEC = 0.2
CHECK_SEC = 0.5
"""How often to check whether the stream is still live."""

logger = logging.getLogger("microqueue.wakeup")
_random = random.Random()  # noqa: S311 (it only spreads pollers)
_abandoned: set[asyncio.Future[Any]] = set()


# Listeners


class Listener:
    """Wakes its subscribers when there may be work in any of their queues."""

    def __init__(self, collection: Any, await_sec: float = AWAIT_SEC) -> None:
        self._collection = collection
        self._await_sec = await_sec
        self._changed = threading.Condition()  # Never held during a call to the server.
        self._subscribers: dict[Callable[[], None], frozenset[str]] = {}
        self._names: frozenset[str] = frozenset()
        self._stream: Any = None
        self._busy_since: float | None = None
        self._read_at = 0.0
        self._tried_at = float("-inf")
        self._users = 0
        self._thread: threading.Thread | None = None
        self.reports = 0
        """How often there was something to wake subscribers for. Read it before you check for work:
        :meth:`subscribe` wakes you at once if it has grown since, because you may have missed that.
        """

    def subscribe(self, wake: Callable[[], None], queues: Sequence[str], since: int) -> None:
        """Call ``wake`` whenever something changes, or at once if something has changed since.

        It is also called after a stream was opened: what came before is not in it.

        Args:
            wake: Called from the thread of the listener, or from this one; it must not block.
            queues: The queues to watch.
            since: The value of :attr:`reports` before the last check for work.
        """
        with self._changed:
            self._subscribers[wake] = frozenset(queues)
            missed = since != self.reports
            if self._is_silent():
                logger.debug("change stream is silent; opening another")
                self._stream = None
                self._tried_at = float("-inf")
                self._start()
            self._changed.notify_all()
        if missed:
            wake()

    @property
    def is_live(self) -> bool:
        """Whether there is a stream and the server answers."""
        since = self._busy_since
        late = since is not None and time.monotonic() - since > self._await_sec + LATE_SEC
        return self._stream is not None and not late

    def unsubscribe(self, wake: Callable[[], None]) -> None:
        """Stop calling ``wake``."""
        with self._changed:
            self._subscribers.pop(wake, None)
            self._changed.notify_all()

    def acquire(self) -> None:
        """Start the thread for the first user."""
        with self._changed:
            if self._thread is None:
                self._start()
            self._users += 1

    def release(self) -> threading.Thread | None:
        """Stop the thread with the last user, and return it, so that it can be joined."""
        with self._changed:
            self._users -= 1
            if self._users:
                return None
            thread, self._thread, self._stream = self._thread, None, None
            self._changed.notify_all()
            return thread

    def _start(self) -> None:
        """Start a thread, which waits for the lock; a previous one ends when it can."""
        former, busy_since = self._thread, self._busy_since
        thread = threading.Thread(target=self._run, name="microqueue-listener", daemon=True)
        self._thread, self._busy_since = thread, None
        try:
            thread.start()
        except BaseException:
            self._thread, self._busy_since = former, busy_since
            raise

    def _is_silent(self) -> bool:
        """Return whether the server has not answered for too long."""
        since = self._busy_since
        return since is not None and time.monotonic() - since > self._await_sec + SILENT_SEC

    def _is_current(self) -> bool:
        """Return whether the stream has the queues of all subscribers, and is not far behind."""
        wanted = frozenset().union(*self._subscribers.values())
        return wanted <= self._names and time.monotonic() - self._read_at <= LEFT_TOO_LONG_SEC

    def _run(self) -> None:
        mine = threading.current_thread()
        stream: Any = None
        while True:
            with self._changed:
                if self._thread is mine:
                    self._busy_since = None
                self._changed.wait_for(lambda: self._thread is not mine or self._subscribers)
                if self._thread is not mine:
                    break
                current = stream is not None and stream is self._stream and self._is_current()
                if not current and time.monotonic() - self._tried_at < REOPEN_SEC and not stream:
                    # There was none a moment ago; the subscribers poll.
                    wait_sec = self._tried_at + REOPEN_SEC - time.monotonic()
                    self._changed.wait_for(lambda: self._thread is not mine, wait_sec)
                    continue
                self._names = self._names.union(*self._subscribers.values())
                names = sorted(self._names)
                self._busy_since = time.monotonic()
            if current:
                stream = self._read(stream)
            else:
                _close(stream)
                stream = self._open(names)
        _close(stream)

    def _open(self, names: Sequence[str]) -> Any:
        """Open a stream for these queues, and wake all subscribers: it starts now."""
        stream: Any = None
        try:
            with bounded(OPEN_SEC):
                stream = self._collection.watch(
                    poll.new_work(names), max_await_time_ms=int(self._await_sec * 1000)
                )
        except PyMongoError as exc:
            logger.debug("no change stream; polling: %s", exc)
        with self._changed:
            if self._thread is not threading.current_thread():
                return stream
            self._stream = stream
            self._tried_at = self._read_at = time.monotonic()
        if stream is not None:
            self._report()
        return stream

    def _read(self, stream: Any) -> Any:
        """Wait for the next change, and wake all subscribers; return the stream if it is open."""
        try:
            change = stream.try_next()
        except PyMongoError as exc:
            logger.debug("change stream ended; polling: %s", exc)
            with self._changed:
                if self._stream is stream:
                    self._stream = None
            return None
        self._read_at = time.monotonic()
        if change is not None:
            self._report()
            with self._changed:
                # Subscribers that were woken leave. Waiting for that lets them run first.
                self._changed.wait_for(lambda: not self._subscribers, YIELD_SEC)
        return stream

    def _report(self) -> None:
        """Wake all subscribers. One that checks for work just now is woken when it subscribes."""
        with self._changed:
            self.reports += 1
            subscribers = list(self._subscribers)
        for wake in subscribers:
            wake()


def _close(stream: Any) -> None:
    if stream is None:
        return
    try:
        with bounded(CLOSE_SEC):
            stream.close()
    except PyMongoError as exc:
        logger.debug("could not close the change stream: %s", exc)


_listeners: dict[Any, Listener] = {}
_listeners_lock = threading.Lock()


def acquire_listener(collection: Any, await_sec: float = AWAIT_SEC) -> Listener:
    """Return the listener of this process for a collection of a blocking client."""
    with _listeners_lock:
        listener = _listeners.get(_key(collection)) or Listener(collection, await_sec)
        listener.acquire()
        _listeners[_key(collection)] = listener
        return listener


def release_listener(collection: Any, listener: Listener) -> threading.Thread | None:
    """Release a listener; return its thread if this was the last user and it ends now."""
    with _listeners_lock:
        thread = listener.release()
        if thread is not None:
            _listeners.pop(_key(collection), None)
        return thread


def _key(collection: Any) -> Any:
    return id(collection.database.client), collection.full_name


# Wakeups


class _Wakeup:
    """What both kinds share: the listener of a blocking client, and the pause between polls."""

    def __init__(
        self, collections: Collections, queues: Sequence[str], *, poll_interval_sec: float
    ) -> None:
        self._collections = collections
        self._queues = list(queues)
        self._poll_interval_sec = mongomock.POLL_SEC if collections.in_memory else poll_interval_sec
        self._listener: Listener | None = None
        self.ending: threading.Thread | None = None
        """The thread that ends with this user. It still has to close its stream."""
        self._reports = 0  # Those of the listener before the caller's last check for work.

    @property
    def _blocking(self) -> Any:
        """The collection of pymongo's blocking client; Motor wraps one."""
        tasks = self._collections.tasks
        return tasks.delegate if self._collections.is_motor else tasks

    def _acquire(self) -> None:
        self._listener = acquire_listener(self._blocking, STREAM_WAIT_SEC)
        self._reports = self._listener.reports

    def _release(self, wake: Callable[[], None]) -> None:
        """Release the listener. Its thread ends with its last user."""
        if self._listener is not None:
            self._listener.unsubscribe(wake)
            self.ending = release_listener(self._blocking, self._listener)

    def _poll_wait_sec(self, deadline: float) -> float:
        remaining = max(deadline - time.monotonic(), 0)
        return min(remaining, self._poll_interval_sec * _random.uniform(0.5, 1.0))

    def _wait_sec(self, deadline: float, poll_at: float) -> float:
        """Return how long to wait for news before the next check; 0 if the time is over."""
        is_live = self._listener is not None and self._listener.is_live
        until = deadline if is_live else min(deadline, poll_at)
        return min(max(until - time.monotonic(), 0.0), CHECK_SEC)


class SyncWakeup(_Wakeup):
    """For threads."""

    def __enter__(self) -> Self:
        self._news = threading.Event()
        if not self._collections.in_memory:
            self._acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._release(self._news.set)

    def wake(self) -> None:
        """End the sleep, from any thread."""
        self._news.set()

    def sleep(self, limit_sec: float) -> None:
        """Return when something changed, or after ``limit_sec``.

        Without a stream it returns earlier, after the poll interval.
        """
        deadline = time.monotonic() + limit_sec
        poll_at = time.monotonic() + self._poll_wait_sec(deadline)
        if self._listener is not None:
            self._listener.subscribe(self._news.set, self._queues, self._reports)
        while (wait_sec := self._wait_sec(deadline, poll_at)) and not self._news.wait(wait_sec):
            pass
        if self._listener is not None:
            self._reports = self._listener.reports
            if self._news.is_set():
                # The thread reads only while someone is subscribed, to leave connections to others.
                self._listener.unsubscribe(self._news.set)
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

    async def _sleep_on_listener(self, listener: Listener, deadline: float) -> None:
        poll_at = time.monotonic() + self._poll_wait_sec(deadline)
        listener.subscribe(self._wake, self._queues, self._reports)
        while wait_sec := self._wait_sec(deadline, poll_at):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), wait_sec)
                listener.unsubscribe(self._wake)
                break
        self._reports = listener.reports
        self._news.clear()

    async def _sleep_on_stream(self, deadline: float) -> None:
        if await self._open():
            return  # What came between the caller's last check and this stream is not in it.
        # A wait shorter than the server's own would come back late.
        while self._stream is not None and deadline - time.monotonic() >= STREAM_WAIT_SEC:
            owed_sec = STREAM_WAIT_SEC + min(SILENT_SEC, deadline - time.monotonic())
            try:
                change = await _next_change(self._stream, owed_sec)
            except TimeoutError:
                logger.debug("change stream is silent; polling")
                self._stream = None  # The task that reads it also closes it.
            except PyMongoError as exc:
                await self._gone(exc)
            else:
                if change is not None:
                    return
        await asyncio.sleep(self._poll_wait_sec(deadline))

    async def _open(self) -> bool:
        """Open a stream at first, and again some time after one ended; return whether it did."""
        lately = self._tried_at is not None and time.monotonic() - self._tried_at < REOPEN_SEC
        if self._stream is not None or self._collections.in_memory or lately:
            return False
        self._tried_at = time.monotonic()
        try:
            async with driver.bounded_async(OPEN_SEC):
                hello = await awaited(self._collections.database.command("hello"))
                self._stream = await awaited(
                    self._collections.tasks.watch(
                        poll.new_work(self._queues),
                        max_await_time_ms=int(STREAM_WAIT_SEC * 1000),
                        start_at_operation_time=poll.from_now_on(hello),
                    )
                )
        except PyMongoError as exc:
            await self._gone(exc)
        return self._stream is not None

    async def _gone(self, exc: Exception) -> None:
        logger.debug("no change stream; polling: %s", exc)
        await self._close()

    async def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(PyMongoError):
                async with driver.bounded_async(CLOSE_SEC):
                    await stream.close()


async def _next_change(stream: Any, limit_sec: float) -> Any:
    """Return the next change, or None; raise :class:`TimeoutError` if the server is silent.

    It is read by its own task. When that is cancelled, PyMongo first closes the stream on the
    server, which may take as long; that task is abandoned.
    """
    reading = asyncio.ensure_future(stream.try_next())
    try:
        await asyncio.wait({reading}, timeout=limit_sec)
    finally:
        if not reading.done():
            abandon(reading)
            reading.cancel()
    if not reading.done():
        raise TimeoutError
    return reading.result()


def abandon(reading: asyncio.Future[Any]) -> None:
    """Leave a read to itself: keep it until it ends, and ignore how it ends."""
    _abandoned.add(reading)
    reading.add_done_callback(_forget)


def _forget(reading: asyncio.Future[Any]) -> None:
    _abandoned.discard(reading)
    if not reading.cancelled():
        reading.exception()  # Retrieved, so that asyncio does not log it.
