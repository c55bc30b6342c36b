"""Memory: what a worker takes after many tasks, beside what it took after a tenth of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.place import Place
from benchmarks.processes import Start
from microqueue import Queue
from microqueue.worker import Worker


def resident_mb() -> float:
    """Read how much memory this process has now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def growth(place: Place, start: Start, total: int) -> dict[str, float]:
    """Drain ``total`` tasks with one worker; give the memory after a tenth, and at the end."""
    seen = 0
    marks: dict[str, float] = {}

    def handle(payload: Any) -> None:  # noqa: ARG001 (nothing is done with it)
        nonlocal seen
        seen += 1
        if seen == total // 10:
            marks["early"] = resident_mb()
        elif seen == total:
            marks["late"] = resident_mb()

    with place.client() as client:
        worker = Worker(Queue(client[place.database]), handle, concurrency=1)
        start()
        worker.run(burst=True)
    return marks
