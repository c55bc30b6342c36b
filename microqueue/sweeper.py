"""The sweeper: jobs that repair and clean up a collection, run once or periodically.

Sweepers are safe anywhere, in any number: each write repeats the condition it was decided on. A
lock keeps two sweepers from doing the same work, and expires soon after its holder died.

:class:`SweeperCore` decides what a sweep does, for :class:`Sweeper` and :class:`AsyncSweeper`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from bson import ObjectId
from pydantic import Field
from pymongo.errors import ExecutionTimeout, NetworkTimeout, WTimeoutError

from microqueue.arguments import check_names, check_several, invalid_argument
from microqueue.async_queue import AsyncQueue
from microqueue.core import QueueCore, core_of, new_worker_id
from microqueue.durations import Duration, duration_argument
from microqueue.effect_runner import EffectGenerator, perform, perform_async
from microqueue.errors import MicroqueueError, ServerUnavailable
from microqueue.hooks import Hooks, check_hooks
from microqueue.model import Model
from microqueue.operations import dlq_collection, maintenance, schedules, workers
from microqueue.operations.batches import BurialCount, SweepProgress
from microqueue.operations.call import Operation, reporting
from microqueue.queue import Queue
from microqueue.schedules import Firer, Firing
from microqueue.task import TaskId
from microqueue.task_ids import reference

__all__ = [
    "COUNTERS",
    "JOBS",
    "AsyncSweeper",
    "BuriedTasks",
    "SweepReport",
    "Sweeper",
    "check_every",
    "describe_burials",
    "wait_for_next_sweep",
]

COUNTERS = ("reclaimed", "promoted", "buried", "expired", "purged", "moved", "fired")
"""The fields of a report that count tasks."""

SOURCE = "sweeper"
"""What dead letters of a sweep have as their source."""

LONGEST_ID = 100
"""How many characters of an id are logged."""

logger = logging.getLogger("microqueue.sweeper")


class BuriedTasks(Model):
    """Tasks that a sweep buried with one code: how many, and the ids of the first ten."""

    count: int
    ids: Sequence[TaskId]


class SweepReport(Model):
    """What one sweep did.

    The counters, such as ``reclaimed`` and ``promoted``, are numbers of tasks.
    """

    sweeper_id: str
    """The sweeper, with host and process id."""
    at: datetime
    """When the sweep began, by the server's clock."""
    took_sec: float = 0.0
    fired: int = 0
    """Tasks that schedules added, also since the sweeper's previous report."""
    reclaimed: int = 0
    promoted: int = 0
    buried: int = 0
    expired: int = 0
    purged: int = 0
    moved: int = 0
    skipped: bool = False
    """Whether another sweeper had the lock, and nothing was done."""
    taken_over: bool = False
    """Whether this sweeper stalled until another one took its lock and does the rest."""
    buried_tasks: Mapping[str, BuriedTasks] = Field(default_factory=dict)
    """The tasks that became dead letters, by error code."""
    errors: Mapping[str, str] = Field(default_factory=dict)
    """The messages of the jobs that failed, by job."""

    @property
    def active(self) -> bool:
        """Whether the sweep changed anything or a job failed."""
        return bool(self.errors) or any(getattr(self, name) for name in COUNTERS)

    @property
    def ok(self) -> bool:
        """Whether no job failed."""
        return not self.errors


class Tally:
    """Builds the report of one sweep from its progress."""

    def __init__(self, sweeper_id: str, at: datetime, progress: SweepProgress) -> None:
        self._sweeper_id, self._at = sweeper_id, at
        self._progress = progress
        self._errors: dict[str, str] = {}
        self._started = time.monotonic()

    def failed(self, job: str, error: Exception) -> None:
        """Record and log a failed job, with a traceback if the error is unexpected."""
        logger.error("sweep job %s failed: %s", job, error, exc_info=_if_unexpected(error))
        self._errors[job] = str(error) or repr(error)

    def report(self, *, skipped: bool = False) -> SweepReport:
        """Return the report of the sweep so far."""
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


def describe_burials(burials: Mapping[str, BurialCount | BuriedTasks]) -> list[str]:
    """Describe buried tasks in a line per code, with ids as the commands take them."""
    return [
        f"buried {one.count:,} as {code}: {_named(one)}" for code, one in sorted(burials.items())
    ]


