"""Deliveries: the messages that this process holds, their leases, and how they are settled.

One thread per broker renews the leases of all deliveries and writes the settlements, so that
acknowledging never waits for MongoDB. Deliveries outlive their channel: after a reconnect, a
message that is still being processed keeps its lease, and can be acknowledged.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import datetime
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from microqueue.contrib.kombu.repeated import RepeatedErrors
from microqueue.core import SyncCore
from microqueue.errors import LeaseLost, MicroqueueError, ServerUnavailable
from microqueue.operations import broker, leases, settle
from microqueue.operations.call import Operation
from microqueue.operations.settle import Settlement
from microqueue.task import Claimed, Task

GROUP_SEC = 0.005
"""How long the first settlement waits for others, to share one write; not during a flush."""
MOST_AT_ONCE = 1000
RETRY_SEC = 0.5
IDLE_SEC = 3600.0

logger = logging.getLogger("microqueue.kombu")


class Settle(Enum):
    """What becomes of a delivery."""

    ACK = auto()
    """The message is done."""
    REQUEUE = auto()
    """It waits again at its position; the delivery counts."""
    RELEASE = auto()
    """It waits again at its position, as if it had not been delivered."""
    DROP = auto()
    """It is deleted."""
    DEAD_LETTER = auto()
    """It is kept as a dead letter."""


class Requeueable(Protocol):
    """A message without a lease, which waits in this process."""

    def requeue(self, *, counted: bool) -> None:
        """Return it to its queue; with ``counted``, as delivered."""


class _Held(NamedTuple):
    claimed: Claimed
    keep: bool


class _Request(NamedTuple):
    claimed: Claimed
    how: Settle


class Deliveries:
    """Holds the deliveries of a process that are not settled yet.

    Args:
        core: The core of any queue of the collection.
        renew_sec: How often to renew the leases.
    """

    def __init__(self, core: SyncCore[Any], *, renew_sec: float) -> None:
        self._core = core
        self._renew_sec = renew_sec
        self._held: dict[str, _Held] = {}
        self._unleased: dict[str, Requeueable] = {}
        self._abandoned: dict[str, weakref.ref[Any]] = {}
        # Its put() may be called by the garbage collector, in the middle of anything.
        self._inbox: queue.SimpleQueue[_Request | threading.Event | Callable[[], None]] = (
            queue.SimpleQueue()
        )
        self._flushing = threading.Event()
        self._unwritten: list[_Request] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._held) + len(self._unleased) + len(self._unwritten)

    def add(self, tag: str, claimed: Claimed, *, keep: bool = True) -> None:
        """Hold a delivery, and renew its lease until it is settled.

        Args:
            tag: The delivery tag.
            claimed: The message.
            keep: Whether it is kept as done when it is acknowledged, and not deleted.
        """
        self._held[tag] = _Held(claimed, keep)
        self._start()

    def add_unleased(self, tag: str, message: Requeueable) -> None:
        """Hold a delivery that has no lease: only a requeue or a release has an effect."""
        self._unleased[tag] = message

    def settle(self, tag: str, how: Settle) -> bool:
        """Settle a delivery, soon. Return whether it was held; the second time it is not.

        After the end, and in a child process, none is held: there is no thread to write it.
        """
        if self._closed or self._pid != os.getpid():
            return False
        self._abandoned.pop(tag, None)
        if (unleased := self._unleased.pop(tag, None)) is not None:
            if how in {Settle.REQUEUE, Settle.RELEASE}:
                unleased.requeue(counted=how is Settle.REQUEUE)
            return True
        held = self._held.pop(tag, None)
        if held is None:
            return False
        if how is Settle.ACK and not held.keep:
            how = Settle.DROP
        self._inbox.put(_Request(held.claimed, how))
        self._start()
        return True

    def abandon(self, tag: str, message: Any) -> None:
        """Keep the lease only as long as the message is in use, and then release it.

        For a channel that broke: Celery drops the messages that wait for a worker process, and
        keeps those that are being processed.
        """
        if tag in self._held or tag in self._unleased:
            inbox = self._inbox

            def release(_: Any, self: Deliveries = self) -> None:
                inbox.put(lambda: self._release_abandoned(tag))

            self._abandoned[tag] = weakref.ref(message, release)
            self._start()

    def _release_abandoned(self, tag: str) -> None:
        if self._abandoned.pop(tag, None) is not None:
            self.settle(tag, Settle.RELEASE)

    def requeue_all(self) -> None:
        """Requeue all messages that are held, because the process ends."""
        for tag in list(self._held):
            self.settle(tag, Settle.REQUEUE)

    def flush(self, limit_sec: float) -> bool:
        """Wait until everything settled so far is written; return whether it is."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        if self._closed:
            if self._thread.is_alive():  # It ends when MongoDB answers.
                return False
            self._collect(0.0, [])  # What another thread settled during the end.
            return not self._unwritten
        written = threading.Event()
        self._inbox.put(written)
        self._flushing.set()
        return written.wait(limit_sec)

    def close(self, limit_sec: float) -> bool:
        """Write what is settled, and stop the thread; return whether all was written."""
        written = self.flush(limit_sec)
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._inbox.put(lambda: None)  # It wakes up, and ends.
            if written:
                thread.join(limit_sec)
        return written

    # The thread

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._run, name="microqueue-deliveries", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        renew_at = time.monotonic() + self._renew_sec
        waiting: list[threading.Event] = []
        errors = RepeatedErrors(logger)
        while not self._closed:
            try:
                next_sec = max(renew_at - time.monotonic(), 0.0)
                limit_sec = RETRY_SEC if self._unwritten else min(next_sec, IDLE_SEC)
                if waiting and not self._unwritten:
                    limit_sec = 0.0  # An error came between the events and their write.
                self._collect(limit_sec, waiting)
                if self._write():
                    for event in waiting:
                        event.set()
                    waiting.clear()
                if time.monotonic() >= renew_at:
                    renew_at = time.monotonic() + self._renew_sec
                    self._renew()
            except Exception as exc:  # noqa: BLE001 (it is logged)
                text = "could not settle or renew messages; next attempt in %g s"
                errors.log(exc, text, RETRY_SEC, extra={"wait_sec": RETRY_SEC})
                time.sleep(RETRY_SEC)
        for event in waiting:
            event.set()

    def _collect(self, limit_sec: float, events: list[threading.Event]) -> None:
        """Wait for the next settlement, and take those that follow at once.

        The events of flushes are added to ``events``, also if something fails after that.
        """
        try:
            item = self._inbox.get(timeout=limit_sec) if limit_sec else self._inbox.get_nowait()
            if isinstance(item, _Request):
                self._flushing.wait(GROUP_SEC)
            self._flushing.clear()
            while True:
                if isinstance(item, _Request):
                    self._unwritten.append(item)
                elif isinstance(item, threading.Event):
                    events.append(item)
                else:
                    item()
                if len(self._unwritten) >= MOST_AT_ONCE:
                    break
                item = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _write(self) -> bool:
        """Write the settlements; return whether none is left."""
        if not self._unwritten:
            return True
        try:
            lost = self._core.run(self._settle_all(self._unwritten))
        except ServerUnavailable as exc:
            self._warn(exc)
            return False
        except Exception:  # noqa: BLE001 (it is logged with the settlement that causes it)
            return self._write_each()
        self._unwritten = []
        _report(lost)
        return True

    def _write_each(self) -> bool:
        """Write the settlements one by one, because one of them fails."""
        while self._unwritten:
            one = self._unwritten[0]
            try:
                _report(self._core.run(self._settle_all([one])))
            except ServerUnavailable as exc:
                self._warn(exc)
                return False
            except Exception:
                logger.exception(
                    "could not settle message %s; it is redelivered when its lease expires",
                    one.claimed.id,
                    extra=_fields(one.claimed, unsettled=1),
                )
            del self._unwritten[0]
        return True

    def _warn(self, error: ServerUnavailable) -> None:
        count = len(self._unwritten)
        text = "could not settle %d messages; next attempt in %g s: %s"
        fields = {"unsettled": count, "wait_sec": RETRY_SEC}
        logger.warning(text, count, RETRY_SEC, error, extra=fields)

    def _settle_all(self, requests: Iterable[_Request]) -> Operation[list[LeaseLost]]:
        now = yield from self._core.now()
        done = [one.claimed for one in requests if one.how is Settle.ACK]
        dropped = [one.claimed for one in requests if one.how is Settle.DROP]
        others = [
            (one.claimed.task, _settlement(one.claimed.task, one.how, now))
            for one in requests
            if one.how not in {Settle.ACK, Settle.DROP}
        ]
        if dropped:
            yield from broker.drop(dropped)
        core = self._core
        return (
            yield from settle.settle_batch(
                done, others, now=now, settings=core.settings, keep_done=core.keeps_done
            )
        )

    def _renew(self) -> None:
        held = {tag: one.claimed for tag, one in dict(self._held).items()}
        unwritten = [one.claimed for one in self._unwritten]
        if not held and not unwritten:
            return
        try:
            lost = self._core.run(self._renew_all([*held.values(), *unwritten]))
        except MicroqueueError as exc:
            fields = {"not_renewed": len(held)}
            logger.warning("could not renew %d leases: %s", len(held), exc, extra=fields)
            return
        ids = {(task.id, task.lease and task.lease.token) for task in lost}
        for tag, claimed in held.items():
            if (claimed.id, claimed.lease and claimed.lease.token) in ids:
                self._held.pop(tag, None)
                logger.warning(
                    "lease of message %s in queue %r is lost; it may be delivered again",
                    claimed.id,
                    claimed.task.queue,
                    extra=_fields(claimed, lease_lost=True),
                )

    def _renew_all(self, claims: Iterable[Claimed]) -> Operation[list[Task[Any]]]:
        now = yield from self._core.now()
        tasks = [one.task for one in claims]
        timeout = self._core.settings.visibility_timeout
        return (yield from leases.renew(tasks, now=now, timeout=timeout))


def _report(lost: Iterable[LeaseLost]) -> None:
    for one in lost:
        fields = {"task_id": str(one.task_id), "lease_lost": True}
        logger.warning("message settled too late, and delivered again: %s", one, extra=fields)


def _fields(claimed: Claimed, **fields: Any) -> dict[str, Any]:
    """Return the fields of a log line about a message."""
    return {"task_id": str(claimed.id), "queue": claimed.task.queue, **fields}


def _settlement(task: Task[Any], how: Settle, now: datetime) -> Settlement:
    if how is Settle.REQUEUE:
        return broker.requeued(task, now)
    if how is Settle.RELEASE:
        return settle.released(task, now, front=False)
    return broker.rejected(now)
