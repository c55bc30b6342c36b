"""Reach a queue's collection from the event loop, and share reads between requests."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import anyio.to_thread

from microqueue.arguments import check_name
from microqueue.async_queue import AsyncQueue
from microqueue.core import core_of
from microqueue.dead_letters import AsyncDeadLetters, DeadLetters
from microqueue.drivers.driver import awaited
from microqueue.drivers.result_watch import Deadline, waiting_async
from microqueue.errors import WaitTimeout
from microqueue.hooks import Hooks
from microqueue.insights import AsyncInsights, Insights, Overview
from microqueue.operations.call import Document, reporting
from microqueue.queue import Queue
from microqueue.settings import QueueSettings
from microqueue.sweeper import AsyncSweeper, Sweeper
from microqueue.task import TaskId
from microqueue.topic import AsyncTopic, Topic

AnyQueue: TypeAlias = Queue[Any] | AsyncQueue[Any]
AnyDeadLetters: TypeAlias = DeadLetters[Any] | AsyncDeadLetters[Any]

SOURCE = "dashboard"
"""What dead letters have as their source."""
MAX_QUEUES = 1000
MAX_RESULTS = 256
MAX_WAITS = 1000
"""How many requests may wait for a result at a time; more get a reply at once."""
MIN_AGE_FACTOR = 5
"""A result is kept at least this many times as long as it took to read, which bounds the load."""
MAX_AGE_SEC = 900.0
"""The longest time that a slow result is kept."""
PENDING_SEC = 1.0
"""How long to wait for a read that is under way."""


class QueueAccess:
    """Awaitable access to all queues of a collection: a ``Queue`` is called in threads."""

    def __init__(self, queue: AnyQueue, hooks: Sequence[Hooks] = ()) -> None:
        self.blocking = isinstance(queue, Queue)
        self._queue = queue
        self.name = queue.name
        self.core = core_of(queue)
        self.collections = self.core.collections
        self._hooks = (*self.core.hooks, *hooks)
        self._report = self.core.report_to(hooks, source=SOURCE)
        self._queues: dict[str, AnyQueue] = {}
        self._waits = 0
        self.insights: Insights | AsyncInsights = (
            Insights(queue) if isinstance(queue, Queue) else AsyncInsights(queue)
        )

    @property
    def settings(self) -> QueueSettings:
        """The queue's settings; connecting to the server may complete them."""
        return self.core.settings

    async def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a method of a queue, a view or a driver object, and return its result."""
        if self.blocking:
            return await anyio.to_thread.run_sync(
                functools.partial(method, *arguments, **options), abandon_on_cancel=False
            )
        return await awaited(method(*arguments, **options))

    async def run(self, operation: Any) -> Any:
        """Run an operation on the collection."""
        return await self.call(self.core.run, reporting(operation, self._report))

    async def wait_for(self, task_id: TaskId, wait_sec: float) -> Document | None:
        """Wait for a task, without a thread, and return it if it is finished in time.

        Raises:
            TaskDeleted: It was deleted during the wait.
        """
        found: Document | None = await self.run(self.core.finished(task_id))
        if found is not None or not wait_sec or self._waits >= MAX_WAITS:
            return found
        deadline = Deadline(wait_sec)
        self._waits += 1
        try:
            async with waiting_async(self.collections, self.settings, task_id) as waiter:
                found = await self.run(self.core.finished(task_id))
                return found if found is not None else await waiter.wait(deadline)
        except WaitTimeout:
            return None
        finally:
            self._waits -= 1

    async def now(self) -> Any:
        """Return the server's time."""
        return await self.call(self._queue.now)

    def queue(self, name: str | None) -> AnyQueue:
        """Return a queue of the collection by name, without a payload model."""
        chosen = self.name if name is None else check_name(name)
        found = self._queues.get(chosen)
        if found is None or found.settings is not self.settings:
            if len(self._queues) >= MAX_QUEUES:
                self._queues.clear()
            kind = Queue if self.blocking else AsyncQueue
            found = self._queues[chosen] = kind(
                self.collections.tasks, chosen, settings=self.settings, clock=self.core.clock
            )
            core_of(found).attach(self._hooks, source=SOURCE)
        return found

    def topic(self, name: str) -> Topic | AsyncTopic:
        """Return a topic beside the collection by name."""
        queue = self.queue(None)
        return Topic(queue, name) if isinstance(queue, Queue) else AsyncTopic(queue, name)

    async def names(self) -> list[str]:
        """Return the names of all queues of the collection."""
        found: list[str] = await self.call(self.insights.queue_names)
        return found

    def sweeper(self) -> Sweeper | AsyncSweeper:
        """Return a sweeper of all queues."""
        queue = self.queue(None)
        return Sweeper(queue) if isinstance(queue, Queue) else AsyncSweeper(queue)


@dataclass
class _Result:
    """The value of a read, when the read began, and how long it is kept: at least, and now."""

    value: Any
    began: float
    least_until: float
    until: float


class ReadCache:
    """Coalesces equal reads: concurrent requests await one read, and its result is kept briefly.

    With ``keep_sec=0`` no result is kept.
    """

    def __init__(self, keep_sec: float) -> None:
        self._keep_sec = keep_sec
        self._results: OrderedDict[Hashable, _Result] = OrderedDict()
        self._pending: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}
        self._generation = 0
        self._changed = float("-inf")

    async def get(self, key: Hashable, read: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result for ``key``; call ``read`` if none is fresh and none is under way."""
        known = self._results.get(key)
        if known is not None and time.monotonic() < known.until:
            return known.value
        if key not in self._pending:
            began = time.monotonic()
            reading = self._read(key, read, began, self._generation)
            self._pending[key] = (began, asyncio.ensure_future(reading))
        _, pending = self._pending[key]
        # A cancelled request must not cancel the read for the others.
        return await asyncio.shield(pending)

    def clear(self) -> None:
        """Drop all results: a viewer changed something, and must see it."""
        self._generation += 1
        self._results.clear()
        self._pending.clear()

    def expire(self) -> None:
        """Shorten the life of all results to the minimum: something changed."""
        self._changed = time.monotonic()
        for result in self._results.values():
            result.until = min(result.until, result.least_until)

    def outdated_sec(self) -> float:
        """Return for how long results from before the last change may still be returned."""
        now = time.monotonic()
        left = [one.until - now for one in self._results.values() if one.began < self._changed]
        left += [PENDING_SEC for began, _ in self._pending.values() if began < self._changed]
        return max([0.0, *left])

    async def _read(
        self, key: Hashable, read: Callable[[], Awaitable[Any]], began: float, generation: int
    ) -> Any:
        try:
            value = await read()
            if self._keep_sec and generation == self._generation:
                self._keep(key, value, began)
            return value
        finally:
            if generation == self._generation:
                self._pending.pop(key, None)

    def _keep(self, key: Hashable, value: Any, began: float) -> None:
        now = time.monotonic()
        least_until = now + min((now - began) * MIN_AGE_FACTOR, MAX_AGE_SEC)
        until = least_until if began < self._changed else max(least_until, now + self._keep_sec)
        self._results[key] = _Result(value, began, least_until, until)
        self._results.move_to_end(key)
        while len(self._results) > MAX_RESULTS:
            self._results.popitem(last=False)


async def read_overview(
    access: QueueAccess, read_cache: ReadCache, *, exact: bool = False
) -> Overview:
    """Return the overview that all viewers share; with ``exact``, nothing is estimated."""
    found: Overview = await read_cache.get(
        ("overview", exact), lambda: access.call(access.insights.overview, exact=exact)
    )
    return found
