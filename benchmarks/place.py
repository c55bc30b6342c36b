"""Where a benchmark runs: a server, databases that are dropped afterwards, and the tasks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pymongo import MongoClient

from microqueue import Queue
from microqueue.embedded import EmbeddedServer

BATCH = 500
PAYLOAD_BYTES = 250


@dataclass(frozen=True)
class Place:
    """A database on a server; plain data, so that other processes can be told of it."""

    uri: str
    database: str

    @contextmanager
    def client(self, **options: Any) -> Iterator[MongoClient[Any]]:
        """Connect, for as long as it is needed."""
        client: MongoClient[Any] = MongoClient(self.uri, tz_aware=True, **options)
        try:
            yield client
        finally:
            client.close()


@contextmanager
def server(uri: str | None) -> Iterator[str]:
    """Give the address of the server to measure: the given one, or an embedded one."""
    if uri or (uri := os.environ.get("MICROQUEUE_URI")):
        yield uri
        return
    with EmbeddedServer.start() as embedded:
        yield embedded.uri


@contextmanager
def fresh_place(uri: str) -> Iterator[Place]:
    """Give a new database, and drop it at the end."""
    place = Place(uri, f"microqueue_benchmark_{secrets.token_hex(4)}")
    try:
        yield place
    finally:
        with place.client() as client:
            client.drop_database(place.database)


def payloads(count: int) -> list[dict[str, Any]]:
    """Invent payloads of about 250 bytes."""
    filler = "x" * (PAYLOAD_BYTES - 60)
    return [
        {"number": number, "name": f"task {number}", "filler": filler} for number in range(count)
    ]


def fill(place: Place, count: int) -> None:
    """Put tasks into the queue as a producer does."""
    with place.client() as client:
        queue = Queue(client[place.database])
        queue.ensure_indexes()
        for start in range(0, count, 10_000):
            queue.enqueue_many(payloads(min(10_000, count - start)))
