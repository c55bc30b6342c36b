"""Parts of the dashboard in rare situations: what other processes do, and limits that are met."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from fastapi import Request
from pymongo import MongoClient

from microqueue import MicroqueueError, OperationFailed, Queue, QueueSettings, TaskNotFound
from microqueue.core import core_of
from microqueue.dashboard import access as access_module
from microqueue.dashboard import feeds
from microqueue.dashboard.access import QueueAccess
from microqueue.dashboard.events import EventHub
from microqueue.dashboard.feeds import ChangeFeed, PollFeed
from microqueue.dashboard.options import DashboardOptions
from microqueue.dashboard.security import SecurityMiddleware, address_of
from microqueue.operations import audit
from microqueue.operations.call import Call
from microqueue.operations.events import Event, Snapshot, compare
from microqueue.operations.workers import leave
from microqueue.testing import FakeClock, memory_queue
from tests.integration.dashboard_site import API, Site, opened
from tests.integration.test_crashes import registered
from tests.integration.test_transient import failing
from tests.waiting import wait_for

# Actions that other processes get in the way of


async def test_retry_of_a_letter_that_another_process_replays_first_is_a_conflict(
    site: Site,
) -> None:
    letter = site.bury()
    other: Queue[Any] = Queue(core_of(site.queue).collections.database)
    used = site.app.state.context.access.queue("default")
    driver = core_of(used)._driver  # noqa: SLF001 (its fault point)

    def replay_first(call: Call) -> None:
        if call.options.get("sort"):  # The read of the replay itself.
            driver.before_call = None
            assert other.dead_letters.replay(letter.id).replayed == 1

    driver.before_call = replay_first
    problem = await site.post(f"/tasks/{letter.id}/retry", expect=409)
    assert problem["code"] == "WrongStatus"
    assert driver.before_call is None
    assert (await site.get("/audit"))["items"][0]["outcome"] == "WrongStatus"


async def test_task_that_is_gone_after_its_action_is_not_found(site: Site) -> None:
    with pytest.raises(TaskNotFound):
        await site.app.state.context.detail("gone")


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (RuntimeError("a bug"), "error", "InternalError"),
        (OperationFailed("no"), "OperationFailed", "OperationFailed"),
    ],
)
async def test_action_that_fails_unexpectedly_is_recorded_and_logged(
    microqueue_database: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    outcome: str,
    code: str,
) -> None:
    def pause(*_: Any, **_options: Any) -> Any:
        raise error

    async with opened(microqueue_database) as site:
        monkeypatch.setattr(Queue, "pause", pause)
        problem = await site.post("/queues/default/pause", expect=500)
        assert problem["code"] == code
        entry = (await site.get("/audit"))["items"][0]
        assert (entry["action"], entry["outcome"]) == ("queue.pause", outcome)
    assert [one.levelname for one in caplog.records if one.name == "microqueue.dashboard"] == [
        "ERROR"
    ]


async def test_action_succeeds_although_it_cannot_be_recorded(
    microqueue_database: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def record(*_: Any) -> Any:
        raise OperationFailed("the disk is full")

    monkeypatch.setattr(audit, "record", record)
    async with opened(microqueue_database) as site:
        await site.post("/queues/default/pause")
        assert site.queue.paused() is not None
    (logged,) = [one for one in caplog.records if one.name == "microqueue.dashboard"]
    assert logged.exc_info is not None
    assert isinstance(logged.exc_info[1], MicroqueueError)


# Requests


async def test_login_form_of_a_dashboard_without_a_token_leads_to_the_page(site: Site) -> None:
    reply = await site.client.get("/login")
    assert (reply.status_code, reply.headers["location"]) == (303, "./")


@pytest.mark.parametrize(
    ("client", "address"),
    [
        (None, "unknown"),
        (("a-socket", 0), "a-socket"),
        (("10.0.0.7", 1), "10.0.0.7"),
        (("::ffff:10.0.0.7", 1), "10.0.0.7"),
        (("fe80::1%eth0", 1), "fe80::/64"),
    ],
)
def test_address_of_a_client_is_that_of_its_connection(client: Any, address: str) -> None:
    request = Request({"type": "http", "client": client, "headers": []})
    assert address_of(request) == address


async def test_app_reads_the_body_once_and_then_that_the_client_is_gone(site: Site) -> None:
    received: list[Any] = []

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        received.extend([await receive(), await receive()])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(_message: Any) -> None:
        raise AssertionError("nothing is sent")

    context = site.app.state.context
    middleware = SecurityMiddleware(app, guard=context.guard, clock=site.clock, request_bytes=100)
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    path = f"{API}/tasks"
    scope = {
        "type": "http", "method": "POST", "path": path, "headers": headers, "scheme": "http",
        "query_string": b"", "client": ("127.0.0.1", 1), "server": ("localhost", 80),
    }  # fmt: skip
    await middleware(scope, receive, send)
    assert [one["type"] for one in received] == ["http.request", "http.disconnect"]


# Limits


def test_only_some_queues_are_kept_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "MAX_QUEUES", 2)
    access = QueueAccess(memory_queue())
    first = access.queue("a")
    assert access.queue("a") is first
    for name in ("b", "c", "d"):
        assert access.queue(name).name == name
    assert access.queue("a") is not first


class Outdated:
    """A cache whose results are outdated for some more questions."""

    def __init__(self, times: int) -> None:
        self.times = times

    def outdated_sec(self) -> float:
        self.times -= 1
        return 0.001 if self.times > 0 else 0.0


async def test_viewers_refresh_again_when_no_result_is_outdated_any_more() -> None:
    cache: Any = Outdated(4)
    hub = EventHub(QueueAccess(memory_queue()), DashboardOptions(), cache)
    hub._schedule_refresh()  # noqa: SLF001 (what a change causes)
    await asyncio.to_thread(wait_for, lambda: hub._remembered)  # noqa: SLF001 (what was sent)
    (sent,) = hub._remembered  # noqa: SLF001 (what was sent)
    assert sent.type == "refresh"


# Changes


def change(collection: str | None, kind: str, key: Any, **fields: Any) -> dict[str, Any]:
    where = {} if collection is None else {"ns": {"coll": collection}}
    return {**where, "operationType": kind, "documentKey": {"_id": key}, **fields}


@pytest.mark.parametrize(
    "foreign",
    [
        change(None, "invalidate", None),
        change("tasks_dlq", "delete", 1),
        change("microqueue_pauses", "insert", "other/default"),
        change("microqueue_workers", "insert", "worker@other"),
        change("microqueue_schedules", "insert", '["other", "default", "often"]'),
        change("microqueue_schedules", "insert", "often"),
        change("microqueue_schedules", "insert", 7),
        change("microqueue_workers", "update", "worker@tasks"),
    ],
    ids=repr,
)
def test_changes_that_are_no_event_of_this_collection_are_left_out(foreign: Any) -> None:
    assert ChangeFeed(QueueAccess(memory_queue()))._parse(foreign) is None  # noqa: SLF001 (pure)


def test_feed_remembers_a_bounded_number_of_workers_and_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds, "MAX_WORKERS", 2)
    monkeypatch.setattr(feeds, "MAX_MOVING", 2)
    feed = ChangeFeed(QueueAccess(memory_queue()))
    parse = feed._parse  # noqa: SLF001 (pure)
    for number in range(3):
        letter = {"_id": number, "status": "failed", "version": 0}
        assert parse(change("tasks_dlq", "insert", number, fullDocument=letter)) is None
        worker = {"gone_at": feed._access.core.clock.now()}  # noqa: SLF001 (its clock)
        registered = change("microqueue_workers", "insert", f"w{number}@tasks", fullDocument=worker)
        assert parse(registered) == Event("worker.started", f"w{number}")
    assert parse(change("tasks", "delete", 2)) is None  # It moved, and is no news.
    assert parse(change("tasks", "delete", 0)) is not None  # Forgotten.
    assert parse(change("microqueue_workers", "delete", "w2@tasks")) == Event("worker.gone", "w2")
    assert parse(change("microqueue_workers", "delete", "w0@tasks")) == Event("worker.left", "w0")


def test_failure_between_two_reads_of_a_snapshot_is_reported_once() -> None:
    now = memory_queue().now()
    held = {"_id": 1, "queue": "q", "attempts": 1}
    failed = {"_id": 1, "queue": "q", "status": "failed", "finished_at": now}
    first = Snapshot(now, {}, [], [])
    both = Snapshot(now, {1: held}, [], [failed])  # It failed after what runs was read.
    after = Snapshot(now, {}, [], [])  # It has moved to the DLQ collection.
    reported = [*compare(first, both, []), *compare(both, after, [failed])]
    assert [one.type for one in reported if one.type == "task.failed"] == ["task.failed"]
    again = {**failed, "finished_at": now + timedelta(seconds=1)}
    assert [one.type for one in compare(both, after, [again])] == ["task.failed"]


async def test_polling_reports_a_worker_as_gone_that_was_deregistered_between_two_looks(
    microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    queue: Queue[Any] = Queue(microqueue_database, clock=microqueue_clock)
    registered(queue, "dies")
    feed = PollFeed(QueueAccess(queue), 0.0)
    await feed.open()  # It is alive.
    microqueue_clock.advance(6)
    registered(queue, "stays")
    core_of(queue).run(leave("dies", core_of(queue).collections.name))
    assert Event("worker.gone", "dies") in await feed.read(0.3)
    core_of(queue).run(leave("stays", core_of(queue).collections.name))
    assert Event("worker.left", "stays") in await feed.read(0.3)


async def test_queue_in_memory_has_no_change_stream() -> None:
    assert not await ChangeFeed(QueueAccess(memory_queue())).open()


async def test_stream_that_the_server_rejects_is_not_opened(
    microqueue_server: Any,
    microqueue_client: MongoClient[Any],
    microqueue_database: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds, "OPEN_SEC", 60.0)
    with MongoClient[Any](microqueue_server.uri, appname="victim", retryReads=False) as client:
        queue: Queue[Any] = Queue(client[microqueue_database.name], settings=QueueSettings())
        feed = ChangeFeed(QueueAccess(queue))
        with failing(microqueue_client, ["aggregate"], times=9, errorCode=13):
            assert not await feed.open()
        assert await feed.open()
        await feed.close()
