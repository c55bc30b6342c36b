"""Latency: the time from the call of ``enqueue`` to the start of the handler elsewhere.

:func:`measure` returns that time, and :func:`measure_steps` what it consists of.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import AsyncMongoClient, WriteConcern
from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
)

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
    _, waits = _send(database, _work, kind, count=count, every_sec=every_sec, delayed=delayed)
    waits = sorted(waits[WARM_UP:])
    cuts = statistics.quantiles(waits, n=100, method="inclusive")
    return Latency(p50=cuts[49] * 1000, p99=cuts[98] * 1000, count=len(waits))


def _send(
    database: Database,
    work: Callable[..., None],
    *arguments: Any,
    count: int,
    every_sec: float,
    delayed: int = 0,
) -> tuple[list[tuple[float, float]], Any]:
    """Enqueue tasks for a worker in another process, after a few that warm up.

    Returns:
        When each call of ``enqueue`` began and ended, and the reply of the worker.
    """
    context = multiprocessing.get_context("spawn")
    ready, replies = context.Event(), context.SimpleQueue()
    total = count + WARM_UP
    process = context.Process(target=work, args=(database, *arguments, total, ready, replies))
    calls = []
    with database.client() as client:
        queue = Queue(client[database.name])
        prepare(queue)
        for start in range(0, delayed, 20 * BATCH):
            queue.enqueue_many(payloads(min(20 * BATCH, delayed - start)), delay=3600 + start)
        process.start()
        ready.wait()
        for payload in payloads(total):
            time.sleep(every_sec)
            sent = time.monotonic()
            queue.enqueue({**payload, "sent": sent})
            calls.append((sent, time.monotonic()))
    reply = replies.get()
    process.join()
    return calls, reply


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
        _work_threads(database, record, ready)
    replies.put(waits)


def _work_threads(
    database: Database,
    record: Callable[[dict[str, Any]], bool],
    ready: Any,
    listeners: Sequence[CommandListener] = (),
) -> None:
    with database.client(event_listeners=listeners) as client:
        worker: Worker

        def handle(payload: dict[str, Any]) -> None:
            if record(payload):
                worker.stop()

        worker = Worker(Queue(client[database.name]), handle)
        threading.Timer(1.0, ready.set).start()
        worker.run()


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


# The steps of one pick-up


@dataclass(frozen=True)
class Steps:
    """What the latency of ``Worker`` consists of: medians in milliseconds.

    Attributes:
        enqueue: From the call of ``enqueue`` to its return, when a majority has the task.
        until_claim: From the call of ``enqueue`` to the first command of the claim.
        claim: The commands of the claim that got the task.
        hand_over: From the end of the claim to the start of the handler.
        in_all: From the call of ``enqueue`` to the start of the handler.
        wake_up: From the reply of the change stream to the first command of the claim; None
            without a reply.
        woken: The share of tasks that the change stream reported before the claim. A claim of a
            worker that still looks for tasks itself got the others.
    """

    enqueue: float
    until_claim: float
    claim: float
    hand_over: float
    in_all: float
    wake_up: float | None
    woken: float


@dataclass(frozen=True)
class _Reply:
    """A reply that has a task: of a claim, or of the change stream."""

    command: str
    began: float
    ended: float


class _Replies(CommandListener):
    """Notes the replies to a worker that have a task."""

    FETCHER = "microqueue-fetcher"
    """The thread that claims."""

    def __init__(self) -> None:
        self.found: list[_Reply] = []
        self._began: dict[int, float] = {}

    def started(self, event: CommandStartedEvent) -> None:
        """Note when the command begins."""
        fetches = threading.current_thread().name == self.FETCHER
        if event.command_name == "getMore" or fetches:
            self._began[event.request_id] = time.monotonic()

    def succeeded(self, event: CommandSucceededEvent) -> None:
        """Note the reply if it has a task."""
        ended, began = time.monotonic(), self._began.pop(event.request_id, None)
        name, reply = event.command_name, event.reply
        has_task = {
            "getMore": lambda: reply["cursor"]["nextBatch"],
            "find": lambda: reply["cursor"]["firstBatch"],
            "update": lambda: reply["n"],
            "findAndModify": lambda: reply["value"],
        }.get(name)
        if began is not None and has_task is not None and has_task():
            self.found.append(_Reply(name, began, ended))

    def failed(self, event: CommandFailedEvent) -> None:
        """Forget the command."""
        self._began.pop(event.request_id, None)


def measure_steps(database: Database, *, count: int, every_sec: float) -> Steps:
    """Enqueue one task at a time into an idle queue; return the steps until ``Worker`` has it."""
    calls, (starts, replies) = _send(database, _work_steps, count=count, every_sec=every_sec)
    enqueue: list[float] = []
    until_claim: list[float] = []
    claim: list[float] = []
    hand_over: list[float] = []
    in_all: list[float] = []
    wake_up: list[float] = []
    for (sent, returned), started in list(zip(calls, starts, strict=True))[WARM_UP:]:
        own = [one for one in replies if sent < one.ended <= started]
        claims = [one for one in own if one.command != "getMore"]
        enqueue.append(returned - sent)
        in_all.append(started - sent)
        until_claim.append(claims[0].began - sent)
        claim.append(sum(one.ended - one.began for one in claims))
        hand_over.append(started - claims[-1].ended)
        wake_up += [
            claims[0].began - one.ended
            for one in own
            if one.command == "getMore" and one.ended <= claims[0].began
        ][:1]
    return Steps(
        _median_ms(enqueue),
        _median_ms(until_claim),
        _median_ms(claim),
        _median_ms(hand_over),
        _median_ms(in_all),
        _median_ms(wake_up) if wake_up else None,
        len(wake_up) / count,
    )


def _median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1000


def _work_steps(database: Database, total: int, ready: Any, replies: Any) -> None:
    starts: list[float] = []
    listener = _Replies()

    def record(_payload: dict[str, Any]) -> bool:
        starts.append(time.monotonic())
        return len(starts) == total

    _work_threads(database, record, ready, [listener])
    replies.put((starts, listener.found))
