"""What workers note while they are measured: a file that all their processes have mapped.

A note is two stores into memory, so a handler that notes its start still does next to nothing.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

MAX_PROCESSES = 8
POLL_SEC = 0.0005
WORD = 8
GO, READY, SETTLED, ACKNOWLEDGED = 0, 1, 1 + MAX_PROCESSES, 1 + 2 * MAX_PROCESSES
"""Where the fields begin, in words: whether to begin, then one word per process and field."""
STARTED = 1 + 3 * MAX_PROCESSES
"""Where the words of the tasks begin; behind them, each task has a byte."""


class Notes:
    """The notes on some numbered tasks.

    Args:
        path: The file.
        process: The number of the worker process that writes; 0 for readers.
    """

    def __init__(self, path: Path, process: int = 0) -> None:
        self.path = path
        self.process = process
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        tasks = (len(self._map) - STARTED * WORD) // (WORD + 1)
        self.tasks = tasks
        whole = memoryview(self._map)
        head, times = STARTED * WORD, (STARTED + tasks) * WORD
        self._head = whole[:head].cast("q")
        self._times = whole[:head].cast("d")
        self._started = whole[head:times].cast("d")
        self._runs = whole[times : times + tasks]
        self._views: list[memoryview[Any]] = [
            self._head,
            self._times,
            self._started,
            self._runs,
            whole,
        ]

    @classmethod
    @contextmanager
    def on(cls, tasks: int) -> Iterator[Self]:
        """Yield empty notes, and delete them."""
        with tempfile.TemporaryDirectory(prefix="microqueue-notes-") as directory:
            path = Path(directory, "notes")
            path.write_bytes(bytes(STARTED * WORD + tasks * (WORD + 1)))
            notes = cls(path)
            try:
                yield notes
            finally:
                notes.close()

    def close(self) -> None:
        """Unmap the file."""
        for view in self._views:
            view.release()
        self._map.close()

    # By workers

    def start(self, number: int) -> None:
        """Note that a task starts."""
        self._started[number] = time.monotonic()  # All processes of a machine share this clock.
        self._runs[number] += 1

    def acknowledge(self) -> None:
        """Note that the server has just acknowledged an update of tasks."""
        self._times[ACKNOWLEDGED + self.process] = time.monotonic()

    def settle(self, count: int) -> None:
        """Note that so many more tasks are done, which the server has acknowledged."""
        self._head[SETTLED + self.process] += count

    def await_go(self) -> None:
        """Note that this process is prepared, and wait until all may begin."""
        self._head[READY + self.process] = 1
        while not self._head[GO]:
            time.sleep(POLL_SEC)

    # By readers

    def ready(self) -> int:
        """Return how many processes are prepared."""
        return sum(self._head[READY:SETTLED])

    def go(self) -> None:
        """Let all processes begin."""
        self._head[GO] = 1

    def started(self) -> int:
        """Return how many tasks have started."""
        return self.tasks - bytes(self._runs).count(0)

    def settled(self) -> int:
        """Return how many tasks are done, as acknowledged by the server."""
        return sum(self._head[SETTLED:ACKNOWLEDGED])

    def started_at(self, number: int) -> float | None:
        """Return when a task started; None if it has not."""
        return self._started[number] or None

    def span_sec(self) -> float:
        """Return the time from the first start to the last start or acknowledgement.

        Raises:
            RuntimeError: A task has not run, or ran twice.
        """
        if bytes(self._runs) != b"\1" * self.tasks:
            raise RuntimeError("a task is missing or ran twice")
        ended = max(*self._times[ACKNOWLEDGED:STARTED], *self._started)
        return ended - min(self._started)
