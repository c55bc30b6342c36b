"""A blocking queue beside another one, for threads that must not wait for anybody.

It has connections of its own: neither a busy event loop nor handlers that use all connections of
the queue's client hold it up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pymongo import MongoClient

from microqueue.core import QueueCore
from microqueue.queue import Queue

# One client beside each that queues have, however many queues and workers use it.
_clients: dict[int, MongoClient[Any] | None] = {}
_users: dict[int, int] = {}
_lock = threading.Lock()


@contextmanager
def blocking_twin(queue: QueueCore[Any]) -> Iterator[Queue[Any]]:
    """Give a blocking queue on the same collection."""
    collections = queue.collections
    key = id(collections.client)
    with _lock:
        if key not in _clients:
            _clients[key] = collections.second_client()
        client = _clients[key]
        _users[key] = _users.get(key, 0) + 1
    try:
        source = collections.through(client)
        yield Queue(source, queue.name, settings=queue.settings, clock=queue.clock)
    finally:
        with _lock:
            _users[key] -= 1
            unused = None
            if not _users[key]:
                del _users[key]
                unused = _clients.pop(key)
        if unused is not None:
            unused.close()
