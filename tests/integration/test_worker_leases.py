"""The leases of what a worker holds: renewed in time, whatever handlers and servers do."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo import MongoClient, WriteConcern

from microqueue import BackoffPolicy, Queue, QueueSettings, Sweeper, TaskStatus
from microqueue.core import SyncCore, core_of
from microqueue.embedded import EmbeddedServer
from microqueue.operations import leases
from microqueue.worker import Hooks, Worker, in_flight, lease_renewal
from microqueue.worker.in_flight import LeasedTask
from microqueue.worker.lease_renewal import open_lease_queue
from microqueue.worker.prefetch import PrefetchController
from tests.integration.rig import Rig, stored
from tests.waiting import LEASE_SEC, wait_for, wait_for_renewals

NO_BACKOFF = BackoffPolicy(base_sec=0, max_sec=0)


def touching(rig: Rig, extend: float, then: Callable[[], None]) -> Any:
    """Make a handler of the rig's kind that renews its lease itself, and continues."""

    def function(_payload: Any, context: Any) -> None:
        context.touch(extend=extend)
        then()

    async def coroutine(_payload: Any, context: Any) -> None:
        await context.touch(extend=extend)
        await asyncio.to_thread(then)

    return function if rig.kind == "threads" else coroutine


def test_a_lease_that_its_handler_made_longer_is_not_cut_back(rig: Rig) -> None:
    rig.settings = QueueSettings(visibility_timeout=0.6)
    task = rig.queue.enqueue({})
    ends: list[Any] = []

    def watch() -> None:
        ends.append(stored(rig, task).lease.expires_at)
        time.sleep(1)  # The usual lease would be renewed several times.
        ends.append(stored(rig, task).lease.expires_at)

    assert rig.run(touching(rig, 3600, watch)) == 1
    assert ends[0] == ends[1]


def test_a_lease_that_its_handler_made_shorter_is_renewed_in_time(rig: Rig) -> None:
    task = rig.queue.enqueue({})

    def watch() -> None:
        wait_for_renewals(rig.queue, task.id, times=1)  # A usual lease is due after 20 seconds.

    assert rig.run(touching(rig, LEASE_SEC, watch)) == 1
    assert (stored(rig, task).status, stored(rig, task).attempts) == (TaskStatus.DONE, 1)


@pytest.mark.parametrize(
    ("granted_sec", "due_sec"),
    [(None, 10), (30, 10), (1, 1 / 3), (3600, 3580)],
    ids=["usual", "as usual", "shorter", "longer"],
)
def test_a_renewal_is_due_while_most_of_the_lease_is_left(
    granted_sec: float | None, due_sec: float
) -> None:
    class Claim:
        own_timeout_sec = None

    asked = SimpleNamespace(lease_sec=30.0)
    held = LeasedTask(asked, Claim(), 100.0)  # type: ignore[arg-type]  # All that it looks at.
    held.granted_sec = granted_sec
    assert held.renewal_due == pytest.approx(100 + due_sec)


def test_a_handler_is_told_when_its_task_comes_back_to_the_same_worker(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_renewal, "CHECK_EVERY_SEC", 0.1)
    rig.settings = QueueSettings(visibility_timeout=60, backoff=NO_BACKOFF)
    task = rig.queue.enqueue({})
    told: dict[int, bool] = {}

    def handler(_payload: Any, context: Any) -> None:
        if context.attempt == 1:
            expired = {"deadline_at": rig.queue.now() - timedelta(seconds=1)}
            rig.database.tasks.update_one({}, {"$set": expired})
            assert Sweeper(rig.queue).reclaim_stuck() == 1
        deadline = time.monotonic() + 60
        while not (context.cancelled or told) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3 * (context.attempt - 1))  # Time enough for a second look.
        told[context.attempt] = context.cancelled

    thread = rig.start(handler, concurrency=2)
    wait_for(lambda: len(told) == 2)
    rig.stop()
    thread.join(30)
    assert told == {1: True, 2: False}
    assert (stored(rig, task).status, stored(rig, task).attempts) == (TaskStatus.DONE, 2)


