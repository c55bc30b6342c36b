from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from microqueue import InvalidArgument, LeaseLost, Outcome, TaskNotFound, TaskStatus, WrongStatus
from tests.contract.conftest import Harness
from tests.rejection import rejecting


async def test_peek_shows_the_newest_first_and_leaves_no_trace(
    harness: Harness, queue: Any
) -> None:
    for n, task_id in enumerate(["z", "a", "m"]):
        await queue.enqueue({"n": n}, task_id=task_id)
        harness.clock.advance(1)
    before = await harness.stored()
    assert [task.payload["n"] for task in await queue.peek()] == [2, 1, 0]
    assert [task.payload["n"] for task in await queue.peek(2)] == [2, 1]
    assert await harness.stored() == before


async def test_peek_looks_at_one_status_or_another_queue(harness: Harness, queue: Any) -> None:
    await harness.queue("other").enqueue({"n": "other"})
    await queue.enqueue_many([{"n": n} for n in range(4)])
    await queue.mark_done(await queue.pop())
    await queue.mark_failure(await queue.pop(), "no")
    await queue.pop()
    for status, n in {"done": 0, "failed": 1, "processing": 2, "pending": 3}.items():
        assert [task.payload["n"] for task in await queue.peek(status=status)] == [n]
    assert [task.payload["n"] for task in await queue.peek(queue="other")] == ["other"]


async def test_stats_tell_how_the_queue_stands(harness: Harness) -> None:
    queue = harness.queue(visibility_timeout=30)
    begun = harness.clock.now()
    await queue.enqueue_many([{}] * 6)
    await queue.mark_done(await queue.pop())
    await queue.mark_failure(await queue.pop(), "no")
    await queue.pop()
    harness.clock.advance(20)
    await queue.pop()
    await queue.enqueue({}, delay=100)
    await harness.queue("other").enqueue({})
    harness.clock.advance(15)
    stats = await queue.stats()
    assert stats.model_dump(exclude={"at"}) == {
        "queue": "default",
        "ready": 2,
        "delayed": 1,
        "processing": 2,
        "overdue": 1,
        "done": 1,
        "failed": 1,
        "oldest_ready_age_sec": 35.0,
        "next_due_at": begun + timedelta(seconds=120),
        "estimated": (),
    }
    assert (stats.pending, stats.in_flight, stats.at) == (3, 2, harness.clock.now())


@pytest.mark.parametrize("dead_letters", ["status", "collection"])
async def test_stats_are_exact_up_to_the_limit_and_on_request(
    harness: Harness, dead_letters: str
) -> None:
    """In memory all counts are exact: there is no server to spare."""
    limit = 40
    queue = harness.queue(count_limit=limit, dead_letters=dead_letters)
    numbers = {"ready": 41, "delayed": 40, "processing": 45, "done": 50, "failed": 60}
    for kind, number in numbers.items():
        if kind in {"processing", "done", "failed"}:
            await queue.enqueue_many([{}] * number, priority=1)
            tasks = await queue.pop_many(number)
            if kind == "done":
                await queue.mark_done_many(tasks)
            if kind == "failed":
                for task in tasks:
                    await queue.mark_failure(task, "no", code="no")
        else:
            delay = 60 if kind == "delayed" else None
            await queue.enqueue_many([{}] * number, delay=delay)
    harness.clock.advance(7)
    exact = await queue.stats(exact=True)
    assert {kind: getattr(exact, kind) for kind in numbers} == numbers
    assert (exact.exact, exact.estimated, exact.oldest_ready_age_sec) == (True, (), 7)
    bounded = await queue.stats()
    larger = {kind for kind, number in numbers.items() if number > limit}
    if harness.in_memory:
        assert bounded == exact
    else:
        assert set(bounded.estimated) == {*larger, "oldest_ready_age_sec"}
        assert not bounded.exact
    assert bounded.delayed == numbers["delayed"]
    assert all(getattr(bounded, kind) > limit for kind in larger)
    assert bounded.overdue == 0
    assert bounded.next_due_at == exact.next_due_at
    letters = await queue.dead_letters.stats()
    assert (letters.estimated, letters.total > limit) == (not harness.in_memory, True)
    assert letters.by_code == {"no": letters.examined}
    assert letters.examined >= limit
    all_letters = await queue.dead_letters.stats(exact=True)
    assert (all_letters.total, all_letters.estimated, all_letters.examined) == (60, False, 60)
    assert (letters.oldest_at, letters.newest_at) == (all_letters.oldest_at, all_letters.newest_at)


