"""What every request passes first: host, size, token and origin; and what every reply carries."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request
from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from microqueue.dashboard.context import Context
from microqueue.dashboard.problems import problem
from microqueue.dashboard.security import CREDENTIALS, HEADERS, OPEN_PATHS, SAFE_METHODS


class Shield:
    """An ASGI middleware. It comes before routing, so that no route can be forgotten."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and hand it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._add_headers(MutableHeaders(scope=message), scope)
            await send(message)

        request = Request(scope, receive)
        try:
            refusal = self._refusal(request)
            if refusal is None and request.method not in SAFE_METHODS:
                receive = await self._bounded(request)
        except HTTPException as exc:
            name = HTTPStatus(exc.status_code).phrase.replace(" ", "")
            refusal = problem(exc.status_code, exc.detail, name, dict(exc.headers or {}))
        await (self._app if refusal is None else refusal)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        guard = self._context.guard
        guard.check_host(request)
        path = local_path(request.scope)
        if path in OPEN_PATHS or path.startswith("/static/"):
            guard.check_origin(request)
            return None
        is_page = path in {"", "/"} and request.method in SAFE_METHODS
        try:
            credentials = guard.credentials_of(request)
        except HTTPException:
            if is_page:  # The login form tells it.
                return RedirectResponse("login", HTTPStatus.SEE_OTHER)
            raise
        request.scope[CREDENTIALS] = credentials
        guard.check_origin(request, with_token=credentials == "token")
        if credentials is not None:
            return None
        if is_page:
            return RedirectResponse("login", HTTPStatus.SEE_OTHER)
        raise HTTPException(
            HTTPStatus.UNAUTHORIZED,
            "give the token, as in Authorization: Bearer TOKEN, or log in",
            {"WWW-Authenticate": "Bearer"},
        )

    async def _bounded(self, request: Request) -> Receive:
        """Read a body that is not too large, and give it to the app once more."""
        most = self._context.options.request_bytes
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise HTTPException(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {most:,} bytes are taken"
                )
        told = False

        async def receive() -> Message:
            nonlocal told
            if told:
                return {"type": "http.disconnect"}
            told = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        return receive

    def _add_headers(self, headers: MutableHeaders, scope: Scope) -> None:
        for name, value in HEADERS.items():
            headers.setdefault(name, value)
        static = local_path(scope).startswith("/static/")
        headers.setdefault("Cache-Control", "no-cache" if static else "no-store")
        clock: Any = self._context.access.core.clock
        if not clock.stale:
            headers["X-Server-Time"] = clock.now().isoformat().replace("+00:00", "Z")


def local_path(scope: Scope) -> str:
    """Give the path below the place where the dashboard is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
