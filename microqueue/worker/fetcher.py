"""Which of several queues a worker claims from, and how much: in strict order, or by weight."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from microqueue.arguments import refused
from microqueue.errors import InvalidArgument, MicroqueueError
from microqueue.operations.poll import PollResult
from microqueue.operations.workers import Isolation, isolation_for, unsettled_limit
from microqueue.worker.effects import Do, Step, Steps, run_on
from microqueue.worker.in_flight import PAUSE_SEC, InFlight, InFlightTask, now_sec, split
from microqueue.worker.options import WorkerOptions
from microqueue.worker.prefetch import PrefetchController

_random = random.Random()  # noqa: S311 (it only shares out)


class Selection(Protocol):
    """Decides, for one round of claims, in which order queues are asked and for how many."""

    def shares(self, queues: Sequence[Any], room: int) -> Iterator[tuple[Any, int]]:
        """Give each queue to ask with how many tasks it may give at most."""


class StrictOrder:
    """The first queue that has a task goes first, always."""

    def shares(self, queues: Sequence[Any], room: int) -> Iterator[tuple[Any, int]]:
        """Offer all the room to each queue in turn."""
        for queue in queues:
            yield queue, room


class Weighted:
    """Each queue gets its share of the room; what one leaves goes to the others.

    A share is seldom whole. It is rounded at random, so that it is right over many rounds.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights

    def shares(self, queues: Sequence[Any], room: int) -> Iterator[tuple[Any, int]]:
        """Draw an order; those asked later may have what the earlier ones were offered.

        Queues whose share is nothing this time are asked for all if the others have nothing.
        """
        total = sum(self._weights[queue.name] for queue in queues)
        without: list[Any] = []
        # One draw for all: what one share is rounded up by, another is rounded down by.
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

    def _draw(self, queues: Sequence[Any]) -> Iterator[Any]:
        """Give the queues in an order drawn by weight, as they share what one leaves."""
        left = list(queues)
        while left:
            (queue,) = _random.choices(left, [self._weights[queue.name] for queue in left])
            left.remove(queue)
            yield queue


