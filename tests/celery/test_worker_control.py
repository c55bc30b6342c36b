"""Remote control, events and routing, with a running worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.celery.workers import PATIENCE_SEC, Site, Worker
from tests.waiting import wait_for


@pytest.fixture(scope="module", autouse=True)
def worker(shared_site: Site) -> Iterator[Worker]:
    with shared_site.worker(queues="celery,sport,finals,everyone") as started:
        yield started


@pytest.fixture
def site(shared_site: Site) -> Site:
    return shared_site


@pytest.fixture
def inspect(site: Site, worker: Worker) -> Callable[..., Any]:
    """Ask the worker; return its reply."""

    def ask(command: str, *arguments: Any) -> Any:
        asking = site.app.control.inspect([worker.name], timeout=PATIENCE_SEC, limit=1)
        return getattr(asking, command)(*arguments)[worker.name]

    return ask


def test_ping_and_stats_and_registered(
    site: Site, worker: Worker, inspect: Callable[..., Any]
) -> None:
    assert inspect("ping") == {"ok": "pong"}
    stats = inspect("stats")
    assert stats["pid"] == worker.pid
    assert stats["broker"]["transport"] == "microqueue"
    assert "shop.add" in inspect("registered")
    queues = {one["alias"] or one["name"] for one in inspect("active_queues")}
    assert queues == {"celery", "sport", "finals", "everyone"}


def wait_until_active(inspect: Callable[..., Any], *sent: Any) -> None:
    """Wait until these tasks alone run, as the worker's main process sees it."""
    wanted = {one.id for one in sent}
    wait_for(
        lambda: {one["id"] for one in inspect("active")} == wanted, PATIENCE_SEC, what="active"
    )


def test_what_flower_asks_for_at_once(
    site: Site, worker: Worker, inspect: Callable[..., Any]
) -> None:
    gate = site.gate()
    wait, add = site.task("wait"), site.task("add")
    running = [wait.delay(str(gate)) for _ in range(2)]
    for one in running:
        site.wait_for_run(one)
    prefetched = add.delay(1, 1)
    worker.wait_for_log(f"shop.add[{prefetched.id}] received")
    wait_until_active(inspect, *running)
    delayed = add.apply_async((1, 1), countdown=3600)
    methods = FLOWER_METHODS
    with ThreadPoolExecutor(len(methods)) as threads:
        found = dict(zip(methods, threads.map(inspect, methods), strict=True))
    assert found["stats"]["pool"]["max-concurrency"] == 2
    assert {one["name"] for one in found["active_queues"]} >= {"celery", "sport", "finals"}
    assert "shop.add" in found["registered"]
    assert [one["request"]["id"] for one in found["scheduled"]] == [delayed.id]
    assert {one["id"] for one in found["active"]} == {one.id for one in running}
    assert prefetched.id in {one["id"] for one in found["reserved"]}
    assert isinstance(found["revoked"], list)
    assert found["conf"]["task_default_queue"] == "celery"
    gate.touch()
    for one in [*running, prefetched]:
        site.result(one)


FLOWER_METHODS = (
    "stats",
    "active_queues",
    "registered",
    "scheduled",
    "active",
    "reserved",
    "revoked",
    "conf",
)


def test_a_worker_sends_events_when_it_is_told_to(site: Site) -> None:
    control = site.app.control
    asking: dict[str, Any] = {"reply": True, "timeout": PATIENCE_SEC, "limit": 1}
    with site.worker(pool="solo", queues="slow", worker_send_task_events=False) as other:
        for change, types in (("enable", TASK_EVENTS), ("disable", set())):
            (reply,) = getattr(control, f"{change}_events")(destination=[other.name], **asking)
            assert reply == {other.name: {"ok": f"task events {change}d"}}
            sent, seen = send_and_listen(site, types, queue="slow")
            assert types == _types(seen, sent)


def test_a_broadcast_reaches_every_worker_once(site: Site, worker: Worker) -> None:
    with site.worker(pool="solo", concurrency=1, queues="slow,everyone") as other:
        replies = site.app.control.ping(timeout=PATIENCE_SEC, limit=2)
        assert {name for reply in replies for name in reply} == {worker.name, other.name}
        assert len(replies) == 2
        sent = site.task("add").apply_async((1, 1), queue="everyone")
        site.wait_for_run(sent, times=2)
        # A task behind it in the same queues: when it has run twice, there was no third run.
        site.wait_for_run(site.task("add").apply_async((1, 1), queue="everyone"), times=2)
        runs = site.ledger(id=sent.id)
        assert sorted(run["worker"] for run in runs) == sorted([worker.name, other.name])
    assert site.database.tasks.find_one({"payload.headers.id": sent.id}) is None


