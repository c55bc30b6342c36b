"""What was finished in each minute of the last hour, read once per minute and remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from microqueue.arguments import check_count, check_names, refused
from microqueue.async_queue import AsyncQueue
from microqueue.core import QueueCore, core_of
from microqueue.dlq import DeadLetterFilter
from microqueue.durations import Duration, check_duration
from microqueue.model import Model
from microqueue.operations import (
    diagnostics,
    lookup,
    maintenance,
    paging,
    pauses,
    search,
    stats,
    workers,
)
from microqueue.operations.call import Document, Operation
from microqueue.operations.search import SearchPage
from microqueue.operations.server_clock import read_clock
from microqueue.operations.stats import (
    MINUTE,
    MINUTES,
    Bounds,
    Finished,
    QueueCounter,
    Sampler,
    latency,
    queue_stats,
)
from microqueue.queue import Queue
from microqueue.reports import (
    Latency,
    MinuteCounts,
    QueueOverview,
    QueueStats,
    RunningTask,
    WorkerInfo,
)
from microqueue.settings import QueueSettings
from microqueue.sweeper import SweepReport
from microqueue.task import TaskId
from microqueue.task_filter import TaskFilter
from microqueue.task_ids import candidate_ids

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


class Held(Model):
    """A task as its worker's row shows it."""

    id: TaskId
    queue: str
    started_at: datetime | None
    lease_expires_at: datetime | None


class WorkerView(Model):
    """A registered worker, whether its heartbeat goes on, and what it holds."""

    id: str
    host: str | None
    pid: int | None
    queues: Sequence[str]
    concurrency: int | None
    handled: int | None
    running: int | None
    started_at: datetime | None
    heartbeat_at: datetime | None
    gone_at: datetime | None
    alive: bool
    holds: Sequence[Held]


class Overview(Model):
    """How everything stands at ``at``, by the server's clock."""

    at: datetime
    queues: Sequence[QueueOverview]
    minutes: MinuteCounts
    workers: Sequence[WorkerView]
    running: Sequence[RunningTask]
    last_sweep: SweepReport | None
    last_active_sweep: SweepReport | None


class TaskPage(Model):
    """Some documents of tasks; not ``complete``: the search stopped early to stay quick."""

    at: datetime
    documents: Sequence[Any]
    next_cursor: str | None
    complete: bool


def task_page(now: datetime, found: SearchPage) -> TaskPage:
    """Put a page together."""
    return TaskPage.trusted(
        at=now,
        documents=found.documents,
        next_cursor=found.next_cursor,
        complete=found.complete,
    )


def queue_overview(name: str, counted: Document, minutes: MinuteCounts) -> QueueOverview:
    """Put together what was counted of one queue."""
    hours = {"done_last_hour": minutes.done_estimated, "failed_last_hour": minutes.failed_estimated}
    estimated = [*counted.get("estimated", ()), *(field for field, some in hours.items() if some)]
    return QueueOverview(
        queue=name,
        done_last_hour=sum(minutes.done.get(name, ())),
        failed_last_hour=sum(minutes.failed.get(name, ())),
        **{**counted, "estimated": tuple(estimated)},
    )


def worker_view(info: WorkerInfo, running: Sequence[RunningTask], now: datetime) -> WorkerView:
    """Show a worker with what it holds."""
    gone_at = info.gone_at()
    fields = set(WorkerView.model_fields) & set(WorkerInfo.model_fields)
    return WorkerView.trusted(
        **{name: getattr(info, name) for name in fields},
        gone_at=gone_at,
        alive=gone_at > now,
        holds=[
            Held.trusted(
                id=task.id,
                queue=task.queue,
                started_at=task.started_at,
                lease_expires_at=task.lease_expires_at,
            )
            for task in running
            if task.worker_id == info.id
        ],
    )


def read_report(document: Document | None) -> SweepReport | None:
    """Read a stored report; what another version stored beside it is left out."""
    if document is None:
        return None
    known = {name: document[name] for name in SweepReport.model_fields if name in document}
    return SweepReport(**known)


__all__ = [
    "AsyncInsights", "Held", "Insights", "Latency", "MinuteCounts", "Overview", "QueueOverview",
    "RunningTask", "TaskFilter", "TaskPage", "WorkerView",
]  # fmt: skip

MOST_RUNNING = 500
OVERVIEW_KINDS = ("ready", "delayed", "processing", "failed")
Shown: TypeAlias = Callable[[Any], Any] | None
Made: TypeAlias = Callable[[Document, datetime], Any] | None
Enough: TypeAlias = Callable[[], bool]


