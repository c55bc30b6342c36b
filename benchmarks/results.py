"""Results: the time from the settlement of a task to the return of the call that waits for it."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pymongo import AsyncMongoClient

from benchmarks.database import Database, payloads, prepare
from microqueue import AsyncQueue, Queue, TaskDeleted
from microqueue.drivers import result_watch

WARM_UP = 5
EVERY_SEC = 0.02
CHECK_SEC = 0.05
SETTLED, IDLE = "settled", "idle"


@dataclass(frozen=True)
class Arrival:
    """Percentiles in milliseconds, and those of the settlement itself."""

    p50: float
    p99: float
    settle_p50: float
    count: int


def measure(database: Database, *, kind: str, count: int, others: int) -> Arrival:
    """Wait for one task after the other, which another process settles now and then.

    The time runs from the call of ``mark_done``, and so includes its write.

    Args:
        database: Where the tasks are.
        kind: ``threads`` or ``coroutines``.
        count: How many tasks to wait for.
        others: How many tasks are waited for beside them, and never finish.
    """
    context = multiprocessing.get_context("spawn")
    ready, start, replies = context.Event(), context.Event(), context.SimpleQueue()
    total = count + WARM_UP
    with database.client() as client:
        queue: Queue[Any] = Queue(client[database.name], SETTLED)
        prepare(queue)
        ids = [task.id for task in queue.enqueue_many(payloads(total)).tasks]
        waiting: Queue[Any] = Queue(client[database.name], IDLE)
        idle = [task.id for task in waiting.enqueue_many([{}] * others).tasks]
        process = context.Process(target=_settle, args=(database, total, ready, start, replies))
        process.start()
        ready.wait()
        if kind == "coroutines":
            waits = asyncio.run(_wait_async(database, ids, idle, start))
        else:
            waits = _wait(waiting, ids, idle, start)
        settles = replies.get()
        process.join()
    cuts = statistics.quantiles(waits[WARM_UP:], n=100, method="inclusive")
    settle_ms = statistics.median(settles[WARM_UP:]) * 1000
    return Arrival(cuts[49] * 1000, cuts[98] * 1000, settle_ms, count)


def _wait(queue: Queue[Any], ids: list[Any], idle: list[Any], start: Any) -> list[float]:
    waits: list[float] = []
    with _threads(queue, idle):
        start.set()
        for task_id in ids:
            result = queue.wait_for(task_id).result
            # All processes of a machine share this clock.
            waits.append(time.monotonic() - result["sent"])
    return waits


@contextmanager
def _threads(queue: Queue[Any], idle: list[Any]) -> Iterator[None]:
    """Wait for other tasks, one in each thread, until they are deleted."""

    def wait(task_id: Any) -> None:
        with suppress(TaskDeleted):
            queue.wait_for(task_id)

    threads = [threading.Thread(target=wait, args=(one,)) for one in idle]
    for thread in threads:
        thread.start()
    while _waiters() < len(idle):
        time.sleep(CHECK_SEC)
    yield
    queue.purge(status="pending")
    for thread in threads:
        thread.join()


def _waiters() -> int:
    """Count the calls of this process that wait."""
    watches = list(result_watch._watches.values())  # noqa: SLF001 (there is no public way)
    return sum(len(several) for one in watches for several in list(one._waiters.values()))  # noqa: SLF001 (as above)


async def _wait_async(
    database: Database, ids: list[Any], idle: list[Any], start: Any
) -> list[float]:
    waits: list[float] = []
    async with AsyncMongoClient[Any](database.uri, tz_aware=True) as client:
        queue: AsyncQueue[Any] = AsyncQueue(client[database.name], SETTLED)
        others = [asyncio.ensure_future(queue.wait_for(one)) for one in idle]
        while _waiters() < len(idle):  # noqa: ASYNC110 (nothing else reports it)
            await asyncio.sleep(CHECK_SEC)
        start.set()
        for task_id in ids:
            result = (await queue.wait_for(task_id)).result
            waits.append(time.monotonic() - result["sent"])
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return waits


def _settle(database: Database, total: int, ready: Any, start: Any, replies: Any) -> None:
    took: list[float] = []
    with database.client() as client:
        queue: Queue[Any] = Queue(client[database.name], SETTLED)
        tasks = queue.pop_many(total)
        ready.set()
        start.wait()
        for task in tasks:
            time.sleep(EVERY_SEC)
            sent = time.monotonic()
            queue.mark_done(task, result={"sent": sent})
            took.append(time.monotonic() - sent)
    replies.put(took)
