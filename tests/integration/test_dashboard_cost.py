"""What an open page costs: counted by the driver, whatever the number of viewers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from pymongo import MongoClient
from pymongo.monitoring import CommandListener

from microqueue import Queue, QueueSettings, Topic
from microqueue.core import core_of
from microqueue.dashboard import dashboard, feeds
from microqueue.dashboard.access import ReadCache
from microqueue.dashboard.server import DashboardServer
from microqueue.embedded import EmbeddedServer
from tests.integration.dashboard_listener import Listener
from tests.integration.dashboard_site import API
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("patient_streams")

WRITES = {
    "insert", "update", "delete", "findAndModify", "create", "createIndexes", "collMod", "drop",
    "bulkWrite", "dropIndexes",
}  # fmt: skip
PAGE = [
    "/config", "/overview", "/queues", "/workers", "/running", "/tasks", "/tasks?status=failed",
    "/tasks?text=nothing", "/tasks/one", "/dead-letters", "/dead-letters/groups",
    "/dead-letters/export", "/sweeper", "/audit", "/topics", "/topics/prices/messages",
    "/topics/prices/message?position=one", "/topics/none/messages",
]  # fmt: skip
VIEWERS = 20


class Counting(CommandListener):
    """Counts the commands that a client sends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.commands: Counter[str] = Counter()
        self.streams = 0

    def started(self, event: Any) -> None:
        with self._lock:
            self.commands[event.command_name] += 1
            self.streams += "$changeStream" in str(event.command.get("pipeline", ""))

    def succeeded(self, event: Any) -> None: ...

    def failed(self, event: Any) -> None: ...

    @property
    def queries(self) -> int:
        # On a slow machine, a ping checks a connection that was idle for some time.
        return self.commands.total() - self.commands["getMore"] - self.commands["ping"]

    def clear(self) -> None:
        self.commands.clear()


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def queue(
    microqueue_server: EmbeddedServer, microqueue_database: Any, counting: Counting
) -> Iterator[Queue[Any]]:
    """A queue whose commands are counted, with a task in each status."""
    arranged: Queue[Any] = Queue(microqueue_database)
    arranged.enqueue({}, task_id="one", delay=60)
    arranged.enqueue_many([{"n": n} for n in range(5)])
    done, dead, _running = arranged.pop_many(3)
    arranged.mark_done(done)
    arranged.mark_failure(dead, "no")
    Topic(arranged, "prices").publish({}, message_id="one")
    Topic(arranged, "prices").bind("mail")
    settings = QueueSettings(ensure_indexes=True)
    with MongoClient[Any](microqueue_server.uri, event_listeners=[counting]) as client:
        yield Queue(client[microqueue_database.name], settings=settings)


def browser(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_looking_writes_nothing(queue: Queue[Any], counting: Counting) -> None:
    before = list(core_of(queue).collections.tasks.find(sort=[("_id", 1)]))
    counting.clear()
    async with browser(dashboard(queue)) as client:
        for path in PAGE:
            reply = await client.get(f"{API}{path}")
            assert reply.status_code == 200, (path, reply.text)
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await client.get(path)).status_code == 200
    assert counting.commands, "nothing was counted"
    assert not WRITES & set(counting.commands), counting.commands
    assert list(core_of(queue).collections.tasks.find(sort=[("_id", 1)])) == before


@pytest.mark.parametrize("path", ["/overview", "/tasks?limit=50", "/dead-letters", "/audit"])
async def test_refresh_costs_the_same_however_many_look_on(
    queue: Queue[Any], counting: Counting, path: str
) -> None:
    async with browser(dashboard(queue, cache_sec=60)) as client:
        await client.get(f"{API}/config")  # The clock is read.
        counting.clear()
        replies = await asyncio.gather(*(client.get(f"{API}{path}") for _ in range(VIEWERS)))
        assert {reply.status_code for reply in replies} == {200}
        assert len({reply.text for reply in replies}) == 1
    assert 1 <= counting.queries <= 12, counting.commands


