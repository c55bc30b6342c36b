"""Names: count and measure tasks by name. Read-only.

No index has the name, so documents are read: of each status at most one more than the limit, by the
index of the status. If there are more, the counts of that status are estimates from a random sample
of the collection. Latencies are those of the newest tasks that were done, up to the limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

from microqueue.operations import filters, paging, stats
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.operations.stats import Bounds, Sampler
from microqueue.reports import NameStats
from microqueue.settings import QueueSettings

COUNTS: Mapping[str, Sequence[str]] = {
    "waiting": ("ready", "delayed"),
    "running": ("processing",),
    "done": ("done",),
    "failed": ("failed",),
}
"""The kinds of tasks that each count has."""
PERCENTILES = (50, 95)
Place: TypeAlias = tuple[Target, str]
"""A collection and a kind of task."""


@dataclass
class _Found:
    """What was counted, by name, and the places that have more."""

    counts: dict[Place, Counter[str | None]] = field(default_factory=dict)
    waits: dict[str | None, Counter[int]] = field(default_factory=dict)
    runs: dict[str | None, Counter[int]] = field(default_factory=dict)
    more: set[Place] = field(default_factory=set)

    def add(self, place: Place, name: Any, number: int) -> None:
        """Count tasks."""
        self.counts.setdefault(place, Counter())[_text(name)] += number

    def estimated(self, count: str) -> bool:
        """Return whether a count is an estimate."""
        return any(kind in COUNTS[count] for _, kind in self.more)


def by_name(
    queues: Sequence[str],
    since: datetime,
    now: datetime,
    settings: QueueSettings,
    *,
    bounds: Bounds,
) -> Operation[list[NameStats]]:
    """Return the figures of each name in some queues, the one with the most tasks first."""
    reader = _Reader(queues, since, settings, bounds)
    found = yield from reader.count()
    if found.more:
        yield from reader.estimate(found, now)
    names = {name for counter in found.counts.values() for name in counter}
    rows = [_row(name, found) for name in names]
    return sorted(rows, key=lambda row: (-sum(getattr(row, one) for one in COUNTS), row.name or ""))


def _row(name: str | None, found: _Found) -> NameStats:
    numbers = {
        count: sum(counter[name] for (_, kind), counter in found.counts.items() if kind in kinds)
        for count, kinds in COUNTS.items()
    }
    ended = numbers["done"] + numbers["failed"]
    latencies: dict[str, float | None] = {}
    for kind, classes in (("wait", found.waits), ("run", found.runs)):
        values = stats.percentiles(classes.get(name, Counter()), PERCENTILES) or (None, None)
        for share, value in zip(PERCENTILES, values, strict=True):
            latencies[f"{kind}_p{share}"] = value
    estimated = [count for count in COUNTS if found.estimated(count)]
    if found.estimated("done") or found.estimated("failed"):
        estimated.append("failure_rate")
    if found.estimated("done"):
        estimated += latencies
    return NameStats(
        name=name,
        **numbers,
        failure_rate=numbers["failed"] / ended if ended else None,
        **latencies,
        estimated=tuple(estimated),
    )


class _Reader:
    """Reads the tasks of some queues, and what ended since an instant."""

    def __init__(
        self, queues: Sequence[str], since: datetime, settings: QueueSettings, bounds: Bounds
    ) -> None:
        self._queues = list(queues)
        self._since = since
        self._bounds = bounds
        self._dead_letters = dict.fromkeys(paging.dead_letter_targets(settings))

    def count(self) -> Operation[_Found]:
        """Count by name, each kind in each collection up to the limit."""
        found = _Found()
        yield from self._add(found, "ready", filters.READY)
        # Ready tasks that may expire are beside the delayed ones in the index.
        yield from self._add(found, "delayed", filters.WAITING)
        yield from self._add(found, "processing", filters.LEASED)
        yield from self._add_done(found)
        failed = {**filters.DEAD, "updated_at": {"$gte": self._since}}
        for target in self._dead_letters:
            yield from self._add(found, "failed", failed, target)
        return found

    def _add(
        self, found: _Found, kind: str, selection: Document, target: Target = Target.TASKS
    ) -> Operation[None]:
        key = {
            "name": filters.NAME,
            "delayed": {"$ne": [{"$ifNull": ["$next_retry_at", None]}, None]},
        }
        pipeline = [
            {"$match": {**filters.of(self._queues), **selection}},
            *self._bounds.stages(),
            {"$group": {"_id": key, "count": {"$sum": 1}}},
        ]
        groups: list[Document] = yield Call("aggregate", pipeline, target=target)
        if self._bounds.exceeded(sum(one["count"] for one in groups)):
            found.more.add((target, kind))
        for one in groups:
            if kind != "delayed" or one["_id"]["delayed"]:
                found.add((target, kind), one["_id"].get("name"), one["count"])

    def _add_done(self, found: _Found) -> Operation[None]:
        groups = yield from stats.newest_done(
            self._bounds.collection,
            self._queues,
            self._since,
            {"name": filters.NAME},
            limit=self._bounds.limit,
        )
        place = Target.TASKS, "done"
        if self._bounds.exceeded(sum(one["count"] for one in groups)):
            found.more.add(place)
        for one in groups:
            name, number = one["_id"].get("name"), one["count"]
            found.add(place, name, number)
            for classes, kind in ((found.waits, "wait"), (found.runs, "run")):
                classes.setdefault(_text(name), Counter())[int(one["_id"][kind] or 0)] += number

    def estimate(self, found: _Found, now: datetime) -> Operation[None]:
        """Replace the counts of places that have more by estimates, if these are larger."""
        sampler = Sampler(self._bounds, now)
        for target in dict.fromkeys(target for target, _ in found.more):
            total = yield from sampler.total(target)
            sample = yield from self._sample(target, total, now)
            whole = sum(weight for _, weight in sample)
            weights: dict[Place, dict[str | None, float]] = {}
            for one, weight in sample:
                kind = stats.kind_of(one.get("status"), dated=bool(one.get("dated")))
                if one["here"] and (target, kind) in found.more:
                    by_name = weights.setdefault((target, kind), {})
                    name = _text(one.get("name"))
                    by_name[name] = by_name.get(name, 0.0) + weight
            for place, by_name in weights.items():
                for name, weight in by_name.items():
                    counter = found.counts.setdefault(place, Counter())
                    counter[name] = max(counter[name], round(total * weight / whole))

    def _sample(
        self, target: Target, total: int, now: datetime
    ) -> Operation[Sequence[tuple[Document, float]]]:
        known_as = ("names", target, tuple(self._queues), now - self._since)
        sample = self._bounds.samples.get(known_as, now)
        if sample is None:
            is_live = {"$not": [{"$in": ["$status", [filters.DONE, filters.FAILED]]}]}
            here = [
                {"$in": ["$queue", self._queues]},
                {"$or": [is_live, {"$gte": [stats.ENDED_AT, self._since]}]},
            ]
            key = {
                "name": filters.NAME,
                "status": "$status",
                "dated": stats.DATED,
                "here": {"$and": here},
            }
            sample = yield from stats.sample_groups(target, total, key)
            self._bounds.samples.put(known_as, now, sample)
        return sample


def _text(name: Any) -> str | None:
    """Return a name; a document that was edited manually may have another value."""
    return name if name and isinstance(name, str) else None
