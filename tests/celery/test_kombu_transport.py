"""Messages of the Kombu transport: how they are stored, delivered and settled."""

from __future__ import annotations

import gc
import logging
import os
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import kombu
import pymongo
import pytest
from pymongo.errors import InvalidOperation

from microqueue import DeadLetter, Hooks, Queue
from microqueue.contrib.kombu import broker as brokers
from microqueue.contrib.kombu import consumers, deliveries, recent
from microqueue.contrib.kombu.claims import MessageClaimer
from microqueue.contrib.kombu.messages import task_eta
from microqueue.task import Lease
from tests.celery.kombu_tools import Connect, Receiver, get, logged, publish
from tests.waiting import wait_for

MAIL = kombu.Queue("mail", routing_key="mail")


def test_a_message_is_a_task_with_the_name_of_celerys_task(
    connect: Connect, microqueue_database: Any
) -> None:
    publish(connect(), [1], headers={"task": "shop.pay", "id": "1"}, priority=200)
    (task,) = microqueue_database.tasks.find()
    assert (task["queue"], task["name"], task["priority"]) == ("mail", "shop.pay", 200)
    assert task["payload"]["body"] == "[1]"


@pytest.mark.parametrize("name", ["shop." + "x" * 200, "shop\npay"])
def test_a_name_that_is_no_name_of_a_task_is_kept_in_a_header(
    connect: Connect, microqueue_database: Any, name: str
) -> None:
    publish(connect(), [1], headers={"task": name, "id": "1"})
    (task,) = microqueue_database.tasks.find()
    assert ("name" in task, task["headers"]) == (False, {"task": name})


def test_acknowledged_is_done(connect: Connect, microqueue_database: Any) -> None:
    connection = connect()
    publish(connection, 1)
    get(connection).ack()
    wait_for(lambda: microqueue_database.tasks.count_documents({"status": "done"}) == 1)


def test_rejected_is_dropped(connect: Connect, microqueue_database: Any) -> None:
    connection = connect()
    publish(connection, 1)
    get(connection).reject()
    wait_for(lambda: microqueue_database.tasks.count_documents({}) == 0)


def test_rejected_is_a_dead_letter_by_option(connect: Connect, microqueue_database: Any) -> None:
    connection = connect(dead_letter_rejected=True)
    publish(connection, 1)
    get(connection).reject()
    found = wait_for(lambda: microqueue_database.tasks.find_one({"status": "failed"}))
    assert found["error"]["code"] == "rejected"


class Recorder(Hooks):
    """Keeps the dead letters that it is notified of."""

    def __init__(self) -> None:
        self.letters: list[DeadLetter] = []

    def on_dead_letter(self, letter: DeadLetter) -> None:
        self.letters.append(letter)


def test_dead_letters_reach_hooks(connect: Connect) -> None:
    recorder = Recorder()
    connection = connect(dead_letter_rejected=True, delivery_limit=1, hooks=[recorder])
    for _ in range(2):
        publish(connection, 1)
    get(connection).reject()
    get(connection).requeue()
    wait_for(lambda: len(recorder.letters) == 2)
    assert {one.error.code for one in recorder.letters} == {"rejected", "poison"}
    assert {one.source for one in recorder.letters} == {"celery"}


def test_requeued_keeps_its_place_and_is_redelivered(connect: Connect) -> None:
    connection = connect()
    publish(connection, "first")
    publish(connection, "second")
    message = get(connection)
    assert message.delivery_info["redelivered"] is False
    message.requeue()
    again = get(connection)
    assert again.payload == "first"
    assert again.delivery_info["redelivered"] is True
    assert again.delivery_tag != message.delivery_tag


