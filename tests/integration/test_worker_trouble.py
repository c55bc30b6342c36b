"""Workers in trouble: handlers that hang, outcomes that cannot be stored, a server that is away."""

from __future__ import annotations

import asyncio
import enum
import re
import threading
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from mongomock_motor import AsyncMongoMockClient

from microqueue import AsyncQueue, Outcome, Queue, QueueSettings, Sweeper, TaskStatus
from microqueue.core import QueueCore, core_of
from microqueue.embedded import EmbeddedServer
from microqueue.errors import AlreadyRunning, InvalidArgument, ServerUnavailable
from microqueue.operations.call import Call
from microqueue.operations.leases import renew
from microqueue.testing import FakeClock
from microqueue.worker import AsyncWorker, Fail, Retry, Worker, completer
from microqueue.worker.fetcher import Claimer
from microqueue.worker.prefetch import PrefetchController
from tests.integration.rig import Rig
from tests.rejection import rejecting
from tests.waiting import LEASE_SEC, wait_for, wait_for_renewals

MEGABYTE = 1024 * 1024


class Code(enum.Enum):
    """A code as somebody may pass it by mistake."""

    LATE = "late"


# Outcomes that cannot be stored


@pytest.mark.parametrize("raised", [Fail, Retry])
@pytest.mark.parametrize("code", [Code.LATE, "half \ud800", 7])
def test_a_code_that_is_no_text_is_rejected_where_it_is_made(raised: Any, code: Any) -> None:
    with rejecting("code"):
        raised("x", code=code)


def test_an_outcome_that_cannot_be_stored_is_buried_and_holds_up_no_other(rig: Rig) -> None:
    (large,) = rig.queue.enqueue_many([{"n": 0, "data": b"x" * 9 * MEGABYTE}]).tasks
    rig.queue.enqueue_many([{"n": n} for n in range(1, 20)])

    def handler(payload: Any) -> Any:
        return b"y" * 9 * MEGABYTE if payload["n"] == 0 else payload["n"]

    assert rig.run(handler, keep_result=True, concurrency=4) == 20
    stats = rig.queue.stats()
    assert (stats.done, stats.failed, stats.processing) == (19, 1, 0)
    buried = rig.queue.get(large.id)
    assert buried is not None
    assert buried.error is not None
    assert buried.error.code == "unstorable"
    assert "16 MB" in buried.error.message


