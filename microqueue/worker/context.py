"""What a handler sees of the task it works on, if it asks for a ``context``."""

from __future__ import annotations

from typing import Any

from microqueue.durations import Duration
from microqueue.errors import InvalidArgument
from microqueue.task import Progress, Task
from microqueue.worker.inflight import Held


class _Context:
    """The task, and whether its result is still wanted."""

    def __init__(self, held: Held, queue: Any) -> None:
        self._held = held
        self._queue = queue

    @property
    def task(self) -> Task[Any]:
        """The task as it was popped."""
        return self._held.task

    @property
    def attempt(self) -> int:
        """Which delivery this is, from 1."""
        return self._held.task.attempts

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop: lease lost, out of time, or the worker ends."""
        return self._held.cancelled

    def progress(self, fraction: float, message: str | None = None) -> None:
        """Say how far the handler is, from 0 to 1; the worker stores the latest once a second.

        It costs the handler nothing, and is seen in ``Task.progress``.
        """
        if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise InvalidArgument(
                f"fraction={fraction!r} is not valid: give a number from 0 to 1",
                argument="fraction",
                value=fraction,
            )
        if message is not None and not isinstance(message, str):
            raise InvalidArgument(
                f"message={message!r} is not valid: give a text", argument="message", value=message
            )
        now = self._held.queue.clock.now()
        self._held.progress = Progress.trusted(fraction=float(fraction), message=message, at=now)


class Context(_Context):
    """For plain functions."""

    def touch(self, extend: Duration | None = None) -> None:
        """Renew the lease by hand; the worker does so by itself every third of its length."""
        self._held.claimed.replace(self._queue.touch(self._held.task, extend=extend))


class AsyncContext(_Context):
    """For coroutines."""

    async def touch(self, extend: Duration | None = None) -> None:
        """Renew the lease by hand; the worker does so by itself every third of its length."""
        self._held.claimed.replace(await self._queue.touch(self._held.task, extend=extend))
