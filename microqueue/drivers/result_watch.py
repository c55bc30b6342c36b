"""Result watch: what callers wait on until their tasks are finished.

All callers of a process that wait for tasks of one client and collection share a :class:`Watch`. It
reads one change stream. When that reports that a task of a caller is finished, one query reads it,
and those that finished with it. Where the server has no change streams, one query polls for all
callers.

:class:`ThreadWatch` runs in a thread, for blocking clients and for Motor. :class:`LoopWatch` runs
in a task of the event loop, for PyMongo's async client. Both perform what :class:`Watch` decides.
A watch starts with its first waiter, and ends soon after its last one has left.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

import bson
from pymongo.errors import NetworkTimeout, PyMongoError

from microqueue.drivers import mongomock
from microqueue.drivers.collections import Collections, is_blocking
from microqueue.drivers.driver import (
    CLOSE_SEC,
    DRIVER_ERRORS,
    AsyncDriver,
    Run,
    SyncDriver,
    awaited,
    bounded,
    bounded_async,
)
from microqueue.drivers.error_translation import may_recover
from microqueue.effect_runner import EffectGenerator, perform, perform_async
from microqueue.errors import (
    MicroqueueError,
    OperationFailed,
    ServerUnavailable,
    TaskDeleted,
    WaitTimeout,
)
from microqueue.operations import results
from microqueue.operations.call import Document
from microqueue.operations.results import Checked
from microqueue.settings import QueueSettings
from microqueue.task_ids import id_key

AWAIT_SEC = 0.2
"""How long the server waits for a change before it replies that there is none."""
SILENT_SEC = 5.0
"""How much longer the server may take to reply, before the stream counts as dead."""
OPEN_SEC = 5.0
SOON_SEC = 0.5
REOPEN_SEC = 5.0
"""How long to poll before the next attempt to open a stream: after an outage, and where the
server has none."""
LINGER_SEC = 1.0
"""How long a stream stays open without waiters: one task after the other may be waited for."""
RECHECK_SEC = 30.0
"""How often all tasks are read although the stream reports nothing."""
FIRST_POLL_SEC = 0.05
POLL_SHARE = 0.25
"""Without a stream, the next poll comes after this share of the time that was waited so far."""
TROUBLE_SEC = (0.05, 1.0)
"""The first and the longest wait between attempts while the server is away."""
CHECK_SIZE = 500
ENDS_WITHIN_SEC = AWAIT_SEC + CLOSE_SEC + 1.0
"""How long a watch takes to end, unless the server does not answer."""

logger = logging.getLogger("microqueue.results")


class StreamEffect(Enum):
    """An effect on the change stream."""

    OPEN = auto()
    READ = auto()
    """Reply with the ids of tasks that finished or were deleted; none if there was no change."""
    CLOSE = auto()


@dataclass(frozen=True, slots=True)
class WatchPause:
    """Wait, or until a waiter joins or the last one leaves."""

    seconds: float


Effect: TypeAlias = StreamEffect | Run | WatchPause


class StreamEnded(Exception):
    """The server closed the change stream."""


# Waiters


class Waiter:
    """One caller that waits for one task; the watch calls :meth:`settle`."""

    def __init__(self, task_id: Any, settings: QueueSettings) -> None:
        self.task_id = task_id
        self.key = id_key(task_id)
        self.settings = settings
        self.since = time.monotonic()

    def settle(self, outcome: Document | Exception | None) -> None:
        """End the wait: with the task, an error, or None if the task was deleted."""
        raise NotImplementedError

    def _document(self, outcome: Document | Exception | None) -> Document:
        if outcome is None:
            raise TaskDeleted(task_id=self.task_id)
        if isinstance(outcome, Exception):
            raise OperationFailed(
                f"the wait for task {self.task_id!r} failed: {outcome}"
            ) from outcome
        return outcome


class SyncWaiter(Waiter):
    """A thread that waits."""

    def __init__(self, task_id: Any, settings: QueueSettings) -> None:
        super().__init__(task_id, settings)
        self._settled = threading.Event()
        self._outcome: Document | Exception | None = None

    def settle(self, outcome: Document | Exception | None) -> None:
        """End the wait."""
        self._outcome = outcome
        self._settled.set()

    def wait(self, deadline: Deadline) -> Document:
        """Return the finished task."""
        left_sec = deadline.left_sec()
        if not self._settled.wait(None if left_sec == math.inf else left_sec):
            raise deadline.error(self.task_id)
        return self._document(self._outcome)


class AsyncWaiter(Waiter):
    """A coroutine that waits; the watch may run in a thread."""

    def __init__(self, task_id: Any, settings: QueueSettings) -> None:
        super().__init__(task_id, settings)
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Document | Exception | None] = self._loop.create_future()
        self._cancellations = _cancellations()

    def settle(self, outcome: Document | Exception | None) -> None:
        """End the wait."""
        with suppress(RuntimeError):  # The loop may have ended in between.
            self._loop.call_soon_threadsafe(self._set, outcome)

    def _set(self, outcome: Document | Exception | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    async def wait(self, deadline: Deadline) -> Document:
        """Return the finished task."""
        if _cancellations() > self._cancellations:
            # Before Python 3.12, a call that is done in the moment of the cancellation swallows it.
            raise asyncio.CancelledError
        left_sec = deadline.left_sec()
        await asyncio.wait({self._outcome}, timeout=None if left_sec == math.inf else left_sec)
        if not self._outcome.done():
            raise deadline.error(self.task_id)
        return self._document(self._outcome.result())


def _cancellations() -> int:
    """Return how often the running task was cancelled; it may survive a cancellation."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


