"""What a sweep consists of, and what it reports."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID

from bson import ObjectId
from pydantic import Field
from pymongo.errors import ExecutionTimeout, NetworkTimeout, WTimeoutError

from microqueue.arguments import check_names, check_several, refused
from microqueue.async_queue import AsyncQueue
from microqueue.core import QueueCore, core_of, worker_name
from microqueue.durations import Duration, duration_argument
from microqueue.errors import MicroqueueError, ServerUnavailable
from microqueue.model import Model
from microqueue.operations import dlq_collection, maintenance, workers
from microqueue.operations.batches import Burial, Progress
from microqueue.operations.call import Operation
from microqueue.queue import Queue
from microqueue.task import TaskId
from microqueue.task_ids import reference

JOBS = (
    "reclaim_stuck",
    "reclaim_orphaned",
    "promote_due",
    "bury_exhausted",
    "expire_undelivered",
    "purge_finished",
    "move_dead_letters",
)
COUNTERS = ("reclaimed", "promoted", "buried", "expired", "purged", "moved")
"""The fields of a report that count tasks."""

LONGEST_ID = 100
"""How many characters of an id are logged."""

logger = logging.getLogger("microqueue.sweeper")

Counts: TypeAlias = dict[str, int]


class BuriedTasks(Model):
    """Tasks that a sweep buried with one code: how many, and the ids of the first ten."""

    count: int
    ids: Sequence[TaskId]


class SweepReport(Model):
    """What one sweep did.

    ``skipped``: another sweeper was at it. ``taken_over``: another sweeper took the lock over
    after this one had stalled, and does the rest. ``errors``: by job. ``buried_tasks``: by code.
    """

    sweeper_id: str
    at: datetime
    took_sec: float = 0.0
    reclaimed: int = 0
    promoted: int = 0
    buried: int = 0
    expired: int = 0
    purged: int = 0
    moved: int = 0
    skipped: bool = False
    taken_over: bool = False
    buried_tasks: Mapping[str, BuriedTasks] = Field(default_factory=dict)
    errors: Mapping[str, str] = Field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Whether it moved anything, or something went wrong."""
        return bool(self.errors) or any(getattr(self, name) for name in COUNTERS)

    @property
    def ok(self) -> bool:
        """Whether every job went through."""
        return not self.errors


class Tally:
    """Makes a report of the progress of one sweep."""

    def __init__(self, sweeper_id: str, at: datetime, progress: Progress) -> None:
        self._sweeper_id, self._at = sweeper_id, at
        self._progress = progress
        self._errors: dict[str, str] = {}
        self._started = time.monotonic()

    def failed(self, job: str, error: Exception) -> None:
        """Note that a job failed, with a traceback if it should not have."""
        logger.error("sweep job %s failed: %s", job, error, exc_info=_if_unexpected(error))
        self._errors[job] = str(error) or repr(error)

    def report(self, *, skipped: bool = False) -> SweepReport:
        """Report what was done so far."""
        progress = self._progress
        return SweepReport(
            sweeper_id=self._sweeper_id,
            at=self._at,
            took_sec=round(time.monotonic() - self._started, 6),
            errors=self._errors,
            skipped=skipped,
            taken_over=progress.stopped,
            buried_tasks={
                code: BuriedTasks(count=burial.count, ids=[_plain_id(one) for one in burial.ids])
                for code, burial in progress.burials.items()
            },
            **{name: progress.counts[name] for name in COUNTERS},
        )


def _plain_id(task_id: Any) -> TaskId:
    """Return an id of a type that tasks have; others, which were inserted manually, as text."""
    known = isinstance(task_id, ObjectId | UUID | str | int) and not isinstance(task_id, bool)
    return task_id if known else str(task_id)


def describe_burials(burials: Mapping[str, Burial | BuriedTasks]) -> list[str]:
    """Name buried tasks, a line per code, as commands take their ids."""
    return [
        f"buried {one.count:,} as {code}: {_named(one)}" for code, one in sorted(burials.items())
    ]


def _named(burial: Burial | BuriedTasks) -> str:
    named = [_one_line(reference(one)) for one in burial.ids]
    more = burial.count - len(named)
    return ", ".join([*named, *([f"{more:,} more"] if more > 0 else [])])


def _one_line(text: str) -> str:
    shown = text if text.isprintable() else json.dumps(text)
    return shown if len(shown) <= LONGEST_ID else f"{shown[: LONGEST_ID - 1]}…"


def is_away(error: Exception) -> bool:
    """Tell a server that is not there from one that takes too long for a job."""
    late = isinstance(error.__cause__, ExecutionTimeout | NetworkTimeout | WTimeoutError)
    return isinstance(error, ServerUnavailable) and not late


