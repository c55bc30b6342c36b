"""The stream of events, as a viewer hears it: by change stream, and by polling."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient

from microqueue import AsyncQueue, BackoffPolicy, DeadLetterFilter, Queue, QueueSettings, Sweeper
from microqueue.core import core_of
from microqueue.dashboard import events, feeds
from microqueue.dashboard.access import QueueAccess, ReadCache
from microqueue.dashboard.events import EventHub, Message, Subscriber
from microqueue.dashboard.feeds import ChangeFeed
from microqueue.dashboard.options import DashboardOptions
from microqueue.dashboard.server import DashboardServer
from microqueue.drivers.driver import awaited
from microqueue.embedded import EmbeddedServer
from microqueue.operations.workers import beat, leave
from microqueue.reports import WorkerInfo
from tests.integration.dashboard_listener import Listener, serving
from tests.integration.queues import popped
from tests.waiting import wait_for, wait_until_over

pytestmark = pytest.mark.usefixtures("patient_streams")

SETTINGS = QueueSettings(
    visibility_timeout=60, max_attempts=2, backoff=BackoffPolicy(base_sec=30, jitter="none")
)


@pytest.fixture
def queue(microqueue_database: Any) -> Queue[Any]:
    queue: Queue[Any] = Queue(microqueue_database, settings=SETTINGS)
    queue.ensure_indexes()
    return queue


@pytest.fixture(params=["change_stream", "polling"])
def live(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind: str = request.param
    if kind == "polling":

        async def refuse(_feed: Any) -> bool:
            return False

        monkeypatch.setattr(feeds.ChangeFeed, "open", refuse)
    return kind


def test_viewer_hears_of_schedules(queue: Queue[Any], live: str) -> None:
    with serving(queue) as (address, _), Listener(address) as viewer:
        queue.schedules.put("often", every=3600)
        viewer.wait_for_types("schedule.changed")
        (changed,) = viewer.of("schedule.changed")
        assert changed["schedules"] == [{"queue": "default", "name": "often"}]
        assert changed["queues"] == ["default"]
        queue.schedules.trigger("often")
        viewer.wait_for_types("schedule.fired")
        queue.schedules.remove("often")
        viewer.wait_for_types("schedule.removed")
        assert viewer.of("hello")[0]["live"] == live


def test_viewer_hears_the_life_of_tasks(queue: Queue[Any], live: str) -> None:
    with serving(queue) as (address, _), Listener(address) as viewer:
        (hello,) = viewer.of("hello")
        assert (hello["resumed"], hello["live"]) == (False, live)
        queue.enqueue({}, task_id="one")
        viewer.wait_for_types("task.enqueued")
        (enqueued,) = viewer.of("task.enqueued")
        assert enqueued["tasks"] == [{"id": "one", "queue": "default"}]
        assert (enqueued["count"], enqueued["queues"]) == (1, ["default"])
        task = popped(queue)
        viewer.wait_for_types("task.started")
        assert viewer.of("task.started")[0]["tasks"] == [{"id": "one", "queue": "default"}]
        queue.touch(task, extend=600)
        viewer.wait_for_types("task.changed")
        queue.release(task)
        viewer.wait_for_types("task.released")
        task = popped(queue)
        viewer.wait_for(lambda: viewer.count("task.started") == 2)
        queue.mark_retry(task, "no", delay=0)
        viewer.wait_for_types("task.retried")
        task = popped(queue)
        viewer.wait_for(lambda: viewer.count("task.started") == 3)
        queue.mark_retry(task, "no")
        viewer.wait_for_types("task.failed")
        queue.enqueue({}, task_id="two")
        task = popped(queue)
        queue.mark_done(task)
        viewer.wait_for_types("task.done")
        assert viewer.of("task.done")[0]["tasks"] == [{"id": "two", "queue": "default"}]
        assert "refresh" in viewer.types


def test_viewer_hears_what_the_sweeper_did(queue: Queue[Any], live: str) -> None:
    with serving(queue) as (address, _), Listener(address) as viewer:
        queue.enqueue({})
        queue.enqueue({}, max_attempts=1)
        tasks = [popped(queue), popped(queue)]
        viewer.wait_for(lambda: viewer.count("task.started") >= 2)
        for task in tasks:
            queue.touch(task, extend=0.001)
        wait_until_over(queue)
        sweeper = Sweeper(queue)
        sweeper.run_once()
        viewer.wait_for_types("sweep.finished", "queue.requeue", "queue.move_to_dlq")
        viewer.wait_for_types("task.reclaimed", "task.failed")
        (requeue,) = viewer.of("queue.requeue")
        assert (requeue["count"], requeue["dlq_count"]) == (1, 1)
        assert sweeper.sweeper_id in requeue["triggered_by"]
        assert viewer.of("queue.move_to_dlq")[0]["count"] == 1
        assert viewer.of("sweep.finished")[0]["report"]["reclaimed"] == 1


def test_letter_that_moves_to_a_collection_of_its_own_is_told_as_failed_alone(
    microqueue_database: Any, live: str
) -> None:
    settings = SETTINGS.model_copy(update={"dead_letters": "collection"})
    queue: Queue[Any] = Queue(microqueue_database, settings=settings)
    queue.ensure_indexes()

    def told(viewer: Listener) -> dict[str, int]:
        kinds = {kind for kind in viewer.types if kind.startswith("task.")}
        return {kind: viewer.count(kind) for kind in kinds - {"task.changed"}}

    with serving(queue) as (address, _), Listener(address) as viewer:
        queue.enqueue({}, task_id="one")
        task = popped(queue)
        viewer.wait_for_types("task.enqueued", "task.started")
        queue.mark_failure(task, "no")
        viewer.wait_for_types("task.failed")
        assert viewer.of("task.failed")[0]["queues"] == ["default"]
        queue.enqueue({}, task_id="two")  # Its event comes after all earlier ones.
        two = {"id": "two", "queue": "default"}
        viewer.wait_for(lambda: any(two in one["tasks"] for one in viewer.of("task.enqueued")))
        expected = {"task.enqueued": 2, "task.started": 1, "task.failed": 1}
        assert told(viewer) == expected
        if live == "change_stream":  # A look cannot tell a replay.
            assert queue.dead_letters.replay(["one"]).replayed == 1
            viewer.wait_for_types("task.replayed")
            assert told(viewer) == {**expected, "task.replayed": 1}


def test_viewer_hears_of_every_sweep_that_moved_something(
    queue: Queue[Any], live: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though another sweep, with nothing to do, has stored its report before that is read."""
    Sweeper(queue).run_once()
    swept = threading.Event()
    feed = feeds.ChangeFeed if live == "change_stream" else feeds.PollFeed
    real: Any = feed.read

    async def read_later(one: Any, for_sec: float) -> Any:
        await asyncio.to_thread(swept.wait)
        return await real(one, for_sec)

    monkeypatch.setattr(feed, "read", read_later)
    with serving(queue) as (address, _), Listener(address) as viewer:
        queue.enqueue({}, max_attempts=1)
        queue.touch(popped(queue), extend=0.001)
        wait_until_over(queue)
        first, second = Sweeper(queue), Sweeper(queue)
        assert first.run_once().buried == 1
        assert not second.run_once().active
        swept.set()
        viewer.wait_for(lambda: len(viewer.of("sweep.finished")) == 2)
        (requeue,) = viewer.of("queue.requeue")
        assert (requeue["count"], requeue["dlq_count"]) == (0, 1)
        assert first.sweeper_id in requeue["triggered_by"]
        assert [one["count"] for one in viewer.of("queue.move_to_dlq")] == [1]
        reports = [one["report"] for one in viewer.of("sweep.finished")]
        assert [one["sweeper_id"] for one in reports] == [first.sweeper_id, second.sweeper_id]
        assert all(one["at"].endswith("Z") for one in reports)


