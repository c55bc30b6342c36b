"""The event stream survives errors, and tasks with unusual ids are shown."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import UTC, datetime
from typing import Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient

from microqueue import AsyncQueue, Queue, QueueSettings
from microqueue.core import core_of
from microqueue.dashboard import events, feeds
from microqueue.dashboard.access import QueueAccess, ReadCache
from microqueue.dashboard.events import EventHub
from microqueue.dashboard.feeds import ChangeFeed
from microqueue.dashboard.options import DashboardOptions
from microqueue.drivers.driver import awaited
from microqueue.embedded import EmbeddedServer
from tests.integration.dashboard_listener import Listener, serving
from tests.integration.dashboard_site import opened
from tests.integration.proxy import Proxy
from tests.servers import direct_uri

pytestmark = pytest.mark.usefixtures("patient_streams")

UNUSUAL_IDS: list[Any] = [
    {"a": 1},
    1.5,
    True,
    datetime(2026, 5, 1, tzinfo=UTC),
    b"bytes",
    {"b": [1]},
]
AT = datetime(2026, 5, 1, tzinfo=UTC)


@pytest.fixture
def queue(microqueue_database: Any, monkeypatch: pytest.MonkeyPatch) -> Queue[Any]:
    monkeypatch.setattr(events, "RETRY_SEC", 0.05)
    queue: Queue[Any] = Queue(microqueue_database)
    queue.ensure_indexes()
    return queue


def unusual_task(task_id: Any, status: str, **fields: Any) -> dict[str, Any]:
    return {
        "_id": task_id, "queue": "default", "status": status, "payload": {}, "attempts": 1,
        "created_at": AT, "updated_at": AT, "next_retry_at": None, **fields,
    }  # fmt: skip


@pytest.mark.parametrize("live", ["change_stream", "polling"])
def test_viewer_hears_of_tasks_whose_ids_are_unusual(
    queue: Queue[Any], live: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if live == "polling":
        monkeypatch.setattr(feeds.ChangeFeed, "open", never_open)
    tasks = core_of(queue).collections.tasks
    with serving(queue) as (address, _), Listener(address) as viewer:
        for task_id in UNUSUAL_IDS:
            now = queue.now()
            lease = {"deadline_at": now, "started_at": now, "created_at": now}
            tasks.insert_one(unusual_task(task_id, "processing", **lease))
        viewer.wait_for(lambda: viewer.count("task.enqueued") == len(UNUSUAL_IDS))
        told = [one for data in viewer.of("task.enqueued") for one in data["tasks"]]
        assert {one["queue"] for one in told} == {"default"}
        assert "{'a': 1}" in {one["id"] for one in told}
        tasks.update_many({}, {"$set": {"status": "failed", "updated_at": queue.now()}})
        viewer.wait_for(lambda: viewer.count("task.failed") == len(UNUSUAL_IDS))
        tasks.delete_many({})
        queue.enqueue({}, task_id="plain")
        plain = {"id": "plain", "queue": "default"}
        viewer.wait_for(lambda: any(plain in one["tasks"] for one in viewer.of("task.enqueued")))


async def never_open(_feed: Any) -> bool:
    return False


def test_viewer_hears_what_happens_after_the_database_was_dropped(queue: Queue[Any]) -> None:
    with serving(queue) as (address, context), Listener(address) as viewer:
        core_of(queue).collections.client.drop_database(core_of(queue).collections.database.name)
        viewer.wait_for(lambda: ["reset"] in [one["types"] for one in viewer.of("refresh")])
        assert viewer.of("task.changed") == [], "of no task is it known that it changed"
        queue.enqueue({})
        viewer.wait_for_types("task.enqueued")
        assert context.events.live == "change_stream"


@pytest.mark.parametrize("driver", ["blocking", "pymongo", "motor"])
async def test_stream_that_has_ended_is_not_asked_for_ever(
    queue: Queue[Any], microqueue_server: EmbeddedServer, driver: str
) -> None:
    client: Any = None
    shown: Any = queue
    if driver != "blocking":
        client = (AsyncMongoClient if driver == "pymongo" else AsyncIOMotorClient)(
            microqueue_server.uri
        )
        shown = AsyncQueue(client[core_of(queue).collections.database.name])
    await asyncio.to_thread(queue.enqueue, {})
    feed = ChangeFeed(QueueAccess(shown))
    assert await feed.open()
    await asyncio.to_thread(
        core_of(queue).collections.client.drop_database, core_of(queue).collections.database.name
    )
    async with asyncio.timeout(40):
        with pytest.raises(feeds.FeedEnded):
            while True:
                await feed.read(0.0)
    await feed.close()
    if client is not None:
        await awaited(client.close())


@pytest.mark.parametrize("driver", ["blocking", "pymongo", "motor"])
async def test_events_continue_after_all_connections_froze(
    queue: Queue[Any],
    microqueue_server: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
) -> None:
    monkeypatch.setattr(feeds, "SILENT_SEC", 0.5)
    monkeypatch.setattr(feeds, "OPEN_SEC", 5.0)
    reads, real = asyncio.Semaphore(0), feeds.ChangeFeed.read

    async def read(feed: feeds.ChangeFeed, for_sec: float) -> Any:
        reads.release()
        return await real(feed, for_sec)

    monkeypatch.setattr(feeds.ChangeFeed, "read", read)
    kinds: dict[str, Any] = {
        "blocking": MongoClient, "pymongo": AsyncMongoClient, "motor": AsyncIOMotorClient,
    }  # fmt: skip
    settings = QueueSettings(call_timeout=1)
    with Proxy(direct_uri(microqueue_server)) as proxy:
        client = kinds[driver](proxy.uri)
        database = client[core_of(queue).collections.database.name]
        shown: Any = (Queue if driver == "blocking" else AsyncQueue)(database, settings=settings)
        hub = EventHub(QueueAccess(shown), DashboardOptions(), ReadCache(0.0))
        stream = hub.subscribe(None)

        async def add_tasks() -> None:
            """A stall of the machine ends the feed, too, and what comes then is not heard."""
            while True:
                await asyncio.to_thread(queue.enqueue, {})
                await asyncio.sleep(0.5)

        async with asyncio.timeout(90):
            await anext(stream)
            assert hub.live == "change_stream"
            # The greeting used connections, too. From the second read on, only the stream does, so
            # it cannot be on a new connection, which the proxy would not freeze.
            for _ in range(2):
                await reads.acquire()
            proxy.freeze()
            while json.loads((message := await anext(stream))["data"]).get("types") != ["reset"]:
                assert message["event"] == "refresh"
            adding = asyncio.create_task(add_tasks())
            while (await anext(stream))["event"] != "task.enqueued":
                pass
            adding.cancel()
            await asyncio.wait([adding])
        hub.stop()
    await awaited(client.close())


async def test_hub_continues_after_an_unexpected_error_and_logs_it_once(
    queue: Queue[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "RETRY_SEC", 0.01)
    failures = [TypeError("unhashable")] * 5
    real = feeds.ChangeFeed.read

    async def read(feed: feeds.ChangeFeed, for_sec: float) -> Any:
        if failures:
            raise failures.pop()
        return await real(feed, for_sec)

    monkeypatch.setattr(feeds.ChangeFeed, "read", read)
    hub = EventHub(QueueAccess(queue), DashboardOptions(), ReadCache(0.0))
    stream = hub.subscribe(None)
    async with asyncio.timeout(40):
        await anext(stream)
        while failures or hub._interrupted:  # noqa: ASYNC110, SLF001 (nothing tells)
            await asyncio.sleep(0.01)
        await asyncio.to_thread(queue.enqueue, {})
        while (await anext(stream))["event"] != "task.enqueued":
            pass
    told = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert [(one.name, one.args) for one in told] == [("microqueue.dashboard", ("TypeError",))]
    hub.stop()


async def test_reader_that_has_ended_is_started_for_the_next_viewer(
    queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = EventHub(QueueAccess(queue), DashboardOptions(), ReadCache(0.0))
    async with asyncio.timeout(40):
        first = hub.subscribe(None)
        seen = (await anext(first))["id"]
        ended = hub._reader  # noqa: SLF001 (what may end)
        assert ended is not None
        ended.cancel()
        await asyncio.wait([ended])
        may_open = hold_up_the_feed(monkeypatch)
        stream = hub.subscribe(seen)
        greeting = asyncio.ensure_future(anext(stream))
        # No hello before changes are read: a viewer would miss those in between.
        assert not (await asyncio.wait([greeting], timeout=0.5))[0]
        may_open.set()
        hello = json.loads((await greeting)["data"])
        assert (hello["live"], hello["resumed"]) == ("change_stream", False)
        await asyncio.to_thread(queue.enqueue, {})
        while (await anext(stream))["event"] != "task.enqueued":
            pass
        # Viewers who were connected are asked to load everything again.
        assert json.loads((await anext(first))["data"])["types"] == ["reset"]
    hub.stop()


def hold_up_the_feed(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let no change stream be opened until the event is set."""
    may_open = asyncio.Event()
    real = feeds.ChangeFeed.open

    async def open_later(feed: feeds.ChangeFeed) -> bool:
        await may_open.wait()
        return await real(feed)

    monkeypatch.setattr(feeds.ChangeFeed, "open", open_later)
    return may_open


