"""How the transport fetches: enough and in time, without needless reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import kombu
import pytest
from kombu.asynchronous import Hub

import microqueue.contrib.kombu  # noqa: F401 (it registers the schemes)
from microqueue import Queue
from microqueue.contrib.kombu import consumers, transport
from microqueue.contrib.kombu.channel import Channel
from microqueue.contrib.kombu.claims import MessageClaimer
from microqueue.contrib.kombu.consumers import Consumer, MessageFetcher
from microqueue.drivers.change_stream import SyncWakeup
from tests.waiting import wait_for


@pytest.fixture
def connection(database_uri: str) -> Iterator[Any]:
    with kombu.Connection(f"microqueue+{database_uri}") as opened:
        yield opened


def publish(connection: Any, name: str, *bodies: Any) -> None:
    producer = connection.Producer()
    for body in bodies:
        producer.publish(body, exchange="", routing_key=name, declare=[kombu.Queue(name)])


def drain(connection: Any, until: Callable[[], Any]) -> None:
    """Deliver messages until something holds."""

    def step() -> Any:
        with suppress(TimeoutError):
            connection.drain_events(timeout=0.1)
        return until()

    wait_for(step, 60)


def test_messages_are_fetched_while_others_are_settled_one_by_one(connection: Any) -> None:
    publish(connection, "mail", *range(30))
    received: list[int] = []

    def receive(body: int, message: Any) -> None:
        received.append(body)
        message.ack()

    queue = kombu.Queue("mail")
    with connection.Consumer([queue], callbacks=[receive], prefetch_count=8):
        drain(connection, lambda: len(received) == 30)
    assert sorted(received) == list(range(30))


def test_a_queue_beside_one_that_never_is_empty_is_read(connection: Any) -> None:
    publish(connection, "busy", *range(20))
    received: list[Any] = []

    def repeat(body: Any, message: Any) -> None:
        message.ack()
        publish(connection, "busy", body)

    def receive(body: Any, message: Any) -> None:
        message.ack()
        received.append(body)

    busy, quiet = connection.channel(), connection.channel()
    with (
        kombu.Consumer(busy, [kombu.Queue("busy")], callbacks=[repeat], prefetch_count=4),
        kombu.Consumer(quiet, [kombu.Queue("quiet")], callbacks=[receive], prefetch_count=4),
    ):
        for body in ("one", "two"):
            publish(connection, "quiet", body)
            drain(connection, lambda: received[-1:] == [body])  # noqa: B023 (called at once)


def test_a_queue_that_rested_is_read_when_the_others_are_empty(
    database_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "REST_SEC", 3600)
    received: list[Any] = []

    def receive(body: Any, message: Any) -> None:
        message.ack()
        received.append(body)

    queues = [kombu.Queue("busy"), kombu.Queue("quiet")]
    options = {"poll_timeout": 3600}
    with (
        kombu.Connection(f"microqueue+{database_uri}", transport_options=options) as connection,
        connection.Consumer(queues, callbacks=[receive]),
    ):
        for number in range(10):  # The consumers take turns: each one is first sometimes.
            publish(connection, queues[number % 2].name, number)
            drain(connection, lambda: received[-1:] == [number])  # noqa: B023 (called at once)


def test_nothing_is_fetched_from_a_paused_queue(
    database_uri: str, microqueue_database: Any
) -> None:
    mail = Queue(microqueue_database, "mail")
    mail.pause()
    received: list[Any] = []

    def receive(body: Any, message: Any) -> None:
        message.ack()
        received.append(body)

    queues = [kombu.Queue("mail"), kombu.Queue("other")]
    options = {"poll_timeout": 0.3}  # It notices a resume when it polls.
    with (
        kombu.Connection(f"microqueue+{database_uri}", transport_options=options) as connection,
        connection.Consumer(queues, callbacks=[receive]),
    ):
        publish(connection, "mail", "paused")
        publish(connection, "other", *range(3))
        drain(connection, lambda: len(received) == 3)
        assert "paused" not in received
        mail.resume()
        drain(connection, lambda: "paused" in received)


def test_a_backlog_without_room_for_it_is_not_polled(
    connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "BUSY_POLL_SEC", 5.0)  # While a message waits in the buffer.
    sleeps: list[float] = []
    sleep = SyncWakeup.sleep

    def note(self: SyncWakeup, limit_sec: float) -> None:
        sleeps.append(limit_sec)
        sleep(self, limit_sec)

    publish(connection, "long", *range(3))
    held: list[Any] = []
    tasks, control = connection.channel(), connection.channel()
    with (
        kombu.Consumer(tasks, [kombu.Queue("long")], on_message=held.append, prefetch_count=1),
        kombu.Consumer(control, [kombu.Queue("control")], no_ack=True, on_message=held.append),
    ):
        drain(connection, lambda: len(held) == 1)
        monkeypatch.setattr(SyncWakeup, "sleep", note)
        publish(connection, "control", "ping")
        drain(connection, lambda: len(held) == 2)
        wait_for(lambda: len(sleeps) > 0)
        held[0].ack()
        drain(connection, lambda: len(held) == 3)
        wait_for(lambda: len(sleeps) > 1)
    assert min(sleeps) > 1  # Seconds; a backlog that could be fetched is a matter of milliseconds.


def test_an_event_loop_never_waits_long_so_that_it_notices_signals(connection: Any) -> None:
    hub = Hub()
    connection.connect()
    transport = connection.transport
    assert hub.fire_timers(min_delay=10, max_delay=10) == 10
    transport.register_with_event_loop(connection.connection, hub)
    assert hub.fire_timers(min_delay=10, max_delay=10) < 1
    transport.unregister_from_event_loop(connection.connection, hub)
    hub.fire_timers()
    assert not [entry for entry in hub.timer.queue if not entry.entry.cancelled]


@pytest.mark.parametrize("turn_sec", [0.0, 60.0])
def test_an_event_loop_delivers_what_was_fetched_until_the_connection_is_closed(
    connection: Any, monkeypatch: pytest.MonkeyPatch, turn_sec: float
) -> None:
    monkeypatch.setattr(transport, "TURN_SEC", turn_sec)
    publish(connection, "mail", *range(3))
    received: list[Any] = []
    hub = Hub()
    consumer = connection.Consumer([kombu.Queue("mail")], on_message=received.append)
    consumer.consume()
    connection.register_with_event_loop(hub)

    def run() -> bool:
        hub.run_once()
        return len(received) == 3

    wait_for(run)
    assert [one.payload for one in received] == [0, 1, 2]
    connection.release()
    assert hub.readers == {}
    hub.close()


def test_a_consumer_gets_a_delayed_message_when_it_is_due(
    database_uri: str, microqueue_database: Any
) -> None:
    tasks = microqueue_database.tasks
    now = datetime.now(UTC)
    eta = (now + timedelta(hours=1)).isoformat()
    received: list[Any] = []
    options = {"poll_timeout": 0.1}
    with (
        kombu.Connection(f"microqueue+{database_uri}", transport_options=options) as connection,
        connection.Consumer([kombu.Queue("mail")], on_message=received.append),
    ):
        connection.Producer().publish([], routing_key="mail", headers={"task": "t", "eta": eta})
        assert tasks.find_one()["next_retry_at"] is not None
        tasks.update_one({}, {"$set": dict.fromkeys(("next_retry_at", "deadline_at"), now)})
        drain(connection, lambda: received)
    assert received[0].delivery_info["redelivered"] is False


def test_a_consumer_whose_messages_others_claim_first_tries_again(
    connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = MessageClaimer.claim
    failures: list[list[Any]] = [[]] * 3

    def lose(self: MessageClaimer, *arguments: Any) -> Any:
        return failures.pop() if failures else claim(self, *arguments)

    publish(connection, "mail", 1)
    monkeypatch.setattr(MessageClaimer, "claim", lose)
    received: list[Any] = []
    with connection.Consumer([kombu.Queue("mail")], on_message=received.append):
        drain(connection, lambda: received)
    assert failures == []


def test_the_last_room_of_a_prefetch_is_used(connection: Any) -> None:
    received: list[Any] = []
    publish(connection, "mail", *range(7))
    with connection.Consumer([kombu.Queue("mail")], on_message=received.append, prefetch_count=8):
        drain(connection, lambda: len(received) == 7)
        publish(connection, "mail", 7)
        drain(connection, lambda: len(received) == 8)


def test_room_for_one_message_is_noticed_when_it_was_counted_twice(
    connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "BUSY_POLL_SEC", 60.0)
    rooms: list[int] = []
    room, hold = MessageFetcher._room, Channel._hold  # noqa: SLF001

    def noted(self: MessageFetcher, consumer: Consumer) -> int:
        found = room(self, consumer)
        rooms.append(found)
        return found

    def hold_slowly(self: Channel, *arguments: Any, **options: Any) -> Any:
        message = hold(self, *arguments, **options)
        if not received:
            self.nudge()
            rooms.clear()
            wait_for(lambda: 0 in rooms)  # The fetcher saw none, and waits.
        return message

    monkeypatch.setattr(MessageFetcher, "_room", noted)
    monkeypatch.setattr(Channel, "_hold", hold_slowly)
    received: list[Any] = []
    publish(connection, "mail", 1)
    with connection.Consumer([kombu.Queue("mail")], on_message=received.append, prefetch_count=2):
        drain(connection, lambda: len(received) == 1)
        publish(connection, "mail", 2)
        drain(connection, lambda: len(received) == 2)
