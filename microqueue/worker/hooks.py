"""Hooks: what metrics, tracing and users' own code may attach to a worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from microqueue.task import Task
from microqueue.worker.threads import DaemonThread

LEASE_LOST = "lease_lost"
"""What hooks call the end of a delivery that has no outcome: the lease went to another."""

logger = logging.getLogger("microqueue.worker")


class Hooks:
    """Override what you need. An error in a hook is logged and changes nothing.

    In ``AsyncWorker`` methods run in the loop. In ``Worker`` they run in the thread that runs the
    handler; what the handler has not brought about, a timeout or a cancellation for instance, is
    told by another thread.
    """

    def on_attach(self, knows: Callable[[str], bool]) -> None:
        """Run when a worker of named tasks is made; ``knows`` tells whether it has a name."""

    def on_start(self, task: Task[Any]) -> None:
        """Run before the handler."""

    def on_success(self, task: Task[Any], *, took_sec: float) -> None:
        """Run after the handler returned."""

    def on_retry(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:
        """Run when the task will be tried again."""

    def on_failure(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:
        """Run when the task becomes a dead letter."""

    def on_release(self, task: Task[Any]) -> None:
        """Run when the task is handed back: the worker ends, or it was not started in time."""

    def on_cancel(self, task: Task[Any]) -> None:
        """Run when somebody cancelled the task while this worker held it."""

    def on_lease_lost(self, task: Task[Any]) -> None:
        """Run when the lease was lost; what the handler did is not recorded."""


class HookList:
    """Calls every hook, and lets none of them disturb the others or the worker."""

    def __init__(self, hooks: Sequence[Hooks]) -> None:
        self._hooks = tuple(hooks)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def call(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call one method of every hook."""
        for hook in self._hooks:
            try:
                getattr(hook, name)(*arguments, **options)
            except BaseException as exc:  # It would end what serves all tasks.
                main = threading.current_thread() is threading.main_thread()
                if isinstance(exc, KeyboardInterrupt) and main:
                    raise  # Somebody has pressed Ctrl-C.
                logger.exception("hook %s.%s failed", type(hook).__name__, name)


class HookDispatcher:
    """Does one thing after the other that may take long, because it calls code of users.

    The threads of leases and deadlines leave that to it: a slow hook must not hold them up.
    """

    def __init__(self) -> None:
        self._things: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = DaemonThread(self._run, name="microqueue-hooks")

    def put(self, thing: Callable[[], None]) -> None:
        """Do this, after what was put before."""
        self._things.put(thing)

    def close(self) -> None:
        """Say that nothing more will come."""
        self._things.put(None)

    def _run(self) -> None:
        while (thing := self._things.get()) is not None:
            try:
                thing()
            except BaseException:
                logger.exception("what happened to a task could not be told")
