"""microqueue with both workers, the fastest plain pymongo, and the loop that one writes first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from pymongo import AsyncMongoClient, monitoring
from pymongo.collection import Collection

from benchmarks.database import BATCH, Database, fresh_database, prepare
from benchmarks.peers.notes import Notes
from benchmarks.peers.peer import Peer, Producer, Server
from benchmarks.references import INDEX, READY, Ceiling, bare_collection
from microqueue import AsyncQueue, Queue
from microqueue.core import core_of
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.worker import AsyncWorker, Worker

IDLE_POLL_SEC = 0.01


class _OnMongoDB(Peer):
    runs_on = Server.MONGODB

    def fresh(self) -> AbstractContextManager[Database]:
        """Create a database."""
        return fresh_database(self.server)


# microqueue


class _LastWrite(monitoring.CommandListener):
    """Notes each acknowledged write to the tasks; the last one is a settlement."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._writes: set[int] = set()

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        name = event.command_name
        if name in {"update", "delete"} and event.command[name] == DEFAULT_COLLECTION:
            self._writes.add(event.request_id)

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        if event.request_id in self._writes:
            self._writes.discard(event.request_id)
            self._notes.acknowledge()

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        self._writes.discard(event.request_id)


@dataclass(frozen=True)
class _QueueProducer:
    queue: Queue[Any]

    def one(self, payload: dict[str, Any]) -> None:
        self.queue.enqueue(payload)

    def many(self, payloads: list[dict[str, Any]]) -> None:
        self.queue.enqueue_many(payloads)


class Microqueue(_OnMongoDB):
    """``Queue`` and ``Worker``. A task is done when a majority has its settlement."""

    name = "microqueue"
    settings = "Queue and Worker, defaults; acknowledged after the handler, kept with its history"

    @contextmanager
    def producer(self, address: Database) -> Iterator[Producer]:
        """Enqueue with ``Queue``."""
        with address.client() as client:
            queue: Queue[Any] = Queue(client[address.name])
            prepare(queue)
            yield _QueueProducer(queue)

    def work(self, address: Database, notes: Notes, *, drain: bool) -> None:
        """Run a ``Worker``."""
        logging.getLogger("microqueue").setLevel(logging.ERROR)
        with address.client(event_listeners=[_LastWrite(notes)]) as client:
            queue: Queue[Any] = Queue(client[address.name])
            prepare(queue)
            worker = Worker(queue, lambda payload: notes.start(payload["number"]))
            notes.await_go()
            notes.settle(worker.run(burst=drain))


@dataclass(frozen=True)
class _AsyncQueueProducer:
    runner: asyncio.Runner
    queue: AsyncQueue[Any]

    def one(self, payload: dict[str, Any]) -> None:
        self.runner.run(self.queue.enqueue(payload))

    def many(self, payloads: list[dict[str, Any]]) -> None:
        self.runner.run(self.queue.enqueue_many(payloads))


class AsyncMicroqueue(_OnMongoDB):
    """``AsyncQueue`` and ``AsyncWorker``, on PyMongo's async client."""

    name = "microqueue async"
    settings = "AsyncQueue and AsyncWorker on PyMongo's async client; otherwise as above"

    @contextmanager
    def producer(self, address: Database) -> Iterator[Producer]:
        """Enqueue with ``AsyncQueue``."""
        with asyncio.Runner() as runner:
            client = runner.run(_connected(address))
            try:
                queue: AsyncQueue[Any] = AsyncQueue(client[address.name])
                core = core_of(queue)
                runner.run(core.run(core.prepare()))
                yield _AsyncQueueProducer(runner, queue)
            finally:
                runner.run(client.close())

    def work(self, address: Database, notes: Notes, *, drain: bool) -> None:
        """Run an ``AsyncWorker``."""
        logging.getLogger("microqueue").setLevel(logging.ERROR)

        async def handle(payload: dict[str, Any]) -> None:
            notes.start(payload["number"])

        async def run() -> None:
            async with await _connected(address, event_listeners=[_LastWrite(notes)]) as client:
                queue: AsyncQueue[Any] = AsyncQueue(client[address.name])
                core = core_of(queue)
                await core.run(core.prepare())
                worker = AsyncWorker(queue, handle)
                notes.await_go()
                notes.settle(await worker.run(burst=drain))

        asyncio.run(run())


async def _connected(address: Database, **options: Any) -> AsyncMongoClient[Any]:
    client: AsyncMongoClient[Any] = AsyncMongoClient(address.uri, tz_aware=True, **options)
    await client.aconnect()
    return client


# Plain pymongo


@dataclass(frozen=True)
class _PlainProducer:
    tasks: Collection[Any]

    def one(self, payload: dict[str, Any]) -> None:
        self.tasks.insert_one({**READY, "position": payload["number"], "payload": payload})

    def many(self, payloads: list[dict[str, Any]]) -> None:
        self.tasks.insert_many(
            [{**READY, "position": one["number"], "payload": one} for one in payloads],
            ordered=False,
        )


class _Plain(_OnMongoDB):
    @contextmanager
    def producer(self, address: Database) -> Iterator[Producer]:
        """Insert plain documents."""
        with address.client() as client:
            yield _PlainProducer(bare_collection(client, address))


class BareCeiling(_Plain):
    """Batches that are claimed and marked done, with none of a queue's guarantees."""

    name = "bare ceiling"
    settings = (
        f"batches of {BATCH}, marked done in another thread, a poll every "
        f"{IDLE_POLL_SEC * 1000:g} ms when idle; after a crash tasks stay claimed"
    )

    def work(self, address: Database, notes: Notes, *, drain: bool) -> None:
        """Claim batches, handle them, and mark them done in another thread."""

        def note(count: int) -> None:
            notes.acknowledge()
            notes.settle(count)

        with address.client() as client, Ceiling(bare_collection(client, address), note) as bare:
            notes.await_go()
            while True:
                batch = bare.claim()
                if batch is not None:
                    for document in batch.documents:
                        notes.start(document["payload"]["number"])
                    bare.finish(batch)
                elif drain:
                    return
                else:
                    time.sleep(IDLE_POLL_SEC)


class NaiveLoop(_Plain):
    """One ``find_one_and_update`` and one ``update_one`` per task."""

    name = "naive loop"
    settings = (
        "find_one_and_update and update_one per task, a poll every "
        f"{IDLE_POLL_SEC * 1000:g} ms when idle; after a crash a task stays claimed"
    )
    max_tasks = 1000

    def work(self, address: Database, notes: Notes, *, drain: bool) -> None:
        """Claim one task, handle it, mark it done, and repeat."""
        with address.client() as client:
            tasks = bare_collection(client, address)
            notes.await_go()
            while True:
                document = tasks.find_one_and_update(
                    READY, {"$set": {"status": "processing"}}, sort=INDEX
                )
                if document is not None:
                    notes.start(document["payload"]["number"])
                    tasks.update_one({"_id": document["_id"]}, {"$set": {"status": "done"}})
                    notes.acknowledge()
                    notes.settle(1)
                elif drain:
                    return
                else:
                    time.sleep(IDLE_POLL_SEC)
