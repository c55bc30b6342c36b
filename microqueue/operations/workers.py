"""Workers: their registrations, and what happens to the tasks of a worker that died.

**Crash attribution** decides which tasks a crash counts against. A worker starts tasks in the
order of their claims, and holds a task that has ended until its settlement is written. So of the
tasks that a dead worker held, the first had ended, the next ran, and the last waited. Where one
group ends and the next begins is not stored.

**Crash isolation** narrows that down for tasks that a wrong guess would harm. Such a task starts
only while no more tasks are unsettled than can run at once: then the tasks that ran are among the
first. Or it runs alone: then it is the one. The worker and the sweeper both read the isolation
from the document, so they agree whatever their settings are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import Enum, IntEnum, auto
from math import inf
from typing import Any, NamedTuple

from microqueue import error_codes
from microqueue.clock import later
from microqueue.model import trusted
from microqueue.operations import filters, settle
from microqueue.operations.batches import Batches, SweepProgress, not_after
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.operations.maintenance import WITHOUT_PAYLOAD, QueueNames, within
from microqueue.operations.settle import FencedSettlement, Settlement
from microqueue.reports import ServedNames, WorkerInfo
from microqueue.settings import QueueSettings
from microqueue.task import Outcome, Task, TaskError, read_count, read_task

CERTAIN_AFTER = 2
DEFAULT_MAX_ATTEMPTS = 10
MOST_NAMES = 500
"""How many task names a worker registers at most."""
AS_CLAIMED = [("started_at", 1), *filters.READY_ORDER]
"""The order in which a worker claimed its tasks, and so starts them."""
ATTRIBUTED_BY = dict.fromkeys(
    ["queue", "position", "attempts", "max_attempts", "redelivered", "crashes"], 1
)


# Crash isolation and attribution


class Isolation(IntEnum):
    """How a task is isolated while it runs; a greater value is stricter.

    Two levels would not do. Without ``LIMITED``, every task on its last attempt would run alone.
    Without ``ALONE``, the crash of another task could make a task a dead letter.
    """

    NONE = auto()
    """It runs beside any number of others."""
    LIMITED = auto()
    """It starts while no more tasks are unsettled than can run at once."""
    ALONE = auto()
    """It starts while no other task is unsettled."""


class CrashRole(Enum):
    """What a task may have had to do with the crash of its worker."""

    SUSPECT = auto()
    """It may have been running."""
    STARTED = auto()
    """It may have been started; most likely it had ended, or waited."""
    WAITED = auto()
    """It was not started."""


def isolation_for(document: Mapping[str, Any]) -> Isolation:
    """Return how to isolate a claimed task.

    ``LIMITED`` if its worker was lost before, or if this is its last attempt: the crash of another
    task would make it a dead letter. ``ALONE`` if both hold, or if two workers died with it: the
    next crash must be its own.
    """
    get: Any = document.get
    attempts, most = get("attempts"), get("max_attempts", DEFAULT_MAX_ATTEMPTS)
    redelivered = get("redelivered")
    if not redelivered and type(attempts) is int and type(most) is int and attempts < most:
        return Isolation.NONE  # The common case, decided first.
    last = read_count(attempts, 0) >= read_count(most, DEFAULT_MAX_ATTEMPTS)
    if not redelivered:
        return Isolation.LIMITED if last else Isolation.NONE
    certain = last or read_count(get("crashes"), 0) >= CERTAIN_AFTER
    return Isolation.ALONE if certain else Isolation.LIMITED


def unsettled_limit(isolation: Isolation, concurrency: int) -> float:
    """Return the number of unsettled tasks from which on nothing starts under this isolation."""
    if isolation is Isolation.ALONE:
        return min(1, concurrency)
    return concurrency if isolation is Isolation.LIMITED else inf


def attribute_crash(held: Iterable[Mapping[str, Any]], concurrency: int) -> Iterator[CrashRole]:
    """Yield the role of each task that a dead worker held, in the order of its claims."""
    started, strictest = 0, Isolation.NONE
    for document in held:
        if not isinstance(document.get("position", 0), int | float):
            yield CrashRole.STARTED  # Edited manually: its order is unknown.
            continue
        # Nothing overtakes an isolated task, so its isolation also holds for what follows.
        strictest = max(strictest, isolation_for(document))
        if started >= unsettled_limit(strictest, concurrency):
            yield CrashRole.WAITED
        else:
            started += 1
            yield CrashRole.SUSPECT if started <= concurrency else CrashRole.STARTED


# Registrations


def beat(info: WorkerInfo) -> Operation[None]:
    """Register a worker, or renew its registration.

    Safe to repeat: it writes the same values again.
    """
    document = info.model_dump(exclude={"id"})
    document |= {"worker_id": info.id, "gone_at": info.gone_at(), "late_at": info.late_at()}
    document |= {"blamed": 0, "missed_at": None}
    own = {"_id": _registration(info.id, info.collection)}
    yield Call("update_one", own, {"$set": document}, upsert=True, target=Target.WORKERS)


def leave(worker_id: str, collection: str) -> Operation[None]:
    """Deregister a worker that ended and holds no task. Safe to repeat."""
    own = {"_id": _registration(worker_id, collection)}
    yield Call("delete_one", own, target=Target.WORKERS)


def _registration(worker_id: str, collection: str) -> str:
    """Return the id of a registration: a worker has one per collection."""
    return f"{worker_id}@{collection}"


def list_workers(collection: str) -> Operation[list[WorkerInfo]]:
    """Return the registered workers, the longest running first."""
    here = {"collection": collection}
    found = yield Call("find", here, sort=[("started_at", 1), ("_id", 1)], target=Target.WORKERS)
    return [_read(document) for document in found]


def served_names(collection: str, now: datetime) -> Operation[list[ServedNames]]:
    """Return by queue which task names the live workers serve."""
    served: dict[str, list[WorkerInfo]] = {}
    for worker in (yield from list_workers(collection)):
        for queue in worker.queues if worker.gone_at() > now else ():
            served.setdefault(str(queue), []).append(worker)
    return [
        ServedNames(
            queue=queue,
            names=sorted({str(name) for one in workers for name in one.tasks or ()}),
            any_name=any(one.tasks is None or bool(one.more_tasks) for one in workers),
            workers=len(workers),
        )
        for queue, workers in sorted(served.items())
    ]


# Tasks of dead workers


def reclaim_orphaned(
    collection: str,
    now: datetime,
    settings: QueueSettings,
    queues: QueueNames = None,
    progress: SweepProgress | None = None,
) -> Operation[None]:
    """Reclaim the tasks of workers whose heartbeat stopped: they wait again, or are dead letters.

    Fenced by the lease tokens that were read. A worker is deregistered only after its tasks are
    reclaimed, so a sweeper that dies half way leaves the rest to the next one, and a sweeper of
    some queues leaves those of the others. A task that a worker claimed after it counted as gone
    shows that it was alive: the task is left to its lease.
    """
    progress = progress or SweepProgress()
    for document in (yield from _dead(collection, now)):
        worker_id, blamed = _worker_id(document), document.get("blamed", 0)
        left = max((document.get("concurrency") or 1) - blamed, 0)
        if not (yield from progress.proceed()):
            return
        held = yield from _attribute_held(worker_id, left)
        claimed = not_after("started_at", document["gone_at"], skew=timedelta(0))
        yield from _reclaim_held(
            worker_id, held, now, settings, claimed=claimed, queues=queues, progress=progress
        )
        # Unless it beat again in the meantime: then it was only slow.
        unchanged = {"_id": document["_id"], "heartbeat_at": document["heartbeat_at"]}
        if queues is None or not (yield Call("find_one", _held_by(worker_id), {"_id": 1})):
            yield Call("delete_one", unchanged, target=Target.WORKERS)
        elif more := _blamed_within(queues, held, left):
            # The sweeper that reclaims the rest must not blame as many again.
            fewer = {"$set": {"blamed": blamed + more}}
            yield Call("update_one", unchanged, fewer, target=Target.WORKERS)
    progress.raise_rejection()


def _dead(collection: str, now: datetime) -> Operation[list[Document]]:
    """Return the workers that are gone, and note which others missed a heartbeat.

    A worker is gone no earlier than one heartbeat after the miss was noted: while MongoDB was
    unavailable, no worker could send one.
    """
    silent = {"$or": [{"late_at": {"$lte": now}}, {"gone_at": {"$lte": now}}]}
    found = yield Call("find", {"collection": collection, **silent}, target=Target.WORKERS)
    unnoticed = [one for one in found if one.get("missed_at") is None]
    for one in unnoticed:
        unchanged = {"_id": one["_id"], "heartbeat_at": one["heartbeat_at"]}
        noticed = {"$set": {"missed_at": later(now, timedelta(0))}}
        yield Call("update_one", unchanged, noticed, target=Target.WORKERS)
    return [
        one
        for one in found
        if one["gone_at"] <= now
        and one.get("missed_at") is not None
        and one["missed_at"] + timedelta(seconds=one["heartbeat_sec"]) <= now
    ]


def _blamed_within(queues: Sequence[str], held: Sequence[Attributed], left: int) -> int:
    """Return how many more tasks are blamed once those of some queues are reclaimed."""
    suspects = [one.queue in queues for one in held if one.role is CrashRole.SUSPECT]
    return left if all(suspects) else sum(suspects)


def reclaim_from(
    worker_id: str,
    now: datetime,
    settings: QueueSettings,
    *,
    concurrency: int,
    queues: QueueNames = None,
) -> Operation[SweepProgress]:
    """Reclaim the tasks that one worker holds, in all queues or in some.

    They wait again, or become dead letters. A crash counts only against tasks that may have been
    running, and an attempt only for those that may have been started. Fenced by lease tokens.
    """
    progress = SweepProgress()
    held = yield from _attribute_held(worker_id, concurrency)
    # Another worker may start under this id: what it claims from now on is not reclaimed.
    claimed = not_after("started_at", now)
    yield from _reclaim_held(
        worker_id, held, now, settings, claimed=claimed, queues=queues, progress=progress
    )
    progress.raise_rejection()
    return progress


class Attributed(NamedTuple):
    """A task that a dead worker held, and its role in the crash."""

    id: Any
    queue: Any
    role: CrashRole


def _attribute_held(worker_id: str, concurrency: int) -> Operation[list[Attributed]]:
    held = yield Call("find", _held_by(worker_id), ATTRIBUTED_BY, sort=AS_CLAIMED)
    return [
        Attributed(document["_id"], document.get("queue"), role)
        for document, role in zip(held, attribute_crash(held, concurrency), strict=True)
    ]


def _reclaim_held(
    worker_id: str,
    attributed: Sequence[Attributed],
    now: datetime,
    settings: QueueSettings,
    *,
    claimed: Document,
    queues: QueueNames,
    progress: SweepProgress,
) -> Operation[None]:
    selection = {**_held_by(worker_id), **within(queues), **claimed}
    # An id of a manually inserted task may be a document, which is not hashable.
    roles = {repr(one.id): one.role for one in attributed}
    # Crash attribution considers all tasks together, so this loop is not stopped half way.
    batches = Batches.of(selection, WITHOUT_PAYLOAD, sort=AS_CLAIMED)
    while held := (yield from batches.next(settings.batch_size)):
        yield from progress.proceed()
        ended: list[FencedSettlement] = []
        for document in held:
            task = read_task(document)
            # One that was claimed in between has no known role.
            role = roles.get(repr(task.id), CrashRole.STARTED)
            ended.append(
                FencedSettlement(task, _crashed(task, now, settings, role), filters.claimed(task))
            )
        count = yield from settle.settle_reclaimed(
            ended, now=now, settings=settings, progress=progress
        )
        batches.wrote(count)


def _held_by(worker_id: str) -> Document:
    return {**filters.LEASED, "worker_id": worker_id}


def _crashed(
    task: Task[Any], now: datetime, settings: QueueSettings, role: CrashRole
) -> Settlement:
    if role is CrashRole.WAITED:
        return settle.released(task, now, front=False)
    suspect = role is CrashRole.SUSPECT
    worker_id = task.lease.worker_id if task.lease else None
    crashes = task.crashes + suspect
    message = f"the worker {worker_id} ended without settling the task"
    error = trusted(
        TaskError, message=message, code=error_codes.WORKER_GONE, at=now, traceback=None
    )
    if suspect and crashes >= settings.max_crashes:
        message = f"{crashes} workers ended while they ran this task; the last was {worker_id}"
        error = trusted(TaskError, message=message, code=error_codes.POISON, at=now, traceback=None)
        settlement = settle.failed(now, error, outcome=Outcome.CRASHED)
    else:
        delay_sec = settle.backoff_sec(task, settings)
        settlement = settle.retried(task, now, error, delay_sec=delay_sec, outcome=Outcome.CRASHED)
    return settlement.after_lost_worker(crashed=suspect)


def _read(document: Document) -> WorkerInfo:
    fields = {name: document.get(name) for name in WorkerInfo.model_fields if name != "id"}
    return trusted(WorkerInfo, id=_worker_id(document), **fields)


def _worker_id(document: Document) -> str:
    return str(document.get("worker_id") or document["_id"])
