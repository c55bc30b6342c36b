"""Wait for a task: its result or its error, however it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from microqueue import (
    InvalidArgument,
    TaskDeleted,
    TaskFailed,
    TaskNotFound,
    TaskStatus,
    WaitTimeout,
)
from microqueue.drivers import result_watch
from microqueue.task_ids import id_key
from tests.contract.conftest import Harness
from tests.rejection import rejecting

PATIENT_SEC = 40


class Waiting:
    """A wait beside the test: in a thread for a blocking queue."""

    def __init__(
        self, harness: Harness, queue: Any, task: Any, timeout: float = PATIENT_SEC
    ) -> None:
        self._task_id = getattr(task, "id", task)
        if harness.blocking:
            wait = asyncio.to_thread(queue._blocking.wait_for, task, timeout=timeout)  # noqa: SLF001 (what it wraps)
        else:
            wait = queue.wait_for(task, timeout=timeout)
        self._wait = asyncio.ensure_future(wait)

    async def is_watched(self, count: int = 1) -> None:
        """Wait until so many waiters are registered for the task."""
        while len(watched(self._task_id)) < count:
            assert not self._wait.done(), self._wait
            await asyncio.sleep(0.01)

    async def end(self) -> Any:
        return await self._wait


def watched(task_id: Any) -> set[Any]:
    found: set[Any] = set()
    for watch in list(result_watch._watches.values()):  # noqa: SLF001 (to see who waits)
        found |= watch._waiters.get(id_key(task_id), set())  # noqa: SLF001 (as above)
    return found


async def test_done_task_is_returned_with_its_result(queue: Any) -> None:
    await queue.enqueue({"n": 1})
    task = await queue.pop()
    await queue.mark_done(task, result={"width": 3})
    found = await queue.wait_for(task)
    assert (found.id, found.status, found.result) == (task.id, TaskStatus.DONE, {"width": 3})
    assert found.payload == {"n": 1}


async def test_task_that_is_done_meanwhile_is_returned(harness: Harness, queue: Any) -> None:
    task = await queue.enqueue({"n": 1})
    waiting = Waiting(harness, queue, task)
    await waiting.is_watched()
    await queue.mark_done(await queue.pop(), result=[7])
    found = await waiting.end()
    assert (found.id, found.status, found.result) == (task.id, TaskStatus.DONE, [7])
    assert not watched(task.id)


async def test_failed_task_raises_its_error(harness: Harness, queue: Any) -> None:
    task = await queue.enqueue({"n": 1})
    waiting = Waiting(harness, queue, task)
    await waiting.is_watched()
    await queue.mark_failure(await queue.pop(), "no such image", code="gone")
    for failing in (waiting.end(), queue.wait_for(task.id)):
        with pytest.raises(TaskFailed) as caught:
            await failing
        failed = caught.value
        assert (failed.task.id, failed.code, failed.error.message) == (
            task.id,
            "gone",
            "no such image",
        )
        assert failed.task.status is TaskStatus.FAILED


async def test_cancelled_task_is_a_failed_one(harness: Harness, queue: Any) -> None:
    task = await queue.enqueue({})
    waiting = Waiting(harness, queue, task)
    await waiting.is_watched()
    await queue.cancel(task.id)
    with pytest.raises(TaskFailed) as caught:
        await waiting.end()
    assert caught.value.code == "cancelled"


async def test_dead_letter_in_its_own_collection_is_found(harness: Harness) -> None:
    queue = harness.queue(dead_letters="collection")
    task = await queue.enqueue({})
    waiting = Waiting(harness, queue, task)
    await waiting.is_watched()
    await queue.mark_failure(await queue.pop(), "no", code="moved")
    assert await harness.stored() == []
    for failing in (waiting.end(), queue.wait_for(task)):
        with pytest.raises(TaskFailed) as caught:
            await failing
        assert caught.value.code == "moved"


@pytest.mark.parametrize("kept", ["status", "collection"])
async def test_replayed_task_is_waited_for_again(harness: Harness, kept: str) -> None:
    queue = harness.queue(dead_letters=kept)
    task = await queue.enqueue({})
    await queue.mark_failure(await queue.pop(), "no")
    await queue.dead_letters.replay([task.id])
    waiting = Waiting(harness, queue, task)
    await waiting.is_watched()
    await queue.mark_done(await queue.pop(), result=2)
    assert (await waiting.end()).result == 2


async def test_timeout_leaves_the_task_alone_and_no_waiter_behind(
    harness: Harness, queue: Any
) -> None:
    task = await queue.enqueue({})
    for timeout in (0, 0.1):
        with pytest.raises(WaitTimeout) as caught:
            await queue.wait_for(task, timeout=timeout)
        assert (caught.value.task_id, caught.value.timeout_sec) == (task.id, timeout)
        assert isinstance(caught.value, TimeoutError)
        assert not watched(task.id)
    (stored,) = await harness.stored()
    assert stored["status"] == "pending"


async def test_retried_task_is_not_finished(harness: Harness, queue: Any) -> None:
    task = await queue.enqueue({})
    waiting = Waiting(harness, queue, task)
    await waiting.is_watched()
    assert await queue.mark_retry(await queue.pop(), "busy", delay=0) is TaskStatus.PENDING
    await queue.release(await queue.pop())
    await queue.mark_done(await queue.pop(), result="at last")
    assert (await waiting.end()).result == "at last"


async def test_unknown_task_is_not_waited_for(queue: Any) -> None:
    with pytest.raises(TaskNotFound) as caught:
        await queue.wait_for("nothing")
    assert caught.value.task_id == "nothing"
    assert not isinstance(caught.value, TaskDeleted)


async def test_task_without_retention_is_deleted_before_its_result_is_read(
    harness: Harness,
) -> None:
    queue = harness.queue(retention=0)
    task = await queue.enqueue({})
    waiting = Waiting(harness, queue, task)
    await waiting.is_watched()
    await queue.mark_done(await queue.pop(), result=1)
    with pytest.raises(TaskDeleted) as caught:
        await waiting.end()
    assert caught.value.task_id == task.id


async def test_purged_task_ends_the_wait(harness: Harness, queue: Any) -> None:
    task = await queue.enqueue({})
    waiting = Waiting(harness, queue, task)
    await waiting.is_watched()
    assert await queue.purge(status="pending") == 1
    with pytest.raises(TaskDeleted):
        await waiting.end()


@pytest.mark.parametrize("task_id", ["order-17", 17, None])
async def test_task_is_found_by_its_id_or_its_text(queue: Any, task_id: Any) -> None:
    task = await queue.enqueue({}, task_id=task_id)
    await queue.mark_done(await queue.pop())
    assert (await queue.wait_for(task.id)).id == task.id
    assert (await queue.wait_for(str(task.id))).id == task.id


async def test_waiters_of_one_task_share_nothing(harness: Harness, queue: Any) -> None:
    task = await queue.enqueue({})
    waits = [Waiting(harness, queue, task) for _ in range(3)]
    await waits[0].is_watched(3)
    await queue.mark_done(await queue.pop(), result={"pages": []})
    found = [await one.end() for one in waits]
    found[0].result["pages"].append(1)
    assert [one.result for one in found[1:]] == [{"pages": []}] * 2


async def test_other_queue_of_the_collection_may_wait(harness: Harness, queue: Any) -> None:
    other = harness.queue("other")
    task = await queue.enqueue({})
    waiting = Waiting(harness, other, task)
    await waiting.is_watched()
    await queue.mark_done(await queue.pop())
    assert (await waiting.end()).queue == queue.name


@pytest.mark.one_driver
@pytest.mark.parametrize("given", [-1, "soon", float("inf")])
async def test_bad_timeout_is_rejected(queue: Any, given: Any) -> None:
    with rejecting("timeout"):
        await queue.wait_for("x", timeout=given)


@pytest.mark.one_driver
async def test_filter_is_no_id(queue: Any) -> None:
    with pytest.raises(InvalidArgument):
        await queue.wait_for({"$gt": 0})
