"""Read-only views of a collection: overview, rates, running tasks, pages of tasks.

A view never claims or writes. Counts are exact up to ``settings.count_limit`` and estimates above
it. :class:`_InsightOperations` composes the views for :class:`Insights` and
:class:`AsyncInsights`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from microqueue.arguments import (
    check_callback,
    check_count,
    check_name,
    check_names,
    check_queue,
    check_text,
    invalid_argument,
)
from microqueue.async_queue import AsyncQueue
from microqueue.binding import Binding
from microqueue.core import QueueCore, core_of
from microqueue.dead_letter_models import DeadLetterFilter, check_dead_letter_filter
from microqueue.deprecation import renamed_arguments, renamed_attributes, renamed_names
from microqueue.durations import Duration, check_duration
from microqueue.model import Model, revalidated, trusted
from microqueue.operations import (
    bindings,
    diagnostics,
    lookup,
    maintenance,
    names,
    paging,
    pauses,
    search,
    stats,
    topics,
    workers,
)
from microqueue.operations.call import Document, Operation
from microqueue.operations.paging import check_cursor
from microqueue.operations.search import SearchPage
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
    NameList,
    NameStats,
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

__all__ = [
    "AsyncInsights",
    "InFlightTask",
    "Insights",
    "Latency",
    "MinuteCounts",
    "NameList",
    "NameStats",
    "Overview",
    "QueueOverview",
    "RunningTask",
    "TaskFilter",
    "TaskPage",
    "TopicList",
    "TopicView",
    "WorkerView",
]

if not TYPE_CHECKING:
    __getattr__ = renamed_names(__name__, {"Held": "InFlightTask"})

MOST_RUNNING = 500
"""How many running tasks an overview has."""
OVERVIEW_KINDS = ("ready", "delayed", "processing", "failed")
Mask: TypeAlias = Callable[[Any], Any]
Convert: TypeAlias = Callable[[Document, datetime], Any]
Stop: TypeAlias = Callable[[], bool]
KINDS = ("done", "failed")
NOTHING = Finished({kind: {} for kind in KINDS}, {kind: frozenset() for kind in KINDS})


class _Minutes:
    """Counts of finished tasks by minute, for the last hour.

    Past minutes are remembered; only the current one and the last are read again. So the cost of
    a page that stays open depends on the work of the last two minutes.
    """

    def __init__(self) -> None:
        # One tuple, replaced whole, so that threads never see half of a new reading.
        self._known: tuple[datetime, Finished] | None = None

    def read(
        self, now: datetime, settings: QueueSettings, *, bounds: Bounds, sampler: Sampler
    ) -> Operation[MinuteCounts]:
        """Return the counts of the last hour; an exact count reads all of it again."""
        current = now.replace(second=0, microsecond=0)
        first = stats.first_minute(now)
        since, old = first, NOTHING
        if self._known is not None and bounds.limit is not None:
            read_at, old = self._known
            since = max(first, read_at - MINUTE)  # A writer's clock may be a little behind.
        fresh = yield from stats.finished_by_minute(
            since, now, settings, bounds=bounds, sampler=sampler
        )
        counts: dict[str, stats.TasksByMinute] = {}
        estimated: dict[str, frozenset[datetime]] = {}
        for kind in KINDS:
            kept = {key: n for key, n in old.counts[kind].items() if first <= key[1] < since}
            counts[kind] = {**kept, **fresh.counts[kind]}
            kept_minutes = {minute for minute in old.estimated[kind] if first <= minute < since}
            estimated[kind] = fresh.estimated[kind] | kept_minutes
        self._known = (current, Finished(counts, estimated))
        return trusted(
            MinuteCounts,
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


class InFlightTask(Model):
    """A task that a worker holds."""

    id: TaskId
    queue: str
    started_at: datetime | None
    lease_expires_at: datetime | None


class WorkerView(Model):
    """A registered worker: whether it is alive, and the tasks that it holds."""

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
    holds: Sequence[InFlightTask]


class Overview(Model):
    """The state of all queues, workers and the sweeper at ``at``, by the server's clock."""

    at: datetime
    queues: Sequence[QueueOverview]
    minutes: MinuteCounts
    workers: Sequence[WorkerView]
    running: Sequence[RunningTask]
    last_sweep: SweepReport | None
    last_active_sweep: SweepReport | None


class TaskPage(Model):
    """A page of documents. If it is not ``complete``, the search stopped early to stay quick."""

    at: datetime
    documents: Sequence[Any]
    next_cursor: str | None
    complete: bool