def test_the_delivery_limit_ends_in_the_dead_letters(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect(delivery_limit=2)
    publish(connection, 1)
    for _ in range(2):
        get(connection).requeue()
    assert get(connection) is None
    (task,) = microqueue_database.tasks.find()
    assert (task["status"], task["error"]["code"], task["attempts"]) == ("failed", "poison", 2)


def test_closing_a_channel_gives_its_messages_back(connect: Connect) -> None:
    connection = connect()
    publish(connection, 1)
    channel = connection.channel()
    assert channel.basic_get("mail").payload == 1
    assert get(connection) is None
    channel.close()
    assert get(connection).payload == 1


def test_fetched_messages_that_were_not_delivered_are_given_back_uncounted(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    for number in range(3):
        publish(connection, number)
    consumer = connection.Consumer([kombu.Queue("mail", routing_key="mail")], callbacks=[print])
    consumer.consume()
    tasks = microqueue_database.tasks
    wait_for(lambda: tasks.count_documents({"status": "processing"}) == 3)
    consumer.cancel()
    wait_for(lambda: tasks.count_documents({"status": "pending", "attempts": 0}) == 3)


def test_the_prefetch_count_limits_what_is_fetched(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    for number in range(5):
        publish(connection, number)
    received: list[Any] = []
    consumer = connection.Consumer(
        [kombu.Queue("mail", routing_key="mail")],
        on_message=received.append,
        prefetch_count=2,
    )
    with consumer:
        wait_for(lambda: _drain(connection, received) == 2)
        assert _drain(connection, received) == 2
        assert microqueue_database.tasks.count_documents({"status": "processing"}) == 2
        received[0].ack()
        wait_for(lambda: _drain(connection, received) == 3)


def _drain(connection: Any, received: list[Any]) -> int:
    """Deliver what was fetched; return how many messages were received in all."""
    with suppress(TimeoutError):
        connection.drain_events(timeout=0.2)
    return len(received)


def test_a_broken_connection_keeps_what_is_in_use_and_releases_the_rest(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    for number in range(2):
        publish(connection, number)
    channel = connection.channel()
    in_use, dropped = channel.basic_get("mail"), channel.basic_get("mail")
    assert dropped is not None
    connection.collect()
    del dropped
    gc.collect()
    tasks = microqueue_database.tasks
    wait_for(lambda: tasks.count_documents({"status": "pending"}) == 1)
    assert tasks.count_documents({"status": "processing"}) == 1
    in_use.ack()
    wait_for(lambda: tasks.count_documents({"status": "done"}) == 1)


def test_a_sweep_redelivers_what_a_killed_process_held(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect(visibility_timeout=30)
    publish(connection, 1)
    assert get(connection) is not None
    past = datetime.now(UTC) - timedelta(hours=1)
    microqueue_database.tasks.update_one({}, {"$set": {"deadline_at": past}})
    connection.transport.broker.sweep()
    again = get(connection)
    assert again.delivery_info["redelivered"] is True


def test_a_sweep_deletes_acknowledged_messages_after_the_retention(
    connect: Connect, microqueue_database: Any
) -> None:
    connection, tasks = connect(), microqueue_database.tasks
    for number in range(2):
        publish(connection, number)
        get(connection).ack()
    wait_for(lambda: tasks.count_documents({"status": "done"}) == 2)
    last_week = datetime.now(UTC) - timedelta(days=8)
    tasks.update_one({}, {"$set": {"finished_at": last_week, "deadline_at": last_week}})
    connection.transport.broker.sweep()
    assert tasks.count_documents({}) == 1


def test_a_delayed_message_is_delivered_when_it_is_due_and_not_as_a_redelivery(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    eta = datetime.now(UTC) + timedelta(hours=1)
    publish(connection, [1], headers={"task": "shop.pay", "id": "1", "eta": eta.isoformat()})
    assert get(connection) is None
    past = datetime.now(UTC) - timedelta(hours=1)
    microqueue_database.tasks.update_one({}, {"$set": {"next_retry_at": past, "deadline_at": past}})
    assert get(connection).delivery_info["redelivered"] is False


def test_headers_keep_types_that_bson_lacks(connect: Connect) -> None:
    connection = connect()
    instant = datetime(2030, 1, 1, 12, 0, 0, 123456)  # noqa: DTZ001
    publish(connection, 1, headers={"at": instant, "most": 2**70, "names": ("a", "b")})
    headers = get(connection).headers
    assert headers["at"] == instant
    assert headers["most"] == 2**70
    assert headers["names"] == ["a", "b"]


def test_properties_that_amqp_does_not_know_are_kept_if_they_can_be_stored(
    connect: Connect,
) -> None:
    connection = connect()
    publish(connection, 1, group="a", signal=object(), message_id="m")
    properties = get(connection).properties
    assert (properties["group"], properties["message_id"]) == ("a", "m")
    assert "signal" not in properties


def test_a_property_of_amqp_that_cannot_be_stored_is_an_error(
    connect: Connect, microqueue_database: Any
) -> None:
    with pytest.raises(TypeError):
        publish(connect(), 1, message_id=object())
    assert microqueue_database.tasks.count_documents({}) == 0


def test_bytes_come_back_as_bytes(connect: Connect, microqueue_database: Any) -> None:
    connection = connect()
    publish(connection, b"\xff\x00", content_type="application/data", content_encoding="binary")
    assert microqueue_database.tasks.find_one()["payload"]["body"] == b"\xff\x00"
    assert get(connection).body == b"\xff\x00"


def test_a_child_process_publishes_with_its_own_client(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    publish(connection, "parent")
    child = os.fork()
    if not child:
        try:
            publish(connection, "child")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert [get(connection).payload for _ in range(2)] == ["parent", "child"]


@pytest.mark.parametrize("stored", ["2030-01-01T00:00:00", "2030-01-01T01:00:00+01:00"])
def test_an_eta_without_a_zone_is_in_utc(stored: str) -> None:
    message = {"headers": {"task": "t", "eta": stored}}
    assert task_eta(message) == datetime(2030, 1, 1, tzinfo=UTC)


# Draining


def consume(connection: Any, count: int, **options: Any) -> Receiver:
    """Publish so many messages, and consume; wait until all are fetched."""
    for number in range(count):
        publish(connection, number)
    receiver = Receiver(connection, MAIL, **options)
    wait_for(lambda: len(connection.transport.broker.deliveries) == count)
    return receiver


def test_draining_delivers_all_messages_that_were_fetched(connect: Connect) -> None:
    connection = connect()
    receiver = consume(connection, 3)
    connection.drain_events(timeout=60)
    assert receiver.bodies == [0, 1, 2]


def test_a_new_consumer_gets_all_that_wait_with_the_first_drain(connect: Connect) -> None:
    connection = connect()
    for _ in range(2):
        for number in range(3):
            publish(connection, number)
        receiver = Receiver(connection, MAIL)
        connection.drain_events(timeout=60)
        assert receiver.bodies == [0, 1, 2]
        for message in receiver.messages:
            message.ack()
        receiver.consumer.cancel()


def test_a_caller_may_drain_once_for_each_message(connect: Connect) -> None:
    connection = connect()
    receiver = consume(connection, 3)
    for _ in range(3):
        connection.drain_events(timeout=60)
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.01)
    assert receiver.bodies == [0, 1, 2]


def test_messages_that_come_later_are_delivered_one_by_one(connect: Connect) -> None:
    connection = connect()
    receiver = consume(connection, 1)
    connection.drain_events(timeout=60)
    for number in range(1, 4):
        publish(connection, number)
    wait_for(lambda: len(connection.transport.broker.deliveries) == 4)
    for number in range(1, 4):
        connection.drain_events(timeout=60)
        assert receiver.bodies == list(range(number + 1))
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.01)


def test_a_simple_queue_that_is_closed_returns_what_it_did_not_pass_on(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    queue = connection.SimpleQueue("mail")
    for number in range(5):
        queue.put(number)
    held = []
    for number in range(4):
        queue = connection.SimpleQueue("mail")
        message = queue.get(timeout=60)
        assert message.payload == number
        if number:
            message.ack()
        else:
            held.append(message)
        queue.close()
    waiting = {"status": "pending", "attempts": 0}
    wait_for(lambda: microqueue_database.tasks.count_documents(waiting) == 1)
    assert microqueue_database.tasks.count_documents({"status": "processing"}) == 1  # As in AMQP.
    held[0].ack()
    wait_for(lambda: microqueue_database.tasks.count_documents({"status": "done"}) == 4)


def test_a_message_that_is_being_delivered_leaves_no_room(connect: Connect) -> None:
    connection = connect()
    for number in range(2):
        publish(connection, number)
    receiver = Receiver(connection, MAIL, prefetch_count=1)
    channel = receiver.consumer.channel
    rooms: list[int] = []

    class Measured(channel.Message):  # type: ignore[name-defined]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            (consumer,) = channel._by_tag.values()  # noqa: SLF001
            rooms.append(connection.transport.fetcher._room(consumer))  # noqa: SLF001
            super().__init__(*arguments, **options)

    channel.Message = Measured
    receiver.receive(1)
    receiver.messages[0].ack()
    assert receiver.receive(2) == [0, 1]
    assert rooms == [0, 0]


def test_another_consumer_waits_for_its_own_messages(connect: Connect) -> None:
    connection = connect()
    receiver = consume(connection, 3)
    connection.drain_events(timeout=60)
    receiver.consumer.cancel()
    Receiver(connection, kombu.Queue("empty", routing_key="empty"))
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.01)


def test_a_consumer_that_needs_no_acknowledgement_gets_one_message_at_a_time(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    receiver = consume(connection, 3, no_ack=True)
    connection.drain_events(timeout=60)
    assert receiver.bodies == [0]
    receiver.consumer.cancel()
    tasks = microqueue_database.tasks
    wait_for(lambda: tasks.count_documents({"status": "done"}) == 1)
    wait_for(lambda: tasks.count_documents({"status": "pending", "attempts": 0}) == 2)


@pytest.mark.parametrize("live", [False, True])
def test_more_is_fetched_before_all_is_delivered(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    monkeypatch.setattr(consumers, "BUSY_POLL_SEC", 3600)
    connection = connect()
    exchange = kombu.Exchange("news", type="fanout")
    queue = kombu.Queue("bcast.1", exchange, auto_delete=True) if live else MAIL
    queue(connection.default_channel).declare()
    count = 2 * consumers.UNLIMITED_PREFETCH + 1
    producer = connection.Producer()
    for number in range(count):
        if live:
            producer.publish(number, exchange=exchange, declare=[exchange])
        else:
            producer.publish(number, exchange="", routing_key="mail")
    receiver = Receiver(connection, queue, no_ack=True)
    assert receiver.receive(count) == list(range(count))


# Claims


def test_a_task_that_is_no_message_becomes_a_dead_letter(
    connect: Connect, microqueue_database: Any
) -> None:
    Queue(microqueue_database, "mail").enqueue({"not": "a message"})
    connection = connect()
    assert get(connection) is None
    assert connection.transport.broker.flush()
    assert microqueue_database.tasks.find_one()["status"] == "failed"


@pytest.mark.parametrize(
    ("options", "code"),
    [({}, None), ({"dead_letter_expired": True}, "expired")],
)
def test_a_message_that_expires_while_it_is_claimed_is_not_delivered(
    connect: Connect, microqueue_database: Any, options: dict[str, Any], code: str | None
) -> None:
    connection = connect(message_ttl=3600, **options)
    publish(connection, 1)
    past = datetime.now(UTC) - timedelta(hours=1)
    microqueue_database.tasks.update_one(
        {}, {"$set": dict.fromkeys(("expires_at", "deadline_at"), past)}
    )
    assert MessageClaimer(connection.transport.broker).claim("mail", 1) == []
    codes = [one["error"]["code"] for one in microqueue_database.tasks.find()]
    assert codes == ([] if code is None else [code])


# Settlements


def test_an_acknowledgement_of_several_leaves_later_ones(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    receiver = consume(connection, 3)
    receiver.receive(3)
    receiver.messages[1].ack(multiple=True)
    assert connection.transport.broker.flush()
    states = [one["status"] for one in microqueue_database.tasks.find(sort=[("position", 1)])]
    assert states == ["done", "done", "processing"]


def test_many_settlements_are_written_in_several_batches(
    connect: Connect, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "MOST_AT_ONCE", 2)
    connection = connect()
    receiver = consume(connection, 5)
    receiver.receive(5)
    for message in receiver.messages:
        message.ack()
    wait_for(lambda: microqueue_database.tasks.count_documents({"status": "done"}) == 5)


def test_a_process_that_ends_requeues_what_it_holds(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    publish(connection, 1)
    message = get(connection)
    broker = connection.transport.broker
    brokers._close_all()  # noqa: SLF001 (what Python calls at the end)
    assert broker.flush()  # What else ends does not wait for a thread that has ended.
    stored = microqueue_database.tasks.find_one()
    assert message.payload == 1
    assert (stored["status"], stored["attempts"]) == ("pending", 1)


def test_a_broker_whose_last_message_was_settled_is_closed_before_the_next_opens(
    connect: Connect,
) -> None:
    broken, other = connect(), connect()
    publish(other, 1)
    message = get(broken)
    broker = broken.transport.broker
    broken.collect()
    other.release()
    message.ack()
    wait_for(lambda: not len(broker.deliveries))
    connect(poll_timeout=11).connect()
    with pytest.raises(InvalidOperation):
        broker.client.admin.command("ping")
    with pytest.raises(InvalidOperation):
        broker.streaming.client.admin.command("ping")


def test_an_acknowledgement_after_the_end_opens_no_broker(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect()
    publish(connection, 1)
    message = get(connection)
    connection.release()
    before = set(brokers._brokers)  # noqa: SLF001
    message.ack()
    assert set(brokers._brokers) == before  # noqa: SLF001
    late = {"delivery_tag": message.delivery_tag, "settlement": "ack", "lease_lost": True}
    assert logged(caplog, logging.WARNING, **late) == caplog.records[-1:]


def test_what_is_settled_during_the_end_is_not_reported_as_written(connect: Connect) -> None:
    connection = connect()
    publish(connection, 1)
    message, broker = get(connection), connection.transport.broker
    held = deliveries.Deliveries(broker.core, renew_sec=60.0)
    held.add("1", broker.deliveries._held[message.delivery_tag].claimed)  # noqa: SLF001
    assert held.close(60.0)
    assert not held.settle("1", deliveries.Settle.ACK)
    assert held.flush(60.0)
    held._closed = False  # noqa: SLF001 (another thread has just checked it)
    assert held.settle("1", deliveries.Settle.ACK)
    held._closed = True  # noqa: SLF001
    assert not held.flush(10.0)


def test_a_child_process_does_not_settle_what_its_parent_holds(
    connect: Connect, microqueue_database: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect()
    publish(connection, 1)
    message = get(connection)
    connection.collect()
    child = os.fork()
    if not child:
        try:
            message.ack()
            opened = brokers._brokers  # noqa: SLF001
            late = logged(caplog, logging.WARNING, delivery_tag=message.delivery_tag)
            os._exit(0 if late and not opened else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    message.ack()
    wait_for(lambda: microqueue_database.tasks.count_documents({"status": "done"}) == 1)


def test_a_celery_worker_that_stops_releases_what_nothing_refers_to(
    connect: Connect, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect()
    receiver = consume(connection, 2)
    receiver.receive(2)
    running = receiver.messages.pop(0)
    receiver.messages.clear()
    monkeypatch.setattr("celery.worker.state.should_stop", 0)
    receiver.consumer.cancel()
    tasks = microqueue_database.tasks
    wait_for(lambda: tasks.count_documents({"status": "pending", "attempts": 0}) == 1)
    assert tasks.count_documents({"status": "processing"}) == 1
    running.channel.close()
    wait_for(lambda: tasks.count_documents({"status": "pending", "attempts": 1}) == 1)


# What Kombu asks a channel


def test_what_a_channel_knows_of_its_messages(connect: Connect) -> None:
    connection = connect()
    receiver = consume(connection, 1, prefetch_count=1)
    receiver.receive(1)
    (message,) = receiver.messages
    qos = receiver.consumer.channel.qos
    assert qos.get(message.delivery_tag) is message
    assert not qos.can_consume()
    message.ack()
    assert qos.can_consume()


def test_what_a_transport_knows_of_its_driver(connect: Connect) -> None:
    assert connect().transport.driver_version() == pymongo.version


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ("[]", {"task": "t", "eta": "tomorrow"}),
        ('{"task": "t", "eta": "2030-', {}),
    ],
)
def test_a_delay_that_cannot_be_read_is_none(body: str, headers: dict[str, str]) -> None:
    message = {"body": body, "content-type": "application/json", "headers": headers}
    assert task_eta(message) is None


def test_a_set_in_the_headers_is_a_list(connect: Connect) -> None:
    connection = connect()
    publish(connection, 1, headers={"stamps": {"b", "a"}})
    assert get(connection).headers["stamps"] == ["a", "b"]


# Memory


def remembered(connection: Any) -> list[int]:
    """Return how many names the broker of a connection has in each of its tables."""
    broker, claimer = connection.transport.broker, connection.transport._claimer  # noqa: SLF001
    tables = [
        broker._cores,  # noqa: SLF001
        broker._declared,  # noqa: SLF001
        broker._bound,  # noqa: SLF001
        broker._keep_at,  # noqa: SLF001
        broker._routes,  # noqa: SLF001
        broker.lost_claims,
        claimer._spreads if claimer else (),  # noqa: SLF001
    ]
    return [len(one) for one in tables]


def test_reply_queues_are_forgotten(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MOST_REMEMBERED", 10)
    monkeypatch.setattr(brokers, "BIND_SEC", 0)
    monkeypatch.setattr(brokers, "ROUTES_SEC", 0)
    inspecting, worker = connect(), connect(poll_timeout=11)
    exchange = kombu.Exchange("reply", type="direct")
    for number in range(300):
        name = f"{number}.reply"
        queue = kombu.Queue(name, exchange, routing_key=name, auto_delete=True, expires=10)
        queue(inspecting.default_channel).declare()
        if number % 10 == 0:
            worker.Producer().publish(number, exchange=exchange, routing_key=name)
            assert get(inspecting, name).payload == number
        else:
            worker.default_channel.queue_declare(name, passive=True)
            worker.transport.broker.queue(name)
            worker.transport.broker.declared(name)
        if number % 2 == 0:
            inspecting.default_channel.queue_delete(name)
    for connection in (inspecting, worker):
        assert max(remembered(connection)) <= 10


def test_a_queue_that_is_deleted_is_forgotten(connect: Connect) -> None:
    connection = connect()
    exchange = kombu.Exchange("reply", type="direct")
    queue = kombu.Queue("1.reply", exchange, routing_key="1", auto_delete=True, expires=10)
    queue(connection.default_channel).declare()
    connection.Producer().publish(1, exchange=exchange, routing_key="1")
    get(connection, "1.reply").ack()
    connection.transport.broker.lost_claims.add("1.reply", cast("Lease", None))
    connection.default_channel.queue_delete("1.reply")
    *tables, spreads = remembered(connection)
    assert (sum(tables), spreads) == (0, 1)


def test_what_is_used_again_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MOST_REMEMBERED", 2)
    names: recent.Recent[int] = recent.Recent()
    for number in range(2):
        names.put(str(number), number)
    assert names.get("0") == 0
    names.put("2", 2)
    assert [names.get(str(number)) for number in range(3)] == [0, None, 2]


def test_queues_that_are_consumed_are_not_forgotten(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "MOST_REMEMBERED", 4)
    monkeypatch.setattr(brokers, "BIND_SEC", 0)
    connection = connect()
    exchange, broker = kombu.Exchange("reply", type="direct"), connection.transport.broker
    consumed = [kombu.Queue(f"used.{number}", exchange, routing_key="x") for number in range(4)]
    consumer = kombu.Consumer(connection, consumed)
    consumer.consume()
    for number in range(5):
        kombu.Queue(f"{number}.reply", exchange, routing_key="x")(connection).declare()
    known = broker._bound  # noqa: SLF001
    assert all(known.get(one.name) for one in consumed)
    assert len(known) == len(consumed) + 4
    consumer.cancel()
    kombu.Queue("last.reply", exchange, routing_key="x")(connection).declare()
    assert len(known) == 4
