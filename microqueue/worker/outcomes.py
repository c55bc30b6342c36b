"""What a handler may raise to say what becomes of its task, and how exceptions are judged."""

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
    """Try again later: after ``delay``, or the backoff. It uses up the attempt."""

    # Of the class too: a subclass may forget to call this __init__.
    delay: timedelta | None = None
    code: str | None = None

    def __init__(
        self, message: str | None = None, *, delay: Duration | None = None, code: str | None = None
    ) -> None:
        super().__init__(message or "the handler asked for a retry")
        self.delay = duration_argument("delay", delay)
        self.code = check_code(code)


class Fail(Exception):
    """Make the task a dead letter at once, whatever attempts it has left."""

    code: str | None = None

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = check_code(code)


class Snooze(Exception):
    """Come back after ``delay``; no attempt is used."""

    # For a subclass that sets none; at once would be again and again, without an end.
    delay: timedelta = timedelta(minutes=1)

    def __init__(self, delay: Duration) -> None:
        super().__init__(f"snoozed for {delay}")
        self.delay = duration_argument("delay", delay) or timedelta(0)


@dataclass(frozen=True, slots=True)
class ExceptionPolicy:
    """Which exceptions of a handler are worth another attempt.

    ``fatal`` ones bury the task at once; if ``retryable`` is given, all others do too.
    """

    fatal: tuple[type[BaseException], ...] = ()
    retryable: tuple[type[BaseException], ...] | None = None

    def is_fatal(self, error: BaseException) -> bool:
        """Decide about one exception; ``fatal`` wins over ``retryable``."""
        if isinstance(error, self.fatal):
            return True
        return self.retryable is not None and not isinstance(error, self.retryable)


def is_unexpected(error: BaseException) -> bool:
    """Tell whether the traceback of an error is worth a look: nobody raised it on purpose."""
    return error.__traceback__ is not None and not isinstance(error, Retry | Fail | Snooze)


def settlement_for(
    task: Task[Any],
    error: BaseException,
    exception_policy: ExceptionPolicy,
    *,
    now: datetime,
    settings: QueueSettings,
) -> Settlement:
    """Decide what an exception does to its task."""
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
        if exception_policy.is_fatal(error):
            return settle.failed(now, described)
        given = None
    delay_sec = _backoff_sec(task, settings) if given is None else given.total_seconds()
    return settle.retried(task, now, described, delay_sec=delay_sec)


def plain_retry(
    task: Task[Any], error: BaseException, *, now: datetime, settings: QueueSettings
) -> Settlement:
    """Take an exception for no more than an error: try again after the backoff."""
    described = settle.describe_error(error, None, now, otherwise="failed")
    return settle.retried(task, now, described, delay_sec=_backoff_sec(task, settings))


def _backoff_sec(task: Task[Any], settings: QueueSettings) -> float:
    policy = task.backoff or settings.backoff
    return policy.delay_seconds(task.attempts, previous=task.backoff_sec)