def _named(burial: BurialCount | BuriedTasks) -> str:
    named = [_one_line(reference(one)) for one in burial.ids]
    more = burial.count - len(named)
    return ", ".join([*named, *([f"{more:,} more"] if more > 0 else [])])


def _one_line(text: str) -> str:
    shown = text if text.isprintable() else json.dumps(text)
    return shown if len(shown) <= LONGEST_ID else f"{shown[: LONGEST_ID - 1]}…"


def is_away(error: Exception) -> bool:
    """Return whether MongoDB is away, and not merely slow with one job."""
    late = isinstance(error.__cause__, ExecutionTimeout | NetworkTimeout | WTimeoutError)
    return isinstance(error, ServerUnavailable) and not late


def log_failure(error: Exception, wait_sec: float) -> None:
    """Log that a sweep failed, and when the next one begins."""
    logger.error(
        "sweep failed; the next one begins in %g s: %s",
        wait_sec,
        error,
        exc_info=_if_unexpected(error),
        extra={"wait_sec": wait_sec},
    )


def _if_unexpected(error: Exception) -> Exception | None:
    """Return an unexpected error, whose traceback is logged."""
    return None if isinstance(error, MicroqueueError) else error


def check_jobs(jobs: Iterable[str]) -> tuple[str, ...]:
    """Reject unknown jobs; return the others in the order in which they run."""
    instead = f"give some of {', '.join(JOBS)}"
    chosen = list(check_several("jobs", jobs, instead))
    if unknown := [job for job in chosen if job not in JOBS]:
        raise invalid_argument("jobs", unknown, instead)
    return tuple(job for job in JOBS if job in chosen)


def check_every(every: Duration) -> float:
    """Reject a wait that is not positive; return it in seconds."""
    wait = duration_argument("every", every)
    if not wait:
        raise invalid_argument("every", every, "give more than 0 seconds")
    return wait.total_seconds()


FIRING = "fire_schedules"
UNFIRED_SEC = 0.05
"""How long to wait at least after a due schedule was not fired here."""
RENEWALS = 3
"""How often the lock is renewed within its lifetime."""


class Job(NamedTuple):
    """A job of the sweeper: the counters of the report that it adds to, and its operation."""

    counters: tuple[str, ...]
    run: Callable[[SweeperCore, datetime, SweepProgress], Operation[None]]


@dataclass(frozen=True, slots=True)
class WaitForNextSweep:
    """Wait before the next sweep, or until the sweeper is stopped."""

    seconds: float


