"""Call a queue from the event loop: an ``AsyncQueue`` is awaited, a ``Queue`` runs in threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import anyio.to_thread

from microqueue.arguments import check_name
from microqueue.async_queue import AsyncQueue
from microqueue.dead_letters import AsyncDeadLetters, DeadLetters
from microqueue.drivers.asynchronous import settled
from microqueue.insights import AsyncInsights, Insights
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
        self.core = queue
        self.name = queue.name
        self.collections = queue.collections
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
        return await self.call(self.core.now)

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
