"""One clock: the server's, so that workers with skewed clocks agree on every instant.

Nothing may be early, so the clock returns bounds. ``now`` is never ahead of the server: what is
due by it is due. A future instant that is stored, the end of a delay or of a lease, counts from
the latest possible server time: :func:`later`.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Protocol

RESYNCHRONISE_AFTER_SEC = 60.0
LARGEST_JUMP_SEC = 1.0
DRIFT = 1e-4
"""How much faster or slower this machine's clock may run than the server's: 0.1 ms a second."""
TICK = timedelta(milliseconds=1)
"""The precision of the server's reply, and of what MongoDB stores."""
CERTAIN = timedelta(0)
LARGEST_SKEW = timedelta(seconds=1)
"""How far the clocks of two processes may differ, where instants that they wrote are compared."""


def whole_milliseconds(instant: datetime) -> datetime:
    """Return an instant cut to the precision that MongoDB stores."""
    return instant.replace(microsecond=instant.microsecond // 1000 * 1000)


def round_up(instant: datetime) -> datetime:
    """Return an instant rounded up to the precision of MongoDB: a delayed task is never early."""
    exact = instant.astimezone(UTC)  # Python compares some instants of two zones wrongly.
    cut = whole_milliseconds(exact)
    return cut if cut == exact else cut + TICK


def as_utc(instant: datetime) -> datetime:
    """Return an instant of the driver in UTC; a naive one is in UTC already."""
    return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)


def add_zones(value: Any) -> None:
    """Add UTC to the dates of a document or list without one, at any depth, in place.

    A driver that returns naive dates and this function together take half the time of a driver
    that returns dates in UTC. Safe to repeat.
    """
    items = value.items() if type(value) is dict else enumerate(value)
    for place, item in items:
        kind = type(item)
        if kind is datetime and item.tzinfo is None:
            value[place] = item.replace(tzinfo=UTC)
        elif (kind is dict or kind is list) and item:
            add_zones(item)


class Instant(datetime):
    """The current instant: never ahead of the server's, and behind by at most ``uncertain``.

    What is computed from it is a plain instant, without uncertainty.
    """

    uncertain: timedelta = CERTAIN

    @classmethod
    def between(cls, earliest: datetime, latest: datetime) -> Instant:
        """Return the earliest instant, in milliseconds, with the distance to the latest."""
        cut = whole_milliseconds(earliest)
        instant = cls.combine(cut.date(), cut.timetz())
        instant.uncertain = latest - cut
        return instant

    @property
    def plain(self) -> datetime:
        """The same instant without its uncertainty."""
        return datetime.combine(self.date(), self.timetz())

    def __repr__(self) -> str:
        return repr(self.plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


def later(now: datetime, duration: timedelta) -> datetime:
    """Return the first instant that is certainly a duration later than ``now``, to store it.

    By the server's clock the duration is over then, whichever process compares. Pass ``now`` as
    the clock returned it: an instant computed from it has lost its uncertainty.
    """
    if isinstance(now, Instant):
        return round_up(now.plain + (duration + now.uncertain))
    return round_up(now + duration)


class Clock(Protocol):
    """What a queue asks for the time. Tests use one that they advance themselves."""

    @property
    def stale(self) -> bool:
        """Whether the server's time must be read before ``now``."""

    def observe(self, server_time: datetime, *, sent: float, received: float) -> None:
        """Take the server's time, read between two readings of the monotonic clock."""

    def forget(self) -> None:
        """Become stale: the server may have changed."""

    def now(self) -> datetime:
        """Return the current instant in UTC, in milliseconds: an :class:`Instant`, or exact."""


class Reading(NamedTuple):
    """The server's time, and what the clocks of this machine showed then."""

    server_time: datetime
    received: float
    error: timedelta
    """How long the reply may have taken, plus the server's precision."""
    wall: float


class ServerClock:
    """The server's time, extrapolated by this machine's monotonic clock.

    The server read its clock before its reply arrived. So when the reply arrives, the server's
    time is that of the reply or later, by no more than the call took. The wall clock of this
    machine is never used for the time. It only shows that the machine slept, during which a
    monotonic clock may stand still.
    """

    def __init__(self) -> None:
        # One tuple, replaced whole, so that threads never see half of a new reading.
        self._reading: Reading | None = None
        self._forgotten = False

    @property
    def stale(self) -> bool:
        """Whether the server's time was never read, is a minute old, or the machine slept."""
        reading = self._reading
        if reading is None or self._forgotten:
            return True
        elapsed = time.monotonic() - reading.received
        slept = abs(time.time() - reading.wall - elapsed) > LARGEST_JUMP_SEC
        return slept or elapsed > RESYNCHRONISE_AFTER_SEC

    def observe(self, server_time: datetime, *, sent: float, received: float) -> None:
        """Assume that the server read its clock at any time between the two readings."""
        wall = time.time() - (time.monotonic() - received)
        error = timedelta(seconds=received - sent) + TICK
        self._reading = Reading(as_utc(server_time), received, error, wall)
        self._forgotten = False

    def forget(self) -> None:
        """Become stale, so that the server's time is read before the next use.

        Until a server answers, the last reading is better than this machine's clock.
        """
        self._forgotten = True

    def now(self) -> datetime:
        """Return the earliest possible server time; this machine's time before any reading."""
        reading = self._reading
        if reading is None:
            return whole_milliseconds(datetime.now(UTC))
        elapsed = time.monotonic() - reading.received
        earliest = reading.server_time + timedelta(seconds=elapsed * (1 - DRIFT))
        drifted = timedelta(seconds=elapsed * 2 * DRIFT)
        return Instant.between(earliest, earliest + reading.error + drifted)
