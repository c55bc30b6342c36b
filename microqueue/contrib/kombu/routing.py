"""Routing: which of the queues that are bound to an exchange receive a message."""

from __future__ import annotations

from collections.abc import Iterable

from kombu.transport.virtual.exchange import STANDARD_EXCHANGE_TYPES

from microqueue.operations.broker import Binding

DIRECT, TOPIC, FANOUT = "direct", "topic", "fanout"
EXCHANGE_TYPES = {name: kind(None) for name, kind in STANDARD_EXCHANGE_TYPES.items()}
BROADCASTING = frozenset({TOPIC, FANOUT})
"""The types of exchanges that usually deliver one message to many queues."""


def matching_queues(kind: str, bindings: Iterable[Binding], routing_key: str) -> set[str]:
    """Return the queues that receive a message with this routing key."""
    exchange_type = EXCHANGE_TYPES[kind]
    table = [
        exchange_type.prepare_bind(one.queue, one.exchange, one.routing_key, None)
        for one in bindings
    ]
    found: set[str] = exchange_type.lookup(table, "", routing_key, None)
    return found
