"""The baselines: a naive loop, and the fastest drain that plain pymongo can do.

Both process the same documents with the same durability, but without the guarantees of a queue:
no leases, no history, no retries, no order except that of the index.
"""

from __future__ import annotations

import queue as queues
import random
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from pymongo import ASCENDING, MongoClient, WriteConcern
from pymongo.collection import Collection

from benchmarks.database import BATCH, Database
from benchmarks.processes import Start

READY = {"queue": "default", "status": "pending"}
INDEX = [("queue", ASCENDING), ("position", ASCENDING)]
WINDOWS = 4


def bare_collection(client: MongoClient[Any], database: Database) -> Collection[Any]:
    """Return a plain collection with only the index that finds the next task."""
    tasks = client[database.name].get_collection(
        "bare", write_concern=WriteConcern("majority", j=None)
    )
    tasks.create_index(INDEX, partialFilterExpression={"status": "pending"})
    return tasks


def copy_to_bare(database: Database) -> None:
    """Copy the queue's documents, so that both sides process the same ones."""
    with database.client() as client:
        bare = bare_collection(client, database)
        batch: list[dict[str, Any]] = []
        for document in client[database.name]["tasks"].find():
            batch.append(document)
            if len(batch) == 10 * BATCH:
                bare.insert_many(batch, ordered=False)
                batch = []
        if batch:
            bare.insert_many(batch, ordered=False)


def naive_loop(database: Database, start: Start, limit: int) -> int:
    """Claim one task, mark it done, and repeat."""
    done = 0
    with database.client() as client:
        tasks = bare_collection(client, database)
        start()
        while done < limit:
            document = tasks.find_one_and_update(
                READY, {"$set": {"status": "processing"}}, sort=[("position", ASCENDING)]
            )
            if document is None:
                break
            tasks.update_one({"_id": document["_id"]}, {"$set": {"status": "done"}})
            done += 1
    return done


def ceiling(database: Database, start: Start) -> int:
    """Drain with :class:`Ceiling`; return how many tasks there were."""
    with database.client() as client, Ceiling(bare_collection(client, database)) as bare:
        start()
        while True:
            claimed = bare.claim()
            if claimed is None:
                break
            bare.finish(claimed)
    return bare.done


@dataclass(frozen=True)
class Batch:
    """Tasks that were claimed together."""

    documents: list[dict[str, Any]]
    token: str


class Ceiling:
    """Claims batches, and marks them done in another thread.

    Args:
        tasks: The collection.
        on_finished: Is told how many tasks an acknowledged write has marked done.
    """

    def __init__(
        self, tasks: Collection[Any], on_finished: Callable[[int], object] = lambda _count: None
    ) -> None:
        self.done = 0
        self._tasks = tasks
        self._on_finished = on_finished
        self._claimed: queues.Queue[Batch | None] = queues.Queue(maxsize=4)
        self._finisher = threading.Thread(target=self._finish_all)

    def __enter__(self) -> Self:
        self._finisher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._claimed.put(None)
        self._finisher.join()

    def claim(self) -> Batch | None:
        """Claim a batch, which is empty if another process claimed it; None if nothing is left."""
        while True:
            skip = BATCH * random.randrange(WINDOWS)  # Avoid collisions of the processes.
            window = list(
                self._tasks.find(READY, sort=INDEX, skip=skip, limit=BATCH, batch_size=BATCH)
            )
            if window:
                break
            if skip == 0:
                return None
        token = secrets.token_hex(12)
        ids = [document["_id"] for document in window]
        result = self._tasks.update_many(
            {"_id": {"$in": ids}, **READY}, {"$set": {"status": "processing", "token": token}}
        )
        if result.modified_count != len(ids):
            mine = self._tasks.find({"_id": {"$in": ids}, "token": token})
            held = {document["_id"] for document in mine}
            window = [document for document in window if document["_id"] in held]
        return Batch(window, token)

    def finish(self, batch: Batch) -> None:
        """Mark a batch done, later."""
        if batch.documents:
            self.done += len(batch.documents)
            self._claimed.put(batch)

    def _finish_all(self) -> None:
        while (batch := self._claimed.get()) is not None:
            ids = [document["_id"] for document in batch.documents]
            self._tasks.update_many(
                {"_id": {"$in": ids}, "token": batch.token},
                {"$set": {"status": "done", "token": None}},
            )
            self._on_finished(len(ids))
