"""Publish, get and receive messages with Kombu."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import kombu
import pytest

Connect: TypeAlias = Callable[..., Any]
PATIENCE_SEC = 60


def logged(caplog: pytest.LogCaptureFixture, level: int, **fields: Any) -> list[logging.LogRecord]:
    """Return the lines that the transport logged at this level and with these fields."""
    return [
        one
        for one in caplog.records
        if (one.name, one.levelno) == ("microqueue.kombu", level)
        and fields.items() <= vars(one).items()
    ]


def publish(connection: Any, body: Any, name: str = "mail", **options: Any) -> None:
    queue = kombu.Queue(name, routing_key=name)
    connection.Producer().publish(body, exchange="", routing_key=name, declare=[queue], **options)


def get(connection: Any, name: str = "mail") -> Any:
    return connection.default_channel.basic_get(name)


class Receiver:
    """Consumes a queue, and keeps the messages."""

    def __init__(self, connection: Any, queue: kombu.Queue, **options: Any) -> None:
        self.connection = connection
        self.messages: list[Any] = []
        self.consumer = kombu.Consumer(
            connection, [queue], on_message=self.messages.append, **options
        )
        self.consumer.consume()

    @property
    def bodies(self) -> list[Any]:
        return [message.payload for message in self.messages]

    def drain(self) -> int:
        """Deliver what was fetched; return how many messages were received so far."""
        with suppress(TimeoutError):
            self.connection.drain_events(timeout=0.1)
        return len(self.messages)

    def receive(self, count: int) -> list[Any]:
        """Wait for so many messages in all, and return their bodies."""
        deadline = time.monotonic() + PATIENCE_SEC
        while self.drain() < count:
            assert time.monotonic() < deadline, f"message {count} did not come"
        return self.bodies
