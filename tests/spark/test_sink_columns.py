"""Chunks written by columns are the same as those written row by row."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from bson import ObjectId
from pyspark.sql.pandas.types import from_arrow_schema

from microqueue import InvalidPayload, Queue
from microqueue.core import core_of
from microqueue.spark.ids import key_id, key_ids
from microqueue.spark.options import SinkOptions
from microqueue.spark.write import columnar
from microqueue.spark.write.documents import chunks_of
from microqueue.spark.write.sink import Sink
from tests.rejection import rejecting

AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
PLAIN = [
    {"order": n, "text": f"é{n}" if n % 3 else None, "large": n << 30, "at": AT, "share": n / 7}
    for n in range(25)
]
STRUCTS = [{"payload": {"n": n, "in": {"x": n % 2 == 0}}, "order": n} for n in range(25)]
SHAPES: dict[str, tuple[list[dict[str, Any]], dict[str, str]]] = {
    "rows": (PLAIN, {"key": "order"}),
    "options": (PLAIN, {"key": "order", "priority": "7", "delay": "60", "expires_in": "900"}),
    "name": (PLAIN, {"key": "order", "name": "pay"}),
    "held": (PLAIN, {"key": "order", "hold": "true", "expires_in": "900"}),
    "structs": (STRUCTS, {"key": "order"}),
    "keys of several columns": (PLAIN, {"key": "order,at_all"}),
    "without keys": (PLAIN, {"keyless": "true"}),
}
INSTANT = pa.timestamp("us", "UTC")
MADE_AT_RANDOM = {"_id", "position", "created_at", "updated_at", "next_retry_at"}


class Seen:
    """Counts the chunks encoded by columns, or prevents that way."""

    def __init__(self, *, allowed: bool) -> None:
        self.allowed, self.chunks = allowed, 0
        self._usual = columnar.columnar_documents

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        made = self._usual(*arguments, **options) if self.allowed else None
        self.chunks += made is not None
        return made


def sink(uri: str, table: pa.Table, **options: Any) -> Sink:
    given = {"uri": uri, "queue": "orders", "batch_rows": "10", **options}
    return Sink(from_arrow_schema(table.schema), SinkOptions.of(given))


def frame(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist([{**row, "at_all": "é"} if "at" in row else row for row in rows])


def written(
    uri: str, table: pa.Table, monkeypatch: Any, *, columns: bool, **options: str
) -> tuple[Any, int]:
    """Write a frame by columns or by rows; return how many chunks were encoded by columns."""
    seen = Seen(allowed=columns)
    with monkeypatch.context() as patch:
        patch.setattr(columnar, "columnar_documents", seen)
        one = sink(uri, table, **options)
        one.load = "load"
        result = one.write(table.to_batches(max_chunksize=7))
    return result, seen.chunks


def comparable(queue: Queue[Any], *, keyed: bool) -> list[Any]:
    """Return the stored documents by position, as ordered lists of fields."""
    found = list(core_of(queue).collections.tasks.find().sort("position"))
    for start in range(0, 25, 10):
        places = [task["position"] for task in found[start : start + 10]]
        assert places == list(range(places[0], places[0] + len(places)))
    assert keyed or all(isinstance(task["_id"], ObjectId) for task in found)
    drop = MADE_AT_RANDOM - {"_id"} if keyed else MADE_AT_RANDOM
    for task in found:
        for field in ("next_retry_at", "expires_at"):
            if field in task.get("held", {}):
                task["held"][field] = bool(task["held"][field])
        for field in {"expires_at", "deadline_at"} & set(task):
            if task[field].year < 9999:  # Otherwise it is held.
                task[field] = (task[field] - task["created_at"]).seconds // 30
    return [
        [(name, type(value), value) for name, value in task.items() if name not in drop]
        for task in found
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_both_ways_store_the_same(
    shape: str, database_uri: str, make_queue: Any, monkeypatch: Any
) -> None:
    rows, options = SHAPES[shape]
    queue, table, keyed = make_queue("orders"), frame(rows), "keyless" not in options
    result, chunks = written(database_uri, table, monkeypatch, columns=True, **options)
    assert (result.inserted, result.duplicates, result.queues) == (25, 0, {"orders"})
    assert chunks == 3
    one = comparable(queue, keyed=keyed)
    core_of(queue).collections.tasks.drop()
    assert written(database_uri, table, monkeypatch, columns=False, **options) == (result, 0)
    assert comparable(queue, keyed=keyed) == one


@pytest.mark.parametrize("first", [True, False])
def test_a_retry_the_other_way_recognises_its_tasks(
    first: bool, database_uri: str, make_queue: Any, monkeypatch: Any
) -> None:
    table = frame(PLAIN)
    for columns in (first, not first):
        result, _ = written(database_uri, table, monkeypatch, columns=columns, key="order")
        assert (result.inserted, result.duplicates) == (25, 0)
    assert make_queue("orders").stats().pending == 25


@pytest.mark.parametrize(
    ("rows", "options", "chunks"),
    [
        ([{"payload": {"n": n}, "order": n, "priority": n} for n in range(25)], {}, 0),
        ([{"payload": {"n": n}, "order": n, "queue": "x"} for n in range(25)], {"queue": ""}, 0),
        ([{"order": n, "tags": ["a"]} for n in range(25)], {}, 0),
        ([{"order": n, "text": "x" * 600_000} for n in range(25)], {}, 3),
        ([{"order": n, "tags": None} for n in range(25)], {}, 3),
    ],
    ids=["row options", "row queues", "lists", "large", "nulls"],
)
def test_rows_that_are_not_uniform_are_read_one_by_one(
    rows: list[dict[str, Any]],
    options: dict[str, str],
    chunks: int,
    database_uri: str,
    monkeypatch: Any,
    make_queue: Any,
) -> None:
    given = {name: value for name, value in {"queue": "orders", **options}.items() if value}
    seen = Seen(allowed=True)
    monkeypatch.setattr(columnar, "columnar_documents", seen)
    table = frame(rows)
    options = {"uri": database_uri, "batch_rows": "10", "key": "order", **given}
    one = Sink(from_arrow_schema(table.schema), SinkOptions.of(options))
    assert one.write(table.to_batches()).inserted == 25
    assert seen.chunks == chunks
    assert core_of(make_queue("orders")).collections.tasks.count_documents({}) == 25


@pytest.mark.parametrize(
    ("row", "argument", "code"),
    [
        ({"order": 7, "text": "x" * 16_000_000}, "payload", "too_large"),
        ({"order": None, "text": "x"}, "order", "null_key"),
        ({"payload": None, "order": 7}, "payload", "not_a_document"),
    ],
    ids=["too large", "no key", "no payload"],
)
def test_a_row_that_cannot_become_a_task_is_rejected(
    row: dict[str, Any], argument: str, code: str, database_uri: str, make_queue: Any
) -> None:
    like = {**row, "order": 1, **({"payload": {"n": 1}} if "payload" in row else {"text": "x"})}
    table = pa.Table.from_pylist([like, row])
    with rejecting(argument, code=code, kind=InvalidPayload):
        sink(database_uri, table, key="order").write(table.to_batches())
    assert make_queue("orders").stats().pending == 0


@pytest.mark.parametrize("kind", [pa.int64(), pa.bool_(), pa.float64(), pa.binary(), INSTANT])
def test_a_payload_that_is_no_document_is_rejected_before_anything_is_written(
    kind: pa.DataType, database_uri: str
) -> None:
    table = pa.table({"payload": pa.array([None], kind), "order": [1]})
    shown = from_arrow_schema(table.schema)["payload"].dataType.simpleString()
    with rejecting("payload", shown, code="wrong_type"):
        sink(database_uri, table, key="order")


@pytest.mark.parametrize(
    ("table", "column", "name"),
    [
        (pa.table([pa.array([1])] * 3, names=["order", "a", "a"]), "columns", "a"),
        (pa.table([pa.array([1])] * 2, names=["order", "order"]), "columns", "order"),
        (
            pa.table(
                [
                    pa.array([1]),
                    pa.StructArray.from_arrays([pa.array([1])] * 2, names=["a", "a"]),
                ],
                names=["order", "inner"],
            ),
            "inner",
            "a",
        ),
    ],
    ids=["columns", "keys", "fields"],
)
def test_repeated_names_are_rejected(
    table: pa.Table, column: str, name: str, database_uri: str
) -> None:
    with rejecting(column, name, code="repeated_name"):
        sink(database_uri, table, key="order")


def test_documents_far_larger_than_their_columns_are_encoded_row_by_row(
    database_uri: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(columnar, "MAX_CHUNK_BYTES", 50_000)
    table = pa.table({"order": range(25), **{f"flag {n}": [True] * 25 for n in range(1_000)}})
    assert table.nbytes < 50_000
    result, chunks = written(database_uri, table, monkeypatch, columns=True, key="order")
    assert (result.inserted, chunks) == (25, 0)


@pytest.mark.parametrize("keys", [["", "17", "é" * 200], [-1, 0, 2**40]])
def test_ids_of_many_keys_are_those_of_each(
    keys: list[Any], database_uri: str, make_queue: Any
) -> None:
    table = pa.table({"order": keys})
    sink(database_uri, table, key="order").write(table.to_batches())
    found = core_of(make_queue("orders")).collections.tasks.find()
    ids = [key_id("orders", str(key)) for key in keys]
    assert {task["_id"]: task["payload"]["order"] for task in found} == dict(
        zip(ids, keys, strict=True)
    )
    assert list(key_ids("orders", map(str, keys))) == ids


def test_strings_that_are_not_utf8_are_never_stored(database_uri: str, make_queue: Any) -> None:
    table = pa.table({"order": pa.array([1]), "text": pa.array([b"\xff"]).view(pa.string())})
    with pytest.raises(pa.ArrowException):
        sink(database_uri, table, key="order").write(table.to_batches())
    assert make_queue("orders").stats().pending == 0


@pytest.mark.parametrize("sizes", [[25], [7, 7, 7, 4], [0, 10, 0, 15], [1] * 25])
def test_chunks_do_not_depend_on_the_batches(sizes: list[int]) -> None:
    numbers, batches = iter(range(25)), []
    for size in sizes:
        some = [next(numbers) for _ in range(size)]
        batches.append(pa.record_batch({"n": pa.array(some, pa.int64())}))
    chunks = [chunk.column("n").to_pylist() for chunk in chunks_of(batches, 10)]
    assert chunks == [[*range(10)], [*range(10, 20)], [*range(20, 25)]]
