"""Log lines about tasks: readable as text, and with fields for those who log as JSON."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from typing import Any

from microqueue.task import Task

logger = logging.getLogger("microqueue.worker")


class UnstartedTasks:
    """Counts tasks that waited here until their leases were over, for one log line about all.

    A worker that was stopped and continued has hundreds of them at once.
    """

    def __init__(self) -> None:
        self._found: deque[Any] = deque()  # Threads add to it without a lock.

    def add(self, held: Any) -> None:
        """Count one; once, however many find out."""
        if not held.discarded:
            held.discarded = True
            self._found.append(held.claimed.id)

    def log(self) -> None:
        """Log how many there were since the last time, if any."""
        count = 0
        while self._found:
            with suppress(IndexError):  # Another thread was quicker.
                self._found.popleft()
                count += 1
        if count:
            logger.warning(
                "%d claimed tasks are not started: their leases ended while they waited; "
                "was this process stopped, the machine suspended, or MongoDB away?",
                count,
                extra={"not_started": count},
            )


def named(task: Task[Any]) -> str:
    """Write a task's id, and its name if it has one."""
    return str(task.id) if task.name is None else f"{task.id} ({task.name})"


def tell(level: int, task: Task[Any], event: str, *arguments: Any, **options: Any) -> None:
    """Log what happened to a task."""
    if logger.isEnabledFor(level):
        fields = {
            "task_id": str(task.id),
            "task": task.name,
            "queue": task.queue,
            "attempt": task.attempts,
            "worker_id": task.lease.worker_id if task.lease else None,
        }
        logger.log(level, f"task %s: {event}", named(task), *arguments, extra=fields, **options)
