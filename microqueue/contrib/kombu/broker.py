"""The broker of a process: what all its connections to one address share.

That is its MongoDB clients, the queues, and the deliveries that are not settled yet. A broker is
opened with the first connection and closed after the last one. It stays open while messages are
being processed, and after a connection broke: the next one continues where that was.

Clients and threads do not survive a fork. So a child process forgets the brokers of its parent,
and opens its own when it needs one.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import kombu
from kombu.utils.uuid import uuid
from pymongo import MongoClient
from pymongo.errors import InvalidName, PyMongoError, ServerSelectionTimeoutError

from microqueue.arguments import check_name, check_text
from microqueue.contrib.kombu.broadcast import BroadcastQueue, Broadcasts, report_dropped
from microqueue.contrib.kombu.deliveries import Deliveries, logger
from microqueue.contrib.kombu.messages import (
    from_milliseconds,
    time_to_live,
    to_message,
    to_payload,
    to_task,
)
from microqueue.contrib.kombu.options import TransportOptions, check_uri_options, mongodb_uri
from microqueue.contrib.kombu.recent import Recent
from microqueue.contrib.kombu.routing import BROADCASTING
from microqueue.core import SyncCore, core_of, new_worker_id
from microqueue.drivers.collections import Collections
from microqueue.drivers.connection import Connection
from microqueue.drivers.driver import CLOSE_SEC, bounded
from microqueue.drivers.error_translation import translate
from microqueue.errors import (
    InvalidArgument,
    InvalidPayload,
    MicroqueueError,
    ServerUnavailable,
)
from microqueue.operations import broker as operations
from microqueue.operations.broker import Binding, Declaration, Routes
from microqueue.operations.call import Operation
from microqueue.queue import Queue
from microqueue.sweeper import Sweeper
from microqueue.task import Lease, read_count

SWEEP_JOBS = (
    "reclaim_stuck",
    "promote_due",
    "bury_exhausted",
    "expire_undelivered",
    "purge_finished",
    "move_dead_letters",
)
SOURCE = "celery"
"""What dead letters have as their source."""
FLUSH_SEC = 10.0
"""How long closing waits for settlements to be written."""
MOST_COUNTED = 100_000
STREAMING = {"maxPoolSize": 0, "minPoolSize": 0, "connect": False}
"""The options of the client for streams: as many connections as it needs, from its first use."""
DECLARED_SEC = 10.0
"""How long the declaration of a queue by another process is remembered."""
ROUTES_SEC = 0.1
"""How long the bindings of an exchange are remembered."""
BIND_SEC = 1.2 * ROUTES_SEC
"""How long a new binding waits, until every process has forgotten the bindings without it."""


@dataclass(frozen=True)
class Address:
    """Where a broker is, and how to use it."""

    uri: str
    client_options: Mapping[str, Any] = field(repr=False)
    options: TransportOptions = field(repr=False)

    @classmethod
    def of(cls, connection: kombu.Connection) -> Address:
        """Read the address and the options of a Kombu connection.

        Raises:
            InvalidArgument: An option is unknown, or its value is not valid.
        """
        options = TransportOptions(**(connection.transport_options or {}))
        uri = mongodb_uri(connection)
        check_uri_options(uri)
        return cls(uri, options.client_options(connection), options)

    @property
    def key(self) -> str:
        """What connections that share a broker have in common."""
        return repr((self.uri, sorted(self.client_options.items()), self.options))


class LostClaims:
    """For each queue, the leases of claims whose outcome is unknown."""

    def __init__(self) -> None:
        self._leases: dict[str, deque[Lease]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, queue: str, lease: Lease) -> None:
        """Keep the lease of a claim that failed."""
        with self._lock:
            self._leases.setdefault(queue, deque()).append(lease)

    def take(self, queue: str) -> Lease | None:
        """Remove the oldest lease of a queue, and return it; None if there is none."""
        with self._lock:
            leases = self._leases.get(queue)
            lease = leases.popleft() if leases else None
            if not leases:
                self._leases.pop(queue, None)
            return lease

    def forget(self, queue: str) -> None:
        """Remove the leases of a queue that is deleted."""
        with self._lock:
            self._leases.pop(queue, None)


class Broker:
    """The clients, the queues and the deliveries of one address in this process."""

    def __init__(self, address: Address) -> None:
        self.options = address.options
        self.settings = self.options.queue_settings()
        self.worker_id = new_worker_id()
        self._connect_sec = address.client_options["serverSelectionTimeoutMS"] / 1000
        self._tasks = self._connect(address)
        self.client = self._tasks.database.client
        self._default_queue = Queue[Any](self._tasks, settings=self.settings)
        self.core: SyncCore[Any] = core_of(self._default_queue)
        self.core.attach(self.options.hooks or (), source=SOURCE)
        self._settings_without_indexes = self.settings.model_copy(update={"ensure_indexes": False})
        streamed = self._connect(address, **STREAMING)
        self._streaming_client = streamed.database.client
        streaming_queue = Queue[Any](
            streamed, settings=self._settings_without_indexes, clock=self._default_queue.clock
        )
        self.streaming: Collections = core_of(streaming_queue).collections
        """The collections on a separate client, for what waits at the server for news.

        Each of these holds a connection, and there may be more of them than ``max_connections``.
        """
        self._pinned: dict[str, int] = {}
        self._cores: Recent[SyncCore[Any]] = Recent(self._pinned)
        self._declared: Recent[tuple[Declaration, float]] = Recent(self._pinned)
        self._bound: Recent[set[Binding]] = Recent(self._pinned)
        self._routes: Recent[tuple[Routes, float]] = Recent()
        self._sweeping: threading.Thread | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._is_prepared = False
        self._keep_at: Recent[float] = Recent()
        self.lost_claims = LostClaims()
        self.users = 0
        self.is_reconnecting = False
        self.deliveries = Deliveries(self.core, renew_sec=self.options.renew_sec)
        self.broadcasts = Broadcasts(
            self._default_queue, streaming_queue, max_messages=self.options.fanout_messages
        )

    def _connect(self, address: Address, **client_options: Any) -> Any:
        """Return the collection of tasks, on a new client."""
        options = self.options
        connection = Connection(
            MongoClient,
            address.uri,
            settings=self.settings,
            collection=None,
            client_options={**address.client_options, **client_options},
        )
        try:
            database = connection.database_or_collection
            if options.database is not None:
                database = connection.client[options.database]
            return database[options.collection]
        except InvalidName as exc:
            connection.client.close()
            raise InvalidArgument(
                f"broker_transport_options name the database {options.database!r} and the "
                f"collection {options.collection!r}: {exc}",
                argument="broker_transport_options",
            ) from exc

    def ping(self) -> None:
        """Check that the server answers, and create missing indexes the first time.

        Raises:
            ServerUnavailable: It does not.
            OperationFailed: It rejects this client.
        """
        try:
            with bounded(self._connect_sec):
                self.client.admin.command("ping")
        except ServerSelectionTimeoutError as exc:
            reason = str(exc).partition(",")[0]
            raise ServerUnavailable(
                f"the broker did not answer within {self._connect_sec:g} s; check that MongoDB "
                f"runs, and the address in broker_url ({reason})"
            ) from exc
        except PyMongoError as exc:
            raise translate(exc) from exc
        with self._lock:
            if not self._is_prepared:
                self.run(self.core.begin())
                self.run(operations.ensure_indexes())
                self._is_prepared = True

    def run(self, operation: Operation[Any]) -> Any:
        """Run an operation on the collections of the broker."""
        return self.core.run(operation)

    def full_name(self, name: str) -> str:
        """Return the name under which a queue is stored.

        Raises:
            InvalidArgument: No queue can have this name.
        """
        if isinstance(name, str):
            return check_name(self.options.global_keyprefix + name)
        return check_name(name)

    def exchange_name(self, name: str) -> str:
        """Return the name under which an exchange is stored.

        Raises:
            InvalidArgument: It is not text.
        """
        return self.options.global_keyprefix + check_text("exchange", name)

    def queue(self, name: str) -> SyncCore[Any]:
        """Return the core of a Kombu queue."""
        core = self._cores.get(name)
        if core is None:
            queue = Queue[Any](
                self._tasks,
                self.full_name(name),
                settings=self._settings_without_indexes,
                clock=self._default_queue.clock,
            )
            core = self._cores.put(name, core_of(queue))
            core.attach(self.options.hooks or (), source=SOURCE)
        return core

    def pin(self, name: str) -> None:
        """Remember what is known of a queue as long as it is consumed."""
        with self._lock:
            self._pinned[name] = self._pinned.get(name, 0) + 1

    def unpin(self, name: str) -> None:
        """Forget a queue that one consumer less consumes, when others were used later."""
        with self._lock:
            if self._pinned.get(name, 0) > 1:
                self._pinned[name] -= 1
            else:
                self._pinned.pop(name, None)

    # Declarations

    def declare_queue(self, name: str, declared: Declaration) -> None:
        """Store a queue and its arguments."""
        collection, now = self.core.collections.name, self._now()
        full_name = self.full_name(name)
        created = self.run(operations.declare_queue(collection, full_name, declared, now=now))
        self._declared.put(name, (declared, float("inf")))
        self._keep_at.forget(name)
        if created:
            self.broadcasts.forget(name)  # Those of a queue of this name that was deleted.

    def find_queue(self, name: str) -> Declaration | None:
        """Return what a queue was declared with; None if it does not exist."""
        found: Declaration | None = self.run(
            operations.declaration(self.core.collections.name, self.full_name(name))
        )
        return found

    def declared(self, name: str) -> Declaration:
        """Return what a queue was declared with, as of some seconds ago."""
        self.full_name(name)  # A wrong one ends here.
        known = self._declared.get(name)
        if known is None or known[1] < time.monotonic():
            found = self.find_queue(name) or Declaration()
            known = self._declared.put(name, (found, time.monotonic() + DECLARED_SEC))
        return known[0]

    def declare_exchange(self, name: str, kind: str) -> str:
        """Store an exchange; return its type, which is that of the first declaration."""
        collection, now = self.core.collections.name, self._now()
        found = self.run(
            operations.declare_exchange(collection, self.exchange_name(name), kind, now=now)
        )
        self._routes.forget(name)
        return str(found)

    def bind(self, queue: str, exchange: str, kind: str, routing_key: str) -> None:
        """Store a binding to an exchange of this type.

        When it returns, every publish that begins later uses the binding, in any process.
        """
        full_name = self.exchange_name(exchange)
        live = kind in BROADCASTING and self.declared(queue).transient
        position = self.broadcasts.position_when_bound(queue, full_name) if live else None
        if self._store(Binding(full_name, self.full_name(queue), routing_key, live, position)):
            time.sleep(BIND_SEC)
        self._routes.forget(exchange)
        bound = self._bound.get(queue) or set()
        self._bound.put(queue, bound | {Binding(exchange, queue, routing_key, live)})
        if live and self.broadcasts.queue(queue) is not None:
            self.open_broadcasts(queue)

    def unbind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Delete a binding."""
        binding = Binding(self.exchange_name(exchange), self.full_name(queue), routing_key)
        self.run(operations.unbind(self.core.collections.name, binding))
        self._routes.forget(exchange)
        if bound := self._bound.get(queue):
            removed = (exchange, routing_key)
            left = {one for one in bound if (one.exchange, one.routing_key) != removed}
            self._bound.put(queue, left)
        if self.broadcasts.queue(queue) is not None:
            self.open_broadcasts(queue)

    def routes(self, exchange: str) -> Routes:
        """Return the type of an exchange, and its bindings, by Kombu's names.

        They are those of the last tenth of a second, so that a publisher that sends often does not
        read them for each message.
        """
        known = self._routes.get(exchange)
        began = time.monotonic()
        if known is not None and known[1] > began:
            return known[0]
        found: Routes = self.run(
            operations.routes(self.core.collections.name, self.exchange_name(exchange))
        )
        bindings = (
            replace(one, exchange=exchange, queue=self._short_name(one.queue))
            for one in found.bindings
        )
        routes = Routes(found.type, tuple(bindings))
        self._routes.put(exchange, (routes, began + ROUTES_SEC))
        return routes

    def delete_exchange(self, exchange: str) -> None:
        """Delete an exchange and its bindings."""
        name = self.exchange_name(exchange)
        self.run(operations.delete_exchange(self.core.collections.name, name))
        self._routes.forget(exchange)

    def delete_queue(self, name: str) -> None:
        """Delete a queue with its bindings and waiting messages."""
        self.run(operations.delete_queue(self.core.collections.name, self.full_name(name)))
        self._routes.clear()
        self.purge(name)
        self.broadcasts.forget(name)
        for known in (self._cores, self._declared, self._bound, self._keep_at):
            known.forget(name)
        self.lost_claims.forget(name)

    def keep_sec(self, names: Iterable[str]) -> float | None:
        """Return how often these queues must be kept from expiring; None if none expires."""
        expiring = [expires for name in names if (expires := self.declared(name).expires)]
        return min(expiring).total_seconds() / 3 if expiring else None

    def keep(self, names: Iterable[str]) -> None:
        """Keep queues that are in use from expiring. One that has expired is declared again.

        That happens where this process was stopped for longer than the queue lives.
        """
        collection, now = self.core.collections.name, self._now()
        expiring = [self.full_name(name) for name in names if self.declared(name).expires]
        for full_name in self.run(operations.keep_queues(collection, expiring, now)):
            name = self._short_name(full_name)
            declared = self.declared(name)
            self.run(operations.declare_queue(collection, full_name, declared, now=now))
            for one in self._bound.get(name) or ():
                self._store(
                    replace(one, exchange=self.exchange_name(one.exchange), queue=full_name)
                )

    def keep_used(self, name: str) -> None:
        """Keep a queue from expiring that was used just now."""
        keep_sec = self.keep_sec([name])
        if keep_sec is not None and time.monotonic() >= (self._keep_at.get(name) or 0.0):
            self.keep([name])
            self._keep_at.put(name, time.monotonic() + keep_sec)

    def _store(self, binding: Binding) -> bool:
        """Store a binding; return whether it is new."""
        now = self._now()
        return bool(self.run(operations.bind(self.core.collections.name, binding, now=now)))

    def _short_name(self, full_name: str) -> str:
        return full_name.removeprefix(self.options.global_keyprefix)

    def _now(self) -> datetime:
        now: datetime = self.run(self.core.now())
        return now

    # Messages

    def publish(self, queue: str, message: Mapping[str, Any], priority: int) -> None:
        """Add a message to a queue."""
        arguments = self.declared(queue).arguments
        if (largest := arguments.get("x-max-priority")) is not None:
            priority = min(priority, int(largest))
        ttl = time_to_live(message, self._ttl(queue))
        core = self.queue(queue)
        now = core.run(core.now())
        core.run(core.enqueue(to_task(message, priority=priority, ttl=ttl, now=now), None))

    def broadcast(self, exchange: str, routing_key: str, message: Mapping[str, Any]) -> None:
        """Store a message once for all transient queues that are bound to an exchange."""
        self.broadcasts.publish(self.exchange_name(exchange), routing_key, to_payload(message))

    def _ttl(self, queue: str) -> timedelta | None:
        """Return how long a message of a queue may wait; None: for ever."""
        given = from_milliseconds(
            "x-message-ttl", self.declared(queue).arguments.get("x-message-ttl")
        )
        limits = [limit for limit in (given, self.options.message_ttl) if limit is not None]
        return min(limits, default=None)

    def open_broadcasts(self, name: str) -> BroadcastQueue | None:
        """Return the broadcast messages of a queue; None for a queue that is not transient."""
        if not self.declared(name).transient:
            return None
        collection, full_name = self.core.collections.name, self.full_name(name)
        taken = self.run(operations.take_live_bindings(collection, full_name))
        bindings: dict[str, list[Binding]] = defaultdict(list)
        for one in taken:
            bindings[one.exchange].append(one)
        routes = [
            Routes(self.run(operations.routes(collection, exchange)).type, tuple(found))
            for exchange, found in bindings.items()
        ]
        limit = self.options.delivery_limit
        return self.broadcasts.open(name, routes, ttl=self._ttl(name), delivery_limit=limit)

    def find_broadcasts(self, name: str) -> BroadcastQueue | None:
        """Return the broadcast messages of a queue, and open them unless this process has."""
        found = self.broadcasts.queue(name)
        return self.open_broadcasts(name) if found is None else found

    def take_broadcasts(
        self, queue: BroadcastQueue, limit: int
    ) -> list[tuple[str, dict[str, Any]]]:
        """Take broadcast messages; return them with their delivery tags."""
        held: list[tuple[str, dict[str, Any]]] = []
        for one in queue.take(limit, self.core.clock.now()):
            tag = uuid()
            try:
                message = to_message(one.message.body, tag, redelivered=one.deliveries > 1)
            except InvalidPayload as exc:
                report_dropped(queue.name, one.message, exc)
            else:
                self.deliveries.add_unleased(tag, one)
                held.append((tag, message))
        return held

    def delayed(self, names: Iterable[str], *, limit: int) -> list[dict[str, Any]]:
        """Return the delayed messages of some queues, the next ones first. Read-only.

        The list is bounded, see :func:`microqueue.operations.broker.delayed`.
        """
        found = self.run(operations.delayed([self.full_name(name) for name in names], limit=limit))
        messages: list[dict[str, Any]] = []
        for one in found:
            with suppress(InvalidPayload):  # It is a dead letter when it is due.
                redelivered = read_count(one.get("attempts"), 0) > 0
                messages.append(to_message(one.get("payload"), "", redelivered=redelivered))
        return messages

    def count(self, name: str) -> int:
        """Count the waiting messages of a queue."""
        self.flush()
        waiting = self.run(operations.count_waiting(self.full_name(name), limit=MOST_COUNTED))
        if (broadcasts := self.broadcasts.queue(name)) is not None:
            broadcasts.catch_up()
            waiting += broadcasts.waiting
        return int(waiting)

    def purge(self, name: str) -> int:
        """Delete the waiting messages of a queue; return how many."""
        self.flush()
        purged = self.run(self.queue(name).purge("pending", None, dry_run=False))
        if (broadcasts := self.broadcasts.queue(name)) is not None:
            broadcasts.catch_up()
            purged += broadcasts.clear()
        return int(purged)

    def flush(self) -> bool:
        """Wait until what was settled so far is written."""
        return self.deliveries.flush(FLUSH_SEC)

    # Sweep

    def start_sweeping(self) -> None:
        """Sweep every ``sweep_interval``, until the broker is closed."""
        with self._lock:
            if self._sweeping is None:
                self._sweeping = threading.Thread(
                    target=self._sweep_forever, name="microqueue-kombu-sweep", daemon=True
                )
                self._sweeping.start()

    def _sweep_forever(self) -> None:
        wait_sec = self.options.sweep_interval.total_seconds()
        while not self._ended.wait(wait_sec):
            try:
                if self.users:
                    self.sweep()
            except MicroqueueError as exc:
                if not self._ended.is_set():
                    logger.warning(
                        "sweep failed; the next one begins in %g s: %s",
                        wait_sec,
                        exc,
                        extra={"wait_sec": wait_sec},
                    )
            except Exception:
                logger.exception(
                    "sweep failed; the next one begins in %g s",
                    wait_sec,
                    extra={"wait_sec": wait_sec},
                )

    def promote_due(self, name: str) -> None:
        """Make the delayed messages of a queue ready that are due, and end the expired ones."""
        core = self.queue(name)
        if not self.options.dead_letter_expired:
            batch_size = self.options.batch_size
            core.run(operations.drop_expired([core.name], self._now(), batch_size=batch_size))
        core.run(core.promote_due())

    def sweep(self) -> None:
        """Reclaim expired leases; delete expired and old messages, and unused queues."""
        collection, batch_size = self.core.collections.name, self.options.batch_size
        now = self._now()
        self.run(operations.delete_unused_queues(collection, now, batch_size=batch_size))
        prefix = self.options.global_keyprefix
        declared = self.run(operations.declared_queues(collection))
        names = sorted(name for name in declared if name.startswith(prefix))
        if not names:
            return
        if not self.options.dead_letter_expired:
            self.run(operations.drop_expired(names, now, batch_size=batch_size))
        Sweeper(self._default_queue, queues=names, jobs=SWEEP_JOBS).run_once()

    # The end

    @property
    def idle(self) -> bool:
        """Whether no connection uses the broker or will, and no message is held."""
        return not self.users and not self.is_reconnecting and not len(self.deliveries)

    def close(self) -> None:
        """Write what was settled, and close the clients."""
        self._ended.set()
        self.broadcasts.close()
        if not self.deliveries.close(FLUSH_SEC):
            logger.error(
                "MongoDB did not answer: %d messages could not be settled, and are redelivered",
                len(self.deliveries),
                extra={"unsettled": len(self.deliveries)},
            )
        with bounded(CLOSE_SEC):
            self.client.close()
            self._streaming_client.close()


