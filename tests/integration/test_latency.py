"""The latency of done tasks, measured by the server."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from microqueue import AsyncQueue, Queue
from microqueue.embedded import EmbeddedServer
from microqueue.insights import AsyncInsights, Insights
from microqueue.operations.stats import percentiles
from microqueue.testing import FakeClock
from tests.rejection import rejecting

WITHIN = 0.065


def work(queue: Queue[Any], clock: FakeClock, *, wait: float, run: float) -> None:
    """Let a task wait and run for so long."""
    queue.enqueue({})
    clock.advance(wait)
    task = queue.pop()
    assert task is not None
    clock.advance(run)
    queue.mark_done(task)


@pytest.fixture
def worked(microqueue_database: Any, microqueue_clock: FakeClock) -> Queue[Any]:
    """Two queues with a past: of twenty tasks of one, one was slow."""
    mail: Queue[Any] = Queue(microqueue_database, "mail", clock=microqueue_clock)
    mail.ensure_indexes()
    work(mail, microqueue_clock, wait=500, run=500)
    microqueue_clock.advance(4000)  # Too long ago.
    for _ in range(19):
        work(mail, microqueue_clock, wait=2, run=0.05)
    work(mail, microqueue_clock, wait=60, run=9)
    work(
        Queue(microqueue_database, "bulk", clock=microqueue_clock), microqueue_clock, wait=0, run=1
    )
    return mail


def test_percentiles_are_those_of_the_tasks_done_lately(worked: Queue[Any]) -> None:
    bulk, mail = Insights(worked).latency()
    assert (bulk.queue, bulk.done, mail.queue, mail.done) == ("bulk", 1, "mail", 20)
    assert mail.wait_p50 == pytest.approx(2, rel=WITHIN)
    assert mail.wait_p95 == pytest.approx(2, rel=WITHIN)
    assert mail.wait_p99 == pytest.approx(60, rel=WITHIN)
    assert mail.run_p50 == pytest.approx(0.05, rel=WITHIN)
    assert mail.run_p99 == pytest.approx(9, rel=WITHIN)
    assert bulk.wait_p50 < 0.002
    (only,) = Insights(worked).latency("bulk", since=timedelta(hours=3))
    assert only.run_p50 == pytest.approx(1, rel=WITHIN)
    assert Insights(worked).latency("mail", since=7200)[0].done == 21
    assert Insights(worked).latency("none") == []
    assert Insights(worked).latency("mail", exact=True)[0] == mail


def test_wait_ends_with_the_first_start_and_the_run_is_the_last(
    microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    queue: Queue[Any] = Queue(microqueue_database, clock=microqueue_clock)
    queue.enqueue({})
    microqueue_clock.advance(4)
    task = queue.pop()
    assert task is not None
    queue.mark_retry(task, delay=30)
    microqueue_clock.advance(30)
    again = queue.pop()
    assert again is not None
    microqueue_clock.advance(8)
    queue.mark_done(again)
    (found,) = Insights(queue).latency()
    assert found.wait_p50 == pytest.approx(4, rel=WITHIN)
    assert found.run_p50 == pytest.approx(8, rel=WITHIN)


def test_the_awaited_view_says_the_same(
    worked: Queue[Any], microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    async def look() -> Any:
        client: Any = AsyncMongoClient(microqueue_server.uri)
        queue: AsyncQueue[Any] = AsyncQueue(client[microqueue_database.name], clock=worked.clock)
        try:
            return await AsyncInsights(queue).latency()
        finally:
            await client.close()

    assert asyncio.run(look()) == Insights(worked).latency()


def test_a_look_reads_only_the_tasks_of_its_period_by_their_index(
    worked: Queue[Any], microqueue_database: Any
) -> None:
    microqueue_database.command("profile", 2)
    Insights(worked).latency(since=30)
    microqueue_database.command("profile", 0)
    (entry,) = microqueue_database["system.profile"].find({"command.aggregate": "tasks"})
    assert "deadline_at" in entry["planSummary"]
    assert entry["docsExamined"] <= 3


@pytest.mark.parametrize("since", ["1h", -1, None])
def test_a_period_that_is_none_is_rejected(worked: Queue[Any], since: Any) -> None:
    with rejecting("since"):
        Insights(worked).latency(since=since)


def test_percentiles_of_classes_are_the_middles_of_theirs() -> None:
    assert percentiles(Counter({0: 1}), [50, 99]) == [0.0011, 0.0011]
    counts = Counter({20: 98, 60: 2})  # 10 ms, and a second.
    assert percentiles(counts, [50, 98, 99]) == [0.0106, 0.0106, 1.0593]
