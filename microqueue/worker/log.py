"""Log lines about tasks: readable as text, and with fields for those who log as JSON."""

from __future__ import annotations

import logging
from typing import Any

from microqueue.task import Task

logger = logging.getLogger("microqueue.worker")


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
