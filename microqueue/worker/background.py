"""Threads that hold up nobody, and whose errors are not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background(threading.Thread):
    """A daemon that does one thing, and has the error with which it ended, if there was one.

    For what asks a server that may never answer: whoever waits for it may give up.
    """

    def __init__(self, work: Callable[[], object], *, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do it."""
        try:
            self._work()
        except BaseException as exc:  # noqa: BLE001 (whoever waits for it decides)
            self.error = exc
