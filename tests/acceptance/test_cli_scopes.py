"""Which queues a command uses: reading covers all, deleting and replaying need a choice."""

from __future__ import annotations

import re
from typing import Any

import pytest

from microqueue import Queue
from tests.acceptance.command_line import Cli, bury


@pytest.fixture
def mail(microqueue_database: Any) -> Queue[Any]:
    return Queue(microqueue_database, "mail")


@pytest.fixture
def bulk(microqueue_database: Any, mail: Queue[Any]) -> Queue[Any]:
    """A second queue, with the clock of the first: two estimates of the time may differ."""
    return Queue(microqueue_database, "bulk", clock=mail.clock)


# Reading


def test_dead_letters_of_all_queues_are_listed(
    cli: Cli, mail: Queue[Any], bulk: Queue[Any], queue: Queue[Any]
) -> None:
    queue.enqueue({})
    bury(mail, task_id="m1")
    bury(bulk, task_id="b1")
    found = cli.json("dlq", "list")
    assert [(task["id"], task["queue"]) for task in found["tasks"]] == [
        ("b1", "bulk"),
        ("m1", "mail"),
    ]
    assert found["queues"] == ["bulk", "default", "mail"]
    heading, *rows = [line.split() for line in cli("dlq", "list").splitlines()]
    assert heading[:2] == ["id", "queue"]
    assert [row[:2] for row in rows] == [["b1", "bulk"], ["m1", "mail"]]
    assert cli.stderr == "All queues: 'bulk', 'default' and 'mail'.\n"
    only = cli.json("dlq", "list", "-q", "mail")
    assert ([task["id"] for task in only["tasks"]], only["queues"]) == (["m1"], ["mail"])
    assert "queue" not in cli("-q", "mail", "dlq", "list").splitlines()[0].split()
    assert cli.stderr == "Queue 'mail'.\n"


def test_dead_letters_of_all_queues_are_paged(
    cli: Cli, mail: Queue[Any], bulk: Queue[Any], microqueue_database: Any
) -> None:
    for n, one in enumerate([mail, bulk] * 3):
        bury(one, task_id=f"letter-{n}")
    newest_first = microqueue_database.tasks.find().sort([("updated_at", -1), ("_id", 1)])
    ids = [task["_id"] for task in newest_first]
    assert len(ids) == 6
    listed: list[str] = []
    cursor: list[str] = []
    while True:
        page = cli.json("dlq", "list", "--limit", "4", *cursor)
        listed += [task["id"] for task in page["tasks"]]
        if page["next_cursor"] is None:
            break
        cursor = ["--cursor", page["next_cursor"]]
    assert listed == ids


def test_tasks_of_all_queues_are_shown(cli: Cli, mail: Queue[Any], bulk: Queue[Any]) -> None:
    mail.enqueue({}, task_id="m1")
    bulk.enqueue({}, task_id="b1")
    assert [task["id"] for task in cli.json("peek")] == ["b1", "m1"]
    assert cli.stderr == "All queues: 'bulk' and 'mail'.\n"
    heading, *rows = [line.split() for line in cli("peek").splitlines()]
    assert heading[:2] == ["id", "queue"]
    assert [row[:2] for row in rows] == [["b1", "bulk"], ["m1", "mail"]]
    assert [task["id"] for task in cli.json("peek", "-q", "mail")] == ["m1"]
    assert cli.stderr == "Queue 'mail'.\n"


def test_stats_count_all_queues(cli: Cli, mail: Queue[Any], bulk: Queue[Any]) -> None:
    bury(mail, code="late")
    bury(mail, code="late")
    bulk.enqueue_many([{}] * 3)
    bulk.enqueue({}, delay=3600)
    cli("pause", "-q", "idle")
    found = cli.json("stats")
    assert (found["queue"], found["ready"], found["pending"], found["failed"]) == (None, 3, 4, 2)
    assert found["next_due_at"] is not None
    assert found["dead_letters"]["by_code"] == {"late": 2}
    own = {one["queue"]: one for one in found["queues"]}
    assert {name: (one["ready"], one["failed"]) for name, one in own.items()} == {
        "bulk": (3, 0),
        "idle": (0, 0),
        "mail": (0, 2),
    }
    assert own["idle"]["paused"]["queue"] == "idle"
    assert own["mail"]["paused"] is None
    shown = cli("stats")
    assert re.search(r"^bulk +3 +1 +0 +0 +0 +0", shown, re.MULTILINE)
    assert re.search(r"^idle .* paused", shown, re.MULTILINE)
    assert re.search(r"^all queues +3 +1 +0 +0 +0 +2", shown, re.MULTILINE)
    assert "failed: 2 late" in shown
    assert cli.json("stats", "-q", "bulk")["failed"] == 0


def test_stats_of_a_single_queue_are_told_in_detail(cli: Cli, mail: Queue[Any]) -> None:
    assert cli("stats") == "No tasks in any queue.\n"
    bury(mail, code="late")
    heading, *rows = cli("stats").splitlines()
    assert heading.startswith("queue mail ")
    assert rows[-1].split()[:3] == ["failed", "1", "1"]


