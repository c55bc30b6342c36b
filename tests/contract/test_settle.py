from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest

from microqueue import (
    BackoffPolicy,
    InvalidPayload,
    LeaseLost,
    Outcome,
    TaskStatus,
)
from tests.contract.conftest import Harness
from tests.rejection import rejecting

Settle = Callable[[Any, Any], Awaitable[Any]]

SETTLEMENTS: dict[str, Settle] = {
    "mark_done": lambda queue, task: queue.mark_done(task),
    "mark_retry": lambda queue, task: queue.mark_retry(task, "again"),
    "mark_failure": lambda queue, task: queue.mark_failure(task, "no"),
    "release": lambda queue, task: queue.release(task),
}
FENCED: dict[str, Settle] = {**SETTLEMENTS, "touch": lambda queue, task: queue.touch(task)}


async def popped(queue: Any, **options: Any) -> Any:
    await queue.enqueue({"n": 1}, **options)
    return await queue.pop(worker_id="w1")


async def test_done_task_keeps_its_result_and_history(harness: Harness, queue: Any) -> None:
    task = await popped(queue)
    harness.clock.advance(3)
    await queue.mark_done(task, result={"sent": True})
    done = await queue.get(task.id)
    assert done.status is TaskStatus.DONE
    assert done.result == {"sent": True}
    assert done.finished_at == harness.clock.now()
    assert done.lease is None
    (attempt,) = done.history
    assert (attempt.attempt, attempt.worker_id, attempt.outcome) == (1, "w1", Outcome.DONE)
    assert attempt.ended_at - attempt.started_at == timedelta(seconds=3)


async def test_a_success_is_stored_without_a_history_and_with_its_token(
    harness: Harness, queue: Any
) -> None:
    """Singly, in a batch of one claim, and one by one in a batch."""
    await queue.enqueue_many([{"n": n} for n in range(6)])
    first, *claimed_together = await queue.pop_many(3)
    claimed_singly = [await queue.pop() for _ in range(3)]
    await queue.mark_done(first)
    assert not await queue.mark_done_many([*claimed_together, *claimed_singly])
    tokens = {one.id: one.lease.token for one in [first, *claimed_together, *claimed_singly]}
    documents = await harness.stored()
    assert {one["_id"]: one["lease_token"] for one in documents} == tokens
    assert [one["history"] for one in documents] == [[]] * 6


async def test_a_lost_lease_is_not_settled_by_the_token_of_a_batch(
    harness: Harness, queue: Any
) -> None:
    """The task was claimed again, in one batch with another task that is settled beside it."""
    task = await queue.enqueue({})
    lost = await queue.pop()
    await queue.mark_retry(lost, "no", delay=0)
    await queue.enqueue({})
    again, other = await queue.pop_many(2)
    assert (again.id, again.lease.token) == (task.id, other.lease.token)
    assert [one.task_id for one in await queue.mark_done_many([lost, other])] == [task.id]
    assert (await queue.get(task.id)).status is TaskStatus.PROCESSING
    assert (await queue.get(other.id)).status is TaskStatus.DONE
    assert not await queue.mark_done_many([again])


async def test_a_done_task_has_no_error_and_its_history_has(harness: Harness, queue: Any) -> None:
    """Singly, in a batch of one claim, and one by one in a batch."""
    await queue.enqueue_many([{"n": n} for n in range(6)])
    for task in await queue.pop_many(6):
        await queue.mark_retry(task, "boom", code="c", delay=0)
    first, *claimed_together = await queue.pop_many(3)
    claimed_singly = [await queue.pop() for _ in range(3)]
    assert first.error.code == "c"
    await queue.mark_done(first, result=1)
    assert not await queue.mark_done_many([*claimed_together, *claimed_singly])
    documents = await harness.stored()
    assert [document["status"] for document in documents] == ["done"] * 6
    assert not [document for document in documents if "error" in document]
    for document in documents:
        done = await queue.get(document["_id"])
        assert done.error is None
        assert [one.error and one.error.code for one in done.history] == ["c", None]


async def test_an_error_that_an_older_version_left_on_a_done_task_is_not_shown(
    harness: Harness, queue: Any
) -> None:
    task = await popped(queue)
    await queue.mark_done(task)
    await harness.edit(task.id, error={"message": "boom", "code": "c", "at": harness.clock.now()})
    assert (await queue.get(task.id)).error is None


