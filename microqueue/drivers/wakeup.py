"""Sleep until there may be work: on a change stream where there is one, else by polling."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any, Self

from pymongo.errors import PyMongoError

from microqueue.drivers import memory
from microqueue.drivers.asynchronous import settled
from microqueue.drivers.collections import Collections
from microqueue.drivers.listener import REOPEN_SEC, logger
from microqueue.operations import watch

STREAM_WAIT_SEC = 0.2

_random = random.Random()  # noqa: S311 (it only spreads pollers)


class _Wakeup:
    """What both kinds share: the stream's options, and how long to sleep without one."""

    def __init__(
        self, collections: Collections, queues: Sequence[str], *, poll_interval_sec: float
    ) -> None:
        self._collections = collections
        self._pipeline = watch.new_work(queues)
        self._poll_interval_sec = memory.POLL_SEC if collections.in_memory else poll_interval_sec
        self._stream: Any = None
        self._tried_at: float | None = None

    def _watch(self, **options: Any) -> Any:
        return self._collections.tasks.watch(
            self._pipeline, max_await_time_ms=int(STREAM_WAIT_SEC * 1000), **options
        )

    def _may_open(self) -> bool:
        """Tell whether to try for a stream: at first, and again some time after one ended."""
        if self._stream is not None or self._collections.in_memory:
            return False
        return self._tried_at is None or time.monotonic() - self._tried_at >= REOPEN_SEC

    def _gone(self, exc: PyMongoError) -> None:
        logger.debug("no change stream, polling instead: %s", exc)
        self._stream = None

    def _pause_sec(self, deadline: float) -> float:
        remaining = max(deadline - time.monotonic(), 0)
        return min(remaining, self._poll_interval_sec * _random.uniform(0.5, 1.0))


class SyncWakeup(_Wakeup):
    """For threads."""

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def _open(self) -> None:
        if self._may_open():
            self._tried_at = time.monotonic()
            try:
                self._stream = self._watch()
            except PyMongoError as exc:
                self._gone(exc)

    def sleep(self, limit_sec: float) -> None:
        """Return when something changed, or after ``limit_sec``.

        Without a stream it returns earlier, after the poll interval.
        """
        self._open()
        deadline = time.monotonic() + limit_sec
        # A wait shorter than the server's own would come back late.
        while self._stream is not None and deadline - time.monotonic() >= STREAM_WAIT_SEC:
            try:
                if self._stream.try_next() is not None:
                    return
            except PyMongoError as exc:
                self._gone(exc)
        time.sleep(self._pause_sec(deadline))


class AsyncWakeup(_Wakeup):
    """For coroutines."""

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._stream is not None:
            await self._stream.close()

    async def _open(self) -> None:
        if self._may_open():
            self._tried_at = time.monotonic()
            try:
                hello = await settled(self._collections.database.command("hello"))
                begin = watch.from_now_on(hello)
                self._stream = await settled(self._watch(start_at_operation_time=begin))
            except PyMongoError as exc:
                self._gone(exc)

    async def sleep(self, limit_sec: float) -> None:
        """Return when something changed, or after ``limit_sec``."""
        await self._open()
        deadline = time.monotonic() + limit_sec
        while self._stream is not None and deadline - time.monotonic() >= STREAM_WAIT_SEC:
            try:
                if await self._stream.try_next() is not None:
                    return
            except PyMongoError as exc:
                self._gone(exc)
        await asyncio.sleep(self._pause_sec(deadline))
