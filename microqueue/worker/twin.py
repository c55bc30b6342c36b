"""A blocking queue beside an asynchronous one, for threads beside the event loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pymongo import MongoClient

from microqueue.async_queue import AsyncQueue
from microqueue.queue import Queue

# One blocking client per asynchronous one, however many queues and workers use it.
_clients: dict[int, MongoClient[Any]] = {}
_users: dict[int, int] = {}
_lock = threading.Lock()


@contextmanager
def blocking_twin(queue: AsyncQueue[Any]) -> Iterator[Queue[Any]]:
    """Give a blocking queue on the same collection, which goes on while the loop is busy."""
    collections = queue.collections
    key = id(collections.client)
    with _lock:
        source, made = collections.blocking(_clients.get(key))
        if made is not None:
            _clients[key] = made
        _users[key] = _users.get(key, 0) + 1
    try:
        yield Queue(source, queue.name, settings=queue.settings, clock=queue.clock)
    finally:
        with _lock:
            _users[key] -= 1
            unused = None if _users[key] else _clients.pop(key, None)
        if unused is not None:
            unused.close()
