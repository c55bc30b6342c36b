"""The routes about schedules: those that read, and those that put, pause, run and remove them."""

from __future__ import annotations

from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from starlette.routing import Match
from starlette.types import Scope

from microqueue.backoff import BackoffPolicy
from microqueue.dashboard.context import DashboardState
from microqueue.dashboard.payloads import from_extended_json, to_browser_json
from microqueue.dashboard.requests import (
    DashboardContext,
    PositiveSeconds,
    PrintableName,
    QueueName,
    Seconds,
    Strict,
    TaskBody,
)
from microqueue.dashboard.task_views import FieldNote
from microqueue.errors import OperationFailed, ScheduleNotFound, ServerUnavailable
from microqueue.schedule import (
    CatchUp,
    Overlap,
    Schedule,
    Source,
    on_change_of_code,
    on_removal_of_code,
)
from microqueue.task import LONGEST_NAME, Task, TaskStatus, name_in


class NextRoute(APIRoute):
    """The route of the next runs. A name that ends with ``/next`` has its slash as ``%2F``."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Leave the path of a schedule with such a name to the next route."""
        if (scope.get("raw_path") or b"").lower().endswith(b"%2fnext"):
            return Match.NONE, {}
        return super().matches(scope)


router = APIRouter()
acting_router = APIRouter()

LONGEST_CRON = 255
NameInPath = Annotated[str, Path(min_length=1, max_length=LONGEST_NAME)]
RunCount = Annotated[int, Query(ge=1, le=100)]


class RunRow(BaseModel):
    """The last run of a schedule. ``status`` is that of its task now; null if it was deleted."""

    at: datetime
    task_id: str
    fired_at: datetime
    late_sec: float
    triggered: bool
    status: TaskStatus | None


class SkippedRow(BaseModel):
    """The last run that was left out, and why: ``late`` or ``overlap``."""

    at: datetime
    reason: str


class ScheduleRow(BaseModel):
    """A schedule. It has ``cron`` and its time zone, or ``every_sec``. Payloads are masked."""

    name: str
    queue: str
    cron: str | None
    every_sec: float | None
    timezone: str
    task: str | None
    payload: Any
    headers: Any
    priority: int
    max_attempts: int
    backoff: BackoffPolicy
    visibility_timeout_sec: float | None
    expires_in_sec: float | None
    catch_up: CatchUp
    grace_sec: float | None
    overlap: Overlap
    jitter_sec: float | None
    source: Source
    app: str | None
    created_at: datetime
    updated_at: datetime
    paused: bool
    next_at: datetime | None
    runs: int
    last_run: RunRow | None
    last_skipped: SkippedRow | None


class SchedulesReply(BaseModel):
    """The schedules of a queue, or of all queues."""

    at: datetime
    schedules: list[ScheduleRow]


class SavedSchedule(ScheduleRow):
    """A schedule that was put. ``warnings`` say what its code no longer decides."""

    warnings: list[FieldNote]


class NextRuns(BaseModel):
    """The next runs of a schedule, in its time zone."""

    name: str
    queue: str
    runs: list[datetime]


class ScheduleBody(TaskBody):
    """A schedule to add or change, with ``cron`` or ``every_sec``.

    What is left out gets its default, also if the schedule has another value. Without ``paused``,
    the schedule stays as it is. Payload and headers may contain extended JSON; values that are
    masked, as they are shown, keep what is stored.
    """

    queue: PrintableName
    cron: str | None = Field(default=None, max_length=LONGEST_CRON)
    every_sec: PositiveSeconds | None = None
    timezone: str = Field(default="UTC", max_length=LONGEST_NAME)
    task: PrintableName | None = None
    payload: dict[str, Any] = Field(default_factory=dict)
    catch_up: CatchUp = "latest"
    grace_sec: Seconds | None = None
    overlap: Overlap = "allow"
    jitter_sec: Seconds | None = None
    paused: bool | None = None


class OfQueue(Strict):
    """The queue of a schedule."""

    queue: PrintableName


class Triggered(BaseModel):
    """The task that a schedule added at once."""

    name: str
    queue: str
    task_id: str


class Removed(BaseModel):
    """A schedule that does not exist, and whether it did.

    ``warnings`` say that a worker whose code declares it adds it again.
    """

    name: str
    queue: str
    existed: bool
    warnings: list[FieldNote]


@router.get("/schedules")
async def schedules(context: DashboardContext, queue: QueueName = None) -> SchedulesReply:
    """List the schedules of a queue, or of all queues: the next run, and the last one."""

    async def read() -> SchedulesReply:
        chosen = context.access.queue(queue).schedules
        found = await context.access.call(chosen.list, all_queues=queue is None)
        return SchedulesReply(
            at=await context.access.now(), schedules=[_row(context, one) for one in found]
        )

    reply: SchedulesReply = await context.read_cache.get(("schedules", queue), read)
    return reply


async def next_runs(
    context: DashboardContext, name: NameInPath, queue: QueueName = None, n: RunCount = 5
) -> NextRuns:
    """Return when a schedule runs next."""
    chosen = context.access.queue(queue)
    runs = await context.access.call(chosen.schedules.next_runs, name, n)
    return NextRuns(name=name, queue=chosen.name, runs=runs)


router.add_api_route(
    "/schedules/{name:path}/next", next_runs, methods=["GET"], route_class_override=NextRoute
)


@router.get("/schedules/{name:path}")
async def schedule(
    context: DashboardContext, name: NameInPath, queue: QueueName = None
) -> ScheduleRow:
    """Return a schedule with all of its options, its next run, and the last one."""
    return _row(context, await _require(context, name, queue))


