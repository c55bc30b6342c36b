"""Batches: several tasks for one call of a handler, and an outcome for each.

:class:`BatchCollector` decides which waiting tasks form the next batch, and when. It performs no
I/O and takes no locks: threads reach it through a :class:`BatchBuffer`, coroutines directly.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import inf
from typing import Any, NamedTuple

from microqueue.core import QueueCore
from microqueue.operations import filters
from microqueue.task import Task
from microqueue.worker.completer import Completer
from microqueue.worker.handlers import Handler
from microqueue.worker.in_flight import LeasedTask, now_sec


class Waiting(NamedTuple):
    """A task that waits for a batch, and since when."""

    since: float
    task: LeasedTask


class BatchCollector:
    """The claimed tasks that wait for a batch: of one queue each, first in, first out.

    A batch is due when it is full, or when its first task and a free handler have waited for
    ``wait_sec``. A task that was redelivered after a crash is a batch by itself, due at once, so
    that the next crash identifies it.
    """

    def __init__(self, *, size: int, wait_sec: float) -> None:
        self._size = size
        self._wait_sec = wait_sec
        self._queues: dict[QueueCore[Any], deque[Waiting]] = {}

    def add(self, tasks: Iterable[LeasedTask]) -> None:
        """Add tasks that were just claimed."""
        now = now_sec()
        for task in tasks:
            self._queues.setdefault(task.queue, deque()).append(Waiting(now, task))

    def take(self, free_since: float) -> list[LeasedTask]:
        """Remove and return the next batch that is due; empty if there is none.

        Args:
            free_since: Since when the handler is free, as :func:`now_sec` reads.
        """
        self._drop_concluded()
        now = now_sec()
        due = [
            (waiting[0].since, number)
            for number, waiting in enumerate(self._queues.values())
            if self._due_at(waiting, free_since) <= now
        ]
        if not due:
            return []
        waiting = list(self._queues.values())[min(due)[1]]
        taken = [waiting.popleft().task for _ in range(self._next_size(waiting))]
        self._queues = {queue: left for queue, left in self._queues.items() if left}
        return taken

    def due_at(self, free_since: float) -> float:
        """Return when the next batch is due; infinite if no task waits."""
        return min(
            (self._due_at(waiting, free_since) for waiting in self._queues.values()), default=inf
        )

    def _due_at(self, waiting: deque[Waiting], free_since: float) -> float:
        count = self._next_size(waiting)
        if count == self._size or count < len(waiting) or _was_redelivered(waiting[0].task):
            return 0.0
        return max(waiting[0].since, free_since) + self._wait_sec

    def _next_size(self, waiting: deque[Waiting]) -> int:
        """Return how many tasks form the next batch of a queue."""
        count = 0
        for one in islice(waiting, self._size):
            if _was_redelivered(one.task):
                return count or 1
            count += 1
        return count

    def _drop_concluded(self) -> None:
        """Drop tasks whose lease was lost while they waited."""
        if any(one.task.concluded for waiting in self._queues.values() for one in waiting):
            self.withdraw(lambda task: task.concluded)

    def withdraw(self, unwanted: Callable[[LeasedTask], bool]) -> list[LeasedTask]:
        """Remove the unwanted tasks, and return them."""
        removed: list[LeasedTask] = []
        kept: dict[QueueCore[Any], deque[Waiting]] = {}
        for queue, waiting in self._queues.items():
            left: deque[Waiting] = deque()
            for one in waiting:
                if unwanted(one.task):
                    removed.append(one.task)
                else:
                    left.append(one)
            if left:
                kept[queue] = left
        self._queues = kept
        return removed

    def take_all(self) -> list[LeasedTask]:
        """Remove and return all tasks."""
        return self.withdraw(lambda _task: True)


def _was_redelivered(task: LeasedTask) -> bool:
    return bool(task.claimed.document.get("redelivered"))


class BatchBuffer:
    """The claimed tasks that wait for a batch and a free thread."""

    def __init__(self, *, size: int, wait_sec: float) -> None:
        self._collector = BatchCollector(size=size, wait_sec=wait_sec)
        self._changed = threading.Condition()
        self._closed = False

    def extend(self, tasks: Sequence[LeasedTask]) -> bool:
        """Add tasks and wake the threads; return ``False`` if the buffer is closed."""
        with self._changed:
            if self._closed:
                return False
            self._collector.add(tasks)
            self._changed.notify_all()
            return True

    def take(self) -> list[LeasedTask]:
        """Wait for a batch; empty once the buffer is closed."""
        free_since = now_sec()
        with self._changed:
            while not self._closed:
                if batch := self._collector.take(free_since):
                    return batch
                due_at = self._collector.due_at(free_since)
                self._changed.wait(None if due_at == inf else max(due_at - now_sec(), 0.0))
            return []

    def withdraw(self, unwanted: Callable[[LeasedTask], bool]) -> list[LeasedTask]:
        """Remove the unwanted tasks, and return them."""
        with self._changed:
            return self._collector.withdraw(unwanted)

    def close(self) -> list[LeasedTask]:
        """Let the threads end, and return the tasks that none has taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self._collector.take_all()


