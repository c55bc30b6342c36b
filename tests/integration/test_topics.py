"""Topics on a real server: many subscribers, dead cursors, elections and restarts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient

from microqueue import (
    AsyncSubscription,
    AsyncTopic,
    Message,
    ServerUnavailable,
    Subscription,
    Topic,
    TopicConflict,
)
from tests.integration.replica_set import ReplicaSet
from tests.waiting import wait_for

AWAY = (ServerUnavailable,)


@pytest.fixture(scope="module")
def trio(own_server: None) -> Iterator[ReplicaSet]:
    with ReplicaSet.started() as trio:
        yield trio


def collect(subscription: Subscription, count: int) -> list[Message]:
    """Read so many messages; the test's own time limit ends it if they never come."""
    found: list[Message] = []
    for message in subscription:
        found.append(message)
        if len(found) == count:
            break
    return found


def numbers(messages: list[Message]) -> list[Any]:
    return [message.body["n"] for message in messages]


async def collect_async(subscription: AsyncSubscription, count: int) -> list[Message]:
    found: list[Message] = []
    async for message in subscription:
        found.append(message)
        if len(found) == count:
            break
    return found


async def read_on_loops(uri: str, database: str, ready: Callable[[], object]) -> list[Any]:
    """Read 200 messages with five subscribers: three of PyMongo's async client, two of Motor."""
    motor: Any = AsyncIOMotorClient(uri)
    async with AsyncMongoClient[Any](uri) as client:
        topics = [AsyncTopic(one[database], "prices") for one in [client] * 3 + [motor] * 2]
        some = [await topic.subscribe(timeout=60) for topic in topics]
        ready()
        read = await asyncio.gather(*(collect_async(one, 200) for one in some))
        for one in some:
            await one.close()
    motor.close()
    return list(read)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("restart", [False, True])
def test_ten_subscribers_get_every_message_of_concurrent_publishers_once(
    request: pytest.FixtureRequest, restart: bool
) -> None:
    """With a restart, all servers are killed once, while all publish and read."""
    servers = request.getfixturevalue("trio" if restart else "microqueue_server")
    client = MongoClient[Any](servers.uri)
    database = client[f"microqueue_test_{uuid4().hex[:12]}"]
    topic = Topic(database, "prices")
    some = [topic.subscribe(timeout=60) for _ in range(5)]
    ready = threading.Event()

    def publish(publisher: int) -> None:
        for n in range(50):
            if restart and (publisher, n) == (0, 20):
                for member in servers.members:
                    member.kill()
                servers.heal()
            body, message_id = {"n": n, "publisher": publisher}, f"{publisher}.{n}"
            if restart:
                wait_for(partial(topic.publish, body, message_id=message_id), 60, ignoring=AWAY)
            else:
                topic.publish(body)

    with ThreadPoolExecutor(10) as threads:
        reading = [threads.submit(collect, one, 200) for one in some]
        looping = threads.submit(asyncio.run, read_on_loops(servers.uri, database.name, ready.set))
        assert ready.wait(60)
        for done in [threads.submit(publish, publisher) for publisher in range(4)]:
            done.result()
        read = [*[one.result() for one in reading], *looping.result()]
    assert len(read) == 10
    for messages in read:
        assert messages == read[0]  # All in the same order.
        assert len({message.position for message in messages}) == 200
        for publisher in range(4):
            own = [one for one in messages if one.body["publisher"] == publisher]
            assert numbers(own) == list(range(50))
    for one in some:
        assert one.gaps == []
        one.close()
    client.drop_database(database.name)
    client.close()


def test_topic_keeps_max_bytes_and_reports_the_gap(microqueue_database: Any) -> None:
    topic = Topic(microqueue_database, "prices", max_messages=1000, max_bytes=65_536)
    first = topic.publish({"n": 0})
    for n in range(1, 200):
        topic.publish({"n": n, "text": "x" * 1000})
    with topic.subscribe(first, timeout=30) as subscription:
        found = collect(subscription, 1)
        (gap,) = subscription.gaps
        assert gap.after == first
        assert gap.first == found[0].position
        kept = 199 - found[0].body["n"]
        assert 30 < kept < 70
        assert numbers(collect(subscription, kept)) == list(range(200 - kept, 200))


def test_subscription_survives_a_killed_cursor(microqueue_database: Any) -> None:
    topic = Topic(microqueue_database, "prices")
    admin = microqueue_database.client.admin
    with topic.subscribe(timeout=30) as subscription:
        topic.publish({"n": 1})
        assert numbers(collect(subscription, 1)) == [1]
        place = f"{microqueue_database.name}.tasks_topic_prices"
        idle = [
            one["cursor"]["cursorId"]
            for one in admin.aggregate(
                [
                    {"$currentOp": {"idleCursors": True, "allUsers": True}},
                    {"$match": {"ns": place, "cursor": {"$exists": True}}},
                ]
            )
        ]
        assert idle
        microqueue_database.command({"killCursors": "tasks_topic_prices", "cursors": idle})
        topic.publish({"n": 2})
        assert numbers(collect(subscription, 1)) == [2]
        assert subscription.gaps == []


def test_another_thread_ends_a_read_without_a_timeout(microqueue_database: Any) -> None:
    subscription = Topic(microqueue_database, "prices").subscribe()
    thread = threading.Thread(target=lambda: list(subscription), daemon=True)
    thread.start()
    subscription.close()
    thread.join(30)
    assert not thread.is_alive()


def test_collection_that_is_not_capped_is_an_error(microqueue_database: Any) -> None:
    microqueue_database.create_collection("tasks_topic_prices")
    with pytest.raises(TopicConflict) as raised:
        Topic(microqueue_database, "prices").publish({})
    assert raised.value.topic == "prices"
    assert raised.value.collection == "tasks_topic_prices"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", ["step down", "kill", "restart all"])
def test_subscription_survives_the_loss_of_the_primary(trio: ReplicaSet, fault: str) -> None:
    with MongoClient[Any](trio.uri) as client:
        name = f"prices {fault}"
        topic = Topic(client.test, name)
        with topic.subscribe(timeout=60) as subscription:
            topic.publish({"n": 1})
            assert numbers(collect(subscription, 1)) == [1]
            if fault == "step down":
                trio.step_down(for_sec=5)
            elif fault == "kill":
                trio.primary().kill()
            else:
                for member in trio.members:
                    member.kill()
            trio.heal()
            wait_for(lambda: topic.publish({"n": 2}, message_id="two"), 60, ignoring=(Exception,))
            topic.publish({"n": 3})
            assert numbers(collect(subscription, 2)) == [2, 3]
            assert subscription.gaps == []
