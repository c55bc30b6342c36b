"""A viewer under test: an open connection to a dashboard's stream of events."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import httpx

from microqueue import Queue
from microqueue.dashboard.server import DashboardServer

PATIENCE_SEC = 40.0


class Listener:
    """Listens in a thread, and remembers all that it heard."""

    def __init__(self, address: str, *, last_id: str | None = None, query: str = "") -> None:
        self._address = f"{address}events?{query}"
        self._headers = {} if last_id is None else {"Last-Event-ID": last_id}
        self._client = httpx.Client(timeout=httpx.Timeout(PATIENCE_SEC, read=None))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._response: httpx.Response | None = None
        self._leaving = threading.Event()
        self.heard: list[tuple[str, Any]] = []
        self.last_id: str | None = last_id
        self.ended = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_for(lambda: "hello" in self.types)
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Vanish."""
        self._leaving.set()
        self._thread.join(PATIENCE_SEC)
        self._client.close()

    def _listen(self) -> None:
        try:
            with self._client.stream("GET", self._address, headers=self._headers) as response:
                event = "message"
                for line in response.iter_lines():
                    if self._leaving.is_set():
                        return
                    name, _, value = line.partition(": ")
                    if name == "event":
                        event = value
                    elif name == "id":
                        self.last_id = value
                    elif name == "data":
                        self.heard.append((event, json.loads(value)))
        except httpx.HTTPError:
            pass
        finally:
            self.ended.set()

    @property
    def types(self) -> list[str]:
        return [kind for kind, _ in self.heard]

    def of(self, kind: str) -> list[Any]:
        return [data for one, data in self.heard if one == kind]

    def count(self, kind: str) -> int:
        """Add up the counts of all messages of a kind."""
        return sum(data["count"] for data in self.of(kind))

    def wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SEC
        while not happened():
            assert time.monotonic() < deadline, (self.types, self.heard[-5:])
            time.sleep(0.02)

    def wait_for_types(self, *kinds: str) -> None:
        self.wait_for(lambda: set(kinds) <= set(self.types))


@contextmanager
def serving(queue: Queue[Any], **options: Any) -> Iterator[tuple[str, Any]]:
    """Serve a dashboard; give its address and what it works with."""
    # A listener notices that it shall leave when it hears something, so the heart beats fast.
    server = DashboardServer(queue, port=0, poll_sec=0.1, heartbeat_sec=0.1, **options)
    with server.running():
        yield server.address, server.app.state.context
