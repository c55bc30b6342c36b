"""Stop a worker by signals, as a process manager or Ctrl-C sends them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopping_by_signal(stop: Callable[..., None]) -> Iterator[None]:
    """Stop gently on the first Ctrl-C or SIGTERM, immediately on the second.

    Only the main thread may say how signals are handled.
    """
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
