"""Every route of the dashboard, over a blocking and an asynchronous queue."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest
from bson import ObjectId

from microqueue import BackoffPolicy, Queue, QueueSettings
from microqueue.dashboard import access, dashboard
from microqueue.drivers import result_watch
from microqueue.embedded import EmbeddedServer
from microqueue.errors import InvalidArgument, ServerUnavailable
from microqueue.masking import MASK
from tests.integration.dashboard_site import API, Site, opened
from tests.rejection import rejecting
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("unhurried_searches")

# Looking


async def test_config_tells_the_server_time_and_the_settings(site: Site) -> None:
    config = await site.get("/config")
    assert datetime.fromisoformat(config["at"]) == site.clock.now()
    assert config["visibility_timeout_sec"] == 60
    assert (config["queue"], config["max_attempts"]) == ("default", 2)
    assert (config["read_only"], config["auth"], config["can_pause"]) == (False, False, True)


async def test_every_reply_tells_the_server_time(site: Site) -> None:
    reply = await site.client.get("/healthz")
    assert datetime.fromisoformat(reply.headers["x-server-time"]) == site.clock.now()


async def test_overview_shows_queues_workers_charts_and_the_last_sweep(site: Site) -> None:
    site.queue.enqueue_many([{}, {}])
    site.queue.mark_done(site.popped())
    await site.post("/sweeper/run")
    overview = await site.get("/overview")
    (default,) = overview["queues"]
    assert (default["ready"], default["done_last_hour"], default["paused"]) == (1, 1, False)
    assert overview["minutes"]["done"]["default"][-1] == 1
    assert len(overview["minutes"]["done"]["default"]) == 60
    assert overview["last_sweep"]["sweeper_id"]
    assert overview["workers"] == []
    assert (await site.get("/queues"))["queues"] == overview["queues"]
    assert (await site.get("/workers"))["workers"] == []
    assert (await site.get("/sweeper"))["last_sweep"] == overview["last_sweep"]


async def test_result_of_a_finished_task_is_masked(site: Site) -> None:
    site.queue.enqueue({})
    done = site.popped()
    site.queue.mark_done(done, result={"width": 3, "password": "x"})
    found = await site.get(f"/results/{done.id}")
    assert (found["id"], found["status"], found["finished"]) == (str(done.id), "done", True)
    assert (found["result"], found["error"]) == ({"width": 3, "password": MASK}, None)
    failed = await site.get(f"/results/{site.bury('no photo', 'gone').id}", wait=30)
    assert (failed["status"], failed["finished"]) == ("failed", True)
    assert (failed["error"]["code"], failed["error"]["message"]) == ("gone", "no photo")


async def test_result_is_waited_for_as_long_as_asked(site: Site) -> None:
    task = site.queue.enqueue({}, task_id="a/b")
    for wait in (0, 0.1):
        found = await site.get(f"/results/{task.id}", wait=wait)
        assert (found["status"], found["finished"], found["result"]) == ("pending", False, None)
    waits = [asyncio.ensure_future(site.get(f"/results/{task.id}", wait=30)) for _ in range(60)]
    # More than the server has threads, so that none of them waits in one.
    await asyncio.to_thread(wait_for, lambda: waiters() == 60)
    site.queue.mark_done(site.popped(), result=7)
    for found in await asyncio.gather(*waits):
        assert (found["status"], found["finished"], found["result"]) == ("done", True, 7)


def waiters() -> int:
    watches = list(result_watch._watches.values())  # noqa: SLF001 (to see who waits)
    return sum(len(several) for watch in watches for several in list(watch._waiters.values()))  # noqa: SLF001 (as above)


async def test_result_that_cannot_come_is_a_problem(site: Site) -> None:
    await site.get("/results/nothing", wait=30, expect=404)
    await site.get("/results/nothing", wait=31, expect=422)
    task = site.queue.enqueue({})
    waiting = asyncio.ensure_future(site.get(f"/results/{task.id}", wait=30, expect=404))
    await asyncio.to_thread(wait_for, lambda: waiters() == 1)
    site.queue.purge(status="pending")
    await waiting


async def test_requests_over_the_limit_do_not_wait(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "MAX_WAITS", 0)
    task = site.queue.enqueue({})
    assert (await site.get(f"/results/{task.id}", wait=30))["finished"] is False


async def test_running_tasks_tell_when_their_leases_end(site: Site) -> None:
    site.queue.enqueue({})
    task = site.popped(worker_id="w")
    (row,) = (await site.get("/running"))["items"]
    assert (row["id"], row["worker_id"], row["overdue"]) == (str(task.id), "w", False)
    assert (row["attempt"], row["max_attempts"]) == (1, 2)
    site.clock.advance(60)
    running = await site.get("/running", queue="default")
    assert (running["total"], running["items"][0]["overdue"]) == (1, True)
    assert (await site.get("/running", queue="other"))["items"] == []


async def test_running_tasks_of_a_queue_are_shown_however_many_run_elsewhere(
    site: Site, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microqueue.insights.MOST_RUNNING", 2)
    site.queue.enqueue_many([{}, {}, {}])
    for _ in range(3):
        site.popped()
    site.clock.advance(1)
    other: Queue[Any] = Queue(microqueue_database, "other", clock=site.clock)
    task = other.enqueue({})
    other.pop()
    running = await site.get("/running", queue="other")
    assert (running["total"], [row["id"] for row in running["items"]]) == (1, [str(task.id)])
    assert len((await site.get("/running"))["items"]) == 4


async def test_tasks_are_listed_filtered_and_paged(site: Site) -> None:
    for n in range(5):
        site.queue.enqueue({"n": n, "text": "needle" if n == 3 else ""})
        site.clock.advance(1)
    first = await site.get("/tasks", limit=3)
    second = await site.get("/tasks", limit=3, cursor=first["next_cursor"])
    shown = [json.loads(row["preview"])["n"] for row in first["items"] + second["items"]]
    assert shown == [4, 3, 2, 1, 0]
    assert second["next_cursor"] is None
    (found,) = (await site.get("/tasks", text="needle", status="ready"))["items"]
    assert json.loads(found["preview"])["n"] == 3
    since = (site.clock.now() - timedelta(seconds=2)).isoformat()
    assert len((await site.get("/tasks", since=since))["items"]) == 2
    assert (await site.get("/tasks", status="failed"))["items"] == []


async def test_tasks_are_counted_by_name(site: Site, microqueue_database: Any) -> None:
    for _ in range(3):
        site.queue.enqueue({}, name="pay")
    site.clock.advance(4)
    site.queue.mark_done(site.popped())
    site.queue.mark_failure(site.popped(), "no")
    other: Queue[Any] = Queue(microqueue_database, "other", clock=site.clock)
    other.enqueue({})
    reply = await site.get("/names")
    pay, nameless = reply["names"]
    counts = ("name", "waiting", "running", "done", "failed", "failure_rate")
    assert [pay[field] for field in counts] == ["pay", 1, 0, 1, 1, 0.5]
    assert [nameless[field] for field in counts] == [None, 1, 0, 0, 0, None]
    assert pay["wait_p95"] == pytest.approx(4, rel=0.07)
    assert (reply["total"], reply["queue"], reply["all_queues"]) == (2, None, True)
    since = site.clock.now() - timedelta(hours=1)
    assert datetime.fromisoformat(reply["since"]) == since
    reply = await site.get("/names", queue="default", limit=1)
    assert ([one["name"] for one in reply["names"]], reply["all_queues"]) == (["pay"], False)
    site.clock.advance(60)
    (pay,) = (await site.get("/names", queue="default", since_sec=30))["names"]
    assert (pay["waiting"], pay["done"], pay["failed"]) == (1, 0, 0)
    for query in ({"since_sec": 0}, {"since_sec": 1e9}, {"limit": 0}):
        await site.get("/names", **query, expect=422)


async def test_tasks_and_dead_letters_are_filtered_by_name(site: Site) -> None:
    for name in ("pay", "ship", None, "pay"):
        site.queue.enqueue({}, name=name)
        site.queue.enqueue({}, name=name, priority=9)
        site.queue.mark_failure(site.popped(), "no", code="c")
    for name, number in (("pay", 2), ("ship", 1), ("", 1), ("other", 0)):
        found = await site.get("/tasks", name=name, status="ready")
        assert [row["name"] for row in found["items"]] == [name or None] * number
        dead = await site.get("/dead-letters", name=name)
        assert [row["name"] for row in dead["items"]] == [name or None] * number
        groups = await site.get("/dead-letters/groups", name=name)
        assert groups["total"] == number
        body = {"filter": {"name": name}, "queue": "default", "dry_run": True}
        assert (await site.post("/dead-letters/replay", body))["matched"] == number
    await site.get("/tasks", name="x" * 201, expect=422)


async def test_page_is_never_larger_than_the_limit(
    microqueue_database: Any, microqueue_server: EmbeddedServer
) -> None:
    async with opened(microqueue_database, page_limit=2) as site:
        site.queue.enqueue_many([{} for _ in range(5)])
        assert len((await site.get("/tasks", limit=1000))["items"]) == 2
        await site.get("/tasks", limit=1001, expect=422)
        await site.get("/tasks", limit=0, expect=422)


@pytest.mark.parametrize("task_id", [42, "order/42", "a b?c#d", uuid4(), "cancel", "%2e%2e", None])
async def test_task_is_shown_whatever_its_id(site: Site, task_id: Any) -> None:
    task = site.queue.enqueue({"n": 1}, task_id=task_id, headers={"trace": "x"})
    shown = await site.get(f"/tasks/{quote(str(task.id), safe='')}")
    assert str(shown["id"]) == str(task.id)
    assert (shown["payload"], shown["headers"]) == ({"n": 1}, {"trace": "x"})
    cancelled = await site.post(f"/tasks/{quote(str(task.id), safe='')}/cancel")
    assert cancelled["error"]["code"] == "cancelled"


async def test_task_shows_its_attempts_and_what_can_be_done(site: Site) -> None:
    task = site.queue.enqueue({"at": datetime(2026, 5, 1, tzinfo=UTC), "ref": ObjectId()})
    assert (await site.get(f"/tasks/{task.id}"))["actions"] == ["cancel", "succeed", "fail"]
    site.queue.mark_retry(site.popped(worker_id="w"), "not yet", code="Later")
    shown = await site.get(f"/tasks/{task.id}")
    (attempt,) = shown["history"]
    assert (attempt["worker_id"], attempt["outcome"]) == ("w", "retried")
    assert attempt["error"]["code"] == "Later"
    assert shown["state"] == "delayed"
    assert "retry" in shown["actions"]
    assert shown["payload"]["at"] == {"$date": "2026-05-01T00:00:00Z"}
    assert set(shown["payload"]["ref"]) == {"$oid"}
    assert "lease_token" not in json.dumps(shown)


async def test_a_tasks_last_error_has_its_traceback(site: Site) -> None:
    task = site.queue.enqueue({})
    try:
        raise ValueError("boom, password=sesame")
    except ValueError as exc:
        site.queue.mark_retry(site.popped(), exc)
    shown = await site.get(f"/tasks/{task.id}")
    assert shown["error"]["traceback"].endswith(f"ValueError: boom, password={MASK}")
    assert "sesame" not in json.dumps(shown)
    assert "traceback" not in shown["history"][0]["error"]
    (row,) = (await site.get("/tasks"))["items"]
    assert "traceback" not in row["error"]


async def test_document_of_another_hand_is_still_shown(
    site: Site, microqueue_database: Any
) -> None:
    malformed = {
        "_id": "malformed",
        "queue": "default",
        "status": "strange",
        "attempts": "x",
        "error": 5,
    }
    malformed |= {
        "history": [5, {"outcome": 7}],
        "payload": float("nan"),
        "headers": [],
        "priority": "p",
    }
    microqueue_database.tasks.insert_one(malformed)
    assert (await site.get("/tasks/malformed"))["state"] == "strange"
    assert [row["id"] for row in (await site.get("/tasks"))["items"]] == ["malformed"]


@pytest.mark.parametrize("task_id", [1234567890123456789, 2**63 - 1, -(2**63), 17, "17"])
async def test_task_added_by_hand_is_answered_and_found_by_its_id(site: Site, task_id: Any) -> None:
    shown = await site.post("/tasks", {"task_id": task_id, "payload": {"n": 1}}, expect=201)
    assert shown["id"] == (task_id if task_id in {17, "17"} else str(task_id))
    assert (await site.get(f"/tasks/{task_id}"))["payload"] == {"n": 1}
    await site.post("/tasks", {"task_id": 2**63}, expect=422)


def stored_ids(site: Site) -> list[Any]:
    return [one.id for one in reversed(site.queue.peek(100))]


async def test_ids_that_look_alike_are_told_apart(site: Site) -> None:
    hexed, uuid, large = ObjectId(), uuid4(), 2**60
    twins: list[Any] = [17, "17", hexed, str(hexed), uuid, str(uuid), large, str(large)]
    for n, task_id in enumerate(twins):
        body = {"task_id": task_id, "payload": {"n": n}}
        if isinstance(task_id, str | int) and task_id != str(hexed):
            assert (await site.post("/tasks", body, expect=201))["payload"] == {"n": n}
        else:
            site.queue.enqueue({"n": n}, task_id=task_id)
    rows = (await site.get("/tasks"))["items"]
    assert len({row["reference"] for row in rows}) == len(twins)
    for row in rows:
        n = json.loads(row["preview"])["n"]
        path = f"/tasks/{quote(row['reference'], safe='')}"
        assert (await site.get(path))["payload"] == {"n": n}
        cancelled = await site.post(f"{path}/cancel")
        assert cancelled["payload"] == {"n": n}
    for row in rows:
        n = json.loads(row["preview"])["n"]
        chosen = row["id"] if isinstance(row["id"], int) else row["reference"]
        dry = await site.post("/dead-letters/replay", {"ids": [chosen], "dry_run": True})
        assert dry["matched"] == 1
        assert (await site.post("/dead-letters/discard", {"ids": [chosen]}))["discarded"] == 1
        left = stored_ids(site)
        assert twins[n] not in left
        assert site.queue.stats().failed == len(left)


async def test_id_as_it_is_shown_means_one_letter(site: Site) -> None:
    for task_id in (17, "17", 18):
        site.queue.enqueue({}, task_id=task_id)
        site.queue.mark_failure(site.popped(), "boom")
    assert (await site.post("/dead-letters/discard", {"ids": ["17"]}))["discarded"] == 1
    assert stored_ids(site) == [17, 18]
    assert (await site.post("/dead-letters/discard", {"ids": ["18"]}))["discarded"] == 1
    assert (await site.post("/dead-letters/discard", {"ids": [17, 99, "99"]}))["discarded"] == 1
    assert site.queue.stats().failed == 0


async def test_unknown_task_is_a_problem(site: Site) -> None:
    problem = await site.get("/tasks/none", expect=404)
    assert (problem["code"], problem["status"], problem["title"]) == (
        "TaskNotFound",
        404,
        "Not Found",
    )
    await site.post("/tasks/none/cancel", expect=404)
    assert (await site.get("/nowhere", expect=404))["code"] == "NotFound"


# Acting on tasks


async def test_task_is_enqueued_by_hand(site: Site) -> None:
    body = {
        "queue": "mail", "payload": {"at": {"$date": "2026-05-01T00:00:00Z"}}, "priority": 7,
        "delay_sec": 5, "max_attempts": 4, "dedupe_key": "k", "task_id": "mine",
        "headers": {"by": "hand"}, "expires_in_sec": 60, "visibility_timeout_sec": 900,
        "backoff": {"base_sec": 7, "jitter": "none"},
    }  # fmt: skip
    shown = await site.post("/tasks", body, expect=201)
    assert (shown["id"], shown["queue"], shown["state"]) == ("mine", "mail", "delayed")
    task = site.queue.get("mine")
    assert task is not None
    assert task.payload == {"at": datetime(2026, 5, 1, tzinfo=UTC)}
    assert (task.priority, task.max_attempts, task.dedupe_key) == (7, 4, "k")
    assert task.headers == {"by": "hand"}
    assert task.backoff == BackoffPolicy(base_sec=7, jitter="none")
    assert task.visibility_timeout_sec == 900
    assert task.expires_at == site.clock.now() + timedelta(seconds=60)
    problem = await site.post("/tasks", body, expect=409)
    assert problem["code"] == "DuplicateTask"


async def test_task_is_enqueued_for_an_instant(site: Site) -> None:
    at = site.clock.now() + timedelta(hours=2)
    shown = await site.post("/tasks", {"eta": at.isoformat()}, expect=201)
    assert datetime.fromisoformat(shown["next_retry_at"]) == at


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"eta": "2026-05-01T12:00:00"}, "eta"),
        ({"eta": "2026-05-01T12:00:00Z", "delay_sec": 5}, "delay_sec"),
        ({"backoff": {"base_sec": -1}}, "backoff"),
        ({"backoff": {"base": 1}}, "backoff.base"),
        ({"visibility_timeout_sec": 0}, "visibility_timeout_sec"),
        ({"visibility_timeout_sec": 1e-9}, "visibility_timeout_sec"),
        ({"dedupe_for_sec": 60}, "dedupe_for_sec"),
        ({"name": "a", "headers": {"task": "b"}}, "name"),
    ],
)
async def test_mistake_in_an_option_is_named_by_its_field(
    site: Site, fields: dict[str, Any], path: str
) -> None:
    problem = await site.post("/tasks", fields, expect=422)
    assert [one["path"] for one in problem["errors"]] == [path]
    assert site.queue.peek() == []


async def test_duplicate_is_returned_or_replaced(site: Site) -> None:
    body: dict[str, Any] = {"queue": "mail", "payload": {"n": 1}, "dedupe_key": "k"}
    first = await site.post("/tasks", {**body, "on_duplicate": "return"}, expect=201)
    assert first["is_duplicate"] is False
    again = {**body, "payload": {"n": 2}}
    found = await site.post("/tasks", {**again, "on_duplicate": "return"}, expect=200)
    assert (found["id"], found["is_duplicate"], found["payload"]) == (first["id"], True, {"n": 1})
    found = await site.post("/tasks", {**again, "on_duplicate": "replace"}, expect=200)
    assert (found["id"], found["is_duplicate"], found["payload"]) == (first["id"], True, {"n": 2})
    period = {"queue": "mail", "dedupe_key": "held", "dedupe_for_sec": 60}
    shown = await site.post("/tasks", period, expect=201)
    until = datetime.fromisoformat(shown["dedupe_until"])
    assert until == site.clock.now() + timedelta(seconds=60)
    await site.post("/tasks", period, expect=409)
    await site.post("/tasks", {"payload": {}, "dedupe_for_sec": 60}, expect=422)
    await site.post("/tasks", {**body, "on_duplicate": "repalce"}, expect=422)
    await site.post("/tasks", {"payload": {}, "on_duplicate": "return"}, expect=422)
    assert len(site.queue.peek(10, all_queues=True)) == 2


@pytest.mark.parametrize(
    "body",
    [
        {"payload": []}, {"payload": {}, "priority": 300}, {"payload": {}, "unknown": 1}, 5, [],
        {"payload": {}, "delay_sec": -1}, {"payload": {"a": {"$oid": "x"}}}, {"queue": ""},
        {"payload": {}, "task_id": ""}, {"payload": {}, "queue": "line\nbreak"},
        {"payload": {"a": {"$date": "never"}}},
    ],
)  # fmt: skip
async def test_task_that_is_not_valid_is_rejected(site: Site, body: Any) -> None:
    problem = await site.post("/tasks", body, expect=422)
    assert problem["code"] in {"InvalidArgument", "InvalidPayload"}
    assert site.queue.stats().pending == 0


async def test_waiting_and_running_tasks_are_cancelled(site: Site) -> None:
    waiting, running = site.queue.enqueue({}, delay=60), site.queue.enqueue({})
    site.popped()
    for task in (waiting, running):
        shown = await site.post(f"/tasks/{task.id}/cancel")
        assert (shown["status"], shown["error"]["code"]) == ("failed", "cancelled")
        await site.post(f"/tasks/{task.id}/cancel", expect=409)


async def test_running_task_is_released_and_its_worker_fenced(site: Site) -> None:
    site.queue.enqueue({})
    task = site.popped()
    shown = await site.post(f"/tasks/{task.id}/release")
    assert (shown["state"], shown["attempts"]) == ("ready", 0)
    with pytest.raises(Exception, match="lost"):
        site.queue.mark_done(task)
    problem = await site.post(f"/tasks/{task.id}/release", expect=409)
    assert problem["code"] == "WrongStatus"


async def test_delayed_task_and_dead_letter_are_retried_now(site: Site) -> None:
    delayed, dead = site.queue.enqueue({}, delay=60), site.bury()
    assert (await site.post(f"/tasks/{delayed.id}/retry"))["state"] == "ready"
    shown = await site.post(f"/tasks/{dead.id}/retry")
    assert (shown["state"], shown["replays"]) == ("ready", 1)
    site.queue.mark_done(site.popped())
    site.queue.mark_done(site.popped())
    await site.post(f"/tasks/{delayed.id}/retry", expect=409)


async def test_chosen_task_is_processed_by_hand(site: Site) -> None:
    first, chosen = site.queue.enqueue({}), site.queue.enqueue({}, delay=60)
    shown = await site.post(f"/tasks/{chosen.id}/succeed", {"result": {"pages": 3}})
    assert (shown["status"], shown["result"]) == ("done", {"pages": 3})
    assert shown["history"][0]["worker_id"].startswith("dashboard:")
    await site.post(f"/tasks/{chosen.id}/succeed", expect=409)
    other = await site.get(f"/tasks/{first.id}")
    assert other["state"] == "ready"


async def test_two_failures_by_hand_make_a_dead_letter(site: Site) -> None:
    task = site.queue.enqueue({})
    once = await site.post("/queues/default/fail-next", {"message": "no", "code": "Hand"})
    assert (once["id"], once["state"], once["attempts"]) == (str(task.id), "delayed", 1)
    twice = await site.post(f"/tasks/{task.id}/fail")
    assert (twice["state"], twice["attempts"]) == ("failed", 2)
    (letter,) = (await site.get("/dead-letters"))["items"]
    assert letter["id"] == str(task.id)


@pytest.mark.parametrize("result", [{"$date": "bogus"}, {"$oid": "zz"}, 10**23])
async def test_result_that_is_not_valid_claims_nothing(site: Site, result: Any) -> None:
    body = {"result": result}
    task = site.queue.enqueue({}, delay=60)
    await site.post(f"/tasks/{task.id}/succeed", body, expect=422)
    assert (await site.get(f"/tasks/{task.id}"))["state"] == "delayed"
    await site.post(f"/tasks/{task.id}/retry")
    await site.post("/queues/default/succeed-next", body, expect=422)
    shown = await site.get(f"/tasks/{task.id}")
    assert (shown["state"], shown["attempts"]) == ("ready", 0)


async def test_task_that_cannot_be_settled_by_hand_is_handed_back(microqueue_database: Any) -> None:
    """Payload and result fit each, but not together."""
    options: dict[str, Any] = {"request_bytes": 10_000_000, "manual_actions": True}
    async with opened(microqueue_database, **options) as site:
        task = site.queue.enqueue({"text": "x" * 15_000_000})
        body = {"result": "x" * 5_000_000}
        reply = await site.client.post(f"{API}/queues/default/succeed-next", json=body)
        assert reply.status_code not in {200, 403}
        found = site.queue.get(task.id)
        assert found is not None
        assert (found.status, found.attempts) == ("pending", 0)


async def test_next_task_is_processed_by_hand(site: Site) -> None:
    site.queue.enqueue({"n": 1})
    assert (await site.post("/queues/default/succeed-next"))["status"] == "done"
    problem = await site.post("/queues/default/succeed-next", expect=409)
    assert problem["code"] == "NothingReady"


async def test_queue_is_paused_and_resumed(site: Site) -> None:
    site.queue.enqueue({})
    assert await site.post("/queues/default/pause") == {"queue": "default", "paused": True}
    pause = site.queue.paused()
    assert pause is not None
    assert pause.reason is not None
    assert "anonymous at" in pause.reason
    assert (await site.get("/overview"))["queues"][0]["paused"]
    problem = await site.post("/queues/default/succeed-next", expect=409)
    assert "'default' is paused" in problem["detail"]
    assert await site.post("/queues/default/resume") == {"queue": "default", "paused": False}
    assert site.queue.paused() is None


@pytest.mark.parametrize("name", ["mail/eu", "/", "a b?c#d%", "x/pause"])
async def test_queue_is_acted_on_whatever_its_name(
    site: Site, microqueue_database: Any, name: str
) -> None:
    from urllib.parse import quote  # noqa: PLC0415 (for this test alone)

    queue: Queue[Any] = Queue(microqueue_database, name, clock=site.clock)
    queue.enqueue_many([{}, {}])
    address = f"/queues/{quote(name, safe='')}"
    assert await site.post(f"{address}/pause") == {"queue": name, "paused": True}
    assert queue.paused() is not None
    assert await site.post(f"{address}/resume") == {"queue": name, "paused": False}
    assert (await site.post(f"{address}/succeed-next"))["queue"] == name
    assert (await site.post(f"{address}/fail-next"))["state"] == "delayed"


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


@pytest.fixture
def deep_stack() -> Iterator[None]:
    """Leave room for 900 levels of JSON above what pytest, xdist and coverage have on the stack."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 500)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("deep_stack")
