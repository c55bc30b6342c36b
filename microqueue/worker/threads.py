"""Threads that hold up nobody, and whose errors are not lost."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class DaemonThread(threading.Thread):
    """A daemon that does one thing, and has the error with which it ended, if there was one.

    For what asks a server that may never answer: whoever waits for it may give up.
    """

    def __init__(self, work: Callable[[], object], *, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do it."""
        try:
            self._work()
        except BaseException as exc:  # noqa: BLE001 (whoever waits for it decides)
            self.error = exc


async def run_in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread of its own, with the caller's context variables.

    Unlike the loop's executor, it has as many threads as are asked for, and they are daemons:
    a function that never returns does not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def tell(result: Any, error: BaseException | None) -> None:
        if not ended.done():  # The caller may have been cancelled.
            ended.set_result((result, error))

    def run() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = context.run(function, *arguments)
        except BaseException as exc:  # noqa: BLE001 (the caller gets it, whatever it is)
            error = exc
        with suppress(RuntimeError):  # The loop may have ended in between.
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="microqueue-handler", daemon=True).start()
    result, error = await ended
    if error is not None:
        raise error
    return result
