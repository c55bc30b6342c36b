"""Which of several queues a worker claims from, and how much: in strict order, or by weight."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, Protocol

from microqueue.arguments import refused
from microqueue.errors import InvalidArgument

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