async def test_retry_waits_out_its_backoff_with_the_error_kept(harness: Harness) -> None:
    queue = harness.queue(backoff=BackoffPolicy(base_sec=8, factor=3, jitter="none"))
    task = await popped(queue)
    assert await queue.mark_retry(task, ValueError("boom")) is TaskStatus.PENDING
    waiting = await queue.get(task.id)
    assert waiting.next_retry_at == harness.clock.now() + timedelta(seconds=8)
    assert (waiting.error.code, waiting.error.message) == ("ValueError", "ValueError: boom")
    assert waiting.backoff_sec == 8
    harness.clock.advance(8)
    again = await queue.pop()
    assert again.attempts == 2
    await queue.mark_retry(again, "boom", code="smtp")
    assert (await queue.get(task.id)).next_retry_at == harness.clock.now() + timedelta(seconds=24)
    assert (await queue.get(task.id)).error.code == "smtp"


async def test_backoff_of_the_task_wins_over_the_queues(harness: Harness) -> None:
    queue = harness.queue(backoff=BackoffPolicy(base_sec=8, jitter="none"))
    task = await popped(queue, backoff=BackoffPolicy(base_sec=2, jitter="none"))
    await queue.mark_retry(task)
    assert (await queue.get(task.id)).backoff_sec == 2


async def test_delay_given_with_the_retry_wins_over_both(harness: Harness, queue: Any) -> None:
    task = await popped(queue)
    await queue.mark_retry(task, "later", delay=timedelta(minutes=2))
    assert (await queue.get(task.id)).next_retry_at == harness.clock.now() + timedelta(minutes=2)


async def test_max_attempts_means_deliveries(harness: Harness, queue: Any) -> None:
    await queue.enqueue({}, max_attempts=3)
    outcomes = [
        await queue.mark_retry(await queue.pop(), "no", code="c", delay=0) for _ in range(3)
    ]
    assert outcomes == [TaskStatus.PENDING, TaskStatus.PENDING, TaskStatus.FAILED]
    assert await queue.pop() is None
    (letter,) = await queue.dead_letters.list()
    assert (letter.attempts, letter.error.code) == (3, "c")
    assert [entry.outcome for entry in letter.history] == ["retried", "retried", "failed"]


async def test_failure_buries_at_once_whatever_attempts_are_left(queue: Any) -> None:
    task = await popped(queue)
    await queue.mark_failure(task, "malformed", code="bad_input")
    failed = await queue.get(task.id)
    assert failed.status is TaskStatus.FAILED
    assert (failed.error.message, failed.error.code) == ("malformed", "bad_input")


async def test_release_gives_the_attempt_back_and_is_ready_at_once(queue: Any) -> None:
    task = await popped(queue)
    await queue.enqueue({"n": 2})
    await queue.release(task)
    again = await queue.pop()
    assert (again.id, again.attempts, again.redelivered) == (task.id, 1, False)


async def test_release_to_the_front_goes_before_older_tasks_of_its_priority(queue: Any) -> None:
    for n in range(3):
        await queue.enqueue({"n": n})
    await queue.enqueue({"n": "urgent"}, priority=1)
    urgent, zero, one = [await queue.pop() for _ in range(3)]
    await queue.release(zero)
    await queue.release(one, front=True)
    await queue.release(urgent)
    order = [(await queue.pop()).payload["n"] for _ in range(4)]
    assert order == ["urgent", 1, 0, 2]


async def test_last_one_released_to_the_front_goes_first(harness: Harness, queue: Any) -> None:
    await queue.enqueue_many([{"n": n} for n in range(3)])
    tasks = await queue.pop_many(3)
    for task in tasks:
        await queue.release(task, front=True)
        harness.clock.advance(1)
    assert [(await queue.pop()).payload["n"] for _ in range(3)] == [2, 1, 0]


@pytest.mark.parametrize("way_back", ["retry", "release"])
async def test_turn_at_the_front_is_for_once(harness: Harness, queue: Any, way_back: str) -> None:
    await queue.enqueue({"n": 0})
    harness.clock.advance(1)
    await queue.enqueue({"n": 1})
    first, second = await queue.pop_many(2)
    await queue.release(second, front=True)
    await queue.release(first)
    again = await queue.pop()
    assert (again.id, again.position < 0) == (second.id, True)
    if way_back == "retry":
        await queue.mark_retry(again, delay=0)
    else:
        await queue.release(again)
    assert [(await queue.pop()).payload["n"] for _ in range(2)] == [0, 1]