def test_viewer_hears_of_workers_and_pauses(queue: Queue[Any], live: str) -> None:
    def register(name: str, *, heartbeat_sec: float) -> None:
        now = queue.now()
        info = WorkerInfo(
            id=name, collection="tasks", host="h", pid=1, queues=["default"], concurrency=1,
            running=0, handled=0, started_at=now, heartbeat_at=now, heartbeat_sec=heartbeat_sec,
        )  # fmt: skip
        core_of(queue).run(beat(info))

    with serving(queue) as (address, _), Listener(address) as viewer:
        register("stays", heartbeat_sec=60)
        register("dies", heartbeat_sec=0.1)
        viewer.wait_for(lambda: viewer.count("worker.started") == 2)
        core_of(queue).run(leave("stays", "tasks"))
        viewer.wait_for_types("worker.left")
        assert viewer.of("worker.left")[0]["workers"] == ["stays"]
        # Three heartbeats of a tenth of a second are missed, and seen to be.

        def is_gone() -> bool:
            Sweeper(queue).run_once()
            return bool(viewer.of("worker.gone"))

        viewer.wait_for(is_gone)
        assert viewer.of("worker.gone")[0]["workers"] == ["dies"]
        queue.pause()
        viewer.wait_for_types("queue.paused")
        queue.resume()
        viewer.wait_for_types("queue.resumed")
        assert viewer.of("queue.resumed")[0]["queues"] == ["default"]


