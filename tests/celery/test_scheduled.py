"""``celery inspect scheduled`` lists the delayed messages in the database."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, TypeAlias

import kombu
import pytest
from celery import Celery
from celery.worker.control import Panel

from microqueue.contrib.kombu import celery_worker
from microqueue.contrib.kombu.celery_worker import TIMER_PRIORITY
from microqueue.errors import OperationFailed
from microqueue.operations import broker as operations
from tests.celery.kombu_tools import Connect, publish
from tests.celery.test_kombu_faults import failing
from tests.integration.queues import profiled

Scheduled: TypeAlias = Callable[..., list[dict[str, Any]]]
TOMORROW = datetime.now(UTC) + timedelta(days=1)
"""Not due before the whole test run is over."""
MAIL = kombu.Queue("mail", routing_key="mail")


def state(consumer: Any) -> Any:
    """Return what a worker passes to a command."""
    timer = SimpleNamespace(schedule=SimpleNamespace(queue=[]))
    worker = SimpleNamespace(task_consumer=consumer, timer=timer)
    return SimpleNamespace(consumer=worker, hostname="worker@test")


@pytest.fixture
def scheduled(connect: Connect) -> Scheduled:
    """Asks a worker that consumes the queue for its delayed tasks."""
    celery_worker.list_delayed_messages()

    def ask(*accept: str, command: str = "scheduled") -> list[dict[str, Any]]:
        consumer = kombu.Consumer(connect(), [MAIL], accept=accept or ["json"])
        found: list[dict[str, Any]] = Panel.data[command](state(consumer))
        return found

    return ask


def send(connection: Any, eta: datetime | None = TOMORROW, **options: Any) -> Any:
    app = Celery("shop", set_as_current=False)
    return app.send_task(
        "shop.add",
        (1, 2),
        eta=eta,
        connection=connection,
        **{"kwargs": {"c": 3}, "queue": MAIL, **options},
    )


def test_a_delayed_message_is_described_as_celery_does(
    connect: Connect, scheduled: Scheduled
) -> None:
    sent = send(connect(), shadow="sum")
    send(connect(), eta=None)
    assert scheduled() == [
        {
            "eta": TOMORROW.isoformat(),
            "priority": TIMER_PRIORITY,
            "request": {
                "id": sent.id,
                "name": "sum",
                "type": "shop.add",
                "args": [1, 2],
                "kwargs": {"c": 3},
                "hostname": "worker@test",
                "time_start": None,
                "acknowledged": False,
                "delivery_info": {
                    "exchange": "",
                    "routing_key": "mail",
                    "priority": 0,
                    "redelivered": False,
                },
                "worker_pid": None,
            },
        }
    ]


def test_the_next_one_is_first_and_other_queues_are_left_out(
    connect: Connect, scheduled: Scheduled, monkeypatch: pytest.MonkeyPatch
) -> None:
    later, soon, last = (
        send(connect(), eta=TOMORROW + timedelta(hours=hours)) for hours in (1, 0, 2)
    )
    send(connect(), queue=kombu.Queue("other", routing_key="other"))
    assert [one["request"]["id"] for one in scheduled()] == [soon.id, later.id, last.id]
    monkeypatch.setattr(celery_worker, "MOST_LISTED", 2)
    listed = scheduled(command="dump_schedule")
    assert [one["request"]["id"] for one in listed] == [soon.id, later.id]


def test_content_that_the_worker_does_not_accept_is_not_decoded(
    connect: Connect, scheduled: Scheduled
) -> None:
    send(connect(), serializer="pickle")
    (refused,) = scheduled()
    assert refused["request"]["args"] == "(1, 2)"
    assert refused["request"]["kwargs"] == "{'c': 3}"
    (accepted,) = scheduled("pickle")
    assert accepted["request"]["args"] == (1, 2)


def test_the_first_version_of_the_protocol(connect: Connect, scheduled: Scheduled) -> None:
    body = {"task": "shop.add", "id": "7", "args": [1], "kwargs": {}, "eta": TOMORROW.isoformat()}
    publish(connect(), body)
    (found,) = scheduled()
    assert (found["eta"], found["request"]["id"]) == (TOMORROW.isoformat(), "7")
    assert (found["request"]["args"], found["request"]["kwargs"]) == ([1], {})


def test_a_task_that_is_no_message_is_left_out(
    connect: Connect, scheduled: Scheduled, microqueue_database: Any
) -> None:
    send(connect())
    microqueue_database.tasks.update_one({}, {"$set": {"payload": 7}})
    assert scheduled() == []


@pytest.mark.parametrize("change", [{"$set": {"attempts": "2"}}, {"$unset": {"attempts": 1}}])
def test_a_message_whose_attempts_are_no_number_is_listed(
    connect: Connect, scheduled: Scheduled, microqueue_database: Any, change: dict[str, Any]
) -> None:
    sent = send(connect())
    microqueue_database.tasks.update_one({}, change)
    (found,) = scheduled()
    assert (found["request"]["id"], found["request"]["delivery_info"]["redelivered"]) == (
        sent.id,
        False,
    )


def test_no_more_messages_are_examined_than_allowed(
    connect: Connect, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect()
    soon = send(connection, eta=datetime.now(UTC) + timedelta(minutes=5))
    for number in range(20):
        publish(connection, number, expiration=600)  # Ready, with a deadline.
    send(connection)
    monkeypatch.setattr(operations, "MOST_EXAMINED", 10)
    with profiled(microqueue_database) as recorded:
        found = connection.transport.broker.delayed(["mail"], limit=1000)
    assert [one["headers"]["id"] for one in found] == [soon.id]
    assert [entry["docsExamined"] for entry in recorded] == [10]
    assert recorded[0]["planSummary"] == "IXSCAN { status: 1, queue: 1, deadline_at: 1 }"


def test_the_list_ends_after_so_many_bytes(
    connect: Connect, scheduled: Scheduled, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [send(connect(), kwargs={"text": "x" * 10_000}) for _ in range(5)]
    monkeypatch.setattr(operations, "MOST_BYTES", 30_000)
    assert [one["request"]["id"] for one in scheduled()] == [one.id for one in sent[:2]]
    monkeypatch.setattr(operations, "MOST_BYTES", 10)
    assert len(scheduled()) == 1


@pytest.mark.parametrize("options", [{"kwargs": {"c": "x" * 200_000}}, {"compression": "zlib"}])
def test_arguments_that_are_large_or_compressed_are_listed_as_printed(
    connect: Connect, scheduled: Scheduled, options: dict[str, Any]
) -> None:
    send(connect(), **options)
    (found,) = scheduled()
    assert found["request"]["args"] == "(1, 2)"
    assert len(found["request"]["kwargs"]) < 2000


def test_a_search_at_its_time_limit_lists_what_it_found(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect()
    for number in range(150):
        publish(connection, number, headers={"eta": TOMORROW, "task": "shop.add", "id": "1"})
    broker = connection.transport.broker
    expired: dict[str, Any] = {"errorCode": 50, "namespace": f"{microqueue_database.name}.tasks"}
    with failing(microqueue_database, "getMore", **expired):
        found = [one["body"] for one in broker.delayed(["mail"], limit=1000)]
    assert found == [str(number) for number in range(len(found))]
    assert 0 < len(found) < 150
    with failing(microqueue_database, "aggregate", **expired), pytest.raises(OperationFailed):
        broker.delayed(["mail"], limit=1000)


def test_a_worker_with_another_transport_lists_its_memory_alone(scheduled: Scheduled) -> None:
    with kombu.Connection("memory://") as other:
        assert Panel.data["scheduled"](state(kombu.Consumer(other, [MAIL]))) == []
    assert Panel.data["scheduled"](state(None)) == []  # It reconnects.


def test_a_process_that_is_no_worker_has_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "celery.worker.control")
    celery_worker.list_delayed_messages()
    assert "celery.worker.control" not in sys.modules
