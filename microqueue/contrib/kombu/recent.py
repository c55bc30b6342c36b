"""What is remembered of the queues and exchanges that were used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Container
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")

MOST_REMEMBERED = 1000
"""How many names are remembered. Each call of ``celery inspect`` has a new reply queue."""


class Recent(Generic[ValueT]):
    """Values by name. Those that were not used for longest are forgotten.

    Args:
        pinned: Names that are not forgotten, and do not count.
    """

    def __init__(self, pinned: Container[str] = ()) -> None:
        self._pinned = pinned
        self._values: OrderedDict[str, ValueT] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, name: str) -> ValueT | None:
        """Return the value of a name; None if there is none."""
        with self._lock:
            if name in self._values:
                self._values.move_to_end(name)
            return self._values.get(name)

    def put(self, name: str, value: ValueT) -> ValueT:
        """Remember a value, and return it."""
        with self._lock:
            self._values[name] = value
            self._values.move_to_end(name)
            if len(self._values) > MOST_REMEMBERED:
                free = [one for one in self._values if one not in self._pinned]
                for one in free[: max(len(free) - MOST_REMEMBERED, 0)]:
                    del self._values[one]
        return value

    def forget(self, name: str) -> None:
        """Forget the value of a name."""
        with self._lock:
            self._values.pop(name, None)

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._values.clear()
