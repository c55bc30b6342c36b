"""The tasks that a worker holds: claimed, waiting for a free handler, running, or settling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from microqueue.task import Claimed, Progress, Task
from microqueue.worker.outcomes import ExceptionPolicy
from microqueue.worker.prefetch import PrefetchController

RENEWALS_PER_LEASE = 3
PAUSE_SEC = 1.0  # Between two tries while the server is away.
# How much of a lease must be left for a handler to start: a fraction, but no more than a second.
# Leases are renewed long before, so less is left only if that was not possible.
LEAST_LEFT = 0.1
LEAST_LEFT_SEC = 1.0


def now_sec() -> float:
    """Read the clock by which a worker measures."""
    return time.monotonic()


def _find_lease_clock() -> Callable[[], float]:
    """Find a monotonic clock that does not stand still while the machine is suspended."""
    # Linux; macOS, whose own monotonic clock goes on; else what there is.
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        number = getattr(time, name, None)
        if number is not None:
            with suppress(OSError):  # It has a name here, but the kernel does not know it.
                time.clock_gettime(number)
                return partial(time.clock_gettime, number)
    return time.monotonic


lease_clock = _find_lease_clock()


def lease_now() -> float:
    """Read the clock by which leases are measured: it runs on while the process is stopped.

    The server's clock runs on, too, and with it the lease, while this machine is suspended.
    """
    return lease_clock()


class InFlightTask:
    """One task in this worker's hands.

    ``claimed_at``, ``renewed`` and ``leased_at`` are readings of :func:`lease_now`, each taken
    before the server was asked. ``renewed`` is when the lease was last renewed, or found lost;
    ``leased_at`` is when it was last known to begin.
    """

    # Defaults of the class: most tasks never have one of their own, and many are made.
    started: float | None = None
    deadline: float | None = None
    exception_policy = ExceptionPolicy()
    concluded = False
    cancelled = False
    was_cancelled = False
    timed_out = False
    discarded = False  # Not started, because its lease had ended.
    granted_sec: float | None = None  # The length of its lease, where the handler gave one.
    progress: Progress | None = None
    on_interrupt: Callable[[], object] | None = None

    def __init__(self, queue: Any, claimed: Claimed, claimed_at: float) -> None:
        self.queue = queue
        self.claimed = claimed
        self.claimed_at = self.renewed = self.leased_at = claimed_at

    @property
    def task(self) -> Task[Any]:
        """The task as it was claimed, or as it is since its lease was renewed by hand."""
        return self.claimed.task

    @property
    def lease_sec(self) -> float:
        """How long its lease is when the worker renews it."""
        own = self.claimed.own_timeout_sec
        queue_sec: float = self.queue.settings.visibility_timeout.total_seconds()
        return queue_sec if own is None else own

    @property
    def lapsed(self) -> bool:
        """Whether its lease has ended, or is about to, so that its handler must not start.

        The process may have been stopped, or the machine suspended, or MongoDB was away: the
        sweeper may have given the task to another worker.
        """
        lease_sec = self.lease_sec
        least_sec = min(lease_sec * LEAST_LEFT, LEAST_LEFT_SEC)
        return lease_now() >= self.leased_at + lease_sec - least_sec

    def interrupt(self) -> None:
        """Tell the handler that its work is no longer wanted."""
        self.cancelled = True
        if self.on_interrupt is not None:
            self.on_interrupt()

    @property
    def running_sec(self) -> float:
        """How long its handler has been running."""
        return 0.0 if self.started is None else now_sec() - self.started

    @property
    def waiting_sec(self) -> float:
        """How long it has been waiting for its handler."""
        return lease_now() - self.claimed_at if self.started is None else 0.0

    @property
    def longest_wait_sec(self) -> float:
        """How long it may wait: a fraction of its queue's lease.

        Not of its own: it would be given back again and again, and overtaken by the others.
        """
        queue_sec: float = self.queue.settings.visibility_timeout.total_seconds()
        return queue_sec * PrefetchController.FRACTION

    def take_progress(self) -> Progress | None:
        """Give what the handler last said of its progress, if that is news."""
        progress, self.progress = self.progress, None
        return progress

    @property
    def renewal_due(self) -> float:
        """When the lease should be renewed: after a third of its length.

        One that the handler made longer is left alone until as much is left as usual.
        """
        usual_sec = self.lease_sec
        granted_sec = usual_sec if self.granted_sec is None else self.granted_sec
        left_sec = min(granted_sec, usual_sec) * (1 - 1 / RENEWALS_PER_LEASE)
        return self.renewed + granted_sec - left_sec

    def renew(self, at: float, *, lost: bool = False) -> None:
        """Note that the worker renewed the lease, or found it lost, unless the handler did since.

        A lost one is no news for :attr:`lapsed`: whoever starts tasks may look before it is known
        how this one was lost.
        """
        if self.renewed <= at:
            self.renewed, self.granted_sec = at, None
            if not lost:
                self.leased_at = at

    def touch(self, task: Task[Any], at: float) -> None:
        """Take the task as it is since its handler renewed the lease."""
        self.claimed.replace(task)
        if task.lease is not None:
            self.granted_sec = (task.lease.expires_at - task.updated_at).total_seconds()
            self.renewed = self.leased_at = at


def split(
    held: Iterable[InFlightTask], test: Callable[[InFlightTask], bool]
) -> tuple[list[InFlightTask], list[InFlightTask]]:
    """Part tasks into those that pass a test and the others, asking once, as time goes on."""
    passed: list[InFlightTask] = []
    others: list[InFlightTask] = []
    for one in held:
        (passed if test(one) else others).append(one)
    return passed, others


class InFlight:
    """A table of what is held, shared by the threads of a worker.

    ``unfinished`` counts what waits or runs. What is finished is held until its settlement
    is written, and does not keep the worker from claiming more. A handler that goes on after
    its task was settled by its timeout, or taken away, counts until it returns: nothing else
    can run in its place.
    """

    def __init__(self) -> None:
        # In the order of their claims. Not by id: a task may come back, under another token,
        # while a handler still has it.
        self._held: dict[InFlightTask, None] = {}
        self._unfinished: set[InFlightTask] = set()
        self._changed = threading.Condition()
        self._wanted = 0  # How few somebody waits for; 0: nobody waits.

    def __len__(self) -> int:
        return len(self._held)

    @property
    def unfinished(self) -> int:
        """How many wait, or run."""
        return len(self._unfinished)

    def begin(self) -> None:
        """Start over, with new handlers: one that goes on from an earlier run takes no place."""
        with self._changed:
            self._held.clear()
            self._unfinished.clear()

    def add(self, held: Sequence[InFlightTask]) -> None:
        """Take tasks in that were just claimed."""
        with self._changed:
            self._held.update(dict.fromkeys(held))
            self._unfinished.update(held)

    def conclude(self, held: InFlightTask, *, returned: bool = False) -> bool:
        """Claim the right to say how a task ended; only the first caller has it.

        The handler, its timeout, a lost lease and the end of the worker may all want it.
        The handler says that it has ``returned``.
        """
        with self._changed:
            first, held.concluded = not held.concluded, True
            if returned or held.started is None:
                self._unfinished.discard(held)
                if len(self._unfinished) < self._wanted:
                    self._changed.notify_all()
            return first

    def remove(self, held: Iterable[InFlightTask]) -> None:
        """Let tasks go that are settled, and wake who waits for room."""
        with self._changed:
            for one in held:
                self._held.pop(one, None)
            self._changed.notify_all()

    def holds(self, held: InFlightTask) -> bool:
        """Tell whether a task is still in hand: its settlement is not written yet."""
        return held in self._held

    def snapshot(self) -> list[InFlightTask]:
        """Give everything held at this moment."""
        with self._changed:
            return list(self._held)

    def has_room(self, *, unfinished: int, held: int) -> bool:
        """Tell whether fewer than these are unfinished, and held in all."""
        return self.unfinished < unfinished and len(self._held) < held

    def await_room(self, *, unfinished: int, held: int, timeout_sec: float) -> None:
        """Wait until there is room, but not for long."""
        with self._changed:
            self._wanted = unfinished
            self._changed.wait_for(
                lambda: self.has_room(unfinished=unfinished, held=held), timeout_sec
            )
            self._wanted = 0

    def await_empty(self, timeout_sec: float) -> None:
        """Wait until nothing is held, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held, timeout_sec)
