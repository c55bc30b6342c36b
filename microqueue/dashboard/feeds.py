"""The sources of events: a change stream, or polling if the server has none."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import anyio
from pymongo.errors import PyMongoError

from microqueue.dashboard.access import QueueAccess
from microqueue.drivers.change_stream import OPEN_SEC, SILENT_SEC, abandon
from microqueue.drivers.driver import CLOSE_SEC, awaited, bounded_async
from microqueue.insights import Overview, parse_report
from microqueue.operations import audit, diagnostics, events, pauses, poll, schedules, workers
from microqueue.operations.call import dlq_collection_name
from microqueue.operations.events import Event
from microqueue.sweeper import SweepReport
from microqueue.task_ids import id_key

STREAM_WAIT_SEC = 0.25
COUNTS_SEC = 3.0
"""How often polling compares the counts of all queues, which cost more than new tasks."""
MAX_WORKERS = 10_000
MAX_MOVING = 10_000
"""The number of tasks remembered between their copy to the DLQ collection and their deletion."""

logger = logging.getLogger("microqueue.dashboard")


class FeedEnded(Exception):
    """The feed has ended, and must be opened again."""


class ChangeFeed:
    """Reads a change stream of tasks, dead letters, workers, pauses, schedules and sweeps."""

    kind = "change_stream"

    def __init__(self, access: QueueAccess) -> None:
        self._access = access
        self._stream: Any = None
        collections = access.collections
        self._tasks = collections.name
        self._dead_letters = dlq_collection_name(collections.name)
        self._workers = collections.workers.name
        self._locks = collections.locks.name
        self._pauses = collections.pauses.name
        self._schedules = collections.schedules.name
        self._gone_at: dict[Any, datetime] = {}
        self._moving: set[Any] = set()

    async def open(self) -> bool:
        """Open the stream; return whether the server has one."""
        access = self._access
        if access.collections.in_memory:
            return False
        watched = [self._workers, self._locks, self._pauses, self._schedules]
        selection = events.pipeline([self._tasks, self._dead_letters, *watched])
        collections = access.collections
        database = collections.database.with_options(codec_options=collections.codec_options)
        try:
            async with bounded_async(OPEN_SEC):
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
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(PyMongoError):
                async with bounded_async(CLOSE_SEC):
                    await self._access.call(stream.close)

    async def read(self, for_sec: float) -> list[Event]:
        """Return the next change and those within ``for_sec`` of it; none if none comes soon.

        Raises:
            FeedEnded: The stream has ended, or its connection is silent.
        """
        if self._access.blocking:
            reading = asyncio.ensure_future(self._access.call(self._drain, for_sec))
        else:
            reading = asyncio.ensure_future(self._drain_awaited(for_sec))
        try:
            await asyncio.wait({reading}, timeout=2 * STREAM_WAIT_SEC + for_sec + SILENT_SEC)
        finally:
            if not reading.done():
                await self._abandon(reading)
        if self._stream is None or reading.cancelled():
            raise FeedEnded
        found = reading.result()
        if not found and not self._stream.alive:
            raise FeedEnded
        return [change for one in found if (change := self._parse(one)) is not None]

    async def _abandon(self, reading: asyncio.Future[Any]) -> None:
        """Cancel a read; if the server does not answer, leave the stream to it.

        Only the reader may close a stream, and a dead connection may block it for minutes.
        """
        reading.cancel()
        await asyncio.wait({reading}, timeout=CLOSE_SEC)
        if not reading.done():
            self._stream = None
            abandon(reading)

    def _drain(self, for_sec: float) -> list[Any]:
        stream, found = self._stream, list[Any]()
        deadline = float("inf")
        while time.monotonic() < deadline:
            change = stream.try_next()
            if change is None:
                break
            deadline = min(deadline, time.monotonic() + for_sec)
            found.append(change)
        return found

    async def _drain_awaited(self, for_sec: float) -> list[Any]:
        stream, found = self._stream, list[Any]()
        deadline = float("inf")
        while time.monotonic() < deadline:
            change = await awaited(stream.try_next())
            if change is None:
                break
            deadline = min(deadline, time.monotonic() + for_sec)
            found.append(change)
        return found

    def _parse(self, change: Any) -> Event | None:
        parsers: dict[str, Callable[[Any], Event | None]] = {
            self._tasks: self._parse_task,
            self._dead_letters: self._parse_dead_letter,
            self._locks: self._parse_sweep,
            self._pauses: self._parse_pause,
            self._workers: self._parse_worker,
            self._schedules: self._parse_schedule,
        }
        parse = parsers.get(change.get("ns", {}).get("coll"))
        return None if parse is None else parse(change)

    def _parse_schedule(self, change: Any) -> Event | None:
        return events.schedule_event(change, self._tasks)

    def _parse_task(self, change: Any) -> Event | None:
        task_id = change.get("documentKey", {}).get("_id")
        key = id_key(task_id)
        if change["operationType"] == "delete" and key in self._moving:
            self._moving.remove(key)
            return None  # It moved to the DLQ collection; its failure was reported before.
        return events.task_event(change)

    def _parse_dead_letter(self, change: Any) -> Event | None:
        if change["operationType"] == "delete":
            return None  # A tombstone of a dead letter that was replayed or discarded before.
        if not events.is_new_dead_letter(change):
            return events.task_event(change)
        if len(self._moving) >= MAX_MOVING:
            self._moving.clear()
        self._moving.add(id_key(change["documentKey"]["_id"]))
        return None

    def _parse_sweep(self, change: Any) -> Event | None:
        name = change.get("documentKey", {}).get("_id")
        own = name == f"report:{self._access.collections.name}"
        report = parse_report(events.sweep_report_in(change)) if own else None
        return Event("sweep.finished", report=report) if report else None

    def _parse_pause(self, change: Any) -> Event | None:
        name = str(change.get("documentKey", {}).get("_id"))
        collection, _, queue = name.partition("/")
        if collection != self._access.collections.name:
            return None
        deleted = change["operationType"] == "delete"
        return Event("queue.resumed" if deleted else "queue.paused", queue=queue)

    def _parse_worker(self, change: Any) -> Event | None:
        registration = str(change.get("documentKey", {}).get("_id"))
        worker_id, _, collection = registration.rpartition("@")
        if collection != self._access.collections.name:
            return None
        if change["operationType"] == "delete":
            gone_at = self._gone_at.pop(worker_id, None)
            gone = gone_at is not None and gone_at <= self._access.core.clock.now()
            return Event("worker.gone" if gone else "worker.left", worker_id)
        updated = change.get("updateDescription", {}).get("updatedFields", {})
        known = {**(change.get("fullDocument") or {}), **updated}
        if gone_at := known.get("gone_at"):
            if len(self._gone_at) >= MAX_WORKERS:
                self._gone_at.clear()
            self._gone_at[worker_id] = gone_at
        return Event("worker.started", worker_id) if change["operationType"] == "insert" else None


class PollFeed:
    """Polls for running and new tasks, and reports the differences.

    A replay or a discard is not visible in these. It is detected by the newest entry of the audit
    log, and by the counts of the shared ``overview``.
    """

    kind = "polling"

    def __init__(
        self,
        access: QueueAccess,
        every_sec: float,
        overview: Callable[[], Awaitable[Overview]] | None = None,
    ) -> None:
        self._access = access
        self._every_sec = every_sec
        self._before: events.Snapshot | None = None
        self._workers: dict[str, datetime] = {}
        self._sweeps: dict[datetime, SweepReport] = {}
        self._paused: set[str] = set()
        self._schedules: Mapping[tuple[str, str], tuple[Any, Any]] = {}
        self._overview = overview
        self._counts: Mapping[str, tuple[int, ...]] = {}
        self._counted_at = float("-inf")
        self._newest_action: str | None = None

    async def open(self) -> bool:
        """Take the first snapshot."""
        self._before = await self._snapshot()
        self._workers = await self._workers_until()
        self._sweeps = await self._last_sweeps()
        self._paused = await self._paused_now()
        self._schedules = await self._schedule_versions()
        self._newest_action = await self._last_action()
        await self._changed_counts()
        return True

    async def close(self) -> None:
        """There is nothing to close."""

    async def read(self, for_sec: float) -> list[Event]:  # noqa: ARG002 (a snapshot is one batch)
        """Wait, take the next snapshot, and return what changed."""
        await anyio.sleep(self._every_sec)
        before, after = self._before, await self._snapshot()
        assert before is not None  # noqa: S101 (opened before it is read)
        left = [one["_id"] for key, one in before.running.items() if key not in after.running]
        back = await self._access.run(events.read_current(left[: events.MOST_NEW]))
        self._before = after
        return [*events.compare(before, after, back), *await self._other_changes()]

    async def _snapshot(self) -> events.Snapshot:
        now = await self._access.now()
        since = now if self._before is None else self._before.at
        queues = await self._access.run(diagnostics.queue_names())
        snapshot: events.Snapshot = await self._access.run(events.snapshot(since, now, queues))
        return snapshot

    async def _other_changes(self) -> Sequence[Event]:
        found: list[Event] = []
        before, self._workers = self._workers, await self._workers_until()
        found += [Event("worker.started", one) for one in self._workers if one not in before]
        now = self._access.core.clock.now()
        for worker_id, gone_at in before.items():
            if worker_id not in self._workers:
                found.append(Event("worker.gone" if gone_at <= now else "worker.left", worker_id))
        reported, self._sweeps = self._sweeps, await self._last_sweeps()
        new = [report for at, report in self._sweeps.items() if at not in reported]
        found += [Event("sweep.finished", report=report) for report in new]
        paused, self._paused = self._paused, await self._paused_now()
        found += [Event("queue.paused", queue=name) for name in self._paused - paused]
        found += [Event("queue.resumed", queue=name) for name in paused - self._paused]
        versions, self._schedules = self._schedules, await self._schedule_versions()
        found += events.compare_schedules(versions, self._schedules)
        action, self._newest_action = self._newest_action, await self._last_action()
        if action != self._newest_action:
            found.append(Event(events.REFRESH))
        return [*found, *await self._changed_counts()]

    async def _changed_counts(self) -> list[Event]:
        """Return a refresh for each queue whose counts changed, if it is time to compare them."""
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
        return [Event(events.REFRESH, queue=name) for name in sorted(differing)]

    async def _last_action(self) -> str | None:
        newest: str | None = await self._access.run(audit.newest(self._access.collections.name))
        return newest

    async def _schedule_versions(self) -> Mapping[tuple[str, str], tuple[Any, Any]]:
        found: Mapping[tuple[str, str], tuple[Any, Any]] = await self._access.run(
            schedules.versions(self._access.collections.name)
        )
        return found

    async def _paused_now(self) -> set[str]:
        paused = await self._access.run(pauses.list_paused(self._access.collections.name))
        return {one.queue for one in paused}

    async def _workers_until(self) -> dict[str, datetime]:
        """Return when each registered worker counts as gone, unless it sends a heartbeat."""
        registered = await self._access.run(workers.list_workers(self._access.collections.name))
        return {one.id: one.gone_at() for one in registered}

    async def _last_sweeps(self) -> dict[datetime, SweepReport]:
        """Return the last sweep, and the last one that changed something, by their time."""
        last, active = await self._access.call(self._access.insights.last_sweeps)
        return {report.at: report for report in (active, last) if report is not None}


def _coarse(estimate: int) -> int:
    """Round an estimate to one digit, because two estimates of a queue differ by chance."""
    return int(round(estimate, 1 - len(str(estimate))))
