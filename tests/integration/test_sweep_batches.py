"""Sweeps, purges and replays that share their batches with others, and the sweeper's lock.

Something happens between the reads and writes of a batch, at a certain call of the operation:
a fault point, so that every run goes the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, timedelta
from itertools import islice
from typing import Any

import pytest
from bson import ObjectId
from pymongo import AsyncMongoClient

from microqueue import (
    AsyncQueue,
    AsyncSweeper,
    BackoffPolicy,
    NewTask,
    Queue,
    QueueSettings,
    Sweeper,
    SweepReport,
)
from microqueue.core import core_of
from microqueue.dead_letter_models import DeadLetterFilter
from microqueue.embedded import EmbeddedServer
from microqueue.insights import Insights
from microqueue.operations import workers
from microqueue.operations.call import Call
from microqueue.testing import FakeClock
from tests.integration.queues import popped
from tests.integration.race_worker import Process
from tests.integration.test_crashes import registered
from tests.rejection import rejecting
from tests.waiting import wait_for

SMALL: dict[str, Any] = {
    "batch_size": 2,
    "visibility_timeout": 30,
    "backoff": BackoffPolicy(base_sec=1800, jitter="none"),
}
WRITES = frozenset({"update_many", "delete_many", "bulk_write", "replace_one", "delete_one"})
MOST_CALLS = 500


def before_each_call(queue: Queue[Any] | AsyncQueue[Any], act: Callable[[Call], object]) -> None:
    """Do something before each database call of a queue."""
    core_of(queue)._driver.before_call = act  # noqa: SLF001 (the fault point of the driver)


class Rival:
    """Gets in between before each write: takes one task of the batch that was read."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act
        self.acting = False
        self.calls = 0

    def __call__(self, call: Call) -> None:
        if self.acting:
            return
        self.calls += 1
        assert self.calls < MOST_CALLS, "the loop does not end"
        if call.method in WRITES:
            self.acting = True
            self.act()
            self.acting = False


@pytest.fixture
def queue(microqueue_database: Any, microqueue_clock: FakeClock) -> Queue[Any]:
    found = Queue[Any](microqueue_database, settings=QueueSettings(**SMALL), clock=microqueue_clock)
    found.ensure_indexes()
    return found


def tasks_of(queue: Queue[Any], **selection: Any) -> int:
    count: int = core_of(queue).collections.tasks.count_documents(selection)
    return count


def snatch(queue: Queue[Any], selection: dict[str, Any], changes: dict[str, Any]) -> object:
    """Change one task behind the sweep's back, the first in the order of a sweep's batch."""
    order = [("deadline_at", 1), ("_id", 1)]
    return core_of(queue).collections.tasks.find_one_and_update(
        selection, {"$set": changes}, sort=order
    )


# Every loop ends when nothing is left, although others take part of each batch.


