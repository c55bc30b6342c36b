"""Tables of tasks have the names of named tasks."""

from __future__ import annotations

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