async def test_payload_that_is_nested_too_deep_is_rejected(site: Site) -> None:
    problem = await site.post("/tasks", {"payload": nested(900)}, expect=422)
    assert (problem["code"], "901 levels" in problem["detail"]) == ("InvalidPayload", True)
    added = await site.post("/tasks", {"payload": nested(169)}, expect=201)
    assert (await site.get(f"/tasks/{added['id']}"))["payload"] == nested(169)
    assert len((await site.get("/tasks"))["items"]) == 1
    dead = site.bury()
    await site.post(
        f"/dead-letters/{dead.id}/edit-and-replay", {"payload": nested(900)}, expect=422
    )
    await site.post("/queues/default/succeed-next", {"result": nested(900)}, expect=422)


async def test_sweep_now_reports_what_it_did(site: Site) -> None:
    site.queue.enqueue({})
    site.popped()
    site.clock.advance(60)
    report = await site.post("/sweeper/run")
    assert (report["reclaimed"], report["skipped"]) == (1, False)
    assert (await site.get("/sweeper"))["last_active_sweep"]["reclaimed"] == 1


async def test_sweep_names_what_it_buried(site: Site) -> None:
    task = site.queue.enqueue({}, max_attempts=1)
    site.popped()
    site.clock.advance(60)
    report = await site.post("/sweeper/run")
    buried = {"lease_expired": {"count": 1, "ids": [str(task.id)]}}
    assert report["buried_tasks"] == buried
    assert (await site.get("/sweeper"))["last_active_sweep"]["buried_tasks"] == buried


