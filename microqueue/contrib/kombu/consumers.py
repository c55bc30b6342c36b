"""The consumers of a connection: a thread fetches messages for them, ahead of their delivery.

The thread claims as many messages as the prefetch of each channel allows, and puts them into a
buffer. Broadcast messages come from their own threads. The consumers take them from the buffer: in
``drain_events``, or in Celery's event loop, which is woken through a socket.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kombu import Message

from microqueue.contrib.kombu import celery_worker
from microqueue.contrib.kombu.broadcast import BroadcastQueue
from microqueue.contrib.kombu.broker import Broker
from microqueue.contrib.kombu.claims import MessageClaimer
from microqueue.contrib.kombu.deliveries import Settle, logger
from microqueue.contrib.kombu.repeated import RepeatedErrors
from microqueue.drivers.change_stream import SyncWakeup
from microqueue.errors import MicroqueueError

UNLIMITED_PREFETCH = 100
"""How many messages are fetched ahead for a channel without a prefetch count."""
LOW_WATER = UNLIMITED_PREFETCH // 2
"""When fewer messages are left for such a channel, more are fetched."""
BUSY_POLL_SEC = 1.0
"""How often a busy consumer checks for delayed messages that are due, and for pauses."""
RETRY_SEC = 1.0
COLLISION_SEC = 0.02
FILL_SEC = 0.005
"""How long to wait for more room, if there is little: one claim takes several messages then."""
REST_SEC = 0.05
"""How long a queue without messages is not read, while another one has some."""
STOP_SEC = 5.0
STREAM_SEC = 2.0
"""How long a stop waits until the change stream is closed."""


@dataclass(eq=False)
class Consumer:
    """A consumer of one queue on one channel."""

    tag: str
    queue: str
    channel: Any
    no_ack: bool
    hold: Callable[[dict[str, Any]], Message | None]
    """Makes a message of what was stored, and counts it as unsettled. None: it cannot be read."""
    receive: Callable[[Message], Any]
    """Passes it to the application."""
    one_by_one: bool = False
    """Whether each call of ``drain_events`` delivers one message only."""
    buffered: int = 0
    cancelled: bool = False
    is_new: bool = True
    """Whether nothing was claimed for it yet."""
    broadcast_queue: BroadcastQueue | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """A message that waits for its delivery."""

    consumer: Consumer
    tag: str
    message: dict[str, Any]
    waited: bool = False
    """Whether it was there when its consumer began. One call delivers all of these."""


class Buffer:
    """Fetched messages, and the error of a broken connection, until they are taken."""

    def __init__(self) -> None:
        self._filled = threading.Condition()
        self._messages: deque[Fetched] = deque()
        self._error: Exception | None = None
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)  # noqa: FBT003
        self._writer.setblocking(False)  # noqa: FBT003

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to take."""
        return self._reader.fileno()

    def put(self, messages: Iterable[Fetched]) -> list[Fetched]:
        """Add messages; return those whose consumer was cancelled before."""
        late: list[Fetched] = []
        with self._filled:
            self._error = None
            for one in messages:
                if one.consumer.cancelled:
                    late.append(one)
                else:
                    one.consumer.buffered += 1
                    self._messages.append(one)
            self._filled.notify_all()
            self._wake()
        return late

    def fail(self, error: Exception) -> None:
        """Let the next :meth:`take` raise an error."""
        with self._filled:
            self._error = error
            self._filled.notify_all()
            self._wake()

    def recover(self) -> None:
        """Forget an error that is over."""
        self._error = None

    def take(self) -> Fetched | None:
        """Return the next message, None if there is none; raise the error of :meth:`fail`.

        It fills the room of its consumer until :meth:`delivered`.
        """
        with self._filled:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if not self._messages:
                return None
            return self._messages.popleft()

    def delivered(self, consumer: Consumer) -> int:
        """Count a message that was taken no more, as its channel does; return how many are left."""
        with self._filled:
            if not consumer.cancelled:
                consumer.buffered -= 1
            return consumer.buffered

    def wait(self, limit_sec: float | None) -> bool:
        """Wait until there is something to take; return whether there is."""
        with self._filled:
            return self._filled.wait_for(
                lambda: bool(self._messages or self._error is not None), limit_sec
            )

    def cancel(self, consumer: Consumer) -> list[Fetched]:
        """Remove the messages of a consumer, and accept no more; return them."""
        with self._filled:
            consumer.cancelled = True
            removed = [one for one in self._messages if one.consumer is consumer]
            if removed:
                left = [one for one in self._messages if one.consumer is not consumer]
                self._messages = deque(left)
            consumer.buffered = 0
            return removed

    def clear_wakeups(self) -> None:
        """Read what made the descriptor readable, before the messages are taken."""
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def wake(self) -> None:
        """Make the descriptor readable if there is something to take."""
        with self._filled:
            if self._messages or self._error is not None:
                self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # It is full, and so readable already; or it is closed.
            self._writer.send(b"\0")

    def close(self) -> None:
        """Close the descriptor."""
        self._reader.close()
        self._writer.close()


