"""A worker whose MongoDB is restarted, and whose primary steps down, while tasks run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import kombu
import pytest

from tests.celery.kombu_tools import Receiver
from tests.celery.workers import Site
from tests.integration.replica_set import ReplicaSet
from tests.waiting import wait_for

POOLS = ["prefork", "threads"]


@pytest.fixture(scope="module")
def trio(own_server: None) -> Iterator[ReplicaSet]:
    with ReplicaSet.started() as started:
        yield started


@pytest.fixture
def site(trio: ReplicaSet, tmp_path: Path) -> Iterator[Site]:
    trio.heal()
    site = Site(trio.uri.replace("/test?", f"/{tmp_path.name}?"), tmp_path)
    yield site
    site.close()


@pytest.mark.parametrize("noticed", [False, True])
def test_a_restart_of_the_server_runs_nothing_twice(
    trio: ReplicaSet, site: Site, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = []
    if noticed:
        monkeypatch.setenv("MICROQUEUE_RETRY_DEADLINE", "2")
        # A heartbeat would wait for the server, and after it there would be no loss to notice.
        arguments += ["--without-heartbeat"]
    with site.worker(*arguments, worker_send_task_events=False) as worker:
        early, late = site.gate(), site.gate()
        # No results: Celery's result backend would fail while the server is away.
        wait, nap = site.task("wait"), site.task("nap")
        running = [wait.apply_async((str(gate),), ignore_result=True) for gate in (early, late)]
        for one in running:
            site.wait_for_run(one)
        waiting = [nap.apply_async((number, 0), ignore_result=True) for number in range(4)]
        worker.wait_for_log(" received", times=len(running + waiting))
        for member in trio.members:
            member.kill()
        early.touch()
        site.wait_for_run(running[0], "end")
        if noticed:
            worker.wait_for_log("Connection to broker lost")
        trio.heal()
        for one in [running[0], *waiting]:
            site.wait_for_status(one, "done")
        assert site.stored(running[1])["status"] == "processing"
        late.touch()
        for one in running:
            assert site.wait_for_status(one, "done")["attempts"] == 1
        for one in [*running, *waiting]:
            assert len(site.ledger(id=one.id)) == 1
        assert site.result(site.task("add").delay(1, 2)) == 3
        assert site.app.control.ping([worker.name], timeout=60) == [{worker.name: {"ok": "pong"}}]


def test_a_stepdown_runs_nothing_twice(trio: ReplicaSet, site: Site) -> None:
    with site.worker(concurrency=2) as worker:
        gate = site.gate()
        running = site.task("wait").delay(str(gate))
        site.wait_for_run(running)
        former = trio.step_down()
        wait_for(lambda: trio.primary() is not former, 90, what="another primary")
        later = [site.task("add").delay(number, 1) for number in range(10)]
        assert [site.result(one) for one in later] == [number + 1 for number in range(10)]
        gate.touch()
        assert site.result(running) == str(gate)
        assert site.wait_for_status(running, "done")["attempts"] == 1
        for one in [running, *later]:
            assert len(site.ledger(id=one.id)) == 1
        assert site.app.control.ping([worker.name], timeout=60) == [{worker.name: {"ok": "pong"}}]


def test_broadcasts_are_received_once_through_a_stepdown(trio: ReplicaSet, site: Site) -> None:
    exchange = kombu.Exchange("news", type="fanout")
    with site.app.connection() as consuming, site.app.connection() as publishing:
        receivers = [
            Receiver(consuming, kombu.Queue(f"bcast.{n}", exchange, auto_delete=True))
            for n in range(3)
        ]

        def publish(body: int) -> bool:
            publishing.Producer().publish(body, exchange=exchange, declare=[exchange], retry=True)
            return True

        publish(1)
        for one in receivers:
            assert one.receive(1) == [1]
        trio.step_down(for_sec=5)
        trio.heal()
        wait_for(lambda: publish(2), 60, ignoring=publishing.connection_errors)
        publish(3)
        for one in receivers:
            bodies = one.receive(3)
            # A publisher that got no reply publishes again.
            assert sorted(set(bodies)) == [1, 2, 3]
            assert bodies == receivers[0].bodies[: len(bodies)]
