"""Commands show, filter and set the names of tasks."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

import pytest

from microqueue import Queue
from tests.acceptance.command_line import Cli, bury


@pytest.mark.parametrize("command", [("peek",), ("dlq", "list")], ids=" ".join)
def test_tasks_are_listed_with_their_names_if_one_has_a_name(
    cli: Cli, queue: Queue[Any], command: tuple[str, ...]
) -> None:
    bury(queue, task_id="nameless", headers={"trace": "abc"})
    bury(queue, task_id="malformed", headers={"task": 7})
    assert "name" not in cli(*command).splitlines()[0].split()
    bury(queue, task_id="named", headers={"task": "send_\x1bmail"})
    heading, *rows = [line.split() for line in cli(*command).splitlines()]
    assert heading[:2] == ["id", "name"]
    assert {row[0]: row[1] for row in rows} == {
        "named": "send_\\x1bmail",
        "nameless": "-",
        "malformed": "-",
    }


def test_tasks_are_enqueued_and_filtered_by_name(cli: Cli, queue: Queue[Any]) -> None:
    cli("enqueue", "{}", "--name", "pay", "--id", "pay-1")
    cli("enqueue", "{}", "--name", "ship", "--id", "ship-1")
    cli("enqueue", "{}", "--id", "nameless")
    for name, task_id in (("pay", "pay-1"), ("ship", "ship-1"), ("", "nameless")):
        assert [one["id"] for one in cli.json("peek", "--name", name)] == [task_id]
    assert cli.json("show", "pay-1")["name"] == "pay"
    assert ["name", "pay"] in [line.split() for line in cli("show", "pay-1").splitlines()]
    assert "'bill'" in cli("peek", "--name", "bill")
    cli("enqueue", "{}", "--name", "a\nb", status=1)


def test_dead_letters_are_listed_replayed_and_discarded_by_name(
    cli: Cli, queue: Queue[Any]
) -> None:
    for name in ("pay", "ship", None):
        bury(queue, task_id=f"{name}", name=name)
    assert [one["id"] for one in cli.json("dlq", "list", "--name", "pay")["tasks"]] == ["pay"]
    assert [one["id"] for one in cli.json("dlq", "list", "--name", "")["tasks"]] == ["None"]
    replay = ("dlq", "replay", "--name", "pay", "--all-queues", "--yes")
    assert cli.json(*replay)["replayed"] == 1
    discard = ("dlq", "discard", "--name", "ship", "--all-queues", "--yes")
    assert cli.json(*discard)["discarded"] == 1
    assert [one.id for one in queue.dead_letters.list()] == ["None"]


def test_names_are_listed_with_their_figures(cli: Cli, queue: Queue[Any]) -> None:
    assert "No tasks" in cli("names")
    bury(queue, name="pay")
    queue.enqueue({}, name="pay")
    task = queue.pop()
    assert task is not None
    queue.mark_done(task)
    queue.enqueue_many([{}, {}], name="pay", delay=60)
    queue.enqueue({})
    heading, *rows = [re.split(r"  +", line.strip()) for line in cli("names").splitlines() if line]
    assert heading[:6] == ["name", "waiting", "running", "done", "failed", "failure rate"]
    assert heading[6:] == ["wait p50", "wait p95", "run p50", "run p95"]
    assert rows[0][:6] == ["pay", "2", "0", "1", "1", "50.0%"]
    assert rows[1] == ["(no name)", "1", "0", "0", "0", *["-"] * 5]
    found = cli.json("names", "--since", "2h", "--limit", "1", "--queue", queue.name)
    assert (found["total"], found["queues"]) == (2, [queue.name])
    (pay,) = found["names"]
    assert (pay["name"], pay["waiting"], pay["failure_rate"]) == ("pay", 2, 0.5)
    since, at = (datetime.fromisoformat(found[field]) for field in ("since", "at"))
    assert at - since == timedelta(hours=2)
    assert "1 of 2 names" in cli("names", "--limit", "1")


def test_estimates_by_name_are_marked(
    cli: Cli, queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICROQUEUE_COUNT_LIMIT", "100")
    queue.enqueue_many([{} for _ in range(400)], name="pay")
    line = cli("names").splitlines()[1].split()
    assert line[0] == "pay"
    assert line[1].startswith("~")
    assert cli("names", "--exact").splitlines()[1].split()[1] == "400"
