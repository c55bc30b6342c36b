"""The queue for plain, blocking code: one short method per operation."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Generic, Self, Unpack

from pymongo import MongoClient

from microqueue.arguments import check_clock, check_count, check_settings, check_worker_id
from microqueue.clock import Clock
from microqueue.core import SyncCore
from microqueue.dead_letters import DeadLetters
from microqueue.drivers.change_stream import SyncWakeup
from microqueue.drivers.collections import Collections, is_async
from microqueue.drivers.connection import Connection
from microqueue.drivers.retry import CLOSE_SEC
from microqueue.drivers.sync import SyncDriver, bounded
from microqueue.durations import Duration, duration_argument
from microqueue.errors import InvalidArgument, LeaseLost
from microqueue.new_task import EnqueueOptions, EnqueueReport, NewTask
from microqueue.reports import Pause, QueueStats, WorkerInfo
from microqueue.settings import QueueSettings
from microqueue.task import DEFAULT_QUEUE, PayloadT, Task, TaskId, TaskStatus


class Queue(Generic[PayloadT]):
    """A named queue in one MongoDB collection. Safe to share between threads.

    Takes a pymongo database, of which it uses the ``tasks`` collection, or a collection.
    With ``payload_model``, payloads go in and come out as that pydantic model.
    """

    def __init__(
        self,
        database_or_collection: Any,
        name: str = DEFAULT_QUEUE,
        *,
        settings: QueueSettings | None = None,
        payload_model: type[PayloadT] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if is_async(database_or_collection):
            raise InvalidArgument(
                f"{type(database_or_collection).__name__} is asynchronous; use AsyncQueue",
                argument="database_or_collection",
            )
        settings, clock = check_settings(settings), check_clock(clock)
        collections = Collections(database_or_collection)
        self._core: SyncCore[PayloadT] = SyncCore(
            SyncDriver(collections, settings=settings, on_retry=clock.forget),
            collections,
            name,
            settings=settings,
            payload_model=payload_model,
            clock=clock,
        )
        self._dead_letters = DeadLetters(self._core)
        self._connection: Connection | None = None  # Of from_uri.

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self._core.place})"

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
        """The failed tasks of the queue: list, replay, discard."""
        return self._dead_letters

    @classmethod
    def from_uri(
        cls,
        uri: str | None = None,
        name: str = DEFAULT_QUEUE,
        *,
        settings: QueueSettings | None = None,
        payload_model: type[PayloadT] | None = None,
        clock: Clock | None = None,
        collection: str | None = None,
        **client_options: Any,
    ) -> Self:
        """Connect to ``uri``, else to ``MICROQUEUE_URI``, else to the embedded server.

        The database is the URI's, else ``microqueue``. ``client_options`` go to ``MongoClient``.
        A server that is not there is an error after ``settings.server_timeout``, at first use.
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
            )
        except Exception:
            connection.abandon()
            raise
        queue._connection = connection
        return queue

    def close(self) -> None:
        """Close the client, and the embedded server, if ``from_uri`` opened them."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with bounded(CLOSE_SEC):  # It tells the server which sessions have ended.
                connection.client.close()
            connection.stop_server()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def now(self) -> datetime:
        """Give the time that this queue goes by: the server's."""
        return self._core.run(self._core.now())

    def ensure_indexes(self, *, adjust: bool = True) -> list[str]:
        """Create missing indexes, adjust the retention, and give the names of the new ones.

        With ``adjust=False``, a retention that the collection has stays, whatever the settings
        say. Safe to repeat. Raises :class:`IndexConflict` if an index of another shape is in
        the way.
        """
        return self._core.run(self._core.ensure_indexes(adjust=adjust))

    # Produce

    def enqueue(
        self,
        payload: PayloadT,
        *,
        session: Any = None,
        **options: Unpack[EnqueueOptions],
    ) -> Task[PayloadT]:
        """Add a task; when this returns, it is stored.

        ``priority`` is 0 to 255, higher first. ``delay`` or ``eta`` hold it back; ``expires_in``
        fails it if it waits then, for its first attempt or for another. Raises
        :class:`DuplicateTask` if a live task has the ``dedupe_key``, or any task the
        ``task_id``. With ``session`` it joins the caller's transaction. After a lost connection
        it is repeated, which is safe as the id is fixed before. Who calls again after an error
        gives a ``task_id`` or ``dedupe_key``: without, that is another task.
        """
        new = NewTask[Any](payload=payload, **options)
        return self._core.run(self._core.enqueue(new, session))

    def enqueue_many(
        self,
        items: Iterable[PayloadT | NewTask[PayloadT]],
        *,
        session: Any = None,
        **options: Unpack[EnqueueOptions],
    ) -> EnqueueReport[PayloadT]:
        """Add many tasks in few round trips; items are payloads, or ``NewTask`` with options.

        ``options`` are those of ``NewTask``, for the items that are bare payloads. All items
        are checked before any is written. Duplicates by ``dedupe_key`` or ``task_id`` are
        reported and the rest is added. Repeated as ``enqueue`` is. If the server is away for too
        long, the first ``settings.batch_size`` or more may be stored: with ``task_id`` or
        ``dedupe_key`` in each item, the call can be made again.
        """
        return self._core.run(self._core.enqueue_many(items, options, session))

    # Claim

    def pop(
        self, *, worker_id: str | None = None, wait: Duration | None = None
    ) -> Task[PayloadT] | None:
        """Claim the next task under a lease, or give ``None``.

        With ``wait``, block up to that long: on a change stream where the server has one,
        by polling where not. Not repeated blindly after a lost connection: the claim is
        looked up by its token; if that fails too, the error surfaces and the lease expires.
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
                # Once more after the stream opened: a task may have come just before.
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
        """Claim up to ``limit`` tasks at once, under one lease token, in queue order."""
        return self._core.run(
            self._core.pop_many(check_count("limit", limit), check_worker_id(worker_id))
        )

    # Settle: each raises LeaseLost if the task is no longer this worker's. All are safe to
    # repeat: the same settlement under the same token is a quiet success.

    def mark_done(self, task: Task[Any], *, result: Any = None, session: Any = None) -> None:
        """Finish a task. With ``session``, in the caller's transaction: all of it, or nothing."""
        self._core.run(self._core.mark_done(task, result, session))

    def mark_done_many(self, tasks: Iterable[Task[Any]]) -> list[LeaseLost]:
        """Finish many tasks with one write per batch popped; give those whose lease was lost."""
        return self._core.run(self._core.mark_done_many(tasks))

    def mark_retry(
        self,
        task: Task[Any],
        error: object = None,
        *,
        code: str | None = None,
        delay: Duration | None = None,
    ) -> TaskStatus:
        """Send a task back to wait out its backoff, or ``delay``; bury it after its last attempt.

        ``error`` is a message or an exception. Gives the task's new status.
        """
        return self._core.run(self._core.mark_retry(task, error, code, delay))

    def mark_failure(self, task: Task[Any], message: object, *, code: str | None = None) -> None:
        """Make a task a dead letter at once, whatever attempts it has left."""
        self._core.run(self._core.mark_failure(task, message, code))

    def touch(self, task: Task[PayloadT], *, extend: Duration | None = None) -> Task[PayloadT]:
        """Renew the lease: it ends ``extend`` from now, or after its usual length."""
        return self._core.run(self._core.touch(task, extend))

    def release(self, task: Task[Any], *, front: bool = False) -> None:
        """Hand a task back unharmed, its attempt refunded; ``front``: first in its priority."""
        self._core.run(self._core.release(task, front=front))

    # Inspect and administer

    def get(self, task_id: TaskId) -> Task[PayloadT] | None:
        """Read one task, of any queue in the collection."""
        return self._core.run(self._core.get(task_id))

    def peek(
        self,
        limit: int = 10,
        *,
        status: TaskStatus | str | None = None,
        queue: str | None = None,
        all_queues: bool = False,
    ) -> list[Task[PayloadT]]:
        """Read tasks, newest first; read-only, nothing is claimed.

        ``queue`` names another queue of the collection; ``all_queues`` reads them all.
        """
        return self._core.run(self._core.peek(limit, status, queue, all_queues=all_queues))

    def stats(self, *, exact: bool = False) -> QueueStats:
        """Count the tasks by status, with the age of the oldest ready one and the next due.

        A count above ``settings.count_limit`` is an estimate, and ``estimated`` names it.

        Args:
            exact: Count everything. With a million tasks that takes seconds.
        """
        return self._core.run(self._core.stats(exact=exact))

    def workers(self) -> list[WorkerInfo]:
        """List the workers that have registered and not ended, those of all queues."""
        return self._core.run(self._core.workers())

    def purge(
        self,
        *,
        status: TaskStatus | str = TaskStatus.DONE,
        older_than: Duration | None = None,
        dry_run: bool = False,
    ) -> int:
        """Delete tasks of one status, done by default; give how many. Never what is leased.

        ``older_than`` spares what changed since; ``dry_run`` only counts.
        """
        return self._core.run(self._core.purge(status, older_than, dry_run=dry_run))

    def cancel(self, task_id: TaskId) -> Task[PayloadT]:
        """Fail a waiting or running task with code ``cancelled``.

        A handler that runs it, on any machine, is told within about a second, as if its
        lease were lost; what it returns is discarded. Raises :class:`TaskNotFound`, or
        :class:`WrongStatus` if the task is finished.
        """
        return self._core.run(self._core.cancel(task_id))

    # Control

    def pause(self, *, reason: str | None = None) -> Pause:
        """Stop deliveries from this queue, for all workers, until :meth:`resume`.

        Takes effect within a second. What already runs goes on; tasks can still be added.
        """
        return self._core.run(self._core.pause(reason))

    def resume(self) -> bool:
        """Deliver again; tell whether the queue was paused."""
        return self._core.run(self._core.resume())

    def paused(self) -> Pause | None:
        """Give the pause of this queue, if it is paused."""
        return self._core.run(self._core.paused())
