"""Insights: read-only views of all queues of a collection, for command line, metrics and page.

    Insights(queue).overview()

Looking leaves no trace: nothing here claims, touches a lease, or writes. Every question is
asked on an index, and lists are paged by cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from microqueue.arguments import check_count, check_names, refused
from microqueue.async_queue import AsyncQueue
from microqueue.core import QueueCore
from microqueue.durations import Duration, check_duration
from microqueue.minutes import Minutes
from microqueue.operations import (
    browse,
    control,
    examine,
    gather,
    insights,
    inspect,
    sweep_report,
    workers,
)
from microqueue.operations.call import Document, Operation
from microqueue.operations.dead_letters import DeadLetterFilter
from microqueue.operations.insights import MinuteCounts, QueueOverview, RunningTask
from microqueue.operations.latency import Latency, latency
from microqueue.operations.matching import TaskFilter
from microqueue.operations.stats import QueueCounter, QueueStats, Sampler, queue_stats
from microqueue.operations.time import read_clock
from microqueue.overview import (
    Held,
    Overview,
    TaskPage,
    WorkerView,
    queue_overview,
    read_report,
    task_page,
    worker_view,
)
from microqueue.queue import Queue
from microqueue.sweeper import SweepReport
from microqueue.task_ids import candidate_ids

__all__ = [
    "AsyncInsights", "Held", "Insights", "Latency", "MinuteCounts", "Overview", "QueueOverview",
    "RunningTask", "TaskFilter", "TaskPage", "WorkerView",
]  # fmt: skip

MOST_RUNNING = 500
OVERVIEW_KINDS = ("ready", "delayed", "processing", "failed")
Shown: TypeAlias = Callable[[Any], Any] | None
Made: TypeAlias = Callable[[Document, datetime], Any] | None
Enough: TypeAlias = Callable[[], bool]


class _InsightOperations:
    """The operations, composed for a queue's collection and settings."""

    def __init__(self, core: QueueCore[Any]) -> None:
        self._core = core
        self._minutes = Minutes()

    def _now(self) -> Operation[datetime]:
        return (yield from read_clock(self._core.clock))

    def _names(self) -> Operation[list[str]]:
        """List all queues: those with tasks, those with dead letters only, and the given one."""
        names = yield from examine.every_queue(self._core.settings)
        return sorted({self._core.name, *names})

    def _overview(self, *, exact: bool) -> Operation[Overview]:
        now = yield from self._now()
        names = yield from self._names()
        bounds = self._core.count_bounds(exact=exact)
        sampler = Sampler(bounds, now)
        counter = QueueCounter(names, now, self._core.settings, bounds=bounds, sampler=sampler)
        counted = yield from counter.count(OVERVIEW_KINDS)
        minutes = yield from self._minutes.read(
            now, self._core.settings, bounds=bounds, sampler=sampler
        )
        running = yield from insights.running(None, now, limit=MOST_RUNNING)
        registered = yield from workers.list_workers(self._core.collections.name)
        last, last_active = yield from self._sweeps()
        pauses = yield from control.list_paused(self._core.collections.name)
        paused = {one.queue for one in pauses}
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

    def _stats(self, queues: Iterable[str] | None, *, exact: bool) -> Operation[list[QueueStats]]:
        names = None if queues is None else check_names("queues", queues)
        now = yield from self._now()
        chosen = (yield from self._names()) if names is None else names
        bounds = self._core.count_bounds(exact=exact)
        return (yield from queue_stats(chosen, now, self._core.settings, bounds=bounds))

    def _running(
        self, queue: str | None, limit: int
    ) -> Operation[tuple[datetime, list[RunningTask]]]:
        now = yield from self._now()
        found = yield from insights.running(queue, now, limit=check_count("limit", limit))
        return now, found

    def _latency(
        self, since: Duration, queue: str | None, *, exact: bool
    ) -> Operation[list[Latency]]:
        period = check_duration("since", since)
        now = yield from self._now()
        limit = self._core.count_bounds(exact=exact).limit
        return (yield from latency(now - period, queue, limit=limit))

    def _sweeps(self) -> Operation[tuple[SweepReport | None, SweepReport | None]]:
        last, active = yield from sweep_report.read(self._core.collections.name)
        return read_report(last), read_report(active)

    def _tasks(
        self, which: TaskFilter, limit: int, cursor: str | None, shown: Shown, made: Made
    ) -> Operation[TaskPage]:
        now = yield from self._now()
        queues = [] if which.queue is not None else (yield from self._names())
        found = yield from browse.page(
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

    def _letters(
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
        now = yield from self._now()
        found = yield from browse.letters(
            (yield from self._names()) if queue is None else queue,
            which,
            limit=check_count("limit", limit),
            cursor=cursor,
            settings=self._core.settings,
            shown=shown or str,
            made=lambda document: document if made is None else made(document, now),
            enough=enough,
        )
        return task_page(now, found)

    def _find(self, text: str) -> Operation[Document | None]:
        return (yield from inspect.find_first(candidate_ids(text), self._core.settings))


class Insights(_InsightOperations):
    """The views of a :class:`Queue`'s collection. Safe to share between threads."""

    def __init__(self, queue: Queue[Any]) -> None:
        if not isinstance(queue, Queue):
            raise refused("queue", queue, "give a Queue; for an AsyncQueue there is AsyncInsights")
        super().__init__(queue)
        self._run = queue.run

    def overview(self, *, exact: bool = False) -> Overview:
        """Read how all queues, workers and the sweeper stand.

        Counts above ``settings.count_limit`` are estimates, which ``estimated`` names; ``exact``
        counts everything.
        """
        return self._run(self._overview(exact=exact))

    def stats(
        self, queues: Iterable[str] | None = None, *, exact: bool = False
    ) -> list[QueueStats]:
        """Count the tasks of all queues, or of some, with few queries for all of them.

        All queues together are counted up to ``settings.count_limit`` of each status. Beyond it
        each queue has its share of the limit, and what is larger is an estimate, which
        ``estimated`` names; ``exact`` counts everything.
        """
        return self._run(self._stats(queues, exact=exact))

    def running(self, queue: str | None = None, *, limit: int = 200) -> Sequence[RunningTask]:
        """Read the tasks that workers hold, those whose lease ends soonest first."""
        return self._run(self._running(queue, limit))[1]

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
        return self._run(self._latency(since, queue, exact=exact))

    def last_sweeps(self) -> tuple[SweepReport | None, SweepReport | None]:
        """Read the report of the last sweep, and of the last that moved something."""
        return self._run(self._sweeps())

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
        return self._run(self._tasks(which or TaskFilter(), limit, cursor, shown, made))

    def letters(
        self,
        queue: str | None,
        which: DeadLetterFilter,
        *,
        limit: int = 50,
        cursor: str | None = None,
        shown: Shown = None,
        made: Made = None,
        enough: Enough = gather.never,
    ) -> TaskPage:
        """Read a page of dead letters, newest first; ``shown`` masks their messages.

        They are those of one queue; ``None`` means of all.

        ``made`` is as in :meth:`tasks`; ``enough`` may end the page after any letter.
        """
        options: dict[str, Any] = {"shown": shown, "made": made, "enough": enough}
        return self._run(self._letters(queue, which, limit=limit, cursor=cursor, **options))

    def queue_names(self) -> list[str]:
        """List all queues: those with tasks, those with dead letters only, and the given one."""
        return self._run(self._names())

    def find(self, text: str) -> Document | None:
        """Find a task by its id as people write it."""
        return self._run(self._find(text))


class AsyncInsights(_InsightOperations):
    """The views of an :class:`AsyncQueue`'s collection: as :class:`Insights`, awaited."""

    def __init__(self, queue: AsyncQueue[Any]) -> None:
        if not isinstance(queue, AsyncQueue):
            raise refused("queue", queue, "give an AsyncQueue; for a Queue there is Insights")
        super().__init__(queue)
        self._run = queue.run

    async def overview(self, *, exact: bool = False) -> Overview:
        """See :meth:`Insights.overview`."""
        return await self._run(self._overview(exact=exact))

    async def stats(
        self, queues: Iterable[str] | None = None, *, exact: bool = False
    ) -> list[QueueStats]:
        """See :meth:`Insights.stats`."""
        return await self._run(self._stats(queues, exact=exact))

    async def running(self, queue: str | None = None, *, limit: int = 200) -> Sequence[RunningTask]:
        """See :meth:`Insights.running`."""
        return (await self._run(self._running(queue, limit)))[1]

    async def latency(
        self,
        queue: str | None = None,
        *,
        since: Duration = timedelta(hours=1),
        exact: bool = False,
    ) -> list[Latency]:
        """See :meth:`Insights.latency`."""
        return await self._run(self._latency(since, queue, exact=exact))

    async def last_sweeps(self) -> tuple[SweepReport | None, SweepReport | None]:
        """See :meth:`Insights.last_sweeps`."""
        return await self._run(self._sweeps())

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
        return await self._run(self._tasks(which or TaskFilter(), limit, cursor, shown, made))

    async def letters(
        self,
        queue: str | None,
        which: DeadLetterFilter,
        *,
        limit: int = 50,
        cursor: str | None = None,
        shown: Shown = None,
        made: Made = None,
        enough: Enough = gather.never,
    ) -> TaskPage:
        """See :meth:`Insights.letters`."""
        options: dict[str, Any] = {"shown": shown, "made": made, "enough": enough}
        return await self._run(self._letters(queue, which, limit=limit, cursor=cursor, **options))

    async def queue_names(self) -> list[str]:
        """See :meth:`Insights.queue_names`."""
        return await self._run(self._names())

    async def find(self, text: str) -> Document | None:
        """See :meth:`Insights.find`."""
        return await self._run(self._find(text))
