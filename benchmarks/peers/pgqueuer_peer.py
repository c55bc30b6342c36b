"""pgqueuer."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import uvloop
from pgqueuer import Queries
from pgqueuer.db import AsyncpgDriver
from pgqueuer.qm import QueueManager

from benchmarks.database import BATCH
from benchmarks.peers.notes import Notes
from benchmarks.peers.peer import Peer, Producer, Server

ENTRYPOINT = "no_op"
CHUNK = 1000
"""Tasks per insert."""


@dataclass(frozen=True)
class _PgqueuerProducer:
    runner: asyncio.Runner
    queries: Any

    def one(self, payload: dict[str, Any]) -> None:
        self.runner.run(self.queries.enqueue(ENTRYPOINT, _encode(payload)))

    def many(self, payloads: list[dict[str, Any]]) -> None:
        self.runner.run(self._many(payloads))

    async def _many(self, payloads: list[dict[str, Any]]) -> None:
        for first in range(0, len(payloads), CHUNK):
            encoded = [_encode(one) for one in payloads[first : first + CHUNK]]
            count = len(encoded)
            await self.queries.enqueue([ENTRYPOINT] * count, encoded, [0] * count)


class Pgqueuer(Peer):
    """pgqueuer. A task is done when its row has been moved to the log, and that is on disk."""

    name = "pgqueuer"
    runs_on = Server.POSTGRESQL
    settings = (
        f"batch_size {BATCH}, the settings of pgq autovac, durable tables; "
        "acknowledged after the handler"
    )

    @contextmanager
    def fresh(self) -> Iterator[str]:
        """Create a database with the tables of pgqueuer."""
        name = f"benchmark_{secrets.token_hex(4)}"
        uvloop.run(_execute(f"{self.server}/postgres", f"CREATE DATABASE {name}"))
        try:
            uvloop.run(_install(f"{self.server}/{name}"))
            yield f"{self.server}/{name}"
        finally:
            drop = f"DROP DATABASE {name} WITH (FORCE)"
            uvloop.run(_execute(f"{self.server}/postgres", drop))

    @contextmanager
    def producer(self, address: str) -> Iterator[Producer]:
        """Insert batches by ``Queries.enqueue``."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            connection = runner.run(asyncpg.connect(address))
            try:
                yield _PgqueuerProducer(runner, Queries(AsyncpgDriver(connection)))
            finally:
                runner.run(connection.close())

    def work(self, address: str, notes: Notes, *, drain: bool) -> None:  # noqa: ARG002 (it cannot)
        """Run a ``QueueManager`` on uvloop, as the command ``pgq run`` does."""
        logging.getLogger("pgqueuer").setLevel(logging.ERROR)
        uvloop.run(_work(address, notes))


async def _work(address: str, notes: Notes) -> None:
    connection = await asyncpg.connect(address)
    queries = Queries(AsyncpgDriver(connection))
    log_jobs = queries.log_jobs

    async def log_and_note(jobs: list[Any]) -> None:
        await log_jobs(jobs)
        notes.acknowledge()
        notes.settle(len(jobs))

    queries.log_jobs = log_and_note
    manager = QueueManager(queries)

    async def no_op(job: Any) -> None:
        notes.start(json.loads(job.payload)["number"])

    manager.entrypoint(ENTRYPOINT)(no_op)
    notes.await_go()
    await manager.run(batch_size=BATCH)


def _encode(payload: dict[str, Any]) -> bytes:
    return json.dumps(payload).encode()


async def _execute(address: str, statement: str) -> None:
    connection = await asyncpg.connect(address)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def _install(address: str) -> None:
    connection = await asyncpg.connect(address)
    try:
        queries = Queries(AsyncpgDriver(connection))
        await queries.install()
        await queries.optimize_autovacuum()
    finally:
        await connection.close()
