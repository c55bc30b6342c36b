"""Access control: token and session cookie, origin and host checks, and throttled logins.

While a login limit is reached, no token is compared, not even the right one: otherwise guessing
could continue at full speed. Three rules keep this from locking out those who have the token:

- The same wrong token from the same address counts once. A scraper or a page with an old token
  sends it again and again, and a guesser learns nothing from it.
- An address that sent the right token before is held to its own limit, not to that of all.
- A session that this process opened is not compared with the token; see :class:`Guard`.
"""

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
"""The key of a request's scope that holds how it was authenticated."""
SESSION_SEC = 12 * 3600
MIN_TOKEN_LENGTH = 16
MAX_TIMESTAMP_LENGTH = 12
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/login"})
LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
MAX_ADDRESSES = 1000
IPV6_NETWORK = 64
"""The prefix length that failed logins count for: one client may have all addresses of it."""

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

logger = logging.getLogger("microqueue.dashboard")


class Guard:
    """Authenticates requests, and rejects those of other sites.

    A session cookie holds two signatures. One is made with a random key of this process: it cannot
    be guessed, so it is accepted even while logins are throttled. The other is made with the token,
    so that other processes of the dashboard accept it too, and this one after a restart. Guessing
    that one means guessing the token, so it is throttled like a login.
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

    def is_token(self, candidate: str) -> bool:
        """Return whether this is the token, comparing in constant time."""
        return self._token is not None and hmac.compare_digest(
            _digest(candidate), _hash(self._token)
        )

    def check_login(self, request: Request, candidate: str) -> bool:
        """Return whether the login form got the token.

        Raises:
            HTTPException: 429, while logins are throttled.
        """
        address = address_of(request)
        self._check_throttle(address)
        if not self.is_token(candidate):
            self.throttle.failed(address, candidate)
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
        """Reject an unknown ``Host``, which protects against DNS rebinding."""
        if self._hosts is None:
            return
        url = _split_url(f"//{request.headers.get('host', '')}")
        if url is None or (url.hostname or "") not in self._hosts:
            raise HTTPException(HTTPStatus.MISDIRECTED_REQUEST, "this host name is not served here")

    def check_origin(self, request: Request, *, with_token: bool = False) -> None:
        """Reject an action that a page of another site requests on behalf of the viewer.

        A request with the token in a header cannot come from such a page.
        """
        if request.method in SAFE_METHODS or with_token:
            return
        fetch_site = request.headers.get("sec-fetch-site")
        origin = request.headers.get("origin")
        if fetch_site is not None:
            same = fetch_site in {"same-origin", "none"}
        else:
            url = _split_url(origin or "")
            same = origin is None or (url is not None and url.netloc == request.headers.get("host"))
        if not same:
            raise HTTPException(HTTPStatus.FORBIDDEN, "cross-site request rejected")

    def credentials_of(self, request: Request) -> str | None:
        """Return how a request is authenticated: ``token``, ``login``, ``anonymous`` or ``None``.

        Raises:
            HTTPException: 429, if it has a token or a session while logins are throttled.
        """
        if self._token is None:
            return "anonymous"
        until, signature, own_signature = _session(request)
        if own_signature and _same(self._sign(until, self._own_key), own_signature):
            return "login"
        bearer = _bearer(request)
        if bearer is None and not signature:
            return None
        address = address_of(request)
        self._check_throttle(address)
        if bearer is not None and self.is_token(bearer):
            self.throttle.succeeded(address)
            return "token"
        if signature and _same(self._sign(until, self._token), signature):
            self.throttle.succeeded(address)
            return "login"
        self.throttle.failed(address, signature if bearer is None else bearer)
        return None

    def _sign(self, until: str, key: bytes) -> str:
        return hmac.new(key, until.encode(), hashlib.sha256).hexdigest()

    def log_in(self, request: Request, response: Response) -> None:
        """Set a session cookie for twelve hours."""
        until = str(int(time.time()) + SESSION_SEC)
        signatures = self._sign(until, self._token or b""), self._sign(until, self._own_key)
        response.set_cookie(
            COOKIE,
            ".".join((until, *signatures)),
            max_age=SESSION_SEC,
            path=cookie_path(request),
            httponly=True,
            samesite="strict",
            secure=_is_https(request),
        )

    def log_out(self, request: Request, response: Response) -> None:
        """Delete the session cookie."""
        response.delete_cookie(COOKIE, path=cookie_path(request), httponly=True, samesite="strict")

    def who(self, request: Request) -> str:
        """Return who sent a request, for the audit log."""
        named = self._identify(request) if self._identify is not None else None
        if named:
            return storable(named)[:200]
        address = request.client.host if request.client else "unknown"
        if self._token is None:
            return f"anonymous at {address}"
        kind = request.scope.get(CREDENTIALS) or "login"
        return f"{kind} at {address}"


def cookie_path(request: Request) -> str:
    """Return the path that the dashboard is mounted at."""
    return f"{request.scope.get('root_path', '')}/"


def storable(text: str) -> str:
    """Replace characters that MongoDB cannot store."""
    return text.encode("utf-8", "replace").decode()


def _split_url(url: str) -> SplitResult | None:
    """Parse an untrusted URL; ``None`` if it is invalid."""
    try:
        return urlsplit(url)
    except ValueError:
        return None


def check_token(token: str | None) -> None:
    """Reject a token that is too short to be safe from guessing."""
    if token is not None and len(token) < MIN_TOKEN_LENGTH:
        raise InvalidArgument(  # Without the value, which must not be shown or logged.
            f"the token has {len(token)} characters, but needs at least {MIN_TOKEN_LENGTH}; "
            "microqueue dashboard --new-token prints one",
            argument="token",
        )


def _bearer(request: Request) -> str | None:
    scheme, _, candidate = request.headers.get("authorization", "").partition(" ")
    return candidate.strip() if scheme.lower() == "bearer" else None


def _session(request: Request) -> tuple[str, str, str]:
    """Return the expiry and the signatures of the session cookie; empty if it has expired."""
    until, _, signatures = request.cookies.get(COOKIE, "").partition(".")
    signature, _, own_signature = signatures.partition(".")
    if not until.isascii() or not until.isdecimal() or len(until) > MAX_TIMESTAMP_LENGTH:
        return "", "", ""
    return ("", "", "") if int(until) < time.time() else (until, signature, own_signature)


def _is_https(request: Request) -> bool:
    """Return whether the viewer uses HTTPS, directly or up to a proxy.

    The header is untrusted, but it can only keep the viewer's own cookie off plain HTTP.
    """
    forwarded = request.headers.get("x-forwarded-proto", "").rpartition(",")[2].strip().lower()
    return request.scope["scheme"] == "https" or forwarded == "https"


def _same(expected: str, candidate: str) -> bool:
    return hmac.compare_digest(expected.encode(), candidate.encode("utf-8", "replace"))


def _digest(candidate: str) -> bytes:
    return _hash(candidate.encode("utf-8", "replace"))


def _hash(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


class LoginThrottle:
    """Counts failed logins per address and in all, for a bounded number of addresses.

    Args:
        per_address: How many different wrong tokens an address may try within the period.
        in_all: How many all addresses together may try.
        period_sec: How long a failed login counts.
        max_addresses: How many failing, and how many known, addresses are remembered.
    """

    def __init__(
        self,
        *,
        per_address: int,
        in_all: int,
        period_sec: float,
        max_addresses: int = MAX_ADDRESSES,
    ) -> None:
        self.now: Callable[[], float] = time.monotonic
        self._per_address = per_address
        self._in_all = in_all
        self._period_sec = period_sec
        self._max_addresses = max_addresses
        self._salt = secrets.token_bytes(16)
        # By address: when each wrong token came first. The most recent address is last.
        self._failures: OrderedDict[str, dict[bytes, float]] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()

    @property
    def size(self) -> int:
        """The number of failures and addresses in memory."""
        return sum(map(len, self._failures.values())) + len(self._known)

    def wait_sec(self, address: str) -> int:
        """Return for how many seconds logins from this address are rejected."""
        self._drop_expired()
        own = sorted(self._failures.get(address, {}).values())
        waits = [self._until_below(own, self._per_address)]
        if address not in self._known:
            every = sorted(at for one in self._failures.values() for at in one.values())
            waits.append(self._until_below(every, self._in_all))
        return math.ceil(max(waits))

    def failed(self, address: str, candidate: str) -> None:
        """Count and log a wrong token, unless this address sent the same one before."""
        self._drop_expired()
        digest = hashlib.sha256(self._salt + candidate.encode("utf-8", "replace")).digest()
        own = self._failures.setdefault(address, {})
        if digest in own:
            return
        own[digest] = self.now()
        self._failures.move_to_end(address)
        while len(self._failures) > self._max_addresses:
            self._failures.popitem(last=False)
        logger.warning(
            "failed login from %s: %d in the last %g s, %d from all addresses%s",
            address,
            len(own),
            self._period_sec,
            sum(map(len, self._failures.values())),
            self._consequence(address),
            extra={"address": address, "failures": len(own)},
        )

    def succeeded(self, address: str, *, reset: bool = False) -> None:
        """Remember an address that sent the right token; ``reset`` clears its failures."""
        if reset:
            self._failures.pop(address, None)
        self._known[address] = None
        self._known.move_to_end(address)
        while len(self._known) > self._max_addresses:
            self._known.popitem(last=False)

    def _consequence(self, address: str) -> str:
        seconds = self.wait_sec(address)
        return f"; more are rejected for {seconds} s" if seconds else ""

    def _until_below(self, instants: list[float], limit: int) -> float:
        """Return the time until fewer than ``limit`` of these count."""
        if len(instants) < limit:
            return 0.0
        return instants[-limit] + self._period_sec - self.now()

    def _drop_expired(self) -> None:
        """Forget failures that no longer count."""
        oldest = self.now() - self._period_sec
        for address, own in list(self._failures.items()):
            for digest in [digest for digest, at in own.items() if at <= oldest]:
                del own[digest]
            if not own:
                del self._failures[address]


def address_of(request: Request) -> str:
    """Return the peer's address, or its network if it is IPv6.

    ``X-Forwarded-For`` is untrusted and ignored. A server that trusts a proxy replaces the proxy's
    address with that of the client before.
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
    """Checks every request before routing, so that no route is left out, and adds headers."""

    def __init__(self, app: ASGIApp, *, guard: Guard, clock: Clock, request_bytes: int) -> None:
        self._app = app
        self._guard = guard
        self._clock = clock
        self._request_bytes = request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and pass it to the app or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._add_headers(MutableHeaders(scope=message), scope)
            await send(message)

        request = Request(scope, receive)
        try:
            rejection = self._reject(request)
            if rejection is None and request.method not in SAFE_METHODS:
                receive = await self._read_body(request)
        except HTTPException as exc:
            name = HTTPStatus(exc.status_code).phrase.replace(" ", "")
            rejection = problem(exc.status_code, exc.detail, name, dict(exc.headers or {}))
        await (self._app if rejection is None else rejection)(scope, receive, send_with_headers)

    def _reject(self, request: Request) -> Response | None:
        """Return a redirect to the login form, raise, or return ``None`` to accept."""
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
            if is_page:  # The login form shows the reason.
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
            "authenticate with Authorization: Bearer TOKEN, or log in",
            {"WWW-Authenticate": "Bearer"},
        )

    async def _read_body(self, request: Request) -> Receive:
        """Read the body up to the limit, and return a ``receive`` that replays it."""
        limit = self._request_bytes
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise HTTPException(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body exceeds {limit:,} bytes"
                )
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                return {"type": "http.disconnect"}
            sent = True
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
    """Return the path below the mount path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
