"""How rows become tasks, and that a retried part changes nothing; without Spark's engine."""

from __future__ import annotations

import threading
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from bson import Decimal128, ObjectId
from pydantic import BaseModel
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    CalendarIntervalType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from microqueue import EnqueueOptions, InvalidPayload, Queue
from microqueue.core import core_of
from microqueue.spark import key_id
from microqueue.spark.frames import write_tasks
from microqueue.spark.options import RowDefaults, SinkOptions
from microqueue.spark.write.documents import OPTION_COLUMNS
from microqueue.spark.write.sink import Sink, Written
from tests.rejection import raising, rejecting
from tests.waiting import lasts

AT = datetime(2126, 3, 1, tzinfo=UTC)


NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001 (that is the point)
N, HUGE = '{"n": 1}', '{"n": 18446744073709551616}'


class Rejected(NamedTuple):
    """What an error says of a row."""

    argument: str
    value: Any
    code: str | None
    key: str | None


class Order(BaseModel):
    order: int
    text: str


MODEL = f"{__name__}:Order"


def sink(uri: str, schema: StructType, **options: Any) -> Sink:
    given = {"uri": uri, "queue": "orders", "key": "order", "batch_rows": "10", **options}
    return Sink(schema, SinkOptions.of({name: str(value) for name, value in given.items()}))


def frame(rows: list[dict[str, Any]], schema: StructType | None = None) -> tuple[Any, StructType]:
    """Return the batches of a part and their schema."""
    if schema is None:
        table = pa.Table.from_pylist(rows)
        return table.to_batches(max_chunksize=7), from_arrow_schema(table.schema)
    arrow = to_arrow_schema(schema, timezone="UTC")
    return pa.Table.from_pylist(rows, schema=arrow).to_batches(max_chunksize=7), schema


def write(uri: str, rows: list[dict[str, Any]], **options: Any) -> Written:
    batches, schema = frame(rows)
    return sink(uri, schema, **options).write(batches)


ROWS = [{"order": n, "text": "x" * n} for n in range(25)]


def stored(queue: Queue[Any]) -> list[Any]:
    return sorted(task["payload"]["order"] for task in core_of(queue).collections.tasks.find())


def test_each_row_is_a_payload(database_uri: str, make_queue: Any) -> None:
    queue = make_queue("orders")
    assert write(database_uri, ROWS) == Written(frozenset({"orders"}), 25, 0)
    tasks = queue.pop_many(100)
    assert [task.payload for task in tasks] == ROWS
    assert tasks[3].id == key_id("orders", "3")


def test_the_same_part_written_again_counts_as_new_and_adds_nothing(
    database_uri: str, make_queue: Any
) -> None:
    batches, schema = frame(ROWS)
    one = sink(database_uri, schema)
    one.write(batches[:2])  # It crashes here, and Spark retries the whole part.
    assert one.write(batches) == Written(frozenset({"orders"}), 25, 0)
    assert stored(make_queue("orders")) == list(range(25))


def test_another_load_of_the_same_rows_finds_duplicates(database_uri: str, make_queue: Any) -> None:
    write(database_uri, ROWS[:20])
    again = write(database_uri, ROWS)
    assert (again.inserted, again.duplicates) == (5, 20)
    assert stored(make_queue("orders")) == list(range(25))


@pytest.mark.parametrize("batch_rows", [1, 4, 100])
def test_rows_with_one_key_are_one_task(
    batch_rows: int, database_uri: str, make_queue: Any
) -> None:
    rows = [{"order": n % 3, "text": str(n)} for n in range(9)]
    written = write(database_uri, rows, batch_rows=batch_rows)
    assert (written.inserted, written.duplicates) == (3, 6)
    texts = [
        task["payload"]["text"] for task in core_of(make_queue("orders")).collections.tasks.find()
    ]
    assert sorted(texts) == ["0", "1", "2"]  # The first of each.