async def test_audit_tells_how_many_tasks_a_sweep_has_purged(site: Site) -> None:
    site.queue.enqueue_many([{}, {}])
    for _ in range(2):
        site.queue.mark_done(site.popped())
    site.clock.advance(8 * 86400)
    assert (await site.post("/sweeper/run"))["purged"] == 2
    assert (await site.get("/audit"))["items"][0]["count"] == 2


# Dead letters


async def test_dead_letters_are_listed_grouped_and_exported(site: Site) -> None:
    for n in range(3):
        site.bury(f"order {n} timed out", "Timeout", n=n)
        site.clock.advance(1)
    site.bury("boom", None, n=9)
    groups = await site.get("/dead-letters/groups")
    assert [(one["code"], one["message"], one["count"]) for one in groups["groups"]] == [
        ("Timeout", "order <n> timed out", 3),
        (None, "boom", 1),
    ]
    page = await site.get("/dead-letters", code="Timeout", group="order <n> timed out", limit=2)
    assert [row["error"]["message"] for row in page["items"]] == [
        "order 2 timed out",
        "order 1 timed out",
    ]
    rest = await site.get("/dead-letters", code="Timeout", cursor=page["next_cursor"])
    assert len(rest["items"]) == 1
    assert len((await site.get("/dead-letters", code=""))["items"]) == 1
    lines = (await site.get("/dead-letters/export", code="Timeout")).splitlines()
    assert [json.loads(line)["payload"]["n"] for line in lines] == [2, 1, 0]
    assert (await site.get("/dead-letters", queue="other"))["items"] == []