def test_one_upstream_serves_all_viewers(
    microqueue_server: EmbeddedServer, queue: Queue[Any], counting: Counting
) -> None:
    server = DashboardServer(queue, port=0, heartbeat_sec=0.1)
    other: Queue[Any] = Queue(
        MongoClient[Any](microqueue_server.uri)[core_of(queue).collections.database.name]
    )
    with core_of(other).collections.client, server.running(), ExitStack() as stack:
        viewers = [stack.enter_context(Listener(server.address)) for _ in range(5)]
        counting.clear()
        other.enqueue({})
        for viewer in viewers:
            viewer.wait_for_types("task.enqueued", "refresh")
        assert counting.streams == 1
        assert counting.queries <= 5, counting.commands
        assert not WRITES & set(counting.commands), counting.commands


async def test_polling_writes_nothing_and_costs_a_few_queries_per_look(
    queue: Queue[Any], counting: Counting
) -> None:
    from microqueue.dashboard.access import QueueAccess  # noqa: PLC0415 (for this test alone)
    from microqueue.dashboard.feeds import PollFeed  # noqa: PLC0415 (as above)

    feed = PollFeed(QueueAccess(queue), 0.0)
    await feed.open()
    counting.clear()
    await feed.read(0.3)
    assert 1 <= counting.queries <= 10, counting.commands
    assert not WRITES & set(counting.commands), counting.commands


def test_polling_costs_the_same_however_many_look_on(
    queue: Queue[Any], counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_feed: Any) -> bool:
        return False

    looks = 0
    upstreams: set[Any] = set()
    usual = feeds.PollFeed.read

    async def look(feed: Any, for_sec: float) -> Any:
        nonlocal looks
        looks += 1
        upstreams.add(feed)
        return await usual(feed, for_sec)

    monkeypatch.setattr(feeds.ChangeFeed, "open", refuse)
    monkeypatch.setattr(feeds.PollFeed, "read", look)
    server = DashboardServer(queue, port=0, heartbeat_sec=0.1, poll_sec=0.1)
    with server.running(), ExitStack() as stack:
        for more in (1, 7):
            for _ in range(more):
                stack.enter_context(Listener(server.address))
            looks = 0
            counting.clear()
            began = time.monotonic()
            wait_for(lambda: looks > 12)  # noqa: B023 (it is called within the round)
            queries = counting.queries
            rounds = 1 + int((time.monotonic() - began) / feeds.COUNTS_SEC)
            # Those of each look, and the reads that are shared, which come every few seconds.
            assert queries <= 10 * (looks + 1) + 15 * rounds, (looks, counting.commands)
            assert not WRITES & set(counting.commands), counting.commands
    assert len(upstreams) == 1


# The reads that are shared


async def test_those_who_ask_at_once_wait_for_one_answer() -> None:
    cache = ReadCache(0.0)
    asked = 0
    answer = asyncio.Event()

    async def read() -> int:
        nonlocal asked
        asked += 1
        await answer.wait()
        return asked

    waiting = [asyncio.create_task(cache.get("key", read)) for _ in range(5)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # One who leaves does not stop it for the others.
    answer.set()
    assert await asyncio.gather(*waiting[1:]) == [1] * 4
    assert await cache.get("key", read) == 2, "nothing is kept for 0 seconds"


async def test_error_is_told_to_all_and_not_kept() -> None:
    cache = ReadCache(60.0)
    failures = [ValueError("no")]

    async def read() -> str:
        await asyncio.sleep(0)
        if failures:
            raise failures.pop()
        return "fine"

    told = await asyncio.gather(
        cache.get("key", read), cache.get("key", read), return_exceptions=True
    )
    assert [str(one) for one in told] == ["no", "no"]
    assert await cache.get("key", read) == "fine"


async def test_answer_read_before_an_action_is_not_shown_after_it() -> None:
    cache = ReadCache(60.0)
    answer = asyncio.Event()

    async def slow() -> str:
        await answer.wait()
        return "before"

    async def quick() -> str:
        return "after"

    waiting = asyncio.create_task(cache.get("key", slow))
    await asyncio.sleep(0)
    cache.clear()
    assert await cache.get("key", quick) == "after"
    answer.set()
    assert await waiting == "before"
    assert await cache.get("key", slow) == "after"


async def test_answers_that_are_kept_are_bounded() -> None:
    cache = ReadCache(60.0)

    async def read() -> int:
        return 1

    for n in range(1000):
        await cache.get(n, read)
    assert len(cache._results) <= 256  # noqa: SLF001 (what it holds)
