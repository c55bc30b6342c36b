from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from microqueue import Queue
from microqueue.testing import FakeClock
from tests.acceptance.command_line import Cli, bury


@pytest.fixture
def queue(microqueue_database: Any) -> Queue[Any]:
    """A queue with a task that was done two hours ago, one done now, a letter, and one to do."""
    past = FakeClock(datetime.now(UTC) - timedelta(hours=2))
    for clock in (past, None):
        queue: Queue[Any] = Queue(microqueue_database, "mail", clock=clock)
        queue.enqueue({})
        task = queue.pop()
        assert task is not None
        queue.mark_done(task)
    bury(queue)
    queue.enqueue({})
    return queue


def test_purge_deletes_what_is_done_and_old_enough(cli: Cli, queue: Queue[Any]) -> None:
    older = ("purge", "-q", "mail", "--older-than", "1h", "--yes")
    assert cli(*older) == "Purged 1 done task of queue 'mail'.\n"
    assert cli(*older) == "Nothing to purge in queue 'mail'.\n"
    counts = {"matched": 1, "purged": 1, "dry_run": False}
    assert cli.json("purge", "-q", "mail", "--yes") == {**counts, "queues": ["mail"]}
    stats = queue.stats()
    assert (stats.done, stats.failed, stats.ready) == (0, 1, 1)


@pytest.mark.parametrize(("status", "left"), [("failed", (2, 0, 1)), ("pending", (2, 1, 0))])
def test_purge_deletes_the_status_that_is_named(
    cli: Cli, queue: Queue[Any], status: str, left: tuple[int, int, int]
) -> None:
    said = cli("purge", "-q", "mail", "--status", status, "--yes")
    assert said == f"Purged 1 {status} task of queue 'mail'.\n"
    stats = queue.stats()
    assert (stats.done, stats.failed, stats.ready) == left


def test_purge_can_only_count(cli: Cli, queue: Queue[Any]) -> None:
    said = cli("purge", "-q", "mail", "--dry-run")
    assert said == "2 done tasks of queue 'mail' would be purged.\n"
    found = cli.json("purge", "-q", "mail", "--older-than", "1h", "--dry-run")
    assert found == {"matched": 1, "purged": 0, "dry_run": True, "queues": ["mail"]}
    assert queue.stats().done == 2


def test_purge_needs_a_yes_where_nobody_can_be_asked(cli: Cli, queue: Queue[Any]) -> None:
    cli("purge", "-q", "mail", status=1)
    assert "without a terminal: add --yes" in cli.stderr
    assert queue.stats().done == 2


def test_purge_asks_at_a_terminal(
    cli: Cli, queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microqueue.cli.prompts.at_terminal", lambda: True)
    cli("purge", "-q", "mail", stdin="n\n", status=1)
    assert "Permanently delete 2 done tasks of queue 'mail'?" in cli.stderr
    assert queue.stats().done == 2
    cli("purge", "-q", "mail", stdin="y\n")
    assert queue.stats().done == 0


def test_purge_leaves_alone_what_workers_hold(cli: Cli, queue: Queue[Any]) -> None:
    assert queue.pop() is not None
    cli("purge", "-q", "mail", "--status", "processing", "--yes", status=1)
    assert "status='processing' cannot be purged: workers hold these tasks" in cli.stderr
    assert queue.stats().processing == 1
