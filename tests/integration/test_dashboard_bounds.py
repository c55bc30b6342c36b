"""No request is long or large, whatever is stored and whatever is asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import ExecutionTimeout
from pymongo.monitoring import CommandListener

from microqueue import DeadLetterFilter, Queue, QueueSettings
from microqueue.core import core_of
from microqueue.dashboard.access import ReadCache
from microqueue.embedded import EmbeddedServer
from microqueue.operations import dead_letters, paging, search
from microqueue.operations.call import Call
from tests.integration.dashboard_site import Site, opened

pytestmark = pytest.mark.usefixtures("unhurried_searches")


class Heard(CommandListener):
    """Keeps the commands that a client sends."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def started(self, event: Any) -> None:
        self.commands.append(str(event.command))

    def succeeded(self, event: Any) -> None: ...

    def failed(self, event: Any) -> None: ...


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def client(microqueue_server: EmbeddedServer, heard: Heard) -> Iterator[MongoClient[Any]]:
    with MongoClient[Any](microqueue_server.uri, event_listeners=[heard]) as client:
        yield client


def bury(site: Site, messages: list[str], code: str | None = "X") -> None:
    """Make dead letters, the newest last, quickly."""
    site.queue.enqueue_many([{"n": n} for n in range(len(messages))])
    for task in site.queue.pop_many(len(messages)):
        core_of(site.queue).collections.tasks.update_one(
            {"_id": task.id},
            {
                "$set": {
                    "status": "failed",
                    "updated_at": site.clock.now() + timedelta(milliseconds=task.payload["n"]),
                    "error": {"message": messages[task.payload["n"]], "code": code},
                }
            },
        )


def numbers(items: list[Any]) -> list[int]:
    return [json.loads(row["preview"])["n"] for row in items]


# Dead letters


async def test_no_filter_of_letters_becomes_a_pattern_that_the_server_has_to_try(
    client: MongoClient[Any], heard: Heard, microqueue_database: Any
) -> None:
    async with opened(client[microqueue_database.name]) as site:
        bury(site, ["1" * 300 + "x"] * 200)
        heard.commands.clear()
        queries: list[dict[str, Any]] = [{"group": "<n><n><n><n>"}, {"text": "1111111x"}]
        for query in queries:
            for path in ("/dead-letters", "/dead-letters/groups", "/dead-letters/export"):
                await site.get(path, **query)
    assert heard.commands
    assert not [one for one in heard.commands if "regex" in one]


async def test_letters_are_filtered_by_code_text_and_group(site: Site) -> None:
    bury(site, [f"order {n} timed out" for n in range(5)])
    bury(site, ["order 1 timed out twice", "Order 7 TIMED OUT"], code=None)
    listed = await site.get("/dead-letters", group="order <n> timed out")
    assert numbers(listed["items"]) == [4, 3, 2, 1, 0]
    assert (listed["complete"], listed["next_cursor"]) == (True, None)
    assert len((await site.get("/dead-letters", text="TIMED out"))["items"]) == 7
    assert len((await site.get("/dead-letters", text="timed", code=""))["items"]) == 2
    assert len((await site.get("/dead-letters", code="X"))["items"]) == 5
    assert len((await site.get("/dead-letters", text="order 1", code="X"))["items"]) == 1
    groups = await site.get("/dead-letters/groups", text="twice")
    assert [(one["message"], one["count"]) for one in groups["groups"]] == [
        ("order <n> timed out twice", 1)
    ]
    assert (groups["total"], groups["more_groups"], groups["truncated"]) == (1, 0, False)


@pytest.mark.parametrize("query", [{"text": "needle"}, {"group": "a needle"}])
async def test_search_of_letters_stops_to_stay_quick_and_goes_on_from_there(
    site: Site, monkeypatch: pytest.MonkeyPatch, query: dict[str, Any]
) -> None:
    bury(site, ["a needle", *["hay"] * 9])
    monkeypatch.setattr(paging, "STEP", 4)
    monkeypatch.setattr(paging, "SCAN_SEC", -1.0)
    told = []
    found: dict[str, Any] = {"next_cursor": None}
    for _ in range(3):
        at = {"cursor": found["next_cursor"]} if found["next_cursor"] else {}
        found = await site.get("/dead-letters", **query, **at)
        told.append((len(found["items"]), found["complete"]))
    assert told == [(0, False), (0, False), (1, True)]
    assert found["next_cursor"] is None
    exported = await site.get("/dead-letters/export", **query)
    assert [json.loads(line)["payload"] for line in exported.splitlines()] == [{"n": 0}]


