"""Helpers to test code that uses microqueue: a queue in memory, and a clock that you move.

    from microqueue.testing import FakeClock, memory_queue

    clock = FakeClock()
    queue = memory_queue(clock=clock)
    queue.enqueue({"n": 1}, delay=60)
    assert queue.pop() is None
    clock.advance(60)
    assert queue.pop() is not None

The queue in memory uses mongomock: for one process, and without transactions. For a real server
there are pytest fixtures: ``pytest_plugins = ["microqueue.testing.fixtures"]``.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from microqueue.async_queue import AsyncQueue
from microqueue.clock import as_utc, whole_milliseconds
from microqueue.durations import Duration, check_duration
from microqueue.queue import Queue
from microqueue.settings import QueueSettings
from microqueue.task import DEFAULT_QUEUE

__all__ = ["FakeClock", "memory_async_queue", "memory_queue"]


class FakeClock:
    """A clock that stands still until it is moved.

    Pass one clock to all queues that share the time.

    Args:
        now: The time at which it starts. Default: the current time.
    """

    stale = False

    def __init__(self, now: datetime | None = None) -> None:
        self._now = whole_milliseconds(as_utc(now or datetime.now(UTC)))

    def now(self) -> datetime:
        """Read the clock.

        Returns:
            The time to which it was last moved.
        """
        return self._now

    def advance(self, duration: Duration) -> datetime:
        """Move the clock forward.

        Args:
            duration: A ``timedelta`` or seconds.

        Returns:
            The new time.
        """
        self._now = whole_milliseconds(self._now + check_duration("duration", duration))
        return self._now

    def observe(self, server_time: datetime, *, sent: float, received: float) -> None:
        """Ignore the server's time.

        Args:
            server_time: What the server answered.
            sent: When it was asked.
            received: When it answered.
        """

    def forget(self) -> None:
        """Ignore that the server may have changed."""


def memory_queue(
    name: str = DEFAULT_QUEUE,
    *,
    clock: FakeClock | None = None,
    settings: QueueSettings | None = None,
    payload_model: type[Any] | None = None,
    database: Any = None,
) -> Queue[Any]:
    """Make a queue in memory.

    Args:
        name: The name of the queue.
        clock: The clock of the queue. Default: the system's.
        settings: The settings of the queue. Default: ``QueueSettings()``.
        payload_model: A pydantic model of the payloads.
        database: A database of another queue in memory, to share its collection.

    Returns:
        The queue.
    """
    return Queue(
        database if database is not None else memory_database(),
        name,
        clock=clock,
        settings=QueueSettings() if settings is None else settings,
        payload_model=payload_model,
    )


def memory_async_queue(
    name: str = DEFAULT_QUEUE,
    *,
    clock: FakeClock | None = None,
    settings: QueueSettings | None = None,
    payload_model: type[Any] | None = None,
    database: Any = None,
) -> AsyncQueue[Any]:
    """Make an asynchronous queue in memory.

    Args:
        name: The name of the queue.
        clock: The clock of the queue. Default: the system's.
        settings: The settings of the queue. Default: ``QueueSettings()``.
        payload_model: A pydantic model of the payloads.
        database: A database of another queue in memory, to share its collection.

    Returns:
        The queue.
    """
    return AsyncQueue(
        database if database is not None else memory_database(),
        name,
        clock=clock,
        settings=QueueSettings() if settings is None else settings,
        payload_model=payload_model,
    )


def memory_database() -> Any:
    """Make an empty database in memory."""
    try:
        import mongomock  # noqa: PLC0415 (needed in tests only)
    except ImportError as exc:
        raise ImportError("the queue in memory needs mongomock: pip install mongomock") from exc
    return mongomock.MongoClient().microqueue
