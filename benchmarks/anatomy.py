"""Anatomy: what a drained task costs the server, from the leanest queue to this one.

Several collections are drained a batch at a time, in turns and in random order, so that each
sees the same machine. The writes wait for no disk here, which leaves the server's own work.
"""

from __future__ import annotations

import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from pymongo import WriteConcern
from pymongo.collection import Collection

from benchmarks.place import BATCH, Place, fill, fresh_place
from microqueue.operations import filters
from microqueue.operations.claim import claim_update
from microqueue.operations.settle import done, settlement_update
from microqueue.task import Claimed, Lease

WARM_UP = 3  # Batches of each, which do not count.
READY = {"queue": "default", **filters.READY}
Update = Callable[[Lease], dict[str, Any]]


def _lean_claim(lease: Lease) -> dict[str, Any]:
    return {"$set": {"status": filters.PROCESSING, "lease_token": lease.token}}


def _lean_done(_lease: Lease) -> dict[str, Any]:
    return {"$set": {"status": filters.DONE, "lease_token": None}}


def _full_done(lease: Lease) -> dict[str, Any]:
    claimed = Claimed({"_id": None, "attempts": 1}, lease, None)
    return settlement_update(
        claimed, done(lease.started_at), now=lease.started_at, history_limit=50
    )


@dataclass
class Build:
    """A way to build a queue: which indexes it has, and what its updates write."""

    name: str
    keeps: set[str] | None
    claim: Update
    done: Update
    seconds: list[float] = field(default_factory=list)

    def drain_batch(self, tasks: Collection[Any]) -> None:
        """Read a batch, claim it, finish it, and note how long that took."""
        now = datetime.now(UTC)
        lease = Lease.trusted(
            token=secrets.token_hex(12),
            worker_id="host:4711:a1b2c3",
            started_at=now,
            expires_at=now + timedelta(minutes=10),
        )
        began = time.perf_counter()
        window = tasks.find(READY, sort=filters.READY_ORDER, limit=BATCH, batch_size=BATCH)
        ids = filters.any_of([document["_id"] for document in window])
        tasks.update_many({**ids, **filters.READY}, self.claim(lease))
        fence = {**ids, "status": filters.PROCESSING, "lease_token": lease.token}
        finished = tasks.update_many(fence, self.done(lease)).modified_count
        self.seconds.append((time.perf_counter() - began) / finished)


def builds() -> list[Build]:
    """Describe the queues to compare, each with more than the one before."""
    hot = {"ready", "lease", "finished"}
    return [
        Build("leanest updates, one index", {"ready"}, _lean_claim, _lean_done),
        Build("the queue's updates, one index", {"ready"}, claim_update, _full_done),
        Build("with the indexes for leases and retention", hot, claim_update, _full_done),
        Build("with all indexes", None, claim_update, _full_done),
    ]


def microseconds(uri: str, batches: int) -> dict[str, float]:
    """Give the server's time per task for each build: the quickest quarter of its batches."""
    compared = builds()
    with _filled(uri, compared, batches + WARM_UP) as collections:
        for _ in range(batches + WARM_UP):
            for build, tasks in random.sample(collections, len(collections)):
                build.drain_batch(tasks)
    return {
        build.name: statistics.quantiles(build.seconds[WARM_UP:], n=4)[0] * 1e6
        for build in compared
    }


@contextmanager
def _filled(
    uri: str, compared: list[Build], batches: int
) -> Iterator[list[tuple[Build, Collection[Any]]]]:
    """Fill a database for each build, and leave it the indexes that it keeps."""
    with fresh_place(uri) as place, place.client() as client:
        places = [Place(uri, f"{place.database}_{number}") for number in range(len(compared))]
        try:
            for one in places:
                fill(one, batches * BATCH)
            collections = [
                client[one.database].get_collection("tasks", write_concern=WriteConcern(w=1))
                for one in places
            ]
            for build, tasks in zip(compared, collections, strict=True):
                for name in tasks.index_information():
                    if build.keeps is not None and name not in {"_id_", *build.keeps}:
                        tasks.drop_index(name)
            yield list(zip(compared, collections, strict=True))
        finally:
            for one in places:
                client.drop_database(one.database)
