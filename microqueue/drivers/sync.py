"""The driver for pymongo and mongomock: it performs the calls of an operation."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

import pymongo
from pymongo.errors import NetworkTimeout, PyMongoError
from tenacity import Retrying

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

bounded = pymongo.timeout
"""Set a time limit in seconds for the calls in a block; a shorter outer limit also holds."""


class SyncDriver:
    """Performs the calls of an operation one after the other."""

    def __init__(
        self, collections: Collections, *, settings: QueueSettings, on_retry: Callable[[], None]
    ) -> None:
        self._collections = collections
        self._on_retry = on_retry
        self._limits = CallLimits(collections, settings)
        self.before_call: Callable[[Call], object] | None = None
        """Called before each call of an operation: a fault point for tests."""

    def run(self, operation: Operation[T]) -> T:
        """Run an operation, and return its result.

        A driver error is thrown into the operation, which may handle it. One that it does not
        handle is raised as an error of microqueue. Inside a caller's transaction it is raised as
        it is, because the caller's ``with_transaction`` retries by its labels.
        """
        call: Call | None = None
        if self._collections.primary_changed():
            self._on_retry()
        try:
            call = next(operation)
            while True:
                if self.before_call is not None:
                    self.before_call(call)
                try:
                    reply = self._perform_repeatedly(call)
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

    def _perform_repeatedly(self, call: Call) -> Any:
        if self._collections.in_memory:
            return self._perform(call, 0.0)
        if self._limits.needs_ping(call):
            self._perform_repeatedly(PING)
        budget = RetryBudget(self._limits, call)
        if call.after is not None:
            budget = call.after.budget
            budget.check_time_left(call.after.error)
            time.sleep(budget.pause_sec())
        try:
            return self._attempt(call, budget)
        except PyMongoError as exc:
            budget.check_repeatable(exc)
            if call.recheck:
                self._on_retry()
                raise RepeatDue(exc, budget) from exc
        self._on_retry()
        # The first repeat is immediate; tenacity makes the next ones.
        retrying = Retrying(**budget.retry_options(self._on_retry))
        return retrying(self._attempt, call, budget)

    def _attempt(self, call: Call, budget: RetryBudget) -> Any:
        try:
            reply = self._perform(call, budget.limit_sec())
        except NetworkTimeout as exc:
            if call.own_limit_sec is not None:
                raise as_time_limit_error(exc) from exc
            self._drop_connections()
            raise
        self._limits.answered()
        return reply

    def _perform(self, call: Call, limit_sec: float) -> Any:
        if not call.timed:
            return self._ask(call, limit_sec)
        sent = time.monotonic()
        reply = self._ask(call, limit_sec)
        return Timed(reply, sent, time.monotonic())

    def _ask(self, call: Call, limit_sec: float) -> Any:
        if self._collections.in_memory:
            return mongomock.perform(self._collections, call)
        method = getattr(self._collections.at(call.target), call.method)
        with bounded(limit_sec):
            reply = method(*call.arguments, **call.options)
        return _read(reply, call, limit_sec) if call.method in CURSORS else reply

    def _drop_connections(self) -> None:
        """Close idle connections: they may be as dead as the one that did not answer."""
        for pool in self._collections.pools():
            pool.reset_without_pause()


def _read(cursor: Any, call: Call, limit_sec: float) -> list[Any]:
    """Read a cursor to its end, in batches; the limit is for each batch.

    It is not for all of them: there may be many documents, and mapping each may take long.
    """
    each = call.each() if call.each is not None else None
    size = LARGE_BATCH if each is None else SMALL_BATCH
    found: list[Any] = []
    try:
        while True:
            with bounded(limit_sec):
                some = list(islice(cursor, size))
            found += some if each is None else apply_each(some, each)
            if len(some) < size or found[-1] is ENOUGH:
                return found
    finally:
        with suppress(PyMongoError), bounded(CLOSE_SEC):
            cursor.close()
