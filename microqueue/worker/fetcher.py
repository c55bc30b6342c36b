"""When a worker claims, from which queue, and how much.

:class:`Fetcher` decides, :class:`QueueSelection` divides a claim among several queues, and
:class:`CrashIsolation` delays tasks that may crash the worker.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from math import inf
from typing import Any, Protocol

from microqueue.arguments import invalid_argument
from microqueue.core import QueueCore
from microqueue.errors import InvalidArgument, MicroqueueError
from microqueue.operations.call import Operation
from microqueue.operations.poll import PollResult
from microqueue.operations.workers import Isolation, isolation_for, unsettled_limit
from microqueue.schedule import Declaration
from microqueue.schedules import Firer, Firing, declare
from microqueue.task import Claimed
from microqueue.worker.completer import RETRY_SEC, Completer
from microqueue.worker.effects import (
    FetchEffect,
    FetchEffects,
    PutInBuffer,
    RunOperation,
    Sleep,
    WaitForRoom,
    WaitForWork,
    Withdraw,
)
from microqueue.worker.in_flight import (
    InFlight,
    LeasedTask,
    lease_now,
    now_sec,
    split,
)
from microqueue.worker.lease_renewal import LeaseService, by_collection
from microqueue.worker.log import logger
from microqueue.worker.options import WorkerOptions
from microqueue.worker.prefetch import PrefetchController
from microqueue.worker.shutdown import StopRequest

_random = random.Random()  # noqa: S311 (not for secrets)


class QueueSelection(Protocol):
    """Decides in which order queues are asked in one round of claims, and for how many tasks."""

    def offers(
        self, queues: Sequence[QueueCore[Any]], room: int
    ) -> Iterator[tuple[QueueCore[Any], int]]:
        """Yield each queue to ask, and how many tasks the round may have claimed after it.

        So the numbers grow, and a queue may take what those before it left.
        """


class StrictOrder:
    """The first queue that has a task always goes first."""

    def offers(
        self, queues: Sequence[QueueCore[Any]], room: int
    ) -> Iterator[tuple[QueueCore[Any], int]]:
        """Offer all the room to each queue in turn."""
        for queue in queues:
            yield queue, room


class Weighted:
    """Each queue gets its share of the room; the others get what a queue leaves.

    Shares are rounded at random, so that they are right over many rounds.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights

    def offers(
        self, queues: Sequence[QueueCore[Any]], room: int
    ) -> Iterator[tuple[QueueCore[Any], int]]:
        """Yield the queues in a random order; later ones may take what earlier ones left.

        Queues whose share is rounded to zero come last, and are offered all the room.
        """
        total = sum(self._weights[queue.name] for queue in queues)
        without: list[QueueCore[Any]] = []
        # One random number for all: where one share is rounded up, another is rounded down.
        exact, offered = _random.random(), 0
        for queue in self._draw(queues):
            exact += room * self._weights[queue.name] / total
            former, offered = offered, min(int(exact), room)
            if offered > former:
                yield queue, offered
            else:
                without.append(queue)
        for queue in without:
            yield queue, room

    def _draw(self, queues: Sequence[QueueCore[Any]]) -> Iterator[QueueCore[Any]]:
        """Yield the queues in an order drawn by weight: the order decides who gets what is left."""
        left = list(queues)
        while left:
            (queue,) = _random.choices(left, [self._weights[queue.name] for queue in left])
            left.remove(queue)
            yield queue


