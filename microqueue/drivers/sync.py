"""Run operations over pymongo, or mongomock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any, TypeVar

from pymongo.errors import PyMongoError
from tenacity import Retrying

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
from microqueue.operations.call import CURSORS, Call, Operation

T = TypeVar("T")


class SyncDriver:
    """Performs the calls of an operation one after the other."""

    def __init__(
        self, collections: Collections, *, deadline: timedelta, on_retry: Callable[[], None]
    ) -> None:
        self._collections = collections
        self._reached = False
        self._retrying = Retrying(**retry_options(deadline, on_retry)) if deadline else None

    def run(self, operation: Operation[T]) -> T:
        """Drive an operation to its result.

        A driver error is thrown into the operation, which may know what it means; one that
        comes out again is raised as ours. Inside a caller's transaction it is left as it
        is, because the caller's ``with_transaction`` retries by its labels.
        """
        call: Call | None = None
        try:
            call = next(operation)
            while True:
                try:
                    reply = self._perform_repeatedly(call)
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

    def _perform_repeatedly(self, call: Call) -> Any:
        try:
            reply = self._perform(call)
        except PyMongoError as exc:
            passing = may_pass(exc) if self._reached else is_transient(exc)
            if self._retrying is None or not call.repeatable or not passing:
                raise
        else:
            self._reached = True
            return reply
        return self._retrying.copy()(self._perform, call)

    def _perform(self, call: Call) -> Any:
        if self._collections.in_memory:
            return memory.perform(self._collections, call)
        method = getattr(self._collections.at(call.target), call.method)
        reply = method(*call.arguments, **call.options)
        if call.method not in CURSORS:
            return reply
        with closing(reply):
            return list(reply) if call.each is None else take(reply, call.each())
