"""Daemon threads: none delays the end of the process, and none loses its error."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

POLL_SEC = 0.05


class DaemonThread(threading.Thread):
    """Calls one function, and keeps the error that it raised.

    For calls to a server that may never answer: the thread that joins it may give up.
    """

    def __init__(self, work: Callable[[], object], *, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self.error: BaseException | None = None

    def run(self) -> None:
        """Call the function."""
        try:
            self._work()
        except BaseException as exc:  # noqa: BLE001 (the thread that joins it decides)
            self.error = exc


class DueThread:
    """A thread that calls :meth:`_run_due` whenever something is due, and sleeps in between."""

    def __init__(self, name: str) -> None:
        self._next_due = inf
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake_by(self, due: float) -> None:
        """Wake up at this reading of ``time.monotonic``, or earlier."""
        if due < self._next_due:
            self._wake.set()

    def stop(self) -> None:
        """Stop after the call that is running."""
        self._stopping = True
        self._wake.set()

    def join(self) -> None:
        """Wait for the end of the thread."""
        if self._thread.ident is not None:  # It may not have been started.
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._next_due = inf  # Whatever comes in from now on wakes the thread once more.
            self._wake.clear()
            self._next_due = due = self._run_due()
            self._wake.wait(None if due == inf else max(due - time.monotonic(), 0.0))

    def _run_due(self) -> float:
        """Do what is due; return when something is due again."""
        raise NotImplementedError


def join_thread(thread: threading.Thread, deadline: Callable[[], float]) -> bool:
    """Wait for a thread until the deadline, which may move; return whether it has ended."""
    while thread.is_alive():
        in_time = time.monotonic() < deadline()
        thread.join(POLL_SEC)  # Once at least: most are about to end.
        if not in_time:
            break
    return not thread.is_alive()


async def join_task(task: asyncio.Task[Any], deadline: Callable[[], float]) -> bool:
    """Wait for an asyncio task as :func:`join_thread` does. It is not cancelled."""
    while True:
        rest_sec = deadline() - time.monotonic()
        await asyncio.wait([task], timeout=min(max(rest_sec, 0.0), POLL_SEC))
        if task.done() or rest_sec <= 0:
            return task.done()


async def run_in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in its own thread, with the caller's context variables.

    Unlike the loop's executor, this has no limit of threads, and they are daemons: a function
    that never returns does not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def finish(result: Any, error: BaseException | None) -> None:
        if not ended.done():  # The caller may have been cancelled.
            ended.set_result((result, error))

    def run() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = context.run(function, *arguments)
        except BaseException as exc:  # noqa: BLE001 (it is raised in the caller)
            error = exc
        with suppress(RuntimeError):  # The loop may have been closed.
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name="microqueue-handler", daemon=True).start()
    result, error = await ended
    if error is not None:
        raise error
    return result
