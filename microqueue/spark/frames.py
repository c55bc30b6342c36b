"""Read tasks as a DataFrame."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from microqueue.errors import OperationFailed
from microqueue.extended_json import to_canonical_json
from microqueue.model import Model
from microqueue.operations import bulk_load
from microqueue.spark.location import Location
from microqueue.spark.options import SelectionOptions, SinkOptions, TimeField, resolve_uri

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
    column ``drifted``. The other options are as in docs/spark.md.
    """
    given: dict[str, Any] = {
        "uri": resolve_uri(uri),
        "database": database,
        "collection": collection,
        "queue": join_names(queue),
        "status": join_names(status),
        "since": _iso(since),
        "until": _iso(until),
        "time": time,
        "query": to_canonical_json(query) if isinstance(query, Mapping) else query,
        "columns": join_names(columns),
        "payload": _ddl_fields(payload) if isinstance(payload, StructType) else payload,
        "partitions": partitions,
        "mode": mode,
        "read_preference": read_preference,
    }
    options = {name: str(value) for name, value in given.items() if value is not None}
    SelectionOptions.of(options)  # Refused here, what is wrong costs no job.
    return spark.read.format(FORMAT).options(**options).load()


def join_names(names: str | Iterable[str] | None) -> str | None:
    """Write several names as one option: as JSON, for a name may have a comma."""
    return names if names is None or isinstance(names, str) else json.dumps(list(names))


def _iso(instant: datetime | str | None) -> str | None:
    return instant.isoformat() if isinstance(instant, datetime) else instant


def _ddl_fields(schema: StructType, between: str = " ") -> str:
    return ", ".join(
        f"`{field.name.replace('`', '``')}`{between}{_ddl_type(field.dataType)}"
        for field in schema.fields
    )


def _ddl_type(kind: DataType) -> str:
    """Write a type with its names quoted, which ``simpleString`` leaves as they are."""
    if isinstance(kind, StructType):
        return f"struct<{_ddl_fields(kind, ':')}>"
    if isinstance(kind, ArrayType):
        return f"array<{_ddl_type(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"map<{_ddl_type(kind.keyType)},{_ddl_type(kind.valueType)}>"
    return kind.simpleString()


class LoadReport(Model):
    """What a write did: tasks that are new, and rows whose task was there already."""

    inserted: int
    duplicates: int
    released: int | None = None
    """Of a held load: how many tasks workers could see at the end, at once."""


def write_tasks(
    frame: DataFrame,
    *,
    uri: str | None = None,
    database: str | None = None,
    collection: str | None = None,
    queue: str | None = None,
    key: str | Iterable[str] | None = None,
    keyless: bool = False,
    hold: bool = False,
    model: str | None = None,
    batch_rows: int | None = None,
    **task_options: Any,
) -> LoadReport:
    """Add a task for each row, once, however often Spark repeats parts or you repeat this.

    With a column ``payload`` (a struct, a map or JSON text), the columns named after the options
    of a task (``priority``, ``delay``, ``eta``, ``dedupe_key``, ...) are that; without one, each
    row is a payload. ``key`` names the columns that make a row what it is; ``task_options`` hold
    for rows that do not say otherwise. With ``hold``, workers see all tasks at the end, or, when
    the write fails, none.
    """
    name = uuid4().hex
    given: dict[str, Any] = {
        "uri": resolve_uri(uri),
        "database": database,
        "collection": collection,
        "queue": queue,
        "key": join_names(key),
        "keyless": keyless or None,
        "hold": hold or None,
        "model": model,
        "batch_rows": batch_rows,
        "load": name,
        **{option: _in_seconds(value) for option, value in task_options.items()},
    }
    options = {option: str(value) for option, value in given.items() if value is not None}
    checked = SinkOptions.of(options)  # Refused here, what is wrong costs no job.
    frame.write.format(FORMAT).options(**options).mode("append").save()
    with Location(checked) as place:
        report = place.run(bulk_load.take_report(name))
    if report is None:
        raise OperationFailed(f"load {name!r} left no report; the tasks are written")
    return LoadReport(**{field: report.get(field) for field in LoadReport.model_fields})


def _in_seconds(value: Any) -> Any:
    return value.total_seconds() if isinstance(value, timedelta) else value
