"""Counts are exact up to a limit and estimates above it: what they cost, and how right they are.

The cost is what the server itself examined, by its own record of each command.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from pymongo import AsyncMongoClient

from microqueue import AsyncQueue, Queue, QueueSettings
from microqueue.dashboard import dashboard, feeds
from microqueue.embedded import EmbeddedServer
from microqueue.insights import AsyncInsights, Insights
from microqueue.metrics import QueueCollector
from microqueue.new_task import NewTask
from microqueue.operations.enqueue import new_document
from microqueue.testing import FakeClock
from tests.integration.dashboard_site import API

LIMIT = 100
NOW = datetime(2026, 5, 1, 12, 0, 30, tzinfo=UTC)
KINDS = ("ready", "delayed", "processing", "overdue", "done", "failed")

Numbers = Mapping[tuple[str, str], int]
"""How many tasks there are, by queue and kind."""


def seed(database: Any, numbers: Numbers, *, letters: str = "tasks", **sizes: int) -> None:
    """Store tasks as they are after a long life, without living it."""
    random.seed(11)
    for (queue, kind), number in numbers.items():
        documents = []
        for n in range(number):
            created_at = NOW - timedelta(hours=1, seconds=n % 1000)
            document = new_document(
                NewTask.model_construct(payload={}, priority=n % 3),
                queue=queue,
                payload={"filler": "x" * sizes.get(kind, 50)},
                settings=QueueSettings(),
                now=created_at,
                position=n,
            )
            ended = NOW - timedelta(seconds=n % 3600)
            if kind == "delayed":
                due = NOW + timedelta(minutes=1, seconds=n)
                document |= {"next_retry_at": due, "deadline_at": due}
            if kind in {"processing", "overdue"}:
                until = NOW + timedelta(minutes=1 if kind == "processing" else -1, seconds=n % 50)
                document |= {"status": "processing", "deadline_at": until, "lease_token": "t"}
                document |= {"started_at": created_at, "worker_id": "w"}
            if kind == "done":
                document |= {"status": "done", "finished_at": ended, "updated_at": ended}
                document |= {"started_at": created_at, "deadline_at": ended}
            if kind == "failed":
                document |= {"status": "failed", "finished_at": ended, "updated_at": ended}
                document |= {"error": {"message": "no", "code": f"c{n % 2}", "at": ended}}
            documents.append(document)
        place = database[letters] if kind == "failed" else database.tasks
        for start in range(0, number, 10_000):
            place.insert_many(documents[start : start + 10_000], ordered=False)


def queue_of(database: Any, name: str = "mail", **settings: Any) -> Queue[Any]:
    given = QueueSettings(**{"count_limit": LIMIT, "retention": None, **settings})
    queue: Queue[Any] = Queue(database, name, settings=given, clock=FakeClock(NOW))
    queue.ensure_indexes()
    return queue


def examined(database: Any, look: Callable[[], Any]) -> tuple[int, list[str]]:
    """Add up the keys and documents that the server examined for some calls, with their plans.

    The documents of a sample are not among them: the server does not count what it picks.
    """
    database.command("profile", 2)
    try:
        look()
    finally:
        database.command("profile", 0)
    place = {"$regex": rf"^{database.name}\.tasks"}
    recorded = list(database["system.profile"].find({"ns": place}))
    database.drop_collection("system.profile")
    assert recorded, "the profiler saw nothing"
    plans = [str(entry.get("planSummary", "")) for entry in recorded]
    return max(
        sum(entry.get(name, 0) for entry in recorded) for name in ("keysExamined", "docsExamined")
    ), plans


LOOKS: dict[str, Callable[[Queue[Any]], Any]] = {
    "queue.stats": lambda queue: queue.stats(),
    "dead_letters.stats": lambda queue: queue.dead_letters.stats(),
    "insights.stats": lambda queue: Insights(queue).stats(),
    "insights.overview": lambda queue: Insights(queue).overview(),
    "insights.latency": lambda queue: Insights(queue).latency("mail"),
    "insights.by_name": lambda queue: Insights(queue).by_name(),
    "insights.by_name of a queue": lambda queue: Insights(queue).by_name("mail"),
}


@pytest.mark.parametrize("dead_letters", ["status", "collection"])
def test_cost_does_not_grow_with_the_number_of_tasks(
    microqueue_database: Any, dead_letters: str
) -> None:
    queue = queue_of(microqueue_database, dead_letters=dead_letters)
    letters = "tasks" if dead_letters == "status" else "tasks_dlq"
    small = {("mail", kind): 300 for kind in KINDS} | {("zeta", "ready"): 7, ("zeta", "done"): 5}
    seed(microqueue_database, small, letters=letters)
    before = {
        name: examined(microqueue_database, partial(look, queue)) for name, look in LOOKS.items()
    }
    seed(microqueue_database, {("mail", kind): 4700 for kind in KINDS}, letters=letters)
    for name, look in LOOKS.items():
        keys, plans = examined(microqueue_database, partial(look, queue))
        assert keys <= 1.2 * before[name][0] + 20, name
        assert keys <= 20 * LIMIT, name
        assert "COLLSCAN" not in plans, (name, plans)


def test_everything_is_counted_on_request(microqueue_database: Any) -> None:
    queue = queue_of(microqueue_database)
    numbers = dict(zip((("mail", kind) for kind in KINDS), range(300, 900, 100), strict=True))
    seed(microqueue_database, {**numbers, ("zeta", "done"): 350})
    expected = {kind: number for (_, kind), number in numbers.items()}
    expected["processing"] += expected["overdue"]
    insights = Insights(queue)
    for stats in (queue.stats(exact=True), insights.stats(exact=True)[0]):
        assert {kind: getattr(stats, kind) for kind in KINDS} == expected
        assert stats.exact
    overview = insights.overview()
    assert "done_last_hour" in overview.queues[0].estimated
    overview = insights.overview(exact=True)
    mail, zeta = overview.queues
    assert (mail.queue, mail.estimated, zeta.estimated) == ("mail", (), ())
    assert (mail.done_last_hour, mail.failed_last_hour) == (expected["done"], expected["failed"])
    assert zeta.done_last_hour == 350
    assert not [*overview.minutes.done_estimated, *overview.minutes.failed_estimated]
    assert sum(one.done for one in insights.latency(exact=True)) == expected["done"] + 350
    assert not any(one.estimated for one in insights.latency(exact=True))


def test_queue_that_is_small_is_exact_beside_a_large_one(microqueue_database: Any) -> None:
    queue = queue_of(microqueue_database)
    large = {("mail", kind): 2000 for kind in KINDS}
    seed(microqueue_database, {**large, **{("zeta", kind): 3 for kind in KINDS}})
    mail, zeta = Insights(queue).stats()
    assert set(mail.estimated) == {*KINDS, "oldest_ready_age_sec"}
    assert zeta.exact
    assert {kind: getattr(zeta, kind) for kind in KINDS} == {
        **dict.fromkeys(KINDS, 3),
        "processing": 6,
    }
    assert queue_of(microqueue_database, "zeta").stats() == zeta
    overview = Insights(queue).overview()
    assert not set(KINDS) & set(overview.queues[1].estimated)
    assert set(KINDS) - {"done"} <= set(overview.queues[0].estimated)


@pytest.fixture(params=["equal", "segregated", "mixed"])
def sizes(request: pytest.FixtureRequest) -> str:
    shape: str = request.param
    return shape


def test_estimate_is_near_the_truth_whatever_the_sizes(
    microqueue_database: Any, sizes: str
) -> None:
    """WiredTiger picks a page first, so that documents of crowded pages are rarely picked."""
    queue = queue_of(microqueue_database, count_limit=1000)
    numbers = {("mail", "ready"): 30_000, ("mail", "done"): 30_000, ("mail", "delayed"): 900}
    if sizes == "mixed":
        for _ in range(60):
            seed_part = {("mail", "ready"): 500, ("mail", "done"): 500, ("mail", "delayed"): 15}
            seed(microqueue_database, seed_part, ready=2000)
    else:
        seed(microqueue_database, numbers, ready=2000 if sizes == "segregated" else 50)
    stats = queue.stats()
    assert set(stats.estimated) == {"ready", "done", "oldest_ready_age_sec"}
    assert stats.delayed == 900
    # A thousand picks: six standard deviations are a tenth of all.
    assert stats.ready == pytest.approx(30_000, rel=0.25)
    assert stats.done == pytest.approx(30_000, rel=0.25)
    assert stats.ready + stats.done == pytest.approx(60_000, abs=2)


def test_one_large_count_alone_is_right_to_the_task(microqueue_database: Any) -> None:
    """The collection knows how many there are, and all others were counted."""
    queue = queue_of(microqueue_database)
    seed(microqueue_database, {("mail", "ready"): 5000, ("mail", "done"): 90, ("a", "failed"): 20})
    (_, stats) = Insights(queue).stats()
    assert (stats.ready, stats.done) == (5000, 90)
    assert set(stats.estimated) == {"ready", "oldest_ready_age_sec"}


def test_oldest_task_of_a_long_line_is_looked_for_in_each_priority(
    microqueue_database: Any,
) -> None:
    queue = queue_of(microqueue_database)
    seed(microqueue_database, {("mail", "ready"): 2000})
    oldest = NOW - timedelta(hours=5)
    microqueue_database.tasks.update_one(
        {"priority": 0, "position": {"$lt": 20}}, {"$set": {"updated_at": oldest}}
    )
    assert queue.stats().oldest_ready_age_sec == 5 * 3600


def test_minutes_are_exact_where_they_are_few_and_marked_where_not(
    microqueue_database: Any,
) -> None:
    queue = queue_of(microqueue_database, count_limit=600)
    seed(microqueue_database, {("mail", "done"): 3600})  # 60 a minute.
    busy = microqueue_database.tasks.find({}, limit=3000)
    recently = NOW - timedelta(minutes=5)
    copies = [
        {**one, "_id": n, "finished_at": recently, "deadline_at": recently}
        for n, one in enumerate(busy)
    ]
    microqueue_database.tasks.insert_many(copies)
    microqueue_database.tasks.delete_many({"finished_at": {"$lt": NOW - timedelta(minutes=10)}})
    minutes = Insights(queue).overview().minutes
    everything = Insights(queue).overview(exact=True).minutes
    assert 54 in minutes.done_estimated
    assert minutes.done["mail"][54] == pytest.approx(3060, rel=0.5)
    quiet = [n for n in range(60) if n not in minutes.done_estimated]
    assert 49 not in quiet
    assert [minutes.done["mail"][n] for n in quiet] == [everything.done["mail"][n] for n in quiet]
    assert Counter(everything.done["mail"])[0] == 49


def test_queues_of_dead_letters_alone_are_found_by_a_key_each(microqueue_database: Any) -> None:
    queue = queue_of(microqueue_database, dead_letters="collection")
    numbers = {("mail", "ready"): 1, ("a", "failed"): 400, ("z", "failed"): 2}
    seed(microqueue_database, numbers, letters="tasks_dlq")
    assert [one.queue for one in Insights(queue).overview().queues] == ["a", "mail", "z"]
    a, mail, z = Insights(queue).stats()
    assert (z.failed, z.exact, mail.failed) == (2, True, 0)
    assert (a.failed, a.estimated) == (400, ("failed",))


def test_letter_that_moves_is_counted_once(microqueue_database: Any) -> None:
    queue = queue_of(microqueue_database, dead_letters="collection")
    seed(microqueue_database, {("mail", "failed"): 9})
    seed(microqueue_database, {("mail", "failed"): 30}, letters="tasks_dlq")
    for letter in microqueue_database.tasks.find({}, limit=4):
        microqueue_database.tasks_dlq.insert_one(letter)
    assert (queue.stats().failed, queue.stats().exact) == (39, True)
    assert queue.stats(exact=True).failed == 39
    assert queue.dead_letters.stats().total == 39
    assert Insights(queue).overview().queues[0].failed == 39


def test_many_letters_that_have_not_moved_yet_are_estimated(microqueue_database: Any) -> None:
    queue = queue_of(microqueue_database, dead_letters="collection")
    seed(microqueue_database, {("mail", "failed"): 3 * LIMIT})
    seed(microqueue_database, {("mail", "failed"): 30}, letters="tasks_dlq")
    found = queue.stats()
    assert found.failed == pytest.approx(330, rel=0.2)
    assert found.estimated == ("failed",)
    assert queue.stats(exact=True).failed == 330


@pytest.fixture
async def async_queue(microqueue_server: EmbeddedServer, microqueue_database: Any) -> Any:
    queue_of(microqueue_database)
    async with AsyncMongoClient[Any](microqueue_server.uri) as client:
        settings = QueueSettings(count_limit=LIMIT)
        database = client[microqueue_database.name]
        yield AsyncQueue(database, "mail", settings=settings, clock=FakeClock(NOW))


async def test_async_insights_take_the_same_options(
    async_queue: AsyncQueue[Any], microqueue_database: Any
) -> None:
    seed(microqueue_database, {("mail", "done"): 300})
    insights = AsyncInsights(async_queue)
    assert (await insights.stats())[0].estimated == ("done",)
    assert (await insights.stats(exact=True))[0].estimated == ()
    assert "done_last_hour" in (await insights.overview()).queues[0].estimated
    assert (await insights.overview(exact=True)).queues[0].done_last_hour == 300
    assert (await insights.latency())[0].estimated
    assert (await insights.latency(exact=True))[0].done == 300


def test_metrics_say_which_depths_are_estimates(microqueue_database: Any) -> None:
    queue = queue_of(microqueue_database)
    seed(microqueue_database, {("mail", "ready"): 300, ("mail", "done"): 3})
    labels = {"queue": "mail", "status": "ready"}
    for exact in (False, True):
        registry = CollectorRegistry()
        registry.register(QueueCollector(queue, exact=exact))
        read = partial(registry.get_sample_value, "microqueue_queue_depth_estimated")
        assert read(labels) == (0 if exact else 1)
        assert read({"queue": "mail", "status": "done"}) == 0
        assert read({"queue": "mail", "status": "overdue"}) == 0
        assert registry.get_sample_value("microqueue_queue_depth", labels) == 300


async def test_dashboard_marks_estimates_and_counts_everything_on_request(
    microqueue_database: Any,
) -> None:
    queue = queue_of(microqueue_database)
    numbers = {("mail", "ready"): 300, ("mail", "processing"): 200, ("zeta", "ready"): 4}
    seed(microqueue_database, numbers)
    transport = httpx.ASGITransport(dashboard(queue))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def get(path: str, **query: Any) -> Any:
            return (await client.get(f"{API}{path}", params=query)).json()

        for path in ("/queues", "/overview"):
            mail, zeta = (await get(path))["queues"]
            assert mail["estimated"] == ["ready", "processing", "oldest_ready_age_sec"]
            assert zeta["estimated"] == []
            mail, zeta = (await get(path, exact=True))["queues"]
            assert (mail["estimated"], mail["ready"], mail["processing"]) == ([], 300, 200)
        assert (await get("/running"))["estimated"] is True
        assert (await get("/running", queue="zeta"))["estimated"] is False
        assert (await client.get(f"{API}/queues?exact=maybe")).status_code == 422


def test_estimates_that_differ_by_chance_are_no_news() -> None:
    assert feeds._coarse(1_234_567) == feeds._coarse(1_190_000) == 1_000_000  # noqa: SLF001 (a pure function)
    assert feeds._coarse(7) == 7  # noqa: SLF001 (as above)
    assert feeds._coarse(0) == 0  # noqa: SLF001 (as above)
