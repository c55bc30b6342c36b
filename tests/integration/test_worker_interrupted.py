"""A run that is interrupted while it begins or ends leaves nothing behind that works on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from microqueue import AsyncQueue, Queue
from microqueue.core import core_of
from microqueue.drivers import change_stream
from microqueue.embedded import EmbeddedServer
from microqueue.worker import AsyncWorker, Worker, lease_renewal, shutdown
from microqueue.worker.daemon_threads import DaemonThread
from microqueue.worker.effects import ReleaseUnstarted
from microqueue.worker.lease_renewal import TimeoutMonitor
from tests.integration.rig import Rig
from tests.waiting import wait_for

known: set[Any] = set()
"""What other tests have left behind."""


def everything() -> dict[Any, str]:
    """Return the names of all that runs for this process, or is open."""
    threads = [one for one in threading.enumerate() if one.name.startswith("microqueue-")]
    opened = [*lease_renewal._clients, *change_stream._listeners]  # noqa: SLF001 (all there is)
    return {one: one.name for one in threads} | {one: str(one) for one in opened}


def leftovers() -> list[str]:
    return [name for one, name in everything().items() if one not in known]


@pytest.fixture(autouse=True)
def _know_others() -> None:
    known.clear()
    known.update(everything())


def test_second_interrupt_ends_all_that_works(
    microqueue_queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()

    def handler(_payload: Any) -> None:
        begun.set()
        go.wait(60)

    worker = Worker(microqueue_queue, handler, concurrency=1)
    microqueue_queue.enqueue({})

    def interrupted(_effect: Any) -> None:
        raise KeyboardInterrupt

    usual = worker._perform_run  # noqa: SLF001 (to interrupt the shutdown)
    monkeypatch.setattr(
        worker,
        "_perform_run",
        lambda effect: (interrupted if isinstance(effect, ReleaseUnstarted) else usual)(effect),
    )
    running = DaemonThread(worker.run, name="test")
    running.start()
    assert begun.wait(30)
    worker.stop()
    running.join(30)
    assert isinstance(running.error, KeyboardInterrupt)
    wait_for(lambda: leftovers() == ["microqueue-0"], what="the end of all but the handler")
    go.set()
    wait_for(lambda: leftovers() == [])


def test_run_that_cannot_begin_leaves_nothing_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_deadlines: TimeoutMonitor) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(TimeoutMonitor, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        rig.run(lambda _payload: None)
    wait_for(lambda: leftovers() == [])


async def test_run_that_is_cancelled_twice_claims_no_more(
    microqueue_server: EmbeddedServer, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()
    async with AsyncMongoClient[Any](microqueue_server.uri) as client:
        queue = AsyncQueue[Any](client[microqueue_database.name])
        core = core_of(queue)
        usual = core.run

        async def slowly(operation: Any) -> Any:
            asked.set()
            await answer.wait()
            return await usual(operation)

        monkeypatch.setattr(core, "run", slowly)
        handled: list[Any] = []

        async def handler(payload: Any) -> None:
            handled.append(payload)

        worker = AsyncWorker(queue, handler)
        running = asyncio.create_task(worker.run())
        await asyncio.wait_for(asked.wait(), 30)
        for _ in range(2):
            running.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await running
        answer.set()
        monkeypatch.undo()
        await queue.enqueue({})
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [one for one in others if "_forever" in repr(one.get_coro())]
        assert handled == []
        assert await worker.run(burst=True) == 1  # The next run is not told of the former stop.
    wait_for(lambda: leftovers() == [])


async def test_run_ends_although_the_change_stream_cannot_be_left(
    microqueue_server: EmbeddedServer, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "ENDING_SEC", 0.2)
    go = threading.Event()
    usual = change_stream.release_listener

    def hang(*arguments: Any) -> Any:
        go.wait(60)
        return usual(*arguments)

    monkeypatch.setattr(change_stream, "release_listener", hang)
    async with AsyncMongoClient[Any](microqueue_server.uri) as client:
        queue = AsyncQueue[Any](client[microqueue_database.name])

        async def handler(_payload: Any) -> None:
            """Do nothing."""

        worker = AsyncWorker(queue, handler, grace=0.2)
        assert await asyncio.wait_for(worker.run(burst=True), 40) == 0
    go.set()
    wait_for(lambda: leftovers() == [])
