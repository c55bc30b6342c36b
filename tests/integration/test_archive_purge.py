"""Archived dead letters are purged from the DLQ collection, whichever process dies in it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from microqueue import Queue, QueueSettings, Sweeper
from microqueue.core import core_of
from microqueue.operations import archive
from microqueue.operations.call import Operation
from tests.integration.model import Steps, perform

COLLECTION = QueueSettings(dead_letters="collection", retention=None)
NOW = datetime(2100, 1, 1, tzinfo=UTC)


def purging(letter: dict[str, Any]) -> Operation[archive.Purged]:
    return archive.delete_archived([letter], now=NOW)


def test_a_letter_whose_mover_and_purge_were_both_killed_is_not_taken_to_live_on(
    microqueue_database: Any,
) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=COLLECTION)
    queue.enqueue({}, task_id="letter")
    task = queue.pop()
    assert task is not None
    Steps(queue, lambda twin: twin.mark_failure(task, "broken")).until("delete_one")
    tasks, letters = core_of(queue).collections.tasks, core_of(queue).collections.dead_letters
    (letter,) = letters.find()
    assert tasks.count_documents({"status": "failed"}) == 1  # The mover died: it is in both.

    purge = purging(letter)
    call = next(purge)
    while call.method != "delete_one":  # Killed before it deletes what the mover left.
        call = purge.send(perform(queue, call))
    assert letters.count_documents({"retired_at": None}) == 0

    assert core_of(queue).run(purging(letter)) == archive.Purged(deleted=0, superseded=[])
    assert tasks.count_documents({}) == 0
    Sweeper(queue).move_dead_letters()
    assert letters.count_documents({"retired_at": None}) == 0
