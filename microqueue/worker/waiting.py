"""Waiting: for work, on the process's change streams; and for MongoDB, when a program starts."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from microqueue.core import SyncCore
from microqueue.drivers import change_stream, mongomock
from microqueue.drivers.change_stream import Listener
from microqueue.errors import ServerUnavailable
from microqueue.worker.daemon_threads import DaemonThread
from microqueue.worker.log import logger
from microqueue.worker.shutdown import ENDING_SEC, SIGNAL_WAIT_SEC

FIRST_WAIT_SEC = 0.5
MAX_WAIT_SEC = 5.0
JITTER = (0.8, 1.0)  # So that workers do not connect in step.

_random = random.Random()  # noqa: S311 (not for secrets)


class WorkWaiter:
    """Waits until a change stream reports that there may be work.

    Args:
        lease_queues: For each queue of the worker, the blocking one on the dedicated client.
    """

    def __init__(self, lease_queues: Mapping[Any, SyncCore[Any]]) -> None:
        queues = list(lease_queues.values())
        self._in_memory = queues[0].collections.in_memory
        self._changed = threading.Event()
        self._closed = False
        self._acquired: list[tuple[Any, Listener]] = []
        self._listeners: dict[Listener, list[str]] = {}
        self._reports: dict[Listener, int] = {}  # Before the worker's last check for work.
        self._ending: list[threading.Thread] = []
        for queue in queues:
            if not queue.collections.in_memory:
                collection = queue.collections.tasks
                listener = change_stream.acquire_listener(collection)
                self._acquired.append((collection, listener))
                self._listeners.setdefault(listener, []).append(queue.name)
                self._reports.setdefault(listener, listener.reports)

    def wait(self, seconds: float, *, stopping: Callable[[], bool]) -> bool:
        """Wait for a change, the timeout or the stop; return whether there was a change."""
        if self._in_memory:
            time.sleep(min(seconds, mongomock.POLL_SEC))
            return True
        for listener, names in self._listeners.items():
            listener.subscribe(self.wake, names, self._reports[listener])
        deadline = time.monotonic() + seconds
        while not stopping():
            remaining = deadline - time.monotonic()
            if self._changed.wait(max(min(remaining, SIGNAL_WAIT_SEC), 0.0)):
                break
            if remaining <= 0:
                self._note_reports()
                return False  # Without leaving: the stream is read on while nothing happens.
        self._leave()
        self._note_reports()
        changed = self._changed.is_set()
        self._changed.clear()
        return changed

    def wake(self) -> None:
        """End the wait, from any thread."""
        self._changed.set()

    def close(self) -> None:
        """Leave the streams, on another thread: the server may not answer. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        closing = DaemonThread(self._release, name="microqueue-end")
        self._ending.append(closing)
        closing.start()

    def wait_closed(self) -> None:
        """Wait until the server has closed the streams, unless it does not answer."""
        while self._ending:
            self._ending.pop(0).join(change_stream.ENDS_WITHIN_SEC)

    def _note_reports(self) -> None:
        self._reports = {listener: listener.reports for listener in self._listeners}

    def _leave(self) -> None:
        for listener in self._listeners:
            listener.unsubscribe(self.wake)

    def _release(self) -> None:
        self._leave()
        for collection, listener in self._acquired:
            if (thread := change_stream.release_listener(collection, listener)) is not None:
                self._ending.append(thread)


def waits() -> Iterator[float]:
    """Yield how long to wait after each attempt: twice as long each time, up to a limit."""
    wait_sec = FIRST_WAIT_SEC
    while True:
        yield wait_sec * _random.uniform(*JITTER)
        wait_sec = min(2 * wait_sec, MAX_WAIT_SEC)


def await_server(
    attempt: Callable[[], object],
    *,
    who: str,
    stopping: Callable[[], bool],
    abandon: Callable[..., object] | None = None,
) -> bool:
    """Repeat an attempt until MongoDB answers.

    Args:
        attempt: What needs the server. Each attempt runs in its own thread, because a server that
            does not answer must not delay a stop.
        who: The name of the program's part that waits, for the log.
        stopping: Whether to give up; called several times a second.
        abandon: Called after giving up, once the running attempt has ended, or some seconds
            later, with ``succeeded``: whether that attempt succeeded after all.

    Returns:
        Whether an attempt succeeded; ``False`` after giving up.

    Raises:
        MicroqueueError: An attempt failed for another reason than a missing server.
    """
    waited = False
    for wait_sec in waits():
        trial = DaemonThread(attempt, name="microqueue-start")
        trial.start()
        while trial.is_alive() and not stopping():
            trial.join(SIGNAL_WAIT_SEC)
        if not trial.is_alive() and trial.error is None:
            if waited:
                logger.info("%s connected to MongoDB", who)
            return True
        if isinstance(trial.error, ServerUnavailable) and not stopping():
            logger.warning(
                "%s is waiting for MongoDB; next attempt in %.1f s: %s",
                who,
                wait_sec,
                trial.error,
                extra={"waits_for": "mongodb"},
            )
            waited = True
            _sleep(wait_sec, stopping)
        elif trial.error is not None and not isinstance(trial.error, ServerUnavailable):
            raise trial.error
        if stopping():
            _abandon(trial, abandon)
            return False
    raise AssertionError  # There is always another wait.


def _sleep(seconds: float, stopping: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while not stopping() and (rest_sec := until - time.monotonic()) > 0:
        time.sleep(min(rest_sec, SIGNAL_WAIT_SEC))


def _abandon(trial: DaemonThread, abandon: Callable[..., object] | None) -> None:
    def end() -> None:
        trial.join(ENDING_SEC)
        if abandon is not None:
            abandon(succeeded=not trial.is_alive() and trial.error is None)

    DaemonThread(end, name="microqueue-end").start()
