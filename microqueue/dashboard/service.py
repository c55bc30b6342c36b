"""The page, the login, the stream of events, health and metrics."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Header, HTTPException, Query, Request
from fastapi.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from sse_starlette import EventSourceResponse, ServerSentEvent

from microqueue.dashboard.problems import problem
from microqueue.dashboard.requests import Shared
from microqueue.errors import MicroqueueError
from microqueue.operations import diagnostics

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
async def login_page(shared: Shared) -> Response:
    """Give the form that asks for the token."""
    if not shared.guard.required:
        return RedirectResponse("./", HTTPStatus.SEE_OTHER)
    return FileResponse(STATIC / "login.html")


@pages.post("/login")
async def log_in(request: Request, shared: Shared) -> Response:
    """Take the token, and give a cookie for it."""
    fields = parse_qs((await request.body()).decode("utf-8", "replace"))
    try:
        right = shared.guard.check_login(request, fields.get("token", [""])[0])
    except HTTPException as exc:
        if "text/html" not in request.headers.get("accept", ""):
            raise
        return _throttled_form(exc)
    if not right:
        return RedirectResponse("login?failed=1", HTTPStatus.SEE_OTHER)
    response = RedirectResponse("./", HTTPStatus.SEE_OTHER)
    shared.guard.log_in(request, response)
    return response


def _throttled_form(exc: HTTPException) -> HTMLResponse:
    """Give the form again, with the reason why it was not looked at."""
    form = (STATIC / "login.html").read_text(encoding="utf-8")
    reason = f"{exc.detail[:1].upper()}{exc.detail[1:]}."
    told = form.replace('id="throttled" hidden>', f'id="throttled">{reason}')
    return HTMLResponse(told, exc.status_code, headers=dict(exc.headers or {}))


@pages.post("/logout")
async def log_out(request: Request, shared: Shared) -> RedirectResponse:
    """Take the cookie back."""
    response = RedirectResponse("login", HTTPStatus.SEE_OTHER)
    shared.guard.log_out(request, response)
    return response


@pages.get("/events")
async def events(
    shared: Shared, last_event_id: LastEventId = None, opened_after: OpenedAfter = None
) -> EventSourceResponse:
    """Stream what happens, from where the viewer left off if that is still known.

    A browser that comes back by itself says so in a header, to the address of the first time.
    """
    return EventSourceResponse(
        shared.events.follow(last_event_id or opened_after),
        ping=shared.options.heartbeat_sec,
        ping_message_factory=lambda: ServerSentEvent("{}", event="heartbeat"),
        send_timeout=SEND_TIMEOUT_SEC,
    )


@service.get("/healthz")
async def health() -> dict[str, str]:
    """Say that the process is there."""
    return {"status": "ok"}


@service.get("/readyz", responses={503: {"description": "MongoDB does not answer."}})
async def ready(shared: Shared) -> Any:
    """Say whether MongoDB answers."""
    try:
        await shared.access.run(diagnostics.hello())
    except MicroqueueError:
        return problem(
            HTTPStatus.SERVICE_UNAVAILABLE, "MongoDB does not answer", "ServerUnavailable"
        )
    return {"status": "ready"}


@service.get("/metrics", response_class=PlainTextResponse)
async def metrics(shared: Shared) -> Response:
    """Give the depth of all queues to Prometheus."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415 (optional)

    from microqueue.dashboard.scrape import registry_of  # noqa: PLC0415 (as above)

    registry = await shared.shared.get("metrics", lambda: registry_of(shared))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
