"""The read-only routes. Equal reads of several viewers are shared."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

import microqueue
from microqueue.backoff import BackoffPolicy
from microqueue.dashboard.context import DashboardState
from microqueue.dashboard.requests import (
    Cursor,
    DashboardContext,
    DeadLetterQuery,
    Exact,
    Instant,
    Limit,
    QueueName,
    Text,
    WaitSec,
)
from microqueue.dashboard.task_views import TaskDetail, TaskResult, TaskRow
from microqueue.dead_letter_models import DeadLetterGroup, DeadLetterGroups
from microqueue.insights import (
    MinuteCounts,
    NameList,
    NameStats,
    Overview,
    QueueOverview,
    RunningTask,
    TaskFilter,
    TaskPage,
    WorkerView,
)
from microqueue.masking import MASK
from microqueue.model import changed
from microqueue.operations import audit
from microqueue.operations.call import Document
from microqueue.operations.dead_letters import groups as group_dead_letters
from microqueue.reports import AuditPage, ServedNames
from microqueue.sweeper import SweepReport
from microqueue.task_filter import State


class Scope(BaseModel):
    """The queue that a reply is about, or all queues."""

    queue: str | None
    all_queues: bool


class Config(BaseModel):
    """The settings that the page needs. ``at`` is the server's time."""

    at: datetime
    queue: str
    version: str
    read_only: bool
    auth: bool
    visibility_timeout_sec: float
    max_attempts: int
    backoff: BackoffPolicy
    retention_sec: float | None
    audit_retention_sec: float
    page_limit: int
    redacts: bool
    mask: str
    can_pause: bool
    manual_actions: bool
    live: Literal["change_stream", "polling", "idle"]


class OverviewReply(BaseModel):
    """The queues, workers and last sweeps."""

    at: datetime
    queues: list[QueueOverview]
    minutes: MinuteCounts
    workers: list[WorkerView]
    last_sweep: SweepReport | None
    last_active_sweep: SweepReport | None


class QueuesReply(BaseModel):
    """The queues with their counts."""

    at: datetime
    queues: list[QueueOverview]


class WorkersReply(BaseModel):
    """The registered workers and their running tasks."""

    at: datetime
    workers: list[WorkerView]


class TaskNamesReply(Scope):
    """The task names that live workers have registered, by queue.

    ``known`` are the names of the tasks that the dashboard checks payloads against.
    """

    at: datetime
    queues: list[ServedNames]
    known: list[str]


class NamesReply(Scope):
    """Tasks by name; ``since`` is the start of the period of what ended.

    The names with the most tasks, of ``total``. The name of tasks without one is null.
    """

    at: datetime
    since: datetime
    names: list[NameStats]
    total: int


class RunningReply(Scope):
    """Running tasks by the expiry of their lease; ``estimated``: the total is an estimate."""

    at: datetime
    total: int
    estimated: bool
    items: list[RunningTask]


class TasksReply(Scope):
    """A page of tasks. If it is not ``complete``, more may follow at ``next_cursor``."""

    at: datetime
    items: list[TaskRow]
    next_cursor: str | None
    complete: bool = True


class GroupsReply(Scope):
    """Dead letters by code and normalised message, the largest groups first.

    ``more_groups`` is the number of smaller groups left out; ``total`` includes them.
    ``truncated``: older dead letters were not examined.
    """

    at: datetime
    total: int
    truncated: bool
    groups: list[DeadLetterGroup]
    more_groups: int


class SweeperReply(BaseModel):
    """The last sweep, and the last one that changed something."""

    at: datetime
    last_sweep: SweepReport | None
    last_active_sweep: SweepReport | None


EXPORT_PAGE = 500
LONGEST_PERIOD_SEC = 31 * 86_400
MAX_GROUPS = 200
EXPORT_BYTES = 8_000_000
"""How much of an export is built at a time, plus at most one task."""

router = APIRouter()


@router.get("/config")
async def config(context: DashboardContext) -> Config:
    """Return the settings of the dashboard, and the server's time."""
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
        backoff=settings.backoff,
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
    """Return the queues, workers and last sweeps."""
    found: Overview = await context.overview(exact=exact)
    return OverviewReply.model_construct(
        **{name: getattr(found, name) for name in OverviewReply.model_fields}
    )


