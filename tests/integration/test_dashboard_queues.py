"""The scope of requests: views show all queues, and actions on all queues must ask for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from microqueue import Queue
from microqueue.core import core_of
from microqueue.dead_letter_models import DeadLetterFilter
from microqueue.operations import dead_letters, paging
from microqueue.operations.indexes import index_names
from tests.integration.dashboard_site import SETTINGS, Site, opened

pytestmark = pytest.mark.usefixtures("unhurried_searches")

QUEUES = ("default", "billing", "mail")


def bury(site: Site, queue: str, message: str = "boom", code: str = "Boom") -> Any:
    owner: Queue[Any] = Queue(
        core_of(site.queue).collections.tasks, queue, settings=site.queue.settings, clock=site.clock
    )
    owner.enqueue({"queue": queue})
    task = owner.pop()
    assert task is not None
    owner.mark_failure(task, message, code=code)
    site.clock.advance(1)
    return str(task.id)


@pytest.fixture(params=["status", "collection"])
async def letters(request: pytest.FixtureRequest, microqueue_database: Any) -> Any:
    """A dashboard of the queue ``default``, which has no dead letters while others have."""
    settings = SETTINGS.model_copy(update={"dead_letters": request.param})
    async with opened(microqueue_database, settings=settings) as site:
        yield site


async def test_views_show_all_queues_and_say_so(letters: Site) -> None:
    first, second, third = (bury(letters, one) for one in ("mail", "billing", "mail"))
    page = await letters.get("/dead-letters", limit=2)
    assert [row["id"] for row in page["items"]] == [third, second]
    assert (page["queue"], page["all_queues"]) == (None, True)
    rest = await letters.get("/dead-letters", limit=2, cursor=page["next_cursor"])
    assert [row["id"] for row in rest["items"]] == [first]
    groups = await letters.get("/dead-letters/groups")
    assert (groups["total"], groups["queue"], groups["all_queues"]) == (3, None, True)
    lines = (await letters.get("/dead-letters/export")).splitlines()
    assert [json.loads(line)["queue"] for line in lines] == ["mail", "billing", "mail"]
    for path in ("/tasks", "/running"):
        reply = await letters.get(path)
        assert (reply["queue"], reply["all_queues"]) == (None, True)
    for text in ("boom", "none"):
        found = await letters.get("/dead-letters", text=text)
        assert len(found["items"]) == (3 if text == "boom" else 0)


async def test_view_of_one_queue_says_which(letters: Site) -> None:
    bury(letters, "mail")
    bury(letters, "billing")
    for path in ("/dead-letters", "/dead-letters/groups", "/tasks", "/running"):
        reply = await letters.get(path, queue="mail")
        assert (reply["queue"], reply["all_queues"]) == ("mail", False)
    assert (await letters.get("/dead-letters/groups", queue="mail"))["total"] == 1
    assert len((await letters.get("/dead-letters/export", queue="mail")).splitlines()) == 1


@pytest.mark.parametrize("verb", ["replay", "discard"])
async def test_many_letters_are_acted_on_only_where_it_is_told(letters: Site, verb: str) -> None:
    for queue in ("default", "mail", "billing", "mail"):
        bury(letters, queue)
    body: dict[str, Any]
    for body in ({"filter": {}}, {"filter": {"code": "Boom"}, "dry_run": True}):
        problem = await letters.post(f"/dead-letters/{verb}", body, expect=422)
        assert {"queue", "all_queues=true"} <= set(problem["detail"].replace(",", "").split())
    assert (await letters.get("/dead-letters/groups"))["total"] == 4

    body = {"queue": "mail", "filter": {}, "limit": 1}
    reply = await letters.post(f"/dead-letters/{verb}", body)
    assert (reply["matched"], reply["queue"], reply["all_queues"]) == (1, "mail", False)
    body = {"all_queues": True, "filter": {"text": "boom"}, "dry_run": True}
    assert (await letters.post(f"/dead-letters/{verb}", body))["matched"] == 3
    reply = await letters.post(f"/dead-letters/{verb}", {**body, "dry_run": False})
    assert (reply["matched"], reply["queue"], reply["all_queues"]) == (3, None, True)
    assert (await letters.get("/dead-letters"))["items"] == []
    newest, older = (await letters.get("/audit"))["items"]
    assert (newest["queue"], newest["count"]) == (None, 3)
    assert newest["target"].startswith("all queues")
    assert (older["queue"], older["count"]) == ("mail", 1)


async def test_limit_takes_the_oldest_letters_of_all_queues(letters: Site) -> None:
    first, second, third = (bury(letters, one) for one in ("mail", "billing", "alarm"))
    body = {"all_queues": True, "filter": {}, "limit": 2}
    assert (await letters.post("/dead-letters/replay", body))["replayed"] == 2
    states = [(await letters.get(f"/tasks/{one}"))["state"] for one in (first, second, third)]
    assert states == ["ready", "ready", "failed"]


async def test_ids_mean_letters_of_any_queue(letters: Site) -> None:
    ids = [bury(letters, queue) for queue in QUEUES]
    body: dict[str, Any] = {"ids": ids[:2]}
    assert (await letters.post("/dead-letters/replay", body))["replayed"] == 2
    body = {"ids": [ids[2]], "queue": "default"}
    assert (await letters.post("/dead-letters/discard", body, expect=404))["code"] == "TaskNotFound"
    body = {"ids": [ids[2]], "all_queues": True}
    assert (await letters.post("/dead-letters/discard", body))["discarded"] == 1


def test_letters_of_all_queues_are_read_in_the_order_of_the_index(
    microqueue_database: Any,
) -> None:
    """Each queue's range of the index is merged; nothing is sorted in memory."""
    queue: Queue[Any] = Queue(microqueue_database)
    for name in QUEUES:
        owner: Queue[Any] = Queue(microqueue_database, name)
        owner.enqueue_many([{} for _ in range(5)])
        for task in owner.pop_many(5):
            owner.mark_failure(task, "boom")
    query = dead_letters.selection(list(QUEUES), DeadLetterFilter())
    cursor = microqueue_database.tasks.find(query).sort(paging.BY_FAILURE.order).limit(2)
    plan = cursor.explain()
    stages = json.dumps(plan["queryPlanner"]["winningPlan"], default=str)
    assert '"SORT_MERGE"' in stages
    assert '"SORT"' not in stages
    assert set(index_names(plan["queryPlanner"]["winningPlan"])) == {"failed"}
    assert plan["executionStats"]["totalKeysExamined"] <= 2 + 2 * len(QUEUES)
    assert queue.stats().failed == 5
