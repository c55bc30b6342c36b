"""Tell hooks of what happened to tasks, in a thread that nobody waits for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue

from microqueue.worker.background import Background

logger = logging.getLogger("microqueue.worker")


class Teller:
    """Does one thing after the other that may take long, because it calls code of users.

    The threads of leases and deadlines leave that to it: a slow hook must not hold them up.
    """

    def __init__(self) -> None:
        self._things: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = Background(self._run, name="microqueue-hooks")

    def put(self, thing: Callable[[], None]) -> None:
        """Do this, after what was put before."""
        self._things.put(thing)

    def close(self) -> None:
        """Say that nothing more will come."""
        self._things.put(None)

    def _run(self) -> None:
        while (thing := self._things.get()) is not None:
            try:
                thing()
            except BaseException:
                logger.exception("what happened to a task could not be told")
