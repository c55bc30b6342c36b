"""Keep the leases and the heartbeat of a worker alive, from a thread of its own.

The thread sleeps most of the time and needs the interpreter for a moment only, so a handler
that computes in Python delays it by the GIL's switch interval, some milliseconds, and a
blocked event loop not at all. A C extension that holds the GIL for longer than a lease does
starve it; such work belongs into a process of its own.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from microqueue.errors import MicroqueueError
from microqueue.operations import filters
from microqueue.operations.renew import Taken, find_taken, renew, report_progress
from microqueue.queue import Queue
from microqueue.task import Progress
from microqueue.worker.inflight import Held, InFlight, lease_now, now_sec, split
from microqueue.worker.registration import Registration
from microqueue.worker.watcher import Watcher

LONGEST_PAUSE_SEC = 1.0
SHORTEST_PAUSE_SEC = 0.01
LOOK_EVERY_SEC = 1.0
MOST_WAITING = 1000

logger = logging.getLogger("microqueue.worker")


class LeaseKeeper(Watcher):
    """Renews the leases in flight, beats, and speaks up when a task was taken away.

    ``twins`` are the queues that it looks after, each with the blocking one that stands for it.
    ``on_looked`` is called after each look, at least once a second.
    """

    def __init__(
        self,
        in_flight: InFlight,
        twins: Mapping[Any, Queue[Any]],
        registration: Registration,
        *,
        on_lost: Callable[[Held], None],
        on_looked: Callable[[], None],
    ) -> None:
        super().__init__("microqueue-leases")
        self._in_flight = in_flight
        self._twins = twins
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

    def _pause_sec(self, held: list[Held]) -> float:
        if self._troubled:
            return LONGEST_PAUSE_SEC
        now, leased_now = now_sec(), lease_now()
        pauses = [one.renewal_due - leased_now for one in held]
        pauses.append(self._beat_due - now)
        if held:
            pauses.append(self._look_due - now)
        return min(max(min(pauses), SHORTEST_PAUSE_SEC), LONGEST_PAUSE_SEC)

    def _say_alive(self, _held: list[Held]) -> None:
        if self._beat_due <= now_sec():
            self._beat_due = now_sec() + self._registration.heartbeat_sec
            self._registration.beat(self._twins)

    def _renew(self, held: list[Held]) -> None:
        due = [one for one in held if one.renewal_due <= lease_now()]
        for queue, blocking, group in self._by_queue(due):
            with self._undisturbed():
                self._renew_group(queue, blocking, group)

    def _renew_group(self, queue: Any, blocking: Queue[Any], group: list[Held]) -> None:
        started = lease_now()
        lost = blocking.run(
            renew(
                [one.task for one in group],
                now=blocking.now(),
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

    def _look_after(self, held: list[Held]) -> None:
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

    def _tell_taken(self, blocking: Queue[Any], held: list[Held]) -> None:
        """Find out which were taken away, and how; what was settled meanwhile is gone, not lost."""
        taken = blocking.run(find_taken([one.claimed for one in held]))
        for one, how in zip(held, taken, strict=True):
            if how is not Taken.NOT and not one.concluded:
                one.was_cancelled = how is Taken.CANCELLED
                self._on_lost(one)

    def _by_queue(self, held: Iterable[Held]) -> Iterator[tuple[Any, Queue[Any], list[Held]]]:
        groups: dict[Any, list[Held]] = defaultdict(list)
        for one in held:
            groups[one.queue].append(one)
        for queue, group in groups.items():
            yield queue, self._twins[queue], group
