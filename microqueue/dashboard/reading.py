"""The routes that only look. Nothing here writes; what many ask for is read once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse

import microqueue
from microqueue.dashboard.context import Context
from microqueue.dashboard.replies import (
    Config,
    GroupsReply,
    NamesReply,
    OverviewReply,
    QueuesReply,
    RunningReply,
    SweeperReply,
    TasksReply,
    WorkersReply,
)
from microqueue.dashboard.requests import (
    Cursor,
    Exact,
    Instant,
    LetterQuery,
    Limit,
    QueueName,
    Shared,
    Text,
)
from microqueue.dashboard.views import TaskDetail
from microqueue.dlq import LetterGroups
from microqueue.insights import (
    Overview,
    TaskFilter,
    TaskPage,
)
from microqueue.masking import MASK
from microqueue.operations import audit
from microqueue.operations.call import Document
from microqueue.operations.dead_letters import groups as letter_groups
from microqueue.reports import AuditPage
from microqueue.task_filter import State

EXPORT_STEP = 500
MOST_GROUPS = 200
EXPORT_BYTES = 8_000_000
"""How much of an export is written at a time, to within one letter."""

router = APIRouter()


@router.get("/config")
async def config(shared: Shared) -> Config:
    """Tell the settings that the page goes by, and the server's time."""
    settings, options = shared.access.settings, shared.options
    retention = settings.retention
    return Config(
        at=await shared.access.now(),
        queue=shared.access.name,
        version=microqueue.__version__,
        read_only=options.read_only,
        auth=shared.guard.required,
        visibility_timeout_sec=settings.visibility_timeout.total_seconds(),
        max_attempts=settings.max_attempts,
        retention_sec=None if retention is None else retention.total_seconds(),
        audit_retention_sec=options.audit_retention.total_seconds(),
        page_limit=options.page_limit,
        redacts=options.redact is not None,
        mask=MASK,
        can_pause=not options.read_only,
        manual_actions=options.manual_actions,
        live=shared.events.live,
    )


@router.get("/overview")
async def overview(shared: Shared, exact: Exact = False) -> OverviewReply:  # noqa: FBT002 (a query parameter)
    """Tell how all queues, workers and the sweeper stand."""
    found: Overview = await shared.overview(exact=exact)
    return OverviewReply.model_construct(
        **{name: getattr(found, name) for name in OverviewReply.model_fields}
    )


@router.get("/queues")
async def queues(shared: Shared, exact: Exact = False) -> QueuesReply:  # noqa: FBT002 (as above)
    """Tell how the queues stand."""
    found: Overview = await shared.overview(exact=exact)
    return QueuesReply.model_construct(at=found.at, queues=list(found.queues))


@router.get("/workers")
async def workers(shared: Shared) -> WorkersReply:
    """Tell which workers are registered, whether they are alive, and what they hold."""
    found: Overview = await shared.overview()
    return WorkersReply.model_construct(at=found.at, workers=list(found.workers))


