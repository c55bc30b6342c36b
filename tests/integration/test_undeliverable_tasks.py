"""A task that cannot be delivered or settled affects no other task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from microqueue import OperationFailed, Outcome, Queue, QueueSettings, Sweeper, Task, TaskStatus
from microqueue.core import core_of
from microqueue.testing import FakeClock
from tests.integration.rig import Rig
from tests.integration.test_crashes import registered

UNDELIVERABLE: list[tuple[str, Any]] = [
    ("expires_at", "2030-01-01T00:00:00Z"),
    ("visibility_timeout_sec", "abc"),
    ("visibility_timeout_sec", 1e300),
    ("visibility_timeout_sec", 0),
    ("visibility_timeout_sec", "long" * 500),
]
HISTORIES = pytest.mark.parametrize("history", [None, "x", {"a": 1}], ids=repr)


def edit(queue: Queue[Any], task_id: Any, **changes: Any) -> None:
    core_of(queue).collections.tasks.update_one({"_id": task_id}, {"$set": changes})


def stored(queue: Queue[Any], task_id: Any) -> Task[Any]:
    task = queue.get(task_id)
    assert task is not None
    return task


def code_of(task: Task[Any]) -> str | None:
    return task.error.code if task.error else None


@pytest.fixture
def queue(microqueue_database: Any, microqueue_clock: FakeClock) -> Queue[Any]:
    settings = QueueSettings(visibility_timeout=30, max_attempts=2)
    return Queue(microqueue_database, settings=settings, clock=microqueue_clock)


# Delivery


@pytest.mark.parametrize("batch", [False, True], ids=["one by one", "batch"])
@pytest.mark.parametrize(("field", "value"), UNDELIVERABLE)
def test_malformed_task_is_failed_alone_and_names_its_field(
    queue: Queue[Any], microqueue_clock: FakeClock, field: str, value: Any, batch: bool
) -> None:
    ids = [task.id for task in queue.enqueue_many([{}] * 5).tasks]
    edit(queue, ids[2], **{field: value})
    microqueue_clock.advance(5)
    tasks = queue.pop_many(5) if batch else [queue.pop() for _ in range(4)]
    assert [task.id for task in tasks if task] == [*ids[:2], *ids[3:]]
    assert queue.pop() is None
    malformed = stored(queue, ids[2])
    assert (malformed.status, code_of(malformed), malformed.attempts) == (
        TaskStatus.FAILED,
        "invalid_task",
        0,
    )
    assert malformed.error is not None
    assert f"{field}={value!r}"[:60] in malformed.error.message
    assert len(malformed.error.message) < 400


def test_own_timeouts_beside_a_malformed_one_are_kept(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue({}, visibility_timeout=90)
    malformed = queue.enqueue({}, visibility_timeout=90)
    queue.enqueue({})
    edit(queue, malformed.id, visibility_timeout_sec="90")
    own, usual = queue.pop_many(5)
    now = microqueue_clock.now()
    assert own.lease is not None
    assert usual.lease is not None
    assert [(one.lease.expires_at - now).seconds for one in (own, usual) if one.lease] == [90, 30]
    assert stored(queue, own.id).lease == own.lease


@pytest.mark.parametrize(("field", "value"), UNDELIVERABLE[:3])
def test_worker_goes_on_after_a_malformed_task(rig: Rig, field: str, value: Any) -> None:
    queue = rig.queue
    ids = [task.id for task in queue.enqueue_many([{"n": n} for n in range(5)]).tasks]
    edit(queue, ids[1], **{field: value})
    seen: list[int] = []
    assert rig.run(lambda payload: seen.append(payload["n"])) == 4
    assert sorted(seen) == [0, 2, 3, 4]
    assert code_of(stored(queue, ids[1])) == "invalid_task"


def test_lease_of_a_task_read_by_its_id_is_renewed_by_the_queues_timeout(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue({})
    task = queue.pop()
    assert task is not None
    edit(queue, task.id, visibility_timeout_sec="abc")
    renewed = queue.touch(stored(queue, task.id))
    assert renewed.lease is not None
    assert (renewed.lease.expires_at - microqueue_clock.now()).seconds == 30


# Settlement

SETTLEMENTS: dict[str, tuple[Callable[[Queue[Any], Task[Any]], Any], TaskStatus, Outcome]] = {
    "done": (Queue.mark_done, TaskStatus.DONE, Outcome.DONE),
    "many done": (lambda q, task: q.mark_done_many([task]), TaskStatus.DONE, Outcome.DONE),
    "retry": (Queue.mark_retry, TaskStatus.PENDING, Outcome.RETRIED),
    "failure": (lambda q, task: q.mark_failure(task, "no"), TaskStatus.FAILED, Outcome.FAILED),
    "release": (Queue.release, TaskStatus.PENDING, Outcome.RELEASED),
    "cancel": (lambda q, task: q.cancel(task.id), TaskStatus.FAILED, Outcome.CANCELLED),
}


@HISTORIES
@pytest.mark.parametrize("name", SETTLEMENTS)
def test_broken_history_is_replaced_where_a_task_is_settled(
    queue: Queue[Any], name: str, history: Any
) -> None:
    settle, status, outcome = SETTLEMENTS[name]
    queue.enqueue({})
    task = queue.pop()
    assert task is not None
    edit(queue, task.id, history=history, position="x")
    settle(queue, stored(queue, task.id))
    after = stored(queue, task.id)
    assert after.status is status
    assert [entry.outcome for entry in after.history] == [outcome]
    assert after.attempts == (0 if name == "release" else 1)


@HISTORIES
def test_broken_history_does_not_undo_what_was_claimed_together(
    queue: Queue[Any], history: Any
) -> None:
    queue.enqueue_many([{}] * 5)
    tasks = queue.pop_many(5)
    edit(queue, tasks[2].id, history=history)
    assert queue.mark_done_many(tasks) == []
    assert [stored(queue, task.id).status for task in tasks] == [TaskStatus.DONE] * 5
    assert [len(stored(queue, task.id).history) for task in tasks] == [1] * 5


def test_lost_lease_of_a_broken_history_is_told(queue: Queue[Any]) -> None:
    queue.enqueue_many([{}] * 3)
    tasks = queue.pop_many(3)
    edit(queue, tasks[1].id, history="x", lease_token="another's")
    assert [lost.task_id for lost in queue.mark_done_many(tasks)] == [tasks[1].id]
    assert core_of(queue).collections.tasks.find_one({"_id": tasks[1].id})["history"] == "x"


@pytest.mark.parametrize("fails", [False, True])
def test_worker_settles_tasks_of_a_broken_history(rig: Rig, fails: bool) -> None:
    queue = rig.queue
    ids = [task.id for task in queue.enqueue_many([{}] * 5).tasks]
    edit(queue, ids[1], history="x")
    edit(queue, ids[3], history=None)

    def handle(_payload: Any) -> None:
        if fails:
            raise ValueError("no")

    assert rig.run(handle) == 5
    status = TaskStatus.PENDING if fails else TaskStatus.DONE
    assert [stored(queue, task_id).status for task_id in ids] == [status] * 5
    assert [len(stored(queue, task_id).history) for task_id in ids] == [1] * 5


def test_broken_history_of_a_dead_letter_does_not_keep_it_from_going_back(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue({})
    task = queue.pop()
    assert task is not None
    queue.mark_failure(task, "no")
    edit(queue, task.id, history="x")
    assert queue.dead_letters.replay([task.id], delay=5).replayed == 1
    microqueue_clock.advance(5)
    again = queue.pop()
    assert again is not None
    queue.mark_done(again)


# Sweep


@pytest.mark.parametrize("orphaned", [False, True], ids=["stuck", "orphaned"])
@pytest.mark.parametrize(
    "changes",
    [{"history": None}, {"history": "x"}, {"position": None}, {"position": "x"}, {"crashes": "x"}],
    ids=repr,
)
def test_one_odd_task_does_not_keep_a_sweep_from_the_others(
    queue: Queue[Any], microqueue_clock: FakeClock, changes: dict[str, Any], orphaned: bool
) -> None:
    queue.enqueue({}, max_attempts=1)
    ids = [task.id for task in queue.enqueue_many([{}] * 3).tasks]
    tasks = queue.pop_many(4, worker_id="gone")
    edit(queue, ids[0], **changes)
    if orphaned:
        edit(queue, tasks[0].id, **changes)  # The one that may have been running.
        registered(queue, "gone", silent_sec=6)
    else:
        microqueue_clock.advance(30)
    report = Sweeper(queue).run_once()
    assert (report.reclaimed, report.buried, report.errors) == (3, 1, {})
    again = Sweeper(queue).run_once()
    assert (again.reclaimed, again.buried, again.errors) == (0, 0, {})
    assert [len(stored(queue, task.id).history) for task in tasks] == [1] * 4


@pytest.mark.parametrize("orphaned", [False, True], ids=["stuck", "orphaned"])
def test_task_that_mongodb_does_not_take_back_is_buried(
    queue: Queue[Any], microqueue_clock: FakeClock, orphaned: bool
) -> None:
    queue.enqueue({}, max_attempts=1)
    malformed = queue.enqueue({"malformed": True})
    queue.enqueue_many([{}] * 2)
    queue.pop_many(4, worker_id="gone")
    refuses(queue, {"payload.malformed": True, "status": "pending"})
    if orphaned:
        registered(queue, "gone", silent_sec=6)
    else:
        microqueue_clock.advance(30)
    report = Sweeper(queue).run_once()
    assert (report.reclaimed, report.buried, report.errors) == (2, 2, {})
    assert Sweeper(queue).run_once().errors == {}
    buried = stored(queue, malformed.id)
    assert (buried.status, code_of(buried)) == (TaskStatus.FAILED, "invalid_task")
    assert buried.error is not None
    assert "failed validation" in buried.error.message


def test_task_that_cannot_even_be_buried_is_told_after_all_others_are_back(
    queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    queue.enqueue({"malformed": True})
    queue.enqueue_many([{}] * 2)
    _, *good = queue.pop_many(3)
    refuses(queue, {"payload.malformed": True})
    microqueue_clock.advance(30)
    with pytest.raises(OperationFailed, match="failed validation"):
        Sweeper(queue).reclaim_stuck()
    assert [stored(queue, task.id).status for task in good] == [TaskStatus.PENDING] * 2


def refuses(queue: Queue[Any], documents: dict[str, Any]) -> None:
    """Set a validation rule by which the collection rejects some documents."""
    tasks = core_of(queue).collections.tasks
    tasks.database.command("collMod", tasks.name, validator={"$nor": [documents]})
