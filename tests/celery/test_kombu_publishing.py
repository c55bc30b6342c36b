"""What a publish costs, and that a queue bound a moment ago receives it."""

from __future__ import annotations

from typing import Any

import kombu
import pytest

from microqueue.contrib.kombu import broker
from microqueue.operations import broker as operations
from tests.celery.kombu_tools import Connect, get

NEWS = kombu.Exchange("news", type="topic")


def tell(connection: Any, body: Any) -> None:
    connection.Producer().publish(body, exchange=NEWS, routing_key="sport.final", declare=[NEWS])


def bind(connection: Any, name: str) -> None:
    kombu.Queue(name, NEWS, routing_key="sport.#")(connection.default_channel).declare()


def test_bindings_are_not_read_for_each_message(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect()
    bind(connection, "sport")
    monkeypatch.setattr(broker, "ROUTES_SEC", 3600)
    reads: list[str] = []
    routes = operations.routes

    def note(collection: str, exchange: str) -> Any:
        reads.append(exchange)
        return routes(collection, exchange)

    monkeypatch.setattr(operations, "routes", note)
    for number in range(10):
        tell(connection, number)
    assert reads == ["news"]
    assert [get(connection, "sport").payload for _ in range(10)] == list(range(10))


def test_a_queue_that_another_process_bound_receives_the_next_message(connect: Connect) -> None:
    publisher = connect()
    other = connect(max_connections=9)  # Other options: it shares nothing but the database.
    tell(publisher, "to nobody")
    for number in range(3):
        name = f"sport-{number}"
        tell(publisher, "before")
        bind(other, name)
        tell(publisher, "after")
        assert get(other, name).payload == "after"
        assert get(other, name) is None