class TopicView(Model):
    """What a topic keeps, and the queues that are bound to it."""

    topic: str
    messages: int
    bytes: int
    max_messages: int | None
    """``None``: the topic keeps no messages."""
    max_bytes: int | None
    oldest_at: datetime | None
    """When the oldest message was published that it still has."""
    newest_at: datetime | None
    bindings: Sequence[Binding]


class TopicList(Model):
    """The first topics by name, of ``total``."""

    at: datetime
    topics: Sequence[TopicView]
    total: int


def task_page(now: datetime, found: SearchPage) -> TaskPage:
    """Make a page of what a search found."""
    return trusted(
        TaskPage,
        at=now,
        documents=found.documents,
        next_cursor=found.next_cursor,
        complete=found.complete,
    )


def queue_overview(name: str, counted: Document, minutes: MinuteCounts) -> QueueOverview:
    """Combine the counts of one queue."""
    hours = {"done_last_hour": minutes.done_estimated, "failed_last_hour": minutes.failed_estimated}
    estimated = [*counted.get("estimated", ()), *(field for field, some in hours.items() if some)]
    return QueueOverview(
        queue=name,
        done_last_hour=sum(minutes.done.get(name, ())),
        failed_last_hour=sum(minutes.failed.get(name, ())),
        **{**counted, "estimated": tuple(estimated)},
    )


def worker_view(info: WorkerInfo, running: Sequence[RunningTask], now: datetime) -> WorkerView:
    """Combine a worker with the tasks that it holds."""
    gone_at = info.gone_at()
    fields = set(WorkerView.model_fields) & set(WorkerInfo.model_fields)
    return trusted(
        WorkerView,
        **{name: getattr(info, name) for name in fields},
        gone_at=gone_at,
        alive=gone_at > now,
        holds=[
            trusted(
                InFlightTask,
                id=task.id,
                queue=task.queue,
                started_at=task.started_at,
                lease_expires_at=task.lease_expires_at,
            )
            for task in running
            if task.worker_id == info.id
        ],
    )


def parse_report(document: Document | None) -> SweepReport | None:
    """Read a stored report; unknown fields, of another version, are left out."""
    if document is None:
        return None
    known = {name: document[name] for name in SweepReport.model_fields if name in document}
    return SweepReport(**known)


