"""Format values as text for people, and as JSON for programs. Pure functions."""

from __future__ import annotations

import base64
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence, Set
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

from pydantic import BaseModel

BIDIRECTIONAL = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
MINUTE = 60
KILO = 1000
UNITS = ("B", "kB", "MB", "GB")
STEPS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "m"), (60, "m", 1, "s"))


def jsonable(value: Any) -> Any:
    """Convert a value to JSON types; types that JSON lacks become strings."""
    result: Any
    match value:
        case Enum():
            result = jsonable(value.value)
        case None | bool() | str():
            result = value
        case int():
            result = int(value)
        case float():
            result = float(value) if math.isfinite(value) else str(value)
        case BaseModel():
            result = {name: jsonable(getattr(value, name)) for name in type(value).model_fields}
        case Mapping():
            result = {str(key): jsonable(item) for key, item in value.items()}
        case datetime():
            result = (value.astimezone(UTC) if value.utcoffset() is not None else value).isoformat()
        case timedelta():
            result = value.total_seconds()
        case bytes():
            result = base64.b64encode(value).decode()
        case Sequence() | Set():
            result = [jsonable(item) for item in value]
        case _:
            result = str(value)
    return result


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON."""
    return json.dumps(jsonable(value), ensure_ascii=False, indent=indent)


def printable(text: str) -> str:
    """Escape control characters, with which a payload could manipulate the terminal."""
    return "".join(
        character
        if character == "\n"
        or (unicodedata.category(character) not in {"Cc", "Cs"} and character not in BIDIRECTIONAL)
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def one_line(text: str) -> str:
    """Return a text as one printable line."""
    return printable(" ".join(text.split()))


def truncate(text: str, limit: int | None) -> str:
    """Shorten a text to a limit, if there is one."""
    return text if limit is None or len(text) <= limit else f"{text[: limit - 1]}…"


def seconds(value: float) -> str:
    """Format a duration: ``12 ms``, ``3.4 s``, ``1 m 15 s``, ``2 h``, ``3 d 4 h``."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < MINUTE:
        return f"{value:.2g} s"
    whole = round(value)
    size, unit, smaller, smaller_unit = next(step for step in STEPS if whole >= step[0])
    rest = whole % size // smaller
    return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")


def relative(instant: datetime | None, now: datetime) -> str:
    """Format an instant relative to now: ``5 s ago``, ``in 2 h``, ``now``."""
    if instant is None:
        return "-"
    elapsed = (now - instant).total_seconds()
    if abs(elapsed) < 1:
        return "now"
    return f"{seconds(elapsed)} ago" if elapsed > 0 else f"in {seconds(-elapsed)}"


def instant(value: datetime | None, now: datetime) -> str:
    """Format an instant in UTC, followed by the time relative to now."""
    if value is None:
        return "-"
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC ({relative(value, now)})"


class Estimate(int):
    """A number that is an estimate."""


def number(value: int, *, estimated: bool = False) -> int:
    """Return the number, marked as an estimate if it is one."""
    return Estimate(value) if estimated else value


def figure(value: int) -> str:
    """Format ``12,345``, and an estimate, rounded to three digits, as ``~12,300``."""
    if not isinstance(value, Estimate):
        return f"{value:,}"
    step = 10 ** max(len(str(abs(value))) - 3, 0)
    return f"~{round(value / step) * step:,}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Format ``1 task``, ``2,000 tasks``."""
    return f"{figure(number)} {noun if number == 1 else plural or f'{noun}s'}"


def size(number: int) -> str:
    """Format ``512 B``, ``1.2 kB``, ``64.0 MB``."""
    power = 0
    while power < len(UNITS) - 1 and number >= KILO ** (power + 1):
        power += 1
    return f"{number / KILO**power:.1f} {UNITS[power]}" if power else f"{number} B"


def listed(items: Sequence[str]) -> str:
    """Format ``a``, ``a and b``, ``a, b and c``."""
    *others, last = items
    return f"{', '.join(others)} and {last}" if others else last
