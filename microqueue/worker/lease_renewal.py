"""A thread that looks at what a worker holds, whenever something is due."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from math import inf
from typing import Any, TypeVar

from pymongo import MongoClient

from microqueue.core import QueueCore, SyncCore, core_of
from microqueue.drivers.retry import CLOSE_SEC
from microqueue.drivers.sync import bounded
from microqueue.errors import MicroqueueError
from microqueue.operations import filters, workers
from microqueue.operations.leases import LeaseState, lease_states, renew, report_progress
from microqueue.operations.workers import MOST_NAMES
from microqueue.queue import Queue
from microqueue.reports import WorkerInfo
from microqueue.task import Progress
from microqueue.worker.in_flight import InFlight, InFlightTask, lease_now, now_sec, split
from microqueue.worker.options import WorkerOptions


class DueThread:
    """Looks, and sleeps until something is due; for good, if nothing is."""

    def __init__(self, name: str) -> None:
        self._next_look = inf
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def expect(self, due: float) -> None:
        """Be awake by then: something was taken in that needs attention at that time."""
        if due < self._next_look:
            self._wake.set()

    def stop(self) -> None:
        """End, after the look that is under way."""
        self._stopping = True
        self._wake.set()

    def join(self) -> None:
        """Wait for the end."""
        if self._thread.ident is not None:  # It may not have been started.
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._next_look = inf  # What comes in from here on is looked at once more.
            self._wake.clear()
            self._next_look = due = self._look()
            self._wake.wait(None if due == inf else max(due - now_sec(), 0.0))

    def _look(self) -> float:
        """Do what is due; give when something is due again."""
        raise NotImplementedError


logger = logging.getLogger("microqueue.worker")


class TimeoutMonitor(DueThread):
    """Watches the time of what runs."""

    def __init__(self, in_flight: InFlight, on_timeout: Callable[[InFlightTask], None]) -> None:
        super().__init__("microqueue-deadlines")
        self._in_flight = in_flight
        self._on_timeout = on_timeout

    def _look(self) -> float:
        """Tell of those whose time is up; give when that of the next one is."""
        first = inf
        for one in self._in_flight.snapshot():
            if one.deadline is None or one.timed_out or one.concluded:
                continue
            if one.deadline > now_sec():
                first = min(first, one.deadline)
                continue
            one.timed_out = True
            try:
                self._on_timeout(one)
            except BaseException:
                logger.exception("the end of a handler's time could not be told")
        return first


SHORTEST_CALL_SEC = 1.0
"""A server that is busy takes longer than that, and is not to be asked all the more."""

# One client beside each that queues have, however many queues and workers use it.
_clients: dict[int, MongoClient[Any] | None] = {}
_users: dict[int, int] = {}
_lock = threading.Lock()


@contextmanager
def open_lease_queue(
    queue: QueueCore[Any], *, heartbeat_sec: float = math.inf
) -> Iterator[SyncCore[Any]]:
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
        limit = min(settings.call_timeout, timedelta(seconds=max(brief, SHORTEST_CALL_SEC)))
        brisk = settings.model_copy(update={"call_timeout": limit})
        yield core_of(Queue(source, queue.name, settings=brisk, clock=queue.clock))
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


QueueT = TypeVar("QueueT", bound=QueueCore[Any])


class Registration:
    """Says that a worker lives, in the database of each of its collections."""

    def __init__(
        self,
        worker_id: str,
        options: WorkerOptions,
        in_flight: InFlight,
        *,
        handled: Callable[[], int],
        tasks: Callable[[], Sequence[str] | None] = lambda: None,
    ) -> None:
        self._worker_id = worker_id
        self._options = options
        self._in_flight = in_flight
        self._handled = handled
        self._tasks = tasks
        self._started_at: datetime | None = None
        self.heartbeat_sec = options.heartbeat.total_seconds()

    def beat(self, lease_queues: Mapping[Any, SyncCore[Any]]) -> None:
        """Say it for these queues, each by the blocking one that stands for it."""
        held = self._in_flight.snapshot()
        names = self._tasks()
        registered = None if names is None else sorted(names)[:MOST_NAMES]
        for group in by_collection(lease_queues):
            first = lease_queues[group[0]]
            now = first.run(first.now())
            self._started_at = self._started_at or now
            info = WorkerInfo(
                id=self._worker_id,
                collection=first.collections.name,
                host=socket.gethostname(),
                pid=os.getpid(),
                queues=[one.name for one in group],
                concurrency=self._options.concurrency,
                running=sum(one.started is not None and one.queue in group for one in held),
                handled=self._handled(),
                started_at=self._started_at,
                heartbeat_at=now,
                heartbeat_sec=self.heartbeat_sec,
                tasks=registered,
                more_tasks=len(names or ()) > MOST_NAMES,
            )
            first.run(workers.beat(info))

    def leave(self, lease_queues: Mapping[Any, SyncCore[Any]]) -> None:
        """Say for these queues that it has ended, and holds nothing."""
        for group in by_collection(lease_queues):
            first = lease_queues[group[0]]
            first.run(workers.leave(self._worker_id, first.collections.name))


def by_collection(queues: Iterable[QueueT]) -> list[list[QueueT]]:
    """Sort queues by the collection that they are in."""
    groups: dict[Any, list[QueueT]] = {}
    for queue in queues:
        place = queue.collections
        key = id(place.client), place.database.name, place.name
        groups.setdefault(key, []).append(queue)
    return list(groups.values())


LONGEST_PAUSE_SEC = 1.0
SHORTEST_PAUSE_SEC = 0.01
LOOK_EVERY_SEC = 1.0
MOST_WAITING = 1000


class LeaseRenewer(DueThread):
    """Renews the leases in flight, beats, and speaks up when a task was taken away.

    ``lease_queues`` has, for each queue, the blocking one on the dedicated client.
    ``on_looked`` is called after each look, at least once a second.
    """

    def __init__(
        self,
        in_flight: InFlight,
        lease_queues: Mapping[Any, SyncCore[Any]],
        registration: Registration,
        *,
        on_lost: Callable[[InFlightTask], None],
        on_looked: Callable[[], None],
    ) -> None:
        super().__init__("microqueue-leases")
        self._in_flight = in_flight
        self._twins = lease_queues
        self._registration = registration
        self._on_lost = on_lost
        self._on_looked = on_looked
        self._beat_due = now_sec() + registration.heartbeat_sec
        self._look_due = 0.0
        self._troubled = False  # Something failed, and is tried again after a pause.

    def _look(self) -> float:
        """Beat, renew and look after what is held; give when one of these is due again."""
        self._troubled = False
        held = [one for one in self._in_flight.snapshot() if one.queue in self._twins]
        # First of all the heartbeat: after a time without a server, it shows who is alive.
        for duty in (self._say_alive, self._renew, self._look_after):
            with self._undisturbed():
                duty(held)
        with self._undisturbed():
            self._on_looked()
        return now_sec() + self._pause_sec(held)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Log what goes wrong with one duty, or with one queue, and go on with the others."""
        try:
            yield
        except MicroqueueError as exc:
            # Two thirds of each lease are left to try again.
            self._troubled = True
            logger.warning("leases or heartbeat could not be renewed: %s", exc)
        except BaseException:  # Without this thread, all that is held would be lost.
            self._troubled = True
            logger.exception("leases or heartbeat could not be renewed")

    def _pause_sec(self, held: list[InFlightTask]) -> float:
        if self._troubled:
            return LONGEST_PAUSE_SEC
        now, leased_now = now_sec(), lease_now()
        pauses = [one.renewal_due - leased_now for one in held]
        pauses.append(self._beat_due - now)
        if held:
            pauses.append(self._look_due - now)
        return min(max(min(pauses), SHORTEST_PAUSE_SEC), LONGEST_PAUSE_SEC)

    def _say_alive(self, _held: list[InFlightTask]) -> None:
        if self._beat_due <= now_sec():
            self._beat_due = now_sec() + self._registration.heartbeat_sec
            self._registration.beat(self._twins)

    def _renew(self, held: list[InFlightTask]) -> None:
        due = [one for one in held if one.renewal_due <= lease_now()]
        for queue, blocking, group in self._by_queue(due):
            with self._undisturbed():
                self._renew_group(queue, blocking, group)

    def _renew_group(self, queue: Any, blocking: SyncCore[Any], group: list[InFlightTask]) -> None:
        started = lease_now()
        lost = blocking.run(
            renew(
                [one.task for one in group],
                now=blocking.run(blocking.now()),
                timeout=queue.settings.visibility_timeout,
            )
        )
        lost_claims = {filters.claim_of(task) for task in lost}
        gone, kept = split(
            group, lambda one: bool(lost_claims) and filters.claim_of(one.claimed) in lost_claims
        )
        for one in kept:
            one.renew(started)
        for one in gone:
            one.renew(started, lost=True)
        if gone:
            self._tell_taken(blocking, gone)

    def _look_after(self, held: list[InFlightTask]) -> None:
        """Store progress, and find out which tasks were cancelled or reclaimed.

        Those that take longer than a moment; of those that wait, the next ones to start.
        """
        if self._look_due > now_sec():
            return
        self._look_due = now_sec() + LOOK_EVERY_SEC
        held = [one for one in held if not one.concluded]
        running = [one for one in held if one.running_sec > LOOK_EVERY_SEC]
        waiting = [one for one in held if one.waiting_sec > LOOK_EVERY_SEC]
        for _, blocking, group in self._by_queue(running + waiting[:MOST_WAITING]):
            reports: list[tuple[Any, Progress]] = [
                (one.task, report) for one in group if (report := one.take_progress())
            ]
            if reports:
                with self._undisturbed():
                    blocking.run(report_progress(reports))
            with self._undisturbed():
                self._tell_taken(blocking, group)

    def _tell_taken(self, blocking: SyncCore[Any], held: list[InFlightTask]) -> None:
        """Find out which were taken away, and how; what was settled meanwhile is gone, not lost."""
        taken = blocking.run(lease_states([one.claimed for one in held]))
        for one, how in zip(held, taken, strict=True):
            if how is not LeaseState.HELD and not one.concluded:
                one.was_cancelled = how is LeaseState.CANCELLED
                self._on_lost(one)

    def _by_queue(
        self, held: Iterable[InFlightTask]
    ) -> Iterator[tuple[Any, SyncCore[Any], list[InFlightTask]]]:
        groups: dict[Any, list[InFlightTask]] = defaultdict(list)
        for one in held:
            groups[one.queue].append(one)
        for queue, group in groups.items():
            yield queue, self._twins[queue], group


