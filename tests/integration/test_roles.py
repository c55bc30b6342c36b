"""The roles of docs/roles.md allow what each process does, and the server rejects the rest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from bson import ObjectId
from pymongo import MongoClient

from microqueue import (
    DeadLetterFilter,
    DuplicateTask,
    Fail,
    OperationFailed,
    Queue,
    QueueSettings,
    Sweeper,
    Topic,
    Worker,
)
from microqueue.core import core_of
from microqueue.migration import Migration
from microqueue.operations import archive, bulk_load, export
from microqueue.operations.workers import beat
from microqueue.reports import WorkerInfo
from tests.fixtures.version_1 import restore
from tests.integration.dashboard_site import opened
from tests.integration.replica_set import NAME, Member
from tests.integration.test_access_control import PASSWORD, is_unauthorized, server

__all__ = ["server"]

PAGE = Path(__file__).parents[2] / "docs" / "roles.md"
BLOCKS = re.findall(r"^```json\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
ROLES: dict[str, dict[str, Any]] = {one["role"]: one for one in map(json.loads, BLOCKS)}
DLQ = QueueSettings(dead_letters="collection")
NO_INDEXES = QueueSettings(ensure_indexes=False)

Login = Callable[[str], Any]


@pytest.fixture(scope="module")
def login(server: Member) -> Iterator[Login]:
    """Returns the database ``shop`` as a user with one role sees it."""
    address = f"mongodb://root:{PASSWORD}@{server.address}/?replicaSet={NAME}"
    clients: list[MongoClient[Any]] = [MongoClient(address)]
    shop = clients[0].shop
    for name, role in ROLES.items():
        shop.command("createRole", name, privileges=role["privileges"], roles=role["roles"])
        shop.command("createUser", name, pwd=PASSWORD, roles=[name])
    queue: Queue[Any] = Queue(shop, settings=DLQ)  # As an administrator prepares it.
    queue.ensure_indexes()
    queue.schedules.put("hourly", every=3600)
    Topic(queue, "prices").bind("default")
    Topic(queue, "prices").publish({"sku": "a-0"})

    def login(user: str) -> Any:
        if user == "root":
            return shop
        clients.append(MongoClient(uri_of(server, user)))
        return clients[-1].shop

    yield login
    shop.tasks.delete_many({})
    for client in clients:
        client.close()


def is_rejected(call: Callable[[], Any]) -> None:
    """Expect that MongoDB does not allow a call, and that the error is typed."""
    with pytest.raises(OperationFailed) as rejected:
        call()
    assert is_unauthorized(rejected.value)


def uri_of(server: Member, user: str, database: str = "shop") -> str:
    """Return the URI with which a user reaches a database."""
    return f"mongodb://{user}:{PASSWORD}@{server.address}/{database}?replicaSet={NAME}"


def run_command(uri: str, *arguments: str, cwd: Path | None = None) -> str:
    """Run a command as a user; give what it printed to stdout."""
    environment = {**os.environ, "MICROQUEUE_URI": uri}
    result = subprocess.run(
        [sys.executable, "-m", "microqueue.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**environment, "PYTHONPATH": str(PAGE.parents[1])},
        cwd=cwd,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def make_due(login: Login) -> None:
    """Let the schedule be due."""
    shop = login("root")
    shop.microqueue_schedules.update_one({}, [{"$set": {"next_at": {"$subtract": ["$$NOW", 1]}}}])


def test_page_has_the_roles_without_wildcards() -> None:
    assert len(ROLES) >= 7
    for role in ROLES.values():
        assert role["privileges"]
        for privilege in role["privileges"]:
            assert set(privilege["resource"]) == {"db", "collection"}
            assert privilege["resource"]["db"] == "shop"
            if not privilege["resource"]["collection"]:  # The database itself.
                assert privilege["actions"] == ["listCollections"]
            assert "anyAction" not in privilege["actions"]


def test_insert_only_producer_adds_tasks_and_cannot_read_them(login: Login) -> None:
    queue: Queue[Any] = Queue(login("microqueueInsertOnly"), "inserted", settings=NO_INDEXES)
    task = queue.enqueue({"n": 1}, delay=60)
    assert queue.enqueue_many([{"n": 2}]).added == 1
    assert Queue[Any](login("root"), "inserted").get(task.id) is not None
    for call in (lambda: queue.get(task.id), queue.pop, queue.purge, lambda: queue.cancel(task.id)):
        is_rejected(call)


def test_producer_uses_dedupe_keys_ids_and_topics_and_deletes_nothing(login: Login) -> None:
    queue: Queue[Any] = Queue(login("microqueueProducer"), "produced", settings=DLQ)
    task = queue.enqueue({"n": 1}, dedupe_key="a", dedupe_for=60)
    for what in ("return", "replace"):
        assert queue.enqueue({"n": 2}, dedupe_key="a", on_duplicate=what).id == task.id
    for again in ({"dedupe_key": "a"}, {"task_id": task.id}, {"dedupe_key": "a", "dedupe_for": 9}):
        with pytest.raises(DuplicateTask):
            queue.enqueue({}, **again)
    assert queue.enqueue_many([{"n": 3}, {"n": 4}]).added == 2
    topic = Topic(queue, "prices")
    topic.publish({"sku": "a-1"})
    assert topic.publish({"sku": "a-1"}, message_id="m") == topic.publish({}, message_id="m")
    tasks = login("microqueueProducer").tasks
    for call in (
        lambda: queue.purge(status="pending"),
        lambda: Topic(queue, "secret").publish({}),
        lambda: queue.schedules.put("mine", every=60),
        queue.pause,
    ):
        is_rejected(call)
    with pytest.raises(Exception, match="not authorized"):
        tasks.drop()


@pytest.mark.parametrize("settings", [QueueSettings(), DLQ, QueueSettings(retention=0)])
def test_worker_claims_settles_and_fires_schedules(login: Login, settings: QueueSettings) -> None:
    given: Queue[Any] = Queue(login("root"), settings=DLQ)
    given.enqueue_many([{}, {}, {"fail": True}])
    make_due(login)

    def handle(payload: Any) -> str:
        if payload.get("fail"):
            raise Fail("no")
        return "done"

    queue: Queue[Any] = Queue(login("microqueueWorker"), settings=settings)
    assert Worker(queue, handle, keep_result=True).run(burst=True) >= 4
    queue.enqueue({})
    task = queue.pop(wait=30)
    assert task is not None
    queue.mark_retry(queue.touch(task), delay=0)
    taken = queue.pop(wait=30)
    assert taken is not None
    queue.mark_done(taken)
    assert queue.workers() == []
    for call in (
        queue.pause,
        lambda: queue.schedules.remove("hourly"),
        lambda: Sweeper(queue).run_once(),
    ):
        is_rejected(call)
    is_rejected(lambda: Topic(queue, "prices").bind("other"))


@pytest.mark.parametrize("processes", ["1", "2"])
def test_worker_command_needs_no_more(
    login: Login, server: Member, tmp_path: Path, processes: str
) -> None:
    (tmp_path / "roles_app.py").write_text("def handle(payload): ...\n", encoding="utf-8")
    task = Queue[Any](login("root"), "command").enqueue({})
    command = ["worker", "roles_app:handle", "-q", "command", "--burst", "--processes", processes]
    run_command(uri_of(server, "microqueueWorker"), *command, cwd=tmp_path)
    done = Queue[Any](login("root"), "command").get(task.id)
    assert done is not None
    assert done.status == "done"


def silence(login: Login, worker_id: str, seconds: float, *, missed: bool) -> None:
    """Register a worker with a task of each of two queues; its last heartbeat was a while ago."""
    shop = login("root")
    queues = [Queue[Any](shop, name) for name in ("lost", "lost too")]
    long_ago = queues[0].now() - timedelta(seconds=seconds)
    claimed = {"worker_id": worker_id, "started_at": long_ago}
    for queue in queues:
        queue.enqueue({})
        task = queue.pop()
        assert task is not None
        shop.tasks.update_one({"_id": task.id}, {"$set": claimed})
    info = WorkerInfo(
        id=worker_id, collection="tasks", host="h", pid=1, queues=[one.name for one in queues],
        concurrency=2, running=2, handled=0, started_at=long_ago, heartbeat_at=long_ago,
        heartbeat_sec=20,
    )  # fmt: skip
    core_of(queue).run(beat(info))
    if missed:
        noted = {"$set": {"missed_at": long_ago}}
        shop.microqueue_workers.update_one({"worker_id": worker_id}, noted)


def test_sweeper_reclaims_tasks_of_silent_workers(login: Login) -> None:
    silence(login, "late", 45, missed=False)  # It is gone after 60 s.
    silence(login, "gone", 600, missed=True)
    root = login("root")
    queue: Queue[Any] = Queue(login("microqueueSweeper"), settings=DLQ)
    # Its other tasks are for other sweepers, which must not blame as many.
    report = Sweeper(queue, queues=["lost"]).run_once()
    assert (report.errors, report.reclaimed) == ({}, 1)
    assert root.microqueue_workers.find_one({"worker_id": "gone"})["blamed"] == 1
    report = Sweeper(queue).run_once()
    assert (report.errors, report.reclaimed) == ({}, 1)
    (late,) = root.microqueue_workers.find({})
    assert late["worker_id"] == "late"
    assert late["missed_at"] is not None
    root.microqueue_workers.delete_many({})


def test_sweeper_runs_all_its_jobs(login: Login, server: Member) -> None:
    root = login("root")
    given: Queue[Any] = Queue(root, "swept", settings=QueueSettings(visibility_timeout=0.01))
    given.enqueue_many([{}, {}, {}])
    done, dead, _stuck = given.pop_many(3)
    given.enqueue({}, expires_in=0.01)
    given.enqueue({}, delay=0.01)
    root.tasks.update_many({"queue": "swept"}, {"$set": {"updated_at": done.created_at}})
    root.tasks.update_one({"_id": dead.id}, {"$set": {"max_attempts": 1}})
    make_due(login)
    queue: Queue[Any] = Queue(login("microqueueSweeper"), settings=DLQ)
    report = Sweeper(queue).run_once()
    assert report.errors == {}
    assert root.tasks.count_documents({"queue": "swept", "status": "processing"}) == 0
    run_command(uri_of(server, "microqueueSweeper"), "sweep")
    for call in (queue.pause, lambda: queue.schedules.put("mine", every=60)):
        is_rejected(call)
    is_rejected(lambda: Topic(queue, "prices").publish({}))


ROUTES = ["/overview", "/queues", "/workers", "/running", "/dead-letters", "/audit", "/tasks"]
ROUTES += ["/names", "/schedules", "/topics", "/topics/prices/messages"]


async def test_viewer_reads_all_pages_and_changes_nothing(login: Login) -> None:
    shop = login("microqueueViewer")
    async with opened(shop, read_only=True) as site:
        for route in ROUTES:
            await site.get(route)
    queue: Queue[Any] = Queue(shop, settings=NO_INDEXES)
    for call in (
        lambda: queue.enqueue({}),
        queue.pop,
        queue.pause,
        queue.purge,
        lambda: queue.schedules.remove("hourly"),
    ):
        is_rejected(call)


async def test_operator_acts_through_the_dashboard(login: Login) -> None:
    root: Queue[Any] = Queue(login("root"), settings=DLQ)
    root.enqueue_many([{}, {}])
    first, second = root.pop_many(2)
    for task in (first, second):
        root.mark_failure(task, "no")
    shop = login("microqueueOperator")
    async with opened(shop, manual_actions=True) as site:
        for route in ROUTES:
            await site.get(route)
        await site.post("/queues/default/pause", {})
        await site.post("/queues/default/resume")
        assert len((await site.get("/audit"))["items"]) >= 2
    queue: Queue[Any] = Queue(shop, settings=DLQ)
    assert queue.dead_letters.replay([first.id]).replayed == 1
    assert queue.dead_letters.discard(DeadLetterFilter()) >= 1
    queue.schedules.put("nightly", cron="0 3 * * *")
    queue.schedules.trigger("nightly")
    assert queue.schedules.remove("nightly")
    topic = Topic(queue, "prices")
    topic.bind("other")
    assert topic.unbind("other")
    topic.publish({"sku": "b"})
    queue.cancel(queue.enqueue({}).id)
    is_rejected(lambda: Sweeper(queue).run_once())
    is_rejected(lambda: Topic(queue, "secret").publish({}))


def test_spark_reads_with_one_role_and_writes_and_archives_with_the_other(login: Login) -> None:
    root: Queue[Any] = Queue(login("root"), "sparks", settings=DLQ)
    root.enqueue({"n": 1})
    task = root.pop()
    assert task is not None
    root.mark_done(task)
    done = login("root").tasks.find_one({"_id": task.id})
    for role in ("microqueueSparkReader", "microqueueSpark"):
        queue: Queue[Any] = Queue(login(role), "sparks", settings=DLQ)
        core = core_of(queue)
        (part,) = core.run(export.split_by_id({"queue": "sparks"}, 2))
        read = core.run(export.read_part({"queue": "sparks"}, ["_id"], part, batch_rows=5))
        assert len(list(read)) == 1
        now = queue.now()
        if role == "microqueueSparkReader":
            is_rejected(lambda: core.run(archive.delete_archived([done], now=now)))  # noqa: B023
            is_rejected(lambda: queue.enqueue({}))  # noqa: B023
            continue
        assert core.run(archive.delete_archived([done], now=now)).deleted == 1
        new = {**done, "_id": ObjectId(), "insert_token": "t"}
        added, _ = core.run(bulk_load.insert_chunk([new], settings=DLQ, hold=None))
        assert added == 1
        is_rejected(queue.pause)


def test_administrator_creates_indexes_and_migrates(login: Login) -> None:
    for place, role in enumerate(sorted({*ROLES} - {"microqueueProducer"})):
        # A new retention each time: the sweeper may change it, but not create indexes.
        queue: Queue[Any] = Queue(login(role), settings=QueueSettings(retention=60 + place))
        is_rejected(queue.ensure_indexes)
    root: Queue[Any] = Queue(login("root"))
    assert Migration(root).run() == 0


def test_read_write_is_enough_to_create_indexes_and_to_migrate(
    login: Login, server: Member
) -> None:
    client = login("root").client
    for name in ("new", "upgraded"):
        client[name].command("createUser", "planner", pwd=PASSWORD, roles=["readWrite"])
    assert "dedupe" in run_command(uri_of(server, "planner", "new"), "indexes")
    run_command(uri_of(server, "planner", "new"), "indexes", "--retention", "30d")
    run_command(uri_of(server, "planner", "new"), "indexes", "--retention", "3d")
    restore(client.upgraded, "collection", Queue[Any](login("root")).now())
    migrated = run_command(uri_of(server, "planner", "upgraded"), "migrate", "--apply")
    assert "now has schema version" in migrated
    run_command(uri_of(server, "planner", "upgraded"), "indexes")