# Deleting and replaying


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_letters_of_all_queues_are_acted_on_only_if_asked(
    cli: Cli, mail: Queue[Any], bulk: Queue[Any], verb: str
) -> None:
    for one in (mail, bulk):
        bury(one, code="late")
        bury(one)
    cli("dlq", verb, "--all", "--yes", status=2)
    cli("dlq", verb, "--code", "late", "--yes", status=2)
    assert mail.dead_letters.all_queues.stats().total == 4
    late = ("dlq", verb, "--code", "late", "--all-queues")
    counted = cli.json(*late, "--dry-run")
    assert (counted["matched"], counted["queues"]) == (2, ["bulk", "mail"])
    assert cli(*late, "--yes").endswith("ed 2 dead letters of all queues.\n")
    assert [one.dead_letters.stats().total for one in (mail, bulk)] == [1, 1]
    rest = cli.json("dlq", verb, "--all", "-q", "mail", "--yes")
    assert (rest["matched"], rest["queues"]) == (1, ["mail"])
    assert [one.dead_letters.stats().total for one in (mail, bulk)] == [0, 1]
    assert cli("dlq", verb, "--all", "-q", "mail", "--yes").startswith("Nothing to ")


def test_limit_holds_for_all_queues_together(cli: Cli, mail: Queue[Any], bulk: Queue[Any]) -> None:
    oldest = [bury(one) for one in (mail, bulk)]
    newest = bury(mail)
    cli("dlq", "discard", "--all", "--all-queues", "--limit", "2", "--yes")
    assert [mail.get(one) for one in oldest] == [None, None]
    assert mail.get(newest) is not None


def test_question_names_all_queues(
    cli: Cli, mail: Queue[Any], bulk: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microqueue.cli.prompts.at_terminal", lambda: True)
    for one in (mail, bulk):
        bury(one)
    cli("dlq", "discard", "--all", "--all-queues", stdin="n\n", status=1)
    assert "2 dead letters of all queues?" in cli.stderr
    cli("purge", "--status", "failed", "--all-queues", stdin="n\n", status=1)
    assert "2 failed tasks of all queues?" in cli.stderr
    assert mail.dead_letters.all_queues.stats().total == 2


def test_named_letters_are_said_to_be_of_their_queues(
    cli: Cli, mail: Queue[Any], bulk: Queue[Any]
) -> None:
    bury(mail, task_id="m1")
    bury(bulk, task_id="b1")
    said = cli("dlq", "replay", "m1", "b1")
    assert said == "Replayed 2 dead letters of queues 'bulk' and 'mail'.\n"
    cli("cancel", "m1")
    assert cli.json("dlq", "discard", "m1")["queues"] == ["mail"]


def test_purge_of_all_queues_has_to_be_asked_for(
    cli: Cli, mail: Queue[Any], bulk: Queue[Any]
) -> None:
    for one in (mail, bulk):
        one.enqueue({})
        task = one.pop()
        assert task is not None
        one.mark_done(task)
    cli("purge", "--yes", status=2)
    assert (mail.stats().done, bulk.stats().done) == (1, 1)
    assert cli("purge", "--all-queues", "--dry-run") == (
        "2 done tasks of all queues would be purged.\n"
    )
    found = cli.json("purge", "--all-queues", "--yes")
    assert (found["purged"], found["queues"]) == (2, ["bulk", "mail"])
    assert (mail.stats().done, bulk.stats().done) == (0, 0)


def test_commands_of_one_queue_say_which_it_is(cli: Cli, mail: Queue[Any]) -> None:
    assert "in queue 'default'" in cli("enqueue", "{}", "--id", "d1")
    assert "of queue 'default'" in cli("cancel", "d1")
    assert cli.json("show", "d1")["queue"] == "default"
    assert "'default'" in cli("pause")
    assert "'mail'" in cli("resume", "-q", "mail")


# Help


@pytest.mark.parametrize(
    ("command", "default"),
    [
        (["enqueue"], "[default: default]"),
        (["worker"], "[default: default]"),
        (["pause"], "[default: default]"),
        (["peek"], "[default: all queues]"),
        (["dlq", "list"], "[default: all queues]"),
        (["show"], "[default: any queue]"),
        (["purge"], "Required, unless --all-queues is given."),
        (["dlq", "replay"], "Required, unless --all-queues or task ids are given."),
    ],
)
def test_help_states_the_default_queue_of_each_command(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, command: list[str], default: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = cli(*command, "--help").splitlines()
    (line,) = [line for line in lines if line.startswith("│ --queue ")]
    assert default in line


@pytest.mark.parametrize("command", ["up", "dashboard", "backoff"])
def test_help_hides_the_queue_where_it_is_rejected(cli: Cli, command: str) -> None:
    assert "--queue" not in cli(command, "--help")
