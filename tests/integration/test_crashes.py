"""Workers that are killed outright: what they held goes to others within heartbeats."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from microqueue import BackoffPolicy, Outcome, Queue, QueueSettings, Sweeper, TaskStatus
from microqueue.core import core_of
from microqueue.operations.workers import beat
from microqueue.reports import WorkerInfo
from microqueue.testing import FakeClock
from microqueue.worker import Worker
from tests.waiting import wait_for

PROGRAM = """
import os, sys, time
from microqueue import Queue, QueueSettings
from microqueue.worker import Worker

def handler(payload):
    os.write(1, b"running\\n")  # In one piece, as two threads do it at once.
    time.sleep(60)

with Queue.from_uri(sys.argv[1], settings=QueueSettings(visibility_timeout=3600)) as queue:
    Worker(queue, handler, worker_id="victim", concurrency=2, heartbeat=2).run()
"""

NO_BACKOFF = BackoffPolicy(base_sec=0, max_sec=0)


def registered(
    queue: Queue[Any], worker_id: str, *, silent_sec: float = 0, concurrency: int = 1
) -> None:
    """Register a worker whose last heartbeat was some time ago, and was missed."""
    now = queue.now()
    info = WorkerInfo(
        id=worker_id,
        collection=core_of(queue).collections.name,
        host="h",
        pid=1,
        queues=["default"],
        concurrency=concurrency,
        running=0,
        handled=0,
        started_at=now,
        heartbeat_at=now,
        heartbeat_sec=2,
    )
    core_of(queue).run(beat(info))
    if silent_sec:
        assert isinstance(queue.clock, FakeClock)
        missed = {"$set": {"missed_at": now}}
        core_of(queue).collections.workers.update_one({"worker_id": worker_id}, missed)
        queue.clock.advance(silent_sec)


def test_tasks_of_a_killed_worker_are_back_within_heartbeats(
    database_uri: str, microqueue_database: Any
) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=QueueSettings(backoff=NO_BACKOFF))
    queue.enqueue_many([{}, {}])
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, database_uri],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["running\n"] * 2
        wait_for(queue.workers)
        assert Sweeper(queue).reclaim_orphaned() == 0  # It lives.
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    sweeper = Sweeper(queue)
    wait_for(lambda: sweeper.reclaim_orphaned() == 2)  # The leases would have lasted an hour.
    assert queue.workers() == []
    for task in queue.pop_many(2):
        assert (task.attempts, task.crashes, task.redelivered) == (2, 1, True)
        assert task.history[0].outcome is Outcome.CRASHED
        assert task.history[0].worker_id == "victim"
        queue.mark_done(task)


def test_only_the_tasks_of_the_silent_worker_are_taken_back(microqueue_queue: Queue[Any]) -> None:
    microqueue_queue.enqueue_many([{}, {}, {}])
    silent = microqueue_queue.pop(worker_id="silent")
    for worker_id in ("alive", "unregistered"):
        microqueue_queue.pop(worker_id=worker_id)
    registered(microqueue_queue, "silent", silent_sec=6)
    registered(microqueue_queue, "alive")
    assert Sweeper(microqueue_queue).run_once().reclaimed == 1
    assert silent is not None
    stored = microqueue_queue.get(silent.id)
    assert stored is not None
    assert (stored.status, stored.error.code if stored.error else None) == (
        TaskStatus.PENDING,
        "worker_gone",
    )
    assert microqueue_queue.stats().processing == 2
    assert [worker.id for worker in microqueue_queue.workers()] == ["alive"]


def test_worker_counts_as_gone_after_three_missed_heartbeats(
    microqueue_queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    microqueue_queue.enqueue({})
    microqueue_queue.pop(worker_id="w")
    registered(microqueue_queue, "w", silent_sec=5.9)
    assert Sweeper(microqueue_queue).reclaim_orphaned() == 0
    microqueue_clock.advance(0.1)
    assert Sweeper(microqueue_queue).reclaim_orphaned() == 1


def test_workers_that_could_not_beat_while_the_server_was_away_are_not_taken_for_dead(
    microqueue_queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue = microqueue_queue
    queue.enqueue_many([{}, {}])
    for worker_id in ("alive", "dead"):
        queue.pop(worker_id=worker_id)
        registered(queue, worker_id)
    microqueue_clock.advance(60)
    assert Sweeper(queue).reclaim_orphaned() == 0  # This is the first notice.
    microqueue_clock.advance(1.9)
    registered(queue, "alive")
    assert Sweeper(queue).reclaim_orphaned() == 0
    microqueue_clock.advance(0.1)
    assert Sweeper(queue).reclaim_orphaned() == 1
    assert [worker.id for worker in queue.workers()] == ["alive"]
    microqueue_clock.advance(3.9)
    assert Sweeper(queue).reclaim_orphaned() == 0
    microqueue_clock.advance(2)
    assert Sweeper(queue).reclaim_orphaned() == 1  # It was noticed when it was late.


def test_tasks_that_a_worker_claims_after_it_counts_as_gone_are_left_to_their_leases(
    microqueue_queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue = microqueue_queue
    before, after = queue.enqueue_many([{}, {}]).tasks
    queue.pop(worker_id="slow")
    registered(queue, "slow", silent_sec=6)
    microqueue_clock.advance(0.01)
    queue.pop(worker_id="slow")  # Its heartbeats did not arrive, but it is alive.
    assert Sweeper(queue).reclaim_orphaned() == 1
    found: list[Any] = [queue.get(task.id) for task in (before, after)]
    assert [task.status for task in found] == [TaskStatus.PENDING, TaskStatus.PROCESSING]
    assert found[1].lease.worker_id == "slow"
    assert queue.workers() == []  # It registers again with its next heartbeat.


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_poison_is_buried_after_the_allowed_crashes(
    microqueue_database: Any, microqueue_clock: FakeClock, limit: int
) -> None:
    settings = QueueSettings(max_crashes=limit, backoff=NO_BACKOFF)
    queue: Queue[Any] = Queue(microqueue_database, settings=settings, clock=microqueue_clock)
    task = queue.enqueue({})
    for crash in range(limit):
        assert queue.pop(worker_id=f"w{crash}") is not None
        registered(queue, f"w{crash}", silent_sec=6)
        assert Sweeper(queue).reclaim_orphaned() == 1
    buried = queue.get(task.id)
    assert buried is not None
    assert (buried.status, buried.crashes) == (TaskStatus.FAILED, limit)
    assert buried.error is not None
    assert buried.error.code == "poison"


def test_what_surely_had_not_started_gets_its_attempt_back(microqueue_queue: Queue[Any]) -> None:
    queue = microqueue_queue
    tasks = queue.enqueue_many([{"n": n} for n in range(5)]).tasks
    core_of(queue).collections.tasks.update_many({}, {"$set": {"redelivered": True}})
    queue.pop_many(5, worker_id="w")
    registered(queue, "w", silent_sec=6, concurrency=2)
    assert Sweeper(queue).reclaim_orphaned() == 5
    found: list[Any] = [queue.get(task.id) for task in tasks]
    assert [task.attempts for task in found] == [1, 1, 0, 0, 0]
    assert [task.crashes for task in found] == [1, 1, 0, 0, 0]
    assert [task.history[0].outcome for task in found] == ["crashed"] * 2 + ["released"] * 3
    assert [task.next_retry_at is None for task in found] == [False, False, True, True, True]


def test_only_the_task_that_ran_alone_is_blamed_by_sweepers_of_any_queue(
    microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    a, b = (Queue[Any](microqueue_database, name, clock=microqueue_clock) for name in "ab")
    for queue in (a, b):
        queue.enqueue({})
        suspicious = {"redelivered": True, "crashes": 2}
        core_of(queue).collections.tasks.update_many({"queue": "a"}, {"$set": suspicious})
        queue.pop(worker_id="w")
        microqueue_clock.advance(0.001)
    registered(a, "w", silent_sec=6, concurrency=2)
    assert Sweeper(a, queues=["a"]).run_once().buried == 1
    assert Sweeper(a, queues=["b"]).reclaim_orphaned() == 1
    (alone,), (other,) = a.peek(), b.peek()
    assert (alone.crashes, alone.error.code if alone.error else None) == (3, "poison")
    assert (other.crashes, other.attempts) == (0, 1)


def test_crash_on_the_last_attempt_is_buried_too(microqueue_queue: Queue[Any]) -> None:
    task = microqueue_queue.enqueue({}, max_attempts=1)
    microqueue_queue.pop(worker_id="w")
    registered(microqueue_queue, "w", silent_sec=6)
    report = Sweeper(microqueue_queue).run_once()
    assert (report.reclaimed, report.buried) == (0, 1)
    buried = microqueue_queue.get(task.id)
    assert buried is not None
    assert buried.error is not None
    assert buried.error.code == "worker_gone"


def test_workers_of_another_collection_are_none_of_this_sweepers_business(
    microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    mine: Queue[Any] = Queue(microqueue_database.mine, clock=microqueue_clock)
    other: Queue[Any] = Queue(microqueue_database.other, clock=microqueue_clock)
    other.enqueue({})
    other.pop(worker_id="w")
    registered(other, "w", silent_sec=60)
    assert Sweeper(mine).reclaim_orphaned() == 0
    assert Sweeper(other).reclaim_orphaned() == 1


def test_sweeper_of_some_queues_takes_back_only_their_tasks_and_blames_only_what_ran(
    microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    queues: dict[str, Queue[Any]] = {
        name: Queue(microqueue_database, name, clock=microqueue_clock) for name in ("a", "b", "c")
    }
    for name in "abbaa":  # Two of them ran: the first, and one of b.
        queues[name].enqueue({})
        assert queues[name].pop(worker_id="w") is not None
        microqueue_clock.advance(0.001)
    registered(queues["a"], "w", silent_sec=6, concurrency=2)
    assert Sweeper(queues["a"], queues=["c"]).reclaim_orphaned() == 0
    assert Sweeper(queues["a"], queues=["a"]).reclaim_orphaned() == 3
    assert [queue.stats().processing for queue in queues.values()] == [0, 2, 0]
    assert [worker.id for worker in queues["a"].workers()] == ["w"]  # For the sweeper of b.
    assert Sweeper(queues["a"], queues=["a"]).reclaim_orphaned() == 0
    assert Sweeper(queues["a"], queues=["b"]).reclaim_orphaned() == 2
    assert queues["a"].workers() == []
    crashes = {name: [task.crashes for task in queues[name].peek()] for name in "ab"}
    assert crashes == {"a": [0, 0, 1], "b": [0, 1]}


def test_worker_that_was_only_slow_may_be_blamed_in_full_when_it_is_gone(
    microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    a, b = (Queue[Any](microqueue_database, name, clock=microqueue_clock) for name in "ab")
    for queue in (a, b):
        queue.enqueue({})
        queue.pop(worker_id="w")
        microqueue_clock.advance(0.001)
    registered(a, "w", silent_sec=6)
    assert Sweeper(a, queues=["a"]).reclaim_orphaned() == 1
    registered(a, "w", silent_sec=6)  # It beat again.
    assert Sweeper(a).reclaim_orphaned() == 1
    assert [queue.peek()[0].crashes for queue in (a, b)] == [1, 1]


def test_worker_is_listed_while_it_runs_and_not_after(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.enqueue({})
    seen: list[Any] = []

    def handler(_payload: Any) -> None:
        wait_for(lambda: any(worker.running for worker in queue.workers()))
        seen.extend(queue.workers())

    Worker(queue, handler, worker_id="w", concurrency=3, heartbeat=0.05).run(burst=True)
    (info,) = seen
    assert (info.id, info.queues, info.concurrency) == ("w", ["default"], 3)
    assert queue.workers() == []