@acting_router.post("/schedules/{name:path}/put")
async def put(
    request: Request, context: DashboardContext, name: NameInPath, body: ScheduleBody
) -> SavedSchedule:
    """Add a schedule, or change the one with this name."""
    chosen = context.access.queue(body.queue)
    arguments = body.arguments("queue")
    arguments["payload"] = from_extended_json(body.payload)
    stored = await _stored(context, name, body.queue)
    for field in ("payload", "headers"):
        known = {} if stored is None else getattr(stored, field)
        arguments[field] = context.redactor.restore(arguments[field], known, name=field)
    task = body.task or name_in(arguments["headers"])
    await context.check_payload(body.queue, task, arguments["payload"])
    async with context.audited(request, "schedule.put", queue=body.queue, target=name) as action:
        saved = await context.access.call(chosen.schedules.put, name, **arguments)
        action.count = 1
    warnings = _notes(on_change_of_code(stored))
    return SavedSchedule(**_row(context, saved).model_dump(), warnings=warnings)


@acting_router.post("/schedules/{name:path}/pause")
async def pause(
    request: Request, context: DashboardContext, name: NameInPath, body: OfQueue
) -> ScheduleRow:
    """Pause a schedule: it adds no tasks until it is resumed."""
    chosen = context.access.queue(body.queue).schedules
    async with context.audited(request, "schedule.pause", queue=body.queue, target=name) as action:
        found = await context.access.call(chosen.pause, name)
        action.count = 1
    return _row(context, found)


@acting_router.post("/schedules/{name:path}/resume")
async def resume(
    request: Request, context: DashboardContext, name: NameInPath, body: OfQueue
) -> ScheduleRow:
    """Resume a schedule from now on. Runs that it missed are left out."""
    chosen = context.access.queue(body.queue).schedules
    async with context.audited(request, "schedule.resume", queue=body.queue, target=name) as action:
        found = await context.access.call(chosen.resume, name)
        action.count = 1
    return _row(context, found)


@acting_router.post("/schedules/{name:path}/trigger", status_code=HTTPStatus.CREATED)
async def trigger(
    request: Request, context: DashboardContext, name: NameInPath, body: OfQueue
) -> Triggered:
    """Add a task of a schedule at once. Its next run stays as it is."""
    chosen = context.access.queue(body.queue).schedules
    async with context.audited(
        request, "schedule.trigger", queue=body.queue, target=name
    ) as action:
        task: Task[Any] = await context.access.call(chosen.trigger, name)
        action.count = 1
    return Triggered(name=name, queue=body.queue, task_id=str(task.id))


@acting_router.post("/schedules/{name:path}/remove")
async def remove(
    request: Request, context: DashboardContext, name: NameInPath, body: OfQueue
) -> Removed:
    """Remove a schedule. The tasks that it added stay."""
    chosen = context.access.queue(body.queue).schedules
    stored = await _stored(context, name, body.queue)
    async with context.audited(request, "schedule.remove", queue=body.queue, target=name) as action:
        existed = await context.access.call(chosen.remove, name)
        action.count = int(existed)
    warnings = _notes(on_removal_of_code(stored))
    return Removed(name=name, queue=body.queue, existed=existed, warnings=warnings)


async def _stored(context: DashboardState, name: str, queue: str) -> Schedule | None:
    """Return a schedule that is about to be put or removed, unless it is malformed."""
    try:
        found: Schedule | None = await context.access.call(
            context.access.queue(queue).schedules.get, name
        )
    except ServerUnavailable:
        raise
    except OperationFailed:
        return None
    return found


async def _require(context: DashboardState, name: str, queue: str | None) -> Schedule:
    chosen = context.access.queue(queue)
    found: Schedule | None = await context.access.call(chosen.schedules.get, name)
    if found is None:
        raise ScheduleNotFound(name=name, queue=chosen.name)
    return found


def _notes(warning: str | None) -> list[FieldNote]:
    return [] if warning is None else [FieldNote(path="name", message=warning)]


def _row(context: DashboardState, schedule: Schedule) -> ScheduleRow:
    last, skipped = schedule.last_run, schedule.last_skipped
    return ScheduleRow(
        name=schedule.name,
        queue=schedule.queue,
        cron=schedule.cron,
        every_sec=_seconds(schedule.every),
        timezone=schedule.timezone,
        task=schedule.task,
        payload=_masked_json(context, schedule.payload),
        headers=_masked_json(context, dict(schedule.headers)),
        priority=schedule.priority,
        max_attempts=schedule.max_attempts,
        backoff=schedule.backoff,
        visibility_timeout_sec=_seconds(schedule.visibility_timeout),
        expires_in_sec=_seconds(schedule.expires_in),
        catch_up=schedule.catch_up,
        grace_sec=_seconds(schedule.grace),
        overlap=schedule.overlap,
        jitter_sec=_seconds(schedule.jitter),
        source=schedule.source,
        app=schedule.app,
        created_at=schedule.created_at,
        updated_at=schedule.updated_at,
        paused=schedule.paused,
        next_at=schedule.next_at,
        runs=schedule.runs,
        last_run=last
        and RunRow(
            at=last.at,
            task_id=str(last.task_id),
            fired_at=last.fired_at,
            late_sec=last.late_sec,
            triggered=last.triggered,
            status=last.status,
        ),
        last_skipped=skipped and SkippedRow(at=skipped.at, reason=skipped.reason),
    )


def _masked_json(context: DashboardState, value: Any) -> Any:
    return to_browser_json(context.redactor.mask(value))


def _seconds(period: timedelta | None) -> float | None:
    return None if period is None else period.total_seconds()
