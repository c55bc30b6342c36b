"""The routes that act on dead letters: replay, discard, edit."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from microqueue.dashboard.context import Context
from microqueue.dashboard.extended import from_json
from microqueue.dashboard.requests import EditAndReplay, Replay, Selection, Shared
from microqueue.dashboard.views import TaskDetail, shown_id
from microqueue.dlq import DeadLetterFilter
from microqueue.errors import TaskNotFound, WrongStatus
from microqueue.payload import check_encodable
from microqueue.task import Task, TaskId, TaskStatus

router = APIRouter()


class ReplayReply(BaseModel):
    """How many letters matched, and how many went back. A dry run only counts.

    ``missing`` are the ids that the queue has no task with.
    """

    matched: int
    replayed: int
    skipped: list[str | int]
    missing: list[str | int]
    dry_run: bool
    queue: str | None
    all_queues: bool


class DiscardReply(BaseModel):
    """How many letters matched, and how many were deleted; ``missing`` as for a replay."""

    matched: int
    discarded: int
    missing: list[str | int]
    dry_run: bool
    queue: str | None
    all_queues: bool


@router.post("/dead-letters/replay")
async def replay(request: Request, shared: Shared, body: Replay) -> ReplayReply:
    """Send dead letters back: now, later, or spread over a period."""
    letters = body.letters(shared)
    options = {
        "reset_attempts": body.reset_attempts,
        "delay": timedelta(seconds=body.delay_sec),
        "spread": timedelta(seconds=body.spread_sec),
        "limit": body.limit,
        "dry_run": body.dry_run,
        "missing_ok": True,
    }
    chosen = await body.chosen(shared)
    await _check_exist(shared, body, chosen)
    if body.dry_run:
        report = await shared.access.call(letters.replay, chosen, **options)
    else:
        async with shared.acting(
            request, "dead_letters.replay", queue=body.queue, target=body.described()
        ) as tally:
            report = await shared.access.call(letters.replay, chosen, **options)
            tally.count = report.replayed
    return ReplayReply(
        matched=report.matched,
        replayed=report.replayed,
        skipped=[shown_id(one) for one in report.skipped],
        missing=[shown_id(one) for one in report.missing],
        dry_run=report.dry_run,
        queue=body.queue,
        all_queues=body.queue is None,
    )


@router.post("/dead-letters/discard")
async def discard(request: Request, shared: Shared, body: Selection) -> DiscardReply:
    """Delete dead letters for good."""
    letters = body.letters(shared)
    where = {"queue": body.queue, "all_queues": body.queue is None}
    chosen = await body.chosen(shared)
    missing = [shown_id(one) for one in await _check_exist(shared, body, chosen)]
    if body.dry_run:
        matched = await shared.access.call(letters.count, chosen)
        matched = matched if body.limit is None else min(matched, body.limit)
        return DiscardReply(matched=matched, discarded=0, missing=missing, dry_run=True, **where)
    async with shared.acting(
        request, "dead_letters.discard", queue=body.queue, target=body.described()
    ) as tally:
        count = await shared.access.call(letters.discard, chosen, limit=body.limit, missing_ok=True)
        tally.count = count
    return DiscardReply(matched=count, discarded=count, missing=missing, dry_run=False, **where)


async def _check_exist(shared: Context, body: Selection, chosen: Any) -> list[TaskId]:
    """Return the ids that there is no task with, or raise if there is a task with none."""
    if isinstance(chosen, DeadLetterFilter):
        return []
    missing: list[TaskId] = await shared.access.call(body.letters(shared).missing, chosen)
    if len(missing) == len(chosen):
        raise TaskNotFound(task_ids=missing, queue=body.queue)
    return missing


@router.post("/dead-letters/{task_id:path}/edit-and-replay")
async def edit_and_replay(
    request: Request, shared: Shared, task_id: str, body: EditAndReplay
) -> TaskDetail:
    """Send a dead letter back with another payload; values left masked stay as they are."""
    document = await shared.document(task_id)
    task: Task[object] = Task.from_document(document)
    given = from_json(body.payload)
    check_encodable({"payload": given}, shared.access.collections.codec_options)
    payload = shared.redactor.restore(given, task.payload)
    letters = shared.access.queue(task.queue).dead_letters
    async with shared.acting(
        request, "dead_letters.edit_and_replay", queue=task.queue, target=task.id
    ) as tally:
        delay = timedelta(seconds=body.delay_sec)
        report = await shared.access.call(letters.edit_and_replay, task.id, payload, delay=delay)
        if not report.replayed:
            needed = TaskStatus.FAILED
            raise WrongStatus(task_id=task.id, status=str(task.status), needed=needed)
        tally.count = 1
    return await shared.detail(task.id)
