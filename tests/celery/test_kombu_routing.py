"""Exchanges, priorities, and how long messages and queues live."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import kombu
import pytest
from kombu.transport.virtual import NotEquivalentError

from microqueue.contrib.kombu.messages import time_to_live
from microqueue.errors import InvalidArgument
from tests.celery.kombu_tools import Connect, Receiver, get, publish
from tests.rejection import rejecting
from tests.waiting import lasts, wait_for

HOUR = timedelta(hours=1)


def declare(connection: Any, *queues: kombu.Queue) -> None:
    for queue in queues:
        queue(connection.default_channel).declare()


def past() -> datetime:
    return datetime.now(UTC) - timedelta(hours=1)


# Exchanges


def test_a_direct_exchange_delivers_by_the_whole_key(connect: Connect) -> None:
    connection = connect()
    exchange = kombu.Exchange("news", type="direct")
    declare(
        connection,
        kombu.Queue("sport", exchange, routing_key="sport"),
        kombu.Queue("also", exchange, routing_key="sport"),
        kombu.Queue("art", exchange, routing_key="art.#"),
    )
    for key in ("sport", "art.film"):
        connection.Producer().publish(key, exchange="news", routing_key=key)
    assert [get(connection, name).payload for name in ("sport", "also")] == ["sport"] * 2
    assert get(connection, "art") is None


def test_a_topic_exchange_delivers_by_a_pattern_once(connect: Connect) -> None:
    connection = connect()
    exchange = kombu.Exchange("news", type="topic")
    declare(connection, kombu.Queue("sport", exchange, routing_key="sport.#"))
    connection.default_channel.queue_bind("sport", "news", "*.final")
    for key in ("sport.final", "art.final", "art.film", "sport.a.b"):
        connection.Producer().publish(key, exchange="news", routing_key=key)
    found = [get(connection, "sport").payload for _ in range(3)]
    assert found == ["sport.final", "art.final", "sport.a.b"]
    assert get(connection, "sport") is None


def test_a_fanout_exchange_delivers_to_each_durable_queue_as_a_task(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    exchange = kombu.Exchange("news", type="fanout")
    declare(connection, kombu.Queue("a", exchange), kombu.Queue("b", exchange, routing_key="x"))
    connection.Producer().publish(1, exchange="news", routing_key="y")
    assert sorted(one["queue"] for one in microqueue_database.tasks.find()) == ["a", "b"]
    get(connection, "a").reject()
    assert get(connection, "b").payload == 1


def test_an_exchange_of_an_unknown_type_is_rejected(connect: Connect) -> None:
    channel = connect().default_channel
    with pytest.raises(InvalidArgument) as caught:
        kombu.Exchange("cases", type="headers")(channel).declare()
    assert (caught.value.argument, caught.value.value) == ("type", "headers")
    assert channel.broker.routes("cases").type is None


def test_another_process_routes_by_the_stored_bindings(connect: Connect) -> None:
    exchange = kombu.Exchange("news", type="topic")
    consuming, publishing = connect(), connect(poll_timeout=11)
    declare(consuming, kombu.Queue("sport", exchange, routing_key="sport.#"))
    publishing.Producer().publish(1, exchange="news", routing_key="sport.football")
    publishing.Producer().publish(2, exchange="news", routing_key="art.film")
    assert get(consuming, "sport").payload == 1
    assert get(consuming, "sport") is None


def test_unbound_and_deleted(connect: Connect, microqueue_database: Any) -> None:
    connection = connect()
    channel = connection.default_channel
    exchange = kombu.Exchange("news", type="direct")
    declare(connection, kombu.Queue("sport", exchange, routing_key="s"))
    channel.queue_unbind("sport", "news", "s")
    connection.Producer().publish(1, exchange="news", routing_key="s")
    assert get(connection, "sport") is None
    publish(connection, 2, "sport")
    channel.queue_delete("sport", if_empty=True)
    assert microqueue_database.tasks.count_documents({"queue": "sport"}) == 1
    channel.queue_delete("sport")
    assert microqueue_database.tasks.count_documents({"queue": "sport"}) == 0
    channel.exchange_delete("news")
    assert microqueue_database.microqueue_broker.count_documents({}) == 0


def test_passive_declarations_find_what_another_process_declared(connect: Connect) -> None:
    declare(connect(), kombu.Queue("sport", kombu.Exchange("news", type="topic")))
    other = connect(poll_timeout=11)
    channel = other.default_channel
    publish(other, 1, "sport")
    assert channel.queue_declare("sport", passive=True).message_count == 1
    channel.exchange_declare("news", passive=True)
    for missing in (channel.queue_declare, channel.exchange_declare):
        with pytest.raises(other.channel_errors):
            missing("missing", passive=True)


# Priorities


def test_priorities_from_0_to_255_and_first_in_first_out_within_one(connect: Connect) -> None:
    connection = connect()
    given = [3, 0, 255, 128, None, 3, 255, 999, -7]
    for number, priority in enumerate(given):
        publish(connection, number, priority=priority)
    receiver = Receiver(connection, kombu.Queue("mail", routing_key="mail"))
    assert receiver.receive(len(given)) == [2, 6, 7, 3, 0, 5, 1, 4, 8]


def test_the_largest_priority_of_a_queue(connect: Connect, microqueue_database: Any) -> None:
    connection = connect()
    queue = kombu.Queue("mail", routing_key="mail", max_priority=10)
    connection.Producer().publish(1, exchange="", routing_key="mail", declare=[queue], priority=200)
    assert microqueue_database.tasks.find_one()["priority"] == 10


# Time to live


@pytest.mark.parametrize("limit", ["queue", "message", "option", None])
def test_what_limits_how_long_a_message_may_wait(
    connect: Connect, microqueue_database: Any, limit: str | None
) -> None:
    connection = connect(**({"message_ttl": HOUR} if limit == "option" else {}))
    queue = kombu.Queue("mail", routing_key="mail", message_ttl=3600 if limit == "queue" else None)
    connection.Producer().publish(
        1,
        exchange="",
        routing_key="mail",
        declare=[queue],
        expiration=3600 if limit == "message" else None,
    )
    task = microqueue_database.tasks.find_one()
    if limit is None:
        assert task.get("expires_at") is None
    else:
        assert lasts(task["expires_at"] - task["created_at"], 3600)


@pytest.mark.parametrize("limit", ["queue", "message", "option"])
def test_the_time_to_live_of_a_delayed_message_begins_when_it_is_due(
    connect: Connect, microqueue_database: Any, limit: str
) -> None:
    connection = connect(**({"message_ttl": 60} if limit == "option" else {}))
    queue = kombu.Queue("mail", routing_key="mail", message_ttl=60 if limit == "queue" else None)
    eta = datetime.now(UTC) + HOUR
    connection.Producer().publish(
        1,
        exchange="",
        routing_key="mail",
        declare=[queue],
        headers={"task": "t", "id": "1", "eta": eta.isoformat()},
        expiration=60 if limit == "message" else None,
    )
    tasks = microqueue_database.tasks
    task = tasks.find_one()
    assert lasts(task["expires_at"] - task["next_retry_at"], 60)
    tasks.update_one({}, {"$set": dict.fromkeys(("next_retry_at", "deadline_at"), past())})
    assert get(connection).payload == 1


def test_a_message_whose_time_to_live_ends_in_more_than_a_century_has_none(
    connect: Connect, microqueue_database: Any
) -> None:
    headers = {"task": "t", "id": "1", "eta": "9998-01-01T00:00:00"}
    publish(connect(message_ttl=60), 1, headers=headers)
    assert microqueue_database.tasks.find_one().get("expires_at") is None


def test_the_shortest_time_to_live_holds() -> None:
    message = {"properties": {"expiration": "2000"}}
    assert time_to_live(message, timedelta(seconds=5), None) == timedelta(seconds=2)
    assert time_to_live(message, timedelta(seconds=1)) == timedelta(seconds=1)
    assert time_to_live({"properties": {}}, None) is None


@pytest.mark.parametrize("sweep", [False, True])
def test_a_message_that_outlived_its_time_is_dropped(
    connect: Connect, microqueue_database: Any, sweep: bool
) -> None:
    connection = connect(message_ttl=3600)
    publish(connection, 1)
    tasks = microqueue_database.tasks
    assert tasks.update_one(
        {}, {"$set": dict.fromkeys(("expires_at", "deadline_at"), past())}
    ).modified_count
    if sweep:
        connection.transport.broker.sweep()
    else:
        assert get(connection) is None
    assert tasks.count_documents({}) == 0


@pytest.mark.parametrize("sweep", [False, True])
def test_a_message_that_outlived_its_time_is_a_dead_letter_by_option(
    connect: Connect, microqueue_database: Any, sweep: bool
) -> None:
    connection = connect(message_ttl=3600, dead_letter_expired=True)
    publish(connection, 1)
    microqueue_database.tasks.update_one(
        {}, {"$set": dict.fromkeys(("expires_at", "deadline_at"), past())}
    )
    if sweep:
        connection.transport.broker.sweep()
    else:
        assert get(connection) is None
    assert microqueue_database.tasks.find_one()["error"]["code"] == "expired"


# The life of queues


def test_an_unused_queue_is_deleted_with_its_bindings_and_messages(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    exchange = kombu.Exchange("news", type="direct")
    declare(connection, kombu.Queue("reply", exchange, routing_key="r", expires=3600))
    connection.Producer().publish(1, exchange="news", routing_key="r")
    stored = microqueue_database.microqueue_broker
    queue = stored.find_one({"kind": "queue"})
    assert lasts(queue["expires_at"] - queue["declared_at"], 3600)
    connection.transport.broker.sweep()
    assert stored.count_documents({"queue": "reply"}) == 2
    stored.update_one({"kind": "queue"}, {"$set": {"expires_at": past()}})
    connection.transport.broker.sweep()
    assert [one["kind"] for one in stored.find()] == ["exchange"]
    assert microqueue_database.tasks.count_documents({}) == 0


def test_a_consumed_queue_does_not_expire(connect: Connect, microqueue_database: Any) -> None:
    connection = connect()
    queue = kombu.Queue("reply", routing_key="reply", expires=6)
    Receiver(connection, queue)
    stored = microqueue_database.microqueue_broker
    first = stored.find_one({"queue": "reply"})["expires_at"]
    wait_for(lambda: stored.find_one({"queue": "reply"})["expires_at"] > first)


def test_a_get_keeps_a_queue_from_expiring_once_in_a_third_of_its_time(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    declare(connection, kombu.Queue("reply", routing_key="reply", expires=3600))
    stored = microqueue_database.microqueue_broker
    soon = datetime.now(UTC) + timedelta(minutes=1)
    for is_kept in (True, False):
        stored.update_one({"kind": "queue"}, {"$set": {"expires_at": soon}})
        assert get(connection, "reply") is None
        expires_at = stored.find_one({"kind": "queue"})["expires_at"].replace(tzinfo=UTC)
        assert (expires_at > soon + timedelta(minutes=1)) == is_kept


def test_a_queue_without_an_expiry_stays(connect: Connect, microqueue_database: Any) -> None:
    connection = connect()
    declare(connection, kombu.Queue("mail"))
    connection.transport.broker.sweep()
    (stored,) = microqueue_database.microqueue_broker.find({"kind": "queue"})
    assert stored["expires_at"] is None


def test_an_auto_delete_queue_lives_as_long_as_a_lease_after_its_last_use(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect(visibility_timeout=1234)
    declare(connection, kombu.Queue("reply", auto_delete=True))
    (stored,) = microqueue_database.microqueue_broker.find({"kind": "queue"})
    assert lasts(stored["expires_at"] - stored["declared_at"], 1234)


def test_a_consumed_queue_is_not_deleted_if_only_unused_ones_are(connect: Connect) -> None:
    connection = connect()
    receiver = Receiver(connection, kombu.Queue("mail", routing_key="mail"))
    channel = receiver.consumer.channel
    channel.queue_delete("mail", if_unused=True)
    assert channel.queue_declare("mail", passive=True).queue == "mail"
    receiver.consumer.cancel()
    channel.queue_delete("mail", if_unused=True)
    with pytest.raises(connection.channel_errors):
        channel.queue_declare("mail", passive=True)


def test_the_table_of_an_exchange(connect: Connect) -> None:
    channel = connect().default_channel
    exchange = kombu.Exchange("letters")
    kombu.Queue("mail", exchange, routing_key="post")(channel).declare()
    assert channel.get_table("letters") == [("post", None, "mail")]


def test_an_exchange_that_another_process_declared_with_another_type(connect: Connect) -> None:
    connect().default_channel.exchange_declare("news", "topic")
    channel = connect(poll_timeout=11).default_channel
    for _ in range(2):
        with pytest.raises(NotEquivalentError, match="topic"):
            channel.exchange_declare("news", "fanout")
    channel.exchange_delete("news")
    channel.exchange_declare("news", "fanout")


def test_without_retention_an_acknowledged_message_is_deleted(
    connect: Connect, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICROQUEUE_RETENTION", "0")
    connection = connect()
    publish(connection, 1)
    get(connection).ack()
    assert connection.transport.broker.flush()
    assert microqueue_database.tasks.count_documents({}) == 0


# Names


@pytest.mark.parametrize("name", ["x\0", "x\n", "x" * 121, {"a": 1}, 3, b"mail"])
@pytest.mark.parametrize("call", ["declare", "bind", "publish", "consume", "get", "delete"])
def test_a_name_that_no_queue_can_have(
    connect: Connect, microqueue_database: Any, name: Any, call: str
) -> None:
    channel = connect().default_channel
    calls: dict[str, Callable[[], Any]] = {
        "declare": lambda: channel.queue_declare(name),
        "bind": lambda: channel.queue_bind(name, "news", "sport"),
        "publish": lambda: channel.basic_publish(channel.prepare_message("1"), "", name),
        "consume": lambda: channel.basic_consume(name, False, print, "1"),
        "get": lambda: channel.basic_get(name),
        "delete": lambda: channel.queue_delete(name),
    }
    with rejecting("name", name):
        calls[call]()
    assert microqueue_database.microqueue_broker.count_documents({}) == 0


def test_the_prefix_is_part_of_the_name(connect: Connect) -> None:
    channel = connect(global_keyprefix="shop-").default_channel
    channel.queue_declare("x" * 115)
    with rejecting("name", f"shop-{'x' * 116}"):
        channel.queue_declare("x" * 116)


@pytest.mark.parametrize("name", [{"a": 1}, 3])
def test_a_name_that_no_exchange_can_have(connect: Connect, name: Any) -> None:
    channel = connect().default_channel
    with rejecting("exchange", name):
        channel.exchange_declare(name)