async def test_export_gives_more_than_one_step(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microqueue.dashboard.routes_read.EXPORT_PAGE", 2)
    for n in range(5):
        site.bury(n=n)
    lines = (await site.get("/dead-letters/export")).splitlines()
    assert sorted(json.loads(line)["payload"]["n"] for line in lines) == list(range(5))


async def test_group_is_replayed_after_a_dry_run(site: Site) -> None:
    for n in range(3):
        site.bury(f"order {n} timed out", "Timeout")
    site.bury("boom")
    body = {"filter": {"code": "Timeout", "group": "order <n> timed out"}, "dry_run": True}
    body["queue"] = "default"
    dry = await site.post("/dead-letters/replay", body)
    assert dry == {
        "matched": 3,
        "replayed": 0,
        "skipped": [],
        "missing": [],
        "dry_run": True,
        "queue": "default",
        "all_queues": False,
    }
    assert site.queue.stats().failed == 4
    done = await site.post("/dead-letters/replay", {**body, "dry_run": False})
    assert (done["matched"], done["replayed"]) == (3, 3)
    stats = site.queue.stats()
    assert (stats.ready, stats.failed) == (3, 1)


async def test_letters_are_replayed_delayed_and_spread(site: Site) -> None:
    for _ in range(4):
        site.bury()
        site.clock.advance(1)
    body = {"filter": {}, "queue": "default", "delay_sec": 100, "spread_sec": 40}
    assert (await site.post("/dead-letters/replay", body))["replayed"] == 4
    waits = sorted(
        (task.next_retry_at - site.clock.now()).total_seconds()  # type: ignore[operator]  # All have one.
        for task in site.queue.peek(10)
    )
    assert waits == [100, 110, 120, 130]


async def test_chosen_letters_are_replayed_or_discarded(site: Site) -> None:
    first, second, third = (site.bury() for _ in range(3))
    replayed = await site.post("/dead-letters/replay", {"ids": [str(first.id)]})
    assert replayed["replayed"] == 1
    body = {"ids": [str(second.id)], "dry_run": True}
    assert (await site.post("/dead-letters/discard", body))["matched"] == 1
    gone = await site.post("/dead-letters/discard", {"ids": [str(second.id), "none"]})
    assert gone == {
        "matched": 1,
        "discarded": 1,
        "missing": ["none"],
        "dry_run": False,
        "queue": None,
        "all_queues": True,
    }
    assert [letter.id for letter in site.queue.dead_letters.list()] == [third.id]


@pytest.mark.parametrize("verb", ["replay", "discard"])
@pytest.mark.parametrize("dry_run", [False, True])
async def test_id_that_does_not_exist_is_reported(site: Site, verb: str, dry_run: bool) -> None:
    letter = site.bury("boom")
    route, options = f"/dead-letters/{verb}", {"dry_run": dry_run}
    for ids in (["none"], ["none", 99]):
        refused = await site.post(route, {"ids": ids, **options}, expect=404)
        assert refused["code"] == "TaskNotFound"
        assert "'none'" in refused["detail"]
    some = await site.post(route, {"ids": ["none", str(letter.id)], **options})
    assert (some["matched"], some["missing"]) == (1, ["none"])


@pytest.mark.parametrize(
    "body",
    [{}, {"ids": ["x"], "filter": {}}, {"ids": []}, {"filter": {"$where": "1"}}, {"ids": [{}]},
     {"filter": {"code": {"$ne": None}}}, {"filter": {}, "spread_sec": -1}, {"ids": [None]},
     {"filter": {}}, {"filter": {}, "all_queues": False}, {"filter": {"code": "x"}},
     {"filter": {}, "queue": "default", "all_queues": True},
     {"filter": {"since": "2026-05-01T00:00:00"}}],
)  # fmt: skip
async def test_selection_that_is_not_valid_is_rejected(site: Site, body: Any) -> None:
    site.bury()
    await site.post("/dead-letters/replay", body, expect=422)
    await site.post("/dead-letters/discard", {**body, "spread_sec": 1}, expect=422)
    assert site.queue.stats().failed == 1


async def test_letter_is_edited_and_masked_values_stay(site: Site) -> None:
    letter = site.bury(to="nobody", password="hunter2", nested=[{"token": "t", "n": 1}])
    shown = await site.get(f"/tasks/{letter.id}")
    assert shown["payload"]["password"] == "•••"
    payload = {**shown["payload"], "to": "ada"}
    edited = await site.post(f"/dead-letters/{letter.id}/edit-and-replay", {"payload": payload})
    assert (edited["state"], edited["payload"]["to"]) == ("ready", "ada")
    expected = {"to": "ada", "password": "hunter2", "nested": [{"token": "t", "n": 1}]}
    assert site.popped().payload == expected
    body = {"payload": {"secret": "•••"}}
    await site.post(f"/dead-letters/{letter.id}/edit-and-replay", body, expect=422)
    await site.post(f"/dead-letters/{letter.id}/edit-and-replay", {"payload": {}}, expect=409)


async def test_numbers_survive_a_browser_that_edits_nothing(site: Site) -> None:
    numbers: dict[str, Any] = {
        "order": 1234567890123456789, "price": 10.0, "least": -(2**63), "n": 7, "half": 0.5,
        "zero": -0.0, "huge": 1e300, "last": 2**53 - 1, "list": [2**53, {"x": 1e20}], "yes": True,
    }  # fmt: skip
    letter = site.bury(**numbers)
    shown = await site.get(f"/tasks/{letter.id}")
    assert shown["payload"]["order"] == {"$numberLong": "1234567890123456789"}
    assert shown["payload"]["price"] == {"$numberDouble": "10.0"}
    assert (shown["payload"]["n"], shown["payload"]["half"]) == (7, 0.5)
    (row,) = (await site.get("/dead-letters"))["items"]
    assert row["preview"].startswith('{"order": 1234567890123456789, "price": 10.0, ')

    def as_a_browser_reads(value: Any) -> Any:
        number = float(value)
        return int(number) if number.is_integer() else number

    payload = json.loads(
        json.dumps(shown["payload"]), parse_int=as_a_browser_reads, parse_float=as_a_browser_reads
    )
    await site.post(f"/dead-letters/{letter.id}/edit-and-replay", {"payload": payload})
    assert repr(site.popped().payload) == repr(numbers)


@pytest.mark.parametrize("word", ["$ne", "$where", "$regex", "$gt"])
async def test_filters_never_become_operators(site: Site, word: str) -> None:
    """As text they match nothing; as a filter they would match the letter."""
    site.bury("boom", "Code")
    for name in ("code", "text", "group"):
        for value in (f'{{"{word}": ""}}', word):
            query: dict[str, Any] = {name: value}
            assert (await site.get("/dead-letters", **query))["items"] == []
    for path in ("/tasks", "/dead-letters"):
        await site.get(f"{path}?code[{word}]=x&queue[{word}]=default")
    assert (await site.get("/tasks", queue=f'{{"{word}": 1}}'))["items"] == []
    assert (await site.get("/dead-letters", text=".*"))["items"] == []


async def test_text_that_cannot_be_searched_for_is_rejected(site: Site) -> None:
    query: dict[str, Any] = {"text": "a\0b"}
    await site.get("/dead-letters", expect=422, **query)
    await site.post("/dead-letters/replay", {"queue": "default", "filter": query}, expect=422)
    assert (await site.get("/tasks", text="a\0b"))["items"] == []


# The audit log


async def test_every_action_is_in_the_audit_log(site: Site) -> None:
    task = site.queue.enqueue({}, delay=60)
    site.bury()
    await site.post(f"/tasks/{task.id}/cancel")
    await site.post(f"/tasks/{task.id}/cancel", expect=409)
    body = {"filter": {}, "dry_run": True, "queue": "default"}
    await site.post("/dead-letters/replay", body)
    body = {"filter": {"text": "boom"}, "queue": "default"}
    await site.post("/dead-letters/discard", body)
    audit = await site.get("/audit")
    told = [(one["action"], one["count"], one["outcome"]) for one in audit["items"]]
    assert told == [
        ("dead_letters.discard", 1, "ok"),
        ("task.cancel", 0, "WrongStatus"),
        ("task.cancel", 1, "ok"),
    ]
    newest = audit["items"][0]
    assert (newest["queue"], newest["target"]) == ("default", "text='boom'")
    assert newest["who"].startswith("anonymous at ")
    assert datetime.fromisoformat(newest["at"]) == site.clock.now()


async def test_audit_log_is_paged_and_kept_as_long_as_told(microqueue_database: Any) -> None:
    async with opened(
        microqueue_database, audit_retention=3600, identify=lambda _request: "ada"
    ) as site:
        for _ in range(3):
            await site.post("/sweeper/run")
        first = await site.get("/audit", limit=2)
        second = await site.get("/audit", limit=2, cursor=first["next_cursor"])
        assert [one["who"] for one in first["items"] + second["items"]] == ["ada"] * 3
        assert second["next_cursor"] is None
        await site.get("/audit", cursor="x", expect=422)
    async with opened(microqueue_database) as site:  # Another one, which says nothing of it.
        await site.post("/sweeper/run")
    index = microqueue_database.microqueue_audit.index_information()["kept"]
    assert index["expireAfterSeconds"] == 3600


# Service


async def test_health_readiness_and_metrics(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.queue.enqueue({})
    assert (await site.client.get("/healthz")).json() == {"status": "ok"}
    assert (await site.client.get("/readyz")).json() == {"status": "ready"}
    metrics = (await site.client.get("/metrics")).text
    assert 'microqueue_queue_depth{queue="default",status="ready"} 1.0' in metrics

    async def away(_operation: Any) -> None:
        raise ServerUnavailable("mongodb://user:hunter2@host is away")

    monkeypatch.setattr(site.app.state.context.access, "run", away)
    reply = await site.client.get("/readyz")
    assert (reply.status_code, reply.json()["code"]) == (503, "ServerUnavailable")
    assert "hunter2" not in reply.text


async def test_letters_in_a_collection_of_their_own(microqueue_database: Any) -> None:
    settings = QueueSettings(dead_letters="collection")
    async with opened(microqueue_database, settings=settings) as site:
        letter = site.bury("order 1 timed out", "Timeout", n=1)
        assert (await site.get("/dead-letters/groups"))["total"] == 1
        assert (await site.get(f"/tasks/{letter.id}"))["status"] == "failed"
        assert (await site.get("/tasks", status="failed"))["items"][0]["id"] == str(letter.id)
        body = {"payload": {"n": 2}}
        edited = await site.post(f"/dead-letters/{letter.id}/edit-and-replay", body)
        assert (edited["state"], edited["payload"]) == ("ready", {"n": 2})


async def test_dashboard_of_a_queue_over_motor(
    microqueue_database: Any, microqueue_server: EmbeddedServer
) -> None:
    options: dict[str, Any] = {
        "kind": "motor",
        "uri": microqueue_server.uri,
        "manual_actions": True,
    }
    async with opened(microqueue_database, **options) as site:
        task = site.queue.enqueue({"n": 1})
        assert (await site.get("/overview"))["queues"][0]["ready"] == 1
        assert (await site.post(f"/tasks/{task.id}/succeed"))["status"] == "done"
        assert (await site.post("/sweeper/run"))["errors"] == {}
        assert len((await site.get("/audit"))["items"]) == 2


def test_dashboard_of_something_else_is_rejected(microqueue_queue: Queue[Any]) -> None:
    for wrong in (None, "queue", object()):
        with rejecting("queue"):
            dashboard(wrong)  # type: ignore[arg-type]  # The point.
    for options in ({"redact": "("}, {"page_limit": 0}, {"unknown": 1}, {"token": "short"}):
        with pytest.raises(InvalidArgument) as refusal:
            dashboard(microqueue_queue, **options)
        assert "short'" not in str(refusal.value)
    assert API in str(dashboard(microqueue_queue).openapi()["paths"])
