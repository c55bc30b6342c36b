"""Contexts: what a handler may know and do besides its payload."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, Unpack

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession

from microqueue.arguments import check_function, invalid_argument
from microqueue.async_queue import AsyncQueue
from microqueue.core import core_of
from microqueue.drivers.transactions import run_in_transaction, run_in_transaction_async
from microqueue.durations import Duration
from microqueue.errors import LeaseLost, WrongStatus
from microqueue.model import trusted
from microqueue.new_task import EnqueueOptions, NewTask
from microqueue.operations.settle import storable_text
from microqueue.queue import Queue
from microqueue.task import Progress, Task
from microqueue.worker.batches import Batch
from microqueue.worker.handlers import close_unrun
from microqueue.worker.in_flight import InFlight, LeasedTask, lease_now
from microqueue.worker.lease_renewal import LeaseService
from microqueue.worker.outcomes import check_storable

T = TypeVar("T")
QueueT = TypeVar("QueueT", bound=Queue[Any] | AsyncQueue[Any])


def new_progress(task: LeasedTask, fraction: float, message: str | None) -> Progress:
    """Return a report of progress, as of now; reject one that is not valid."""
    if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise invalid_argument("fraction", fraction, "give a number from 0 to 1")
    if message is not None and not isinstance(message, str):
        raise invalid_argument("message", message, "give a text")
    text = None if message is None else storable_text(message)
    return trusted(Progress, fraction=float(fraction), message=text, at=task.queue.clock.now())


class _Context(Generic[QueueT]):
    """The task a handler works on, and whether its result is still wanted."""

    def __init__(
        self,
        task: LeasedTask,
        queue: QueueT,
        *,
        in_flight: InFlight,
        leases: LeaseService,
        keep_result: bool,
    ) -> None:
        self._leased_task = task
        self._queue = queue
        self._in_flight = in_flight
        self._leases = leases
        self._keep_result = keep_result
        self._session: Any = None

    @property
    def task(self) -> Task[Any]:
        """The task as it was claimed."""
        return self._leased_task.task

    @property
    def queue(self) -> QueueT:
        """The queue of the task."""
        return self._queue

    @property
    def attempt(self) -> int:
        """The number of this delivery, from 1."""
        return self._leased_task.task.attempts

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop: lease lost, timed out, cancelled, or grace over.

        When the worker is asked to stop, this stays false until the ``grace`` is over.
        """
        return self._leased_task.interrupted

    def progress(self, fraction: float, message: str | None = None) -> None:
        """Report progress, to be seen in ``Task.progress``.

        The worker stores the latest report once a second; the call itself does no I/O.

        Args:
            fraction: From 0 to 1.
            message: What the handler is doing.

        Raises:
            InvalidArgument: An argument is not valid; nothing is reported.
        """
        self._leased_task.progress = new_progress(self._leased_task, fraction, message)

    def _touched(self, task: Task[Any], at: float) -> None:
        self._leased_task.touch(task, at)
        self._leases.expect_renewal(self._leased_task.renewal_due)

    @contextmanager
    def _transacting(self) -> Iterator[None]:
        """Enter the one transaction of the task; leave it as done, or as it was."""
        task = self._leased_task
        if task.committed:
            raise WrongStatus(task_id=task.task.id, status="done", needed="running")
        if task.transacting:
            raise WrongStatus(
                task_id=task.task.id, status="in a transaction", needed="outside of one"
            )
        task.transacting = True
        try:
            yield
            task.committed = True
        finally:
            task.transacting = False
            self._session = None
            self._end_commit()

    def _begin_commit(self) -> None:
        """From now on, nothing but the transaction decides about the task."""
        if not self._in_flight.begin_commit(self._leased_task):
            task = self._leased_task.task
            worker_id = task.lease.worker_id if task.lease else None
            reason = "it timed out, or was released, before its transaction was committed"
            raise LeaseLost(task_id=task.id, worker_id=worker_id, reason=reason)

    def _end_commit(self) -> None:
        """Let others decide again: the transaction has ended, or begins once more."""
        task = self._leased_task
        task.committing = task.timed_out = False
        if task.deadline is not None:
            self._leases.expect_timeout(task.deadline)

    def _kept(self, result: Any) -> Any:
        """Return what is stored as the task's result."""
        if not self._keep_result:
            return None
        if (error := check_storable(self._leased_task.queue, result)) is not None:
            raise error
        return result


