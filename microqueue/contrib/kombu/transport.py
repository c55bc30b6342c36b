"""The transport: a Kombu connection to MongoDB."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from typing import Any

import pymongo
from kombu.transport import virtual
from pymongo.errors import ConnectionFailure

from microqueue.contrib.kombu import broker as brokers
from microqueue.contrib.kombu import celery_worker
from microqueue.contrib.kombu.broker import Address, Broker
from microqueue.contrib.kombu.channel import Channel
from microqueue.contrib.kombu.claims import MessageClaimer
from microqueue.contrib.kombu.consumers import LOW_WATER, Buffer, Consumer, Fetched, MessageFetcher
from microqueue.contrib.kombu.deliveries import Settle
from microqueue.contrib.kombu.options import (
    DEFAULT_PORT,
    SCHEME,
    masked_uri,
    mongodb_uri,
    use_alternates,
)
from microqueue.errors import MicroqueueError, OperationFailed, ServerUnavailable

TURN_SEC = 0.1
"""How long messages are delivered before the caller's loop gets its turn."""
TICK_SEC = 0.5
"""How long an event loop waits at most."""


LOST = (ServerUnavailable, ConnectionFailure)
"""The errors after which a connection is replaced."""


class Transport(virtual.Transport):
    """Kombu's transport to MongoDB: queues are microqueue queues, messages are tasks.

    Raises:
        InvalidArgument: A transport option is unknown, its value is not valid, or Kombu cannot
            fail over to one of the URLs.
    """

    Channel = Channel
    can_parse_url = True
    default_port = DEFAULT_PORT
    driver_type = "mongodb"
    driver_name = "pymongo"
    connection_errors = (*virtual.Transport.connection_errors, *LOST)
    channel_errors = (*virtual.Transport.channel_errors, MicroqueueError)
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors = virtual.Transport.channel_errors
    implements = virtual.Transport.implements.extend(
        asynchronous=True,
        exchange_type=frozenset(["direct", "topic", "fanout"]),
        heartbeats=False,
    )

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        use_alternates(client)
        self._address = Address.of(client)
        self._lock = threading.Lock()
        self._broker: Broker | None = None
        self._pid: int | None = None
        self._buffer: Buffer | None = None
        self._fetcher: MessageFetcher | None = None
        self._claimer: MessageClaimer | None = None
        self._owed_returns = 0
        self._hubs: dict[Any, Any] = {}

    def driver_version(self) -> str:
        """Return the version of pymongo."""
        return pymongo.version

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Return the URL of the broker, by default without the password."""
        full = f"{SCHEME}+{mongodb_uri(self.client)}"
        return full if include_password else masked_uri(full, mask)

    # Connect

    @property
    def broker(self) -> Broker:
        """The broker of this process; after a fork, the child has its own."""
        with self._lock:
            if self._broker is None or self._pid != os.getpid():
                self._broker = brokers.acquire(self._address)
                self._pid = os.getpid()
                self._buffer = self._fetcher = self._claimer = None
            return self._broker

    def establish_connection(self) -> Any:
        """Connect, and check that the server answers.

        Raises:
            ServerUnavailable: It does not.
            OperationFailed: The same in a Celery worker that shuts down: Kombu would connect again
                and again, for a heartbeat for example, and the worker would not end.
        """
        try:
            self.broker.ping()
        except MicroqueueError as exc:
            self._release()
            if isinstance(exc, ServerUnavailable) and celery_worker.is_stopping():
                raise OperationFailed(str(exc)) from exc
            raise
        return super().establish_connection()

    def close_connection(self, connection: Any) -> None:
        """Close all channels; what is not settled is requeued, unless the connection broke."""
        if self.is_broken():
            self._collect(connection)
            return
        self._stop(wait=True)
        super().close_connection(connection)
        self._release()

    def is_broken(self) -> bool:
        """Return whether the caller handles the loss of the server.

        Kombu does not say why it closes: before it fails over to the next URL, it closes the
        connection in the handler of the error, as if it were done with it.
        """
        return isinstance(sys.exception(), LOST)

    def _collect(self, connection: Any) -> None:
        """Abandon a connection that broke, or that a parent process opened.

        Messages that are still being processed keep their leases.
        """
        self._stop(wait=False)
        for channels in (self._avail_channels, self.channels):
            while channels:
                channels.pop().abandon()
        self._release(broken=True)

    def _stop(self, *, wait: bool) -> None:
        if self._pid != os.getpid():
            return
        for hub, tick in self._hubs.items():
            tick.cancel()
            if self._buffer is not None:
                hub.remove(self._buffer.fileno())
        self._hubs.clear()
        if self._fetcher is not None:
            self._fetcher.stop(wait=wait)

    def _release(self, *, broken: bool = False) -> None:
        with self._lock:
            broker, self._broker = self._broker, None
            buffer, self._buffer = self._buffer, None
            self._fetcher = self._claimer = None
        if broker is not None and self._pid == os.getpid():
            brokers.release(self._address, broker, broken=broken)
            if buffer is not None:
                buffer.close()

    def verify_connection(self, connection: Any) -> bool:
        """Return whether the connection is open."""
        return self._broker is not None and self._pid == os.getpid()

    # Consume

    @property
    def buffer(self) -> Buffer:
        """The messages that were fetched."""
        if self._buffer is None:
            self._buffer = Buffer()
        return self._buffer

    @property
    def fetcher(self) -> MessageFetcher:
        """The thread that fetches messages."""
        broker = self.broker
        if self._fetcher is None:
            self._fetcher = MessageFetcher(broker, self.buffer)
        return self._fetcher

    def add_consumer(self, consumer: Consumer) -> None:
        """Fetch messages for a consumer."""
        celery_worker.list_delayed_messages()
        celery_worker.follow_pool()
        self.fetcher.add(consumer)

    def remove_consumer(self, consumer: Consumer) -> None:
        """Release what was fetched for a consumer."""
        self._owed_returns = 0
        if self._fetcher is None or self._pid != os.getpid():
            return
        for one in reversed(self.buffer.cancel(consumer)):  # A broadcast goes to the front.
            self.broker.deliveries.settle(one.tag, Settle.RELEASE)
        self._fetcher.remove(consumer)

    def get(self, queue: str) -> dict[str, Any] | None:
        """Claim one message of a queue now."""
        broker = self.broker
        if self._claimer is None:
            self._claimer = MessageClaimer(broker)
        broker.keep_used(queue)
        broker.promote_due(queue)
        found = self._claimer.claim_next(queue)
        if found is None and (broadcasts := broker.find_broadcasts(queue)) is not None:
            broadcasts.catch_up()
            found = next(iter(broker.take_broadcasts(broadcasts, 1)), None)
        return found[1] if found else None

    def nudge(self) -> None:
        """Fetch again: there is more room."""
        if self._fetcher is not None and self._pid == os.getpid():
            self._fetcher.nudge()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver the next message, and wait for it.

        As with RabbitMQ, the messages that waited when a consumer began are delivered together,
        except to one that could not return them: without acknowledgements, and to a SimpleQueue. It
        stops after deliveries that took long, so that the caller's loop gets its turn.

        A caller may call it once for each message that it expects. So after several messages were
        delivered together, as many of the next calls return without waiting.

        Raises:
            TimeoutError: There was none in time.
        """
        buffer = self.buffer
        if self._owed_returns and not buffer.wait(0):
            self._owed_returns -= 1
            return
        if not buffer.wait(timeout):
            raise socket.timeout  # noqa: UP041 (Kombu's name for it)
        delivered = 0
        ends_at = time.monotonic() + TURN_SEC
        while (one := buffer.take()) is not None:
            delivered += 1
            self._hand_over(one)
            if not one.waited or time.monotonic() > ends_at:
                break
        self._owed_returns += max(delivered - 1, 0)

    def _hand_over(self, one: Fetched) -> None:
        message = one.consumer.hold(one.message)
        # Its channel counts it by now: between the two, there would be room for one too many.
        left = self.buffer.delivered(one.consumer)
        fetcher = self._fetcher
        if left == LOW_WATER or (fetcher is not None and fetcher.has_last_room(one.consumer)):
            self.nudge()
        if message is not None:
            one.consumer.receive(message)

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Deliver from an event loop whenever messages were fetched."""
        buffer = self.buffer
        loop.add_reader(buffer.fileno(), self.on_readable, buffer)
        if loop not in self._hubs:
            # Celery's loop handles signals between its waits, which can be long.
            self._hubs[loop] = loop.call_repeatedly(TICK_SEC, _pass)
        buffer.wake()

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:
        """Deliver no more from an event loop."""
        if loop in self._hubs:
            self._hubs.pop(loop).cancel()
            loop.remove(self.buffer.fileno())

    def on_readable(self, buffer: Buffer) -> None:
        """Deliver fetched messages, without waiting.

        The loop gets its turn after a delivery that took long: without a pool, that was the task.
        """
        buffer.clear_wakeups()
        ends_at = time.monotonic() + TURN_SEC
        while (one := buffer.take()) is not None:
            self._hand_over(one)
            if time.monotonic() > ends_at:
                buffer.wake()
                break


def _pass() -> None:
    """Let an event loop begin its next round."""


class AliasTransport(Transport):
    """The transport behind the schemes of URLs.

    Kombu parses ``microqueue://host:port/database`` itself, as it does for failover. What comes
    after ``microqueue+`` it passes on as it is, with its options.
    """

    can_parse_url = False

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self.can_parse_url = True  # So that Kombu leaves the masking of passwords to as_uri().