class _InsightOperations:
    """The views of a queue's collection, as operations."""

    def __init__(self, core: QueueCore[Any]) -> None:
        self._core = core
        self._minutes = _Minutes()

    def queue_names(self) -> Operation[list[str]]:
        """Perform :meth:`Insights.queue_names`."""
        names = yield from diagnostics.every_queue(self._core.settings)
        return sorted({self._core.name, *names})

    def overview(self, *, exact: bool) -> Operation[Overview]:
        """Perform :meth:`Insights.overview`."""
        settings, collection = self._core.settings, self._core.collections.name
        now = yield from self._core.now()
        names = yield from self.queue_names()
        bounds = self._core.count_bounds(exact=exact)
        sampler = Sampler(bounds, now)
        counter = QueueCounter(names, now, settings, bounds=bounds, sampler=sampler)
        counted = yield from counter.count(OVERVIEW_KINDS)
        minutes = yield from self._minutes.read(now, settings, bounds=bounds, sampler=sampler)
        running = yield from stats.running(None, now, limit=MOST_RUNNING)
        registered = yield from workers.list_workers(collection)
        last, last_active = yield from self.last_sweeps()
        paused = {one.queue for one in (yield from pauses.list_paused(collection))}
        return trusted(
            Overview,
            at=now,
            queues=[
                queue_overview(name, {**counted.get(name, {}), "paused": name in paused}, minutes)
                for name in sorted({*names, *paused})
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
        now = yield from self._core.now()
        chosen = (yield from self.queue_names()) if names is None else names
        bounds = self._core.count_bounds(exact=exact)
        return (yield from queue_stats(chosen, now, self._core.settings, bounds=bounds))

    def running(self, queue: str | None, limit: int) -> Operation[list[RunningTask]]:
        """Perform :meth:`Insights.running`."""
        check_queue(queue)
        check_count("limit", limit)
        now = yield from self._core.now()
        return (yield from stats.running(queue, now, limit=limit))

    def latency(
        self, since: Duration, queue: str | None, *, exact: bool
    ) -> Operation[list[Latency]]:
        """Perform :meth:`Insights.latency`."""
        period = check_duration("since", since)
        check_queue(queue)
        now = yield from self._core.now()
        limit = self._core.count_bounds(exact=exact).limit
        return (yield from latency(self._core.collections.name, now - period, queue, limit=limit))

    def by_name(
        self, since: Duration, queue: str | None, *, limit: int, exact: bool
    ) -> Operation[NameList]:
        """Perform :meth:`Insights.by_name`."""
        period, most = check_duration("since", since), check_count("limit", limit)
        queues = None if queue is None else [check_name(queue)]
        now = yield from self._core.now()
        found = yield from names.by_name(
            (yield from self.queue_names()) if queues is None else queues,
            now - period,
            now,
            self._core.settings,
            bounds=self._core.count_bounds(exact=exact),
        )
        return trusted(NameList, at=now, since=now - period, names=found[:most], total=len(found))

    def last_sweeps(self) -> Operation[tuple[SweepReport | None, SweepReport | None]]:
        """Perform :meth:`Insights.last_sweeps`."""
        last, active = yield from maintenance.read_report(self._core.collections.name)
        return parse_report(last), parse_report(active)

    def tasks(
        self,
        which: TaskFilter,
        *,
        limit: int,
        cursor: str | None,
        mask: Mask | None,
        convert: Convert | None,
    ) -> Operation[TaskPage]:
        """Perform :meth:`Insights.tasks`."""
        if not isinstance(which, TaskFilter):
            raise invalid_argument("which", which, "give a TaskFilter")
        which = revalidated(which)
        check_callback("mask", mask)
        check_callback("convert", convert)
        check_count("limit", limit)
        check_cursor(cursor)
        now = yield from self._core.now()
        queues = [] if which.queue is not None else (yield from self.queue_names())
        found = yield from search.page(
            which,
            queues=queues,
            now=now,
            limit=limit,
            cursor=cursor,
            settings=self._core.settings,
            mask=mask,
            convert=lambda document: document if convert is None else convert(document, now),
        )
        return task_page(now, found)

    def dead_letters(
        self,
        queue: str | None,
        which: DeadLetterFilter,
        *,
        limit: int,
        cursor: str | None,
        mask: Mask | None,
        convert: Convert | None,
        stop: Stop,
    ) -> Operation[TaskPage]:
        """Perform :meth:`Insights.dead_letters`."""
        check_queue(queue)
        which = check_dead_letter_filter(which)
        for argument, given in (("mask", mask), ("convert", convert)):
            check_callback(argument, given)
        if not callable(stop):
            raise invalid_argument("stop", stop, "give a function")
        check_count("limit", limit)
        check_cursor(cursor)
        now = yield from self._core.now()
        found = yield from search.dead_letter_page(
            (yield from self.queue_names()) if queue is None else queue,
            which,
            limit=limit,
            cursor=cursor,
            settings=self._core.settings,
            mask=mask or str,
            convert=lambda document: document if convert is None else convert(document, now),
            enough=stop,
        )
        return task_page(now, found)

    def topics(self, topic: str | None, limit: int) -> Operation[TopicList]:
        """Perform :meth:`Insights.topics`."""
        if topic is not None:
            check_text("topic", topic)
        limit, tasks = check_count("limit", limit), self._core.collections.name
        now = yield from self._core.now()
        bound = yield from bindings.of_all_topics(tasks)
        names = sorted({*(yield from topics.names(tasks)), *bound})
        if topic is not None:
            names = [name for name in names if name == topic]
        found = []
        for name in names[:limit]:
            counted = yield from topics.counts(tasks, name)
            found.append(
                trusted(TopicView, topic=name, bindings=bound.get(name, []), **counted._asdict())
            )
        return trusted(TopicList, at=now, topics=found, total=len(names))

    def find(self, text: str) -> Operation[Document | None]:
        """Perform :meth:`Insights.find`."""
        candidates = candidate_ids(check_text("text", text))
        return (yield from lookup.find_first(candidates, self._core.settings))


class Insights:
    """Read-only views of the collection of a :class:`Queue`. Safe to share between threads.

    Args:
        queue: A queue of the collection.

    Raises:
        InvalidArgument: It is not a ``Queue``.
    """

    def __init__(self, queue: Queue[Any]) -> None:
        if not isinstance(queue, Queue):
            raise invalid_argument(
                "queue", queue, "give a Queue; for an AsyncQueue there is AsyncInsights"
            )
        self._core = core_of(queue)
        self._operations = _InsightOperations(self._core)

    def overview(self, *, exact: bool = False) -> Overview:
        """Return the state of all queues, workers and the sweeper.

        Args:
            exact: Count everything. Otherwise counts above ``settings.count_limit`` are estimates,
                which ``estimated`` names.

        Returns:
            The overview, at one instant by the server's clock.
        """
        return self._core.run(self._operations.overview(exact=exact))

    def stats(
        self, queues: Iterable[str] | None = None, *, exact: bool = False
    ) -> list[QueueStats]:
        """Count the tasks of several queues, with few queries for all of them.

        All queues together are counted up to ``settings.count_limit`` of each status. Beyond it
        each queue gets its share of the limit, and larger counts are estimates, which ``estimated``
        names.

        Args:
            queues: The names of the queues. Default: all.
            exact: Count everything.

        Returns:
            The counts, one entry per queue.

        Raises:
            InvalidArgument: A name is not valid.
        """
        return self._core.run(self._operations.stats(queues, exact=exact))

    def running(self, queue: str | None = None, *, limit: int = 200) -> Sequence[RunningTask]:
        """Return the tasks that workers hold, the first lease to expire first.

        Args:
            queue: Only those of this queue.
            limit: The largest number of tasks.

        Returns:
            The tasks.

        Raises:
            InvalidArgument: The limit is not valid.
        """
        return self._core.run(self._operations.running(queue, limit))

    def latency(
        self,
        queue: str | None = None,
        *,
        since: Duration = timedelta(hours=1),
        exact: bool = False,
    ) -> list[Latency]:
        """Measure wait and run times of the tasks that were done in a period.

        MongoDB groups them and returns a few numbers, accurate to within 6 %. The newest
        ``settings.count_limit`` tasks of all queues are measured; if there are more, the result is
        ``estimated``.

        Args:
            queue: Only tasks of this queue.
            since: The length of the period, up to now.
            exact: Measure all tasks.

        Returns:
            The times, one entry per queue.

        Raises:
            InvalidArgument: The period is not valid.
        """
        return self._core.run(self._operations.latency(since, queue, exact=exact))

    def by_name(
        self,
        queue: str | None = None,
        *,
        since: Duration = timedelta(hours=1),
        limit: int = 100,
        exact: bool = False,
    ) -> NameList:
        """Count and measure tasks by name: what waits, what runs, and what ended in a period.

        Of each status, at most ``settings.count_limit`` tasks are read. If there are more, the
        counts are estimates from a random sample, and wait and run times are those of the newest
        tasks; ``estimated`` of each name says so. Times are accurate to within 6 %.

        Args:
            queue: Only tasks of this queue. Default: those of all queues together.
            since: The length of the period, up to now.
            limit: The largest number of names; those with the most tasks are returned.
            exact: Read all tasks.

        Returns:
            The names, the one with the most tasks first. Tasks without a name have an entry, too.

        Raises:
            InvalidArgument: An argument is not valid.
        """
        return self._core.run(self._operations.by_name(since, queue, limit=limit, exact=exact))

    def last_sweeps(self) -> tuple[SweepReport | None, SweepReport | None]:
        """Read what the sweeper reported.

        Returns:
            The report of the last sweep, and of the last one that changed something. Each is
            ``None`` if there is none.
        """
        return self._core.run(self._operations.last_sweeps())

    @renamed_arguments(shown="mask", made="convert")
    def tasks(
        self,
        which: TaskFilter | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
        mask: Mask | None = None,
        convert: Convert | None = None,
    ) -> TaskPage:
        """Return a page of tasks, newest first.

        Args:
            which: Only tasks that the filter matches. Default: all.
            limit: The largest number of tasks in the page.
            cursor: The ``next_cursor`` of the page before. Default: the first page.
            mask: A function of a value; the text of the filter is searched in what it returns.
            convert: A function of a document and the server's time. The page holds what it returns
                instead of the document, so that large documents are freed one by one.

        Returns:
            The page. If it is not ``complete``, the search stopped early to stay quick.

        Raises:
            InvalidArgument: An argument is not valid.
        """
        return self._core.run(
            self._operations.tasks(
                TaskFilter() if which is None else which,
                limit=limit,
                cursor=cursor,
                mask=mask,
                convert=convert,
            )
        )

    @renamed_arguments(shown="mask", made="convert", enough="stop")
    def dead_letters(
        self,
        queue: str | None,
        which: DeadLetterFilter,
        *,
        limit: int = 50,
        cursor: str | None = None,
        mask: Mask | None = None,
        convert: Convert | None = None,
        stop: Stop = paging.never_enough,
    ) -> TaskPage:
        """Return a page of dead letters, newest first.

        Args:
            queue: Only those of this queue; ``None``: those of all queues.
            which: Only those that the filter matches.
            limit: The largest number of dead letters in the page.
            cursor: The ``next_cursor`` of the page before. Default: the first page.
            mask: A function of a value; the text of the filter is searched in what it returns.
            convert: As in :meth:`tasks`.
            stop: A function that is asked after each dead letter whether to end the page.

        Returns:
            The page. If it is not ``complete``, the search stopped early to stay quick.

        Raises:
            InvalidArgument: An argument is not valid.
        """
        return self._core.run(
            self._operations.dead_letters(
                queue, which, limit=limit, cursor=cursor, mask=mask, convert=convert, stop=stop
            )
        )

    def queue_names(self) -> list[str]:
        """List the queues of the collection.

        Returns:
            The names of all queues with tasks or dead letters, and of the given queue, sorted.
        """
        return self._core.run(self._operations.queue_names())

    def topics(self, topic: str | None = None, *, limit: int = 100) -> TopicList:
        """Return the topics beside the collection, with what they keep and their bindings.

        Args:
            topic: Only this one, if it exists.
            limit: The largest number of topics.

        Returns:
            The first topics by name.

        Raises:
            InvalidArgument: The limit is not valid.
        """
        return self._core.run(self._operations.topics(topic, limit))

    def find(self, text: str) -> Document | None:
        """Return a task by its id as text.

        Args:
            text: The id, as views and commands show it.

        Returns:
            The stored document, or ``None`` if there is none.
        """
        return self._core.run(self._operations.find(text))

    if not TYPE_CHECKING:
        __getattr__ = renamed_attributes({"letters": "dead_letters"})


class AsyncInsights:
    """Read-only views of the collection of an :class:`AsyncQueue`.

    Args:
        queue: A queue of the collection.

    Raises:
        InvalidArgument: It is not an ``AsyncQueue``.
    """

    def __init__(self, queue: AsyncQueue[Any]) -> None:
        if not isinstance(queue, AsyncQueue):
            raise invalid_argument(
                "queue", queue, "give an AsyncQueue; for a Queue there is Insights"
            )
        self._core = core_of(queue)
        self._operations = _InsightOperations(self._core)

    async def overview(self, *, exact: bool = False) -> Overview:
        """Return the state of all queues, workers and the sweeper.

        Args:
            exact: Count everything. Otherwise counts above ``settings.count_limit`` are estimates,
                which ``estimated`` names.

        Returns:
            The overview, at one instant by the server's clock.
        """
        return await self._core.run(self._operations.overview(exact=exact))

    async def stats(
        self, queues: Iterable[str] | None = None, *, exact: bool = False
    ) -> list[QueueStats]:
        """Count the tasks of several queues, with few queries for all of them.

        All queues together are counted up to ``settings.count_limit`` of each status. Beyond it
        each queue gets its share of the limit, and larger counts are estimates, which ``estimated``
        names.

        Args:
            queues: The names of the queues. Default: all.
            exact: Count everything.

        Returns:
            The counts, one entry per queue.

        Raises:
            InvalidArgument: A name is not valid.
        """
        return await self._core.run(self._operations.stats(queues, exact=exact))

    async def running(self, queue: str | None = None, *, limit: int = 200) -> Sequence[RunningTask]:
        """Return the tasks that workers hold, the first lease to expire first.

        Args:
            queue: Only those of this queue.
            limit: The largest number of tasks.

        Returns:
            The tasks.

        Raises:
            InvalidArgument: The limit is not valid.
        """
        return await self._core.run(self._operations.running(queue, limit))

    async def latency(
        self,
        queue: str | None = None,
        *,
        since: Duration = timedelta(hours=1),
        exact: bool = False,
    ) -> list[Latency]:
        """Measure wait and run times of the tasks that were done in a period.

        MongoDB groups them and returns a few numbers, accurate to within 6 %. The newest
        ``settings.count_limit`` tasks of all queues are measured; if there are more, the result is
        ``estimated``.

        Args:
            queue: Only tasks of this queue.
            since: The length of the period, up to now.
            exact: Measure all tasks.

        Returns:
            The times, one entry per queue.

        Raises:
            InvalidArgument: The period is not valid.
        """
        return await self._core.run(self._operations.latency(since, queue, exact=exact))

    async def by_name(
        self,
        queue: str | None = None,
        *,
        since: Duration = timedelta(hours=1),
        limit: int = 100,
        exact: bool = False,
    ) -> NameList:
        """Count and measure tasks by name: what waits, what runs, and what ended in a period.

        Of each status, at most ``settings.count_limit`` tasks are read. If there are more, the
        counts are estimates from a random sample, and wait and run times are those of the newest
        tasks; ``estimated`` of each name says so. Times are accurate to within 6 %.

        Args:
            queue: Only tasks of this queue. Default: those of all queues together.
            since: The length of the period, up to now.
            limit: The largest number of names; those with the most tasks are returned.
            exact: Read all tasks.

        Returns:
            The names, the one with the most tasks first. Tasks without a name have an entry, too.

        Raises:
            InvalidArgument: An argument is not valid.
        """
        return await self._core.run(
            self._operations.by_name(since, queue, limit=limit, exact=exact)
        )

    async def last_sweeps(self) -> tuple[SweepReport | None, SweepReport | None]:
        """Read what the sweeper reported.

        Returns:
            The report of the last sweep, and of the last one that changed something. Each is
            ``None`` if there is none.
        """
        return await self._core.run(self._operations.last_sweeps())

    @renamed_arguments(shown="mask", made="convert")
    async def tasks(
        self,
        which: TaskFilter | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
        mask: Mask | None = None,
        convert: Convert | None = None,
    ) -> TaskPage:
        """Return a page of tasks, newest first.

        Args:
            which: Only tasks that the filter matches. Default: all.
            limit: The largest number of tasks in the page.
            cursor: The ``next_cursor`` of the page before. Default: the first page.
            mask: A function of a value; the text of the filter is searched in what it returns.
            convert: A function of a document and the server's time. The page holds what it returns
                instead of the document, so that large documents are freed one by one.

        Returns:
            The page. If it is not ``complete``, the search stopped early to stay quick.

        Raises:
            InvalidArgument: An argument is not valid.
        """
        return await self._core.run(
            self._operations.tasks(
                TaskFilter() if which is None else which,
                limit=limit,
                cursor=cursor,
                mask=mask,
                convert=convert,
            )
        )

    @renamed_arguments(shown="mask", made="convert", enough="stop")
    async def dead_letters(
        self,
        queue: str | None,
        which: DeadLetterFilter,
        *,
        limit: int = 50,
        cursor: str | None = None,
        mask: Mask | None = None,
        convert: Convert | None = None,
        stop: Stop = paging.never_enough,
    ) -> TaskPage:
        """Return a page of dead letters, newest first.

        Args:
            queue: Only those of this queue; ``None``: those of all queues.
            which: Only those that the filter matches.
            limit: The largest number of dead letters in the page.
            cursor: The ``next_cursor`` of the page before. Default: the first page.
            mask: A function of a value; the text of the filter is searched in what it returns.
            convert: As in :meth:`tasks`.
            stop: A function that is asked after each dead letter whether to end the page.

        Returns:
            The page. If it is not ``complete``, the search stopped early to stay quick.

        Raises:
            InvalidArgument: An argument is not valid.
        """
        return await self._core.run(
            self._operations.dead_letters(
                queue, which, limit=limit, cursor=cursor, mask=mask, convert=convert, stop=stop
            )
        )

    async def queue_names(self) -> list[str]:
        """List the queues of the collection.

        Returns:
            The names of all queues with tasks or dead letters, and of the given queue, sorted.
        """
        return await self._core.run(self._operations.queue_names())

    async def topics(self, topic: str | None = None, *, limit: int = 100) -> TopicList:
        """Return the topics beside the collection, with what they keep and their bindings.

        Args:
            topic: Only this one, if it exists.
            limit: The largest number of topics.

        Returns:
            The first topics by name.

        Raises:
            InvalidArgument: The limit is not valid.
        """
        return await self._core.run(self._operations.topics(topic, limit))

    async def find(self, text: str) -> Document | None:
        """Return a task by its id as text.

        Args:
            text: The id, as views and commands show it.

        Returns:
            The stored document, or ``None`` if there is none.
        """
        return await self._core.run(self._operations.find(text))

    if not TYPE_CHECKING:
        __getattr__ = renamed_attributes({"letters": "dead_letters"})
