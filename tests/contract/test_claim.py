from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from microqueue import TaskStatus
from tests.contract.conftest import Harness
from tests.rejection import rejecting


async def drain(queue: Any) -> list[Any]:
    payloads = []
    while (task := await queue.pop()) is not None:
        payloads.append(task.payload["n"])
    return payloads


async def test_higher_priority_goes_first_and_equal_ones_in_order(queue: Any) -> None:
    for n, priority in enumerate([0, 5, 0, 255, 5]):
        await queue.enqueue({"n": n}, priority=priority)
    assert await drain(queue) == [3, 1, 4, 0, 2]


async def test_order_holds_within_one_millisecond_whatever_the_ids(queue: Any) -> None:
    for n, task_id in enumerate(["z", "a", "m"]):
        await queue.enqueue({"n": n}, task_id=task_id)
    assert await drain(queue) == [0, 1, 2]


async def test_pop_and_pop_many_deliver_in_the_same_order(harness: Harness) -> None:
    singly, batched = harness.queue("a"), harness.queue("b")
    for queue in (singly, batched):
        for n in range(12):
            await queue.enqueue({"n": n}, priority=n % 3)
    batches = [await batched.pop_many(5) for _ in range(4)]
    assert [task.payload["n"] for batch in batches for task in batch] == await drain(singly)
    assert [len(batch) for batch in batches] == [5, 5, 2, 0]


async def test_pop_leases_the_task_and_counts_the_delivery(harness: Harness, queue: Any) -> None:
    await queue.enqueue({"n": 1})
    task = await queue.pop(worker_id="w1")
    now = harness.clock.now()
    assert task.status is TaskStatus.PROCESSING
    assert task.attempts == 1
    assert task.lease.worker_id == "w1"
    assert task.lease.started_at == now
    assert task.lease.expires_at == now + timedelta(seconds=600)
    assert len(task.lease.token) == 24
    assert await queue.pop() is None


async def test_every_pop_has_a_token_of_its_own(queue: Any) -> None:
    await queue.enqueue_many([{}, {}])
    first, second = await queue.pop(), await queue.pop()
    assert first.lease.token != second.lease.token


async def test_lease_lasts_as_the_queue_or_the_task_says(harness: Harness) -> None:
    queue = harness.queue(visibility_timeout=30)
    await queue.enqueue({})
    await queue.enqueue({}, visibility_timeout=7)
    now = harness.clock.now()
    assert (await queue.pop()).lease.expires_at == now + timedelta(seconds=30)
    own = await queue.pop()
    assert own.lease.expires_at == now + timedelta(seconds=7)
    assert (await queue.get(own.id)).lease == own.lease


async def test_batch_respects_each_tasks_own_lease(harness: Harness) -> None:
    queue = harness.queue(visibility_timeout=30)
    await queue.enqueue_many([{}, {}], visibility_timeout=5)
    await queue.enqueue({})
    now = harness.clock.now()
    leases = [task.lease.expires_at - now for task in await queue.pop_many(3)]
    assert leases == [timedelta(seconds=5), timedelta(seconds=5), timedelta(seconds=30)]


async def test_delayed_task_is_never_early_and_then_on_time(harness: Harness, queue: Any) -> None:
    await queue.enqueue({"n": 1}, delay=10)
    harness.clock.advance(timedelta(seconds=10) - timedelta(milliseconds=1))
    assert await queue.pop() is None
    harness.clock.advance(timedelta(milliseconds=1))
    assert (await queue.pop()).payload == {"n": 1}


async def test_sub_millisecond_eta_is_rounded_up_not_down(harness: Harness, queue: Any) -> None:
    eta = harness.clock.now() + timedelta(milliseconds=5, microseconds=300)
    await queue.enqueue({}, eta=eta)
    harness.clock.advance(0.005)
    assert await queue.pop() is None
    harness.clock.advance(0.001)
    assert await queue.pop() is not None


async def test_due_retry_older_than_a_ready_task_goes_first(harness: Harness, queue: Any) -> None:
    await queue.enqueue({"n": "old"})
    await queue.mark_retry(await queue.pop(), delay=5)
    await queue.enqueue({"n": "new"})
    harness.clock.advance(5)
    assert await drain(queue) == ["old", "new"]


async def test_pop_promotes_at_most_the_configured_number(harness: Harness) -> None:
    queue = harness.queue(promote_limit=2)
    await queue.enqueue_many([{"n": n} for n in range(5)], delay=1)
    harness.clock.advance(1)
    assert (await queue.pop()).payload == {"n": 0}
    stats = await queue.stats()
    assert (stats.ready, stats.delayed) == (1, 3)


async def test_queues_of_one_collection_do_not_mix(harness: Harness) -> None:
    a, b = harness.queue("a"), harness.queue("b")
    await a.enqueue({"n": "a"})
    assert await b.pop() is None
    assert await b.pop_many(5) == []
    assert (await a.pop()).payload == {"n": "a"}


async def test_expired_task_is_not_delivered_even_before_a_sweep(
    harness: Harness, queue: Any
) -> None:
    expiring = await queue.enqueue({"n": 1}, expires_in=5)
    await queue.enqueue({"n": 2})
    harness.clock.advance(5)
    assert (await queue.pop()).payload == {"n": 2}
    failed = await queue.get(expiring.id)
    assert (failed.status, failed.error.code, failed.attempts) == (TaskStatus.FAILED, "expired", 0)


async def test_expired_tasks_at_the_head_are_buried_together(harness: Harness) -> None:
    queue = harness.queue(promote_limit=1)
    await queue.enqueue_many([{"n": n} for n in range(30)], expires_in=5)
    await queue.enqueue({"n": "good"})
    harness.clock.advance(5)
    assert (await queue.pop()).payload == {"n": "good"}
    outcomes = [len(task.history) for task in await queue.peek(40, status="failed")]
    assert len(outcomes) == 30
    assert sum(outcomes) == 1  # Only the first was met; the others went in one write.


async def test_task_is_delivered_until_just_before_it_expires(harness: Harness, queue: Any) -> None:
    await queue.enqueue({"n": 1}, expires_in=5)
    harness.clock.advance(4.999)
    assert await queue.pop() is not None


async def test_task_without_attempts_left_is_buried_instead_of_delivered(
    harness: Harness, queue: Any
) -> None:
    task = await queue.enqueue({"n": 1}, max_attempts=3)
    await harness.edit(task.id, attempts=3)
    assert await queue.pop() is None
    buried = await queue.get(task.id)
    assert (buried.status, buried.error.code, buried.attempts) == ("failed", "max_attempts", 3)


async def test_pop_waits_for_a_task_that_comes_due(harness: Harness) -> None:
    queue = harness.queue(poll_interval=0.05)
    assert await queue.pop(wait=0.05) is None
    await queue.enqueue({"n": 1})
    assert (await queue.pop(wait=timedelta(seconds=30))).payload == {"n": 1}


@pytest.mark.one_driver
@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None])
async def test_pop_many_rejects_a_limit_that_is_no_count(queue: Any, limit: Any) -> None:
    with rejecting("limit"):
        await queue.pop_many(limit)


async def test_pop_rejects_a_negative_wait(queue: Any) -> None:
    with rejecting("wait", -1):
        await queue.pop(wait=-1)
