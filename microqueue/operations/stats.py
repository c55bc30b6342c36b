"""Stats: tasks by queue and status, by minute, running tasks, and latency. Read-only.

A count is exact up to a limit. Above the limit it is an estimate, and is marked as one, so that
stats of a million tasks cost as much as those of a few thousand:

1. Each status is counted for all queues at once, by its index, up to the limit.
2. If there is more, every queue gets its share of the limit, so that a small queue is counted
   exactly beside a large one.
3. What is still larger is estimated. The collection knows how many documents it has. The exact
   counts are subtracted, and the rest is distributed by a random sample.

A sample reads 4 MB of documents from anywhere in the collection, so it is reused for half a
minute. A single estimate needs no sample if everything else was counted.

WiredTiger samples a page first and then a document in it, so large documents are over-represented
where large and small ones are apart. The collection also knows the mean size of its documents. So
the documents of a sample are weighted by a power of their size that makes their mean agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

from microqueue.dead_letter_models import DeadLetterStats
from microqueue.model import trusted
from microqueue.operations import dead_letters, diagnostics, filters, paging
from microqueue.operations.call import Call, Document, Operation, Target, dlq_collection_name
from microqueue.reports import Latency, QueueStats, RunningTask
from microqueue.settings import QueueSettings
from microqueue.task import DEFAULT_QUEUE, name_of, read_task

MINUTE = timedelta(minutes=1)
MINUTES = 60

MOST_SAMPLED = 4000
SAMPLE_AGE = timedelta(seconds=30)
LEAST_PER_SAMPLE = 25
"""MongoDB samples at random only if asked for less than a 20th of the documents."""
MOST_PIPELINES = 100
"""How many counts one command makes. MongoDB allows 1,000 stages."""
MOST_MERGED = 100
HEADS = 20
"""How many tasks of each priority are read to find the oldest one of a long queue."""
BEFORE_ALL = datetime(1, 1, 1, tzinfo=UTC)
EARLIEST = datetime(1, 1, 2, tzinfo=UTC)
LARGEST_POWER = 4.0
STEPS = 40
SIZE_CLASSES = 8

SELECTIONS: Mapping[str, Document] = {
    "ready": filters.READY,
    # Ready tasks that may expire are beside them in the index, and are left out after the limit.
    "delayed": filters.WAITING,
    "processing": filters.LEASED,
    "done": filters.SUCCEEDED,
    "failed": filters.DEAD,
}
KINDS = tuple(SELECTIONS)
SINCE: Mapping[str, str] = {"ready": "updated_at", "delayed": "next_retry_at"}
"""The field of which the smallest value is read along with the count."""
ORDERS: Mapping[str, Document] = {
    "ready": dict(filters.READY_ORDER),
    "delayed": {"deadline_at": 1},
    "processing": {"deadline_at": 1},
    "done": {"deadline_at": 1},
    "failed": dict(paging.BY_FAILURE.order),
}
"""The order of each status's index after the queue."""
Place: TypeAlias = tuple[Target, str, str]
"""A collection, a queue, a status."""
TasksByMinute: TypeAlias = dict[tuple[str, datetime], int]
"""Tasks by queue and minute."""
RUNNING_FIELDS = dict.fromkeys(
    (
        "queue", "name", "headers", "worker_id", "attempts", "max_attempts", "started_at",
        "deadline_at",
        "progress",
    ),
    1,
)  # fmt: skip
CLASSES_PER_TEN = 20
MILLISECONDS = 1000


