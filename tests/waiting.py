"""Wait for what comes about in another thread, process or server."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any


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


def lasts(period: timedelta, seconds: float) -> bool:
    """Tell whether a delay that was stored has its length: no less, and hardly more.

    It ends by the latest that the server's time can be, which the client does not know exactly.
    """
    return timedelta(0) <= period - timedelta(seconds=seconds) < timedelta(seconds=30)
