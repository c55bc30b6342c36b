"""What the routes that only look reply with."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

import microqueue
from microqueue.dashboard.context import Context
from microqueue.dashboard.requests import (
    Cursor,
    DashboardContext,
    Exact,
    Instant,
    LetterQuery,
    Limit,
    QueueName,
    Text,
)
from microqueue.dashboard.views import TaskDetail, TaskRow
from microqueue.dlq import LetterGroup, LetterGroups
from microqueue.insights import (
    MinuteCounts,
    Overview,
    QueueOverview,
    RunningTask,
    TaskFilter,
    TaskPage,
    WorkerView,
)
from microqueue.masking import MASK
from microqueue.operations import audit
from microqueue.operations.call import Document
from microqueue.operations.dead_letters import groups as letter_groups
from microqueue.reports import AuditPage, ServedNames
from microqueue.sweeper import SweepReport
from microqueue.task_filter import State


class Shown(BaseModel):
    """Which queues a reply shows: one, or all."""

    queue: str | None
    all_queues: bool


class Config(BaseModel):
    """What the page has to know before it shows anything. ``at`` is the server's time."""

    at: datetime
    queue: str
    version: str
    read_only: bool
    auth: bool
    visibility_timeout_sec: float
    max_attempts: int
    retention_sec: float | None
    audit_retention_sec: float
    page_limit: int
    redacts: bool
    mask: str
    can_pause: bool
    manual_actions: bool
    live: Literal["change_stream", "polling", "idle"]


class OverviewReply(BaseModel):
    """How everything stands."""

    at: datetime
    queues: list[QueueOverview]
    minutes: MinuteCounts
    workers: list[WorkerView]
    last_sweep: SweepReport | None
    last_active_sweep: SweepReport | None


class QueuesReply(BaseModel):
    """How the queues stand."""

    at: datetime
    queues: list[QueueOverview]


class WorkersReply(BaseModel):
    """Who works, and on what."""

    at: datetime
    workers: list[WorkerView]


class NamesReply(Shown):
    """The names of tasks that living workers have registered, by queue.

    ``known`` are those of the tasks that the dashboard was given; their payloads are checked.
    """

    at: datetime
    queues: list[ServedNames]
    known: list[str]


class RunningReply(Shown):
    """What runs, those whose lease ends soonest first; ``estimated``: the total is an estimate."""

    at: datetime
    total: int
    estimated: bool
    items: list[RunningTask]


class TasksReply(Shown):
    """A page of tasks; not ``complete``: go on with ``next_cursor`` even if there are few."""

    at: datetime
    items: list[TaskRow]
    next_cursor: str | None
    complete: bool = True


class GroupsReply(Shown):
    """Dead letters by code and normalised message, the largest groups first.

    ``more_groups`` is how many smaller ones there are; ``total`` counts their letters too.
    ``truncated``: there are older letters, which were not looked at.
    """

    at: datetime
    total: int
    truncated: bool
    groups: list[LetterGroup]
    more_groups: int


class SweeperReply(BaseModel):
    """What the last sweeps did."""

    at: datetime
    last_sweep: SweepReport | None
    last_active_sweep: SweepReport | None


EXPORT_STEP = 500
MOST_GROUPS = 200
EXPORT_BYTES = 8_000_000
"""How much of an export is written at a time, to within one letter."""

router = APIRouter()


@router.get("/config")
async def config(context: DashboardContext) -> Config:
    """Tell the settings that the page goes by, and the server's time."""
    settings, options = context.access.settings, context.options
    retention = settings.retention
    return Config(
        at=await context.access.now(),
        queue=context.access.name,
        version=microqueue.__version__,
        read_only=options.read_only,
        auth=context.guard.required,
        visibility_timeout_sec=settings.visibility_timeout.total_seconds(),
        max_attempts=settings.max_attempts,
        retention_sec=None if retention is None else retention.total_seconds(),
        audit_retention_sec=options.audit_retention.total_seconds(),
        page_limit=options.page_limit,
        redacts=options.redact is not None,
        mask=MASK,
        can_pause=not options.read_only,
        manual_actions=options.manual_actions,
        live=context.events.live,
    )