@router.get("/queues")
async def queues(context: DashboardContext, exact: Exact = False) -> QueuesReply:  # noqa: FBT002 (as above)
    """Return the queues with their counts."""
    found: Overview = await context.overview(exact=exact)
    return QueuesReply.model_construct(at=found.at, queues=list(found.queues))


@router.get("/workers")
async def workers(context: DashboardContext) -> WorkersReply:
    """Return the registered workers, whether they are alive, and their running tasks."""
    found: Overview = await context.overview()
    return WorkersReply.model_construct(at=found.at, workers=list(found.workers))


@router.get("/running")
async def running(
    context: DashboardContext, queue: QueueName = None, limit: Limit = 200
) -> RunningReply:
    """List running tasks with the expiry of their leases."""
    limit = min(limit, context.options.page_limit)
    found: Overview = await context.overview()
    rows = [row for row in found.running if queue is None or row.queue == queue]
    counted = [one for one in found.queues if queue is None or one.queue == queue]
    total = sum(one.processing for one in counted)
    estimated = any("processing" in one.estimated for one in counted)
    if len(rows) < min(limit, total):  # The overview has only the first leases of all queues.
        rows = await context.read_cache.get(
            ("running", queue, limit),
            lambda: context.access.call(context.access.insights.running, queue, limit=limit),
        )
    shown = [changed(row, progress=context.views.progress(row.progress)) for row in rows[:limit]]
    return RunningReply.model_construct(
        at=found.at,
        total=total,
        estimated=estimated,
        items=shown,
        queue=queue,
        all_queues=queue is None,
    )


@router.get("/task-names")
async def task_names(context: DashboardContext, queue: QueueName = None) -> TaskNamesReply:
    """List the task names that live workers have registered."""
    served = await context.served_names()
    return TaskNamesReply.model_construct(
        at=await context.access.now(),
        queues=[one for one in served if queue in {None, one.queue}],
        known=context.known_names(),
        queue=queue,
        all_queues=queue is None,
    )


@router.get("/names")
async def names(
    context: DashboardContext,
    *,
    queue: QueueName = None,
    since_sec: Annotated[float, Query(gt=0, le=LONGEST_PERIOD_SEC)] = 3600,
    limit: Limit = 100,
    exact: Exact = False,
) -> NamesReply:
    """Count and measure tasks by name: what waits, what runs, and what ended in a period."""

    async def read() -> NamesReply:
        found: NameList = await context.access.call(
            context.access.insights.by_name, queue, since=since_sec, limit=limit, exact=exact
        )
        return NamesReply.model_construct(**dict(found), queue=queue, all_queues=queue is None)

    key = ("names", queue, since_sec, limit, exact)
    reply: NamesReply = await context.read_cache.get(key, read)
    return reply