class Batch:
    """The tasks of one call of a handler.

    The call is interrupted when all its tasks are: one whose lease was lost, or that was
    cancelled, does not stop the others.

    Attributes:
        on_interrupt: Called when the last of the tasks is interrupted.
    """

    def __init__(self, tasks: Sequence[LeasedTask]) -> None:
        self.on_interrupt: Callable[[], object] | None = None
        self.leased: Sequence[LeasedTask] = ()
        self.tasks: list[Task[Any]] = []
        self.keep(tasks)

    def keep(self, tasks: Sequence[LeasedTask]) -> None:
        """Keep only these tasks: the others are not started."""
        self.leased = tasks
        self.tasks = [one.task for one in tasks]
        for one in tasks:
            one.on_interrupt = self._one_interrupted

    @property
    def concluded(self) -> bool:
        """Whether the outcome of every task is decided."""
        return all(one.concluded for one in self.leased)

    @property
    def interrupted(self) -> bool:
        """Whether the handler should stop: no result is wanted any more."""
        return all(one.interrupted for one in self.leased)

    def is_interrupted(self, task: Task[Any]) -> bool:
        """Return whether the result of one task is no longer wanted."""
        claim = filters.claim_of(task)
        return any(one.interrupted for one in self.leased if filters.claim_of(one.claimed) == claim)

    def _one_interrupted(self) -> None:
        if self.on_interrupt is not None and self.interrupted:
            self.on_interrupt()

    def complete(
        self, completer: Completer, handler: Handler, result: Any, error: BaseException | None
    ) -> None:
        """Settle each task by what the handler returned for it, or all by what it raised."""
        outcomes: Sequence[Any] = [error] * len(self.leased)
        if error is None:
            try:
                outcomes = self._outcomes(handler, result)
            except TypeError as exc:
                outcomes = [exc] * len(self.leased)
        logged: set[int] = set()  # An error that many tasks share has one traceback in the log.
        for one, outcome in zip(self.leased, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                first = id(outcome) not in logged
                logged.add(id(outcome))
                completer.complete(one, handler, None, outcome, with_traceback=first)
            else:
                completer.complete(one, handler, outcome, None)

    def _outcomes(self, handler: Handler, result: Any) -> Sequence[Any]:
        count = len(self.leased)
        if result is None:
            return [None] * count
        handler.check_ran(result)
        if not isinstance(result, list | tuple):
            given = type(result).__name__
        elif len(result) != count:
            given = f"{len(result)} outcomes for {count} tasks"
        elif any(isinstance(one, type) and issubclass(one, BaseException) for one in result):
            given = "the class of an exception; give an instance, as in Retry()"
        else:
            return result
        reason = "it returns None, or a list with one outcome for each task"
        raise TypeError(f"{handler.name} returned {given}: {reason}")