class LeaseService:
    """Looks after what a worker holds.

    ``lease_queues`` has a blocking queue, on a dedicated client, for each of the worker's queues.
    Each client has its own renewer, so a server that does not answer delays no lease on another.
    """

    def __init__(
        self,
        queues: Sequence[QueueCore[Any]],
        in_flight: InFlight,
        registration: Registration,
        *,
        on_timeout: Callable[[InFlightTask], None],
        on_lost: Callable[[InFlightTask], None],
        on_looked: Callable[[], None],
    ) -> None:
        self._registration = registration
        with ExitStack() as opened:
            beat_sec = registration.heartbeat_sec
            self.lease_queues = {
                queue: opened.enter_context(open_lease_queue(queue, heartbeat_sec=beat_sec))
                for queue in queues
            }
            self._opened = opened.pop_all()
        self._deadlines = TimeoutMonitor(in_flight, on_timeout)
        by_client: dict[int, list[QueueCore[Any]]] = {}
        for queue in queues:
            by_client.setdefault(id(queue.collections.client), []).append(queue)
        self._keepers = [
            LeaseRenewer(
                in_flight,
                {queue: self.lease_queues[queue] for queue in group},
                registration,
                on_lost=on_lost,
                on_looked=on_looked,
            )
            for group in by_client.values()
        ]

    def register(self) -> None:
        """Say that the worker lives. Before its first claim: its death may come soon."""
        self._registration.beat(self.lease_queues)

    def unregister(self) -> None:
        """Take the worker off the list: it ends before its first claim."""
        self._registration.leave(self.lease_queues)

    def start(self) -> None:
        """Begin to look after what is held."""
        for keeper in self._keepers:
            keeper.start()
        self._deadlines.start()

    def expect_renewal(self, within_sec: float) -> None:
        """Be awake within so many seconds: a lease wants to be renewed."""
        due = now_sec() + within_sec
        for keeper in self._keepers:
            keeper.expect(due)

    def expect_deadline(self, due: float) -> None:
        """Be awake by then: the time of a handler is up."""
        self._deadlines.expect(due)

    def stop_deadlines(self) -> None:
        """Watch nobody's time any more."""
        self._deadlines.stop()
        self._deadlines.join()

    def stop(self) -> None:
        """End, and wait for renewals under way."""
        for keeper in self._keepers:
            keeper.stop()
        for keeper in self._keepers:
            keeper.join()
        self.stop_deadlines()

    def close(self) -> None:
        """Let go of the connections."""
        self._opened.close()

    def let_go(self) -> None:
        """End, and let go of the connections, however long that takes."""
        self.stop()
        self.close()