@router.get("/tasks")
async def tasks(
    context: DashboardContext,
    *,
    queue: QueueName = None,
    name: Text = None,
    status: State | None = None,
    code: Text = None,
    text: Text = None,
    since: Instant = None,
    until: Instant = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> TasksReply:
    """List tasks, newest first."""
    task_filter = TaskFilter(
        queue=queue, name=name, status=status, code=code, text=text, since=since, until=until
    )
    limit = min(limit, context.options.page_limit)

    async def read() -> TasksReply:
        found = await context.access.call(
            context.access.insights.tasks,
            task_filter,
            limit=limit,
            cursor=cursor,
            mask=context.redactor.mask,
            convert=context.views.row,
        )
        return _tasks_reply(found, queue)

    reply: TasksReply = await context.read_cache.get(
        ("tasks", repr(task_filter), limit, cursor), read
    )
    return reply


@router.get("/tasks/{task_id:path}")
async def task(context: DashboardContext, task_id: str) -> TaskDetail:
    """Return a task with all fields."""
    document = await context.document(task_id)
    return context.views.detail(document, await context.access.now())


@router.get("/results/{task_id:path}")
async def result(context: DashboardContext, task_id: str, wait: WaitSec = 0) -> TaskResult:
    """Return the result of a task; with ``wait``, as soon as the task is finished."""
    document = await context.document(task_id)
    found = await context.access.wait_for(document["_id"], wait)
    detail = context.views.detail(found or document, await context.access.now())
    fields = {name: getattr(detail, name) for name in TaskResult.model_fields if name != "finished"}
    return TaskResult.model_construct(**fields, finished=found is not None)


@router.get("/dead-letters")
async def dead_letters(
    context: DashboardContext,
    query: Annotated[DeadLetterQuery, Depends()],
    limit: Limit = 50,
    cursor: Cursor = None,
) -> TasksReply:
    """List dead letters of one queue or of all queues, newest first."""
    limit = min(limit, context.options.page_limit)

    async def read() -> TasksReply:
        found = await _list_dead_letters(
            context, query, limit=limit, cursor=cursor, convert=context.views.row
        )
        return _tasks_reply(found, query.queue)

    key = ("dead-letters", query.queue, repr(query.filter), limit, cursor)
    reply: TasksReply = await context.read_cache.get(key, read)
    return reply


@router.get("/dead-letters/groups")
async def groups(
    context: DashboardContext, query: Annotated[DeadLetterQuery, Depends()]
) -> GroupsReply:
    """Group dead letters of one queue or of all queues by error code and normalised message."""

    async def read() -> GroupsReply:
        queues = (
            await context.access.names()
            if query.queue is None
            else context.access.queue(query.queue).name
        )
        found: DeadLetterGroups = await context.access.run(
            group_dead_letters(
                queues,
                query.filter,
                context.access.settings,
                shown=context.redactor.text,
            )
        )
        return GroupsReply.model_construct(
            at=await context.access.now(),
            total=found.total,
            truncated=found.truncated,
            groups=list(found.groups[:MAX_GROUPS]),
            more_groups=max(len(found.groups) - MAX_GROUPS, 0),
            queue=query.queue,
            all_queues=query.queue is None,
        )

    key = ("groups", query.queue, repr(query.filter))
    reply: GroupsReply = await context.read_cache.get(key, read)
    return reply


@router.get(
    "/dead-letters/export",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {}}}},
)
async def export(
    context: DashboardContext, query: Annotated[DeadLetterQuery, Depends()]
) -> StreamingResponse:
    """Export all matching dead letters of one queue or of all queues as JSON lines."""
    first = await _export_page(context, query, None)

    async def lines() -> AsyncIterator[str]:
        found = first
        while True:
            for line in found.documents:
                yield line
            if found.next_cursor is None:
                return
            found = await _export_page(context, query, found.next_cursor)

    return StreamingResponse(
        lines(),
        media_type="application/x-ndjson",
        headers={"Content-Disposition": 'attachment; filename="dead-letters.jsonl"'},
    )


@router.get("/sweeper")
async def sweeper(context: DashboardContext) -> SweeperReply:
    """Return the last sweep, and the last one that changed something."""
    found: Overview = await context.overview()
    return SweeperReply.model_construct(
        at=found.at, last_sweep=found.last_sweep, last_active_sweep=found.last_active_sweep
    )


@router.get("/audit")
async def audit_log(
    context: DashboardContext, limit: Limit = 50, cursor: Cursor = None
) -> AuditPage:
    """List the actions of viewers, newest first."""
    limit = min(limit, context.options.page_limit)

    async def read() -> AuditPage:
        now = await context.access.now()
        collection = context.access.collections.name
        found: AuditPage = await context.access.run(
            audit.page(collection, now=now, limit=limit, cursor=cursor)
        )
        return found

    reply: AuditPage = await context.read_cache.get(("audit", limit, cursor), read)
    return reply


async def _export_page(
    context: DashboardState, query: DeadLetterQuery, cursor: str | None
) -> TaskPage:
    """Return a page of dead letters as JSON lines, shorter if they are large."""
    size = 0

    def line(document: Document, now: datetime) -> str:
        nonlocal size
        detail = context.views.detail(document, now)
        text = json.dumps(detail.model_dump(mode="json", exclude={"actions", "at"})) + "\n"
        size += len(text)
        return text

    return await _list_dead_letters(
        context,
        query,
        limit=EXPORT_PAGE,
        cursor=cursor,
        convert=line,
        stop=lambda: size > EXPORT_BYTES,
    )


async def _list_dead_letters(
    context: DashboardState, query: DeadLetterQuery, **options: Any
) -> TaskPage:
    found: TaskPage = await context.access.call(
        context.access.insights.dead_letters,
        None if query.queue is None else context.access.queue(query.queue).name,
        query.filter,
        mask=context.redactor.text,
        **options,
    )
    return found


def _tasks_reply(found: TaskPage, queue: str | None) -> TasksReply:
    return TasksReply(
        at=found.at,
        items=list(found.documents),
        next_cursor=found.next_cursor,
        complete=found.complete,
        queue=queue,
        all_queues=queue is None,
    )
