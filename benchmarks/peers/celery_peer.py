"""Celery, on Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.brokers import fresh_redis
from benchmarks.celery_worker import CONCURRENCY, POOL, PREFETCH, new_app, run_worker
from benchmarks.peers.notes import Notes
from benchmarks.peers.peer import Peer, Producer, Server


@dataclass(frozen=True)
class _CeleryProducer:
    task: Any
    producer: Any

    def one(self, payload: dict[str, Any]) -> None:
        self.task.apply_async((payload,), producer=self.producer)

    def many(self, payloads: list[dict[str, Any]]) -> None:
        for payload in payloads:
            self.task.apply_async((payload,), producer=self.producer)


class CeleryOnRedis(Peer):
    """Celery. A message is acknowledged before its task runs."""

    name = "Celery"
    runs_on = Server.REDIS
    settings = (
        f"{POOL}, {CONCURRENCY} processes, worker_prefetch_multiplier {PREFETCH}, no results, no "
        "events, no gossip, no mingle; acknowledged before the handler"
    )
    worker_processes = 1  # It starts the others.
    acknowledges = False
    max_tasks = 3000

    def fresh(self) -> AbstractContextManager[str]:
        """Empty the server."""
        return fresh_redis(self.server)

    @contextmanager
    def producer(self, address: str) -> Iterator[Producer]:
        """Call the task, once for each payload; there is no call for many."""
        task = _task(address)
        try:
            with task.app.producer_pool.acquire(block=True) as producer:
                producer.connection.ensure_connection(max_retries=1)
                yield _CeleryProducer(task, producer)
        finally:
            task.app.close()

    def work(self, address: str, notes: Notes, *, drain: bool) -> None:  # noqa: ARG002 (it cannot)
        """Run a worker, which starts the processes of its pool."""
        app = _task(address, notes).app
        notes.await_go()
        run_worker(app)


def _task(address: str, notes: Notes | None = None) -> Any:
    def no_op(payload: dict[str, Any]) -> None:
        if notes is not None:
            notes.start(payload["number"])

    return new_app(address).task(name="no_op")(no_op)
