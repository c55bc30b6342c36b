from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from microqueue import Queue
from microqueue.core import core_of
from microqueue.operations.workers import beat
from microqueue.reports import WorkerInfo
from tests.acceptance.command_line import Cli
from tests.fixtures.version_1 import restore


def restored(queue: Queue[Any]) -> Any:
    database = core_of(queue).collections.database
    restore(database, "status", datetime.now(UTC))
    return database


def test_migrate_first_shows_what_it_would_do(cli: Cli, queue: Queue[Any]) -> None:
    database = restored(queue)
    before = list(database.tasks.find())
    cli("stats", status=1)
    assert "microqueue migrate" in cli.stderr
    said = cli("migrate")
    assert "schema version 1" in said
    assert "To drop: due, exhausted, expiring, finished, lease." in said
    assert "microqueue migrate --apply" in said
    found = cli.json("migrate")
    assert (found["found"], found["needed"], found["applied"]) == (1, True, False)
    assert list(database.tasks.find()) == before


def test_migrate_applies_and_commands_work_again(cli: Cli, queue: Queue[Any]) -> None:
    restored(queue)
    assert "schema version 2" in cli("migrate", "--apply")
    assert cli.json("stats", "-q", "mail")["done"] == 2
    again = cli.json("migrate", "--apply")
    assert (again["needed"], again["changed"]) == (False, 0)
    assert "nothing to do" in cli("migrate")
    assert "version 2" in cli("migrate")


def test_doctor_names_the_migration(cli: Cli, queue: Queue[Any]) -> None:
    restored(queue)
    checks = {one["name"]: one for one in cli.json("doctor", status=1)["checks"]}
    assert not checks["schema version"]["ok"]
    assert "microqueue migrate" in checks["schema version"]["advice"]


def test_migrate_is_for_all_queues(cli: Cli) -> None:
    cli("migrate", "--queue", "mail", status=1)
    assert "leave --queue out" in cli.stderr


def test_old_indexes_that_came_back_are_shown_and_dropped(cli: Cli, queue: Queue[Any]) -> None:
    queue.enqueue({})
    tasks = core_of(queue).collections.tasks
    tasks.create_index("finished_at", name="finished", expireAfterSeconds=60)
    said = cli("migrate")
    assert "To drop: finished." in said
    assert "microqueue migrate --apply" in said
    assert (cli.json("migrate")["needed"], cli.json("migrate")["drop"]) == (True, ["finished"])
    checks = {one["name"]: one for one in cli.json("doctor", status=1)["checks"]}
    assert "microqueue migrate" in checks["indexes of tasks"]["advice"]
    cli("migrate", "--apply")
    assert "finished" not in tasks.index_information()
    assert "nothing to do" in cli("migrate")


def test_tasks_that_an_old_worker_left_are_shown_and_changed(cli: Cli, queue: Queue[Any]) -> None:
    queue.enqueue({})
    tasks = core_of(queue).collections.tasks
    lease = {"lease_token": "t", "lease_expires_at": datetime(2026, 5, 1, tzinfo=UTC)}
    tasks.update_one({}, {"$set": {"status": "processing", **lease}})
    said = cli("migrate")
    assert "older tasks" in said
    assert "To change: 1 tasks (1 processing)." in said
    assert "microqueue migrate --apply" in said
    assert cli.json("migrate", "--apply")["changed"] == 1
    assert "nothing to do" in cli("migrate")


def test_migrate_waits_for_workers_unless_forced(cli: Cli, queue: Queue[Any]) -> None:
    database = restored(queue)
    now = datetime.now(UTC)
    info = WorkerInfo(
        id="old:7",
        collection="tasks",
        host="h",
        pid=1,
        queues=["mail"],
        concurrency=1,
        running=0,
        handled=0,
        started_at=now,
        heartbeat_at=now,
        heartbeat_sec=60,
    )
    core_of(queue).run_on_any_version(beat(info))
    assert "Stop these workers first: old:7." in cli("migrate")
    assert cli.json("migrate")["workers"] == ["old:7"]
    cli("migrate", "--apply", status=1)
    assert "old:7" in cli.stderr
    assert database.microqueue_locks.find_one("schema:tasks") is None
    assert "schema version 2" in cli("migrate", "--apply", "--force")


def test_migrate_notes_its_progress(
    cli: Cli, queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    restored(queue)
    monkeypatch.setenv("MICROQUEUE_BATCH_SIZE", "1")
    cli("migrate", "--apply")
    assert "20 of about 20 tasks" in cli.stderr
