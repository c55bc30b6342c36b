"""The columns of the source, and which of them a read returns.

Each column is the field of the task's document with the same name, except that ``id`` is ``_id``
as text, ``id_type`` is the type of ``_id``, and ``drifted`` counts values of the wrong type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from microqueue.arguments import invalid_argument
from microqueue.spark import error_codes

ERROR = StructType(
    [
        StructField("message", StringType()),
        StructField("code", StringType()),
        StructField("at", TimestampType()),
    ]
)

ATTEMPT = StructType(
    [
        StructField("attempt", IntegerType()),
        StructField("worker_id", StringType()),
        StructField("started_at", TimestampType()),
        StructField("ended_at", TimestampType()),
        StructField("outcome", StringType()),
        StructField("error", ERROR),
    ]
)

BACKOFF = StructType(
    [
        StructField("base_sec", DoubleType()),
        StructField("factor", DoubleType()),
        StructField("max_sec", DoubleType()),
        StructField("jitter", StringType()),
    ]
)

DEFAULT_COLUMNS: dict[str, DataType] = {
    "id": StringType(),
    "queue": StringType(),
    "name": StringType(),
    "status": StringType(),
    "priority": IntegerType(),
    "attempts": IntegerType(),
    "max_attempts": IntegerType(),
    "created_at": TimestampType(),
    "updated_at": TimestampType(),
    "started_at": TimestampType(),
    "finished_at": TimestampType(),
    "next_retry_at": TimestampType(),
    "expires_at": TimestampType(),
    "lease_expires_at": TimestampType(),
    "worker_id": StringType(),
    "redelivered": BooleanType(),
    "replays": IntegerType(),
    "crashes": IntegerType(),
    "dedupe_key": StringType(),
    "backoff_sec": DoubleType(),
    "visibility_timeout_sec": DoubleType(),
    "error": ERROR,
    "drifted": IntegerType(),
}
"""The columns of a read that does not name any: those that are cheap to read."""

OPTIONAL_COLUMNS: dict[str, DataType] = {
    "id_type": StringType(),
    "position": LongType(),
    "lease_token": StringType(),
    "insert_token": StringType(),
    "backoff_policy": BACKOFF,
    "history": ArrayType(ATTEMPT),
    "headers": StringType(),
    "result": StringType(),
    "payload": StringType(),
}
"""Columns that are read only if they are named. The last three are JSON text."""

ALL_COLUMNS = {**DEFAULT_COLUMNS, **OPTIONAL_COLUMNS}

JSON_COLUMNS = frozenset({"headers", "result", "payload"})
COMPUTED_COLUMNS = frozenset({"id", "id_type", "drifted"})
REQUIRED_COLUMNS = frozenset(
    {"queue", "status", "priority", "attempts", "max_attempts", "created_at", "updated_at"}
)
"""Fields that every task has. A missing one counts as drift."""

DEFAULT_VALUES: dict[str, Any] = {"redelivered": False, "replays": 0, "crashes": 0}
"""Values of fields that a document may lack."""

ALL = "*"
PAYLOAD_OFF = "off"
PAYLOAD_JSON = "json"


def select_columns(columns: Sequence[str] | None, payload: str | None) -> list[str]:
    """Return the names of the columns to read; ``*`` selects all.

    Raises:
        InvalidArgument: A name is unknown or repeated, or there is none.
    """
    if columns is None:
        selected = list(DEFAULT_COLUMNS)
    elif list(columns) == [ALL]:
        selected = [name for name in ALL_COLUMNS if name != "payload" or payload != PAYLOAD_OFF]
    else:
        selected = list(columns)
    unknown = [name for name in selected if name not in ALL_COLUMNS]
    if unknown or not selected:
        raise invalid_argument(
            "columns",
            ",".join(selected),
            f"give some of {', '.join(ALL_COLUMNS)}",
            code=error_codes.UNKNOWN_COLUMN,
        )
    if len(set(selected)) < len(selected):
        raise invalid_argument(
            "columns",
            ",".join(selected),
            "name each column once",
            code=error_codes.REPEATED_NAME,
        )
    if payload is None or payload == PAYLOAD_OFF or "payload" in selected:
        return selected
    return [*selected, "payload"]


def ddl(columns: Sequence[str], payload: str | None) -> str:
    """Return the schema of a read as Spark DDL, which is also how a payload schema is given."""
    typed = payload not in {None, PAYLOAD_OFF, PAYLOAD_JSON}
    return ", ".join(
        f"`{name}` struct<{payload}>"
        if name == "payload" and typed
        else f"`{name}` {ALL_COLUMNS[name].simpleString()}"
        for name in columns
    )
