"""Messages that cannot be read, and errors that nothing expects: what comes next is delivered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

import kombu
import pytest
from kombu.utils import json as kombu_json

from microqueue import Queue, Topic
from microqueue.contrib.kombu import broadcast, consumers, deliveries
from microqueue.contrib.kombu.broker import Broker
from microqueue.contrib.kombu.claims import MessageClaimer
from microqueue.contrib.kombu.deliveries import Deliveries
from microqueue.contrib.kombu.repeated import RepeatedErrors
from tests.celery.kombu_tools import Connect, Receiver, get, logged, publish
from tests.rejection import rejecting
from tests.waiting import wait_for

MAIL = kombu.Queue("mail", routing_key="mail")
NEWS = kombu.Exchange("news", type="fanout")


class Money:
    """A value of a type that only its publisher registers."""


@pytest.fixture
def price(monkeypatch: pytest.MonkeyPatch) -> Money:
    monkeypatch.setattr(kombu_json, "_encoders", dict(kombu_json._encoders))  # noqa: SLF001
    monkeypatch.setattr(kombu_json, "_decoders", dict(kombu_json._decoders))  # noqa: SLF001
    kombu_json.register_type(Money, "money", lambda _: "3 EUR")
    del kombu_json._decoders["money"]  # noqa: SLF001
    return Money()


def test_a_message_that_cannot_be_decoded_becomes_a_dead_letter(
    connect: Connect, microqueue_database: Any, price: Money
) -> None:
    connection = connect()
    publish(connection, 1, headers={"price": price})
    publish(connection, 2)
    assert Receiver(connection, MAIL).receive(1) == [2]
    letter = wait_for(lambda: microqueue_database.tasks.find_one({"status": "failed"}))
    assert letter["payload"]["body"] == "1"


def test_a_broadcast_that_cannot_be_decoded_is_dropped(
    connect: Connect, price: Money, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect()
    receiver = Receiver(connection, kombu.Queue("bcast.1", NEWS, auto_delete=True))
    for body, headers in ((1, {"price": price}), (2, {})):
        connection.Producer().publish(body, exchange=NEWS, headers=headers)
    assert receiver.receive(1) == [2]
    assert logged(caplog, logging.ERROR, queue="bcast.1", dropped=True)


@pytest.mark.parametrize(
    "payload",
    [
        {"properties": {}, "headers": ["a"]},
        {"properties": {"delivery_info": "mail"}},
        {"properties": {"body_encoding": "no-codec"}, "body": "1"},
        {"properties": {"__type__": "decimal", "__value__": "1"}, "tagged": True},
    ],
)
@pytest.mark.parametrize("consumes", [False, True])
def test_a_payload_of_another_form_becomes_a_dead_letter(
    connect: Connect, microqueue_database: Any, payload: dict[str, Any], consumes: bool
) -> None:
    Queue(microqueue_database, "mail").enqueue(payload)
    connection = connect()
    if consumes:
        publish(connection, 2)
        assert Receiver(connection, MAIL, prefetch_count=1).receive(1) == [2]
    else:
        assert get(connection) is None
    wait_for(lambda: microqueue_database.tasks.find_one({"status": "failed"}))


@pytest.mark.parametrize("no_ack", [False, True])
def test_get_skips_what_cannot_be_decoded(
    connect: Connect, microqueue_database: Any, price: Money, no_ack: bool
) -> None:
    connection = connect()
    for body, headers in ((1, {"price": price}), (2, {"price": price}), (3, {})):
        publish(connection, body, headers=headers)
    assert connection.default_channel.basic_get("mail", no_ack=no_ack).payload == 3
    assert connection.default_channel.basic_get("mail") is None
    tasks = microqueue_database.tasks
    wait_for(lambda: tasks.count_documents({"status": "failed"}) == 2)


@pytest.mark.parametrize("more", [{}, {"at": datetime(2030, 1, 1)}])  # noqa: DTZ001
@pytest.mark.parametrize(
    "value",
    [
        {"__type__": "uuid", "__value__": "zz"},
        {"__type__": "microqueue.mapping", "__value__": []},
        {"a": [{"__type__": {"__type__": 1, "__value__": 2**70}, "__value__": None}]},
        {"__type__": "datetime"},
    ],
)
def test_headers_that_look_like_the_tags_of_kombus_json_are_kept(
    connect: Connect, value: Any, more: dict[str, Any]
) -> None:
    connection = connect()
    publish(connection, 1, headers={"value": value, **more})
    headers = get(connection).headers
    assert headers["value"] == value
    assert {name: headers[name] for name in more} == more


@pytest.mark.parametrize("name", ["expiration", "x-message-ttl", "x-expires"])
@pytest.mark.parametrize("value", ["soon", [1], 10**18])
def test_a_duration_that_is_no_number_is_an_error(connect: Connect, name: str, value: Any) -> None:
    connection = connect()
    with rejecting(name, value):
        if name == "expiration":
            message = connection.default_channel.prepare_message("1")
            message["properties"][name] = value
            connection.default_channel.basic_publish(message, "", "mail")
        else:
            connection.default_channel.queue_declare("mail", arguments={name: value})


@pytest.mark.parametrize(
    "body", [{"properties": {"expiration": "soon"}}, {"properties": ["soon"]}, {"n": 1}]
)
def test_a_malformed_broadcast_is_skipped(
    connect: Connect, microqueue_database: Any, caplog: pytest.LogCaptureFixture, body: Any
) -> None:
    connection = connect()
    receiver = Receiver(connection, kombu.Queue("bcast.1", NEWS, auto_delete=True))
    position = Topic(microqueue_database, "exchange.news").publish(body)
    connection.Producer().publish(1, exchange=NEWS)
    assert receiver.receive(1) == [1]
    assert logged(caplog, logging.ERROR, queue="bcast.1", position=position, dropped=True)


# Errors that nothing expects


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Callable[[], int]:
    """Let the next call of a method fail; return how often that happened."""
    method = getattr(owner, name)
    failures: list[int] = []

    def fail(*arguments: Any, **options: Any) -> Any:
        if not failures:
            failures.append(1)
            raise ZeroDivisionError
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, fail)
    return lambda: len(failures)


def test_a_consumer_continues_after_an_unexpected_error(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(consumers, "RETRY_SEC", 0.01)
    connection = connect()
    publish(connection, 1)
    fail_once(monkeypatch, MessageClaimer, "claim")
    receiver = Receiver(connection, MAIL)
    with pytest.raises(ZeroDivisionError):
        wait_for(receiver.drain)
    assert receiver.receive(1) == [1]
    assert logged(caplog, logging.ERROR, wait_sec=0.01)


def test_broadcasts_continue_after_an_unexpected_error(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(broadcast, "RETRY_SEC", 0.01)
    connection = connect()
    receiver = Receiver(connection, kombu.Queue("bcast.1", NEWS, auto_delete=True))
    failed = fail_once(monkeypatch, Broker, "take_broadcasts")
    connection.Producer().publish(1, exchange=NEWS)
    wait_for(failed)
    assert receiver.receive(1) == [1]
    assert logged(caplog, logging.ERROR, queue="bcast.1", wait_sec=0.01)


@pytest.mark.parametrize("method", ["_collect", "_renew", "_write_each"])
def test_settling_and_renewing_continue_after_an_unexpected_error(
    connect: Connect,
    microqueue_database: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    monkeypatch.setattr(deliveries, "RETRY_SEC", 0.01)
    connection, tasks = connect(renew_interval=0.05), microqueue_database.tasks
    failed = fail_once(monkeypatch, Deliveries, method)
    if method == "_write_each":
        fail_once(monkeypatch, Deliveries, "_settle_all")
    for number in range(2):
        publish(connection, number)
        get(connection).ack()
    wait_for(lambda: tasks.count_documents({"status": "done"}) == 2)
    publish(connection, 2)
    message = get(connection)
    lease = tasks.find_one({"status": "processing"})["deadline_at"]
    wait_for(lambda: tasks.find_one({"status": "processing"})["deadline_at"] > lease)
    assert failed()
    assert logged(caplog, logging.ERROR, wait_sec=0.01)
    message.ack()


def test_a_flush_is_not_lost_with_an_error_after_it(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "RETRY_SEC", 0.01)
    held = connect().transport.broker.deliveries
    flushed = threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    for item in (flushed, fail):  # Together, so that one round takes both.
        held._inbox.put(item)  # noqa: SLF001
    held._start()  # noqa: SLF001
    assert flushed.wait(60)


def test_an_error_that_repeats_has_one_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [100.0]
    monkeypatch.setattr("microqueue.contrib.kombu.repeated.time.monotonic", lambda: clock[0])
    errors = RepeatedErrors(deliveries.logger)

    def log(number: int) -> None:
        try:
            if number:
                raise KeyError(number)
            raise ZeroDivisionError
        except Exception as exc:  # noqa: BLE001
            errors.log(exc, "failed; next attempt in %g s", 1, extra={"wait_sec": 1})

    for second in range(150):
        clock[0] = 100.0 + second
        log(second)
    found = [bool(one.exc_info) for one in logged(caplog, logging.ERROR, wait_sec=1)]
    assert found == [True, True, False, False]


@pytest.mark.parametrize("thread", ["fetcher", "broadcasts", "deliveries"])
def test_threads_log_the_traceback_of_an_error_that_repeats_once(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, thread: str
) -> None:
    failures = []

    def fail(*_: Any) -> Any:
        failures.append(1)
        raise ZeroDivisionError

    module, owner, name = {
        "fetcher": (consumers, MessageClaimer, "claim"),
        "broadcasts": (broadcast, broadcast._Reader, "_read"),  # noqa: SLF001
        "deliveries": (deliveries, Deliveries, "_collect"),
    }[thread]
    monkeypatch.setattr(module, "RETRY_SEC", 0.01)
    monkeypatch.setattr(owner, name, fail)
    connection = connect()
    if thread == "deliveries":
        connection.transport.broker.deliveries._start()  # noqa: SLF001
    else:
        Receiver(connection, kombu.Queue("bcast.1", NEWS, auto_delete=True))
    wait_for(lambda: len(failures) >= 4)
    assert len(logged(caplog, logging.ERROR, wait_sec=0.01)) == 1
    monkeypatch.undo()


def test_one_settlement_that_fails_does_not_hold_up_the_others(
    connect: Connect, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect()
    for number in range(2):
        publish(connection, number)
    messages = [get(connection) for _ in range(2)]
    settle_all = Deliveries._settle_all  # noqa: SLF001
    first = microqueue_database.tasks.find_one(sort=[("position", 1)])["_id"]

    def fail(self: Deliveries, requests: Any) -> Any:
        if any(one.claimed.id == first for one in requests):
            raise ZeroDivisionError
        return settle_all(self, requests)

    monkeypatch.setattr(Deliveries, "_settle_all", fail)
    for message in messages:
        message.ack()
    assert connection.transport.broker.flush()
    states = [one["status"] for one in microqueue_database.tasks.find(sort=[("position", 1)])]
    assert states == ["processing", "done"]
