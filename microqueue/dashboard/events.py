"""What viewers are told: one message per type, or per sweep, and one that asks to refresh."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pymongo.errors import PyMongoError

from microqueue.dashboard.access import Access, ReadCache, overview_of
from microqueue.dashboard.feeds import ChangeFeed, FeedEnded, PollFeed
from microqueue.dashboard.options import DashboardOptions
from microqueue.dashboard.views import shown_id
from microqueue.errors import MicroqueueError
from microqueue.operations import events, id_order
from microqueue.operations.events import Change
from microqueue.sweeper import SweepReport

MOST_TASKS = 20
Told: TypeAlias = tuple[str, dict[str, Any]]


def messages_of(
    by_type: Mapping[str, Sequence[Change]], at: str, queues: Mapping[Hashable, str]
) -> list[Told]:
    """Tell what happened. ``queues`` are those of tasks whose change does not say, by id."""
    messages: list[Told] = []
    for kind, some in by_type.items():
        if kind == "sweep.finished":
            for one in some:
                messages += _sweep_messages(at, one.report)
        elif kind.startswith("worker."):
            names = [str(one.id) for one in some[:MOST_TASKS]]
            messages.append((kind, {"at": at, "count": len(some), "workers": names}))
        elif kind.startswith("queue."):
            messages.append((kind, {"at": at, "queues": sorted(_named(some))}))
        elif kind != events.REFRESH:
            shown = [
                {"id": shown_id(one.id), "queue": queues.get(id_order.key(one.id), one.queue)}
                for one in some[:MOST_TASKS]
            ]
            named = sorted({one["queue"] for one in shown if one["queue"]} | _named(some))
            data = {"at": at, "count": len(some), "queues": named, "tasks": shown}
            messages.append((kind, data))
    touched = _named(by_type.get(events.REFRESH, ()))
    touched |= {name for _, data in messages for name in data.get("queues", ())}
    types = list(dict.fromkeys(kind for kind, _ in messages))
    return [*messages, ("refresh", {"at": at, "queues": sorted(touched), "types": types})]


def _named(some: Sequence[Change]) -> set[str]:
    return {one.queue for one in some if one.queue}


def _sweep_messages(at: str, report: SweepReport) -> list[Told]:
    messages: list[Told] = []
    if report.reclaimed or report.buried:
        requeue = {"count": report.reclaimed, "dlq_count": report.buried}
        by = f"sweeper {report.sweeper_id}"
        messages.append(("queue.requeue", {"at": at, **requeue, "triggered_by": by}))
    if buried := report.buried + report.expired:
        messages.append(("queue.move_to_dlq", {"at": at, "count": buried}))
    data = {"at": at, "report": report.model_dump(mode="json")}
    return [*messages, ("sweep.finished", data)]


BATCH_SEC = 0.3
MOST_REMEMBERED = 500
MOST_WAITING = 200
MOST_LOOKED_UP = 100
REOPEN_SEC = 30.0
OPENING_SEC = 5.0
LINGER_SEC = 30.0
"""How long changes are read on after the last viewer left, who may come back."""
RETRY_SEC = 1.0

logger = logging.getLogger("microqueue.dashboard")


Feed: TypeAlias = ChangeFeed | PollFeed


@dataclass(frozen=True)
class Message:
    """One message of the stream, as it is sent."""

    number: int
    type: str
    data: str


class Subscriber:
    """One open connection: what waits to be sent to it. One that is too slow is dropped."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[Message | None] = asyncio.Queue()
        self.dropped = False

    def offer(self, messages: Sequence[Message]) -> None:
        """Put messages in line, or end a connection that does not keep up."""
        if self.dropped:
            return
        if self.waiting.qsize() + len(messages) > MOST_WAITING:
            self.drop()  # It comes back by itself, and catches up.
            return
        for message in messages:
            self.waiting.put_nowait(message)

    def drop(self) -> None:
        """End the connection, without what waits."""
        self.dropped = True
        while not self.waiting.empty():
            self.waiting.get_nowait()
        self.waiting.put_nowait(None)


