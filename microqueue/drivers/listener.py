"""One change stream per process and collection, for all who wait for work there.

A thread opens and reads the stream while somebody waits, and only then: a busy worker needs no
news, and a stream that is not read falls behind. So one that was left for a while is opened again.

A stream has no deadline, as it waits for what may never come. If its connection dies in silence,
only this thread waits for it. The next caller that waits notices that it has been silent for too
long, leaves it behind, and starts another thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pymongo.errors import PyMongoError

from microqueue.drivers.sync import bounded
from microqueue.drivers.transient import CLOSE_SEC
from microqueue.operations import watch

AWAIT_SEC = 1.0
LEFT_TOO_LONG_SEC = 1.0
REOPEN_SEC = 5.0
"""How long to poll before the next try for a stream: a server without any is not asked often."""
YIELD_SEC = 0.05
OPEN_SEC = 5.0
LATE_SEC = 1.0
SILENT_SEC = 5.0
"""How much longer than it was told to the server may take, before a stream counts as dead."""
ENDS_WITHIN_SEC = AWAIT_SEC + CLOSE_SEC + 1.0
"""How long a thread that was let go takes to end, unless the server does not answer."""

logger = logging.getLogger("microqueue.wakeup")


class Listener:
    """Wakes those who wait when there may be work, in whichever of their queues."""

    def __init__(self, collection: Any, await_sec: float = AWAIT_SEC) -> None:
        self._collection = collection
        self._await_sec = await_sec
        self._changed = threading.Condition()  # Held for moments only, never while a server works.
        self._waiting: dict[Callable[[], None], frozenset[str]] = {}
        self._names: frozenset[str] = frozenset()
        self._stream: Any = None
        self._busy_since: float | None = None
        self._read_at = 0.0
        self._tried_at = float("-inf")
        self._users = 0
        self._thread: threading.Thread | None = None

    def join(self, wake: Callable[[], None], queues: Sequence[str]) -> None:
        """Call ``wake`` from now on whenever something changes.

        It is also called after a stream was opened: what came before is not in it.
        """
        with self._changed:
            self._waiting[wake] = frozenset(queues)
            if self._is_stuck():
                logger.debug("the change stream is silent, opening another")
                self._stream = None
                self._tried_at = float("-inf")
                self._start()
            self._changed.notify_all()

    @property
    def hears(self) -> bool:
        """Whether there is a stream, and the server answers."""
        since = self._busy_since
        late = since is not None and time.monotonic() - since > self._await_sec + LATE_SEC
        return self._stream is not None and not late

    def part(self, wake: Callable[[], None]) -> None:
        """Stop calling ``wake``."""
        with self._changed:
            self._waiting.pop(wake, None)
            self._changed.notify_all()

    def acquire(self) -> None:
        """Start the thread for the first user."""
        with self._changed:
            if self._thread is None:
                self._start()
            self._users += 1

    def release(self) -> threading.Thread | None:
        """Tell the thread to end with the last user, and return it, to wait for."""
        with self._changed:
            self._users -= 1
            if self._users:
                return None
            thread, self._thread, self._stream = self._thread, None, None
            self._changed.notify_all()
            return thread

    def _start(self) -> None:
        """Start a thread, which waits for the lock; a former one ends when it can."""
        former, busy_since = self._thread, self._busy_since
        thread = threading.Thread(target=self._run, name="microqueue-listener", daemon=True)
        self._thread, self._busy_since = thread, None
        try:
            thread.start()
        except BaseException:
            self._thread, self._busy_since = former, busy_since
            raise

    def _is_stuck(self) -> bool:
        """Tell whether the server has owed an answer for too long."""
        since = self._busy_since
        return since is not None and time.monotonic() - since > self._await_sec + SILENT_SEC

    def _is_current(self) -> bool:
        """Tell whether the stream covers all queues waited for, and is not far behind."""
        if self._stream is None:
            return False
        wanted = frozenset().union(*self._waiting.values())
        return wanted <= self._names and time.monotonic() - self._read_at <= LEFT_TOO_LONG_SEC

    def _run(self) -> None:
        mine = threading.current_thread()
        stream: Any = None
        while True:
            with self._changed:
                if self._thread is mine:
                    self._busy_since = None
                self._changed.wait_for(lambda: self._thread is not mine or self._waiting)
                if self._thread is not mine:
                    break
                current = stream is not None and stream is self._stream and self._is_current()
                if not current and time.monotonic() - self._tried_at < REOPEN_SEC and not stream:
                    # There was none a moment ago; those who wait poll.
                    pause_sec = self._tried_at + REOPEN_SEC - time.monotonic()
                    self._changed.wait_for(lambda: self._thread is not mine, pause_sec)
                    continue
                self._names = self._names.union(*self._waiting.values())
                names = sorted(self._names)
                self._busy_since = time.monotonic()
            if current:
                stream = self._read(stream)
            else:
                _close(stream)
                stream = self._open(names)
        _close(stream)

    def _open(self, names: Sequence[str]) -> Any:
        """Open a stream for these queues, and wake all who wait: it begins now."""
        stream: Any = None
        try:
            with bounded(OPEN_SEC):
                stream = self._collection.watch(
                    watch.new_work(names), max_await_time_ms=int(self._await_sec * 1000)
                )
        except PyMongoError as exc:
            logger.debug("no change stream, polling instead: %s", exc)
        with self._changed:
            if self._thread is not threading.current_thread():
                return stream
            self._stream = stream
            self._tried_at = self._read_at = time.monotonic()
            waiting = list(self._waiting)
        if stream is not None:
            for wake in waiting:
                wake()
        return stream

    def _read(self, stream: Any) -> Any:
        """Wait for the next change, and wake all who wait; return the stream, if it goes on."""
        try:
            change = stream.try_next()
        except PyMongoError as exc:
            logger.debug("the change stream ended, polling instead: %s", exc)
            with self._changed:
                if self._stream is stream:
                    self._stream = None
            return None
        self._read_at = time.monotonic()
        if change is not None:
            with self._changed:
                waiting = list(self._waiting)
            for wake in waiting:
                wake()
            with self._changed:
                # Those who were woken leave. Waiting for that lets them run first.
                self._changed.wait_for(lambda: not self._waiting, YIELD_SEC)
        return stream


def _close(stream: Any) -> None:
    if stream is None:
        return
    try:
        with bounded(CLOSE_SEC):
            stream.close()
    except PyMongoError as exc:
        logger.debug("the change stream could not be closed: %s", exc)


_listeners: dict[Any, Listener] = {}
_listeners_lock = threading.Lock()


def acquire(collection: Any, await_sec: float = AWAIT_SEC) -> Listener:
    """Give the listener of this process for a collection of a blocking client."""
    with _listeners_lock:
        listener = _listeners.get(_key(collection)) or Listener(collection, await_sec)
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
