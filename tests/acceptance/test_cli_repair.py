from __future__ import annotations

from typing import Any

import pytest

from microqueue import Queue
from microqueue.cli import prompts
from microqueue.core import core_of
from microqueue.repair import RepairReport
from tests.acceptance.command_line import Cli


@pytest.fixture
def broken(queue: Queue[Any]) -> tuple[Any, Any]:
    """A task that no sweep would find, and one that cannot be repaired."""
    queue.ensure_indexes()
    tasks = core_of(queue).collections.tasks
    late, odd = queue.enqueue({}, delay=3600).id, queue.enqueue({}).id
    tasks.update_one({"_id": late}, {"$unset": {"deadline_at": ""}})
    tasks.update_one({"_id": odd}, {"$set": {"status": "strange"}})
    return late, odd


def test_doctor_counts_malformed_documents(cli: Cli, broken: tuple[Any, Any]) -> None:
    assert len(broken) == 2
    checks = {one["name"]: one for one in cli.json("doctor", status=1)["checks"]}
    assert not checks["documents"]["ok"]
    assert "microqueue doctor --repair" in checks["documents"]["advice"]


def test_repair_shows_first_and_mends_with_apply(
    cli: Cli, queue: Queue[Any], broken: tuple[Any, Any]
) -> None:
    tasks = core_of(queue).collections.tasks
    before = list(tasks.find())
    shown = cli.json("doctor", "--repair", status=1)
    assert (shown["applied"], shown["clean"], shown["documents"]) == (False, False, 2)
    found = {one["rule"]: one for one in shown["rules"]}
    assert {name: one["ids"] for name, one in found.items()} == {
        "deadline": [str(broken[0])],
        "status": [str(broken[1])],
    }
    printed = cli("doctor", "--repair", status=1)
    assert str(broken[0]) in printed
    assert "microqueue doctor --repair --apply" in printed
    assert list(tasks.find()) == before
    assert "To repair what can be repaired" in printed
    applied = cli.json("doctor", "--repair", "--apply", "--yes")
    assert (applied["applied"], applied["clean"], applied["left"]) == (True, True, 0)
    assert {one["repaired"] for one in applied["rules"]} == {1}
    assert "No malformed documents" in cli("doctor", "--repair")
    assert [letter.id for letter in queue.dead_letters.list()] == [broken[1]]


def test_repair_asks_before_it_mends(
    cli: Cli, queue: Queue[Any], broken: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = core_of(queue).collections.tasks
    cli("doctor", "--repair", "--apply", status=1)  # There is no terminal to ask at.
    assert "--yes" in cli.stderr
    monkeypatch.setattr(prompts, "at_terminal", lambda: True)
    cli("doctor", "--repair", "--apply", stdin="n\n", status=1)
    assert tasks.find_one({"_id": broken[1]})["status"] == "strange"
    cli("doctor", "--repair", "--apply", stdin="y\n")
    assert tasks.find_one({"_id": broken[1]})["status"] == "failed"


def test_what_is_left_is_a_failure(cli: Cli, queue: Queue[Any]) -> None:
    queue.enqueue({})
    queue.pop()
    core_of(queue).collections.tasks.update_one({}, {"$set": {"queue": 5}})
    assert "1 malformed document left" in cli("doctor", "--repair", "--apply", "--yes", status=1)


def test_repair_is_for_all_queues_and_apply_is_for_repair(cli: Cli) -> None:
    cli("doctor", "--repair", "--queue", "mail", status=1)
    assert "leave --queue out" in cli.stderr
    cli("doctor", "--apply", status=2)


def test_what_may_not_be_read_is_not_called_clean(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = RepairReport(applied=False, documents=0, left=0, unread=["tasks_dlq"])
    monkeypatch.setattr("microqueue.cli.doctor.repair", lambda *_, **__: report)
    printed = cli("doctor", "--repair")
    assert "lack of rights: tasks_dlq" in printed
    assert "No malformed documents" not in printed
