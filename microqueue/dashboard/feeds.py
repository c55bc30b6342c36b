"""Where events come from: a change stream where there is one, else a look every second."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import anyio
from pymongo.errors import PyMongoError

from microqueue.dashboard.access import Access
from microqueue.drivers.asynchronous import settled
from microqueue.insights import Overview, read_report
from microqueue.operations import audit, diagnostics, events, id_order, pauses, poll, workers
from microqueue.operations.call import dlq_collection_name
from microqueue.operations.events import Change
from microqueue.sweeper import SweepReport

STREAM_WAIT_SEC = 0.25
COUNTS_SEC = 3.0
"""How often a look compares the counts of all queues, which cost more than what is new."""
MOST_WORKERS = 10_000
MOST_MOVING = 10_000
"""Of how many tasks it is remembered that they are copied, and not yet deleted where they were."""

logger = logging.getLogger("microqueue.dashboard")


class FeedEnded(Exception):
    """A feed will tell nothing any more."""


class ChangeFeed:
    """Reads a change stream of the tasks, the workers and the sweeper's report."""

    kind = "change_stream"

    def __init__(self, access: Access) -> None:
        self._access = access
        self._stream: Any = None
        places = access.collections
        self._tasks = places.name
        self._letters = dlq_collection_name(places.name)
        self._workers = places.workers.name
        self._locks = places.locks.name
        self._pauses = places.pauses.name
        self._gone_at: dict[Any, datetime] = {}
        self._moving: set[Any] = set()

    async def open(self) -> bool:
        """Open the stream; tell whether the server has one."""
        access = self._access
        if access.collections.in_memory:
            return False
        selection = events.pipeline(
            [self._tasks, self._letters, self._workers, self._locks, self._pauses]
        )
        places = access.collections
        database = places.database.with_options(codec_options=places.codec_options)
        try:
            begin = poll.from_now_on(await access.call(database.command, "hello"))
            self._stream = begin and await access.call(
                database.watch,
                selection,
                max_await_time_ms=int(STREAM_WAIT_SEC * 1000),
                start_at_operation_time=begin,
            )
        except PyMongoError as exc:
            logger.info("no change stream, polling instead: %s", type(exc).__name__)
            return False
        return self._stream is not None

    async def close(self) -> None:
        """Close the stream."""
        if self._stream is not None:
            await self._access.call(self._stream.close)

    async def read(self, for_sec: float) -> list[Change]:
        """Wait for a change, then gather what comes within ``for_sec``."""
        if self._access.blocking:
            found = await self._access.call(self._drain, for_sec)
        else:
            found = await self._drain_awaited(for_sec)
        if not found and not self._stream.alive:
            raise FeedEnded
        return [change for one in found if (change := self._understand(one)) is not None]

    def _drain(self, for_sec: float) -> list[Any]:
        found: list[Any] = []
        deadline = float("inf")
        while time.monotonic() < deadline:
            change = self._stream.try_next()
            if change is None:
                break
            deadline = min(deadline, time.monotonic() + for_sec)
            found.append(change)
        return found

    async def _drain_awaited(self, for_sec: float) -> list[Any]:
        found: list[Any] = []
        deadline = float("inf")
        while time.monotonic() < deadline:
            change = await settled(self._stream.try_next())
            if change is None:
                break
            deadline = min(deadline, time.monotonic() + for_sec)
            found.append(change)
        return found

    def _understand(self, change: Any) -> Change | None:
        place = change.get("ns", {}).get("coll")
        if place == self._tasks:
            return self._of_task(change)
        if place == self._letters:
            return self._of_letter(change)
        if place == self._locks:
            return self._of_sweeper(change)
        if place == self._pauses:
            return self._of_pause(change)
        if place == self._workers:
            return self._of_worker(change)
        return None

    def _of_task(self, change: Any) -> Change | None:
        task_id = change.get("documentKey", {}).get("_id")
        key = id_order.key(task_id)
        if change["operationType"] == "delete" and key in self._moving:
            self._moving.remove(key)
            return None  # It is among the dead letters now; that it failed was told.
        return events.task_change(change)

    def _of_letter(self, change: Any) -> Change | None:
        if change["operationType"] == "delete":
            return None  # A tombstone, whose letter was replayed or discarded long ago.
        if not events.is_new_dead_letter(change):
            return events.task_change(change)
        if len(self._moving) >= MOST_MOVING:
            self._moving.clear()
        self._moving.add(id_order.key(change["documentKey"]["_id"]))
        return None

    def _of_sweeper(self, change: Any) -> Change | None:
        name = change.get("documentKey", {}).get("_id")
        ours = name == f"report:{self._access.collections.name}"
        report = read_report(events.sweep_report_in(change)) if ours else None
        return Change("sweep.finished", report=report) if report else None

    def _of_pause(self, change: Any) -> Change | None:
        name = str(change.get("documentKey", {}).get("_id"))
        place, _, queue = name.partition("/")
        if place != self._access.collections.name:
            return None
        deleted = change["operationType"] == "delete"
        return Change("queue.resumed" if deleted else "queue.paused", queue=queue)

    def _of_worker(self, change: Any) -> Change | None:
        registration = str(change.get("documentKey", {}).get("_id"))
        worker_id, _, place = registration.rpartition("@")
        if place != self._access.collections.name:
            return None
        if change["operationType"] == "delete":
            gone_at = self._gone_at.pop(worker_id, None)
            gone = gone_at is not None and gone_at <= self._access.core.clock.now()
            return Change("worker.gone" if gone else "worker.left", worker_id)
        described = change.get("updateDescription", {}).get("updatedFields", {})
        known = {**(change.get("fullDocument") or {}), **described}
        if gone_at := known.get("gone_at"):
            if len(self._gone_at) >= MOST_WORKERS:
                self._gone_at.clear()
            self._gone_at[worker_id] = gone_at
        return Change("worker.started", worker_id) if change["operationType"] == "insert" else None