class Deadline:
    """When a wait ends: after ``timeout_sec``, or never."""

    def __init__(self, timeout_sec: float | None) -> None:
        self._timeout_sec = timeout_sec
        self._ends = math.inf if timeout_sec is None else time.monotonic() + timeout_sec

    def left_sec(self) -> float:
        """Return how much time is left."""
        return max(self._ends - time.monotonic(), 0.0)

    def check(self, task_id: Any) -> None:
        """Raise :class:`WaitTimeout` if no time is left."""
        if not self.left_sec():
            raise self.error(task_id)

    def error(self, task_id: Any) -> WaitTimeout:
        """Return the error of a wait that is over."""
        return WaitTimeout(task_id=task_id, timeout_sec=self._timeout_sec or 0.0)


@contextmanager
def waiting(
    collections: Collections, settings: QueueSettings, task_id: Any
) -> Iterator[SyncWaiter]:
    """Wait for a task on the watch of its collection, from now on."""
    waiter = SyncWaiter(task_id, settings)
    watch = _join(ThreadWatch, collections, waiter)
    try:
        yield waiter
    finally:
        watch.leave(waiter)


@asynccontextmanager
async def waiting_async(
    collections: Collections, settings: QueueSettings, task_id: Any
) -> AsyncIterator[AsyncWaiter]:
    """Wait for a task on the watch of its collection, from now on."""
    waiter = AsyncWaiter(task_id, settings)
    in_thread = collections.is_motor or is_blocking(collections.tasks)
    watch = _join(ThreadWatch if in_thread else LoopWatch, collections, waiter)
    try:
        yield waiter
    finally:
        watch.leave(waiter)


def end_watch(collections: Collections) -> None:
    """Close the stream that no one waits on any more, before its client is closed."""
    watch = _without_waiters(ThreadWatch.key_of(collections))
    if isinstance(watch, ThreadWatch):
        watch.join(ENDS_WITHIN_SEC)


async def end_watch_async(collections: Collections) -> None:
    """Close the stream that no one waits on any more, before its client is closed."""
    watch = _without_waiters(LoopWatch.key_of(collections))
    if isinstance(watch, LoopWatch):
        await watch.join(ENDS_WITHIN_SEC)


# The watch


