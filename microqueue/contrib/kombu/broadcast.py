"""Broadcast: how transient queues receive the messages of fanout and topic exchanges.

Such an exchange has a topic, in which each message is stored once. Every process that consumes a
bound queue reads the topic, from where it was when the queue was bound. A message needs no
acknowledgement: a process that ends forgets what it has not delivered. So two processes that
consume one transient queue each receive every message.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from weakref import WeakSet

from microqueue.contrib.kombu.deliveries import logger
from microqueue.contrib.kombu.messages import time_to_live
from microqueue.contrib.kombu.repeated import RepeatedErrors
from microqueue.contrib.kombu.routing import DIRECT, matching_queues
from microqueue.errors import InvalidArgument, MicroqueueError
from microqueue.message import Gap, Message
from microqueue.operations.broker import Routes
from microqueue.queue import Queue
from microqueue.subscription import Subscription
from microqueue.topic import LONGEST_NAME, NOW, START, Topic

TOPIC_PREFIX = "exchange."
READ_SEC = 1.0
"""How long one read waits for messages."""
CATCH_UP_SEC = 5.0
"""How long to read what was published so far, where no thread reads it."""
AHEAD = 1000
"""How many messages are read ahead of their delivery."""
RETRY_SEC = 1.0
END_SEC = 2.0
"""How long closing waits until the cursors are closed."""


def topic_name(exchange: str) -> str:
    """Return the name of the topic of an exchange; a name too long for a topic gets a hash."""
    name = TOPIC_PREFIX + exchange
    if len(name) <= LONGEST_NAME and name.isprintable():
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    printable = "".join(letter for letter in name if letter.isprintable())
    return f"{printable[: LONGEST_NAME - len(digest) - 1]}~{digest}"


@dataclass(eq=False, slots=True)
class Broadcast:
    """A message of a topic, for one queue."""

    queue: BroadcastQueue
    message: Message
    deliveries: int = 0

    def requeue(self, *, counted: bool) -> None:
        """Return it to the front of its queue, in this process."""
        self.queue.put_back(self, counted=counted)

    def is_expired(self, now: datetime, ttl: timedelta | None) -> bool:
        """Return whether its time to live is over.

        Raises:
            InvalidArgument: Its body is no message of Kombu.
        """
        published_at = self.message.published_at
        limit = time_to_live(self.message.body, ttl)
        return limit is not None and published_at is not None and now >= published_at + limit


def report_dropped(queue: str, message: Message, error: InvalidArgument) -> None:
    """Log that a message of a topic is no message of Kombu."""
    fields = {"queue": queue, "position": message.position, "dropped": True}
    logger.error("message %s is dropped: %s", message.position, error, extra=fields)


class BroadcastQueue:
    """The messages of a transient queue that this process has read and not delivered yet.

    Args:
        name: The name of the queue.
        ttl: How long a message may wait, besides its own limit.
        delivery_limit: How often a message is delivered, if it is requeued; None: no limit.
    """

    def __init__(self, name: str, *, ttl: timedelta | None, delivery_limit: int | None) -> None:
        self.name = name
        self._ttl = ttl
        self._delivery_limit = delivery_limit
        self._messages: deque[Broadcast] = deque()
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._sources: dict[str, _Source] = {}
        self._sources_lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """How many messages wait."""
        return len(self._messages)

    # Read

    def read_from(self, sources: Iterable[_Source]) -> None:
        """Read these topics and no others. One that was read before continues where it was."""
        with self._sources_lock:
            former, self._sources = self._sources, {}
            for one in sources:
                known = former.pop(one.topic.name, None)
                if known is not None:
                    known.matches = one.matches
                self._sources[one.topic.name] = known or one
            self._start_or_stop()
        for gone in former.values():
            gone.stop()

    def listen(self, listener: Callable[[], None]) -> None:
        """Read in the background, and call the listener when there are messages to take."""
        with self._sources_lock:
            self._listeners = [*self._listeners, listener]
            self._start_or_stop()
        if self._messages:
            listener()

    def leave(self, listener: Callable[[], None]) -> None:
        """Call the listener no more; stop reading after the last one."""
        with self._sources_lock:
            listeners = list(self._listeners)
            listeners.remove(listener)
            self._listeners = listeners
            self._start_or_stop()

    def _start_or_stop(self) -> None:
        for source in self._sources.values():
            if self._listeners:
                source.start(self)
            else:
                source.stop()

    def catch_up(self) -> None:
        """Read what was published so far, unless it is read in the background."""
        with self._sources_lock:
            if not self._listeners:
                for source in self._sources.values():
                    source.catch_up(self)

    def close(self) -> None:
        """Stop reading, and forget all messages."""
        self.read_from(())
        self.clear()

    # Messages

    def put(self, messages: Iterable[Message]) -> None:
        """Add messages."""
        with self._changed:
            self._messages.extend(Broadcast(self, one) for one in messages)
        self.notify()

    def put_back(self, broadcast: Broadcast, *, counted: bool) -> None:
        """Return a message to the front, unless it was delivered too often."""
        if not counted:
            broadcast.deliveries -= 1
        limit = self._delivery_limit
        if limit is not None and broadcast.deliveries >= limit:
            logger.error(
                "message %s of queue %r is dropped: it was requeued after delivery %d, the last "
                "one allowed",
                broadcast.message.position, self.name, broadcast.deliveries,
                extra={"queue": self.name, "deliveries": broadcast.deliveries, "dropped": True},
            )  # fmt: skip
            return
        with self._changed:
            self._messages.appendleft(broadcast)
        self.notify()

    def take(self, limit: int, now: datetime) -> list[Broadcast]:
        """Remove up to ``limit`` messages, and return those whose time to live is not over."""
        taken: list[Broadcast] = []
        with self._changed:
            while self._messages and len(taken) < limit:
                one = self._messages.popleft()
                try:
                    if one.is_expired(now, self._ttl):
                        continue
                except InvalidArgument as exc:
                    report_dropped(self.name, one.message, exc)
                    continue
                one.deliveries += 1
                taken.append(one)
            self._changed.notify_all()
        return taken

    def clear(self) -> int:
        """Forget all messages; return how many."""
        with self._changed:
            count = len(self._messages)
            self._messages.clear()
            self._changed.notify_all()
        return count

    @property
    def has_room(self) -> bool:
        """Whether more messages should be read."""
        return len(self._messages) < AHEAD

    def wait_for_room(self) -> None:
        """Wait a while for :attr:`has_room`."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_room, READ_SEC)

    def notify(self) -> None:
        """Call the listeners: there are messages to take."""
        for listener in set(self._listeners):
            listener()


