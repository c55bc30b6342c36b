"""Latency: the time from the call of ``enqueue`` to the start of the handler elsewhere."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

from pymongo import AsyncMongoClient, WriteConcern

from benchmarks.database import BATCH, Database, payloads, prepare
from microqueue import AsyncQueue, Queue
from microqueue.worker import AsyncWorker, Worker

WARM_UP = 5


@dataclass(frozen=True)
class Latency:
    """Percentiles in milliseconds."""

    p50: float
    p99: float
    count: int


def measure(
    database: Database, *, kind: str, count: int, every_sec: float, delayed: int = 0
) -> Latency:
    """Enqueue one task at a time into an idle queue, and measure when a worker starts it."""
    context = multiprocessing.get_context("spawn")
    ready, replies = context.Event(), context.SimpleQueue()
    total = count + WARM_UP
    process = context.Process(target=_work, args=(database, kind, total, ready, replies))
    with database.client() as client:
        queue = Queue(client[database.name])
        prepare(queue)
        for start in range(0, delayed, 20 * BATCH):
            queue.enqueue_many(payloads(min(20 * BATCH, delayed - start)), delay=3600 + start)
        process.start()
        ready.wait()
        for payload in payloads(total):
            time.sleep(every_sec)
            queue.enqueue({**payload, "sent": time.monotonic()})
    waits = sorted(replies.get()[WARM_UP:])
    process.join()
    cuts = statistics.quantiles(waits, n=100, method="inclusive")
    return Latency(p50=cuts[49] * 1000, p99=cuts[98] * 1000, count=len(waits))


def bare_insert_ms(database: Database, count: int, *, every_sec: float = 0.0) -> float:
    """Return the median time of single inserts with majority acknowledgement.

    ``every_sec`` is the pace. An insert after a rest takes longer than one right after another.
    """
    took = []
    with database.client() as client:
        tasks = client[database.name].get_collection("bare", write_concern=WriteConcern("majority"))
        for payload in payloads(count):
            time.sleep(every_sec)
            began = time.perf_counter()
            tasks.insert_one(payload)
            took.append(time.perf_counter() - began)
    return statistics.median(took) * 1000


def _work(database: Database, kind: str, total: int, ready: Any, replies: Any) -> None:
    waits: list[float] = []

    def record(payload: dict[str, Any]) -> bool:
        waits.append(
            time.monotonic() - payload["sent"]
        )  # All processes of a machine share this clock.
        return len(waits) == total

    if kind == "coroutines":
        asyncio.run(_work_async(database, record, ready))
    else:
        with database.client() as client:
            worker: Worker

            def handle(payload: dict[str, Any]) -> None:
                if record(payload):
                    worker.stop()

            worker = Worker(Queue(client[database.name]), handle)
            threading.Timer(1.0, ready.set).start()
            worker.run()
    replies.put(waits)


async def _work_async(database: Database, record: Any, ready: Any) -> None:
    client: AsyncMongoClient[Any] = AsyncMongoClient(database.uri, tz_aware=True)
    worker: AsyncWorker

    async def handle(payload: dict[str, Any]) -> None:
        if record(payload):
            worker.stop()

    worker = AsyncWorker(AsyncQueue(client[database.name]), handle)
    asyncio.get_running_loop().call_later(1.0, ready.set)
    await worker.run()
    await client.close()
