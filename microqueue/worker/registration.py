"""A worker's line in ``microqueue_workers``, by which others see that it lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from microqueue.core import QueueCore
from microqueue.operations import workers
from microqueue.operations.workers import MOST_NAMES, WorkerInfo
from microqueue.queue import Queue
from microqueue.worker.inflight import InFlight
from microqueue.worker.options import WorkerOptions

QueueT = TypeVar("QueueT", bound=QueueCore[Any])


class Registration:
    """Says that a worker lives, in the database of each of its collections."""

    def __init__(
        self,
        worker_id: str,
        options: WorkerOptions,
        in_flight: InFlight,
        *,
        handled: Callable[[], int],
        tasks: Callable[[], Sequence[str] | None] = lambda: None,
    ) -> None:
        self._worker_id = worker_id
        self._options = options
        self._in_flight = in_flight
        self._handled = handled
        self._tasks = tasks
        self._started_at: datetime | None = None
        self.heartbeat_sec = options.heartbeat.total_seconds()

    def beat(self, twins: Mapping[Any, Queue[Any]]) -> None:
        """Say it for these queues, each by the blocking one that stands for it."""
        held = self._in_flight.snapshot()
        names = self._tasks()
        registered = None if names is None else sorted(names)[:MOST_NAMES]
        for group in by_collection(twins):
            first = twins[group[0]]
            now = first.now()
            self._started_at = self._started_at or now
            info = WorkerInfo(
                id=self._worker_id,
                collection=first.collections.name,
                host=socket.gethostname(),
                pid=os.getpid(),
                queues=[one.name for one in group],
                concurrency=self._options.concurrency,
                running=sum(one.started is not None and one.queue in group for one in held),
                handled=self._handled(),
                started_at=self._started_at,
                heartbeat_at=now,
                heartbeat_sec=self.heartbeat_sec,
                tasks=registered,
                more_tasks=len(names or ()) > MOST_NAMES,
            )
            first.run(workers.beat(info))

    def leave(self, twins: Mapping[Any, Queue[Any]]) -> None:
        """Say for these queues that it has ended, and holds nothing."""
        for group in by_collection(twins):
            first = twins[group[0]]
            first.run(workers.leave(self._worker_id, first.collections.name))


def by_collection(queues: Iterable[QueueT]) -> list[list[QueueT]]:
    """Sort queues by the collection that they are in."""
    groups: dict[Any, list[QueueT]] = {}
    for queue in queues:
        place = queue.collections
        key = id(place.client), place.database.name, place.name
        groups.setdefault(key, []).append(queue)
    return list(groups.values())