@router.get("/overview")
async def overview(context: DashboardContext, exact: Exact = False) -> OverviewReply:  # noqa: FBT002 (a query parameter)
    """Tell how all queues, workers and the sweeper stand."""
    found: Overview = await context.overview(exact=exact)
    return OverviewReply.model_construct(
        **{name: getattr(found, name) for name in OverviewReply.model_fields}
    )


@router.get("/queues")
async def queues(context: DashboardContext, exact: Exact = False) -> QueuesReply:  # noqa: FBT002 (as above)
    """Tell how the queues stand."""
    found: Overview = await context.overview(exact=exact)
    return QueuesReply.model_construct(at=found.at, queues=list(found.queues))


@router.get("/workers")
async def workers(context: DashboardContext) -> WorkersReply:
    """Tell which workers are registered, whether they are alive, and what they hold."""
    found: Overview = await context.overview()
    return WorkersReply.model_construct(at=found.at, workers=list(found.workers))


@router.get("/running")
async def running(
    context: DashboardContext, queue: QueueName = None, limit: Limit = 200
) -> RunningReply:
    """List what runs, with the end of each lease."""
    most = min(limit, context.options.page_limit)
    found: Overview = await context.overview()
    rows = [row for row in found.running if queue is None or row.queue == queue]
    counted = [one for one in found.queues if queue is None or one.queue == queue]
    total = sum(one.processing for one in counted)
    estimated = any("processing" in one.estimated for one in counted)
    if len(rows) < min(most, total):  # The overview holds those that end soonest of all queues.
        rows = await context.read_cache.get(
            ("running", queue, most),
            lambda: context.access.call(context.access.insights.running, queue, limit=most),
        )
    shown = [
        row.model_copy(update={"progress": context.viewer.progress(row.progress)})
        for row in rows[:most]
    ]
    return RunningReply.model_construct(
        at=found.at,
        total=total,
        estimated=estimated,
        items=shown,
        queue=queue,
        all_queues=queue is None,
    )


@router.get("/task-names")
async def task_names(context: DashboardContext, queue: QueueName = None) -> NamesReply:
    """List the names of tasks that workers serve, for whoever enqueues one."""
    served = await context.served_names()
    return NamesReply.model_construct(
        at=await context.access.now(),
        queues=[one for one in served if queue in {None, one.queue}],
        known=context.known_names(),
        queue=queue,
        all_queues=queue is None,
    )


