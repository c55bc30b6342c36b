"""Memory: whether a worker grows with the number of tasks that it has processed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.database import Database
from benchmarks.processes import Start
from microqueue import Queue
from microqueue.worker import Worker


def resident_mb() -> float:
    """Return the resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def growth(database: Database, start: Start, total: int) -> dict[str, float]:
    """Drain ``total`` tasks; return the memory after a tenth of them and at the end."""
    seen = 0
    marks: dict[str, float] = {}

    def handle(payload: Any) -> None:  # noqa: ARG001 (only counted)
        nonlocal seen
        seen += 1
        if seen == total // 10:
            marks["early"] = resident_mb()
        elif seen == total:
            marks["late"] = resident_mb()

    with database.client() as client:
        worker = Worker(Queue(client[database.name]), handle, concurrency=1)
        start()
        worker.run(burst=True)
    return marks
