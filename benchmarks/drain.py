"""Drain: how fast workers process no-op tasks."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

from benchmarks.database import Database
from benchmarks.processes import Start
from microqueue import AsyncQueue, Queue
from microqueue.worker import AsyncWorker, Worker


def no_op(payload: Any) -> None:
    """Do nothing, so that only the queue is measured."""


async def no_op_async(payload: Any) -> None:
    """Do nothing, as a coroutine."""


def threads(database: Database, start: Start) -> int:
    """Drain with ``Worker``."""
    logging.getLogger("microqueue").setLevel(logging.ERROR)
    with database.client() as client:
        queue = Queue(client[database.name])
        worker = Worker(queue, no_op)
        start()
        return worker.run(burst=True)


def coroutines(database: Database, start: Start, driver: str = "pymongo") -> int:
    """Drain with ``AsyncWorker``, on PyMongo's async client or on Motor."""

    async def run() -> int:
        make: Any = AsyncIOMotorClient if driver == "motor" else AsyncMongoClient
        client = make(database.uri, tz_aware=True)
        queue = AsyncQueue(client[database.name])
        worker = AsyncWorker(queue, no_op_async)
        start()
        handled = await worker.run(burst=True)
        closing = client.close()
        if closing is not None:
            await closing
        return handled

    return asyncio.run(run())
