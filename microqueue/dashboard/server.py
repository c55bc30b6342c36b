"""Serve a dashboard alone: on this machine only, unless it is protected by a token."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn

from microqueue.arguments import refused
from microqueue.dashboard.access import AnyQueue
from microqueue.dashboard.app import dashboard
from microqueue.dashboard.security import LOCAL_NAMES, check_token
from microqueue.errors import InvalidArgument
from microqueue.settings import DASHBOARD_PORT

__all__ = ["DashboardServer", "check_proxies", "check_reach", "check_token", "is_local"]

ENDING_SEC = 2
PATIENCE_SEC = 30.0


class _Server(uvicorn.Server):
    """Ends the streams of events before it waits for connections, which else stay open."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.context.events.dismiss()  # type: ignore[union-attr]  # It is our own app.
        await super().shutdown(sockets)


class DashboardServer:
    """A dashboard at an address. It listens when it is made, and answers in :meth:`run`.

    An address that others can reach needs a ``token``, or ``insecure=True``. ``proxies`` are the
    addresses, or networks, of proxies whose ``X-Forwarded-For`` names the client; without them
    the header is ignored.
    """

    def __init__(
        self,
        queue: AnyQueue,
        *,
        host: str = "127.0.0.1",
        port: int = DASHBOARD_PORT,
        insecure: bool = False,
        proxies: Sequence[str] = (),
        **options: Any,
    ) -> None:
        token = options.get("token")
        check_proxies(proxies)
        check_reach(host, protected=bool(token), insecure=insecure)
        if is_local(host) and not token:
            # A name of another site may be made to lead here; only a token would stop its page.
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
                # Else a client behind 127.0.0.1 would choose the address that it is counted by.
                proxy_headers=bool(proxies),
                forwarded_allow_ips=[*proxies],
                timeout_graceful_shutdown=ENDING_SEC,
            )
        )

    def run(self) -> None:
        """Answer requests until :meth:`stop`; in the main thread, also until Ctrl-C."""
        with self._socket:
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End :meth:`run`, from any thread."""
        self._server.should_exit = True

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Answer requests in a thread."""
        thread = threading.Thread(target=self.run, name="microqueue-dashboard", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.stop()
            thread.join(PATIENCE_SEC)


def check_reach(host: str, *, protected: bool, insecure: bool) -> None:
    """Refuse an address that others can reach, unless there is a token or it is meant so."""
    if not (protected or insecure or is_local(host)):
        raise InvalidArgument(
            f"host={host!r} can be reached by others: give a token, or say that everybody "
            "may look and act with --insecure",
            argument="host",
            value=host,
        )


def check_proxies(proxies: Sequence[str]) -> None:
    """Reject what is no address or network: the server would compare it with none."""
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError as exc:
            raise refused("proxies", proxy, "give an address, or a network as 10.0.0.0/8") from exc


def is_local(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    if host.lower() in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # A name may lead anywhere.


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as exc:
        instead = f"cannot listen at {host} ({exc}); give another port, or 0 for a free one"
        raise refused("port", port, instead) from exc


def _address(host: str, port: int) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/"
