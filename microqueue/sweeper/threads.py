"""The sweeper for plain, blocking code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from microqueue.arguments import refused
from microqueue.durations import Duration
from microqueue.queue import Queue
from microqueue.sweeper.core import SweeperCore
from microqueue.sweeper.report import (
    JOBS,
    SweepReport,
    Tally,
    check_every,
    is_away,
    log_failure,
)


class Sweeper(SweeperCore):
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
        super().__init__(queue, queues=queues, jobs=jobs, on_report=on_report, lock_ttl=lock_ttl)
        self._run = queue.run
        self._stopping = threading.Event()

    def reclaim_stuck(self) -> int:
        """Take back tasks whose lease expired; give how many, the buried among them."""
        return sum(self._run(self._job("reclaim_stuck")).values())

    def reclaim_orphaned(self) -> int:
        """Take back tasks whose worker's heartbeat ended; give how many, the buried included."""
        return sum(self._run(self._job("reclaim_orphaned")).values())

    def promote_due(self) -> int:
        """Make delayed tasks ready whose time has come; give how many."""
        return self._run(self._job("promote_due"))["promoted"]

    def bury_exhausted(self) -> int:
        """Fail waiting tasks without attempts left; give how many."""
        return self._run(self._job("bury_exhausted"))["buried"]

    def expire_undelivered(self) -> int:
        """Fail waiting tasks whose ``expires_at`` has passed; give how many."""
        return self._run(self._job("expire_undelivered"))["expired"]

    def purge_finished(self) -> int:
        """Delete done tasks older than the retention; give how many."""
        return self._run(self._job("purge_finished"))["purged"]

    def move_dead_letters(self) -> int:
        """Move failed tasks to ``tasks_dlq``, where the settings say so; give how many."""
        return self._run(self._job("move_dead_letters"))["moved"]

    def run_once(self) -> SweepReport:
        """Run the jobs one after the other; one that fails does not stop the others.

        A server that is away does, as it would fail them all. The lock is renewed between
        batches; a sweeper that stalled until another took the lock over stops at the next batch.
        """
        now, acquired = self._run(self._acquire())
        progress = self._progress(now)
        tally = Tally(self.sweeper_id, now, progress)
        if not acquired:
            return self._finish(tally.report(skipped=True))
        away = False
        try:
            for job in self.jobs:
                try:
                    self._run(self._job(job, progress))
                except Exception as exc:  # noqa: BLE001 (one job must not stop the others)
                    tally.failed(job, exc)
                    if away := is_away(exc):
                        break
                if progress.stopped:
                    break
        finally:
            if not away:  # Else the lock ends by itself.
                self._run(self._release())
        report = tally.report()
        if not away:
            self._run(self._store(report))
        return self._finish(report)

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
