"""Log errors that may repeat for ever without filling the log."""

from __future__ import annotations

import logging
import time
import traceback
from typing import Any

QUIET_SEC = 60.0
"""How long an error that repeats is not logged again."""


class RepeatedErrors:
    """Logs the errors of a loop: a traceback for each that is new, then one line a minute.

    An error is new if none of its type was raised by the same line of code.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._seen: set[tuple[type[BaseException], str, int]] = set()
        self._next_at = 0.0

    def log(self, error: BaseException, text: str, *values: Any, extra: dict[str, Any]) -> None:
        """Log an error, unless it was logged a moment ago."""
        frames = list(traceback.walk_tb(error.__traceback__))
        file, line = (frames[-1][0].f_code.co_filename, frames[-1][1]) if frames else ("", 0)
        name = (type(error), file, line)
        is_new, now = name not in self._seen, time.monotonic()
        if is_new or now >= self._next_at:
            self._seen.add(name)
            self._next_at = now + QUIET_SEC
            exc_info = error if is_new else None
            self._logger.error(f"{text}: %r", *values, error, extra=extra, exc_info=exc_info)
