"""How much a worker claims ahead."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import bson
from bson.codec_options import CodecOptions


class PrefetchController:
    """How many tasks to hold: enough to keep handlers busy, few enough to start them in time.

    What is claimed must start within a fraction of its lease, and within about a second, judged
    by how long tasks took so far: what waits here is out of reach of idle workers, and goes
    before what is more urgent. Without experience, one task per handler is held, and one more;
    then no more than twice as many as were seen, as the first ones may have been the quick ones.
    Handlers that are ``busy`` for longer than a task may wait start nothing. What waits must fit
    into memory, too, judged by how large tasks were so far.
    """

    FRACTION = 0.25
    LONGEST_SEC = 1.0
    LARGEST_BYTES = 64_000_000
    # What is long or large is believed at once, what is quick or small only after a while.
    MORE = 0.5
    LESS = 0.05

    def __init__(self, *, concurrency: int, prefetch: int, lease_sec: float) -> None:
        self._concurrency = concurrency
        self._prefetch = prefetch
        self._lease_sec = lease_sec
        self._mean_sec: float | None = None
        self._mean_bytes: float | None = None
        self._seen = 0
        self.busy = 0

    def learn(self, took_sec: float) -> None:
        """Take into account how long one task took."""
        self._seen += 1
        self._mean_sec = self._drawn(self._mean_sec, took_sec)

    def weigh(self, document: Mapping[str, Any], codec_options: CodecOptions[Any]) -> None:
        """Take into account how large one task is."""
        try:
            size = len(bson.encode(document, codec_options=codec_options))
        except Exception:  # noqa: BLE001 (users may have types that they can only read)
            return
        self._mean_bytes = self._drawn(self._mean_bytes, size)

    def _drawn(self, mean: float | None, value: float) -> float:
        if mean is None:
            return value
        return mean + (self.MORE if value > mean else self.LESS) * (value - mean)

    @property
    def affordable(self) -> float:
        """How many tasks may wait, for their handlers or for their settlement, to fit in memory."""
        return inf if not self._mean_bytes else self.LARGEST_BYTES / self._mean_bytes

    def most(self) -> int:
        """Give how many tasks may be held at once, those that run included."""
        least = self._concurrency
        if self._prefetch <= 1:
            return least
        free = max(self._concurrency - self.busy, 0)
        if self._mean_sec is None:
            return least + min(free, self._prefetch)
        within_sec = min(self._lease_sec * self.FRACTION, self.LONGEST_SEC)
        startable = free * within_sec / max(self._mean_sec, 1e-6)
        return least + int(min(self._prefetch, startable, 2 * self._seen, self.affordable))
