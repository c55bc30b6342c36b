"""The sweeper for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from microqueue.arguments import refused
from microqueue.async_queue import AsyncQueue
from microqueue.durations import Duration
from microqueue.sweeper.core import SweeperCore
from microqueue.sweeper.report import (
    JOBS,
    SweepReport,
    Tally,
    check_every,
    is_away,
    log_failure,
)


class AsyncSweeper(SweeperCore):
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
        super().__init__(queue, queues=queues, jobs=jobs, on_report=on_report, lock_ttl=lock_ttl)
        self._run = queue.run
        self._stopping = asyncio.Event()

    async def reclaim_stuck(self) -> int:
        """See :meth:`Sweeper.reclaim_stuck`."""
        return sum((await self._run(self._job("reclaim_stuck"))).values())

    async def reclaim_orphaned(self) -> int:
        """See :meth:`Sweeper.reclaim_orphaned`."""
        return sum((await self._run(self._job("reclaim_orphaned"))).values())

    async def promote_due(self) -> int:
        """See :meth:`Sweeper.promote_due`."""
        return (await self._run(self._job("promote_due")))["promoted"]

    async def bury_exhausted(self) -> int:
        """See :meth:`Sweeper.bury_exhausted`."""
        return (await self._run(self._job("bury_exhausted")))["buried"]

    async def expire_undelivered(self) -> int:
        """See :meth:`Sweeper.expire_undelivered`."""
        return (await self._run(self._job("expire_undelivered")))["expired"]

    async def purge_finished(self) -> int:
        """See :meth:`Sweeper.purge_finished`."""
        return (await self._run(self._job("purge_finished")))["purged"]

    async def move_dead_letters(self) -> int:
        """See :meth:`Sweeper.move_dead_letters`."""
        return (await self._run(self._job("move_dead_letters")))["moved"]

    async def run_once(self) -> SweepReport:
        """See :meth:`Sweeper.run_once`."""
        now, acquired = await self._run(self._acquire())
        progress = self._progress(now)
        tally = Tally(self.sweeper_id, now, progress)
        if not acquired:
            return self._finish(tally.report(skipped=True))
        away = False
        try:
            for job in self.jobs:
                try:
                    await self._run(self._job(job, progress))
                except Exception as exc:  # noqa: BLE001 (one job must not stop the others)
                    tally.failed(job, exc)
                    if away := is_away(exc):
                        break
                if progress.stopped:
                    break
        finally:
            if not away:  # Else the lock ends by itself.
                await self._run(self._release())
        report = tally.report()
        if not away:
            await self._run(self._store(report))
        return self._finish(report)

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
