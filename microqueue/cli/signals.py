"""End a loop cleanly on Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


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


@contextmanager
def stopping_by_signal(stop: Callable[..., None]) -> Iterator[None]:
    """Stop gently on the first Ctrl-C or SIGTERM, immediately on the second."""
    received = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        stop(immediately=received > 1)

    former = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