def test_every_due_task_is_promoted_although_pops_share_the_batches(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue_many([{}] * 12, delay=5)
    microqueue_clock.advance(5)
    other = Queue[Any](
        core_of(queue).collections.tasks,
        settings=QueueSettings(promote_limit=1),
        clock=microqueue_clock,
    )
    before_each_call(queue, Rival(other.pop))

    promoted = Sweeper(queue).promote_due()

    assert tasks_of(queue, status="pending", next_retry_at={"$type": "date"}) == 0
    assert promoted == 12 - tasks_of(queue, status="processing")
    assert 0 < promoted < 12


def test_every_stuck_task_is_reclaimed_although_workers_settle_some(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue_many([{}] * 12)
    held = queue.pop_many(12)
    microqueue_clock.advance(30)
    settling = iter(held)
    other = Queue[Any](core_of(queue).collections.tasks, clock=microqueue_clock)
    # Two of three, in the order of the sweep: a whole batch is gone, and the loop continues.
    before_each_call(queue, Rival(lambda: other.mark_done_many([*islice(settling, 3)][:2])))

    Sweeper(queue).reclaim_stuck()

    assert tasks_of(queue, status="processing") == 0


def test_every_orphan_is_reclaimed_although_some_are_settled(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue_many([{}] * 12)
    held = queue.pop_many(12, worker_id="gone")
    registered(queue, "gone", silent_sec=6)
    other = Queue[Any](core_of(queue).collections.tasks, clock=microqueue_clock)
    settling = iter(held)
    before_each_call(queue, Rival(lambda: other.mark_done_many([*islice(settling, 3)][:2])))

    Sweeper(queue).reclaim_orphaned()

    assert tasks_of(queue, status="processing") == 0
    assert tasks_of(queue, status="pending") + tasks_of(queue, status="done") == 12


def test_every_expired_task_is_buried_although_others_take_some(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue_many([{}] * 12, expires_in=5)
    microqueue_clock.advance(5)
    before_each_call(queue, Rival(lambda: snatch(queue, {"status": "pending"}, {"status": "done"})))

    count = Sweeper(queue).expire_undelivered()

    assert tasks_of(queue, status="pending") == 0
    assert tasks_of(queue, status="failed") == count


def test_every_exhausted_task_is_buried_although_others_take_some(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue_many([{}] * 12, max_attempts=3, delay=5)
    core_of(queue).collections.tasks.update_many({}, {"$set": {"attempts": 3}})
    microqueue_clock.advance(5)
    before_each_call(queue, Rival(lambda: snatch(queue, {"status": "pending"}, {"status": "done"})))

    count = Sweeper(queue).bury_exhausted()

    assert tasks_of(queue, status="pending") == 0
    assert tasks_of(queue, status="failed") == count


@pytest.mark.parametrize("how", ["sweep", "purge"])
def test_every_old_task_is_deleted_although_others_delete_some(
    queue: Queue[Any], microqueue_clock: FakeClock, how: str
) -> None:
    queue.enqueue_many([{}] * 12)
    queue.mark_done_many(queue.pop_many(12))
    microqueue_clock.advance(timedelta(days=8))
    raw = core_of(queue).collections.tasks
    before_each_call(queue, Rival(lambda: raw.find_one_and_delete({"status": "done"})))

    count = Sweeper(queue).purge_finished() if how == "sweep" else queue.purge(status="done")

    assert tasks_of(queue) == 0
    assert 0 < count < 12


def test_purge_ends_although_producers_go_on(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue_many([{}] * 6)
    other = Queue[Any](core_of(queue).collections.tasks, clock=microqueue_clock)

    def produce() -> None:
        microqueue_clock.advance(0.5)
        other.enqueue_many([{}] * 3)

    before_each_call(queue, Rival(produce))
    assert queue.purge(status="pending") >= 6
    assert tasks_of(queue, status="pending") > 0


@pytest.mark.parametrize("place", ["status", "collection"])
def test_every_letter_is_discarded_although_others_discard_a_whole_batch(
    queue: Queue[Any], microqueue_clock: FakeClock, place: str
) -> None:
    apart = settings_with(queue, dead_letters=place)
    fail_all(apart, 12)
    letters = (
        core_of(apart).collections.tasks
        if place == "status"
        else core_of(apart).collections.dead_letters
    )
    last: list[Any] = []

    def before(call: Call) -> None:
        # All of one batch is gone before it is discarded: once, in the midst.
        if call.method == "find" and not last:
            last.append("read")
        elif call.method in WRITES | {"replace_one"} and last == ["read"]:
            last.append("taken")
            for letter in list(letters.find({"status": "failed"}).sort("updated_at", 1).limit(2)):
                letters.delete_one({"_id": letter["_id"]})

    before_each_call(apart, before)
    apart.dead_letters.discard(DeadLetterFilter())

    assert letters.count_documents({"status": "failed"}) == 0


@pytest.mark.parametrize("place", ["status", "collection"])
def test_every_letter_is_replayed_although_others_replay_some(
    queue: Queue[Any], microqueue_clock: FakeClock, place: str
) -> None:
    apart = settings_with(queue, dead_letters=place)
    fail_all(apart, 12)
    other = Queue[Any](
        core_of(apart).collections.tasks, settings=apart.settings, clock=microqueue_clock
    )
    before_each_call(apart, Rival(lambda: other.dead_letters.replay(DeadLetterFilter(), limit=1)))

    apart.dead_letters.replay(DeadLetterFilter())

    assert apart.stats().failed == 0
    assert tasks_of(apart, status="pending") == 12


def test_all_abandoned_replays_are_finished_however_many(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    apart = settings_with(queue, dead_letters="collection")
    fail_all(apart, 120)
    intent = {"at": microqueue_clock.now(), "changes": {"status": "pending", "next_retry_at": None}}
    core_of(apart).collections.dead_letters.update_many({}, {"$set": {"replaying": intent}})
    microqueue_clock.advance(60)

    Sweeper(apart).move_dead_letters()

    assert tasks_of(apart, status="pending") == 120


def test_all_letters_are_moved_out_although_others_move_some(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    fail_all(queue, 120)
    apart = settings_with(queue, dead_letters="collection")
    other = settings_with(queue, dead_letters="collection")
    taken: list[Call] = []

    def before(call: Call) -> None:
        if call.method == "replace_one" and len(taken) < 3:
            taken.append(call)
            Sweeper(other).move_dead_letters()

    before_each_call(apart, before)
    Sweeper(apart).move_dead_letters()

    assert tasks_of(apart) == 0
    assert core_of(apart).collections.dead_letters.count_documents({"status": "failed"}) == 120


# No loop spins on what it cannot change.


def test_letter_that_cannot_come_back_does_not_hold_the_sweep(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    apart = settings_with(queue, dead_letters="collection")
    apart.enqueue({}, task_id="letter", dedupe_key="key")
    apart.mark_failure(popped(apart), "broken")
    apart.enqueue({}, task_id="live", dedupe_key="key")
    # Edited manually: a letter that claims its dedupe key as a live task does.
    intent = {"at": microqueue_clock.now(), "changes": {"status": "pending"}}
    core_of(apart).collections.dead_letters.update_one(
        {"_id": "letter"}, {"$set": {"replaying": intent, "finished_at": None}}
    )
    microqueue_clock.advance(60)
    before_each_call(apart, Rival(lambda: None))

    assert Sweeper(apart).move_dead_letters() == 0
    assert core_of(apart).collections.dead_letters.count_documents({"status": "failed"}) == 1


@pytest.mark.parametrize("batch", [1, 5])
def test_task_whose_attempts_are_a_list_does_not_hold_the_line(
    queue: Queue[Any], batch: int
) -> None:
    queue.enqueue_many([NewTask(payload={}, task_id=name) for name in ("malformed", "good")])
    core_of(queue).collections.tasks.update_one({"_id": "malformed"}, {"$set": {"attempts": [1]}})
    before_each_call(queue, Rival(lambda: None))
    assert [task.id for task in queue.pop_many(batch)] == ["good"]
    malformed = queue.get("malformed")
    assert malformed is not None
    assert malformed.error is not None
    assert malformed.error.code == "invalid_task"


def test_tasks_that_cannot_be_changed_hold_up_no_other(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue_many([{"malformed": True}] * 4)
    queue.pop_many(4)
    microqueue_clock.advance(1)
    queue.enqueue_many([{}] * 4)
    good = queue.pop_many(4)
    tasks = core_of(queue).collections.tasks
    rule = {"$nor": [{"payload.malformed": True}]}
    tasks.database.command("collMod", tasks.name, validator=rule)
    microqueue_clock.advance(30)
    before_each_call(queue, Rival(lambda: None))

    report = Sweeper(queue).run_once()

    assert list(report.errors) == ["reclaim_stuck"]
    assert report.reclaimed == 4
    assert tasks_of(queue, _id={"$in": [task.id for task in good]}, status="pending") == 4


def test_a_worker_that_was_only_slow_does_not_hold_its_sweeper(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue_many([{}] * 300)
    queue.pop_many(4, worker_id="slow")
    other = Queue[Any](core_of(queue).collections.tasks, clock=microqueue_clock)

    def claim_on() -> None:
        microqueue_clock.advance(0.4)
        other.pop_many(3, worker_id="slow")

    before_each_call(queue, Rival(claim_on))
    found = core_of(queue).run(
        workers.reclaim_from("slow", queue.now(), queue.settings, concurrency=1)
    )
    assert found.counts.total() >= 4
    assert tasks_of(queue, status="processing", worker_id="slow") > 0


# The lock


def locks(queue: Queue[Any]) -> Any:
    return core_of(queue).collections.database.microqueue_locks


def test_sweeper_killed_in_mid_sweep_delays_others_by_the_ttl_at_most(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    queue = Queue[Any](microqueue_database, settings=QueueSettings(dead_letters="collection"))
    for name, expires_in in (("a", None), ("b", 3600)):  # A write for each.
        other = Queue[Any](microqueue_database, name, settings=queue.settings)
        other.enqueue_many([{}] * 3, delay=0.001, expires_in=expires_in)
    wait_for(lambda: queue.now() and tasks_of(queue, next_retry_at={"$lte": queue.now()}) == 6)
    process = Process("die", uri=microqueue_server.uri)
    try:
        order = {"database": microqueue_database.name, "action": "sweep", "writes": 1}
        process.tell(order)
        assert process.hear() == "killed"
    finally:
        process.end()
    dead_at = queue.now()
    assert tasks_of(queue, next_retry_at=None) == 3, "it was not killed in mid-sweep"
    (lock,) = locks(queue).find({"_id": {"$regex": "^sweeper:"}})
    # By its own clock, 2.5 seconds: it may be uncertain of the server's time.
    assert lock["expires_at"] <= dead_at.replace(tzinfo=None) + timedelta(seconds=2.5 + 2)

    report = wait_for(lambda: unless_skipped(Sweeper(queue).run_once()))

    assert report.at >= lock["expires_at"].replace(tzinfo=UTC)
    assert report.promoted == 3


def unless_skipped(report: SweepReport) -> SweepReport | None:
    return None if report.skipped else report


def test_by_default_a_dead_sweeper_delays_others_by_ten_seconds_at_most(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    dead = Sweeper(queue)
    core_of(queue).run(dead._sweep.acquire())  # noqa: SLF001 (it dies with the lock)
    microqueue_clock.advance(10)
    assert not Sweeper(queue).run_once().skipped


@pytest.mark.parametrize("given", ["setting", "option"])
def test_lock_is_renewed_while_a_sweep_takes_longer(
    queue: Queue[Any], microqueue_clock: FakeClock, given: str
) -> None:
    settings = {"lock_ttl": 3} if given == "setting" else {}
    options: dict[str, Any] = {"lock_ttl": timedelta(seconds=3)} if given == "option" else {}
    slow = settings_with(queue, **settings)
    slow.enqueue_many([{}] * 12, delay=1)
    microqueue_clock.advance(1)
    other = Queue[Any](
        core_of(queue).collections.tasks, settings=slow.settings, clock=microqueue_clock
    )
    skipped: list[bool] = []

    def act() -> None:
        microqueue_clock.advance(2)  # Each batch takes so long.
        skipped.append(Sweeper(other, **options).run_once().skipped)

    before_each_call(slow, Rival(act))
    report = Sweeper(slow, **options).run_once()

    assert len(skipped) >= 6
    assert all(skipped)
    assert (report.promoted, report.taken_over, report.errors) == (12, False, {})
    assert not Sweeper(other).run_once().skipped, "the lock was not released"


def test_sweeper_that_lost_its_lock_stops_quietly_and_harms_nobody(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue_many([{}] * 12, delay=1)
    microqueue_clock.advance(1)
    heir = Queue[Any](core_of(queue).collections.tasks, clock=microqueue_clock)
    heirs: list[Sweeper] = []

    def act() -> None:
        if not heirs:  # It stalls for longer than its lock lives, and another takes over.
            microqueue_clock.advance(queue.settings.lock_ttl)
            heirs.append(Sweeper(heir))
            assert core_of(heir).run(heirs[0]._sweep.acquire())[1]  # noqa: SLF001 (it is in mid-sweep)

    before_each_call(queue, Rival(act))
    report = Sweeper(queue).run_once()

    assert (report.taken_over, report.ok, report.skipped) == (True, True, False)
    assert report.promoted == 2, "it did not stop"
    (lock,) = locks(queue).find({"_id": {"$regex": "^sweeper:"}})
    assert lock["token"] == heirs[0].sweeper_id, "it freed the lock of another"
    assert heirs[0].run_once().promoted == 10


async def test_async_sweeper_that_lost_its_lock_stops_quietly(
    queue: Queue[Any], microqueue_server: EmbeddedServer, microqueue_clock: FakeClock
) -> None:
    queue.enqueue_many([{}] * 12, delay=1)
    microqueue_clock.advance(1)
    heir = Sweeper(Queue[Any](core_of(queue).collections.tasks, clock=microqueue_clock), lock_ttl=2)

    def act() -> None:
        microqueue_clock.advance(2)
        core_of(queue).run(heir._sweep.acquire())  # noqa: SLF001 (it is in mid-sweep)

    rival = Rival(act)

    client: AsyncMongoClient[Any] = AsyncMongoClient(microqueue_server.uri)
    database = client[core_of(queue).collections.database.name]
    slow = AsyncQueue[Any](database, settings=queue.settings, clock=microqueue_clock)
    before_each_call(slow, rival)
    report = await AsyncSweeper(slow, lock_ttl=2).run_once()
    await client.close()

    assert (report.taken_over, report.promoted, report.errors) == (True, 2, {})


@pytest.mark.parametrize("ttl", [0, -1, "long"])
def test_lock_that_would_not_live_is_rejected(queue: Queue[Any], ttl: Any) -> None:
    with rejecting("lock_ttl"):
        Sweeper(queue, lock_ttl=ttl)
    with rejecting("lock_ttl"):
        QueueSettings(lock_ttl=ttl)


def test_ttl_comes_from_the_environment() -> None:
    settings = QueueSettings.from_environment({"MICROQUEUE_LOCK_TTL": "7s"})
    assert settings.lock_ttl == timedelta(seconds=7)


# What was buried is named


def bury_in_every_way(queue: Queue[Any], clock: FakeClock) -> dict[str, list[Any]]:
    """Leave tasks that a sweep buries with each of its codes; give their ids by code."""
    stuck = ObjectId()
    tasks = [
        NewTask[Any](payload={}, task_id=stuck, max_attempts=1),
        NewTask[Any](payload={}, task_id="killer"),
    ]
    queue.enqueue_many(tasks[1:])
    core_of(queue).collections.tasks.update_one({"_id": "killer"}, {"$set": {"crashes": 2}})
    queue.pop_many(1, worker_id="gone")
    registered(queue, "gone", silent_sec=6)
    queue.enqueue_many(tasks[:1])
    queue.pop_many(1, worker_id="stuck")
    queue.enqueue_many(
        [NewTask[Any](payload={}, task_id=number, expires_in=1) for number in range(12)]
    )
    queue.enqueue({}, task_id="spent", max_attempts=3, delay=1)
    core_of(queue).collections.tasks.update_one({"_id": "spent"}, {"$set": {"attempts": 3}})
    clock.advance(30)
    return {
        "lease_expired": [stuck],
        "poison": ["killer"],
        "expired": list(range(12)),
        "max_attempts": ["spent"],
    }


def named(report: SweepReport) -> dict[str, tuple[int, list[Any]]]:
    return {code: (one.count, list(one.ids)) for code, one in report.buried_tasks.items()}


def test_report_names_what_was_buried_up_to_ten_per_code(
    queue: Queue[Any], microqueue_clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    buried = bury_in_every_way(queue, microqueue_clock)
    with caplog.at_level(logging.INFO, "microqueue.sweeper"):
        report = Sweeper(queue, jobs=["reclaim_orphaned"]).run_once()
        assert named(report) == {"poison": (1, ["killer"])}
        report = Sweeper(queue).run_once()

    found = named(report)
    assert {code: count for code, (count, _) in found.items()} == {
        "lease_expired": 1,
        "expired": 12,
        "max_attempts": 1,
    }
    assert found["lease_expired"][1] == buried["lease_expired"]
    assert found["max_attempts"][1] == buried["max_attempts"]
    assert len(found["expired"][1]) == 10
    assert set(found["expired"][1]) < set(buried["expired"])
    first, second = (one.getMessage() for one in caplog.records)
    assert "poison: killer" in first
    assert str(buried["lease_expired"][0]) in second
    assert "expired: " in second
    assert "2 more" in second


def test_only_what_this_sweep_buried_is_named(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue_many([NewTask(payload={}, task_id=number, expires_in=5) for number in range(4)])
    microqueue_clock.advance(5)
    before_each_call(queue, Rival(lambda: snatch(queue, {"status": "pending"}, {"status": "done"})))

    report = Sweeper(queue).run_once()

    failed = {one["_id"] for one in core_of(queue).collections.tasks.find({"status": "failed"})}
    assert report.expired == len(failed) < 4
    assert set(report.buried_tasks["expired"].ids) == failed


def test_only_what_was_reclaimed_and_buried_is_named(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue_many([NewTask(payload={}, task_id=number, max_attempts=1) for number in range(4)])
    held = iter(queue.pop_many(4)[::2])
    microqueue_clock.advance(30)
    other = Queue[Any](core_of(queue).collections.tasks, clock=microqueue_clock)
    before_each_call(queue, Rival(lambda: other.mark_done(next(held))))

    report = Sweeper(queue, jobs=["reclaim_stuck"]).run_once()

    assert report.errors == {}
    failed = {one["_id"] for one in core_of(queue).collections.tasks.find({"status": "failed"})}
    assert report.buried == len(failed) < 4
    assert set(report.buried_tasks["lease_expired"].ids) == failed


def test_stored_report_has_the_names(queue: Queue[Any], microqueue_clock: FakeClock) -> None:
    bury_in_every_way(queue, microqueue_clock)
    report = Sweeper(queue).run_once()
    last, last_active = Insights(queue).last_sweeps()
    assert last is not None
    assert last.model_dump_json(exclude={"took_sec"}) == report.model_dump_json(
        exclude={"took_sec"}
    )
    assert last_active == last


def test_counts_of_a_job_that_fails_half_way_are_reported(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue_many([{}] * 6, delay=1)
    microqueue_clock.advance(1)
    writes = iter(range(10))

    def before(call: Call) -> None:
        if call.method == "update_many" and next(writes) == 2:
            raise KeyError("a bug")

    before_each_call(queue, before)
    report = Sweeper(queue, jobs=["promote_due"]).run_once()
    assert report.promoted == 4
    assert list(report.errors) == ["promote_due"]


# Helpers


def settings_with(queue: Queue[Any], **changes: Any) -> Queue[Any]:
    settings = QueueSettings(**{**SMALL, **changes})
    found = Queue[Any](core_of(queue).collections.tasks, settings=settings, clock=queue.clock)
    found.ensure_indexes()
    return found


def fail_all(queue: Queue[Any], number: int) -> None:
    """Leave so many dead letters."""
    queue.enqueue_many([{}] * number)
    assert isinstance(queue.clock, FakeClock)
    for task in queue.pop_many(number):
        queue.mark_failure(task, "broken")
        queue.clock.advance(0.001)
