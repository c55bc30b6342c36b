"""The queue works the same whatever options the caller's collection carries."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest
from bson import SON, Binary, DatetimeMS, Decimal128
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion, TypeCodec, TypeRegistry
from bson.raw_bson import RawBSONDocument
from pymongo import ReadPreference, WriteConcern

from microqueue import InvalidArgument, Queue, TaskStatus
from microqueue.core import core_of


class DecimalCodec(TypeCodec):
    python_type = Decimal
    bson_type = Decimal128

    def transform_python(self, value: Any) -> Decimal128:
        return Decimal128(value)

    def transform_bson(self, value: Any) -> Decimal:
        decimal: Decimal = value.to_decimal()
        return decimal


OPTIONS: dict[str, CodecOptions[Any]] = {
    "naive": CodecOptions(),
    "aware": CodecOptions(tz_aware=True),
    "son": CodecOptions(document_class=SON),
    "raw": CodecOptions(document_class=RawBSONDocument),
    "milliseconds": CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS),
    "legacy uuid": CodecOptions(uuid_representation=UuidRepresentation.PYTHON_LEGACY),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_life_of_a_task_is_the_same(microqueue_database: Any, name: str) -> None:
    collection = microqueue_database.tasks.with_options(codec_options=OPTIONS[name])
    queue: Queue[Any] = Queue(collection)
    moment = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
    payload = {"at": moment, "id": uuid4(), "nested": {"list": [1, {"a": 2}]}, "data": b"\x00\xff"}
    queue.enqueue(payload)
    task = queue.pop()
    assert task is not None
    assert task.payload == payload
    assert type(task.payload) is dict
    queue.mark_retry(task, "again", delay=0)
    again = queue.pop()
    assert again is not None
    assert again.created_at.tzinfo is not None
    queue.mark_done(again)
    assert [entry.outcome for entry in queue.peek()[0].history] == ["retried", "done"]


def test_type_registry_of_the_caller_is_kept(microqueue_database: Any) -> None:
    options: CodecOptions[Any] = CodecOptions(type_registry=TypeRegistry([DecimalCodec()]))
    queue: Queue[Any] = Queue(microqueue_database.tasks.with_options(codec_options=options))
    queue.enqueue({"price": Decimal("9.99")})
    task = queue.pop()
    assert task is not None
    assert task.payload == {"price": Decimal("9.99")}


def test_id_of_a_type_of_the_caller_is_settled(microqueue_database: Any) -> None:
    """Another program may have chosen it."""
    options: CodecOptions[Any] = CodecOptions(type_registry=TypeRegistry([DecimalCodec()]))
    queue: Queue[Any] = Queue(microqueue_database.tasks.with_options(codec_options=options))
    queue.enqueue({})
    stored = microqueue_database.tasks.find_one_and_delete({})
    microqueue_database.tasks.insert_one({**stored, "_id": Decimal128("1.5")})
    task = queue.pop()
    assert task is not None
    assert task.id == Decimal("1.5")
    queue.release(task)
    again = queue.pop()
    assert again is not None
    queue.mark_done(queue.touch(again))
    assert microqueue_database.tasks.find_one()["status"] == "done"


def test_date_outside_of_pythons_range_stops_nothing(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.enqueue({"at": DatetimeMS(2**50)})
    queue.enqueue({"n": 2})
    task = queue.pop()
    assert task is not None
    assert task.payload["at"] == DatetimeMS(2**50)
    assert queue.pop() is not None


def test_unacknowledged_writes_are_rejected(microqueue_database: Any) -> None:
    collection = microqueue_database.tasks.with_options(write_concern=WriteConcern(w=0))
    with pytest.raises(InvalidArgument) as caught:
        Queue(collection)
    assert (caught.value.argument, caught.value.value) == ("write_concern", WriteConcern(w=0))


def test_default_write_concern_becomes_majority_and_a_chosen_one_is_kept(
    microqueue_database: Any,
) -> None:
    default: Queue[Any] = Queue(microqueue_database)
    assert core_of(default).collections.tasks.write_concern.document == {"w": "majority"}
    chosen = microqueue_database.tasks.with_options(write_concern=WriteConcern(w=1, j=True))
    assert core_of(Queue(chosen)).collections.tasks.write_concern.document == {"w": 1, "j": True}


def test_reads_go_to_the_primary_whatever_the_callers_preference(microqueue_database: Any) -> None:
    collection = microqueue_database.tasks.with_options(read_preference=ReadPreference.SECONDARY)
    queue: Queue[Any] = Queue(collection)
    queue.enqueue({})
    assert core_of(queue).collections.tasks.read_preference == ReadPreference.PRIMARY
    assert queue.stats().ready == 1


def test_collection_of_another_name_keeps_everything_beside_it(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database.jobs)
    queue.enqueue({})
    assert "tasks" not in microqueue_database.list_collection_names()
    assert repr(queue) == f"Queue('default', {microqueue_database.name}.jobs)"


def test_stored_binary_that_is_no_uuid_stays_as_it_is(microqueue_queue: Queue[Any]) -> None:
    payload = {"blob": Binary(b"\x01\x02", subtype=128)}
    microqueue_queue.enqueue(payload)
    task = microqueue_queue.pop()
    assert task is not None
    assert task.payload == payload
    assert task.status is TaskStatus.PROCESSING
