"""Enqueue: how fast tasks are added, compared with plain inserts of the same documents."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.database import Database, payloads, prepare
from benchmarks.processes import Start
from microqueue import Queue
from microqueue.core import core_of
from microqueue.new_task import NewTask
from microqueue.operations.enqueue import new_document

CHUNK = 1000  # The queue's default.


def _bare_documents(queue: Queue[Any], count: int) -> list[dict[str, Any]]:
    now = queue.now()
    return [
        new_document(
            NewTask(payload=payload),
            queue=queue.name,
            payload=payload,
            settings=queue.settings,
            now=now,
            position=position,
        )
        for position, payload in enumerate(payloads(count))
    ]


def many(database: Database, start: Start, count: int, rounds: int) -> dict[str, float]:
    """Time ``enqueue_many`` and ``insert_many`` alternately; return tasks per second of each."""
    took = {"queue": 0.0, "bare": 0.0}
    with database.client() as client:
        queue = Queue(client[database.name])
        prepare(queue)
        tasks = core_of(queue).collections.tasks
        start()
        for _ in range(rounds):
            given = payloads(count)
            began = time.perf_counter()
            queue.enqueue_many(given)
            took["queue"] += time.perf_counter() - began
            documents = _bare_documents(queue, count)
            began = time.perf_counter()
            for first in range(0, count, CHUNK):
                tasks.insert_many(documents[first : first + CHUNK], ordered=False)
            took["bare"] += time.perf_counter() - began
    return {name: count * rounds / seconds for name, seconds in took.items()}


def single(database: Database, start: Start, count: int) -> dict[str, float]:
    """Time ``enqueue`` and ``insert_one`` alternately; return calls per second of each."""
    took = {"queue": 0.0, "bare": 0.0}
    with database.client() as client:
        queue = Queue(client[database.name])
        prepare(queue)
        tasks = core_of(queue).collections.tasks
        documents = _bare_documents(queue, count)
        start()
        for payload, document in zip(payloads(count), documents, strict=True):
            began = time.perf_counter()
            queue.enqueue(payload)
            took["queue"] += time.perf_counter() - began
            began = time.perf_counter()
            tasks.insert_one(document)
            took["bare"] += time.perf_counter() - began
    return {name: count / seconds for name, seconds in took.items()}
