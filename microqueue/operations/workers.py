"""Suspects: which of the tasks that a dead worker held may have taken it down.

Tasks start in the order in which they were claimed, and those that have ended are held until
their settlement is written. So of what a dead worker held, the first ones had ended, the next
ones ran, and the last ones waited; but it does not tell where one begins and the other ends.

A task that this may harm is handled with care. Either no more than can run at the same time
are between their start and their settlement together with it: then all that may have run are
among the first ones. Or it runs alone: then it is the one. Worker and sweeper read from the
document itself which care a task needs, so that they agree whatever their settings are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import Enum, IntEnum, auto
from math import inf
from typing import Any, NamedTuple

from microqueue.clock import later
from microqueue.operations import filters, settle
from microqueue.operations.batches import Batches, Progress, not_after
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.operations.maintenance import WITHOUT_PAYLOAD, Queues, within
from microqueue.operations.settle import FencedSettlement, Settlement
from microqueue.reports import ServedNames, WorkerInfo
from microqueue.settings import QueueSettings
from microqueue.task import Outcome, Task, TaskError, read_count

CERTAIN_AFTER = 2
DEFAULT_MAX_ATTEMPTS = 10


class Isolation(IntEnum):
    """How a task is started; more is stricter."""

    NONE = auto()
    """With any number of others."""
    LIMITED = auto()
    """While no more are unsettled than can run at the same time."""
    ALONE = auto()
    """While nothing else is unsettled."""


class CrashRole(Enum):
    """What a task had to do with the end of its worker."""

    SUSPECT = auto()
    """It may have been running."""
    STARTED = auto()
    """It may have been started, and most likely had ended, or waited."""
    WAITED = auto()
    """It was not started."""


def isolation_for(document: Mapping[str, Any]) -> Isolation:
    """Say how to start a claimed task.

    With care, if its worker was lost before, or if this is its last attempt, as it would be
    buried for the crash of another. Alone, if both, or if two workers died over it: the next
    crash must be its own.
    """
    get: Any = document.get
    attempts, most = get("attempts"), get("max_attempts", DEFAULT_MAX_ATTEMPTS)
    redelivered = get("redelivered")
    if not redelivered and type(attempts) is int and type(most) is int and attempts < most:
        return Isolation.NONE  # As most are.
    last = read_count(attempts, 0) >= read_count(most, DEFAULT_MAX_ATTEMPTS)
    if not redelivered:
        return Isolation.LIMITED if last else Isolation.NONE
    certain = last or read_count(get("crashes"), 0) >= CERTAIN_AFTER
    return Isolation.ALONE if certain else Isolation.LIMITED


def unsettled_limit(care: Isolation, concurrency: int) -> float:
    """Give how many must be unsettled so that nothing is started with this care, or beside it."""
    if care is Isolation.ALONE:
        return min(1, concurrency)
    return concurrency if care is Isolation.LIMITED else inf


def attribute_crash(held: Iterable[Mapping[str, Any]], concurrency: int) -> Iterator[CrashRole]:
    """Judge what a dead worker held, in the order of its claims."""
    started, strictest = 0, Isolation.NONE
    for document in held:
        if not isinstance(document.get("position", 0), int | float):
            yield CrashRole.STARTED  # A hand took it out of its place, and nobody can tell.
            continue
        # Nothing overtakes a task that needs care, so its care holds for what follows, too.
        strictest = max(strictest, isolation_for(document))
        if started >= unsettled_limit(strictest, concurrency):
            yield CrashRole.WAITED
        else:
            started += 1
            yield CrashRole.SUSPECT if started <= concurrency else CrashRole.STARTED


MOST_NAMES = 500
"""So many names of tasks a worker registers."""
AS_CLAIMED = [("started_at", 1), *filters.READY_ORDER]
"""The order in which a worker claimed its tasks, and so starts them."""
JUDGED_BY = dict.fromkeys(
    ["queue", "position", "attempts", "max_attempts", "redelivered", "crashes"], 1
)


def beat(info: WorkerInfo) -> Operation[None]:
    """Register a worker, or renew its registration. Safe to repeat: it writes the same again."""
    document = info.model_dump(exclude={"id"})
    document |= {"worker_id": info.id, "gone_at": info.gone_at(), "late_at": info.late_at()}
    document |= {"blamed": 0, "missed_at": None}
    own = {"_id": _registration(info.id, info.collection)}
    yield Call("update_one", own, {"$set": document}, upsert=True, target=Target.WORKERS)


def leave(worker_id: str, collection: str) -> Operation[None]:
    """Take a worker off the list: it ended, and holds nothing."""
    own = {"_id": _registration(worker_id, collection)}
    yield Call("delete_one", own, target=Target.WORKERS)


def _registration(worker_id: str, collection: str) -> str:
    """Name a registration: a worker of several collections has one for each."""
    return f"{worker_id}@{collection}"


def list_workers(collection: str) -> Operation[list[WorkerInfo]]:
    """Read who is registered, the longest running first."""
    here = {"collection": collection}
    found = yield Call("find", here, sort=[("started_at", 1), ("_id", 1)], target=Target.WORKERS)
    return [_read(document) for document in found]


def served_names(collection: str, now: datetime) -> Operation[list[ServedNames]]:
    """List by queue which names of tasks the living workers serve."""
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


def reclaim_orphaned(
    collection: str,
    now: datetime,
    settings: QueueSettings,
    queues: Queues = None,
    progress: Progress | None = None,
) -> Operation[None]:
    """Reclaim the tasks of workers whose heartbeat has ended: they wait again, or are buried.

    A worker is taken off the list only after its tasks were, so a sweeper that dies half
    way leaves the rest to the next one; and one of some queues, what is in the others.
    """
    progress = progress or Progress()
    for document in (yield from _dead(collection, now)):
        worker_id, blamed = _worker_id(document), document.get("blamed", 0)
        left = max((document.get("concurrency") or 1) - blamed, 0)
        if not (yield from progress.proceed()):
            return
        held = yield from _attribute_held(worker_id, left)
        yield from _reclaim_held(worker_id, held, now, settings, queues=queues, progress=progress)
        # Unless it beat again in the meantime: then it was only slow.
        unchanged = {"_id": document["_id"], "heartbeat_at": document["heartbeat_at"]}
        if queues is None or not (yield Call("find_one", _held_by(worker_id), {"_id": 1})):
            yield Call("delete_one", unchanged, target=Target.WORKERS)
        elif more := _blamed_within(queues, held, left):
            # Whoever takes back the rest must not blame as many once more.
            fewer = {"$set": {"blamed": blamed + more}}
            yield Call("update_one", unchanged, fewer, target=Target.WORKERS)
    progress.check_refused()


def _dead(collection: str, now: datetime) -> Operation[list[Document]]:
    """Find the workers that are gone, and note which others are silent."""
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
    """Count how many may not be blamed any more, once those of some queues are taken back."""
    suspects = [one.queue in queues for one in held if one.verdict is CrashRole.SUSPECT]
    return left if all(suspects) else sum(suspects)


def reclaim_from(
    worker_id: str,
    now: datetime,
    settings: QueueSettings,
    *,
    concurrency: int,
    queues: Queues = None,
) -> Operation[Progress]:
    """Reclaim what one worker holds, in all queues or in some: it waits again, or is buried.

    A crash is counted only against those that may have been running, and an attempt only of
    those that may have been started; :mod:`microqueue.operations.workers` tells which.
    """
    progress = Progress()
    held = yield from _attribute_held(worker_id, concurrency)
    yield from _reclaim_held(worker_id, held, now, settings, queues=queues, progress=progress)
    progress.check_refused()
    return progress


class Attributed(NamedTuple):
    """A task that a dead worker held, and what it had to do with its end."""

    id: Any
    queue: Any
    verdict: CrashRole


def _attribute_held(worker_id: str, concurrency: int) -> Operation[list[Attributed]]:
    held = yield Call("find", _held_by(worker_id), JUDGED_BY, sort=AS_CLAIMED)
    return [
        Attributed(document["_id"], document.get("queue"), verdict)
        for document, verdict in zip(held, attribute_crash(held, concurrency), strict=True)
    ]


def _reclaim_held(
    worker_id: str,
    judged: Sequence[Attributed],
    now: datetime,
    settings: QueueSettings,
    *,
    queues: Queues,
    progress: Progress,
) -> Operation[None]:
    # A worker that was only slow may claim on: what it claims from now on is not taken.
    selection = {**_held_by(worker_id), **within(queues), **not_after("started_at", now)}
    # An id that a hand wrote may be a document, which cannot be looked up.
    verdicts = {repr(one.id): one.verdict for one in judged}
    # Crash attribution judges all that it held together, so this is not left half done.
    batches = Batches.of(selection, WITHOUT_PAYLOAD, sort=AS_CLAIMED)
    while held := (yield from batches.next(settings.batch_size)):
        yield from progress.proceed()
        ended: list[FencedSettlement] = []
        for document in held:
            task: Task[Any] = Task.from_document(document)
            # One that was claimed in between: nobody can tell.
            verdict = verdicts.get(repr(task.id), CrashRole.STARTED)
            ended.append(
                FencedSettlement(task, _crash(task, now, settings, verdict), filters.claimed(task))
            )
        count = yield from settle.settle_reclaimed(
            ended, now=now, settings=settings, progress=progress
        )
        batches.wrote(count)


def _held_by(worker_id: str) -> Document:
    return {**filters.LEASED, "worker_id": worker_id}


def _crash(
    task: Task[Any], now: datetime, settings: QueueSettings, verdict: CrashRole
) -> Settlement:
    if verdict is CrashRole.WAITED:
        return settle.released(task, now, front=False)
    suspect = verdict is CrashRole.SUSPECT
    worker_id = task.lease.worker_id if task.lease else None
    crashes = task.crashes + suspect
    message = f"the worker {worker_id} ended without settling the task"
    error = TaskError.trusted(message=message, code="worker_gone", at=now)
    if suspect and crashes >= settings.max_crashes:
        message = f"{crashes} workers ended while they ran this task; the last was {worker_id}"
        error = TaskError.trusted(message=message, code="poison", at=now)
        settlement = settle.failed(now, error, outcome=Outcome.CRASHED)
    else:
        policy = task.backoff or settings.backoff
        delay_sec = policy.delay_seconds(task.attempts, previous=task.backoff_sec)
        settlement = settle.retried(task, now, error, delay_sec=delay_sec, outcome=Outcome.CRASHED)
    settlement.changes["redelivered"] = True
    if suspect:
        settlement.increments["crashes"] = 1
    return settlement


def _read(document: Document) -> WorkerInfo:
    fields = {name: document.get(name) for name in WorkerInfo.model_fields if name != "id"}
    return WorkerInfo.trusted(id=_worker_id(document), **fields)


def _worker_id(document: Document) -> str:
    return str(document.get("worker_id") or document["_id"])
