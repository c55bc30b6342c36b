"""huey, on Redis."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from huey import RedisHuey

from benchmarks.brokers import fresh_redis
from benchmarks.peers.notes import Notes
from benchmarks.peers.peer import PROCESSES, Peer, Producer, Server

THREADS = 4
"""Threads per consumer: most of a thread's time is spent on waiting for Redis."""


@dataclass(frozen=True)
class _HueyProducer:
    task: Any

    def one(self, payload: dict[str, Any]) -> None:
        self.task(payload)

    def many(self, payloads: list[dict[str, Any]]) -> None:
        self.task.map(payloads)


class Huey(Peer):
    """huey. Redis forgets a task when a worker takes it."""

    name = "huey"
    runs_on = Server.REDIS
    settings = (
        f"{PROCESSES} consumers with {THREADS} threads each, results=False, no periodic tasks; "
        "no acknowledgement"
    )
    acknowledges = False

    def fresh(self) -> AbstractContextManager[str]:
        """Empty the server."""
        return fresh_redis(self.server)

    @contextmanager
    def producer(self, address: str) -> Iterator[Producer]:
        """Call the task, once for each payload; there is no call for many."""
        task = _task(address)
        task.huey.storage.conn.ping()
        try:
            yield _HueyProducer(task)
        finally:
            task.huey.storage.close()

    def work(self, address: str, notes: Notes, *, drain: bool) -> None:  # noqa: ARG002 (it cannot)
        """Run a consumer."""
        logging.getLogger("huey").setLevel(logging.ERROR)
        huey = _task(address, notes).huey
        consumer = huey.create_consumer(workers=THREADS, periodic=False)
        notes.await_go()
        consumer.run()


def _task(address: str, notes: Notes | None = None) -> Any:
    def no_op(payload: dict[str, Any]) -> None:
        if notes is not None:
            notes.start(payload["number"])

    return RedisHuey("peers", url=address, results=False).task()(no_op)
