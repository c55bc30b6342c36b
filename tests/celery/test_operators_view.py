"""Celery's messages are ordinary tasks: what the dashboard, the command line and metrics show."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from microqueue import Queue, QueueSettings
from microqueue.embedded import EmbeddedServer
from microqueue.metrics import QueueCollector
from tests.acceptance.command_line import PROGRAM
from tests.celery.conftest import end_site, new_site
from tests.celery.workers import Site
from tests.integration.dashboard_site import opened


@pytest.fixture(scope="module")
def site(
    microqueue_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A site with its worker, which the tests share."""
    site = new_site(
        microqueue_server,
        tmp_path_factory.mktemp("celery"),
        broker_transport_options={"dead_letter_rejected": True, "delivery_limit": 2},
    )
    with site.worker():
        yield site
    end_site(site)


@pytest.fixture
def running(site: Site) -> Iterator[Any]:
    """A task that runs during the test."""
    gate = site.gate()
    sent = site.task("wait").delay(str(gate))
    site.wait_for_run(sent)
    yield sent
    gate.touch()
    site.wait_for_status(sent, "done")  # Its result comes before its acknowledgement.


def microqueue(site: Site, *arguments: str) -> Any:
    """Run a command, and return what it prints as JSON."""
    done = subprocess.run(
        [*PROGRAM, *arguments, "--json"],
        env=os.environ | {"MICROQUEUE_URI": site.uri, "MICROQUEUE_QUEUE": "celery"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_the_dashboard_shows_messages_by_the_name_of_their_task(
    site: Site, running: Any
) -> None:
    stored = site.stored(running)
    async with opened(site.database) as dashboard:
        rows = (await dashboard.get("/running", queue="celery"))["items"]
        (row,) = [one for one in rows if one["id"] == str(stored["_id"])]
        assert (row["name"], row["attempt"]) == ("shop.wait", 1)
        tasks = (await dashboard.get("/tasks", queue="celery", status="processing"))["items"]
        assert [one["name"] for one in tasks] == ["shop.wait"]
        detail = await dashboard.get(f"/tasks/{stored['_id']}")
        assert (detail["name"], detail["state"]) == ("shop.wait", "processing")
        assert detail["payload"]["headers"]["id"] == running.id


def test_top_shows_the_queue_and_what_runs(site: Site, running: Any) -> None:
    shown = microqueue(site, "top")
    assert ("celery", "shop.wait") in [(one["queue"], one["name"]) for one in shown["running"]]
    (queue,) = [one for one in shown["queues"] if one["queue"] == "celery"]
    assert queue["processing"] == 1


def test_metrics_count_the_messages_of_a_queue(site: Site, running: Any) -> None:
    site.task("add").apply_async((1, 1), queue="sport")
    registry = CollectorRegistry()
    registry.register(QueueCollector(*(Queue(site.database, name) for name in ("celery", "sport"))))
    depth = "microqueue_queue_depth"
    assert registry.get_sample_value(depth, {"queue": "sport", "status": "ready"}) == 1
    assert registry.get_sample_value(depth, {"queue": "celery", "status": "processing"}) == 1


def test_a_rejected_message_is_a_dead_letter_and_runs_after_a_replay(site: Site) -> None:
    gate = site.gate()
    sent = site.task("refuse").delay(str(gate), requeue=False)
    dead = site.wait_for_status(sent, "failed")
    listed = microqueue(site, "dlq", "list")["tasks"]
    (letter,) = [one for one in listed if one["id"] == str(dead["_id"])]
    assert (letter["name"], letter["error"]["code"]) == ("shop.refuse", "rejected")
    shown = microqueue(site, "dlq", "show", str(dead["_id"]))
    assert shown["payload"]["headers"]["id"] == sent.id
    gate.touch()
    microqueue(site, "dlq", "replay", str(dead["_id"]), "--yes")
    site.wait_for_status(sent, "done")
    assert site.result(sent) == str(gate)
    assert len(site.ledger(id=sent.id)) == 2


def test_a_poisonous_message_is_a_dead_letter_and_runs_after_a_replay(site: Site) -> None:
    gate = site.gate()
    sent = site.task("refuse").delay(str(gate), requeue=True)
    dead = site.wait_for_status(sent, "failed")
    assert (dead["error"]["code"], dead["attempts"]) == ("poison", 2)
    assert len(site.ledger(id=sent.id)) == 2
    gate.touch()
    queue: Queue[Any] = Queue(site.database, "celery", settings=QueueSettings())
    assert queue.dead_letters.replay(dead["_id"]).replayed == 1
    assert site.result(sent) == str(gate)
    assert site.wait_for_status(sent, "done")["attempts"] == 1


def test_purge_deletes_what_waits_in_all_queues_and_not_what_runs(site: Site, running: Any) -> None:
    add, tasks = site.task("add"), site.database.tasks
    site.app.control.purge()  # What other tests left.
    delayed = add.apply_async((1, 1), countdown=3600)
    waiting = [add.apply_async((1, 1), queue="slow") for _ in range(2)]
    assert {site.stored(one)["status"] for one in [delayed, *waiting]} == {"pending"}
    assert site.app.control.purge() == 3
    assert tasks.count_documents({"status": "pending"}) == 0
    assert site.stored(running)["status"] == "processing"
    assert site.app.control.purge() == 0
