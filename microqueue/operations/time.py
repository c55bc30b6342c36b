"""Read the server's time."""

from __future__ import annotations

import time
from datetime import datetime

from microqueue.clock import Clock
from microqueue.operations.call import Call, Operation, Target


def read_clock(clock: Clock) -> Operation[datetime]:
    """Give the current instant, asking the server first if the clock is stale."""
    if clock.stale:
        sent = time.monotonic()
        reply = yield Call("command", "hello", target=Target.DATABASE)
        clock.observe(reply["localTime"], sent=sent, received=time.monotonic())
    return clock.now()
