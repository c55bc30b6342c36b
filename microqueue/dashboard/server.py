"""A standalone server of a dashboard: on this machine only, unless a token protects it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Unpack, get_type_hints

import uvicorn

from microqueue.arguments import invalid_argument
from microqueue.dashboard.access import AnyQueue
from microqueue.dashboard.app import dashboard
from microqueue.dashboard.options import (
    DashboardOptionsDict,
    DashboardServerOptionsDict,
)
from microqueue.dashboard.security import LOCAL_NAMES, check_token
from microqueue.errors import InvalidArgument
from microqueue.model import reject_unknown
from microqueue.settings import DASHBOARD_PORT

__all__ = ["DashboardServer", "check_proxies", "check_reach", "check_token", "is_local"]

SHUTDOWN_SEC = 2
JOIN_SEC = 30.0


class _Server(uvicorn.Server):
    """Closes the event streams before it waits for open connections."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.context.events.disconnect_all()  # type: ignore[union-attr]  # The app is a dashboard.
        await super().shutdown(sockets)


class DashboardServer:
    """A dashboard on its own port. It listens when it is created, and serves in :meth:`run`.

    Args:
        queue: The queue whose collection to show.
        host: The address to listen on. Other machines can reach it only with a ``token``, or with
            ``insecure=True``.
        port: The port to listen on; 0 chooses a free one.
        insecure: Whether other machines may reach it without a token.
        proxies: Addresses or networks of proxies whose ``X-Forwarded-For`` is trusted.
        options: The options of :class:`~microqueue.dashboard.DashboardOptions`.

    Raises:
        InvalidArgument: The address needs a token, or the port is in use.
    """

    def __init__(
        self,
        queue: AnyQueue,
        *,
        host: str = "127.0.0.1",
        port: int = DASHBOARD_PORT,
        insecure: bool = False,
        proxies: Sequence[str] = (),
        **options: Unpack[DashboardOptionsDict],
    ) -> None:
        reject_unknown("DashboardServer", options, get_type_hints(DashboardServerOptionsDict))
        token = options.get("token")
        check_proxies(proxies)
        check_reach(host, protected=bool(token), insecure=insecure)
        if is_local(host) and not token:
            # DNS rebinding: another site's name may resolve to this address.
            options["hosts"] = tuple(LOCAL_NAMES | {host.lower()})
        self.app = dashboard(queue, **options)
        self._socket = _listen(host, port)
        self.address = _address(host, self._socket.getsockname()[1])
        self._server = _Server(
            uvicorn.Config(
                self.app,
                log_config=None,
                access_log=False,
                server_header=False,
                # Otherwise local clients could choose the address that failed logins count for.
                proxy_headers=bool(proxies),
                forwarded_allow_ips=[*proxies],
                timeout_graceful_shutdown=SHUTDOWN_SEC,
            )
        )

    def run(self) -> None:
        """Serve until :meth:`stop`, or in the main thread until Ctrl-C."""
        with self._socket:
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Stop :meth:`run`, from any thread."""
        self._server.should_exit = True

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Serve in a background thread."""
        thread = threading.Thread(target=self.run, name="microqueue-dashboard", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.stop()
            thread.join(JOIN_SEC)


def check_reach(host: str, *, protected: bool, insecure: bool) -> None:
    """Reject an address that other machines can reach, unless a token or ``insecure`` is given."""
    if not (protected or insecure or is_local(host)):
        raise InvalidArgument(
            f"host={host!r} can be reached by other machines: give a token, or allow access "
            "without one with --insecure",
            argument="host",
            value=host,
        )


def check_proxies(proxies: Sequence[str]) -> None:
    """Reject values that are no address or network."""
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError as exc:
            raise invalid_argument(
                "proxies", proxy, "give an IP address, or a network such as 10.0.0.0/8"
            ) from exc


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host.lower() in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # A name may resolve to any address.


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError, TypeError, ValueError) as exc:  # The last two: no host's name.
        instead = f"cannot listen at {host} ({exc}); give another port, or 0 for a free one"
        raise invalid_argument("port", port, instead) from exc


def _address(host: str, port: int) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/"
