"""Documents that another version wrote, or a hand edited, stop nothing but themselves."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from bson import Decimal128
from bson.datetime_ms import DatetimeMS

from microqueue import (
    DeadLetterFilter,
    DuplicateTask,
    NewTask,
    Queue,
    QueueSettings,
    Sweeper,
    TaskStatus,
)
from microqueue.core import core_of
from microqueue.operations import bulk_load
from microqueue.operations.call import Call
from microqueue.operations.enqueue import new_document
from microqueue.operations.leases import LeaseState, lease_states, renew
from microqueue.sweeper import SweeperCore
from microqueue.testing import FakeClock
from microqueue.worker import Worker

MISSING = object()

MALFORMED: dict[str, dict[str, Any]] = {
    "no updated_at": {"updated_at": MISSING},
    "no payload": {"payload": MISSING},
    "no history": {"history": MISSING},
    "no max_attempts": {"max_attempts": MISSING},
    "attempts is null": {"attempts": None},
    "attempts is text": {"attempts": "two"},
    "attempts is a float": {"attempts": 1.0},
    "an unknown outcome": {"history": [{"outcome": "vaporised", "attempt": 1}]},
    "a history of numbers": {"history": [1, 2]},
    "an error of text": {"error": "broken"},
    "a policy of another version": {"backoff_policy": {"speed": 9}},
    "a policy of text": {"backoff_policy": "fast"},
    "headers of text": {"headers": "x"},
    "expires_at is text": {"expires_at": "2030-01-01T00:00:00Z"},
    "expires_at is after all dates": {"expires_at": DatetimeMS(2**60)},
    "a timeout of text": {"visibility_timeout_sec": "abc"},
    "a timeout without end": {"visibility_timeout_sec": 1e300},
    "a timeout in the past": {"visibility_timeout_sec": -5},
    "a timeout of a list": {"visibility_timeout_sec": [5]},
    "position is null": {"position": None},
    "position is text": {"position": "x"},
    "position of the front, no created_at": {"position": -5, "created_at": MISSING},
    "history is null": {"history": None},
    "history is text": {"history": "x"},
    "an outcome of a list": {"history": [{"outcome": []}]},
    "updated_at is text": {"updated_at": "today"},
    "attempts without end": {"attempts": math.inf},
    "attempts of too many digits": {"attempts": 1e300},
    "attempts is not a number": {"attempts": math.nan},
    "attempts is a decimal": {"attempts": Decimal128("1")},
    "crashes is text": {"crashes": "x"},
}


def make_malformed(queue: Queue[Any], task_id: Any, name: str) -> None:
    changes = MALFORMED[name]
    update: dict[str, Any] = {}
    if given := {key: value for key, value in changes.items() if value is not MISSING}:
        update["$set"] = given
    if gone := {key: "" for key, value in changes.items() if value is MISSING}:
        update["$unset"] = gone
    core_of(queue).collections.tasks.update_one({"_id": task_id}, update)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("name", MALFORMED)
def test_odd_ready_task_does_not_hold_up_the_line(
    microqueue_queue: Queue[Any], name: str, batch: bool
) -> None:
    queue = microqueue_queue
    malformed = queue.enqueue({"n": "malformed"}, priority=9)
    good = [queue.enqueue({"n": n}).id for n in range(2)]
    make_malformed(queue, malformed.id, name)
    delivered = []
    for _ in range(4):
        delivered += queue.pop_many(2) if batch else [task for task in [queue.pop()] if task]
    assert [task.id for task in delivered if task.id != malformed.id] == good
    for task in delivered:
        queue.mark_done(task)
    queue.peek()
    queue.stats()
    settled = queue.get(malformed.id)
    assert settled is not None
    assert settled.status in {TaskStatus.DONE, TaskStatus.FAILED}


@pytest.mark.parametrize("limit", [1, 3, None])
def test_task_whose_id_is_a_document_stops_nothing_but_itself(
    microqueue_queue: Queue[Any], microqueue_clock: FakeClock, limit: int | None
) -> None:
    queue = microqueue_queue
    first, second, third = queue.enqueue_many([{"n": n} for n in range(3)]).tasks
    tasks = core_of(queue).collections.tasks
    document = tasks.find_one_and_delete({"_id": second.id})
    tasks.insert_one({**document, "_id": {"of": ["another", "make"]}})
    microqueue_clock.advance(60)  # So that a claim trusts what it has read.
    if limit is None:
        assert Worker(queue, lambda _payload: None).run(burst=True) == 2
    else:
        popped = [task for _ in range(3) for task in queue.pop_many(limit)]
        assert [task.id for task in popped] == [first.id, third.id]
        for task in popped:
            queue.mark_done(task)
    assert queue.stats().done == 2
    (letter,) = queue.dead_letters.list()
    assert letter.error is not None
    assert letter.error.code == "invalid_task"
    assert "give an ObjectId, a string, an integer or a UUID" in letter.error.message


@pytest.mark.parametrize("name", MALFORMED)
def test_odd_stuck_task_does_not_hold_up_the_sweep(
    microqueue_database: Any, microqueue_clock: FakeClock, name: str
) -> None:
    settings = QueueSettings(visibility_timeout=5)
    queue: Queue[Any] = Queue(microqueue_database, settings=settings, clock=microqueue_clock)
    queue.enqueue_many([{}, {}])
    malformed, good = queue.pop_many(2)
    queue.enqueue({}, expires_in=5)
    make_malformed(queue, malformed.id, name)
    microqueue_clock.advance(5)
    report = Sweeper(queue).run_once()
    assert report.expired == 1
    assert report.reclaimed + report.buried == 2
    assert report.ok
    back = queue.get(good.id)
    assert back is not None
    assert back.status is TaskStatus.PENDING


@pytest.mark.parametrize("place", ["status", "collection"])
@pytest.mark.parametrize("name", MALFORMED)
def test_odd_dead_letter_does_not_hide_the_others(
    microqueue_database: Any, microqueue_clock: FakeClock, name: str, place: Any
) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=QueueSettings(), clock=microqueue_clock)
    queue.enqueue_many([{}, {}])
    for task in queue.pop_many(2):
        queue.mark_failure(task, "no", code="c")
    malformed = queue.peek()[0]
    make_malformed(queue, malformed.id, name)
    seen: Queue[Any] = Queue(
        microqueue_database, settings=QueueSettings(dead_letters=place), clock=microqueue_clock
    )
    assert len(seen.dead_letters.list()) == 2
    assert seen.dead_letters.stats().total == 2
    good = [task.id for task in seen.dead_letters.list() if task.id != malformed.id]
    assert seen.dead_letters.replay(good).replayed == 1
    assert seen.dead_letters.discard(DeadLetterFilter()) <= 1


WITHOUT_A_TIME = ["no updated_at", "updated_at is text"]


@pytest.mark.parametrize("place", ["status", "collection"])
@pytest.mark.parametrize(
    ("name", "which"),
    [(name, "all") for name in MALFORMED]
    + [(name, which) for name in WITHOUT_A_TIME for which in ("by id", "group")],
)
def test_odd_dead_letter_is_replayed_once_with_the_others(
    microqueue_database: Any, microqueue_clock: FakeClock, name: str, which: str, place: Any
) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=QueueSettings(), clock=microqueue_clock)
    queue.enqueue_many([{}, {}, {}])
    for task in queue.pop_many(3):
        queue.mark_failure(task, "no", code="c")
    ids = [task.id for task in queue.peek()]
    make_malformed(queue, ids[1], name)
    seen: Queue[Any] = Queue(
        microqueue_database, settings=QueueSettings(dead_letters=place), clock=microqueue_clock
    )
    chosen: dict[str, Any] = {
        "by id": ids,
        "all": DeadLetterFilter(),
        "group": DeadLetterFilter(group="no"),
    }
    assert seen.dead_letters.replay(chosen[which], dry_run=True).matched == 3
    report = seen.dead_letters.replay(chosen[which])
    assert (report.matched, report.replayed, report.skipped) == (3, 3, [])
    assert {stored["status"] for stored in microqueue_database["tasks"].find()} == {"pending"}
    assert len(seen.dead_letters.list()) == 0


def test_one_failing_job_does_not_stop_the_others(
    microqueue_queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    microqueue_queue.enqueue({}, delay=1)
    clock = microqueue_queue.clock
    assert isinstance(clock, FakeClock)
    clock.advance(timedelta(seconds=1))
    sweeper = Sweeper(microqueue_queue)
    usual = SweeperCore.job

    def job(core: SweeperCore, name: str, progress: Any) -> Any:
        if name == "reclaim_stuck":
            raise KeyError("a bug")
        return usual(core, name, progress)

    monkeypatch.setattr(SweeperCore, "job", job)
    report = sweeper.run_once()
    assert report.promoted == 1
    assert not report.ok
    assert "a bug" in report.errors["reclaim_stuck"]


# Ids that only Python takes for equal: another program may have stored True beside 1.

LOOKALIKES = [True, 1, False, 0]


def lookalikes(queue: Queue[Any], **fields: Any) -> list[dict[str, Any]]:
    return [
        {
            **new_document(
                NewTask.model_construct(payload={}),
                queue=queue.name,
                payload={},
                settings=queue.settings,
                now=queue.now(),
                position=place,
            ),
            "_id": one,
            **fields,
        }
        for place, one in enumerate(LOOKALIKES)
    ]


def typed(ids: Any) -> list[str]:
    return sorted(map(repr, ids))


@pytest.mark.parametrize("age_sec", [0, 3600], ids=["read again", "as read"])
def test_true_and_one_are_claimed_renewed_and_settled_apart(
    microqueue_database: Any, age_sec: float
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    written_at = queue.now() - timedelta(seconds=age_sec)
    core = core_of(queue)
    core.collections.tasks.insert_many(lookalikes(queue, updated_at=written_at))
    tasks = queue.pop_many(9)
    assert typed(task.id for task in tasks) == typed(LOOKALIKES)
    queue.release(next(task for task in tasks if task.id is True))
    lost = core.run(renew(tasks, now=queue.now(), timeout=timedelta(minutes=1)))
    assert typed(task.id for task in lost) == typed([True])
    states = core.run(lease_states(tasks))
    held = [task.id for task, one in zip(tasks, states, strict=True) if one is LeaseState.HELD]
    assert typed(held) == typed([1, False, 0])
    assert typed(one.task_id for one in queue.mark_done_many(tasks)) == typed([True])
    assert queue.stats().done == 3


def test_true_and_one_are_won_apart_by_two_workers(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    core = core_of(queue)
    stale = queue.now() - timedelta(hours=1)
    core.collections.tasks.insert_many(lookalikes(queue, updated_at=stale))
    taken: list[Any] = []

    def take_one_first(call: Call) -> None:
        if call.method == "update_many" and not taken:
            taken.append(1)
            core.collections.tasks.update_one({"_id": 1}, {"$set": {"status": "done"}})

    core._driver.before_call = take_one_first  # noqa: SLF001 (between the read and the claim)
    assert typed(task.id for task in queue.pop_many(9)) == typed([True, False, 0])


def test_worker_settles_true_and_one(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    core_of(queue).collections.tasks.insert_many(lookalikes(queue))
    assert Worker(queue, lambda _payload: None).run(burst=True) == len(LOOKALIKES)
    assert queue.stats().done == len(LOOKALIKES)


def test_holder_of_a_dedupe_key_is_not_taken_for_the_id(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.ensure_indexes()
    (holder, *_) = lookalikes(queue, dedupe_key="k")
    core_of(queue).collections.tasks.insert_one(holder)
    with pytest.raises(DuplicateTask) as caught:
        queue.enqueue({}, task_id=1, dedupe_key="k")
    assert caught.value.dedupe_key == "k"
    assert caught.value.existing_id is True


@pytest.mark.parametrize("place", ["status", "collection"])
@pytest.mark.parametrize("hold", [None, "load"])
def test_bulk_load_takes_true_and_one_for_two(
    microqueue_database: Any, place: Any, hold: str | None
) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=QueueSettings(dead_letters=place))
    queue.ensure_indexes()
    collections = core_of(queue).collections
    letters = collections.dead_letters if place == "collection" else collections.tasks
    letters.insert_one(lookalikes(queue, status="failed", insert_token="theirs", version=0)[0])
    rows = lookalikes(queue, insert_token="ours")
    loading = bulk_load.insert_chunk(rows, settings=queue.settings, hold=hold)
    assert core_of(queue).run(loading) == (3, 1)
    stored = [one["_id"] for one in collections.tasks.find({"insert_token": "ours"})]
    assert typed(stored) == typed([1, False, 0])


@pytest.mark.parametrize("place", ["status", "collection"])
@pytest.mark.parametrize("stored", [1.0, Decimal128("1.0")], ids=["float", "decimal"])
def test_number_of_another_type_is_the_same_id(
    microqueue_database: Any, place: Any, stored: Any
) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=QueueSettings(dead_letters=place))
    queue.ensure_indexes()
    collections = core_of(queue).collections
    letters = collections.dead_letters if place == "collection" else collections.tasks
    letters.insert_one({**lookalikes(queue, status="failed", version=0)[0], "_id": stored})
    with pytest.raises(DuplicateTask):
        queue.enqueue({}, task_id=1)
    assert [one.task_id for one in queue.enqueue_many([NewTask(payload={}, task_id=1)]).duplicates]
    assert letters.count_documents({}) == 1