async def test_age_of_a_promoted_task_counts_from_when_it_was_ready(
    harness: Harness, queue: Any
) -> None:
    await queue.enqueue({}, delay=60)
    harness.clock.advance(60)
    await harness.sweeper(queue).promote_due()
    harness.clock.advance(5)
    assert (await queue.stats()).oldest_ready_age_sec == 5


async def test_stats_of_an_empty_queue_are_zero(queue: Any) -> None:
    stats = await queue.stats()
    assert (stats.pending, stats.oldest_ready_age_sec, stats.next_due_at) == (0, None, None)


async def test_purge_deletes_one_status_of_this_queue_only(harness: Harness) -> None:
    queue = harness.queue(batch_size=2)
    other = harness.queue("other")
    for each in (queue, other):
        await each.enqueue_many([{}] * 3)
        await each.mark_done_many(await each.pop_many(3))
    await queue.enqueue({})
    assert await queue.purge() == 3
    assert (await other.stats()).done == 3
    assert await queue.purge(status="pending") == 1


async def test_purge_can_spare_what_is_recent(harness: Harness, queue: Any) -> None:
    await queue.enqueue_many([{}, {}])
    await queue.mark_done(await queue.pop())
    harness.clock.advance(60)
    await queue.mark_done(await queue.pop())
    assert await queue.purge(older_than=30) == 1
    assert (await queue.stats()).done == 1


@pytest.mark.parametrize("dead_letters", ["status", "collection"])
async def test_purge_can_only_count(harness: Harness, dead_letters: str) -> None:
    queue = harness.queue(dead_letters=dead_letters)
    await queue.enqueue_many([{}, {}, {}])
    await queue.mark_done(await queue.pop())
    await queue.mark_failure(await queue.pop(), "no")
    harness.clock.advance(60)
    for status in ("done", "failed", "pending"):
        assert await queue.purge(status=status, older_than=61, dry_run=True) == 0
        assert await queue.purge(status=status, older_than=30, dry_run=True) == 1
        assert await queue.purge(status=status) == 1


async def test_leased_tasks_cannot_be_purged(queue: Any) -> None:
    with rejecting("status", "processing"):
        await queue.purge(status="processing")


async def test_cancelled_task_is_not_delivered_and_can_be_replayed(queue: Any) -> None:
    task = await queue.enqueue({}, dedupe_key="k")
    cancelled = await queue.cancel(task.id)
    assert (cancelled.status, cancelled.error.code) == (TaskStatus.FAILED, "cancelled")
    assert await queue.pop() is None
    await queue.dead_letters.replay(task.id)
    assert (await queue.pop()).id == task.id


async def test_cancelling_frees_the_dedupe_key(queue: Any) -> None:
    task = await queue.enqueue({}, dedupe_key="k")
    await queue.cancel(task.id)
    other = await queue.enqueue({}, dedupe_key="k")
    assert (other.id != task.id, other.is_duplicate, other.status) == (True, False, "pending")


async def test_running_task_that_is_cancelled_is_taken_from_its_worker(queue: Any) -> None:
    task = await queue.enqueue({}, dedupe_key="k")
    popped = await queue.pop(worker_id="w")
    cancelled = await queue.cancel(task.id)
    assert (cancelled.status, cancelled.error.code) == (TaskStatus.FAILED, "cancelled")
    assert cancelled.lease is None
    (attempt,) = cancelled.history
    assert (attempt.outcome, attempt.worker_id) == (Outcome.CANCELLED, "w")
    with pytest.raises(LeaseLost):
        await queue.mark_done(popped)
    assert (await queue.dead_letters.stats()).by_code == {"cancelled": 1}


async def test_finished_tasks_cannot_be_cancelled(queue: Any) -> None:
    task = await queue.enqueue({})
    await queue.mark_done(await queue.pop())
    with pytest.raises(WrongStatus) as caught:
        await queue.cancel(task.id)
    assert (caught.value.status, caught.value.needed) == ("done", "pending or processing")
    with pytest.raises(TaskNotFound):
        await queue.cancel("unknown")


async def test_unknown_id_is_none(queue: Any) -> None:
    assert await queue.get("unknown") is None


