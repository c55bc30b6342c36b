"""What callers get wrong is refused by name, with an error of ours, and writes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from pydantic import BaseModel, model_validator

from microqueue import (
    InvalidArgument,
    InvalidPayload,
    LeaseLost,
    NewTask,
    QueueSettings,
    TaskStatus,
)
from microqueue.testing import FakeClock
from tests.contract.conftest import Harness

HALF_A_PAIR = "\ud800"
WEST = timezone(timedelta(hours=-5))


@pytest.mark.one_driver
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"eta": datetime.max.replace(tzinfo=UTC)}, "eta="),
        ({"eta": datetime.max.replace(tzinfo=WEST)}, "eta="),
        ({"eta": datetime.min.replace(tzinfo=UTC)}, "eta="),
        ({"task_id": 2**70}, "task_id=1180591620717411303424"),
        ({"task_id": HALF_A_PAIR}, "task_id='\\ud800'"),
        ({"task_id": ""}, "task_id=''"),
        ({"task_id": {"$ne": 1}}, "task_id={'$ne': 1}"),
        ({"delay": "60"}, "delay='60'"),
        ({"expires_in": "60"}, "expires_in='60'"),
        ({"headers": 0}, "headers=0"),
        ({"headers": []}, "headers=[]"),
        ({"session": "x"}, "session='x'"),
        ({"session": object()}, "session="),
    ],
)
async def test_bad_option_of_enqueue_is_named_first(
    harness: Harness, queue: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await queue.enqueue({}, **options)
    assert str(caught.value).startswith(says)
    assert caught.value.argument in options
    assert await harness.stored() == []


@pytest.mark.one_driver
async def test_database_is_not_a_session(harness: Harness, queue: Any) -> None:
    with pytest.raises(InvalidArgument, match="session="):
        await queue.enqueue({}, session=harness.database)
    task = await queue.enqueue({})
    with pytest.raises(InvalidArgument, match="session="):
        await queue.mark_done(task, session=harness.database)
    with pytest.raises(InvalidArgument, match="session="):
        await queue.enqueue_many([{}], session=harness.database)


@pytest.mark.one_driver
@pytest.mark.parametrize("task_id", [2**70, -(2**70), HALF_A_PAIR, "", None, True, 1.5, b"x"])
async def test_id_that_no_task_can_have_is_refused_everywhere(queue: Any, task_id: Any) -> None:
    for call in (queue.get, queue.cancel):
        with pytest.raises(InvalidArgument, match=r"^task_id="):
            await call(task_id)
    for call in (queue.dead_letters.replay, queue.dead_letters.discard):
        with pytest.raises(InvalidArgument, match=r"^task_id="):
            await call([task_id])


@pytest.mark.one_driver
@pytest.mark.parametrize("limit", [2**31, 2**63, 2**70])
async def test_count_beyond_what_mongodb_takes_is_refused(queue: Any, limit: int) -> None:
    for call in (queue.pop_many, queue.peek):
        with pytest.raises(InvalidArgument, match=f"limit={limit}.*at most 2147483647"):
            await call(limit)
    with pytest.raises(InvalidArgument, match="limit="):
        await queue.dead_letters.list(limit=limit)


def nested(levels: int) -> Any:
    value: Any = [1]
    for level in range(levels - 1):
        value = {"a": value} if level % 2 else [0, value]
    return value


@pytest.mark.parametrize("payload", [{"a": nested(169)}, {"a": nested(900)}])
async def test_payload_that_is_nested_too_deep_is_refused(
    harness: Harness, queue: Any, payload: Any
) -> None:
    for add in (queue.enqueue, lambda one: queue.enqueue_many([{}, one])):
        with pytest.raises(InvalidPayload, match=r"nested \d+ levels deep, and at most 170"):
            await add(payload)
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
async def test_enqueue_many_refuses_what_are_not_several_items(
    harness: Harness, queue: Any, items: Any
) -> None:
    with pytest.raises(InvalidArgument, match=r"^items=.*give a list"):
        await queue.enqueue_many(items)
    assert await harness.stored() == []


@pytest.mark.one_driver
async def test_enqueue_many_takes_payloads_as_items_only(harness: Harness, queue: Any) -> None:
    with pytest.raises(InvalidArgument, match="payload="):
        await queue.enqueue_many([{}], payload={"a": 1})
    assert await harness.stored() == []


@pytest.mark.one_driver
@pytest.mark.parametrize("tasks", [None, 5, "text"])
async def test_mark_done_many_refuses_what_are_not_several_tasks(queue: Any, tasks: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^tasks="):
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
    with pytest.raises(InvalidArgument, match=r"^worker_id="):
        await queue.pop(worker_id=worker_id)
    with pytest.raises(InvalidArgument, match=r"^worker_id="):
        await queue.pop_many(1, worker_id=worker_id)
    assert (await queue.get(task.id)).status is TaskStatus.PENDING


@pytest.mark.one_driver
@pytest.mark.parametrize("code", [5, "", "x" * 201, HALF_A_PAIR, {"$ne": 1}])
async def test_code_that_cannot_be_searched_for_settles_nothing(queue: Any, code: Any) -> None:
    await queue.enqueue({})
    task = await queue.pop()
    with pytest.raises(InvalidArgument, match=r"^code="):
        await queue.mark_retry(task, "no", code=code)
    with pytest.raises(InvalidArgument, match=r"^code="):
        await queue.mark_failure(task, "no", code=code)
    assert (await queue.get(task.id)).status is TaskStatus.PROCESSING


@pytest.mark.one_driver
async def test_text_is_not_a_duration(queue: Any) -> None:
    await queue.enqueue({})
    with pytest.raises(InvalidArgument, match="wait='0'"):
        await queue.pop(wait="0")
    task = await queue.pop(wait=0)
    with pytest.raises(InvalidArgument, match="delay='60'"):
        await queue.mark_retry(task, "no", delay="60")
    with pytest.raises(InvalidArgument, match="extend='60'"):
        await queue.touch(task, extend="60")


@pytest.mark.one_driver
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"settings": {"max_attempts": 3}}, "settings={'max_attempts': 3}"),
        ({"settings": 0}, "settings=0"),
        ({"settings": QueueSettings}, "settings=<class"),
        ({"clock": "noon"}, "clock='noon'"),
        ({"clock": FakeClock}, "clock=<class"),
        ({"clock": object()}, "clock="),
        ({"payload_model": "Email"}, "payload_model='Email'"),
        ({"payload_model": 5}, "payload_model=5"),
    ],
)
async def test_queue_is_not_made_of_bad_parts(
    harness: Harness, queue: Any, options: dict[str, Any], says: str
) -> None:
    made_of = type(queue._blocking if harness.blocking else queue)  # noqa: SLF001 (what is behind the harness)
    with pytest.raises(InvalidArgument) as caught:
        made_of(harness.database, **options)
    assert str(caught.value).startswith(says)


@pytest.mark.one_driver
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"queues": "mail"}, "queues='mail'"),
        ({"queues": 5}, "queues=5"),
        ({"queues": [1]}, "queues=[1]"),
        ({"jobs": 5}, "jobs=5"),
        ({"jobs": "reclaim_stuck"}, "jobs='reclaim_stuck'"),
        ({"jobs": [1, "x"]}, "jobs=[1, 'x']"),
        ({"jobs": [["x"]]}, "jobs=[['x']]"),
        ({"on_report": 5}, "on_report=5"),
    ],
)
async def test_sweeper_refuses_bad_options_by_name(
    harness: Harness, queue: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        harness.sweeper(queue, **options)
    assert str(caught.value).startswith(says)


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
