"""Where a worker calls hooks: in its event loop, or in a thread."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from microqueue.worker.daemon_threads import DaemonThread
from microqueue.worker.log import logger


class Dispatcher(Protocol):
    """Runs the hooks for events that a handler did not cause."""

    def submit(self, call: Callable[[], None]) -> None:
        """Run a hook call, now or later."""


class InlineDispatcher:
    """Runs hooks at once, in the event loop."""

    def submit(self, call: Callable[[], None]) -> None:
        """Run a hook call."""
        call()


class HookDispatcher:
    """Runs user hooks in order on its own thread, so a slow hook never delays lease renewal."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = DaemonThread(self._run, name="microqueue-hooks")

    def submit(self, call: Callable[[], None]) -> None:
        """Queue a hook call."""
        self._calls.put(call)

    def close(self) -> None:
        """Stop after the calls already queued."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException:
                logger.exception("hook failed")
