"""The options of a worker, with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, TypedDict, Unpack

from pydantic import Field, ValidationInfo, field_validator

from microqueue.deprecation import renamed_attributes
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
    batch: int | None
    batch_wait: Duration


class WorkerOptions(Model):
    """The options of ``Worker`` and ``AsyncWorker``, given as keyword arguments.

    Durations are ``timedelta`` or seconds.
    """

    _renamed_fields: ClassVar[Mapping[str, str]] = {"brisk_period": "hot_poll_period"}

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
    """How often the worker sends a heartbeat. After three missed ones, the second sweep that
    notices it reclaims its tasks."""
    timeout: PositiveDuration | None = None
    """How long a handler may run; a named task may have its own timeout."""
    keep_result: bool = False
    """Store the return values of handlers."""
    batch: int | None = Field(default=None, ge=1, le=10_000)
    """Call the handler with lists of up to so many tasks. ``None``: with the payload of one."""
    batch_wait: NonNegativeDuration = timedelta(milliseconds=50)
    """How long the first task of a batch waits for others, once a handler is free."""

    if TYPE_CHECKING:  # Type checkers would ask for the stored types, not the accepted ones.

        def __init__(self, **options: Unpack[WorkerOptionsDict]) -> None: ...

    @field_validator("batch_wait")
    @classmethod
    def _check_batch_wait(cls, value: timedelta, info: ValidationInfo) -> timedelta:
        if info.data.get("batch") is None:
            raise ValueError("give batch, too")
        return value

    @property
    def max_running(self) -> int:
        """How many tasks run at the same time: one per handler, or a batch per handler."""
        return self.concurrency * (self.batch or 1)

    if not TYPE_CHECKING:
        __getattr__ = renamed_attributes({"brisk_period": "hot_poll_period"})
