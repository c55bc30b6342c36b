"""The line of claimed tasks that wait for a free handler thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from microqueue.worker.inflight import Held, split


class Line:
    """First come, first served; threads wait here only when there is nothing to take."""

    def __init__(self) -> None:
        self._waiting: deque[Held] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the worker ends."""
        return self._closed

    def extend(self, held: Iterable[Held]) -> bool:
        """Add tasks, and wake as many threads as can have one; give whether it was open."""
        with self._changed:
            if self._closed:
                return False
            self._waiting.extend(held)
            if self._idle:
                self._changed.notify(len(self._waiting))
            return True

    def take(self) -> Held | None:
        """Wait for a task; nothing once the line is closed and empty."""
        while True:
            try:
                return self._waiting.popleft()  # Most often there is one, and no lock is needed.
            except IndexError:
                pass
            with self._changed:
                if self._closed:
                    return None
                if not self._waiting:
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1

    def withdraw(self, unwanted: Callable[[Held], bool]) -> list[Held]:
        """Take out what is not to be started any more, and nobody has taken yet."""
        with self._changed:
            # Who finds nothing in between waits for the lock.
            out, left = split(self._take_all(), unwanted)
            self._waiting.extend(left)
            return out

    def close(self) -> list[Held]:
        """Let the threads go, and give what nobody has taken."""
        with self._changed:
            left = self._take_all()
            self._closed = True
            self._changed.notify_all()
            return left

    def _take_all(self) -> list[Held]:
        left = []
        while self._waiting:
            try:
                left.append(self._waiting.popleft())
            except IndexError:  # A thread was quicker.
                break
        return left