def log_failure(error: Exception, pause_sec: float) -> None:
    """Say that a sweep failed, and when the next one is."""
    event = "sweep failed; the next one is in %g s: %s"
    logger.error(event, pause_sec, error, exc_info=_if_unexpected(error))


def _if_unexpected(error: Exception) -> Exception | None:
    """Give an error whose traceback is worth a look."""
    return None if isinstance(error, MicroqueueError) else error


def check_jobs(jobs: Iterable[str]) -> tuple[str, ...]:
    """Refuse unknown jobs; give the known ones in the order in which they run."""
    instead = f"give some of {', '.join(JOBS)}"
    chosen = list(check_several("jobs", jobs, instead))
    if unknown := [job for job in chosen if job not in JOBS]:
        raise refused("jobs", unknown, instead)
    return tuple(job for job in JOBS if job in chosen)


def check_every(every: Duration) -> float:
    """Refuse a period that would sweep without a pause."""
    pause = duration_argument("every", every)
    if not pause:
        raise refused("every", every, "give more than 0 seconds")
    return pause.total_seconds()


SIMPLE_JOBS: dict[str, tuple[str, Callable[..., Operation[None]]]] = {
    "promote_due": ("promoted", maintenance.promote_due),
    "bury_exhausted": ("buried", maintenance.bury_exhausted),
    "expire_undelivered": ("expired", maintenance.expire_undelivered),
    "purge_finished": ("purged", maintenance.purge_finished),
}
RENEWALS = 3
"""How often the lock is renewed within its lifetime."""


class SweeperCore:
    """The jobs as operations, and how their counts become a report."""

    def __init__(
        self,
        core: QueueCore[Any],
        *,
        queues: Sequence[str] | None,
        jobs: Iterable[str],
        on_report: Callable[[SweepReport], None] | None,
        lock_ttl: Duration | None,
    ) -> None:
        self._core = core
        ttl = duration_argument("lock_ttl", lock_ttl)
        if ttl is not None and not ttl:
            raise refused("lock_ttl", lock_ttl, "give more than 0 seconds")
        self.lock_ttl: timedelta = core.settings.lock_ttl if ttl is None else ttl
        self._queues = None if queues is None else check_names("queues", queues)
        self.jobs = check_jobs(jobs)
        if on_report is not None and not callable(on_report):
            raise refused("on_report", on_report, "give a function of one report")
        self._on_report = on_report
        self.sweeper_id = worker_name()
        self._lock_name = _lock_name(core.collections.name, self.jobs, self._queues)

    def job(self, name: str, progress: Progress | None = None) -> Operation[Counts]:
        """Run one job; return what it counted. ``progress`` has that even if it fails."""
        progress = progress or Progress()
        before = progress.counts.copy()
        now = yield from self._core.begin()
        settings, queues = self._core.settings, self._queues
        counters: tuple[str, ...] = ("reclaimed", "buried")
        if name == "reclaim_stuck":
            yield from maintenance.reclaim_stuck(now, settings, queues, progress)
        elif name == "reclaim_orphaned":
            place = self._core.collections.name
            yield from workers.reclaim_orphaned(place, now, settings, queues, progress)
        elif name == "move_dead_letters":
            counters = ("moved",)
            yield from self._move_dead_letters(now, progress)
        else:
            counter, duty = SIMPLE_JOBS[name]
            counters = (counter,)
            yield from duty(now, settings, queues, progress)
        return {one: progress.counts[one] - before[one] for one in counters}

    def _move_dead_letters(self, now: datetime, progress: Progress) -> Operation[None]:
        if self._core.settings.separate_dlq:
            yield from dlq_collection.finish_abandoned(now, self._queues, progress)
            yield from dlq_collection.move_all_out(now, self._queues, progress)

    def acquire(self) -> Operation[tuple[datetime, bool]]:
        """Take the lock; return the time, and whether the lock was free."""
        now = yield from self._core.begin()
        return now, (yield from self._lock(now))

    def _lock(self, now: datetime) -> Operation[bool]:
        """Take or renew the lock."""
        return (
            yield from maintenance.acquire_lock(
                self._lock_name,
                token=self.sweeper_id,
                owner=self.sweeper_id,
                now=now,
                lifetime=self.lock_ttl,
            )
        )

    def progress(self, acquired_at: datetime) -> Progress:
        """Begin a sweep that renews its lock between batches, and stops once another has it."""
        renewed_at = acquired_at

        def keep_lock() -> Operation[bool]:
            nonlocal renewed_at
            now = yield from self._core.begin()
            if renewed_at <= now < renewed_at + self.lock_ttl / RENEWALS:
                return True
            renewed_at = now
            return (yield from self._lock(now))

        return Progress(keep_lock)

    def release(self) -> Operation[None]:
        """Release the lock."""
        yield from maintenance.release_lock(self._lock_name, token=self.sweeper_id)

    def store(self, report: SweepReport) -> Operation[None]:
        """Keep the report for doctor, top and dashboard; a sweep that was skipped has none."""
        if not report.skipped:
            document = report.model_dump(exclude={"skipped", "buried_tasks"})
            # Ids as text: what reads a report may decode those of some types in another way.
            document |= report.model_dump(mode="json", include={"buried_tasks"})
            place = self._core.collections.name
            last = not report.taken_over
            yield from maintenance.store_report(place, document, active=report.active, last=last)

    def finish(self, report: SweepReport) -> SweepReport:
        """Log a report and pass it to ``on_report``."""
        hidden = {"sweeper_id", "at", "buried_tasks"}
        moved = {name: value for name, value in report.model_dump(exclude=hidden).items() if value}
        level = logging.INFO if report.ok else logging.ERROR
        buried = "".join(f"; {line}" for line in describe_burials(report.buried_tasks))
        logger.log(level, "sweep finished: %s%s", moved, buried)
        if self._on_report is not None:
            self._on_report(report)
        return report