# Ids that microqueue never assigns


@pytest.mark.parametrize("kept", ["status", "collection"])
@pytest.mark.parametrize("kind", ["blocking", "async"])
async def test_tasks_with_unusual_ids_are_listed_page_by_page_and_exported(
    microqueue_database: Any, microqueue_server: EmbeddedServer, kept: Any, kind: str
) -> None:
    settings = QueueSettings(dead_letters=kept)
    ids = [*UNUSUAL_IDS, 7, "seven"]
    for task_id in ids:
        microqueue_database.tasks.insert_one(
            unusual_task(task_id, "failed", error={"message": "no", "code": "X", "at": AT})
        )
    options: dict[str, Any] = {"settings": settings, "kind": kind, "uri": microqueue_server.uri}
    async with opened(microqueue_database, **options) as site:
        for path in ("/tasks", "/tasks?status=failed", "/tasks?text=no", "/dead-letters"):
            shown: list[Any] = []
            query: dict[str, Any] = {"limit": 1}
            while True:
                name, _, more = path.partition("?")
                given: Any = dict(one.split("=") for one in more.split("&") if one)
                page = await site.get(name, **given, **query)
                shown += [one["id"] for one in page["items"]]
                if page["next_cursor"] is None:
                    break
                query["cursor"] = page["next_cursor"]
            assert len(shown) == len(ids), (path, shown)
            assert len(set(map(str, shown))) == len(ids), (path, shown)
            assert {"{'a': 1}", "1.5"} <= set(shown), path
        exported = (await site.get("/dead-letters/export")).splitlines()
        assert len(exported) == len(ids)
        overview = await site.get("/overview")
        assert overview["queues"][0]["failed"] == len(ids)
        await site.get("/dead-letters/groups")


async def test_running_task_with_an_unusual_id_is_shown(microqueue_database: Any) -> None:
    async with opened(microqueue_database) as site:
        now = site.clock.now()
        lease = {"deadline_at": now, "started_at": now, "worker_id": "w"}
        microqueue_database.tasks.insert_one(unusual_task({"a": 1}, "processing", **lease))
        running = await site.get("/running")
        assert [one["id"] for one in running["items"]] == ["{'a': 1}"]


async def test_letters_with_unusual_ids_are_replayed_and_discarded(
    microqueue_database: Any,
) -> None:
    for place, task_id in enumerate(UNUSUAL_IDS):
        microqueue_database.tasks.insert_one(
            unusual_task(task_id, "failed", queue="mail" if place % 2 else "default")
        )
    async with opened(microqueue_database) as site:
        replayed = await site.post("/dead-letters/replay", {"queue": "default", "filter": {}})
        assert replayed["replayed"] == 3
        gone = await site.post("/dead-letters/discard", {"filter": {}, "queue": "mail"})
        assert gone["discarded"] == 3