class MessageFetcher:
    """Claims messages for the consumers of a connection, in its own thread."""

    def __init__(self, broker: Broker, buffer: Buffer) -> None:
        self._broker = broker
        self._buffer = buffer
        self._consumers: list[Consumer] = []
        self._lock = threading.Lock()
        self._nudged = threading.Event()
        self._wakeup: SyncWakeup | None = None
        self._watched: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._turn = 0
        self._next_poll = 0.0
        self._next_keep = 0.0
        self._paused: frozenset[str] = frozenset()
        self._collisions = 0
        self._idle = True
        self._rests: dict[str, float] = {}
        self._claimer = MessageClaimer(broker)
        self._broadcast_lock = threading.Lock()
        self._errors = RepeatedErrors(logger)

    def add(self, consumer: Consumer) -> None:
        """Fetch for one more consumer."""
        broadcasts = self._broker.open_broadcasts(consumer.queue)
        self._broker.pin(consumer.queue)
        with self._lock:
            self._consumers = [*self._consumers, consumer]
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="microqueue-kombu-fetch", daemon=True
                )
                self._thread.start()
        if broadcasts is not None:
            consumer.broadcast_queue = broadcasts
            broadcasts.listen(self.deliver_broadcasts)
        self._broker.start_sweeping()
        self.nudge()

    def remove(self, consumer: Consumer) -> None:
        """Fetch no more for a consumer."""
        with self._lock:
            self._consumers = [one for one in self._consumers if one is not consumer]
        self._broker.unpin(consumer.queue)
        if consumer.broadcast_queue is not None:
            consumer.broadcast_queue.leave(self.deliver_broadcasts)
        self.nudge()

    def nudge(self) -> None:
        """Fetch again: there is more room, or there are other consumers."""
        self.deliver_broadcasts()
        self._nudged.set()
        if (wakeup := self._wakeup) is not None:
            wakeup.wake()

    def stop(self, *, wait: bool) -> None:
        """Stop the thread, and wait until it has ended unless MongoDB does not answer."""
        self._stopped = True
        self.nudge()
        thread = self._thread
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join(STOP_SEC)

    def _run(self) -> None:
        try:
            while not self._stopped:
                if celery_worker.is_stopping():
                    self._release_buffered()
                    break
                try:
                    self._round()
                except MicroqueueError as exc:
                    logger.debug("could not fetch: %s", exc, extra={"wait_sec": RETRY_SEC})
                    self._retry(exc)
                except Exception as exc:  # noqa: BLE001 (it is logged, and raised to the consumer)
                    text, fields = "could not fetch; next attempt in %g s", {"wait_sec": RETRY_SEC}
                    self._errors.log(exc, text, RETRY_SEC, extra=fields)
                    self._retry(exc)
        finally:
            wakeup = self._wakeup
            self._watch(frozenset())
            if wakeup is not None and wakeup.ending is not None:
                wakeup.ending.join(STREAM_SEC)  # Its client may be closed after that.

    def _retry(self, error: Exception) -> None:
        """Report an error to the consumers, and wait for the next attempt."""
        self._buffer.fail(error)
        self._nudged.clear()
        if not self._stopped:
            self._nudged.wait(RETRY_SEC)

    def _round(self) -> None:
        """Claim once, or wait once."""
        self._nudged.clear()
        consumers = self._consumers
        self._watch(frozenset(one.queue for one in consumers))
        now = time.monotonic()
        roomy = [one for one in consumers if self._room(one) > 0]
        wanting = [one for one in roomy if self._rests.get(one.queue, now) <= now]
        if not wanting:
            self._keep(consumers)
            rests = [self._rests[one.queue] for one in roomy]
            self._nudged.wait(min(rests, default=now + BUSY_POLL_SEC) - now)
            return
        if all(self._is_nearly_full(one) for one in wanting):
            time.sleep(FILL_SEC)
        # A backlog for which there is no room is no reason to read again.
        names = frozenset(one.queue for one in roomy)
        if now >= self._next_poll:
            self._poll(names)
        found = self._claim_for(wanting)
        self._keep(consumers)
        if found:
            self._collisions = 0
            return
        self._rests.clear()
        due_sec = self._poll(names)
        if due_sec is not None and due_sec <= 0:
            # Another consumer may have claimed what is ready: the next poll is a little later.
            self._collisions += 1
            if self._collisions < 2:  # noqa: PLR2004
                return
            due_sec = COLLISION_SEC
        limit_sec = self._broker.options.poll_timeout.total_seconds()
        if any(one.buffered for one in consumers):
            limit_sec = min(limit_sec, BUSY_POLL_SEC)  # It notices the end of the worker in time.
        if (keep_sec := self._broker.keep_sec(self._watched)) is not None:
            limit_sec = min(limit_sec, keep_sec)
        wakeup = self._wakeup
        self._idle = len(roomy) == len(consumers)
        if wakeup is not None and not self._nudged.is_set() and not self._stopped:
            wakeup.sleep(limit_sec if due_sec is None else min(limit_sec, due_sec))

    def _room(self, consumer: Consumer) -> int:
        """Return how many more messages may be fetched for a consumer."""
        if consumer.no_ack:
            return UNLIMITED_PREFETCH - consumer.buffered
        allowed = consumer.channel.qos.can_consume_max_estimate()
        if allowed is None:
            return UNLIMITED_PREFETCH - consumer.buffered
        buffered = sum(one.buffered for one in self._consumers if one.channel is consumer.channel)
        return int(allowed) - buffered

    def has_last_room(self, consumer: Consumer) -> bool:
        """Return whether there is room for one more message.

        While a message was counted twice, there was none, and the thread may wait for it.
        """
        return self._room(consumer) == 1

    def _is_nearly_full(self, consumer: Consumer) -> bool:
        """Return whether a consumer has less than a quarter of its room left."""
        limit = 0 if consumer.no_ack else consumer.channel.qos.prefetch_count
        return self._room(consumer) < (limit or UNLIMITED_PREFETCH) // 4

    def _watch(self, names: frozenset[str]) -> None:
        """Listen to the change stream for these queues."""
        if names == self._watched:
            return
        if self._wakeup is not None:
            former, self._wakeup = self._wakeup, None
            former.__exit__()
        self._watched = names
        if names:
            self._wakeup = SyncWakeup(
                self._broker.streaming,
                [self._broker.full_name(name) for name in names],
                poll_interval_sec=self._broker.options.polling_interval.total_seconds(),
            ).__enter__()

    def _keep(self, consumers: Iterable[Consumer]) -> None:
        """Keep the consumed queues from expiring."""
        names = {one.queue for one in consumers}
        keep_sec = self._broker.keep_sec(names)
        if keep_sec is not None and time.monotonic() >= self._next_keep:
            self._broker.keep(names)
            self._next_keep = time.monotonic() + keep_sec

    def _poll(self, names: frozenset[str]) -> float | None:
        """Promote due messages; return in how many seconds the next one is ready, 0 for now."""
        broker = self._broker
        stored = {broker.full_name(name): name for name in names}
        result = broker.run(broker.core.poll([one for one in stored if one not in self._paused]))
        self._buffer.recover()
        self._paused = result.paused
        due_sec: float | None = result.due_sec
        if due_sec is not None and due_sec <= 0:
            for name in stored.values():
                broker.promote_due(name)
            result_ready, due_sec = True, None
        else:
            result_ready = result.ready
        soonest = BUSY_POLL_SEC if due_sec is None else min(BUSY_POLL_SEC, due_sec)
        self._next_poll = time.monotonic() + soonest
        return 0.0 if result_ready else due_sec

    # Claim

    def _claim_for(self, wanting: list[Consumer]) -> bool:
        """Claim for each consumer in turn; return whether there was any message."""
        self._turn += 1
        start = self._turn % len(wanting)
        empty: set[str] = set()
        found = False
        for consumer in [*wanting[start:], *wanting[:start]]:
            room = self._room(consumer)
            if self._idle and not consumer.is_new:
                # After a pause there is often one message, which is claimed by a single write. A
                # new consumer gets all that wait at once, in their order.
                room = min(room, 1)
            if (
                room > 0
                and not consumer.cancelled
                and self._broker.full_name(consumer.queue) not in self._paused
            ):
                if self._claim(consumer, room):
                    found = True
                else:
                    empty.add(consumer.queue)
        if found:
            self._idle = False
            self._rests |= dict.fromkeys(empty, time.monotonic() + REST_SEC)
        return found

    def _claim(self, consumer: Consumer, room: int) -> int:
        claimed = self._claimer.claim(consumer.queue, room)
        waited = consumer.is_new and not consumer.one_by_one
        consumer.is_new = False
        fetched = [Fetched(consumer, *one, waited=waited) for one in claimed]
        for one in self._buffer.put(fetched) if fetched else ():
            self._broker.deliveries.settle(one.tag, Settle.RELEASE)
        return len(fetched)

    def _release_buffered(self) -> None:
        """Release what was not delivered: a pool that is busy may not cancel for a long time.

        Broadcasts are still delivered.
        """
        for consumer in self._consumers:
            if consumer.broadcast_queue is None:
                for one in self._buffer.cancel(consumer):
                    self._broker.deliveries.settle(one.tag, Settle.RELEASE)

    # Broadcasts

    def deliver_broadcasts(self) -> None:
        """Put broadcast messages that were read into the buffer, as far as there is room."""
        late: list[Fetched] = []
        with self._broadcast_lock:
            for consumer in self._consumers:
                broadcasts = consumer.broadcast_queue
                if broadcasts is not None and broadcasts.waiting and not consumer.cancelled:
                    taken = self._broker.take_broadcasts(broadcasts, self._room(consumer))
                    late += self._buffer.put(Fetched(consumer, *one) for one in taken)
        for one in reversed(late):
            self._broker.deliveries.settle(one.tag, Settle.RELEASE)
