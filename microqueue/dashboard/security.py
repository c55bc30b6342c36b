"""Who may ask: a token, a cookie that stands for it, and no other site's page."""

from __future__ import annotations

import hashlib
import hmac
import time
from http import HTTPStatus
from urllib.parse import SplitResult, urlsplit

from fastapi import HTTPException, Request, Response

from microqueue.dashboard.options import DashboardOptions
from microqueue.errors import InvalidArgument

COOKIE = "microqueue_session"
SESSION_SEC = 12 * 3600
SHORTEST_TOKEN = 8
LONGEST_INSTANT = 12
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/login"})
LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; manifest-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Decides about requests."""

    def __init__(self, options: DashboardOptions) -> None:
        token = options.token
        self._token = None if token is None else token.get_secret_value().encode()
        if self._token is not None and len(self._token) < SHORTEST_TOKEN:
            raise InvalidArgument(  # Without the value, which must not reach a screen or log.
                f"the token is too short: give at least {SHORTEST_TOKEN} characters",
                argument="token",
            )
        self._identify = options.identify
        self._hosts = None if options.hosts is None else frozenset(options.hosts)

    @property
    def required(self) -> bool:
        """Whether a token is needed."""
        return self._token is not None

    def is_token(self, given: str) -> bool:
        """Tell whether this is the token, in a time that does not depend on how much is right."""
        return self._token is not None and hmac.compare_digest(_digest(given), _hash(self._token))

    def check_host(self, request: Request) -> None:
        """Refuse a name that is not ours: another site's name may be made to lead here."""
        if self._hosts is None:
            return
        place = _place(f"//{request.headers.get('host', '')}")
        if place is None or (place.hostname or "") not in self._hosts:
            raise HTTPException(HTTPStatus.MISDIRECTED_REQUEST, "this name does not lead here")

    def check_origin(self, request: Request) -> None:
        """Refuse an action that a page of another site asks for in the viewer's name."""
        if request.method in SAFE_METHODS or self.has_bearer(request):
            return
        fetched_by = request.headers.get("sec-fetch-site")
        origin = request.headers.get("origin")
        if fetched_by is not None:
            same = fetched_by in {"same-origin", "none"}
        else:
            place = _place(origin or "")
            same = origin is None or (
                place is not None and place.netloc == request.headers.get("host")
            )
        if not same:
            raise HTTPException(HTTPStatus.FORBIDDEN, "this came from a page of another site")

    def is_known(self, request: Request) -> bool:
        """Tell whether a request carries the token, or the cookie of somebody who gave it."""
        if self._token is None:
            return True
        return self.has_bearer(request) or self._has_cookie(request)

    def has_bearer(self, request: Request) -> bool:
        """Tell whether a request carries the token."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self.is_token(given.strip())

    def _has_cookie(self, request: Request) -> bool:
        until, _, seal = request.cookies.get(COOKIE, "").partition(".")
        if not until.isascii() or not until.isdecimal() or len(until) > LONGEST_INSTANT:
            return False
        if int(until) < time.time():
            return False
        return hmac.compare_digest(self._seal(until).encode(), seal.encode("utf-8", "replace"))

    def _seal(self, until: str) -> str:
        return hmac.new(self._token or b"", until.encode(), hashlib.sha256).hexdigest()

    def log_in(self, request: Request, response: Response) -> None:
        """Give the cookie that stands for the token for half a day."""
        until = str(int(time.time()) + SESSION_SEC)
        response.set_cookie(
            COOKIE,
            f"{until}.{self._seal(until)}",
            max_age=SESSION_SEC,
            path=cookie_path(request),
            httponly=True,
            samesite="strict",
            secure=request.scope["scheme"] == "https",
        )

    def log_out(self, request: Request, response: Response) -> None:
        """Take the cookie back."""
        response.delete_cookie(COOKIE, path=cookie_path(request), httponly=True, samesite="strict")

    def who(self, request: Request) -> str:
        """Name who asks, for the audit log."""
        named = self._identify(request) if self._identify is not None else None
        if named:
            return storable(named)[:200]
        address = request.client.host if request.client else "unknown"
        if self._token is None:
            return f"anybody at {address}"
        kind = "token" if self.has_bearer(request) else "login"
        return f"{kind} at {address}"


def cookie_path(request: Request) -> str:
    """Give the path below which the dashboard is mounted."""
    return f"{request.scope.get('root_path', '')}/"


def storable(text: str) -> str:
    """Replace what MongoDB cannot hold."""
    return text.encode("utf-8", "replace").decode()


def _place(address: str) -> SplitResult | None:
    """Read an address that anybody may have written; ``None`` if it is none."""
    try:
        return urlsplit(address)
    except ValueError:
        return None


def _digest(given: str) -> bytes:
    return _hash(given.encode("utf-8", "replace"))


def _hash(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
