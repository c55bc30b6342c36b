"""The queue for plain, blocking code: one short method per operation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Self, Unpack

from pymongo import MongoClient

from microqueue.arguments import check_count, check_settings, check_worker_id, clock_argument
from microqueue.clock import Clock
from microqueue.core import SyncCore
from microqueue.dead_letters import DeadLetters
from microqueue.drivers.change_stream import SyncWakeup
from microqueue.drivers.client_options import ClientOptions
from microqueue.drivers.collections import Collections, is_async
from microqueue.drivers.connection import Connection
from microqueue.drivers.driver import CLOSE_SEC, SyncDriver, bounded
from microqueue.drivers.result_watch import Deadline, end_watch, waiting
from microqueue.durations import Duration, duration_argument
from microqueue.errors import InvalidArgument, LeaseLost
from microqueue.hooks import Hooks
from microqueue.new_task import EnqueueOptions, EnqueueReport, NewTask, new_task_of
from microqueue.reports import Pause, QueueStats, WorkerInfo
from microqueue.settings import QueueSettings
from microqueue.task import DEFAULT_QUEUE, PayloadT, Task, TaskId, TaskStatus

if TYPE_CHECKING:
    from microqueue.schedules import Schedules


class Queue(Generic[PayloadT]):
    """A named queue in one MongoDB collection. Safe to share between threads.

    Every call is bounded by the timeouts in ``settings``. If MongoDB cannot be reached in time, it
    raises :class:`ServerUnavailable`; if MongoDB rejects the operation, :class:`OperationFailed`.

    Args:
        database_or_collection: A pymongo database, whose ``tasks`` collection is used, or a
            collection.
        name: The name of the queue. Any number of queues share a collection.
        settings: Settings of the queue. Default: read from ``MICROQUEUE_*`` in the environment.
        payload_model: A pydantic model: payloads go in and come out as its instances.
        clock: The clock of the queue. Default: the server's.
        hooks: ``on_dead_letter`` is called for each dead letter that a call of this queue makes,
            or a worker, sweeper or dashboard with this queue.

    Raises:
        InvalidArgument: An argument is not valid.
    """

    def __init__(
        self,
        database_or_collection: Any,
        name: str = DEFAULT_QUEUE,
        *,
        settings: QueueSettings | None = None,
        payload_model: type[PayloadT] | None = None,
        clock: Clock | None = None,
        hooks: Sequence[Hooks] = (),
    ) -> None:
        if is_async(database_or_collection):
            raise InvalidArgument(
                f"{type(database_or_collection).__name__} is asynchronous; use AsyncQueue",
                argument="database_or_collection",
                code="async_client",
            )
        settings, clock = check_settings(settings), clock_argument(clock)
        collections = Collections(database_or_collection)
        self._core: SyncCore[PayloadT] = SyncCore(
            SyncDriver(collections, settings=settings, on_retry=clock.forget),
            collections,
            name,
            settings=settings,
            payload_model=payload_model,
            clock=clock,
            hooks=hooks,
        )
        self._dead_letters = DeadLetters(self._core)
        self._schedules: Schedules[PayloadT] | None = None
        self._connection: Connection | None = None  # Of from_uri.

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self._core.namespace})"

    @property
    def name(self) -> str:
        """The name of the queue."""
        return self._core.name

    @property
    def settings(self) -> QueueSettings:
        """The settings of the queue."""
        return self._core.settings

    @property
    def clock(self) -> Clock:
        """The clock of the queue: the server's, unless another one was given."""
        return self._core.clock

    @property
    def dead_letters(self) -> DeadLetters[PayloadT]:
        """The failed tasks of the queue: list, replay or discard them."""
        return self._dead_letters

    @property
    def schedules(self) -> Schedules[PayloadT]:
        """The schedules of the queue: tasks that are added at given times."""
        if self._schedules is None:
            # On first use: most producers have none, and `import microqueue` stays light.
            from microqueue.schedules import Schedules  # noqa: PLC0415

            self._schedules = Schedules(self._core)
        return self._schedules

    @classmethod
    def from_uri(
        cls,
        uri: str | None = None,
        name: str = DEFAULT_QUEUE,
        *,
        settings: QueueSettings | None = None,
        payload_model: type[PayloadT] | None = None,
        clock: Clock | None = None,
        hooks: Sequence[Hooks] = (),
        collection: str | None = None,
        **client_options: Unpack[ClientOptions],
    ) -> Self:
        """Connect to a MongoDB server and open a queue.

        A server that does not answer is an error at the first use, after
        ``settings.server_timeout``.

        Args:
            uri: The address. Default: ``MICROQUEUE_URI``, or the embedded server.
            name: The name of the queue.
            settings: As for the class.
            payload_model: As for the class.
            clock: As for the class.
            hooks: As for the class.
            collection: The collection. Default: ``tasks``. The database is the URI's, or
                ``microqueue`` if it names none.
            **client_options: Options of ``MongoClient``.

        Returns:
            The queue. :meth:`close` it at the end, or use ``with``.

        Raises:
            InvalidArgument: The URI or another argument is not valid.
            EmbeddedServerError: The embedded server could not be started.
        """
        settings = check_settings(settings)
        connection = Connection(
            MongoClient,
            uri,
            settings=settings,
            collection=collection,
            client_options=client_options,
        )
        try:
            queue = cls(
                connection.database_or_collection,
                name,
                settings=settings,
                payload_model=payload_model,
                clock=clock,
                hooks=hooks,
            )
        except Exception:
            connection.abandon()
            raise
        queue._connection = connection
        return queue

    def close(self) -> None:
        """Close the client, and the embedded server, if :meth:`from_uri` opened them."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            end_watch(self._core.collections)
            with bounded(CLOSE_SEC):  # Closing ends the sessions on the server.
                connection.client.close()
            connection.stop_server()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def now(self) -> datetime:
        """Read the time by the queue's clock: the server's.

        Returns:
            The time, in UTC.
        """
        return self._core.run(self._core.now())

    def ensure_indexes(self, *, adjust: bool = True) -> list[str]:
        """Create missing indexes, that of dedupe keys too, and adjust the retention.

        Safe to repeat.

        Args:
            adjust: Set the retention of the collection to that of the settings. If false, the
                retention that the collection has is kept.

        Returns:
            The names of the indexes that were created.

        Raises:
            IndexConflict: An index with the same name or keys exists in another shape.
            DuplicatesStored: Live tasks share a dedupe key.
            SchemaMismatch: The collection has another schema version.
        """
        return self._core.run(self._core.ensure_indexes(adjust=adjust))

    # Produce

    def enqueue(
        self,
        payload: PayloadT | NewTask[PayloadT],
        *,
        session: Any = None,
        **options: Unpack[EnqueueOptions],
    ) -> Task[PayloadT]:
        """Add a task. When the call returns, the task is stored.

        A lost connection is retried safely, as the id is fixed first. To repeat the call after an
        error, pass a ``task_id`` or ``dedupe_key``: without them, a second call adds a second task.

        Args:
            payload: The data of the task: a dict, or an instance of ``payload_model``. Or a
                :class:`NewTask` with its own options, as a named task's ``new`` makes.
            session: A session of the queue's own client, to add the task in the caller's
                transaction.
            **options: Options of this task, see :class:`EnqueueOptions`:

                - ``priority``: 0 to 255; higher is delivered first. Default: 0.
                - ``delay``: deliver the task this much later, at the earliest.
                - ``eta``: deliver the task at this instant, at the earliest; not with ``delay``.
                - ``max_attempts``: deliveries in all. Default: the setting.
                - ``backoff``: the waits between attempts. Default: the setting.
                - ``visibility_timeout``: the length of a lease. Default: the setting.
                - ``dedupe_key``: reject the task while a live one has the same key.
                - ``expires_in``: fail the task, with code ``expired``, if it waits longer.
                - ``task_id``: the id of the task. Default: a new ``ObjectId``.
                - ``dedupe_for``: keep the ``dedupe_key`` taken for this long, also after the task
                  is finished or deleted.
                - ``on_duplicate``: instead of raising ``DuplicateTask``, ``"return"`` the task
                  that exists, or ``"replace"`` its payload and options if it is pending.
                - ``headers``: values stored beside the payload.
                - ``name``: what the task does, to filter and group by; at most 120 characters.

        Returns:
            The task as it was stored. ``is_duplicate`` is set if it existed before, and was
            returned or replaced.

        Raises:
            DuplicateTask: A live task has the ``dedupe_key``, or it is taken for a period, or any
                task has the ``task_id``. With ``"return"`` or ``"replace"``, only if that task
                is in another queue or deleted, or cannot be replaced: it is running or finished,
                or a replacement would change which key is taken for a period (``code``).
            InvalidPayload: The payload cannot be stored, or does not fit ``payload_model``.
            InvalidArgument: An option is unknown, its value is not valid, or it is given beside a
                ``NewTask``.
        """
        new = new_task_of(payload, options)
        return self._core.run(self._core.enqueue(new, session))

    def enqueue_many(
        self,
        items: Iterable[PayloadT | NewTask[PayloadT]],
        *,
        session: Any = None,
        **options: Unpack[EnqueueOptions],
    ) -> EnqueueReport[PayloadT]:
        """Add many tasks in few round trips.

        All items are checked before any is written. Duplicates are reported and the others are
        added. If MongoDB is away for too long, the first ``settings.batch_size`` tasks or more may
        be stored: with a ``task_id`` or ``dedupe_key`` in each item, the call can be repeated.

        Args:
            items: Payloads, or :class:`NewTask` with their own options.
            session: A session of the queue's own client, to join the caller's transaction.
            **options: Options of the items that are payloads, as in :meth:`enqueue`.

        Returns:
            The tasks that were added, and the duplicates that were not.

        Raises:
            InvalidPayload: A payload cannot be stored, or does not fit ``payload_model``.
            InvalidArgument: An option is unknown or its value is not valid.
        """
        return self._core.run(self._core.enqueue_many(items, options, session))

    # Claim

    def pop(
        self, *, worker_id: str | None = None, wait: Duration | None = None
    ) -> Task[PayloadT] | None:
        """Claim the next task under a lease.

        With ``wait``, the call waits on a change stream where the server has one, and polls where
        it has none. A claim is not repeated blindly after a lost connection: it is looked up by its
        token. If that fails too, the error is raised and the lease expires.

        Args:
            worker_id: The name of the worker, stored in the task. Default: host and process id.
            wait: How long to wait for a task. Default: not at all.

        Returns:
            The task, or ``None`` if none is ready or the queue is paused.

        Raises:
            InvalidArgument: An argument is not valid.
        """
        limit = duration_argument("wait", wait)
        check_worker_id(worker_id)
        task = self._pop_now(worker_id)
        if task is not None or not limit:
            return task
        deadline = time.monotonic() + limit.total_seconds()
        poll_sec = self.settings.poll_interval.total_seconds()
        with SyncWakeup(self._core.collections, [self.name], poll_interval_sec=poll_sec) as wakeup:
            while True:
                # Again, now that the stream is open: a task may have been added just before.
                task = self._pop_now(worker_id)
                remaining = deadline - time.monotonic()
                if task is not None or remaining <= 0:
                    return task
                poll_in_sec = self._core.run(self._core.next_poll_sec())
                wakeup.sleep(remaining if poll_in_sec is None else min(remaining, poll_in_sec))

    def _pop_now(self, worker_id: str | None) -> Task[PayloadT] | None:
        tasks = self._core.run(self._core.pop(worker_id))
        return tasks[0] if tasks else None

    def pop_many(self, limit: int, *, worker_id: str | None = None) -> list[Task[PayloadT]]:
        """Claim up to ``limit`` tasks at once, in queue order, under one lease token.

        Args:
            limit: The largest number of tasks.
            worker_id: The name of the worker, stored in the tasks. Default: host and process id.

        Returns:
            The tasks; an empty list if none is ready or the queue is paused.

        Raises:
            InvalidArgument: An argument is not valid.
        """
        return self._core.run(
            self._core.pop_many(check_count("limit", limit), check_worker_id(worker_id))
        )

    # Settle: the same settlement under the same lease token succeeds again.

    def mark_done(self, task: Task[Any], *, result: Any = None, session: Any = None) -> None:
        """Finish a task. Safe to repeat.

        Args:
            task: The task that :meth:`pop` returned.
            result: A value to store with the task.
            session: A session of the queue's own client, to finish the task in the caller's
                transaction.

        Raises:
            LeaseLost: Another worker or the sweeper has the task, or it was done before this
                transaction; nothing was changed.
            InvalidArgument: An argument is not valid.
        """
        self._core.run(self._core.mark_done(task, result, session))

    def mark_done_many(self, tasks: Iterable[Task[Any]]) -> list[LeaseLost]:
        """Finish many tasks with one write per batch that was popped. Safe to repeat.

        Args:
            tasks: Tasks that :meth:`pop` or :meth:`pop_many` returned.

        Returns:
            One error per task whose lease was lost; the other tasks are done.
        """
        return self._core.run(self._core.mark_done_many(tasks))

    def mark_retry(
        self,
        task: Task[Any],
        error: object = None,
        *,
        code: str | None = None,
        delay: Duration | None = None,
    ) -> TaskStatus:
        """Send a task back to wait for another attempt. Safe to repeat.

        After its last attempt, the task becomes a dead letter instead.

        Args:
            task: The task that :meth:`pop` returned.
            error: The reason: a message or an exception.
            code: A short code of the error, to group and filter by.
            delay: How long to wait. Default: the backoff of the task.

        Returns:
            The new status of the task: pending, or failed.

        Raises:
            LeaseLost: Another worker or the sweeper has the task; nothing was changed.
            InvalidArgument: An argument is not valid.
        """
        return self._core.run(self._core.mark_retry(task, error, code, delay))

    def mark_failure(self, task: Task[Any], message: object, *, code: str | None = None) -> None:
        """Make a task a dead letter at once, even if it has attempts left. Safe to repeat.

        Args:
            task: The task that :meth:`pop` returned.
            message: The reason: a message or an exception.
            code: A short code of the error, to group and filter by.

        Raises:
            LeaseLost: Another worker or the sweeper has the task; nothing was changed.
            InvalidArgument: An argument is not valid.
        """
        self._core.run(self._core.mark_failure(task, message, code))

    def touch(self, task: Task[PayloadT], *, extend: Duration | None = None) -> Task[PayloadT]:
        """Renew the lease of a task.

        Args:
            task: The task that :meth:`pop` returned.
            extend: The length of the lease from now on. Default: its usual length.

        Returns:
            The task with its new lease.

        Raises:
            LeaseLost: Another worker or the sweeper has the task; nothing was changed.
            InvalidArgument: An argument is not valid.
        """
        return self._core.run(self._core.touch(task, extend))

    def release(self, task: Task[Any], *, front: bool = False) -> None:
        """Return a task to the queue unchanged, with its attempt refunded. Safe to repeat.

        Args:
            task: The task that :meth:`pop` returned.
            front: Put the task first among those of its priority.

        Raises:
            LeaseLost: Another worker or the sweeper has the task; nothing was changed.
        """
        self._core.run(self._core.release(task, front=front))

    # Inspect and administer

    def get(self, task_id: TaskId) -> Task[PayloadT] | None:
        """Return a task by its id, from any queue of the collection.

        Args:
            task_id: The id, or its text.

        Returns:
            The task, or ``None`` if there is none.

        Raises:
            InvalidArgument: The id is not valid.
        """
        return self._core.run(self._core.get(task_id))

    def wait_for(
        self, task: Task[Any] | TaskId, *, timeout: Duration | None = None
    ) -> Task[PayloadT]:
        """Wait until a task is finished, and return it with its result.

        All waits of a process on one client and collection share one change stream, or one poll
        where the server has no change streams. Do not wait in a handler for a task of the same
        worker: if all its handlers wait, the task never runs.

        Args:
            task: The task, or its id, from any queue of the collection.
            timeout: How long to wait. Default: until the task is finished. 0 only checks it.

        Returns:
            The task, which is done. ``result`` is what its handler returned, if that is kept: see
            ``keep_result`` of :class:`Worker`.

        Raises:
            TaskFailed: The task failed, expired or was cancelled; it has the error.
            WaitTimeout: The task is not finished yet.
            TaskNotFound: No task has this id.
            TaskDeleted: The task was deleted before its result could be read: with ``retention=0``,
                as soon as it is done.
            InvalidArgument: An argument is not valid.
        """
        limit = duration_argument("timeout", timeout)
        deadline = Deadline(None if limit is None else limit.total_seconds())
        core = self._core
        task_id, found = core.run(core.begin_wait(task))
        if found is None:
            deadline.check(task_id)
            with waiting(core.collections, self.settings, task_id) as waiter:
                # Again, now that it is watched: it may have finished just before.
                found = core.run(core.finished(task_id))
                if found is None:
                    found = waiter.wait(deadline)
        return core.to_done_task(found)

    def peek(
        self,
        limit: int = 10,
        *,
        status: TaskStatus | str | None = None,
        name: str | None = None,
        queue: str | None = None,
        all_queues: bool = False,
    ) -> list[Task[PayloadT]]:
        """Return tasks, newest first. Read-only: nothing is claimed.

        Args:
            limit: The largest number of tasks.
            status: Only tasks with this status.
            name: Only tasks with this name; the empty string: only tasks without a name.
            queue: Another queue of the collection.
            all_queues: Tasks of all queues of the collection; not with ``queue``.

        Returns:
            The tasks.

        Raises:
            InvalidArgument: An argument is not valid.
        """
        return self._core.run(
            self._core.peek(limit, status, queue, name=name, all_queues=all_queues)
        )

    def stats(self, *, exact: bool = False) -> QueueStats:
        """Count the tasks by status, with the age of the oldest ready one and the next due.

        A count above ``settings.count_limit`` is an estimate, and ``estimated`` names it.

        Args:
            exact: Count everything. With a million tasks that takes seconds.

        Returns:
            The counts.
        """
        return self._core.run(self._core.stats(exact=exact))

    def workers(self) -> list[WorkerInfo]:
        """List the registered workers of all queues of the collection.

        Returns:
            The workers, as of their last heartbeats.
        """
        return self._core.run(self._core.workers())

    def purge(
        self,
        *,
        status: TaskStatus | str = TaskStatus.DONE,
        older_than: Duration | None = None,
        dry_run: bool = False,
    ) -> int:
        """Delete tasks of one status. Leased tasks are never deleted.

        Args:
            status: The status of the tasks to delete.
            older_than: Keep tasks that changed within this time.
            dry_run: Only count them.

        Returns:
            How many tasks were deleted, or would be.

        Raises:
            InvalidArgument: An argument is not valid, or the status is ``processing``.
        """
        return self._core.run(self._core.purge(status, older_than, dry_run=dry_run))

    def cancel(self, task_id: TaskId) -> Task[PayloadT]:
        """Fail a waiting or running task with code ``cancelled``.

        A running handler, on any machine, is notified within about a second, as if its lease were
        lost. Its result is discarded.

        Args:
            task_id: The id, or its text.

        Returns:
            The cancelled task.

        Raises:
            TaskNotFound: No task has this id.
            WrongStatus: The task is finished.
            InvalidArgument: The id is not valid.
        """
        return self._core.run(self._core.cancel(task_id))

    # Control

    def pause(self, *, reason: str | None = None) -> Pause:
        """Stop deliveries from this queue, for all workers, until :meth:`resume`.

        A pause takes effect within a second. Running tasks finish, and tasks can still be added.

        Args:
            reason: A text that views and commands show.

        Returns:
            The pause.

        Raises:
            InvalidArgument: The reason is not a text.
        """
        return self._core.run(self._core.pause(reason))

    def resume(self) -> bool:
        """Deliver again.

        Returns:
            Whether the queue was paused.
        """
        return self._core.run(self._core.resume())

    def paused(self) -> Pause | None:
        """Look up the pause of this queue.

        Returns:
            The pause, or ``None`` if the queue is not paused.
        """
        return self._core.run(self._core.paused())
