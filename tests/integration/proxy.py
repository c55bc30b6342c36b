"""A TCP proxy in front of a server, whose connections a test can freeze, cut, slow down or mute.

It belongs before a server that is reached directly (``directConnection=true``), as the members of
a replica set tell clients the addresses of its configuration. Proxies in front of all members work
if the configuration has the addresses of the proxies, through which the members then talk, too.
"""

from __future__ import annotations

import re
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

CHUNK = 65_536
LOOK_SEC = 0.02


class Link:
    """One connection of a client, and the one to the server that stands for it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.frozen = False
        self.mute = False
        self.closed = False

    def close(self) -> None:
        """Close both ends."""
        self.closed = True
        for end in (self.client, self.server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Proxy:
    """Passes on what comes in, until a test disturbs it.

    - ``freeze()``: connections that exist stay open and pass nothing on, for good, as after a
      firewall has forgotten them. New ones work. ``freeze(new=True)``: new ones freeze, too.
    - ``thaw()``: new connections work again; the frozen ones pass on what was sent.
    - ``cut()``: connections that exist are closed.
    - ``drop_replies()``: on connections that exist, requests reach the server, replies are lost.
    - ``request_delay_sec``, ``reply_delay_sec``: what passes in that direction comes later.

    Each direction of a connection wakes up every ``look_sec``, which costs time with hundreds.
    """

    def __init__(self, uri: str, *, look_sec: float = LOOK_SEC) -> None:
        self._look_sec = look_sec
        found = re.search(r"//(?:[^@/]*@)?([^:/,]+):(\d+)", uri)
        assert found is not None, uri
        self._target = found[1], int(found[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.uri = uri.replace(f"{found[1]}:{found[2]}", f"127.0.0.1:{self.port}")
        self.request_delay_sec = 0.0
        self.reply_delay_sec = 0.0
        self._freeze_new = False
        self._links: list[Link] = []
        self._lock = threading.Lock()
        self._closed = False
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def frozen(self) -> int:
        """How many connections are frozen, and not closed by their clients."""
        with self._lock:
            return sum(link.frozen and not link.closed for link in self._links)

    @property
    def open(self) -> int:
        """How many connections there are."""
        with self._lock:
            return sum(not link.closed for link in self._links)

    def freeze(self, *, new: bool = False) -> int:
        """Pass nothing on any more, in silence; return how many connections that concerns."""
        return self._each(lambda link: setattr(link, "frozen", True), freeze_new=new)

    def thaw(self) -> int:
        """Pass on everything again."""
        return self._each(lambda link: setattr(link, "frozen", False), freeze_new=False)

    def drop_replies(self) -> int:
        """Lose what the server says on the connections that exist."""
        return self._each(lambda link: setattr(link, "mute", True))

    def cut(self) -> int:
        """Close the connections that exist."""
        return self._each(Link.close)

    def close(self) -> None:
        """End: nothing can connect any more, and what is connected is cut."""
        self._closed = True
        self._listener.close()
        self.cut()

    def _each(self, change: Callable[[Link], None], *, freeze_new: bool | None = None) -> int:
        with self._lock:
            if freeze_new is not None:
                self._freeze_new = freeze_new
            living = [link for link in self._links if not link.closed]
            for link in living:
                change(link)
            return len(living)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(client, server)
            with self._lock:
                link.frozen = self._freeze_new
                self._links.append(link)
            self._start(lambda link=link: self._pass(link, link.client, link.server))  # type: ignore[misc]  # It is bound now.
            self._start(lambda link=link: self._pass(link, link.server, link.client))  # type: ignore[misc]  # As above.

    def _pass(self, link: Link, source: socket.socket, sink: socket.socket) -> None:
        """Pass on one direction until either end closes."""
        with suppress(OSError, ValueError):  # What was closed has no number any more.
            incoming = select.poll()  # Not select(), which takes small numbers only.
            incoming.register(source, select.POLLIN)
            while not link.closed:
                if not incoming.poll(self._look_sec * 1000):
                    continue
                data = b"" if link.closed else source.recv(CHUNK)
                requests = source is link.client
                delay_sec = self.request_delay_sec if requests else self.reply_delay_sec
                if delay_sec and data:
                    time.sleep(delay_sec)
                while link.frozen and not link.closed and data:
                    # A client that gives up closes its end, which is all that gets through.
                    if requests and _is_closed(source):
                        data = b""
                    time.sleep(LOOK_SEC)
                if not data:
                    break
                if requests or not link.mute:
                    sink.sendall(data)
        link.close()

    def _start(self, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name="proxy", daemon=True).start()


def _is_closed(end: socket.socket) -> bool:
    """Return whether the other side has closed, without reading what it sent before."""
    try:
        return end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
