"""What keeps claimed tasks in this worker's hands: lease renewal, heartbeat and timeouts.

All of it runs on its own threads and its own connections, so that neither a busy event loop nor
an exhausted connection pool costs a lease.
"""

from __future__ import annotations

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
from microqueue.drivers.driver import CLOSE_SEC, bounded
from microqueue.errors import MicroqueueError
from microqueue.operations import filters, workers
from microqueue.operations.leases import LeaseState, lease_states, renew, report_progress
from microqueue.operations.workers import MOST_NAMES
from microqueue.queue import Queue
from microqueue.reports import WorkerInfo
from microqueue.task import Progress
from microqueue.worker.daemon_threads import DueThread
from microqueue.worker.in_flight import (
    RENEWALS_PER_LEASE,
    InFlight,
    LeasedTask,
    lease_now,
    now_sec,
    split,
)
from microqueue.worker.log import logger
from microqueue.worker.options import WorkerOptions

QueueT = TypeVar("QueueT", bound=QueueCore[Any])

MIN_CALL_SEC = 1.0
"""A busy server may need as long; a shorter timeout would only add attempts."""
MAX_WAIT_SEC = 1.0
MIN_WAIT_SEC = 0.01
CHECK_EVERY_SEC = 1.0
MAX_CHECKED_WAITING = 1000


class TimeoutMonitor(DueThread):
    """Reports each task whose handler has reached its timeout."""

    def __init__(self, in_flight: InFlight, on_timeout: Callable[[LeasedTask], object]) -> None:
        super().__init__("microqueue-deadlines")
        self._in_flight = in_flight
        self._on_timeout = on_timeout

    def _run_due(self) -> float:
        next_deadline = inf
        for task in self._in_flight.snapshot():
            if task.deadline is None or task.timed_out or task.concluded:
                continue
            if task.deadline > now_sec():
                next_deadline = min(next_deadline, task.deadline)
                continue
            task.timed_out = True
            try:
                self._on_timeout(task)
            except BaseException:
                logger.exception("could not time out task %s", task.claimed.id)
        return next_deadline


# One dedicated client for each client of a queue, however many queues and workers share it.
_clients: dict[int, MongoClient[Any] | None] = {}
_users: dict[int, int] = {}
_lock = threading.Lock()


