"""The routes that act. With ``read_only`` none of them exists. Each is in the audit log."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Body, Depends, Path, Request
from pydantic import BaseModel

from microqueue.clock import later
from microqueue.dashboard.access import AnyQueue
from microqueue.dashboard.context import Context
from microqueue.dashboard.extended import from_json
from microqueue.dashboard.problems import ManualActionsOff, NothingReady
from microqueue.dashboard.requests import Failure, NewTaskBody, Shared, Success
from microqueue.dashboard.views import EnqueuedTask, FieldNote, TaskDetail
from microqueue.errors import MicroqueueError, WrongStatus
from microqueue.operations import administration
from microqueue.payload import check_encodable
from microqueue.sweeper import SweepReport
from microqueue.task import Lease, Task, TaskStatus, name_in
from microqueue.task_ids import new_id

WORKER_ID = f"dashboard:{socket.gethostname()}:{os.getpid()}"

router = APIRouter()

QueueInPath = Annotated[str, Path(min_length=1, max_length=120)]
SuccessBody = Annotated[Success | None, Body()]
FailureBody = Annotated[Failure | None, Body()]
Settlement: TypeAlias = Callable[[AnyQueue, Task[Any]], Awaitable[Any]]


def manual_actions(shared: Shared) -> None:
    """Reject what settles a task that no worker ran, unless that is allowed here."""
    if not shared.options.manual_actions:
        raise ManualActionsOff


MANUAL = [Depends(manual_actions)]


class Paused(BaseModel):
    """Whether a queue is paused now."""

    queue: str
    paused: bool


@router.post("/tasks", status_code=HTTPStatus.CREATED)
async def enqueue(request: Request, shared: Shared, body: NewTaskBody) -> EnqueuedTask:
    """Add a task by hand. What is not valid is rejected before anything is stored."""
    queue = shared.access.queue(body.queue)
    given: dict[str, Any] = {
        "priority": body.priority,
        "delay": body.delay_sec,
        "max_attempts": body.max_attempts,
        "dedupe_key": body.dedupe_key,
        "expires_in": body.expires_in_sec,
        "headers": from_json(body.named_headers(), name="headers"),
    }
    if body.task_id is not None:
        chosen = body.task_id
        given["task_id"] = new_id(chosen) if isinstance(chosen, str) else chosen
    payload = from_json(body.payload)
    name = name_in(given["headers"])
    await shared.check_payload(queue.name, name, payload)
    warnings = await _doubts(shared, queue.name, name)
    async with shared.acting(request, "task.enqueue", queue=queue.name) as tally:
        task = await shared.access.call(queue.enqueue, payload, **given)
        tally.count = 1
    detail = await shared.detail(task.id)
    return EnqueuedTask(**detail.model_dump(), warnings=warnings)


async def _doubts(shared: Context, queue: str, name: str | None) -> list[FieldNote]:
    """Say if no worker that is alive is known to serve the name, or the lack of one."""
    served = [one for one in await shared.served_names() if one.queue == queue]
    if any(one.any_name for one in served):
        return []
    if name is None:
        message = f"the workers of queue {queue!r} serve named tasks alone"
        return [FieldNote(path="name", message=message)] if served else []
    if name in shared.known_names() or any(name in one.names for one in served):
        return []
    message = f"no worker of queue {queue!r} has registered the name {name!r}"
    return [FieldNote(path="name", message=message)]


@router.post("/tasks/{task_id:path}/cancel")
async def cancel(request: Request, shared: Shared, task_id: str) -> TaskDetail:
    """Fail a task before it is delivered; it can be replayed like any dead letter."""
    task = await _task(shared, task_id)
    async with _acting_on(shared, request, "task.cancel", task) as tally:
        await shared.access.call(shared.access.queue(task.queue).cancel, task.id)
        tally.count = 1
    return await shared.detail(task.id)


@router.post("/tasks/{task_id:path}/release")
async def release(request: Request, shared: Shared, task_id: str) -> TaskDetail:
    """Hand a running task back, its attempt refunded; its worker finds its lease lost."""
    task = await _task(shared, task_id)
    if task.lease is None:
        raise WrongStatus(task_id=task.id, status=str(task.status), needed="processing")
    async with _acting_on(shared, request, "task.release", task) as tally:
        await shared.access.call(shared.access.queue(task.queue).release, task)
        tally.count = 1
    return await shared.detail(task.id)


@router.post("/tasks/{task_id:path}/retry")
async def retry(request: Request, shared: Shared, task_id: str) -> TaskDetail:
    """Make a delayed task ready now, or replay a dead letter."""
    task = await _task(shared, task_id)
    async with _acting_on(shared, request, "task.retry", task) as tally:
        if task.status == TaskStatus.FAILED:
            letters = shared.access.queue(task.queue).dead_letters
            report = await shared.access.call(letters.replay, task.id)
            if not report.replayed:
                raise WrongStatus(task_id=task.id, status="no longer the same", needed="failed")
        else:
            now = await shared.access.now()
            await shared.access.run(administration.run_now(task.id, now))
        tally.count = 1
    return await shared.detail(task.id)


@router.post("/tasks/{task_id:path}/succeed", dependencies=MANUAL)
async def succeed(
    request: Request, shared: Shared, task_id: str, body: SuccessBody = None
) -> TaskDetail:
    """Claim a waiting task and mark it as done; no worker runs it."""
    task = await _task(shared, task_id)
    settlement = _settlement(shared, body or Success())
    async with _acting_on(shared, request, "task.succeed", task) as tally:
        await _settle(shared, await _claim(shared, task), settlement)
        tally.count = 1
    return await shared.detail(task.id)


@router.post("/tasks/{task_id:path}/fail", dependencies=MANUAL)
async def fail(
    request: Request, shared: Shared, task_id: str, body: FailureBody = None
) -> TaskDetail:
    """Claim a waiting task and mark its attempt as failed: it waits again, or is buried."""
    task = await _task(shared, task_id)
    settlement = _settlement(shared, body or Failure())
    async with _acting_on(shared, request, "task.fail", task) as tally:
        await _settle(shared, await _claim(shared, task), settlement)
        tally.count = 1
    return await shared.detail(task.id)


@router.post("/queues/{queue:path}/succeed-next", dependencies=MANUAL)
async def succeed_next(
    request: Request, shared: Shared, queue: QueueInPath, body: SuccessBody = None
) -> TaskDetail:
    """Pop the next task and mark it as done; no worker runs it."""
    return await _process_next(request, shared, queue, "queue.succeed_next", body or Success())


@router.post("/queues/{queue:path}/fail-next", dependencies=MANUAL)
async def fail_next(
    request: Request, shared: Shared, queue: QueueInPath, body: FailureBody = None
) -> TaskDetail:
    """Pop the next task and mark its attempt as failed; no worker runs it."""
    return await _process_next(request, shared, queue, "queue.fail_next", body or Failure())


@router.post("/queues/{queue:path}/pause")
async def pause(request: Request, shared: Shared, queue: QueueInPath) -> Paused:
    """Stop deliveries from a queue, for all workers."""
    chosen = shared.access.queue(queue)
    async with shared.acting(request, "queue.pause", queue=chosen.name) as tally:
        await shared.access.call(chosen.pause, reason=f"by {tally.who}")
        tally.count = 1
    return Paused(queue=chosen.name, paused=True)


@router.post("/queues/{queue:path}/resume")
async def resume(request: Request, shared: Shared, queue: QueueInPath) -> Paused:
    """Let a queue go on."""
    chosen = shared.access.queue(queue)
    async with shared.acting(request, "queue.resume", queue=chosen.name) as tally:
        tally.count = int(await shared.access.call(chosen.resume))
    return Paused(queue=chosen.name, paused=False)


@router.post("/sweeper/run")
async def sweep(request: Request, shared: Shared) -> SweepReport:
    """Sweep all queues now."""
    async with shared.acting(request, "sweeper.run") as tally:
        report: SweepReport = await shared.access.call(shared.access.sweeper().run_once)
        ended = report.buried + report.expired + report.purged
        tally.count = report.reclaimed + report.promoted + ended
    return report


def _acting_on(shared: Context, request: Request, action: str, task: Task[Any]) -> Any:
    return shared.acting(request, action, queue=task.queue, target=task.id)


async def _task(shared: Context, task_id: str) -> Task[Any]:
    return Task.from_document(await shared.document(task_id))


async def _claim(shared: Context, task: Task[Any]) -> Task[Any]:
    """Claim a task for a moment: long enough to settle it."""
    now = await shared.access.now()
    lease = Lease(
        token=secrets.token_hex(12),
        worker_id=WORKER_ID,
        started_at=now,
        expires_at=later(now, shared.access.settings.visibility_timeout),
    )
    return Task.from_document(await shared.access.run(administration.claim_one(task.id, lease)))


async def _process_next(
    request: Request, shared: Context, name: str, action: str, outcome: Success | Failure
) -> TaskDetail:
    queue = shared.access.queue(name)
    settlement = _settlement(shared, outcome)
    async with shared.acting(request, action, queue=queue.name) as tally:
        task = await shared.access.call(queue.pop, worker_id=WORKER_ID)
        if task is None:
            pause = await shared.access.call(queue.paused)
            raise NothingReady(queue=queue.name, paused=pause is not None)
        await _settle(shared, task, settlement)
        tally.count = 1
    return await shared.detail(task.id)


def _settlement(shared: Context, outcome: Success | Failure) -> Settlement:
    """Make what settles a claimed task; what is not valid is refused before one is claimed."""
    if isinstance(outcome, Success):
        result = from_json(outcome.result, name="result")
        check_encodable({"result": result}, shared.access.collections.codec_options)
        return lambda queue, task: shared.access.call(queue.mark_done, task, result=result)
    message, code = outcome.message, outcome.code
    return lambda queue, task: shared.access.call(queue.mark_retry, task, message, code=code)


async def _settle(shared: Context, task: Task[Any], settlement: Settlement) -> None:
    queue = shared.access.queue(task.queue)
    try:
        await settlement(queue, task)
    except MicroqueueError:
        with suppress(MicroqueueError):  # Why it was not settled matters more.
            await shared.access.call(queue.release, task)
        raise
