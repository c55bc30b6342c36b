"""End a loop cleanly on Ctrl-C or SIGTERM."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from microqueue.worker.shutdown import stopping_by_signal


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Give an event that the first Ctrl-C or SIGTERM sets; the second one interrupts."""
    stop = threading.Event()

    def handle(*, immediately: bool) -> None:
        if immediately or stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with stopping_by_signal(handle):
        yield stop
