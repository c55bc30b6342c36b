"""A wall clock that is wrong: an hour off from the start, or jumping while the process runs.

The clock of the machine is shared, so the functions that read it are replaced in one process. The
monotonic clock stays, as a wrong wall clock does not change it. A thread reads the offset from a
file, which the injector writes. It also writes a line at each turn: if they are missing for a
while, the machine did not let the process run, or it was suspended.
"""

from __future__ import annotations

import threading
import time
import types
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from random import Random

from microqueue import clock
from tests.chaos.ledger import Ledger

FOLDER = "clocks"
LOOK_SEC = 0.25
HOUR_SEC = 3600.0
WRONG_SHARE = 0.25
"""How many of the processes start with a wrong clock."""
RIGHT_ROLES = {"celery-worker", "celery-sender", "archiver", "supervisor", "dashboard"}
"""Which do not: Celery and Spark compare their clocks with those of others, and a supervisor and a
dashboard become a command, which reads the right clock."""

_offset_sec = 0.0


def clock_file(folder: Path | str, who: str) -> Path:
    """Return the file with the offset of a process, in seconds."""
    return Path(folder) / FOLDER / who


class _WrongDatetime:
    """Stands for ``datetime`` where only the current time is asked for."""

    @staticmethod
    def now(zone: tzinfo | None = None) -> datetime:
        return datetime.now(zone) + timedelta(seconds=_offset_sec)


def first_offset(seed: int, who: str, role: str) -> float:
    """Return by how many seconds the clock of a process is wrong when it starts."""
    rng = Random(f"{seed}/clock/{who}")
    if role in RIGHT_ROLES or rng.random() >= WRONG_SHARE:
        return 0.0
    return rng.choice((HOUR_SEC, -HOUR_SEC))


def distort(offset_sec: float) -> None:
    """Let this process read its wall clock with an offset, which may change later."""
    global _offset_sec  # noqa: PLW0603 (there is one wall clock)
    _offset_sec = offset_sec
    right, right_ns = time.time, time.time_ns
    time.time = lambda: right() + _offset_sec
    time.time_ns = lambda: right_ns() + int(_offset_sec * 1e9)
    read = clock.ServerClock.now
    names = {**vars(clock), "datetime": _WrongDatetime}
    distorted = types.FunctionType(read.__code__, names, read.__name__, None, read.__closure__)
    clock.ServerClock.now = distorted  # type: ignore[method-assign]  # The same code.


def watch(folder: str, ledger: Ledger) -> None:
    """Follow the file of this process in a thread, and show that it runs."""
    path = clock_file(folder, ledger.who.replace("/", "."))

    def follow() -> None:
        global _offset_sec  # noqa: PLW0603 (there is one wall clock)
        while True:
            ledger.write("beat")
            time.sleep(LOOK_SEC)
            if path.exists():
                _offset_sec = float(path.read_text(encoding="ascii") or 0)

    threading.Thread(target=follow, name="chaos-clock", daemon=True).start()
