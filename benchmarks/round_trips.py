"""Round trips: which commands a worker sends to drain a thousand tasks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
)

from benchmarks.place import Place
from benchmarks.processes import Start
from microqueue import Queue
from microqueue.worker import Worker


class Counting(CommandListener):
    """Counts commands by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def started(self, event: CommandStartedEvent) -> None:
        """Count it."""
        self.counts[event.command_name] += 1

    def succeeded(self, event: CommandSucceededEvent) -> None:
        """Do nothing."""

    def failed(self, event: CommandFailedEvent) -> None:
        """Do nothing."""


def _no_op(payload: Any) -> None:
    pass


def per_thousand(place: Place, start: Start) -> dict[str, float]:
    """Drain with one worker, and give its commands per 1,000 tasks."""
    listener = Counting()
    with place.client(event_listeners=[listener]) as client:
        worker = Worker(Queue(client[place.database]), _no_op)
        start()
        handled = worker.run(burst=True)
    return {name: count * 1000 / handled for name, count in listener.counts.items()}