class Silent:
    """Makes the server not answer the threads of the leases, for one collection, once told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, collection: str) -> None:
        self.begun, self.asked, self.over = (threading.Event() for _ in range(3))
        answer = SyncCore.run

        def run(core: SyncCore[Any], operation: Any) -> Any:
            by_keeper = threading.current_thread().name == "microqueue-leases"
            if by_keeper and core.collections.name == collection and self.begun.is_set():
                self.asked.set()
                self.over.wait(60)
            return answer(core, operation)

        monkeypatch.setattr(SyncCore, "run", run)


def test_a_server_that_does_not_answer_delays_no_lease_on_another(
    microqueue_server: EmbeddedServer, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = QueueSettings(visibility_timeout=LEASE_SEC)
    silent = Silent(monkeypatch, "a")
    with (
        MongoClient[Any](microqueue_server.uri) as one,
        MongoClient[Any](microqueue_server.uri) as other,
    ):
        hanging: Queue[Any] = Queue(one[microqueue_database.name].a, settings=settings)
        healthy: Queue[Any] = Queue(other[microqueue_database.name].b, settings=settings)
        running: list[Any] = []

        def handler(payload: Any) -> None:
            running.append(payload)
            silent.over.wait(60)

        hanging.enqueue({})
        task = healthy.enqueue({})
        worker = Worker([hanging, healthy], handler, concurrency=2, heartbeat=0.2)
        thread = threading.Thread(target=worker.run)
        thread.start()
        wait_for(lambda: len(running) == 2)
        silent.begun.set()
        try:
            assert silent.asked.wait(30)
            asked_at = healthy.now()
            wait_for_renewals(healthy, task.id)
            wait_for(lambda: healthy.workers()[0].heartbeat_at > asked_at)
        finally:
            silent.over.set()
            worker.stop()
            thread.join(30)


def test_a_server_that_does_not_answer_delays_no_timeout(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = Silent(monkeypatch, "tasks")
    told: list[bool] = []

    def handler(_payload: Any, context: Any) -> None:
        silent.begun.set()
        silent.asked.wait(30)
        wait_for(lambda: context.cancelled or silent.over.is_set())
        told.append(not silent.over.is_set())

    rig.queue.enqueue({})
    thread = rig.start(handler, heartbeat=0.1, timeout=1.0)
    try:
        wait_for(lambda: told)
    finally:
        silent.over.set()
        rig.stop()
        thread.join(30)
    assert told == [True]


def test_a_handler_that_uses_all_connections_keeps_its_lease(rig: Rig) -> None:
    rig.settings = QueueSettings(visibility_timeout=LEASE_SEC)
    rig.client_options = {"maxPoolSize": 1, "waitQueueTimeoutMS": 30_000}
    rig.queue.enqueue({})
    rig.database.slow.insert_one({})
    slowly = {"$where": "sleep(7000) || true"}
    begun, ended = threading.Event(), threading.Event()

    def function(_payload: Any) -> None:
        begun.set()
        rig.client[rig.database.name].slow.find_one(slowly)
        ended.set()

    async def coroutine(_payload: Any) -> None:
        begun.set()
        await rig.client[rig.database.name].slow.find_one(slowly)
        ended.set()

    thread = rig.start(function if rig.kind == "threads" else coroutine)
    assert begun.wait(30)
    sweeper = Sweeper(rig.queue)
    reclaimed = 0
    while not ended.wait(0.1):
        reclaimed += sweeper.reclaim_stuck()
    wait_for(lambda: rig.queue.stats().done == 1)
    rig.stop()
    thread.join(30)
    assert reclaimed == 0
    assert [one.attempts for one in rig.queue.peek(status=TaskStatus.DONE)] == [1]


def test_leases_are_renewed_with_the_options_of_the_collection(
    microqueue_database: Any,
) -> None:
    legacy = CodecOptions[dict[str, Any]](uuid_representation=UuidRepresentation.PYTHON_LEGACY)
    given = microqueue_database.get_collection(
        "legacy", codec_options=legacy, write_concern=WriteConcern(1)
    )
    queue: Queue[Any] = Queue(given, settings=QueueSettings(visibility_timeout=0.6))
    task = queue.enqueue({}, task_id=uuid4())
    ends: set[Any] = set()

    def handler(_payload: Any, context: Any) -> None:
        def renewed() -> bool:
            found = queue.get(task.id)
            assert found is not None
            assert found.lease is not None
            ends.add(found.lease.expires_at)
            return len(ends) > 3 or context.cancelled

        wait_for(renewed)

    assert Worker(queue, handler).run(burst=True) == 1
    assert len(ends) > 3
    with open_lease_queue(core_of(queue)) as lease_queue:
        assert lease_queue.collections.tasks.write_concern == WriteConcern(1)


def test_leases_have_as_many_connections_as_they_need(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    uri = f"{microqueue_server.uri}&maxPoolSize=1"
    with (
        MongoClient[Any](uri, minpoolsize=1, waitQueueTimeoutMS=5) as client,
        open_lease_queue(core_of(Queue[Any](client[microqueue_database.name]))) as lease_queue,
    ):
        pool = lease_queue.collections.client.options.pool_options
        assert not pool.max_pool_size
        assert (pool.min_pool_size, pool.wait_queue_timeout) == (0, None)


def test_a_renewal_that_finds_a_task_cancelled_says_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        lease_renewal, "CHECK_EVERY_SEC", 60.0
    )  # So that the renewal finds it first.
    rig.settings = QueueSettings(visibility_timeout=0.6)
    task = rig.queue.enqueue({})
    begun = threading.Event()
    told: list[str] = []

    class Listening(Hooks):
        def on_cancel(self, task: Any) -> None:
            told.append(f"cancelled {task.id}")

        def on_lease_lost(self, task: Any) -> None:
            told.append(f"lost {task.id}")

    def handler(_payload: Any, context: Any) -> None:
        begun.set()
        wait_for(lambda: context.cancelled)

    thread = rig.start(handler, hooks=[Listening()])
    assert begun.wait(30)
    rig.queue.cancel(task.id)
    wait_for(lambda: told)
    rig.stop()
    thread.join(30)
    assert told == [f"cancelled {task.id}"]


# Tasks that waited longer than their leases

GATE = 20  # After so many quick tasks a worker claims many ahead.
COUNT = 50


class Waiting:
    """A worker with one handler that is busy, and tasks behind it that were claimed ahead."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.passed_sec = 0.0
        usual = in_flight.lease_clock
        monkeypatch.setattr(in_flight, "lease_clock", lambda: usual() + self.passed_sec)
        monkeypatch.setattr(
            PrefetchController, "LEASE_FRACTION", 10
        )  # None is given back because it waits long.
        # A worker claims more only while less than three quarters of the limit are unfinished.
        monkeypatch.setattr(PrefetchController, "limit", lambda _self: 12)
        self.rig = rig
        self.started: list[tuple[int, str]] = []
        self._busy, self.go = threading.Event(), threading.Event()
        rig.queue.enqueue_many([{"n": n} for n in range(COUNT)])
        self._thread = rig.start(self._handle, concurrency=1, **options)
        assert self._busy.wait(30)
        wait_for(lambda: len(self.waiting()) > 5 and rig.queue.stats().done == GATE)
        wait_for(lambda: rig.worker._in_flight.unfinished >= 9)  # noqa: SLF001 (it claims no more)

    def _handle(self, payload: Any, context: Any) -> None:
        self.started.append((payload["n"], context.task.lease.token))
        if payload["n"] == GATE and not self._busy.is_set():
            self._busy.set()
            self.go.wait(60)

    def waiting(self) -> dict[int, str]:
        """Return the tokens of what is claimed and not started."""
        found = self.rig.database.tasks.find({"status": "processing"})
        return {
            one["payload"]["n"]: one["lease_token"] for one in found if one["payload"]["n"] != GATE
        }

    def end(self) -> None:
        self.go.set()
        self.rig.stop()
        self._thread.join(30)


