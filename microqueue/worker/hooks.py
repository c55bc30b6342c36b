"""Hooks: what metrics, tracing and user code attach to a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from microqueue.task import Task
from microqueue.worker.log import logger
from microqueue.worker.threads import DaemonThread

LEASE_LOST = "lease_lost"
"""What metrics and traces call a delivery without an outcome: its lease was lost."""


class Hooks:
    """Base class for hooks; override the methods you need.

    An error in a hook is logged, and changes nothing else. ``AsyncWorker`` calls hooks in its
    event loop. ``Worker`` calls them in the thread that runs the handler, except for events that
    the handler did not cause, such as a timeout or a cancellation: those have their own thread.
    """

    def on_attach(self, knows: Callable[[str], bool]) -> None:
        """Run when a worker with named tasks is created.

        Args:
            knows: Returns whether a task of this name is registered.
        """

    def on_start(self, task: Task[Any]) -> None:
        """Run before the handler."""

    def on_success(self, task: Task[Any], *, took_sec: float) -> None:
        """Run after the handler returned."""

    def on_retry(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:
        """Run when the task will be retried."""

    def on_failure(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:
        """Run when the task becomes a dead letter."""

    def on_release(self, task: Task[Any]) -> None:
        """Run when the task is released: the worker stops, or could not start it in time."""

    def on_cancel(self, task: Task[Any]) -> None:
        """Run when the task was cancelled while this worker held it."""

    def on_lease_lost(self, task: Task[Any]) -> None:
        """Run when the lease was lost; the result of the handler is discarded."""


class HookList:
    """Calls every hook, and logs the errors they raise."""

    def __init__(self, hooks: Sequence[Hooks]) -> None:
        self._hooks = tuple(hooks)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def call(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call one method of every hook."""
        for hook in self._hooks:
            try:
                getattr(hook, name)(*arguments, **options)
            except BaseException as exc:  # It would end a thread that serves all tasks.
                in_main_thread = threading.current_thread() is threading.main_thread()
                if isinstance(exc, KeyboardInterrupt) and in_main_thread:
                    raise  # Ctrl-C.
                logger.exception("hook %s.%s failed", type(hook).__name__, name)


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