async def test_touch_moves_the_end_of_the_lease(harness: Harness) -> None:
    queue = harness.queue(visibility_timeout=30)
    task = await popped(queue)
    harness.clock.advance(20)
    renewed = await queue.touch(task)
    assert renewed.lease.expires_at == harness.clock.now() + timedelta(seconds=30)
    assert (await queue.touch(task, extend=5)).lease.expires_at == harness.clock.now() + timedelta(
        seconds=5
    )
    assert (await queue.get(task.id)).lease.expires_at == harness.clock.now() + timedelta(seconds=5)
    await queue.mark_done(task)


async def test_touch_uses_the_tasks_own_timeout(harness: Harness, queue: Any) -> None:
    task = await popped(queue, visibility_timeout=11)
    renewed = await queue.touch(task)
    assert renewed.lease.expires_at == harness.clock.now() + timedelta(seconds=11)


@pytest.mark.parametrize("name", SETTLEMENTS)
async def test_repeating_the_very_same_settlement_is_a_quiet_success(
    harness: Harness, queue: Any, name: str
) -> None:
    task = await popped(queue)
    await SETTLEMENTS[name](queue, task)
    before = await harness.stored()
    harness.clock.advance(1)
    await SETTLEMENTS[name](queue, task)
    assert await harness.stored() == before


@pytest.mark.parametrize(("first", "second"), list(permutations(SETTLEMENTS, 2)))
async def test_settling_twice_differently_loses_the_lease_and_changes_nothing(
    harness: Harness, queue: Any, first: str, second: str
) -> None:
    task = await popped(queue)
    await SETTLEMENTS[first](queue, task)
    before = await harness.stored()
    with pytest.raises(LeaseLost) as caught:
        await SETTLEMENTS[second](queue, task)
    assert caught.value.task_id == task.id
    assert caught.value.worker_id == "w1"
    assert await harness.stored() == before


@pytest.mark.parametrize("name", FENCED)
async def test_reclaimed_task_cannot_be_settled_by_its_former_worker(
    harness: Harness, name: str
) -> None:
    queue = harness.queue(visibility_timeout=5, backoff=BackoffPolicy(base_sec=0, max_sec=0))
    task = await popped(queue)
    harness.clock.advance(5)
    await harness.sweeper(queue).reclaim_stuck()
    later = await queue.pop(worker_id="w2")
    assert later.id == task.id
    before = await harness.stored()
    with pytest.raises(LeaseLost) as caught:
        await FENCED[name](queue, task)
    assert (caught.value.status, caught.value.holder) == ("processing", "w2")
    assert await harness.stored() == before
    await queue.mark_done(later)


async def test_expired_lease_still_settles_until_it_is_reclaimed(harness: Harness) -> None:
    queue = harness.queue(visibility_timeout=5)
    task = await popped(queue)
    harness.clock.advance(60)
    await queue.mark_done(task)
    assert (await queue.get(task.id)).status is TaskStatus.DONE


async def test_settling_a_purged_task_says_that_it_is_gone(queue: Any) -> None:
    task = await popped(queue)
    await queue.mark_done(task)
    await queue.purge()
    with pytest.raises(LeaseLost) as caught:
        await queue.mark_done(task)
    assert (caught.value.task_id, caught.value.status) == (task.id, None)


@pytest.mark.one_driver
@pytest.mark.parametrize("name", FENCED)
async def test_task_that_was_not_popped_cannot_be_settled(queue: Any, name: str) -> None:
    task = await queue.enqueue({})
    with pytest.raises(LeaseLost) as caught:
        await FENCED[name](queue, task)
    assert (caught.value.task_id, caught.value.worker_id) == (task.id, None)


@pytest.mark.one_driver
@pytest.mark.parametrize("name", FENCED)
async def test_settling_something_else_than_a_task_is_rejected(queue: Any, name: str) -> None:
    with rejecting("task", {"_id": {"$ne": None}}):
        await FENCED[name](queue, {"_id": {"$ne": None}})


async def test_many_are_done_at_once_and_the_lost_are_named(harness: Harness) -> None:
    queue = harness.queue(visibility_timeout=5, backoff=BackoffPolicy(base_sec=0, max_sec=0))
    await queue.enqueue_many([{"n": n} for n in range(6)])
    first = await queue.pop_many(3)
    harness.clock.advance(5)
    await harness.sweeper(queue).reclaim_stuck()
    second = await queue.pop_many(3)
    third = await queue.pop_many(3)
    assert {task.id for task in second} == {task.id for task in first}
    assert await queue.mark_done_many([*second, *third]) == []
    lost = await queue.mark_done_many(first)
    assert {error.task_id for error in lost} == {task.id for task in first}
    assert await queue.mark_done_many([*second, *third]) == []
    assert (await queue.stats()).done == 6
    histories = [(await queue.get(task.id)).history for task in second]
    assert [[entry.outcome for entry in history] for history in histories] == [
        ["lease_expired", "done"]
    ] * 3


