"""Tell handlers that their time is up, from a thread that asks no server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from math import inf

from microqueue.worker.inflight import Held, InFlight, now_sec

logger = logging.getLogger("microqueue.worker")


class Deadlines:
    """Watches the time of what runs; it sleeps until the first deadline, or for good."""

    def __init__(self, in_flight: InFlight, on_timeout: Callable[[Held], None]) -> None:
        self._in_flight = in_flight
        self._on_timeout = on_timeout
        self._next_look = inf
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="microqueue-deadlines", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def expect(self, due: float) -> None:
        """Be awake by then: a handler was started whose time is up at that instant."""
        if due < self._next_look:
            self._wake.set()

    def stop(self) -> None:
        """End at once."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:  # It may not have come to that.
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._next_look = inf  # What is started from here on is looked at once more.
            self._wake.clear()
            self._next_look = due = self._interrupt_overdue()
            self._wake.wait(None if due == inf else max(due - now_sec(), 0.0))

    def _interrupt_overdue(self) -> float:
        """Tell of those whose time is up; give when that of the next one is."""
        first = inf
        for one in self._in_flight.snapshot():
            if one.deadline is None or one.timed_out or one.concluded:
                continue
            if one.deadline > now_sec():
                first = min(first, one.deadline)
                continue
            one.timed_out = True
            try:
                self._on_timeout(one)
            except BaseException:
                logger.exception("the end of a handler's time could not be told")
        return first