class SweeperCore:
    """Decides what a sweep does: a generator of operations to run, and of pauses."""

    def __init__(
        self,
        core: QueueCore[Any],
        *,
        queues: Sequence[str] | None,
        jobs: Iterable[str],
        on_report: Callable[[SweepReport], None] | None,
        lock_ttl: Duration | None,
        hooks: Sequence[Hooks],
    ) -> None:
        self.core = core
        self._report = core.report_to(check_hooks(hooks), source=SOURCE)
        ttl = duration_argument("lock_ttl", lock_ttl)
        if ttl is not None and not ttl:
            raise invalid_argument("lock_ttl", lock_ttl, "give more than 0 seconds")
        self.lock_ttl: timedelta = core.settings.lock_ttl if ttl is None else ttl
        self.queues = None if queues is None else check_names("queues", queues)
        self.jobs = check_jobs(jobs)
        if on_report is not None and not callable(on_report):
            raise invalid_argument("on_report", on_report, "give a function of one report")
        self._on_report = on_report
        self.sweeper_id = new_worker_id()
        self._lock_name = _lock_name(core.collections.name, self.jobs, self.queues)
        self._can_fire = False
        """Whether the last sweep could fire schedules. If not, the next one tries again."""
        self._fired_between = 0  # Since the last report.
        self.firer = Firer(core, self.queues)

    def run_forever(
        self, every: Duration, *, stopping: Callable[[], bool]
    ) -> EffectGenerator[Operation[Any] | WaitForNextSweep, None]:
        """Sweep again and again; a sweep that fails is logged."""
        wait_sec = check_every(every)
        while not stopping():
            ends = time.monotonic() + wait_sec
            try:
                yield from self.run_once()
                ends = time.monotonic() + wait_sec
                yield from self.fire_until(ends, stopping)
            except Exception as exc:  # noqa: BLE001 (it is logged, and the next sweep may succeed)
                log_failure(exc, wait_sec)
            yield WaitForNextSweep(max(ends - time.monotonic(), 0.0))

    def fire_until(
        self, ends: float, stopping: Callable[[], bool]
    ) -> EffectGenerator[Operation[Any] | WaitForNextSweep, None]:
        """Between two sweeps, fire the schedules that are due before the next one, on time."""
        if not self._can_fire or FIRING not in self.jobs or stopping():
            return
        due_sec = max((yield self._next_schedule_sec()), 0.0)
        while time.monotonic() + due_sec < ends:
            yield WaitForNextSweep(due_sec)
            if stopping():
                return
            firing: Firing = yield self.firer.fire()
            self._fired_between += firing.added
            due_sec = max(firing.due_sec, 0.0 if firing.added else UNFIRED_SEC)

    def _next_schedule_sec(self) -> Operation[float]:
        now = yield from self.core.begin()
        next_at = yield from schedules.next_due(self.core.collections.name, self.queues)
        return Firing(0, now, next_at).due_sec

    def run_once(self) -> EffectGenerator[Operation[Any], SweepReport]:
        """Take the lock, run the jobs, release the lock, and report."""
        self._can_fire = False
        now, acquired = yield self.acquire()
        progress = self._progress(now)
        tally = Tally(self.sweeper_id, now, progress)
        if not acquired:
            self._can_fire = True
            return self._finish(tally.report(skipped=True))
        progress.counts["fired"] += self._fired_between
        self._fired_between = 0
        away = False
        try:
            for job in self.jobs:
                try:
                    yield self.job(job, progress)
                except Exception as exc:  # noqa: BLE001 (one job must not stop the others)
                    tally.failed(job, exc)
                    if away := is_away(exc):
                        break
                if progress.stopped:
                    break
        finally:
            if not away:  # Otherwise the lock expires.
                yield self.release()
        report = tally.report()
        self._can_fire = not away and FIRING not in report.errors
        if not away:
            yield self._store(report)
        return self._finish(report)

    def count(self, name: str) -> Operation[int]:
        """Run one job by itself, without the lock; return how many tasks it changed."""
        progress = SweepProgress()
        yield from self.job(name, progress)
        return sum(progress.counts[counter] for counter in JOB_TABLE[name].counters)

    def job(self, name: str, progress: SweepProgress) -> Operation[None]:
        """Run one job. ``progress`` has what was done, even if the job fails."""
        now = yield from self.core.begin()
        yield from reporting(JOB_TABLE[name].run(self, now, progress), self._report)

    def acquire(self) -> Operation[tuple[datetime, bool]]:
        """Take the lock; return the time, and whether the lock was free."""
        now = yield from self.core.begin()
        return now, (yield from self._lock(now))

    def release(self) -> Operation[None]:
        """Release the lock."""
        yield from maintenance.release_lock(self._lock_name, token=self.sweeper_id)

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

    def _progress(self, acquired_at: datetime) -> SweepProgress:
        """Begin a sweep that renews its lock between batches, and stops if another has it."""
        renewed_at = acquired_at

        def keep_lock() -> Operation[bool]:
            nonlocal renewed_at
            now = yield from self.core.begin()
            if renewed_at <= now < renewed_at + self.lock_ttl / RENEWALS:
                return True
            renewed_at = now
            return (yield from self._lock(now))

        return SweepProgress(keep_lock)

    def _store(self, report: SweepReport) -> Operation[None]:
        """Store the report for doctor, top and dashboard; a skipped sweep stores none."""
        if not report.skipped:
            document = report.model_dump(exclude={"skipped", "buried_tasks"})
            # Ids as text: readers may decode ids of some types differently.
            document |= report.model_dump(mode="json", include={"buried_tasks"})
            collection, last = self.core.collections.name, not report.taken_over
            yield from maintenance.store_report(
                collection, document, active=report.active, last=last
            )

    def _finish(self, report: SweepReport) -> SweepReport:
        """Log a report and pass it to ``on_report``."""
        hidden = {"sweeper_id", "at", "buried_tasks"}
        changes = {name: one for name, one in report.model_dump(exclude=hidden).items() if one}
        level = logging.INFO if report.ok else logging.ERROR
        buried = "".join(f"; {line}" for line in describe_burials(report.buried_tasks))
        logger.log(level, "sweep finished: %s%s", changes, buried)
        if self._on_report is not None:
            self._on_report(report)
        return report


def _on_queues(operation: Callable[..., Operation[None]]) -> Callable[..., Operation[None]]:
    """Make a job of an operation that needs the settings and the queues."""

    def run(sweeper: SweeperCore, now: datetime, progress: SweepProgress) -> Operation[None]:
        yield from operation(now, sweeper.core.settings, sweeper.queues, progress)

    return run