async def test_one_lost_lease_does_not_hold_up_the_batch(harness: Harness) -> None:
    queue = harness.queue()
    await queue.enqueue_many([{"n": n} for n in range(3)])
    tasks = await queue.pop_many(3)
    await queue.mark_failure(tasks[1], "no")
    (lost,) = await queue.mark_done_many(tasks)
    assert lost.task_id == tasks[1].id
    assert (await queue.stats()).done == 2


async def test_history_is_bounded_to_the_latest_attempts(harness: Harness) -> None:
    queue = harness.queue(history_limit=3)
    await queue.enqueue({})
    for _ in range(5):
        await queue.mark_retry(await queue.pop(), delay=0)
    (task,) = await queue.peek()
    assert [entry.attempt for entry in task.history] == [3, 4, 5]


async def test_long_error_is_cut_before_it_is_stored(queue: Any) -> None:
    task = await popped(queue)
    await queue.mark_failure(task, "x" * 100_000)
    assert len((await queue.get(task.id)).error.message) == 4000


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [ValueError("file \udcff"), Unspeakable(), "\ud800", b"\xff"])
async def test_any_error_can_be_told(queue: Any, error: Any) -> None:
    task = await popped(queue)
    await queue.mark_retry(task, error, delay=0)
    assert (await queue.get(task.id)).error.message


async def test_error_without_a_text_is_its_type(queue: Any) -> None:
    task = await popped(queue)
    await queue.mark_failure(task, ValueError())
    error = (await queue.get(task.id)).error
    assert (error.message, error.code) == ("ValueError", "ValueError")


def raised(message: str) -> ValueError:
    try:
        raise ValueError(message)
    except ValueError as exc:
        return exc


async def test_traceback_of_the_last_failure_is_stored_once(harness: Harness, queue: Any) -> None:
    task = await popped(queue)
    await queue.mark_retry(task, raised("one \udcff \0, password=sesame"), delay=0)
    await queue.mark_retry(await queue.pop(), raised("two"), code="c", delay=0)
    (document,) = await harness.stored()
    assert document["error"]["traceback"].endswith("\nValueError: two")
    assert [set(one["error"]) for one in document["history"]] == [{"message", "code", "at"}] * 2
    shown = await queue.get(task.id)
    assert shown.error.traceback == document["error"]["traceback"]
    await queue.mark_retry(await queue.pop(), "no exception", delay=0)
    (document,) = await harness.stored()
    assert set(document["error"]) == {"message", "code", "at"}
    assert (await queue.get(task.id)).error.traceback is None


async def test_any_character_of_a_traceback_can_be_stored(queue: Any) -> None:
    task = await popped(queue)
    await queue.mark_failure(task, raised("one \udcff \0, password=sesame"))
    traceback = (await queue.get(task.id)).error.traceback
    assert traceback.endswith("ValueError: one \\udcff \0, password=•••")


@pytest.mark.parametrize("where", ["status", "collection"])
async def test_a_replay_keeps_the_traceback_until_the_task_is_done(
    harness: Harness, where: str
) -> None:
    queue = harness.queue(dead_letters=where)
    task = await popped(queue)
    await queue.mark_failure(task, raised("boom"))
    (letter,) = await queue.dead_letters.list()
    assert letter.error.traceback.endswith("ValueError: boom")
    await queue.dead_letters.replay([task.id])
    again = await queue.pop()
    assert again.error.traceback.endswith("ValueError: boom")
    await queue.mark_done(again)
    (document,) = await harness.stored()
    assert "error" not in document


@pytest.mark.parametrize(("limit", "length"), [(0, None), (60, 60)])
async def test_traceback_can_be_shortened_and_switched_off(
    harness: Harness, limit: int, length: int | None
) -> None:
    queue = harness.queue(traceback_limit=limit)
    task = await popped(queue)
    await queue.mark_failure(task, raised("boom " * 100))
    error = (await queue.get(task.id)).error
    assert error.message.startswith("ValueError: boom")
    assert (error.traceback and len(error.traceback)) == length


