"""Read tasks as a DataFrame, and write a DataFrame as tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Unpack
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from microqueue.errors import OperationFailed
from microqueue.extended_json import to_canonical_json
from microqueue.model import Model, reject_unknown
from microqueue.operations import bulk_load
from microqueue.spark.location import Location, resolve_uri
from microqueue.spark.options import RowDefaults, SelectionOptions, SinkOptions, TimeField

FORMAT = "microqueue"


class LoadReport(Model):
    """The result of a write."""

    inserted: int
    """Tasks that this write added."""
    duplicates: int
    """Rows whose task existed already."""
    released: int | None = None
    """With ``hold``: tasks that became visible to workers at the end of the write."""


def read_tasks(
    spark: SparkSession,
    *,
    uri: str | None = None,
    database: str | None = None,
    collection: str | None = None,
    queue: str | Iterable[str] | None = None,
    name: str | Iterable[str] | None = None,
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
    """Return tasks as a DataFrame. MongoDB sends only what these options select.

    Each use of the DataFrame reads MongoDB again.

    Args:
        spark: The session.
        uri: The MongoDB server. Default: ``MICROQUEUE_URI``, or the running embedded server.
        database: The database. Default: the one in the URI.
        collection: The collection of tasks. Default: ``tasks``.
        queue: One queue or several. Default: all.
        name: One task name or several. Default: all tasks, also those without a name.
        status: One status or several. Default: all.
        since: The first instant, inclusive.
        until: The last instant, exclusive.
        time: The field that ``since`` and ``until`` apply to. Default: ``created_at``.
        query: An additional MongoDB query, as a dict or as Extended JSON.
        columns: The columns to read; ``"*"`` for all. Default: those that are cheap to read.
        payload: ``"json"`` for payloads as text, or a schema such as
            ``"to string, urgent boolean"``. Default: payloads are not read.
        partitions: The number of parts. Default: chosen by the number of matching tasks.
        mode: ``"permissive"`` (the default) reads a value of the wrong type as null and counts it
            in the column ``drifted``; ``"strict"`` raises an error.
        read_preference: The MongoDB read preference. Default: that of the URI.

    Returns:
        The DataFrame. ``docs/spark.md`` describes its columns.

    Raises:
        InvalidArgument: An option is not valid. Checked before any Spark job starts.
    """
    given: dict[str, Any] = {
        "uri": resolve_uri(uri),
        "database": database,
        "collection": collection,
        "queue": _join_names(queue),
        "name": _join_names(name),
        "status": _join_names(status),
        "since": _iso(since),
        "until": _iso(until),
        "time": time,
        "query": to_canonical_json(query) if isinstance(query, Mapping) else query,
        "columns": _join_names(columns),
        "payload": _ddl_fields(payload) if isinstance(payload, StructType) else payload,
        "partitions": partitions,
        "mode": mode,
        "read_preference": read_preference,
    }
    options = _as_text(given)
    SelectionOptions.of(options)  # Fail before a Spark job starts.
    return spark.read.format(FORMAT).options(**options).load()


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
    **task_options: Unpack[RowDefaults],
) -> LoadReport:
    """Add one task per row, exactly once, even if Spark retries parts or you run it again.

    If the frame has a column ``payload`` (a struct, a map or JSON text), that is the payload, and
    columns named after enqueue options (``priority``, ``delay``, ``eta``, ``dedupe_key``, ...) set
    those options. Otherwise each whole row is a payload.

    Args:
        frame: The rows.
        uri: The MongoDB server. Default: ``MICROQUEUE_URI``, or the running embedded server.
        database: The database. Default: the one in the URI.
        collection: The collection of tasks. Default: ``tasks``.
        queue: The queue of all rows. Default: the column ``queue``.
        key: The columns that identify a row. Rows with the same key are the same task.
        keyless: Write without a key. Parts that Spark retries are then written twice.
        hold: Make the tasks visible to workers all at once at the end of the write, or, if the
            write fails, not at all.
        model: A pydantic model that validates each payload, as ``module:Class``.
        batch_rows: Rows per insert. Default: 5,000.
        **task_options: Enqueue options for rows that do not set their own: ``name``, ``priority``,
            ``max_attempts``, ``delay``, ``expires_in``, ``visibility_timeout``.

    Returns:
        How many tasks were added, and how many existed already.

    Raises:
        InvalidArgument: An option is not valid. Checked before any Spark job starts.
    """
    reject_unknown("write_tasks", task_options, RowDefaults.__annotations__, function=write_tasks)
    load = uuid4().hex
    given: dict[str, Any] = {
        "uri": resolve_uri(uri),
        "database": database,
        "collection": collection,
        "queue": queue,
        "key": _join_names(key),
        "keyless": keyless or None,
        "hold": hold or None,
        "model": model,
        "batch_rows": batch_rows,
        "load": load,
        **{name: _in_seconds(value) for name, value in task_options.items()},
    }
    options = _as_text(given)
    checked = SinkOptions.of(options)  # Fail before a Spark job starts.
    frame.write.format(FORMAT).options(**options).mode("append").save()
    with Location(checked) as location:
        report = location.run(bulk_load.take_report(load))
    if report is None:
        raise OperationFailed(f"the tasks of load {load!r} are written, but its report is missing")
    return LoadReport(**{name: report.get(name) for name in LoadReport.model_fields})


def _as_text(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options that are set, as the strings that Spark accepts."""
    return {name: str(value) for name, value in options.items() if value is not None}


def _join_names(names: str | Iterable[str] | None) -> str | None:
    """Return several names as one option: as JSON, because a name may contain a comma."""
    return names if names is None or isinstance(names, str) else json.dumps(list(names))


def _iso(instant: datetime | str | None) -> str | None:
    return instant.isoformat() if isinstance(instant, datetime) else instant


def _in_seconds(value: Any) -> Any:
    return value.total_seconds() if isinstance(value, timedelta) else value


def _ddl_fields(schema: StructType, separator: str = " ") -> str:
    return ", ".join(
        f"`{field.name.replace('`', '``')}`{separator}{_ddl_type(field.dataType)}"
        for field in schema.fields
    )


def _ddl_type(kind: DataType) -> str:
    """Return a type as DDL with quoted field names, which ``simpleString`` does not quote."""
    if isinstance(kind, StructType):
        return f"struct<{_ddl_fields(kind, ':')}>"
    if isinstance(kind, ArrayType):
        return f"array<{_ddl_type(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"map<{_ddl_type(kind.keyType)},{_ddl_type(kind.valueType)}>"
    return kind.simpleString()