def test_two_concurrent_attempts_write_each_row_once(database_uri: str, make_queue: Any) -> None:
    batches, schema = frame([{"order": n} for n in range(2_000)])
    one = sink(database_uri, schema, batch_rows=50)
    results: list[Written] = []
    threads = [
        threading.Thread(target=lambda: results.append(one.write(batches))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(one.inserted, one.duplicates) for one in results] == [(2_000, 0)] * 3
    assert stored(make_queue("orders")) == list(range(2_000))


def test_the_same_key_in_two_queues_is_two_tasks(database_uri: str, make_queue: Any) -> None:
    write(database_uri, ROWS)
    assert write(database_uri, ROWS, queue="others").inserted == 25
    assert len(stored(make_queue("orders"))) == 50
    assert key_id("a", "bc") != key_id("ab", "c")


def test_a_key_of_several_columns(database_uri: str) -> None:
    rows = [{"a": "x", "b": "y,z"}, {"a": "x,y", "b": "z"}, {"a": "x", "b": "y,z"}]
    written = write(database_uri, rows, key="a,b")
    assert (written.inserted, written.duplicates) == (2, 1)


def test_options_of_a_task_come_from_columns_named_after_them(
    database_uri: str, make_queue: Any
) -> None:
    rows: list[dict[str, Any]] = [
        {
            "payload": {"n": 1},
            "order": "a",
            "priority": 9,
            "eta": AT,
            "max_attempts": 2,
            "dedupe_key": "d",
            "expires_in": 60.0,
            "headers": '{"trace": "abc"}',
            "name": "pay",
            "queue": "first",
        },
        {
            "payload": {"n": 2},
            "order": "b",
            "priority": None,
            "eta": None,
            "max_attempts": None,
            "dedupe_key": None,
            "expires_in": None,
            "headers": None,
            "name": None,
            "queue": "second",
        },
    ]
    batches, schema = frame(rows)
    options = {"uri": database_uri, "key": "order", "priority": "4", "max_attempts": "7"}
    options["name"] = "ship"
    written = Sink(schema, SinkOptions.of(options)).write(batches)
    assert written == Written(frozenset({"first", "second"}), 2, 0)
    first = make_queue("first").peek()[0]
    assert (first.priority, first.next_retry_at, first.max_attempts) == (9, AT, 2)
    assert (first.dedupe_key, first.headers, first.payload) == ("d", {"trace": "abc"}, {"n": 1})
    assert lasts(first.expires_at - first.created_at, 60)
    second = make_queue("second").peek()[0]
    assert (second.priority, second.max_attempts, second.next_retry_at) == (4, 7, None)
    assert (first.name, second.name) == ("pay", "ship")


def test_a_dedupe_key_that_is_taken_is_a_duplicate(database_uri: str, make_queue: Any) -> None:
    make_queue("orders").enqueue({}, dedupe_key="d")
    rows = [{"payload": {"n": n}, "order": n, "dedupe_key": key} for n, key in enumerate("de")]
    written = write(database_uri, rows)
    assert (written.inserted, written.duplicates) == (1, 1)


def test_payloads_of_every_type_are_stored_as_mongodb_types(
    database_uri: str, make_queue: Any
) -> None:
    schema = StructType(
        [
            StructField("order", LongType()),
            StructField("price", DecimalType(10, 2)),
            StructField("day", DateType()),
            StructField("seen", TimestampType()),
            StructField("scores", MapType(StringType(), DecimalType(4, 1))),
            StructField("items", ArrayType(StructType([StructField("day", DateType())]))),
            StructField("share", DoubleType()),
        ]
    )
    seen = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
    day = date(2026, 1, 2)
    row = {"order": 1, "price": Decimal("12.50"), "day": day, "seen": seen, "share": 0.5}
    row |= {"scores": [("a", Decimal("1.5"))], "items": [{"day": day}, None]}
    empty = dict.fromkeys(row) | {"order": 2}
    batches, _ = frame([row, empty], schema)
    assert sink(database_uri, schema).write(batches).inserted == 2
    full, bare = make_queue("orders").pop_many(2)
    assert full.payload == {
        "order": 1,
        "price": Decimal128("12.50"),
        "day": "2026-01-02",
        "seen": seen,
        "scores": {"a": Decimal128("1.5")},
        "items": [{"day": "2026-01-02"}, None],
        "share": 0.5,
    }
    assert bare.payload == empty


def test_json_payloads_keep_the_types_of_extended_json(database_uri: str, make_queue: Any) -> None:
    text = '{"n": 1, "id": {"$oid": "6650c0ffee0123456789abcd"}}'
    write(database_uri, [{"payload": text, "order": 1}])
    payload = make_queue("orders").pop().payload
    assert payload == {"n": 1, "id": ObjectId("6650c0ffee0123456789abcd")}


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"payload": "{", "order": 1}, Rejected("payload", "{", "not_json", "1")),
        ({"payload": "{}", "order": 1, "headers": "{"}, Rejected("headers", "{", "not_json", "1")),
        ({"payload": "[1]", "order": 1}, Rejected("payload", [1], "not_a_document", "1")),
        ({"payload": None, "order": 1}, Rejected("payload", None, "not_a_document", "1")),
        ({"payload": N, "order": 7, "priority": 256}, Rejected("priority", 256, None, "7")),
        ({"payload": HUGE, "order": 1}, Rejected("payload", {"n": 2**64}, "unencodable", None)),
        ({"payload": N, "order": None}, Rejected("order", None, "null_key", None)),
        ({"payload": N, "order": 1, "dedupe_key": ""}, Rejected("dedupe_key", "", None, "1")),
        ({"payload": N, "order": 1, "queue": "a\nb"}, Rejected("name", "a\nb", None, "1")),
        (
            {"payload": N, "order": 1, "queue": None, "priority": 1},
            Rejected("name", None, None, "1"),
        ),
        ({"payload": N, "order": 1, "eta": NAIVE}, Rejected("eta", NAIVE, "no_timezone", "1")),
    ],
)
def test_a_row_that_cannot_become_a_task_is_rejected_by_its_key(
    row: dict[str, Any], error: Rejected, database_uri: str, make_queue: Any
) -> None:
    schema = StructType([StructField("payload", StringType()), StructField("order", LongType())])
    if len(row) > 2:
        _, schema = frame([row])
    batches, _ = frame([row], schema)
    options = {"uri": database_uri, "key": "order"}
    if "queue" not in row:
        options["queue"] = "orders"
    argument, value, code, key = error
    with rejecting(argument, value, kind=InvalidPayload, key=key) as caught:
        Sink(schema, SinkOptions.of(options)).write(batches)
    assert caught.value.code == code
    assert make_queue("orders").stats().pending == 0