class InsightOperations:
    """The operations, composed for a queue's collection and settings."""

    def __init__(self, core: QueueCore[Any]) -> None:
        self._core = core
        self._minutes = Minutes()

    def _now(self) -> Operation[datetime]:
        return (yield from read_clock(self._core.clock))

    def queue_names(self) -> Operation[list[str]]:
        """List all queues: those with tasks, those with dead letters only, and the given one."""
        names = yield from diagnostics.every_queue(self._core.settings)
        return sorted({self._core.name, *names})

    def overview(self, *, exact: bool) -> Operation[Overview]:
        """Perform :meth:`Insights.overview`."""
        now = yield from self._now()
        names = yield from self.queue_names()
        bounds = self._core.count_bounds(exact=exact)
        sampler = Sampler(bounds, now)
        counter = QueueCounter(names, now, self._core.settings, bounds=bounds, sampler=sampler)
        counted = yield from counter.count(OVERVIEW_KINDS)
        minutes = yield from self._minutes.read(
            now, self._core.settings, bounds=bounds, sampler=sampler
        )
        running = yield from stats.running(None, now, limit=MOST_RUNNING)
        registered = yield from workers.list_workers(self._core.collections.name)
        last, last_active = yield from self.last_sweeps()
        found = yield from pauses.list_paused(self._core.collections.name)
        paused = {one.queue for one in found}
        names = sorted({*names, *paused})
        return Overview.trusted(
            at=now,
            queues=[
                queue_overview(name, {**counted.get(name, {}), "paused": name in paused}, minutes)
                for name in names
            ],
            minutes=minutes,
            workers=[worker_view(one, running, now) for one in registered],
            running=running,
            last_sweep=last,
            last_active_sweep=last_active,
        )

    def stats(self, queues: Iterable[str] | None, *, exact: bool) -> Operation[list[QueueStats]]:
        """Perform :meth:`Insights.stats`."""
        names = None if queues is None else check_names("queues", queues)
        now = yield from self._now()
        chosen = (yield from self.queue_names()) if names is None else names
        bounds = self._core.count_bounds(exact=exact)
        return (yield from queue_stats(chosen, now, self._core.settings, bounds=bounds))

    def running(
        self, queue: str | None, limit: int
    ) -> Operation[tuple[datetime, list[RunningTask]]]:
        """Perform :meth:`Insights.running`."""
        now = yield from self._now()
        found = yield from stats.running(queue, now, limit=check_count("limit", limit))
        return now, found

    def latency(
        self, since: Duration, queue: str | None, *, exact: bool
    ) -> Operation[list[Latency]]:
        """Perform :meth:`Insights.latency`."""
        period = check_duration("since", since)
        now = yield from self._now()
        limit = self._core.count_bounds(exact=exact).limit
        return (yield from latency(now - period, queue, limit=limit))

    def last_sweeps(self) -> Operation[tuple[SweepReport | None, SweepReport | None]]:
        """Perform :meth:`Insights.last_sweeps`."""
        last, active = yield from maintenance.read_report(self._core.collections.name)
        return read_report(last), read_report(active)

    def tasks(
        self, which: TaskFilter, limit: int, cursor: str | None, shown: Shown, made: Made
    ) -> Operation[TaskPage]:
        """Perform :meth:`Insights.tasks`."""
        now = yield from self._now()
        queues = [] if which.queue is not None else (yield from self.queue_names())
        found = yield from search.page(
            which,
            queues=queues,
            now=now,
            limit=check_count("limit", limit),
            cursor=cursor,
            settings=self._core.settings,
            shown=shown,
            made=lambda document: document if made is None else made(document, now),
        )
        return task_page(now, found)

    def letters(
        self,
        queue: str | None,
        which: DeadLetterFilter,
        *,
        limit: int,
        cursor: str | None,
        shown: Shown,
        made: Made,
        enough: Enough,
    ) -> Operation[TaskPage]:
        """Perform :meth:`Insights.letters`."""
        now = yield from self._now()
        found = yield from search.dead_letter_page(
            (yield from self.queue_names()) if queue is None else queue,
            which,
            limit=check_count("limit", limit),
            cursor=cursor,
            settings=self._core.settings,
            shown=shown or str,
            made=lambda document: document if made is None else made(document, now),
            enough=enough,
        )
        return task_page(now, found)

    def find(self, text: str) -> Operation[Document | None]:
        """Perform :meth:`Insights.find`."""
        return (yield from lookup.find_first(candidate_ids(text), self._core.settings))


