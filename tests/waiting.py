"""Wait for what comes about in another thread, process or server."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from microqueue import Queue, Sweeper
from microqueue.core import core_of

INSTANTS = ("lease_expires_at", "next_retry_at", "expires_at", "deadline_at")
LEASE_SEC = 6.0
"""A lease that a slow machine renews in time, and that a test can outwait."""
SLACK = timedelta(seconds=0.2)
"""How far the clock of another process may be behind: it is a lower bound of the server's time."""


def wait_for(
    condition: Callable[[], Any],
    limit_sec: float = 40,
    *,
    what: str = "it",
    ignoring: tuple[type[Exception], ...] = (),
) -> Any:
    """Wait until something is true, and give it; fail if that takes too long."""
    deadline = time.monotonic() + limit_sec
    while True:
        with suppress(*ignoring):
            if result := condition():
                return result
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(0.02)


def wait_for_renewals(queue: Queue[Any], task_id: Any, times: int = 2) -> None:
    """Wait until the lease of a task was renewed so often, and check that it never ended before.

    A lease must be long enough for a slow machine to renew it: it is due after a third.
    """
    sweeper = Sweeper(queue)
    ends: set[Any] = set()

    def renewed() -> bool:
        assert sweeper.reclaim_stuck() == 0
        task = queue.get(task_id)
        assert task is not None
        assert task.lease is not None
        ends.add(task.lease.expires_at)
        time.sleep(0.1)  # Renewals are seconds apart.
        return len(ends) > times

    wait_for(renewed, what="renewals")


def lasts(period: timedelta, seconds: float) -> bool:
    """Return whether a delay that was stored has its length: no less, and hardly more.

    It ends by the latest that the server's time can be, which the client does not know exactly.
    """
    return timedelta(0) <= period - timedelta(seconds=seconds) < timedelta(seconds=30)


def wait_until_over(queue: Queue[Any]) -> None:
    """Wait until all leases, delays and expiries stored so far are over, by every clock."""
    stored = core_of(queue).collections.tasks.find({}, dict.fromkeys(INSTANTS, 1))
    ends = [one[name] for one in stored for name in INSTANTS if one.get(name) is not None]
    wait_for(lambda: queue.now() > max(ends) + SLACK, what="the end of leases and delays")
