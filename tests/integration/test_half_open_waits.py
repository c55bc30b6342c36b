"""Connections that die in silence: waiting calls end in time, and workers continue."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from microqueue import (
    Queue,
    QueueSettings,
    ServerUnavailable,
    Sweeper,
    TaskStatus,
)
from tests.integration.half_open import KINDS, PATIENT_SEC, calling
from tests.integration.proxy import Proxy
from tests.integration.rig import Rig
from tests.waiting import wait_for


def test_worker_works_on_after_its_connections_died(rig: Rig, proxy: Proxy) -> None:
    rig.uri = proxy.uri
    rig.settings = rig.settings.model_copy(update={"call_timeout": timedelta(seconds=1)})
    seen: list[int] = []

    def handler(payload: Any) -> None:
        seen.append(payload["n"])

    rig.queue.enqueue({"n": 0})
    running = rig.start(handler, heartbeat=1)
    try:
        for round_ in (1, 2, 3):
            wait_for(lambda: len(seen) == round_)  # noqa: B023 (it is called within the round)
            proxy.freeze()
            rig.queue.enqueue({"n": round_})
        wait_for(lambda: len(seen) == 4)
        wait_for(lambda: rig.queue.stats().done == 4)
    finally:
        rig.stop()
        running.join(PATIENT_SEC)
    assert not running.is_alive()
    assert sorted(seen) == [0, 1, 2, 3]


def test_worker_whose_connections_died_keeps_its_leases_and_its_name(
    rig: Rig, proxy: Proxy
) -> None:
    """It beats and renews on another connection before it counts as dead."""
    rig.uri = proxy.uri
    rig.settings = rig.settings.model_copy(update={"visibility_timeout": timedelta(seconds=12)})
    task = rig.queue.enqueue({"n": 0})
    started, let_go = threading.Event(), threading.Event()

    def handler(_payload: Any) -> None:
        started.set()
        let_go.wait(PATIENT_SEC)

    running = rig.start(handler, heartbeat=2)
    try:
        assert started.wait(PATIENT_SEC)
        before = rig.queue.get(task.id)
        assert before is not None
        assert before.lease is not None
        ends = before.lease.expires_at
        proxy.freeze()
        wait_for(lambda: rig.queue.now() > ends)
        Sweeper(rig.queue).run_once()
        held = rig.queue.get(task.id)
        assert held is not None
        assert (held.status, held.attempts) == (TaskStatus.PROCESSING, 1)
    finally:
        let_go.set()
        wait_for(lambda: rig.queue.get(task.id).status is TaskStatus.DONE)  # type: ignore[union-attr]  # It is there.
        rig.stop()
        running.join(PATIENT_SEC)
    assert not running.is_alive()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("new", [False, True])
def test_waiting_pop_ends_by_its_limit_when_the_stream_is_dead(
    kind: str, new: bool, proxy: Proxy, microqueue_database: Any
) -> None:
    # A slow machine may need many attempts where some connection works.
    deadline_sec = 1 if new else 30
    settings = QueueSettings(call_timeout=0.5, retry_deadline=deadline_sec, poll_interval=0.2)
    with calling(kind, proxy, microqueue_database, QueueSettings()) as caller:
        caller(caller.queue.ensure_indexes)
        caller.hasten(settings)
        freezing = threading.Timer(0.7, lambda: proxy.freeze(new=new))
        freezing.start()
        try:
            assert caller(lambda: caller.queue.pop(wait=2.5)) is None
        except ServerUnavailable:
            assert new
        freezing.join()


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_pop_polls_when_its_stream_is_dead(
    kind: str, proxy: Proxy, microqueue_database: Any
) -> None:
    settings = QueueSettings(call_timeout=0.5, retry_deadline=30, poll_interval=0.2)
    other: Queue[Any] = Queue(microqueue_database)
    other.ensure_indexes()

    def disturb() -> None:
        proxy.freeze()
        other.enqueue({"n": 1})

    with calling(kind, proxy, microqueue_database, settings) as caller:
        caller(caller.queue.stats)
        disturbing = threading.Timer(1.0, disturb)
        disturbing.start()
        task = caller(lambda: caller.queue.pop(wait=50))
        disturbing.join()
        assert task is not None
