"""Every pool of Celery: its event loop, its threads, and its forks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import group

from tests.celery.workers import GEVENT, PATIENCE_SEC, Site, Worker
from tests.waiting import wait_for

VISIBILITY_SEC = 5


@pytest.fixture(
    scope="module",
    params=["prefork", "threads", "solo", GEVENT],
)
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def worker(shared_site: Site, pool: str) -> Iterator[Worker]:
    transport_options = {"visibility_timeout": VISIBILITY_SEC, "sweep_interval": 1}
    with shared_site.worker(pool=pool, broker_transport_options=transport_options) as started:
        yield started


@pytest.fixture
def site(shared_site: Site, worker: Worker) -> Site:
    return shared_site


def test_tasks_retries_and_delays(site: Site) -> None:
    add, flaky = site.task("add"), site.task("flaky")
    sent = group(add.s(n, 1) for n in range(20)).delay()
    retried = flaky.delay(1)
    assert site.result(sent) == [n + 1 for n in range(20)]
    assert site.result(retried) == 1
    delayed = add.apply_async((1, 1), countdown=1)
    assert site.result(delayed) == 2
    assert site.ledger(id=delayed.id)[0]["redelivered"] is False


def test_remote_control(site: Site, worker: Worker) -> None:
    asking = site.app.control.inspect([worker.name], timeout=PATIENCE_SEC, limit=1)
    assert asking.ping() == {worker.name: {"ok": "pong"}}


def test_the_lease_is_renewed_while_a_task_runs(site: Site) -> None:
    gate = site.gate()
    sent = site.task("wait").delay(str(gate))
    site.wait_for_run(sent)
    first = site.stored(sent)["deadline_at"]
    timeout = timedelta(seconds=VISIBILITY_SEC)
    wait_for(lambda: site.stored(sent)["deadline_at"] > first + timeout, PATIENCE_SEC)
    gate.touch()
    assert site.result(sent) == str(gate)
    assert len(site.ledger(id=sent.id)) == 1 + expired_leases(site, sent)


def test_a_delay_longer_than_the_visibility_timeout_is_one_delivery(site: Site) -> None:
    due_at = time.time() + VISIBILITY_SEC + 5
    sent = site.task("add").apply_async((1, 1), countdown=VISIBILITY_SEC + 5)
    looks = 0
    while True:
        stored = site.stored(sent)
        if time.time() >= due_at:  # It may have been due when it was read.
            break
        assert (stored["status"], stored["attempts"], stored["history"]) == ("pending", 0, [])
        looks += 1
        time.sleep(0.1)
    assert looks
    assert site.result(sent) == 2
    assert len(site.ledger(id=sent.id)) == 1 + expired_leases(site, sent)


def expired_leases(site: Site, sent: Any) -> int:
    """Return how often a worker was too slow to renew a lease: on a busy machine, that happens."""
    history = site.wait_for_status(sent, "done")["history"]
    return len([one for one in history if one["outcome"] == "lease_expired"])
