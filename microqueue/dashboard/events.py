"""The event stream: changes are read once for all viewers, batched, and sent as messages.

Messages can be resumed, and memory is bounded.
"""

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

from microqueue.dashboard.access import QueueAccess, ReadCache, read_overview
from microqueue.dashboard.feeds import ChangeFeed, FeedEnded, PollFeed
from microqueue.dashboard.options import DashboardOptions
from microqueue.dashboard.task_views import shown_id
from microqueue.errors import MicroqueueError
from microqueue.operations import events
from microqueue.operations.events import Event
from microqueue.sweeper import SweepReport
from microqueue.task_ids import id_key

MAX_TASKS = 20
"""The number of tasks that a message names."""
BATCH_SEC = 0.3
MAX_REMEMBERED = 500
"""The number of messages that a viewer can resume from."""
MAX_WAITING = 200
"""The number of unsent messages at which a slow viewer is disconnected."""
MAX_LOOKED_UP = 100
REOPEN_SEC = 30.0
"""How often to try a change stream again while polling."""
OPENING_SEC = 5.0
LINGER_SEC = 30.0
"""How long changes are read after the last viewer left, who may come back."""
RETRY_SEC = 1.0

Feed: TypeAlias = ChangeFeed | PollFeed
TypedMessage: TypeAlias = tuple[str, dict[str, Any]]

logger = logging.getLogger("microqueue.dashboard")


def build_messages(
    by_type: Mapping[str, Sequence[Event]], at: str, queues: Mapping[Hashable, str]
) -> list[TypedMessage]:
    """Return one message per type, or per sweep, and a last one that asks viewers to refresh.

    Args:
        by_type: The changes by their type.
        at: When they were read.
        queues: By id, the queues of tasks whose change does not name one.
    """
    messages: list[TypedMessage] = []
    for kind, changes in by_type.items():
        if kind == "sweep.finished":
            for one in changes:
                messages += _sweep_messages(at, one.report)
        elif kind.startswith("worker."):
            names = [str(one.id) for one in changes[:MAX_TASKS]]
            messages.append((kind, {"at": at, "count": len(changes), "workers": names}))
        elif kind.startswith("schedule."):
            shown = [{"queue": one.queue, "name": one.id} for one in changes[:MAX_TASKS]]
            counted = {"count": len(changes), "queues": sorted(_queues_of(changes))}
            messages.append((kind, {"at": at, **counted, "schedules": shown}))
        elif kind.startswith("queue."):
            messages.append((kind, {"at": at, "queues": sorted(_queues_of(changes))}))
        elif kind != events.REFRESH:
            shown = [
                {"id": shown_id(one.id), "queue": queues.get(id_key(one.id), one.queue)}
                for one in changes[:MAX_TASKS]
            ]
            named = sorted({one["queue"] for one in shown if one["queue"]} | _queues_of(changes))
            data = {"at": at, "count": len(changes), "queues": named, "tasks": shown}
            messages.append((kind, data))
    touched = _queues_of(by_type.get(events.REFRESH, ()))
    touched |= {name for _, data in messages for name in data.get("queues", ())}
    types = list(dict.fromkeys(kind for kind, _ in messages))
    return [*messages, ("refresh", {"at": at, "queues": sorted(touched), "types": types})]


def _queues_of(changes: Sequence[Event]) -> set[str]:
    return {one.queue for one in changes if one.queue}


def _sweep_messages(at: str, report: SweepReport) -> list[TypedMessage]:
    messages: list[TypedMessage] = []
    if report.reclaimed or report.buried:
        requeue = {"count": report.reclaimed, "dlq_count": report.buried}
        by = f"sweeper {report.sweeper_id}"
        messages.append(("queue.requeue", {"at": at, **requeue, "triggered_by": by}))
    if buried := report.buried + report.expired:
        messages.append(("queue.move_to_dlq", {"at": at, "count": buried}))
    data = {"at": at, "report": report.model_dump(mode="json")}
    return [*messages, ("sweep.finished", data)]


@dataclass(frozen=True)
class Message:
    """A message of the stream, with its data as JSON."""

    number: int
    type: str
    data: str


