"""The last line of a process: it ends as it should, and these threads live on in it.

It imports nothing from microqueue: a process of the command line writes it, too.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import Any

from tests.chaos.ledger import Ledger, now

THREADS_SEC = 12.0
LOOK_SEC = 0.1
MAY_STAY = ("chaos-clock", "microqueue-watchdog", "microqueue-flush", "microqueue-lifeline")
"""The harness has the first one, and the command line the others: they end with the process."""
_registered: list[Ledger] = []
_tolerated: set[threading.Thread] = set()


def tolerate_threads() -> None:
    """Let the threads that run now stay: those of Spark end with the process."""
    _tolerated.update(threading.enumerate())


def leave(ledger: Ledger) -> None:
    """Write the last line."""
    ledger.write("left", threads=threads_left())


def leave_at_exit(ledger: Ledger) -> None:
    """Write the last line when the interpreter exits, or that it does not come to that.

    The first call counts: what is registered later, such as the end of a broker, comes before it.
    """
    if _registered:
        return
    _registered.append(ledger)
    pid, leaving = os.getpid(), os._exit

    def observed(status: int) -> Any:
        if os.getpid() == pid:  # Not in a child that a handler has forked.
            ledger.write("exited", status=status)
        leaving(status)

    os._exit = observed
    atexit.register(leave, ledger)


def threads_left() -> list[str]:
    """Return the threads that live on; those of a closed client need a moment to end."""
    ends = now() + THREADS_SEC
    while (left := _others()) and now() < ends:
        time.sleep(LOOK_SEC)
    return left


def _others() -> list[str]:
    # Motor has one executor for the whole process.
    motor = getattr(sys.modules.get("motor.frameworks.asyncio"), "_EXECUTOR", None)
    known = {threading.main_thread(), *getattr(motor, "_threads", ()), *_tolerated}
    return [
        one.name
        for one in threading.enumerate()
        if one not in known and not one.name.startswith(MAY_STAY)
    ]
