"""One change stream per process and collection, for all who wait for work there.

A thread reads the stream while somebody waits, and only then: a busy worker needs no news,
and a stream that nobody reads falls behind. So one that was left for a while is opened anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pymongo.errors import PyMongoError

from microqueue.operations import watch

AWAIT_SEC = 1.0
LEFT_TOO_LONG_SEC = 1.0
REOPEN_SEC = 5.0
"""How long to poll before the next try for a stream: a server without any is not asked often."""
YIELD_SEC = 0.05

logger = logging.getLogger("microqueue.wakeup")


class Listener:
    """Tells those who wait that there may be work, in whichever of their queues."""

    def __init__(self, collection: Any) -> None:
        self._collection = collection
        self._changed = threading.Condition()
        self._waiting: dict[Callable[[], None], frozenset[str]] = {}
        self._names: frozenset[str] = frozenset()
        self._stream: Any = None
        self._reading = False
        self._read_at = 0.0
        self._tried_at = float("-inf")
        self._users = 0
        self._thread: threading.Thread | None = None

    def join(self, wake: Callable[[], None], queues: Sequence[str]) -> bool:
        """Call ``wake`` from now on whenever something changes; tell whether a stream is open.

        If one was just opened, ``wake`` is called at once: what came before is not in it.
        """
        with self._changed:
            self._waiting[wake] = frozenset(queues)
            if not self._is_current():
                self._open()
                wake()
            self._changed.notify_all()
            return self._stream is not None

    def part(self, wake: Callable[[], None]) -> None:
        """Stop calling ``wake``."""
        with self._changed:
            self._waiting.pop(wake, None)
            self._changed.notify_all()

    def acquire(self) -> None:
        """Start the thread for the first user."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="microqueue-listener", daemon=True)
                self._thread = thread
                try:
                    thread.start()  # It waits for the lock.
                except BaseException:
                    self._thread = None
                    raise
            self._users += 1

    def release(self) -> threading.Thread | None:
        """Tell the thread to end with the last user, and give it, to wait for."""
        with self._changed:
            self._users -= 1
            if self._users:
                return None
            thread, self._thread, self._stream = self._thread, None, None
            self._changed.notify_all()
            return thread

    def _is_current(self) -> bool:
        """Tell whether the stream covers all queues waited for, and is not far behind."""
        wanted = frozenset().union(*self._waiting.values())
        if self._stream is None:
            return time.monotonic() - self._tried_at < REOPEN_SEC
        behind = not self._reading and time.monotonic() - self._read_at > LEFT_TOO_LONG_SEC
        return wanted <= self._names and not behind

    def _open(self) -> None:
        self._names = self._names.union(*self._waiting.values())
        self._stream = None
        self._tried_at = self._read_at = time.monotonic()
        try:
            self._stream = self._collection.watch(
                watch.new_work(sorted(self._names)), max_await_time_ms=int(AWAIT_SEC * 1000)
            )
        except PyMongoError as exc:
            logger.debug("no change stream, polling instead: %s", exc)

    def _run(self) -> None:
        mine = threading.current_thread()
        stream: Any = None
        while True:
            with self._changed:
                self._reading = False
                self._changed.wait_for(
                    lambda: self._thread is not mine or (self._waiting and self._stream)
                )
                ended = self._thread is not mine
                former, stream = stream, None if ended else self._stream
                self._reading = not ended
            if former is not None and former is not stream:
                _close(former)  # Here, because a stream must not be closed while it is read.
            if ended:
                return
            self._read(stream)

    def _read(self, stream: Any) -> None:
        """Wait for the next change, and wake all who wait."""
        try:
            change = stream.try_next()
        except PyMongoError as exc:
            logger.debug("the change stream ended, polling instead: %s", exc)
            with self._changed:
                if self._stream is stream:
                    self._stream = None
            return
        self._read_at = time.monotonic()
        if change is not None:
            with self._changed:
                waiting = list(self._waiting)
            for wake in waiting:
                wake()
            with self._changed:
                # Those who were woken leave. Waiting for that lets them run first.
                self._changed.wait_for(lambda: not self._waiting, YIELD_SEC)


def _close(stream: Any) -> None:
    try:
        stream.close()
    except PyMongoError as exc:
        logger.debug("the change stream could not be closed: %s", exc)


_listeners: dict[Any, Listener] = {}
_listeners_lock = threading.Lock()


def acquire(collection: Any) -> Listener:
    """Give the listener of this process for a collection of a blocking client."""
    with _listeners_lock:
        listener = _listeners.get(_key(collection)) or Listener(collection)
        listener.acquire()
        _listeners[_key(collection)] = listener
        return listener


def release(collection: Any, listener: Listener) -> threading.Thread | None:
    """Let a listener go; give its thread if it ends, after its last look, within a second."""
    with _listeners_lock:
        thread = listener.release()
        if thread is not None:
            _listeners.pop(_key(collection), None)
        return thread


def _key(collection: Any) -> Any:
    return id(collection.database.client), collection.full_name