class PollFeed:
    """Looks every so often at what runs and what is new, and tells the difference.

    A replay or a discard leaves nothing to be seen of that. It is found by the newest entry of
    the audit log, and by the counts of the ``overview`` that all viewers share.
    """

    kind = "polling"

    def __init__(
        self,
        access: Access,
        every_sec: float,
        overview: Callable[[], Awaitable[Overview]] | None = None,
    ) -> None:
        self._access = access
        self._every_sec = every_sec
        self._before: events.Snapshot | None = None
        self._workers: dict[str, bool] = {}
        self._sweeps: dict[datetime, SweepReport] = {}
        self._paused: set[str] = set()
        self._overview = overview
        self._counts: Mapping[str, tuple[int, ...]] = {}
        self._counted_at = float("-inf")
        self._acted: str | None = None

    async def open(self) -> bool:
        """Take the first look."""
        self._before = await self._look()
        self._workers = await self._alive()
        self._sweeps = await self._last_sweeps()
        self._paused = await self._paused_now()
        self._acted = await self._last_action()
        await self._recounted()
        return True

    async def close(self) -> None:
        """There is nothing to close."""

    async def read(self, for_sec: float) -> list[Change]:  # noqa: ARG002 (a look is one batch)
        """Wait for the next look, and tell what is different."""
        await anyio.sleep(self._every_sec)
        before, after = self._before, await self._look()
        assert before is not None  # noqa: S101 (opened before it is read)
        left = [one["_id"] for key, one in before.running.items() if key not in after.running]
        back = await self._access.run(events.read_current(left[: events.MOST_NEW]))
        self._before = after
        return [*events.compare(before, after, back), *await self._others()]

    async def _look(self) -> events.Snapshot:
        now = await self._access.now()
        since = now if self._before is None else self._before.at
        queues = await self._access.run(diagnostics.queue_names())
        glance: events.Snapshot = await self._access.run(events.snapshot(since, now, queues))
        return glance

    async def _others(self) -> Sequence[Change]:
        found: list[Change] = []
        before, self._workers = self._workers, await self._alive()
        found += [Change("worker.started", one) for one in self._workers if one not in before]
        for worker_id, alive in before.items():
            if worker_id not in self._workers:
                found.append(Change("worker.left" if alive else "worker.gone", worker_id))
        told, self._sweeps = self._sweeps, await self._last_sweeps()
        new = [report for at, report in self._sweeps.items() if at not in told]
        found += [Change("sweep.finished", report=report) for report in new]
        paused, self._paused = self._paused, await self._paused_now()
        found += [Change("queue.paused", queue=name) for name in self._paused - paused]
        found += [Change("queue.resumed", queue=name) for name in paused - self._paused]
        acted, self._acted = self._acted, await self._last_action()
        if acted != self._acted:
            found.append(Change(events.REFRESH))
        return [*found, *await self._recounted()]

    async def _recounted(self) -> list[Change]:
        """Tell of which queues the counts are no longer the same, if it is time to look."""
        if self._overview is None or time.monotonic() - self._counted_at < COUNTS_SEC:
            return []
        before, overview = self._counts, await self._overview()
        self._counted_at = time.monotonic()
        self._counts = {
            one.queue: tuple(
                _coarse(getattr(one, name)) if name in one.estimated else getattr(one, name)
                for name in ("ready", "delayed", "processing", "failed")
            )
            for one in overview.queues
        }
        differing = dict(before.items() ^ self._counts.items())
        return [Change(events.REFRESH, queue=name) for name in sorted(differing)]

    async def _last_action(self) -> str | None:
        newest: str | None = await self._access.run(audit.newest(self._access.collections.name))
        return newest

    async def _paused_now(self) -> set[str]:
        paused = await self._access.run(pauses.list_paused(self._access.collections.name))
        return {one.queue for one in paused}

    async def _alive(self) -> dict[str, bool]:
        now = await self._access.now()
        registered = await self._access.run(workers.list_workers(self._access.collections.name))
        return {one.id: one.gone_at() > now for one in registered}

    async def _last_sweeps(self) -> dict[datetime, SweepReport]:
        """Read the last sweep that moved something, and the last of all, by when they were."""
        last, active = await self._access.call(self._access.insights.last_sweeps)
        return {report.at: report for report in (active, last) if report is not None}


def _coarse(estimate: int) -> int:
    """Round an estimate to one digit: two of the same queue differ by chance."""
    return int(round(estimate, 1 - len(str(estimate))))
