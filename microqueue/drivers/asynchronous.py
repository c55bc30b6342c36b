"""Run operations over Motor, PyMongo's async client, or mongomock-motor."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from pymongo.errors import PyMongoError
from tenacity import AsyncRetrying

from microqueue.drivers import memory
from microqueue.drivers.collections import Collections
from microqueue.drivers.memory import take
from microqueue.drivers.transient import (
    DRIVER_ERRORS,
    is_transient,
    may_pass,
    retry_options,
    translate,
)
from microqueue.operations.call import CURSORS, ENOUGH, Call, Operation

T = TypeVar("T")
FEW = 8


async def settled(reply: Any) -> Any:
    """Await a reply if it has to be awaited: Motor's ``aggregate`` has not, PyMongo's has."""
    return await reply if inspect.isawaitable(reply) else reply


class AsyncDriver:
    """Performs the calls of an operation one after the other, awaiting each."""

    def __init__(
        self, collections: Collections, *, deadline: timedelta, on_retry: Callable[[], None]
    ) -> None:
        self._collections = collections
        self._reached = False
        self._retrying = AsyncRetrying(**retry_options(deadline, on_retry)) if deadline else None

    async def run(self, operation: Operation[T]) -> T:
        """Drive an operation to its result, with errors as :meth:`SyncDriver.run` has them."""
        call: Call | None = None
        try:
            call = next(operation)
            while True:
                try:
                    reply = await self._perform_repeatedly(call)
                except DRIVER_ERRORS as exc:
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
        try:
            reply = await self._perform(call)
        except PyMongoError as exc:
            passing = may_pass(exc) if self._reached else is_transient(exc)
            if self._retrying is None or not call.repeatable or not passing:
                raise
        else:
            self._reached = True
            return reply
        return await self._retrying.copy()(self._perform, call)

    async def _perform(self, call: Call) -> Any:
        if self._collections.in_memory:
            return memory.perform(self._collections, call)
        method = getattr(self._collections.at(call.target), call.method)
        reply = await settled(method(*call.arguments, **call.options))
        if call.method not in CURSORS:
            return reply
        return await (reply.to_list(None) if call.each is None else _take(reply, call.each()))


async def _take(cursor: Any, each: Callable[[Any], Any]) -> list[Any]:
    """Do something with each document, a few at a time, beside the event loop."""
    found: list[Any] = []
    while some := await cursor.to_list(FEW):
        found += await asyncio.to_thread(take, some, each)
        if found[-1] is ENOUGH:
            await settled(cursor.close())
            break
    return found
