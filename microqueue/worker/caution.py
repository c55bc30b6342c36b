"""Start tasks with the care that they need, so that a crash is blamed on the one that did it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf

from microqueue.operations.suspects import Care, care_for, fewest
from microqueue.worker.inflight import Held, InFlight, split


class Caution:
    """Sets tasks aside that need care, and what was claimed behind them, until they may start.

    :mod:`microqueue.operations.suspects` says what that is good for. Used by the thread, or
    the coroutine, that claims.
    """

    def __init__(self, in_flight: InFlight, concurrency: int) -> None:
        self._in_flight = in_flight
        self._concurrency = concurrency
        self._aside: deque[Held] = deque()
        self._started: dict[Held, Care] = {}  # With care, and not settled yet.

    def __bool__(self) -> bool:
        """Tell whether there is anything to be careful about."""
        return bool(self._aside or self._started)

    @property
    def waiting(self) -> bool:
        """Tell whether anything is set aside."""
        return bool(self._aside)

    def admit(self, claimed: Sequence[Held]) -> Sequence[Held]:
        """Take in what was claimed; give what may start at once."""
        if not self and all(care_for(one.claimed.document) is Care.NONE for one in claimed):
            return claimed
        self._aside.extend(claimed)
        return self.proceed()

    def proceed(self) -> list[Held]:
        """Give what may start now of what was set aside."""
        self._refresh()
        unsettled = len(self._in_flight) - len(self._aside)
        starting: list[Held] = []
        while self._aside:
            care = care_for(self._aside[0].claimed.document)
            if unsettled >= self._limit(care):
                break
            held = self._aside.popleft()
            unsettled += 1
            starting.append(held)
            if care is not Care.NONE:
                self._started[held] = care
        return starting

    def most(self) -> int | None:
        """Give how many may be held before one more is started, or claimed; none: any number."""
        self._refresh()
        care = care_for(self._aside[0].claimed.document) if self._aside else Care.NONE
        limit = self._limit(care)
        return None if limit == inf else int(limit) + len(self._aside)

    def withdraw(self, unwanted: Callable[[Held], bool]) -> list[Held]:
        """Take out, of what was set aside, what is not to be started any more."""
        out, left = split(self._aside, unwanted)
        self._aside = deque(left)
        return out

    def _limit(self, care: Care) -> float:
        """Give how many unsettled ones are too many to start a task that needs some care."""
        return fewest(max(care, *self._started.values(), Care.NONE), self._concurrency)

    def _refresh(self) -> None:
        """Forget what is settled, and what was taken away while it waited."""
        if any(one.concluded for one in self._aside):
            self._aside = deque(one for one in self._aside if not one.concluded)
        self._started = {
            one: care for one, care in self._started.items() if self._in_flight.holds(one)
        }
