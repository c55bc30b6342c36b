"""How many tasks a worker claims ahead of its handlers."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import bson
from bson.codec_options import CodecOptions


class PrefetchController:
    """Decides how many tasks to claim ahead of the handlers.

    The limit is the smallest of: the ``prefetch`` option; what can start within a second and
    within a quarter of the lease, given the mean run time so far; and 64 MB of payload. Until
    run times are known it grows by doubling, because the first tasks may be the fast ones.

    ``concurrency`` is the number of tasks that can run at once: with batches, that of all
    handlers, if their batches are full.

    Attributes:
        unused: By how much the running batches are smaller than full ones.
        blocked: How many handlers have been running for longer than a task may wait. They are
            not expected to start another task soon.
    """

    LEASE_FRACTION = 0.25
    MAX_WAIT_SEC = 1.0
    MAX_BYTES = 64_000_000
    # A long run or a large task changes the mean at once, a short or small one slowly.
    WEIGHT_UP = 0.5
    WEIGHT_DOWN = 0.05

    def __init__(self, *, concurrency: int, prefetch: int, lease_sec: float) -> None:
        self._concurrency = concurrency
        self._prefetch = prefetch
        self._lease_sec = lease_sec
        self._mean_run_sec: float | None = None
        self._mean_bytes: float | None = None
        self._finished = 0
        self.blocked = 0
        self.unused = 0

    def record_run(self, run_sec: float) -> None:
        """Learn from the run time of one task."""
        self._finished += 1
        mean = self._mean_run_sec
        if mean is None:
            self._mean_run_sec = run_sec
        else:
            weight = self.WEIGHT_UP if run_sec > mean else self.WEIGHT_DOWN
            self._mean_run_sec = mean + weight * (run_sec - mean)

    def measure_size(self, document: Mapping[str, Any], codec_options: CodecOptions[Any]) -> None:
        """Encode a task to learn from its size."""
        try:
            size = len(bson.encode(document, codec_options=codec_options))
        except Exception:  # noqa: BLE001 (a codec of the user may only decode)
            return
        self._mean_bytes = self._updated(self._mean_bytes, size)

    def _updated(self, mean: float | None, value: float) -> float:
        if mean is None:
            return value
        return mean + (self.WEIGHT_UP if value > mean else self.WEIGHT_DOWN) * (value - mean)

    @property
    def max_in_memory(self) -> float:
        """How many tasks fit into the memory limit, waiting for a handler or for their write."""
        return inf if not self._mean_bytes else self.MAX_BYTES / self._mean_bytes

    @property
    def can_run(self) -> int:
        """How many tasks can run at once, beside the batches that are running."""
        return max(self._concurrency - self.unused, 1)

    def limit(self) -> int:
        """Return how many tasks may wait or run at once."""
        can_run = self.can_run
        if self._prefetch <= 1:
            return can_run
        free = max(self._concurrency - self.blocked, 0)
        if self._mean_run_sec is None:
            return can_run + min(free, self._prefetch)
        within_sec = min(self._lease_sec * self.LEASE_FRACTION, self.MAX_WAIT_SEC)
        startable = free * within_sec / max(self._mean_run_sec, 1e-6)
        ahead = min(self._prefetch, startable, 2 * self._finished, self.max_in_memory)
        return can_run + int(ahead)