class _Source:
    """The topic of an exchange to which a queue is bound, and how far it was read."""

    def __init__(self, topic: Topic, position: str, matches: Callable[[str], bool]) -> None:
        self.topic = topic
        self.matches = matches
        self.position = position
        self._reader: _Reader | None = None

    def start(self, queue: BroadcastQueue) -> None:
        """Read in a thread, until it is stopped."""
        if self._reader is None:
            self._reader = _Reader(self, queue)

    def stop(self) -> None:
        """Stop the thread."""
        if self._reader is not None:
            self._reader.stop()
            self._reader = None

    def subscribe(self, queue: BroadcastQueue) -> Subscription:
        """Return a subscription that continues behind the last position."""

        def report(gap: Gap) -> None:
            logger.warning(
                "queue %r lost the messages of topic %r between %s and %s: they were not read in "
                "time; to keep more, set the option fanout_messages",
                queue.name, gap.topic, gap.after, gap.first,
                extra={
                    "queue": queue.name, "topic": gap.topic, "after": gap.after, "first": gap.first
                },
            )  # fmt: skip

        return self.topic.subscribe(self.position, timeout=READ_SEC, on_gap=report)

    def receive(self, messages: Sequence[Message], queue: BroadcastQueue) -> None:
        """Put the messages that match into the queue."""
        if messages:
            self.position = messages[-1].position
            queue.put(one for one in messages if self.matches(one.key))

    def catch_up(self, queue: BroadcastQueue) -> None:
        """Read what was published so far."""
        deadline = time.monotonic() + CATCH_UP_SEC
        latest = self.topic.subscribe(NOW).position
        if self.position == latest:
            return
        with self.subscribe(queue) as subscription:
            found = False
            while not found and queue.has_room and time.monotonic() < deadline:
                messages = subscription.read()
                self.receive(messages, queue)
                found = any(one.position == latest for one in messages)


_ending: WeakSet[threading.Thread] = WeakSet()
"""The threads that were stopped, and still have to close their cursors."""


