"""Read tasks as a DataFrame."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from microqueue.spark.extended import to_exact_json
from microqueue.spark.options import SelectionOptions, TimeField, resolve_uri

FORMAT = "microqueue"


def read_tasks(
    spark: SparkSession,
    *,
    uri: str | None = None,
    database: str | None = None,
    collection: str | None = None,
    queue: str | Iterable[str] | None = None,
    status: str | Iterable[str] | None = None,
    since: datetime | str | None = None,
    until: datetime | str | None = None,
    time: TimeField | None = None,
    query: Mapping[str, Any] | str | None = None,
    columns: str | Iterable[str] | None = None,
    payload: str | StructType | None = None,
    partitions: int | None = None,
    mode: str | None = None,
    read_preference: str | None = None,
) -> DataFrame:
    """Load tasks, freshly at each call: what is asked here is all that MongoDB sends.

    ``since`` (included) and ``until`` (not included) are about ``time``, by default
    ``created_at``. ``payload`` is ``"json"`` for text, or a schema such as
    ``"to string, urgent boolean"``; without it, payloads stay in MongoDB. ``mode="strict"``
    refuses a value of another type than its column's, which is else null and counted in the
    column ``drifted``. The other options are as in docs/pipeline.md.
    """
    given: dict[str, Any] = {
        "uri": resolve_uri(uri),
        "database": database,
        "collection": collection,
        "queue": joined(queue),
        "status": joined(status),
        "since": _text(since),
        "until": _text(until),
        "time": time,
        "query": to_exact_json(query) if isinstance(query, Mapping) else query,
        "columns": joined(columns),
        "payload": _fields(payload) if isinstance(payload, StructType) else payload,
        "partitions": partitions,
        "mode": mode,
        "read_preference": read_preference,
    }
    options = {name: str(value) for name, value in given.items() if value is not None}
    SelectionOptions.of(options)  # Refused here, what is wrong costs no job.
    return spark.read.format(FORMAT).options(**options).load()


def joined(names: str | Iterable[str] | None) -> str | None:
    """Write several names as one option: as JSON, for a name may have a comma."""
    return names if names is None or isinstance(names, str) else json.dumps(list(names))


def _text(instant: datetime | str | None) -> str | None:
    return instant.isoformat() if isinstance(instant, datetime) else instant


def _fields(schema: StructType, between: str = " ") -> str:
    return ", ".join(
        f"`{field.name.replace('`', '``')}`{between}{_kind(field.dataType)}"
        for field in schema.fields
    )


def _kind(kind: DataType) -> str:
    """Write a type with its names quoted, which ``simpleString`` leaves as they are."""
    if isinstance(kind, StructType):
        return f"struct<{_fields(kind, ':')}>"
    if isinstance(kind, ArrayType):
        return f"array<{_kind(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"map<{_kind(kind.keyType)},{_kind(kind.valueType)}>"
    return kind.simpleString()
