"""The dashboard as an app: page, login, event stream, health checks, metrics and REST API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Unpack
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Query, Request
from fastapi.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from fastapi.staticfiles import StaticFiles
from sse_starlette import EventSourceResponse, ServerSentEvent

import microqueue
from microqueue.arguments import invalid_argument
from microqueue.async_queue import AsyncQueue
from microqueue.dashboard import problems, routes_act, routes_read, routes_schedules, routes_topics
from microqueue.dashboard.access import AnyQueue
from microqueue.dashboard.context import DashboardState
from microqueue.dashboard.options import DashboardOptions, DashboardOptionsDict
from microqueue.dashboard.problems import problem
from microqueue.dashboard.requests import API, DashboardContext, reject_unknown_query
from microqueue.dashboard.security import SecurityMiddleware
from microqueue.errors import MicroqueueError
from microqueue.model import reject_unknown
from microqueue.operations import diagnostics
from microqueue.queue import Queue
from microqueue.schedules import ScheduleOperations

STATIC = Path(__file__).parent / "static"
SEND_TIMEOUT_SEC = 10.0

LastEventId = Annotated[str | None, Header(max_length=100)]
OpenedAfter = Annotated[str | None, Query(alias="last_event_id", max_length=100)]

pages = APIRouter(include_in_schema=False)
service = APIRouter()


@pages.get("/")
async def page() -> FileResponse:
    """Return the page."""
    return FileResponse(STATIC / "index.html")


@pages.get("/login")
async def login_page(context: DashboardContext) -> Response:
    """Return the login form."""
    if not context.guard.required:
        return RedirectResponse("./", HTTPStatus.SEE_OTHER)
    return FileResponse(STATIC / "login.html")


@pages.post("/login")
async def log_in(request: Request, context: DashboardContext) -> Response:
    """Check the token, and set a session cookie."""
    fields = parse_qs((await request.body()).decode("utf-8", "replace"))
    try:
        correct = context.guard.check_login(request, fields.get("token", [""])[0])
    except HTTPException as exc:
        if "text/html" not in request.headers.get("accept", ""):
            raise
        return _throttled_form(exc)
    if not correct:
        return RedirectResponse("login?failed=1", HTTPStatus.SEE_OTHER)
    response = RedirectResponse("./", HTTPStatus.SEE_OTHER)
    context.guard.log_in(request, response)
    return response


def _throttled_form(exc: HTTPException) -> HTMLResponse:
    """Return the login form with the reason why the login was rejected."""
    form = (STATIC / "login.html").read_text(encoding="utf-8")
    reason = f"{exc.detail[:1].upper()}{exc.detail[1:]}."
    page = form.replace('id="throttled" hidden>', f'id="throttled">{reason}')
    return HTMLResponse(page, exc.status_code, headers=dict(exc.headers or {}))


@pages.post("/logout")
async def log_out(request: Request, context: DashboardContext) -> RedirectResponse:
    """Delete the session cookie."""
    response = RedirectResponse("login", HTTPStatus.SEE_OTHER)
    context.guard.log_out(request, response)
    return response


@pages.get("/events")
async def event_stream(
    context: DashboardContext, last_event_id: LastEventId = None, opened_after: OpenedAfter = None
) -> EventSourceResponse:
    """Stream events, starting after the last one that the viewer received, if still known.

    A browser that reconnects by itself sends a header; its URL is that of the first connection.
    """
    return EventSourceResponse(
        context.events.subscribe(last_event_id or opened_after),
        ping=context.options.heartbeat_sec,
        ping_message_factory=lambda: ServerSentEvent("{}", event="heartbeat"),
        send_timeout=SEND_TIMEOUT_SEC,
    )


@service.get("/healthz")
async def health() -> dict[str, str]:
    """Return that the process is up."""
    return {"status": "ok"}


@service.get("/readyz", responses={503: {"description": "MongoDB does not answer."}})
async def ready(context: DashboardContext) -> Any:
    """Return whether MongoDB answers."""
    try:
        await context.access.run(diagnostics.hello())
    except MicroqueueError:
        return problem(
            HTTPStatus.SERVICE_UNAVAILABLE, "MongoDB does not answer", "ServerUnavailable"
        )
    return {"status": "ready"}


@service.get("/metrics", response_class=PlainTextResponse)
async def metrics(context: DashboardContext) -> Response:
    """Return the depth of all queues, and the schedules, in the Prometheus text format."""
    # Imported here, because only this route needs prometheus-client.
    from prometheus_client import (  # noqa: PLC0415
        CONTENT_TYPE_LATEST,
        CollectorRegistry,
        generate_latest,
    )

    from microqueue.metrics import queue_families, schedule_families  # noqa: PLC0415

    async def read() -> bytes:
        stats = await context.access.call(context.access.insights.stats)
        operations = ScheduleOperations(context.access.core)
        schedules = await context.access.run(operations.list(all_queues=True))
        now = await context.access.now()
        registry = CollectorRegistry()
        registry.register(_Families([*queue_families(stats), *schedule_families(schedules, now)]))
        return generate_latest(registry)

    return Response(await context.read_cache.get("metrics", read), media_type=CONTENT_TYPE_LATEST)


class _Families:
    """A Prometheus collector of metrics that were read before."""

    def __init__(self, families: Iterable[Any]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Any]:
        return self._families


def dashboard(queue: AnyQueue, **options: Unpack[DashboardOptionsDict]) -> FastAPI:
    """Return the dashboard of all queues of a queue's collection, as an ASGI app.

    Mount it in your app, or serve it on its own. Give a token if other machines can reach it.

    Args:
        queue: The queue whose collection to show. The form that enqueues a task suggests it.
        options: The options of :class:`DashboardOptions`.

    Returns:
        An app that can be mounted in another app.

    Raises:
        InvalidArgument: ``queue`` is not a queue, or an option is not valid.
    """
    if not isinstance(queue, Queue | AsyncQueue):
        raise invalid_argument("queue", queue, "give a Queue or an AsyncQueue")
    reject_unknown("dashboard", options, DashboardOptions.model_fields)
    context = DashboardState(queue, DashboardOptions(**options))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        context.events.stop()

    app = FastAPI(
        title="microqueue",
        version=microqueue.__version__,
        docs_url=None,  # These pages would load scripts from another site.
        redoc_url=None,
        openapi_url=f"{API}/openapi.json",
        lifespan=lifespan,
    )
    app.state.context = context
    problems.install_handlers(app)
    errors: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": problems.Problem},
        "5XX": {"model": problems.Problem},
    }
    routers = [
        (routes_read.router, "views"),
        (routes_topics.router, "topics"),
        (routes_schedules.router, "schedules"),
    ]
    if not context.options.read_only:
        routers += [
            (routes_act.dead_letter_router, "dead letters"),
            (routes_act.router, "actions"),
            (routes_topics.acting_router, "topics"),
            (routes_schedules.acting_router, "schedules"),
        ]
    for router, tag in routers:
        app.include_router(
            router,
            prefix=API,
            tags=[tag],
            responses=errors,
            dependencies=[Depends(reject_unknown_query)],
        )
    app.include_router(service, tags=["service"])
    app.include_router(pages)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_middleware(
        SecurityMiddleware,
        guard=context.guard,
        clock=context.access.core.clock,
        request_bytes=context.options.request_bytes,
    )
    return app
