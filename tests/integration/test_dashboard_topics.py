"""Topics through the dashboard: what it shows of them, and what viewers may do."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from urllib.parse import quote

import pytest

from microqueue import Queue, Topic
from microqueue.masking import MASK
from tests.integration.dashboard_site import API, Site, opened


@pytest.fixture
def topic(site: Site) -> Topic:
    return Topic(site.queue, "prices")


async def test_topics_are_listed_with_what_they_keep_and_their_bindings(
    site: Site, topic: Topic
) -> None:
    assert (await site.get("/topics"))["topics"] == []
    topic.bind("mail", "shop.*", priority=3, delay=60, max_attempts=4, expires_in=90)
    topic.bind("stock", {"order.country": "FR"})
    topic.publish({"n": 1})
    begun = site.clock.now()
    site.clock.advance(30)
    topic.publish({"n": 2})
    found = await site.get("/topics")
    (row,) = found["topics"]
    assert (row["topic"], row["messages"], row["max_messages"]) == ("prices", 2, 10_000)
    assert 0 < row["bytes"] < row["max_bytes"] == 64 * 1024 * 1024
    assert datetime.fromisoformat(row["oldest_at"]) == begun
    assert datetime.fromisoformat(row["newest_at"]) == site.clock.now()
    mail, stock = row["bindings"]
    assert (mail["queue"], mail["filter"], mail["priority"]) == ("mail", "shop.*", 3)
    assert (mail["delay_sec"], mail["expires_in_sec"], mail["max_attempts"]) == (60, 90, 4)
    assert stock["filter"] == {"order.country": "FR"}
    Topic(site.queue, "a").publish({})
    first = await site.get("/topics", limit=1)
    assert ([one["topic"] for one in first["topics"]], first["total"]) == (["a"], 2)
    assert (await site.get("/topics", topic="prices"))["topics"] == found["topics"]
    assert (await site.get("/topics", topic="other"))["topics"] == []


async def test_newest_messages_are_shown_newest_first(site: Site, topic: Topic) -> None:
    positions = [topic.publish({"n": n}, key=f"k{n}", headers={"h": n}) for n in range(3)]
    found = await site.get("/topics/prices/messages", limit=2)
    assert [one["position"] for one in found["items"]] == positions[:0:-1]
    assert found["items"][0]["preview"] == '{"n": 2}'
    assert datetime.fromisoformat(found["items"][0]["published_at"]) == site.clock.now()
    whole = await site.get("/topics/prices/message", position=positions[1])
    assert (whole["body"], whole["headers"], whole["key"]) == ({"n": 1}, {"h": 1}, "k1")
    await site.get("/topics/prices/message", position="none", expect=404)
    assert (await site.get("/topics/unknown/messages"))["items"] == []


@pytest.mark.parametrize("name", ["a/b", "messages", "a b?c#d", "%2e%2e", "über"])
async def test_topic_is_used_whatever_its_name(site: Site, name: str) -> None:
    path = f"/topics/{quote(name, safe='')}"
    position = (await site.post(f"{path}/publish", {"message": {"n": 1}}, expect=201))["position"]
    assert [one["topic"] for one in (await site.get("/topics"))["topics"]] == [name]
    (row,) = (await site.get(f"{path}/messages"))["items"]
    assert row["position"] == position
    assert (await site.get(f"{path}/message", position=position))["body"] == {"n": 1}
    await site.post(f"{path}/bind", {"queue": "mail"})
    assert (await site.post(f"{path}/unbind", {"queue": "mail"}))["was_bound"] is True


async def test_message_is_published_to_subscribers_and_bound_queues(
    site: Site, topic: Topic
) -> None:
    body = {
        "queue": "default",
        "filter": {"at": {"$date": "2026-05-01T00:00:00Z"}},
        "priority": 5,
        "delay_sec": 0,
        "max_attempts": 7,
        "expires_in_sec": 60,
    }
    bound = await site.post("/topics/prices/bind", body)
    assert (bound["queue"], bound["priority"], bound["max_attempts"]) == ("default", 5, 7)
    message = {
        "message": {"at": {"$date": "2026-05-01T00:00:00Z"}},
        "key": "shop.eu",
        "headers": {"trace": "x"},
        "message_id": "m1",
    }
    for _ in range(2):
        published = await site.post("/topics/prices/publish", message, expect=201)
        assert published == {"topic": "prices", "position": "m1"}
    (found,) = topic.peek()
    assert (found.key, found.headers) == ("shop.eu", {"trace": "x"})
    (task,) = site.queue.pop_many(10)
    assert (task.payload["at"].year, task.headers["position"]) == (2026, "m1")
    assert (task.priority, task.max_attempts) == (5, 7)
    await site.post("/topics/prices/unbind", {"queue": "default"})
    unbound = await site.post("/topics/prices/unbind", {"queue": "default"})
    assert unbound == {"topic": "prices", "queue": "default", "was_bound": False}
    audit = [
        (one["action"], one["queue"], one["target"], one["count"])
        for one in (await site.get("/audit"))["items"]
    ]
    assert audit == [
        ("topic.unbind", "default", "prices", 0),
        ("topic.unbind", "default", "prices", 1),
        ("topic.publish", None, "prices", 1),
        ("topic.publish", None, "prices", 1),
        ("topic.bind", "default", "prices", 1),
    ]


@pytest.mark.parametrize(
    ("verb", "body", "path"),
    [
        ("publish", {"message": {"$date": "2026-05-01T00:00:00Z"}}, "message"),
        ("publish", {"message": {"n": 2**70}}, "message"),
        ("publish", {"headers": {"topic": "x"}}, "headers"),
        ("publish", {"key": "k" * 256}, "key"),
        ("publish", {"message_id": "now"}, "message_id"),
        ("publish", {"body": {}}, "body"),
        ("bind", {"queue": "mail", "filter": "shop*"}, "filter"),
        ("bind", {"queue": "mail", "filter": {"$where": "1"}}, "filter"),
        ("bind", {"queue": "mail", "filter": {"a": {"$gt": 1}}}, "filter"),
        ("bind", {"queue": "\n"}, "queue"),
        ("bind", {"queue": "mail", "priority": 256}, "priority"),
        ("unbind", {}, "queue"),
    ],
)
async def test_value_that_is_not_valid_is_named_and_nothing_is_stored(
    site: Site, microqueue_database: Any, verb: str, body: Any, path: str
) -> None:
    problem = await site.post(f"/topics/prices/{verb}", body, expect=422)
    assert {one["path"].split(".")[0] for one in problem["errors"]} == {path}
    stored = set(microqueue_database.list_collection_names()) - {"microqueue_audit"}
    assert stored == set()


async def test_name_that_no_topic_can_have(site: Site) -> None:
    for name in ("n" * 81, quote("a\u202eb"), quote("\U0001f4e3" * 20)):
        await site.get(f"/topics/{name}/messages", expect=422)
        await site.post(f"/topics/{name}/publish", {}, expect=422)


async def test_collection_that_is_not_capped_is_a_conflict(
    site: Site, microqueue_database: Any
) -> None:
    microqueue_database.create_collection("tasks_topic_prices")
    problem = await site.post("/topics/prices/publish", {}, expect=409)
    assert problem["code"] == "TopicConflict"


async def test_secrets_of_messages_and_filters_are_masked(site: Site, topic: Topic) -> None:
    topic.bind("mail", {"password": "letmein"})
    position = topic.publish({"password": "letmein"}, headers={"token": "letmein"})
    for path in ("", "/prices/messages", f"/prices/message?position={position}"):
        reply = await site.client.get(f"{API}/topics{path}")
        assert reply.status_code == 200
        assert "letmein" not in reply.text, path
        assert MASK in reply.text, path


async def test_malformed_binding_does_not_hide_the_others(
    site: Site, topic: Topic, microqueue_database: Any
) -> None:
    for queue in ("a", "b"):
        topic.bind(queue)
    broken = {"$set": {"bindings.0.max_attempts": "many"}}
    microqueue_database.microqueue_bindings.update_one({}, broken)
    microqueue_database.microqueue_bindings.insert_one({"collection": "tasks"})
    (row,) = (await site.get("/topics"))["topics"]
    assert [one["queue"] for one in row["bindings"]] == ["b"]
    topic.unbind("a")
    topic.publish({"n": 1})
    assert Queue(microqueue_database, "b").pop() is not None


async def test_page_of_messages_is_never_larger_than_the_limit(microqueue_database: Any) -> None:
    async with opened(microqueue_database, page_limit=2) as site:
        for name in "abc":
            for n in range(3):
                Topic(site.queue, name).publish({"n": n})
        assert len((await site.get("/topics", limit=100))["topics"]) == 2
        assert len((await site.get("/topics/a/messages", limit=100))["items"]) == 2