class Context(_Context[Queue[Any]]):
    """What a plain function gets as its ``context`` argument."""

    def touch(self, extend: Duration | None = None) -> None:
        """Renew the lease now; the worker renews it every third of its length.

        Args:
            extend: The length of the lease from now on. A longer one is kept; a shorter one is
                renewed in time.

        Raises:
            LeaseLost: Another worker or the sweeper has the task; nothing was changed.
            InvalidArgument: ``extend`` is not valid.
        """
        at = lease_now()
        core = core_of(self._queue)
        self._touched(core.run(core.touch(self._leased_task.task, extend)), at)

    def enqueue(self, payload: Any | NewTask[Any], **options: Unpack[EnqueueOptions]) -> Task[Any]:
        """Add a task to the same queue; inside :meth:`transaction`, as a part of it.

        Args:
            payload: The data of the task, or a :class:`NewTask`, as for :meth:`Queue.enqueue`.
            **options: The options of :meth:`Queue.enqueue`.

        Returns:
            The task.

        Raises:
            InvalidArgument: The payload or an option is not valid; nothing is written.
            DuplicateTask: The ``dedupe_key`` or ``task_id`` is taken.
        """
        return self._queue.enqueue(payload, session=self._session, **options)

    def transaction(self, write: Callable[[ClientSession], T]) -> T:
        """Call a function in a transaction that also marks the task done.

        What the function writes with the session, what it enqueues with :meth:`enqueue`, and the
        settlement of the task are stored together, or not at all. The function may be called
        again, after a conflict or an election. If it raises, or the lease is lost, nothing is
        stored. After this call the task is done, whatever the handler does next.

        Args:
            write: The function. Its return value is the task's result if ``keep_result`` is set.

        Returns:
            What the function returned.

        Raises:
            InvalidArgument: ``write`` is no function.
            LeaseLost: Another worker may have the task; nothing was written.
            TransactionsUnsupported: The server is not a replica set; nothing was written.
            WrongStatus: The task is done, or this is called inside another transaction.
        """
        check_function("write", write)
        core = core_of(self._queue)

        def run(session: ClientSession) -> T:
            self._session = session
            self._end_commit()
            result = write(session)
            if inspect.isawaitable(result):
                close_unrun(result)
                raise TypeError("the function of a transaction returned a coroutine; use def")
            kept = self._kept(result)
            self._begin_commit()
            core.run(core.mark_done(self.task, kept, session))
            return result

        with self._transacting():
            return run_in_transaction(core.collections, run)


class AsyncContext(_Context[AsyncQueue[Any]]):
    """What a coroutine function gets as its ``context`` argument."""

    async def touch(self, extend: Duration | None = None) -> None:
        """Renew the lease now; the worker renews it every third of its length.

        Args:
            extend: The length of the lease from now on. A longer one is kept; a shorter one is
                renewed in time.

        Raises:
            LeaseLost: Another worker or the sweeper has the task; nothing was changed.
            InvalidArgument: ``extend`` is not valid.
        """
        at = lease_now()
        core = core_of(self._queue)
        self._touched(await core.run(core.touch(self._leased_task.task, extend)), at)

    async def enqueue(
        self, payload: Any | NewTask[Any], **options: Unpack[EnqueueOptions]
    ) -> Task[Any]:
        """Add a task to the same queue; inside :meth:`transaction`, as a part of it.

        Args:
            payload: The data of the task, or a :class:`NewTask`, as for :meth:`AsyncQueue.enqueue`.
            **options: The options of :meth:`AsyncQueue.enqueue`.

        Returns:
            The task.

        Raises:
            InvalidArgument: The payload or an option is not valid; nothing is written.
            DuplicateTask: The ``dedupe_key`` or ``task_id`` is taken.
        """
        return await self._queue.enqueue(payload, session=self._session, **options)

    async def transaction(self, write: Callable[[AsyncClientSession], Awaitable[T]]) -> T:
        """Call a coroutine function in a transaction that also marks the task done.

        What the coroutine function writes with the session, what it enqueues with :meth:`enqueue`,
        and the settlement of the task are stored together, or not at all. The coroutine function
        may be called again, after a conflict or an election. If it raises, or the lease is lost,
        nothing is stored. After this call the task is done, whatever the handler does next.

        Args:
            write: The coroutine function. Its return value is the task's result if ``keep_result``
                is set.

        Returns:
            What the coroutine function returned.

        Raises:
            InvalidArgument: ``write`` is no function.
            LeaseLost: Another worker may have the task; nothing was written.
            TransactionsUnsupported: The server is not a replica set; nothing was written.
            WrongStatus: The task is done, or this is called inside another transaction.
        """
        check_function("write", write)
        core = core_of(self._queue)

        async def run(session: AsyncClientSession) -> T:
            self._session = session
            self._end_commit()
            result = await write(session)
            kept = self._kept(result)
            self._begin_commit()
            await core.run(core.mark_done(self.task, kept, session))
            return result

        with self._transacting():
            return await run_in_transaction_async(core.collections, run)