class Insights:
    """The views of a :class:`Queue`'s collection. Safe to share between threads."""

    def __init__(self, queue: Queue[Any]) -> None:
        if not isinstance(queue, Queue):
            raise refused("queue", queue, "give a Queue; for an AsyncQueue there is AsyncInsights")
        self._core = core_of(queue)
        self._operations = InsightOperations(self._core)

    def overview(self, *, exact: bool = False) -> Overview:
        """Read how all queues, workers and the sweeper stand.

        Counts above ``settings.count_limit`` are estimates, which ``estimated`` names; ``exact``
        counts everything.
        """
        return self._core.run(self._operations.overview(exact=exact))

    def stats(
        self, queues: Iterable[str] | None = None, *, exact: bool = False
    ) -> list[QueueStats]:
        """Count the tasks of all queues, or of some, with few queries for all of them.

        All queues together are counted up to ``settings.count_limit`` of each status. Beyond it
        each queue has its share of the limit, and what is larger is an estimate, which
        ``estimated`` names; ``exact`` counts everything.
        """
        return self._core.run(self._operations.stats(queues, exact=exact))

    def running(self, queue: str | None = None, *, limit: int = 200) -> Sequence[RunningTask]:
        """Read the tasks that workers hold, those whose lease ends soonest first."""
        return self._core.run(self._operations.running(queue, limit))[1]

    def latency(
        self,
        queue: str | None = None,
        *,
        since: Duration = timedelta(hours=1),
        exact: bool = False,
    ) -> list[Latency]:
        """Measure what the tasks took that were done in the last hour, or another period.

        One group by MongoDB itself, which sends a few numbers, right to within 6 %. It takes the
        newest ``settings.count_limit`` tasks of all queues; if there are more, the result is
        ``estimated``. ``exact`` takes all.
        """
        return self._core.run(self._operations.latency(since, queue, exact=exact))

    def last_sweeps(self) -> tuple[SweepReport | None, SweepReport | None]:
        """Read the report of the last sweep, and of the last that moved something."""
        return self._core.run(self._operations.last_sweeps())

    def tasks(
        self,
        which: TaskFilter | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
        shown: Shown = None,
        made: Made = None,
    ) -> TaskPage:
        """Read a page of tasks, newest first; ``shown`` masks what text must not find.

        ``made`` makes of each document, and the server's time, what the page holds instead, so
        that large ones are held one after the other.
        """
        return self._core.run(
            self._operations.tasks(which or TaskFilter(), limit, cursor, shown, made)
        )

    def letters(
        self,
        queue: str | None,
        which: DeadLetterFilter,
        *,
        limit: int = 50,
        cursor: str | None = None,
        shown: Shown = None,
        made: Made = None,
        enough: Enough = paging.never_enough,
    ) -> TaskPage:
        """Read a page of dead letters, newest first; ``shown`` masks their messages.

        They are those of one queue; ``None`` means of all.

        ``made`` is as in :meth:`tasks`; ``enough`` may end the page after any letter.
        """
        options: dict[str, Any] = {"shown": shown, "made": made, "enough": enough}
        return self._core.run(
            self._operations.letters(queue, which, limit=limit, cursor=cursor, **options)
        )

    def queue_names(self) -> list[str]:
        """List all queues: those with tasks, those with dead letters only, and the given one."""
        return self._core.run(self._operations.queue_names())

    def find(self, text: str) -> Document | None:
        """Find a task by its id as people write it."""
        return self._core.run(self._operations.find(text))


class AsyncInsights:
    """The views of an :class:`AsyncQueue`'s collection: as :class:`Insights`, awaited."""

    def __init__(self, queue: AsyncQueue[Any]) -> None:
        if not isinstance(queue, AsyncQueue):
            raise refused("queue", queue, "give an AsyncQueue; for a Queue there is Insights")
        self._core = core_of(queue)
        self._operations = InsightOperations(self._core)

    async def overview(self, *, exact: bool = False) -> Overview:
        """See :meth:`Insights.overview`."""
        return await self._core.run(self._operations.overview(exact=exact))

    async def stats(
        self, queues: Iterable[str] | None = None, *, exact: bool = False
    ) -> list[QueueStats]:
        """See :meth:`Insights.stats`."""
        return await self._core.run(self._operations.stats(queues, exact=exact))

    async def running(self, queue: str | None = None, *, limit: int = 200) -> Sequence[RunningTask]:
        """See :meth:`Insights.running`."""
        return (await self._core.run(self._operations.running(queue, limit)))[1]

    async def latency(
        self,
        queue: str | None = None,
        *,
        since: Duration = timedelta(hours=1),
        exact: bool = False,
    ) -> list[Latency]:
        """See :meth:`Insights.latency`."""
        return await self._core.run(self._operations.latency(since, queue, exact=exact))

    async def last_sweeps(self) -> tuple[SweepReport | None, SweepReport | None]:
        """See :meth:`Insights.last_sweeps`."""
        return await self._core.run(self._operations.last_sweeps())

    async def tasks(
        self,
        which: TaskFilter | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
        shown: Shown = None,
        made: Made = None,
    ) -> TaskPage:
        """See :meth:`Insights.tasks`."""
        return await self._core.run(
            self._operations.tasks(which or TaskFilter(), limit, cursor, shown, made)
        )

    async def letters(
        self,
        queue: str | None,
        which: DeadLetterFilter,
        *,
        limit: int = 50,
        cursor: str | None = None,
        shown: Shown = None,
        made: Made = None,
        enough: Enough = paging.never_enough,
    ) -> TaskPage:
        """See :meth:`Insights.letters`."""
        options: dict[str, Any] = {"shown": shown, "made": made, "enough": enough}
        return await self._core.run(
            self._operations.letters(queue, which, limit=limit, cursor=cursor, **options)
        )

    async def queue_names(self) -> list[str]:
        """See :meth:`Insights.queue_names`."""
        return await self._core.run(self._operations.queue_names())

    async def find(self, text: str) -> Document | None:
        """See :meth:`Insights.find`."""
        return await self._core.run(self._operations.find(text))