def _lock_name(collection: str, jobs: Sequence[str], queues: Sequence[str] | None) -> str:
    """Name the lock after what a sweeper does, so that only those wait that do the same."""
    whole = f"sweeper:{collection}"
    if queues is None and tuple(jobs) == JOBS:
        return whole
    return f"{whole}:{json.dumps([list(jobs), queues and sorted(set(queues))])}"


class Sweeper:
    """Runs the jobs over a :class:`Queue`'s collection.

    Args:
        queue: a queue of the collection; all its queues are swept.
        queues: only these queues.
        jobs: only these jobs.
        on_report: called with each :class:`SweepReport`.
        lock_ttl: how long the sweeper's lock lives without being renewed, and so how long a
            sweeper that was killed delays the others; else the setting ``lock_ttl``.
    """

    def __init__(
        self,
        queue: Queue[Any],
        *,
        queues: Sequence[str] | None = None,
        jobs: Iterable[str] = JOBS,
        on_report: Callable[[SweepReport], None] | None = None,
        lock_ttl: Duration | None = None,
    ) -> None:
        if not isinstance(queue, Queue):
            raise refused("queue", queue, "give a Queue; for an AsyncQueue there is AsyncSweeper")
        self._core = core_of(queue)
        self._sweep = SweeperCore(
            self._core, queues=queues, jobs=jobs, on_report=on_report, lock_ttl=lock_ttl
        )
        self._stopping = threading.Event()

    @property
    def sweeper_id(self) -> str:
        """The id that the sweeper's lock and reports carry."""
        return self._sweep.sweeper_id

    def reclaim_stuck(self) -> int:
        """Take back tasks whose lease expired; give how many, the buried among them."""
        return sum(self._core.run(self._sweep.job("reclaim_stuck")).values())

    def reclaim_orphaned(self) -> int:
        """Take back tasks whose worker's heartbeat ended; give how many, the buried included."""
        return sum(self._core.run(self._sweep.job("reclaim_orphaned")).values())

    def promote_due(self) -> int:
        """Make delayed tasks ready whose time has come; give how many."""
        return self._core.run(self._sweep.job("promote_due"))["promoted"]

    def bury_exhausted(self) -> int:
        """Fail waiting tasks without attempts left; give how many."""
        return self._core.run(self._sweep.job("bury_exhausted"))["buried"]

    def expire_undelivered(self) -> int:
        """Fail waiting tasks whose ``expires_at`` has passed; give how many."""
        return self._core.run(self._sweep.job("expire_undelivered"))["expired"]

    def purge_finished(self) -> int:
        """Delete done tasks older than the retention; give how many."""
        return self._core.run(self._sweep.job("purge_finished"))["purged"]

    def move_dead_letters(self) -> int:
        """Move failed tasks to ``tasks_dlq``, where the settings say so; give how many."""
        return self._core.run(self._sweep.job("move_dead_letters"))["moved"]

    def run_once(self) -> SweepReport:
        """Run the jobs one after the other; one that fails does not stop the others.

        A server that is away does, as it would fail them all. The lock is renewed between
        batches; a sweeper that stalled until another took the lock over stops at the next batch.
        """
        now, acquired = self._core.run(self._sweep.acquire())
        progress = self._sweep.progress(now)
        tally = Tally(self._sweep.sweeper_id, now, progress)
        if not acquired:
            return self._sweep.finish(tally.report(skipped=True))
        away = False
        try:
            for job in self._sweep.jobs:
                try:
                    self._core.run(self._sweep.job(job, progress))
                except Exception as exc:  # noqa: BLE001 (one job must not stop the others)
                    tally.failed(job, exc)
                    if away := is_away(exc):
                        break
                if progress.stopped:
                    break
        finally:
            if not away:  # Else the lock ends by itself.
                self._core.run(self._sweep.release())
        report = tally.report()
        if not away:
            self._core.run(self._sweep.store(report))
        return self._sweep.finish(report)

    def run_forever(self, every: Duration = 5) -> None:
        """Sweep until :meth:`stop`; an error in one sweep never ends the loop."""
        pause = check_every(every)
        while not self._stopping.is_set():
            try:
                self.run_once()
            except Exception as exc:  # noqa: BLE001 (it is logged, and the next sweep may do)
                log_failure(exc, pause)
            self._stopping.wait(pause)
        self._stopping.clear()  # At the end: a stop that came before the start must count.

    def stop(self) -> None:
        """End :meth:`run_forever`, from any thread or a signal handler."""
        self._stopping.set()


