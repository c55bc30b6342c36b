"""Samples of a run: memory of processes, and how many tasks wait, over time.

A sample is a line of ``samples.jsonl``. Processes that are killed again and again say nothing about
leaks. So the processes of the group ``steady`` are no targets of faults of processes: a worker, a
sweeper and a dashboard, whose pages are read all the time.
"""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pymongo.errors import PyMongoError

from tests.chaos.fleet import Fleet, children_of
from tests.chaos.ledger import now
from tests.chaos.profiles import STEADY

SAMPLES = "samples.jsonl"
DEPTH_SAMPLES = 10
"""One of so many samples counts the tasks, because that reads them all."""
PAGES = ("overview", "queues", "tasks?status=failed", "workers")


class Sampler:
    """Samples in a thread until it is stopped.

    Args:
        folder: The folder of the run.
        fleet: The processes.
        depth: Counts the tasks by status.
        every: The seconds between two samples.
        port: Where the dashboard listens.
    """

    def __init__(
        self,
        folder: Path,
        fleet: Fleet,
        depth: Callable[[], dict[str, int]],
        *,
        every: float,
        port: int,
    ) -> None:
        self._port = port
        self._path = folder / SAMPLES
        self._fleet = fleet
        self._depth = depth
        self._every = every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-samples", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, after the sample that is under way."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(30)

    def _run(self) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            number = 0
            while not self._over.wait(self._every):
                counting = number % DEPTH_SAMPLES == 0
                file.write(json.dumps(self._sample(counting=counting)) + "\n")
                file.flush()
                number += 1

    def _sample(self, *, counting: bool) -> dict[str, Any]:
        memory = {}
        for process in self._fleet.living(STEADY):
            pids = [process.pid, *children_of(process.pid)]
            memory[process.who] = sum(map(resident_kb, pids))
        depth: dict[str, int] = {}
        if counting:
            with contextlib.suppress(PyMongoError, AssertionError):
                depth = self._depth()
        return {"at": now(), "memory_kb": memory, "depth": depth, "pages": read_pages(self._port)}


def resident_kb(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    return 0


def read_pages(port: int) -> int:
    """Read the views of the dashboard, as a browser does; return how many were there."""
    read = 0
    for page in PAGES:
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{port}/api/v1/{page}"
            with urllib.request.urlopen(url, timeout=5) as reply:
                reply.read()
                read += 1
    return read
