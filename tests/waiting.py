"""Wait for what comes about in another thread, process or server."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
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
