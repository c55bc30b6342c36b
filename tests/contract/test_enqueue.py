from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from enum import Enum
from typing import Any
from uuid import UUID, uuid4

import pytest
from bson import ObjectId
from pydantic import BaseModel

from microqueue import (
    BackoffPolicy,
    DuplicateTask,
    InvalidPayload,
    NewTask,
    TaskStatus,
)
from tests.contract.conftest import Harness
from tests.rejection import rejecting


async def test_enqueue_returns_the_task_that_is_stored(queue: Any) -> None:
    task = await queue.enqueue({"to": "a@b.c"}, headers={"trace": "1"}, priority=7)
    assert task.status is TaskStatus.PENDING
    assert task.payload == {"to": "a@b.c"}
    assert (await queue.get(task.id)) == task


async def test_a_new_task_is_added_with_its_own_options(harness: Harness, queue: Any) -> None:
    task = await queue.enqueue(NewTask(payload={"n": 1}, name="resize", priority=7, task_id="a"))
    (stored,) = await harness.stored()
    assert (task.id, task.name, task.priority, task.payload) == ("a", "resize", 7, {"n": 1})
    assert (stored["payload"], stored["name"]) == ({"n": 1}, "resize")


@pytest.mark.one_driver
async def test_options_beside_a_new_task_are_rejected(harness: Harness, queue: Any) -> None:
    with rejecting("priority", 3):
        await queue.enqueue(NewTask(payload={}), priority=3)
    with rejecting("payload"):
        await queue.enqueue(NewTask(payload=NewTask(payload={})))
    assert await harness.stored() == []


async def test_document_has_the_designed_fields_and_values(harness: Harness, queue: Any) -> None:
    await queue.enqueue({"n": 1}, task_id="own-id")
    (document,) = await harness.stored()
    assert set(document) == {
        "_id", "queue", "payload", "status", "priority", "position", "created_at", "updated_at",
        "attempts", "max_attempts", "next_retry_at", "finished_at", "history", "insert_token",
    }  # fmt: skip
    assert document["_id"] == "own-id"
    assert document["queue"] == "default"
    assert document["attempts"] == 0
    assert document["max_attempts"] == 10
    assert document["next_retry_at"] is None


async def test_options_of_one_task_are_stored_with_it(harness: Harness, queue: Any) -> None:
    await queue.enqueue(
        {},
        delay=90,
        max_attempts=3,
        backoff=BackoffPolicy(base_sec=1, jitter="none"),
        visibility_timeout=timedelta(seconds=45),
        dedupe_key="k",
        expires_in=3600,
        name="send_email",
    )
    (document,) = await harness.stored()
    now = harness.clock.now().replace(tzinfo=None)
    assert document["next_retry_at"].replace(tzinfo=None) == now + timedelta(seconds=90)
    assert document["max_attempts"] == 3
    assert document["backoff_policy"]["jitter"] == "none"
    assert document["visibility_timeout_sec"] == 45
    assert document["dedupe_key"] == "k"
    assert document["expires_at"].replace(tzinfo=None) == now + timedelta(hours=1)
    assert document["name"] == "send_email"
    assert "headers" not in document


async def test_a_header_names_a_task_that_has_no_other_name(harness: Harness, queue: Any) -> None:
    await queue.enqueue_many([{}], headers={"task": "resize"})
    await queue.enqueue({}, headers={"task": "not\nprintable"})
    documents = await harness.stored()
    assert [one.get("name") for one in documents] == ["resize", None]
    assert [task.name for task in await queue.pop_many(2)] == ["resize", "not\nprintable"]


async def test_settings_of_the_queue_apply_where_a_task_says_nothing(harness: Harness) -> None:
    queue = harness.queue(max_attempts=4)
    assert (await queue.enqueue({})).max_attempts == 4
    assert (await queue.enqueue({}, max_attempts=2)).max_attempts == 2


@pytest.mark.parametrize("task_id", [ObjectId(), "text", 12345, uuid4()])
async def test_a_task_can_have_an_id_of_the_callers_own(queue: Any, task_id: Any) -> None:
    await queue.enqueue({}, task_id=task_id)
    popped = await queue.pop()
    assert popped.id == task_id
    await queue.mark_done(popped)
    assert (await queue.get(task_id)).status is TaskStatus.DONE


async def test_a_taken_id_is_rejected_and_names_the_task(queue: Any) -> None:
    await queue.enqueue({"n": 1}, task_id="a")
    with pytest.raises(DuplicateTask) as caught:
        await queue.enqueue({"n": 2}, task_id="a")
    assert (caught.value.existing_id, caught.value.existing_queue) == ("a", "default")
    assert caught.value.code is None
    assert (await queue.get("a")).payload == {"n": 1}