def test_a_worker_with_a_single_connection_for_calls(site: Site) -> None:
    options = {"max_connections": 1}
    with site.worker(queues="slow", broker_transport_options=options) as other:
        sent = site.task("add").apply_async((1, 2), queue="slow")
        assert site.result(sent) == 3
        asking = site.app.control.inspect([other.name], timeout=PATIENCE_SEC, limit=1)
        assert asking.ping() == {other.name: {"ok": "pong"}}


def test_active_shows_what_runs(site: Site, inspect: Callable[..., Any]) -> None:
    gate = site.gate()
    sent = site.task("wait").delay(str(gate))
    site.wait_for_run(sent)
    wait_until_active(inspect, sent)
    (active,) = inspect("active")
    assert (active["id"], active["name"]) == (sent.id, "shop.wait")
    gate.touch()
    assert site.result(sent) == str(gate)


def test_a_revoked_task_is_not_run(site: Site, worker: Worker, inspect: Callable[..., Any]) -> None:
    sent = site.task("add").apply_async((1, 1), queue="slow")
    site.app.control.revoke(sent.id, reply=True, timeout=PATIENCE_SEC, limit=1)
    assert sent.id in inspect("revoked")
    site.app.control.add_consumer("slow", destination=[worker.name], reply=True)
    site.wait_for_status(sent, "done")
    assert sent.state == "REVOKED"
    site.app.control.cancel_consumer("slow", destination=[worker.name], reply=True)
    assert not site.ledger(id=sent.id)


def test_a_running_task_is_terminated_and_not_delivered_again(site: Site) -> None:
    sent = site.task("wait").delay(str(site.gate()))
    site.wait_for_run(sent)
    sent.revoke(terminate=True, signal="SIGKILL")
    wait_for(lambda: sent.state == "REVOKED", PATIENCE_SEC, what="revoked")
    site.wait_for_status(sent, "done")
    assert len(site.ledger(id=sent.id)) == 1


def test_a_new_rate_limit(site: Site, worker: Worker) -> None:
    (reply,) = site.app.control.rate_limit(
        "shop.quick", "3/m", destination=[worker.name], reply=True, timeout=PATIENCE_SEC
    )
    assert reply == {worker.name: {"ok": "new rate limit set successfully"}}


def test_a_receiver_sees_the_events_of_a_task(site: Site, worker: Worker) -> None:
    sent, seen = send_and_listen(site, TASK_EVENTS)
    assert _types(seen, sent) == TASK_EVENTS
    assert {one["hostname"] for one in seen if one.get("uuid") == sent.id} == {worker.name}


def send_and_listen(
    site: Site, types: set[str], **options: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """Run a task, and receive events until those of these types came."""
    seen: list[dict[str, Any]] = []
    with site.app.connection() as connection:
        receiver = site.app.events.Receiver(connection, handlers={"*": seen.append})
        (consumer,) = receiver.get_consumers(connection.Consumer, connection.default_channel)
        with consumer:
            sent = site.task("add").apply_async((1, 1), **options)
            site.result(sent)
            wait_for(lambda: _drained(connection) and _types(seen, sent) >= types, PATIENCE_SEC)
    return sent, seen


TASK_EVENTS = {"task-received", "task-started", "task-succeeded"}


def _drained(connection: Any) -> bool:
    with suppress(TimeoutError):
        connection.drain_events(timeout=1)
    return True


def _types(seen: list[dict[str, Any]], sent: Any) -> set[str]:
    return {one["type"] for one in seen if one.get("uuid") == sent.id}


def test_a_topic_exchange_routes_by_pattern(site: Site) -> None:
    add = site.task("add")
    keys = {
        "sport.football": ["sport"],
        "sport.final": ["finals", "sport"],
        "art.final": ["finals"],
    }
    sent = {key: add.apply_async((1, 1), exchange="news", routing_key=key) for key in keys}
    for key, queues in keys.items():
        stored = list(site.database.tasks.find({"payload.headers.id": sent[key].id}))
        assert sorted(one["queue"] for one in stored) == queues
        site.wait_for_run(sent[key], times=len(queues))
    lost = add.apply_async((1, 1), exchange="news", routing_key="art.film")
    assert site.database.tasks.find_one({"payload.headers.id": lost.id}) is None