def test_viewer_who_returns_hears_what_was_missed(queue: Queue[Any], live: str) -> None:
    with serving(queue) as (address, context):
        with Listener(address) as viewer:
            queue.enqueue({}, task_id="seen")
            viewer.wait_for_types("task.enqueued", "refresh")
        last_id = viewer.last_id
        queue.enqueue({}, task_id="missed")
        wait_for(lambda: len(context.events._remembered) >= 4)  # noqa: SLF001 (no one listens)
        with Listener(address, last_id=last_id) as again:
            again.wait_for_types("task.enqueued")
            assert again.of("hello")[0]["resumed"] is True
            assert [one["id"] for data in again.of("task.enqueued") for one in data["tasks"]] == [
                "missed"
            ]


def test_viewer_may_name_the_place_in_the_address(queue: Queue[Any]) -> None:
    """A page that opens a new connection cannot set a header; one that it keeps is newer."""
    with serving(queue) as (address, context), Listener(address) as viewer:
        for name in ("one", "two"):
            queue.enqueue({}, task_id=name)
            viewer.wait_for(lambda name=name: name in tasks_told(viewer))  # type: ignore[misc]  # A lambda has no types.
        first, second = (
            context.events._id(one.number)  # noqa: SLF001 (to name a place)
            for one in list(context.events._remembered)  # noqa: SLF001 (as above)
            if one.type == "task.enqueued"
        )
        for given, header in ((first, None), ("x-1", first)):
            with Listener(address, last_id=header, query=f"last_event_id={given}") as again:
                again.wait_for(lambda again=again: tasks_told(again) == ["two"])  # type: ignore[misc]  # A lambda has no types.
                assert again.of("hello")[0]["resumed"] is True
        assert first != second


def tasks_told(viewer: Listener) -> list[Any]:
    return [one["id"] for data in viewer.of("task.enqueued") for one in data["tasks"]]


@pytest.mark.parametrize(
    "last_id", ["", "x", "00000000-5", "-", "00000000-99999999999999999999999"]
)
def test_viewer_with_an_unknown_place_reads_everything_again(
    queue: Queue[Any], last_id: str
) -> None:
    with serving(queue) as (address, context):
        epoch = context.events._epoch  # noqa: SLF001 (to name a place in it)
        for name in (last_id, f"{epoch}-7", f"{epoch}-{'9' * 50}", f"{epoch}-²"):
            if not name.isascii():
                continue
            with Listener(address, last_id=name) as viewer:
                assert viewer.of("hello")[0]["resumed"] is False


def test_burst_comes_in_few_messages(queue: Queue[Any], live: str) -> None:
    with serving(queue) as (address, _), Listener(address) as viewer:
        started = time.monotonic()
        many = 150  # A look at what is new by polling is bounded at 200.
        queue.enqueue_many([{"n": n} for n in range(many)])
        viewer.wait_for(lambda: viewer.count("task.enqueued") >= many)
        refreshes = len(viewer.of("refresh"))  # Before the time is read: more may come then.
        elapsed = time.monotonic() - started
        assert refreshes <= elapsed / events.BATCH_SEC + 2
        assert all(len(data["tasks"]) <= events.MAX_TASKS for data in viewer.of("task.enqueued"))


