"""The page, the login, the stream of events, health and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, FastAPI, Header, HTTPException, Query, Request
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
from microqueue.arguments import refused
from microqueue.async_queue import AsyncQueue
from microqueue.dashboard import problems, routes_act, routes_read
from microqueue.dashboard.access import AnyQueue
from microqueue.dashboard.context import Context
from microqueue.dashboard.options import DashboardOptions
from microqueue.dashboard.problems import problem
from microqueue.dashboard.requests import DashboardContext
from microqueue.dashboard.security import SecurityMiddleware
from microqueue.errors import MicroqueueError
from microqueue.operations import diagnostics
from microqueue.queue import Queue

API = "/api/v1"
STATIC = Path(__file__).parent / "static"
SEND_TIMEOUT_SEC = 10.0

LastEventId = Annotated[str | None, Header(max_length=100)]
OpenedAfter = Annotated[str | None, Query(alias="last_event_id", max_length=100)]

pages = APIRouter(include_in_schema=False)
service = APIRouter()


@pages.get("/")
async def page() -> FileResponse:
    """Give the page."""
    return FileResponse(STATIC / "index.html")


@pages.get("/login")
async def login_page(context: DashboardContext) -> Response:
    """Give the form that asks for the token."""
    if not context.guard.required:
        return RedirectResponse("./", HTTPStatus.SEE_OTHER)
    return FileResponse(STATIC / "login.html")


@pages.post("/login")
async def log_in(request: Request, context: DashboardContext) -> Response:
    """Take the token, and give a cookie for it."""
    fields = parse_qs((await request.body()).decode("utf-8", "replace"))
    try:
        right = context.guard.check_login(request, fields.get("token", [""])[0])
    except HTTPException as exc:
        if "text/html" not in request.headers.get("accept", ""):
            raise
        return _throttled_form(exc)
    if not right:
        return RedirectResponse("login?failed=1", HTTPStatus.SEE_OTHER)
    response = RedirectResponse("./", HTTPStatus.SEE_OTHER)
    context.guard.log_in(request, response)
    return response


def _throttled_form(exc: HTTPException) -> HTMLResponse:
    """Give the form again, with the reason why it was not looked at."""
    form = (STATIC / "login.html").read_text(encoding="utf-8")
    reason = f"{exc.detail[:1].upper()}{exc.detail[1:]}."
    told = form.replace('id="throttled" hidden>', f'id="throttled">{reason}')
    return HTMLResponse(told, exc.status_code, headers=dict(exc.headers or {}))


@pages.post("/logout")
async def log_out(request: Request, context: DashboardContext) -> RedirectResponse:
    """Take the cookie back."""
    response = RedirectResponse("login", HTTPStatus.SEE_OTHER)
    context.guard.log_out(request, response)
    return response


@pages.get("/events")
async def event_stream(
    context: DashboardContext, last_event_id: LastEventId = None, opened_after: OpenedAfter = None
) -> EventSourceResponse:
    """Stream what happens, from where the viewer left off if that is still known.

    A browser that comes back by itself says so in a header, to the address of the first time.
    """
    return EventSourceResponse(
        context.events.follow(last_event_id or opened_after),
        ping=context.options.heartbeat_sec,
        ping_message_factory=lambda: ServerSentEvent("{}", event="heartbeat"),
        send_timeout=SEND_TIMEOUT_SEC,
    )


@service.get("/healthz")
async def health() -> dict[str, str]:
    """Say that the process is there."""
    return {"status": "ok"}


@service.get("/readyz", responses={503: {"description": "MongoDB does not answer."}})
async def ready(context: DashboardContext) -> Any:
    """Say whether MongoDB answers."""
    try:
        await context.access.run(diagnostics.hello())
    except MicroqueueError:
        return problem(
            HTTPStatus.SERVICE_UNAVAILABLE, "MongoDB does not answer", "ServerUnavailable"
        )
    return {"status": "ready"}


@service.get("/metrics", response_class=PlainTextResponse)
async def metrics(context: DashboardContext) -> Response:
    """Return the depth of all queues in the Prometheus text format."""
    # Imported here, because only this route needs prometheus-client.
    from prometheus_client import (  # noqa: PLC0415
        CONTENT_TYPE_LATEST,
        CollectorRegistry,
        generate_latest,
    )

    from microqueue.metrics import queue_families  # noqa: PLC0415

    async def read() -> bytes:
        stats = await context.access.call(context.access.insights.stats)
        registry = CollectorRegistry()
        registry.register(_Families(queue_families(stats)))
        return generate_latest(registry)

    return Response(await context.read_cache.get("metrics", read), media_type=CONTENT_TYPE_LATEST)


class _Families:
    """A Prometheus collector of metrics that were read before."""

    def __init__(self, families: Iterable[Any]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Any]:
        return self._families


def dashboard(queue: AnyQueue, **options: Any) -> FastAPI:
    """Make the dashboard of a queue's collection; ``options`` are those of `DashboardOptions`.

    It shows all queues of the collection, and the given one first. Mount it in an app of your
    own, or serve it alone: then give a token, unless nobody else can reach it.
    """
    if not isinstance(queue, Queue | AsyncQueue):
        raise refused("queue", queue, "give a Queue or an AsyncQueue")
    context = Context(queue, DashboardOptions(**options))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        context.events.stop()

    app = FastAPI(
        title="microqueue",
        version=microqueue.__version__,
        docs_url=None,  # They would load scripts from elsewhere.
        redoc_url=None,
        openapi_url=f"{API}/openapi.json",
        lifespan=lifespan,
    )
    app.state.context = context
    problems.install(app)
    told: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": problems.Problem},
        "5XX": {"model": problems.Problem},
    }
    if not context.options.read_only:
        app.include_router(
            routes_act.dead_letter_router, prefix=API, tags=["dead letters"], responses=told
        )
        app.include_router(routes_act.router, prefix=API, tags=["acting"], responses=told)
    app.include_router(routes_read.router, prefix=API, tags=["reading"], responses=told)
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
