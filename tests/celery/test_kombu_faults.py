"""What an acknowledgement survives: lost replies, an absent server, and a new connection."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kombu
import pytest

from microqueue.contrib.kombu import broker as brokers
from microqueue.contrib.kombu import consumers, deliveries
from microqueue.contrib.kombu.claims import MessageClaimer
from microqueue.errors import OperationFailed, ServerUnavailable
from tests.celery.kombu_tools import Connect, Receiver, get, logged, publish
from tests.integration.test_transient import ReplyLost
from tests.waiting import wait_for

MAIL = kombu.Queue("mail", routing_key="mail")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls fail at once while the server does not answer."""
    monkeypatch.setenv("MICROQUEUE_RETRY_DEADLINE", "0")


def failing_updates(
    database: Any, times: int, **how: Any
) -> contextlib.AbstractContextManager[None]:
    """Let the next updates of tasks fail; by default, the connection is closed before each."""
    how = how or {"closeConnection": True}
    return failing(database, "update", times=times, namespace=f"{database.name}.tasks", **how)


@contextmanager
def failing(database: Any, command: str, *, times: int = 1, **how: Any) -> Iterator[None]:
    """Let a command of the server fail."""
    admin = database.client.admin
    data = {"failCommands": [command], **how}
    admin.command("configureFailPoint", "failCommand", mode={"times": times}, data=data)
    try:
        yield
    finally:
        admin.command("configureFailPoint", "failCommand", mode="off")


def lose_replies(connection: Any, *methods: str) -> list[ReplyLost]:
    """Lose the reply to the next call of each method."""
    collections = connection.transport.broker.core.collections
    lossy = []
    for method in methods:
        collections.tasks = ReplyLost(collections.tasks, method)
        lossy.append(collections.tasks)
    return lossy


def done(database: Any) -> Any:
    return database.tasks.find_one({"status": "done"})


@pytest.mark.parametrize("claimed", ["singly", "together"])
def test_acknowledgements_whose_reply_is_lost_count_once(
    connect: Connect, microqueue_database: Any, caplog: pytest.LogCaptureFixture, claimed: str
) -> None:
    connection = connect()
    for number in range(2):
        publish(connection, number)
    receiver = None
    if claimed == "together":
        receiver = Receiver(connection, MAIL)
        receiver.receive(2)
    messages = receiver.messages if receiver else [get(connection), get(connection)]
    lossy = lose_replies(connection, "update_many", "bulk_write")
    with caplog.at_level(logging.WARNING, "microqueue.kombu"):
        for message in messages:
            message.ack()
        assert connection.transport.broker.flush()
    assert any(one.lost for one in lossy)
    tasks = list(microqueue_database.tasks.find())
    assert [(one["status"], one["attempts"]) for one in tasks] == [("done", 1)] * 2
    assert caplog.records == []
    assert get(connection) is None


