"""What a worker logs: the start and end of a run, and failures, with fields to find them by."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from microqueue.worker import Fail, Retry, Snooze, Tasks, shutdown
from tests.integration.rig import Rig
from tests.waiting import wait_for


class Log:
    """The fields of the records that the worker has logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def with_fields(self, *names: str) -> list[tuple[Any, ...]]:
        records = [vars(record) for record in self._caplog.records]
        return [tuple(one[name] for name in names) for one in records if set(names) <= one.keys()]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.INFO, "microqueue.worker")
    return Log(caplog)


def test_start_and_end_of_a_run_are_logged(rig: Rig, log: Log) -> None:
    tasks = Tasks()

    @tasks.task()
    def resize() -> None:
        """Do nothing."""

    @tasks.task("send")
    def any_name() -> None:
        """Do nothing."""

    resize.enqueue(rig.queue)
    rig.run(tasks, names=("default", "bulk"))
    worker_id = rig.worker.worker_id
    assert log.with_fields("worker_id", "queues", "handlers") == [
        (worker_id, ["default", "bulk"], ["resize", "send"])
    ]
    assert log.with_fields("worker_id", "handled", "released") == [(worker_id, 1, 0)]


def test_shutdown_logs_what_is_running_and_what_was_released(
    rig: Rig, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "HURRY_SEC", 30.0)  # A slow machine writes the releases in time.
    begun, go = threading.Semaphore(0), threading.Event()

    def handler(_payload: Any) -> None:
        begun.release()
        go.wait(60)

    rig.queue.enqueue_many([{}, {}])
    thread = rig.start(handler, concurrency=2, grace=600)
    for _ in range(2):
        assert begun.acquire(timeout=30)
    rig.stop()
    ((running, grace_sec),) = wait_for(lambda: log.with_fields("running", "grace_sec"))
    assert running == 2
    assert 540 < grace_sec <= 600
    rig.stop(immediately=True)
    thread.join(30)
    go.set()
    assert log.with_fields("handled", "released") == [(0, 2)]


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
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert vars(record)["dead_letter"] is False
    assert "0.1 s" in record.getMessage()
    assert not [record for record in caplog.records if record.exc_info]


def test_name_of_a_task_is_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks()

    @tasks.task()
    def resize() -> None:
        raise ValueError("too large")

    task = resize.enqueue(rig.queue)
    rig.run(tasks)
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert f"{task.id} (resize)" in record.getMessage()
    fields = ("task_id", "task", "attempt", "dead_letter")
    assert [vars(record)[name] for name in fields] == [str(task.id), "resize", 1, False]
