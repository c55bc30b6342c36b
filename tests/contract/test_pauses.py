"""A paused queue delivers nothing until it is resumed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from microqueue import core
from microqueue.core import QueueCore
from tests.rejection import rejecting


async def test_paused_queue_takes_tasks_and_delivers_none(queue: Any) -> None:
    await queue.enqueue({"n": 1})
    pause = await queue.pause(reason="the bank is closed")
    assert (pause.queue, pause.reason) == (queue.name, "the bank is closed")
    await queue.enqueue({"n": 2})
    assert await queue.pop() is None
    assert await queue.pop_many(10) == []
    assert (await queue.stats()).ready == 2
    assert await queue.paused() == pause


async def test_resumed_queue_goes_on_where_it_stopped(queue: Any) -> None:
    await queue.enqueue({"n": 1})
    await queue.pause()
    assert await queue.resume() is True
    assert await queue.paused() is None
    assert (await queue.pop()).payload == {"n": 1}


async def test_what_runs_when_a_queue_is_paused_can_be_settled(queue: Any) -> None:
    await queue.enqueue({})
    task = await queue.pop()
    await queue.pause()
    await queue.mark_done(task)
    assert (await queue.stats()).done == 1


async def test_pausing_twice_keeps_the_first_instant_and_the_last_reason(queue: Any) -> None:
    first = await queue.pause(reason="one")
    again = await queue.pause(reason="two")
    assert (again.paused_at, again.reason) == (first.paused_at, "two")
    assert await queue.resume() is True
    assert await queue.resume() is False


async def test_pause_holds_for_one_queue_only(harness: Any) -> None:
    one, other = harness.queue("one"), harness.queue("other")
    await one.pause()
    await other.enqueue({})
    assert await other.pop() is not None


async def test_pause_reaches_other_processes_once_their_memory_is_stale(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = harness.queue("same"), harness.queue("same")
    await there.enqueue({})
    await there.enqueue({})
    assert await there.pop() is not None  # It knows now that the queue is open, for a second.
    await here.pause()
    monkeypatch.setattr(core, "REMEMBERED_SEC", 0.0)
    assert await there.pop() is None


async def test_reason_must_be_a_text(queue: Any) -> None:
    with rejecting("reason", 7):
        await queue.pause(reason=7)


async def test_waiting_for_a_paused_queue_costs_a_few_looks(
    queue: Any, harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queue.enqueue({}, delay=1)
    harness.clock.advance(1)  # It is due, and is not made ready.
    await queue.pause()
    asked = 0
    usual = QueueCore.pop

    def counted(self: Any, worker_id: str | None) -> Any:
        nonlocal asked
        asked += 1
        return usual(self, worker_id)

    monkeypatch.setattr(QueueCore, "pop", counted)
    started = time.monotonic()
    assert await queue.pop(wait=0.3) is None
    took_sec = time.monotonic() - started
    # Every 20 ms in memory; without a pause it would be hundreds.
    assert asked < took_sec / 0.02 + 10


async def test_waiting_pop_goes_on_soon_after_a_resume(
    queue: Any, harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "REMEMBERED_SEC", 0.05)
    monkeypatch.setattr(core, "REMEMBERED_SEC", 0.05)
    await queue.enqueue({"n": 1})
    await queue.pause()
    await harness.queue().resume()  # Another process.
    task = await queue.pop(wait=30)
    assert task.payload == {"n": 1}
