"""The end of a worker: what runs, what was prefetched, and what the next worker gets."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.celery.kombu_tools import Receiver
from tests.celery.workers import GEVENT, PATIENCE_SEC, Site
from tests.waiting import wait_for

PREFETCH = 4


def start_and_prefetch(site: Site) -> tuple[Path, Any, list[Any]]:
    """Let a task run until its gate opens, and three more wait for it in the worker."""
    gate = site.gate()
    running = site.task("wait").delay(str(gate))
    site.wait_for_run(running)
    others = [site.task("nap").delay(number, 0) for number in range(PREFETCH)]
    wait_for(
        lambda: statuses(site).count("processing") == PREFETCH, PATIENCE_SEC, what="prefetched"
    )
    return gate, running, others


def statuses(site: Site) -> list[str]:
    return [one["status"] for one in site.database.tasks.find({"queue": "celery"})]


def attempts(site: Site, sent: list[Any]) -> list[tuple[str, int]]:
    stored = [site.stored(one) for one in sent]
    return [(one["status"], one["attempts"]) for one in stored]


def received(site: Site, count: int) -> list[Any]:
    """Receive so many messages as another worker does, and acknowledge them."""
    with site.app.connection() as connection:
        receiver = Receiver(connection, site.app.amqp.queues["celery"])
        receiver.receive(count)
        for message in receiver.messages:
            message.ack()
        return receiver.messages


def test_a_warm_shutdown_returns_prefetched_messages_at_once_and_ends_the_running_task(
    site: Site,
) -> None:
    with site.worker(concurrency=1, worker_prefetch_multiplier=PREFETCH) as worker:
        gate, running, others = start_and_prefetch(site)
        worker.wait_for_log(" received", times=PREFETCH)
        worker.signal(signal.SIGTERM)
        wait_for(lambda: attempts(site, others) == [("pending", 0)] * PREFETCH, PATIENCE_SEC)
        assert attempts(site, [running]) == [("processing", 1)]
        for message in received(site, PREFETCH):  # Others need not wait for the worker's end.
            assert message.delivery_info["redelivered"] is False
        for one in others:
            site.wait_for_status(one, "done")
        gate.touch()
        assert worker.wait() == 0
    assert site.result(running) == str(gate)
    assert attempts(site, [running, *others]) == [("done", 1)] * (PREFETCH + 1)
    assert not any(run["redelivered"] for run in site.ledger())


@pytest.mark.parametrize(
    ("pool", "most_held"),
    [("threads", 0), ("solo", 0), pytest.param("gevent", 1, marks=GEVENT.marks)],
)
def test_a_warm_shutdown_of_other_pools_returns_prefetched_messages_while_a_task_runs(
    site: Site, pool: str, most_held: int
) -> None:
    with site.worker(pool=pool, concurrency=1, worker_prefetch_multiplier=PREFETCH) as worker:
        gate, running, others = start_and_prefetch(site)
        if pool == "threads":
            worker.wait_for_log(" received", times=PREFETCH)
        worker.signal(signal.SIGTERM)
        wait_for(
            lambda: attempts(site, others).count(("pending", 0)) >= PREFETCH - most_held,
            PATIENCE_SEC,
        )
        assert attempts(site, [running]) == [("processing", 1)]
        gate.touch()
        assert worker.wait() == 0
    assert attempts(site, [running]) == [("done", 1)]
    ran = 0
    for one in others:  # A full gevent pool starts the one that waits for it.
        has_run = bool(site.ledger(id=one.id))
        assert attempts(site, [one]) == [("done", 1) if has_run else ("pending", 0)]
        ran += has_run
    assert ran <= most_held


def test_a_cold_shutdown_returns_everything_and_counts_what_ran(site: Site) -> None:
    with site.worker(concurrency=1, worker_prefetch_multiplier=PREFETCH) as worker:
        _, running, others = start_and_prefetch(site)
        worker.wait_for_log(" received", times=PREFETCH)
        worker.signal(signal.SIGQUIT)
        assert worker.wait() == 0
    assert attempts(site, [running, *others]) == [("pending", 1), *[("pending", 0)] * PREFETCH]
    again = {one.headers["id"]: one for one in received(site, 1 + PREFETCH)}
    redelivered = {name: one.delivery_info["redelivered"] for name, one in again.items()}
    assert redelivered == {running.id: True, **{one.id: False for one in others}}


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_warm_shutdown_leaves_no_cursors(site: Site, pool: str) -> None:
    """MongoDB would keep them for ten minutes."""
    with site.worker(pool=pool, concurrency=1) as worker:
        site.wait_for_status(site.task("nap").delay(1, 0), "done")
        wait_for(lambda: len(cursors(site)) >= 2, PATIENCE_SEC, what="its streams")
        assert worker.stop() == 0
    wait_for(lambda: cursors(site) == [], what="the end of its streams")  # Soon, not in minutes.


def cursors(site: Site) -> list[str]:
    """Return what the open cursors of the database read."""
    stage = {"$currentOp": {"allUsers": True, "idleCursors": True}}
    found = site.client.admin.aggregate([stage])
    of_streams = [one for one in found if one.get("ns", "").startswith(site.database.name + ".")]
    return [one["ns"] for one in of_streams if one.get("cursor", {}).get("tailable")]
