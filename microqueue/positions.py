"""Positions: a task's place in the queue, an integer that grows with time; the smallest goes first.

``created_at`` cannot order tasks: it has a precision of a millisecond, in which one call may add
thousands, and a released task may have to go before all others.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any

LONGEST_LEAD = 300 * 1_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def microseconds(instant: datetime) -> int:
    """Return the microseconds from 1970 to an instant."""
    elapsed = instant - _EPOCH
    return (elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds


def front_position(now: datetime) -> int:
    """Return a position before all others; the latest such position goes first."""
    return -microseconds(now)


def original_position(position: Any, created_at: Any) -> Any:
    """Return the position of a task that waits again: the front of the queue is for one turn only.

    Both values are read from a document. A position that is no number counts as the front.
    """
    is_number = isinstance(position, int | float) and not isinstance(position, bool)
    if is_number and position >= 0:
        return position
    return microseconds(created_at) if isinstance(created_at, datetime) else 0


class Positions:
    """Allocates positions: by the time, and strictly increasing within one producer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0

    def take(self, now: datetime, count: int = 1) -> int:
        """Reserve ``count`` consecutive positions, and return the first."""
        with self._lock:
            current = microseconds(now)
            # A clock that was set back by more than some minutes must not leave this
            # producer at the end of the queue for good.
            first = self._next if current <= self._next <= current + LONGEST_LEAD else current
            self._next = first + count
            return first
