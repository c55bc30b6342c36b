"""The jobs as operations, and how their counts become a report."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from microqueue.arguments import check_names, refused
from microqueue.core import QueueCore, worker_name
from microqueue.operations import lock, relocate, sweep, sweep_report, workers
from microqueue.operations.call import Operation
from microqueue.sweeper.report import JOBS, Counts, SweepReport, check_jobs, logger

SIMPLE_JOBS: dict[str, tuple[str, Callable[..., Operation[int]]]] = {
    "promote_due": ("promoted", sweep.promote_due),
    "bury_exhausted": ("buried", sweep.bury_exhausted),
    "expire_undelivered": ("expired", sweep.expire_undelivered),
    "purge_finished": ("purged", sweep.purge_finished),
}
LOCK_LIFETIME = timedelta(seconds=30)


class SweeperCore:
    """The jobs as operations, and how their counts become a report."""

    def __init__(
        self,
        core: QueueCore[Any],
        *,
        queues: Sequence[str] | None,
        jobs: Iterable[str],
        on_report: Callable[[SweepReport], None] | None,
    ) -> None:
        self._core = core
        self._queues = None if queues is None else check_names("queues", queues)
        self.jobs = check_jobs(jobs)
        if on_report is not None and not callable(on_report):
            raise refused("on_report", on_report, "give a function of one report")
        self._on_report = on_report
        self.sweeper_id = worker_name()
        self._lock_name = _lock_name(core.collections.name, self.jobs, self._queues)

    def _job(self, name: str) -> Operation[Counts]:
        now = yield from self._core.begin()
        settings, queues = self._core.settings, self._queues
        if name == "reclaim_stuck":
            reclaimed, buried = yield from sweep.reclaim_stuck(now, settings, queues)
            return {"reclaimed": reclaimed, "buried": buried}
        if name == "reclaim_orphaned":
            place = self._core.collections.name
            reclaimed, buried = yield from workers.reclaim_orphaned(place, now, settings, queues)
            return {"reclaimed": reclaimed, "buried": buried}
        if name == "move_dead_letters":
            return {"moved": (yield from self._move_dead_letters(now))}
        counter, duty = SIMPLE_JOBS[name]
        return {counter: (yield from duty(now, settings, queues))}

    def _move_dead_letters(self, now: datetime) -> Operation[int]:
        settings = self._core.settings
        if not settings.letters_apart:
            return 0
        yield from relocate.finish_abandoned(now, self._queues)
        return (yield from relocate.move_all_out(self._queues))

    def _acquire(self) -> Operation[tuple[datetime, bool]]:
        now = yield from self._core.begin()
        acquired = yield from lock.acquire(
            self._lock_name,
            token=self.sweeper_id,
            owner=self.sweeper_id,
            now=now,
            lifetime=LOCK_LIFETIME,
        )
        return now, acquired

    def _release(self) -> Operation[None]:
        yield from lock.release(self._lock_name, token=self.sweeper_id)

    def _store(self, report: SweepReport) -> Operation[None]:
        """Keep the report for those who look on; a sweep that was skipped is none."""
        if not report.skipped:
            document = report.model_dump(exclude={"skipped"})
            place = self._core.collections.name
            yield from sweep_report.store(place, document, active=report.active)

    def _finish(self, report: SweepReport) -> SweepReport:
        moved = {
            name: value
            for name, value in report.model_dump(exclude={"sweeper_id", "at"}).items()
            if value
        }
        logger.log(logging.INFO if report.ok else logging.ERROR, "sweep finished: %s", moved)
        if self._on_report is not None:
            self._on_report(report)
        return report


def _lock_name(collection: str, jobs: Sequence[str], queues: Sequence[str] | None) -> str:
    """Name the lock after what a sweeper does, so that only those wait that do the same."""
    whole = f"sweeper:{collection}"
    if queues is None and tuple(jobs) == JOBS:
        return whole
    return f"{whole}:{json.dumps([list(jobs), queues and sorted(set(queues))])}"
