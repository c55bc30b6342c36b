"""Round trips: the commands that a worker sends per thousand tasks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
)

from benchmarks.database import Database
from benchmarks.processes import Start
from microqueue import Queue
from microqueue.worker import Worker


class Counting(CommandListener):
    """Counts commands by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def started(self, event: CommandStartedEvent) -> None:
        """Count the command."""
        self.counts[event.command_name] += 1

    def succeeded(self, event: CommandSucceededEvent) -> None:
        """Do nothing."""

    def failed(self, event: CommandFailedEvent) -> None:
        """Do nothing."""


def _no_op(payload: Any) -> None:
    pass


def per_thousand(database: Database, start: Start) -> dict[str, float]:
    """Drain with one worker; return its commands per 1,000 tasks."""
    listener = Counting()
    with database.client(event_listeners=[listener]) as client:
        worker = Worker(Queue(client[database.name]), _no_op)
        start()
        handled = worker.run(burst=True)
    return {name: count * 1000 / handled for name, count in listener.counts.items()}
