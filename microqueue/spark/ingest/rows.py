"""Validate the rows of an ingest, and add them as tasks; runs in the executors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from pyspark.sql.types import StructType

from microqueue.arguments import invalid_argument
from microqueue.errors import InvalidArgument, InvalidPayload
from microqueue.extended_json import from_json
from microqueue.new_task import NewTask
from microqueue.payload import codec_of
from microqueue.settings import QueueSettings
from microqueue.spark import error_codes
from microqueue.spark.ids import key_id
from microqueue.spark.location import LocationOptions, location_of, server_now
from microqueue.spark.task_inserter import CHUNK, TaskInserter
from microqueue.spark.value_conversion import (
    Converter,
    check_column_names,
    convert_fields,
    converter_of,
)
from microqueue.worker.handlers import load_model

CORRUPT = "_corrupt"
"""The column in which Spark puts a line of CSV that does not match the header."""

OUTCOME = "added long, duplicates long, rejected long, reject string"


class Loader:
    """Validates rows and adds tasks; Spark sends it to the executors."""

    def __init__(
        self,
        location: LocationOptions,
        settings: QueueSettings,
        *,
        queue: str,
        model: str | type[Any] | None,
        key: str | None,
        run: str,
        priority: int,
        name: str | None,
        kind: str,
        columns: StructType,
        write: bool,
    ) -> None:
        self.location, self.settings, self.queue, self.model = location, settings, queue, model
        self.key, self.run, self.priority, self.name = key, run, priority, name
        self.kind, self.columns, self.write = kind, columns, write

    def check(self) -> None:
        """Raise if the model or the columns cannot be used, before anything is read."""
        codec_of(self._model())
        self._converters()

    def _model(self) -> Any:
        return load_model(self.model) if isinstance(self.model, str) else self.model

    def _converters(self) -> dict[str, Converter]:
        """Return what converts columns for the sink, or for the model."""
        check_column_names("columns", self.columns)
        return {
            field.name: convert
            for field in self.columns.fields
            if (
                convert := converter_of(
                    field.name, field.dataType, for_model=self.model is not None
                )
            )
        }

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Add the rows of each batch, and yield the counts and the rejected rows."""
        location, now = location_of(self.location), server_now(self.location)
        inserter = TaskInserter(location, settings=self.settings, now=now)
        make_document = _TaskMaker(self, inserter, self._model(), self._converters())
        for batch in batches:
            rows = batch.to_pylist()
            for start in range(0, len(rows), CHUNK):
                documents: list[dict[str, Any]] = []
                bad: list[str] = []
                for row in rows[start : start + CHUNK]:
                    try:
                        documents.append(make_document(row))
                    except _Reject as reject:
                        bad.append(reject.line)
                added, others = inserter.add(documents) if self.write else (len(documents), 0)
                yield _outcome(added, others, bad)


def _outcome(added: int, duplicates: int, bad: list[str]) -> pa.RecordBatch:
    """Return one row of counts, and one for each rejected row."""
    counts = [(added, duplicates, 0, None), *((0, 0, 1, line) for line in bad)]
    columns = list(zip(*counts, strict=True))
    types = [pa.int64(), pa.int64(), pa.int64(), pa.string()]
    arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, ["added", "duplicates", "rejected", "reject"])


class _Reject(Exception):
    """A row is not valid; ``line`` is for the reject file."""

    def __init__(self, row: Any, reasons: list[dict[str, str]]) -> None:
        super().__init__(reasons)
        shown = to_jsonable_python(row, fallback=str, bytes_mode="base64")
        self.line = json.dumps({"row": shown, "reasons": reasons}, ensure_ascii=False)


class _TaskMaker:
    """Makes the document of a task from a row, or raises ``_Reject``."""

    def __init__(
        self, loader: Loader, inserter: TaskInserter, model: Any, converters: dict[str, Converter]
    ) -> None:
        self._loader, self._inserter, self._converters = loader, inserter, converters
        self._codec = codec_of(model)
        self._adapter = None if model is None else TypeAdapter[Any](model)

    def __call__(self, numbered: dict[str, Any]) -> dict[str, Any]:
        row = _fields(numbered["row"], self._loader.kind)
        try:
            payload = convert_fields(row, self._converters)
            if self._adapter is not None:
                payload = self._codec.dump(self._adapter.validate_python(payload))
            new = NewTask[Any](
                payload=None,
                task_id=key_id(self._loader.queue, self._identity(row, numbered)),
                priority=self._loader.priority,
                name=self._loader.name,
            )
            return self._inserter.document(
                self._loader.queue, new, payload, token=self._token(numbered)
            )
        except ValidationError as exc:
            raise _Reject(row, _reasons(exc)) from exc
        except (InvalidPayload, InvalidArgument) as exc:
            reason = {"field": exc.argument or "", "reason": str(exc)}
            raise _Reject(row, [reason]) from exc

    def _identity(self, row: dict[str, Any], numbered: dict[str, Any]) -> str:
        key = self._loader.key
        if key is None:
            return _row_id(numbered)
        if row.get(key) is None:
            raise invalid_argument(key, None, "the key is missing", code=error_codes.NULL_KEY)
        value = row[key]
        if isinstance(value, datetime) and value.tzinfo is not None:
            value = value.astimezone(UTC)  # Spark uses the timezone of the session.
        return str(value)

    def _token(self, numbered: dict[str, Any]) -> str:
        return f"ingest:{self._loader.run}/{_row_id(numbered)}"


def _row_id(numbered: dict[str, Any]) -> str:
    return f"{numbered['digest']}/{numbered['number']}"


def _fields(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the fields of a row: of a line of JSON, of CSV without empty ones, or all."""
    if kind == "json":
        text = row["value"]
        try:
            fields = from_json(text)
        except (ValueError, TypeError) as exc:
            reason = {"field": "", "reason": f"it is not JSON: {exc}"}
            raise _Reject(text, [reason]) from exc
        if not isinstance(fields, dict):
            raise _Reject(fields, [{"field": "", "reason": "it is not a JSON object"}])
        return fields
    if kind != "csv":
        return row
    corrupt = row.pop(CORRUPT, None)
    if corrupt is not None:
        reason = {"field": "", "reason": "it has more or fewer fields than the header"}
        raise _Reject(corrupt, [reason])
    return {name: value for name, value in row.items() if value is not None}


def _reasons(exc: ValidationError) -> list[dict[str, str]]:
    """Return everything that is wrong with a row, field by field."""
    return [
        {"field": ".".join(str(part) for part in error["loc"]), "reason": error["msg"]}
        for error in exc.errors(include_url=False, include_context=False)
    ]