class _Reader:
    """A thread that reads the topic of a source."""

    def __init__(self, source: _Source, queue: BroadcastQueue) -> None:
        self._source = source
        self._queue = queue
        self._subscription = source.subscribe(queue)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="microqueue-kombu-broadcast", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop reading. When it returns, the position of the source does not change any more."""
        with self._lock:
            self._stopped.set()
        self._subscription.close()
        _ending.add(self._thread)

    def _run(self) -> None:
        failed, errors = False, RepeatedErrors(logger)
        while not self._stopped.is_set():
            try:
                if failed:
                    self._queue.notify()  # What was read before the error.
                self._read()
                failed = False
            except Exception as exc:  # noqa: BLE001 (the next attempt may succeed)
                failed = True
                if not self._stopped.is_set():
                    text = "could not read the messages of queue %r; next attempt in %g s"
                    values = self._queue.name, RETRY_SEC
                    fields = {"queue": self._queue.name, "wait_sec": RETRY_SEC}
                    if isinstance(exc, MicroqueueError):
                        logger.warning(f"{text}: %s", *values, exc, extra=fields)
                    else:
                        errors.log(exc, text, *values, extra=fields)
                self._stopped.wait(RETRY_SEC)

    def _read(self) -> None:
        messages = self._subscription.read()
        with self._lock:
            if not self._stopped.is_set():
                self._source.receive(messages, self._queue)
        while not (self._queue.has_room or self._stopped.is_set()):
            self._queue.wait_for_room()


class Broadcasts:
    """The topics of the exchanges of a broker, and the transient queues that read them.

    Args:
        queue: Any queue of the broker: topics share its collection, settings and clock.
        streaming: The same on the client whose connections may be held, to read the topics.
        max_messages: How many messages each topic keeps.
    """

    def __init__(self, queue: Queue[Any], streaming: Queue[Any], *, max_messages: int) -> None:
        self._queue = queue
        self._streaming = streaming
        self._max_messages = max_messages
        self._topics: dict[str, Topic] = {}
        self._queues: dict[str, BroadcastQueue] = {}
        self._positions_when_bound: dict[tuple[str, str], str] = {}

    def publish(self, exchange: str, routing_key: str, payload: dict[str, Any]) -> None:
        """Store a message once, for all queues that read the exchange."""
        self._topic(exchange).publish(payload, key=routing_key)

    def position_when_bound(self, queue: str, exchange: str) -> str:
        """Return where the topic of an exchange was when this process bound a queue first."""
        key = (queue, exchange)
        if key not in self._positions_when_bound:
            self._positions_when_bound[key] = self._latest_position(exchange)
        return self._positions_when_bound[key]

    def queue(self, name: str) -> BroadcastQueue | None:
        """Return a queue that this process has used."""
        return self._queues.get(name)

    def open(
        self,
        name: str,
        routes: Iterable[Routes],
        *,
        ttl: timedelta | None,
        delivery_limit: int | None,
    ) -> BroadcastQueue:
        """Return a queue that reads the topics of these exchanges.

        Args:
            name: The name of the queue.
            routes: For each exchange, its type and the bindings of the queue.
            ttl: How long a message may wait, besides its own limit.
            delivery_limit: How often a message is delivered at most.
        """
        queue = self._queues.get(name)
        if queue is None:
            queue = BroadcastQueue(name, ttl=ttl, delivery_limit=delivery_limit)
            self._queues[name] = queue
        queue.read_from([self._source(name, one) for one in routes])
        return queue

    def _source(self, queue: str, routes: Routes) -> _Source:
        bindings = routes.bindings
        exchange = bindings[0].exchange
        stored = next((one.position for one in bindings if one.position is not None), None)
        position = (
            stored
            or self._positions_when_bound.get((queue, exchange))
            or self._latest_position(exchange)
        )
        kind = routes.type or DIRECT
        return _Source(
            self._new_topic(self._streaming, exchange),
            position,
            lambda key: bool(matching_queues(kind, bindings, key)),
        )

    def forget(self, name: str) -> None:
        """Stop reading for a queue that is deleted."""
        for key in [key for key in self._positions_when_bound if key[0] == name]:
            del self._positions_when_bound[key]
        if (queue := self._queues.pop(name, None)) is not None:
            queue.close()

    def close(self) -> None:
        """Stop reading."""
        for name in list(self._queues):
            self.forget(name)
        deadline = time.monotonic() + END_SEC
        for thread in list(_ending):
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))

    def _latest_position(self, exchange: str) -> str:
        return self._topic(exchange).subscribe(NOW).position or START

    def _topic(self, exchange: str) -> Topic:
        topic = self._topics.get(exchange)
        if topic is None:
            topic = self._topics[exchange] = self._new_topic(self._queue, exchange)
        return topic

    def _new_topic(self, queue: Queue[Any], exchange: str) -> Topic:
        return Topic(queue, topic_name(exchange), max_messages=self._max_messages)
