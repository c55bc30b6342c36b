"""Drivers: they perform the calls of an operation, within time limits, and repeat failed ones.

:class:`SyncDriver` is for pymongo and mongomock, :class:`AsyncDriver` for Motor, PyMongo's async
client and mongomock-motor. A call is repeated only if it is repeatable and its error is transient,
until its deadline: :class:`CallLimits` and :class:`RetryBudget` decide that for both.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import pymongo
from bson.errors import BSONError
from pymongo import _csot  # There is no public way to read the limit that a caller has set.
from pymongo.errors import ExecutionTimeout, NetworkTimeout, OperationFailure, PyMongoError
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    wait_random_exponential,
)

from microqueue.drivers import mongomock
from microqueue.drivers.collections import Collections
from microqueue.drivers.error_translation import (
    UNKNOWN_COMMIT,
    as_time_limit_error,
    is_transient,
    may_recover,
    translate,
)
from microqueue.operations.call import (
    CURSORS,
    ENOUGH,
    Buried,
    Call,
    Operation,
    RepeatDue,
    Span,
    Target,
    Timed,
    apply_each,
)
from microqueue.settings import QueueSettings

T = TypeVar("T")

DRIVER_ERRORS = (PyMongoError, BSONError, OverflowError, UnicodeError)
"""What a call may raise: errors of the server, the connection and the encoder."""
THROWN = (*DRIVER_ERRORS, RepeatDue)
"""What a driver throws into an operation."""
STANDALONE = "Standalone"
PRIMARIES = frozenset({"RSPrimary", STANDALONE})

PING = Call("command", "ping", target=Target.DATABASE)
ANSWERED_LATELY_SEC = 0.1
CLOSE_SEC = 1.0
"""How long closing a cursor or stream may take. The server also closes it after a while."""
GRACE_SEC = 0.5
"""How much longer than its own limit an asynchronous driver may take."""
SMALL_BATCH = 8
LARGE_BATCH = 250

ATTEMPT_SHARE = 2 / 3
ATTEMPT_SEC = 2.0
"""One attempt may take a share of the deadline, but at least this long if the limit allows."""
SHORTEST_SEC = 0.001
LAST_SEC = 0.05
"""How much time must be left for another attempt."""
LONGEST_SEC = 6 * 3600.0
"""How long an index build may take."""
COMMIT_WAIT_SEC = 0.05
"""Between two attempts to commit a transaction."""
RETRY_WAITS = wait_random_exponential(multiplier=0.05, max=1.0)

bounded = pymongo.timeout
"""Set a time limit in seconds for the calls in a block; a shorter outer limit also holds."""


@asynccontextmanager
async def bounded_async(limit_sec: float) -> AsyncIterator[None]:
    """Set a time limit for the awaited calls in a block.

    Motor's calls wait for a thread of its pool first, and other calls may never free one. So the
    limit is not left to the driver alone.
    """
    try:
        async with asyncio.timeout(limit_sec + GRACE_SEC):
            with pymongo.timeout(limit_sec):
                yield
    except TimeoutError as exc:
        raise NetworkTimeout(f"no answer within {limit_sec:.3g} s") from exc


async def awaited(reply: Any) -> Any:
    """Return a reply, awaited if it must be: PyMongo's ``aggregate`` must, Motor's must not."""
    return await reply if inspect.isawaitable(reply) else reply


def is_standalone(collections: Collections) -> bool:
    """Return whether the server is known to be one without transactions."""
    servers = collections.client.topology_description.server_descriptions().values()
    return any(one.server_type_name == STANDALONE for one in servers)


@dataclass(frozen=True, slots=True)
class Run:
    """An effect of a reader that waits: run an operation, and reply with its result."""

    operation: Operation[Any]


class Driver:
    """What both drivers share."""

    def __init__(
        self, collections: Collections, *, settings: QueueSettings, on_retry: Callable[[], None]
    ) -> None:
        """Create a driver.

        Args:
            collections: Where calls go.
            settings: How long calls may take.
            on_retry: Called before a repeat, and after a failover: another server may answer.
        """
        self._collections = collections
        self._on_retry = on_retry
        self._limits = CallLimits(collections, settings)
        self._topology: Any = None
        self._primary: Any = None
        self.before_call: Callable[[Call], object] | None = None
        """Called before each call of an operation: a fault point for tests."""

    def _notice_failover(self) -> None:
        """Call ``on_retry`` if another server became the primary since the last operation."""
        if self._collections.in_memory:
            return
        # Immutable, and replaced at each change.
        topology = self._collections.client.topology_description
        if topology is self._topology:
            return
        self._topology = topology
        for address, server in topology.server_descriptions().items():
            if server.server_type_name in PRIMARIES:
                former, self._primary = self._primary, address
                if former not in {None, address}:
                    self._on_retry()
                return

    def _method(self, call: Call) -> Any:
        return getattr(getattr(self._collections, call.target), call.method)

    def _is_standalone(self) -> bool:
        return is_standalone(self._collections)

    def _write_concern(self, call: Call) -> Any:
        return getattr(self._collections, call.target).write_concern


def _check_commit(error: PyMongoError) -> None:
    """Raise the error of a commit, unless its outcome is unknown and there is time to repeat it."""
    left_sec = _csot.remaining()
    is_over = left_sec is not None and left_sec <= COMMIT_WAIT_SEC + LAST_SEC
    if is_over or not error.has_error_label(UNKNOWN_COMMIT):
        raise error


class SyncDriver(Driver):
    """Performs the calls of an operation one after the other."""

    def run(self, operation: Operation[T]) -> T:
        """Run an operation, and return its result.

        A driver error is thrown into the operation, which may handle it. One that it does not
        handle is raised as an error of microqueue. Inside a caller's transaction it is raised as
        it is, because the caller's ``with_transaction`` retries by its labels.
        """
        call: Call | None = None
        self._notice_failover()
        try:
            call = next(operation)
            while True:
                if self.before_call is not None:
                    self.before_call(call)
                try:
                    reply = self._perform(call)
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

    def _perform(self, call: Call) -> Any:
        """Perform a call; repeat it after a transient error."""
        if isinstance(call, Buried):
            return None
        if self._collections.in_memory:
            return self._send(call, 0.0)
        if self._limits.needs_ping(call):
            self._perform(PING)
        budget = RetryBudget(self._limits, call)
        if call.after is not None:
            budget = call.after.budget
            budget.check_time_left(call.after.error)
            time.sleep(budget.wait_sec())
        try:
            return self._attempt(call, budget)
        except PyMongoError as exc:
            budget.check_repeatable(exc)
            self._on_retry()
            if call.recheck:
                raise RepeatDue(exc, budget) from exc
        # The first repeat is immediate; tenacity makes the next ones.
        retrying = Retrying(**budget.retry_options(self._on_retry))
        return retrying(self._attempt, call, budget)

    def _attempt(self, call: Call, budget: RetryBudget) -> Any:
        try:
            reply = self._send(call, budget.limit_sec())
        except NetworkTimeout as exc:
            if call.own_limit_sec is not None:
                raise as_time_limit_error(exc) from exc
            self.drop_connections()
            raise
        self._limits.answered()
        return reply

    def _send(self, call: Call, limit_sec: float) -> Any:
        sent = time.monotonic()
        if self._collections.in_memory:
            reply = mongomock.perform_call(self._collections, call)
        else:
            reply = self._request(call, limit_sec)
            if call.method in CURSORS:
                reply = _read(reply, call, limit_sec)
        return Timed(reply, sent, time.monotonic()) if call.timed else reply

    def _request(self, call: Call, limit_sec: float) -> Any:
        if call.atomic and not self._is_standalone():
            try:
                return self._request_atomically(call, limit_sec)
            except OperationFailure:
                if not self._is_standalone():  # Known only since this call.
                    raise
        with bounded(limit_sec):
            return self._method(call)(*call.arguments, **call.options)

    def _request_atomically(self, call: Call, limit_sec: float) -> Any:
        """Perform a call in its own transaction. What is not committed is aborted."""
        session = self._collections.client.start_session()
        try:
            with bounded(limit_sec):
                session.start_transaction(write_concern=self._write_concern(call))
                reply = self._method(call)(*call.arguments, **call.options, session=session)
                while True:
                    try:
                        session.commit_transaction()
                    except PyMongoError as exc:
                        _check_commit(exc)
                        time.sleep(COMMIT_WAIT_SEC)
                    else:
                        return reply
        finally:
            # Not within the limit, which may be over: an open transaction would block the repeat.
            with suppress(PyMongoError), bounded(CLOSE_SEC):
                session.end_session()

    def drop_connections(self) -> None:
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


class AsyncDriver(Driver):
    """Performs calls as :class:`SyncDriver` does, awaiting each."""

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation, and return its result; with the errors of :meth:`SyncDriver.run`."""
        call: Call | None = None
        self._notice_failover()
        try:
            call = next(operation)
            while True:
                if self.before_call is not None:
                    self.before_call(call)
                try:
                    reply = await self._perform(call)
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

    async def _perform(self, call: Call) -> Any:
        """Perform a call; repeat it after a transient error."""
        if isinstance(call, Buried):
            return None
        if self._collections.in_memory:
            return await self._send(call, 0.0)
        if self._limits.needs_ping(call):
            await self._perform(PING)
        budget = RetryBudget(self._limits, call)
        if call.after is not None:
            budget = call.after.budget
            budget.check_time_left(call.after.error)
            await asyncio.sleep(budget.wait_sec())
        try:
            return await self._attempt(call, budget)
        except PyMongoError as exc:
            budget.check_repeatable(exc)
            self._on_retry()
            if call.recheck:
                raise RepeatDue(exc, budget) from exc
        # The first repeat is immediate; tenacity makes the next ones.
        retrying = AsyncRetrying(**budget.retry_options(self._on_retry))
        return await retrying(self._attempt, call, budget)

    async def _attempt(self, call: Call, budget: RetryBudget) -> Any:
        try:
            reply = await self._send(call, budget.limit_sec())
        except NetworkTimeout as exc:
            if call.own_limit_sec is not None:
                raise as_time_limit_error(exc) from exc
            await self.drop_connections()
            raise
        self._limits.answered()
        return reply

    async def _send(self, call: Call, limit_sec: float) -> Any:
        sent = time.monotonic()
        if self._collections.in_memory:
            reply = mongomock.perform_call(self._collections, call)
        else:
            reply = await self._request(call, limit_sec)
            if call.method in CURSORS:
                reply = await _read_async(reply, call, limit_sec)
        return Timed(reply, sent, time.monotonic()) if call.timed else reply

    async def _request(self, call: Call, limit_sec: float) -> Any:
        if call.atomic and not self._is_standalone():
            try:
                return await self._request_atomically(call, limit_sec)
            except OperationFailure:
                if not self._is_standalone():  # Known only since this call.
                    raise
        async with bounded_async(limit_sec):
            return await awaited(self._method(call)(*call.arguments, **call.options))

    async def _request_atomically(self, call: Call, limit_sec: float) -> Any:
        """Perform a call in its own transaction. What is not committed is aborted."""
        session = await awaited(self._collections.client.start_session())
        try:
            async with bounded_async(limit_sec):
                await awaited(session.start_transaction(write_concern=self._write_concern(call)))
                options = {**call.options, "session": session}
                reply = await awaited(self._method(call)(*call.arguments, **options))
                while True:
                    try:
                        await session.commit_transaction()
                    except PyMongoError as exc:
                        _check_commit(exc)
                        await asyncio.sleep(COMMIT_WAIT_SEC)
                    else:
                        return reply
        finally:
            # Not within the limit, which may be over: an open transaction would block the repeat.
            with suppress(PyMongoError):
                async with bounded_async(CLOSE_SEC):
                    await session.end_session()

    async def drop_connections(self) -> None:
        """Close idle connections: they may be as dead as the one that did not answer."""
        for pool in self._collections.pools():
            if inspect.iscoroutinefunction(pool.reset_without_pause):
                await pool.reset_without_pause()
            else:
                await asyncio.to_thread(pool.reset_without_pause)