class _BatchContext(Generic[QueueT]):
    """The tasks a batch handler works on, and which results are still wanted."""

    def __init__(self, batch: Batch, queue: QueueT) -> None:
        self._batch = batch
        self._queue = queue

    @property
    def tasks(self) -> list[Task[Any]]:
        """The tasks as they were claimed."""
        return self._batch.tasks

    @property
    def queue(self) -> QueueT:
        """The queue of the tasks."""
        return self._queue

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop: timed out, grace over, or no task is held."""
        return self._batch.interrupted

    def is_cancelled(self, task: Task[Any]) -> bool:
        """Check whether the result of a task is still wanted.

        Args:
            task: One of the tasks.

        Returns:
            Whether it is no longer wanted: its lease is lost, or it was cancelled.

        Raises:
            InvalidArgument: It is not a task.
        """
        if not isinstance(task, Task):
            raise invalid_argument("task", task, "give one of context.tasks")
        return self._batch.is_interrupted(task)

    def progress(self, fraction: float, message: str | None = None) -> None:
        """Report the progress of all tasks, as :meth:`Context.progress` does.

        Args:
            fraction: From 0 to 1.
            message: What the handler is doing.

        Raises:
            InvalidArgument: An argument is not valid; nothing is reported.
        """
        for task in self._batch.leased:
            task.progress = new_progress(task, fraction, message)


class BatchContext(_BatchContext[Queue[Any]]):
    """What a plain function gets as its ``context`` argument, with the option ``batch``."""

    def enqueue(self, payload: Any | NewTask[Any], **options: Unpack[EnqueueOptions]) -> Task[Any]:
        """Add a task to the same queue, as :meth:`Context.enqueue` does outside a transaction.

        Args:
            payload: The data of the task, or a :class:`NewTask`, as for :meth:`Queue.enqueue`.
            **options: The options of :meth:`Queue.enqueue`.

        Returns:
            The task.

        Raises:
            InvalidArgument: The payload or an option is not valid; nothing is written.
            DuplicateTask: The ``dedupe_key`` or ``task_id`` is taken.
        """
        return self._queue.enqueue(payload, **options)


class AsyncBatchContext(_BatchContext[AsyncQueue[Any]]):
    """What a coroutine function gets as its ``context`` argument, with the option ``batch``."""

    async def enqueue(
        self, payload: Any | NewTask[Any], **options: Unpack[EnqueueOptions]
    ) -> Task[Any]:
        """Add a task to the same queue, as :meth:`AsyncContext.enqueue` does outside a transaction.

        Args:
            payload: The data of the task, or a :class:`NewTask`, as for :meth:`AsyncQueue.enqueue`.
            **options: The options of :meth:`AsyncQueue.enqueue`.

        Returns:
            The task.

        Raises:
            InvalidArgument: The payload or an option is not valid; nothing is written.
            DuplicateTask: The ``dedupe_key`` or ``task_id`` is taken.
        """
        return await self._queue.enqueue(payload, **options)
