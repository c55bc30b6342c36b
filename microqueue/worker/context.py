"""What a handler sees of the task it works on, if it asks for a ``context``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from microqueue.arguments import refused
from microqueue.durations import Duration
from microqueue.operations.settle import storable_text
from microqueue.task import Progress, Task
from microqueue.worker.inflight import Held, lease_now


class _Context:
    """The task, and whether its result is still wanted."""

    def __init__(self, held: Held, queue: Any, expect: Callable[[float], None]) -> None:
        self._held = held
        self._queue = queue
        self._expect = expect

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
            raise refused("fraction", fraction, "give a number from 0 to 1")
        if message is not None and not isinstance(message, str):
            raise refused("message", message, "give a text")
        now = self._held.queue.clock.now()
        said = None if message is None else storable_text(message)
        self._held.progress = Progress.trusted(fraction=float(fraction), message=said, at=now)

    def _touched(self, task: Task[Any], at: float) -> None:
        self._held.touch(task, at)
        self._expect(self._held.renewal_due - lease_now())


class Context(_Context):
    """For plain functions."""

    def touch(self, extend: Duration | None = None) -> None:
        """Renew the lease by hand; the worker does so by itself every third of its length.

        A lease that ``extend`` made longer than usual stays so; a shorter one is renewed in time.
        """
        at = lease_now()
        self._touched(self._queue.touch(self._held.task, extend=extend), at)


class AsyncContext(_Context):
    """For coroutines."""

    async def touch(self, extend: Duration | None = None) -> None:
        """Renew the lease by hand, as :meth:`Context.touch` does."""
        at = lease_now()
        self._touched(await self._queue.touch(self._held.task, extend=extend), at)
