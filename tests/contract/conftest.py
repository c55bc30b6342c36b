"""One suite for every driver: each test runs on all five, and uses the async names.

Tests of checks that happen before any I/O are marked ``one_driver`` and run once.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import mongomock
import pytest
from mongomock_motor import AsyncMongoMockClient
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

from microqueue import AsyncQueue, AsyncSweeper, AsyncTopic, Queue, QueueSettings, Sweeper, Topic
from microqueue.drivers.driver import awaited
from microqueue.embedded import EmbeddedServer
from microqueue.insights import AsyncInsights, Insights
from microqueue.testing import FakeClock

TIMEOUT_SEC = 0.2
DRIVERS = ["pymongo", "motor", "pymongo_async", "mongomock", "mongomock_motor"]


class Awaited:
    """Makes the blocking classes speak the async names, so that one test serves both."""

    def __init__(self, blocking: Any) -> None:
        self._blocking = blocking

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._blocking, name)
        if name in {"dead_letters", "all_queues", "schedules"}:
            return Awaited(value)
        if not callable(value):
            return value

        async def call(*arguments: Any, **options: Any) -> Any:
            return value(*arguments, **options)

        return call


class Harness:
    """Makes queues and sweepers on one database, through one driver."""

    def __init__(self, driver: str, database: Any, clock: FakeClock) -> None:
        self.driver = driver
        self.database = database
        self.clock = clock
        self.blocking = driver in {"pymongo", "mongomock"}
        self.in_memory = driver.startswith("mongomock")

    def queue(
        self,
        name: str = "default",
        *,
        model: type[Any] | None = None,
        hooks: Sequence[Any] = (),
        **settings: Any,
    ) -> Any:
        options: Any = {
            "hooks": hooks,
            "settings": QueueSettings(**settings),
            "payload_model": model,
            "clock": self.clock,
        }
        if self.blocking:
            return Awaited(Queue(self.database, name, **options))
        return AsyncQueue(self.database, name, **options)

    def sweeper(self, queue: Any, **options: Any) -> Any:
        if self.blocking:
            return Awaited(Sweeper(queue._blocking, **options))  # noqa: SLF001 (what it wraps)
        return AsyncSweeper(queue, **options)

    def insights(self, queue: Any) -> Any:
        if self.blocking:
            return Awaited(Insights(queue._blocking))  # noqa: SLF001 (what it wraps)
        return AsyncInsights(queue)

    def lock(self, sweeper: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return functions that take and release the lock of a sweeper."""
        made = sweeper._blocking if self.blocking else sweeper  # noqa: SLF001 (what it wraps)
        core, sweep = made._core, made._sweep  # noqa: SLF001 (to hold the lock)

        async def acquire() -> None:
            await awaited(core.run(sweep.acquire()))

        async def release() -> None:
            await awaited(core.run(sweep.release()))

        return acquire, release

    async def stored(self, collection: str = "tasks") -> list[dict[str, Any]]:
        """Read the documents as they are stored, through the caller's own options."""
        cursor = self.database[collection].find({}).sort([("position", 1)])
        if self.blocking:
            return list(cursor)
        documents: list[dict[str, Any]] = await cursor.to_list(None)
        return documents

    async def edit(self, task_id: Any, **changes: Any) -> None:
        """Change a stored task behind the queue's back."""
        reply = self.database.tasks.update_one({"_id": task_id}, {"$set": changes})
        if inspect.isawaitable(reply):
            await reply


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on every driver, unless it is about a check that comes before any I/O."""
    if "harness" in metafunc.fixturenames:
        one = metafunc.definition.get_closest_marker("one_driver") is not None
        metafunc.parametrize("harness", DRIVERS[:1] if one else DRIVERS, indirect=True)


@pytest.fixture
async def harness(
    request: pytest.FixtureRequest,
    microqueue_clock: FakeClock,
) -> AsyncIterator[Harness]:
    driver: str = request.param
    if driver == "mongomock":
        yield Harness(driver, mongomock.MongoClient().microqueue, microqueue_clock)
        return
    if driver == "mongomock_motor":
        yield Harness(driver, AsyncMongoMockClient().microqueue, microqueue_clock)
        return
    database = request.getfixturevalue("microqueue_database")
    if driver == "pymongo":
        yield Harness(driver, database, microqueue_clock)
        return
    server: EmbeddedServer = request.getfixturevalue("microqueue_server")
    if driver == "motor":
        motor: Any = AsyncIOMotorClient(server.uri)
        yield Harness(driver, motor[database.name], microqueue_clock)
        motor.close()
        return
    client: AsyncMongoClient[Any] = AsyncMongoClient(server.uri)
    yield Harness(driver, client[database.name], microqueue_clock)
    await client.close()


@pytest.fixture
def queue(harness: Harness) -> Any:
    return harness.queue()


class Topics:
    """Makes topics and reads them, through one driver."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._opened: list[Any] = []

    def topic(self, name: str = "news", **options: Any) -> Any:
        options = {"clock": self._harness.clock, **options}
        if self._harness.blocking:
            return Awaited(Topic(self._harness.database, name, **options))
        return AsyncTopic(self._harness.database, name, **options)

    async def subscribe(self, topic: Any, *arguments: Any, **options: Any) -> Any:
        subscription = await topic.subscribe(*arguments, **{"timeout": TIMEOUT_SEC, **options})
        subscription = Awaited(subscription) if self._harness.blocking else subscription
        self._opened.append(subscription)
        return subscription

    async def close(self) -> None:
        for subscription in self._opened:
            await subscription.close()


@pytest.fixture
async def topics(harness: Harness) -> AsyncIterator[Topics]:
    made = Topics(harness)
    yield made
    await made.close()
