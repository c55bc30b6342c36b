"""What was finished in each minute of the last hour, read once per minute and remembered."""

from __future__ import annotations

from datetime import datetime
from typing import TypeAlias

from microqueue.operations import insights
from microqueue.operations.call import Operation
from microqueue.operations.insights import MINUTE, MINUTES, MinuteCounts
from microqueue.settings import QueueSettings

Counts: TypeAlias = dict[str, dict[tuple[str, datetime], int]]
"""Done and failed, each by queue and minute."""


class Minutes:
    """Counts by minute. Minutes that are over are not read again, but for the last of them.

    So what a page that is left open all day costs depends on the work of the last two minutes.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self._settings = settings
        # Replaced whole, so that threads never see half of a new reading.
        self._known: tuple[datetime, Counts] | None = None

    def read(self, now: datetime) -> Operation[MinuteCounts]:
        """Read what is new, and give the last hour."""
        current = now.replace(second=0, microsecond=0)
        first = current - (MINUTES - 1) * MINUTE
        since = first
        counts: Counts = {"done": {}, "failed": {}}
        if self._known is not None:
            read_at, counts = self._known
            since = max(first, read_at - MINUTE)  # A writer's clock may be a little behind.
        fresh = yield from insights.finished_by_minute(since, self._settings)
        merged = {
            kind: {
                **{key: count for key, count in old.items() if first <= key[1] < since},
                **fresh[kind],
            }
            for kind, old in counts.items()
        }
        self._known = (current, merged)
        return MinuteCounts.trusted(
            first_at=first,
            done=_rows(merged["done"], first),
            failed=_rows(merged["failed"], first),
        )


def _rows(counts: dict[tuple[str, datetime], int], first: datetime) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for (queue, minute), count in counts.items():
        place = int((minute - first) / MINUTE)
        if 0 <= place < MINUTES:
            rows.setdefault(queue, [0] * MINUTES)[place] += count
    return rows