_brokers: dict[str, Broker] = {}
_brokers_lock = threading.Lock()
_inherited: list[Broker] = []


def acquire(address: Address) -> Broker:
    """Return this process's broker of an address, for one more connection."""
    with _brokers_lock:
        for key in [key for key, one in _brokers.items() if one.idle and key != address.key]:
            _brokers.pop(key).close()
        broker = _brokers.get(address.key)
        if broker is None:
            broker = _brokers[address.key] = Broker(address)
        broker.users += 1
        broker.is_reconnecting = False
        return broker


def release(address: Address, broker: Broker, *, broken: bool) -> None:
    """Release the broker of a connection. It is closed with the last one, if nothing is held.

    After a connection broke, it stays open for the next one.
    """
    with _brokers_lock:
        broker.users -= 1
        broker.is_reconnecting = broken
        if _brokers.get(address.key) is broker and broker.idle:
            del _brokers[address.key]
            broker.close()


def _close_all() -> None:
    with _brokers_lock:
        while _brokers:
            _, broker = _brokers.popitem()
            broker.deliveries.requeue_all()
            broker.close()


def _forget_inherited() -> None:
    global _brokers_lock  # noqa: PLW0603 (the parent may have held it while it forked)
    _brokers_lock = threading.Lock()
    # Kept, because closing or collecting them would use the parent's connections.
    _inherited.extend(_brokers.values())
    _brokers.clear()


os.register_at_fork(after_in_child=_forget_inherited)
atexit.register(_close_all)
