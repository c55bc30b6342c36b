"""A thread that looks at what a worker holds, whenever something is due."""

from __future__ import annotations

import threading
from math import inf

from microqueue.worker.inflight import now_sec


class Watcher:
    """Looks, and sleeps until something is due; for good, if nothing is."""

    def __init__(self, name: str) -> None:
        self._next_look = inf
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def expect(self, due: float) -> None:
        """Be awake by then: something was taken in that needs attention at that time."""
        if due < self._next_look:
            self._wake.set()

    def stop(self) -> None:
        """End, after the look that is under way."""
        self._stopping = True
        self._wake.set()

    def join(self) -> None:
        """Wait for the end."""
        if self._thread.ident is not None:  # It may not have been started.
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._next_look = inf  # What comes in from here on is looked at once more.
            self._wake.clear()
            self._next_look = due = self._look()
            self._wake.wait(None if due == inf else max(due - now_sec(), 0.0))

    def _look(self) -> float:
        """Do what is due; give when something is due again."""
        raise NotImplementedError
