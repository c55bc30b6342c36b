"""Anatomy: what a task costs, from a minimal queue to this one, and without done tasks.

Several collections are drained one batch at a time, in random order, so that all see the same
machine. One client reads, claims and settles each batch. The elapsed time includes that client's
work, and the processor time of ``mongod`` does not. Writes do not wait for the disk.
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
from benchmarks.processor import server_pid, spent_sec
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


@dataclass(frozen=True)
class Cost:
    """Microseconds per task: the elapsed ones, and those of the server's processor, if known."""

    elapsed: float
    server: float | None


@dataclass
class Build:
    """A variant of the queue: its indexes, and the updates of a claim and of a settlement.

    Without ``indexes``, it has all. Without ``done``, a settlement deletes the tasks.
    """

    name: str
    indexes: set[str] | None
    claim: Update
    done: Update | None
    seconds: list[float] = field(default_factory=list)
    server_seconds: list[float] = field(default_factory=list)

    def drain_batch(self, tasks: Collection[Any], pid: int | None) -> None:
        """Read, claim and finish a batch, and record the times per task."""
        now = datetime.now(UTC)
        lease = trusted(
            Lease,
            token=secrets.token_hex(12),
            worker_id="host:4711:a1b2c3",
            started_at=now,
            expires_at=now + timedelta(minutes=10),
        )
        spent = None if pid is None else spent_sec(pid)
        began = time.perf_counter()
        window = tasks.find(READY, sort=filters.READY_ORDER, limit=BATCH, batch_size=BATCH)
        ids = filters.any_of([document["_id"] for document in window])
        tasks.update_many({**ids, **filters.READY}, self.claim(lease))
        fence = {**ids, "status": filters.PROCESSING, "lease_token": lease.token}
        if self.done is None:
            finished = tasks.delete_many(fence).deleted_count
        else:
            finished = tasks.update_many(fence, self.done(lease)).modified_count
        self.seconds.append((time.perf_counter() - began) / finished)
        if pid is not None and spent is not None:
            self.server_seconds.append((spent_sec(pid) - spent) / finished)

    def cost(self) -> Cost:
        """Return the first quartile of the batches."""
        return Cost(
            _microseconds(self.seconds),
            _microseconds(self.server_seconds) if self.server_seconds else None,
        )


def _microseconds(seconds: list[float]) -> float:
    return statistics.quantiles(seconds[WARM_UP:], n=4)[0] * 1e6


def builds() -> list[Build]:
    """Return the variants: each with more than the one before, and one that keeps no done task.

    All indexes are the four that the first write creates.
    """
    hot = {"ready", "deadline"}
    return [
        Build("minimal updates, one index", {"ready"}, _minimal_claim, _minimal_done),
        Build("the queue's updates, one index", {"ready"}, claim_update, _full_done),
        Build(
            "with the index of deadlines, without failed and browse", hot, claim_update, _full_done
        ),
        Build("with all indexes", None, claim_update, _full_done),
        Build("with all indexes, deleted when done (retention=0)", None, claim_update, None),
    ]


def costs(uri: str, batches: int) -> dict[str, Cost]:
    """Return what a task costs in each build."""
    compared, pid = builds(), server_pid(uri)
    with _filled(uri, compared, batches + WARM_UP) as collections:
        for _ in range(batches + WARM_UP):
            for build, tasks in random.sample(collections, len(collections)):
                build.drain_batch(tasks, pid)
    return {build.name: build.cost() for build in compared}


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
