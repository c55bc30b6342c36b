"""Retry: which driver errors are transient, how long a call is repeated, and what it raises.

A call is repeated only if it is repeatable and its error is transient, until its deadline. Then
the driver error is raised as an error of microqueue.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from bson.errors import BSONError
from pymongo import _csot  # There is no public way to read the limit that a caller has set.
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ConnectionFailure,
    DocumentTooLarge,
    ExecutionTimeout,
    NetworkTimeout,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
)
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from microqueue.drivers.collections import Collections
from microqueue.errors import (
    InvalidArgument,
    InvalidPayload,
    MicroqueueError,
    OperationFailed,
    ServerUnavailable,
)
from microqueue.masking import without_password
from microqueue.operations.call import Call, RepeatDue, Span, Target
from microqueue.operations.mongo_errors import (
    INTERRUPTED,
    KILLED,
    MAX_TIME_EXPIRED,
    write_concern_codes,
)
from microqueue.settings import QueueSettings

ANSWERED_LATELY_SEC = 0.1
CLOSE_SEC = 1.0
"""How long closing a cursor or stream may take. The server also closes it after a while."""
SMALL_BATCH = 8
LARGE_BATCH = 250
PING = Call("command", "ping", target=Target.DATABASE)
ATTEMPT_SHARE = 2 / 3
ATTEMPT_SEC = 2.0
"""One attempt may take a share of the deadline, but at least this long if the limit allows."""
SHORTEST_SEC = 0.001
LAST_SEC = 0.05
"""How much time must be left for another attempt."""
LONGEST_SEC = 6 * 3600.0
"""How long an index build may take."""
TOO_LARGE_CODES = frozenset({10334, 17419, 17280})

DRIVER_ERRORS = (PyMongoError, BSONError, OverflowError, UnicodeError)
"""What a call may raise: errors of the server, the connection and the encoder."""
THROWN = (*DRIVER_ERRORS, RepeatDue)
"""What a driver throws into an operation."""
PAUSES = wait_random_exponential(multiplier=0.05, max=1.0)


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed a moment later.

    A server that was not found within the selection timeout has been waited for already. One that
    did not answer in time may do so on another connection.
    """
    if isinstance(error, ServerSelectionTimeoutError):
        return False
    if isinstance(error, AutoReconnect):
        return True
    if isinstance(error, PyMongoError) and error.timeout:
        return True
    if isinstance(error, OperationFailure):
        codes = {error.code, *write_concern_codes(error)}
        return bool(codes & INTERRUPTED) or error.has_error_label("RetryableWriteError")
    return False


def may_recover(error: BaseException) -> bool:
    """Return whether to retry, for a client that has reached its server before.

    If it no longer finds a server, a failover is under way, which may take longer than the
    selection timeout. For a client that never found one, the address is wrong.
    """
    return is_transient(error) or isinstance(error, ServerSelectionTimeoutError)


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

    def pause_sec(self) -> float:
        """Return how long to wait before the next attempt; the first repeat is immediate."""
        state = RetryCallState(Retrying(), None, (), {})
        state.attempt_number = self._repeats - 1
        return self._pause_sec(state) if state.attempt_number else 0.0

    def retry_options(self, on_retry: Callable[[], None]) -> dict[str, Any]:
        """Configure tenacity: jittered pauses of up to a second, until the deadline."""
        return {
            "retry": retry_if_exception(self._may_repeat),
            "stop": lambda _state: self._is_over(),
            "wait": self._pause_sec,
            "before_sleep": lambda _state: on_retry(),
            "reraise": True,
        }

    def _pause_sec(self, state: RetryCallState) -> float:
        # The last pause ends before the deadline, so that there is time for an attempt.
        return min(PAUSES(state), max(self._left_sec() - LAST_SEC, 0.0))

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


def as_time_limit_error(error: NetworkTimeout) -> ExecutionTimeout:
    """Return the error that the server raises at a time limit, if the client noticed it first."""
    return ExecutionTimeout(str(error), MAX_TIME_EXPIRED)


def translate(error: Exception) -> MicroqueueError:
    """Return the error of microqueue for a driver error, without addresses and passwords."""
    if write_concern_codes(error):
        return ServerUnavailable(
            "MongoDB did not acknowledge the write with its write concern, so a failover may "
            f"lose it; repeat the call ({_first_line(_first_of(error))})"
        )
    error = _first_of(error)
    if not isinstance(error, PyMongoError) or isinstance(error, DocumentTooLarge):
        return InvalidArgument(f"MongoDB cannot store this: {_first_line(error)}")
    if isinstance(error, OperationFailure) and error.code in TOO_LARGE_CODES:
        return InvalidPayload(
            "the task would grow over MongoDB's limit of 16 MB; store large data elsewhere"
        )
    if isinstance(error, ServerSelectionTimeoutError):
        return ServerUnavailable(
            "no MongoDB server answered in time; check that it runs, and the address "
            f"in --uri, MICROQUEUE_URI or from_uri() ({_first_line(error)})"
        )
    killed = isinstance(error, OperationFailure) and error.code in KILLED
    if killed or is_transient(error) or isinstance(error, ConnectionFailure):
        return ServerUnavailable(f"MongoDB could not complete the call: {_first_line(error)}")
    return OperationFailed(f"MongoDB rejected the call: {_first_line(error)}")


def _first_of(error: Exception) -> Exception:
    """Return the first error of a bulk write, whose own message has no cause."""
    details: Any = (error.details if isinstance(error, BulkWriteError) else None) or {}
    found = details.get("writeConcernErrors") or details.get("writeErrors") or []
    return OperationFailure(found[0].get("errmsg", ""), found[0]["code"]) if found else error


def _first_line(error: Exception) -> str:
    text = str(error).split(", full error:")[0].split(", Timeout:")[0].splitlines()[0]
    text = re.sub(r" \(configured timeouts:[^)]*\)", "", text)
    return without_password(text)[:500]  # Masked before it is cut: half a URI has no end.
