"""Refusals: what MongoDB's errors say of a write.

Codes by which it says that a document is at fault, and nothing else: such a write fails again
however often it is repeated, and says nothing of its neighbours. And codes by which it says that
it could not go on: then nobody knows how much was written.
"""

from __future__ import annotations

from pymongo.errors import AutoReconnect, OperationFailure, WriteConcernError

BAD_VALUE = 2
TYPE_MISMATCH = 14
DUPLICATE_KEY = 11000

BROKEN = frozenset({BAD_VALUE, TYPE_MISMATCH})
"""What should be a list or a number is none: an update cannot add to it, but replace it."""

AT_FAULT = BROKEN | {121, 171, 10334, 17280, 17419}
"""It may also break a rule of its collection, have keys of two lists, or be too large."""

# Not primary, stepping down, shutting down, host unreachable and the like: the codes that
# drivers treat as retryable.
INTERRUPTED = frozenset({6, 7, 89, 91, 134, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436})


def is_uncertain(error: BaseException) -> bool:
    """Tell whether a write may have been made, in part or as a whole, although it failed."""
    if isinstance(error, OperationFailure):
        return isinstance(error, WriteConcernError) or error.code in INTERRUPTED
    return isinstance(error, AutoReconnect)