class EventHub:
    """Reads changes while somebody looks on, and sends them to all who do."""

    def __init__(self, access: Access, options: DashboardOptions, read_cache: ReadCache) -> None:
        self._access = access
        self._read_cache = read_cache
        self._trailing: asyncio.TimerHandle | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._poll_sec = options.poll_sec
        self._heartbeat_sec = options.heartbeat_sec
        self._epoch = secrets.token_hex(4)
        self._number = 0
        self._remembered: deque[Message] = deque(maxlen=MOST_REMEMBERED)
        self._viewers: set[Subscriber] = set()
        self._reader: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._interrupted = False
        self.live = "idle"

    @property
    def viewers(self) -> int:
        """How many look on."""
        return len(self._viewers)

    async def follow(self, last_id: str | None) -> AsyncIterator[dict[str, str]]:
        """Give messages for as long as the caller takes them, first those that it missed."""
        viewer = Subscriber()
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        self._start()
        missed = self._since(last_id)
        self._viewers.add(viewer)
        try:
            # From here on nothing is missed, so a viewer may read what there is.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._opened.wait(), OPENING_SEC)
            hello = {
                "at": await self._at(),
                "live": self.live,
                "resumed": missed is not None,
                "heartbeat_sec": self._heartbeat_sec,
            }
            greeting = {"event": "hello", "data": json.dumps(hello)}
            # Not before what was missed has been sent: the next connection resumes from there.
            yield greeting if missed else {**greeting, "id": self._id(self._number)}
            for message in missed or ():
                yield self._written(message)
            while (following := await viewer.waiting.get()) is not None:
                yield self._written(following)
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                loop = asyncio.get_running_loop()
                self._resting = loop.call_later(LINGER_SEC, self.stop)

    def _written(self, message: Message) -> dict[str, str]:
        return {"event": message.type, "data": message.data, "id": self._id(message.number)}

    def _id(self, number: int) -> str:
        return f"{self._epoch}-{number}"

    def _since(self, last_id: str | None) -> list[Message] | None:
        """Give what came after a message, or ``None`` if that is no longer known."""
        epoch, _, number = (last_id or "").partition("-")
        if epoch != self._epoch or not number.isdecimal():
            return None
        last = int(number[:18])
        oldest = self._remembered[0].number if self._remembered else self._number + 1
        if not oldest - 1 <= last <= self._number:
            return None
        return [message for message in self._remembered if message.number > last]

    def _start(self) -> None:
        if self._reader is not None and self._reader.done():
            self.stop()
            self._interrupted = True  # Those who still look on have missed something.
        if self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read())

    def dismiss(self) -> None:
        """End all connections: the server stops, and would wait for them."""
        for viewer in self._viewers:
            viewer.drop()

    def stop(self) -> None:
        """Read no more, until somebody looks on again."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
            self._opened.clear()
            self.live = "idle"
            # What happens from now on is missed, so nobody can resume from before.
            self._epoch = secrets.token_hex(4)
            self._remembered.clear()
        if self._trailing is not None:
            self._trailing.cancel()
            self._trailing = None

    async def _read(self) -> None:
        while True:
            try:
                feed = await self._open()
                self._opened.set()
                if self._interrupted:
                    # What was missed is not known, so everybody reads everything again.
                    reset = {"at": await self._at(), "queues": [], "types": ["reset"]}
                    self._send([("refresh", reset)])
                while True:
                    try:
                        following = await self._relay(feed)
                    finally:
                        await feed.close()
                    feed = following
            except Exception as exc:  # Viewers wait, whatever it was.
                if not self._interrupted:
                    expected = isinstance(exc, PyMongoError | MicroqueueError | FeedEnded)
                    name = type(exc).__name__
                    logger.warning("events are interrupted: %s", name, exc_info=not expected)
                self._interrupted = True
                await asyncio.sleep(RETRY_SEC)

    async def _open(self) -> Feed:
        feed: Feed = ChangeFeed(self._access)
        if not await feed.open():
            overview = functools.partial(overview_of, self._access, self._read_cache)
            feed = PollFeed(self._access, self._poll_sec, overview)
            await feed.open()
        self.live = feed.kind
        return feed

    async def _relay(self, feed: Feed) -> Feed:
        """Send on what a feed tells, until there is a better one."""
        tried_at = time.monotonic()
        while True:
            await self._pass_on(feed)
            tired = time.monotonic() - tried_at > REOPEN_SEC
            if feed.kind == "polling" and tired:
                stream = ChangeFeed(self._access)
                if await stream.open():
                    await self._pass_on(feed)  # What happened before the stream began.
                    self.live = stream.kind
                    return stream
                tried_at = time.monotonic()

    async def _pass_on(self, feed: Feed) -> None:
        found = await feed.read(BATCH_SEC)
        self._interrupted = False
        if found:
            self._read_cache.expire()
            self._send(await self._batched(found))
            self._follow_up()

    def _follow_up(self) -> None:
        """Ask to refresh once more, when answers from before the change are no longer given."""
        if self._trailing is None and (wait_sec := self._read_cache.outdated_sec()):
            loop = asyncio.get_running_loop()
            self._trailing = loop.call_later(wait_sec, self._settled)

    def _settled(self) -> None:
        self._trailing = None
        if self._read_cache.outdated_sec():
            self._follow_up()
        else:
            self._send([("refresh", {"at": None, "queues": [], "types": ["settled"]})])

    async def _batched(self, found: Sequence[Change]) -> list[tuple[str, dict[str, Any]]]:
        """Make one message per type, or per sweep, and one that asks to refresh."""
        at = await self._at()
        by_type: dict[str, list[Change]] = {}
        for change in found:
            by_type.setdefault(change.type, []).append(change)
        return messages_of(by_type, at, await self._queues(by_type))

    async def _queues(self, by_type: dict[str, list[Change]]) -> dict[Any, str]:
        """Find out in which queues some of the tasks are: an update does not say."""
        unknown = [
            one.id
            for kind, some in by_type.items()
            if kind.startswith("task.") and kind != "task.removed"
            for one in some[:MOST_TASKS]
            if one.queue is None
        ]
        found = await self._access.run(events.read_current(unknown[:MOST_LOOKED_UP]))
        return {id_order.key(one["_id"]): one.get("queue") for one in found}

    async def _at(self) -> str:
        now = await self._access.now()
        return str(now.isoformat().replace("+00:00", "Z"))

    def _send(self, messages: Sequence[tuple[str, dict[str, Any]]]) -> None:
        written = []
        for kind, data in messages:
            self._number += 1
            message = Message(self._number, kind, json.dumps(data, default=str))
            self._remembered.append(message)
            written.append(message)
        for viewer in list(self._viewers):
            viewer.offer(written)
