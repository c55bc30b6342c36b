"""How a worker works: each option with its default and its reason."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import ClassVar

from pydantic import Field

from microqueue.deprecation import warn_renamed
from microqueue.durations import NonNegativeDuration, PositiveDuration
from microqueue.model import Model


class WorkerOptions(Model):
    """What ``Worker`` and ``AsyncWorker`` take beside queue and handler."""

    renamed_fields: ClassVar[Mapping[str, str]] = {"brisk_period": "hot_poll_period"}

    concurrency: int = Field(default=8, ge=1, le=10_000)
    """How many handlers run at the same time."""
    prefetch: int = Field(default=500, ge=1, le=100_000)
    """How many tasks may wait, claimed, beside those that run. 1: only what can start now."""
    flush_interval: NonNegativeDuration = timedelta(milliseconds=2)
    """How long a settlement waits for others to share its write. 0: each on its own."""
    flush_limit: int = Field(default=500, ge=1, le=10_000)
    """How many settlements one write takes at most."""
    grace: NonNegativeDuration = timedelta(seconds=30)
    """How long running handlers may go on after a stop before their tasks are handed back."""
    poll_interval: PositiveDuration = timedelta(seconds=1)
    """How often an idle worker looks for tasks, woken or not."""
    hot_poll_period: NonNegativeDuration = timedelta(milliseconds=250)
    """How long the worker polls every millisecond after its last task."""
    weights: dict[str, float] | None = None
    """How much of the work goes to each of several queues, by name; none: strict order."""
    heartbeat: PositiveDuration = timedelta(seconds=3)
    """How often the worker says that it lives; three missed ones, and its tasks go to others."""
    timeout: PositiveDuration | None = None
    """How long one handler may take; a task may say otherwise."""
    keep_result: bool = False
    """Store what handlers return."""

    @property
    def brisk_period(self) -> timedelta:
        """Deprecated: use :attr:`hot_poll_period`."""
        warn_renamed("WorkerOptions.brisk_period", "hot_poll_period")
        return self.hot_poll_period
