"""What was finished in each minute of the last hour, read once per minute and remembered."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from microqueue.operations import stats
from microqueue.operations.call import Operation
from microqueue.operations.insights import MinuteCounts
from microqueue.operations.stats import MINUTE, MINUTES, Bounds, Finished, Sampler
from microqueue.settings import QueueSettings

KINDS = ("done", "failed")
NOTHING = Finished({kind: {} for kind in KINDS}, {kind: frozenset() for kind in KINDS})


class Minutes:
    """Counts by minute. Minutes that are over are not read again, but for the last of them.

    So what a page that is left open all day costs depends on the work of the last two minutes.
    """

    def __init__(self) -> None:
        # Replaced whole, so that threads never see half of a new reading.
        self._known: tuple[datetime, Finished] | None = None

    def read(
        self, now: datetime, settings: QueueSettings, *, bounds: Bounds, sampler: Sampler
    ) -> Operation[MinuteCounts]:
        """Read what is new, and give the last hour; all of it anew if everything is counted."""
        current = now.replace(second=0, microsecond=0)
        first = stats.first_minute(now)
        since, old = first, NOTHING
        if self._known is not None and bounds.limit is not None:
            read_at, old = self._known
            since = max(first, read_at - MINUTE)  # A writer's clock may be a little behind.
        fresh = yield from stats.finished_by_minute(
            since, now, settings, bounds=bounds, sampler=sampler
        )
        counts: dict[str, stats.Minutes] = {}
        estimated: dict[str, frozenset[datetime]] = {}
        for kind in KINDS:
            kept = {key: n for key, n in old.counts[kind].items() if first <= key[1] < since}
            counts[kind] = {**kept, **fresh.counts[kind]}
            kept_minutes = {minute for minute in old.estimated[kind] if first <= minute < since}
            estimated[kind] = fresh.estimated[kind] | kept_minutes
        self._known = (current, Finished(counts, estimated))
        return MinuteCounts.trusted(
            first_at=first,
            done=_rows(counts["done"], first),
            failed=_rows(counts["failed"], first),
            done_estimated=_places(estimated["done"], first),
            failed_estimated=_places(estimated["failed"], first),
        )


def _places(minutes: Iterable[datetime], first: datetime) -> list[int]:
    return sorted(int((minute - first) / MINUTE) for minute in minutes)


def _rows(counts: dict[tuple[str, datetime], int], first: datetime) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for (queue, minute), count in counts.items():
        place = int((minute - first) / MINUTE)
        if 0 <= place < MINUTES:
            rows.setdefault(queue, [0] * MINUTES)[place] += count
    return rows
