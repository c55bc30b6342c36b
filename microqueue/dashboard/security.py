"""Who may ask: a token, a cookie that stands for it, and no other site's page."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import SplitResult, urlsplit

from fastapi import HTTPException, Request
from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from microqueue.clock import Clock
from microqueue.dashboard.options import DashboardOptions
from microqueue.dashboard.problems import problem
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


MOST_ADDRESSES = 1000
IPV6_NETWORK = 64
"""Whoever has one address of an IPv6 network has all of these."""

logger = logging.getLogger("microqueue.dashboard")


class LoginThrottle:
    """Counts failed logins. It remembers a bounded number of addresses.

    Args:
        per_address: How many different wrong tokens an address may give within the period.
        in_all: How many all addresses together may give.
        period_sec: How long a failure counts.
        most_addresses: How many addresses are remembered, of each kind.
    """

    def __init__(
        self,
        *,
        per_address: int,
        in_all: int,
        period_sec: float,
        most_addresses: int = MOST_ADDRESSES,
    ) -> None:
        self.now: Callable[[], float] = time.monotonic
        self._per_address = per_address
        self._in_all = in_all
        self._period_sec = period_sec
        self._most_addresses = most_addresses
        self._salt = secrets.token_bytes(16)
        # By address: when each wrong token came first. The address that failed last is the last.
        self._failures: OrderedDict[str, dict[bytes, float]] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()

    @property
    def size(self) -> int:
        """How many failures and addresses are remembered."""
        return sum(map(len, self._failures.values())) + len(self._known)

    def wait_sec(self, address: str) -> int:
        """Return after how many seconds a login from this address is looked at; 0: now."""
        self._forget()
        own = sorted(self._failures.get(address, {}).values())
        waits = [self._until_below(own, self._per_address)]
        if address not in self._known:
            every = sorted(at for one in self._failures.values() for at in one.values())
            waits.append(self._until_below(every, self._in_all))
        return math.ceil(max(waits))

    def failed(self, address: str, given: str) -> None:
        """Count a wrong token, unless this address gave the same one already; log it."""
        self._forget()
        digest = hashlib.sha256(self._salt + given.encode("utf-8", "replace")).digest()
        own = self._failures.setdefault(address, {})
        if digest in own:
            return
        own[digest] = self.now()
        self._failures.move_to_end(address)
        while len(self._failures) > self._most_addresses:
            self._failures.popitem(last=False)
        logger.warning(
            "failed login from %s: %d in the last %g s, %d from all addresses%s",
            address,
            len(own),
            self._period_sec,
            sum(map(len, self._failures.values())),
            self._consequence(address),
        )

    def succeeded(self, address: str, *, reset: bool = False) -> None:
        """Note that the right token came from this address; ``reset`` forgives its failures."""
        if reset:
            self._failures.pop(address, None)
        self._known[address] = None
        self._known.move_to_end(address)
        while len(self._known) > self._most_addresses:
            self._known.popitem(last=False)

    def _consequence(self, address: str) -> str:
        seconds = self.wait_sec(address)
        return f"; more are rejected for {seconds} s" if seconds else ""

    def _until_below(self, instants: list[float], most: int) -> float:
        """Return how long it takes until fewer than ``most`` of these count."""
        if len(instants) < most:
            return 0.0
        return instants[-most] + self._period_sec - self.now()

    def _forget(self) -> None:
        """Drop the failures whose time is over."""
        oldest = self.now() - self._period_sec
        for address, own in list(self._failures.items()):
            for digest in [digest for digest, at in own.items() if at <= oldest]:
                del own[digest]
            if not own:
                del self._failures[address]


def address_of(request: Request) -> str:
    """Name where a request came from: the peer's address, or its network if that is IPv6.

    ``X-Forwarded-For`` is not read: anybody may write it. A server that is told to trust a proxy
    puts the address of the client in place of the proxy's.
    """
    host = request.client.host if request.client else "unknown"
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_NETWORK), strict=False))


class SecurityMiddleware:
    """An ASGI middleware. It comes before routing, so that no route can be forgotten."""

    def __init__(self, app: ASGIApp, *, guard: Guard, clock: Clock, request_bytes: int) -> None:
        self._app = app
        self._guard = guard
        self._clock = clock
        self._request_bytes = request_bytes

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
        guard = self._guard
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
        most = self._request_bytes
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
        if not self._clock.stale:
            headers["X-Server-Time"] = self._clock.now().isoformat().replace("+00:00", "Z")


def local_path(scope: Scope) -> str:
    """Give the path below the place where the dashboard is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
