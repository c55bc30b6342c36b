"""End a process in time, whatever its handlers and its server do."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from typing import Self

FLUSH_SEC = 0.5

logger = logging.getLogger("microqueue.worker")


class Watchdog:
    """Ends the process if it takes too long after a stop in the block that this guards.

    Once there was a stop, it goes on after the block until the process is gone: the interpreter
    waits for threads that handlers have started.

    It waits in a thread of its own from the beginning, and is told through a pipe: a signal
    handler may interrupt anything, so it must take no lock and start no thread.
    """

    def __init__(self) -> None:
        self._end_at = float("inf")
        self._left = False
        self._status = 1
        self._flushing, self._flushed = threading.Event(), threading.Event()
        self._reader, self._writer = os.pipe()  # Never closed: a late stop may write to it.

    def __enter__(self) -> Self:
        # Both from the beginning: Python starts no thread once it is shutting down.
        threading.Thread(target=self._watch, name="microqueue-watchdog", daemon=True).start()
        threading.Thread(target=self._flush, name="microqueue-flush", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left = self._end_at == float("inf")
        os.write(self._writer, b"x")

    def succeeded(self) -> None:
        """Say that the work is done: if only the rest takes too long, that is no failure."""
        self._status = 0

    def expect_end(self, seconds: float) -> None:
        """End the process so many seconds from now, unless it ends by itself."""
        self._end_at = min(self._end_at, time.monotonic() + seconds)
        os.write(self._writer, b"x")

    def _watch(self) -> None:
        while not self._left and (rest_sec := self._end_at - time.monotonic()) > 0:
            wait_sec = None if rest_sec == float("inf") else rest_sec
            if select.select([self._reader], [], [], wait_sec)[0]:
                os.read(self._reader, 64)
        self._flushing.set()
        if not self._left:
            self._flushed.wait(FLUSH_SEC)
            os._exit(self._status)

    def _flush(self) -> None:
        """Log and flush in a thread of its own: what does not end may hold the lock of a stream."""
        self._flushing.wait()
        if self._left:
            return
        logger.warning("something keeps this process from ending; it is ended now")
        sys.stdout.flush()
        sys.stderr.flush()
        self._flushed.set()
