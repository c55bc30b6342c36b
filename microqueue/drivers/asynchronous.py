"""The driver for Motor, PyMongo's async client and mongomock-motor."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import pymongo
from pymongo.errors import NetworkTimeout, PyMongoError
from tenacity import AsyncRetrying

from microqueue.drivers import mongomock
from microqueue.drivers.collections import Collections
from microqueue.drivers.retry import (
    CLOSE_SEC,
    DRIVER_ERRORS,
    LARGE_BATCH,
    PING,
    SMALL_BATCH,
    THROWN,
    CallLimits,
    RetryBudget,
    as_time_limit_error,
    translate,
)
from microqueue.operations.call import (
    CURSORS,
    ENOUGH,
    Call,
    Operation,
    RepeatDue,
    Timed,
    apply_each,
)
from microqueue.settings import QueueSettings

T = TypeVar("T")
GRACE_SEC = 0.5
"""How much longer than its own limit a driver may take."""


async def awaited(reply: Any) -> Any:
    """Return a reply, awaited if it must be: PyMongo's ``aggregate`` must, Motor's must not."""
    return await reply if inspect.isawaitable(reply) else reply


class AsyncDriver:
    """Performs the calls of an operation one after the other, awaiting each."""

    def __init__(
        self, collections: Collections, *, settings: QueueSettings, on_retry: Callable[[], None]
    ) -> None:
        self._collections = collections
        self._on_retry = on_retry
        self._limits = CallLimits(collections, settings)
        self.before_call: Callable[[Call], object] | None = None
        """Called before each call of an operation: a fault point for tests."""

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation, and return its result; with the errors of :meth:`SyncDriver.run`."""
        call: Call | None = None
        if self._collections.primary_changed():
            self._on_retry()
        try:
            call = next(operation)
            while True:
                if self.before_call is not None:
                    self.before_call(call)
                try:
                    reply = await self._perform_repeatedly(call)
                except THROWN as exc:
                    call = operation.throw(exc)
                else:
                    call = operation.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except DRIVER_ERRORS as exc:
            if call is not None and call.in_transaction:
                raise
            raise translate(exc) from exc

    async def _perform_repeatedly(self, call: Call) -> Any:
        if self._collections.in_memory:
            return await self._perform(call, 0.0)
        if self._limits.needs_ping(call):
            await self._perform_repeatedly(PING)
        budget = RetryBudget(self._limits, call)
        if call.after is not None:
            budget = call.after.budget
            budget.check_time_left(call.after.error)
            await asyncio.sleep(budget.pause_sec())
        try:
            return await self._attempt(call, budget)
        except PyMongoError as exc:
            budget.check_repeatable(exc)
            if call.recheck:
                self._on_retry()
                raise RepeatDue(exc, budget) from exc
        self._on_retry()
        # The first repeat is immediate; tenacity makes the next ones.
        retrying = AsyncRetrying(**budget.retry_options(self._on_retry))
        return await retrying(self._attempt, call, budget)

    async def _attempt(self, call: Call, budget: RetryBudget) -> Any:
        try:
            reply = await self._perform(call, budget.limit_sec())
        except NetworkTimeout as exc:
            if call.own_limit_sec is not None:
                raise as_time_limit_error(exc) from exc
            await self._drop_connections()
            raise
        self._limits.answered()
        return reply

    async def _perform(self, call: Call, limit_sec: float) -> Any:
        if not call.timed:
            return await self._ask(call, limit_sec)
        sent = time.monotonic()
        reply = await self._ask(call, limit_sec)
        return Timed(reply, sent, time.monotonic())

    async def _ask(self, call: Call, limit_sec: float) -> Any:
        if self._collections.in_memory:
            return mongomock.perform(self._collections, call)
        method = getattr(self._collections.at(call.target), call.method)
        async with bounded(limit_sec):
            reply = await awaited(method(*call.arguments, **call.options))
        return await _read(reply, call, limit_sec) if call.method in CURSORS else reply

    async def _drop_connections(self) -> None:
        """Close idle connections: they may be as dead as the one that did not answer."""
        for pool in self._collections.pools():
            if inspect.iscoroutinefunction(pool.reset_without_pause):
                await pool.reset_without_pause()
            else:
                await asyncio.to_thread(pool.reset_without_pause)


@asynccontextmanager
async def bounded(limit_sec: float) -> AsyncIterator[None]:
    """Set a time limit for the calls in a block.

    Motor's calls wait for a thread of its pool first, and other calls may never free one. So the
    limit is not left to the driver alone.
    """
    try:
        async with asyncio.timeout(limit_sec + GRACE_SEC):
            with pymongo.timeout(limit_sec):
                yield
    except TimeoutError as exc:
        raise NetworkTimeout(f"no answer within {limit_sec:.3g} s") from exc


async def _read(cursor: Any, call: Call, limit_sec: float) -> list[Any]:
    """Read a cursor to its end, in batches; the limit is for each batch.

    Documents are mapped in a thread, because that may take long.
    """
    each = call.each() if call.each is not None else None
    size = LARGE_BATCH if each is None else SMALL_BATCH
    found: list[Any] = []
    try:
        while True:
            async with bounded(limit_sec):
                some = await cursor.to_list(size)
            found += some if each is None else await asyncio.to_thread(apply_each, some, each)
            if len(some) < size or found[-1] is ENOUGH:
                return found
    finally:
        with suppress(PyMongoError):
            async with bounded(CLOSE_SEC):
                await awaited(cursor.close())
