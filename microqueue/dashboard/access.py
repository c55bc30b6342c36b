"""Call a queue from the event loop: an ``AsyncQueue`` is awaited, a ``Queue`` runs in threads."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

import anyio.to_thread

from microqueue.arguments import check_name
from microqueue.async_queue import AsyncQueue
from microqueue.core import core_of
from microqueue.dead_letters import AsyncDeadLetters, DeadLetters
from microqueue.drivers.asynchronous import settled
from microqueue.insights import AsyncInsights, Insights, Overview
from microqueue.queue import Queue
from microqueue.settings import QueueSettings
from microqueue.sweeper import AsyncSweeper, Sweeper

AnyQueue: TypeAlias = Queue[Any] | AsyncQueue[Any]
AnyLetters: TypeAlias = DeadLetters[Any] | AsyncDeadLetters[Any]
MOST_QUEUES = 1000


class Access:
    """A queue's collection, all of its queues, and its views, for code that awaits."""

    def __init__(self, queue: AnyQueue) -> None:
        # Payloads are shown and edited as they are stored, so the model is left out.
        self.blocking = isinstance(queue, Queue)
        self._queue = queue
        self.name = queue.name
        self.core = core_of(queue)
        self.collections = self.core.collections
        self._queues: dict[str, AnyQueue] = {}
        self.insights: Insights | AsyncInsights = (
            Insights(queue) if isinstance(queue, Queue) else AsyncInsights(queue)
        )

    @property
    def settings(self) -> QueueSettings:
        """The queue's settings, which say more once its server was reached for the first time."""
        return self.core.settings

    async def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a method of a queue or a collection, and give its result."""
        if self.blocking:
            return await anyio.to_thread.run_sync(
                functools.partial(method, *arguments, **options), abandon_on_cancel=False
            )
        return await settled(method(*arguments, **options))

    async def run(self, operation: Any) -> Any:
        """Run an operation on the collection."""
        return await self.call(self.core.run, operation)

    async def now(self) -> Any:
        """Give the server's time."""
        return await self.call(self._queue.now)

    def queue(self, name: str | None) -> AnyQueue:
        """Give one of the collection's queues, by name; payloads are left as they are stored."""
        chosen = self.name if name is None else check_name(name)
        found = self._queues.get(chosen)
        if found is None or found.settings is not self.settings:
            if len(self._queues) >= MOST_QUEUES:
                self._queues.clear()
            kind = Queue if self.blocking else AsyncQueue
            found = self._queues[chosen] = kind(
                self.collections.tasks, chosen, settings=self.settings, clock=self.core.clock
            )
        return found

    async def names(self) -> list[str]:
        """List all queues of the collection."""
        found: list[str] = await self.call(self.insights.queue_names)
        return found

    def sweeper(self) -> Sweeper | AsyncSweeper:
        """Make a sweeper of all queues."""
        queue = self.queue(None)
        return Sweeper(queue) if isinstance(queue, Queue) else AsyncSweeper(queue)


MOST_ANSWERS = 256
SHARE_OF_TIME = 5
"""An answer is kept at least this many times as long as it took: an open page is never busy."""
LONGEST_SEC = 900.0
"""No answer is older than this, and what it took to read it."""
SOON_SEC = 1.0


@dataclass
class _Answer:
    """What was read, when reading began, and how long it is kept: at least, and now."""

    value: Any
    began: float
    least_until: float
    until: float


async def overview_of(access: Access, read_cache: ReadCache, *, exact: bool = False) -> Overview:
    """Give the overview that all viewers share; with ``exact``, everything is counted."""
    found: Overview = await read_cache.get(
        ("overview", exact), lambda: access.call(access.insights.overview, exact=exact)
    )
    return found


class ReadCache:
    """Keeps answers for a moment, and lets those who ask meanwhile wait for the same one.

    With ``keep_sec=0`` nothing is kept.
    """

    def __init__(self, keep_sec: float) -> None:
        self._keep_sec = keep_sec
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()
        self._pending: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}
        self._generation = 0
        self._changed = float("-inf")

    async def get(self, key: Hashable, read: Callable[[], Awaitable[Any]]) -> Any:
        """Give the answer to ``key``, read anew if there is none that is fresh."""
        known = self._answers.get(key)
        if known is not None and time.monotonic() < known.until:
            return known.value
        if key not in self._pending:
            began = time.monotonic()
            reading = self._read(key, read, began, self._generation)
            self._pending[key] = (began, asyncio.ensure_future(reading))
        _, pending = self._pending[key]
        return await asyncio.shield(pending)  # One who leaves must not stop it for the others.

    def forget(self) -> None:
        """Drop all answers: somebody acted, and wants to see it."""
        self._generation += 1
        self._answers.clear()
        self._pending.clear()

    def expire(self) -> None:
        """Note that something changed: answers from before are kept no longer than they must."""
        self._changed = time.monotonic()
        for answer in self._answers.values():
            answer.until = min(answer.until, answer.least_until)

    def outdated_sec(self) -> float:
        """Tell for how long answers from before the last change may still be given."""
        now = time.monotonic()
        left = [one.until - now for one in self._answers.values() if one.began < self._changed]
        left += [SOON_SEC for began, _ in self._pending.values() if began < self._changed]
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
        least_until = now + min((now - began) * SHARE_OF_TIME, LONGEST_SEC)
        until = least_until if began < self._changed else max(least_until, now + self._keep_sec)
        self._answers[key] = _Answer(value, began, least_until, until)
        self._answers.move_to_end(key)
        while len(self._answers) > MOST_ANSWERS:
            self._answers.popitem(last=False)