async def _read_async(cursor: Any, call: Call, limit_sec: float) -> list[Any]:
    """Read a cursor to its end, in batches; the limit is for each batch.

    Documents are mapped in a thread, because that may take long.
    """
    each = call.each() if call.each is not None else None
    size = LARGE_BATCH if each is None else SMALL_BATCH
    found: list[Any] = []
    try:
        while True:
            async with bounded_async(limit_sec):
                some = await cursor.to_list(size)
            found += some if each is None else await asyncio.to_thread(apply_each, some, each)
            if len(some) < size or found[-1] is ENOUGH:
                return found
    finally:
        with suppress(PyMongoError):
            async with bounded_async(CLOSE_SEC):
                await awaited(cursor.close())


class CallLimits:
    """How long calls may take: each attempt, and all attempts of a call together."""

    def __init__(self, collections: Collections, settings: QueueSettings) -> None:
        self.deadline_sec = settings.retry_deadline.total_seconds()
        self.client_sec = collections.timeout_sec
        brief_sec = settings.call_timeout.total_seconds()
        if self.deadline_sec:
            # So that a repeat on another connection has some time, too.
            brief_sec = min(brief_sec, max(self.deadline_sec * ATTEMPT_SHARE, ATTEMPT_SEC))
        long_sec = max(settings.long_call_timeout, settings.call_timeout).total_seconds()
        self._limits_sec = {
            Span.BRIEF: brief_sec,
            Span.LONG: long_sec,
            Span.LONGEST: max(LONGEST_SEC, long_sec),
        }
        self._selection_sec = collections.selection_sec
        self._reached = False
        self._answered_at = float("-inf")

    def limit_sec(self, call: Call) -> float:
        """Return how long one attempt may take.

        A client that has not reached its server yet waits no longer than its selection timeout.
        """
        limit_sec = self._limits_sec[call.span]
        if not self._reached:
            limit_sec = min(limit_sec, self._selection_sec)
        own_sec = call.own_limit_sec
        return limit_sec if own_sec is None else min(limit_sec, own_sec)

    def answered(self) -> None:
        """Note that the server answered."""
        self._reached = True
        self._answered_at = time.monotonic()

    def needs_ping(self, call: Call) -> bool:
        """Return whether to ping the server before a call that may take long.

        Without that, a dead connection would be noticed only at the end of the long limit.
        """
        if call.span is Span.BRIEF or call.in_transaction or call.own_limit_sec is not None:
            return False
        return time.monotonic() - self._answered_at > ANSWERED_LATELY_SEC

    def allows_repeat(self, error: PyMongoError, *, first: bool) -> bool:
        """Return whether a call may be repeated after this error."""
        return is_transient(error) if first and not self._reached else may_recover(error)


