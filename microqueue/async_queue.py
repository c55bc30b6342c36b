"""The queue for asyncio: the same names as :class:`Queue`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import Any, Generic, Self, Unpack

from pymongo import AsyncMongoClient

from microqueue.arguments import check_clock, check_count, check_settings, check_worker_id
from microqueue.clock import Clock
from microqueue.core import AsyncCore
from microqueue.dead_letters import AsyncDeadLetters
from microqueue.drivers.asynchronous import AsyncDriver
from microqueue.drivers.change_stream import AsyncWakeup
from microqueue.drivers.collections import Collections, is_blocking
from microqueue.drivers.connection import Connection
from microqueue.drivers.retry import CLOSE_SEC
from microqueue.drivers.sync import bounded
from microqueue.durations import Duration, duration_argument
from microqueue.errors import InvalidArgument, LeaseLost, MicroqueueError
from microqueue.new_task import EnqueueOptions, EnqueueReport, NewTask
from microqueue.operations.call import Operation
from microqueue.reports import Pause, QueueStats, WorkerInfo
from microqueue.settings import QueueSettings
from microqueue.task import DEFAULT_QUEUE, PayloadT, Task, TaskId, TaskStatus


class AsyncQueue(Generic[PayloadT]):
    """A named queue in one MongoDB collection, for one event loop.

    Takes a database, or a collection, of PyMongo's async client or of Motor. Every method
    does what the one of the same name in :class:`Queue` does, with the same guarantees.
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
        if is_blocking(database_or_collection):
            raise InvalidArgument(
                f"{type(database_or_collection).__name__} would block the event loop; "
                "use AsyncMongoClient or Motor, or Queue",
                argument="database_or_collection",
            )
        settings, clock = check_settings(settings), check_clock(clock)
        collections = Collections(database_or_collection)
        self._core: AsyncCore[PayloadT] = AsyncCore(
            AsyncDriver(collections, settings=settings, on_retry=clock.forget),
            collections,
            name,
            settings=settings,
            payload_model=payload_model,
            clock=clock,
        )
        self._dead_letters = AsyncDeadLetters(self._core)
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
    def dead_letters(self) -> AsyncDeadLetters[PayloadT]:
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
        """See :meth:`Queue.from_uri`; the client is PyMongo's own ``AsyncMongoClient``."""
        settings = check_settings(settings)
        connection = Connection(
            AsyncMongoClient,
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

    async def close(self) -> None:
        """See :meth:`Queue.close`."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with bounded(CLOSE_SEC):  # It tells the server which sessions have ended.
                await connection.client.close()
            connection.stop_server()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def now(self) -> datetime:
        """See :meth:`Queue.now`."""
        return await self._core.run(self._core.now())

    async def ensure_indexes(self, *, adjust: bool = True) -> list[str]:
        """See :meth:`Queue.ensure_indexes`."""
        return await self._core.run(self._core.ensure_indexes(adjust=adjust))

    # Produce

    async def enqueue(
        self,
        payload: PayloadT,
        *,
        session: Any = None,
        **options: Unpack[EnqueueOptions],
    ) -> Task[PayloadT]:
        """See :meth:`Queue.enqueue`."""
        new = NewTask[Any](payload=payload, **options)
        return await self._core.run(self._core.enqueue(new, session))

    async def enqueue_many(
        self,
        items: Iterable[PayloadT | NewTask[PayloadT]],
        *,
        session: Any = None,
        **options: Unpack[EnqueueOptions],
    ) -> EnqueueReport[PayloadT]:
        """See :meth:`Queue.enqueue_many`."""
        return await self._core.run(self._core.enqueue_many(items, options, session))

    # Claim

    async def pop(
        self, *, worker_id: str | None = None, wait: Duration | None = None
    ) -> Task[PayloadT] | None:
        """See :meth:`Queue.pop`."""
        limit = duration_argument("wait", wait)
        check_worker_id(worker_id)
        task = await self._pop_now(worker_id)
        if task is not None or not limit:
            return task
        deadline = asyncio.get_running_loop().time() + limit.total_seconds()
        poll_sec = self.settings.poll_interval.total_seconds()
        async with AsyncWakeup(
            self._core.collections, [self.name], poll_interval_sec=poll_sec
        ) as wakeup:
            while True:
                # Once more after the stream opened: a task may have come just before.
                task = await self._pop_now(worker_id)
                remaining = deadline - asyncio.get_running_loop().time()
                if task is not None or remaining <= 0:
                    return task
                poll_in_sec = await self._core.run(self._core.next_poll_sec())
                await wakeup.sleep(
                    remaining if poll_in_sec is None else min(remaining, poll_in_sec)
                )

    async def pop_many(self, limit: int, *, worker_id: str | None = None) -> list[Task[PayloadT]]:
        """See :meth:`Queue.pop_many`."""
        return await self._claim(
            self._core.pop_many(check_count("limit", limit), check_worker_id(worker_id))
        )

    async def _pop_now(self, worker_id: str | None) -> Task[PayloadT] | None:
        tasks = await self._claim(self._core.pop(worker_id))
        return tasks[0] if tasks else None

    async def _claim(self, operation: Operation[list[Task[PayloadT]]]) -> list[Task[PayloadT]]:
        """Claim, and if the caller is cancelled meanwhile, hand back what was claimed."""
        claiming = asyncio.ensure_future(self._core.run(operation))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            with suppress(MicroqueueError):  # The caller wants to end; a lease ends by itself.
                for task in await claiming:
                    await self.release(task)
            raise

    # Settle

    async def mark_done(self, task: Task[Any], *, result: Any = None, session: Any = None) -> None:
        """See :meth:`Queue.mark_done`."""
        await self._core.run(self._core.mark_done(task, result, session))

    async def mark_done_many(self, tasks: Iterable[Task[Any]]) -> list[LeaseLost]:
        """See :meth:`Queue.mark_done_many`."""
        return await self._core.run(self._core.mark_done_many(tasks))

    async def mark_retry(
        self,
        task: Task[Any],
        error: object = None,
        *,
        code: str | None = None,
        delay: Duration | None = None,
    ) -> TaskStatus:
        """See :meth:`Queue.mark_retry`."""
        return await self._core.run(self._core.mark_retry(task, error, code, delay))

    async def mark_failure(
        self, task: Task[Any], message: object, *, code: str | None = None
    ) -> None:
        """See :meth:`Queue.mark_failure`."""
        await self._core.run(self._core.mark_failure(task, message, code))

    async def touch(
        self, task: Task[PayloadT], *, extend: Duration | None = None
    ) -> Task[PayloadT]:
        """See :meth:`Queue.touch`."""
        return await self._core.run(self._core.touch(task, extend))

    async def release(self, task: Task[Any], *, front: bool = False) -> None:
        """See :meth:`Queue.release`."""
        await self._core.run(self._core.release(task, front=front))

    # Inspect and administer

    async def get(self, task_id: TaskId) -> Task[PayloadT] | None:
        """See :meth:`Queue.get`."""
        return await self._core.run(self._core.get(task_id))

    async def peek(
        self,
        limit: int = 10,
        *,
        status: TaskStatus | str | None = None,
        queue: str | None = None,
        all_queues: bool = False,
    ) -> list[Task[PayloadT]]:
        """See :meth:`Queue.peek`."""
        return await self._core.run(self._core.peek(limit, status, queue, all_queues=all_queues))

    async def stats(self, *, exact: bool = False) -> QueueStats:
        """See :meth:`Queue.stats`."""
        return await self._core.run(self._core.stats(exact=exact))

    async def workers(self) -> list[WorkerInfo]:
        """See :meth:`Queue.workers`."""
        return await self._core.run(self._core.workers())

    async def purge(
        self,
        *,
        status: TaskStatus | str = TaskStatus.DONE,
        older_than: Duration | None = None,
        dry_run: bool = False,
    ) -> int:
        """See :meth:`Queue.purge`."""
        return await self._core.run(self._core.purge(status, older_than, dry_run=dry_run))

    async def cancel(self, task_id: TaskId) -> Task[PayloadT]:
        """See :meth:`Queue.cancel`."""
        return await self._core.run(self._core.cancel(task_id))

    # Control

    async def pause(self, *, reason: str | None = None) -> Pause:
        """See :meth:`Queue.pause`."""
        return await self._core.run(self._core.pause(reason))

    async def resume(self) -> bool:
        """See :meth:`Queue.resume`."""
        return await self._core.run(self._core.resume())

    async def paused(self) -> Pause | None:
        """See :meth:`Queue.paused`."""
        return await self._core.run(self._core.paused())
