"""Sweepers: one process with one of them for each database, or with twenty."""

from __future__ import annotations

import signal
import threading
from typing import Any

from microqueue import Queue, Sweeper
from tests.chaos.handlers import Participant


def run_sweepers(
    me: Participant, databases: list[str], *, count: int = 1, every: float = 0.5
) -> None:
    """Sweep each of the databases with ``count`` sweepers until SIGTERM."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    opened = [
        Queue[Any].from_uri(me.setup.address(name), settings=me.setup.settings(name))
        for name in databases
    ]
    sweepers = [Sweeper(queue) for queue in opened for _ in range(count)]
    threads = [
        threading.Thread(target=sweeper.run_forever, kwargs={"every": every}, daemon=True)
        for sweeper in sweepers
    ]
    for thread in threads:
        thread.start()
    while not stopping.wait(1):
        pass
    for sweeper in sweepers:
        sweeper.stop()
    for thread in threads:
        thread.join(30)
    for queue in opened:
        queue.close()
