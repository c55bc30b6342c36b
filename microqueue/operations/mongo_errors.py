"""MongoDB error codes, and what they mean for a write.

Some codes blame the document alone: the write fails again however often it is repeated, and other
writes of the same batch are not affected. Others mean that the server was interrupted: it is
unknown how much was written.
"""

from __future__ import annotations

from typing import Any

from pymongo.errors import AutoReconnect, BulkWriteError, OperationFailure, WriteConcernError

BAD_VALUE = 2
UNAUTHORIZED = 13
TYPE_MISMATCH = 14
MAX_TIME_EXPIRED = 50
DUPLICATE_KEY = 11000

WRONG_TYPE = frozenset({BAD_VALUE, TYPE_MISMATCH})
"""A field is no list or number where the update needs one: it can only be replaced."""

DOCUMENT_REJECTED = WRONG_TYPE | {121, 171, 10334, 17280, 17419}
"""The document also breaks a validation rule, has two indexed arrays, or is too large."""

INTERRUPTED = frozenset({6, 7, 89, 91, 134, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436})
"""Not primary, stepping down, shutting down, host unreachable: what drivers treat as retryable."""

KILLED = frozenset({MAX_TIME_EXPIRED, 11601})
"""Killed by an operator or at its time limit: it may have been done in part."""


def write_concern_codes(error: BaseException) -> list[Any]:
    """Return the codes of failed write concerns, if any.

    Such a write was made on the primary; whether a majority will have it is unknown.
    """
    if isinstance(error, WriteConcernError):
        return [error.code]
    if isinstance(error, BulkWriteError):
        found = (error.details or {}).get("writeConcernErrors") or []
        return [one.get("code") for one in found]
    return []


def is_uncertain(error: BaseException) -> bool:
    """Return whether a write that failed may have been made, in part or as a whole."""
    if isinstance(error, OperationFailure):
        interrupted = error.code in INTERRUPTED | KILLED or error.timeout
        return bool(write_concern_codes(error)) or interrupted
    return isinstance(error, AutoReconnect)


def only_duplicates(error: BulkWriteError) -> list[int]:
    """Return the places of the duplicates; raise the error if it has any other cause.

    A failed write concern concerns the whole chunk: no insert of it is certain.
    """
    details: Any = error.details or {}
    errors = details.get("writeErrors") or []
    foreign = any(one["code"] != DUPLICATE_KEY for one in errors)
    if not errors or foreign or details.get("writeConcernErrors"):
        raise error
    return [one["index"] for one in errors]
