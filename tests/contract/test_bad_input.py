"""What callers get wrong is refused by name, with an error of ours, and writes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from pydantic import BaseModel, model_validator

from microqueue import (
    InvalidPayload,
    LeaseLost,
    NewTask,
    QueueSettings,
    TaskStatus,
)
from microqueue.testing import FakeClock
from tests.contract.conftest import Harness
from tests.rejection import rejecting

HALF_A_PAIR = "\ud800"
WEST = timezone(timedelta(hours=-5))


@pytest.mark.one_driver
@pytest.mark.parametrize(
    "options",
    [
        {"eta": datetime.max.replace(tzinfo=UTC)},
        {"eta": datetime.max.replace(tzinfo=WEST)},
        {"eta": datetime.min.replace(tzinfo=UTC)},
        {"task_id": 2**70},
        {"task_id": HALF_A_PAIR},
        {"task_id": ""},
        {"task_id": {"$ne": 1}},
        {"delay": "60"},
        {"expires_in": "60"},
        {"headers": 0},
        {"headers": []},
        {"session": "x"},
        {"session": object()},
    ],
)
async def test_bad_option_of_enqueue_is_rejected_by_name(
    harness: Harness, queue: Any, options: dict[str, Any]
) -> None:
    ((argument, value),) = options.items()
    with rejecting(argument, value):
        await queue.enqueue({}, **options)
    assert await harness.stored() == []


@pytest.mark.one_driver
async def test_database_is_not_a_session(harness: Harness, queue: Any) -> None:
    with rejecting("session"):
        await queue.enqueue({}, session=harness.database)
    task = await queue.enqueue({})
    with rejecting("session"):
        await queue.mark_done(task, session=harness.database)
    with rejecting("session"):
        await queue.enqueue_many([{}], session=harness.database)


@pytest.mark.one_driver
@pytest.mark.parametrize("task_id", [2**70, -(2**70), HALF_A_PAIR, "", None, True, 1.5, b"x"])
async def test_id_that_no_task_can_have_is_rejected_everywhere(queue: Any, task_id: Any) -> None:
    for call in (queue.get, queue.cancel):
        with rejecting("task_id"):
            await call(task_id)
    for call in (queue.dead_letters.replay, queue.dead_letters.discard):
        with rejecting("task_id"):
            await call([task_id])


@pytest.mark.one_driver
@pytest.mark.parametrize("limit", [2**31, 2**63, 2**70])
async def test_count_beyond_what_mongodb_takes_is_rejected(queue: Any, limit: int) -> None:
    for call in (queue.pop_many, queue.peek):
        with rejecting("limit", limit):
            await call(limit)
    with rejecting("limit", limit):
        await queue.dead_letters.list(limit=limit)


def nested(levels: int) -> Any:
    value: Any = [1]
    for level in range(levels - 1):
        value = {"a": value} if level % 2 else [0, value]
    return value


@pytest.mark.parametrize("payload", [{"a": nested(169)}, {"a": nested(900)}])
async def test_payload_that_is_nested_too_deep_is_rejected(
    harness: Harness, queue: Any, payload: Any
) -> None:
    for add in (queue.enqueue, lambda one: queue.enqueue_many([{}, one])):
        with pytest.raises(InvalidPayload) as caught:
            await add(payload)
        assert (caught.value.argument, caught.value.value is payload) == ("payload", True)
    assert await harness.stored() == []


async def test_payload_of_the_deepest_nesting_lives_its_life(queue: Any) -> None:
    payload = nested(168)
    task = await queue.enqueue({"a": payload})
    await queue.mark_failure(await queue.pop(), "no")
    assert (await queue.dead_letters.replay(task.id)).replayed == 1
    await queue.mark_done(await queue.pop(), result={"a": payload})
    assert (await queue.get(task.id)).result == {"a": payload}


async def test_payload_of_many_parts_is_taken(queue: Any) -> None:
    payload = {"parts": [{"n": [n]} for n in range(1000)]}
    assert (await queue.enqueue(payload)).payload == payload


async def generate() -> AsyncIterator[dict[str, Any]]:
    yield {}


@pytest.mark.one_driver
@pytest.mark.parametrize(
    "items",
    [None, 5, "text", b"text", {"a": 1}, generate(), NewTask(payload={})],
    ids=["none", "number", "text", "bytes", "dict", "async generator", "one task"],
)
async def test_enqueue_many_rejects_what_are_not_several_items(
    harness: Harness, queue: Any, items: Any
) -> None:
    with rejecting("items", items):
        await queue.enqueue_many(items)
    assert await harness.stored() == []


@pytest.mark.one_driver
async def test_enqueue_many_takes_payloads_as_items_only(harness: Harness, queue: Any) -> None:
    with rejecting("payload"):
        await queue.enqueue_many([{}], payload={"a": 1})
    assert await harness.stored() == []


@pytest.mark.one_driver
@pytest.mark.parametrize("tasks", [None, 5, "text"])
async def test_mark_done_many_rejects_what_are_not_several_tasks(queue: Any, tasks: Any) -> None:
    with rejecting("tasks"):
        await queue.mark_done_many(tasks)


async def test_mark_done_many_settles_the_others_beside_one_that_was_not_popped(
    queue: Any,
) -> None:
    await queue.enqueue_many([{}, {}])
    popped = await queue.pop()
    (peeked,) = await queue.peek(status="pending")
    lost = await queue.mark_done_many([peeked, popped])
    assert [(type(one), one.task_id) for one in lost] == [(LeaseLost, peeked.id)]
    assert (await queue.get(popped.id)).status is TaskStatus.DONE
    assert (await queue.get(peeked.id)).status is TaskStatus.PENDING


@pytest.mark.one_driver
@pytest.mark.parametrize("worker_id", [5, {"$ne": 1}, "", "a\nb", "x" * 201, HALF_A_PAIR, b"x"])
async def test_worker_that_people_could_not_read_claims_nothing(queue: Any, worker_id: Any) -> None:
    task = await queue.enqueue({})
    with rejecting("worker_id"):
        await queue.pop(worker_id=worker_id)
    with rejecting("worker_id"):
        await queue.pop_many(1, worker_id=worker_id)
    assert (await queue.get(task.id)).status is TaskStatus.PENDING


@pytest.mark.one_driver
@pytest.mark.parametrize("code", [5, "", "x" * 201, HALF_A_PAIR, {"$ne": 1}])
async def test_code_that_cannot_be_searched_for_settles_nothing(queue: Any, code: Any) -> None:
    await queue.enqueue({})
    task = await queue.pop()
    with rejecting("code"):
        await queue.mark_retry(task, "no", code=code)
    with rejecting("code"):
        await queue.mark_failure(task, "no", code=code)
    assert (await queue.get(task.id)).status is TaskStatus.PROCESSING


@pytest.mark.one_driver
async def test_text_is_not_a_duration(queue: Any) -> None:
    await queue.enqueue({})
    with rejecting("wait", "0"):
        await queue.pop(wait="0")
    task = await queue.pop(wait=0)
    with rejecting("delay", "60"):
        await queue.mark_retry(task, "no", delay="60")
    with rejecting("extend", "60"):
        await queue.touch(task, extend="60")


@pytest.mark.one_driver
@pytest.mark.parametrize(
    "options",
    [
        {"settings": {"max_attempts": 3}},
        {"settings": 0},
        {"settings": QueueSettings},
        {"clock": "noon"},
        {"clock": FakeClock},
        {"clock": object()},
        {"payload_model": "Email"},
        {"payload_model": 5},
    ],
)
async def test_queue_is_not_made_of_bad_parts(
    harness: Harness, queue: Any, options: dict[str, Any]
) -> None:
    made_of = type(queue._blocking if harness.blocking else queue)  # noqa: SLF001 (what is behind the harness)
    ((argument, value),) = options.items()
    with rejecting(argument, value):
        made_of(harness.database, **options)


@pytest.mark.one_driver
@pytest.mark.parametrize(
    "options",
    [
        {"queues": "mail"},
        {"queues": 5},
        {"queues": [1]},
        {"jobs": 5},
        {"jobs": "reclaim_stuck"},
        {"jobs": [1, "x"]},
        {"jobs": [["x"]]},
        {"on_report": 5},
    ],
)
async def test_sweeper_rejects_bad_options_by_name(
    harness: Harness, queue: Any, options: dict[str, Any]
) -> None:
    ((argument, value),) = options.items()
    with rejecting(argument, value):
        harness.sweeper(queue, **options)


class Picky(BaseModel):
    x: int

    @model_validator(mode="before")
    @classmethod
    def _needs_more(cls, values: Any) -> Any:
        return {"x": values["x"]} if values["needed"] else values


async def test_typed_payload_whose_validator_breaks_fails_that_task_alone(
    harness: Harness,
) -> None:
    plain, typed = harness.queue(), harness.queue(model=Picky)
    bad = await plain.enqueue({"x": 1})
    await plain.enqueue({"x": 2, "needed": True})
    assert [task.payload.x for task in await typed.pop_many(10)] == [2]
    failed = await typed.get(bad.id)
    assert failed.error.code == "invalid_payload"
    assert "KeyError: 'needed'" in failed.error.message