@pytest.mark.parametrize("action", ["replay", "discard"])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_viewer_without_a_stream_is_asked_to_refresh_by_what_is_done_to_letters(
    queue: Queue[Any], monkeypatch: pytest.MonkeyPatch, action: str, where: str
) -> None:
    async def refuse(_feed: Any) -> bool:
        return False

    real = feeds.PollFeed.read
    polls: list[float] = []

    async def read(feed: Any, for_sec: float) -> Any:
        polls.append(for_sec)
        return await real(feed, for_sec)

    def await_polls() -> None:
        """What changed before is sent: each poll begins when the one before it has reported."""
        begun = len(polls)
        wait_for(lambda: len(polls) > begun + 2)

    monkeypatch.setattr(feeds.ChangeFeed, "open", refuse)
    monkeypatch.setattr(feeds.PollFeed, "read", read)
    # What is done in a dashboard is seen at once, by its audit log; all else by the counts.
    monkeypatch.setattr(feeds, "COUNTS_SEC", 3600.0 if where == "here" else 0.0)
    for _ in range(3):
        queue.enqueue({})
        queue.mark_failure(popped(queue), "no")
    with serving(queue) as (address, context), Listener(address) as viewer:

        def refreshes() -> int:
            remembered = list(context.events._remembered)  # noqa: SLF001 (what viewers are sent)
            return [one.type for one in remembered].count("refresh")

        # An overview counts one status after the other: a change in between is told twice.
        counting, overview = threading.Lock(), context.access.insights.overview

        def undisturbed(**options: Any) -> Any:
            with counting:
                return overview(**options)

        monkeypatch.setattr(context.access.insights, "overview", undisturbed)
        await_polls()
        before = refreshes()
        if where == "here":
            path = f"{address}api/v1/dead-letters/{action}"
            httpx.post(
                path, json={"filter": {}, "all_queues": True, "limit": 1}, timeout=40
            ).raise_for_status()
        else:
            with counting:
                getattr(queue.dead_letters, action)(DeadLetterFilter(), limit=1)
        wait_for(lambda: refreshes() > before)
        about = [] if where == "here" else ["default"]
        viewer.wait_for(lambda: about in [one["queues"] for one in viewer.of("refresh")])
        await_polls()
        assert refreshes() <= before + 2, "it is reported once"


