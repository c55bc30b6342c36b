"""A dashboard under test: its app, asked without a network, and a queue to arrange things by."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

from microqueue import AsyncQueue, BackoffPolicy, Queue, QueueSettings, Task
from microqueue.dashboard import dashboard
from microqueue.drivers.driver import awaited
from microqueue.testing import FakeClock
from tests.integration.queues import popped

API = "/api/v1"
SETTINGS = QueueSettings(
    visibility_timeout=60, max_attempts=2, backoff=BackoffPolicy(base_sec=30, jitter="none")
)
TOKEN = "correct-horse-battery"


class Site:
    """Asks a dashboard as a viewer would, and arranges tasks through a blocking queue."""

    def __init__(self, app: FastAPI, client: httpx.AsyncClient, queue: Queue[Any]) -> None:
        self.app = app
        self.client = client
        self.queue = queue

    @property
    def clock(self) -> FakeClock:
        assert isinstance(self.queue.clock, FakeClock)
        return self.queue.clock

    async def get(self, path: str, *, expect: int = 200, **query: Any) -> Any:
        return _read(await self.client.get(f"{API}{path}", params=query), expect)

    async def post(self, path: str, body: Any = None, *, expect: int = 200) -> Any:
        return _read(await self.client.post(f"{API}{path}", json=body), expect)

    def popped(self, **options: Any) -> Task[Any]:
        return popped(self.queue, **options)

    def bury(self, message: str = "boom", code: str | None = None, **payload: Any) -> Task[Any]:
        self.queue.enqueue(payload, priority=255)
        task = self.popped()
        self.queue.mark_failure(task, message, code=code)
        return task


def _read(reply: httpx.Response, status: int) -> Any:
    assert reply.status_code == status, reply.text
    expected = "application/json" if status < 400 else "application/problem+json"
    if "ndjson" in reply.headers["content-type"]:
        return reply.text
    assert reply.headers["content-type"].startswith(expected), reply.headers
    return reply.json()


@asynccontextmanager
async def opened(
    database: Any, *, kind: str = "blocking", uri: str | None = None, **options: Any
) -> AsyncIterator[Site]:
    """Open a dashboard on a database, through a ``Queue`` or an ``AsyncQueue``."""
    settings = options.pop("settings", SETTINGS)
    headers = options.pop("headers", {})
    model = options.pop("model", None)
    clock = FakeClock()
    queue: Queue[Any] = Queue(database, settings=settings, clock=clock)
    shown: Any = Queue(database, settings=settings, clock=clock, payload_model=model)
    client: Any = None
    if kind != "blocking":
        client = (AsyncMongoClient if kind == "async" else AsyncIOMotorClient)(uri)
        shown = AsyncQueue(client[database.name], settings=settings, clock=clock)
    app = dashboard(shown, **{"cache_sec": 0.0, **options})
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers
        ) as browser:
            yield Site(app, browser, queue)
    finally:
        app.state.context.events.stop()
        if client is not None:
            await awaited(client.close())  # Motor's is not awaited.
