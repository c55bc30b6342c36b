"""Stats: the time and the examined keys of stats of a large collection."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from benchmarks.database import Database, payloads, prepare
from microqueue import Queue, QueueSettings
from microqueue.core import core_of
from microqueue.insights import Insights
from microqueue.new_task import NewTask
from microqueue.operations.enqueue import new_document

CHUNK = 10_000
QUEUES = ("default", "default", "default", "mail")
ROUNDS = 5


@dataclass(frozen=True)
class Cost:
    """The cost of one read."""

    milliseconds: float
    keys: int


def fill(queue: Queue[Any], total: int) -> None:
    """Insert tasks of two queues. Of twenty, 11 are done, 6 ready, 2 delayed and 1 failed."""
    prepare(queue)
    now = queue.now()
    settings = QueueSettings()
    new: NewTask[Any] = NewTask.model_construct(payload={}, priority=0)
    for start in range(0, total, CHUNK):
        documents = []
        for n, payload in enumerate(payloads(min(CHUNK, total - start)), start):
            document = new_document(
                new,
                queue=QUEUES[n % len(QUEUES)],
                payload=payload,
                settings=settings,
                now=now - timedelta(hours=3) + timedelta(milliseconds=n),
                position=n,
            )
            # Tasks finish about in their order, over two hours.
            at = now - timedelta(seconds=7200 * (1 - n / total))
            documents.append(document | _state(n // len(QUEUES) % 20, at))
        core_of(queue).collections.tasks.insert_many(documents, ordered=False)
    core_of(queue).collections.client.admin.command("fsync")  # Finish the writes of the filling.


def _state(number: int, at: datetime) -> dict[str, Any]:
    if number < 11:  # noqa: PLR2004 (eleven of twenty)
        ended = {"finished_at": at, "deadline_at": at, "updated_at": at}
        return {"status": "done", "started_at": at, **ended}
    if number < 13:  # noqa: PLR2004 (two of twenty)
        due = at + timedelta(days=1)
        return {"next_retry_at": due, "deadline_at": due, "attempts": 1}
    if number < 14:  # noqa: PLR2004 (one of twenty)
        error = {"message": "no", "code": "no", "at": at}
        return {"status": "failed", "finished_at": at, "updated_at": at, "error": error}
    return {}


READS: dict[str, Callable[[Queue[Any]], Any]] = {
    "queue.stats()": lambda queue: queue.stats(),
    "queue.dead_letters.stats()": lambda queue: queue.dead_letters.stats(),
    "Insights(queue).stats()": lambda queue: Insights(queue).stats(),
    "Insights(queue).overview()": lambda queue: Insights(queue).overview(),
    "queue.stats(exact=True)": lambda queue: queue.stats(exact=True),
}


def costs(database: Database, total: int) -> dict[str, Cost]:
    """Fill a collection, and measure each read: the median time, and the examined keys."""
    with database.client() as client:
        queue: Queue[Any] = Queue(client[database.name])
        fill(queue, total)
        return {name: _cost(queue, read) for name, read in READS.items()}


def _cost(queue: Queue[Any], read: Callable[[Queue[Any]], Any]) -> Cost:
    database = core_of(queue).collections.database
    times = []
    read(queue)
    for _ in range(ROUNDS):
        started = time.perf_counter()
        read(queue)
        times.append(time.perf_counter() - started)
    database.command("profile", 2)
    try:
        read(queue)
    finally:
        database.command("profile", 0)
    keys = sum(
        entry.get("keysExamined", 0)
        for entry in database["system.profile"].find({"ns": f"{database.name}.tasks"})
    )
    database.drop_collection("system.profile")
    return Cost(statistics.median(times) * 1000, keys)
