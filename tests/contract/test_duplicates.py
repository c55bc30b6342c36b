"""``on_duplicate``: raise, return or replace the task that has the id or the dedupe key."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from microqueue import BackoffPolicy, DuplicateTask, NewTask, TaskStatus
from tests.contract.conftest import Harness
from tests.rejection import raising, rejecting

SAME: list[dict[str, Any]] = [{"task_id": "a"}, {"dedupe_key": "k"}]


@pytest.mark.parametrize("same", SAME, ids=["id", "key"])
async def test_return_gives_the_task_that_exists_unchanged(
    harness: Harness, queue: Any, same: dict[str, Any]
) -> None:
    first = await queue.enqueue({"n": 1}, priority=3, on_duplicate="return", **same)
    assert not first.is_duplicate
    before = await harness.stored()
    second = await queue.enqueue({"n": 2}, priority=9, on_duplicate="return", **same)
    assert second.is_duplicate
    assert (second.id, second.payload, second.priority) == (first.id, {"n": 1}, 3)
    assert await harness.stored() == before


@pytest.mark.parametrize("same", SAME, ids=["id", "key"])
async def test_return_gives_a_running_task_with_its_lease(queue: Any, same: dict[str, Any]) -> None:
    await queue.enqueue({}, **same)
    popped = await queue.pop()
    found = await queue.enqueue({}, on_duplicate="return", **same)
    assert (found.id, found.status) == (popped.id, TaskStatus.PROCESSING)
    await queue.mark_done(popped)


async def test_return_by_id_gives_a_finished_task_and_by_key_adds_another(queue: Any) -> None:
    await queue.enqueue({"n": 1}, task_id="a", dedupe_key="k")
    await queue.mark_done(await queue.pop(), result=5)
    found = await queue.enqueue({"n": 2}, task_id="a", on_duplicate="return")
    assert (found.is_duplicate, found.status, found.result) == (True, TaskStatus.DONE, 5)
    other = await queue.enqueue({"n": 3}, dedupe_key="k", on_duplicate="return")
    assert (other.is_duplicate, other.payload) == (False, {"n": 3})


@pytest.mark.parametrize("on_duplicate", ["raise", "return", "replace"])
async def test_task_of_another_queue_is_neither_returned_nor_replaced(
    harness: Harness, on_duplicate: Any
) -> None:
    await harness.queue("other").enqueue({"n": 1}, task_id="a")
    before = await harness.stored()
    fields = {"existing_queue": "other", "existing_id": "a"}
    with raising(DuplicateTask, "other_queue", **fields) as caught:
        await harness.queue().enqueue({"n": 2}, task_id="a", on_duplicate=on_duplicate)
    assert caught.value.queue == "default"
    assert await harness.stored() == before


@pytest.mark.parametrize("same", SAME, ids=["id", "key"])
async def test_replace_gives_a_pending_task_the_new_payload_and_options(
    harness: Harness, queue: Any, same: dict[str, Any]
) -> None:
    first = await queue.enqueue(
        {"n": 1}, delay=60, headers={"old": 1}, visibility_timeout=7, expires_in=90, **same
    )
    harness.clock.advance(10)
    second = await queue.enqueue(
        {"n": 2},
        priority=9,
        max_attempts=3,
        backoff=BackoffPolicy(base_sec=1),
        headers={"new": 1},
        on_duplicate="replace",
        **same,
    )
    assert second.is_duplicate
    assert (second.id, second.created_at, second.position) == (
        first.id,
        first.created_at,
        first.position,
    )
    assert (second.payload, second.priority, second.max_attempts) == ({"n": 2}, 9, 3)
    assert (second.headers, second.backoff) == ({"new": 1}, BackoffPolicy(base_sec=1))
    assert (second.next_retry_at, second.expires_at) == (None, None)
    assert second.visibility_timeout_sec is None
    assert second == (await queue.get(first.id)).model_copy(update={"is_duplicate": True})
    assert (await queue.pop()).payload == {"n": 2}
    assert len(await harness.stored()) == 1


async def test_replace_moves_the_delay_and_the_expiry(harness: Harness, queue: Any) -> None:
    for n in range(3):  # A task that runs when nothing has changed for a minute.
        await queue.enqueue(
            {"n": n}, dedupe_key="k", delay=60, expires_in=600, on_duplicate="replace"
        )
        harness.clock.advance(40)
        assert await queue.pop() is None
    harness.clock.advance(20)
    task = await queue.pop()
    assert task.payload == {"n": 2}
    assert task.expires_at == harness.clock.now() + timedelta(seconds=540)


async def test_replaced_task_keeps_its_place_in_line(queue: Any) -> None:
    await queue.enqueue({"n": 1}, task_id="a")
    await queue.enqueue({"n": 2})
    await queue.enqueue({"n": 3}, task_id="a", on_duplicate="replace")
    assert [task.payload["n"] for task in await queue.pop_many(5)] == [3, 2]


async def test_replaced_task_starts_again_with_its_history(harness: Harness) -> None:
    queue = harness.queue(max_attempts=2)
    await queue.enqueue({"n": 1}, dedupe_key="k")
    await queue.mark_retry(await queue.pop(), "no", code="c", delay=30)
    task = await queue.enqueue({"n": 2}, dedupe_key="k", on_duplicate="replace")
    assert (task.attempts, task.error, task.next_retry_at) == (0, None, None)
    assert [one.error.code for one in task.history] == ["c"]
    await queue.mark_retry(await queue.pop(), delay=0)
    last = await queue.pop()
    assert last.attempts == 2
    await queue.mark_done(last)


@pytest.mark.parametrize("same", SAME, ids=["id", "key"])
async def test_running_task_is_not_replaced(
    harness: Harness, queue: Any, same: dict[str, Any]
) -> None:
    first = await queue.enqueue({"n": 1}, **same)
    popped = await queue.pop()
    before = await harness.stored()
    fields = {"existing_id": first.id, "existing_queue": "default"}
    fields["dedupe_key"] = same.get("dedupe_key")
    with raising(DuplicateTask, "not_pending", naming=["processing", "pending"], **fields):
        await queue.enqueue({"n": 2}, on_duplicate="replace", **same)
    assert await harness.stored() == before
    await queue.mark_done(popped)


@pytest.mark.parametrize("dead_letters", ["status", "collection"])
@pytest.mark.parametrize("settle", ["mark_done", "mark_failure"])
async def test_finished_task_is_not_replaced(
    harness: Harness, settle: str, dead_letters: Any
) -> None:
    queue = harness.queue(dead_letters=dead_letters)
    await queue.enqueue({"n": 1}, task_id="a")
    arguments = ["no"] if settle == "mark_failure" else []
    await getattr(queue, settle)(await queue.pop(), *arguments)
    status = "done" if settle == "mark_done" else "failed"
    with raising(DuplicateTask, "not_pending", naming=[status], existing_id="a"):
        await queue.enqueue({"n": 2}, task_id="a", on_duplicate="replace")
    found = await queue.enqueue({"n": 2}, task_id="a", on_duplicate="return")
    assert found == (await queue.get("a")).model_copy(update={"is_duplicate": True})
    assert found.payload == {"n": 1}


@pytest.mark.parametrize("on_duplicate", ["raise", "return", "replace"])
@pytest.mark.parametrize("dead_letters", ["status", "collection"])
async def test_dead_letter_of_another_queue_names_its_queue(
    harness: Harness, on_duplicate: Any, dead_letters: Any
) -> None:
    queue = harness.queue(dead_letters=dead_letters)
    other = harness.queue("other", dead_letters=dead_letters)
    await other.enqueue({}, task_id="a")
    await other.mark_failure(await other.pop(), "no")
    with raising(DuplicateTask, "other_queue", existing_queue="other", existing_id="a"):
        await queue.enqueue({}, task_id="a", on_duplicate=on_duplicate)


async def test_replacement_gets_the_key_of_its_call(queue: Any) -> None:
    await queue.enqueue({}, task_id="a", dedupe_key="k")
    await queue.enqueue({}, task_id="a", dedupe_key="other", on_duplicate="replace")
    await queue.enqueue({}, dedupe_key="k")
    with pytest.raises(DuplicateTask) as caught:  # Another task has the key by now.
        await queue.enqueue({}, task_id="a", dedupe_key="k", on_duplicate="replace")
    assert caught.value.dedupe_key == "k"
    assert (await queue.get("a")).dedupe_key == "other"


class Email(BaseModel):
    to: str


async def test_typed_task_that_exists_has_its_model(harness: Harness) -> None:
    queue = harness.queue(model=Email)
    await queue.enqueue(Email(to="a"), task_id="a")
    found = await queue.enqueue(Email(to="b"), task_id="a", on_duplicate="return")
    assert found.payload == Email(to="a")
    replaced = await queue.enqueue(Email(to="b"), task_id="a", on_duplicate="replace")
    assert replaced.payload == Email(to="b")
    again = NewTask(payload=Email(to="c"), task_id="a", on_duplicate="return")
    (task,) = (await queue.enqueue_many([again])).tasks
    assert task.payload == Email(to="b")


async def test_enqueue_many_decides_for_each_item(harness: Harness) -> None:
    queue = harness.queue(batch_size=3)
    for name in ("raised", "returned", "replaced", "running"):
        await queue.enqueue({"old": name}, task_id=name, priority=int(name == "running"))
    popped = await queue.pop()
    assert popped.id == "running"
    report = await queue.enqueue_many(
        [
            {"n": 0},
            NewTask(payload={"n": 1}, task_id="raised"),
            NewTask(payload={"n": 2}, task_id="returned", on_duplicate="return"),
            NewTask(payload={"n": 3}, task_id="replaced", on_duplicate="replace"),
            NewTask(payload={"n": 4}, task_id="running", on_duplicate="replace"),
            NewTask(payload={"n": 5}, dedupe_key="k", on_duplicate="replace"),
            NewTask(payload={"n": 6}, dedupe_key="k", on_duplicate="replace"),
        ]
    )
    assert [(task.payload, task.is_duplicate) for task in report.tasks] == [
        ({"n": 0}, False),
        ({"old": "returned"}, True),
        ({"n": 3}, True),
        ({"n": 5}, False),
        ({"n": 6}, True),
    ]
    assert report.added == 2
    assert [(one.index, one.task_id) for one in report.duplicates] == [
        (1, "raised"),
        (4, "running"),
    ]
    stored = {task["_id"]: task["payload"] for task in await harness.stored()}
    assert stored["raised"] == {"old": "raised"}
    assert stored["replaced"] == {"n": 3}
    assert len(stored) == 6


@pytest.mark.one_driver
@pytest.mark.parametrize(
    ("options", "closest"),
    [
        ({"on_duplicate": "repalce", "task_id": 1}, ["replace"]),
        ({"on_duplicate": "ignore", "task_id": 1}, []),
        ({"on_duplicate": None, "task_id": 1}, []),
        ({"on_duplicate": "return"}, []),
    ],
)
async def test_bad_values_are_rejected_and_nothing_is_written(
    harness: Harness, queue: Any, options: dict[str, Any], closest: list[str]
) -> None:
    with rejecting("on_duplicate", options["on_duplicate"]) as caught:
        await queue.enqueue({}, **options)
    assert caught.value.closest == closest
    assert all(one in str(caught.value) for one in [repr(options["on_duplicate"]), *closest])
    assert await harness.stored() == []
