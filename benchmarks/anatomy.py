"""Anatomy: the server's time per task, from a minimal queue to this one.

Several collections are drained one batch at a time, in random order, so that all see the same
machine. Writes do not wait for the disk, so that only the server's own work is measured.
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

from benchmarks.database import BATCH, Database, fill, fresh_database
from microqueue.model import trusted
from microqueue.operations import filters
from microqueue.operations.claim import claim_update
from microqueue.operations.settle import done, settlement_update
from microqueue.task import Claimed, Lease

WARM_UP = 3  # Batches per build that are not measured.
READY = {"queue": "default", **filters.READY}
Update = Callable[[Lease], dict[str, Any]]


def _minimal_claim(lease: Lease) -> dict[str, Any]:
    return {"$set": {"status": filters.PROCESSING, "lease_token": lease.token}}


def _minimal_done(_lease: Lease) -> dict[str, Any]:
    return {"$set": {"status": filters.DONE, "lease_token": None}}


def _full_done(lease: Lease) -> dict[str, Any]:
    claimed = Claimed({"_id": None, "attempts": 1}, lease, None)
    return settlement_update(
        claimed, done(lease.started_at), now=lease.started_at, history_limit=50
    )


@dataclass
class Build:
    """A variant of the queue: its indexes, and the updates of a claim and of a settlement."""

    name: str
    indexes: set[str] | None
    claim: Update
    done: Update
    seconds: list[float] = field(default_factory=list)

    def drain_batch(self, tasks: Collection[Any]) -> None:
        """Read, claim and finish a batch, and record the time per task."""
        now = datetime.now(UTC)
        lease = trusted(
            Lease,
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
    """Return the variants, each with more than the one before."""
    hot = {"ready", "deadline"}
    return [
        Build("minimal updates, one index", {"ready"}, _minimal_claim, _minimal_done),
        Build("the queue's updates, one index", {"ready"}, claim_update, _full_done),
        Build("with the index of deadlines", hot, claim_update, _full_done),
        Build("with all indexes", None, claim_update, _full_done),
    ]


def microseconds(uri: str, batches: int) -> dict[str, float]:
    """Return the time per task of each build: the first quartile of its batches."""
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
    """Fill a database per build, and drop the indexes that the build does not have."""
    with fresh_database(uri) as database, database.client() as client:
        databases = [Database(uri, f"{database.name}_{number}") for number in range(len(compared))]
        try:
            for one in databases:
                fill(one, batches * BATCH)
            collections = [
                client[one.name].get_collection("tasks", write_concern=WriteConcern(w=1))
                for one in databases
            ]
            for build, tasks in zip(compared, collections, strict=True):
                for name in tasks.index_information():
                    if build.indexes is not None and name not in {"_id_", *build.indexes}:
                        tasks.drop_index(name)
            yield list(zip(compared, collections, strict=True))
        finally:
            for one in databases:
                client.drop_database(one.name)