async def test_first_dedupe_key_comes_after_tasks_without_one(queue: Any) -> None:
    for _ in range(2):
        await queue.enqueue({})
    await queue.enqueue({}, dedupe_key="k")
    with pytest.raises(DuplicateTask):
        await queue.enqueue({}, dedupe_key="k")


async def test_dedupe_key_is_unique_among_live_tasks_of_a_queue(harness: Harness) -> None:
    queue, other = harness.queue(), harness.queue("other")
    first = await queue.enqueue({}, dedupe_key="k")
    await other.enqueue({}, dedupe_key="k")
    with pytest.raises(DuplicateTask) as caught:
        await queue.enqueue({}, dedupe_key="k")
    assert caught.value.existing_id == first.id
    assert caught.value.dedupe_key == "k"
    popped = await queue.pop()
    with pytest.raises(DuplicateTask):
        await queue.enqueue({}, dedupe_key="k")
    await queue.mark_done(popped)
    await queue.enqueue({}, dedupe_key="k")


async def test_enqueue_many_chunks_keeps_order_and_reports_duplicates(harness: Harness) -> None:
    queue = harness.queue(batch_size=7)
    await queue.enqueue({}, task_id="taken")
    items: list[Any] = [{"n": n} for n in range(20)]
    items[3] = NewTask(payload={"n": 3}, task_id="taken")
    items[5] = NewTask(payload={"n": 5}, dedupe_key="k", priority=0)
    items[11] = NewTask(payload={"n": 11}, dedupe_key="k")
    report = await queue.enqueue_many(items)
    assert report.added == 18
    assert [(one.index, one.task_id == "taken", one.dedupe_key) for one in report.duplicates] == [
        (3, True, None),
        (11, False, "k"),
    ]
    delivered = [task.payload.get("n") for task in await queue.pop_many(50)]
    assert delivered == [None, *(n for n in range(20) if n not in {3, 11})]


async def test_enqueue_many_applies_common_options_to_bare_payloads(queue: Any) -> None:
    report = await queue.enqueue_many([{}, NewTask(payload={}, priority=1)], priority=9)
    assert [task.priority for task in report.tasks] == [9, 1]


async def test_added_tasks_are_a_sequence(queue: Any) -> None:
    added = (await queue.enqueue_many([{"n": n} for n in range(4)])).tasks
    assert [task.payload for task in added[1:3]] == [{"n": 1}, {"n": 2}]
    assert added == list(added)
    assert added[:2] != added[2:]
    assert repr(added[:1]) == repr([added[0]])


async def test_enqueue_many_writes_nothing_if_one_item_is_bad(harness: Harness, queue: Any) -> None:
    with pytest.raises(InvalidPayload):
        await queue.enqueue_many([{"n": 1}, {"n": object()}])
    assert await harness.stored() == []


async def test_eta_of_another_timezone_is_kept_in_utc(harness: Harness, queue: Any) -> None:
    eta = (harness.clock.now() + timedelta(hours=1)).astimezone(timezone(timedelta(hours=5)))
    task = await queue.enqueue({}, eta=eta)
    assert task.next_retry_at == eta
    assert task.next_retry_at.utcoffset() == timedelta(0)


async def test_eta_in_the_past_is_ready_now(harness: Harness, queue: Any) -> None:
    task = await queue.enqueue({}, eta=harness.clock.now() - timedelta(days=1))
    assert task.next_retry_at is None


class Size(Enum):
    LARGE = "large"


class Email(BaseModel):
    to: str
    sent_at: datetime
    size: Size = Size.LARGE
    tags: set[str] = {"a"}
    token: UUID
    blob: bytes = b"\xff\x00"


async def test_typed_payload_goes_in_and_comes_out_as_its_model(harness: Harness) -> None:
    queue = harness.queue(model=Email)
    email = Email(to="a@b.c", sent_at=datetime(2026, 1, 2, tzinfo=UTC), token=uuid4())
    assert (await queue.enqueue(email)).payload == email
    popped = await queue.pop()
    assert popped.payload == email
    (document,) = await harness.stored()
    assert document["payload"]["size"] == "large"
    assert isinstance(document["payload"]["sent_at"], datetime)