@pytest.mark.one_driver
@pytest.mark.parametrize("task_id", [{"$ne": None}, None, 1.5, ["a"], True])
async def test_ids_that_could_be_filters_are_rejected(queue: Any, task_id: Any) -> None:
    for method in (queue.get, queue.cancel):
        with rejecting("task_id"):
            await method(task_id)


@pytest.mark.one_driver
@pytest.mark.parametrize("name", ["", {"$gt": ""}, None, 7, "a\nb", "x" * 121])
async def test_bad_queue_names_are_rejected(harness: Harness, name: Any) -> None:
    with rejecting("name"):
        harness.queue(name)
    with pytest.raises(InvalidArgument) as caught:
        await harness.queue().peek(0, queue=name or "ok")
    assert caught.value.argument in {"limit", "name"}


async def test_bad_status_is_rejected_with_the_known_ones(queue: Any) -> None:
    with rejecting("status", {"$ne": "x"}) as caught:
        await queue.peek(status={"$ne": "x"})
    assert all(status in str(caught.value) for status in TaskStatus)


async def test_indexes_are_created_once(queue: Any) -> None:
    created = await queue.ensure_indexes()
    assert set(created) == {
        "ready", "deadline", "dedupe", "failed", "browse", "until",
    }  # fmt: skip
    assert await queue.ensure_indexes() == []
    assert await queue.ensure_indexes(adjust=False) == []


@pytest.mark.parametrize("letters", ["status", "collection"])
@pytest.mark.parametrize("task_id", [None, UUID(int=7), 17], ids=["ObjectId", "UUID", "integer"])
async def test_an_id_may_be_given_as_text(harness: Harness, task_id: Any, letters: str) -> None:
    queue = harness.queue(dead_letters=letters)
    await queue.enqueue({}, task_id="another")
    task = await queue.enqueue({"n": 1}, task_id=task_id)
    text = str(task.id)
    assert (await queue.get(text)).id == task.id
    assert (await queue.cancel(text)).id == task.id
    assert (await queue.get(text)).error.code == "cancelled"
    assert (await queue.dead_letters.replay(text)).replayed == 1
    assert (await queue.get(text)).status is TaskStatus.PENDING


async def test_text_that_is_an_id_itself_stands_for_no_other(queue: Any) -> None:
    other = await queue.enqueue({"n": 1})
    await queue.enqueue({"n": 2}, task_id=str(other.id))
    assert (await queue.get(str(other.id))).payload == {"n": 2}
    assert (await queue.get(other.id)).payload == {"n": 1}


async def test_peek_looks_at_one_name(harness: Harness, queue: Any) -> None:
    await harness.queue("other").enqueue({"n": "other"}, name="pay")
    harness.clock.advance(1)
    for n, name in enumerate(["pay", "ship", None, "pay"]):
        await queue.enqueue({"n": n}, name=name)
        harness.clock.advance(1)
    await queue.mark_done(await queue.pop())
    assert [task.payload["n"] for task in await queue.peek(name="pay")] == [3, 0]
    assert [task.payload["n"] for task in await queue.peek(name="pay", status="done")] == [0]
    assert [task.payload["n"] for task in await queue.peek(name="")] == [2]
    assert await queue.peek(name="nothing") == []
    both = await queue.peek(name="pay", all_queues=True)
    assert [task.payload["n"] for task in both] == [3, 0, "other"]
    with pytest.raises(InvalidArgument):
        await queue.peek(name={"$ne": "x"})


@pytest.mark.parametrize("kept", ["status", "collection"])
async def test_peek_reads_all_queues_if_asked(harness: Harness, kept: str) -> None:
    a, b = (harness.queue(name, dead_letters=kept) for name in ("a", "b"))
    first = await a.enqueue({})
    harness.clock.advance(1)
    await a.mark_failure(await a.pop(), "no")
    second = await b.enqueue({})
    seen = [task.id for task in await harness.queue("c", dead_letters=kept).peek(all_queues=True)]
    assert seen == [second.id, first.id]
    assert [task.id for task in await b.peek(all_queues=True, status="failed")] == [first.id]
    assert len(await b.peek(1, all_queues=True)) == 1
    assert [task.id for task in await b.peek()] == [second.id]
    with rejecting("queue"):
        await b.peek(queue="a", all_queues=True)
