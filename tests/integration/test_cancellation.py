"""A coroutine that is cancelled while it pops leaves no task leased without a worker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

from microqueue import AsyncQueue, ServerUnavailable
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer


@pytest.fixture(params=["motor", "pymongo_async"])
async def queue(
    request: pytest.FixtureRequest, microqueue_server: EmbeddedServer, microqueue_database: Any
) -> AsyncIterator[AsyncQueue[Any]]:
    if request.param == "motor":
        motor: Any = AsyncIOMotorClient(microqueue_server.uri)
        yield AsyncQueue(motor[microqueue_database.name])
        motor.close()
        return
    client: AsyncMongoClient[Any] = AsyncMongoClient(microqueue_server.uri)
    yield AsyncQueue(client[microqueue_database.name])
    await client.close()


@pytest.mark.parametrize("batch", [False, True])
async def test_cancelled_pop_hands_back_what_it_claimed(
    queue: AsyncQueue[Any], batch: bool
) -> None:
    await queue.enqueue_many([{"n": n} for n in range(100)])
    rng = random.Random(7)
    held: list[Any] = []
    for _ in range(60):
        popping: Any = queue.pop_many(2) if batch else queue.pop()
        attempt = asyncio.create_task(popping)
        await asyncio.sleep(rng.uniform(0, 0.006))
        attempt.cancel()
        try:
            popped = await attempt
        except asyncio.CancelledError:
            continue
        held += popped if batch else [popped]
    stats = await queue.stats()
    assert stats.processing == len(held)
    assert stats.processing + stats.ready == 100
    assert {task.attempts for task in await queue.peek(100, status="pending")} <= {0}


async def test_pop_that_fails_while_it_is_cancelled_is_cancelled(
    queue: AsyncQueue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, failing = asyncio.Event(), asyncio.Event()

    async def fail(operation: Any) -> Any:
        operation.close()
        asked.set()
        await failing.wait()
        raise ServerUnavailable("gone")

    monkeypatch.setattr(core_of(queue), "run", fail)
    attempt = asyncio.create_task(queue.pop())
    await asked.wait()
    attempt.cancel()
    failing.set()
    with pytest.raises(asyncio.CancelledError):
        await attempt
