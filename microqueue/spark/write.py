"""Write a DataFrame into a queue, and learn what became of it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from uuid import uuid4

from pyspark.sql import DataFrame

from microqueue.errors import OperationFailed
from microqueue.model import Model
from microqueue.operations import bulk_load
from microqueue.spark.options import SinkOptions, resolve_uri
from microqueue.spark.place import Place
from microqueue.spark.read import FORMAT, joined


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
        "key": joined(key),
        "keyless": keyless or None,
        "hold": hold or None,
        "model": model,
        "batch_rows": batch_rows,
        "load": name,
        **{option: _plain(value) for option, value in task_options.items()},
    }
    options = {option: str(value) for option, value in given.items() if value is not None}
    checked = SinkOptions.of(options)  # Refused here, what is wrong costs no job.
    frame.write.format(FORMAT).options(**options).mode("append").save()
    with Place(checked) as place:
        report = place.run(bulk_load.take_report(name))
    if report is None:
        raise OperationFailed(f"load {name!r} left no report; the tasks are written")
    return LoadReport(**{field: report.get(field) for field in LoadReport.model_fields})


def _plain(value: Any) -> Any:
    return value.total_seconds() if isinstance(value, timedelta) else value