class RetryBudget:
    """How long one call may take, and whether it is repeated.

    The first attempt may take the limit of one attempt. A repeat may also take no more than what
    is left until the deadline. A shorter limit of the caller holds: the client's ``timeoutMS``, or
    a ``pymongo.timeout`` around the call.
    """

    __slots__ = ("_call", "_ends", "_limits", "_repeats", "_strict")

    def __init__(self, limits: CallLimits, call: Call) -> None:
        self._limits = limits
        self._call = call
        self._repeats = 0
        now = time.monotonic()
        self._ends = now + limits.deadline_sec
        self._strict = float("inf") if limits.client_sec is None else now + limits.client_sec
        around_sec = _csot.remaining()
        if around_sec is not None:
            self._strict = min(self._strict, now + around_sec)

    def limit_sec(self) -> float:
        """Return how long the next attempt may take."""
        limit_sec = self._limits.limit_sec(self._call)
        until = self._strict
        if self._repeats and self._call.span is Span.BRIEF:
            until = min(until, self._ends)
        # Not zero, which would be no limit at all.
        return max(min(limit_sec, until - time.monotonic()), SHORTEST_SEC)

    def check_repeatable(self, error: PyMongoError) -> None:
        """Raise the error of an attempt, unless the call is repeated after it."""
        if not self._may_repeat(error):
            raise error
        self.check_time_left(error)
        self._repeats += 1

    def check_time_left(self, error: Exception) -> None:
        """Raise the error of the last attempt, if there is no time for another one."""
        if self._is_over():
            raise error

    def wait_sec(self) -> float:
        """Return how long to wait before the next attempt; the first repeat is immediate."""
        state = RetryCallState(Retrying(), None, (), {})
        state.attempt_number = self._repeats - 1
        return self._wait_sec(state) if state.attempt_number else 0.0

    def retry_options(self, on_retry: Callable[[], None]) -> dict[str, Any]:
        """Configure tenacity: jittered waits of up to a second, until the deadline."""
        return {
            "retry": retry_if_exception(self._may_repeat),
            "stop": lambda _state: self._is_over(),
            "wait": self._wait_sec,
            "before_sleep": lambda _state: on_retry(),
            "reraise": True,
        }

    def _wait_sec(self, state: RetryCallState) -> float:
        # The last wait ends before the deadline, so that there is time for an attempt.
        return min(RETRY_WAITS(state), max(self._left_sec() - LAST_SEC, 0.0))

    def _may_repeat(self, error: BaseException) -> bool:
        if not isinstance(error, PyMongoError) or self._exceeded_own_limit(error):
            return False
        return self._call.repeatable and self._limits.allows_repeat(error, first=not self._repeats)

    def _exceeded_own_limit(self, error: PyMongoError) -> bool:
        late = isinstance(error, ExecutionTimeout | NetworkTimeout)
        return late and self._call.own_limit_sec is not None

    def _is_over(self) -> bool:
        return self._left_sec() <= LAST_SEC

    def _left_sec(self) -> float:
        return min(self._ends, self._strict) - time.monotonic()
