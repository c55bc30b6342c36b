"""Leases of tasks in flight: renew them, find out which were lost, and store progress.

Every write is fenced by the lease tokens, so it changes only tasks that are still held.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import Any

from pymongo import UpdateOne

from microqueue import error_codes
from microqueue.clock import later
from microqueue.operations import filters
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.task import Claim, Progress, Task
from microqueue.task_ids import id_key


class LeaseState(Enum):
    """Whether a claim still holds its task."""

    HELD = auto()
    """It does."""
    LOST = auto()
    """Another worker holds the task, or none."""
    CANCELLED = auto()
    """The task was cancelled."""
    DONE = auto()
    """It has marked the task done, or the task is deleted."""


def renew(
    tasks: Sequence[Task[Any]], *, now: datetime, timeout: timedelta
) -> Operation[list[Task[Any]]]:
    """Renew the leases of tasks in flight; return the tasks that are no longer held.

    One write renews all leases of the same length. Each round of a claim has its own token, so any
    of the tokens proves that a task is still held. A lease that ends later stays as it is. Safe to
    repeat: it sets the same instants again.
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
        update = {"$max": {"deadline_at": expires_at}, "$set": {"updated_at": now}}
        result = yield Call("update_many", fence, update)
        if result.matched_count != len(group):
            found = yield Call("find", fence, {"lease_token": 1})
            held = {(id_key(one["_id"]), one["lease_token"]) for one in found}
            lost += [task for task in group if filters.claim_of(task) not in held]
    return lost


def lease_states(tasks: Sequence[Claim]) -> Operation[list[LeaseState]]:
    """Return for each task whether it is held, lost, cancelled or done.

    Read-only, by ``_id``. Without it, a handler would run for up to a third of a lease after its
    task was cancelled.
    """
    ids = {id_key(task.id): task.id for task in tasks}
    fields = {"status": 1, "lease_token": 1, "error.code": 1}
    found = yield Call("find", filters.any_of(ids.values()), fields)
    stored = {id_key(document["_id"]): document for document in found}
    if missing := [task_id for key, task_id in ids.items() if key not in stored]:
        # A cancelled task may have moved to the dead letters.
        moved = yield Call(
            "find",
            filters.any_of(missing),
            {"status": 1, "error.code": 1},
            target=Target.DEAD_LETTERS,
        )
        stored |= {id_key(document["_id"]): document for document in moved}
    return [_state(task, stored.get(id_key(task.id), {})) for task in tasks]


def _state(task: Claim, document: Document) -> LeaseState:
    status = document.get("status")
    own = task.lease is None or document.get("lease_token") == task.lease.token
    if task.lease is None or (own and status == filters.PROCESSING):
        return LeaseState.HELD
    if not document or (own and status == filters.DONE):  # A done task keeps its last token.
        return LeaseState.DONE
    error = document.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    cancelled = status == filters.FAILED and code == error_codes.CANCELLED
    return LeaseState.CANCELLED if cancelled else LeaseState.LOST


def report_progress(reports: Iterable[tuple[Task[Any], Progress]]) -> Operation[None]:
    """Store the progress of handlers, each fenced by its lease token.

    Safe to repeat: it sets the same values again.
    """
    updates = [
        UpdateOne(filters.claimed(task), {"$set": {"progress": progress.model_dump()}})
        for task, progress in reports
    ]
    yield Call("bulk_write", updates, ordered=False)