async def test_history_keeps_the_beginning_of_long_errors(queue: Any) -> None:
    task = await popped(queue)
    await queue.mark_failure(task, "ä" * 9000)
    stored = await queue.get(task.id)
    assert len(stored.error.message.encode()) == 4000
    assert len(stored.history[0].error.message.encode()) == 500


@pytest.mark.parametrize("length", [480, 3980])
async def test_no_half_of_a_password_is_stored(queue: Any, length: int) -> None:
    task = await popped(queue)
    given = f"{'ä' * (length // 2)} mongodb://ada:{'secret' * 9}@db {'x' * 9000}"
    await queue.mark_failure(task, given)
    stored = await queue.get(task.id)
    for message in (stored.error.message, stored.history[0].error.message):
        assert "secret@db" in message or "sec" not in message


async def test_result_that_cannot_be_stored_leaves_the_task_leased(queue: Any) -> None:
    task = await popped(queue)
    with pytest.raises(InvalidPayload):
        await queue.mark_done(task, result=object())
    await queue.mark_done(task, result=[1, 2])


async def test_decorrelated_jitter_uses_the_previous_delay(harness: Harness) -> None:
    policy = BackoffPolicy(base_sec=1, max_sec=1000, jitter="decorrelated")
    queue = harness.queue(backoff=policy)
    await queue.enqueue({}, max_attempts=100)
    previous = 1.0
    for _ in range(12):
        task = await queue.pop()
        await queue.mark_retry(task)
        delay = (await queue.get(task.id)).backoff_sec
        assert 1 <= delay <= previous * 3
        previous = delay
        harness.clock.advance(delay + 0.001)


# Without a retention, a done task is deleted


@pytest.mark.parametrize("result", [None, {"sent": 1}])
async def test_done_task_is_deleted_without_retention(harness: Harness, result: Any) -> None:
    queue = harness.queue(retention=0)
    await queue.enqueue({}, dedupe_key="k")
    task = await queue.pop()
    await queue.mark_done(task, result=result)
    assert await queue.get(task.id) is None
    await queue.mark_done(task)  # As after a lost reply: it is gone, and that is what was asked.
    assert await queue.mark_done_many([task]) == []
    await queue.enqueue({}, dedupe_key="k")
    stats = await queue.stats()
    assert (stats.ready, stats.processing, stats.done) == (1, 0, 0)


async def test_many_done_tasks_are_deleted_and_lost_leases_are_named(harness: Harness) -> None:
    queue = harness.queue(retention=0, visibility_timeout=5)
    await queue.enqueue_many([{"n": n} for n in range(4)])
    gone, taken, failed, mine = await queue.pop_many(4)
    await queue.mark_done(gone)
    await queue.mark_failure(failed, "no")
    harness.clock.advance(4)
    await queue.touch(mine)
    harness.clock.advance(1)
    assert await harness.sweeper(queue).reclaim_stuck() == 1
    lost = await queue.mark_done_many([gone, taken, failed, mine])
    assert {error.task_id for error in lost} == {taken.id, failed.id}
    assert await queue.get(mine.id) is None
    assert (await queue.get(taken.id)).status is TaskStatus.PENDING
    with pytest.raises(LeaseLost):
        await queue.mark_done(taken)
    assert (await queue.get(taken.id)).status is TaskStatus.PENDING


@pytest.mark.parametrize("letters", ["status", "collection"])
async def test_retries_and_dead_letters_are_kept_without_retention(
    harness: Harness, letters: str
) -> None:
    queue = harness.queue(retention=0, dead_letters=letters)
    await queue.enqueue({}, max_attempts=2)
    await queue.mark_retry(await queue.pop(), "no", delay=0)
    task = await queue.pop()
    await queue.mark_failure(task, "broken")
    await harness.sweeper(queue).run_once()
    (letter,) = list(await queue.dead_letters.list())
    assert [one.outcome for one in letter.history] == ["retried", "failed"]
    with pytest.raises(LeaseLost):
        await queue.mark_done(task)


async def test_collection_decides_whether_done_tasks_are_kept(harness: Harness) -> None:
    await harness.queue(retention=60).ensure_indexes()
    other = harness.queue(retention=0)
    await other.enqueue({})
    task = await other.pop()
    await other.mark_done(task)
    assert (await other.get(task.id)).status is TaskStatus.DONE
    await other.ensure_indexes()
    await other.enqueue({})
    again = await other.pop()
    await other.mark_done(again)
    assert await other.get(again.id) is None
    assert await harness.sweeper(other).purge_finished() == 1