class AsyncSweeper:
    """Runs the jobs over an :class:`AsyncQueue`'s collection: as :class:`Sweeper`, awaited."""

    def __init__(
        self,
        queue: AsyncQueue[Any],
        *,
        queues: Sequence[str] | None = None,
        jobs: Iterable[str] = JOBS,
        on_report: Callable[[SweepReport], None] | None = None,
        lock_ttl: Duration | None = None,
    ) -> None:
        if not isinstance(queue, AsyncQueue):
            raise refused("queue", queue, "give an AsyncQueue; for a Queue there is Sweeper")
        self._core = core_of(queue)
        self._sweep = SweeperCore(
            self._core, queues=queues, jobs=jobs, on_report=on_report, lock_ttl=lock_ttl
        )
        self._stopping = asyncio.Event()

    @property
    def sweeper_id(self) -> str:
        """The id that the sweeper's lock and reports carry."""
        return self._sweep.sweeper_id

    async def reclaim_stuck(self) -> int:
        """See :meth:`Sweeper.reclaim_stuck`."""
        return sum((await self._core.run(self._sweep.job("reclaim_stuck"))).values())

    async def reclaim_orphaned(self) -> int:
        """See :meth:`Sweeper.reclaim_orphaned`."""
        return sum((await self._core.run(self._sweep.job("reclaim_orphaned"))).values())

    async def promote_due(self) -> int:
        """See :meth:`Sweeper.promote_due`."""
        return (await self._core.run(self._sweep.job("promote_due")))["promoted"]

    async def bury_exhausted(self) -> int:
        """See :meth:`Sweeper.bury_exhausted`."""
        return (await self._core.run(self._sweep.job("bury_exhausted")))["buried"]

    async def expire_undelivered(self) -> int:
        """See :meth:`Sweeper.expire_undelivered`."""
        return (await self._core.run(self._sweep.job("expire_undelivered")))["expired"]

    async def purge_finished(self) -> int:
        """See :meth:`Sweeper.purge_finished`."""
        return (await self._core.run(self._sweep.job("purge_finished")))["purged"]

    async def move_dead_letters(self) -> int:
        """See :meth:`Sweeper.move_dead_letters`."""
        return (await self._core.run(self._sweep.job("move_dead_letters")))["moved"]

    async def run_once(self) -> SweepReport:
        """See :meth:`Sweeper.run_once`."""
        now, acquired = await self._core.run(self._sweep.acquire())
        progress = self._sweep.progress(now)
        tally = Tally(self._sweep.sweeper_id, now, progress)
        if not acquired:
            return self._sweep.finish(tally.report(skipped=True))
        away = False
        try:
            for job in self._sweep.jobs:
                try:
                    await self._core.run(self._sweep.job(job, progress))
                except Exception as exc:  # noqa: BLE001 (one job must not stop the others)
                    tally.failed(job, exc)
                    if away := is_away(exc):
                        break
                if progress.stopped:
                    break
        finally:
            if not away:  # Else the lock ends by itself.
                await self._core.run(self._sweep.release())
        report = tally.report()
        if not away:
            await self._core.run(self._sweep.store(report))
        return self._sweep.finish(report)

    async def run_forever(self, every: Duration = 5) -> None:
        """See :meth:`Sweeper.run_forever`; cancelling the coroutine ends it too."""
        pause = check_every(every)
        while not self._stopping.is_set():
            try:
                await self.run_once()
            except Exception as exc:  # noqa: BLE001 (it is logged, and the next sweep may do)
                log_failure(exc, pause)
            try:
                await asyncio.wait_for(self._stopping.wait(), pause)
            except TimeoutError:
                continue
        self._stopping.clear()  # At the end: a stop that came before the start must count.

    def stop(self) -> None:
        """End :meth:`run_forever`."""
        self._stopping.set()


__all__ = [
    "COUNTERS",
    "JOBS",
    "AsyncSweeper",
    "BuriedTasks",
    "SweepReport",
    "Sweeper",
    "check_every",
    "describe_burials",
]
