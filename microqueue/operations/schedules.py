"""Schedules: store them, and fire those that are due.

A schedule is one document of ``microqueue_schedules``. A worker or sweeper fires it by two writes:

1. Insert the task of ``next_at``. Its id derives from the schedule and the instant, so a second
   insert of the same run is a duplicate, and changes nothing.
2. Advance ``next_at``, if it still has the value that was read.

If the second one does not match, another process has advanced the schedule, or it was changed. The
run is noted all the same, unless that process has.

If a process is killed between the two, ``next_at`` stays. The next one finds the task, and
advances. Runs that are left out are passed over before the insert, by a write like the second. So
what a killed process may have added is always the task of ``next_at``.

A done task of a run is kept for an hour at least, whatever the retention: a process that read
``next_at`` and stalled must find it, and not add the run again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from pymongo import IndexModel, ReturnDocument
from pymongo.errors import DuplicateKeyError

from microqueue.backoff import BackoffPolicy
from microqueue.errors import OperationFailed, ScheduleNotFound
from microqueue.operations import confirm, filters
from microqueue.operations.call import SCHEDULES_COLLECTION, Call, Document, Operation, Target
from microqueue.operations.indexes import ensure_indexes
from microqueue.schedule import Schedule, ScheduleRun, SkippedRun, run_id, timing_of
from microqueue.settings import QueueSettings
from microqueue.task import TaskStatus
from microqueue.task_ids import id_key
from microqueue.timing import check_cron, check_zone

MOST_SCHEDULES = 10_000
"""How many schedules one list has."""
MOST_RECENT = 20
"""How many tasks of a schedule are remembered at least: the last ones."""
MOST_UNFINISHED = 1000
"""How many are remembered with ``overlap="skip"``, to see whether one is unfinished."""
DURATIONS = ("every", "grace", "jitter", "visibility_timeout", "expires_in")
KEPT = ("next_at", "starts_at", "created_at", "last", "recent", "runs", "skipped", "paused")
"""The fields that a change of a schedule keeps."""
UNCOMPARED = frozenset({*KEPT, "_id", "revision", "updated_at"})


def due_index() -> IndexModel:
    """Return the index of the next runs. The first schedule creates it."""
    return IndexModel([("collection", 1), ("next_at", 1)], name="due")


def prepare() -> Operation[list[str]]:
    """Create the index of the next runs. Safe to repeat."""
    return (yield from ensure_indexes([due_index()], SCHEDULES_COLLECTION, target=Target.SCHEDULES))


# Store


def put(
    tasks: str,
    schedule: Schedule,
    *,
    paused: bool | None,
    now: datetime,
    former: Document | None = None,
) -> Operation[Document]:
    """Store a schedule, or change the one that has its name; return the document.

    What code declares changes only what the same app declared; any other one is returned as it is.
    While the timing stays the same, so does the next run. ``paused`` of ``None`` keeps the state.
    A new one takes over the state of ``former``, which was held in another queue. A state that was
    edited and is not valid is not kept, except ``paused``.
    Each write compares what was read. Safe to repeat: the revision shows that it was written.
    """
    revision = secrets.token_hex(8)
    key = {"_id": _key(tasks, schedule.queue, schedule.name)}
    wanted = {**_to_stored(tasks, schedule), "updated_at": now}
    for _ in range(confirm.ROUNDS):
        found = yield from confirm.one(key, target=Target.SCHEDULES)
        if found is not None and found.get("revision") == revision:
            return found
        if found is not None and schedule.source == "code" and owner(found) != owner(wanted):
            return found
        kept = former if found is None else found
        is_paused = _is_paused(kept) if paused is None else paused
        if kept is not None and not _is_valid({**wanted, **_state(kept)}, now):
            kept = None
        document = {
            **key,
            **merged(schedule, wanted, kept, paused=is_paused, now=now),
            "revision": revision,
        }
        if found is None:
            try:
                yield Call("insert_one", document, target=Target.SCHEDULES)
            except DuplicateKeyError:
                continue
            return document
        if kept is not None and _unchanged(found, document):
            return found
        fence = {**key, **{name: found.get(name) for name in ("revision", "next_at", "runs")}}
        result = yield Call("replace_one", fence, document, target=Target.SCHEDULES)
        if result.matched_count:
            return document
    raise confirm.keeps_changing()


def merged(
    schedule: Schedule, wanted: Document, kept: Document | None, *, paused: bool, now: datetime
) -> Document:
    """Return the document of a schedule, ``wanted``, with the state of the one that it replaces.

    While the timing stays the same, so does the next run.
    """
    document = {**wanted, "paused": paused}
    next_at = None
    if kept is not None:
        document |= _state(kept)
        if _timing(kept) == _timing(wanted):
            next_at = kept.get("next_at") or kept.get("held_at")
        else:
            document["starts_at"] = schedule.starts_at
    document["next_at"] = None if paused else next_at or timing_of(schedule).after(now)
    return document


def owner(document: Document) -> tuple[Any, Any]:
    """Return who made a schedule: the source, and the app."""
    return document.get("source"), document.get("app")


def _state(kept: Document) -> Document:
    return {name: kept[name] for name in KEPT if name in kept and name != "paused"}


def _is_valid(document: Document, now: datetime) -> bool:
    """Return whether a schedule can be read, and its next run be computed."""
    try:
        timing_of(read(document)).after(now)
    except (OperationFailed, TypeError, ValueError, OverflowError):
        return False
    return True


def _is_paused(document: Document | None) -> bool:
    return bool((document or {}).get("paused"))


def _timing(document: Document) -> tuple[Any, ...]:
    return tuple(document.get(name) for name in ("cron", "every_sec", "timezone"))


def _unchanged(found: Document, document: Document) -> bool:
    state = ("paused", "next_at")
    names = ({*found, *document} - UNCOMPARED) | set(state)
    return all(found.get(name) == document.get(name) for name in names)


def pause(tasks: str, queue: str, name: str, now: datetime) -> Operation[Document]:
    """Pause a schedule. Safe to repeat."""
    changes = {"paused": True, "next_at": None, "updated_at": now}
    return (yield from _change(tasks, queue, name, {}, {"$set": changes}))


def resume(tasks: str, queue: str, name: str, now: datetime) -> Operation[Document]:
    """Resume a schedule with its next run after now. Safe to repeat.

    Runs that were missed during the pause are left out.
    """
    for _ in range(confirm.ROUNDS):
        found = yield from require(tasks, queue, name)
        if not _is_paused(found):
            return found
        next_at = timing_of(read(found)).after(now)
        update = {"$set": {"paused": False, "next_at": next_at, "updated_at": now}}
        fence = {"paused": True, "revision": found.get("revision")}
        key = {"_id": _key(tasks, queue, name), **fence}
        result = yield Call("update_one", key, update, target=Target.SCHEDULES)
        if result.matched_count:
            return (yield from require(tasks, queue, name))
    raise confirm.keeps_changing()


def _change(
    tasks: str, queue: str, name: str, fence: Document, update: Document
) -> Operation[Document]:
    found: Document | None = yield Call(
        "find_one_and_update",
        {"_id": _key(tasks, queue, name), **fence},
        update,
        return_document=ReturnDocument.AFTER,
        target=Target.SCHEDULES,
    )
    if found is None:
        raise ScheduleNotFound(name=name, queue=queue)
    return found


def remove(tasks: str, queue: str, name: str) -> Operation[bool]:
    """Delete a schedule; return whether there was one. Safe to repeat: it deletes at most once."""
    key = {"_id": _key(tasks, queue, name)}
    result = yield Call("delete_one", key, target=Target.SCHEDULES)
    return bool(result.deleted_count)


class Place(NamedTuple):
    """The queue of a schedule, and its name."""

    queue: str
    name: str


def declared_by(tasks: str, app: str) -> Operation[dict[Place, Document]]:
    """Return the schedules that the code of an app declared, by what their ids stand for.

    The fields may be malformed. A document with another id is no schedule, and is left out.
    """
    own = {"collection": tasks, "source": "code", "app": app}
    found: list[Document] = yield Call("find", own, target=Target.SCHEDULES)
    named = ((names_in(one["_id"]), one) for one in found)
    return {
        Place(*names[1:]): one for names, one in named if names is not None and names[0] == tasks
    }


def hold(document: Document, app: str) -> Operation[Document | None]:
    """Stop a schedule that the code of an app moves to another queue; return it. Safe to repeat.

    ``held_at`` keeps its next run. So the process that continues after a kill misses none.
    """
    own = {"_id": document["_id"], "source": "code", "app": app}
    for _ in range(confirm.ROUNDS):
        found = yield from confirm.one(own, target=Target.SCHEDULES)
        if found is None or found.get("next_at") is None:
            return found
        held = {"next_at": None, "held_at": found["next_at"]}
        result = yield Call("update_one", _fence(found), {"$set": held}, target=Target.SCHEDULES)
        if result.matched_count:
            return {**found, **held}
    raise confirm.keeps_changing()


def remove_declared(document: Document, app: str) -> Operation[bool]:
    """Delete a schedule if the code of this app still has it. Safe to repeat."""
    own = {"_id": document["_id"], "source": "code", "app": app}
    result = yield Call("delete_one", own, target=Target.SCHEDULES)
    return bool(result.deleted_count)


# Read


def find(tasks: str, queue: str, name: str) -> Operation[Document | None]:
    """Return a schedule by its name."""
    key = {"_id": _key(tasks, queue, name)}
    found: Document | None = yield Call("find_one", key, target=Target.SCHEDULES)
    return found


def require(tasks: str, queue: str, name: str) -> Operation[Document]:
    """Return a schedule by its name, or raise :class:`ScheduleNotFound`."""
    found = yield from find(tasks, queue, name)
    if found is None:
        raise ScheduleNotFound(name=name, queue=queue)
    return found


def find_all(tasks: str, queue: str | None) -> Operation[list[Document]]:
    """Return the schedules of a queue, or of all queues, by queue and name.

    Without ``recent``, which may be long.
    """
    chosen = {"collection": tasks, **({} if queue is None else {"queue": queue})}
    found: list[Document] = yield Call(
        "find", chosen, {"recent": 0}, limit=MOST_SCHEDULES, target=Target.SCHEDULES
    )
    return sorted(found, key=lambda one: (str(one.get("queue")), str(one.get("name"))))


def statuses(documents: Sequence[Document], settings: QueueSettings) -> Operation[dict[Any, Any]]:
    """Return the status of the last task of each schedule, by the key of its id."""
    ids = [one["last"]["task_id"] for one in documents if last_of(one)]
    found: dict[Any, Any] = {}
    targets = [Target.TASKS, Target.DEAD_LETTERS] if settings.separate_dlq else [Target.TASKS]
    for target in targets:
        left = [one for one in ids if id_key(one) not in found]
        if left:
            some = yield Call("find", filters.any_of(left), {"status": 1}, target=target)
            found |= {id_key(one["_id"]): one.get("status") for one in some}
    return found


def last_of(document: Document) -> Document | None:
    """Return the last run of a schedule, as it is stored."""
    last = document.get("last")
    return last if isinstance(last, dict) and "task_id" in last else None


# Fire


def due(
    tasks: str,
    now: datetime,
    *,
    queues: Sequence[str] | None,
    without: Sequence[Any] = (),
    limit: int,
) -> Operation[list[Document]]:
    """Return schedules whose next run is due, the most urgent first."""
    chosen = _scheduled(tasks, {"$lte": now}, queues, without)
    found: list[Document] = yield Call(
        "find", chosen, sort=[("next_at", 1)], limit=limit, target=Target.SCHEDULES
    )
    return found


def next_due(
    tasks: str, queues: Sequence[str] | None = None, *, without: Sequence[Any] = ()
) -> Operation[datetime | None]:
    """Return when the next schedule is due, by one key of the index."""
    chosen = _scheduled(tasks, filters.IS_DATE, queues, without)
    order = [("next_at", 1)]
    fields = {"_id": 0, "next_at": 1}
    found = yield Call("find", chosen, fields, sort=order, limit=1, target=Target.SCHEDULES)
    return found[0]["next_at"] if found else None


def _scheduled(
    tasks: str, next_at: Document, queues: Sequence[str] | None, without: Sequence[Any]
) -> Document:
    chosen: Document = {"collection": tasks, "next_at": next_at}
    if queues is not None:
        chosen["queue"] = {"$in": list(queues)}
    if without:
        chosen["_id"] = {"$nin": without}
    return chosen


def is_current(document: Document) -> Operation[bool]:
    """Return whether a schedule is still due as it was read: another process may have fired it."""
    found = yield Call("find_one", _fence(document), {"_id": 1}, target=Target.SCHEDULES)
    return found is not None


def find_run(schedule: Schedule, instant: datetime, now: datetime) -> Operation[ScheduleRun | None]:
    """Return the run of an instant if its task has been added."""
    task_id = run_id(schedule, instant)
    found = yield Call("find_one", {"_id": task_id}, {"created_at": 1})
    if found is None:
        return None
    return ScheduleRun(at=instant, task_id=task_id, fired_at=found.get("created_at") or now)


def overlaps(document: Document, schedule: Schedule) -> Operation[tuple[Document, bool]]:
    """Return whether a task of the schedule is unfinished, and not that of the next run.

    A process that was killed may have added that one without noting it. Returned with the
    schedule, without tasks that need not be remembered.
    """
    document = yield from _forget_finished(document)
    own = run_id(schedule, document["next_at"])
    found = yield Call("find", filters.any_of([*document["recent"], own]), {"status": 1})
    if any(one["_id"] == own for one in found):
        return document, False
    unfinished = {filters.PENDING, filters.PROCESSING}
    return document, any(one.get("status") in unfinished for one in found)


def advance(
    document: Document,
    next_at: datetime | None,
    *,
    run: ScheduleRun | None,
    skipped: SkippedRun | None,
) -> Operation[Document | None]:
    """Set the next run, and note what was added or skipped; return the schedule as it is then.

    ``None`` if another process fired the schedule, or it was changed. Safe to repeat: it matches
    once.
    """
    changes: Document = {"next_at": next_at}
    update: Document = {"$set": changes}
    if skipped is not None:
        changes["skipped"] = skipped.model_dump()
    if run is not None:
        changes["last"] = run.model_dump(exclude={"status"})
        update |= _noted(document, run)
    result = yield Call("update_one", _fence(document), update, target=Target.SCHEDULES)
    if not result.matched_count:
        return None
    recent = [*document["recent"], *([] if run is None else [run.task_id])]
    runs = document["runs"] + (run is not None)
    return {**document, "next_at": next_at, "recent": recent[-_kept(document) :], "runs": runs}


def note(document: Document, run: ScheduleRun) -> Operation[bool]:
    """Note a run whose schedule could not be advanced; return whether no one else had noted it.

    Another process may have noted the same run. But it may also have skipped the instant, or the
    schedule was paused or changed: then only we know that the task was added. While ``next_at`` is
    that of the run, the next process that fires notes it.
    """
    unnoted: Document = {
        "_id": document["_id"],
        "next_at": {"$ne": run.at},
        "recent": {"$ne": run.task_id},
        # After so many others, a run that was noted is no longer among the recent ones.
        "runs": {"$lt": document["runs"] + MOST_RECENT},
    }
    last = {"last": run.model_dump(exclude={"status"})}
    newest = {**unnoted, "$or": [{"last": None}, {"last.at": {"$lt": run.at}}]}
    noted = _noted(document, run)
    for fence, update in ((newest, {"$set": last, **noted}), (unnoted, noted)):
        result = yield Call("update_one", fence, update, target=Target.SCHEDULES)
        if result.matched_count:
            return True
    return False


def note_triggered(document: Document, run: ScheduleRun) -> Operation[None]:
    """Note a run that was triggered."""
    document = yield from _forget_finished(document)
    last = run.model_dump(exclude={"status"})
    update = {"$set": {"last": last}, **_noted(document, run)}
    # A repeat would count the run twice.
    unnoted = {"_id": document["_id"], "recent": {"$ne": run.task_id}}
    yield Call("update_one", unnoted, update, target=Target.SCHEDULES)


def mend(document: Document, schedule: Schedule) -> Operation[Document]:
    """Return a schedule whose next run can be noted: with a list of tasks, and a count."""
    recent, runs = document.get("recent"), document.get("runs")
    changes: Document = {}
    if not isinstance(recent, list):
        changes["recent"] = []
    if isinstance(runs, bool) or not isinstance(runs, int | float):
        changes["runs"] = schedule.runs
    if changes:
        fence = {name: {"$eq": document.get(name)} for name in changes}
        key = {"_id": document["_id"], **fence}
        yield Call("update_one", key, {"$set": changes}, target=Target.SCHEDULES)
    return {**document, **changes}


def _noted(document: Document, run: ScheduleRun) -> Document:
    recent = {"$each": [run.task_id], "$slice": -_kept(document)}
    return {"$push": {"recent": recent}, "$inc": {"runs": 1}}


def _kept(document: Document) -> int:
    """Return how many tasks are remembered. Only ``overlap="skip"`` needs the unfinished ones."""
    return MOST_UNFINISHED if document.get("overlap") == "skip" else MOST_RECENT


def _forget_finished(document: Document) -> Operation[Document]:
    """Forget tasks that are finished or deleted, except the last ones; once in a while.

    Those that are unfinished stay, however long they run. Returns the schedule as it is then. Safe
    to repeat.
    """
    recent: list[Any] = document["recent"]
    if len(recent) < 2 * MOST_RECENT:
        return document
    older, last = recent[:-MOST_RECENT], recent[-MOST_RECENT:]
    open_tasks = {**filters.any_of(older), "status": {"$in": [filters.PENDING, filters.PROCESSING]}}
    found = yield Call("find", open_tasks, {"_id": 1})
    unfinished = {id_key(one["_id"]) for one in found}
    finished = [one for one in older if id_key(one) not in unfinished]
    if finished:
        update = {"$pull": {"recent": {"$in": finished}}}
        yield Call("update_one", {"_id": document["_id"]}, update, target=Target.SCHEDULES)
    left = [one for one in older if id_key(one) in unfinished]
    return {**document, "recent": [*left, *last]}


def _fence(document: Document) -> Document:
    """Match a schedule only as it was read."""
    names = ("_id", "revision", "next_at")
    return {name: document.get(name) for name in names}


# Documents


def _key(tasks: str, queue: str, name: str) -> str:
    return json.dumps([tasks, queue, name], ensure_ascii=False)


def key_prefix(tasks: str) -> str:
    """Return what the ids of the schedules of a collection begin with."""
    return json.dumps([tasks], ensure_ascii=False)[:-1] + ", "


def names_in(key: Any) -> tuple[str, str, str] | None:
    """Return the collection, queue and name that the id of a schedule stands for."""
    try:
        tasks, queue, name = json.loads(key)
    except (TypeError, ValueError):
        return None  # Another program inserted it.
    named = all(isinstance(one, str) for one in (tasks, queue, name))
    return (tasks, queue, name) if named else None


def versions(tasks: str) -> Operation[dict[tuple[str, str], tuple[Any, Any]]]:
    """Return for each schedule what changes when it is changed, and when it is fired."""
    fields = {"queue": 1, "name": 1, "updated_at": 1, "runs": 1, "next_at": 1}
    found = yield Call(
        "find", {"collection": tasks}, fields, limit=MOST_SCHEDULES, target=Target.SCHEDULES
    )
    return {
        (one["queue"], one["name"]): (one.get("updated_at"), (one.get("runs"), one.get("next_at")))
        for one in found
        if "queue" in one and "name" in one
    }


def _to_stored(tasks: str, schedule: Schedule) -> Document:
    return {
        "collection": tasks,
        "queue": schedule.queue,
        "name": schedule.name,
        "cron": schedule.cron,
        "timezone": schedule.timezone,
        "catch_up": schedule.catch_up,
        "overlap": schedule.overlap,
        "payload": schedule.payload,
        "task": schedule.task,
        "priority": schedule.priority,
        "max_attempts": schedule.max_attempts,
        "backoff_policy": schedule.backoff.model_dump(),
        "headers": dict(schedule.headers),
        "source": schedule.source,
        "app": schedule.app,
        "starts_at": schedule.starts_at,
        "created_at": schedule.created_at,
        "next_at": None,
        "recent": [],
        "runs": 0,
        **{f"{name}_sec": _seconds(getattr(schedule, name)) for name in DURATIONS},
    }


def read(document: Document, status: Any = None) -> Schedule:
    """Return a stored schedule; ``status`` is that of its last task.

    Raises:
        OperationFailed: The document was edited and is not valid.
    """
    try:
        return _read(document, status)
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        name = document.get("name")
        raise OperationFailed(
            f"schedule {name!r} in {SCHEDULES_COLLECTION} was edited and is not valid; "
            f"put it again, or remove it ({exc})"
        ) from exc


def _read(document: Document, status: Any) -> Schedule:
    get = document.get
    if (get("cron") is None) is (get("every_sec") is None):
        raise ValueError("it needs cron or every_sec")
    if get("cron") is not None:
        check_cron(document["cron"], stored=True)
    check_zone(document["timezone"], stored=True)
    last, skipped = last_of(document), get("skipped")
    found: dict[str, Any] = {name: get(f"{name}_sec") for name in DURATIONS}
    plain = ("timezone", "catch_up", "overlap", "priority", "source", "starts_at", "created_at")
    return Schedule(
        **{name: document[name] for name in plain},
        name=document["name"],
        queue=document["queue"],
        cron=get("cron"),
        payload=get("payload"),
        task=get("task"),
        max_attempts=document["max_attempts"],
        backoff=BackoffPolicy(**document["backoff_policy"]),
        headers=get("headers") or {},
        app=get("app"),
        paused=_is_paused(document),
        updated_at=document["updated_at"],
        next_at=get("next_at"),
        runs=get("runs") or 0,
        last_run=None if last is None else ScheduleRun(**last, status=_status(status)),
        last_skipped=SkippedRun(**skipped) if skipped else None,
        **{name: None if sec is None else timedelta(seconds=sec) for name, sec in found.items()},
    )


def _status(value: Any) -> TaskStatus | None:
    return TaskStatus(value) if value in set(TaskStatus) else None


def _seconds(period: timedelta | None) -> float | None:
    return None if period is None else period.total_seconds()
