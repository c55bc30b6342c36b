"""Read the server's time."""

from __future__ import annotations

from datetime import datetime

from pymongo.errors import PyMongoError

from microqueue.clock import Clock
from microqueue.operations.call import Call, Operation, Target, Timed

SLOW_SEC = 0.05
TRIES = 4


def read_clock(clock: Clock) -> Operation[datetime]:
    """Return the current instant, asking the server first if the clock is stale.

    The longer a reply took, the less is known about when the server read its clock. So a slow
    reply is discarded and the server is asked again; if all are slow, the fastest one counts.
    """
    if clock.stale:
        best: Timed | None = None
        for _ in range(TRIES):
            try:
                timed: Timed = yield Call("command", "hello", target=Target.DATABASE, timed=True)
            except PyMongoError:
                if best is None:
                    raise
                break
            if best is None or timed.took_sec < best.took_sec:
                best = timed
            if best.took_sec <= SLOW_SEC:
                break
        if best is not None:
            clock.observe(best.reply["localTime"], sent=best.sent, received=best.received)
    return clock.now()
