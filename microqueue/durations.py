"""Durations: a ``timedelta`` or seconds, checked, parsed and printed the same everywhere."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator

from microqueue.errors import InvalidArgument

Duration: TypeAlias = timedelta | float
"""What callers may pass: a ``timedelta``, or seconds."""

LONGEST = timedelta(days=36_500)
"""A century: longer is a mistake, and would pass the last date of a datetime."""

UNITS = {
    "w": timedelta(weeks=1),
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}
FORMS = "give seconds, or 30s, 5m, 2h, 1d"
NO_TIMEZONE = "no_timezone"
"""The code of the error about an instant without a timezone."""
NOT_A_DURATION = "give a timedelta or a number of seconds"
NEGATIVE = "a duration cannot be negative"
TOO_LONG = f"give a duration of at most {LONGEST.days} days"
_NUMBER = r"\d+(?:\.\d+)?|\.\d+"
_PART = r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)"

EARLIEST = datetime(2, 1, 1, tzinfo=UTC)
LATEST = datetime(9998, 12, 31, tzinfo=UTC)
"""Instants that can be rounded and converted to any timezone without an overflow.

The latest is before that of a task that is held.
"""


def to_timedelta(value: Any) -> timedelta:
    """Return a duration; reject what is negative, not finite, not a number, or over a century."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        # Written so that NaN is rejected, and an integer that is too large for a float.
        if not abs(value) <= LONGEST.total_seconds():
            raise ValueError(TOO_LONG)
        value = timedelta(seconds=value)
    if not isinstance(value, timedelta):
        raise ValueError(NOT_A_DURATION)  # noqa: TRY004 (pydantic reads ValueError)
    if value < timedelta(0):
        raise ValueError(NEGATIVE)
    if value > LONGEST:
        raise ValueError(TOO_LONG)
    return value


def read_duration(text: str) -> timedelta:
    """Parse a duration: seconds, or ``30s``, ``5m``, ``2h``, ``1d``, ``1h30m``."""
    wanted = text.strip().lower()
    if re.fullmatch(_NUMBER, wanted):
        return to_timedelta(float(wanted))
    if not re.fullmatch(rf"({_PART}\s*)+", wanted):
        raise ValueError(FORMS)
    parts = re.findall(_PART, wanted)
    return to_timedelta(sum(float(number) * UNITS[unit].total_seconds() for number, unit in parts))


def write_duration(value: timedelta) -> str:
    """Format a duration exactly: ``0 s``, ``1.5 s``, ``1 h 30 m``."""
    if value < timedelta(0):
        return f"-{write_duration(-value)}"
    parts, rest = [], value
    for unit in ("d", "h", "m"):
        number, rest = divmod(rest, UNITS[unit])
        if number:
            parts.append(f"{number} {unit}")
    if rest or not parts:
        parts.append(f"{rest.total_seconds():.6f}".rstrip("0").rstrip(".") + " s")
    return " ".join(parts)


def to_positive_timedelta(value: Any) -> timedelta:
    """Return a duration; reject one shorter than a millisecond."""
    duration = to_timedelta(value)
    if duration < timedelta(milliseconds=1):
        raise ValueError("give a duration of at least a millisecond")
    return duration


def to_aware_datetime(value: Any) -> datetime:
    """Reject an instant without a timezone: guessing one could shift tasks by hours."""
    if not isinstance(value, datetime):
        raise ValueError("give a datetime")  # noqa: TRY004 (pydantic reads ValueError)
    if value.utcoffset() is None:
        raise InvalidArgument(
            "it has no timezone; use for example datetime.now(timezone.utc)", code=NO_TIMEZONE
        )
    if not EARLIEST <= value <= LATEST:
        raise ValueError(f"give a datetime between {EARLIEST.date()} and {LATEST.date()}")
    return value


NonNegativeDuration = Annotated[timedelta, BeforeValidator(to_timedelta)]
PositiveDuration = Annotated[timedelta, BeforeValidator(to_positive_timedelta)]
AwareDatetime = Annotated[datetime, BeforeValidator(to_aware_datetime)]


def duration_argument(name: str, value: Duration | None) -> timedelta | None:
    """Check an optional duration argument; an error names the argument."""
    return None if value is None else check_duration(name, value)


def check_duration(name: str, value: Duration) -> timedelta:
    """Check a required duration argument; an error names the argument."""
    try:
        return to_timedelta(value)
    except ValueError as exc:
        shown = write_duration(value) if isinstance(value, timedelta) else repr(value)
        raise InvalidArgument(
            f"{name}={shown} is not valid: {exc}", argument=name, value=value
        ) from exc
