"""Read a topic: where a subscription is, and how it resumes after a cursor ended.

:class:`Tail` decides and performs no I/O: it yields effects. :class:`SyncReader` performs them with
a blocking cursor, :class:`LoopReader` with PyMongo's async client. A topic of Motor is read by a
blocking reader in a thread: Motor would take one of its few threads for as long as the topic is
read.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, TypeAlias

import bson
from pymongo import CursorType
from pymongo.errors import CursorNotFound, ExecutionTimeout, OperationFailure, PyMongoError

from microqueue.drivers.collections import Collections
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
from microqueue.drivers.error_translation import may_recover, translate
from microqueue.drivers.mongomock import POLL_SEC
from microqueue.effect_runner import EffectGenerator, perform, perform_async
from microqueue.errors import ServerUnavailable, TopicConflict
from microqueue.message import Gap, Message
from microqueue.operations import topics
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.operations.mongo_errors import BAD_VALUE

AWAIT_SEC = 1.0
"""How long the server waits for a message before it replies that there is none."""
SHORTEST_AWAIT_SEC = 0.001
SILENT_SEC = 5.0
"""How much longer than asked the server may take to reply, before a connection counts as dead."""
EMPTY_SEC = 0.1
"""How long to wait where a cursor ends at once, because the collection does not exist."""
PAUSE_SEC = (0.05, 1.0)
"""The first and the longest wait between attempts while the server is away."""
BATCH_SIZE = 1000
CURSOR_LOST = frozenset({43, 136, 175, 237, 11601})
"""Cursor not found, position lost in a capped collection, plan, cursor or operation killed."""

logger = logging.getLogger("microqueue.topic")


class CursorEffect(Enum):
    """An effect on the cursor."""

    OPEN = auto()
    FETCH = auto()
    """Reply with the next documents, as BSON or decoded: empty if there is no new one yet.

    ``None`` if the cursor has ended.
    """
    CLOSE = auto()


@dataclass(frozen=True, slots=True)
class ReadPause:
    """Wait, unless the subscription is closed."""

    seconds: float


Effect: TypeAlias = CursorEffect | Run | ReadPause


class Batch(NamedTuple):
    """The next messages of a topic, and the gap before them, if there is one."""

    gap: Gap | None
    messages: list[Message]


NOTHING = Batch(None, [])


class Closed(Exception):
    """The subscription was closed."""


class PositionLost(Exception):
    """The cursor in memory no longer finds where it was."""


class Tail:
    """Decides how a subscription reads: where a new cursor starts, and what it delivers.

    A cursor on a capped collection starts with the oldest message. So a new one skips messages up
    to the last position. If that is no longer there, messages were lost, and the cursor delivers
    all that are left.
    """

    def __init__(self, topic: str, collections: Collections, after: Any) -> None:
        self._topic = topic
        self._collections = collections
        self._after = after
        self._is_open = False
        self._is_skipping = False
        self._has_gap = False
        self._wait_sec = 0.0

    def read(self, deadline: float | None) -> EffectGenerator[Effect, Batch]:
        """Return the next messages that a majority has; none if the deadline passes first."""
        while True:
            try:
                batch = yield from self._read()
            except (*DRIVER_ERRORS, ServerUnavailable, PositionLost) as exc:
                yield from self._close()
                self._check_resumable(exc)
                yield ReadPause(self._next_pause(exc))
                batch = NOTHING
            if batch.messages or (deadline is not None and time.monotonic() >= deadline):
                return batch

    def _read(self) -> EffectGenerator[Effect, Batch]:
        if not self._is_open:
            yield from self._open()
        fetched = yield CursorEffect.FETCH
        if self._wait_sec:
            logger.info("topic %r: resumed", self._topic)
            self._wait_sec = 0.0
        if not fetched:
            if self._is_skipping or fetched is None:
                # The position was replaced while it was looked for, or there is no collection.
                yield from self._close()
                yield ReadPause(0.0 if self._is_skipping else EMPTY_SEC)
            return NOTHING
        documents = self._unread(fetched)
        if not documents:
            return NOTHING
        last = documents[-1]["_id"]
        if not (yield Run(topics.holds(last))):
            # They were rolled back, or so many came that they were replaced already.
            yield from self._close()
            return NOTHING
        messages = topics.to_messages(documents)
        gap: Gap | None = None
        if self._has_gap and messages:
            after = topics.position_of(self._after)
            gap = Gap(topic=self._topic, after=after, first=messages[0].position)
            self._has_gap = False
        if not self._has_gap:
            self._after = last
        return Batch(gap, messages)

    def _open(self) -> EffectGenerator[Effect, None]:
        self._is_skipping = False
        if self._after is not None:
            self._is_skipping = yield Run(topics.holds(self._after))
            self._has_gap = not self._is_skipping
        yield CursorEffect.OPEN
        self._is_open = True

    def _close(self) -> EffectGenerator[Effect, None]:
        self._is_open = False
        yield CursorEffect.CLOSE

    def _unread(self, fetched: bytes | list[Document]) -> list[Document]:
        """Return the documents behind the last position."""
        if isinstance(fetched, bytes):
            if self._is_skipping and bson.encode({"_id": self._after})[4:-1] not in fetched:
                return []  # Most of what is skipped need not be decoded.
            documents = bson.decode_all(fetched, self._collections.codec_options)
        else:
            documents = fetched
        if not self._is_skipping:
            return documents
        for place, document in enumerate(documents):
            if document["_id"] == self._after:
                self._is_skipping = False
                return documents[place + 1 :]
        return []

    def _check_resumable(self, error: Exception) -> None:
        """Raise an error that another cursor would not mend."""
        if isinstance(error, OperationFailure) and error.code == BAD_VALUE:
            collection = self._collections.topic.name
            raise TopicConflict(topic=self._topic, collection=collection) from error
        lost = isinstance(error, OperationFailure) and error.code in CURSOR_LOST
        ended = isinstance(error, CursorNotFound | ExecutionTimeout | ServerUnavailable)
        if not (lost or ended or isinstance(error, PositionLost) or may_recover(error)):
            raise translate(error) from error

    def _next_pause(self, error: Exception) -> float:
        """Return how long to wait: not at all for a cursor that ended, longer for an outage."""
        lost = isinstance(error, OperationFailure) and error.code in CURSOR_LOST
        if lost or isinstance(error, PositionLost):
            return 0.0
        first, longest = PAUSE_SEC
        if not self._wait_sec:
            logger.warning(
                "topic %r: interrupted, resuming: %s",
                self._topic,
                translate(error) if not isinstance(error, ServerUnavailable) else error,
            )
        self._wait_sec = min(max(self._wait_sec * 2, first), longest)
        return self._wait_sec


def await_sec(timeout_sec: float | None) -> float:
    """Return how long to ask the server to wait, so that reads end with the timeout."""
    if timeout_sec is None or timeout_sec == AWAIT_SEC:
        return AWAIT_SEC
    rounds = max(-(-timeout_sec // AWAIT_SEC), 1)
    return max(timeout_sec / rounds, SHORTEST_AWAIT_SEC)


class MemoryCursor:
    """Stands in for a tailable cursor on mongomock, which has none: it polls."""

    def __init__(self) -> None:
        self._last: Any = None

    def unread(self, documents: list[Document]) -> list[Document]:
        """Return the documents behind those that it has returned before."""
        if self._last is not None:
            places = [n for n, one in enumerate(documents) if one["_id"] == self._last]
            if not places:
                raise PositionLost
            documents = documents[places[0] + 1 :]
        if documents:
            self._last = documents[-1]["_id"]
        return documents


def _all_in_memory() -> Operation[list[Document]]:
    found: list[Document] = yield Call("find", {}, target=Target.TOPIC)
    return found


def _tail(collection: Any, limit_sec: float) -> Any:
    cursor = collection.find_raw_batches(
        {}, cursor_type=CursorType.TAILABLE_AWAIT, batch_size=BATCH_SIZE
    )
    return cursor.max_await_time_ms(max(int(limit_sec * 1000), 1))


class SyncReader:
    """Reads a topic in the thread of the caller; another thread may close it."""

    def __init__(
        self, driver: SyncDriver, collections: Collections, tail: Tail, timeout_sec: float | None
    ) -> None:
        self._driver = driver
        self._collections = collections
        self._tail = tail
        self._timeout_sec = timeout_sec
        self._await_sec = await_sec(timeout_sec)
        self._closed = threading.Event()
        self._reading = threading.Lock()
        self._cursor: Any = None

    def read(self) -> Batch:
        """Return the next messages; none after the timeout, or if it was closed."""
        deadline = None if self._timeout_sec is None else time.monotonic() + self._timeout_sec
        with self._reading:
            try:
                return perform(self._tail.read(deadline), self._perform)
            except Closed:
                return NOTHING
            finally:
                if self._closed.is_set():
                    self._kill()

    def close(self) -> None:
        """Stop reading. A read in another thread ends with the reply it waits for.

        That thread closes the cursor: pymongo's cursors are not safe to close while they are read.
        """
        self._closed.set()
        if self._reading.acquire(blocking=False):
            self._kill()
            self._reading.release()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed.is_set()

    def _perform(self, effect: Effect) -> Any:
        if self._closed.is_set():
            raise Closed
        try:
            if isinstance(effect, Run):
                return self._driver.run(effect.operation)
            if isinstance(effect, ReadPause):
                return self._closed.wait(effect.seconds) if effect.seconds else None
            return self._on_cursor(effect)
        except DRIVER_ERRORS as exc:
            if self._closed.is_set():
                raise Closed from exc
            raise

    def _on_cursor(self, effect: CursorEffect) -> Any:
        if effect is CursorEffect.CLOSE:
            return self._kill()
        if effect is CursorEffect.OPEN:
            in_memory = self._collections.in_memory
            topic = self._collections.topic
            self._cursor = MemoryCursor() if in_memory else _tail(topic, self._await_sec)
            return None
        cursor = self._cursor
        if cursor is None:
            return None
        if isinstance(cursor, MemoryCursor):
            found = cursor.unread(self._driver.run(_all_in_memory()))
            if not found:
                self._closed.wait(POLL_SEC)
            return found
        with bounded(self._await_sec + SILENT_SEC):
            fetched = next(cursor, b"")
        return fetched or (b"" if cursor.alive else None)

    def _kill(self) -> None:
        cursor, self._cursor = self._cursor, None
        if cursor is not None and not isinstance(cursor, MemoryCursor):
            with suppress(PyMongoError), bounded(CLOSE_SEC):
                cursor.close()


class AsyncReader(Protocol):
    """Reads a topic for asyncio: on the event loop, or in a thread."""

    async def read(self) -> Batch:
        """Return the next messages; none after the timeout, or if it was closed."""

    async def close(self) -> None:
        """Stop reading."""

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""


class ThreadReader:
    """Reads a topic of Motor: with a blocking reader, in its own thread."""

    def __init__(self, reader: SyncReader) -> None:
        self._reader = reader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="microqueue-topic")

    async def read(self) -> Batch:
        """Return the next messages; none after the timeout, or if it was closed."""
        if self._reader.is_closed:
            return NOTHING
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._reader.read)

    async def close(self) -> None:
        """Stop reading, and end the thread."""
        if not self._reader.is_closed:
            await asyncio.to_thread(self._reader.close)
            self._thread.shutdown(wait=False)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._reader.is_closed


class LoopReader:
    """Reads a topic on the event loop."""

    def __init__(
        self, driver: AsyncDriver, collections: Collections, tail: Tail, timeout_sec: float | None
    ) -> None:
        self._driver = driver
        self._collections = collections
        self._tail = tail
        self._timeout_sec = timeout_sec
        self._await_sec = await_sec(timeout_sec)
        self._closed = asyncio.Event()
        self._cursor: Any = None

    async def read(self) -> Batch:
        """Return the next messages; none after the timeout, or if it was closed."""
        deadline = None if self._timeout_sec is None else time.monotonic() + self._timeout_sec
        try:
            return await perform_async(self._tail.read(deadline), self._perform)
        except Closed:
            return NOTHING
        finally:
            if self._closed.is_set():
                await self._kill()

    async def close(self) -> None:
        """Stop reading. A read in another task ends with the reply it waits for."""
        self._closed.set()
        await self._kill()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed.is_set()

    async def _perform(self, effect: Effect) -> Any:
        if self._closed.is_set():
            raise Closed
        try:
            if isinstance(effect, Run):
                return await self._driver.run(effect.operation)
            if isinstance(effect, ReadPause):
                return await self._pause(effect.seconds)
            return await self._on_cursor(effect)
        except DRIVER_ERRORS as exc:
            if self._closed.is_set():
                raise Closed from exc
            raise

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)

    async def _on_cursor(self, effect: CursorEffect) -> Any:
        if effect is CursorEffect.CLOSE:
            return await self._kill()
        if effect is CursorEffect.OPEN:
            in_memory = self._collections.in_memory
            topic = self._collections.topic
            self._cursor = MemoryCursor() if in_memory else _tail(topic, self._await_sec)
            return None
        cursor = self._cursor
        if cursor is None:
            return None
        if isinstance(cursor, MemoryCursor):
            found = cursor.unread(await self._driver.run(_all_in_memory()))
            if not found:
                await self._pause(POLL_SEC)
            return found
        async with bounded_async(self._await_sec + SILENT_SEC):
            try:
                fetched = await cursor.next()
            except StopAsyncIteration:
                fetched = b""
        return fetched or (b"" if cursor.alive else None)

    async def _kill(self) -> None:
        cursor, self._cursor = self._cursor, None
        if cursor is not None and not isinstance(cursor, MemoryCursor):
            with suppress(PyMongoError):
                async with bounded_async(CLOSE_SEC):
                    await awaited(cursor.close())
