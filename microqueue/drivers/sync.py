"""Run operations over pymongo, or mongomock."""

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
from microqueue.drivers.mongomock import take
from microqueue.drivers.retry import (
    CLOSE_SEC,
    DRIVER_ERRORS,
    FEW,
    MANY,
    PING,
    THROWN,
    CallLimits,
    RetryBudget,
    took_too_long,
    translate,
)
from microqueue.operations.call import CURSORS, ENOUGH, Call, Operation, RepeatDue, Timed
from microqueue.settings import QueueSettings

T = TypeVar("T")

bounded = pymongo.timeout
"""End what is done here by a limit, in seconds; a shorter one around it holds as well."""


def _nothing(call: Call) -> None:
    """Do nothing before a call."""


class SyncDriver:
    """Performs the calls of an operation one after the other."""

    def __init__(
        self, collections: Collections, *, settings: QueueSettings, on_retry: Callable[[], None]
    ) -> None:
        self._collections = collections
        self._on_retry = on_retry
        self._bounds = CallLimits(collections, settings)
        self.before_call: Callable[[Call], object] = _nothing
        """Called before each call of an operation: a fault point for tests."""

    def run(self, operation: Operation[T]) -> T:
        """Drive an operation to its result.

        A driver error is thrown into the operation, which may know what it means; one that
        comes out again is raised as ours. Inside a caller's transaction it is left as it
        is, because the caller's ``with_transaction`` retries by its labels.
        """
        call: Call | None = None
        if self._collections.primary_changed():
            self._on_retry()
        try:
            call = next(operation)
            while True:
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
        if self._bounds.must_ask_first(call):
            self._perform_repeatedly(PING)
        budget = RetryBudget(self._bounds, call)
        if call.after is not None:
            budget = call.after.budget
            time.sleep(budget.pause_sec())
        try:
            return self._attempt(call, budget)
        except PyMongoError as exc:
            budget.check_repeatable(exc)
            if call.recheck:
                self._on_retry()
                raise RepeatDue(budget) from exc
        self._on_retry()
        # The first repeat is immediate; the next ones are left to tenacity.
        retrying = Retrying(**budget.retry_options(self._on_retry))
        return retrying(self._attempt, call, budget)

    def _attempt(self, call: Call, budget: RetryBudget) -> Any:
        try:
            reply = self._perform(call, budget.limit_sec())
        except NetworkTimeout as exc:
            if call.own_limit_sec is not None:
                raise took_too_long(exc) from exc
            self._drop_connections()
            raise
        self._bounds.answered()
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
        """Let go of idle connections: they may be as dead as the one that gave no answer."""
        for pool in self._collections.pools():
            pool.reset_without_pause()


def _read(cursor: Any, call: Call, limit_sec: float) -> list[Any]:
    """Read a cursor to its end, a number of documents at a time; the limit is for each.

    Not for all, as there may be many, and what is done with each may take long.
    """
    each = call.each() if call.each is not None else None
    size = MANY if each is None else FEW
    found: list[Any] = []
    try:
        while True:
            with bounded(limit_sec):
                some = list(islice(cursor, size))
            found += some if each is None else take(some, each)
            if len(some) < size or found[-1] is ENOUGH:
                return found
    finally:
        with suppress(PyMongoError), bounded(CLOSE_SEC):
            cursor.close()