def test_stream_that_comes_later_is_taken_and_nothing_is_missed(
    queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = feeds.ChangeFeed.open
    there = threading.Event()

    async def open_later(feed: feeds.ChangeFeed) -> bool:
        return there.is_set() and await real(feed)

    monkeypatch.setattr(feeds.ChangeFeed, "open", open_later)
    monkeypatch.setattr(events, "REOPEN_SEC", 0.0)
    with serving(queue) as (address, context), Listener(address) as viewer:
        assert context.events.live == "polling"
        for n in range(10):
            if n == 5:
                there.set()
            queue.enqueue({"n": n}, task_id=n)
        wait_for(lambda: context.events.live == "change_stream")
        queue.enqueue({"n": 10}, task_id=10)
        viewer.wait_for(lambda: set(tasks_told(viewer)) == set(range(11)))


def test_viewer_who_asks_after_a_refresh_sees_the_change(queue: Queue[Any]) -> None:
    """However long answers are kept for those who ask without a reason."""
    with serving(queue, cache_sec=60) as (address, _), Listener(address) as viewer:
        for n in range(1, 4):
            assert ready(address) == n - 1
            queue.enqueue({})
            viewer.wait_for(lambda n=n: viewer.count("task.enqueued") == n)  # type: ignore[misc]  # A lambda has no types.
            # A costly answer is kept a little longer, and then there is one more refresh.
            wait_for(lambda n=n: ready(address) == n)  # type: ignore[misc]  # A lambda has no types.


def ready(address: str) -> int:
    reply = httpx.get(f"{address}api/v1/overview", timeout=40)
    count: int = reply.json()["queues"][0]["ready"]
    return count


def test_costly_answer_is_refreshed_once_more(
    queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0
    clock = SimpleNamespace(monotonic=lambda: seconds)
    monkeypatch.setattr("microqueue.dashboard.access.time", clock)
    with serving(queue, cache_sec=60) as (address, context), Listener(address) as viewer:
        real = context.access.insights.overview

        def slow(**options: Any) -> Any:
            nonlocal seconds
            overview = real(**options)
            seconds += 0.2
            return overview

        monkeypatch.setattr(context.access.insights, "overview", slow)
        assert ready(address) == 0
        queue.enqueue({})
        viewer.wait_for_types("task.enqueued")
        assert ready(address) == 0, "it is kept for a second"
        seconds += 1.1
        viewer.wait_for(lambda: ["settled"] in [one["types"] for one in viewer.of("refresh")])
        assert ready(address) == 1


def test_vanished_viewer_is_forgotten(queue: Queue[Any]) -> None:
    with serving(queue) as (address, context):
        with Listener(address):
            assert context.events.subscribers == 1
        wait_for(lambda: not context.events.subscribers)


def test_heartbeat_keeps_the_connection(queue: Queue[Any]) -> None:
    with serving(queue) as (address, _), Listener(address) as viewer:
        assert viewer.of("hello")[0]["heartbeat_sec"] == 0.1
        last_id = viewer.last_id
        viewer.wait_for(lambda: len(viewer.of("heartbeat")) >= 3)
        assert viewer.last_id == last_id, "one who returns resumes from what was told"


def test_server_that_stops_ends_the_streams_of_its_viewers(
    queue: Queue[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microqueue.dashboard.server.SHUTDOWN_SEC", 15)  # Streams end at once.
    server = DashboardServer(queue, port=0)
    with ExitStack() as viewers:
        with server.running():
            viewer = viewers.enter_context(Listener(server.address))
        assert viewer.ended.wait(40)
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR] == []


async def test_hub_that_rested_does_not_pretend_to_resume(queue: Queue[Any]) -> None:
    hub = EventHub(QueueAccess(queue), DashboardOptions(), ReadCache(0.0))
    async with asyncio.timeout(40):
        first = hub.subscribe(None)
        last_id = (await anext(first))["id"]
        await first.aclose()  # type: ignore[attr-defined]  # It is a generator.
        hub.stop()
        await asyncio.to_thread(queue.enqueue, {}, task_id="missed")
        other = hub.subscribe(None)
        await anext(other)
        hello = json.loads((await anext(hub.subscribe(last_id)))["data"])
        assert hello["resumed"] is False
    hub.stop()


async def test_lingering_starts_again_when_a_viewer_returns_and_leaves(
    queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = EventHub(QueueAccess(queue), DashboardOptions(), ReadCache(0.0))

    async def look_in() -> None:
        stream = hub.subscribe(None)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]  # It is a generator.

    async with asyncio.timeout(40):
        monkeypatch.setattr(events, "LINGER_SEC", 0.5)
        await look_in()
        monkeypatch.setattr(events, "LINGER_SEC", 60.0)
        await look_in()
        await asyncio.sleep(0.7)  # The first wait is over, the second is not.
        assert hub.live == "change_stream"
        monkeypatch.setattr(events, "LINGER_SEC", 0.0)
        await look_in()
        while hub.live != "idle":  # noqa: ASYNC110 (nothing tells)
            await asyncio.sleep(0.02)


def test_viewer_who_does_not_keep_up_is_dropped() -> None:
    viewer = Subscriber()
    few = [Message(n, "refresh", "{}") for n in range(events.MAX_WAITING)]
    viewer.offer(few)
    assert not viewer.disconnected
    viewer.offer(few[:1])
    assert viewer.disconnected
    assert viewer.waiting.qsize() == 1
    assert viewer.waiting.get_nowait() is None, "the connection ends"
    viewer.offer(few)
    assert viewer.waiting.qsize() <= 1, "nothing is held for one who is gone"


async def test_hub_remembers_a_bounded_number_of_messages(queue: Queue[Any]) -> None:
    hub = EventHub(QueueAccess(queue), DashboardOptions(), ReadCache(0.0))
    for n in range(3 * events.MAX_REMEMBERED):
        hub._send([("refresh", {"n": n})])  # noqa: SLF001 (what the feed makes it do)
    assert len(hub._remembered) == events.MAX_REMEMBERED  # noqa: SLF001 (as above)


async def test_hub_continues_after_the_server_failed(
    queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pymongo.errors import AutoReconnect  # noqa: PLC0415 (for this test alone)

    monkeypatch.setattr(events, "RETRY_SEC", 0.01)
    failures = [AutoReconnect("gone"), AutoReconnect("still gone")]
    real = feeds.ChangeFeed.read

    async def read(feed: feeds.ChangeFeed, for_sec: float) -> Any:
        if failures:
            raise failures.pop()
        return await real(feed, for_sec)

    monkeypatch.setattr(feeds.ChangeFeed, "read", read)
    hub = EventHub(QueueAccess(queue), DashboardOptions(), ReadCache(0.0))
    heard: list[dict[str, str]] = []

    async def listen() -> None:
        async for message in hub.subscribe(None):
            heard.append(message)  # noqa: PERF401 (it is looked at while it grows)

    listening = asyncio.create_task(listen())

    async def heard_types() -> set[str]:
        await asyncio.sleep(0.02)
        return {one["event"] for one in heard}

    async with asyncio.timeout(40):
        while "refresh" not in await heard_types() or failures:
            pass
        resets = [json.loads(one["data"])["types"] for one in heard if one["event"] == "refresh"]
        assert resets[0] == ["reset"]
        while "task.enqueued" not in await heard_types():
            await asyncio.to_thread(queue.enqueue, {})
    hub.stop()
    listening.cancel()


@pytest.mark.parametrize("driver", ["pymongo", "motor"])
async def test_asynchronous_queue_is_listened_to_as_well(
    queue: Queue[Any], microqueue_server: EmbeddedServer, driver: str
) -> None:
    client: Any = (AsyncMongoClient if driver == "pymongo" else AsyncIOMotorClient)(
        microqueue_server.uri
    )
    name = core_of(queue).collections.database.name
    shown: AsyncQueue[Any] = AsyncQueue(client[name], settings=SETTINGS)
    hub = EventHub(QueueAccess(shown), DashboardOptions(), ReadCache(0.0))
    stream = hub.subscribe(None)
    async with asyncio.timeout(40):
        hello = json.loads((await anext(stream))["data"])
        assert hello["live"] == "change_stream"
        await asyncio.to_thread(queue.enqueue, {}, task_id="one")
        told = await anext(stream)
        assert told["event"] == "task.enqueued"
        assert json.loads(told["data"])["tasks"] == [{"id": "one", "queue": "default"}]
        await asyncio.to_thread(queue.pop)
        while (await anext(stream))["event"] != "task.started":
            pass
    reader = hub._reader  # noqa: SLF001 (to see that it ends)
    hub.stop()
    assert reader is not None
    with pytest.raises(asyncio.CancelledError):
        await reader
    closing = client.close()
    if closing is not None:
        await closing


@pytest.mark.parametrize("driver", ["pymongo", "motor"])
async def test_what_happens_between_opening_and_reading_is_told(
    queue: Queue[Any], microqueue_server: EmbeddedServer, driver: str
) -> None:
    make: Any = AsyncMongoClient if driver == "pymongo" else AsyncIOMotorClient
    client = make(microqueue_server.uri)
    feed = ChangeFeed(QueueAccess(AsyncQueue(client[core_of(queue).collections.database.name])))
    await asyncio.to_thread(queue.enqueue, {}, task_id="before")
    assert await feed.open()
    await asyncio.to_thread(queue.enqueue, {}, task_id="between")
    told: list[Any] = []
    async with asyncio.timeout(40):
        while not told:
            told += await feed.read(0.0)
    assert [change.id for change in told] == ["between"]
    await feed.close()
    await awaited(client.close())


@pytest.mark.usefixtures("own_server")
async def test_motor_has_no_change_stream_where_the_server_has_none(tmp_path: Any) -> None:
    with EmbeddedServer.start(tmp_path, replica_set=False) as server:
        client: Any = AsyncIOMotorClient(server.uri)
        assert not await ChangeFeed(QueueAccess(AsyncQueue(client.standalone))).open()
        client.close()


@pytest.mark.usefixtures("own_server")
def test_server_without_change_streams_is_polled(tmp_path: Any) -> None:
    """A real standalone server, on which a change stream is refused."""
    with (
        EmbeddedServer.start(tmp_path, replica_set=False) as server,
        MongoClient[Any](server.uri) as client,
    ):
        queue: Queue[Any] = Queue(client.standalone, settings=SETTINGS)
        queue.ensure_indexes()
        with serving(queue) as (address, context), Listener(address) as viewer:
            queue.enqueue({})
            viewer.wait_for_types("task.enqueued")
            assert context.events.live == "polling"
            queue.mark_done(popped(queue))
            viewer.wait_for_types("task.done")