@pytest.mark.parametrize(
    ("kind", "value", "argument", "code", "key"),
    [
        (ArrayType(BooleanType()), [True] * 2_000_000, "payload", "too_large", None),
        (
            StructType([StructField("x", ArrayType(LongType()))]),
            {"x": [1] * 2_000_000},
            "payload",
            "too_large",
            None,
        ),
        (DecimalType(38, 0), Decimal("1234567890" * 3 + "12345678"), "has", "too_many_digits", "1"),
    ],
)
def test_a_row_that_is_larger_in_mongodb_than_in_spark_is_rejected(
    kind: DataType,
    value: Any,
    argument: str,
    code: str,
    key: str | None,
    database_uri: str,
    make_queue: Any,
) -> None:
    schema = StructType([StructField("order", LongType()), StructField("has", kind)])
    batches, _ = frame([{"order": 1, "has": value}], schema)
    with rejecting(argument, code=code, kind=InvalidPayload, key=key):
        sink(database_uri, schema).write(batches)
    assert make_queue("orders").stats().pending == 0


def test_a_model_checks_each_payload(database_uri: str, make_queue: Any) -> None:
    assert write(database_uri, [{"order": 1, "text": "x"}], model=MODEL).inserted == 1
    with raising(InvalidPayload, "rejected_by_model", key="2", field="text") as caught:
        write(database_uri, [{"order": 2, "other": "x"}], model=MODEL)
    assert caught.value.argument == "payload"
    assert stored(make_queue("orders")) == [1]


