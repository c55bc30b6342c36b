"""The routes that act on dead letters: replay, discard, edit."""

from __future__ import annotations

from datetime import timedelta

from fastapi import APIRouter, Request
from pydantic import BaseModel

from microqueue.dashboard.extended import from_json
from microqueue.dashboard.requests import EditAndReplay, Replay, Selection, Shared
from microqueue.dashboard.views import TaskDetail, shown_id
from microqueue.errors import WrongStatus
from microqueue.payload import check_encodable
from microqueue.task import Task, TaskStatus

router = APIRouter()


class ReplayReply(BaseModel):
    """How many letters matched, and how many went back. A dry run only counts."""

    matched: int
    replayed: int
    skipped: list[str | int]
    dry_run: bool


class DiscardReply(BaseModel):
    """How many letters matched, and how many were deleted."""

    matched: int
    discarded: int
    dry_run: bool


@router.post("/dead-letters/replay")
async def replay(request: Request, shared: Shared, body: Replay) -> ReplayReply:
    """Send dead letters back: now, later, or spread over a period."""
    queue = shared.access.queue(body.queue)
    options = {
        "reset_attempts": body.reset_attempts,
        "delay": timedelta(seconds=body.delay_sec),
        "spread": timedelta(seconds=body.spread_sec),
        "limit": body.limit,
        "dry_run": body.dry_run,
    }
    chosen = await body.chosen(shared)
    if body.dry_run:
        report = await shared.access.call(queue.dead_letters.replay, chosen, **options)
    else:
        async with shared.acting(
            request, "dead_letters.replay", queue=queue.name, target=body.described()
        ) as tally:
            report = await shared.access.call(queue.dead_letters.replay, chosen, **options)
            tally.count = report.replayed
    return ReplayReply(
        matched=report.matched,
        replayed=report.replayed,
        skipped=[shown_id(one) for one in report.skipped],
        dry_run=report.dry_run,
    )


@router.post("/dead-letters/discard")
async def discard(request: Request, shared: Shared, body: Selection) -> DiscardReply:
    """Delete dead letters for good."""
    queue = shared.access.queue(body.queue)
    chosen = await body.chosen(shared)
    if body.dry_run:
        matched = await shared.access.call(queue.dead_letters.count, chosen)
        matched = matched if body.limit is None else min(matched, body.limit)
        return DiscardReply(matched=matched, discarded=0, dry_run=True)
    async with shared.acting(
        request, "dead_letters.discard", queue=queue.name, target=body.described()
    ) as tally:
        count = await shared.access.call(queue.dead_letters.discard, chosen, limit=body.limit)
        tally.count = count
    return DiscardReply(matched=count, discarded=count, dry_run=False)


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
