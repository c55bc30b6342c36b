"""What the queue is measured against: a naive loop, and the fastest that bare pymongo can be.

Both move the same documents, with the same durability, and neither keeps any promise of a
queue: no leases, no history, no retries, no order beyond the index.
"""

from __future__ import annotations

import queue as queues
import random
import secrets
import threading
from typing import Any

from pymongo import ASCENDING, MongoClient, WriteConcern
from pymongo.collection import Collection

from benchmarks.place import BATCH, Place
from benchmarks.processes import Start

READY = {"queue": "default", "status": "pending"}
LEANEST = [("queue", ASCENDING), ("position", ASCENDING)]
WINDOWS = 4


def bare_collection(client: MongoClient[Any], place: Place) -> Collection[Any]:
    """Give the tasks as bare pymongo sees them, with the leanest index that finds the next."""
    tasks = client[place.database].get_collection(
        "bare", write_concern=WriteConcern("majority", j=None)
    )
    tasks.create_index(LEANEST, partialFilterExpression={"status": "pending"})
    return tasks


def copy_to_bare(place: Place) -> None:
    """Copy the queue's documents, so that both sides move the same ones."""
    with place.client() as client:
        bare = bare_collection(client, place)
        batch: list[dict[str, Any]] = []
        for document in client[place.database]["tasks"].find():
            batch.append(document)
            if len(batch) == 10 * BATCH:
                bare.insert_many(batch, ordered=False)
                batch = []
        if batch:
            bare.insert_many(batch, ordered=False)


def naive_loop(place: Place, start: Start, limit: int) -> int:
    """Take one task, mark it done, take the next."""
    moved = 0
    with place.client() as client:
        tasks = bare_collection(client, place)
        start()
        while moved < limit:
            document = tasks.find_one_and_update(
                READY, {"$set": {"status": "processing"}}, sort=[("position", ASCENDING)]
            )
            if document is None:
                break
            tasks.update_one({"_id": document["_id"]}, {"$set": {"status": "done"}})
            moved += 1
    return moved


def ceiling(place: Place, start: Start) -> int:
    """Claim in batches, and finish in batches from a thread of its own."""
    claimed: queues.Queue[tuple[list[Any], str] | None] = queues.Queue(maxsize=4)
    moved = 0

    def finish() -> None:
        while (batch := claimed.get()) is not None:
            ids, token = batch
            tasks.update_many(
                {"_id": {"$in": ids}, "token": token}, {"$set": {"status": "done", "token": None}}
            )

    with place.client() as client:
        tasks = bare_collection(client, place)
        finisher = threading.Thread(target=finish)
        start()
        finisher.start()
        while True:
            skip = BATCH * random.randrange(WINDOWS)  # So that the two do not meet.
            window = list(tasks.find(READY, sort=LEANEST, skip=skip, limit=BATCH, batch_size=BATCH))
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
                moved += len(ids)
                claimed.put((ids, token))
        claimed.put(None)
        finisher.join()
    return moved