def _reclaim_orphaned(
    sweeper: SweeperCore, now: datetime, progress: SweepProgress
) -> Operation[None]:
    collection = sweeper.core.collections.name
    yield from workers.reclaim_orphaned(
        collection, now, sweeper.core.settings, sweeper.queues, progress
    )


def _purge_finished(
    sweeper: SweeperCore, now: datetime, progress: SweepProgress
) -> Operation[None]:
    collection = sweeper.core.collections.name
    yield from maintenance.purge_finished(
        collection, now, sweeper.core.settings, sweeper.queues, progress
    )


def _move_dead_letters(
    sweeper: SweeperCore, now: datetime, progress: SweepProgress
) -> Operation[None]:
    if sweeper.core.settings.separate_dlq:
        yield from dlq_collection.finish_abandoned(now, sweeper.queues, progress)
        yield from dlq_collection.move_all_out(now, sweeper.queues, progress)


def _fire_schedules(
    sweeper: SweeperCore,
    now: datetime,  # noqa: ARG001 (it asks the clock itself)
    progress: SweepProgress,
) -> Operation[None]:
    if (yield from progress.proceed()):
        firing = yield from sweeper.firer.fire()
        progress.counts["fired"] += firing.added


JOB_TABLE: dict[str, Job] = {
    # Before the done tasks are purged that prove that a run was added.
    FIRING: Job(("fired",), _fire_schedules),
    "reclaim_stuck": Job(("reclaimed", "buried"), _on_queues(maintenance.reclaim_stuck)),
    "reclaim_orphaned": Job(("reclaimed", "buried"), _reclaim_orphaned),
    "promote_due": Job(("promoted",), _on_queues(maintenance.promote_all_due)),
    "bury_exhausted": Job(("buried",), _on_queues(maintenance.bury_exhausted)),
    "expire_undelivered": Job(("expired",), _on_queues(maintenance.expire_undelivered)),
    "purge_finished": Job(("purged",), _purge_finished),
    "move_dead_letters": Job(("moved",), _move_dead_letters),
}
"""The jobs, in the order in which they run."""
JOBS = tuple(JOB_TABLE)


def _lock_name(collection: str, jobs: Sequence[str], queues: Sequence[str] | None) -> str:
    """Name the lock after what a sweeper does, so that only sweepers of the same work wait."""
    whole = f"sweeper:{collection}"
    if queues is None and tuple(jobs) == JOBS:
        return whole
    return f"{whole}:{json.dumps([list(jobs), queues and sorted(set(queues))])}"


