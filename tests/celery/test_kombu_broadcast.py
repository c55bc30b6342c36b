"""Fanout and topic exchanges with transient queues: the live broadcast."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import kombu
import pytest
from kombu.pidbox import Mailbox

from microqueue import Topic
from microqueue.contrib.kombu import broadcast as broadcasts
from microqueue.errors import ServerUnavailable
from microqueue.subscription import Subscription
from tests.celery.kombu_tools import Connect, Receiver, get, logged, publish
from tests.waiting import wait_for

FANOUT = kombu.Exchange("news", type="fanout")
TOPIC = kombu.Exchange("events", type="topic")
COLLECTION = "tasks_topic_exchange.news"


def transient(name: str, exchange: Any = FANOUT, **options: Any) -> kombu.Queue:
    return kombu.Queue(name, exchange, auto_delete=True, **options)


def broadcast(
    connection: Any, body: Any, exchange: Any = FANOUT, key: str = "", **more: Any
) -> None:
    connection.Producer().publish(
        body, exchange=exchange, routing_key=key, declare=[exchange], **more
    )


def stored(database: Any, collection: str = COLLECTION) -> int:
    found: int = database[collection].count_documents({"start": None})
    return found


def other_process(connect: Connect, number: int) -> Any:
    """A connection that shares nothing with those of other options, as in another process."""
    return connect(poll_timeout=10 + number)


def test_each_process_gets_a_broadcast_once_and_it_is_stored_once(
    connect: Connect, microqueue_database: Any
) -> None:
    receivers = [
        Receiver(other_process(connect, n), transient(f"bcast.{n}"), no_ack=True) for n in range(5)
    ]
    publisher = connect()
    for n in range(20):
        broadcast(publisher, n)
    for one in receivers:
        assert one.receive(20) == list(range(20))
        assert one.drain() == 20
    assert stored(microqueue_database) == 20
    assert microqueue_database.tasks.count_documents({}) == 0


def test_more_queues_than_connections(connect: Connect) -> None:
    connection = connect(max_connections=1)
    receivers = [Receiver(connection, transient(f"bcast.{n}"), no_ack=True) for n in range(12)]
    mail = Receiver(connection, kombu.Queue("mail", routing_key="mail"))
    publish(connect(), "task")
    broadcast(connect(), "news")
    assert mail.receive(1) == ["task"]
    for one in receivers:
        assert one.receive(1) == ["news"]


def test_nothing_is_stored_if_no_queue_is_bound(connect: Connect, microqueue_database: Any) -> None:
    broadcast(connect(), 1)
    names = microqueue_database.list_collection_names()
    assert "microqueue_broker" in names
    assert COLLECTION not in names
    assert microqueue_database.tasks.count_documents({}) == 0


def test_durable_and_transient_queues_of_one_exchange(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    kombu.Queue("kept", FANOUT)(connection.default_channel).declare()
    receiver = Receiver(connection, transient("bcast.1"))
    broadcast(connection, "hello")
    assert receiver.receive(1) == ["hello"]
    assert [one["queue"] for one in microqueue_database.tasks.find()] == ["kept"]
    assert get(connection, "kept").payload == "hello"


@pytest.mark.parametrize("option", ["auto_delete", "exclusive"])
def test_queues_that_are_transient(connect: Connect, microqueue_database: Any, option: str) -> None:
    connection = connect()
    options: dict[str, Any] = {option: True}
    receiver = Receiver(connection, kombu.Queue("bcast.1", FANOUT, **options))
    broadcast(connection, 1)
    receiver.receive(1)
    assert stored(microqueue_database) == 1


def test_what_is_published_between_bind_and_consume_is_received(connect: Connect) -> None:
    connection = connect()
    broadcast(connection, "before")
    queue = transient("bcast.1")
    queue(connection.default_channel).declare()
    broadcast(connection, "between")
    receiver = Receiver(connection, queue)
    broadcast(connection, "after")
    assert receiver.receive(2) == ["between", "after"]


def test_another_process_consumes_what_was_published_after_the_queue_was_bound(
    connect: Connect,
) -> None:
    queue = transient("bcast.1")
    queue(other_process(connect, 1).default_channel).declare()
    broadcast(connect(), "between")
    receiver = Receiver(other_process(connect, 2), queue)
    assert receiver.receive(1) == ["between"]


def test_a_new_consumer_of_the_queue_does_not_get_what_another_has_received(
    connect: Connect,
) -> None:
    queue = transient("bcast.1")
    first = Receiver(other_process(connect, 1), queue)
    broadcast(connect(), "old")
    assert first.receive(1) == ["old"]
    second = Receiver(other_process(connect, 2), queue)
    broadcast(connect(), "new")
    assert second.receive(1) == ["new"]


def test_a_reconnect_loses_and_repeats_nothing(connect: Connect) -> None:
    connection, publisher = connect(), other_process(connect, 1)
    queue = transient("bcast.1")
    receiver = Receiver(connection, queue)
    broadcast(publisher, 1)
    assert receiver.receive(1) == [1]
    receiver.messages[0].ack()
    connection.collect()
    broadcast(publisher, 2)
    again = Receiver(connection, queue)
    broadcast(publisher, 3)
    assert again.receive(2) == [2, 3]


def test_a_topic_exchange_delivers_by_routing_key(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    all_events = Receiver(other_process(connect, 1), transient("ev.1", TOPIC, routing_key="#"))
    workers = Receiver(other_process(connect, 2), transient("ev.2", TOPIC, routing_key="worker.*"))
    for key in ("task.sent", "worker.online", "worker.online.late"):
        broadcast(connection, key, TOPIC, key)
    broadcast(connection, "end", TOPIC, "worker.end")
    assert all_events.receive(4) == ["task.sent", "worker.online", "worker.online.late", "end"]
    assert workers.receive(2) == ["worker.online", "end"]


def test_a_message_that_no_key_matches_is_not_stored(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    transient("ev.1", TOPIC, routing_key="worker.*")(connection.default_channel).declare()
    broadcast(connection, 1, TOPIC, "task.sent")
    assert stored(microqueue_database, "tasks_topic_exchange.events") == 0
    broadcast(connection, 1, TOPIC, "worker.online")
    assert stored(microqueue_database, "tasks_topic_exchange.events") == 1


def test_keys_that_overlap_deliver_once_and_unbound_ones_no_more(connect: Connect) -> None:
    connection = connect()
    receiver = Receiver(connection, transient("ev.1", TOPIC, routing_key="#"))
    channel = connection.default_channel
    channel.queue_bind("ev.1", "events", "worker.*")
    broadcast(connection, 1, TOPIC, "worker.online")
    broadcast(connection, 2, TOPIC, "task.sent")
    assert receiver.receive(2) == [1, 2]
    channel.queue_unbind("ev.1", "events", "#")
    broadcast(connection, 3, TOPIC, "task.sent")
    broadcast(connection, 4, TOPIC, "worker.online")
    assert receiver.receive(3) == [1, 2, 4]


def test_a_queue_of_two_exchanges(connect: Connect) -> None:
    connection = connect()
    receiver = Receiver(connection, transient("bcast.1"))
    other = kombu.Exchange("weather", type="fanout")
    other(connection.default_channel).declare()
    connection.default_channel.queue_bind("bcast.1", "weather", "")
    broadcast(connection, 1)
    broadcast(connection, 2, other)
    assert sorted(receiver.receive(2)) == [1, 2]


@pytest.mark.parametrize("limit", ["queue", "message", "option"])
def test_a_message_that_outlived_its_time_is_not_delivered(
    connect: Connect, microqueue_database: Any, limit: str
) -> None:
    connection = connect(**({"message_ttl": 3600} if limit == "option" else {}))
    queue = transient("bcast.1", **({"message_ttl": 3600} if limit == "queue" else {}))
    queue(connection.default_channel).declare()
    broadcast(connection, "old", expiration=3600 if limit == "message" else None)
    past = datetime.now(UTC) - timedelta(hours=2)
    microqueue_database[COLLECTION].update_one({"start": None}, {"$set": {"published_at": past}})
    broadcast(connection, "new")
    assert Receiver(connection, queue).receive(1) == ["new"]


def test_requeued_comes_first_and_is_redelivered_up_to_the_limit(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect(delivery_limit=2)
    receiver = Receiver(connection, transient("bcast.1"), prefetch_count=1)
    broadcast(connection, 1)
    broadcast(connection, 2)
    receiver.receive(1)
    receiver.messages[-1].requeue()
    assert receiver.receive(2) == [1, 1]
    flags = [one.delivery_info["redelivered"] for one in receiver.messages]
    assert flags == [False, True]
    with caplog.at_level(logging.ERROR, "microqueue.kombu"):
        receiver.messages[-1].requeue()
        assert receiver.receive(3) == [1, 1, 2]
    (record,) = caplog.records
    assert (vars(record)["dropped"], vars(record)["deliveries"]) == (True, 2)


def test_the_prefetch_count_limits_broadcasts(connect: Connect) -> None:
    connection = connect()
    receiver = Receiver(connection, transient("bcast.1"), prefetch_count=2)
    for n in range(4):
        broadcast(connection, n)
    receiver.receive(2)
    assert receiver.drain() == 2
    receiver.messages[0].ack()
    assert receiver.receive(3) == [0, 1, 2]


def test_messages_not_delivered_before_a_cancel_are_delivered_later_in_order(
    connect: Connect,
) -> None:
    connection = connect()
    queue = transient("bcast.1")
    receiver = Receiver(connection, queue)
    for n in range(3):
        broadcast(connection, n)
    wait_for(lambda: len(connection.transport.broker.deliveries) == 3)  # All are in the buffer.
    receiver.consumer.cancel()
    assert Receiver(connection, queue).receive(3) == [0, 1, 2]


def test_get_count_and_purge(connect: Connect) -> None:
    connection = connect()
    queue = transient("bcast.1")(connection.default_channel)
    queue.declare()
    assert queue.get() is None
    for n in range(3):
        broadcast(connection, n)
    message = queue.get()
    assert message.payload == 0
    assert queue.queue_declare(passive=True).message_count == 2
    message.requeue()
    assert queue.get(no_ack=True).payload == 0
    assert queue.purge() == 2
    assert queue.get() is None


def test_a_transient_queue_is_also_reached_directly_and_leaves_nothing(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    receiver = Receiver(connection, transient("bcast.1"), no_ack=True)
    connection.Producer().publish("direct", exchange="", routing_key="bcast.1")
    assert receiver.receive(1) == ["direct"]
    wait_for(lambda: microqueue_database.tasks.count_documents({}) == 0)


def test_a_gap_is_logged_and_the_rest_is_delivered(
    connect: Connect, microqueue_database: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect(fanout_messages=5)
    queue = transient("bcast.1")
    queue(connection.default_channel).declare()
    for n in range(20):
        broadcast(connection, n)
    assert stored(microqueue_database) == 5
    with caplog.at_level(logging.WARNING, "microqueue.kombu"):
        assert Receiver(connection, queue).receive(5) == [15, 16, 17, 18, 19]
    (record,) = caplog.records
    assert vars(record)["queue"] == "bcast.1"
    assert vars(record)["topic"]
    assert vars(record)["after"] < vars(record)["first"]
    assert "fanout_messages" in record.getMessage()  # The option that keeps more.


def test_a_message_of_another_kind_in_the_topic_is_skipped(
    connect: Connect, microqueue_database: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect()
    receiver = Receiver(connection, transient("bcast.1"))
    position = Topic(microqueue_database, "exchange.news").publish({"n": 1})
    broadcast(connection, 1)
    assert receiver.receive(1) == [1]
    assert logged(caplog, logging.ERROR, queue="bcast.1", position=position, dropped=True)


def test_exchange_names_that_are_too_long_for_a_topic(connect: Connect) -> None:
    connection = connect()
    names = ["x" * 200 + end for end in "ab"]
    exchanges = [kombu.Exchange(name, type="fanout") for name in names]
    receivers = [
        Receiver(connection, transient(f"bcast.{n}", one)) for n, one in enumerate(exchanges)
    ]
    for n, one in enumerate(exchanges):
        broadcast(connection, n, one)
    assert [one.receive(1) for one in receivers] == [[0], [1]]


def test_the_prefix_separates_exchanges(connect: Connect) -> None:
    ours, theirs = connect(global_keyprefix="a."), connect(global_keyprefix="b.")
    receivers = [Receiver(one, transient("bcast.1")) for one in (ours, theirs)]
    broadcast(theirs, "theirs")
    broadcast(ours, "ours")
    assert [one.receive(1) for one in receivers] == [["ours"], ["theirs"]]


def test_a_consumed_queue_that_expired_is_declared_again(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    receiver = Receiver(connection, transient("bcast.1", expires=3))
    declared = microqueue_database.microqueue_broker
    assert declared.delete_many({"queue": "bcast.1"}).deleted_count == 2
    wait_for(lambda: declared.count_documents({"queue": "bcast.1"}) == 2)
    broadcast(connection, 1)
    assert receiver.receive(1) == [1]


def test_a_queue_declared_again_after_another_process_deleted_it_starts_empty(
    connect: Connect,
) -> None:
    connection = connect()
    queue = transient("bcast.1")(connection.default_channel)
    queue.declare()
    broadcast(connection, "old")
    other_process(connect, 1).default_channel.queue_delete("bcast.1")
    queue.declare()
    broadcast(connection, "new")
    assert Receiver(connection, transient("bcast.1")).receive(1) == ["new"]


def test_readers_end_with_their_consumers(connect: Connect) -> None:
    connection = connect()
    receiver = Receiver(connection, transient("bcast.1"))
    readers = [one for one in threading.enumerate() if one.name == "microqueue-kombu-broadcast"]
    assert readers
    receiver.consumer.cancel()
    wait_for(lambda: not any(one.is_alive() for one in readers))


def test_remote_control_of_several_nodes(connect: Connect, microqueue_database: Any) -> None:
    """What ``celery inspect ping`` does: one command to all, and a reply from each."""
    calls: list[str] = []

    def ping(state: Any, **_: Any) -> str:
        calls.append(state)
        return f"pong {state}"

    def serve(number: int, stop: threading.Event) -> None:
        connection = other_process(connect, number)
        mailbox = Mailbox("shop", type="fanout", connection=connection, queue_expires=10)
        node = mailbox.Node(f"w{number}", state=f"w{number}", channel=connection.default_channel)
        node.handlers["ping"] = ping
        with node.listen():
            ready.release()
            while not stop.is_set():
                try:
                    connection.drain_events(timeout=0.1)
                except TimeoutError:
                    continue

    stop, ready = threading.Event(), threading.Semaphore(0)
    threads = [threading.Thread(target=serve, args=(n, stop)) for n in range(4)]
    with ExitStack() as stack:
        for one in threads:
            one.start()
            stack.callback(one.join)
        stack.callback(stop.set)
        for _ in threads:
            assert ready.acquire(timeout=40)
        client = Mailbox("shop", type="fanout", connection=connect())
        replies = client.multi_call("ping", timeout=40, limit=4)
        assert sorted(map(str, replies)) == [str({f"w{n}": f"pong w{n}"}) for n in range(4)]
    assert sorted(calls) == [f"w{n}" for n in range(4)]
    wait_for(lambda: microqueue_database.tasks.count_documents({}) == 0)


def test_no_more_is_read_ahead_than_allowed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcasts, "AHEAD", 2)
    connection = connect()
    receiver = Receiver(connection, transient("bcast.1"), prefetch_count=1)
    for n in range(6):
        broadcast(connection, n)
    for n in range(6):
        assert receiver.receive(n + 1)[-1] == n
        receiver.messages[-1].ack()


def test_a_reader_that_fails_continues(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(broadcasts, "RETRY_SEC", 0.01)
    read = Subscription.read
    failures = [ServerUnavailable("away")]

    def fail(self: Subscription) -> Any:
        if failures:
            raise failures.pop()
        return read(self)

    monkeypatch.setattr(Subscription, "read", fail)
    connection = connect()
    receiver = Receiver(connection, transient("bcast.1"))
    broadcast(connection, 1)
    assert receiver.receive(1) == [1]
    assert logged(caplog, logging.WARNING, queue="bcast.1", wait_sec=0.01)
