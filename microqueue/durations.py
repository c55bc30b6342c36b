"""Durations: a ``timedelta`` or a number of seconds, checked once and the same everywhere."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator

from microqueue.errors import InvalidArgument

Duration: TypeAlias = timedelta | float
"""What callers may give: a ``timedelta``, or seconds."""

LONGEST = timedelta(days=36_500)
"""A century: longer is a mistake, and would run past the last date that a datetime can hold."""

EARLIEST = datetime(2, 1, 1, tzinfo=UTC)
LATEST = datetime(9999, 1, 1, tzinfo=UTC)
"""Instants that can be rounded, and told in any timezone, without running out of dates."""


def to_timedelta(value: Any) -> timedelta:
    """Read a duration; refuse what is negative, not finite, not a number, or over a century."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value) or abs(value) > LONGEST.total_seconds():
            raise ValueError(f"give a duration of at most {LONGEST.days} days")
        value = timedelta(seconds=value)
    if not isinstance(value, timedelta):
        raise ValueError("give a timedelta or a number of seconds")  # noqa: TRY004 (pydantic reads ValueError)
    if value < timedelta(0):
        raise ValueError("a duration cannot be negative")
    if value > LONGEST:
        raise ValueError(f"give a duration of at most {LONGEST.days} days")
    return value


def to_positive_timedelta(value: Any) -> timedelta:
    """Read a duration that must be longer than nothing."""
    duration = to_timedelta(value)
    if duration < timedelta(milliseconds=1):
        raise ValueError("give a duration of at least a millisecond")
    return duration


def to_aware_datetime(value: Any) -> datetime:
    """Refuse an instant without a timezone: guessing one would shift tasks by hours."""
    if not isinstance(value, datetime):
        raise ValueError("give a datetime")  # noqa: TRY004 (pydantic reads ValueError)
    if value.utcoffset() is None:
        raise ValueError("it has no timezone; use for example datetime.now(timezone.utc)")
    if not EARLIEST <= value <= LATEST:
        raise ValueError(f"give a datetime between {EARLIEST.date()} and {LATEST.date()}")
    return value


NonNegativeDuration = Annotated[timedelta, BeforeValidator(to_timedelta)]
PositiveDuration = Annotated[timedelta, BeforeValidator(to_positive_timedelta)]
AwareDatetime = Annotated[datetime, BeforeValidator(to_aware_datetime)]


def duration_argument(name: str, value: Duration | None) -> timedelta | None:
    """Check a duration given directly to a method, naming the argument when it is refused."""
    return None if value is None else check_duration(name, value)


def check_duration(name: str, value: Duration) -> timedelta:
    """Check a duration that must be given, naming the argument when it is refused."""
    try:
        return to_timedelta(value)
    except ValueError as exc:
        raise InvalidArgument(
            f"{name}={value!r} is not valid: {exc}", argument=name, value=value
        ) from exc