def test_a_model_sees_what_the_columns_hold(database_uri: str, make_queue: Any) -> None:
    priced = StructType(
        [
            StructField("price", DecimalType(10, 2)),
            StructField("names", MapType(IntegerType(), StringType())),
            StructField("day", DateType()),
        ]
    )
    payload = {"price": Decimal("1.10"), "names": [(1, "a")], "day": date(2026, 1, 1)}
    order = StructField("order", LongType())
    as_row = StructType([order, *priced.fields]), {"order": 1, **payload}
    as_column = (
        StructType([order, StructField("payload", priced)]),
        {"order": 2, "payload": payload},
    )
    for schema, row in (as_row, as_column):
        batches, _ = frame([row], schema)
        sink(database_uri, schema, model="tests.spark.rows_model:Priced").write(batches)
    kept = [task["payload"] for task in core_of(make_queue("orders")).collections.tasks.find()]
    assert kept == [{"price": "1.10", "names": {"1": "a"}, "day": "2026-01-01"}] * 2


@pytest.mark.parametrize(
    ("options", "argument", "value", "code", "naming"),
    [
        ({"key": ""}, "key", (), "no_key", ["keyless=true"]),
        ({"keyless": "true"}, "keyless", True, "conflicting_options", ["key", "keyless=true"]),
        ({"keyless": "true", "key": "", "hold": "true"}, "hold", True, "no_key", ["key"]),
        ({"key": "colour"}, "key", "colour", "unknown_column", ["order, text"]),
        ({"key": "share"}, "key", "share", "wrong_type", ["double", "string"]),
        ({"queue": ""}, "queue", "", None, []),
        ({"priority": "300"}, "priority", 300, None, []),
        ({"delay": "-1"}, "delay", -1.0, None, []),
        ({"colour": "red"}, "colour", "red", "unknown_option", []),
        ({"model": "nowhere:Model"}, "model", "nowhere:Model", "import_failed", []),
    ],
)
def test_an_invalid_write_is_rejected_on_the_driver(
    options: dict[str, str],
    argument: str,
    value: Any,
    code: str | None,
    naming: list[str],
    database_uri: str,
) -> None:
    schema = StructType(
        [
            StructField("order", IntegerType()),
            StructField("text", StringType()),
            StructField("share", DoubleType()),
        ]
    )
    with rejecting(argument, value, code=code, naming=naming):
        sink(database_uri, schema, **options)


def test_invalid_columns_are_rejected(database_uri: str) -> None:
    order = StructField("order", StringType())
    unsupported = StructType([order, StructField("x", CalendarIntervalType())])
    with rejecting("x", "interval", code="unsupported_type"):
        sink(database_uri, unsupported)
    extra = StructType([order, StructField("payload", StringType()), StructField("a", LongType())])
    with rejecting("columns", "a", code="unknown_column", naming=["priority"]):
        sink(database_uri, extra)
    for name in ("on_duplicate", "dedupe_for"):
        column = StructField(name, StringType())
        with rejecting("columns", name, code="unknown_column"):
            sink(database_uri, StructType([order, StructField("payload", StringType()), column]))
    nowhere = SinkOptions.of({"uri": database_uri, "key": "order"})
    with rejecting("queue", None, code="no_queue"):
        Sink(StructType([order]), nowhere)


# Held loads