@router.get("/running")
async def running(shared: Shared, queue: QueueName = None, limit: Limit = 200) -> RunningReply:
    """List what runs, with the end of each lease."""
    most = min(limit, shared.options.page_limit)
    found: Overview = await shared.overview()
    rows = [row for row in found.running if queue is None or row.queue == queue]
    counted = [one for one in found.queues if queue is None or one.queue == queue]
    total = sum(one.processing for one in counted)
    estimated = any("processing" in one.estimated for one in counted)
    if len(rows) < min(most, total):  # The overview holds those that end soonest of all queues.
        rows = await shared.shared.get(
            ("running", queue, most),
            lambda: shared.access.call(shared.access.insights.running, queue, limit=most),
        )
    shown = [
        row.model_copy(update={"progress": shared.viewer.progress(row.progress)})
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
async def task_names(shared: Shared, queue: QueueName = None) -> NamesReply:
    """List the names of tasks that workers serve, for whoever enqueues one."""
    served = await shared.served_names()
    return NamesReply.model_construct(
        at=await shared.access.now(),
        queues=[one for one in served if queue in {None, one.queue}],
        known=shared.known_names(),
        queue=queue,
        all_queues=queue is None,
    )


@router.get("/tasks")
async def tasks(
    shared: Shared,
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
    most = min(limit, shared.options.page_limit)

    async def read() -> TasksReply:
        found = await shared.access.call(
            shared.access.insights.tasks,
            which,
            limit=most,
            cursor=cursor,
            shown=shared.redactor.mask,
            made=shared.viewer.row,
        )
        return _listed(found, queue)

    reply: TasksReply = await shared.shared.get(("tasks", repr(which), most, cursor), read)
    return reply


@router.get("/tasks/{task_id:path}")
async def task(shared: Shared, task_id: str) -> TaskDetail:
    """Show all of a task."""
    document = await shared.document(task_id)
    return shared.viewer.detail(document, await shared.access.now())


@router.get("/dead-letters")
async def dead_letters(
    shared: Shared,
    query: Annotated[LetterQuery, Depends()],
    limit: Limit = 50,
    cursor: Cursor = None,
) -> TasksReply:
    """List dead letters of a queue, or of all, newest first."""
    most = min(limit, shared.options.page_limit)

    async def read() -> TasksReply:
        found = await _letters(shared, query, limit=most, cursor=cursor, made=shared.viewer.row)
        return _listed(found, query.queue)

    key = ("letters", query.queue, repr(query.which), most, cursor)
    reply: TasksReply = await shared.shared.get(key, read)
    return reply


@router.get("/dead-letters/groups")
async def groups(shared: Shared, query: Annotated[LetterQuery, Depends()]) -> GroupsReply:
    """Group dead letters of a queue, or of all, by error code and normalised message."""

    async def read() -> GroupsReply:
        queues = (
            await shared.access.names()
            if query.queue is None
            else shared.access.queue(query.queue).name
        )
        found: LetterGroups = await shared.access.run(
            letter_groups(
                queues,
                query.which,
                shared.access.settings,
                shown=shared.redactor.text,
            )
        )
        return GroupsReply.model_construct(
            at=await shared.access.now(),
            total=found.total,
            truncated=found.truncated,
            groups=list(found.groups[:MOST_GROUPS]),
            more_groups=max(len(found.groups) - MOST_GROUPS, 0),
            queue=query.queue,
            all_queues=query.queue is None,
        )

    key = ("groups", query.queue, repr(query.which))
    reply: GroupsReply = await shared.shared.get(key, read)
    return reply


@router.get(
    "/dead-letters/export",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {}}}},
)
async def export(shared: Shared, query: Annotated[LetterQuery, Depends()]) -> StreamingResponse:
    """Give all dead letters of a queue, or of all, that match, one JSON document per line."""
    first = await _lines(shared, query, None)

    async def lines() -> AsyncIterator[str]:
        found = first
        while True:
            for line in found.documents:
                yield line
            if found.next_cursor is None:
                return
            found = await _lines(shared, query, found.next_cursor)

    return StreamingResponse(
        lines(),
        media_type="application/x-ndjson",
        headers={"Content-Disposition": 'attachment; filename="dead-letters.jsonl"'},
    )


@router.get("/sweeper")
async def sweeper(shared: Shared) -> SweeperReply:
    """Tell what the last sweeps did."""
    found: Overview = await shared.overview()
    return SweeperReply.model_construct(
        at=found.at, last_sweep=found.last_sweep, last_active_sweep=found.last_active_sweep
    )


@router.get("/audit")
async def audit_log(shared: Shared, limit: Limit = 50, cursor: Cursor = None) -> AuditPage:
    """List what was done by hand, newest first."""
    most = min(limit, shared.options.page_limit)

    async def read() -> AuditPage:
        now = await shared.access.now()
        place = shared.access.collections.name
        found: AuditPage = await shared.access.run(
            audit.page(place, now=now, limit=most, cursor=cursor)
        )
        return found

    reply: AuditPage = await shared.shared.get(("audit", most, cursor), read)
    return reply


async def _lines(shared: Context, query: LetterQuery, cursor: str | None) -> TaskPage:
    """Write some letters, few of large ones."""
    size = 0

    def line(document: Document, now: datetime) -> str:
        nonlocal size
        detail = shared.viewer.detail(document, now)
        text = json.dumps(detail.model_dump(mode="json", exclude={"actions", "at"})) + "\n"
        size += len(text)
        return text

    return await _letters(
        shared,
        query,
        limit=EXPORT_STEP,
        cursor=cursor,
        made=line,
        enough=lambda: size > EXPORT_BYTES,
    )


async def _letters(shared: Context, query: LetterQuery, **options: Any) -> TaskPage:
    found: TaskPage = await shared.access.call(
        shared.access.insights.letters,
        None if query.queue is None else shared.access.queue(query.queue).name,
        query.which,
        shown=shared.redactor.text,
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