@dataclass(frozen=True)
class Bounds:
    """How far to count: up to a limit, or everything if there is none."""

    collection: str
    limit: int | None
    samples: KnownSamples

    def exceeded(self, number: int) -> bool:
        """Whether a count went beyond the limit."""
        return self.limit is not None and number > self.limit

    def share(self, parts: int) -> int:
        """Divide the limit among some counts."""
        return max((self.limit or 0) // max(parts, 1), 1)

    def stages(self, order: Document | None = None) -> list[Document]:
        """Return the stages that end a count one above the limit."""
        if self.limit is None:
            return []
        return [*([{"$sort": order}] if order else []), {"$limit": self.limit + 1}]

    def name(self, target: Target) -> str:
        """Return the name of a target's collection."""
        if target is Target.DEAD_LETTERS:
            return dlq_collection_name(self.collection)
        return self.collection


# Random samples


@dataclass(frozen=True)
class Sampled:
    """Documents of a sample that have all of this in common, and their weight."""

    queue: str
    kind: str
    overdue: bool
    minute: datetime | None
    weight: float


@dataclass(frozen=True)
class CollectionSample:
    """How many documents a collection has, and a sample of them."""

    total: int
    items: Sequence[Sampled]

    def weight(self, accepts: Callable[[Sampled], bool]) -> float:
        """Return the total weight of a part of the sample."""
        return sum(one.weight for one in self.items if accepts(one))


class KnownSamples:
    """The last samples of a queue's collections, by what they are of, and when they were taken."""

    def __init__(self) -> None:
        # Each is replaced whole, so that threads never see half of a new one.
        self._known: dict[Hashable, tuple[datetime, Sequence[Any]]] = {}

    def get(self, key: Hashable, now: datetime) -> Sequence[Any] | None:
        """Return a sample that is not too old, if there is one."""
        taken_at, items = self._known.get(key, (datetime.min.replace(tzinfo=UTC), ()))
        return items if abs(now - taken_at) < SAMPLE_AGE else None

    def put(self, key: Hashable, now: datetime, items: Sequence[Any]) -> None:
        """Keep a sample, and drop those that are too old."""
        known = {one: kept for one, kept in self._known.items() if now - kept[0] < SAMPLE_AGE}
        self._known = {**known, key: (now, items)}


class Sampler:
    """Takes a sample of each collection when the first estimate needs it and none is known."""

    def __init__(self, bounds: Bounds, now: datetime) -> None:
        self._bounds = bounds
        self._now = now
        self._totals: dict[Target, int] = {}

    def total(self, target: Target) -> Operation[int]:
        """Return how many documents a collection has, from its metadata; read once."""
        if target not in self._totals:
            found = yield Call("aggregate", [{"$collStats": {"count": {}}}], target=target)
            self._totals[target] = int(sum(one.get("count", 0) for one in found))
        return self._totals[target]

    def read(self, target: Target) -> Operation[CollectionSample]:
        """Return a sample of a collection."""
        total = yield from self.total(target)
        items = self._bounds.samples.get(target, self._now)
        if items is None:
            items = yield from self._read(target, total)
            self._bounds.samples.put(target, self._now, items)
        return CollectionSample(total, items)

    def _read(self, target: Target, total: int) -> Operation[Sequence[Sampled]]:
        key = {
            "queue": "$queue",
            "status": "$status",
            "dated": DATED,
            "late": by_status(False, processing={"$lte": ["$deadline_at", self._now]}),  # noqa: FBT003 (a value of MongoDB)
            # One group for all that ended earlier, or has not ended.
            "minute": {"$max": [-1, _minute_of(ENDED_AT, first_minute(self._now))]},
        }
        return [
            Sampled(
                queue=str(one.get("queue")),
                kind=kind_of(one.get("status"), dated=bool(one.get("dated"))),
                overdue=bool(one.get("late")),
                minute=_instant(one.get("minute"), first_minute(self._now)),
                weight=weight,
            )
            for one, weight in (yield from sample_groups(target, total, key))
        ]


def by_status(otherwise: Any, **values: Any) -> Document:
    """Return an expression: the value for the task's status, or otherwise another one."""
    branches = [
        {"case": {"$eq": ["$status", name]}, "then": value} for name, value in values.items()
    ]
    return {"$switch": {"branches": branches, "default": otherwise}}


DATED: Document = {
    "$eq": [
        {
            "$type": by_status(
                None, pending="$next_retry_at", processing="$deadline_at", done="$deadline_at"
            )
        },
        "date",
    ]
}
"""Whether a task has the instant by which its status is counted; see :func:`kind_of`."""
ENDED_AT: Document = by_status(None, done="$finished_at", failed="$updated_at")


def sample_groups(
    target: Target, total: int, key: Document
) -> Operation[Sequence[tuple[Document, float]]]:
    """Group a random sample of a collection; return each group's key and its weight.

    ``total`` is the number of documents of the collection.
    """
    wanted = min(MOST_SAMPLED, total // LEAST_PER_SAMPLE)
    if wanted < 1:
        return ()
    found = yield Call("aggregate", [{"$collStats": {"storageStats": {}}}], target=target)
    shards = [one.get("storageStats", {}) for one in found]
    count = sum(one.get("count", 0) for one in shards)
    mean_size = sum(one.get("size", 0) for one in shards) / max(count, 1)
    size = {"$bsonSize": "$$ROOT"}
    group = {
        "_id": {**key, "size": {"$floor": {"$multiply": [SIZE_CLASSES, {"$ln": size}]}}},
        "count": {"$sum": 1},
        "bytes": {"$sum": size},
    }
    pipeline = [{"$sample": {"size": wanted}}, {"$group": group}]
    groups = yield Call("aggregate", pipeline, target=target)
    return _weighted(groups, mean_size) if groups else ()


def _weighted(groups: Sequence[Document], mean_size: float) -> list[tuple[Document, float]]:
    """Weight the documents of a sample so that their mean size is that of the collection."""
    sizes = [one["bytes"] / one["count"] for one in groups]

    def weights(power: float) -> list[float]:
        return [
            one["count"] * (size / mean_size) ** -power
            for one, size in zip(groups, sizes, strict=True)
        ]

    low, high = -LARGEST_POWER, LARGEST_POWER
    for _ in range(STEPS):
        power = (low + high) / 2
        tried = weights(power)
        mean = sum(map(math.prod, zip(tried, sizes, strict=True))) / sum(tried)
        low, high = (power, high) if mean > mean_size else (low, power)
    found = zip(groups, weights((low + high) / 2), strict=True)
    return [(one["_id"], weight) for one, weight in found]


def kind_of(status: Any, *, dated: bool) -> str:
    """Return in which count a document is, or an empty text if in none."""
    match status, dated:
        case filters.PENDING, _:
            return "delayed" if dated else "ready"
        case ((filters.PROCESSING | filters.DONE), True):
            return str(status)
        case filters.FAILED, _:
            return "failed"
    return ""


def _instant(minute: Any, first: datetime) -> datetime | None:
    return first + int(minute) * MINUTE if minute is not None and minute >= 0 else None


# Counts by queue and status


@dataclass
class Counted:
    """The exact counts, and the counts that stopped at their limit (``more``)."""

    exact: dict[Place, int] = field(default_factory=dict)
    more: dict[Place, int] = field(default_factory=dict)
    overdue: Counter[str] = field(default_factory=Counter)
    overdue_more: set[str] = field(default_factory=set)
    """The queues that have more overdue tasks than were counted."""
    since: dict[str, dict[str, datetime]] = field(
        default_factory=lambda: {kind: {} for kind in SINCE}
    )

    def put(self, target: Target, queue: str, kind: str, number: int, *, exact: bool) -> None:
        """Store a count; an exact one replaces one that is not."""
        place = target, queue, kind
        if exact:
            self.exact[place] = number
            self.more.pop(place, None)
        elif place not in self.exact:
            self.more[place] = max(number, self.more.get(place, 0))


class QueueCounter:
    """Counts the tasks of some queues."""

    def __init__(
        self,
        names: Sequence[str],
        now: datetime,
        settings: QueueSettings,
        *,
        bounds: Bounds,
        sampler: Sampler,
    ) -> None:
        self._names = list(dict.fromkeys(names))
        self._now = now
        self._settings = settings
        self._bounds = bounds
        self._sampler = sampler
        self._here = {"queue": {"$in": self._names}}
        self._found = Counted()

    def count(self, kinds: Collection[str] = KINDS) -> Operation[dict[str, Document]]:
        """Count; return by queue the fields of :class:`QueueStats` for these kinds."""
        for kind in ("ready", "delayed", "processing", "done"):
            if kind in kinds:
                yield from self._count_by_queue(kind)
        if "failed" in kinds:
            yield from self._count_failed()
        if "ready" in kinds:
            yield from self._find_older()
        estimates = yield from self._estimate(kinds)
        return {name: self._fields(name, kinds, estimates) for name in self._names}

    def _fields(
        self, name: str, kinds: Collection[str], estimates: Mapping[Place, int]
    ) -> Document:
        fields: Document = {}
        estimated = []
        for kind in KINDS:
            if kind not in kinds:
                continue
            places = [(target, name, kind) for target in (Target.TASKS, Target.DEAD_LETTERS)]
            fields[kind] = sum(
                estimates.get(place, self._found.exact.get(place, 0)) for place in places
            )
            if any(place in estimates for place in places):
                estimated.append(kind)
            if kind == "processing":
                place = (Target.TASKS, name, "overdue")
                fields["overdue"] = estimates.get(place, self._found.overdue[name])
                if place in estimates:
                    estimated.append("overdue")
        if "ready" in kinds:
            since = self._found.since["ready"].get(name)
            waited = None if since is None else max((self._now - since).total_seconds(), 0.0)
            fields["oldest_ready_age_sec"] = waited
            if "ready" in estimated:
                estimated.append("oldest_ready_age_sec")
        if "delayed" in kinds:
            fields["next_due_at"] = self._found.since["delayed"].get(name)
        return {**fields, "estimated": tuple(estimated)}

    def _count_by_queue(
        self, kind: str, target: Target = Target.TASKS, only: Document | None = None
    ) -> Operation[None]:
        """Count a status in all queues at once, or in each with its share of the limit."""
        selection = {**SELECTIONS[kind], **(only or {})}
        alone = len(self._names) == 1
        pipeline = [
            {"$match": {**self._here, **selection}},
            *self._bounds.stages(ORDERS[kind] if alone else None),
            {"$group": self._group("$queue", kind)},
        ]
        groups = yield Call("aggregate", pipeline, target=target)
        if not self._bounds.exceeded(sum(one["examined"] for one in groups)):
            self._note(target, kind, groups, most=None)
            return
        if alone:
            self._note(target, kind, groups, most=self._bounds.limit)
            return
        share = self._bounds.share(len(self._names))
        groups = yield from self._each_queue(
            lambda name: [
                {"$match": {"queue": name, **selection}},
                {"$sort": ORDERS[kind]},
                {"$limit": share + 1},
                {"$group": self._group({"$literal": name}, kind)},
            ],
            target,
        )
        self._note(target, kind, groups, most=share)

    def _group(self, key: Any, kind: str) -> Document:
        group: Document = {"_id": key, "count": {"$sum": 1}, "examined": {"$sum": 1}}
        if kind in SINCE:
            group["since"] = {"$min": f"${SINCE[kind]}"}
        if kind == "delayed":
            # Dates are greater than anything else that may be there; mongomock has no "$type".
            is_delayed = {"$gte": [{"$ifNull": ["$next_retry_at", BEFORE_ALL]}, EARLIEST]}
            group["count"] = {"$sum": {"$cond": [is_delayed, 1, 0]}}
        if kind == "processing":
            is_late = {"$lte": ["$deadline_at", self._now]}
            group["overdue"] = {"$sum": {"$cond": [is_late, 1, 0]}}
            group["last"] = {"$max": "$deadline_at"}
        return group

    def _note(
        self, target: Target, kind: str, groups: Iterable[Document], most: int | None
    ) -> None:
        for name in self._names:
            self._found.put(target, name, kind, 0, exact=True)
        for one in groups:
            name, number = str(one["_id"]), int(one["count"])
            whole = most is None or one["examined"] <= most
            if not whole:
                del self._found.exact[target, name, kind]
            self._found.put(target, name, kind, number, exact=whole)
            if kind == "processing":
                self._found.overdue[name] = one["overdue"]
                # They are sorted by the end of their lease: after one that is not overdue, none is.
                if not whole and one["last"] <= self._now:
                    self._found.overdue_more.add(name)
            if isinstance(one.get("since"), datetime):
                self._found.since[kind][name] = one["since"]

    def _each_queue(
        self,
        pipeline_of: Callable[[str], list[Document]],
        target: Target = Target.TASKS,
        names: Sequence[str] | None = None,
    ) -> Operation[list[Document]]:
        pipelines = [pipeline_of(name) for name in (self._names if names is None else names)]
        return (yield from _together(pipelines, self._bounds.name(target), target))

    def _find_older(self) -> Operation[None]:
        """Find the oldest ready task of a long queue among the heads of its priorities."""
        found = self._found.since["ready"]
        places = [place for place in self._found.more if place[2] == "ready"]
        below: dict[str, Any] = {name: math.inf for _, name, _ in places}
        while below:
            heads = yield from self._each_queue(
                lambda name: [
                    {
                        "$match": {
                            "queue": name,
                            **filters.READY,
                            "priority": {"$lt": below[name]},  # noqa: B023 (it is called at once)
                        }
                    },
                    {"$sort": ORDERS["ready"]},
                    {"$limit": HEADS},
                    {
                        "$group": {
                            **self._group({"$literal": name}, "ready"),
                            "lowest": {"$min": "$priority"},
                        }
                    },
                ],
                names=list(below),
            )
            below = {str(one["_id"]): one["lowest"] for one in heads if one["lowest"] is not None}
            for one in heads:
                name, since = str(one["_id"]), one["since"]
                if isinstance(since, datetime):
                    found[name] = min(since, found.get(name, since))

    # Dead letters

    def _count_failed(self) -> Operation[None]:
        if not self._settings.separate_dlq:
            yield from self._count_by_queue("failed")
            return
        query = {**self._here, **filters.DEAD}
        if self._bounds.limit is None:
            letters = yield from dead_letters.each_once(query, {"queue": 1}, self._settings)
            counted = Counter(str(one.get("queue")) for one in letters.values())
            for name in self._names:
                self._found.put(Target.TASKS, name, "failed", counted[name], exact=True)
            return
        # A dead letter may be in both collections for a moment. It is counted in the first, and
        # left out in the second.
        first = yield Call("find", query, {"queue": 1}, limit=self._bounds.limit + 1)
        if self._bounds.exceeded(len(first)):
            yield from self._count_by_queue("failed")
            yield from self._count_by_queue("failed", Target.DEAD_LETTERS)
            return
        counted = Counter(str(one.get("queue")) for one in first)
        for name in self._names:
            self._found.put(Target.TASKS, name, "failed", counted[name], exact=True)
        others = {"_id": {"$nin": [one["_id"] for one in first]}} if first else None
        yield from self._count_by_queue("failed", Target.DEAD_LETTERS, others)

    # Estimates

    def _estimate(self, kinds: Collection[str]) -> Operation[dict[Place, int]]:
        """Estimate the counts that stopped at their limit; never less than was counted."""
        estimates: dict[Place, int] = {}
        for target in (Target.TASKS, Target.DEAD_LETTERS):
            open_places = {place: n for place, n in self._found.more.items() if place[0] is target}
            if not open_places:
                continue
            closed = {place: n for place, n in self._found.exact.items() if place[0] is target}
            total = yield from self._sampler.total(target)
            rest = max(total - sum(closed.values()), 0)
            if (yield from self._is_the_rest(open_places, kinds)):
                estimates |= {place: max(n, rest) for place, n in open_places.items()}
                continue
            sample = yield from self._sampler.read(target)
            weight = sample.weight(lambda one: (target, one.queue, one.kind) not in closed)  # noqa: B023 (it is called at once)
            for place, counted in open_places.items():
                _, name, kind = place
                share = sample.weight(lambda one: (one.queue, one.kind) == (name, kind))  # noqa: B023 (as above)
                estimates[place] = max(counted, round(rest * share / weight) if weight else 0)
                if kind == "processing" and name in self._found.overdue_more:
                    late = sample.weight(
                        lambda one: one.overdue and (one.queue, one.kind) == (name, kind)  # noqa: B023 (as above)
                    )
                    part = round(estimates[place] * late / share) if share else 0
                    estimates[target, name, "overdue"] = max(self._found.overdue[name], part)
        return estimates

    def _is_the_rest(self, places: Collection[Place], kinds: Collection[str]) -> Operation[bool]:
        """Return whether only one count is open, and every other task was counted."""
        ((target, _, kind), *others) = places
        if others or target is not Target.TASKS or kind == "processing" or set(kinds) < set(KINDS):
            return False
        return set((yield from diagnostics.queue_names())) <= set(self._names)


def _together(
    pipelines: Sequence[list[Document]], collection: str, target: Target
) -> Operation[list[Document]]:
    """Run many small pipelines with few commands; return all their documents."""
    found: list[Document] = []
    for start in range(0, len(pipelines), MOST_PIPELINES):
        first, *others = pipelines[start : start + MOST_PIPELINES]
        unions = [{"$unionWith": {"coll": collection, "pipeline": one}} for one in others]
        found += yield Call("aggregate", [*first, *unions], target=target)
    return found


def queue_stats(
    names: Sequence[str], now: datetime, settings: QueueSettings, *, bounds: Bounds
) -> Operation[list[QueueStats]]:
    """Return the stats of some queues, with as many commands as for one of them."""
    counter = QueueCounter(names, now, settings, bounds=bounds, sampler=Sampler(bounds, now))
    counted = yield from counter.count()
    return [QueueStats(queue=name, at=now, **counted[name]) for name in names]


# Dead letters by code


def dead_letter_stats(
    queues: filters.Queues, now: datetime, settings: QueueSettings, *, bounds: Bounds
) -> Operation[DeadLetterStats]:
    """Count the dead letters of queues by error code: all, or the newest up to the limit."""
    if bounds.limit is None:
        return (yield from dead_letters.stats(queues, settings))
    query: Document = {**filters.of(queues), **filters.DEAD}
    by_code: Counter[str] = Counter()
    ends: list[datetime] = []
    more = False
    for target in dict.fromkeys(paging.dead_letter_targets(settings)):
        group = {
            "_id": "$error.code",
            "count": {"$sum": 1},
            "oldest": {"$min": "$updated_at"},
            "newest": {"$max": "$updated_at"},
        }
        pipeline = [
            {"$match": query},
            *bounds.stages(dict(paging.BY_FAILURE.order)),
            {"$group": group},
        ]
        if settings.separate_dlq and target is Target.TASKS:
            group["ids"] = {"$push": "$_id"}
        groups: list[Document] = yield Call("aggregate", pipeline, target=target)
        for one in groups:
            by_code[str(one["_id"] or "none")] += one["count"]
            ends += [at for at in (one["oldest"], one["newest"]) if isinstance(at, datetime)]
        if bounds.exceeded(sum(one["count"] for one in groups)):
            more = True
            last = yield Call(
                "find", query, {"updated_at": 1}, sort=[("updated_at", 1)], limit=1, target=target
            )
            ends += [one["updated_at"] for one in last if isinstance(one["updated_at"], datetime)]
        elif ids := [one_id for one in groups for one_id in one.get("ids", ())]:
            query = {**query, "_id": {"$nin": ids}}  # It may be in both collections for a moment.
    total, estimated = by_code.total(), False
    if more:
        names = [queues] if isinstance(queues, str) else queues
        counter = QueueCounter(names, now, settings, bounds=bounds, sampler=Sampler(bounds, now))
        counted = (yield from counter.count(("failed",))).values()
        total = max(sum(one["failed"] for one in counted), total)
        estimated = any(one["estimated"] for one in counted)
    return DeadLetterStats(
        total=total,
        by_code=dict(by_code.most_common()),
        oldest_at=min(ends, default=None),
        newest_at=max(ends, default=None),
        estimated=estimated,
        examined=by_code.total(),
    )


# What was finished by minute


@dataclass(frozen=True)
class Finished:
    """Tasks done and failed by queue and minute, and the minutes that are estimates."""

    counts: Mapping[str, TasksByMinute]
    estimated: Mapping[str, frozenset[datetime]]


def first_minute(now: datetime) -> datetime:
    """Return the first of the last 60 minutes, of which the current one is the last."""
    return now.replace(second=0, microsecond=0) - (MINUTES - 1) * MINUTE


def finished_by_minute(
    since: datetime, now: datetime, settings: QueueSettings, *, bounds: Bounds, sampler: Sampler
) -> Operation[Finished]:
    """Count tasks done and failed since the start of a minute, by queue and minute."""
    counts: dict[str, TasksByMinute] = {"done": {}, "failed": {}}
    estimated: dict[str, set[datetime]] = {"done": set(), "failed": set()}
    places = [("done", Target.TASKS)]
    places += [("failed", target) for target in dict.fromkeys(paging.dead_letter_targets(settings))]
    for kind, target in places:
        counter = _MinuteCounter(kind, target, bounds=bounds)
        found, unclear = yield from counter.count(since, now)
        if unclear:
            sample = yield from sampler.read(target)
            found = counter.estimated(found, unclear, sample)
            estimated[kind] |= unclear
        for key, number in found.items():
            counts[kind][key] = counts[kind].get(key, 0) + number
    return Finished(counts, {kind: frozenset(minutes) for kind, minutes in estimated.items()})


class _MinuteCounter:
    """Counts tasks that are done, or failed, in one collection."""

    def __init__(self, kind: str, target: Target, *, bounds: Bounds) -> None:
        self._kind = kind
        self._target = target
        self._bounds = bounds
        self._field = "deadline_at" if kind == "done" else "updated_at"

    def count(
        self, since: datetime, now: datetime
    ) -> Operation[tuple[TasksByMinute, set[datetime]]]:
        """Count all minutes at once, or each with its share of the limit.

        Also returns the minutes that have more tasks than were counted.
        """
        minute = _minute_of(f"${self._field}", since)
        groups = yield Call(
            "aggregate",
            [
                {"$match": self._selection({"$gte": since})},
                *self._bounds.stages(),
                {"$group": {"_id": {"queue": "$queue", "minute": minute}, "count": {"$sum": 1}}},
            ],
            target=self._target,
        )
        if not self._bounds.exceeded(sum(one["count"] for one in groups)):
            return self._read(groups, since), set()
        number = int((now - since) / MINUTE) + 1
        share = self._bounds.share(number)
        groups = yield from _together(
            [self._one_minute(since, number, place, share) for place in range(number)],
            self._bounds.name(self._target),
            self._target,
        )
        seen: Counter[datetime] = Counter()
        for one in groups:
            seen[since + int(one["_id"]["minute"]) * MINUTE] += one["count"]
        unclear = {instant for instant, count in seen.items() if count > share}
        return self._read(groups, since), unclear

    def _one_minute(self, since: datetime, number: int, place: int, share: int) -> list[Document]:
        window = {"$gte": since + place * MINUTE}
        if place < number - 1:  # A writer's clock may be a little ahead of this one.
            window["$lt"] = since + (place + 1) * MINUTE
        group = {"queue": "$queue", "minute": {"$literal": place}}
        return [
            {"$match": self._selection(window)},
            {"$limit": share + 1},
            {"$group": {"_id": group, "count": {"$sum": 1}}},
        ]

    def estimated(
        self, counted: TasksByMinute, unclear: Collection[datetime], sample: CollectionSample
    ) -> TasksByMinute:
        """Estimate the minutes that have more tasks than were counted.

        A minute that is newer than the sample stays as counted.
        """
        total = sample.weight(lambda _: True)
        found = dict(counted)
        weights: Counter[tuple[str, datetime]] = Counter()
        for one in sample.items:
            if one.kind == self._kind and one.minute is not None:
                weights[one.queue, one.minute] += one.weight  # type: ignore[assignment]  # Counters may hold any number.
        for key, weight in weights.items():
            if key[1] in unclear:
                found[key] = max(found.get(key, 0), round(sample.total * weight / total))
        return found

    def _selection(self, window: Document) -> Document:
        if self._kind == "done":
            return {**filters.SUCCEEDED, "deadline_at": {**filters.IS_DATE, **window}}
        # A range on the first key of an index lets a query over all queues use that index.
        return {"queue": {"$gt": ""}, **filters.DEAD, "updated_at": window}

    @staticmethod
    def _read(groups: Iterable[Document], since: datetime) -> TasksByMinute:
        found: TasksByMinute = {}
        for one in groups:
            key = str(one["_id"]["queue"]), since + int(one["_id"]["minute"]) * MINUTE
            found[key] = found.get(key, 0) + one["count"]
        return found


def _minute_of(instant: Any, since: datetime) -> Document:
    return {"$floor": {"$divide": [{"$subtract": [instant, since]}, 60_000]}}


# Running tasks


def running(queue: str | None, now: datetime, *, limit: int) -> Operation[list[RunningTask]]:
    """Return the tasks that workers hold, sorted by the end of their lease."""
    names = [queue] if queue is not None else (yield from diagnostics.queue_names())
    found = yield from by_deadline(filters.LEASED, names, RUNNING_FIELDS, limit=limit)
    return [_running_task(document, now) for document in found]


def by_deadline(
    selection: Document,
    queues: Sequence[str],
    fields: Document,
    *,
    limit: int,
    newest: bool = False,
) -> Operation[list[Document]]:
    """Return the first tasks of some queues in the order of their deadlines, or the last ones.

    The index has the tasks of each queue in this order. MongoDB merges up to ``MOST_MERGED``
    queues without sorting.
    """
    found: list[Document] = []
    for start in range(0, len(queues), MOST_MERGED):
        here = {"queue": {"$in": list(queues[start : start + MOST_MERGED])}}
        order = [("deadline_at", -1 if newest else 1)]
        found += yield Call("find", {**here, **selection}, fields, sort=order, limit=limit)
    if len(queues) > MOST_MERGED:
        found.sort(key=lambda one: one["deadline_at"], reverse=newest)
    return found[:limit]


def _running_task(document: Document, now: datetime) -> RunningTask:
    get: Any = document.get
    expires_at = get("deadline_at")
    return trusted(
        RunningTask,
        id=document["_id"],
        queue=get("queue", DEFAULT_QUEUE),
        name=name_of(document),
        worker_id=get("worker_id"),
        attempt=get("attempts", 0),
        max_attempts=get("max_attempts", 0),
        started_at=get("started_at"),
        lease_expires_at=expires_at,
        overdue=expires_at is not None and expires_at <= now,
        progress=read_task(document).progress,
    )


# Latency


def latency(
    collection: str, since: datetime, queue: str | None = None, *, limit: int | None = None
) -> Operation[list[Latency]]:
    """Return percentiles of wait and run time, for tasks done since an instant.

    The wait is from enqueue to the first start; the run time is that of the last attempt. With a
    limit, only the newest tasks are measured.
    """
    names = [queue] if queue is not None else (yield from diagnostics.queue_names())
    counted = yield from newest_done(collection, names, since, {"queue": "$queue"}, limit=limit)
    more = limit is not None and sum(one["count"] for one in counted) > limit
    waits: dict[str, Counter[int]] = {}
    runs: dict[str, Counter[int]] = {}
    for one in counted:
        name = str(one["_id"]["queue"])
        waits.setdefault(name, Counter())[int(one["_id"]["wait"] or 0)] += one["count"]
        runs.setdefault(name, Counter())[int(one["_id"]["run"] or 0)] += one["count"]
    return [
        Latency(
            queue=name,
            done=waits[name].total(),
            **_percentiles("wait", waits[name]),
            **_percentiles("run", runs[name]),
            estimated=more,
        )
        for name in sorted(waits)
    ]


def newest_done(
    collection: str, names: Sequence[str], since: datetime, key: Document, *, limit: int | None
) -> Operation[list[Document]]:
    """Count the tasks of some queues done since an instant, by a key and classes of latency.

    With a limit, only the newest are counted, and one more if there is one.
    """
    began = {"$ifNull": [{"$arrayElemAt": ["$history.started_at", 0]}, "$started_at"]}
    group = {
        "_id": {
            **key,
            "wait": _class_of({"$subtract": [began, "$created_at"]}),
            "run": _class_of({"$subtract": ["$finished_at", "$started_at"]}),
        },
        "count": {"$sum": 1},
    }
    done = {**filters.SUCCEEDED, "deadline_at": {**filters.IS_DATE, "$gte": since}}
    newest: Document = {"$sort": {"deadline_at": -1}}
    parts: list[list[Document]] = []
    for start in range(0, len(names), MOST_MERGED):
        here = {"queue": {"$in": names[start : start + MOST_MERGED]}}
        stages = [] if limit is None else [newest, {"$limit": limit + 1}]
        parts.append([{"$match": {**here, **done}}, *stages])
    if not parts:
        return []
    first, *others = parts
    unions = [{"$unionWith": {"coll": collection, "pipeline": one}} for one in others]
    last = [newest, {"$limit": limit + 1}] if limit is not None and others else []
    counted: list[Document] = yield Call("aggregate", [*first, *unions, *last, {"$group": group}])
    return counted


def _class_of(milliseconds: Document) -> Document:
    at_least_one = {"$max": [1, milliseconds]}
    return {"$floor": {"$multiply": [CLASSES_PER_TEN, {"$log10": at_least_one}]}}


def _percentiles(name: str, counts: Counter[int]) -> dict[str, Any]:
    values = percentiles(counts, (50, 95, 99))
    return {f"{name}_p{share}": value for share, value in zip((50, 95, 99), values, strict=True)}


def percentiles(counts: Counter[int], shares: Iterable[int]) -> list[float]:
    """Return percentiles in seconds from the counts of classes: the middle of each class."""
    found = []
    for share in shares:
        left = counts.total() * share / 100
        for number in sorted(counts):
            left -= counts[number]
            if left <= 0:
                middle = 10 ** ((number + 0.5) / CLASSES_PER_TEN)
                found.append(round(middle / MILLISECONDS, 4))
                break
    return found
