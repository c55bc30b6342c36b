"""A worker of each kind on a real server, for tests that hold for all of them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient

from microqueue import AsyncQueue, BackoffPolicy, Queue, QueueSettings
from microqueue.worker import AsyncWorker, Worker
from tests.waiting import wait_for

KINDS = ["threads", "pymongo_async", "motor"]


class Rig:
    """A queue to look at, and a worker of one kind on the same queue."""

    def __init__(self, kind: str, uri: str, database: Any) -> None:
        self.kind = kind
        self.uri = uri
        self.database = database
        self.settings = QueueSettings(
            visibility_timeout=60, max_attempts=3, backoff=BackoffPolicy(base_sec=30, jitter="none")
        )
        self.client_options: dict[str, Any] = {}
        self.client: Any = None
        self.worker: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def queue(self) -> Queue[Any]:
        return Queue(self.database, settings=self.settings)

    def run(
        self,
        handler: Any,
        *,
        burst: bool = True,
        names: tuple[str, ...] = ("default",),
        **options: Any,
    ) -> int:
        """Run a worker of this kind until it ends."""
        if self.kind == "threads":
            return self._run_threads(handler, burst=burst, names=names, **options)
        return asyncio.run(self._run(handler, burst=burst, names=names, **options))

    def _run_threads(
        self, handler: Any, *, burst: bool, names: tuple[str, ...], **options: Any
    ) -> int:
        with MongoClient[Any](self.uri, **self.client_options) as client:
            self.client = client
            database = client[self.database.name]
            queues = [Queue[Any](database, name, settings=self.settings) for name in names]
            self.worker = Worker(queues, handler, **options)
            handled: int = self.worker.run(burst=burst)
            return handled

    async def _run(
        self, handler: Any, *, burst: bool, names: tuple[str, ...], **options: Any
    ) -> int:
        self._loop = asyncio.get_running_loop()
        client_class: Any = AsyncIOMotorClient if self.kind == "motor" else AsyncMongoClient
        client = self.client = client_class(self.uri, **self.client_options)
        database = client[self.database.name]
        queues = [AsyncQueue[Any](database, name, settings=self.settings) for name in names]
        self.worker = AsyncWorker(queues, handler, **options)
        try:
            handled: int = await self.worker.run(burst=burst)
            return handled
        finally:
            closing = client.close()
            if inspect.isawaitable(closing):
                await closing

    def start(self, handler: Any, **options: Any) -> threading.Thread:
        """Run a worker in a thread of the test, until it is stopped."""
        thread = threading.Thread(target=lambda: self.run(handler, burst=False, **options))
        thread.start()
        return thread

    def stop(self, **options: Any) -> None:
        wait_for(lambda: self.worker is not None)
        if self.kind == "threads":
            self.worker.stop(**options)
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: self.worker.stop(**options))


def stored(rig: Rig, task: Any) -> Any:
    found = rig.queue.get(task.id)
    assert found is not None
    return found