@pytest.mark.usefixtures("impatient")
def test_an_acknowledgement_waits_for_a_server_that_is_away(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    publish(connection, 1)
    message = get(connection)
    with failing_updates(microqueue_database, times=2):
        message.ack()
        task = wait_for(lambda: done(microqueue_database))
    assert task["attempts"] == 1


@pytest.mark.usefixtures("impatient")
def test_an_acknowledgement_survives_a_reconnect(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    publish(connection, 1)
    message = get(connection)
    with failing_updates(microqueue_database, times=2):
        message.ack()
        connection.collect()
        receiver = Receiver(connection, MAIL)
        task = wait_for(lambda: done(microqueue_database))
    assert task["attempts"] == 1
    assert receiver.drain() == 0


def test_what_runs_is_acknowledged_on_the_next_connection(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    publish(connection, 1)
    first = Receiver(connection, MAIL)
    first.receive(1)
    connection.collect()
    second = Receiver(connection, MAIL)
    assert second.drain() == 0
    assert microqueue_database.tasks.find_one()["status"] == "processing"
    first.messages[0].ack()
    wait_for(lambda: done(microqueue_database))
    assert second.drain() == 0


class Publishing:
    """What Kombu ensures: it fails once because the server is away."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls == 1:
            raise ServerUnavailable("the reply is lost")
        return self.calls

    def revive(self, channel: Any) -> None:
        """Use another channel."""

    __name__ = "publish"


@pytest.mark.parametrize("urls", [1, 2])
def test_a_call_that_is_repeated_on_another_connection_requeues_nothing(
    microqueue_database: Any, database_uri: str, urls: int
) -> None:
    url = f"microqueue+{database_uri.partition('?')[0]}"
    with kombu.Connection(";".join([url] * urls)) as connection:
        for number in range(3):
            publish(connection, number)
        receiver = Receiver(connection, MAIL, prefetch_count=1)
        receiver.receive(1)
        in_use = get(connection)
        publishing = Publishing()
        assert connection.ensure(publishing, publishing, max_retries=3)() == 2
        tasks = microqueue_database.tasks
        wait_for(lambda: tasks.count_documents({"status": "processing"}) == 2)
        for message in (in_use, *receiver.messages):
            message.ack()
        wait_for(lambda: tasks.count_documents({"status": "done", "attempts": 1}) == 2)


def test_a_connection_that_is_closed_for_another_reason_requeues(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    publish(connection, 1)
    message = get(connection)
    try:
        connection.drain_events(timeout=0.01)
    except TimeoutError:
        connection.release()
    assert message.payload == 1
    assert microqueue_database.tasks.find_one()["status"] == "pending"


def test_a_settlement_that_mongodb_rejects_does_not_hold_up_the_others(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    for number in range(3):
        publish(connection, number)
    messages = [get(connection) for _ in range(3)]
    bad_value = 2
    with failing_updates(microqueue_database, times=2, errorCode=bad_value):
        for message in messages:
            message.ack()
        assert connection.transport.broker.flush()
    states = [one["status"] for one in microqueue_database.tasks.find()]
    assert states == ["processing", "done", "done"]


def test_a_claim_whose_reply_is_lost_is_delivered_once(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    publish(connection, 1)
    connection.transport.broker.queue("mail")
    lossy = lose_claims(connection)
    assert get(connection).payload == 1
    assert lossy.lost == 1
    assert microqueue_database.tasks.find_one()["attempts"] == 1
    assert get(connection) is None


def lose_claims(connection: Any) -> ReplyLost:
    core = connection.transport.broker.queue("mail")
    lossy = ReplyLost(core.collections.tasks, "find_one_and_update")
    core.collections.tasks = lossy
    return lossy


def fail_after_claim(connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next claim take its messages, and fail."""
    core = connection.transport.broker.queue("mail")
    run = core.run

    def fail(operation: Any) -> Any:
        result = run(operation)
        if operation.__name__ == "pop_many":
            monkeypatch.setattr(core, "run", run)
            raise ServerUnavailable("the reply is lost")
        return result

    monkeypatch.setattr(core, "run", fail)


@pytest.mark.parametrize("reconnects", [False, True])
def test_a_claim_that_failed_is_found_by_the_next_one(
    connect: Connect,
    microqueue_database: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    reconnects: bool,
) -> None:
    connection = connect()
    publish(connection, 1)
    fail_after_claim(connection, monkeypatch)
    with pytest.raises(ServerUnavailable):
        get(connection)
    if reconnects:
        connection.collect()
    assert get(connection).payload == 1
    assert microqueue_database.tasks.find_one()["attempts"] == 1


def test_a_consumer_reports_that_fetching_failed_and_continues(
    connect: Connect, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "RETRY_SEC", 0.01)
    connection = connect()
    publish(connection, 1)
    fail_after_claim(connection, monkeypatch)
    receiver = Receiver(connection, MAIL)
    with pytest.raises(connection.connection_errors):
        wait_for(receiver.drain)
    assert receiver.receive(1) == [1]
    assert microqueue_database.tasks.find_one()["attempts"] == 1


def test_an_unexpected_error_of_the_fetching_thread_reaches_the_consumer(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(MessageClaimer, "claim", fail)
    receiver = Receiver(connect(), MAIL)
    with pytest.raises(ZeroDivisionError):
        wait_for(receiver.drain)


def test_a_server_that_rejects_the_client_is_an_error(
    connect: Connect, microqueue_database: Any
) -> None:
    unauthorized = 13
    with (
        failing(microqueue_database, "ping", errorCode=unauthorized),
        pytest.raises(OperationFailed),
    ):
        connect().connect()


@pytest.mark.usefixtures("impatient")
def test_a_lease_that_could_not_be_renewed_is_renewed_later(
    connect: Connect, microqueue_database: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect(renew_interval=0.05)
    publish(connection, 1)
    message = get(connection)
    with failing_updates(microqueue_database, times=1):
        wait_for(lambda: bool(logged(caplog, logging.WARNING, not_renewed=1)))
    first = microqueue_database.tasks.find_one()["deadline_at"]
    wait_for(lambda: microqueue_database.tasks.find_one()["deadline_at"] > first)
    message.ack()


def test_a_lost_lease_is_logged_and_the_acknowledgement_is_too_late(
    connect: Connect, microqueue_database: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect(renew_interval=0.05)
    publish(connection, 1)
    message = get(connection)
    microqueue_database.tasks.update_one({}, {"$set": {"lease_token": "another"}})
    wait_for(lambda: not len(connection.transport.broker.deliveries))
    message.ack()
    assert connection.transport.broker.flush()
    assert microqueue_database.tasks.find_one()["status"] == "processing"
    task_id = str(microqueue_database.tasks.find_one()["_id"])
    lost = logged(caplog, logging.WARNING, task_id=task_id, queue="mail", lease_lost=True)
    assert lost == caplog.records[:1]
    late = {"delivery_tag": message.delivery_tag, "settlement": "ack", "lease_lost": True}
    assert logged(caplog, logging.WARNING, **late) == caplog.records[-1:]


@pytest.mark.usefixtures("impatient")
def test_what_could_not_be_settled_before_the_end_is_logged(
    connect: Connect,
    microqueue_database: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(brokers, "FLUSH_SEC", 0.1)
    connection = connect()
    publish(connection, 1)
    broker = connection.transport.broker
    message = get(connection)
    with failing_updates(microqueue_database, times=100):
        message.ack()
        broker.close()
    assert logged(caplog, logging.ERROR, unsettled=1)
    assert microqueue_database.tasks.find_one()["status"] == "processing"


@pytest.mark.usefixtures("impatient")
def test_a_server_that_leaves_while_settlements_are_written_one_by_one(
    connect: Connect,
    microqueue_database: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection = connect()
    publish(connection, 1)
    message = get(connection)
    errors: list[Exception] = [OperationFailed("rejected"), ServerUnavailable("away")]
    held = connection.transport.broker.deliveries
    settle_all = held._settle_all  # noqa: SLF001

    def fail(requests: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return settle_all(requests)

    monkeypatch.setattr(held, "_settle_all", fail)
    message.ack()
    wait_for(lambda: done(microqueue_database))
    assert errors == []
    assert logged(caplog, logging.WARNING, unsettled=1, wait_sec=deliveries.RETRY_SEC)


@pytest.mark.parametrize("error", [ServerUnavailable("away"), ZeroDivisionError()])
def test_a_sweep_that_fails_is_repeated(
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    connection = connect(sweep_interval=0.01)
    connection.connect()
    sweeps: list[int] = []

    def fail() -> None:
        sweeps.append(1)
        raise error

    monkeypatch.setattr(connection.transport.broker, "sweep", fail)
    Receiver(connection, MAIL)
    wait_for(lambda: len(sweeps) > 1)
    is_expected = isinstance(error, ServerUnavailable)
    assert logged(caplog, logging.WARNING if is_expected else logging.ERROR, wait_sec=0.01)