class Watch:
    """Decides when to open and read the stream, and when to query; yields effects."""

    def __init__(self, collections: Collections, settings: QueueSettings, key: Hashable) -> None:
        self._collections = collections
        self._settings = settings
        self._key = key
        self._waiters: dict[Hashable, set[Waiter]] = {}
        self._left_at = 0.0
        self._is_open = False
        self._is_over = False
        self._reopen_at = math.inf if collections.in_memory else 0.0
        self._checked_at = -math.inf
        self._failures = 0
        self._cursor: Any = None

    @classmethod
    def key_of(cls, collections: Collections) -> Hashable:
        """Return what the waiters of one watch have in common."""
        client = collections.client.delegate if collections.is_motor else collections.client
        return id(client), collections.database.name, collections.name

    @property
    def is_alive(self) -> bool:
        """Whether its thread or task still runs: not after a fork, or on a closed loop."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the thread or task."""
        raise NotImplementedError

    def wake(self) -> None:
        """End a sleep."""
        raise NotImplementedError

    def add(self, waiter: Waiter) -> None:
        """Add a waiter; called under the lock."""
        self._waiters.setdefault(waiter.key, set()).add(waiter)

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter. Safe to repeat."""
        with _lock:
            several = self._waiters.get(waiter.key, set())
            several.discard(waiter)
            if not several:
                self._waiters.pop(waiter.key, None)
            is_last = not self._waiters
            self._left_at = time.monotonic()
        if is_last:
            self.wake()

    def decide(self) -> EffectGenerator[Effect, None]:
        """Serve the waiters until there are none."""
        while not self._retires():
            try:
                yield from self._step()
            except (*DRIVER_ERRORS, MicroqueueError, StreamEnded) as exc:
                yield from self._recover(exc)

    def _retires(self) -> bool:
        """Return whether this watch ends now; no waiter joins it any more then."""
        with _lock:
            lingers = self._is_open and time.monotonic() - self._left_at < LINGER_SEC
            if self._waiters or (lingers and not self._is_over):
                return False
            self._unregister()
            return True

    def _unregister(self) -> None:
        if _watches.get(self._key) is self:
            del _watches[self._key]

    def end_without_waiters(self) -> bool:
        """End without lingering if there are no waiters, and return whether it does."""
        with _lock:
            self._is_over = not self._waiters
        if self._is_over:
            self.wake()
        return self._is_over

    def abandon(self, error: Exception) -> None:
        """End at once: all waiters raise the error."""
        with _lock:
            self._unregister()
            waiters = [one for several in self._waiters.values() for one in several]
            self._waiters.clear()
        for waiter in waiters:
            waiter.settle(error)

    def _step(self) -> EffectGenerator[Effect, None]:
        """Open a stream if there is none, and read it; or query for all waiters."""
        now = time.monotonic()
        if not self._is_open and now >= self._reopen_at:
            yield from self._open()
            self._checked_at = -math.inf  # The stream starts now: what came before is not in it.
        check_sec = self._checked_at + self._check_period_sec() - time.monotonic()
        if check_sec <= 0:
            self._checked_at = time.monotonic()
            yield from self._check(self._waited_ids())
        elif self._is_open:
            changed = yield StreamEffect.READ
            self._failures = 0
            yield from self._check(self._waited_ids(changed))
        else:
            yield WatchPause(check_sec)

    def _open(self) -> EffectGenerator[Effect, None]:
        try:
            yield StreamEffect.OPEN
            self._is_open = True
        except PyMongoError as exc:
            logger.debug("no change stream; polling: %s", exc)
            pause_sec = SOON_SEC if may_recover(exc) else REOPEN_SEC
            self._reopen_at = time.monotonic() + pause_sec

    def _check(self, ids: list[Any]) -> EffectGenerator[Effect, None]:
        """Read tasks, and settle the waiters of those that are finished or gone."""
        for start in range(0, len(ids), CHECK_SIZE):
            some = ids[start : start + CHECK_SIZE]
            checked: Checked = yield Run(results.check(some, self._check_settings()))
            for document in checked.finished:
                self._settle(document["_id"], document)
            for task_id in checked.missing:
                self._settle(task_id, None)
        if not self._is_open:
            self._failures = 0

    def _settle(self, task_id: Any, document: Document | None) -> None:
        with _lock:
            waiters = list(self._waiters.pop(id_key(task_id), ()))
            self._left_at = time.monotonic()
        for place, waiter in enumerate(waiters):
            # Callers may change what they get.
            waiter.settle(copy.deepcopy(document) if place else document)

    def _recover(self, error: Exception) -> EffectGenerator[Effect, None]:
        """Close the stream, and begin again; changes that it reported may not have been read."""
        logger.debug("waiting for results was interrupted: %s", error)
        if self._is_open:
            self._is_open = False
            yield StreamEffect.CLOSE
            self._reopen_at = time.monotonic()
        self._checked_at = -math.inf
        if isinstance(error, MicroqueueError) and not isinstance(error, ServerUnavailable):
            self.abandon(error)
        with _lock:
            self._is_over = not self._waiters
        if self._failures and not self._is_over:
            first, longest = TROUBLE_SEC
            yield WatchPause(min(first * 2 ** min(self._failures, 10), longest))
        self._failures += 1

    def _waited_ids(self, among: list[Any] | None = None) -> list[Any]:
        """Return the ids that are waited for: all, or those among some."""
        with _lock:
            wanted = self._waiters if among is None else map(id_key, among)
            several = (self._waiters.get(key) for key in dict.fromkeys(wanted))
            return [next(iter(waiters)).task_id for waiters in several if waiters]

    def _check_settings(self) -> QueueSettings:
        """Return the settings of a waiter whose dead letters are kept apart, if there is one."""
        with _lock:
            given = (waiter.settings for several in self._waiters.values() for waiter in several)
            return next((one for one in given if one.separate_dlq), self._settings)

    def _check_period_sec(self) -> float:
        """Return how long after a query the next one for all waiters follows."""
        if self._is_open:
            return RECHECK_SEC
        if self._collections.in_memory:
            return mongomock.POLL_SEC
        with _lock:
            all_since = [one.since for several in self._waiters.values() for one in several]
        waited_sec = time.monotonic() - max(all_since, default=-math.inf)
        longest_sec = self._settings.poll_interval.total_seconds()
        return min(max(waited_sec * POLL_SHARE, FIRST_POLL_SEC), longest_sec)

    def _changed_ids(self, batch: bytes | None) -> list[Any]:
        """Decode what the stream replied."""
        if batch:
            return results.changed_ids(bson.decode_all(batch, self._collections.codec_options))
        if not self._cursor.alive:
            raise StreamEnded("the server closed the change stream")
        return []


_watches: dict[Hashable, Watch] = {}
_lock = threading.Lock()
"""Guards the watches and their waiters; never held during a call to the server."""


def _without_waiters(key: Hashable) -> Watch | None:
    """Return a watch that ends now because it has no waiters."""
    with _lock:
        watch = _watches.get(key)
    return watch if watch is not None and watch.end_without_waiters() else None


def _join(kind: type[Watch], collections: Collections, waiter: Waiter) -> Watch:
    """Add a waiter to the watch of its collection, and start that if there is none."""
    key = kind.key_of(collections)
    with _lock:
        for dead in [one for one, watch in _watches.items() if not watch.is_alive]:
            del _watches[dead]
        watch = _watches.get(key)
        if watch is None:
            watch = kind(collections, waiter.settings, key)
            watch.add(waiter)
            watch.start()
            _watches[key] = watch
        else:
            watch.add(waiter)
    watch.wake()
    return watch


class ThreadWatch(Watch):
    """A watch in a daemon thread, on a blocking client."""

    def __init__(self, collections: Collections, settings: QueueSettings, key: Hashable) -> None:
        super().__init__(
            collections.blocking() if collections.is_motor else collections, settings, key
        )
        self._driver = SyncDriver(self._collections, settings=settings, on_retry=lambda: None)
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="microqueue-results", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, limit_sec: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(limit_sec)

    def wake(self) -> None:
        """End a sleep."""
        self._woken.set()

    def _run(self) -> None:
        try:
            perform(self.decide(), self._perform)
        except Exception as exc:
            logger.exception("waiting for results failed")
            self.abandon(exc)
        finally:
            self._close()

    def _perform(self, effect: Effect) -> Any:
        if isinstance(effect, Run):
            return self._driver.run(effect.operation)
        if isinstance(effect, WatchPause):
            self._woken.wait(effect.seconds)
            return self._woken.clear()
        if effect is StreamEffect.CLOSE:
            return self._close()
        try:
            if effect is StreamEffect.OPEN:
                return self._open_cursor()
            with bounded(AWAIT_SEC + SILENT_SEC):
                batch = self._cursor.try_next()
        except NetworkTimeout:
            self._driver.drop_connections()  # Others may be as dead.
            raise
        return self._changed_ids(batch)

    def _open_cursor(self) -> None:
        with bounded(OPEN_SEC):
            hello = self._collections.database.command("hello")
            self._cursor = self._collections.tasks.aggregate_raw_batches(
                results.settlements(hello), maxAwaitTimeMS=int(AWAIT_SEC * 1000)
            )

    def _close(self) -> None:
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            with suppress(PyMongoError), bounded(CLOSE_SEC):
                cursor.close()


class LoopWatch(Watch):
    """A watch in a task of the event loop, on an async client."""

    def __init__(self, collections: Collections, settings: QueueSettings, key: Hashable) -> None:
        super().__init__(collections, settings, key)
        self._driver = AsyncDriver(self._collections, settings=settings, on_retry=lambda: None)
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def key_of(cls, collections: Collections) -> Hashable:
        """Return what the waiters of one watch have in common."""
        return super().key_of(collections), id(asyncio.get_running_loop())

    @property
    def is_alive(self) -> bool:
        """Whether the task runs."""
        return not self._loop.is_closed() and self._task is not None and not self._task.done()

    def start(self) -> None:
        """Start the task."""
        # Not in the context of the first waiter, which may have a time limit of PyMongo's.
        self._task = self._loop.create_task(
            self._run(), name="microqueue-results", context=contextvars.Context()
        )

    async def join(self, limit_sec: float) -> None:
        """Wait for the end of the task."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=limit_sec)

    def wake(self) -> None:
        """End a sleep."""
        self._woken.set()

    async def _run(self) -> None:
        try:
            await perform_async(self.decide(), self._perform)
        except asyncio.CancelledError:
            self.abandon(OperationFailed("the task 'microqueue-results' was cancelled"))
            await self._close()
            raise
        except Exception as exc:
            if self._loop.is_closed():  # By a program that did not end its tasks before.
                return
            logger.exception("waiting for results failed")
            self.abandon(exc)
        await self._close()

    async def _perform(self, effect: Effect) -> Any:
        reply = await self._perform_once(effect)
        # Before Python 3.12, a call that is done in the moment of the cancellation swallows it.
        if self._task is not None and self._task.cancelling():
            raise asyncio.CancelledError
        return reply

    async def _perform_once(self, effect: Effect) -> Any:
        if isinstance(effect, Run):
            return await self._driver.run(effect.operation)
        if isinstance(effect, WatchPause):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), effect.seconds)
            return self._woken.clear()
        if effect is StreamEffect.CLOSE:
            return await self._close()
        try:
            if effect is StreamEffect.OPEN:
                return await self._open_cursor()
            async with bounded_async(AWAIT_SEC + SILENT_SEC):
                batch = await self._cursor.try_next()
        except NetworkTimeout:
            await self._driver.drop_connections()  # Others may be as dead.
            raise
        return self._changed_ids(batch)

    async def _open_cursor(self) -> None:
        async with bounded_async(OPEN_SEC):
            hello = await self._collections.database.command("hello")
            self._cursor = await awaited(
                self._collections.tasks.aggregate_raw_batches(
                    results.settlements(hello), maxAwaitTimeMS=int(AWAIT_SEC * 1000)
                )
            )

    async def _close(self) -> None:
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            with suppress(PyMongoError):
                async with bounded_async(CLOSE_SEC):
                    await cursor.close()
