"""Which errors count as trouble of the server or of the connection."""

from __future__ import annotations

from typing import Any

import pytest
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    CursorNotFound,
    DuplicateKeyError,
    ExecutionTimeout,
    InvalidOperation,
    NetworkTimeout,
    NotPrimaryError,
    OperationFailure,
    ServerSelectionTimeoutError,
    WriteConcernError,
    WTimeoutError,
)

from tests.chaos.observing import is_trouble

NO_MAJORITY: dict[str, Any] = {"writeConcernErrors": [{"code": 64}], "writeErrors": []}
TROUBLES = [
    AutoReconnect("cut"),
    BulkWriteError(NO_MAJORITY),
    BulkWriteError({"writeErrors": [{"code": 11602}], "writeConcernErrors": []}),
    CursorNotFound("gone", 43),
    ExecutionTimeout("slow", 50),
    NetworkTimeout("slow"),
    NotPrimaryError("stepped down"),
    OperationFailure("shutdown", 91),
    OperationFailure("not primary", 10107),
    OperationFailure("disk full", 14031),
    ServerSelectionTimeoutError("none"),
    WTimeoutError("slow", 64),
    WriteConcernError("no majority", 91),
]
OWN = [
    BulkWriteError({"writeErrors": [{"code": 2}], "writeConcernErrors": []}),
    DuplicateKeyError("taken", 11000),
    InvalidOperation("closed"),
    OperationFailure("no such operator", 2),
    OperationFailure("no such field", 9),
    OperationFailure("write conflict", 112),
    OperationFailure("not allowed", 13),
    TypeError("a bug"),
    ValueError("a bug"),
]


@pytest.mark.parametrize("error", TROUBLES, ids=repr)
def test_error_of_the_server_or_the_connection_is_trouble(error: Exception) -> None:
    assert is_trouble(error)


@pytest.mark.parametrize("error", OWN, ids=repr)
def test_error_of_what_was_sent_excuses_nothing(error: Exception) -> None:
    assert not is_trouble(error)
