"""Log lines about tasks: readable as text, with fields for structured logs."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from typing import Any

from microqueue.task import Task
from microqueue.worker.in_flight import LeasedTask

logger = logging.getLogger("microqueue.worker")


class UnstartedTasks:
    """Counts tasks whose leases expired before they started, for one log line about all of them.

    A worker that was suspended and resumed may have hundreds.
    """

    def __init__(self) -> None:
        self._task_ids: deque[Any] = deque()  # Threads append without a lock.

    def add(self, task: LeasedTask) -> None:
        """Count a task, once."""
        if not task.counted_unstarted:
            task.counted_unstarted = True
            self._task_ids.append(task.claimed.id)

    def log(self) -> None:
        """Log how many were counted since the last call, if any."""
        count = 0
        while self._task_ids:
            with suppress(IndexError):  # Another thread was faster.
                self._task_ids.popleft()
                count += 1
        if count:
            logger.warning(
                "%d claimed tasks were not started: their leases expired while they waited. "
                "The process was stopped, the machine was suspended, or MongoDB did not answer.",
                count,
                extra={"not_started": count},
            )


def describe(task: Task[Any]) -> str:
    """Return a task's id, and its name if it has one."""
    return str(task.id) if task.name is None else f"{task.id} ({task.name})"


def log_task(level: int, task: Task[Any], event: str, *arguments: Any, **options: Any) -> None:
    """Log an event of a task, with the task's fields."""
    if logger.isEnabledFor(level):
        fields = {
            "task_id": str(task.id),
            "task": task.name,
            "queue": task.queue,
            "attempt": task.attempts,
            "worker_id": task.lease.worker_id if task.lease else None,
        }
        fields |= options.pop("extra", {})
        logger.log(level, f"task %s: {event}", describe(task), *arguments, extra=fields, **options)
