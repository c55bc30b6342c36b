"""How a run is stopped: the request, its deadlines, and the signals that make it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from types import FrameType

SIGNAL_WAIT_SEC = 0.1  # A signal handler sets a plain flag, which is read this often.
# How long a shutdown waits for MongoDB: after the handlers have ended, and after a second signal.
ENDING_SEC = 5.0
HURRY_SEC = 2.0


class StopRequest:
    """Whether one run was asked to stop, and by when its parts must end.

    Each run has its own request: a thread that outlives its run never sees the next run's.
    """

    # Plain attributes: a signal handler must not wait for a lock that its thread holds.
    def __init__(self, grace_sec: float) -> None:
        self._grace_sec = grace_sec
        self.requested = False
        self.immediate = False
        self.grace_ends = inf
        """Handlers may run until then."""

    def request(self, *, immediately: bool = False) -> None:
        """Ask the run to stop; without the grace if ``immediately``."""
        self.immediate = self.immediate or immediately
        self.end_grace_within(0.0 if self.immediate else self._grace_sec)
        self.requested = True

    def end_grace_within(self, seconds: float) -> None:
        """Shorten the grace."""
        self.grace_ends = min(self.grace_ends, time.monotonic() + seconds)

    @property
    def settle_until(self) -> float:
        """Until when a settlement that MongoDB rejects for now is tried again."""
        return 0.0 if self.immediate else self.grace_ends

    def server_deadline(self, handlers_ended: float) -> Callable[[], float]:
        """Return until when MongoDB is waited for, given when the handlers ended.

        It is a function because a second signal brings the deadline forward.
        """

        def deadline() -> float:
            if self.immediate:
                return self.grace_ends + HURRY_SEC
            return max(self.grace_ends, handlers_ended) + ENDING_SEC

        return deadline


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopping_by_signal(stop: Callable[..., None]) -> Iterator[None]:
    """Call ``stop()`` on the first SIGINT or SIGTERM, ``stop(immediately=True)`` on the second.

    Python allows this in the main thread only.

    Args:
        stop: :meth:`Worker.stop`, or any function with the parameter ``immediately``.
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
