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


def fill(place: Any, *kinds: dict[str, Any], each: int) -> None:
    """Replace a collection by many documents of each kind, which the server makes itself.

    That takes a tenth of the time of sending them. In a value, ``$n`` is the number of a document,
    from 0. Create the indexes afterwards.
    """
    numbered = [
        {"$documents": [{"n": {"$range": [0, each]}}]},
        {"$unwind": "$n"},
        {"$set": {"kind": {"$range": [0, len(kinds)]}}},
        {"$unwind": "$kind"},
    ]
    branches = [{"case": {"$eq": ["$kind", n]}, "then": kind} for n, kind in enumerate(kinds)]
    place.database.aggregate(
        [*numbered, {"$replaceWith": {"$switch": {"branches": branches}}}, {"$out": place.name}]
    )


@contextmanager
def profiled(database: Any, *collections: str) -> Iterator[list[dict[str, Any]]]:
    """Collect what the server itself recorded about each command on ``tasks``, or on others."""
    recorded: list[dict[str, Any]] = []
    database.command("profile", 2)
    try:
        yield recorded
    finally:
        database.command("profile", 0)
        names = [f"{database.name}.{one}" for one in collections or ("tasks",)]
        recorded += database["system.profile"].find({"ns": {"$in": names}})
        database.drop_collection("system.profile")