class Subscriber:
    """An open connection and its unsent messages. It is disconnected if it is too slow."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[Message | None] = asyncio.Queue()
        self.disconnected = False

    def offer(self, messages: Sequence[Message]) -> None:
        """Queue messages, or disconnect if too many are unsent."""
        if self.disconnected:
            return
        if self.waiting.qsize() + len(messages) > MAX_WAITING:
            self.disconnect()  # The browser reconnects and catches up.
            return
        for message in messages:
            self.waiting.put_nowait(message)

    def disconnect(self) -> None:
        """End the connection, and drop its unsent messages."""
        self.disconnected = True
        while not self.waiting.empty():
            self.waiting.get_nowait()
        self.waiting.put_nowait(None)


class EventHub:
    """Reads changes while there are subscribers, and sends them messages."""

    def __init__(
        self, access: QueueAccess, options: DashboardOptions, read_cache: ReadCache
    ) -> None:
        self._access = access
        self._read_cache = read_cache
        self._refresh_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._poll_sec = options.poll_sec
        self._heartbeat_sec = options.heartbeat_sec
        self._epoch = secrets.token_hex(4)
        self._number = 0
        self._remembered: deque[Message] = deque(maxlen=MAX_REMEMBERED)
        self._subscribers: set[Subscriber] = set()
        self._reader: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._interrupted = False
        self.live = "idle"

    @property
    def subscribers(self) -> int:
        """The number of subscribers."""
        return len(self._subscribers)

    async def subscribe(self, last_id: str | None) -> AsyncIterator[dict[str, str]]:
        """Yield a hello, the messages since ``last_id`` if still known, and then new messages."""
        subscriber = Subscriber()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        self._start()
        missed = self._since(last_id)
        self._subscribers.add(subscriber)
        try:
            # Say hello once changes are read: what a viewer loads from then on misses nothing.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._opened.wait(), OPENING_SEC)
            hello = {
                "at": await self._at(),
                "live": self.live,
                "resumed": missed is not None,
                "heartbeat_sec": self._heartbeat_sec,
            }
            greeting = {"event": "hello", "data": json.dumps(hello)}
            # With missed messages, no id: a lost connection resumes from the last message sent.
            yield greeting if missed else {**greeting, "id": self._id(self._number)}
            for message in missed or ():
                yield self._to_event(message)
            while (waiting := await subscriber.waiting.get()) is not None:
                yield self._to_event(waiting)
        finally:
            self._subscribers.discard(subscriber)
            if not self._subscribers:
                loop = asyncio.get_running_loop()
                self._linger_timer = loop.call_later(LINGER_SEC, self.stop)

    def _to_event(self, message: Message) -> dict[str, str]:
        return {"event": message.type, "data": message.data, "id": self._id(message.number)}

    def _id(self, number: int) -> str:
        return f"{self._epoch}-{number}"

    def _since(self, last_id: str | None) -> list[Message] | None:
        """Return the messages after ``last_id``, or ``None`` if they are no longer known."""
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
            self._interrupted = True  # Connected subscribers have missed something.
        if self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read())

    def disconnect_all(self) -> None:
        """End all connections, for which a server that stops would wait."""
        for subscriber in self._subscribers:
            subscriber.disconnect()

    def stop(self) -> None:
        """Stop reading until the next subscriber."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
            self._opened.clear()
            self.live = "idle"
            # Changes from now on are missed, so no one may resume from an earlier message.
            self._epoch = secrets.token_hex(4)
            self._remembered.clear()
        if self._refresh_timer is not None:
            self._refresh_timer.cancel()
            self._refresh_timer = None

    async def _read(self) -> None:
        while True:
            try:
                feed = await self._open()
                self._opened.set()
                if self._interrupted:
                    # It is unknown what was missed, so viewers load everything again.
                    reset = {"at": await self._at(), "queues": [], "types": ["reset"]}
                    self._send([("refresh", reset)])
                while True:
                    try:
                        next_feed = await self._relay(feed)
                    finally:
                        await feed.close()
                    feed = next_feed
            except Exception as exc:  # Subscribers wait, so try again after any error.
                if not self._interrupted:
                    expected = isinstance(exc, PyMongoError | MicroqueueError | FeedEnded)
                    name = type(exc).__name__
                    logger.warning(
                        "event stream interrupted, retrying: %s", name, exc_info=not expected
                    )
                self._interrupted = True
                await asyncio.sleep(RETRY_SEC)

    async def _open(self) -> Feed:
        feed: Feed = ChangeFeed(self._access)
        if not await feed.open():
            overview = functools.partial(read_overview, self._access, self._read_cache)
            feed = PollFeed(self._access, self._poll_sec, overview)
            await feed.open()
        self.live = feed.kind
        return feed

    async def _relay(self, feed: Feed) -> Feed:
        """Send the changes of a feed, until polling can be replaced by a change stream."""
        tried_at = time.monotonic()
        while True:
            await self._send_changes(feed)
            if feed.kind == "polling" and time.monotonic() - tried_at > REOPEN_SEC:
                stream = ChangeFeed(self._access)
                if await stream.open():
                    await self._send_changes(feed)  # Changes before the stream began.
                    self.live = stream.kind
                    return stream
                tried_at = time.monotonic()

    async def _send_changes(self, feed: Feed) -> None:
        changes = await feed.read(BATCH_SEC)
        self._interrupted = False
        if changes:
            self._read_cache.expire()
            self._send(await self._messages(changes))
            self._schedule_refresh()

    def _schedule_refresh(self) -> None:
        """Ask viewers to refresh again once no outdated result is returned any more."""
        if self._refresh_timer is None and (wait_sec := self._read_cache.outdated_sec()):
            loop = asyncio.get_running_loop()
            self._refresh_timer = loop.call_later(wait_sec, self._refresh_again)

    def _refresh_again(self) -> None:
        self._refresh_timer = None
        if self._read_cache.outdated_sec():
            self._schedule_refresh()
        else:
            self._send([("refresh", {"at": None, "queues": [], "types": ["settled"]})])

    async def _messages(self, changes: Sequence[Event]) -> list[TypedMessage]:
        """Return the messages for some changes."""
        at = await self._at()
        by_type: dict[str, list[Event]] = {}
        for change in changes:
            by_type.setdefault(change.type, []).append(change)
        return build_messages(by_type, at, await self._queues(by_type))

    async def _queues(self, by_type: dict[str, list[Event]]) -> dict[Any, str]:
        """Look up the queues of some tasks, which an update does not name."""
        unknown = [
            one.id
            for kind, changes in by_type.items()
            if kind.startswith("task.") and kind != "task.removed"
            for one in changes[:MAX_TASKS]
            if one.queue is None
        ]
        found = await self._access.run(events.read_current(unknown[:MAX_LOOKED_UP]))
        return {id_key(one["_id"]): one.get("queue") for one in found}

    async def _at(self) -> str:
        now = await self._access.now()
        return str(now.isoformat().replace("+00:00", "Z"))

    def _send(self, messages: Sequence[TypedMessage]) -> None:
        written = []
        for kind, data in messages:
            self._number += 1
            message = Message(self._number, kind, json.dumps(data, default=str))
            self._remembered.append(message)
            written.append(message)
        for subscriber in list(self._subscribers):
            subscriber.offer(written)
