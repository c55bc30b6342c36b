"""The options of a worker, with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import ClassVar, TypedDict

from pydantic import Field

from microqueue.deprecation import warn_renamed
from microqueue.durations import Duration, NonNegativeDuration, PositiveDuration
from microqueue.model import Model


class WorkerOptionsDict(TypedDict, total=False):
    """The options as keyword arguments of ``Worker`` and ``AsyncWorker``."""

    concurrency: int
    prefetch: int
    flush_interval: Duration
    flush_limit: int
    grace: Duration
    poll_interval: Duration
    hot_poll_period: Duration
    weights: Mapping[str, float] | None
    heartbeat: Duration
    timeout: Duration | None
    keep_result: bool


class WorkerOptions(Model):
    """The options of ``Worker`` and ``AsyncWorker``, given as keyword arguments.

    Durations are ``timedelta`` or seconds.
    """

    renamed_fields: ClassVar[Mapping[str, str]] = {"brisk_period": "hot_poll_period"}

    concurrency: int = Field(default=8, ge=1, le=10_000)
    """How many handlers run at the same time."""
    prefetch: int = Field(default=500, ge=1, le=100_000)
    """How many claimed tasks may wait for a handler. 1: only tasks that can start are claimed."""
    flush_interval: NonNegativeDuration = timedelta(milliseconds=2)
    """How long a settlement waits for others to share its write. 0: each is written alone."""
    flush_limit: int = Field(default=500, ge=1, le=10_000)
    """The largest number of settlements in one write, and of tasks in one claim."""
    grace: NonNegativeDuration = timedelta(seconds=30)
    """How long running handlers may take to finish after a stop; then their tasks are released."""
    poll_interval: PositiveDuration = timedelta(seconds=1)
    """How often an idle worker polls, whether or not its change stream wakes it."""
    hot_poll_period: NonNegativeDuration = timedelta(milliseconds=250)
    """How long the worker polls every millisecond after its last task."""
    weights: dict[str, float] | None = None
    """Each queue's share of the work, by name. ``None``: the first queue with a task goes first."""
    heartbeat: PositiveDuration = timedelta(seconds=3)
    """How often the worker sends a heartbeat. After three missed ones its tasks are reclaimed."""
    timeout: PositiveDuration | None = None
    """How long a handler may run; a named task may have its own timeout."""
    keep_result: bool = False
    """Store the return values of handlers."""

    @property
    def brisk_period(self) -> timedelta:
        """Deprecated: use :attr:`hot_poll_period`."""
        warn_renamed("WorkerOptions.brisk_period", "hot_poll_period")
        return self.hot_poll_period
