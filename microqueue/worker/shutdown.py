"""How a worker is stopped, and how long its end may take."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from microqueue.worker.in_flight import now_sec
from microqueue.worker.options import WorkerOptions

CLOSING_WAIT_SEC = 0.05
SIGNAL_WAIT_SEC = 0.1  # A signal handler sets a plain flag, which is looked at this often.
# How long the end waits for a server: after the grace, and from a hurry on.
ENDING_SEC = 5.0
HURRY_SEC = 2.0


class Stopping:
    """What a worker knows of its end. Handlers may go on until ``_stop_by``."""

    options: WorkerOptions

    # Plain flags: a signal handler must not wait for a lock that its thread holds.
    _stopping = False
    _hurrying = False
    _stop_by = float("inf")

    def _ask_to_stop(self, *, immediately: bool) -> None:
        self._hurrying = self._hurrying or immediately
        grace_sec = 0.0 if self._hurrying else self.options.grace.total_seconds()
        self._stop_by = min(self._stop_by, now_sec() + grace_sec)
        self._stopping = True

    def _forget_stop(self) -> None:
        """Be ready for the next run. What was given up stays so: its time is not reset."""
        self._stopping = self._hurrying = False

    def _end_from(self, since: float) -> Callable[[], float]:
        """Give until when to wait for the server, if handlers have been through since then.

        It is asked again and again, because somebody may begin to hurry.
        """

        def end_by() -> float:
            if self._hurrying:
                return self._stop_by + HURRY_SEC
            return max(self._stop_by, since + ENDING_SEC)

        return end_by


def join_thread(thread: threading.Thread, end_by: Callable[[], float]) -> bool:
    """Wait for the end of a thread; give whether it came in time."""
    while thread.is_alive():
        in_time = now_sec() < end_by()
        thread.join(CLOSING_WAIT_SEC)  # Once at least: most are about to end.
        if not in_time:
            break
    return not thread.is_alive()


async def join_task(task: asyncio.Task[Any], end_by: Callable[[], float]) -> bool:
    """Wait for the end of a task; give whether it came in time. It is not cancelled."""
    while True:
        rest_sec = end_by() - now_sec()
        await asyncio.wait([task], timeout=min(max(rest_sec, 0.0), CLOSING_WAIT_SEC))
        if task.done() or rest_sec <= 0:
            return task.done()


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopping_by_signal(stop: Callable[..., None]) -> Iterator[None]:
    """Stop gently on the first Ctrl-C or SIGTERM, immediately on the second.

    Only the main thread may say how signals are handled.
    """
    received = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        stop(immediately=received > 1)

    former = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
