"""Outcomes: what a handler raises to decide about its task, and what other exceptions do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from microqueue.arguments import check_code
from microqueue.durations import Duration, duration_argument
from microqueue.operations import settle
from microqueue.operations.settle import Settlement
from microqueue.settings import QueueSettings
from microqueue.task import Task


class Retry(Exception):
    """Retry the task later. The attempt counts."""

    # Class attributes, because a subclass may not call this __init__.
    delay: timedelta | None = None
    code: str | None = None

    def __init__(
        self, message: str | None = None, *, delay: Duration | None = None, code: str | None = None
    ) -> None:
        """Create the outcome; raise it in a handler.

        Args:
            message: Stored as the task's error.
            delay: How long the task waits; by default, as long as its backoff says.
            code: Stored as the error's code, to filter by.
        """
        super().__init__(message or "the handler asked for a retry")
        self.delay = duration_argument("delay", delay)
        self.code = check_code(code)


class Fail(Exception):
    """Make the task a dead letter now, whatever attempts it has left."""

    code: str | None = None

    def __init__(self, message: str, *, code: str | None = None) -> None:
        """Create the outcome; raise it in a handler.

        Args:
            message: Stored as the task's error.
            code: Stored as the error's code, to filter by.
        """
        super().__init__(message)
        self.code = check_code(code)


class Snooze(Exception):
    """Deliver the task again after a delay. The attempt does not count."""

    # For a subclass that sets none: without a delay, the task would be delivered in a loop.
    delay: timedelta = timedelta(minutes=1)

    def __init__(self, delay: Duration) -> None:
        """Create the outcome; raise it in a handler.

        Args:
            delay: How long the task waits.
        """
        super().__init__(f"snoozed for {delay}")
        self.delay = duration_argument("delay", delay) or timedelta(0)


@dataclass(frozen=True, slots=True)
class ExceptionPolicy:
    """Which exceptions of a handler are retried.

    ``fatal`` exceptions make the task a dead letter at once. If ``retryable`` is given, so do all
    exceptions that it does not name.
    """

    fatal: tuple[type[BaseException], ...] = ()
    retryable: tuple[type[BaseException], ...] | None = None

    def is_fatal(self, error: BaseException) -> bool:
        """Return whether an exception makes the task a dead letter; ``fatal`` takes precedence."""
        if isinstance(error, self.fatal):
            return True
        return self.retryable is not None and not isinstance(error, self.retryable)


def is_unexpected(error: BaseException) -> bool:
    """Return whether an error needs a traceback in the log: it was not raised as an outcome."""
    return error.__traceback__ is not None and not isinstance(error, Retry | Fail | Snooze)


def settlement_for(
    task: Task[Any],
    error: BaseException,
    policy: ExceptionPolicy,
    *,
    now: datetime,
    settings: QueueSettings,
) -> Settlement:
    """Return the settlement of a task whose handler raised ``error``."""
    if isinstance(error, Snooze):
        return settle.snoozed(task, now, delay_sec=error.delay.total_seconds())
    if isinstance(error, Fail):
        described = settle.describe_error(str(error), error.code, now, otherwise="failed")
        return settle.failed(now, described)
    if isinstance(error, Retry):
        described = settle.describe_error(str(error), error.code, now, otherwise="retry")
        given = error.delay
    else:
        described = settle.describe_error(error, None, now, otherwise="failed")
        if policy.is_fatal(error):
            return settle.failed(now, described)
        given = None
    delay_sec = _backoff_sec(task, settings) if given is None else given.total_seconds()
    return settle.retried(task, now, described, delay_sec=delay_sec)


def plain_retry(
    task: Task[Any], error: BaseException, *, now: datetime, settings: QueueSettings
) -> Settlement:
    """Return the settlement of an ordinary error: a retry after the backoff."""
    described = settle.describe_error(error, None, now, otherwise="failed")
    return settle.retried(task, now, described, delay_sec=_backoff_sec(task, settings))


def _backoff_sec(task: Task[Any], settings: QueueSettings) -> float:
    policy = task.backoff or settings.backoff
    return policy.delay_seconds(task.attempts, previous=task.backoff_sec)
