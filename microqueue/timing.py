"""When a schedule is due: cron expressions, periods and time zones.

A cron expression has five fields (minute, hour, day of month, month, day of week), or six with
seconds first. ``cronsim`` evaluates it, with the rules of Debian's cron for changes of the clock.
It is imported on first use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from microqueue.errors import InvalidArgument, InvalidCron
from microqueue.model import shorten

MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
LONGEST_EXPRESSION = 200
SHORTEST_PERIOD = timedelta(seconds=1)
FIRST_WINDOW = timedelta(minutes=2)
WINDOW_FACTOR = 8
_EXAMPLE = datetime(2024, 1, 1, tzinfo=UTC)


class CronField(NamedTuple):
    """A field of an expression: its name, the smallest and largest value, and named values."""

    name: str
    smallest: int
    largest: int
    names: tuple[str, ...] = ()


MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
DAY_OF_MONTH, DAY_OF_WEEK = "day of month", "day of week"
FIELDS = (
    CronField("second", 0, 59),
    CronField("minute", 0, 59),
    CronField("hour", 0, 23),
    CronField(DAY_OF_MONTH, 1, 31),
    CronField("month", 1, 12, MONTHS),
    CronField(DAY_OF_WEEK, 0, 7, DAYS),
)


# Cron expressions


def check_cron(given: Any, *, stored: bool = False) -> str:
    """Return a valid expression, or raise :class:`InvalidCron` with the place of the mistake.

    A ``stored`` one may have steps larger than the range of their field: it may be older than
    that rule.
    """
    return _checked(str(given), stored=stored) if isinstance(given, str) else _check(given)


def _check(given: Any, *, stored: bool = False) -> str:
    if not isinstance(given, str) or len(given) > LONGEST_EXPRESSION:
        raise InvalidArgument(
            f"cron={shorten(given)} is not valid: give five fields, as in '0 3 * * *'",
            argument="cron",
            value=given,
        )
    text = given.strip()
    if text.startswith("@"):
        if text.lower() not in MACROS:
            close = get_close_matches(text.lower(), MACROS, n=1) or list(MACROS)
            raise _wrong(given, None, given.index("@"), f"give {' or '.join(close)}")
        return text.lower()
    words = list(re.finditer(r"\S+", given))
    if len(words) not in {len(FIELDS) - 1, len(FIELDS)}:
        place = len(given) if len(words) < len(FIELDS) else words[len(FIELDS)].start()
        reason = f"it has {len(words)} fields; give five (minute, hour, day, month, weekday) or six"
        raise _wrong(given, None, place, reason)
    for field, word in zip(FIELDS[-len(words) :], words, strict=True):
        _check_field(given, field, word.group().upper(), word.start(), any_step=stored)
    _check_possible(given, words[-3].start())
    return text


_checked = lru_cache(maxsize=1024)(_check)


def _check_field(given: str, field: CronField, text: str, start: int, *, any_step: bool) -> None:
    """Check one field of an expression, item by item."""
    for item in text.split(","):
        base, slash, step = item.partition("/")
        _check_base(given, field, base, start)
        place = start + len(base) + 1
        if slash and (not step.isdecimal() or not int(step)):
            raise _wrong(given, field, place, "the step is an integer of 1 or more")
        if slash and not any_step and int(step) > field.largest - field.smallest + 1:
            raise _wrong(given, field, place, "the step is larger than the range of the field")
        start += len(item) + 1


def _check_base(given: str, field: CronField, base: str, start: int) -> None:
    last = field.name == DAY_OF_MONTH and base in {"L", "LW"}
    if base == "*" or last:
        return
    if field.name == DAY_OF_WEEK and base.endswith("L") and base[:-1].isdecimal():
        _check_value(given, field, base[:-1], start)
        return
    if field.name == DAY_OF_WEEK and "#" in base:
        day, _, number = base.partition("#")
        _check_value(given, field, day, start)
        if number not in {"1", "2", "3", "4", "5"}:
            raise _wrong(given, field, start + len(day) + 1, "give the 1st to 5th of the month")
        return
    first, dash, end = base.partition("-")
    low = _check_value(given, field, first, start)
    if dash:
        place = start + len(first) + 1
        if _check_value(given, field, _last_day(field, first, end), place) < low:
            raise _wrong(given, field, place, f"the range ends before {first}")


def _last_day(field: CronField, first: str, end: str) -> str:
    """Return the end of a range: a Sunday at the end of a week is the seventh day."""
    is_sunday = field.name == DAY_OF_WEEK and end == "SUN"
    return "7" if is_sunday and first not in {"SUN", "0"} else end


def _check_value(given: str, field: CronField, value: str, start: int) -> int:
    """Return the number that a value means."""
    if value in field.names:
        return field.names.index(value) + field.smallest
    limits = f"give {field.smallest} to {field.largest}"
    limits += f" or {field.names[0]} to {field.names[-1]}" if field.names else ""
    if not value:
        raise _wrong(given, field, start, f"a value is missing; {limits}")
    strange = next((place for place, one in enumerate(value) if one not in "0123456789"), None)
    if strange is not None:
        named = shorten(given[start : start + len(value)])
        # A word is wrong as a whole, and a number from the first character that is no digit.
        place = 0 if value[0].isalpha() else strange
        raise _wrong(given, field, start + place, f"{named} is no value; {limits}")
    number = int(value)
    if not field.smallest <= number <= field.largest:
        raise _wrong(given, field, start, f"{value} is out of range; {limits}")
    return number


def _check_possible(given: str, day_start: int) -> None:
    """Reject an expression that is never due, such as the 30th of February."""
    from cronsim import CronSim, CronSimError  # noqa: PLC0415 (only schedules need it)

    try:
        if next(CronSim(_with_last_day(given), _EXAMPLE), None) is not None:
            return
    except CronSimError:  # It finds that no month has the day.
        pass
    raise _wrong(given, FIELDS[3], day_start, "no month has such a day")


def _wrong(given: str, field: CronField | None, place: int, reason: str) -> InvalidCron:
    return InvalidCron(
        value=given, field=None if field is None else field.name, position=place + 1, reason=reason
    )


def _standard(cron: str) -> str:
    """Return an expression without its seconds, if it is due once a minute at most.

    ``cronsim`` follows the clock for all of six fields: through a gap, and twice in a fold.
    """
    words = MACROS.get(cron, cron).split()
    if len(words) == len(FIELDS) and words[0].isdecimal() and not int(words[0]):
        del words[0]
    return _with_last_day(" ".join(words))


def _with_last_day(cron: str) -> str:
    """Return an expression whose ranges of weekdays end with 7 and not with ``SUN``.

    ``cronsim`` takes Sunday for the first day of the week.
    """
    *others, weekdays = cron.upper().split()
    ranges = re.sub(r"(?<![^,])(?!SUN-|0-)(\w+)-SUN\b", r"\1-7", weekdays)
    return " ".join([*others, ranges])


# Time zones


@lru_cache(maxsize=256)
def zone_of(name: str) -> tzinfo:
    """Return a time zone by its IANA name."""
    if name == "UTC":
        return UTC
    return ZoneInfo(name)


def check_zone(name: Any, *, stored: bool = False) -> str:
    """Return the name of a time zone; reject an unknown one with the closest names.

    A ``stored`` one may depend on the machine: it may be older than that rule.
    """
    close: list[str] = []
    if isinstance(name, str) and name:
        with suppress(LookupError, OSError, ValueError):
            if stored or not _is_of_the_machine(name):
                zone_of(name)
                return name
        close = _closest_zones(name)
    hint = f"did you mean {' or '.join(close)}?" if close else "give a name as 'Europe/Berlin'"
    raise InvalidArgument(
        f"timezone={shorten(name)} is not valid: {hint}",
        argument="timezone",
        value=name,
        closest=close,
    )


def _is_of_the_machine(name: str) -> bool:
    """Return whether a zone depends on the machine: each may have another one, or none.

    Names are files, on some systems without regard to case.
    """
    plain = name.casefold()
    return plain in {"localtime", "posixrules"} or plain.startswith(("posix/", "right/"))


def _closest_zones(name: str) -> list[str]:
    wanted = name.casefold().replace(" ", "_").removeprefix("posix/").removeprefix("right/")
    known = (one for one in sorted(available_timezones()) if not _is_of_the_machine(one))
    zones = {one.casefold(): one for one in known}
    cities = {key.rpartition("/")[2]: key for key in zones}
    found = get_close_matches(wanted, zones, n=3, cutoff=0.7)
    if not found:
        close = get_close_matches(wanted.rpartition("/")[2], cities, n=3, cutoff=0.7)
        found = [cities[one] for one in close]
    return [zones[one] for one in found]


# Instants


@dataclass(frozen=True, slots=True)
class Timing:
    """The instants of a schedule, in UTC: of an expression in a zone, or of a period."""

    cron: str | None
    every: timedelta | None
    timezone: str
    starts_at: datetime
    """The instant from which the period counts."""

    def after(self, instant: datetime) -> datetime | None:
        """Return the first instant later than this one; ``None`` if there is none."""
        return next(self._all_after(instant), None)

    def between(self, after: datetime, until: datetime) -> Iterator[datetime]:
        """Yield the instants later than ``after``, up to and including ``until``."""
        return takewhile(lambda one: one <= until, self._all_after(after))

    def latest(self, first: datetime, now: datetime) -> datetime:
        """Return the last instant until ``now``, if ``first`` is one that has passed.

        After a long outage it looks back step by step, and not at each instant that was missed.
        """
        if self.every is not None:
            passed = (now - self.starts_at) // self.every
            return max(self.starts_at + passed * self.every, first)
        window = FIRST_WINDOW
        while now - window > first:
            if found := list(self.between(now - window, now)):
                return found[-1]
            window *= WINDOW_FACTOR
        return [first, *self.between(first, now)][-1]

    def _all_after(self, instant: datetime) -> Iterator[datetime]:
        if self.every is not None:
            number = max((instant - self.starts_at) // self.every, 0) + 1
            while True:
                yield self.starts_at + number * self.every
                number += 1
        from cronsim import CronSim  # noqa: PLC0415 (only schedules need it)

        # The instant has been cut to a second: an expression is due at whole seconds.
        local = instant.astimezone(zone_of(self.timezone))
        for found in CronSim(_standard(self.cron or ""), local):
            due = found.astimezone(UTC)
            # In the second of two equal hours, the first ones are over.
            if due > instant:
                yield due