def test_a_task_that_cannot_even_be_buried_is_left_to_its_lease(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def refuse(_queue: Any, batch: Any) -> Any:
        tries.append(len(batch))
        raise InvalidArgument("MongoDB cannot store this")
        yield  # So that it is an operation.

    monkeypatch.setattr(completer, "commit", refuse)
    rig.queue.enqueue({})
    rig.run(lambda _payload: None)
    assert tries == [1, 1]
    assert rig.queue.stats().processing == 1


# Handlers that hang


def test_an_idle_handler_gets_a_task_while_another_is_busy(rig: Rig) -> None:
    rig.queue.enqueue({"n": 0})
    seen: list[int] = []
    go = threading.Event()

    def handler(payload: Any) -> None:
        seen.append(payload["n"])
        if payload["n"] == 0:
            go.wait(30)

    thread = rig.start(handler, concurrency=2, prefetch=1)
    try:
        wait_for(lambda: seen == [0])
        rig.queue.enqueue({"n": 1})
        wait_for(lambda: seen == [0, 1])
    finally:
        go.set()
        rig.stop()
        thread.join(30)


def test_a_handler_that_ignores_its_timeout_keeps_its_place(microqueue_queue: Queue[Any]) -> None:
    queue = microqueue_queue
    queue.enqueue_many([{"n": n} for n in range(5)])
    go = threading.Event()
    started: list[int] = []

    def handler(payload: Any) -> None:
        started.append(payload["n"])
        if payload["n"] == 0:
            go.wait(30)

    worker = Worker(queue, handler, concurrency=1, prefetch=1, timeout=1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_for(lambda: queue.stats().delayed == 1)  # It is to be tried again.
    time.sleep(0.3)
    assert queue.stats().processing == 0  # Nobody could run it.
    assert started == [0]
    go.set()
    wait_for(lambda: queue.stats().done == 4)
    worker.stop()
    thread.join(30)
    assert started == [0, 1, 2, 3, 4]


def test_a_burst_does_not_wait_for_a_handler_that_ignores_its_timeout(
    microqueue_queue: Queue[Any],
) -> None:
    go = threading.Event()
    microqueue_queue.enqueue({}, max_attempts=1)
    worker = Worker(
        microqueue_queue, lambda _payload: go.wait(90), concurrency=1, timeout=0.2, grace=0.1
    )
    began = time.monotonic()
    worker.run(burst=True)
    go.set()
    assert time.monotonic() - began < 60
    assert microqueue_queue.stats().failed == 1


def test_each_run_counts_its_own_tasks(microqueue_queue: Queue[Any]) -> None:
    worker = Worker(microqueue_queue, lambda _payload: None)
    for count in (3, 2):
        microqueue_queue.enqueue_many([{}] * count)
        assert worker.run(burst=True) == count


def test_a_handler_that_goes_on_from_an_earlier_run_takes_no_place_in_the_next(
    microqueue_queue: Queue[Any],
) -> None:
    go, ended = threading.Event(), threading.Event()

    def handler(payload: Any) -> None:
        if payload["hang"]:
            go.wait(60)
            ended.set()

    worker = Worker(microqueue_queue, handler, concurrency=1, prefetch=1, timeout=0.2, grace=0.1)
    microqueue_queue.enqueue({"hang": True}, max_attempts=1)
    assert worker.run(burst=True) == 1
    microqueue_queue.enqueue_many([{"hang": False}] * 2)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        wait_for(lambda: microqueue_queue.stats().done == 2)
        go.set()
        assert ended.wait(30)
        microqueue_queue.enqueue({"hang": False})
        wait_for(lambda: microqueue_queue.stats().done == 3)
    finally:
        go.set()
        worker.stop()
        thread.join(30)


def test_a_worker_of_coroutines_may_run_in_one_loop_after_another() -> None:
    queue = AsyncQueue[Any](AsyncMongoMockClient().microqueue)
    begun: list[asyncio.Event] = []

    async def handler(_payload: Any) -> None:
        begun[-1].set()

    worker = AsyncWorker(queue, handler)

    async def work() -> int:
        begun.append(asyncio.Event())
        running = asyncio.create_task(worker.run())
        assert not (await asyncio.wait([running], timeout=0.2))[0]  # It waits for work.
        await queue.enqueue({})
        await asyncio.wait_for(begun[-1].wait(), 30)
        worker.stop()
        return await running

    assert [asyncio.run(work()), asyncio.run(work())] == [1, 1]


def test_a_worker_that_runs_cannot_be_run_once_more(rig: Rig) -> None:
    begun, go = threading.Event(), threading.Event()

    def handler(_payload: Any) -> None:
        begun.set()
        go.wait(30)

    rig.queue.enqueue({})
    thread = rig.start(handler)
    assert begun.wait(30)
    with pytest.raises(AlreadyRunning, match=re.escape(rig.worker.worker_id)):
        # Neither does it disturb the run that is on.
        rig.worker.run() if rig.kind == "threads" else asyncio.run(rig.worker.run())
    go.set()
    wait_for(lambda: rig.queue.stats().done == 1)
    rig.stop()
    thread.join(30)
    assert not thread.is_alive()


# A server that is away


class Away:
    """Makes every settlement of a queue fail, as if the server were away, until told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tries = 0
        monkeypatch.setattr(completer, "commit", self._refuse)

    def _refuse(self, *_: Any) -> Any:
        self.tries += 1
        raise ServerUnavailable("away")
        yield  # So that it is an operation.


@pytest.mark.parametrize(
    ("grace", "immediately"), [(300, True), (0.3, False)], ids=["in a hurry", "after the grace"]
)
def test_a_stop_does_not_wait_for_a_server_that_is_away(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, grace: float, immediately: bool
) -> None:
    away = Away(monkeypatch)
    rig.queue.enqueue({})
    thread = rig.start(lambda _payload: None, grace=grace)
    wait_for(lambda: away.tries)
    rig.stop(immediately=immediately)
    thread.join(60)
    assert not thread.is_alive()
    assert rig.queue.stats().processing == 1  # Its lease will expire.
    wait_for(lambda: not [one for one in threading.enumerate() if one.name == "microqueue-leases"])


def test_a_hurry_does_not_wait_for_an_answer_that_does_not_come(
    microqueue_queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered = threading.Event(), threading.Event()

    def never(*_: Any) -> Any:
        asked.set()
        answered.wait(60)
        raise ServerUnavailable("away")
        yield  # So that it is an operation.

    monkeypatch.setattr(completer, "commit", never)
    microqueue_queue.enqueue({})
    worker = Worker(microqueue_queue, lambda _payload: None, grace=300)
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert asked.wait(30)
    worker.stop(immediately=True)
    thread.join(30)
    ended = not thread.is_alive()
    wait_for(lambda: not [one for one in threading.enumerate() if "leases" in one.name])
    answered.set()
    wait_for(lambda: not [one for one in threading.enumerate() if "settlement-writer" in one.name])
    assert ended


def test_cancelling_a_worker_holds_although_its_claim_fails(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    from microqueue.worker import AsyncWorker  # noqa: PLC0415 (only here)

    async def run() -> None:
        from pymongo import AsyncMongoClient  # noqa: PLC0415 (as above)

        client: Any = AsyncMongoClient(microqueue_server.uri)
        queue: AsyncQueue[Any] = AsyncQueue(client[microqueue_database.name])
        claiming = asyncio.Event()

        async def claim_slowly(operation: Any) -> Any:
            if operation.gi_code is not Claimer._claim_batch.__code__:  # noqa: SLF001 (the claim)
                return await plain_run(operation)
            claiming.set()
            await asyncio.sleep(0.2)
            raise ServerUnavailable("away")

        plain_run = core_of(queue).run
        core_of(queue).run = claim_slowly  # type: ignore[method-assign]  # To come in between.
        await queue.enqueue({})
        working = asyncio.create_task(AsyncWorker(queue, lambda _payload: None).run())
        await claiming.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(working, 60)
        await client.close()

    asyncio.run(run())


# Leases


def test_one_write_renews_all_leases_of_the_same_length(microqueue_queue: Queue[Any]) -> None:
    queue = microqueue_queue
    queue.enqueue_many([{}] * 5)
    tasks: list[Any] = [queue.pop() for _ in range(5)]
    now = queue.now()
    writes: list[Call] = []

    def counted() -> Any:
        operation = renew(tasks, now=now, timeout=queue.settings.visibility_timeout)
        reply = None
        while True:
            try:
                call = operation.send(reply)
            except StopIteration as end:
                return end.value
            if call.method.startswith("update"):
                writes.append(call)
            reply = yield call

    assert core_of(queue).run(counted()) == []
    assert len(writes) == 1
    queue.mark_done(tasks[0])
    assert [task.id for task in core_of(queue).run(counted())] == [tasks[0].id]


def test_a_handler_that_computes_in_python_keeps_its_lease(
    microqueue_database: Any, microqueue_server: Any
) -> None:
    settings = QueueSettings(visibility_timeout=LEASE_SEC)
    queue: Queue[Any] = Queue(microqueue_database, settings=settings)
    waiting = queue.enqueue({})
    begun, enough = threading.Event(), threading.Event()

    def compute(_payload: Any) -> None:
        begun.set()
        while not enough.is_set():
            sum(range(1000))

    worker = Worker(queue, compute, concurrency=1)
    thread = threading.Thread(target=worker.run, kwargs={"burst": True})
    thread.start()
    try:
        assert begun.wait(30)
        wait_for_renewals(queue, waiting.id)
    finally:
        enough.set()
        thread.join(30)
    (task,) = queue.peek(1)
    assert (task.status, task.attempts) == (TaskStatus.DONE, 1)


def test_a_dead_worker_of_two_collections_is_found_in_both(
    microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    settings = QueueSettings(visibility_timeout=3600)
    queues: list[Queue[Any]] = [
        Queue(microqueue_database[name], settings=settings, clock=microqueue_clock)
        for name in ("x", "y")
    ]
    for queue in queues:
        queue.enqueue({})
    go = threading.Event()
    worker = Worker(
        queues, lambda _payload: go.wait(30), worker_id="w", concurrency=2, heartbeat=600
    )
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_for(lambda: all(queue.stats().processing for queue in queues))
    assert [[one.id for one in queue.workers()] for queue in queues] == [["w"], ["w"]]
    microqueue_clock.advance(1)  # Later than the claims.
    silent = {"gone_at": microqueue_clock.now(), "missed_at": datetime(2000, 1, 1, tzinfo=UTC)}
    microqueue_database["microqueue_workers"].update_many({}, {"$set": silent})
    for queue in queues:
        assert Sweeper(queue).reclaim_orphaned() == 1
        (task,) = queue.peek(1)
        assert task.history[-1].outcome is Outcome.CRASHED
    go.set()
    worker.stop()
    thread.join(30)
    assert [queue.workers() for queue in queues] == [[], []]


@pytest.mark.parametrize(
    ("options", "largest"),
    [({"flush_interval": 0}, 1), ({"flush_limit": 4}, 4), ({}, 12)],
    ids=["each at once", "four at most", "all"],
)
def test_settlements_share_as_many_writes_as_the_options_say(
    rig: Rig, options: dict[str, Any], largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    usual = completer.commit

    def counted(queue: Any, batch: Any) -> Any:
        sizes.append(len(batch))
        return usual(queue, batch)

    monkeypatch.setattr(completer, "commit", counted)
    rig.queue.enqueue_many([{}] * 12)
    together = threading.Barrier(12)
    options = {"flush_interval": 6, **options}
    rig.run(lambda _payload: together.wait(30), concurrency=12, prefetch=1, **options)
    assert sum(sizes) == 12
    assert max(sizes) == largest


def test_large_tasks_are_not_hoarded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefetchController, "MAX_BYTES", 6_000)
    unfinished: list[int] = []

    def handler(_payload: Any) -> None:
        unfinished.append(len(rig.worker._in_flight.unconcluded()))  # noqa: SLF001

    rig.queue.enqueue_many([{"text": "x" * 2_000} for _ in range(60)])
    assert rig.run(handler, concurrency=1) == 60
    assert len(unfinished) == 60
    assert max(unfinished) <= 3  # One that runs, and two that wait for it.


def test_one_claim_of_a_worker_is_no_larger_than_a_reply(microqueue_queue: Queue[Any]) -> None:
    payload = {"large": b"x" * 4 * MEGABYTE}
    for _ in range(5):
        microqueue_queue.enqueue(payload)
    core = core_of(microqueue_queue)
    lease = core.run(core.new_lease("w"))
    claimed = core.run(core.claim_under(lease, 5, one_reply=True))
    assert claimed is not None
    assert len(claimed) in {3, 4}
    for one in claimed:
        microqueue_queue.release(one.task)
    assert len(microqueue_queue.pop_many(5)) == 5  # Who asks for five gets them.


def test_a_worker_claims_no_more_than_a_reply(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    usual = QueueCore.claim_under

    def claim_under(*arguments: Any, **options: Any) -> Any:
        asked.append(options["one_reply"])
        return usual(*arguments, **options)

    monkeypatch.setattr(QueueCore, "claim_under", claim_under)
    rig.queue.enqueue({})
    assert rig.run(lambda _payload: None) == 1
    assert set(asked) == {True}