def not_started(caplog: pytest.LogCaptureFixture) -> int:
    return sum(getattr(record, "not_started", 0) for record in caplog.records)


def test_a_task_whose_lease_ended_unseen_is_released_in_place_of_started(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    silent = Silent(monkeypatch, "tasks")
    scene = Waiting(rig, monkeypatch)
    try:
        silent.begun.set()
        assert silent.asked.wait(30)  # No lease is renewed any more.
        held = scene.waiting()
        scene.passed_sec = 60.0
        scene.go.set()
        wait_for(lambda: rig.queue.stats().done == COUNT)
    finally:
        silent.over.set()
        scene.end()
    later = dict(scene.started[GATE + 1 :])
    assert set(later) == set(range(GATE + 1, COUNT))
    assert not {n for n, token in held.items() if later[n] == token}
    # Nobody else had claimed them, so nothing of theirs is used up.
    assert {one.attempts for one in rig.queue.peek(COUNT, status=TaskStatus.DONE)} == {1}
    assert 0 < not_started(caplog) <= len(held)


def test_no_renewal_that_comes_too_late_lets_a_lost_task_start(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        lease_renewal, "CHECK_EVERY_SEC", 1000.0
    )  # So that the renewal finds it first.
    asked, answered = threading.Event(), threading.Event()

    def delayed(tasks: Any) -> Any:
        asked.set()
        answered.wait(30)
        return (yield from leases.lease_states(tasks))

    monkeypatch.setattr(lease_renewal, "lease_states", delayed)
    lost: list[int] = []

    class Listening(Hooks):
        def on_lease_lost(self, task: Any) -> None:
            lost.append(task.payload["n"])

    scene = Waiting(rig, monkeypatch, hooks=[Listening()])
    try:
        others = {"status": "processing", "payload.n": {"$ne": GATE}}
        rig.database.tasks.update_many(others, {"$set": {"lease_token": "another"}})
        taken = sorted(scene.waiting())
        assert len(taken) >= 8
        scene.passed_sec = 60.0
        assert asked.wait(30)  # The renewal has found them lost, and not yet how.
        scene.go.set()
        rig.queue.enqueue({"n": COUNT})
        wait_for(lambda: COUNT in dict(scene.started))
    finally:
        answered.set()
        scene.end()
    assert not {*taken} & {n for n, _ in scene.started}
    assert sorted(lost) == taken
    assert set(scene.waiting().values()) == {"another"}  # They are left as they are.
    assert not_started(caplog) == len(taken)


@pytest.mark.parametrize(
    ("lease_sec", "own_sec", "least_sec"),
    [(30, None, 1), (3, None, 0.3), (30, 2, 0.2), (2, 600, 1)],
)
def test_a_lease_that_is_about_to_end_is_over(
    monkeypatch: pytest.MonkeyPatch, lease_sec: float, own_sec: float | None, least_sec: float
) -> None:
    class Claim:
        own_timeout_sec = own_sec

    now = 100.0
    monkeypatch.setattr(in_flight, "lease_clock", lambda: now)
    asked = SimpleNamespace(lease_sec=lease_sec)
    held = LeasedTask(asked, Claim(), now)  # type: ignore[arg-type]  # All that it looks at.
    ends_sec = (own_sec or lease_sec) - least_sec
    now = 100.0 + ends_sec - 0.01
    assert not held.lapsed
    now = 100.0 + ends_sec + 0.01
    assert held.lapsed
    held.renew(now, lost=True)
    assert held.lapsed
    held.renew(now)
    assert not held.lapsed


def test_leases_are_measured_by_a_clock_that_no_suspended_machine_stops() -> None:
    if sys.platform == "linux":
        assert abs(in_flight.lease_now() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60
    assert in_flight.lease_now() <= in_flight.lease_now()
