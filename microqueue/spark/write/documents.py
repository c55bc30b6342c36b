"""Convert the rows of a DataFrame to documents of new tasks.

If the frame has a column ``payload``, that is the payload, and columns named after enqueue options
set those options. Otherwise each whole row is a payload. Chunks of plain rows are encoded column
by column (see ``columnar``), all others row by row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from bson import ObjectId
from bson.codec_options import CodecOptions
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DayTimeIntervalType,
    IntegralType,
    MapType,
    NullType,
    StringType,
    StructType,
)

from microqueue.arguments import check_name, invalid_argument
from microqueue.errors import InvalidArgument, InvalidPayload
from microqueue.extended_json import from_json
from microqueue.model import changed, shorten
from microqueue.new_task import EnqueueOptions, NewTask
from microqueue.operations import bulk_load
from microqueue.operations.call import Document
from microqueue.operations.enqueue import new_document
from microqueue.payload import LARGEST_DOCUMENT, PayloadCodec, codec_of, encode_all
from microqueue.settings import QueueSettings
from microqueue.spark import error_codes
from microqueue.spark.ids import key_id, key_ids
from microqueue.spark.options import SinkOptions
from microqueue.spark.value_conversion import Converter, check_column_names, converter_of
from microqueue.spark.write import columnar
from microqueue.worker.handlers import load_model

PAYLOAD, QUEUE = "payload", "queue"
OPTION_COLUMNS = frozenset(EnqueueOptions.__annotations__) - {
    "backoff",
    "task_id",
    "on_duplicate",
    "dedupe_for",
}
KEY_TYPES = (StringType, IntegralType)
PAYLOAD_TYPES = (StructType, MapType, StringType, NullType)


class RowTask(NamedTuple):
    """The new task of a row. ``new`` is None if the row does not set any enqueue option."""

    queue: str
    task_id: ObjectId | None
    payload: dict[str, Any]
    new: NewTask[Any] | None


class RowReader:
    """Reads the rows of one frame.

    Raises:
        InvalidArgument: The frame cannot be written with these options.
    """

    def __init__(self, schema: StructType, options: SinkOptions, codec: PayloadCodec[Any]) -> None:
        self._options = options
        self._codec = codec
        self._types = {field.name: field.dataType for field in schema.fields}
        self.has_payload_column = PAYLOAD in self._types
        """Whether a column is the payload; otherwise the whole row is."""
        self._queues: set[str] = set()
        check_column_names("columns", schema)
        self._check_columns()
        self._option_columns = [
            name for name in OPTION_COLUMNS if self.has_payload_column and name in self._types
        ]
        self.defaults = NewTask[Any](payload={}, **options.task_options)
        """The options of a row that does not set any."""
        nested = any(map(_may_be_unencodable, self._types.values()))
        self.needs_check = nested or self.has_payload_column or options.model is not None
        """Whether BSON may be unable to hold a row of any size."""
        self._converters = {
            name: converter
            for name, kind in self._types.items()
            if (converter := self._converter(name, kind)) is not None
        }
        unchecked = not self._converters and not self._option_columns and options.model is None
        self.uniform = unchecked and options.queue is not None
        """Whether tasks differ only in key and payload, and payloads are stored unchanged."""

    def read(self, batch: pa.RecordBatch) -> Iterator[RowTask]:
        """Yield the task of each row."""
        rows = _rows(batch)
        return self._read_uniform(rows) if self._is_uniform(batch) else self._read_rows(rows)

    def _is_uniform(self, batch: pa.RecordBatch) -> bool:
        """Return whether each row is a payload as it is, with a key of one column."""
        key = self._options.key
        if self.has_payload_column or not self.uniform or len(key) != 1:
            return False
        return not batch.column(key[0]).null_count

    def _read_uniform(self, rows: list[dict[str, Any]]) -> Iterator[RowTask]:
        """Yield the same as :meth:`_read_rows`, in a third of the time."""
        (key,), queue = self._options.key, str(self._options.queue)
        task_ids = key_ids(queue, (str(row[key]) for row in rows))
        return (
            RowTask(queue, task_id, row, None) for task_id, row in zip(task_ids, rows, strict=True)
        )

    def _read_rows(self, rows: list[dict[str, Any]]) -> Iterator[RowTask]:
        for row in rows:
            key = None
            try:
                key = self._key(row)
                for name, convert in self._converters.items():
                    row[name] = convert(row[name])
                queue = self._options.queue or row[QUEUE]
                yield self._task(row, queue, key)
            except InvalidArgument as exc:
                where = "a row" if key is None else f"the row with key {shorten(key)}"
                raise InvalidPayload(
                    f"{where} cannot become a task: {exc}",
                    argument=exc.argument,
                    value=exc.value,
                    code=exc.code,
                    field=exc.field if isinstance(exc, InvalidPayload) else None,
                    key=key,
                ) from exc

    def _task(self, row: dict[str, Any], queue: Any, key: str | None) -> RowTask:
        if queue not in self._queues:
            self._queues.add(check_name(queue))
        task_id = None if key is None else key_id(queue, key)
        payload = row[PAYLOAD] if self.has_payload_column else row
        if self._options.model is not None or type(payload) is not dict:
            _, payload = self._codec.accept(payload)
        new = None
        if row_options := {
            name: row[name] for name in self._option_columns if row[name] is not None
        }:
            options = {**self._options.task_options, **row_options}
            new = NewTask[Any](payload=payload, task_id=task_id, **options)
        return RowTask(queue, task_id, payload, new)

    def _key(self, row: dict[str, Any]) -> str | None:
        names = self._options.key
        if not names:
            return None
        for name in names:
            if row[name] is None:
                raise invalid_argument(
                    name, None, "a key cannot be null", code=error_codes.NULL_KEY
                )
        if len(names) == 1:
            return str(row[names[0]])
        return json.dumps([row[name] for name in names])

    def _check_columns(self) -> None:
        columns = ", ".join(self._types)
        for name in self._options.key:
            kind = self._types.get(name)
            if kind is None:
                raise invalid_argument(
                    "key",
                    name,
                    f"give one of the columns {columns}",
                    code=error_codes.UNKNOWN_COLUMN,
                )
            if not isinstance(kind, KEY_TYPES):
                reason = f"its type is {kind.simpleString()}; cast it to string"
                raise invalid_argument("key", name, reason, code=error_codes.WRONG_TYPE)
        if self._options.queue is None and not (self.has_payload_column and QUEUE in self._types):
            raise invalid_argument(
                QUEUE,
                None,
                "give the option queue, or the columns payload and queue",
                code=error_codes.NO_QUEUE,
            )
        if self.has_payload_column:
            if not isinstance(kind := self._types[PAYLOAD], PAYLOAD_TYPES):
                reason = "a payload is a struct, a map or JSON text; cast the column"
                raise invalid_argument(
                    PAYLOAD, kind.simpleString(), reason, code=error_codes.WRONG_TYPE
                )
            known = {PAYLOAD, QUEUE, *OPTION_COLUMNS, *self._options.key}
            if unknown := [name for name in self._types if name not in known]:
                raise invalid_argument(
                    "columns",
                    ", ".join(unknown),
                    f"allowed with payload: {', '.join(sorted(known - {PAYLOAD}))}",
                    code=error_codes.UNKNOWN_COLUMN,
                )

    def _converter(self, name: str, kind: DataType) -> Converter | None:
        if (
            self.has_payload_column
            and name in {PAYLOAD, "headers"}
            and isinstance(kind, StringType)
        ):
            return partial(_parse_json, name)
        if self.has_payload_column and name == "delay" and isinstance(kind, DayTimeIntervalType):
            return None
        is_payload = not self.has_payload_column or name == PAYLOAD
        return converter_of(name, kind, for_model=is_payload and self._options.model is not None)


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows as dicts, as ``to_pylist`` does, but faster."""
    names = batch.schema.names
    return [
        dict(zip(names, row, strict=True)) for row in zip(*map(_values, batch.columns), strict=True)
    ]


