"""Every subscriber of a topic reads every message, in order, from the position it chose."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from microqueue import Gap, InvalidArgument, InvalidPayload, Message, MessagesLost
from tests.contract.conftest import Harness, Topics


async def read(subscription: Any, count: int) -> list[Message]:
    """Read until so many messages came; a slow machine may need several reads."""
    found: list[Message] = []
    for _ in range(100):
        found += await subscription.read()
        if len(found) >= count:
            break
    return found


async def bodies(subscription: Any, count: int) -> list[Any]:
    return [message.body["n"] for message in await read(subscription, count)]


async def test_subscriber_gets_what_is_published_after_it_subscribed(
    topics: Topics, harness: Harness
) -> None:
    topic = topics.topic()
    await topic.publish({"n": 1})
    subscription = await topics.subscribe(topic)
    position = await topic.publish({"n": 2}, key="shop.eu", headers={"a": [1]})
    (message,) = await read(subscription, 1)
    assert message == Message(
        position=position,
        key="shop.eu",
        body={"n": 2},
        headers={"a": [1]},
        published_at=harness.clock.now(),
    )
    assert subscription.position == position


async def test_start_delivers_all_that_the_topic_has(topics: Topics) -> None:
    topic = topics.topic()
    for n in range(3):
        await topic.publish({"n": n})
    assert await bodies(await topics.subscribe(topic, "start"), 3) == [0, 1, 2]


async def test_position_delivers_what_came_after_it(topics: Topics) -> None:
    topic = topics.topic()
    positions = [await topic.publish({"n": n}) for n in range(4)]
    subscription = await topics.subscribe(topic, positions[1])
    assert await bodies(subscription, 2) == [2, 3]
    assert subscription.position == positions[3]
    assert subscription.gaps == []


async def test_each_subscriber_reads_independently(topics: Topics) -> None:
    topic = topics.topic()
    some = [await topics.subscribe(topic) for _ in range(3)]
    await topic.publish({"n": 1})
    assert await bodies(some[0], 1) == [1]
    await topic.publish({"n": 2})
    assert await bodies(some[0], 1) == [2]
    assert [await bodies(one, 2) for one in some[1:]] == [[1, 2], [1, 2]]


async def test_topics_are_apart(topics: Topics) -> None:
    names = ["news", "a.b..c.", "$x/%2E é"]
    made = [topics.topic(name) for name in names]
    some = [await topics.subscribe(topic) for topic in made]
    for n, topic in enumerate(made):
        await topic.publish({"n": n})
    assert [await bodies(one, 1) for one in some] == [[0], [1], [2]]


async def test_timeout_ends_a_read_and_the_next_one_continues(topics: Topics) -> None:
    topic = topics.topic()
    subscription = await topics.subscribe(topic, timeout=0.05)
    assert await subscription.read() == []
    await topic.publish({"n": 1})
    assert await bodies(subscription, 1) == [1]


async def test_topic_keeps_max_messages(topics: Topics) -> None:
    topic = topics.topic(max_messages=3)
    for n in range(5):
        await topic.publish({"n": n})
    assert await bodies(await topics.subscribe(topic, "start"), 3) == [2, 3, 4]


async def test_subscriber_that_fell_behind_gets_a_gap_and_continues(topics: Topics) -> None:
    topic = topics.topic(max_messages=3)
    behind = await topic.publish({"n": 0})
    positions = [await topic.publish({"n": n}) for n in range(1, 6)]
    seen: list[Gap] = []
    subscription = await topics.subscribe(topic, behind, on_gap=seen.append)
    assert await bodies(subscription, 3) == [3, 4, 5]
    expected = Gap(topic="news", after=behind, first=positions[2])
    assert seen == subscription.gaps == [expected]
    await topic.publish({"n": 6})
    assert await bodies(subscription, 1) == [6]
    assert seen == [expected]


async def test_gap_raises_once_if_asked_to(topics: Topics) -> None:
    topic = topics.topic(max_messages=2)
    behind = await topic.publish({"n": 0})
    positions = [await topic.publish({"n": n}) for n in range(1, 4)]
    subscription = await topics.subscribe(topic, behind, on_gap="raise")
    with pytest.raises(MessagesLost) as raised:
        await read(subscription, 1)
    assert (raised.value.topic, raised.value.after) == ("news", behind)
    assert raised.value.first == positions[1]
    assert await bodies(subscription, 2) == [2, 3]


async def test_subscriber_of_an_empty_topic_notices_a_gap(topics: Topics) -> None:
    topic = topics.topic(max_messages=2)
    subscription = await topics.subscribe(topic)
    for n in range(4):
        await topic.publish({"n": n})
    assert await bodies(subscription, 2) == [2, 3]
    assert len(subscription.gaps) == 1


@pytest.mark.parametrize("message_id", ["order-17", "6afd5d5ffdff463fbf0d6ec3"])
async def test_message_with_the_same_id_is_published_once(topics: Topics, message_id: str) -> None:
    topic = topics.topic()
    subscription = await topics.subscribe(topic)
    assert await topic.publish({"n": 1}, message_id=message_id) == message_id
    assert await topic.publish({"n": 1}, message_id=message_id) == message_id
    await topic.publish({"n": 2})
    assert await bodies(subscription, 2) == [1, 2]
    assert await bodies(await topics.subscribe(topic, message_id), 1) == [2]


async def test_peek_shows_the_newest_messages_and_writes_nothing(
    topics: Topics, harness: Harness
) -> None:
    topic = topics.topic(max_messages=5)
    assert await topic.peek() == []
    assert await harness.stored("tasks_topic_news") == []
    positions = [await topic.publish({"n": n}, key=f"k{n}") for n in range(7)]
    assert [one.position for one in await topic.peek(2)] == [positions[6], positions[5]]
    assert [one.body["n"] for one in await topic.peek()] == [6, 5, 4, 3, 2]
    assert await topic.peek(2, convert=lambda message: message.key) == ["k6", "k5"]
    found = await topic.get(positions[6])
    assert (found.position, found.key) == (positions[6], "k6")
    assert await topic.get(positions[0]) is None
    with pytest.raises(InvalidArgument):
        await topic.peek(0)


async def test_topics_are_listed_with_what_they_keep(topics: Topics, harness: Harness) -> None:
    insights = harness.insights(harness.queue())
    assert (await insights.topics()).topics == []
    begun = harness.clock.now()
    news = topics.topic("news", max_messages=3, max_bytes=8192)
    await news.publish({"n": 0})
    harness.clock.advance(60)
    await news.publish({"n": 1})
    await topics.topic("a/b").publish({})
    await topics.topic("only bound", live=False).bind("mail", "shop.*")
    found = await insights.topics()
    assert [one.topic for one in found.topics] == ["a/b", "news", "only bound"]
    assert (found.total, found.at) == (3, harness.clock.now())
    _, one, bound = found.topics
    assert (one.messages, one.oldest_at, one.newest_at) == (2, begun, harness.clock.now())
    assert (bound.messages, bound.max_messages, bound.newest_at) == (0, None, None)
    assert [(each.queue, each.filter) for each in bound.bindings] == [("mail", "shop.*")]
    if not harness.in_memory:
        assert (one.max_messages, one.max_bytes) == (3, 8192)
        assert 0 < one.bytes < 8192
    for n in (2, 3, 4):
        await news.publish({"n": n})
    (one,) = [one for one in (await insights.topics()).topics if one.topic == "news"]
    assert (one.messages, one.oldest_at) == (3, begun + timedelta(seconds=60))
    few = await insights.topics(limit=1)
    assert ([each.topic for each in few.topics], few.total) == (["a/b"], 3)


async def test_closed_subscription_delivers_nothing(topics: Topics) -> None:
    topic = topics.topic()
    subscription = await topics.subscribe(topic, timeout=None)
    await topic.publish({"n": 1})
    await subscription.close()
    assert await subscription.read() == []
    await subscription.close()


@pytest.mark.one_driver
@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("key", {"key": 7}),
        ("key", {"key": "k" * 256}),
        ("headers", {"headers": ["a"]}),
        ("headers", {"headers": {"topic": 1}}),
        ("message_id", {"message_id": ""}),
        ("message_id", {"message_id": "now"}),
        ("message_id", {"message_id": 3}),
    ],
)
async def test_bad_arguments_of_publish(topics: Topics, argument: str, call: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        await topics.topic().publish({}, **call)
    assert raised.value.argument == argument


@pytest.mark.one_driver
@pytest.mark.parametrize(
    ("argument", "options"),
    [("from_", {"from_": 3}), ("timeout", {"timeout": "soon"}), ("on_gap", {"on_gap": "ignore"})],
)
async def test_bad_arguments_of_subscribe(topics: Topics, argument: str, options: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        await topics.topic().subscribe(**options)
    assert raised.value.argument == argument


@pytest.mark.one_driver
@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("name", {"name": ""}),
        ("name", {"name": "n" * 81}),
        ("name", {"name": "\U0001f4e3" * 20}),
        ("max_messages", {"max_messages": 0}),
        ("max_bytes", {"max_bytes": 100}),
    ],
)
def test_bad_arguments_of_a_topic(topics: Topics, argument: str, options: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        topics.topic(**options)
    assert raised.value.argument == argument


@pytest.mark.parametrize("message", [7, "text", None, {"x": object()}])
async def test_message_that_cannot_be_stored(topics: Topics, message: Any) -> None:
    with pytest.raises(InvalidPayload):
        await topics.topic().publish(message)


async def test_message_larger_than_the_topic(topics: Topics) -> None:
    with pytest.raises(InvalidPayload):
        await topics.topic(max_bytes=4096).publish({"x": "y" * 5000})


async def test_publisher_with_a_lower_limit_than_the_topic(topics: Topics) -> None:
    await topics.topic(max_bytes=65_536).publish({"x": "y" * 5000})
    with pytest.raises(InvalidPayload, match="max_bytes=4,096 of this object"):
        await topics.topic(max_bytes=4096).publish({"x": "y" * 5000})
    await topics.topic(max_bytes=65_536).publish({"x": "y" * 5000})
