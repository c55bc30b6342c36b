"""What tests ask of a queue, and of the server about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from microqueue import Queue, Task


def popped(queue: Queue[Any], **options: Any) -> Task[Any]:
    """Pop a task that must be there."""
    task = queue.pop(**options)
    assert task is not None
    return task


@contextmanager
def profiled(database: Any) -> Iterator[list[dict[str, Any]]]:
    """Collect what the server itself recorded about each command on ``tasks``."""
    recorded: list[dict[str, Any]] = []
    database.command("profile", 2)
    try:
        yield recorded
    finally:
        database.command("profile", 0)
        recorded += database["system.profile"].find({"ns": f"{database.name}.tasks"})
        database.drop_collection("system.profile")
