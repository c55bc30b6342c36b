"""A message becomes one task of each queue that is bound to its topic."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from microqueue import BackoffPolicy, Binding, DuplicateTask, InvalidArgument, QueueSettings
from tests.contract.conftest import Harness, Topics

BACKOFF = BackoffPolicy(base_sec=3, jitter="none")


def plain(queue: Any) -> Any:
    """Return the queue itself, which the tests of a blocking driver wrap."""
    return getattr(queue, "_blocking", queue)


async def payloads(queue: Any) -> list[Any]:
    return [task.payload for task in await queue.pop_many(100)]


async def test_message_becomes_a_task_of_each_bound_queue(topics: Topics, harness: Harness) -> None:
    topic = topics.topic("shop orders")
    queues = [harness.queue(name) for name in ("mail", "stock/1")]
    for queue in queues:
        await topic.bind(plain(queue))
    subscription = await topics.subscribe(topic)
    headers = {"trace": "x", "task": "send_email"}
    position = await topic.publish({"n": 1}, key="shop.eu", headers=headers)
    for queue, task_id in zip(queues, ("mail", "stock%2F1"), strict=True):
        (task,) = await queue.pop_many(10)
        assert task.id == f"shop%20orders/{position}/{task_id}"
        assert task.payload == {"n": 1}
        assert task.name == "send_email"
        assert task.headers == {
            **headers,
            "topic": "shop orders",
            "key": "shop.eu",
            "position": position,
        }
        assert task.created_at == harness.clock.now()
    (message,) = await subscription.read() or await subscription.read()
    assert (message.position, message.headers) == (position, headers)


async def test_queue_bound_later_gets_only_later_messages(topics: Topics, harness: Harness) -> None:
    topic = topics.topic()
    await topic.bind("early")
    await topic.publish({"n": 1})
    await topic.bind("late")
    await topic.publish({"n": 2})
    assert await topic.unbind("early") is True
    assert await topic.unbind("early") is False
    await topic.publish({"n": 3})
    assert await payloads(harness.queue("early")) == [{"n": 1}, {"n": 2}]
    assert await payloads(harness.queue("late")) == [{"n": 2}, {"n": 3}]
    assert [one.queue for one in await topic.bindings()] == ["late"]
    await topic.unbind("late")
    assert await topic.bindings() == []
    assert await harness.stored("microqueue_bindings") == []


async def test_bindings_belong_to_one_topic(topics: Topics, harness: Harness) -> None:
    await topics.topic("news").bind("mail")
    await topics.topic("other").publish({"n": 1})
    assert await payloads(harness.queue("mail")) == []
    assert await topics.topic("other").bindings() == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [0, 1, 2]),
        ("shop.*", [0, 1]),
        ("shop.eu", [0]),
        ({"order.country": "FR"}, [1, 2]),
        ({"order.country": "FR", "n": 2}, [2]),
    ],
)
async def test_filter_chooses_messages(
    topics: Topics, harness: Harness, given: Any, expected: list[int]
) -> None:
    topic = topics.topic()
    binding = await topic.bind("mail", given)
    assert binding.filter == given
    for n, (key, country) in enumerate([("shop.eu", "DE"), ("shop.us", "FR"), ("", "FR")]):
        await topic.publish({"n": n, "order": {"country": country}}, key=key)
    assert [one["n"] for one in await payloads(harness.queue("mail"))] == expected


async def test_binding_again_replaces_filter_and_options(topics: Topics, harness: Harness) -> None:
    topic = topics.topic()
    first = await topic.bind("mail", "shop.*", priority=7)
    await topic.bind("other", max_attempts=4)
    harness.clock.advance(60)
    assert await topic.bind("mail", {"n": 2}) == Binding(
        topic="news",
        queue="mail",
        filter={"n": 2},
        bound_at=first.bound_at,
        max_attempts=10,
        backoff=BackoffPolicy(),
    )
    await topic.publish({"n": 1}, key="shop.eu")
    await topic.publish({"n": 2}, key="shop.eu")
    assert await payloads(harness.queue("mail")) == [{"n": 2}]
    assert [(one.queue, one.max_attempts) for one in await topic.bindings()] == [
        ("mail", 10),
        ("other", 4),
    ]


async def test_tasks_have_the_options_of_the_binding(topics: Topics, harness: Harness) -> None:
    topic = topics.topic()
    options = {
        "priority": 9,
        "delay": 30,
        "max_attempts": 2,
        "backoff": BACKOFF,
        "visibility_timeout": timedelta(seconds=77),
        "expires_in": 3600,
    }
    binding = await topic.bind("mail", **options)
    assert (await topic.bindings()) == [binding]
    await topic.publish({"n": 1})
    (stored,) = await harness.stored()
    assert (stored["priority"], stored["max_attempts"]) == (9, 2)
    assert stored["backoff_policy"] == BACKOFF.model_dump()
    assert stored["visibility_timeout_sec"] == 77
    assert stored["expires_at"] - stored["created_at"] == timedelta(hours=1)
    queue = harness.queue("mail")
    assert await queue.pop() is None
    harness.clock.advance(30)
    assert await queue.pop() is not None


async def test_retries_are_those_of_the_bound_queue(topics: Topics, harness: Harness) -> None:
    settings = QueueSettings(max_attempts=5, backoff=BackoffPolicy(base_sec=8, jitter="none"))
    topic = topics.topic(settings=settings)
    await topic.bind(plain(harness.queue("mail", max_attempts=2, backoff=BACKOFF)))
    await topic.bind("named")
    # Whoever publishes, with whatever settings.
    await topics.topic(settings=QueueSettings(max_attempts=1)).publish({"n": 1})
    mail, named = harness.queue("mail"), harness.queue("named")
    for queue, base_sec, most in ((mail, 3, 2), (named, 8, 5)):
        task = await queue.pop()
        assert task.max_attempts == most
        await queue.mark_retry(task, "broken")
        harness.clock.advance(base_sec - 0.1)
        assert await queue.pop() is None
        harness.clock.advance(0.1)
        await queue.mark_failure(await queue.pop(), "broken")
        assert [one.payload for one in await queue.dead_letters.list()] == [{"n": 1}]


async def test_repeated_message_adds_nothing(topics: Topics, harness: Harness) -> None:
    topic = topics.topic(max_messages=2)
    queue = harness.queue("mail")
    await topic.bind("mail")
    await topic.bind("audit")
    await topic.publish({"n": 1}, message_id="order-1")
    await topic.bind("late")
    await topic.publish({"n": 1}, message_id="order-1")
    assert len(await harness.stored()) == 2  # None for the queue bound later.
    await queue.mark_done(await queue.pop())
    for n in (2, 3):  # The topic no longer has the first message; the queues have its tasks.
        await topic.publish({"n": n})
    before = await harness.stored()
    await topic.unbind("late")
    await topic.publish({"n": 1}, message_id="order-1")
    assert await harness.stored() == before


async def test_repeat_completes_what_an_interrupted_call_left_out(
    topics: Topics, harness: Harness
) -> None:
    topic = topics.topic()
    for name in ("a", "b", "c"):
        await topic.bind(name)
    subscription = await topics.subscribe(topic)
    quiet = topics.topic(live=False)
    await topic.unbind("b")
    await quiet.publish({"n": 1}, message_id="m")  # To two queues, and to no subscriber.
    await topic.bind("b")
    await topic.publish({"n": 1}, message_id="m")
    assert sorted(one["queue"] for one in await harness.stored()) == ["a", "b", "c"]
    assert [one.body for one in await subscription.read()] == [{"n": 1}]


@pytest.mark.parametrize("end", ["fail", "replay", "discard"])
async def test_repeat_knows_a_dead_letter_in_its_own_collection(
    topics: Topics, harness: Harness, end: str
) -> None:
    settings = QueueSettings(dead_letters="collection")
    topic = topics.topic(live=False, settings=settings)
    queue = harness.queue("mail", dead_letters="collection")
    await topic.bind("mail")
    await topic.bind("audit")
    await topic.publish({"n": 1}, message_id="m")
    task = await queue.pop()
    await queue.mark_failure(task, "broken")
    await harness.sweeper(queue).move_dead_letters()
    if end == "replay":
        await queue.dead_letters.replay([task.id])
    elif end == "discard":
        await queue.dead_letters.discard([task.id])
    before = await harness.stored(), await harness.stored("tasks_dlq")
    await topic.publish({"n": 1}, message_id="m")
    assert (await harness.stored(), await harness.stored("tasks_dlq")) == before


async def test_another_task_with_the_id_of_a_message(topics: Topics, harness: Harness) -> None:
    topic = topics.topic()
    await topic.bind("mail")
    await harness.queue("mail").enqueue({}, task_id="news/m/mail")
    with pytest.raises(DuplicateTask) as raised:
        await topic.publish({"n": 1}, message_id="m")
    assert raised.value.existing_id == "news/m/mail"


async def test_topic_without_live_messages(topics: Topics, harness: Harness) -> None:
    topic = topics.topic(live=False, max_bytes=4096)
    await topic.bind("mail")
    await topic.publish({"n": "x" * 5000})
    assert len(await payloads(harness.queue("mail"))) == 1
    assert await harness.stored("tasks_topic_news") == []
    with pytest.raises(InvalidArgument) as raised:
        await topic.subscribe()
    assert raised.value.argument == "live"


@pytest.mark.one_driver
@pytest.mark.parametrize(
    ("argument", "queue", "options"),
    [
        ("queue", "", {}),
        ("queue", 7, {}),
        ("filter", "mail", {"filter": {"$where": "1"}}),
        ("priority", "mail", {"priority": 256}),
        ("max_attempts", "mail", {"max_attempts": 0}),
        ("dedupe_key", "mail", {"dedupe_key": "k"}),
        ("prority", "mail", {"prority": 1}),
    ],
)
async def test_bad_arguments_of_bind(
    topics: Topics, harness: Harness, argument: str, queue: Any, options: Any
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        await topics.topic().bind(queue, **options)
    assert raised.value.argument == argument
    assert await harness.stored("microqueue_bindings") == []


@pytest.mark.one_driver
async def test_queue_of_another_collection(topics: Topics, harness: Harness) -> None:
    other = plain(Harness(harness.driver, harness.database.jobs, harness.clock).queue("mail"))
    for call in (topics.topic().bind, topics.topic().unbind):
        with pytest.raises(InvalidArgument) as raised:
            await call(other)
        assert raised.value.argument == "queue"


async def test_topic_has_a_largest_number_of_bindings(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microqueue.operations.bindings.MOST_BINDINGS", 2)
    topic = topics.topic()
    await topic.bind("a")
    await topic.bind("b")
    with pytest.raises(InvalidArgument) as raised:
        await topic.bind("c")
    assert raised.value.argument == "queue"
    await topic.bind("a", "changed")
    assert [(one.queue, one.filter) for one in await topic.bindings()] == [
        ("a", "changed"),
        ("b", None),
    ]