async def test_typed_enqueue_gives_the_model_whatever_was_given(harness: Harness) -> None:
    queue = harness.queue(model=Email)
    sent_at = datetime(2026, 1, 2, tzinfo=UTC)
    email = Email(to="a@b.c", sent_at=sent_at, token=uuid4(), blob=b"x")
    assert (await queue.enqueue(email.model_dump(mode="json"))).payload == email
    items = [email, email.model_dump(), NewTask(payload=email), NewTask[Email](payload=email)]
    report = await queue.enqueue_many(items)
    assert [task.payload for task in report.tasks] == [email] * 4
    assert [task.payload for task in await queue.pop_many(10)] == [email] * 5


async def test_payload_that_its_model_rejects_is_not_added(harness: Harness) -> None:
    queue = harness.queue(model=Email)
    with pytest.raises(InvalidPayload) as caught:
        await queue.enqueue({"to": "x"})
    assert caught.value.field == "sent_at"
    assert await harness.stored() == []


async def test_invalid_stored_payload_fails_that_task_alone(harness: Harness) -> None:
    plain, typed = harness.queue(), harness.queue(model=Email)
    bad = await plain.enqueue({"to": 1})
    await typed.enqueue(Email(to="b", sent_at=datetime.now(UTC), token=uuid4()))
    popped = await typed.pop()
    assert popped.payload.to == "b"
    failed = await typed.get(bad.id)
    assert failed.status is TaskStatus.FAILED
    assert failed.error.code == "invalid_payload"
    assert failed.payload == {"to": 1}


REFUSED: list[dict[str, Any]] = [
    {"priority": 256},
    {"priority": -1},
    {"priority": True},
    {"priority": "1"},
    {"delay": -1},
    {"delay": float("nan")},
    {"delay": "soon"},
    {"delay": True},
    {"delay": timedelta.max},
    {"eta": datetime(2026, 1, 1)},  # noqa: DTZ001 (that is the point)
    {"eta": "2026-01-01"},
    {"max_attempts": 0},
    {"visibility_timeout": 0},
    {"dedupe_key": {"$gt": ""}},
    {"dedupe_key": ""},
    {"task_id": {"$ne": None}},
    {"task_id": 1.5},
    {"task_id": True},
    {"expires_in": -3},
    {"headers": ["x"]},
    {"name": ""},
    {"name": 5},
    {"name": "x" * 121},
    {"name": "a\nb"},
    {"name": "a\ud800"},
    {"backoff": "fast"},
]


@pytest.mark.one_driver
@pytest.mark.parametrize("options", REFUSED)
async def test_bad_options_are_rejected_by_name_and_nothing_is_written(
    harness: Harness, queue: Any, options: dict[str, Any]
) -> None:
    ((argument, value),) = options.items()
    with rejecting(argument) as caught:
        await queue.enqueue({}, **options)
    assert repr(caught.value.value) == repr(value)  # NaN is not equal to itself.
    assert await harness.stored() == []


@pytest.mark.one_driver
@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"delay": 1, "eta": datetime.now(UTC)}, "delay"),
        ({"name": "a", "headers": {"task": "b"}}, "name"),
        ({"headers": {1: "x"}}, "headers.1.[key]"),
    ],
)
async def test_options_that_do_not_agree_are_rejected_by_name(
    harness: Harness, queue: Any, options: dict[str, Any], argument: str
) -> None:
    with rejecting(argument):
        await queue.enqueue({}, **options)
    assert await harness.stored() == []


@pytest.mark.parametrize(
    "payload",
    [
        {"f": object()},
        {"n": 2**64},
        {"a\0b": 1},
        {"text": "\ud800"},
        {1: "not a string key"},
        ["a", "list"],
        "text",
        None,
        {"large": b"x" * (15 * 1024 * 1024)},
    ],
    ids=["object", "long", "nul", "surrogate", "key", "list", "text", "none", "large"],
)
async def test_payloads_that_cannot_be_stored_are_rejected(
    harness: Harness, queue: Any, payload: Any
) -> None:
    with pytest.raises(InvalidPayload):
        await queue.enqueue(payload)
    assert await harness.stored() == []


async def test_text_that_is_none_is_rejected_by_name(queue: Any) -> None:
    with pytest.raises(InvalidPayload) as caught:
        await queue.enqueue({"text": "\ud800"})
    assert isinstance(caught.value.__cause__, UnicodeEncodeError)
    assert str(caught.value.__cause__.reason) in str(caught.value)


async def test_dollars_and_dots_in_payload_keys_are_data(queue: Any) -> None:
    payload = {"$set": {"status": "done"}, "a.b": 1}
    await queue.enqueue(payload)
    popped = await queue.pop()
    assert popped.payload == payload
    await queue.mark_retry(popped, delay=0)
    assert (await queue.pop()).payload == payload
