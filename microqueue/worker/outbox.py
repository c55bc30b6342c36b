"""Group commit: settlements wait a moment for others, and share a write."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from microqueue.operations.settle import Settlement
from microqueue.worker.inflight import Held


class Finished(NamedTuple):
    """A task whose handler is through, and what becomes of it: plainly done, if nothing else."""

    held: Held
    settlement: Settlement | None = None


class Outbox:
    """The settlements of many threads that wait for the next write of one.

    Not a ``SimpleQueue``: its ``get`` with a timeout so short that it has passed before the
    wait begins can wait for ever (seen on CPython 3.11).
    """

    def __init__(self, *, wait_sec: float, limit: int) -> None:
        self._wait_sec = wait_sec
        self._limit = limit if wait_sec else 1
        self._items: deque[Finished] = deque()
        self._hungry = 0  # How many items the writer waits for; 0: it is not waiting.
        self._closed = False
        self._changed = threading.Condition()

    def put(self, finished: Finished) -> None:
        """Add a settlement; the writer is woken for the first, and when a batch is full."""
        self._items.append(finished)  # Safe without the lock, which the writer may hold long.
        if self._hungry and (self._hungry == 1 or len(self._items) >= self._limit):
            with self._changed:
                self._changed.notify()

    def close(self) -> None:
        """Say that nothing more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self) -> list[Finished]:
        """Wait for a settlement, and a moment longer for others; nothing at the end."""
        with self._changed:
            self._hungry = 1
            self._changed.wait_for(lambda: self._items or self._closed)
            self._hungry = self._limit
            if self._wait_sec:
                self._changed.wait_for(self._is_due, self._wait_sec)
            self._hungry = 0
        count = min(len(self._items), self._limit)
        return [self._items.popleft() for _ in range(count)]

    def _is_due(self) -> bool:
        return self._closed or len(self._items) >= self._limit


class AsyncOutbox:
    """The same for coroutines of one loop."""

    def __init__(self, *, wait_sec: float, limit: int) -> None:
        self._wait_sec = wait_sec
        self._limit = limit if wait_sec else 1
        self._items: deque[Finished] = deque()
        self._closed = False
        self._changed = asyncio.Event()  # There is something, or nothing more will come.
        self._due = asyncio.Event()  # A batch is full, or nothing more will come.

    def __len__(self) -> int:
        return len(self._items)

    def put(self, finished: Finished) -> None:
        """Add a settlement."""
        self._items.append(finished)
        self._changed.set()
        if len(self._items) >= self._limit:
            self._due.set()

    def put_back(self, batch: Sequence[Finished]) -> None:
        """Take a batch back whose writing was cancelled; who writes it again does no harm."""
        self._items.extendleft(reversed(batch))
        self._changed.set()

    def close(self) -> None:
        """Say that nothing more will come."""
        self._closed = True
        self._changed.set()
        self._due.set()

    async def take(self) -> list[Finished]:
        """Wait for a settlement, and a moment longer for others; nothing at the end."""
        while not self._items and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if self._wait_sec and len(self._items) < self._limit and not self._closed:
            self._due.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), self._wait_sec)
        count = min(len(self._items), self._limit)
        return [self._items.popleft() for _ in range(count)]
