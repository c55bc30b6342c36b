"""The view by name: what it counts and measures, exactly and by estimate."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from microqueue import AsyncQueue, InvalidArgument, Queue, QueueSettings
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from microqueue.insights import AsyncInsights, Insights, NameStats
from microqueue.testing import FakeClock, memory_queue
from tests.integration.queues import fill, popped, profiled

NOW = datetime(2026, 5, 1, 12, 0, 30, tzinfo=UTC)
LIMIT = 100
COUNTS = ("waiting", "running", "done", "failed")


def queue_of(database: Any, clock: FakeClock, name: str = "mail", **settings: Any) -> Queue[Any]:
    given = QueueSettings(**{"count_limit": LIMIT, "retention": None, **settings})
    return Queue(database, name, settings=given, clock=clock)


def counts(row: NameStats) -> tuple[int, ...]:
    return tuple(getattr(row, name) for name in COUNTS)


def live(queue: Queue[Any], other: Queue[Any], clock: FakeClock) -> None:
    """Let tasks of three names live, in two queues."""
    queue.enqueue({}, name="pay", priority=9)
    queue.mark_failure(popped(queue), "no")  # Long ago: not in the period.
    clock.advance(7200)
    for _ in range(3):
        queue.enqueue({}, name="pay", priority=9)
        clock.advance(2)
        task = popped(queue)
        clock.advance(5)
        queue.mark_done(task)
    queue.enqueue({}, name="pay", priority=9)
    queue.mark_failure(popped(queue), "no")
    other.enqueue({}, name="pay")
    queue.enqueue({}, name="ship", priority=9)
    popped(queue)
    queue.enqueue({}, name="ship", delay=60)
    queue.enqueue({}, name="ship", expires_in=3600)
    queue.enqueue({})


@pytest.mark.parametrize("dead_letters", ["status", "collection", "memory"])
def test_tasks_are_counted_and_measured_by_name(
    microqueue_database: Any, dead_letters: str
) -> None:
    clock = FakeClock(NOW)
    if dead_letters == "memory":
        queue: Queue[Any] = memory_queue("mail", clock=clock)
        other: Queue[Any] = Queue(core_of(queue).collections.tasks, "other", clock=clock)
    else:
        queue = queue_of(microqueue_database, clock, dead_letters=dead_letters)
        other = queue_of(microqueue_database, clock, "other", dead_letters=dead_letters)
    live(queue, other, clock)
    found = Insights(queue).by_name()
    pay, ship, nameless = found.names
    assert (pay.name, ship.name, nameless.name) == ("pay", "ship", None)
    assert counts(pay) == (1, 0, 3, 1)
    assert counts(ship) == (2, 1, 0, 0)
    assert counts(nameless) == (1, 0, 0, 0)
    assert (pay.failure_rate, ship.failure_rate) == (0.25, None)
    for measured, seconds in ((pay.wait_p50, 2), (pay.wait_p95, 2), (pay.run_p95, 5)):
        assert measured == pytest.approx(seconds, rel=0.07)
    assert (ship.wait_p50, ship.run_p95) == (None, None)
    assert not any(one.estimated for one in found.names)
    assert (found.total, found.at, found.since) == (
        3,
        clock.now(),
        clock.now() - timedelta(hours=1),
    )
    (alone,) = Insights(queue).by_name("other").names
    assert (alone.name, counts(alone)) == ("pay", (1, 0, 0, 0))
    earlier = Insights(queue).by_name(since=3 * 3600, limit=1)
    assert (counts(earlier.names[0]), earlier.total) == ((1, 0, 3, 2), 3)


def test_name_that_earlier_versions_stored_in_a_header_counts(microqueue_database: Any) -> None:
    queue = queue_of(microqueue_database, FakeClock(NOW))
    queue.enqueue_many([{}, {}], headers={"task": "pay"})
    queue.enqueue({}, name="pay")
    queue.enqueue({}, headers={"task": 7})
    core_of(queue).collections.tasks.update_many({"headers.task": "pay"}, {"$unset": {"name": ""}})
    found = {row.name: row.waiting for row in Insights(queue).by_name().names}
    assert found == {"pay": 3, None: 1}


@pytest.mark.parametrize("argument", [{"limit": 0}, {"since": -1}, {"queue": {"$ne": None}}])
def test_bad_argument_is_rejected(microqueue_database: Any, argument: dict[str, Any]) -> None:
    queue = queue_of(microqueue_database, FakeClock(NOW))
    with pytest.raises(InvalidArgument):
        Insights(queue).by_name(**argument)


def seed_large(database: Any, *, dead_letters: str) -> None:
    """Store 20,000 tasks of each status; a tenth of them are named ``rare``, others ``usual``."""
    name = {"$cond": [{"$eq": [{"$mod": ["$n", 10]}, 0]}, "rare", "usual"]}
    base = {"queue": "mail", "name": name, "payload": {"filler": "x" * 50}, "priority": 0,
            "position": "$n", "attempts": 0, "next_retry_at": None, "finished_at": None,
            "created_at": NOW - timedelta(seconds=600), "updated_at": NOW}  # fmt: skip
    # Half of what ended did so before the last hour.
    ended = {"$cond": [{"$eq": [{"$mod": [{"$floor": {"$divide": ["$n", 10]}}, 2]}, 0]},
                       NOW - timedelta(minutes=5), NOW - timedelta(hours=5)]}  # fmt: skip
    done = {"status": "done", "finished_at": ended, "deadline_at": ended, "updated_at": ended,
            "started_at": NOW - timedelta(seconds=590)}  # fmt: skip
    held = {"status": "processing", "deadline_at": NOW + timedelta(minutes=1), "lease_token": "t"}
    failed = base | {"status": "failed", "finished_at": ended, "updated_at": ended}
    kinds = [base | {"status": "pending"}, base | held, base | done]
    if dead_letters == "status":
        fill(database.tasks, *kinds, failed, each=20_000)
    else:
        fill(database.tasks, *kinds, each=20_000)
        fill(database.tasks_dlq, failed, each=20_000)


@pytest.mark.parametrize("dead_letters", ["status", "collection"])
def test_large_counts_are_estimates_at_a_bounded_cost(
    microqueue_database: Any, dead_letters: str
) -> None:
    seed_large(microqueue_database, dead_letters=dead_letters)
    queue = queue_of(microqueue_database, FakeClock(NOW), dead_letters=dead_letters)
    queue.ensure_indexes()
    insights = Insights(queue)
    with profiled(microqueue_database, "tasks", "tasks_dlq") as recorded:
        found = insights.by_name()
    assert "COLLSCAN" not in {str(entry.get("planSummary")) for entry in recorded}
    assert sum(entry.get("docsExamined", 0) for entry in recorded) <= 6 * (LIMIT + 1)
    assert sum(entry.get("keysExamined", 0) for entry in recorded) <= 7 * (LIMIT + 1)
    usual, rare = found.names
    assert (usual.name, rare.name) == ("usual", "rare")
    assert set(usual.estimated) >= {*COUNTS, "failure_rate", "wait_p50", "run_p95"}
    truth = {"waiting": 20_000, "running": 20_000, "done": 10_000, "failed": 10_000}
    for name, number in truth.items():
        # A sample of some 3,000: the error is three standard deviations at most, and some.
        assert getattr(usual, name) == pytest.approx(number * 0.9, rel=0.25)
        assert getattr(rare, name) == pytest.approx(number * 0.1, rel=0.7)
    assert usual.failure_rate == pytest.approx(0.5, abs=0.15)
    assert usual.wait_p50 == pytest.approx(10, rel=0.07)
    assert found.total == 2
    # The sample is reused: the next view reads none.
    with profiled(microqueue_database, "tasks", "tasks_dlq") as recorded:
        assert insights.by_name().names == found.names
    assert not [one for one in recorded if "$sample" in str(one["command"].get("pipeline"))]
    exact = {row.name: row for row in insights.by_name(exact=True).names}
    assert counts(exact["usual"]) == (18_000, 18_000, 9_000, 9_000)
    assert counts(exact["rare"]) == (2_000, 2_000, 1_000, 1_000)
    assert not exact["rare"].estimated


def test_exact_count_beside_an_estimate_is_kept(microqueue_database: Any) -> None:
    queue = queue_of(microqueue_database, FakeClock(NOW))
    for start in range(0, 5000, 1000):
        queue.enqueue_many([{"n": n} for n in range(start, start + 1000)], name="pay")
    queue.enqueue_many([{}] * 7, name="ship", delay=60)
    found = {row.name: row for row in Insights(queue).by_name().names}
    assert found["pay"].waiting == pytest.approx(5000, rel=0.2)
    assert found["ship"].waiting == 7
    assert found["pay"].estimated == ("waiting",)


async def test_async_insights_count_the_same(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    client: AsyncMongoClient[Any] = AsyncMongoClient(microqueue_server.uri, tz_aware=True)
    async with client:
        queue: AsyncQueue[Any] = AsyncQueue(
            client[microqueue_database.name], "mail", clock=FakeClock(NOW)
        )
        await queue.enqueue_many([{}, {}], name="pay")
        (pay,) = (await AsyncInsights(queue).by_name("mail")).names
        assert (pay.name, pay.waiting) == ("pay", 2)
