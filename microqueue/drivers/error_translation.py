"""Driver errors: which ones are transient, and which error of microqueue a call raises for them."""

from __future__ import annotations

import re
from typing import Any

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

from microqueue.errors import (
    InvalidArgument,
    InvalidPayload,
    MicroqueueError,
    OperationFailed,
    ServerUnavailable,
)
from microqueue.masking import without_password
from microqueue.operations.mongo_errors import (
    INTERRUPTED,
    KILLED,
    MAX_TIME_EXPIRED,
    write_concern_codes,
)

TOO_LARGE_CODES = frozenset({10334, 17419, 17280})
UNKNOWN_COMMIT = "UnknownTransactionCommitResult"
TRANSIENT_LABELS = ("RetryableWriteError", "TransientTransactionError", UNKNOWN_COMMIT)


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
        return bool(codes & INTERRUPTED) or any(map(error.has_error_label, TRANSIENT_LABELS))
    return False


def may_recover(error: BaseException) -> bool:
    """Return whether to retry, for a client that has reached its server before.

    If it no longer finds a server, a failover is under way, which may take longer than the
    selection timeout. For a client that never found one, the address is wrong.
    """
    return is_transient(error) or isinstance(error, ServerSelectionTimeoutError)


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
