"""The routes that change something. All record an entry in the audit log.

With the option ``read_only`` none of them exists.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Body, Depends, Path, Request, Response
from pydantic import BaseModel

from microqueue.clock import later
from microqueue.dashboard.access import AnyQueue
from microqueue.dashboard.context import DashboardState
from microqueue.dashboard.payloads import from_extended_json
from microqueue.dashboard.problems import ManualActionsOff, NothingReady
from microqueue.dashboard.requests import (
    DashboardContext,
    EditAndReplay,
    Failure,
    NewTaskBody,
    Replay,
    Selection,
    Success,
)
from microqueue.dashboard.task_views import EnqueuedTask, FieldNote, TaskDetail, shown_id
from microqueue.dead_letter_models import DeadLetterFilter
from microqueue.errors import MicroqueueError, TaskNotFound, WrongStatus
from microqueue.operations import administration
from microqueue.payload import check_encodable
from microqueue.sweeper import SweepReport
from microqueue.task import Lease, Task, TaskId, TaskStatus, name_in, read_task
from microqueue.task_ids import new_id

WORKER_ID = f"dashboard:{socket.gethostname()}:{os.getpid()}"

router = APIRouter()

QueueInPath = Annotated[str, Path(min_length=1, max_length=120)]
SuccessBody = Annotated[Success | None, Body()]
FailureBody = Annotated[Failure | None, Body()]
Settlement: TypeAlias = Callable[[AnyQueue, Task[Any]], Awaitable[Any]]


def require_manual_actions(context: DashboardContext) -> None:
    """Reject manual actions unless the option allows them."""
    if not context.options.manual_actions:
        raise ManualActionsOff


MANUAL = [Depends(require_manual_actions)]


class Paused(BaseModel):
    """Whether a queue is paused."""

    queue: str
    paused: bool


@router.post("/tasks", status_code=HTTPStatus.CREATED)
async def enqueue(
    request: Request, response: Response, context: DashboardContext, body: NewTaskBody
) -> EnqueuedTask:
    """Enqueue a task. Invalid fields are rejected before anything is stored.

    The status is 200 instead of 201 if the task existed, and ``on_duplicate`` is not ``raise``.
    """
    queue = context.access.queue(body.queue)
    options = body.arguments("queue", "payload")
    if isinstance(body.task_id, str):
        options["task_id"] = new_id(body.task_id)
    payload = from_extended_json(body.payload)
    name = body.name or name_in(options["headers"])
    await context.check_payload(queue.name, name, payload)
    warnings = await _name_warnings(context, queue.name, name)
    async with context.audited(request, "task.enqueue", queue=queue.name) as action:
        task = await context.access.call(queue.enqueue, payload, **options)
        returned = task.is_duplicate and body.on_duplicate == "return"
        action.count = 0 if returned else 1
    if task.is_duplicate:
        response.status_code = HTTPStatus.OK
    detail = await context.detail(task.id)
    return EnqueuedTask(**detail.model_dump(), warnings=warnings, is_duplicate=task.is_duplicate)


async def _name_warnings(context: DashboardState, queue: str, name: str | None) -> list[FieldNote]:
    """Warn if no live worker of the queue runs tasks of this name, or without one."""
    served = [one for one in await context.served_names() if one.queue == queue]
    if any(one.any_name for one in served):
        return []
    if name is None:
        message = f"the workers of queue {queue!r} run named tasks only"
        return [FieldNote(path="name", message=message)] if served else []
    if name in context.known_names() or any(name in one.names for one in served):
        return []
    message = f"no worker of queue {queue!r} has registered the task name {name!r}"
    return [FieldNote(path="name", message=message)]


@router.post("/tasks/{task_id:path}/cancel")
async def cancel(request: Request, context: DashboardContext, task_id: str) -> TaskDetail:
    """Cancel a task. It becomes a dead letter, which can be replayed."""
    task = await _task(context, task_id)
    async with _audited(context, request, "task.cancel", task) as action:
        await context.access.call(context.access.queue(task.queue).cancel, task.id)
        action.count = 1
    return await context.detail(task.id)


@router.post("/tasks/{task_id:path}/release")
async def release(request: Request, context: DashboardContext, task_id: str) -> TaskDetail:
    """Release a running task and refund its attempt; its worker loses the lease."""
    task = await _task(context, task_id)
    if task.lease is None:
        raise WrongStatus(task_id=task.id, status=str(task.status), needed="processing")
    async with _audited(context, request, "task.release", task) as action:
        await context.access.call(context.access.queue(task.queue).release, task)
        action.count = 1
    return await context.detail(task.id)


@router.post("/tasks/{task_id:path}/retry")
async def retry(request: Request, context: DashboardContext, task_id: str) -> TaskDetail:
    """Make a delayed task ready now, or replay a dead letter."""
    task = await _task(context, task_id)
    async with _audited(context, request, "task.retry", task) as action:
        if task.status == TaskStatus.FAILED:
            dead_letters = context.access.queue(task.queue).dead_letters
            report = await context.access.call(dead_letters.replay, task.id)
            if not report.replayed:
                raise WrongStatus(task_id=task.id, status="no longer the same", needed="failed")
        else:
            now = await context.access.now()
            await context.access.run(administration.run_now(task.id, now))
        action.count = 1
    return await context.detail(task.id)


@router.post("/tasks/{task_id:path}/succeed", dependencies=MANUAL)
async def succeed(
    request: Request, context: DashboardContext, task_id: str, body: SuccessBody = None
) -> TaskDetail:
    """Mark a pending task as done without running it."""
    task = await _task(context, task_id)
    settlement = _settlement(context, body or Success())
    async with _audited(context, request, "task.succeed", task) as action:
        await _settle(context, await _claim(context, task), settlement)
        action.count = 1
    return await context.detail(task.id)


@router.post("/tasks/{task_id:path}/fail", dependencies=MANUAL)
async def fail(
    request: Request, context: DashboardContext, task_id: str, body: FailureBody = None
) -> TaskDetail:
    """Mark an attempt of a pending task as failed without running it.

    The task is retried after its backoff, or becomes a dead letter after its last attempt.
    """
    task = await _task(context, task_id)
    settlement = _settlement(context, body or Failure())
    async with _audited(context, request, "task.fail", task) as action:
        await _settle(context, await _claim(context, task), settlement)
        action.count = 1
    return await context.detail(task.id)


@router.post("/queues/{queue:path}/succeed-next", dependencies=MANUAL)
async def succeed_next(
    request: Request, context: DashboardContext, queue: QueueInPath, body: SuccessBody = None
) -> TaskDetail:
    """Mark the next ready task of a queue as done without running it."""
    return await _settle_next(request, context, queue, "queue.succeed_next", body or Success())


@router.post("/queues/{queue:path}/fail-next", dependencies=MANUAL)
async def fail_next(
    request: Request, context: DashboardContext, queue: QueueInPath, body: FailureBody = None
) -> TaskDetail:
    """Mark an attempt of the next ready task of a queue as failed without running it."""
    return await _settle_next(request, context, queue, "queue.fail_next", body or Failure())


@router.post("/queues/{queue:path}/pause")
async def pause(request: Request, context: DashboardContext, queue: QueueInPath) -> Paused:
    """Pause a queue for all workers."""
    chosen = context.access.queue(queue)
    async with context.audited(request, "queue.pause", queue=chosen.name) as action:
        await context.access.call(chosen.pause, reason=f"by {action.who}")
        action.count = 1
    return Paused(queue=chosen.name, paused=True)


@router.post("/queues/{queue:path}/resume")
async def resume(request: Request, context: DashboardContext, queue: QueueInPath) -> Paused:
    """Resume a queue."""
    chosen = context.access.queue(queue)
    async with context.audited(request, "queue.resume", queue=chosen.name) as action:
        action.count = int(await context.access.call(chosen.resume))
    return Paused(queue=chosen.name, paused=False)


@router.post("/sweeper/run")
async def sweep(request: Request, context: DashboardContext) -> SweepReport:
    """Sweep all queues now."""
    async with context.audited(request, "sweeper.run") as action:
        report: SweepReport = await context.access.call(context.access.sweeper().run_once)
        ended = report.buried + report.expired + report.purged
        action.count = report.fired + report.reclaimed + report.promoted + ended
    return report


def _audited(context: DashboardState, request: Request, action: str, task: Task[Any]) -> Any:
    return context.audited(request, action, queue=task.queue, target=task.id)


async def _task(context: DashboardState, task_id: str) -> Task[Any]:
    return read_task(await context.document(task_id))


async def _claim(context: DashboardState, task: Task[Any]) -> Task[Any]:
    """Claim a task in order to settle it."""
    now = await context.access.now()
    lease = Lease(
        token=secrets.token_hex(12),
        worker_id=WORKER_ID,
        started_at=now,
        expires_at=later(now, context.access.settings.visibility_timeout),
    )
    return read_task(await context.access.run(administration.claim_one(task.id, lease)))


async def _settle_next(
    request: Request,
    context: DashboardState,
    name: str,
    action_name: str,
    outcome: Success | Failure,
) -> TaskDetail:
    queue = context.access.queue(name)
    settlement = _settlement(context, outcome)
    async with context.audited(request, action_name, queue=queue.name) as action:
        task = await context.access.call(queue.pop, worker_id=WORKER_ID)
        if task is None:
            pause = await context.access.call(queue.paused)
            raise NothingReady(queue=queue.name, paused=pause is not None)
        await _settle(context, task, settlement)
        action.count = 1
    return await context.detail(task.id)


def _settlement(context: DashboardState, outcome: Success | Failure) -> Settlement:
    """Return a function that settles a claimed task; an invalid result is rejected at once."""
    if isinstance(outcome, Success):
        result = from_extended_json(outcome.result, name="result")
        check_encodable({"result": result}, context.access.collections.codec_options)
        return lambda queue, task: context.access.call(queue.mark_done, task, result=result)
    message, code = outcome.message, outcome.code
    return lambda queue, task: context.access.call(queue.mark_retry, task, message, code=code)


async def _settle(context: DashboardState, task: Task[Any], settlement: Settlement) -> None:
    queue = context.access.queue(task.queue)
    try:
        await settlement(queue, task)
    except MicroqueueError:
        with suppress(MicroqueueError):  # The first error matters more.
            await context.access.call(queue.release, task)
        raise


dead_letter_router = APIRouter()


class ReplayReply(BaseModel):
    """How many dead letters matched, and how many were replayed. A dry run only counts.

    ``skipped`` have a dedupe key that is in use. ``missing`` are ids without a task.
    """

    matched: int
    replayed: int
    skipped: list[str | int]
    missing: list[str | int]
    dry_run: bool
    queue: str | None
    all_queues: bool


class DiscardReply(BaseModel):
    """How many dead letters matched and were deleted; ``missing`` are ids without a task."""

    matched: int
    discarded: int
    missing: list[str | int]
    dry_run: bool
    queue: str | None
    all_queues: bool


@dead_letter_router.post("/dead-letters/replay")
async def replay(request: Request, context: DashboardContext, body: Replay) -> ReplayReply:
    """Replay dead letters: now, after a delay, or spread over a period."""
    dead_letters = body.dead_letters(context)
    options = {
        "reset_attempts": body.reset_attempts,
        "delay": timedelta(seconds=body.delay_sec),
        "spread": timedelta(seconds=body.spread_sec),
        "limit": body.limit,
        "dry_run": body.dry_run,
        "missing_ok": True,
    }
    selected = await body.resolve(context)
    await _find_missing(context, body, selected)
    if body.dry_run:
        report = await context.access.call(dead_letters.replay, selected, **options)
    else:
        async with context.audited(
            request, "dead_letters.replay", queue=body.queue, target=body.describe()
        ) as action:
            report = await context.access.call(dead_letters.replay, selected, **options)
            action.count = report.replayed
    return ReplayReply(
        matched=report.matched,
        replayed=report.replayed,
        skipped=[shown_id(one) for one in report.skipped],
        missing=[shown_id(one) for one in report.missing],
        dry_run=report.dry_run,
        queue=body.queue,
        all_queues=body.queue is None,
    )


@dead_letter_router.post("/dead-letters/discard")
async def discard(request: Request, context: DashboardContext, body: Selection) -> DiscardReply:
    """Delete dead letters permanently."""
    dead_letters = body.dead_letters(context)
    where = {"queue": body.queue, "all_queues": body.queue is None}
    selected = await body.resolve(context)
    missing = [shown_id(one) for one in await _find_missing(context, body, selected)]
    if body.dry_run:
        matched = await context.access.call(dead_letters.count, selected)
        matched = matched if body.limit is None else min(matched, body.limit)
        return DiscardReply(matched=matched, discarded=0, missing=missing, dry_run=True, **where)
    async with context.audited(
        request, "dead_letters.discard", queue=body.queue, target=body.describe()
    ) as action:
        count = await context.access.call(
            dead_letters.discard, selected, limit=body.limit, missing_ok=True
        )
        action.count = count
    return DiscardReply(matched=count, discarded=count, missing=missing, dry_run=False, **where)


async def _find_missing(
    context: DashboardState, body: Selection, selected: DeadLetterFilter | list[TaskId]
) -> list[TaskId]:
    """Return the ids without a task; raise TaskNotFound if that is all of them."""
    if isinstance(selected, DeadLetterFilter):
        return []
    missing: list[TaskId] = await context.access.call(body.dead_letters(context).missing, selected)
    if len(missing) == len(selected):
        raise TaskNotFound(task_ids=missing, queue=body.queue)
    return missing


@dead_letter_router.post("/dead-letters/{task_id:path}/edit-and-replay")
async def edit_and_replay(
    request: Request, context: DashboardContext, task_id: str, body: EditAndReplay
) -> TaskDetail:
    """Replay a dead letter with another payload; masked values keep what is stored."""
    document = await context.document(task_id)
    task = read_task(document)
    edited = from_extended_json(body.payload)
    check_encodable({"payload": edited}, context.access.collections.codec_options)
    payload = context.redactor.restore(edited, task.payload)
    dead_letters = context.access.queue(task.queue).dead_letters
    async with context.audited(
        request, "dead_letters.edit_and_replay", queue=task.queue, target=task.id
    ) as action:
        delay = timedelta(seconds=body.delay_sec)
        report = await context.access.call(
            dead_letters.edit_and_replay, task.id, payload, delay=delay
        )
        if not report.replayed:
            needed = TaskStatus.FAILED
            raise WrongStatus(task_id=task.id, status=str(task.status), needed=needed)
        action.count = 1
    return await context.detail(task.id)
