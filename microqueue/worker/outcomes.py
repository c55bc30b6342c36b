"""What a handler raises to decide about its task, and what other exceptions do.

The outcomes themselves are :class:`microqueue.task.Outcome`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from microqueue import error_codes
from microqueue.arguments import check_code
from microqueue.core import QueueCore
from microqueue.durations import Duration, duration_argument
from microqueue.errors import InvalidPayload
from microqueue.operations import settle
from microqueue.operations.settle import Settlement
from microqueue.payload import check_encodable
from microqueue.settings import QueueSettings
from microqueue.task import Outcome, Task, TaskError
from microqueue.tracebacks import is_caused

LEASE_LOST = "lease_lost"
"""What metrics and traces call a delivery without an outcome: its lease was lost."""


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


def redelivery_outcome(error: BaseException) -> Outcome:
    """Return the outcome of an attempt that ``on_retry`` reports with this error."""
    return Outcome.SNOOZED if isinstance(error, Snooze) else Outcome.RETRIED


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
        return settle.failed(now, _described_outcome(error, now, settings))
    if isinstance(error, Retry):
        described = _described_outcome(error, now, settings)
        given = error.delay
    else:
        described = _described(error, None, now, settings)
        if policy.is_fatal(error):
            return settle.failed(now, described)
        given = None
    delay_sec = settle.backoff_sec(task, settings) if given is None else given.total_seconds()
    return settle.retried(task, now, described, delay_sec=delay_sec)


def plain_retry(
    task: Task[Any], error: BaseException, *, now: datetime, settings: QueueSettings
) -> Settlement:
    """Return the settlement of an ordinary error: a retry after the backoff."""
    described = _described(error, None, now, settings)
    return settle.retried(task, now, described, delay_sec=settle.backoff_sec(task, settings))


def _described(
    error: object, code: str | None, now: datetime, settings: QueueSettings
) -> TaskError:
    return settle.describe_error(error, code, now, otherwise="failed", settings=settings)


def _described_outcome(error: Fail | Retry, now: datetime, settings: QueueSettings) -> TaskError:
    """Return the error of an outcome. A traceback is stored if another exception led to it."""
    raised = error if is_caused(error) else None
    return settle.describe_error(
        str(error), error.code, now, otherwise="failed", settings=settings, raised=raised
    )


def check_storable(queue: QueueCore[Any], result: Any) -> Fail | None:
    """Return an error if a result cannot be stored; a retry would not change that."""
    try:
        check_encodable({"result": result}, queue.collections.codec_options)
    except InvalidPayload as exc:
        return Fail(str(exc), code=error_codes.INVALID_RESULT)
    return None
