"""Tell handlers that their time is up, from a thread that asks no server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf

from microqueue.worker.inflight import Held, InFlight, now_sec
from microqueue.worker.watcher import Watcher

logger = logging.getLogger("microqueue.worker")


class Deadlines(Watcher):
    """Watches the time of what runs."""

    def __init__(self, in_flight: InFlight, on_timeout: Callable[[Held], None]) -> None:
        super().__init__("microqueue-deadlines")
        self._in_flight = in_flight
        self._on_timeout = on_timeout

    def _look(self) -> float:
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
