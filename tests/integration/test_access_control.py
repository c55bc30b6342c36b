"""MongoDB users: the roles that SECURITY.md names are enough, and no weaker ones are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from microqueue import OperationFailed, Queue, QueueSettings, Sweeper, Topic, Worker
from microqueue.core import core_of
from microqueue.operations import schema
from tests.integration.dashboard_site import opened
from tests.integration.replica_set import NAME, Member
from tests.ports import free_port
from tests.waiting import wait_for

ROLES = {"producer": ["readWrite"], "viewer": ["read"], "admin": ["readWrite", "dbAdmin"]}
PASSWORD = "secret"
UNAUTHORIZED = 13

Login = Callable[[str], Any]


@pytest.fixture(scope="module")
def server(own_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    """A replica set of one with access control, and users of the database ``shop``."""
    place = tmp_path_factory.mktemp("access-control")
    key = place / "key"
    key.write_text("a key of the members")
    key.chmod(0o600)
    member = Member(free_port(), place / "data", ["--auth", "--keyFile", str(key)])
    member.start()
    try:
        wait_for(lambda: member.client.admin.command("ping"), 90, ignoring=(PyMongoError,))
        hosts = [{"_id": 0, "host": member.address}]
        # From this machine, all this is allowed until there is a user.
        member.client.admin.command("replSetInitiate", {"_id": NAME, "members": hosts})
        wait_for(lambda: member.client.admin.command("hello")["isWritablePrimary"], 90)
        member.client.admin.command("createUser", "root", pwd=PASSWORD, roles=["root"])
        with MongoClient[Any](member.address, username="root", password=PASSWORD) as root:
            for user, roles in ROLES.items():
                root.shop.command("createUser", user, pwd=PASSWORD, roles=roles)
        yield member
    finally:
        member.end()


@pytest.fixture
def login(server: Member) -> Iterator[Login]:
    """Returns the database as a user sees it."""
    clients: list[MongoClient[Any]] = []

    def login(user: str) -> Any:
        uri = f"mongodb://{user}:{PASSWORD}@{server.address}/shop?replicaSet={NAME}"
        clients.append(MongoClient(uri))
        return clients[-1].shop

    yield login
    for client in clients:
        client.close()


def is_unauthorized(error: OperationFailed) -> bool:
    return getattr(error.__cause__, "code", None) == UNAUTHORIZED


async def test_read_write_is_enough_for_producers_workers_sweepers_and_the_dashboard(
    login: Login,
) -> None:
    shop = login("producer")
    queue: Queue[Any] = Queue(shop, settings=QueueSettings(dead_letters="collection"))
    queue.enqueue_many([{"n": 1}, {"n": 2}])
    taken = queue.pop(wait=30)
    assert taken is not None
    queue.mark_failure(taken, "no")
    assert await asyncio.to_thread(Worker(queue, lambda _payload: None).run, burst=True) == 1
    assert Sweeper(queue).run_once().errors == {}
    (letter,) = queue.dead_letters.list()
    queue.dead_letters.replay(letter.id)
    assert queue.purge(status="done") == 1
    async with opened(shop) as site:
        await site.post("/queues/default/pause", {})
        await site.post("/queues/default/resume")
        assert len((await site.get("/audit"))["items"]) == 2


def test_topics_need_read_write(login: Login) -> None:
    prices: Topic = Topic(login("producer"), "prices")
    prices.bind("copies")
    with prices.subscribe(timeout=40) as messages:
        prices.publish({"sku": "a-1"})
        assert next(messages).body == {"sku": "a-1"}
    shown: Topic = Topic(login("viewer"), "prices")
    with (
        pytest.raises(OperationFailed) as rejected,
        shown.subscribe(from_="start", timeout=40) as messages,
    ):
        next(messages)
    assert is_unauthorized(rejected.value)


async def test_read_is_enough_for_a_read_only_dashboard(login: Login) -> None:
    Queue[Any](login("producer")).enqueue({"n": 1})
    shop = login("viewer")
    async with opened(shop, read_only=True) as site:
        assert (await site.get("/tasks"))["items"]
        for route in ("/overview", "/queues", "/workers", "/running", "/dead-letters", "/audit"):
            await site.get(route)
    with pytest.raises(OperationFailed) as rejected:
        Queue[Any](shop).enqueue({"n": 2})
    assert is_unauthorized(rejected.value)


def test_read_write_is_enough_to_change_the_retention_of_a_collection(login: Login) -> None:
    shop, shorter = login("producer"), QueueSettings(retention=timedelta(days=3))
    Queue[Any](shop).ensure_indexes()
    Queue[Any](shop, settings=shorter).ensure_indexes()
    kept = core_of(Queue[Any](shop)).run(schema.read_retention("tasks", None))
    assert kept == timedelta(days=3)


async def test_retention_of_an_existing_audit_log_needs_the_role_db_admin(login: Login) -> None:
    for user, days, kept_days in (("producer", 90, 90), ("producer", 3, 90), ("admin", 3, 3)):
        shop, kept = login(user), timedelta(days=days)
        async with opened(shop, manual_actions=True, audit_retention=kept) as site:
            await site.post("/queues/default/pause")  # Though it may not change the index.
        index = shop.microqueue_audit.index_information()["kept"]
        assert index["expireAfterSeconds"] == timedelta(days=kept_days).total_seconds()
