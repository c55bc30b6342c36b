"""Renew: move the end of many leases with one write, and see what was taken away."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import Any

from pymongo import UpdateOne

from microqueue.clock import later
from microqueue.operations import filters
from microqueue.operations.administration import CANCELLED
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.task import Claim, Progress, Task


class LeaseState(Enum):
    """What became of a claim."""

    HELD = auto()
    """It holds."""
    LOST = auto()
    """The task is somebody else's, or nobody's."""
    CANCELLED = auto()
    """Somebody cancelled the task."""


def renew(
    tasks: Sequence[Task[Any]], *, now: datetime, timeout: timedelta
) -> Operation[list[Task[Any]]]:
    """Renew the leases of tasks in flight; give those that are no longer held.

    One write renews all that have leases of the same length. Each is claimed under a token
    that no other claim has, so any of the tokens proves that it is still ours. A lease that
    ends later stays as it is. Safe to repeat: it sets the same instants again.
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
        expires_at = later(now, timedelta(seconds=seconds))
        update = {"$max": {"lease_expires_at": expires_at}, "$set": {"updated_at": now}}
        result = yield Call("update_many", fence, update)
        if result.matched_count != len(group):
            found = yield Call("find", fence, {"lease_token": 1})
            held = {(document["_id"], document["lease_token"]) for document in found}
            lost += [task for task in group if filters.claim_of(task) not in held]
    return lost


def lease_states(tasks: Sequence[Claim]) -> Operation[list[LeaseState]]:
    """Tell of each task whether it is no longer held, and whether it was cancelled.

    A look by ``_id`` that writes nothing, for tasks that wait or run longer than a moment:
    their handlers should not go on for a third of a lease after somebody cancelled them.
    """
    ids = filters.any_of({task.id: None for task in tasks})
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
    return [_how_taken(task, stored.get(task.id, {})) for task in tasks]


def _how_taken(task: Claim, document: Document) -> LeaseState:
    if task.lease is None or document.get("lease_token") == task.lease.token:
        return LeaseState.HELD
    error = document.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    cancelled = document.get("status") == filters.FAILED and code == CANCELLED
    return LeaseState.CANCELLED if cancelled else LeaseState.LOST


def report_progress(reports: Iterable[tuple[Task[Any], Progress]]) -> Operation[None]:
    """Store how far handlers are, each fenced by its lease. Safe to repeat."""
    updates = [
        UpdateOne(filters.claimed(task), {"$set": {"progress": progress.model_dump()}})
        for task, progress in reports
    ]
    yield Call("bulk_write", updates, ordered=False)