def make_selection(queues: Iterable[Any], weights: Mapping[str, float] | None) -> Selection:
    """Take a worker's ``weights``: one positive number per queue, by name; none: strict order."""
    if weights is None:
        return StrictOrder()
    names = {queue.name for queue in queues}
    if not isinstance(weights, Mapping) or set(weights) != names:
        raise refused("weights", weights, f"give one for each of {sorted(names)}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < inf:
            raise InvalidArgument(
                f"weights[{name!r}]={weight!r} is not valid: give a finite number above 0",
                argument="weights",
                value=weight,
            )
    return Weighted(dict(weights))


class CrashIsolation:
    """Sets tasks aside that need care, and what was claimed behind them, until they may start.

    :mod:`microqueue.operations.workers` says what that is good for. Used by the thread, or
    the coroutine, that claims.
    """

    def __init__(self, in_flight: InFlight, concurrency: int) -> None:
        self._in_flight = in_flight
        self._concurrency = concurrency
        self._aside: deque[InFlightTask] = deque()
        self._started: dict[InFlightTask, Isolation] = {}  # With care, and not settled yet.

    def __bool__(self) -> bool:
        """Tell whether there is anything to be careful about."""
        return bool(self._aside or self._started)

    @property
    def waiting(self) -> bool:
        """Tell whether anything is set aside."""
        return bool(self._aside)

    def admit(self, claimed: Sequence[InFlightTask]) -> Sequence[InFlightTask]:
        """Take in what was claimed; give what may start at once."""
        if not self and all(
            isolation_for(one.claimed.document) is Isolation.NONE for one in claimed
        ):
            return claimed
        self._aside.extend(claimed)
        return self.proceed()

    def proceed(self) -> list[InFlightTask]:
        """Give what may start now of what was set aside."""
        self._refresh()
        unsettled = len(self._in_flight) - len(self._aside)
        starting: list[InFlightTask] = []
        while self._aside:
            care = isolation_for(self._aside[0].claimed.document)
            if unsettled >= self._limit(care):
                break
            held = self._aside.popleft()
            unsettled += 1
            starting.append(held)
            if care is not Isolation.NONE:
                self._started[held] = care
        return starting

    def most(self) -> int | None:
        """Give how many may be held before one more is started, or claimed; none: any number."""
        self._refresh()
        care = isolation_for(self._aside[0].claimed.document) if self._aside else Isolation.NONE
        limit = self._limit(care)
        return None if limit == inf else int(limit) + len(self._aside)

    def withdraw(self, unwanted: Callable[[InFlightTask], bool]) -> list[InFlightTask]:
        """Take out, of what was set aside, what is not to be started any more."""
        out, left = split(self._aside, unwanted)
        self._aside = deque(left)
        return out

    def _limit(self, care: Isolation) -> float:
        """Give how many unsettled ones are too many to start a task that needs some care."""
        return unsettled_limit(
            max(care, *self._started.values(), Isolation.NONE), self._concurrency
        )

    def _refresh(self) -> None:
        """Forget what is settled, and what was taken away while it waited."""
        if any(one.concluded for one in self._aside):
            self._aside = deque(one for one in self._aside if not one.concluded)
        self._started = {
            one: care for one, care in self._started.items() if self._in_flight.holds(one)
        }


NAP_SEC = 0.001
SOON_SEC = 0.005
DEAF_SEC = 0.2
STALE_SEC = 1.0
ROOM_WAIT_SEC = 0.5
UNSETTLED_BATCHES = 4  # So many batches may wait for their write while others are claimed.
JITTER = (0.8, 1.0)  # Of the poll interval, so that many workers do not look at once.

logger = logging.getLogger("microqueue.worker")


@dataclass(frozen=True, slots=True)
class PollSummary:
    """What a look has shown: work that is ready, or due in some time, and queues that pause."""

    ready: bool
    due_sec: float | None
    paused: Sequence[Any]

    @classmethod
    def of(cls, seen: Sequence[tuple[PollResult, Sequence[Any]]]) -> PollSummary:
        """Take together what was seen in each collection, and the queues that are there."""
        return cls(
            ready=any(glance.ready for glance, _ in seen),
            due_sec=min(
                (glance.due_sec for glance, _ in seen if glance.due_sec is not None), default=None
            ),
            paused=[one for glance, queues in seen for one in queues if one.name in glance.paused],
        )


class Fetcher:
    """Claims for a worker until it stops, or, in a burst, until nothing is left."""

    def __init__(
        self,
        queues: Sequence[Any],
        selection: Selection,
        options: WorkerOptions,
        *,
        prefetch: PrefetchController,
        in_flight: InFlight,
        isolation: CrashIsolation,
        claim: Callable[[Any, int], Steps[Sequence[InFlightTask]]],
        look: Callable[[Sequence[Any]], Steps[PollSummary]],
        start: Callable[[Sequence[InFlightTask]], None],
        hand_back: Callable[[Callable[[InFlightTask], bool]], None],
        stopping: Callable[[], bool],
        burst: bool,
    ) -> None:
        self._queues = queues
        self._open = list(queues)
        self._selection = selection
        self._prefetch_controller = prefetch
        self._in_flight = in_flight
        self._isolation = isolation
        self._claim = claim
        self._look = look
        self._start = start
        self._hand_back = hand_back
        self._stopping = stopping
        self._burst = burst
        self._batch = options.flush_limit
        self._concurrency = options.concurrency
        self._poll_sec = options.poll_interval.total_seconds()
        self._brisk_sec = options.hot_poll_period.total_seconds()
        self._nap_sec = NAP_SEC * len(queues)
        self._brisk_until = 0.0
        self._look_at = 0.0
        self._looked_at = 0.0
        self._asleep = False  # Only a look, or news, can tell of work.
        self._quiet = False  # The last claim found nothing.
        self._false_news_sec = 0.0

    def steps(self) -> Steps[None]:
        """Say what to do next, again and again."""
        while not self._stopping():
            try:
                if (yield from self._round()):
                    return
            except MicroqueueError as exc:
                if self._burst:
                    raise
                logger.warning("cannot claim; trying again in %g s: %s", PAUSE_SEC, exc)
                yield Step(Do.PAUSE, seconds=PAUSE_SEC)

    def _round(self) -> Steps[bool]:
        """Claim once, or wait once; give whether a burst is over."""
        if self._isolation:
            self._start(self._isolation.proceed())
        held, unfinished = len(self._in_flight), self._in_flight.unfinished
        if self._burst and unfinished and not held:
            # Only handlers are left that go on after their time; the end waits for none of them.
            yield from self._look_around()
            if self._asleep:
                return True
        most = self._prefetch_controller.most()
        with_care = self._isolation.most() if self._isolation else None
        full = self._full(held, unfinished, most, with_care)
        if full is not None:
            if self._anything_waits() and now_sec() >= self._look_at:
                yield from self._look_around(full=True)
            else:
                yield full
            return False
        if now_sec() >= self._look_at:
            yield from self._look_around()
            return False
        room = most - unfinished if with_care is None else min(most - unfinished, with_care - held)
        if not self._asleep and (yield from self._claim_some(room)):
            return False
        if self._burst:
            return (yield from self._end_burst(held, unfinished))
        yield from self._rest()
        return False

    def _full(self, held: int, unfinished: int, most: int, with_care: int | None) -> Step | None:
        """Say what to wait for, if there is no room for more."""
        # Room for a good part of a batch, or for an idle handler, is worth a claim.
        enough = max(most * 3 // 4, self._concurrency)
        too_many = most + int(
            min(UNSETTLED_BATCHES * self._batch, self._prefetch_controller.affordable)
        )
        if with_care is not None and held >= with_care:
            return self._await_room(unfinished + 1, with_care)
        if unfinished >= enough or held >= too_many:
            return self._await_room(enough, too_many)
        return None

    def _end_burst(self, held: int, unfinished: int) -> Steps[bool]:
        """Wait for what is held; with nothing left, give whether nothing has come due either."""
        if held:
            yield self._await_room(max(unfinished, 1), held)
            self._asleep = False
            return False
        yield from self._look_around()
        return self._asleep

    def _claim_some(self, room: int) -> Steps[int]:
        """Claim up to ``room``; give how many there were.

        Where the last look found nothing, there is one task at most, most likely: that is
        claimed with a single write. If there is one, others may follow.
        """
        room = 1 if self._quiet else min(room, self._batch)
        claimed = 0
        for queue, share in self._selection.shares(self._open, room):
            limit = min(share, room) - claimed
            if limit > 0:
                taken = yield from self._claim(queue, limit)
                self._start(self._isolation.admit(taken))
                claimed += len(taken)
            if claimed >= room or (claimed and share >= room):
                break
        if claimed:
            self._brisk_until = now_sec() + self._brisk_sec
            self._false_news_sec = 0.0
            if self._quiet or claimed < room:
                # Nothing more is near: let the handlers have the interpreter first.
                yield Step(Do.PAUSE, seconds=NAP_SEC)
        self._quiet = not claimed and not self._burst
        return claimed

    def _await_room(self, unfinished: int, held: int) -> Step:
        """Wait until fewer are unfinished, and held; but not for long."""
        wait_sec = ROOM_WAIT_SEC
        if self._anything_waits():
            wait_sec = min(wait_sec, max(self._look_at - now_sec(), NAP_SEC))
        return Step(Do.AWAIT_ROOM, limit=unfinished, most=held, seconds=wait_sec)

    def _anything_waits(self) -> bool:
        """Tell whether some of what is held has not started."""
        return self._in_flight.unfinished > self._concurrency or self._isolation.waiting

    def _look_around(self, *, full: bool = False) -> Steps[None]:
        """Find out what is ready, due and paused; make ready what is due.

        A worker that is ``full`` wants to know, too: what is due may be more urgent than all that
        is ready, and nobody else may be there to put it into the line.
        """
        polled = yield from self._look(self._open)
        resumed = self._note_pauses(polled.paused)
        self._asleep = not (polled.ready or resumed or full)
        self._quiet = self._quiet and self._asleep
        self._looked_at = now_sec()
        # Whoever claims, or waits for a queue to go on, knows of pauses within a second.
        calm = self._asleep and not polled.paused and not self._anything_waits()
        wait_sec = self._poll_sec if calm else min(self._poll_sec, STALE_SEC)
        wait_sec *= _random.uniform(*JITTER)
        self._give_back(polled.paused)
        if polled.due_sec is not None and polled.due_sec <= 0 and self._open:
            for queue in self._open:
                yield from run_on(queue, queue.promote_due())
            self._asleep = False
            wait_sec = SOON_SEC  # There may be more than one batch.
        elif polled.due_sec is not None:
            wait_sec = min(wait_sec, max(polled.due_sec, SOON_SEC))
        self._look_at = self._looked_at + wait_sec

    def _note_pauses(self, paused: Sequence[Any]) -> bool:
        """Claim from the other queues only; give whether one of them goes on."""
        resumed = False
        for queue in self._queues:
            if queue in paused and queue in self._open:
                logger.info("queue %r is paused: nothing is claimed from it", queue.name)
            elif queue not in paused and queue not in self._open:
                logger.info("queue %r goes on", queue.name)
                resumed = True
        self._open = [one for one in self._queues if one not in paused]
        return resumed

    def _give_back(self, paused: Sequence[Any]) -> None:
        """Hand back what waits in vain: in a queue that pauses, or for handlers that are busy."""
        self._prefetch_controller.busy = sum(
            one.running_sec > one.longest_wait_sec for one in self._in_flight.snapshot()
        )
        if self._anything_waits():
            self._hand_back(
                lambda one: one.queue in paused or one.waiting_sec > one.longest_wait_sec
            )

    def _rest(self) -> Steps[None]:
        """Wait for work: briskly for a moment after the last, then on the stream."""
        until_look_sec = max(self._look_at - now_sec(), 0.0)
        if now_sec() < self._brisk_until:
            self._asleep = False
            yield Step(Do.PAUSE, seconds=min(self._nap_sec, until_look_sec))
        elif (yield Step(Do.SLEEP, seconds=until_look_sec)):
            # An update does not say in which queue it was. Where others are busy with theirs,
            # most news are false: then they are taken together, so that they cost little.
            if self._false_news_sec:
                yield Step(Do.PAUSE, seconds=self._false_news_sec)
            self._false_news_sec = min(max(2 * self._false_news_sec, SOON_SEC), DEAF_SEC)
            self._asleep = False
            # If nothing is ready, the news may have been of a delayed task.
            stale = now_sec() - self._looked_at > STALE_SEC
            self._look_at = 0.0 if stale else min(self._look_at, now_sec() + SOON_SEC)
