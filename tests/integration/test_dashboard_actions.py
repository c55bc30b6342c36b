"""Actions of viewers: mark tasks as done or failed without a worker, and enqueue by name."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from microqueue import DeadLetter, Hooks, InvalidArgument, Queue
from microqueue.core import core_of
from microqueue.dashboard import dashboard
from microqueue.embedded import EmbeddedServer
from microqueue.operations import workers
from microqueue.operations.workers import MOST_NAMES
from microqueue.reports import WorkerInfo
from microqueue.testing import memory_queue
from microqueue.worker import Tasks, Worker
from tests.integration.dashboard_site import Site, opened
from tests.rejection import rejecting
from tests.waiting import wait_for

MANUAL = ["/tasks/{id}/succeed", "/tasks/{id}/fail", "/queues/default/succeed-next",
          "/queues/default/fail-next"]  # fmt: skip

tasks = Tasks()


@tasks.task("send_email")
def send_email(to: str, *, copies: int = 1) -> None:
    """Send nothing: what is enqueued is looked at, and not run."""


class Mail(BaseModel):
    to: str


# Hooks


class Recorder(Hooks):
    """Keeps the dead letters that it is notified of."""

    def __init__(self) -> None:
        self.letters: list[DeadLetter] = []

    def on_dead_letter(self, letter: DeadLetter) -> None:
        self.letters.append(letter)


@pytest.mark.parametrize("kind", ["blocking", "async", "motor"])
async def test_dead_letters_that_viewers_make_reach_hooks(
    microqueue_database: Any, microqueue_server: EmbeddedServer, kind: str
) -> None:
    recorder = Recorder()
    options: Any = {"hooks": [recorder], "manual_actions": True}
    async with opened(microqueue_database, kind=kind, uri=microqueue_server.uri, **options) as site:
        cancelled = site.queue.enqueue({})
        await site.post(f"/tasks/{cancelled.id}/cancel")
        failed = site.queue.enqueue({}, max_attempts=1)
        await site.post(f"/tasks/{failed.id}/fail", {"message": "no", "code": "own"})
        next_one = site.queue.enqueue({}, max_attempts=1)
        await site.post("/queues/default/fail-next", {"message": "no", "code": "next"})
        expired = site.queue.enqueue({}, expires_in=5)
        site.clock.advance(6)
        await site.post("/sweeper/run")
    assert [(one.id, one.error.code, one.source) for one in recorder.letters] == [
        (cancelled.id, "cancelled", "dashboard"),
        (failed.id, "own", "dashboard"),
        (next_one.id, "next", "dashboard"),
        (expired.id, "expired", "sweeper"),
    ]


async def test_hooks_of_the_queue_are_those_of_its_dashboard(microqueue_database: Any) -> None:
    recorder = Recorder()
    queue: Queue[Any] = Queue(microqueue_database, hooks=[recorder])
    app = dashboard(queue, hooks=[recorder])
    access = app.state.context.access
    task = queue.enqueue({})
    await access.call(access.queue("default").cancel, task.id)
    app.state.context.events.stop()
    assert [(one.id, one.source) for one in recorder.letters] == [(task.id, "dashboard")]


# Manual actions


@pytest.mark.parametrize("path", MANUAL)
async def test_tasks_are_settled_by_their_workers_alone_by_default(
    microqueue_database: Any, path: str
) -> None:
    async with opened(microqueue_database) as site:
        task = site.queue.enqueue({})
        problem = await site.post(path.format(id=task.id), expect=403)
        assert problem["code"] == "ManualActionsOff"
        assert "manual_actions=True" in problem["detail"]
        found = site.queue.get(task.id)
        assert found is not None
        assert (found.status, found.attempts, len(found.history)) == ("pending", 0, 0)
        assert not (await site.get("/config"))["manual_actions"]
        assert (await site.get(f"/tasks/{task.id}"))["actions"] == ["cancel"]
        assert (await site.get("/audit"))["items"] == []


@pytest.mark.parametrize("path", MANUAL)
async def test_tasks_are_settled_by_hand_where_that_is_allowed(
    microqueue_database: Any, path: str
) -> None:
    async with opened(microqueue_database, manual_actions=True) as site:
        task = site.queue.enqueue({})
        assert (await site.get("/config"))["manual_actions"]
        assert (await site.get(f"/tasks/{task.id}"))["actions"] == ["cancel", "succeed", "fail"]
        shown = await site.post(path.format(id=task.id))
        assert shown["state"] == ("done" if "succeed" in path else "delayed")
        assert (await site.get("/audit"))["items"][0]["count"] == 1


def test_read_only_page_has_no_manual_actions() -> None:
    with pytest.raises(InvalidArgument, match="read_only"):  # It is about two arguments.
        dashboard(memory_queue(), read_only=True, manual_actions=True)


# Enqueueing by name


def register(site: Site, *names: str, queue: str = "default", **fields: Any) -> None:
    """Register a worker that serves these names, or, without any, tasks of any name."""
    info = WorkerInfo(
        **{
            "id": f"worker of {names}",
            "collection": "tasks",
            "host": "h",
            "pid": 1,
            "queues": [queue],
            "concurrency": 1,
            "running": 0,
            "handled": 0,
            "started_at": site.clock.now(),
            "heartbeat_at": site.clock.now(),
            "heartbeat_sec": 5,
            "tasks": list(names) or None,
            **fields,
        }
    )
    core_of(site.queue).run(workers.beat(info))


async def test_task_is_enqueued_by_its_name(site: Site) -> None:
    register(site, "send_email")
    body = {"name": "send_email", "payload": {"to": "ada"}, "headers": {"trace": "t"},
            "delay_sec": 5, "priority": 3}  # fmt: skip
    shown = await site.post("/tasks", body, expect=201)
    assert (shown["name"], shown["warnings"]) == ("send_email", [])
    task = site.queue.peek(1)[0]
    assert task.headers == {"trace": "t"}
    assert (task.name, task.priority) == ("send_email", 3)
    assert task.next_retry_at == site.clock.now() + timedelta(seconds=5)
    # A header may name the task, too, but not otherwise.
    again = await site.post("/tasks", {"headers": {"task": "send_email"}}, expect=201)
    assert (again["name"], again["warnings"]) == ("send_email", [])
    contradicting = {"name": "send_email", "headers": {"task": "other"}}
    problem = await site.post("/tasks", contradicting, expect=422)
    assert [one["path"] for one in problem["errors"]] == ["name"]


async def test_names_that_workers_registered_are_listed(site: Site) -> None:
    register(site, "send_email", "resize")
    register(site, "bill", queue="billing", more_tasks=True)
    register(site, queue="plain")
    register(site, "gone", id="gone", heartbeat_at=site.clock.now() - timedelta(seconds=60))
    reply = await site.get("/task-names")
    assert (reply["queue"], reply["all_queues"], reply["known"]) == (None, True, [])
    told = {one["queue"]: (one["names"], one["any_name"]) for one in reply["queues"]}
    assert told == {
        "billing": (["bill"], True),
        "default": (["resize", "send_email"], False),
        "plain": ([], True),
    }
    reply = await site.get("/task-names", queue="plain")
    assert [one["queue"] for one in reply["queues"]] == ["plain"]


async def test_name_that_no_worker_registered_is_stored_with_a_warning(site: Site) -> None:
    register(site, "send_email")
    for body in ({"name": "send_mail"}, {}):
        shown = await site.post("/tasks", body, expect=201)
        assert [one["path"] for one in shown["warnings"]] == ["name"]
    assert (await site.post("/tasks", {"name": "send_email"}, expect=201))["warnings"] == []
    # Nobody knows what workers of this queue will serve.
    shown = await site.post("/tasks", {"name": "x", "queue": "new"}, expect=201)
    assert [one["path"] for one in shown["warnings"]] == ["name"]
    assert (await site.post("/tasks", {"queue": "new"}, expect=201))["warnings"] == []
    register(site, queue="plain")
    for body in ({"name": "x"}, {}):
        shown = await site.post("/tasks", {"queue": "plain", **body}, expect=201)
        assert shown["warnings"] == []


@pytest.mark.parametrize("given", [tasks, send_email])
async def test_payload_of_a_known_task_is_checked_before_it_is_stored(
    microqueue_database: Any, given: Any
) -> None:
    async with opened(microqueue_database, tasks=given) as site:
        assert (await site.get("/task-names"))["known"] == ["send_email"]
        payload = {"copies": "many", "subject": "hello"}
        body = {"name": "send_email", "payload": payload}
        problem = await site.post("/tasks", body, expect=422)
        assert problem["code"] == "InvalidPayload"
        paths = {one["path"] for one in problem["errors"]}
        assert paths == {"payload.to", "payload.copies", "payload.subject"}
        assert site.queue.stats().pending == 0
        assert (await site.get("/audit"))["items"] == []
        body = {"name": "send_email", "payload": {"to": "ada", "copies": 2}}
        assert (await site.post("/tasks", body, expect=201))["warnings"] == []
        await site.post("/tasks", {"name": "other", "payload": payload}, expect=201)
    with rejecting("tasks"):
        dashboard(memory_queue(), tasks=print)


async def test_payload_is_checked_by_the_model_of_the_queue(microqueue_database: Any) -> None:
    async with opened(microqueue_database, model=Mail) as site:
        problem = await site.post("/tasks", {"payload": {"to": 5}}, expect=422)
        assert [one["path"] for one in problem["errors"]] == ["payload.to"]
        await site.post("/tasks", {"payload": {"to": "ada"}}, expect=201)
        await site.post("/tasks", {"payload": {"to": 5}, "queue": "other"}, expect=201)


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        ({"priority": 300, "delay_sec": -1}, {"priority", "delay_sec"}),
        ({"payload": {"a": {"$oid": "x"}}}, {"payload"}),
        ({"headers": {"a": {"$date": "never"}}}, {"headers"}),
        ({"payload": []}, {"payload"}),
        ({"queue": "line\nbreak"}, {"queue"}),
        ({"name": "", "max_attempts": 0}, {"name", "max_attempts"}),
        ({"payload": {"a": {"b": 10**23}}}, {"payload"}),
        ({"surprise": 1}, {"surprise"}),
    ],
)
async def test_fields_that_are_not_valid_are_named(
    site: Site, body: dict[str, Any], paths: set[str]
) -> None:
    problem = await site.post("/tasks", body, expect=422)
    assert {one["path"] for one in problem["errors"]} == paths
    assert all(one["message"] for one in problem["errors"])
    assert site.queue.stats().pending == 0


@pytest.fixture
def many() -> Tasks:
    registry = Tasks()
    for n in range(MOST_NAMES + 1):
        registry.task(f"task_{n:04}")(_nothing_of())
    return registry


def _nothing_of() -> Any:
    def nothing() -> None:
        """Do nothing."""

    return nothing


@pytest.mark.parametrize("kind", ["named", "plain", "many"])
def test_worker_registers_the_names_that_it_serves(
    microqueue_database: Any, kind: str, many: Tasks
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    handler: Any = {"named": tasks, "plain": print, "many": many}[kind]
    worker = Worker(queue, handler)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        wait_for(queue.workers, what="the worker's registration")
        (info,) = queue.workers()
        (served,) = core_of(queue).run(workers.served_names("tasks", queue.now()))
    finally:
        worker.stop()
        thread.join()
    expected = {"named": ["send_email"], "plain": None, "many": sorted(many.names())[:MOST_NAMES]}
    assert info.tasks == expected[kind]
    assert served.names == (expected[kind] or [])
    assert served.any_name is (kind != "named")
