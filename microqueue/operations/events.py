"""Events: what happened to tasks, from a change stream, or from two snapshots without one.

Everything here is read-only.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from microqueue import error_codes
from microqueue.operations import filters, schedules
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.operations.stats import by_deadline
from microqueue.task import Outcome
from microqueue.task_ids import id_key

CHANGED = "updateDescription.updatedFields"
STATUS_TYPES = {
    filters.PROCESSING: "task.started",
    filters.DONE: "task.done",
    filters.FAILED: "task.failed",
}
RECLAIMS = frozenset({error_codes.LEASE_EXPIRED, error_codes.WORKER_GONE})
MOST_NEW = 200
LATEST_WRITE = timedelta(seconds=2)
MOST_RUNNING = 1000
REFRESH = "refresh"
"""The type of an unknown change: every listener reads everything again."""


@dataclass(frozen=True)
class Event:
    """One event. ``type`` is for example ``task.done``, ``id`` that of a task or worker.

    The id of a schedule is its name.

    ``report`` is the report of a sweep: the next sweep may overwrite the stored one.
    """

    type: str
    id: Any = None
    queue: str | None = None
    report: Any = None


def pipeline(collections: Sequence[str]) -> list[Document]:
    """Return the pipeline of a change stream: some collections, with the fields needed here."""
    fields = (
        *("status", "error.code", "finished_at", "next_retry_at", "deadline_at"),
        *("gone_at", "last"),
    )
    return [
        {"$match": {"ns.coll": {"$in": list(collections)}}},
        {
            "$project": {
                "operationType": 1,
                "ns": 1,
                "documentKey": 1,
                "fullDocument.queue": 1,
                "fullDocument.status": 1,
                "fullDocument.gone_at": 1,
                "fullDocument.last": 1,
                **{f"{CHANGED}.{name}": 1 for name in fields},
            }
        },
    ]


def task_event(change: Mapping[str, Any]) -> Event:
    """Return the event for a change of ``tasks``."""
    task_id = change.get("documentKey", {}).get("_id")
    operation = change["operationType"]
    if operation == "insert":
        inserted = change.get("fullDocument") or {}
        # A replay from ``tasks_dlq`` inserts the task as failed first.
        returned = inserted.get("status") == filters.FAILED
        kind = "task.changed" if returned else "task.enqueued"
        return Event(kind, task_id, inserted.get("queue"))
    if operation == "delete":
        return Event("task.removed", task_id)
    if task_id is None:
        return Event(REFRESH)  # The whole collection is gone, or has another name.
    changed: Mapping[str, Any] = change.get("updateDescription", {}).get("updatedFields", {})
    return Event(_update_type(changed), task_id)


def is_new_dead_letter(change: Mapping[str, Any]) -> bool:
    """Return whether a change of ``tasks_dlq`` is a failed task that moved there."""
    return (change.get("fullDocument") or {}).get("status") == filters.FAILED


def sweep_report_in(change: Mapping[str, Any]) -> Document | None:
    """Return the report that a sweep has stored, see :func:`maintenance.store_report`."""
    stored = change.get("fullDocument") or change.get("updateDescription", {}).get("updatedFields")
    report: Document | None = (stored or {}).get("last")
    return report


def schedule_event(change: Mapping[str, Any], collection: str) -> Event | None:
    """Return the event for a change of ``microqueue_schedules``; its id is the name."""
    names = schedules.names_in(change.get("documentKey", {}).get("_id"))
    if names is None or names[0] != collection:
        return None
    _, queue, name = names
    if change["operationType"] == "delete":
        return Event("schedule.removed", name, queue)
    changed = change.get("updateDescription", {}).get("updatedFields", {})
    return Event("schedule.fired" if "last" in changed else "schedule.changed", name, queue)


def compare_schedules(
    before: Mapping[tuple[str, str], tuple[Any, Any]],
    after: Mapping[tuple[str, str], tuple[Any, Any]],
) -> list[Event]:
    """Return the events between two readings of the versions of schedules."""
    found = [Event("schedule.removed", name, queue) for queue, name in before.keys() - after.keys()]
    for (queue, name), (changed, fired) in after.items():
        known = before.get((queue, name))
        if known is None or known[0] != changed:
            found.append(Event("schedule.changed", name, queue))
        elif known[1] != fired:
            found.append(Event("schedule.fired", name, queue))
    return found


def _update_type(changed: Mapping[str, Any]) -> str:
    status = changed.get("status")
    if status != filters.PENDING:
        return STATUS_TYPES.get(str(status), "task.changed")
    if "error" in changed:
        code = (changed["error"] or {}).get("code")
        return "task.reclaimed" if code in RECLAIMS else "task.retried"
    if "finished_at" in changed:
        return "task.replayed"
    # A snoozed task waits; a released one is ready at once.
    return "task.retried" if changed.get("next_retry_at") else "task.released"


@dataclass(frozen=True)
class Snapshot:
    """What is seen of a collection at one moment, to compare it with the next."""

    at: datetime
    running: Mapping[Any, Document]
    created: Sequence[Document]
    finished: Sequence[Document]


def snapshot(since: datetime, now: datetime, queues: Sequence[str]) -> Operation[Snapshot]:
    """Return what runs, and what was created or finished since an instant, by indexes."""
    fields = {"queue": 1, "deadline_at": 1, "attempts": 1}
    running = yield from by_deadline(filters.LEASED, queues, fields, limit=MOST_RUNNING)
    here = {"queue": {"$in": list(queues)}}
    # A task carries the instant at which its write began, and may appear a little later.
    new = {"$gt": since - LATEST_WRITE}
    created = yield Call(
        "find",
        {**here, "created_at": new},
        {"queue": 1, "created_at": 1},
        sort=[("created_at", -1), ("_id", -1)],
        limit=MOST_NEW,
    )
    done = yield from by_deadline(
        {**filters.SUCCEEDED, "deadline_at": {**filters.IS_DATE, **new}},
        queues,
        {"queue": 1, "status": 1, "finished_at": 1, "deadline_at": 1},
        limit=MOST_NEW,
        newest=True,
    )
    failed = yield Call(
        "find",
        {**here, **filters.DEAD, "updated_at": new},
        {"queue": 1, "status": 1, "finished_at": 1},
        sort=[("updated_at", -1), ("_id", 1)],
        limit=MOST_NEW,
    )
    held = {id_key(one["_id"]): one for one in running}
    return Snapshot(now, held, created, [*done, *failed])


def compare(before: Snapshot, after: Snapshot, back: Sequence[Document]) -> list[Event]:
    """Return the events between two snapshots; ``back`` are tasks that no longer run."""
    known_created = {_key(one) for one in before.created}
    known_finished = {_finish(one) for one in before.finished}
    changes = [
        Event("task.enqueued", one["_id"], one.get("queue"))
        for one in after.created
        if _key(one) not in known_created
    ]
    changes += [
        Event(f"task.{one['status']}", one["_id"], one.get("queue"))
        for one in after.finished
        if _finish(one) not in known_finished
    ]
    for key, held in after.running.items():
        known = before.running.get(key)
        if known is None or known.get("attempts") != held.get("attempts"):
            changes.append(Event("task.started", held["_id"], held.get("queue")))
        elif known.get("deadline_at") != held.get("deadline_at"):
            changes.append(Event("task.changed", held["_id"], held.get("queue")))
    changes += [
        Event(_return_type(one), one["_id"], one.get("queue"))
        for one in back
        if one.get("status") == filters.PENDING
    ]
    # A task that failed between two reads of one snapshot is both running and finished there.
    finished = known_finished | {_finish(one) for one in after.finished}
    changes += [
        Event("task.failed", one["_id"], one.get("queue"))
        for one in back
        if one.get("status") == filters.FAILED and _finish(one) not in finished
    ]
    return changes


def _finish(document: Document) -> tuple[Any, Any]:
    """Identify one end of a task: it may be replayed and end again."""
    return _key(document), document.get("finished_at")


def _key(document: Document) -> Hashable:
    return id_key(document["_id"])


def _return_type(document: Document) -> str:
    history = document.get("history")
    last = history[-1] if isinstance(history, list) and history else None
    outcome = last.get("outcome") if isinstance(last, dict) else None
    if any(outcome == one for one in Outcome if one.is_reclaimed):
        return "task.reclaimed"
    return "task.released" if outcome == Outcome.RELEASED else "task.retried"


def read_current(ids: Sequence[Any]) -> Operation[list[Document]]:
    """Return the current state of tasks, also of those that moved to the dead letters."""
    if not ids:
        return []
    fields: Document = {"queue": 1, "status": 1, "finished_at": 1}
    fields |= {"history": {"$slice": -1}, "name": 1, "headers": 1}
    found: list[Document] = yield Call("find", filters.any_of(ids), fields)
    present = {_key(one) for one in found}
    if missing := [task_id for task_id in ids if id_key(task_id) not in present]:
        here = filters.any_of(missing)
        found += yield Call("find", here, fields, target=Target.DEAD_LETTERS)
    return found
