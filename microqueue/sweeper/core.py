"""The jobs as operations, and how their counts become a report."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from microqueue.arguments import check_names, refused
from microqueue.core import QueueCore, worker_name
from microqueue.durations import Duration, duration_argument
from microqueue.operations import lock, relocate, sweep, sweep_report, workers
from microqueue.operations.batches import Progress
from microqueue.operations.call import Operation
from microqueue.sweeper.report import (
    JOBS,
    Counts,
    SweepReport,
    check_jobs,
    describe_burials,
    logger,
)

SIMPLE_JOBS: dict[str, tuple[str, Callable[..., Operation[None]]]] = {
    "promote_due": ("promoted", sweep.promote_due),
    "bury_exhausted": ("buried", sweep.bury_exhausted),
    "expire_undelivered": ("expired", sweep.expire_undelivered),
    "purge_finished": ("purged", sweep.purge_finished),
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

    def _job(self, name: str, progress: Progress | None = None) -> Operation[Counts]:
        """Run one job; return what it counted. ``progress`` has that even if it fails."""
        progress = progress or Progress()
        before = progress.counts.copy()
        now = yield from self._core.begin()
        settings, queues = self._core.settings, self._queues
        counters: tuple[str, ...] = ("reclaimed", "buried")
        if name == "reclaim_stuck":
            yield from sweep.reclaim_stuck(now, settings, queues, progress)
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
        if self._core.settings.letters_apart:
            yield from relocate.finish_abandoned(now, self._queues, progress)
            yield from relocate.move_all_out(now, self._queues, progress)

    def _acquire(self) -> Operation[tuple[datetime, bool]]:
        now = yield from self._core.begin()
        return now, (yield from self._lock(now))

    def _lock(self, now: datetime) -> Operation[bool]:
        """Take or renew the lock."""
        return (
            yield from lock.acquire(
                self._lock_name,
                token=self.sweeper_id,
                owner=self.sweeper_id,
                now=now,
                lifetime=self.lock_ttl,
            )
        )

    def _progress(self, acquired_at: datetime) -> Progress:
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

    def _release(self) -> Operation[None]:
        yield from lock.release(self._lock_name, token=self.sweeper_id)

    def _store(self, report: SweepReport) -> Operation[None]:
        """Keep the report for doctor, top and dashboard; a sweep that was skipped has none."""
        if not report.skipped:
            document = report.model_dump(exclude={"skipped", "buried_tasks"})
            # Ids as text: what reads a report may decode those of some types in another way.
            document |= report.model_dump(mode="json", include={"buried_tasks"})
            place = self._core.collections.name
            last = not report.taken_over
            yield from sweep_report.store(place, document, active=report.active, last=last)

    def _finish(self, report: SweepReport) -> SweepReport:
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