class Sweeper:
    """Runs the sweeper's jobs on the collection of a :class:`Queue`.

    :meth:`stop` may be called from any thread or a signal handler.

    Args:
        queue: A queue of the collection. All queues of the collection are swept.
        queues: Sweep only these queues.
        jobs: Run only these jobs.
        on_report: A function that is called with each :class:`SweepReport`.
        lock_ttl: How long the sweeper's lock lives without being renewed, and so how long a
            killed sweeper delays the others. Default: ``settings.lock_ttl``.
        hooks: ``on_dead_letter`` is called for each task that a sweep buries, as are the hooks of
            the queue.

    Raises:
        InvalidArgument: An argument is not valid.
    """

    def __init__(
        self,
        queue: Queue[Any],
        *,
        queues: Sequence[str] | None = None,
        jobs: Iterable[str] = JOBS,
        on_report: Callable[[SweepReport], None] | None = None,
        lock_ttl: Duration | None = None,
        hooks: Sequence[Hooks] = (),
    ) -> None:
        if not isinstance(queue, Queue):
            raise invalid_argument(
                "queue", queue, "give a Queue; for an AsyncQueue there is AsyncSweeper"
            )
        self._core = core_of(queue)
        self._sweep = SweeperCore(
            self._core,
            queues=queues,
            jobs=jobs,
            on_report=on_report,
            lock_ttl=lock_ttl,
            hooks=hooks,
        )
        self._stopping = threading.Event()

    @property
    def sweeper_id(self) -> str:
        """The id in the sweeper's lock and reports."""
        return self._sweep.sweeper_id

    @property
    def jobs(self) -> tuple[str, ...]:
        """The jobs that it runs, in their order."""
        return self._sweep.jobs

    @property
    def lock_ttl(self) -> timedelta:
        """How long the sweeper's lock lives without being renewed."""
        return self._sweep.lock_ttl

    def fire_schedules(self) -> int:
        """Add the tasks of schedules that are due.

        Returns:
            How many were added.
        """
        return self._core.run(self._sweep.count(FIRING))

    def reclaim_stuck(self) -> int:
        """Reclaim tasks whose lease expired.

        Returns:
            How many were reclaimed or buried.
        """
        return self._core.run(self._sweep.count("reclaim_stuck"))

    def reclaim_orphaned(self) -> int:
        """Reclaim tasks whose worker stopped its heartbeat.

        Returns:
            How many were reclaimed or buried.
        """
        return self._core.run(self._sweep.count("reclaim_orphaned"))

    def promote_due(self) -> int:
        """Make delayed tasks ready that are due.

        Returns:
            How many became ready.
        """
        return self._core.run(self._sweep.count("promote_due"))

    def bury_exhausted(self) -> int:
        """Fail waiting tasks without attempts left.

        Returns:
            How many failed.
        """
        return self._core.run(self._sweep.count("bury_exhausted"))

    def expire_undelivered(self) -> int:
        """Fail waiting tasks whose ``expires_at`` has passed.

        Returns:
            How many failed.
        """
        return self._core.run(self._sweep.count("expire_undelivered"))

    def purge_finished(self) -> int:
        """Delete done tasks older than the retention.

        Returns:
            How many were deleted.
        """
        return self._core.run(self._sweep.count("purge_finished"))

    def move_dead_letters(self) -> int:
        """Move failed tasks to ``tasks_dlq``, if ``settings.separate_dlq``.

        Returns:
            How many were moved.
        """
        return self._core.run(self._sweep.count("move_dead_letters"))

    def run_once(self) -> SweepReport:
        """Run the jobs one after the other.

        A job that fails does not stop the others, unless MongoDB is away. The lock is renewed
        between batches. A sweeper that stalled until another one took its lock stops.

        Returns:
            What was changed, and what failed.
        """
        return perform(self._sweep.run_once(), self._do)

    def run_forever(self, every: Duration = 5) -> None:
        """Sweep until :meth:`stop`. A sweep that fails is logged and does not end the loop.

        Args:
            every: The time between two sweeps.

        Raises:
            InvalidArgument: ``every`` is not a positive duration.
        """
        sweeps = self._sweep.run_forever(every, stopping=self._stopping.is_set)
        perform(sweeps, self._do)
        self._stopping.clear()  # At the end: a stop before the start must count.

    def stop(self) -> None:
        """Stop :meth:`run_forever` after the current sweep."""
        self._stopping.set()

    def _do(self, effect: Operation[Any] | WaitForNextSweep) -> Any:
        if isinstance(effect, WaitForNextSweep):
            return self._stopping.wait(effect.seconds)
        return self._core.run(effect)


def wait_for_next_sweep(
    sweeper: Sweeper,
    seconds: float,
    stop: threading.Event,
    *,
    on_error: Callable[[MicroqueueError], object],
    wait: Callable[[float], object] | None = None,
) -> None:
    """Wait between two sweeps, and fire the schedules that come due between them, on time.

    For commands that repeat :meth:`Sweeper.run_once` themselves.

    Args:
        sweeper: The sweeper.
        seconds: The time until the next sweep.
        stop: Ends the wait.
        on_error: A function that gets the error if schedules cannot be fired. The next sweep
            tries again.
        wait: A function that waits for so many seconds, or until ``stop`` is set. If it raises,
            it must do so again when called again. Default: ``stop.wait``.
    """
    core, wait = core_of(sweeper), wait or stop.wait
    ends = time.monotonic() + seconds

    def do(effect: Operation[Any] | WaitForNextSweep) -> Any:
        return wait(effect.seconds) if isinstance(effect, WaitForNextSweep) else core.run(effect)

    try:
        perform(sweeper._sweep.fire_until(ends, stop.is_set), do)  # noqa: SLF001 (for commands)
    except MicroqueueError as exc:
        on_error(exc)
    wait(max(ends - time.monotonic(), 0.0))


