"""The task that a named task has added: a :class:`Task` that its producer can wait for."""

from __future__ import annotations

import copy
from typing import Any, Self, TypeVar

from microqueue.async_queue import AsyncQueue
from microqueue.durations import Duration
from microqueue.model import trusted
from microqueue.queue import Queue
from microqueue.task import Task


class _Enqueued(Task[dict[str, Any]]):
    """A task that knows its queue. It equals the plain task, and is pickled as that."""

    _queue: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and vars(self) == vars(other)

    __hash__ = Task.__hash__

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        # A queue cannot be copied.
        return with_queue(type(self), copy.deepcopy(vars(self), memo), self._queue)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain_task, (vars(self),)


EnqueuedT = TypeVar("EnqueuedT", bound=_Enqueued)


def with_queue(kind: type[EnqueuedT], fields: dict[str, Any], queue: Any) -> EnqueuedT:
    """Return a task of a queue; ``fields`` are those of the task that was added to it."""
    task = trusted(kind, **fields)
    object.__setattr__(task, "__pydantic_private__", {"_queue": queue})
    return task


def _plain_task(fields: dict[str, Any]) -> Task[Any]:
    return trusted(Task, **fields)


class EnqueuedTask(_Enqueued):
    """The task that :meth:`NamedTask.enqueue` has added to a ``Queue``."""

    def wait(self, timeout: Duration | None = None) -> Any:
        """Wait until the task is done, and return its result.

        Args:
            timeout: How long to wait. Default: until the task is finished.

        Returns:
            What the function returned, as it was stored, if the task has ``keep_result``; ``None``
            otherwise.

        Raises:
            TaskFailed: The task failed; it has the error.
            WaitTimeout: The task is not finished yet.
            TaskNotFound: The task was deleted, or was added in a transaction that is not committed.
        """
        queue: Queue[Any] = self._queue
        return queue.wait_for(self, timeout=timeout).result


class AsyncEnqueuedTask(_Enqueued):
    """The task that :meth:`NamedTask.enqueue` has added to an ``AsyncQueue``."""

    async def wait(self, timeout: Duration | None = None) -> Any:  # noqa: ASYNC109 (as wait_for)
        """Wait until the task is done, and return its result.

        Args:
            timeout: How long to wait. Default: until the task is finished.

        Returns:
            What the function returned, as it was stored, if the task has ``keep_result``; ``None``
            otherwise.

        Raises:
            TaskFailed: The task failed; it has the error.
            WaitTimeout: The task is not finished yet.
            TaskNotFound: The task was deleted, or was added in a transaction that is not committed.
        """
        queue: AsyncQueue[Any] = self._queue
        return (await queue.wait_for(self, timeout=timeout)).result