@contextmanager
def open_lease_queue(
    queue: QueueCore[Any], *, heartbeat_sec: float = math.inf
) -> Iterator[SyncCore[Any]]:
    """Open a blocking queue on the same collection, with the dedicated lease client.

    Its calls have a short timeout, so that one that gets no answer is repeated on another
    connection before the lease expires, or the worker counts as dead.
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
        brief_sec = min(heartbeat_sec, settings.visibility_timeout.total_seconds() / 3)
        limit = min(settings.call_timeout, timedelta(seconds=max(brief_sec, MIN_CALL_SEC)))
        brief = settings.model_copy(update={"call_timeout": limit})
        yield core_of(Queue(source, queue.name, settings=brief, clock=queue.clock))
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


class Registration:
    """The entry of a worker in the list of workers, in the database of each collection."""

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

    def heartbeat(self, lease_queues: Mapping[Any, SyncCore[Any]]) -> None:
        """Register the worker for these queues, or renew its entry."""
        in_flight = self._in_flight.snapshot()
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
                queues=[queue.name for queue in group],
                concurrency=self._options.max_running,
                running=sum(task.started is not None and task.queue in group for task in in_flight),
                handled=self._handled(),
                started_at=self._started_at,
                heartbeat_at=now,
                heartbeat_sec=self.heartbeat_sec,
                tasks=registered,
                more_tasks=len(names or ()) > MOST_NAMES,
            )
            first.run(workers.beat(info))

    def remove(self, lease_queues: Mapping[Any, SyncCore[Any]]) -> None:
        """Deregister the worker for these queues: it holds no task."""
        for group in by_collection(lease_queues):
            first = lease_queues[group[0]]
            first.run(workers.leave(self._worker_id, first.collections.name))


def by_collection(queues: Iterable[QueueT]) -> list[list[QueueT]]:
    """Group queues by collection."""
    groups: dict[Any, list[QueueT]] = {}
    for queue in queues:
        collections = queue.collections
        key = id(collections.client), collections.database.name, collections.name
        groups.setdefault(key, []).append(queue)
    return list(groups.values())


class LeaseRenewer(DueThread):
    """Renews the leases of the queues of one client, sends heartbeats, and finds lost tasks.

    Args:
        in_flight: The tasks in flight.
        lease_queues: For each queue, the blocking one on the dedicated client.
        registration: The worker's entry.
        on_lost: Called with each task whose lease was lost.
        after_check: Called after each round, at least once a second.
    """

    def __init__(
        self,
        in_flight: InFlight,
        lease_queues: Mapping[Any, SyncCore[Any]],
        registration: Registration,
        *,
        on_lost: Callable[[LeasedTask], object],
        after_check: Callable[[], None],
    ) -> None:
        super().__init__("microqueue-leases")
        self._in_flight = in_flight
        self._lease_queues = lease_queues
        self._registration = registration
        self._on_lost = on_lost
        self._after_check = after_check
        self._heartbeat_due = now_sec() + registration.heartbeat_sec
        self._check_due = 0.0
        self._failed = False  # Something failed, and is repeated after a wait.

    def _run_due(self) -> float:
        self._failed = False
        tasks = [task for task in self._in_flight.snapshot() if task.queue in self._lease_queues]
        # The heartbeat first: when MongoDB is back, the sweeper must see that this worker lives.
        for duty in (self._send_heartbeat, self._renew, self._check):
            with self._logging_errors():
                duty(tasks)
        with self._logging_errors():
            self._after_check()
        return now_sec() + self._wait_sec(tasks)

    @contextmanager
    def _logging_errors(self) -> Iterator[None]:
        """Log the error of one duty, or one queue, so that the others are still performed."""
        try:
            yield
        except MicroqueueError as exc:
            # Two thirds of each lease are left to try again.
            self._failed = True
            logger.warning("could not renew leases or send the heartbeat: %s", exc)
        except BaseException:  # Without this thread, all leases would be lost.
            self._failed = True
            logger.exception("could not renew leases or send the heartbeat")

    def _wait_sec(self, tasks: list[LeasedTask]) -> float:
        if self._failed:
            return MAX_WAIT_SEC
        now, leased_now = now_sec(), lease_now()
        waits = [task.renewal_due - leased_now for task in tasks]
        waits.append(self._heartbeat_due - now)
        if tasks:
            waits.append(self._check_due - now)
        return min(max(min(waits), MIN_WAIT_SEC), MAX_WAIT_SEC)

    def _send_heartbeat(self, _tasks: list[LeasedTask]) -> None:
        if self._heartbeat_due <= now_sec():
            self._heartbeat_due = now_sec() + self._registration.heartbeat_sec
            self._registration.heartbeat(self._lease_queues)

    def _renew(self, tasks: list[LeasedTask]) -> None:
        due = [task for task in tasks if task.renewal_due <= lease_now()]
        for queue, lease_queue, group in self._by_queue(due):
            with self._logging_errors():
                self._renew_group(queue, lease_queue, group)

    def _renew_group(
        self, queue: QueueCore[Any], lease_queue: SyncCore[Any], group: list[LeasedTask]
    ) -> None:
        started = lease_now()
        lost = lease_queue.run(
            renew(
                [task.task for task in group],
                now=lease_queue.run(lease_queue.now()),
                timeout=queue.settings.visibility_timeout,
            )
        )
        lost_claims = {filters.claim_of(task) for task in lost}
        gone, kept = split(
            group,
            lambda task: bool(lost_claims) and filters.claim_of(task.claimed) in lost_claims,
        )
        for task in kept:
            task.renew(started)
        for task in gone:
            task.renew(started, lost=True)
        if gone:
            self._report_lost(lease_queue, gone)

    def _check(self, tasks: list[LeasedTask]) -> None:
        """Store progress, and find tasks that were cancelled or reclaimed.

        Only tasks that take longer than a moment are checked, and the next ones to start.
        """
        if self._check_due > now_sec():
            return
        self._check_due = now_sec() + CHECK_EVERY_SEC
        tasks = [task for task in tasks if not task.concluded]
        running = [task for task in tasks if task.running_sec > CHECK_EVERY_SEC]
        waiting = [task for task in tasks if task.waiting_sec > CHECK_EVERY_SEC]
        for _, lease_queue, group in self._by_queue(running + waiting[:MAX_CHECKED_WAITING]):
            reports: list[tuple[Any, Progress]] = [
                (task.task, progress)
                for task in group
                if not task.transacting and (progress := task.take_progress())
            ]
            if reports:
                with self._logging_errors():
                    lease_queue.run(report_progress(reports))
            with self._logging_errors():
                self._report_lost(lease_queue, group)

    def _report_lost(self, lease_queue: SyncCore[Any], tasks: list[LeasedTask]) -> None:
        """Report which of these tasks were lost, and how; a settled task is not lost.

        If a transaction that settles a task is committed, and its reply is still to come, the
        task is done here and not concluded.
        """
        found = lease_queue.run(lease_states([task.claimed for task in tasks]))
        for task, state in zip(tasks, found, strict=True):
            if state is LeaseState.DONE and task.transacting:
                continue
            if state is not LeaseState.HELD and not task.concluded:
                task.cancelled = state is LeaseState.CANCELLED
                self._on_lost(task)

    def _by_queue(
        self, tasks: Iterable[LeasedTask]
    ) -> Iterator[tuple[Any, SyncCore[Any], list[LeasedTask]]]:
        groups: dict[Any, list[LeasedTask]] = defaultdict(list)
        for task in tasks:
            groups[task.queue].append(task)
        for queue, group in groups.items():
            yield queue, self._lease_queues[queue], group


class LeaseService:
    """The threads and connections behind the leases of one run.

    Each client has its own renewer, so that a server that does not answer delays no lease on
    another one.

    Attributes:
        lease_queues: For each queue of the worker, a blocking one on the dedicated client.
    """

    def __init__(
        self,
        queues: Sequence[QueueCore[Any]],
        in_flight: InFlight,
        registration: Registration,
        *,
        on_timeout: Callable[[LeasedTask], object],
        on_lost: Callable[[LeasedTask], object],
        after_check: Callable[[], None],
    ) -> None:
        self._registration = registration
        self._min_lease_sec = min(
            queue.settings.visibility_timeout.total_seconds() for queue in queues
        )
        with ExitStack() as opened:
            heartbeat_sec = registration.heartbeat_sec
            self.lease_queues = {
                queue: opened.enter_context(open_lease_queue(queue, heartbeat_sec=heartbeat_sec))
                for queue in queues
            }
            self._opened = opened.pop_all()
        self._timeouts = TimeoutMonitor(in_flight, on_timeout)
        by_client: dict[int, list[QueueCore[Any]]] = {}
        for queue in queues:
            by_client.setdefault(id(queue.collections.client), []).append(queue)
        self._renewers = [
            LeaseRenewer(
                in_flight,
                {queue: self.lease_queues[queue] for queue in group},
                registration,
                on_lost=on_lost,
                after_check=after_check,
            )
            for group in by_client.values()
        ]

    def register(self) -> None:
        """Register the worker. Before its first claim, so that a crash is noticed."""
        self._registration.heartbeat(self.lease_queues)

    def deregister(self) -> None:
        """Remove the worker from the list. After its last settlement: it must hold no task."""
        self._registration.remove(self.lease_queues)

    def start(self) -> None:
        """Start the threads."""
        for renewer in self._renewers:
            renewer.start()
        self._timeouts.start()

    def expect_tasks(self, claimed: Sequence[LeasedTask]) -> None:
        """Renew the leases of tasks that were just claimed together in time."""
        if claimed:
            own = (task.claimed.own_timeout_sec for task in claimed)
            lease_sec = min([self._min_lease_sec, *(sec for sec in own if sec is not None)])
            self.expect_renewal(claimed[0].claimed_at + lease_sec / RENEWALS_PER_LEASE)

    def expect_renewal(self, due: float) -> None:
        """Renew a lease at this reading of :func:`lease_now`."""
        wake_at = now_sec() + due - lease_now()
        for renewer in self._renewers:
            renewer.wake_by(wake_at)

    def expect_timeout(self, deadline: float) -> None:
        """Time out a task at this reading of :func:`now_sec`."""
        self._timeouts.wake_by(deadline)

    def stop_timeouts(self) -> None:
        """Stop the timeout monitor, and wait for its end."""
        self._timeouts.stop()
        self._timeouts.join()

    def stop(self) -> None:
        """Stop all threads, and wait for renewals that are running."""
        for renewer in self._renewers:
            renewer.stop()
        for renewer in self._renewers:
            renewer.join()
        self.stop_timeouts()

    def close(self) -> None:
        """Close the connections."""
        self._opened.close()
