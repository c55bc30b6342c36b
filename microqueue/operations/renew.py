"""Renew: move the end of many leases with one write, and see what was taken away."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from pymongo import UpdateOne

from microqueue.operations import filters
from microqueue.operations.administer import CANCELLED
from microqueue.operations.call import Call, Operation, Target
from microqueue.task import Progress, Task


def renew(
    tasks: Sequence[Task[Any]], *, now: datetime, timeout: timedelta
) -> Operation[list[Task[Any]]]:
    """Renew the leases of tasks in flight; give those that are no longer held.

    One write renews all that have leases of the same length. Each is claimed under a token
    that no other claim has, so any of the tokens proves that it is still ours. Safe to repeat:
    it sets the same instants again.
    """
    groups: dict[float, list[Task[Any]]] = defaultdict(list)
    for task in tasks:
        if task.lease is not None:
            own = task.visibility_timeout_sec
            seconds = timeout.total_seconds() if own is None else own
            groups[seconds].append(task)
    lost: list[Task[Any]] = []
    for seconds, group in groups.items():
        fence = filters.claimed_together(group)
        expires_at = now + timedelta(seconds=seconds)
        update = {"$set": {"lease_expires_at": expires_at, "updated_at": now}}
        result = yield Call("update_many", fence, update)
        if result.matched_count != len(group):
            found = yield Call("find", fence, {"_id": 1})
            held = {document["_id"] for document in found}
            lost += [task for task in group if task.id not in held]
    return lost


def find_taken(tasks: Sequence[Task[Any]]) -> Operation[dict[Any, bool]]:
    """Give the ids of tasks that are no longer held, and whether each was cancelled.

    A look by ``_id`` that writes nothing, for handlers that run longer than a moment: they
    should not go on for a third of a lease after somebody cancelled their task.
    """
    ids = filters.any_of(task.id for task in tasks)
    found = yield Call("find", ids, {"status": 1, "lease_token": 1, "error.code": 1})
    stored = {document["_id"]: document for document in found}
    if missing := [task.id for task in tasks if task.id not in stored]:
        # What was cancelled may have moved to the dead letters since.
        moved = yield Call(
            "find",
            filters.any_of(missing),
            {"status": 1, "error.code": 1},
            target=Target.DEAD_LETTERS,
        )
        stored |= {document["_id"]: document for document in moved}
    taken = {}
    for task in tasks:
        document = stored.get(task.id, {})
        if task.lease and document.get("lease_token") != task.lease.token:
            code = (document.get("error") or {}).get("code")
            taken[task.id] = document.get("status") == filters.FAILED and code == CANCELLED
    return taken


def report_progress(reports: Iterable[tuple[Task[Any], Progress]]) -> Operation[None]:
    """Store how far handlers are, each fenced by its lease. Safe to repeat."""
    updates = [
        UpdateOne(filters.claimed(task), {"$set": {"progress": progress.model_dump()}})
        for task, progress in reports
    ]
    yield Call("bulk_write", updates, ordered=False)
