"""The channel of the transport: declares, publishes, consumes and settles messages."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Mapping
from queue import Empty
from typing import Any

from kombu.simple import SimpleBase
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.transport.virtual.base import queue_declare_ok_t

from microqueue.arguments import invalid_argument
from microqueue.contrib.kombu import celery_worker
from microqueue.contrib.kombu.broker import Broker
from microqueue.contrib.kombu.consumers import Consumer
from microqueue.contrib.kombu.deliveries import Settle, logger
from microqueue.contrib.kombu.messages import from_milliseconds
from microqueue.contrib.kombu.routing import DIRECT, EXCHANGE_TYPES, matching_queues
from microqueue.operations.broker import Declaration
from microqueue.task import LARGEST_PRIORITY


class QoS(virtual.QoS):
    """The prefetch count of a channel, and its messages that are not settled."""

    def __init__(self, channel: Channel, prefetch_count: int = 0) -> None:
        self.channel = channel
        self.prefetch_count = prefetch_count or 0
        self._unsettled: dict[str, virtual.Message] = {}

    def can_consume(self) -> bool:
        """Return whether the prefetch count allows another message."""
        return self.can_consume_max_estimate() != 0

    def can_consume_max_estimate(self) -> int | None:
        """Return how many more messages the prefetch count allows; None: no limit."""
        if not self.prefetch_count:
            return None
        return max(self.prefetch_count - len(self._unsettled), 0)

    def append(self, message: virtual.Message, delivery_tag: str) -> None:
        """Hold a message until it is settled."""
        self._unsettled[delivery_tag] = message

    def get(self, delivery_tag: str) -> virtual.Message:
        """Return a message that is not settled."""
        return self._unsettled[delivery_tag]

    def ack(self, delivery_tag: str, *, multiple: bool = False) -> None:
        """Acknowledge a message; with ``multiple``, also those delivered before it."""
        for tag in self._up_to(delivery_tag) if multiple else [delivery_tag]:
            self._settle(tag, Settle.ACK)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Requeue a message, or drop it, or keep it as a dead letter."""
        if requeue:
            how = Settle.REQUEUE
        elif self.channel.broker.options.dead_letter_rejected:
            how = Settle.DEAD_LETTER
        else:
            how = Settle.DROP
        self._settle(delivery_tag, how)

    def restore_unacked(self) -> list[Any]:
        """Requeue all messages that are not settled."""
        if celery_worker.is_stopping():
            self.release_unused()
        messages, self._unsettled = self._unsettled, {}
        for tag in reversed(messages):  # A broadcast goes to the front.
            self.channel.broker.deliveries.settle(tag, Settle.REQUEUE)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Requeue all messages that are not settled; the second time there are none."""
        self.restore_unacked()

    def release_unused(self) -> None:
        """Release the messages that nothing refers to: they were only prefetched."""
        if not self._unsettled:
            return
        unsettled = {tag: weakref.ref(message) for tag, message in self._unsettled.items()}
        self._unsettled.clear()
        gc.collect()
        for tag, reference in unsettled.items():
            if (message := reference()) is not None:
                self._unsettled[tag] = message
            else:
                self.channel.broker.deliveries.settle(tag, Settle.RELEASE)

    def abandon(self) -> None:
        """Keep the leases of messages that are still in use, and release the others."""
        messages, self._unsettled = self._unsettled, {}
        deliveries = self.channel.broker.deliveries
        for tag, message in messages.items():
            deliveries.abandon(tag, message)

    def _up_to(self, delivery_tag: str) -> list[str]:
        tags = list(self._unsettled)
        return tags[: tags.index(delivery_tag) + 1] if delivery_tag in tags else [delivery_tag]

    def _settle(self, tag: str, how: Settle) -> None:
        self._unsettled.pop(tag, None)
        if not self.channel.broker.deliveries.settle(tag, how):
            logger.warning(
                "delivery %s is not held any more: %s is too late",
                tag,
                how.name,
                extra={"delivery_tag": tag, "settlement": how.name.lower(), "lease_lost": True},
            )
        self.channel.nudge()


class Channel(virtual.Channel):
    """A channel whose queues are microqueue queues, and whose messages are tasks."""

    QoS = QoS
    supports_fanout = True
    body_encoding = None  # Text is stored as text, and bytes as bytes.
    min_priority = 0
    max_priority = LARGEST_PRIORITY
    closed: bool

    def __init__(self, connection: Any, **options: Any) -> None:
        super().__init__(connection, **options)
        self._qos = QoS(self)  # Now, because another thread also asks for it.
        self._pid = os.getpid()
        self._transport = connection
        self._by_tag: dict[str, Consumer] = {}
        self._last_broker: Broker | None = None

    @property
    def broker(self) -> Broker:
        """The broker of this process, which outlives the connection of the channel.

        A message that is still in use is settled there after the channel was closed. A closed
        channel opens no broker, even if its last one is closed: no connection would close it.
        """
        if self._last_broker is not None:
            return self._last_broker
        broker: Broker = self._transport.broker
        return broker

    def nudge(self) -> None:
        """Fetch more messages, if there is room now."""
        self._transport.nudge()

    # Declare

    def exchange_declare(
        self,
        exchange: str | None = None,
        type: str = "direct",
        **options: Any,
    ) -> None:
        """Declare an exchange, for all processes.

        Raises:
            InvalidArgument: There are no exchanges of this type.
            NotEquivalentError: It exists with another type.
        """
        kind = type or DIRECT
        if kind not in EXCHANGE_TYPES:
            raise invalid_argument("type", kind, f"give one of {', '.join(EXCHANGE_TYPES)}")
        name = exchange or f"amq.{kind}"
        self.broker.exchange_name(name)  # A wrong one ends here.
        passive = options.get("passive", False)
        if passive and name not in self.state.exchanges:
            found = self.broker.routes(name).type
            if found is not None:
                super().exchange_declare(name, found)
        super().exchange_declare(name, kind, **options)
        if not passive:
            stored = self.broker.declare_exchange(name, kind)
            if stored != kind:
                self.state.exchanges.pop(name, None)
                raise virtual.NotEquivalentError(
                    f"exchange {name!r} exists with the type {stored}, and not {kind}; delete it "
                    "first to change its type"
                )

    def exchange_delete(self, exchange: str, **_: Any) -> None:
        """Delete an exchange and its bindings."""
        self.broker.delete_exchange(exchange)
        self.state.exchanges.pop(exchange, None)

    def _new_queue(
        self,
        queue: str,
        auto_delete: bool = False,
        exclusive: bool = False,
        arguments: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        arguments = arguments or {}
        expires = from_milliseconds("x-expires", arguments.get("x-expires"))
        from_milliseconds("x-message-ttl", arguments.get("x-message-ttl"))  # Wrong ones end here.
        transient = auto_delete or exclusive
        if transient and expires is None:
            # AMQP deletes it with its last consumer, which no process here can know.
            expires = self.broker.options.visibility_timeout
        self.broker.declare_queue(queue, Declaration(arguments, expires, transient))

    def _has_queue(self, queue: str, **_: Any) -> bool:
        return self.broker.find_queue(queue) is not None

    def queue_declare(self, queue: str | None = None, passive: bool = False, **options: Any) -> Any:
        """Declare a queue, or with ``passive`` check that it exists."""
        if passive and queue and self._has_queue(queue):
            return queue_declare_ok_t(queue, self._size(queue), 0)
        return super().queue_declare(queue, passive=passive, **options)

    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Any = None,
        **_: Any,
    ) -> None:
        """Bind a queue to an exchange, for all processes."""
        name = exchange or "amq.direct"
        self.broker.full_name(queue)  # A wrong one ends here.
        self.state.binding_declare(queue, name, routing_key, arguments)
        self.broker.bind(queue, name, self._type_of(name), routing_key or "")

    def queue_unbind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Any = None,
        **_: Any,
    ) -> None:
        """Remove a binding, for all processes."""
        name = exchange or "amq.direct"
        self.state.binding_delete(queue, name, routing_key)
        self.broker.unbind(queue, name, routing_key or "")

    def queue_delete(
        self,
        queue: str,
        if_unused: bool = False,
        if_empty: bool = False,
        **_: Any,
    ) -> None:
        """Delete a queue with its bindings and waiting messages."""
        if if_empty and self._size(queue):
            return
        if if_unused and any(one.queue == queue for one in self._by_tag.values()):
            return
        self.state.queue_bindings_delete(queue)
        self.broker.delete_queue(queue)

    def get_table(self, exchange: str) -> list[tuple[str, str | None, str]]:
        """Return the bindings of an exchange, as its type matches them."""
        kind = self.typeof(exchange)
        return [
            kind.prepare_bind(one.queue, exchange, one.routing_key, None)
            for one in self.broker.routes(exchange).bindings
        ]

    def typeof(self, exchange: str, default: str = DIRECT) -> Any:
        """Return the type of an exchange, which another process may have declared."""
        return self.exchange_types[self._type_of(exchange, default)]

    def _type_of(self, exchange: str, default: str = DIRECT) -> str:
        declared = self.state.exchanges.get(exchange)
        kind: str | None = declared["type"] if declared else self.broker.routes(exchange).type
        return kind or default

    def prepare_queue_arguments(self, arguments: Any, **options: Any) -> Any:
        """Translate Kombu's options of a queue to its arguments."""
        return to_rabbitmq_queue_arguments(arguments, **options)

    # Publish

    def basic_publish(
        self, message: dict[str, Any], exchange: str, routing_key: str, **_: Any
    ) -> None:
        """Publish a message to the queues that are bound to an exchange, or to one queue."""
        self._inplace_augment_message(message, exchange, routing_key)
        if not exchange:
            self._put(routing_key, message)
            return
        routes = self.broker.routes(exchange)
        declared = self.state.exchanges.get(exchange)
        kind = (declared["type"] if declared else routes.type) or DIRECT
        queues = matching_queues(kind, routes.bindings, routing_key)
        live = {one.queue for one in routes.bindings if one.live}
        if not queues and kind == DIRECT and self.deadletter_queue is not None:
            queues = {self.deadletter_queue}
            self._new_queue(self.deadletter_queue)
        for queue in queues - live:
            self._put(queue, message)
        if queues & live:
            self.broker.broadcast(exchange, routing_key, message)

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        self.broker.publish(queue, message, self._get_message_priority(message))

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Keep the body as it is, unless an encoding is set."""
        if encoding:
            encoded: tuple[Any, str | None] = super().encode_body(body, encoding)
            return encoded
        return body, None

    # Consume

    def basic_consume(
        self,
        queue: str,
        no_ack: bool,
        callback: Any,
        consumer_tag: str,
        **_: Any,
    ) -> None:
        """Consume from a queue."""
        self.broker.full_name(queue)  # A wrong one ends here.
        self.broker.flush()  # What this process requeued comes in its order.

        def hold(raw: dict[str, Any]) -> virtual.Message | None:
            message = self._hold(raw, no_ack=no_ack)
            if message is not None:
                message.delivery_info.setdefault("consumer_tag", consumer_tag)
            return message

        one_by_one = no_ack or _keeps_messages(callback)
        consumer = Consumer(consumer_tag, queue, self, no_ack, hold, callback, one_by_one)
        self._consumers.add(consumer_tag)
        self._by_tag[consumer_tag] = consumer
        self._transport.add_consumer(consumer)

    def _hold(self, raw: dict[str, Any], *, no_ack: bool) -> virtual.Message | None:
        """Return a message, which is unsettled or acknowledged from now.

        One whose body cannot be decoded becomes a dead letter, and the result is None.
        """
        try:
            message = self.Message(raw, channel=self)
        except Exception as exc:  # noqa: BLE001 (the codec is Kombu's)
            tag = raw["properties"]["delivery_tag"]
            fields = {"delivery_tag": tag, "dead_letter": True}
            logger.error("delivery %s becomes a dead letter: %r", tag, exc, extra=fields)  # noqa: TRY400
            self.broker.deliveries.settle(tag, Settle.DEAD_LETTER)
            self.nudge()
            return None
        if no_ack:
            self.broker.deliveries.settle(message.delivery_tag, Settle.ACK)
        else:
            self.qos.append(message, message.delivery_tag)
        return message

    def basic_cancel(self, consumer_tag: str) -> None:
        """Stop consuming; messages that were fetched and not delivered are released."""
        consumer = self._by_tag.pop(consumer_tag, None)
        self._consumers.discard(consumer_tag)
        if consumer is not None:
            self._transport.remove_consumer(consumer)
            if celery_worker.is_stopping():
                # Celery forgot what it had not started. Other workers need not wait for the end.
                celery_worker.cancel_waiting()
                self.qos.release_unused()

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        self.broker.flush()  # What this process requeued must be found.
        message: dict[str, Any] | None = self._transport.get(queue)
        if message is None:
            raise Empty
        return message

    def basic_get(self, queue: str, no_ack: bool = False, **_: Any) -> virtual.Message | None:
        """Return the next message of a queue that can be decoded, or None."""
        try:
            while (message := self._hold(self._get(queue), no_ack=no_ack)) is None:
                pass
        except Empty:
            return None
        return message

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Acknowledge a message."""
        self.qos.ack(delivery_tag, multiple=multiple)

    def basic_qos(
        self,
        prefetch_size: int = 0,
        prefetch_count: int = 0,
        apply_global: bool = False,
    ) -> None:
        """Set how many messages may be unsettled; 0: no limit."""
        self.qos.prefetch_count = prefetch_count
        self.nudge()

    def _size(self, queue: str) -> int:
        return self.broker.count(queue)

    def _purge(self, queue: str) -> int:
        return self.broker.purge(queue)

    def close(self) -> None:
        """Cancel all consumers, and requeue what is not settled, unless the connection broke."""
        self._close(broken=self._transport.is_broken())

    def abandon(self) -> None:
        """Close a channel whose connection broke: messages in use keep their leases."""
        self._close(broken=True)

    def _close(self, *, broken: bool) -> None:
        if self.closed:
            return
        self.closed = True
        if self._pid == os.getpid():  # The messages of a parent process are not ours.
            for tag in list(self._by_tag):
                self.basic_cancel(tag)
            if broken:
                self._qos.abandon()
            else:
                self._qos.restore_unacked_once()
                self.broker.flush()
            self._last_broker = self.broker
        if self.connection is not None:
            self.connection.close_channel(self)


def _keeps_messages(callback: Any) -> bool:
    """Return whether a callback is that of a ``SimpleQueue``.

    It keeps what it is delivered until its user asks for it. What it has when it is closed could
    not be acknowledged, so it must have no more than one message.
    """
    callbacks = getattr(getattr(callback, "__self__", None), "callbacks", None) or ()
    return any(isinstance(getattr(one, "__self__", None), SimpleBase) for one in callbacks)