@router.get("/tasks")
async def tasks(
    context: DashboardContext,
    *,
    queue: QueueName = None,
    status: State | None = None,
    code: Text = None,
    text: Text = None,
    since: Instant = None,
    until: Instant = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> TasksReply:
    """Find tasks, newest first."""
    which = TaskFilter(queue=queue, status=status, code=code, text=text, since=since, until=until)
    most = min(limit, context.options.page_limit)

    async def read() -> TasksReply:
        found = await context.access.call(
            context.access.insights.tasks,
            which,
            limit=most,
            cursor=cursor,
            mask=context.redactor.mask,
            convert=context.viewer.row,
        )
        return _listed(found, queue)

    reply: TasksReply = await context.read_cache.get(("tasks", repr(which), most, cursor), read)
    return reply


@router.get("/tasks/{task_id:path}")
async def task(context: DashboardContext, task_id: str) -> TaskDetail:
    """Show all of a task."""
    document = await context.document(task_id)
    return context.viewer.detail(document, await context.access.now())


@router.get("/dead-letters")
async def dead_letters(
    context: DashboardContext,
    query: Annotated[LetterQuery, Depends()],
    limit: Limit = 50,
    cursor: Cursor = None,
) -> TasksReply:
    """List dead letters of a queue, or of all, newest first."""
    most = min(limit, context.options.page_limit)

    async def read() -> TasksReply:
        found = await _letters(
            context, query, limit=most, cursor=cursor, convert=context.viewer.row
        )
        return _listed(found, query.queue)

    key = ("letters", query.queue, repr(query.which), most, cursor)
    reply: TasksReply = await context.read_cache.get(key, read)
    return reply


@router.get("/dead-letters/groups")
async def groups(
    context: DashboardContext, query: Annotated[LetterQuery, Depends()]
) -> GroupsReply:
    """Group dead letters of a queue, or of all, by error code and normalised message."""

    async def read() -> GroupsReply:
        queues = (
            await context.access.names()
            if query.queue is None
            else context.access.queue(query.queue).name
        )
        found: LetterGroups = await context.access.run(
            letter_groups(
                queues,
                query.which,
                context.access.settings,
                shown=context.redactor.text,
            )
        )
        return GroupsReply.model_construct(
            at=await context.access.now(),
            total=found.total,
            truncated=found.truncated,
            groups=list(found.groups[:MOST_GROUPS]),
            more_groups=max(len(found.groups) - MOST_GROUPS, 0),
            queue=query.queue,
            all_queues=query.queue is None,
        )

    key = ("groups", query.queue, repr(query.which))
    reply: GroupsReply = await context.read_cache.get(key, read)
    return reply


@router.get(
    "/dead-letters/export",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {}}}},
)
async def export(
    context: DashboardContext, query: Annotated[LetterQuery, Depends()]
) -> StreamingResponse:
    """Give all dead letters of a queue, or of all, that match, one JSON document per line."""
    first = await _lines(context, query, None)

    async def lines() -> AsyncIterator[str]:
        found = first
        while True:
            for line in found.documents:
                yield line
            if found.next_cursor is None:
                return
            found = await _lines(context, query, found.next_cursor)

    return StreamingResponse(
        lines(),
        media_type="application/x-ndjson",
        headers={"Content-Disposition": 'attachment; filename="dead-letters.jsonl"'},
    )


@router.get("/sweeper")
async def sweeper(context: DashboardContext) -> SweeperReply:
    """Tell what the last sweeps did."""
    found: Overview = await context.overview()
    return SweeperReply.model_construct(
        at=found.at, last_sweep=found.last_sweep, last_active_sweep=found.last_active_sweep
    )


@router.get("/audit")
async def audit_log(
    context: DashboardContext, limit: Limit = 50, cursor: Cursor = None
) -> AuditPage:
    """List what was done by hand, newest first."""
    most = min(limit, context.options.page_limit)

    async def read() -> AuditPage:
        now = await context.access.now()
        place = context.access.collections.name
        found: AuditPage = await context.access.run(
            audit.page(place, now=now, limit=most, cursor=cursor)
        )
        return found

    reply: AuditPage = await context.read_cache.get(("audit", most, cursor), read)
    return reply


async def _lines(context: Context, query: LetterQuery, cursor: str | None) -> TaskPage:
    """Write some letters, few of large ones."""
    size = 0

    def line(document: Document, now: datetime) -> str:
        nonlocal size
        detail = context.viewer.detail(document, now)
        text = json.dumps(detail.model_dump(mode="json", exclude={"actions", "at"})) + "\n"
        size += len(text)
        return text

    return await _letters(
        context,
        query,
        limit=EXPORT_STEP,
        cursor=cursor,
        convert=line,
        stop=lambda: size > EXPORT_BYTES,
    )


async def _letters(context: Context, query: LetterQuery, **options: Any) -> TaskPage:
    found: TaskPage = await context.access.call(
        context.access.insights.dead_letters,
        None if query.queue is None else context.access.queue(query.queue).name,
        query.which,
        mask=context.redactor.text,
        **options,
    )
    return found


def _listed(found: TaskPage, queue: str | None) -> TasksReply:
    return TasksReply(
        at=found.at,
        items=list(found.documents),
        next_cursor=found.next_cursor,
        complete=found.complete,
        queue=queue,
        all_queues=queue is None,
    )
