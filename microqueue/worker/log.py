"""Log lines about tasks: readable as text, and with fields for those who log as JSON."""

from __future__ import annotations

import logging
from typing import Any

from microqueue.task import Task

logger = logging.getLogger("microqueue.worker")


def tell(level: int, task: Task[Any], event: str, *arguments: Any, **options: Any) -> None:
    """Log what happened to a task."""
    if logger.isEnabledFor(level):
        fields = {
            "task_id": str(task.id),
            "queue": task.queue,
            "attempt": task.attempts,
            "worker_id": task.lease.worker_id if task.lease else None,
        }
        logger.log(level, f"task %s: {event}", task.id, *arguments, extra=fields, **options)
