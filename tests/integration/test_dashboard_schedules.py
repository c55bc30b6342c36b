"""Schedules through the dashboard: what it shows of them, and what viewers may do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest

from microqueue import BackoffPolicy, Queue, Sweeper, Tasks, Worker
from microqueue.core import core_of
from microqueue.dashboard.routes_schedules import ScheduleBody
from microqueue.masking import MASK
from tests.integration.dashboard_site import Site, opened


def mail_queue(site: Site) -> Queue[Any]:
    return Queue(core_of(site.queue).collections.tasks, "mail", clock=site.clock)


async def test_schedules_are_listed_with_their_next_and_last_run(site: Site) -> None:
    assert (await site.get("/schedules"))["schedules"] == []
    site.queue.schedules.put(
        "nightly",
        every=60,
        payload={"password": "letmein", "n": 1},
        task="report",
        catch_up="all",
        grace=900,
        overlap="skip",
        jitter=5,
        priority=7,
        max_attempts=4,
        expires_in=120,
        visibility_timeout=900,
        backoff=BackoffPolicy(base_sec=7, jitter="none"),
    )
    (row,) = (await site.get("/schedules"))["schedules"]
    assert (row["name"], row["queue"], row["task"]) == ("nightly", site.queue.name, "report")
    assert (row["cron"], row["every_sec"], row["timezone"]) == (None, 60, "UTC")
    assert (row["catch_up"], row["grace_sec"]) == ("all", 900)
    assert (row["overlap"], row["jitter_sec"]) == ("skip", 5)
    assert (row["priority"], row["max_attempts"], row["expires_in_sec"]) == (7, 4, 120)
    assert row["visibility_timeout_sec"] == 900
    assert row["backoff"] == {"base_sec": 7, "factor": 2, "max_sec": 1800, "jitter": "none"}
    assert (row["source"], row["app"]) == ("api", None)
    assert row["payload"] == {"password": MASK, "n": 1}
    assert await site.get("/schedules/nightly") == row
    assert (row["paused"], row["runs"], row["last_run"]) == (False, 0, None)
    next_at = datetime.fromisoformat(row["next_at"])
    assert timedelta(0) < next_at - site.clock.now() <= timedelta(seconds=61)

    site.clock.advance(75)
    Sweeper(site.queue).run_once()
    (row,) = (await site.get("/schedules", queue=site.queue.name))["schedules"]
    assert row["runs"] == 1
    last = row["last_run"]
    assert datetime.fromisoformat(last["at"]) == next_at
    assert (last["status"], last["triggered"]) == ("pending", False)
    assert last["late_sec"] == pytest.approx((site.clock.now() - next_at).total_seconds())
    assert (await site.get("/schedules", queue="other"))["schedules"] == []


async def test_schedule_is_put_paused_resumed_run_and_removed(site: Site) -> None:
    body: dict[str, Any] = {
        "queue": "mail",
        "cron": "0 3 * * *",
        "timezone": "Europe/Berlin",
        "payload": {"since": {"$date": "2030-01-01T00:00:00Z"}},
        "priority": 2,
    }
    row = await site.post("/schedules/a%2Fb/put", body)
    assert (row["name"], row["cron"], row["timezone"]) == ("a/b", "0 3 * * *", "Europe/Berlin")
    mail = mail_queue(site)
    stored = mail.schedules.get("a/b")
    assert stored is not None
    assert stored.payload["since"].year == 2030
    runs = (await site.get("/schedules/a%2Fb/next", queue="mail", n=3))["runs"]
    assert [datetime.fromisoformat(one).hour for one in runs] == [3, 3, 3]

    of_queue = {"queue": "mail"}
    assert (await site.post("/schedules/a%2Fb/pause", of_queue))["paused"]
    assert mail.schedules.get("a/b").next_at is None  # type: ignore[union-attr]
    assert not (await site.post("/schedules/a%2Fb/resume", of_queue))["paused"]
    added = await site.post("/schedules/a%2Fb/trigger", of_queue, expect=201)
    (task,) = mail.peek()
    assert (added["task_id"], task.priority) == (str(task.id), 2)
    assert (await site.post("/schedules/a%2Fb/remove", of_queue))["existed"]
    assert not (await site.post("/schedules/a%2Fb/remove", of_queue))["existed"]
    assert mail.schedules.list() == []
    entries = (await site.get("/audit"))["items"]
    verbs = ["remove", "remove", "trigger", "resume", "pause", "put"]
    assert [one["action"] for one in entries] == [f"schedule.{verb}" for verb in verbs]
    assert {(one["queue"], one["target"]) for one in entries} == {("mail", "a/b")}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"cron": "0 25 * * *"}, "cron"),
        ({"cron": "* * *"}, "cron"),
        ({"timezone": "Europe/Nowhere"}, "timezone"),
        ({"cron": None}, "cron"),
        ({"cron": None, "every_sec": 0.01}, "every_sec"),
        ({"jitter_sec": -1}, "jitter_sec"),
        ({"grace_sec": 0}, "grace_sec"),
        ({"grace_sec": 0.5}, "grace_sec"),
        ({"backoff": {"factor": 0}}, "backoff"),
        ({"payload": {"password": MASK}}, "payload.password"),
    ],
)
async def test_mistake_in_a_schedule_is_named_and_nothing_is_stored(
    site: Site, change: dict[str, Any], path: str
) -> None:
    body = {"queue": "mail", "cron": "0 3 * * *", **change}
    problem = await site.post("/schedules/x/put", body, expect=422)
    assert [one["path"] for one in problem["errors"]] == [path]
    assert mail_queue(site).schedules.list() == []


@pytest.mark.parametrize("verb", ["pause", "resume", "trigger"])
async def test_unknown_schedule_is_not_found(site: Site, verb: str) -> None:
    await site.post(f"/schedules/none/{verb}", {"queue": "mail"}, expect=404)
    await site.get("/schedules/none/next", queue="mail", expect=404)
    await site.get("/schedules/none", queue="mail", expect=404)


@pytest.mark.parametrize("name", ["a/next", "next", "a/NEXT/next", "a/next/b", "a/put"])
async def test_schedule_whose_name_is_like_a_route_is_found(site: Site, name: str) -> None:
    others = {"a", "a/next", "a/NEXT"} - {name}
    for one in others:
        await site.post(f"/schedules/{quote(one, safe='')}/put", {"queue": "mail", "every_sec": 60})
    path = f"/schedules/{quote(name, safe='')}"
    await site.get(path, queue="mail", expect=404)
    await site.post(f"{path}/put", {"queue": "mail", "cron": "0 3 * * *"})
    assert (await site.get(path, queue="mail"))["name"] == name
    assert (await site.get(path.replace("%2F", "%2f"), queue="mail"))["name"] == name
    runs = await site.get(f"{path}/next", queue="mail", n=2)
    assert (runs["name"], len(runs["runs"])) == (name, 2)
    assert [one[11:19] for one in runs["runs"]] == ["03:00:00"] * 2
    await site.post(f"{path}/remove", {"queue": "mail"})
    left = (await site.get("/schedules", queue="mail"))["schedules"]
    assert {one["name"] for one in left} == others


FORM = (
    *("cron", "every_sec", "timezone", "task", "payload", "headers", "catch_up", "grace_sec"),
    *("overlap", "jitter_sec", "priority", "max_attempts", "backoff", "visibility_timeout_sec"),
    "expires_in_sec",
)
"""The fields that the page sends back."""


async def test_schedule_that_is_put_as_it_is_shown_stays_as_it_is(site: Site) -> None:
    site.queue.schedules.put(
        "nightly",
        cron="0 3 * * *",
        timezone="Europe/Berlin",
        payload={"password": "letmein", "at": datetime(2030, 1, 1, tzinfo=UTC), "n": 1.0},
        headers={"token": "abc", "tenant": "a"},
        catch_up="all",
        grace=90,
        overlap="skip",
        jitter=0.5,
        priority=3,
        max_attempts=4,
        backoff=BackoffPolicy(base_sec=7, factor=1.5, max_sec=60, jitter="none"),
        visibility_timeout=900,
        expires_in=120,
        paused=True,
    )
    before = site.queue.schedules.get("nightly")
    row = await site.get("/schedules/nightly")
    sent = {"queue": site.queue.name, **{name: row[name] for name in FORM}}
    assert set(sent) == set(ScheduleBody.model_fields) - {"paused"}
    saved = await site.post("/schedules/nightly/put", sent)
    assert saved["warnings"] == []
    assert site.queue.schedules.get("nightly") == before


async def test_change_of_a_schedule_in_code_is_warned_of(site: Site) -> None:
    declared = Tasks(app="billing")
    declared.task("ping", every=300)(lambda: None)
    worker = Worker(site.queue, declared)
    of_queue = {"queue": site.queue.name}
    worker.run(burst=True)
    assert (await site.get("/schedules/ping"))["app"] == "billing"
    removed = await site.post("/schedules/ping/remove", of_queue)
    assert [one["path"] for one in removed["warnings"]] == ["name"]
    worker = Worker(site.queue, declared)
    worker.run(burst=True)
    saved = await site.post("/schedules/ping/put", {**of_queue, "every_sec": 600})
    assert [one["path"] for one in saved["warnings"]] == ["name"]
    assert (saved["source"], saved["app"]) == ("api", None)
    removed = await site.post("/schedules/ping/remove", of_queue)
    assert removed["warnings"] == []


async def test_malformed_schedule_can_be_put_again_and_removed(site: Site) -> None:
    stored = core_of(site.queue).collections.database["microqueue_schedules"]
    body = {"queue": site.queue.name}
    for verb, fields in (("put", {"every_sec": 60}), ("remove", {})):
        site.queue.schedules.put("broken", every=60)
        stored.update_one({"name": "broken"}, {"$unset": {"every_sec": 1}})
        await site.post(f"/schedules/broken/{verb}", {**body, **fields})
    assert stored.count_documents({}) == 0


async def test_payload_of_a_schedule_is_checked_as_that_of_a_task(microqueue_database: Any) -> None:
    tasks = Tasks()

    @tasks.task("send")
    def send(to: str) -> None: ...

    async with opened(microqueue_database, tasks=tasks) as site:
        body = {"queue": "mail", "every_sec": 60, "task": "send", "payload": {"too": "x"}}
        await site.post("/schedules/x/put", body, expect=422)
        assert site.queue.schedules.list(all_queues=True) == []


async def test_viewers_of_a_read_only_dashboard_cannot_change_schedules(site: Site) -> None:
    site.queue.schedules.put("nightly", every=60)
    database = core_of(site.queue).collections.database
    async with opened(database, read_only=True) as viewer:
        assert len((await viewer.get("/schedules"))["schedules"]) == 1
        await viewer.post("/schedules/nightly/remove", {"queue": "default"}, expect=405)
    assert len(site.queue.schedules.list()) == 1
