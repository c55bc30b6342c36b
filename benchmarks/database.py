"""The server, the temporary databases and the tasks of the benchmarks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pymongo import MongoClient

from microqueue import Queue
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer

BATCH = 500
PAYLOAD_BYTES = 250


@dataclass(frozen=True)
class Database:
    """A database on a server. Plain data, so that it can be passed to other processes."""

    uri: str
    name: str

    @contextmanager
    def client(self, **options: Any) -> Iterator[MongoClient[Any]]:
        """Yield a client, and close it."""
        client: MongoClient[Any] = MongoClient(self.uri, tz_aware=True, **options)
        try:
            yield client
        finally:
            client.close()


@contextmanager
def server(uri: str | None) -> Iterator[str]:
    """Yield the URI of the server: ``uri``, ``MICROQUEUE_URI``, or an embedded server."""
    if uri or (uri := os.environ.get("MICROQUEUE_URI")):
        yield uri
        return
    with EmbeddedServer.start() as embedded:
        yield embedded.uri


@contextmanager
def fresh_database(uri: str) -> Iterator[Database]:
    """Yield a new database, and drop it."""
    database = Database(uri, f"microqueue_benchmark_{secrets.token_hex(4)}")
    try:
        yield database
    finally:
        with database.client() as client:
            client.drop_database(database.name)


def payloads(count: int) -> list[dict[str, Any]]:
    """Return payloads of about 250 bytes."""
    filler = "x" * (PAYLOAD_BYTES - 60)
    return [
        {"number": number, "name": f"task {number}", "filler": filler} for number in range(count)
    ]


def prepare(queue: Queue[Any]) -> None:
    """Create the indexes as the first write does: without that of dedupe keys."""
    core = core_of(queue)
    core.run(core.prepare())


def fill(database: Database, count: int) -> None:
    """Enqueue tasks as a producer does."""
    with database.client() as client:
        queue = Queue(client[database.name])
        for start in range(0, count, 10_000):
            queue.enqueue_many(payloads(min(10_000, count - start)))
