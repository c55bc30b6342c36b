"""Who may ask: a token, a cookie that stands for it, and no other site's page."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from http import HTTPStatus
from urllib.parse import SplitResult, urlsplit

from fastapi import HTTPException, Request, Response

from microqueue.dashboard.options import DashboardOptions
from microqueue.dashboard.throttle import LoginThrottle, address_of
from microqueue.errors import InvalidArgument

COOKIE = "microqueue_session"
CREDENTIALS = "microqueue.credentials"
"""Where the scope of a request says how it proved that it may ask."""
SESSION_SEC = 12 * 3600
SHORTEST_TOKEN = 16
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
    """Decides about requests.

    A session's cookie holds two seals. One is made with a key that this process drew: nobody can
    guess it, so it is believed even while logins are throttled. The other is made with the token,
    so that another process of the same dashboard, or this one after a restart, believes it too.
    To guess that one is to guess the token, and it is throttled likewise.
    """

    def __init__(self, options: DashboardOptions) -> None:
        token = None if options.token is None else options.token.get_secret_value()
        check_token(token)
        self._token = None if token is None else token.encode()
        self._own_key = secrets.token_bytes(32)
        self._identify = options.identify
        self._hosts = None if options.hosts is None else frozenset(options.hosts)
        self.throttle = LoginThrottle(
            per_address=options.login_failures,
            in_all=options.login_failures_in_all,
            period_sec=options.login_period.total_seconds(),
        )

    @property
    def required(self) -> bool:
        """Whether a token is needed."""
        return self._token is not None

    def is_token(self, given: str) -> bool:
        """Return whether this is the token, in a time that does not depend on how much is right."""
        return self._token is not None and hmac.compare_digest(_digest(given), _hash(self._token))

    def check_login(self, request: Request, given: str) -> bool:
        """Return whether the login form was given the token; too many failures are a 429."""
        address = address_of(request)
        self._check_throttle(address)
        if not self.is_token(given):
            self.throttle.failed(address, given)
            return False
        self.throttle.succeeded(address, reset=True)
        return True

    def _check_throttle(self, address: str) -> None:
        if seconds := self.throttle.wait_sec(address):
            raise HTTPException(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"too many failed logins; try again in {seconds} s",
                {"Retry-After": str(seconds)},
            )

    def check_host(self, request: Request) -> None:
        """Refuse a name that is not ours: another site's name may be made to lead here."""
        if self._hosts is None:
            return
        place = _place(f"//{request.headers.get('host', '')}")
        if place is None or (place.hostname or "") not in self._hosts:
            raise HTTPException(HTTPStatus.MISDIRECTED_REQUEST, "this name does not lead here")

    def check_origin(self, request: Request, *, with_token: bool = False) -> None:
        """Reject an action that a page of another site asks for in the viewer's name.

        A request that carries the token itself was not made by such a page.
        """
        if request.method in SAFE_METHODS or with_token:
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

    def credentials_of(self, request: Request) -> str | None:
        """Return how a request proves that it may ask: ``token``, ``login``, or not at all.

        Raises:
            HTTPException: 429, if it gives a token or a session while logins are throttled.
        """
        if self._token is None:
            return "anybody"
        until, seal, own_seal = _session(request)
        if own_seal and _same(self._seal(until, self._own_key), own_seal):
            return "login"
        bearer = _bearer(request)
        if bearer is None and not seal:
            return None
        address = address_of(request)
        self._check_throttle(address)
        if bearer is not None and self.is_token(bearer):
            self.throttle.succeeded(address)
            return "token"
        if seal and _same(self._seal(until, self._token), seal):
            self.throttle.succeeded(address)
            return "login"
        self.throttle.failed(address, seal if bearer is None else bearer)
        return None

    def _seal(self, until: str, key: bytes) -> str:
        return hmac.new(key, until.encode(), hashlib.sha256).hexdigest()

    def log_in(self, request: Request, response: Response) -> None:
        """Give the cookie that stands for the token for half a day."""
        until = str(int(time.time()) + SESSION_SEC)
        seals = self._seal(until, self._token or b""), self._seal(until, self._own_key)
        response.set_cookie(
            COOKIE,
            ".".join((until, *seals)),
            max_age=SESSION_SEC,
            path=cookie_path(request),
            httponly=True,
            samesite="strict",
            secure=_is_https(request),
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
        kind = request.scope.get(CREDENTIALS) or "login"
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


def check_token(token: str | None) -> None:
    """Reject a token that is so short that it could be guessed."""
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise InvalidArgument(  # Without the value, which must not reach a screen or log.
            f"the token is too short: it has {len(token)} characters, and needs at least "
            f"{SHORTEST_TOKEN}; microqueue dashboard --new-token prints one",
            argument="token",
        )


def _bearer(request: Request) -> str | None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else None


def _session(request: Request) -> tuple[str, str, str]:
    """Read the cookie: until when it holds, and its seals; empty if it can hold no longer."""
    until, _, seals = request.cookies.get(COOKIE, "").partition(".")
    seal, _, own_seal = seals.partition(".")
    if not until.isascii() or not until.isdecimal() or len(until) > LONGEST_INSTANT:
        return "", "", ""
    return ("", "", "") if int(until) < time.time() else (until, seal, own_seal)


def _is_https(request: Request) -> bool:
    """Return whether the viewer came over HTTPS, here or as far as a proxy that ends it.

    Anybody may write the header; it only keeps the viewer's own cookie off plain HTTP.
    """
    forwarded = request.headers.get("x-forwarded-proto", "").rpartition(",")[2].strip().lower()
    return request.scope["scheme"] == "https" or forwarded == "https"


def _same(expected: str, given: str) -> bool:
    return hmac.compare_digest(expected.encode(), given.encode("utf-8", "replace"))


def _digest(given: str) -> bytes:
    return _hash(given.encode("utf-8", "replace"))


def _hash(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