def _values(column: pa.Array) -> list[Any]:
    """Return the values of a column. numpy is faster, but has no null among numbers."""
    kind = column.type
    plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if pa.types.is_string(kind) or (plain and not column.null_count):
        return list(column.to_numpy(zero_copy_only=False).tolist())
    return list(column.to_pylist())


def _parse_json(column: str, text: str | None) -> Any:
    """Parse plain or Extended JSON."""
    if text is None:
        return None
    try:
        return from_json(text)
    except (ValueError, TypeError) as exc:
        raise InvalidPayload(
            f"{column}={shorten(text)} is not JSON: {exc}",
            argument=column,
            value=text,
            code=error_codes.NOT_JSON,
        ) from exc


def _may_be_unencodable(kind: DataType) -> bool:
    """Return whether values may have field names that BSON rejects, or be far larger in BSON."""
    if isinstance(kind, StructType):
        return any(_may_be_unencodable(field.dataType) for field in kind.fields)
    # BSON stores the index of each array item as a field name.
    return isinstance(kind, MapType | ArrayType)


class Stamp(NamedTuple):
    """The time and token of a chunk's documents, and the position of the first one."""

    now: datetime
    position: int
    token: str


class Chunk(NamedTuple):
    """Documents with their ids and queues, and in encoded form if that exists."""

    documents: Sequence[Document]
    ids: Sequence[Any]
    encoded: Sequence[Any] | None
    queues: set[str]