def make_selection(
    queues: Iterable[QueueCore[Any]], weights: Mapping[str, float] | None
) -> QueueSelection:
    """Check a worker's ``weights``: a positive number per queue name. ``None``: strict order."""
    if weights is None:
        return StrictOrder()
    names = {queue.name for queue in queues}
    if not isinstance(weights, Mapping) or set(weights) != names:
        raise invalid_argument("weights", weights, f"give one for each of {sorted(names)}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < inf:
            raise InvalidArgument(
                f"weights[{name!r}]={weight!r} is not valid: give a finite number above 0",
                argument="weights",
                value=weight,
            )
    return Weighted(dict(weights))


class CrashIsolation:
    """Delays tasks that may crash the worker, and what was claimed after them.

    A task that was redelivered after a crash, or is on its last attempt, starts only while few
    others are unsettled, so that a crash can be attributed; :mod:`microqueue.operations.workers`
    explains the rules. Only the thread or coroutine that claims uses it.
    """

    def __init__(self, in_flight: InFlight, concurrency: int) -> None:
        self._in_flight = in_flight
        self._concurrency = concurrency
        self._delayed: deque[LeasedTask] = deque()
        self._isolated: dict[LeasedTask, Isolation] = {}  # Started, and not settled yet.

    def __bool__(self) -> bool:
        """Return whether any task is delayed or isolated."""
        return bool(self._delayed or self._isolated)

    @property
    def has_delayed(self) -> bool:
        """Whether any task is delayed."""
        return bool(self._delayed)

    def admit(self, claimed: Sequence[LeasedTask]) -> Sequence[LeasedTask]:
        """Take tasks that were just claimed; return those that may start now."""
        if not self and all(
            isolation_for(task.claimed.document) is Isolation.NONE for task in claimed
        ):
            return claimed
        self._delayed.extend(claimed)
        return self.admit_delayed()

    def admit_delayed(self) -> list[LeasedTask]:
        """Return the delayed tasks that may start now."""
        self._refresh()
        unsettled = len(self._in_flight) - len(self._delayed)
        starting: list[LeasedTask] = []
        while self._delayed:
            level = isolation_for(self._delayed[0].claimed.document)
            if unsettled >= self._limit(level):
                break
            task = self._delayed.popleft()
            unsettled += 1
            starting.append(task)
            if level is not Isolation.NONE:
                self._isolated[task] = level
        return starting

    def max_in_flight(self) -> int | None:
        """Return at how many tasks in flight none is started or claimed; ``None``: no limit."""
        self._refresh()
        level = (
            isolation_for(self._delayed[0].claimed.document) if self._delayed else Isolation.NONE
        )
        limit = self._limit(level)
        return None if limit == inf else int(limit) + len(self._delayed)

    def withdraw(self, unwanted: Callable[[LeasedTask], bool]) -> list[LeasedTask]:
        """Remove the unwanted tasks from the delayed ones, and return them."""
        removed, left = split(self._delayed, unwanted)
        self._delayed = deque(left)
        return removed

    def _limit(self, level: Isolation) -> float:
        """Return how many unsettled tasks keep a task at this level from starting."""
        return unsettled_limit(
            max(level, *self._isolated.values(), Isolation.NONE), self._concurrency
        )

    def _refresh(self) -> None:
        """Forget tasks that are settled, or whose lease was lost while they were delayed."""
        if any(task.concluded for task in self._delayed):
            self._delayed = deque(task for task in self._delayed if not task.concluded)
        self._isolated = {
            task: level for task, level in self._isolated.items() if task in self._in_flight
        }


HOT_POLL_SEC = 0.001
SOON_SEC = 0.005
MAX_FALSE_WAKE_SEC = 0.2
STALE_SEC = 1.0
FIRING_SPREAD_SEC = 0.02
ROOM_WAIT_SEC = 0.5
UNSETTLED_BATCHES = 4  # So many batches may wait for their write while others are claimed.
JITTER = (0.8, 1.0)  # Of the poll interval, so that workers do not poll in step.


@dataclass(frozen=True, slots=True)
class PollSummary:
    """What one poll found in all collections: ready tasks, the next due one, paused queues.

    ``schedules`` has a queue of each collection with schedules, and when the next of them is due.
    """

    ready: bool
    due_sec: float | None
    paused: Sequence[QueueCore[Any]]
    schedules: Sequence[tuple[QueueCore[Any], float]] = ()

    @classmethod
    def of(cls, results: Sequence[tuple[PollResult, Sequence[QueueCore[Any]]]]) -> PollSummary:
        """Combine the result of each collection with the queues it holds."""
        return cls(
            ready=any(result.ready for result, _ in results),
            due_sec=min(
                (result.due_sec for result, _ in results if result.due_sec is not None),
                default=None,
            ),
            paused=[
                queue
                for result, queues in results
                for queue in queues
                if queue.name in result.paused
            ],
            schedules=[
                (queues[0], result.scheduled_sec)
                for result, queues in results
                if result.scheduled_sec is not None
            ],
        )


class Claimer:
    """Claims tasks and adds them to the table, for all runs of a worker."""

    def __init__(
        self,
        queues: Sequence[QueueCore[Any]],
        *,
        worker_id: str,
        in_flight: InFlight,
        prefetch: PrefetchController,
    ) -> None:
        self.queues = queues
        self._worker_id = worker_id
        self._in_flight = in_flight
        self._prefetch = prefetch
        self._last_claim_at: datetime | None = None
        # The token of each claim that was sent and has no reply yet, or ended in an error.
        self._unconfirmed: dict[QueueCore[Any], str] = {}

    @property
    def has_unconfirmed(self) -> bool:
        """Whether a claim may have taken tasks that this worker does not know of."""
        return bool(self._unconfirmed)

    def claim(self, queue: QueueCore[Any], limit: int) -> FetchEffects[list[LeasedTask]]:
        """Claim up to ``limit`` tasks of a queue, but first recover what a failed claim took.

        Those tasks are leased to this worker, and no one else would start them.
        """
        if (failed := self._unconfirmed.get(queue)) is not None:
            asked_at = lease_now()
            found = yield RunOperation(queue, queue.recover_claim(failed, self._worker_id))
            self._confirm(queue, failed)
            if found:
                return self._add(queue, found, asked_at)
        asked_at = lease_now()  # Before the call: the lease begins at this time or later.
        claimed = yield RunOperation(queue, self._claim_batch(queue, limit))
        return self._add(queue, claimed, asked_at)

    def _claim_batch(self, queue: QueueCore[Any], limit: int) -> Operation[Sequence[Claimed]]:
        """Claim, and note the lease before a write.

        A claim that fails before its first write has taken nothing.
        """
        claimed: Sequence[Claimed] | None = None
        while claimed is None:
            lease = yield from queue.new_lease(self._worker_id, after=self._last_claim_at)
            note = partial(self._unconfirmed.__setitem__, queue, lease.token)
            claimed = yield from queue.claim_under(lease, limit, one_reply=True, before_write=note)
            self._confirm(queue, lease.token)
        return claimed

    def _confirm(self, queue: QueueCore[Any], token: str) -> None:
        if self._unconfirmed.get(queue) == token:  # A later run may have claimed since.
            del self._unconfirmed[queue]

    def _add(
        self, queue: QueueCore[Any], claimed: Sequence[Claimed], claimed_at: float
    ) -> list[LeasedTask]:
        tasks = [LeasedTask(queue, one, claimed_at) for one in claimed]
        self._in_flight.add(tasks)
        if claimed:
            # The first and the last one: encoding all of them would take long.
            for one in claimed[:: max(len(claimed) - 1, 1)]:
                self._prefetch.measure_size(one.document, queue.collections.codec_options)
            lease = claimed[0].lease
            self._last_claim_at = lease.started_at if lease else None
        return tasks


class Fetcher:
    """Decides, in one run of a worker, when to claim, and starts what was claimed."""

    def __init__(
        self,
        claimer: Claimer,
        selection: QueueSelection,
        options: WorkerOptions,
        *,
        in_flight: InFlight,
        prefetch: PrefetchController,
        completer: Completer,
        leases: LeaseService,
        declarations: tuple[str, Sequence[Declaration]] | None = None,
    ) -> None:
        self._declarations = declarations
        self._claimer = claimer
        self._queues = claimer.queues
        self._unpaused = list(claimer.queues)
        self._selection = selection
        self._in_flight = in_flight
        self._prefetch = prefetch
        self._completer = completer
        self._leases = leases
        self._isolation = CrashIsolation(in_flight, options.max_running)
        self._batch_size = options.flush_limit
        # With batches, tasks may wait for others while handlers are free.
        self._surely_started = 0 if options.batch else options.concurrency
        self._poll_sec = options.poll_interval.total_seconds()
        self._hot_period_sec = options.hot_poll_period.total_seconds()
        self._hot_poll_sec = HOT_POLL_SEC * len(self._queues)
        self._hot_until = 0.0
        self._next_poll = 0.0
        self._polled_at = 0.0
        self._asleep = False  # Until a poll, or the change stream, finds work.
        self._quiet = False  # The last claim found nothing.
        self._false_wake_sec = 0.0
        self._burst = False
        self._has_schedules = False
        self._firers = {group[0]: Firer(group[0]) for group in by_collection(self._queues)}
        self._fire_until: datetime | None = None  # In a burst: when it fired for the first time.

    def fetch(self, stop: StopRequest, *, burst: bool) -> FetchEffects[None]:
        """Claim and start tasks until the stop, or, in a burst, until none is left."""
        self._burst = burst
        try:
            while not stop.requested:
                try:
                    yield from self._declare_schedules()
                    if (yield from self._round()):
                        return
                except MicroqueueError as exc:
                    if burst:
                        raise
                    logger.warning(
                        "could not claim; next attempt in %g s: %s",
                        RETRY_SEC,
                        exc,
                        extra={"claimed": False, "wait_sec": RETRY_SEC},
                    )
                    yield Sleep(RETRY_SEC)
        finally:
            self._release(self._isolation.withdraw(lambda _task: True))

    def _declare_schedules(self) -> FetchEffects[None]:
        """Store the schedules of the code, once."""
        if self._declarations is not None:
            app, declared = self._declarations
            queue = self._queues[0]
            yield RunOperation(queue, declare(queue, app, declared))
            self._declarations = None

    def _round(self) -> FetchEffects[bool]:
        """Claim once, or wait once; return whether a burst is over."""
        if self._isolation and (admitted := self._isolation.admit_delayed()):
            yield PutInBuffer(admitted)
        total, unfinished = len(self._in_flight), self._in_flight.unfinished
        if self._burst and unfinished and not total:
            # Only handlers that outlived their tasks are left; the end does not wait for them.
            yield from self._poll()
            if self._asleep:
                return True
        limit = self._prefetch.limit()
        isolated_limit = self._isolation.max_in_flight() if self._isolation else None
        wait = self._wait_if_full(total, unfinished, limit, isolated_limit)
        if wait is not None:
            if self._must_poll_when_full() and now_sec() >= self._next_poll:
                yield from self._poll(full=True)
            else:
                yield wait
            return False
        if now_sec() >= self._next_poll:
            yield from self._poll()
            return False
        room = limit - unfinished
        if isolated_limit is not None:
            room = min(room, isolated_limit - total)
        if not self._asleep and (yield from self._claim_some(room)):
            return False
        if self._burst:
            return (yield from self._end_burst(total, unfinished))
        yield from self._wait_for_work()
        return False

    def _wait_if_full(
        self, total: int, unfinished: int, limit: int, isolated_limit: int | None
    ) -> FetchEffect | None:
        """Return what to wait for, if there is no room for more."""
        # A claim is worth it for a good part of a batch, or for an idle handler.
        enough = max(limit * 3 // 4, self._prefetch.can_run)
        too_many = limit + int(
            min(UNSETTLED_BATCHES * self._batch_size, self._prefetch.max_in_memory)
        )
        if isolated_limit is not None and total >= isolated_limit:
            return self._wait_for_room(unfinished + 1, isolated_limit)
        if unfinished >= enough or total >= too_many:
            return self._wait_for_room(enough, too_many)
        return None

    def _end_burst(self, total: int, unfinished: int) -> FetchEffects[bool]:
        """Wait for the tasks in flight; return whether none is left, and none has come due."""
        if total:
            yield self._wait_for_room(max(unfinished, 1), total)
            self._asleep = False
            return False
        yield from self._poll()
        return self._asleep

    # Claim

    def _claim_some(self, room: int) -> FetchEffects[int]:
        """Claim up to ``room`` tasks and start them; return how many there were.

        After a claim that found nothing, most likely one new task is there: one write claims it.
        """
        room = 1 if self._quiet else min(room, self._batch_size)
        count = 0
        for queue, up_to in self._selection.offers(self._unpaused, room):
            limit = min(up_to, room) - count
            if limit > 0:
                claimed = yield from self._claimer.claim(queue, limit)
                self._leases.expect_tasks(claimed)
                yield PutInBuffer(self._isolation.admit(claimed))
                count += len(claimed)
            if count >= room or (count and up_to >= room):
                break
        if count:
            self._hot_until = now_sec() + self._hot_period_sec
            self._false_wake_sec = 0.0
            if self._quiet or count < room:
                # No more tasks are near: let the handlers have the interpreter first.
                yield Sleep(HOT_POLL_SEC)
        self._quiet = not count and not self._burst
        return count

    # Poll

    def _poll(self, *, full: bool = False) -> FetchEffects[None]:
        """Find out what is ready, due and paused; make due tasks ready.

        A worker that is ``full`` polls too: a due task may be more urgent than all ready ones, and
        no other worker may be there to make it ready, or to fire a schedule.
        """
        polled = yield from self._poll_collections()
        resumed = self._note_pauses(polled.paused)
        self._asleep = not (polled.ready or resumed or full)
        self._quiet = self._quiet and self._asleep
        self._polled_at = now_sec()
        # A worker that claims, or waits for a queue to resume, sees pauses within a second.
        idle = self._asleep and not polled.paused and not self._any_unstarted()
        wait_sec = self._poll_sec if idle else min(self._poll_sec, STALE_SEC)
        wait_sec *= _random.uniform(*JITTER)
        yield from self._release_unstartable(polled.paused)
        if polled.due_sec is not None and polled.due_sec <= 0 and self._unpaused:
            for queue in self._unpaused:
                yield RunOperation(queue, queue.promote_due())
            self._asleep = False
            wait_sec = SOON_SEC  # There may be more than one batch.
        elif polled.due_sec is not None:
            wait_sec = min(wait_sec, max(polled.due_sec, SOON_SEC))
        wait_sec = min(wait_sec, (yield from self._fire_schedules(polled.schedules)))
        self._next_poll = self._polled_at + wait_sec

    def _fire_schedules(
        self, schedules: Sequence[tuple[QueueCore[Any], float]]
    ) -> FetchEffects[float]:
        """Add the tasks of due schedules; return after how many seconds the next one is due."""
        self._has_schedules = bool(schedules)
        wait_sec = inf
        for queue, scheduled_sec in schedules:
            due_sec = scheduled_sec
            firer = self._firers.get(queue)
            if firer is None:
                continue
            if due_sec <= 0:
                firing: Firing = yield RunOperation(queue, firer.fire(self._fire_until))
                due_sec = firing.due_sec
                if firing.added:
                    self._asleep = False
                    due_sec = 0.0  # A task may be delayed, which the next poll finds out.
                if self._burst:
                    self._note_fired_in_burst(queue, firing)
            # Workers that wait for the same instant do not all write at once.
            wait_sec = min(wait_sec, due_sec + _random.uniform(0, FIRING_SPREAD_SEC))
        return max(wait_sec, SOON_SEC)

    def _note_fired_in_burst(self, queue: QueueCore[Any], firing: Firing) -> None:
        """Fire no runs that come due later: a burst would not end."""
        self._fire_until = self._fire_until or firing.now
        if firing.next_at is None or firing.next_at > self._fire_until:
            del self._firers[queue]

    def _poll_collections(self) -> FetchEffects[PollSummary]:
        results = []
        for group in by_collection(self._queues):
            names = [queue.name for queue in group if queue in self._unpaused]
            result: PollResult = yield RunOperation(group[0], group[0].poll(names))
            results.append((result, group))
        return PollSummary.of(results)

    def _note_pauses(self, paused: Sequence[QueueCore[Any]]) -> bool:
        """Claim from the other queues only; return whether a queue was resumed."""
        resumed = False
        for queue in self._queues:
            fields = {"queue": queue.name}
            if queue in paused and queue in self._unpaused:
                logger.info("queue %r paused", queue.name, extra={**fields, "paused": True})
            elif queue not in paused and queue not in self._unpaused:
                logger.info("queue %r resumed", queue.name, extra={**fields, "paused": False})
                resumed = True
        self._unpaused = [queue for queue in self._queues if queue not in paused]
        return resumed

    # Wait

    def _must_poll_when_full(self) -> bool:
        return self._any_unstarted() or self._has_schedules

    def _any_unstarted(self) -> bool:
        """Return whether some tasks in flight may not have started."""
        return self._in_flight.unfinished > self._surely_started or self._isolation.has_delayed

    def _release_unstartable(self, paused: Sequence[QueueCore[Any]]) -> FetchEffects[None]:
        """Release tasks of paused queues, and tasks that have waited too long for a handler."""
        self._prefetch.blocked = sum(
            task.running_sec > task.max_wait_sec for task in self._in_flight.snapshot()
        )
        if self._any_unstarted():

            def unwanted(task: LeasedTask) -> bool:
                return task.queue in paused or task.waiting_sec > task.max_wait_sec

            withdrawn = yield Withdraw(unwanted)
            self._release([*withdrawn, *self._isolation.withdraw(unwanted)])

    def _release(self, tasks: Iterable[LeasedTask]) -> None:
        for task in tasks:
            self._completer.release(task)

    def _wait_for_room(self, unfinished: int, total: int) -> FetchEffect:
        wait_sec = ROOM_WAIT_SEC
        if self._must_poll_when_full():
            wait_sec = min(wait_sec, max(self._next_poll - now_sec(), HOT_POLL_SEC))
        return WaitForRoom(unfinished, total, wait_sec)

    def _wait_for_work(self) -> FetchEffects[None]:
        """Poll every millisecond for a moment after the last task, then wait for the stream."""
        until_poll_sec = max(self._next_poll - now_sec(), 0.0)
        if now_sec() < self._hot_until:
            self._asleep = False
            yield Sleep(min(self._hot_poll_sec, until_poll_sec))
        elif (yield WaitForWork(until_poll_sec)):
            # A change to a task does not include its queue. If other queues are busy, most
            # changes are theirs: the worker waits a moment, so that one poll serves several.
            if self._false_wake_sec:
                yield Sleep(self._false_wake_sec)
            self._false_wake_sec = min(max(2 * self._false_wake_sec, SOON_SEC), MAX_FALSE_WAKE_SEC)
            self._asleep = False
            # If nothing is ready, the change may have been a delayed task.
            stale = now_sec() - self._polled_at > STALE_SEC
            self._next_poll = 0.0 if stale else min(self._next_poll, now_sec() + SOON_SEC)