async def test_walk_looks_at_the_time_within_a_step(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(site, ["hay"] * 10)
    monkeypatch.setattr(paging, "LEAST_SEC", -1.0)
    monkeypatch.setattr(paging, "SCAN_SEC", -1.0)
    found = await site.get("/dead-letters", text="needle")
    rest = await site.get("/dead-letters", cursor=found["next_cursor"])
    assert (found["complete"], numbers(rest["items"])) == (False, [8, 7, 6, 5, 4, 3, 2, 1, 0])


async def test_letters_with_a_rare_code_are_looked_for_in_steps(
    client: MongoClient[Any], heard: Heard, microqueue_database: Any
) -> None:
    async with opened(client[microqueue_database.name]) as site:
        bury(site, ["no"] * 3)
        heard.commands.clear()
        assert len((await site.get("/dead-letters", code="X"))["items"]) == 3
    (asked,) = [one for one in heard.commands if "error.code" in one]
    # The driver takes the time to the server off.
    limit = re.search(r"'maxTimeMS': (\d+)", asked)
    assert limit is not None
    assert int(limit[1]) <= search.QUICK_MS


def made_by(call: Call, *documents: dict[str, Any]) -> list[Any]:
    """Reply as a driver does: with what the call makes of each document."""
    assert call.each is not None
    return list(map(call.each(), documents))


def test_letters_are_walked_when_the_server_takes_too_long() -> None:
    which = DeadLetterFilter(code="X")
    page = search.dead_letter_page("q", which, limit=5, cursor=None, settings=QueueSettings())
    assert next(page).options["max_time_ms"] == search.QUICK_MS
    paging = page.throw(ExecutionTimeout("too slow"))
    assert "error.code" not in paging.arguments[0]
    one = {"_id": 1, "updated_at": None, "error": {"code": "X"}}
    whole = page.send(made_by(paging, one, {**one, "_id": 2, "error": {"code": "Y"}}))
    assert whole.arguments == ({"_id": {"$in": [1]}},)
    with pytest.raises(StopIteration) as ended:
        page.send(made_by(whole, one))
    assert (ended.value.value.documents, ended.value.value.complete) == ([one], True)


def test_groups_of_a_rare_code_are_those_among_the_newest_letters() -> None:
    grouping = dead_letters.groups("q", DeadLetterFilter(code="X"), QueueSettings())
    first = next(grouping)
    assert first.options["maxTimeMS"] == dead_letters.QUICK_MS
    assert first.arguments[0][0]["$match"]["error.code"] == {"$eq": "X"}
    second = grouping.throw(ExecutionTimeout("too slow"))
    assert second.options["maxTimeMS"] == dead_letters.LONGEST_MS
    stages = [next(iter(stage)) for stage in second.arguments[0]]
    assert stages == ["$match", "$sort", "$limit", "$match", "$group"]
    with pytest.raises(StopIteration) as ended:
        grouping.send([])
    assert (ended.value.value.total, ended.value.value.truncated) == (0, True)


def test_groups_that_take_too_long_are_a_problem() -> None:
    grouping = dead_letters.groups("q", DeadLetterFilter(), QueueSettings())
    assert next(grouping).options["maxTimeMS"] == dead_letters.LONGEST_MS
    with pytest.raises(ExecutionTimeout):  # Reported as ServerUnavailable.
        grouping.throw(ExecutionTimeout("too slow"))


async def test_largest_groups_are_shown_and_the_others_counted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microqueue.dashboard.routes_read.MAX_GROUPS", 2)
    bury(site, ["a", "b", "b", "c", "c", "c", "d"])
    found = await site.get("/dead-letters/groups")
    assert [one["message"] for one in found["groups"]] == ["c", "b"]
    assert (found["total"], found["more_groups"]) == (7, 2)


# Pages and metrics


async def test_running_tasks_are_no_more_than_the_largest_page(microqueue_database: Any) -> None:
    async with opened(microqueue_database, page_limit=2) as site:
        site.queue.enqueue_many([{}] * 5)
        site.queue.pop_many(5)
        running = await site.get("/running", limit=1000)
        assert (len(running["items"]), running["total"]) == (2, 5)


async def test_metrics_cost_the_same_however_many_queues_there_are(
    client: MongoClient[Any], heard: Heard, microqueue_database: Any
) -> None:
    async with opened(client[microqueue_database.name]) as site:
        others = [Queue[Any](microqueue_database, f"q{n}", clock=site.clock) for n in range(20)]
        for queue in others:
            queue.enqueue_many([{}] * 4)
            done, dead, _running = queue.pop_many(3)
            queue.mark_done(done)
            queue.mark_failure(dead, "no")
        heard.commands.clear()
        text = (await site.client.get("/metrics")).text
        # On a slow machine, a ping checks a connection that was idle for some time.
        assert len([one for one in heard.commands if not one.startswith("{'ping'")]) <= 8
    for status in ("ready", "processing", "done", "failed"):
        assert f'microqueue_queue_depth{{queue="q19",status="{status}"}} 1.0' in text
    assert 'microqueue_queue_depth{queue="default",status="ready"} 0.0' in text


# What an open page costs


@dataclass
class Time:
    """A clock that a test moves."""

    monotonic: Callable[[], float]


@pytest.mark.parametrize("took_sec", [1.0, 20.0, 100.0])
async def test_answer_is_kept_five_times_as_long_as_it_took(
    monkeypatch: pytest.MonkeyPatch, took_sec: float
) -> None:
    now = 0.0
    reads = 0
    monkeypatch.setattr("microqueue.dashboard.access.time", Time(lambda: now))

    async def read() -> int:
        nonlocal now, reads
        reads += 1
        now += took_sec
        return reads

    kept = ReadCache(0.3)
    await kept.get("key", read)
    kept.expire()
    now += 5 * took_sec - 0.1
    assert await kept.get("key", read) == 1
    now += 0.2
    assert await kept.get("key", read) == 2


async def test_answer_is_not_kept_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("microqueue.dashboard.access.time", Time(lambda: now))

    async def read() -> float:
        nonlocal now
        now += 3600
        return now

    kept = ReadCache(0.3)
    first = await kept.get("key", read)
    now += 901
    assert await kept.get("key", read) > first