class ChunkBuilder:
    """Builds the documents of one frame, a chunk of rows at a time.

    Raises:
        InvalidArgument: The frame cannot be written with these options.
    """

    def __init__(
        self, schema: StructType, options: SinkOptions, *, settings: QueueSettings, load: str
    ) -> None:
        self._options = options
        self._settings = settings
        self._load = load
        model = None if options.model is None else load_model(options.model)
        self._rows = RowReader(schema, options, codec_of(model))

    def build(self, rows: pa.Table, stamp: Stamp, codec_options: CodecOptions[Any]) -> Chunk:
        """Return the documents of a chunk of rows."""
        if self._rows.uniform:
            columns = self._from_columns(rows, stamp, codec_options)
            if columns is not None:
                return Chunk(columns, columns.ids, columns.encoded, {str(self._options.queue)})
        batches = rows.to_batches()
        tasks = [task for batch in batches for task in self._rows.read(batch)]
        documents = self._documents(tasks, stamp)
        large = any(batch.nbytes > LARGEST_DOCUMENT // 2 for batch in batches)
        check = large or self._rows.needs_check
        encoded = encode_all(documents, codec_options) if check else None
        ids = [document["_id"] for document in documents]
        return Chunk(documents, ids, encoded, {document["queue"] for document in documents})

    def _from_columns(
        self, rows: pa.Table, stamp: Stamp, codec_options: CodecOptions[Any]
    ) -> columnar.ColumnarDocuments | None:
        task_id = ObjectId() if self._options.key else None
        pattern = RowTask(str(self._options.queue), task_id, {}, None)
        return columnar.columnar_documents(
            rows,
            self._document(pattern, stamp, stamp.position),
            key=self._options.key,
            has_payload_column=self._rows.has_payload_column,
            codec_options=codec_options,
        )

    def _documents(self, tasks: list[RowTask], stamp: Stamp) -> list[Document]:
        """Return the documents of tasks. Without options, they copy the first of their queue."""
        patterns: dict[str, Document] = {}
        documents = []
        for position, task in enumerate(tasks, stamp.position):
            pattern = patterns.get(task.queue) if task.new is None else None
            if pattern is None:
                document = self._document(task, stamp, position)
                if task.new is None:
                    patterns[task.queue] = document
            else:
                document = {
                    **pattern,
                    "_id": task.task_id or ObjectId(),
                    "payload": task.payload,
                    "position": position,
                }
            documents.append(document)
        return documents

    def _document(self, task: RowTask, stamp: Stamp, position: int) -> Document:
        document = new_document(
            task.new or changed(self._rows.defaults, task_id=task.task_id),
            queue=task.queue,
            payload=task.payload,
            settings=self._settings,
            now=stamp.now,
            position=position,
            insert_token=stamp.token,
        )
        return bulk_load.held(document, self._load) if self._options.hold else document


def chunks_of(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    """Yield batches of any sizes as chunks of ``size`` rows; the last one may have fewer."""
    waiting: list[pa.RecordBatch] = []
    missing = size
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            part = batch.slice(start, missing)
            waiting.append(part)
            start, missing = start + part.num_rows, missing - part.num_rows
            if not missing:
                yield pa.Table.from_batches(waiting)
                waiting, missing = [], size
    if waiting:
        yield pa.Table.from_batches(waiting)
