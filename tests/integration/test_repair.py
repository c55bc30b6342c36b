"""A repair finds and mends what no healthy run makes, and nothing else."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from bson import Decimal128
from bson.codec_options import CodecOptions
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument
from hypothesis import Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pymongo.errors import ExecutionTimeout, OperationFailure

from microqueue import (
    DuplicateTask,
    Fail,
    Hooks,
    InvalidArgument,
    NewTask,
    Queue,
    QueueSettings,
    Sweeper,
    TaskStatus,
    Topic,
    Worker,
)
from microqueue.core import core_of
from microqueue.doctor import check_documents
from microqueue.durations import LATEST
from microqueue.migration import Migration
from microqueue.operations import bulk_load, maintenance, workers
from microqueue.operations.call import Buried, Call, Operation
from microqueue.operations.enqueue import new_document
from microqueue.operations.filters import FAR
from microqueue.operations.mongo_errors import MAX_TIME_EXPIRED, UNAUTHORIZED
from microqueue.operations.repair_records import IN_BOTH, RECORD_RULES
from microqueue.operations.repair_rules import RULES, unknown_characters
from microqueue.repair import RepairJob, RepairReport, Sampled, repair, sample
from microqueue.reports import WorkerInfo
from microqueue.sweeper import JOBS
from microqueue.task import is_name, read_task
from microqueue.testing import FakeClock
from tests.conftest import ROOT
from tests.fixtures.version_1 import restore
from tests.integration.model import EFFORT, Steps, perform
from tests.integration.queues import popped

MISSING = object()
DAY = timedelta(days=1)
PLACES = ["status", "collection"]


def opened(database: Any, clock: FakeClock, place: Any = "status", **options: Any) -> Queue[Any]:
    settings = QueueSettings(dead_letters=place, **options)
    return Queue(database, settings=settings, clock=clock)


def stored(database: Any) -> dict[str, list[Any]]:
    """Return every document of a database as bytes, by collection."""
    raw: Any = CodecOptions(document_class=RawBSONDocument)
    return {
        name: sorted(one.raw for one in database.get_collection(name, raw).find())
        for name in database.list_collection_names()
    }


def edit(collection: Any, task_id: Any, changes: dict[str, Any]) -> None:
    update: dict[str, Any] = {}
    if given_values := {key: one for key, one in changes.items() if one is not MISSING}:
        update["$set"] = given_values
    if gone := {key: "" for key, one in changes.items() if one is MISSING}:
        update["$unset"] = gone
    assert collection.update_one({"_id": task_id}, update).matched_count


def found(report: RepairReport) -> dict[str, int]:
    return {one.rule: one.found for one in report.rules}


# Healthy collections


def make_every_kind(queue: Queue[Any]) -> None:
    """Leave tasks of every status, made in every way."""
    clock: Any = queue.clock
    queue.enqueue_many([{"n": n} for n in range(12)])
    handled = queue.pop_many(10)
    queue.mark_done(handled[0])
    queue.mark_done(handled[1], result={"ok": True})
    queue.mark_retry(handled[2], error="busy", delay=60)
    queue.mark_retry(handled[3], error=ValueError("now"), delay=0)
    queue.mark_failure(handled[4], "no", code="c")
    queue.mark_failure(handled[5], "no")
    queue.release(handled[6])
    queue.release(handled[7], front=True)
    queue.cancel(handled[8].id)
    queue.touch(handled[9])
    queue.enqueue({}, delay=60)
    queue.enqueue({}, delay=120, expires_in=60, name="both")
    queue.enqueue({}, expires_in=600, visibility_timeout=5, priority=7, headers={"a": 1})
    queue.enqueue({}, task_id="mine", dedupe_key="k")
    queue.enqueue({"new": 1}, task_id="mine", dedupe_key="k", delay=9, on_duplicate="replace")
    queue.enqueue({}, dedupe_key="kept", dedupe_for=3600)
    queue.cancel(queue.enqueue({}).id)
    queue.dead_letters.replay(queue.dead_letters.list().tasks[0].id, delay=30)
    queue.dead_letters.replay(queue.dead_letters.list().tasks[0].id, reset_attempts=False)
    queue.enqueue({}, task_id="expires", expires_in=1)
    queue.enqueue_many([{}, {}])
    clock.advance(2)
    popped(queue)
    queue.pause(reason="a break")
    queue.schedules.put("nightly", cron="0 3 * * *")
    queue.schedules.put("paused", every=60)
    queue.schedules.pause("paused")


def hold(queue: Queue[Any], count: int = 2) -> None:
    """Leave tasks of a load that is under way."""
    rows = [
        bulk_load.held(
            new_document(
                NewTask.model_construct(payload={}),
                queue=queue.name,
                payload={},
                settings=queue.settings,
                now=queue.now(),
                position=place,
            ),
            "load",
        )
        for place in range(count)
    ]
    core_of(queue).run(bulk_load.insert_chunk(rows, settings=queue.settings, hold="load"))


@pytest.mark.parametrize("place", PLACES)
def test_healthy_collection_is_clean_and_unchanged(microqueue_database: Any, place: Any) -> None:
    clock = FakeClock()
    queue = opened(microqueue_database, clock, place)
    Topic(microqueue_database, "orders").bind(queue.name, "order.*")
    make_every_kind(queue)
    hold(queue)
    Sweeper(queue).run_once()
    for _ in range(2):
        before = stored(microqueue_database)
        report = repair(queue, apply=True)
        assert (found(report), report.clean, report.unread) == ({}, True, [])
        assert stored(microqueue_database) == before
        clock.advance(700)
        Sweeper(queue).run_once()  # Reclaims, promotes and expires.


@pytest.mark.parametrize("kind", ["status", "collection"])
def test_what_an_earlier_version_wrote_is_clean_after_its_migration(
    microqueue_database: Any, kind: Any
) -> None:
    restore(microqueue_database, kind, datetime.now(UTC))
    queue: Queue[Any] = Queue(
        microqueue_database, "mail", settings=QueueSettings(dead_letters=kind)
    )
    Migration(queue).run()
    assert found(repair(queue)) == {}


STEPPED: dict[str, Callable[[Queue[Any]], object]] = {
    "claim": lambda queue: queue.pop_many(3),
    "reserve": lambda queue: queue.enqueue({}, dedupe_key="new", dedupe_for=3600),
    "meet a reserved task": lambda queue: queue.enqueue({}, dedupe_key="key", dedupe_for=3600),
    "move": lambda queue: Sweeper(queue).move_dead_letters(),
    "replay": lambda queue: queue.dead_letters.replay("letter"),
    "discard": lambda queue: queue.dead_letters.discard("letter"),
    "reclaim": lambda queue: Sweeper(queue).reclaim_stuck(),
    "promote": lambda queue: Sweeper(queue).promote_due(),
}


@pytest.mark.parametrize("use", STEPPED)
def test_repair_between_any_two_calls_of_another_process_finds_nothing(
    microqueue_database: Any, microqueue_clock: FakeClock, use: str
) -> None:
    in_place = opened(microqueue_database, microqueue_clock, visibility_timeout=30)
    queue = opened(microqueue_database, microqueue_clock, "collection", visibility_timeout=30)
    queue.enqueue({}, dedupe_key="old", dedupe_for=3600)  # Creates the index of the keys.
    queue.mark_done(popped(queue))
    queue.enqueue({}, task_id="letter")
    (in_place if use == "move" else queue).mark_failure(popped(queue), "no")
    queue.enqueue_many([{}, {}])
    queue.pop_many(2)
    if use == "meet a reserved task":
        Steps(queue, lambda twin: twin.enqueue({}, dedupe_key="key", dedupe_for=3600)).until(
            "insert_many"
        )
    queue.enqueue_many([{}, {}, {}, NewTask(payload={}, delay=10)])
    if use in {"reclaim", "promote"}:
        microqueue_clock.advance(40)
    steps = Steps(queue, STEPPED[use])
    while steps.next is not None:
        before = stored(microqueue_database)
        assert found(repair(queue, apply=True)) == {}
        assert stored(microqueue_database) == before
        try:
            steps.step()
        except DuplicateTask:
            assert use == "meet a reserved task"
            break
    assert found(repair(queue, apply=True)) == {}


def test_repairs_beside_workers_find_nothing(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=QueueSettings())
    queue.enqueue_many([{"n": n} for n in range(600)])

    repaired = threading.Event()

    def handle(payload: Any) -> None:
        repaired.wait(60)  # The first repair is beside running tasks, however late it is.
        if payload["n"] % 10 == 0:
            raise Fail("no")

    worker = Worker(queue, handle, concurrency=4)
    thread = threading.Thread(target=worker.run, kwargs={"burst": True})
    thread.start()
    reports = []
    while thread.is_alive():
        reports.append(repair(queue, apply=True))
        repaired.set()
    thread.join()
    assert {report.documents for report in reports} == {0}
    stats = queue.stats(exact=True)
    assert (stats.done, stats.failed) == (540, 60)


# One rule each

TEXT = "2026-05-01T12:00:00Z"
BEFORE = datetime(2026, 5, 1, 12, tzinfo=UTC)
BEYOND = DatetimeMS(2**60)


def ready(queue: Queue[Any]) -> Any:
    return queue.enqueue({}, task_id=queue.name).id


def delayed(queue: Queue[Any]) -> Any:
    return queue.enqueue({}, task_id=queue.name, delay=60).id


def claimed(queue: Queue[Any]) -> Any:
    ready(queue)
    return popped(queue).id


def done(queue: Queue[Any]) -> Any:
    ready(queue)
    task = popped(queue)
    queue.mark_done(task)
    return task.id


def dead(queue: Queue[Any]) -> Any:
    ready(queue)
    task = popped(queue)
    queue.mark_failure(task, "no", code="c")
    return task.id


def held(queue: Queue[Any]) -> Any:
    hold(queue, 1)
    return queue.peek()[0].id


def reserved(queue: Queue[Any]) -> Any:
    queue.enqueue({}, dedupe_key="other", dedupe_for=3600)  # Creates the index of the keys.
    queue.mark_done(popped(queue))
    queue.purge(status="done")
    steps = Steps(queue, lambda twin: twin.enqueue({}, dedupe_key="k", dedupe_for=3600))
    while not (waiting := queue.peek()):
        steps.step()
    return waiting[0].id


Make = Callable[[Queue[Any]], Any]
BURIED = TaskStatus.FAILED
CASES: list[tuple[str, Make, dict[str, Any], TaskStatus | None]] = [
    ("date-as-text", delayed, {"next_retry_at": TEXT, "deadline_at": TEXT}, TaskStatus.PENDING),
    ("date-as-text", claimed, {"deadline_at": TEXT}, TaskStatus.PROCESSING),
    ("date-as-text", done, {"finished_at": TEXT}, TaskStatus.DONE),
    ("date-as-text", dead, {"updated_at": TEXT}, TaskStatus.FAILED),
    ("created-at-as-text", ready, {"created_at": TEXT}, TaskStatus.PENDING),
    ("status", ready, {"status": "paused"}, BURIED),
    ("status", ready, {"status": MISSING}, BURIED),
    ("queue", ready, {"queue": MISSING}, BURIED),
    ("queue", ready, {"queue": "x" * 200}, BURIED),
    ("queue", ready, {"queue": "a\nb"}, BURIED),
    ("next-retry-at", delayed, {"next_retry_at": "soon"}, BURIED),
    ("next-retry-at", delayed, {"next_retry_at": 1_777_777_777}, BURIED),
    ("next-retry-at", delayed, {"next_retry_at": [None]}, BURIED),
    ("next-retry-at", delayed, {"next_retry_at": BEYOND}, BURIED),
    ("expires-at", ready, {"expires_at": "never"}, BURIED),
    ("expires-at", ready, {"expires_at": BEYOND}, BURIED),
    ("visibility-timeout", ready, {"visibility_timeout_sec": -5}, BURIED),
    ("visibility-timeout", ready, {"visibility_timeout_sec": "abc"}, BURIED),
    ("visibility-timeout", ready, {"visibility_timeout_sec": 1e300}, BURIED),
    ("attempts-unknown", ready, {"attempts": "two"}, BURIED),
    ("attempts-unknown", ready, {"attempts": None}, BURIED),
    ("attempts-unknown", ready, {"attempts": [1]}, BURIED),
    ("attempts-unknown", ready, {"attempts": math.nan}, BURIED),
    ("attempts", ready, {"attempts": MISSING}, TaskStatus.PENDING),
    ("attempts", ready, {"attempts": -3}, TaskStatus.PENDING),
    ("attempts", ready, {"attempts": Decimal128("1")}, TaskStatus.PENDING),
    ("max-attempts", ready, {"max_attempts": MISSING}, TaskStatus.PENDING),
    ("max-attempts", ready, {"max_attempts": 0}, TaskStatus.PENDING),
    ("attempts-used-up", ready, {"attempts": 10}, BURIED),
    ("created-at", done, {"created_at": MISSING}, TaskStatus.DONE),
    ("created-at", ready, {"created_at": 5}, TaskStatus.PENDING),
    ("updated-at", dead, {"updated_at": MISSING}, TaskStatus.FAILED),
    ("updated-at", ready, {"updated_at": "today"}, TaskStatus.PENDING),
    ("priority", ready, {"priority": "high"}, TaskStatus.PENDING),
    ("priority", ready, {"priority": MISSING}, TaskStatus.PENDING),
    ("position", ready, {"position": None}, TaskStatus.PENDING),
    ("history", ready, {"history": "x"}, TaskStatus.PENDING),
    ("history", claimed, {"history": None}, TaskStatus.PROCESSING),
    ("counters", dead, {"replays": "x"}, TaskStatus.FAILED),
    ("counters", dead, {"moves": None}, TaskStatus.FAILED),
    ("counters", ready, {"crashes": []}, TaskStatus.PENDING),
    ("counters", dead, {"moves": math.nan}, TaskStatus.FAILED),
    ("counters", dead, {"moves": math.inf}, TaskStatus.FAILED),
    ("counters", dead, {"moves": -math.inf}, TaskStatus.FAILED),
    ("counters", dead, {"moves": Decimal128("1")}, TaskStatus.FAILED),
    ("counters", ready, {"crashes": 1e300}, TaskStatus.PENDING),
    ("lease-token", claimed, {"lease_token": MISSING}, TaskStatus.PROCESSING),
    ("lease-token", claimed, {"lease_token": 5}, TaskStatus.PROCESSING),
    ("lease-end", claimed, {"deadline_at": MISSING}, TaskStatus.PROCESSING),
    ("lease-end", claimed, {"deadline_at": "soon"}, TaskStatus.PROCESSING),
    ("lease-start", claimed, {"started_at": MISSING}, TaskStatus.PROCESSING),
    ("lease-worker", claimed, {"worker_id": None}, TaskStatus.PROCESSING),
    ("lease-queue", claimed, {"queue": 5}, None),
    ("queue-characters", ready, {"queue": "a\U00087235"}, None),
    ("queue-characters", claimed, {"queue": "\U00087235b"}, None),
    ("lease-left", ready, {"lease_token": "t"}, TaskStatus.PENDING),
    ("lease-left", dead, {"lease_token": "t"}, TaskStatus.FAILED),
    ("reservation", reserved, {"expires_at": MISSING, "deadline_at": FAR}, TaskStatus.PENDING),
    ("deadline", delayed, {"deadline_at": MISSING}, TaskStatus.PENDING),
    ("deadline", delayed, {"deadline_at": FAR}, TaskStatus.PENDING),
    ("deadline", delayed, {"deadline_at": "soon"}, TaskStatus.PENDING),
    ("held", held, {"held": MISSING}, None),
    ("held", held, {"held.by": []}, None),
    ("held", held, {"updated_at": BEFORE - DAY}, None),
    ("finished-early", ready, {"finished_at": BEFORE}, TaskStatus.PENDING),
    ("finished-early", claimed, {"finished_at": BEFORE}, TaskStatus.PROCESSING),
    ("done-end", done, {"finished_at": None}, TaskStatus.DONE),
    ("done-end", done, {"deadline_at": MISSING}, TaskStatus.DONE),
    ("done-end", done, {"deadline_at": FAR}, TaskStatus.DONE),
    ("failed-end", dead, {"finished_at": None}, TaskStatus.FAILED),
    ("failed-deadline", dead, {"deadline_at": BEFORE}, TaskStatus.FAILED),
    ("failed-error", dead, {"error": MISSING}, TaskStatus.FAILED),
    ("failed-error", dead, {"error": "broken"}, TaskStatus.FAILED),
    ("failed-error", dead, {"error.at": "then"}, TaskStatus.FAILED),
    ("finished-queue", dead, {"queue": None}, TaskStatus.FAILED),
    ("finished-queue", done, {"queue": 7}, TaskStatus.DONE),
    ("replaying", dead, {"replaying": {"at": "then"}}, TaskStatus.FAILED),
    ("replaying", ready, {"replaying": {"at": BEFORE, "changes": {}}}, TaskStatus.PENDING),
    ("task-version", dead, {"version": 2}, TaskStatus.FAILED),
]
IN_DLQ: list[tuple[str, dict[str, Any]]] = [
    ("date-as-text", {"finished_at": TEXT}),
    ("updated-at", {"updated_at": 3}),
    ("history", {"history": {}}),
    ("counters", {"moves": "x"}),
    ("lease-left", {"lease_token": "t"}),
    ("failed-end", {"finished_at": MISSING}),
    ("failed-deadline", {"deadline_at": BEFORE}),
    ("failed-error", {"error": None}),
    ("finished-queue", {"queue": MISSING}),
    ("replaying", {"replaying": True}),
    ("dlq-status", {"status": "faild"}),
    ("dlq-status", {"status": MISSING}),
    ("dlq-retired", {"retired_at": BEFORE}),
    ("dlq-version", {"version": MISSING}),
    ("dlq-version", {"version": 4}),
    ("dlq-version", {"version": 2**40}),
    ("dlq-version", {"moves": 1}),
]


@dataclass
class Mended:
    """What became of the malformed documents of one collection."""

    queue: Queue[Any]
    ids: list[Any]
    before: dict[str, list[Any]]
    dry: RepairReport
    after_dry: dict[str, list[Any]]
    sampled: Sampled
    applied: RepairReport
    again: RepairReport
    documents: dict[Any, Any]

    def ids_of(self, rule: str) -> list[Any]:
        return [task_id for one in self.dry.rules if one.rule == rule for task_id in one.ids]


def mend(
    queue: Queue[Any],
    target: str,
    cases: Sequence[tuple[Make, dict[str, Any]]],
) -> Mended:
    """Make one malformed document for each case, each in its own queue, and repair them."""
    collections = core_of(queue).collections
    ids = []
    for number, (make, changes) in enumerate(cases):
        own: Queue[Any] = Queue(
            collections.tasks, f"q{number}", settings=queue.settings, clock=queue.clock
        )
        ids.append(make(own))
        edit(getattr(collections, target), ids[-1], changes)
    before = stored(collections.database)
    return Mended(
        queue,
        ids,
        before,
        dry=repair(queue),
        after_dry=stored(collections.database),
        sampled=sample(queue),
        applied=repair(queue, apply=True),
        again=repair(queue, apply=True),
        documents={one["_id"]: one for one in getattr(collections, target).find()},
    )


def finish(queue: Queue[Any], names: Sequence[str]) -> None:
    """Let sweepers and workers do all that is left to do, for days."""
    clock: Any = queue.clock
    tasks = core_of(queue).collections.tasks
    for _ in range(4):
        clock.advance(DAY)
        assert Sweeper(queue).run_once().errors == {}
        for name in tasks.distinct("queue", {"status": "pending"}):
            if not is_name(name):
                continue  # Of a task that was only reported.
            assert name in names
            own: Queue[Any] = Queue(tasks, name, settings=queue.settings, clock=clock)
            while (task := own.pop()) is not None:
                own.mark_done(task)


@pytest.fixture(scope="module")
def database(microqueue_client: Any) -> Iterator[Any]:
    database = microqueue_client[f"repair_{uuid4().hex[:12]}"]
    yield database
    microqueue_client.drop_database(database.name)


@pytest.fixture(scope="module")
def mended(database: Any) -> Mended:
    queue = opened(database, FakeClock(), retention=DAY)
    return mend(queue, "tasks", [(make, changes) for _, make, changes, _ in CASES])


@pytest.fixture(scope="module")
def finished(mended: Mended) -> dict[Any, Any]:
    """Return the tasks that are left after some days."""
    finish(mended.queue, [f"q{number}" for number in range(len(CASES))])
    return {one["_id"]: one for one in core_of(mended.queue).collections.tasks.find()}


@pytest.fixture(scope="module")
def mended_dlq(database: Any) -> Mended:
    queue = opened(database["letters"], FakeClock(), "collection")
    return mend(queue, "dead_letters", [(dead, changes) for _, changes in IN_DLQ])


@pytest.mark.parametrize("which", ["mended", "mended_dlq"])
def test_dry_run_changes_nothing_and_a_second_repair_finds_nothing(
    request: pytest.FixtureRequest, which: str
) -> None:
    mended: Mended = request.getfixturevalue(which)
    reported_only = sum(1 for *_, after in CASES if after is None) if which == "mended" else 0
    total = len(mended.ids)
    assert mended.after_dry == mended.before
    assert (mended.dry.applied, mended.dry.documents, mended.dry.left) == (False, total, total)
    assert sum(one.repaired for one in mended.dry.rules) == 0
    assert mended.sampled == (total, 10_000, True, [])
    assert (mended.applied.applied, mended.applied.documents) == (True, total)
    assert mended.applied.left == reported_only
    assert (mended.again.documents, mended.again.left) == (reported_only, reported_only)
    assert mended.again.clean is not bool(reported_only)
    assert sum(one.repaired for one in mended.again.rules) == 0


@pytest.mark.parametrize("number", range(len(CASES)), ids=[one[0] for one in CASES])
def test_rule_for_tasks(mended: Mended, finished: dict[Any, Any], number: int) -> None:
    rule, make, changes, after = CASES[number]
    task_id = mended.ids[number]
    assert task_id in mended.ids_of(rule)
    document = mended.documents[task_id]
    if after is None:
        assert {name: document.get(name, MISSING) for name in changes if "." not in name} == {
            name: value for name, value in changes.items() if "." not in name
        }
        return
    assert document["status"] == after.value
    assert read_task(document).status is after
    if after is TaskStatus.FAILED or rule == "reservation":
        letters = mended.queue.dead_letters.all_queues
        letter = next(one for one in letters.list(limit=200) if one.id == task_id)
        assert letter.error is not None
        if make is not dead and rule != "reservation":
            codes = {"attempts-used-up": "max_attempts"}
            assert letter.error.code == codes.get(rule, "invalid_task")
        assert letters.replay(task_id).replayed == 1
    else:
        assert task_id not in finished  # Delivered, done and purged.


@pytest.mark.parametrize("number", range(len(IN_DLQ)), ids=[one[0] for one in IN_DLQ])
def test_rule_for_the_dlq_collection(mended_dlq: Mended, number: int) -> None:
    rule, _ = IN_DLQ[number]
    task_id = mended_dlq.ids[number]
    assert task_id in mended_dlq.ids_of(rule)
    letters = mended_dlq.queue.dead_letters.all_queues
    letter = next(one for one in letters.list(limit=200) if one.id == task_id)
    assert letter.error is not None
    assert letters.replay(task_id).replayed == 1
    back = mended_dlq.queue.get(task_id)
    assert back is not None
    assert back.status is TaskStatus.PENDING


@pytest.mark.parametrize("make", [delayed, claimed, done, dead])
def test_text_that_becomes_a_date_is_stamped_as_a_change(
    microqueue_queue: Queue[Any], make: Make
) -> None:
    queue = microqueue_queue
    task_id = make(queue)
    tasks = core_of(queue).collections.tasks
    edit(tasks, task_id, {"updated_at": TEXT})
    assert found(repair(queue, apply=True)) == {"date-as-text": 1}
    stamp = tasks.find_one({})["updated_at"]
    assert stamp == BEFORE if make is dead else stamp >= queue.now() - timedelta(minutes=1)


@pytest.mark.parametrize("moves", [math.nan, math.inf, Decimal128("1"), 1e300])
def test_dead_letter_with_a_malformed_count_of_moves_can_be_moved_once_it_is_mended(
    microqueue_database: Any, microqueue_clock: FakeClock, moves: Any
) -> None:
    in_place = opened(microqueue_database, microqueue_clock)
    task_id = dead(in_place)
    edit(core_of(in_place).collections.tasks, task_id, {"moves": moves})
    queue = opened(microqueue_database, microqueue_clock, "collection")
    assert repair(queue, apply=True).clean
    assert Sweeper(queue).run_once().errors == {}
    assert core_of(queue).collections.dead_letters.find_one({})["_id"] == task_id


def test_task_with_the_latest_eta_is_healthy(microqueue_queue: Queue[Any]) -> None:
    microqueue_queue.enqueue({}, eta=LATEST)
    assert repair(microqueue_queue).documents == 0
    with pytest.raises(InvalidArgument):
        microqueue_queue.enqueue({}, eta=FAR)


def test_task_whose_id_is_a_document_becomes_a_dead_letter(microqueue_queue: Queue[Any]) -> None:
    queue = microqueue_queue
    queue.enqueue({}, delay=60)
    tasks = core_of(queue).collections.tasks
    document = tasks.find_one_and_delete({})
    tasks.insert_one({**document, "_id": {"a": 1}})
    assert [list(one.ids) for one in repair(queue).rules if one.rule == "id"] == [[{"a": 1}]]
    assert repair(queue, apply=True).clean
    (letter,) = queue.dead_letters.list()
    assert letter.error is not None
    assert letter.error.code == "invalid_task"


@pytest.mark.parametrize("value", ["then", MISSING])
def test_tombstone_gets_a_date_by_which_it_is_deleted(
    microqueue_database: Any, microqueue_clock: FakeClock, value: Any
) -> None:
    queue = opened(microqueue_database, microqueue_clock, "collection")
    task_id = dead(queue)
    queue.dead_letters.discard(task_id)
    letters = core_of(queue).collections.dead_letters
    assert repair(queue).clean
    edit(letters, task_id, {"retired_at": value})
    assert found(repair(queue)) == {"dlq-tombstone": 1}
    assert repair(queue, apply=True).clean
    tombstone = letters.find_one({})
    assert tombstone["retired_at"] == queue.now()
    assert "status" not in tombstone
    assert "updated_at" not in tombstone


@pytest.mark.parametrize(
    ("rule", "changes", "is_free"),
    [
        ("dedupe-key-as-text", {"until": "2100-01-01T00:00:00Z"}, False),
        ("dedupe-key", {"until": MISSING}, True),
        ("dedupe-key", {"until": "x"}, True),
        ("dedupe-key", {"token": MISSING}, True),
        ("dedupe-key", {"task_id": MISSING}, True),
    ],
)
def test_rule_for_dedupe_keys(
    microqueue_database: Any,
    microqueue_clock: FakeClock,
    rule: str,
    changes: dict[str, Any],
    is_free: bool,
) -> None:
    queue = opened(microqueue_database, microqueue_clock, retention=0)
    other: Queue[Any] = Queue(microqueue_database["other"], clock=microqueue_clock)
    for one in (queue, other):
        one.enqueue({}, dedupe_key="k", dedupe_for=3600)
        one.mark_done(popped(one))
    keys = core_of(queue).collections.dedupe_keys
    for key in list(keys.find()):
        edit(keys, key["_id"], changes)
    assert found(repair(queue)) == {rule: 1}  # Not the key of the other collection.
    assert repair(queue, apply=True).clean
    assert repair(queue).documents == 0
    assert found(repair(other)) == {rule: 1}
    if is_free:
        queue.enqueue({}, dedupe_key="k", dedupe_for=3600)
    else:
        with pytest.raises(DuplicateTask):
            queue.enqueue({}, dedupe_key="k", dedupe_for=3600)


def test_task_whose_dedupe_key_a_live_task_has_becomes_a_dead_letter(
    microqueue_queue: Queue[Any],
) -> None:
    queue = microqueue_queue
    tasks = core_of(queue).collections.tasks
    others = [queue.enqueue({}, dedupe_key=f"other {n}").id for n in range(2)]
    first = queue.enqueue({}, dedupe_key="k").id
    for task_id in (first, *others):
        edit(tasks, task_id, {"finished_at": queue.now()})
    second = queue.enqueue({}, dedupe_key="k").id
    report = repair(queue, apply=True)
    assert (found(report), report.clean) == ({"finished-early": 3}, True)
    (letter,) = queue.dead_letters.list()
    assert letter.id == first
    assert letter.error is not None
    assert letter.error.code == "invalid_task"
    assert {popped(queue).id for _ in range(3)} == {second, *others}


# Other collections

PERIOD = {"cron": None, "next_at": None}
MALFORMED: list[tuple[str, str, dict[str, Any]]] = [
    ("schedule-next", "schedules", {"next_at": MISSING}),
    ("schedule-next", "schedules", {"next_at": "tomorrow"}),
    ("schedule-next", "schedules", {"paused": True}),
    ("schedule-names", "schedules", {"collection": MISSING, "next_at": 5}),
    ("schedule-names", "schedules", {"queue": "x"}),
    ("worker", "workers", {"heartbeat_at": MISSING}),
    ("worker", "workers", {"gone_at": MISSING, "late_at": "x", "heartbeat_sec": None}),
    ("worker", "workers", {"missed_at": "x", "queues": None}),
    ("worker", "workers", {"heartbeat_at": datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)}),
    ("pause", "pauses", {"queue": MISSING}),
    ("pause", "pauses", {"paused_at": "x", "collection": MISSING}),
    ("lock", "locks", {"expires_at": "x"}),
    ("lock", "locks", {"expires_at": MISSING}),
    ("schedule", "schedules", {"cron": "no"}),
    ("schedule", "schedules", {"backoff_policy": MISSING}),
    ("schedule", "schedules", {"timezone": "Mars/X"}),
    ("schedule", "schedules", {"timezone": "Mars/X", "next_at": None}),
    ("schedule", "schedules", PERIOD | {"every_sec": 60, "starts_at": "2026-01-01T00:00:00"}),
    ("schedule", "schedules", PERIOD | {"every_sec": 1e20}),
    ("schedule", "schedules", {"jitter_sec": 1e300}),
    ("binding", "bindings", {"bindings.0.priority": "x"}),
    ("binding", "bindings", {"bindings": 5}),
    ("binding", "bindings", {"bindings.0.delay_sec": 1e300}),
]
REPORTED_ONLY = {"schedule", "binding"}


def register(queue: Queue[Any], worker_id: str) -> None:
    now = queue.now()
    info = WorkerInfo(
        id=worker_id,
        collection="tasks",
        host="h",
        pid=1,
        queues=[queue.name],
        concurrency=1,
        running=0,
        handled=0,
        started_at=now,
        heartbeat_at=now,
        heartbeat_sec=3,
    )
    core_of(queue).run(workers.beat(info))


@pytest.fixture
def records(microqueue_database: Any, microqueue_clock: FakeClock) -> Queue[Any]:
    """A queue with one document in each of the other collections."""
    queue = opened(microqueue_database, microqueue_clock)
    queue.schedules.put("nightly", cron="0 3 * * *")
    queue.pause()
    register(queue, "w")
    Topic(microqueue_database, "orders").bind(queue.name, "order.*")
    lock = maintenance.acquire_lock(
        "sweeper:tasks", token="t", owner="o", now=queue.now(), lifetime=timedelta(seconds=5)
    )
    assert core_of(queue).run(lock)
    assert repair(queue).documents == 0
    return queue


@pytest.mark.parametrize(("rule", "place", "changes"), MALFORMED)
def test_rule_for_other_collections(
    records: Queue[Any], rule: str, place: str, changes: dict[str, Any]
) -> None:
    queue, clock = records, records.clock
    assert isinstance(clock, FakeClock)
    collection = getattr(core_of(queue).collections, place)
    edit(collection, collection.find_one({"_id": {"$not": re.compile("^schema")}})["_id"], changes)
    database = core_of(queue).collections.database
    before = stored(database)
    assert found(repair(queue)) == {rule: 1}
    assert sample(queue).malformed == 1
    assert stored(database) == before
    applied = repair(queue, apply=True)
    assert found(applied)[rule] == 1
    if rule in REPORTED_ONLY:
        assert (applied.clean, applied.left) == (False, 1)
        assert stored(database) == before
        return
    assert applied.clean
    assert repair(queue, apply=True).documents == 0
    if rule.startswith("schedule"):
        (schedule,) = queue.schedules.list()
        assert (schedule.next_at is None) is schedule.paused
    paused = queue.paused()
    assert paused is not None
    assert paused.queue == queue.name
    for _ in range(3):
        clock.advance(60)
        assert Sweeper(queue).run_once().errors == {}
    assert queue.workers() == []  # It did not beat again.


def test_documents_of_other_collections_are_read_in_pages(
    records: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microqueue.operations.repair_records.PAGE", 2)
    for number in range(5):
        register(records, f"w{number}")
    collection = core_of(records).collections.workers
    collection.update_many({}, {"$unset": {"gone_at": ""}})
    assert found(repair(records)) == {"worker": 6}
    assert repair(records, apply=True).clean
    assert collection.count_documents({"gone_at": {"$type": "date"}}) == 6


def test_schedule_that_has_no_further_run_is_healthy(records: Queue[Any]) -> None:
    schedules = core_of(records).collections.schedules
    (key,) = [one["_id"] for one in schedules.find()]
    edit(schedules, key, {"cron": "0 0 30 2 *", "next_at": None})
    assert found(repair(records)) in ({}, {"schedule": 1})


# Both collections


@pytest.mark.parametrize("status", ["pending", "done", "another life", "an older version"])
def test_same_id_in_both_collections_is_reported(
    microqueue_database: Any, microqueue_clock: FakeClock, status: str
) -> None:
    queue = opened(microqueue_database, microqueue_clock, "collection")
    task_id = dead(queue)
    collections = core_of(queue).collections
    copy = collections.dead_letters.find_one({"_id": task_id})
    task = {name: value for name, value in copy.items() if name != "version"}
    if status == "another life":
        task["created_at"] -= DAY
    elif status == "an older version":
        edit(collections.dead_letters, task_id, {"version": 2, "moves": 1})
    elif status == "done":
        task |= {"status": status, "deadline_at": task["finished_at"]}
    else:
        task |= {"status": status, "finished_at": None}
    collections.tasks.insert_one(task)
    before = stored(microqueue_database)
    report = repair(queue, apply=True)
    assert [(one.rule, list(one.ids), one.left) for one in report.rules] == [
        ("in-both", [task_id], 1)
    ]
    assert not report.clean
    assert stored(microqueue_database) == before


# Beside others, and without rights


def test_document_that_changed_since_it_was_found_is_left_alone(
    microqueue_queue: Queue[Any],
) -> None:
    queue = microqueue_queue
    task_id = queue.enqueue({}, priority=3).id
    collections = core_of(queue).collections
    edit(collections.tasks, task_id, {"priority": "high"})
    changed: list[int] = []

    def claim_first(call: Call) -> None:
        if call.method == "update_many" and not changed:
            changed.append(1)
            edit(collections.tasks, task_id, {"priority": 9})

    core_of(queue)._driver.before_call = claim_first  # noqa: SLF001 (before the write)
    report = repair(queue, apply=True)
    assert [(one.rule, one.found, one.repaired, one.left) for one in report.rules] == [
        ("priority", 1, 0, 0)
    ]
    assert changed
    assert collections.tasks.find_one({})["priority"] == 9


def test_worker_keeps_its_lease_while_its_task_is_mended(microqueue_queue: Queue[Any]) -> None:
    queue = microqueue_queue
    queue.enqueue({})
    task = popped(queue)
    changes = {"deadline_at": MISSING, "history": 1, "started_at": MISSING, "worker_id": MISSING}
    edit(core_of(queue).collections.tasks, task.id, changes)
    assert repair(queue, apply=True).clean
    queue.touch(task)
    queue.mark_done(task)
    assert repair(queue).documents == 0


def watched(database: Any, letters: list[Any]) -> Queue[Any]:
    """Return a queue that adds each dead letter that its hooks get to a list."""

    class Watch(Hooks):
        def on_dead_letter(self, letter: Any) -> None:
            letters.append(letter)

    return Queue(database, hooks=[Watch()])


def test_hooks_are_told_of_tasks_that_become_dead_letters(microqueue_database: Any) -> None:
    letters: list[Any] = []
    queue = watched(microqueue_database, letters)
    task_id = queue.enqueue({}).id
    edit(core_of(queue).collections.tasks, task_id, {"attempts": "two"})
    repair(queue, apply=True)
    assert [(one.id, one.error.code) for one in letters] == [(task_id, "invalid_task")]
    stored_letter = queue.dead_letters.list().tasks[0]
    assert stored_letter.error is not None
    assert letters[0].error.message == stored_letter.error.message
    assert "attempts=two" in letters[0].error.message


def test_hooks_are_told_once_of_a_task_with_two_faults(microqueue_database: Any) -> None:
    letters: list[Any] = []
    queue = watched(microqueue_database, letters)
    ids = [queue.enqueue({}).id for _ in range(2)]
    tasks = core_of(queue).collections.tasks
    edit(tasks, ids[0], {"queue": 5, "expires_at": "never"})
    edit(tasks, ids[1], {"expires_at": "never"})
    report = repair(queue, apply=True)
    assert report.clean
    assert {one.rule: one.repaired for one in report.rules} == {"queue": 1, "expires-at": 1}
    assert [one.id for one in letters] == ids
    assert [one.queue for one in letters] == ["default", queue.name]


def test_one_task_that_cannot_be_changed_does_not_hide_the_others(
    microqueue_database: Any,
) -> None:
    letters: list[Any] = []
    queue = watched(microqueue_database, letters)
    ids = [queue.enqueue({}, name="fixed" if n == 2 else None).id for n in range(4)]
    tasks = core_of(queue).collections.tasks
    tasks.update_many({}, {"$set": {"attempts": "x"}})
    microqueue_database.command("collMod", "tasks", validator={"name": {"$ne": "fixed"}})
    report = repair(queue, apply=True)
    assert [(one.found, one.repaired, one.left) for one in report.rules] == [(4, 3, 1)]
    assert sorted(one.id for one in letters) == [ids[0], ids[1], ids[3]]


def test_task_with_a_taken_dedupe_key_that_cannot_be_changed_is_left(
    microqueue_queue: Queue[Any],
) -> None:
    queue = microqueue_queue
    collections = core_of(queue).collections
    first = queue.enqueue({}, dedupe_key="k").id
    edit(collections.tasks, first, {"finished_at": queue.now()})
    queue.enqueue({}, dedupe_key="k")
    collections.database.command(
        "collMod", collections.tasks.name, validator={"status": {"$ne": "failed"}}
    )
    report = repair(queue, apply=True)
    assert [(one.rule, one.repaired, one.left) for one in report.rules] == [
        ("finished-early", 0, 1)
    ]


def drive(
    queue: Queue[Any], job: Operation[Any], answer: Callable[[Call], Any] | None = None
) -> tuple[Any, list[Any]]:
    """Run an operation call by call; return its result, and the dead letters that it reports.

    ``answer`` may raise an error instead of a call, or perform it in another way.
    """
    letters: list[Any] = []
    reply: Any = None
    error: Exception | None = None
    while True:
        try:
            call = job.send(reply) if error is None else job.throw(error)
        except StopIteration as stop:
            return stop.value, letters
        reply, error = None, None
        if isinstance(call, Buried):
            letters += call.letters
            continue
        try:
            reply = answer(call) if answer is not None else perform(queue, call)
        except OperationFailure as exc:
            error = exc


@pytest.mark.parametrize("fault", ["attempts", "dedupe key"])
def test_hooks_are_told_if_the_reply_to_the_write_was_lost(
    microqueue_queue: Queue[Any], fault: str
) -> None:
    queue = microqueue_queue
    task_id = queue.enqueue({}, dedupe_key="k").id
    tasks = core_of(queue).collections.tasks
    if fault == "attempts":
        edit(tasks, task_id, {"attempts": "x"})
    else:
        edit(tasks, task_id, {"finished_at": queue.now()})
        queue.enqueue({}, dedupe_key="k")

    def lose_replies(call: Call) -> Any:
        reply = perform(queue, call)
        return perform(queue, call) if call.method.startswith("update") else reply

    job = RepairJob("tasks", queue.settings, queue.clock).run(apply=True)
    report, letters = drive(queue, job, lose_replies)
    assert [one.id for one in letters] == [task_id]
    assert [(one.repaired, one.left) for one in report.rules] == [(1, 0)]


@pytest.mark.parametrize(("code", "stops"), [(14031, True), (50, True), (241, False)])
def test_only_an_error_of_one_document_lets_a_repair_proceed(
    microqueue_queue: Queue[Any], code: int, stops: bool
) -> None:
    queue = microqueue_queue
    edit(core_of(queue).collections.tasks, queue.enqueue({}).id, {"priority": "x"})

    def fail(call: Call) -> Any:
        if call.method.startswith("update"):
            raise OperationFailure("it failed", code)
        return perform(queue, call)

    job = RepairJob("tasks", queue.settings, queue.clock).run(apply=True)
    if stops:
        with pytest.raises(OperationFailure):
            drive(queue, job, fail)
        return
    report, _ = drive(queue, job, fail)
    assert [(one.repaired, one.left) for one in report.rules] == [(0, 1)]


def test_calls_have_few_ids(microqueue_database: Any, microqueue_clock: FakeClock) -> None:
    queue = opened(microqueue_database, microqueue_clock, "collection", batch_size=5)
    queue.enqueue_many([{} for _ in range(12)])
    for task in queue.pop_many(12):
        queue.mark_failure(task, "no")
    Sweeper(queue).move_dead_letters()
    collections = core_of(queue).collections
    copies = list(collections.dead_letters.find())
    collections.tasks.insert_many([{**one, "priority": "x", "status": "done"} for one in copies])
    collections.tasks.update_many({}, {"$unset": {"finished_at": "", "version": ""}})
    lengths: list[int] = []

    def note(call: Call) -> None:
        chosen = call.arguments[0] if call.arguments else None
        if isinstance(chosen, dict) and isinstance(chosen.get("_id"), dict):
            lengths.append(len(chosen["_id"].get("$in", ())))

    core_of(queue)._driver.before_call = note  # noqa: SLF001 (it sees the calls)
    assert found(repair(queue, apply=True)) == {"done-end": 12, "in-both": 12}
    assert max(lengths) == 5


def test_repair_reads_in_parts_and_can_be_repeated(
    microqueue_queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microqueue.operations.repair.PART", 7)
    queue = microqueue_queue
    ids = [*range(10), *map(str, range(10)), True, *(queue.enqueue({}).id for _ in range(10))]
    queue.enqueue_many([NewTask(payload={}, task_id=one) for one in range(10)])
    queue.enqueue_many([NewTask(payload={}, task_id=str(one)) for one in range(10)])
    tasks = core_of(queue).collections.tasks
    tasks.insert_one({**tasks.find_one({"_id": 1}), "_id": True})
    tasks.update_many({}, {"$set": {"priority": "x"}})
    parts: list[int] = []

    class Interrupted(Exception):
        pass

    def interrupt(name: str, count: int) -> None:
        if name == "tasks":
            parts.append(count)
            if len(parts) == 2:
                raise Interrupted

    with pytest.raises(Interrupted):
        repair(queue, apply=True, on_part=interrupt)
    assert parts == [7, 14]
    assert repair(queue).documents == len(ids) - 14
    assert repair(queue, apply=True).clean
    assert tasks.count_documents({"priority": 0}) == len(ids)


def test_sample_is_a_small_share_of_a_large_collection(
    microqueue_queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microqueue.operations.repair.SMALL", 400)
    queue = microqueue_queue
    queue.enqueue_many([{} for _ in range(500)])
    core_of(queue).collections.tasks.update_many({}, {"$set": {"priority": "x"}})
    assert sample(queue) == (20, 20, False, [])
    assert sample(queue, 10) == (10, 10, False, [])
    monkeypatch.undo()
    assert sample(queue) == (500, 10_000, True, [])


def test_sample_that_takes_too_long_is_a_failed_check(microqueue_queue: Queue[Any]) -> None:
    queue = microqueue_queue
    edit(core_of(queue).collections.tasks, queue.enqueue({}).id, {"priority": "x"})
    register(queue, "w")
    core_of(queue).collections.workers.update_many({}, {"$unset": {"gone_at": ""}})

    def be_late(call: Call) -> Any:
        if call.method == "aggregate" and call.target == "tasks":
            assert call.own_limit_sec == queue.settings.long_call_timeout.total_seconds()
            raise ExecutionTimeout("operation exceeded time limit", MAX_TIME_EXPIRED)
        return perform(queue, call)

    sampled, _ = drive(
        queue, RepairJob("tasks", queue.settings, queue.clock).sample(10_000), be_late
    )
    assert sampled == (1, 10_000, True, ["tasks"])
    check = check_documents(sampled)
    assert (check.ok, check.detail) == (False, "1 malformed; read too slowly: tasks")


def test_every_rule_has_a_test_and_a_line_in_the_docs() -> None:
    rules: list[Any] = [*RULES, unknown_characters([]), *RECORD_RULES, IN_BOTH]
    names = {rule.name for rule in rules}
    cases = {one[0] for one in (*CASES, *IN_DLQ, *MALFORMED)}
    others = {"id", "dlq-tombstone", "dedupe-key", "dedupe-key-as-text", "in-both"}
    assert names == cases | others
    assert len(names) == len(rules)
    text = (ROOT / "docs/repair.md").read_text()
    for rule in rules:
        assert f"| `{rule.name}` | {rule.wrong} | {rule.remedy} |" in text


# Any field, any value

VALUES: Any = st.one_of(
    st.sampled_from(
        [
            *(MISSING, None, True, "", "x", TEXT, math.nan, math.inf, -math.inf, -1, 0, 1.5),
            *(BEYOND, Decimal128("1"), Decimal128("NaN"), FAR, BEFORE, 2**40, 1e300),
            *([], [None], [1], [BEFORE], {}, {"a": 1}, {"at": BEFORE, "changes": {}}, b"x"),
            *("pending", "processing", "done", "failed", datetime.max.replace(tzinfo=UTC)),
        ]
    ),
    st.integers(-(2**31), 2**31),
    st.text(max_size=5),
)
FIELDS = (
    *("status", "queue", "priority", "position", "attempts", "max_attempts", "history", "error"),
    *("next_retry_at", "deadline_at", "expires_at", "created_at", "updated_at", "finished_at"),
    *("started_at", "lease_token", "worker_id", "visibility_timeout_sec", "crashes", "replays"),
    *("moves", "replaying", "version", "headers", "backoff_sec", "backoff_policy", "held"),
    *("reserving", "redelivered", "payload", "progress", "name"),
)
EDITS = st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3)


@pytest.mark.timeout(180 * EFFORT)
@hypothesis_settings(
    max_examples=25 * EFFORT,
    derandomize=EFFORT == 1,
    phases=[Phase.generate],  # Shrinking is slow.
)
@given(edits=st.lists(EDITS, min_size=8, max_size=40))
def test_any_edited_document_is_reachable_after_a_repair_or_reported(
    database: Any, edits: list[dict[str, Any]]
) -> None:
    queue = opened(database["any"], FakeClock())
    tasks = core_of(queue).collections.tasks
    tasks.delete_many({})
    queue.enqueue_many([NewTask(payload={}, max_attempts=3) for _ in edits[::2]])
    for number, task in enumerate(queue.pop_many(len(edits))):
        if number % 4 == 1:
            queue.mark_done(task)
        elif number % 4 == 2:
            queue.mark_failure(task, "no")
        elif number % 4 == 3:
            queue.mark_retry(task, error="again", delay=60)
    queue.enqueue_many([NewTask(payload={}, delay=60 * (n % 2)) for n in range(len(edits[1::2]))])
    for document, changes in zip(list(tasks.find({}, {"_id": 1})), edits, strict=True):
        edit(tasks, document["_id"], changes)
    report = repair(queue, apply=True)
    reported = {repr(task_id) for one in report.rules if one.left for task_id in one.ids}
    assert len(reported) == report.left or report.left > 10
    again = repair(queue, apply=True)
    assert (again.documents, again.left) == (report.left, report.left)
    assert sum(one.repaired for one in again.rules) == 0
    clock: Any = queue.clock
    for _ in range(4):  # Backoff and leases are over each time.
        for document in tasks.find():
            read_task(document)
        clock.advance(2 * DAY)
        repair(queue, apply=True)  # What was reported while it was claimed.
        assert Sweeper(queue, jobs=[one for one in JOBS if one != "purge_finished"]).run_once().ok
        for name in tasks.distinct("queue", {"status": "pending"}):
            if not is_name(name):
                continue  # It is reported, or the next repair makes it a dead letter.
            own: Queue[Any] = Queue(tasks, name, settings=queue.settings, clock=clock)
            while (delivered := own.pop()) is not None:
                own.mark_done(delivered)
    far = {"next_retry_at": {"$gt": queue.now()}}
    waiting = tasks.find({"status": {"$nin": ["done", "failed"]}, "$nor": [far]})
    assert [one for one in waiting if repr(one["_id"]) not in reported] == []
    listed = {one.id for one in queue.dead_letters.all_queues.list(limit=200)}
    assert listed == {one["_id"] for one in tasks.find({"status": "failed"})}
    clock.advance(30 * DAY)
    assert Sweeper(queue).run_once().ok
    assert tasks.count_documents({"status": "done"}) == 0


def test_collections_without_rights_are_left_out_and_named(microqueue_queue: Queue[Any]) -> None:
    queue = microqueue_queue
    edit(core_of(queue).collections.tasks, queue.enqueue({}).id, {"priority": "x"})
    job = RepairJob("tasks", queue.settings, queue.clock).run(apply=True)

    def deny(call: Call) -> Any:
        if call.target in {"dead_letters", "workers"}:
            raise OperationFailure("not authorized", UNAUTHORIZED)
        return perform(queue, call)

    report, _ = drive(queue, job, deny)
    assert report.unread == ["tasks_dlq", "microqueue_workers"]
    assert (found(report), report.clean) == ({"priority": 1}, True)


def test_documents_that_may_be_read_and_not_changed_are_reported_as_left(
    records: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microqueue.operations.repair.PART", 3)
    collections = core_of(records).collections
    ids = [records.enqueue({}).id for _ in range(7)]
    for task_id in (ids[0], ids[6]):
        edit(collections.tasks, task_id, {"priority": "x"})
    collections.pauses.update_many({}, {"$unset": {"queue": ""}})

    def deny(call: Call) -> Any:
        if call.method.startswith("update"):
            raise OperationFailure("not authorized", UNAUTHORIZED)
        return perform(records, call)

    job = RepairJob("tasks", records.settings, records.clock).run(apply=True)
    report, _ = drive(records, job, deny)
    assert report.unread == ["tasks", "microqueue_pauses"]
    assert [(one.rule, one.found, one.repaired, one.left) for one in report.rules] == [
        ("priority", 2, 0, 2),
        ("pause", 1, 0, 1),
    ]
    assert (report.documents, report.left, report.clean) == (3, 3, False)
