"""What a worker logs: its life, and what went wrong with tasks, so that it can be found."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from microqueue.worker import Fail, Retry, Snooze, Tasks
from tests.integration.rig import Rig
from tests.waiting import wait_for


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    caplog.set_level(logging.INFO, "microqueue.worker")

    def lines(start: str) -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [one.removeprefix(start) for one in messages if one.startswith(start)]

    return lines


def test_begin_and_end_of_a_run_are_told(rig: Rig, said: Callable[[str], list[str]]) -> None:
    tasks = Tasks()

    @tasks.task()
    def resize() -> None:
        """Do nothing."""

    @tasks.task("send")
    def any_name() -> None:
        """Do nothing."""

    resize.enqueue(rig.queue)
    rig.run(tasks, names=("default", "bulk"))
    worker = f"worker {rig.worker.worker_id} "
    assert said(worker) == [
        "begins: queues 'default', 'bulk', handlers resize, send",
        "ends: 1 handled, 0 handed back",
    ]


def test_stop_tells_what_it_waits_for_and_what_went_back(
    rig: Rig, said: Callable[[str], list[str]]
) -> None:
    begun, go = threading.Semaphore(0), threading.Event()

    def handler(_payload: Any) -> None:
        begun.release()
        go.wait(60)

    rig.queue.enqueue_many([{}, {}])
    thread = rig.start(handler, concurrency=2, grace=20)
    for _ in range(2):
        assert begun.acquire(timeout=30)
    rig.stop()
    assert wait_for(lambda: said("stopping: ")) == ["2 running, to end within 20 s"]
    rig.stop(immediately=True)
    thread.join(30)
    go.set()
    assert said(f"worker {rig.worker.worker_id} ")[1:] == ["ends: 0 handled, 2 handed back"]


@pytest.mark.parametrize(
    ("error", "traced"),
    [
        (ValueError("a bug"), True),
        (Retry("busy"), False),
        (Fail("hopeless"), False),
        (Snooze(60), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_traceback_of_an_unexpected_error_is_logged(
    rig: Rig, error: Exception, traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_payload: Any) -> None:
        raise error

    rig.queue.enqueue({})
    rig.run(broken)
    traces = [record.exc_text or "" for record in caplog.records if record.exc_info]
    assert len(traces) == traced
    assert all("in broken" in trace and "a bug" in trace for trace in traces)


def test_timeout_has_no_traceback(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.queue.enqueue({})
    rig.run(lambda _payload, context: wait_for(lambda: context.cancelled), timeout=0.1)
    assert "the handler took longer than 0.1 s" in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


def test_name_of_a_task_is_told(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks()

    @tasks.task()
    def resize() -> None:
        raise ValueError("too large")

    task = resize.enqueue(rig.queue)
    rig.run(tasks)
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert record.getMessage().startswith(f"task {task.id} (resize): attempt 1 of 3 failed")
    assert vars(record)["task"] == "resize"
