"""Which driver errors pass by themselves, how long to try again, and what surfaces at last."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from bson.errors import BSONError
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ConnectionFailure,
    DocumentTooLarge,
    ExecutionTimeout,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WTimeoutError,
)
from tenacity import retry_if_exception, stop_after_delay, wait_random_exponential

from microqueue.errors import (
    InvalidArgument,
    InvalidPayload,
    MicroqueueError,
    OperationFailed,
    ServerUnavailable,
)
from microqueue.operations.refusals import INTERRUPTED
from microqueue.redaction import without_password

TOO_LARGE_CODES = frozenset({10334, 17419, 17280})

DRIVER_ERRORS = (PyMongoError, BSONError, OverflowError, UnicodeError)
"""What a call may raise: the server's and the connection's errors, and those of encoding."""


def is_transient(error: BaseException) -> bool:
    """Tell whether the same call may succeed a moment later.

    A server that was not found within the selection timeout was waited for already.
    """
    if isinstance(error, ServerSelectionTimeoutError):
        return False
    if isinstance(error, AutoReconnect):
        return True
    if isinstance(error, OperationFailure):
        return error.code in INTERRUPTED or error.has_error_label("RetryableWriteError")
    return False


def may_pass(error: BaseException) -> bool:
    """Tell whether to go on trying, for a client that has reached its server before.

    A server that cannot be found then is a failover under way, which may take longer than
    the selection timeout; for a client that never found one, it is a wrong address.
    """
    return is_transient(error) or isinstance(error, ServerSelectionTimeoutError)


def retry_options(deadline: timedelta, on_retry: Callable[[], None]) -> dict[str, Any]:
    """Configure tenacity: jittered waits of up to a second, until the deadline."""
    return {
        "retry": retry_if_exception(may_pass),
        "stop": stop_after_delay(deadline),
        "wait": wait_random_exponential(multiplier=0.05, max=1.0),
        "before_sleep": lambda _state: on_retry(),
        "reraise": True,
    }


def translate(error: Exception) -> MicroqueueError:
    """Give the error of ours that stands for a driver's. Addresses and passwords stay out."""
    if isinstance(error, BulkWriteError):
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
    if is_transient(error) or isinstance(
        error, ConnectionFailure | ExecutionTimeout | WTimeoutError
    ):
        return ServerUnavailable(f"MongoDB could not complete the call: {_first_line(error)}")
    return OperationFailed(f"MongoDB refused the call: {_first_line(error)}")


def _first_of(error: BulkWriteError) -> OperationFailure:
    """Give the first error of a bulk, which says of itself only that there was one."""
    found = (error.details or {}).get("writeErrors") or []
    return OperationFailure(found[0]["errmsg"], found[0]["code"]) if found else error


def _first_line(error: Exception) -> str:
    text = str(error).split(", full error:")[0].split(", Timeout:")[0].splitlines()[0]
    text = re.sub(r" \(configured timeouts:[^)]*\)", "", text)
    return without_password(text)[:500]  # Masked before it is cut: half a URI has no end.
