"""Crash isolation: tasks that may crash a worker start while few others are unsettled."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from microqueue.worker import completer
from tests.integration.rig import Rig
from tests.waiting import wait_for

TASKS = 30


class Unsettled:
    """Counts what is between its start and its settlement."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self._now = 0
        self._lock = threading.Lock()
        self._usual = completer.commit
        monkeypatch.setattr(completer, "commit", self._commit)

    def handler(self, _payload: Any) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)

    def _commit(self, queue: Any, batch: Any) -> Any:
        result = yield from self._usual(queue, batch)
        with self._lock:
            self._now -= len(batch)
        return result


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"redelivered": True}, 3),
        ({"redelivered": True, "crashes": 2}, 1),
        ({"max_attempts": 1}, 3),
        ({}, TASKS),
    ],
    ids=["few", "alone", "the last attempt", "any number"],
)
def test_no_more_are_unsettled_than_the_isolation_allows(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], most: int
) -> None:
    unsettled = Unsettled(monkeypatch)
    rig.queue.enqueue_many([{}] * TASKS)
    if fields:
        rig.database.tasks.update_many({}, {"$set": fields})
    assert rig.run(unsettled.handler, concurrency=3, flush_interval=0.02) == TASKS
    assert 1 <= unsettled.most <= most
    assert rig.queue.stats().done == TASKS


def test_delayed_tasks_are_released_at_a_stop(rig: Rig) -> None:
    rig.queue.enqueue_many([{}] * 5)
    rig.database.tasks.update_many({}, {"$set": {"redelivered": True, "crashes": 2}})
    go = threading.Event()
    running = threading.Event()

    def handler(_payload: Any) -> None:
        running.set()
        go.wait(30)

    thread = rig.start(handler, concurrency=4)
    assert running.wait(30)
    rig.stop()
    wait_for(lambda: rig.queue.stats().ready == 4)  # At once: the handler still runs.
    go.set()
    thread.join(30)
    assert (rig.queue.stats().done, rig.queue.stats().ready) == (1, 4)
