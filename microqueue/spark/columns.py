"""The columns that the source offers, and which of them a read gives.

Each is a field of the task's document under its own name; only ``id`` differs: it is ``_id``
as text, and ``id_type`` tells what it was.
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

from microqueue.arguments import refused

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

PLAIN: dict[str, DataType] = {
    "id": StringType(),
    "queue": StringType(),
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
"""What a read gives that names no columns: cheap, and enough for most questions."""

ON_REQUEST: dict[str, DataType] = {
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
"""What a read gives when it is named; the last three as JSON text."""

KNOWN = {**PLAIN, **ON_REQUEST}

JSON_COLUMNS = frozenset({"headers", "result", "payload"})
COMPUTED = frozenset({"id", "id_type", "drifted"})
REQUIRED = frozenset(
    {"queue", "status", "priority", "attempts", "max_attempts", "created_at", "updated_at"}
)
"""What every task has: one of these that is missing counts as drift."""

DEFAULTS: dict[str, Any] = {"redelivered": False, "replays": 0, "crashes": 0}
"""What a task has that does not say."""

EVERY = "*"
PAYLOAD_OFF = "off"
PAYLOAD_JSON = "json"


def chosen_columns(columns: Sequence[str] | None, payload: str | None) -> list[str]:
    """Give the names of the columns of a read; ``*`` stands for all of them."""
    if columns is None:
        chosen = list(PLAIN)
    elif list(columns) == [EVERY]:
        chosen = [name for name in KNOWN if name != "payload" or payload != PAYLOAD_OFF]
    else:
        chosen = list(columns)
    unknown = [name for name in chosen if name not in KNOWN]
    if unknown or not chosen:
        raise refused("columns", ",".join(chosen), f"give some of {', '.join(KNOWN)}")
    if len(set(chosen)) < len(chosen):
        raise refused("columns", ",".join(chosen), "name each column once")
    if payload is None or payload == PAYLOAD_OFF or "payload" in chosen:
        return chosen
    return [*chosen, "payload"]


def ddl(columns: Sequence[str], payload: str | None) -> str:
    """Write the schema of a read as Spark's DDL, which a typed payload comes in, too."""
    typed = payload not in {None, PAYLOAD_OFF, PAYLOAD_JSON}
    return ", ".join(
        f"`{name}` struct<{payload}>"
        if name == "payload" and typed
        else f"`{name}` {KNOWN[name].simpleString()}"
        for name in columns
    )