def test_held_tasks_become_visible_at_once_with_their_options(
    database_uri: str, make_queue: Any
) -> None:
    queue = make_queue("orders")
    rows = [{"payload": {"order": n}, "order": n, "delay": n * 60.0} for n in range(3)]
    batches, schema = frame(rows)
    one = sink(database_uri, schema, hold="true", expires_in="86400")
    written = one.write(batches)
    assert queue.pop() is None
    assert queue.stats().delayed == 3
    one.commit([written], name="report")
    task = queue.pop()
    assert task.payload == {"order": 0}
    assert lasts(task.expires_at - task.created_at, 86_400)
    waits = sorted(task.next_retry_at - task.created_at for task in queue.peek(status="pending"))
    assert [lasts(wait, minutes * 60) for wait, minutes in zip(waits, (1, 2), strict=True)] == [
        True,
        True,
    ]
    assert core_of(queue).collections.tasks.count_documents({"held": {"$exists": True}}) == 0
    report = core_of(queue).collections.loads.find_one({"_id": "report"})
    assert report == {"_id": "report", "inserted": 3, "duplicates": 0, "released": 3}


def test_a_held_load_that_fails_leaves_nothing(database_uri: str, make_queue: Any) -> None:
    queue = make_queue("orders")
    queue.enqueue({"order": 99})
    batches, schema = frame(ROWS)
    one = sink(database_uri, schema, hold="true")
    one.write(batches)
    one.abort()
    assert stored(queue) == [99]


def test_a_held_load_that_crashed_is_finished_by_the_next(
    database_uri: str, make_queue: Any
) -> None:
    queue = make_queue("orders")
    batches, schema = frame(ROWS)
    sink(database_uri, schema, hold="true").write(batches[:3])  # Its driver is killed here.
    again = sink(database_uri, schema, hold="true")
    written = again.write(batches)
    assert (written.inserted, written.duplicates) == (4, 21)
    again.commit([written], name=None)
    assert sorted(task.payload["order"] for task in queue.pop_many(100)) == list(range(25))


def test_aborting_does_not_delete_tasks_of_another_load(database_uri: str, make_queue: Any) -> None:
    queue = make_queue("orders")
    batches, schema = frame(ROWS)
    one, other = (sink(database_uri, schema, hold="true") for _ in range(2))
    written = one.write(batches)
    other.write(batches)
    other.abort()
    one.commit([written], name=None)
    assert len(queue.pop_many(100)) == 25


NOT_IN_COLUMNS = {"backoff", "task_id", "on_duplicate", "dedupe_for"}
"""Options that rows do not have: their key is the id, and a repeated row is no duplicate."""
NOT_FOR_ALL_ROWS = {"eta", "dedupe_key", "headers"}
"""Options that differ from row to row: one value for all of them has no use."""


def test_columns_and_options_of_the_sink_are_those_of_enqueue() -> None:
    options = set(EnqueueOptions.__annotations__)
    assert options - NOT_IN_COLUMNS == OPTION_COLUMNS
    shared = options & set(SinkOptions.model_fields)
    assert shared == options - NOT_IN_COLUMNS - NOT_FOR_ALL_ROWS


def test_every_enqueue_option_of_the_sink_is_an_argument_of_write_tasks() -> None:
    shared = EnqueueOptions.__annotations__.keys() & SinkOptions.model_fields.keys()
    assert RowDefaults.__annotations__.keys() == shared


@pytest.mark.parametrize(("typo", "meant"), [("prioritty", "priority"), ("keyles", "keyless")])
def test_unknown_option_of_write_tasks_names_the_closest_one(typo: str, meant: str) -> None:
    no_frame: Any = None
    options: Any = {typo: 3}
    with rejecting(typo, 3, code="unknown_option", closest=meant) as caught:
        write_tasks(no_frame, **options)
    assert str(caught.value).startswith("write_tasks has no option ")


def test_unknown_option_of_the_format_names_the_format() -> None:
    with rejecting("keyles", "3", code="unknown_option", closest="keyless") as caught:
        SinkOptions.of({"uri": "mongodb://h/db", "keyles": "3"})
    assert str(caught.value).startswith("format('microqueue') has no option ")
