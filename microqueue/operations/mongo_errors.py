"""Refusals: what MongoDB's errors say of a write.

Codes by which it says that a document is at fault, and nothing else: such a write fails again
however often it is repeated, and says nothing of its neighbours. And codes by which it says that
it could not go on: then nobody knows how much was written.
"""

from __future__ import annotations

from typing import Any

from pymongo.errors import AutoReconnect, BulkWriteError, OperationFailure, WriteConcernError

BAD_VALUE = 2
TYPE_MISMATCH = 14
MAX_TIME_EXPIRED = 50
DUPLICATE_KEY = 11000

WRONG_TYPE = frozenset({BAD_VALUE, TYPE_MISMATCH})
"""What should be a list or a number is none: an update cannot add to it, but replace it."""

DOCUMENT_REJECTED = WRONG_TYPE | {121, 171, 10334, 17280, 17419}
"""It may also break a rule of its collection, have keys of two lists, or be too large."""

# Not primary, stepping down, shutting down, host unreachable and the like: the codes that
# drivers treat as retryable.
INTERRUPTED = frozenset({6, 7, 89, 91, 134, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436})


# Killed by an operator, or at its time limit: it may have done a part of what it was to do.
KILLED = frozenset({MAX_TIME_EXPIRED, 11601})


def write_concern_codes(error: BaseException) -> list[Any]:
    """Give the codes with which a write was not acknowledged as it should have been, if any.

    Then it is made on the primary, and nobody knows whether a majority will have it.
    """
    if isinstance(error, WriteConcernError):
        return [error.code]
    if isinstance(error, BulkWriteError):
        found = (error.details or {}).get("writeConcernErrors") or []
        return [one.get("code") for one in found]
    return []


def is_uncertain(error: BaseException) -> bool:
    """Tell whether a write may have been made, in part or as a whole, although it failed."""
    if isinstance(error, OperationFailure):
        interrupted = error.code in INTERRUPTED | KILLED or error.timeout
        return bool(write_concern_codes(error)) or interrupted
    return isinstance(error, AutoReconnect)