class AsyncSweeper:
    """Runs the sweeper's jobs on the collection of an :class:`AsyncQueue`.

    Cancelling :meth:`run_forever` ends it, too.

    Args:
        queue: A queue of the collection. All queues of the collection are swept.
        queues: Sweep only these queues.
        jobs: Run only these jobs.
        on_report: A function that is called with each :class:`SweepReport`.
        lock_ttl: How long the sweeper's lock lives without being renewed, and so how long a
            killed sweeper delays the others. Default: ``settings.lock_ttl``.
        hooks: ``on_dead_letter`` is called for each task that a sweep buries, as are the hooks of
            the queue.

    Raises:
        InvalidArgument: An argument is not valid.
    """

    def __init__(
        self,
        queue: AsyncQueue[Any],
        *,
        queues: Sequence[str] | None = None,
        jobs: Iterable[str] = JOBS,
        on_report: Callable[[SweepReport], None] | None = None,
        lock_ttl: Duration | None = None,
        hooks: Sequence[Hooks] = (),
    ) -> None:
        if not isinstance(queue, AsyncQueue):
            raise invalid_argument(
                "queue", queue, "give an AsyncQueue; for a Queue there is Sweeper"
            )
        self._core = core_of(queue)
        self._sweep = SweeperCore(
            self._core,
            queues=queues,
            jobs=jobs,
            on_report=on_report,
            lock_ttl=lock_ttl,
            hooks=hooks,
        )
        self._stopping = asyncio.Event()

    @property
    def sweeper_id(self) -> str:
        """The id in the sweeper's lock and reports."""
        return self._sweep.sweeper_id

    @property
    def jobs(self) -> tuple[str, ...]:
        """The jobs that it runs, in their order."""
        return self._sweep.jobs

    @property
    def lock_ttl(self) -> timedelta:
        """How long the sweeper's lock lives without being renewed."""
        return self._sweep.lock_ttl

    async def fire_schedules(self) -> int:
        """Add the tasks of schedules that are due.

        Returns:
            How many were added.
        """
        return await self._core.run(self._sweep.count(FIRING))

    async def reclaim_stuck(self) -> int:
        """Reclaim tasks whose lease expired.

        Returns:
            How many were reclaimed or buried.
        """
        return await self._core.run(self._sweep.count("reclaim_stuck"))

    async def reclaim_orphaned(self) -> int:
        """Reclaim tasks whose worker stopped its heartbeat.

        Returns:
            How many were reclaimed or buried.
        """
        return await self._core.run(self._sweep.count("reclaim_orphaned"))

    async def promote_due(self) -> int:
        """Make delayed tasks ready that are due.

        Returns:
            How many became ready.
        """
        return await self._core.run(self._sweep.count("promote_due"))

    async def bury_exhausted(self) -> int:
        """Fail waiting tasks without attempts left.

        Returns:
            How many failed.
        """
        return await self._core.run(self._sweep.count("bury_exhausted"))

    async def expire_undelivered(self) -> int:
        """Fail waiting tasks whose ``expires_at`` has passed.

        Returns:
            How many failed.
        """
        return await self._core.run(self._sweep.count("expire_undelivered"))

    async def purge_finished(self) -> int:
        """Delete done tasks older than the retention.

        Returns:
            How many were deleted.
        """
        return await self._core.run(self._sweep.count("purge_finished"))

    async def move_dead_letters(self) -> int:
        """Move failed tasks to ``tasks_dlq``, if ``settings.separate_dlq``.

        Returns:
            How many were moved.
        """
        return await self._core.run(self._sweep.count("move_dead_letters"))

    async def run_once(self) -> SweepReport:
        """Run the jobs one after the other.

        A job that fails does not stop the others, unless MongoDB is away. The lock is renewed
        between batches. A sweeper that stalled until another one took its lock stops.

        Returns:
            What was changed, and what failed.
        """
        return await perform_async(self._sweep.run_once(), self._do)

    async def run_forever(self, every: Duration = 5) -> None:
        """Sweep until :meth:`stop`. A sweep that fails is logged and does not end the loop.

        Args:
            every: The time between two sweeps.

        Raises:
            InvalidArgument: ``every`` is not a positive duration.
        """
        sweeps = self._sweep.run_forever(every, stopping=self._stopping.is_set)
        await perform_async(sweeps, self._do)
        self._stopping.clear()  # At the end: a stop before the start must count.

    def stop(self) -> None:
        """Stop :meth:`run_forever` after the current sweep."""
        self._stopping.set()

    async def _do(self, effect: Operation[Any] | WaitForNextSweep) -> Any:
        if not isinstance(effect, WaitForNextSweep):
            return await self._core.run(effect)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), effect.seconds)
        return None
