"""A queue of any driver behind a proxy that can silence its connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pymongo
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient

from microqueue import (
    AsyncQueue,
    AsyncSweeper,
    Queue,
    QueueSettings,
    Sweeper,
)
from microqueue.core import core_of
from microqueue.drivers.driver import awaited
from tests.integration.proxy import Proxy

PATIENT_SEC = 60.0
"""For what takes a second or two, and would take forever."""

BRISK = QueueSettings(call_timeout=0.5, retry_deadline=30, poll_interval=0.1)


class Caller:
    """A queue of any driver behind a proxy, whose methods are called as if they were blocking."""

    def __init__(self, kind: str, uri: str, name: str, settings: QueueSettings) -> None:
        self._loop = asyncio.new_event_loop()
        self._kind = kind
        if kind == "blocking":
            self.client: Any = MongoClient(uri)
            self.queue: Any = Queue(self.client[name], settings=settings)
            self.sweeper: Any = Sweeper(self.queue)
        elif kind == "from_uri":
            self.queue = Queue.from_uri(uri.replace("/?", f"/{name}?"), settings=settings)
            self.client = self.queue
            self.sweeper = Sweeper(self.queue)
        else:
            asyncio.set_event_loop(self._loop)
            make: Any = AsyncIOMotorClient if kind == "motor" else AsyncMongoClient
            self.client = make(uri)
            self.queue = AsyncQueue(self.client[name], settings=settings)
            self.sweeper = AsyncSweeper(self.queue)

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Perform a call within the time that it has, or fail."""
        if self._kind not in {"blocking", "from_uri"}:
            return self._loop.run_until_complete(asyncio.wait_for(call(), PATIENT_SEC))
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append((call(), None))
            except Exception as exc:  # noqa: BLE001 (it is raised below)
                outcome.append((None, exc))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(PATIENT_SEC)
        assert outcome, "the call hangs"
        reply, error = outcome[0]
        if error is not None:
            raise error
        return reply

    def hasten(self, settings: QueueSettings) -> None:
        """Shorten the limit of all further calls, on the same connections."""
        self.queue = type(self.queue)(core_of(self.queue).collections.tasks, settings=settings)
        self.sweeper = type(self.sweeper)(self.queue)

    def close(self) -> None:
        async def close() -> None:
            await awaited(self.client.close())

        with pymongo.timeout(1):
            if self._kind in {"blocking", "from_uri"}:
                self.client.close()
            else:
                self._loop.run_until_complete(close())
        self._loop.close()


KINDS = ["blocking", "from_uri", "pymongo_async", "motor"]


@contextmanager
def calling(kind: str, proxy: Proxy, database: Any, settings: QueueSettings) -> Iterator[Caller]:
    caller = Caller(kind, proxy.uri, database.name, settings)
    try:
        yield caller
    finally:
        proxy.thaw()
        caller.close()
        asyncio.set_event_loop(None)
