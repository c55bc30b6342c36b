"""One clock: the server's, so that workers with skewed clocks agree on every instant."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

RESYNCHRONISE_AFTER_SEC = 60.0
LARGEST_JUMP_SEC = 1.0


def whole_milliseconds(instant: datetime) -> datetime:
    """Cut an instant to the precision that MongoDB stores."""
    return instant.replace(microsecond=instant.microsecond // 1000 * 1000)


def as_utc(instant: datetime) -> datetime:
    """Read an instant from the driver, which gives naive UTC unless told otherwise."""
    return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)


class Clock(Protocol):
    """What a queue asks for the time. Tests give one that they move by hand."""

    @property
    def stale(self) -> bool:
        """Whether the server's time should be read before ``now`` is asked."""

    def observe(self, server_time: datetime, *, sent: float, received: float) -> None:
        """Learn the server's time, read between two readings of the monotonic clock."""

    def forget(self) -> None:
        """Become stale: the server may have changed."""

    def now(self) -> datetime:
        """Give the current instant in UTC, to the millisecond."""


class ServerClock:
    """The server's time, extrapolated by this machine's monotonic clock.

    The wall clock of this machine is never used to tell the time; it only serves to
    notice that the machine slept, during which a monotonic clock may stand still.
    """

    def __init__(self) -> None:
        # One tuple, replaced whole, so that threads never see half of a new reading.
        self._reading: tuple[datetime, float, float] | None = None
        self._forgotten = False

    @property
    def stale(self) -> bool:
        """Whether the server's time was never read, is a minute old, or the machine slept."""
        reading = self._reading
        if reading is None or self._forgotten:
            return True
        _, monotonic, wall = reading
        elapsed = time.monotonic() - monotonic
        slept = abs(time.time() - wall - elapsed) > LARGEST_JUMP_SEC
        return slept or elapsed > RESYNCHRONISE_AFTER_SEC

    def observe(self, server_time: datetime, *, sent: float, received: float) -> None:
        """Take the server to have read its clock half way between the two readings."""
        monotonic = (sent + received) / 2
        wall = time.time() - (time.monotonic() - monotonic)
        self._reading = (as_utc(server_time), monotonic, wall)
        self._forgotten = False

    def forget(self) -> None:
        """Read the server's time again before the next use.

        Until there is a server to ask, the last reading tells better than this machine's clock.
        """
        self._forgotten = True

    def now(self) -> datetime:
        """Give the server's current time; this machine's, before the server was asked."""
        reading = self._reading
        if reading is None:
            return whole_milliseconds(datetime.now(UTC))
        server_time, monotonic, _ = reading
        return whole_milliseconds(server_time + timedelta(seconds=time.monotonic() - monotonic))
