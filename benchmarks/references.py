"""The baselines: a naive loop, and the fastest drain that plain pymongo can do.

Both process the same documents with the same durability, but without the guarantees of a queue:
no leases, no history, no retries, no order except that of the index.
"""

from __future__ import annotations

import queue as queues
import random
import secrets
import threading
from typing import Any

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
    """Claim batches, and mark them done in another thread."""
    claimed: queues.Queue[tuple[list[Any], str] | None] = queues.Queue(maxsize=4)
    done = 0

    def finish() -> None:
        while (batch := claimed.get()) is not None:
            ids, token = batch
            tasks.update_many(
                {"_id": {"$in": ids}, "token": token}, {"$set": {"status": "done", "token": None}}
            )

    with database.client() as client:
        tasks = bare_collection(client, database)
        finisher = threading.Thread(target=finish)
        start()
        finisher.start()
        while True:
            skip = BATCH * random.randrange(WINDOWS)  # Avoid collisions of the processes.
            window = list(tasks.find(READY, sort=INDEX, skip=skip, limit=BATCH, batch_size=BATCH))
            if not window and skip == 0:
                break
            if not window:
                continue
            token = secrets.token_hex(12)
            ids = [document["_id"] for document in window]
            result = tasks.update_many(
                {"_id": {"$in": ids}, **READY}, {"$set": {"status": "processing", "token": token}}
            )
            if result.modified_count != len(ids):
                ids = [one["_id"] for one in tasks.find({"_id": {"$in": ids}, "token": token})]
            if ids:
                done += len(ids)
                claimed.put((ids, token))
        claimed.put(None)
        finisher.join()
    return done
