"""What an application sends to a worker: tasks, delays, retries and workflows, with results."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from celery import chain, chord, group

from tests.celery.workers import PATIENCE_SEC, Site, Worker
from tests.waiting import wait_for


@pytest.fixture(scope="module", autouse=True)
def worker(shared_site: Site) -> Iterator[Worker]:
    with shared_site.worker() as started:
        yield started


@pytest.fixture
def site(shared_site: Site) -> Site:
    return shared_site


def test_delay_returns_its_result(site: Site) -> None:
    sent = site.task("add").delay(2, 3)
    assert site.result(sent) == 5
    assert len(site.ledger(id=sent.id)) == 1
    assert site.wait_for_status(sent, "done")["name"] == "shop.add"


def test_countdown_is_kept_in_the_database_and_is_on_time(site: Site) -> None:
    sent_at = time.time()
    sent = site.task("add").apply_async((1, 1), countdown=2)
    stored = site.stored(sent)
    if time.time() < sent_at + 2:  # It was read before it was due.
        assert (stored["status"], stored["attempts"]) == ("pending", 0)
    assert site.result(sent) == 2
    (run,) = site.ledger(id=sent.id)
    assert run["at"] >= sent_at + 2
    assert run["redelivered"] is False
    assert site.wait_for_status(sent, "done")["attempts"] == 1


def test_eta(site: Site) -> None:
    eta = datetime.now(UTC) + timedelta(seconds=1)
    sent = site.task("add").apply_async((1, 1), eta=eta)
    assert site.result(sent) == 2
    (run,) = site.ledger(id=sent.id)
    assert run["at"] >= eta.timestamp()


def test_a_delayed_task_is_not_received_before_it_is_due(site: Site, worker: Worker) -> None:
    sent = site.task("add").apply_async((1, 1), countdown=3600)
    later = site.task("add").delay(1, 2)
    site.result(later)
    asking = site.app.control.inspect([worker.name], timeout=PATIENCE_SEC, limit=1)
    (scheduled,) = asking.scheduled()[worker.name]
    assert (scheduled["request"]["id"], scheduled["request"]["args"]) == (sent.id, [1, 1])
    assert sent.id not in worker.log
    stored = site.stored(sent)
    assert (stored["status"], stored["attempts"]) == ("pending", 0)


def test_retry(site: Site) -> None:
    sent = site.task("flaky").delay(2)
    assert site.result(sent) == 2
    assert [run["value"] for run in site.ledger(id=sent.id)] == [0, 1, 2]


def test_retries_end(site: Site, worker: Worker) -> None:
    """By the log: the process of the run before may store its state RETRY after FAILURE."""
    sent = site.task("flaky").delay(9, countdown=0)
    worker.wait_for_log(f"Can't retry shop.flaky[{sent.id}]")
    assert [run["value"] for run in site.ledger(id=sent.id)] == [0, 1, 2, 3]


def test_chain(site: Site) -> None:
    add = site.task("add")
    assert site.result(chain(add.s(1, 2), add.s(3), add.s(4)).delay()) == 10


def test_group(site: Site) -> None:
    add = site.task("add")
    assert site.result(group(add.s(n, n) for n in range(10)).delay()) == [2 * n for n in range(10)]


def test_chord(site: Site) -> None:
    add, total = site.task("add"), site.task("total")
    assert site.result(chord((add.s(n, 1) for n in range(5)), total.s()).delay()) == 15


def test_a_group_in_a_chain(site: Site) -> None:
    add, total = site.task("add"), site.task("total")
    sent = chain(add.s(1, 1), group(add.s(n) for n in range(3)), total.s()).delay()
    assert site.result(sent) == 2 + 3 + 4


def test_rate_limit(site: Site) -> None:
    sent_at = time.time()  # The first may take long to start.
    sent = group(site.task("quick").s() for _ in range(5)).delay()
    site.result(sent)
    *_, last = (run["at"] for run in site.ledger(name="shop.quick"))
    assert last - sent_at >= 1.5  # 2 at once, and 2 in each second after.


def test_purge_deletes_what_waits(site: Site) -> None:
    with site.app.connection() as connection:
        waiting = [
            site.task("add").apply_async((1, n), queue="slow", connection=connection)
            for n in range(3)
        ]
        later = site.task("add").apply_async((1, 9), queue="slow", countdown=3600)
        assert site.app.amqp.queues["slow"](connection.default_channel).purge() == 4
    assert not site.database.tasks.count_documents({"queue": "slow"})
    assert not any(site.ledger(id=one.id) for one in [*waiting, later])


def test_a_task_that_expired_is_dropped(site: Site) -> None:
    sent = site.task("add").apply_async((1, 1), queue="slow", expires=0.05)
    # So much later that it has expired by each clock.
    site.wait_for_run(site.task("add").apply_async((1, 1), countdown=3))
    site.app.control.add_consumer("slow", reply=True)
    wait_for(lambda: not site.database.tasks.count_documents({"queue": "slow"}))
    site.app.control.cancel_consumer("slow", reply=True)
    assert not site.ledger(id=sent.id)


def test_an_error_is_the_result(site: Site) -> None:
    sent = site.task("add").delay(1, "x")
    with pytest.raises(TypeError):
        site.result(sent)
