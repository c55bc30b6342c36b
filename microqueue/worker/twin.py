"""A blocking queue beside another one, for threads that must not wait for anybody.

It has connections of its own: neither a busy event loop nor handlers that use all connections of
the queue's client hold it up.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from pymongo import MongoClient

from microqueue.core import QueueCore
from microqueue.drivers.sync import bounded
from microqueue.drivers.transient import CLOSE_SEC
from microqueue.queue import Queue

SHORTEST_SEC = 1.0
"""A server that is busy takes longer than that, and is not to be asked all the more."""

# One client beside each that queues have, however many queues and workers use it.
_clients: dict[int, MongoClient[Any] | None] = {}
_users: dict[int, int] = {}
_lock = threading.Lock()


@contextmanager
def blocking_twin(
    queue: QueueCore[Any], *, heartbeat_sec: float = math.inf
) -> Iterator[Queue[Any]]:
    """Give a blocking queue on the same collection.

    Its calls are short, and must be through before a lease ends or the worker counts as dead. So
    an attempt is given up early, and made again on another connection.
    """
    collections = queue.collections
    key = id(collections.client)
    with _lock:
        if key not in _clients:
            _clients[key] = collections.second_client()
        client = _clients[key]
        _users[key] = _users.get(key, 0) + 1
    try:
        source = collections.through(client)
        settings = queue.settings
        brief = min(heartbeat_sec, settings.visibility_timeout.total_seconds() / 3)
        limit = min(settings.call_timeout, timedelta(seconds=max(brief, SHORTEST_SEC)))
        brisk = settings.model_copy(update={"call_timeout": limit})
        yield Queue(source, queue.name, settings=brisk, clock=queue.clock)
    finally:
        with _lock:
            _users[key] -= 1
            unused = None
            if not _users[key]:
                del _users[key]
                unused = _clients.pop(key)
        if unused is not None:
            with bounded(CLOSE_SEC):  # It tells the server which sessions have ended.
                unused.close()
