"""The tasks in flight: claimed by this worker, and waiting, running or about to be settled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from microqueue.core import QueueCore
from microqueue.task import Claimed, Progress, Task
from microqueue.worker.outcomes import ExceptionPolicy
from microqueue.worker.prefetch import PrefetchController

RENEWALS_PER_LEASE = 3
# A handler starts only if this much of the lease is left: a fraction, but at most a second.
# Renewals come long before that, so less is left only if they failed.
MIN_LEFT = 0.1
MIN_LEFT_SEC = 1.0


def now_sec() -> float:
    """Read the clock that measures run times and waits."""
    return time.monotonic()


def _find_lease_clock() -> Callable[[], float]:
    """Find a monotonic clock that keeps running while the machine is suspended."""
    # Linux; then macOS, whose CLOCK_MONOTONIC keeps running; then any.
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        number = getattr(time, name, None)
        if number is not None:
            with suppress(OSError):  # Python has the name, but the kernel does not know it.
                time.clock_gettime(number)
                return partial(time.clock_gettime, number)
    return time.monotonic


lease_clock = _find_lease_clock()


def lease_now() -> float:
    """Read the clock that measures leases. It keeps running while the process is stopped.

    So does the server's clock, and with it the lease.
    """
    return lease_clock()


class LeasedTask:
    """A claimed task, its lease, and what became of it so far.

    ``claimed_at``, ``renewed_at`` and ``leased_at`` are readings of :func:`lease_now`, each taken
    before the server was asked. ``renewed_at`` is when the lease was last renewed, or found lost;
    ``leased_at`` is when it was last known to begin.
    """

    # Class attributes: most tasks never need their own value, and many tasks are created.
    started: float | None = None
    deadline: float | None = None
    exception_policy = ExceptionPolicy()
    concluded = False  # Its outcome is decided; see InFlight.conclude.
    interrupted = False  # The handler should stop, for whatever reason.
    cancelled = False  # By Queue.cancel.
    timed_out = False
    counted_unstarted = False  # See UnstartedTasks.
    transacting = False  # Its handler runs a transaction that settles it.
    committing = False  # That transaction has begun to settle it: it is done, or undecided again.
    committed = False  # Its handler has committed that: it is done.
    granted_sec: float | None = None  # The length of its lease, if the handler chose one.
    progress: Progress | None = None
    on_interrupt: Callable[[], object] | None = None

    def __init__(self, queue: QueueCore[Any], claimed: Claimed, claimed_at: float) -> None:
        self.queue = queue
        self.claimed = claimed
        self.claimed_at = self.renewed_at = self.leased_at = claimed_at

    @property
    def task(self) -> Task[Any]:
        """The task as it was claimed, or as :meth:`touch` left it."""
        return self.claimed.task

    @property
    def lease_sec(self) -> float:
        """The length of its lease when the worker renews it."""
        own = self.claimed.own_timeout_sec
        queue_sec: float = self.queue.lease_sec
        return queue_sec if own is None else own

    @property
    def lapsed(self) -> bool:
        """Whether its lease has expired or is about to, so that its handler must not start.

        The process was stopped, the machine suspended, or MongoDB did not answer: the sweeper may
        have made the task available to another worker.
        """
        own = self.claimed.own_timeout_sec
        lease_sec: float = self.queue.lease_sec if own is None else own
        min_left_sec = min(lease_sec * MIN_LEFT, MIN_LEFT_SEC)
        return lease_now() >= self.leased_at + lease_sec - min_left_sec

    def interrupt(self) -> None:
        """Ask the handler to stop: its result is no longer wanted."""
        self.interrupted = True
        if self.on_interrupt is not None:
            self.on_interrupt()

    @property
    def running_sec(self) -> float:
        """How long its handler has been running."""
        return 0.0 if self.started is None else now_sec() - self.started

    @property
    def waiting_sec(self) -> float:
        """How long it has been waiting for a handler."""
        return lease_now() - self.claimed_at if self.started is None else 0.0

    @property
    def max_wait_sec(self) -> float:
        """How long it may wait for a handler: a fraction of its queue's visibility timeout.

        A fraction of the task's timeout would be too short for some: they would be released again
        and again, while other tasks overtake them.
        """
        queue_sec: float = self.queue.lease_sec
        return queue_sec * PrefetchController.LEASE_FRACTION

    def take_progress(self) -> Progress | None:
        """Return the latest progress that was not stored yet, once."""
        progress, self.progress = self.progress, None
        return progress

    @property
    def renewal_due(self) -> float:
        """When to renew the lease: after a third of its length.

        A lease that the handler made longer is renewed when as much is left as usual. During a
        transaction the renewal would be a conflict, so that it comes when a third is left.
        """
        usual_sec = self.lease_sec
        granted_sec = usual_sec if self.granted_sec is None else self.granted_sec
        share = 1 / RENEWALS_PER_LEASE
        left_sec = min(granted_sec, usual_sec) * (share if self.transacting else 1 - share)
        return self.renewed_at + granted_sec - left_sec

    def renew(self, at: float, *, lost: bool = False) -> None:
        """Note that the worker renewed the lease at this time, unless the handler did later.

        A lost lease does not change :attr:`lapsed`: the task may be about to start before it is
        known how the lease was lost.
        """
        if self.renewed_at <= at:
            self.renewed_at, self.granted_sec = at, None
            if not lost:
                self.leased_at = at

    def touch(self, task: Task[Any], at: float) -> None:
        """Note that the handler renewed the lease at this time."""
        self.claimed.replace(task)
        if task.lease is not None:
            self.granted_sec = (task.lease.expires_at - task.updated_at).total_seconds()
            self.renewed_at = self.leased_at = at


def split(
    tasks: Iterable[LeasedTask], test: Callable[[LeasedTask], bool]
) -> tuple[list[LeasedTask], list[LeasedTask]]:
    """Split tasks into those that pass a test and the others.

    Each is tested once, because the answer may depend on the time.
    """
    passed: list[LeasedTask] = []
    others: list[LeasedTask] = []
    for task in tasks:
        (passed if test(task) else others).append(task)
    return passed, others


class InFlight:
    """The table of tasks in flight, shared by the threads of a worker.

    ``unfinished`` counts tasks that wait or run. A finished task stays in the table until its
    settlement is written, and does not keep the worker from claiming more. A handler that runs on
    after its task timed out, or its lease was lost, counts as unfinished until it returns: it
    occupies its thread.
    """

    def __init__(self) -> None:
        # In the order of the claims. Not by id: a task may be claimed again, under another token,
        # while an earlier handler still runs.
        self._tasks: dict[LeasedTask, None] = {}
        self._unfinished: set[LeasedTask] = set()
        self._changed = threading.Condition()
        self._awaited_unfinished = 0  # What wait_for_room waits for; 0: no thread waits.

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, task: LeasedTask) -> bool:
        return task in self._tasks

    @property
    def unfinished(self) -> int:
        """How many tasks wait or run."""
        return len(self._unfinished)

    def reset(self) -> None:
        """Start with an empty table: handlers left over from an earlier run do not count."""
        with self._changed:
            self._tasks.clear()
            self._unfinished.clear()

    def add(self, tasks: Sequence[LeasedTask]) -> None:
        """Add tasks that were just claimed."""
        with self._changed:
            self._tasks.update(dict.fromkeys(tasks))
            self._unfinished.update(tasks)

    def conclude(self, task: LeasedTask, *, returned: bool = False) -> bool:
        """Return whether the caller is the first to decide the task's outcome.

        The handler, its timeout, a lost lease and a shutdown compete for it. While the handler
        commits it, only the handler may.

        Args:
            task: The task.
            returned: Whether its handler has returned.
        """
        with self._changed:
            if task.committing and not returned:
                return False
            first, task.concluded = not task.concluded, True
            if returned or task.started is None:
                self._unfinished.discard(task)
                if len(self._unfinished) < self._awaited_unfinished:
                    self._changed.notify_all()
            return first

    def begin_commit(self, task: LeasedTask) -> bool:
        """Return whether the handler may commit the task: its outcome is not decided yet."""
        with self._changed:
            task.committing = not task.concluded
            return task.committing

    def remove(self, tasks: Iterable[LeasedTask]) -> None:
        """Remove tasks that are settled, or left to their leases."""
        with self._changed:
            for task in tasks:
                self._tasks.pop(task, None)
            self._changed.notify_all()

    def snapshot(self) -> list[LeasedTask]:
        """Return the tasks in flight at this moment."""
        with self._changed:
            return list(self._tasks)

    def unconcluded(self) -> list[LeasedTask]:
        """Return the tasks whose outcome is not decided yet."""
        return [task for task in self.snapshot() if not task.concluded]

    def has_room(self, *, unfinished: int, total: int) -> bool:
        """Return whether there are fewer unfinished tasks, and fewer tasks in total."""
        return self.unfinished < unfinished and len(self._tasks) < total

    def wait_for_room(self, *, unfinished: int, total: int, timeout_sec: float) -> None:
        """Wait until :meth:`has_room`, or time out."""
        with self._changed:
            self._awaited_unfinished = unfinished
            self._changed.wait_for(
                lambda: self.has_room(unfinished=unfinished, total=total), timeout_sec
            )
            self._awaited_unfinished = 0

    def wait_until_empty(self, timeout_sec: float) -> None:
        """Wait until nothing is in flight, or time out."""
        with self._changed:
            self._changed.wait_for(lambda: not self._tasks, timeout_sec)
