"""A collection of schema version 1 is refused, migrated, and then lives on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from bson import CodecOptions, Int64

from microqueue import Queue, QueueSettings, Sweeper, Worker
from microqueue.core import core_of
from microqueue.doctor import examine
from microqueue.errors import (
    DuplicateTask,
    MicroqueueError,
    SchemaMismatch,
    SchemaTooNew,
    SchemaTooOld,
)
from microqueue.insights import Insights
from microqueue.migration import Migration
from microqueue.operations import bulk_load, schema
from microqueue.operations import migration as operations
from microqueue.operations.call import Call, Operation
from microqueue.operations.workers import beat
from microqueue.repair import repair
from microqueue.reports import WorkerInfo
from microqueue.task import read_task
from microqueue.testing import FakeClock
from tests.fixtures.version_1 import FAR, restore

HOUR = timedelta(hours=1)
FIVE = {"_id_", "ready", "deadline", "dedupe", "failed", "browse"}


@pytest.fixture(params=["status", "collection"])
def letters(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def mail(microqueue_database: Any, microqueue_clock: FakeClock, letters: Any) -> Queue[Any]:
    """A queue of the new version on a collection of the old one."""
    now = microqueue_clock.now()
    restore(microqueue_database, letters, now)
    settings = QueueSettings(dead_letters=letters, visibility_timeout=60, batch_size=3)
    return Queue(microqueue_database, "mail", settings=settings, clock=microqueue_clock)


def stored(queue: Queue[Any]) -> dict[str, dict[str, Any]]:
    """Return the tasks by their ids; those with a generated id by their payload."""
    tasks = core_of(queue).collections.tasks.with_options(CodecOptions(tz_aware=True))
    return {
        one["_id"] if isinstance(one["_id"], str) else str(one["payload"]): one
        for one in tasks.find()
    }


def indexes(queue: Queue[Any]) -> set[str]:
    return set(core_of(queue).collections.tasks.index_information())


def run_worker(queue: Queue[Any]) -> int:
    return Worker(queue, lambda _payload: None).run(burst=True)


ENTRANCES: dict[str, Callable[[Queue[Any]], Any]] = {
    "enqueue": lambda queue: queue.enqueue({}),
    "enqueue_many": lambda queue: queue.enqueue_many([{}]),
    "pop": lambda queue: queue.pop(),
    "stats": lambda queue: queue.stats(),
    "get": lambda queue: queue.get("done"),
    "peek": lambda queue: queue.peek(),
    "ensure_indexes": lambda queue: queue.ensure_indexes(),
    "sweeper": lambda queue: Sweeper(queue).run_once(),
    "worker": run_worker,
    "insights": lambda queue: Insights(queue).overview(),
    "cancel": lambda queue: queue.cancel("delayed"),
    "replay": lambda queue: queue.dead_letters.replay(["cancelled"]),
    "dead_letters.list": lambda queue: queue.dead_letters.list(),
    "dead_letters.groups": lambda queue: queue.dead_letters.groups(),
    "dead_letters.stats": lambda queue: queue.dead_letters.stats(),
    "discard": lambda queue: queue.dead_letters.discard(["cancelled"]),
    "pause": lambda queue: queue.pause(),
    "resume": lambda queue: queue.resume(),
    "paused": lambda queue: queue.paused(),
    "workers": lambda queue: queue.workers(),
    "schedules.put": lambda queue: queue.schedules.put("hourly", every=HOUR, payload={}),
    "schedules.list": lambda queue: queue.schedules.list(),
    "schedules.remove": lambda queue: queue.schedules.remove("hourly"),
    "purge": lambda queue: queue.purge(),
    "wait_for": lambda queue: queue.wait_for("done", timeout=0),
    "touch": lambda queue: queue.touch(read_task(stored(queue)["lease-live"])),
    "mark_done": lambda queue: queue.mark_done(read_task(stored(queue)["lease-live"])),
    "sweeper.reclaim_stuck": lambda queue: Sweeper(queue).reclaim_stuck(),
    "repair": lambda queue: repair(queue, apply=True),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_old_collection_is_rejected_and_left_alone(mail: Queue[Any], entrance: str) -> None:
    before = stored(mail), indexes(mail)
    with pytest.raises(SchemaTooOld) as caught:
        ENTRANCES[entrance](mail)
    assert (caught.value.found, caught.value.supported) == (1, schema.VERSION)
    assert "microqueue migrate" in str(caught.value)
    assert (stored(mail), indexes(mail)) == before


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_newer_collection_is_rejected_and_left_alone(mail: Queue[Any], entrance: str) -> None:
    Migration(mail).run()
    newer = {"$set": {"version": schema.VERSION + 1}}
    core_of(mail).collections.locks.update_one({"_id": "schema:tasks"}, newer)
    before = stored(mail), indexes(mail)
    with pytest.raises(SchemaTooNew) as caught:
        ENTRANCES[entrance](mail)
    assert (caught.value.found, caught.value.supported) == (schema.VERSION + 1, schema.VERSION)
    with pytest.raises(SchemaTooNew):
        Migration(mail).run()
    assert (stored(mail), indexes(mail)) == before


def test_survey_counts_and_changes_nothing(mail: Queue[Any], letters: str) -> None:
    before = stored(mail), indexes(mail)
    survey = Migration(mail).survey()
    assert (survey.found, survey.needed, survey.resumed) == (1, True, False)
    failed = {"failed": 1} if letters == "status" else {}
    assert survey.to_change == {"done": 2, "processing": 4, "pending": 8, **failed}
    assert survey.tasks == (20 if letters == "status" else 18)
    assert survey.create == ["deadline"]
    assert set(survey.drop) == schema.FIRST_INDEXES
    assert survey.retention == timedelta(days=3)
    assert (stored(mail), indexes(mail)) == before


def expected_deadlines(now: datetime) -> dict[str, datetime | None]:
    began = now - timedelta(minutes=2)
    return {
        "done": began - timedelta(seconds=2),
        "done-after-retry": began,
        "snoozed-and-due": began + timedelta(seconds=30),
        "replayed": began + HOUR,
        "lease-expired": began + timedelta(seconds=60),
        "own-lease": began + 2 * HOUR,
        "lease-live": now + timedelta(seconds=60),
        "other-lease-live": now + timedelta(seconds=60),
        "ready": None,
        "ready-with-key": None,
        "delayed": now + HOUR,
        "delayed-with-key": now + 2 * HOUR,
        "expiring": now + HOUR,
        "delayed-and-expiring": now + HOUR,
        "slow-delayed": now + HOUR,
        "{'n': 18}": None,
        "{'n': 19}": None,
        "held": FAR,
    }


def check_migrated(queue: Queue[Any], before: dict[str, dict[str, Any]], now: datetime) -> None:
    found = stored(queue)
    assert indexes(queue) == FIVE
    deadlines = {name: one.get("deadline_at") for name, one in found.items()}
    expected = expected_deadlines(now)
    expected |= {name: None for name in ("cancelled", "failed") if name in before}
    assert deadlines == expected
    gone = {"lease_expires_at", "deadline_at"}
    for name, one in found.items():
        kept = {field: value for field, value in one.items() if field not in gone}
        assert kept == {field: value for field, value in before[name].items() if field not in gone}
        assert "lease_expires_at" not in one


def test_migration_gives_every_task_its_deadline(mail: Queue[Any]) -> None:
    now, before = mail.clock.now(), stored(mail)
    batches: list[tuple[int, int]] = []
    changed = Migration(mail).run(on_batch=lambda *batch: batches.append(batch))
    check_migrated(mail, before, now)
    assert changed == batches[-1][1] >= 14
    assert [read for read, _ in batches][:2] == [3, 6]
    assert batches[-1][0] == len(before)
    assert not Migration(mail).survey().needed
    assert Migration(mail).run() == 0


@pytest.mark.parametrize("interrupted_after", range(1, 7))
def test_interrupted_migration_resumes_where_it_was(
    mail: Queue[Any], interrupted_after: int
) -> None:
    now, before = mail.clock.now(), stored(mail)
    left = interrupted_after

    def interrupt(_read: int, _changed: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Migration(mail).run(on_batch=interrupt)
    with pytest.raises(SchemaTooOld):
        mail.enqueue({})
    assert Migration(mail).survey().resumed
    reads: list[int] = []
    Migration(mail).run(on_batch=lambda read, _: reads.append(read))
    check_migrated(mail, before, now)
    if interrupted_after < 6:  # After the last batch, all are read once more.
        assert reads[-1] == len(before) - 3 * interrupted_after


def test_tasks_that_an_old_process_adds_meanwhile_are_migrated(mail: Queue[Any]) -> None:
    tasks = core_of(mail).collections.tasks
    pattern = tasks.find_one("delayed")
    added: list[str] = []

    def add(_read: int, _changed: int) -> None:
        if len(added) < 3:
            added.append(f"a{len(added)}")  # In front of the place where the migration is.
            tasks.insert_one({**pattern, "_id": added[-1]})

    Migration(mail).run(on_batch=add)
    found = stored(mail)
    assert {found[name]["deadline_at"] for name in added} == {found["delayed"]["deadline_at"]}


def test_migration_waits_until_workers_are_stopped(
    mail: Queue[Any], microqueue_clock: FakeClock
) -> None:
    now = microqueue_clock.now()
    info = WorkerInfo(
        id="old:2",
        collection="tasks",
        host="h",
        pid=1,
        queues=["mail"],
        concurrency=1,
        running=0,
        handled=0,
        started_at=now,
        heartbeat_at=now,
        heartbeat_sec=2,
    )
    core_of(mail).run_on_any_version(beat(info))
    before = stored(mail)
    with pytest.raises(MicroqueueError, match="old:2"):
        Migration(mail).run()
    assert stored(mail) == before
    Migration(mail).run(force=True)
    check_migrated(mail, before, now)


# Normal use after the migration


def test_everything_that_was_due_happens_after_the_migration(
    mail: Queue[Any], microqueue_clock: FakeClock
) -> None:
    Migration(mail).run()
    report = Sweeper(mail).run_once()
    assert report.ok
    assert (report.reclaimed, report.promoted, report.expired, report.purged) == (1, 1, 0, 0)
    microqueue_clock.advance(HOUR)
    report = Sweeper(mail).run_once()
    assert (report.reclaimed, report.expired) == (2, 2)
    found = stored(mail)
    assert found["delayed"]["next_retry_at"] is None
    assert found["slow-delayed"]["next_retry_at"] is None
    microqueue_clock.advance(timedelta(days=3))
    assert Sweeper(mail).run_once().purged == 2


def test_old_claim_settles_and_its_history_is_whole(mail: Queue[Any]) -> None:
    Migration(mail).run()
    claimed = read_task(stored(mail)["lease-live"])
    assert claimed.lease is not None
    mail.mark_done(claimed)
    mail.mark_done(claimed)
    done = mail.get("lease-live")
    assert done is not None
    assert [one.outcome for one in done.history] == ["done"]
    retried = mail.get("done-after-retry")
    assert retried is not None
    assert [one.outcome for one in retried.history] == ["retried", "done"]


def test_keys_loads_and_dead_letters_work_on(
    mail: Queue[Any], microqueue_clock: FakeClock, letters: str
) -> None:
    Migration(mail).run()
    with pytest.raises(DuplicateTask):
        mail.enqueue({}, dedupe_key="k2")
    now = microqueue_clock.now()
    assert core_of(mail).run(bulk_load.release(["slow"], "load", now)) == 1
    assert stored(mail)["held"]["deadline_at"] is None
    assert mail.dead_letters.replay(["cancelled"], delay=60).replayed == 1
    assert stored(mail)["cancelled"]["deadline_at"] == now + timedelta(seconds=60)
    if letters == "collection":  # Its replay was under way when the old process died.
        assert mail.get("failed").status == "failed"  # type: ignore[union-attr]
        Sweeper(mail).run_once()
        back = stored(mail)["failed"]
        assert back["status"] == "pending"
        assert back["deadline_at"] == back["next_retry_at"]
        assert back["next_retry_at"] is not None


def test_worker_drains_what_is_ready(mail: Queue[Any], microqueue_clock: FakeClock) -> None:
    Migration(mail).run()
    microqueue_clock.advance(timedelta(seconds=30))
    assert run_worker(mail) == 4  # Two ready, the one that was due, and one that may expire.
    stats = mail.stats()
    assert (stats.ready, stats.processing, stats.done) == (0, 3, 6)


def test_new_collection_says_its_version(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.enqueue({})
    assert microqueue_database.microqueue_locks.find_one("schema:tasks") == {
        "_id": "schema:tasks",
        "version": schema.VERSION,
        "retention_sec": 604_800.0,
    }
    assert not Migration(queue).survey().needed


# Interruptions and other processes


def finish_in_the_middle(calls: int) -> Callable[[str], Operation[None]]:
    """Return ``finish``, killed after so many calls."""

    def finish(collection: str, whole: Any = operations.finish) -> Operation[None]:
        operation, reply = whole(collection), None
        for _ in range(calls):
            reply = yield operation.send(reply)
        raise KeyboardInterrupt

    return finish


CALLS_OF_FINISH = 9
"""Two that create the new index, six that drop the old ones, and one that sets the version."""


@pytest.mark.parametrize("calls", range(CALLS_OF_FINISH))
def test_migration_killed_at_its_end_never_leaves_the_old_ttl_index(
    mail: Queue[Any], monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    now, before = mail.clock.now(), stored(mail)
    with monkeypatch.context() as patch:
        patch.setattr(operations, "finish", finish_in_the_middle(calls))
        with pytest.raises(KeyboardInterrupt):
            Migration(mail).run()
    survey = Migration(mail).survey()
    assert (survey.found, survey.needed) == (1, True)
    assert survey.retention == timedelta(days=3)
    Migration(mail).run()
    check_migrated(mail, before, now)
    assert not Migration(mail).survey().needed
    assert len(list(recorded(operations.finish("tasks")))) == CALLS_OF_FINISH


def recorded(operation: Operation[None]) -> Iterator[Call]:
    """Yield the calls of an operation on a collection with all indexes of version 1."""
    reply: Any = None
    while True:
        try:
            call = operation.send(reply)
        except StopIteration:
            return
        yield call
        reply = dict.fromkeys(schema.FIRST_INDEXES) if call.method == "index_information" else None


def test_tasks_that_an_old_worker_leaves_after_the_migration_are_changed(
    mail: Queue[Any], microqueue_clock: FakeClock
) -> None:
    tasks = core_of(mail).collections.tasks
    pattern = tasks.find_one("delayed")
    Migration(mail).run()
    now = microqueue_clock.now()
    claimed = {"status": "processing", "attempts": 1, "lease_token": "t", "worker_id": "old"}
    live = mail.pop()
    assert live is not None
    mine = {"$set": {"lease_expires_at": now - HOUR}}  # It was claimed by an old worker before.
    tasks.update_one({"_id": live.id}, mine)
    left: dict[str, dict[str, Any]] = {
        "stranded": {**claimed, "next_retry_at": None, "lease_expires_at": now - HOUR},
        "waiting": {"next_retry_at": now - HOUR},
        "over": {"status": "done", "finished_at": now - HOUR, "lease_expires_at": None},
    }
    tasks.insert_many({**pattern, "_id": name, **one} for name, one in left.items())
    before = stored(mail)

    survey = Migration(mail).survey()
    assert (survey.found, survey.needed) == (schema.VERSION, True)
    assert survey.to_change == {"processing": 2, "pending": 1, "done": 1}
    assert stored(mail) == before
    batches: list[tuple[int, int]] = []
    assert Migration(mail).run(on_batch=lambda *batch: batches.append(batch)) == 4
    assert len(batches) > 1
    assert batches == sorted(batches)
    assert batches[-1] == (len(before), 4)
    found = stored(mail)
    assert {found[name]["deadline_at"] for name in left} == {now - HOUR}
    assert not any("lease_expires_at" in one for one in found.values())
    assert not Migration(mail).survey().needed
    Sweeper(mail).run_once()
    assert {stored(mail)[name]["status"] for name in ("stranded", "waiting")} == {"pending"}
    mail.mark_done(live)  # Its lease of the new version was not cut short.


def test_old_indexes_that_come_back_are_dropped(mail: Queue[Any]) -> None:
    Migration(mail).run()
    core_of(mail).collections.tasks.create_index("finished_at", name="finished")
    survey = Migration(mail).survey()
    assert (survey.found, survey.needed, list(survey.drop)) == (schema.VERSION, True, ["finished"])
    (check,) = (one for one in examine(mail) if one.name == "indexes of tasks")
    assert not check.ok
    assert "finished" in check.detail
    assert "microqueue migrate" in str(check.advice)
    assert Migration(mail).run() == 0
    assert indexes(mail) == FIVE
    assert all(one.ok for one in examine(mail) if one.name == "indexes of tasks")


@pytest.mark.parametrize("at", range(1, 7))
def test_two_migrations_at_once_both_end(mail: Queue[Any], at: int) -> None:
    now, before = mail.clock.now(), stored(mail)
    batches = 0

    def migrate_too(_read: int, _changed: int) -> None:
        nonlocal batches
        batches += 1
        assert batches < 20, "it never ends"
        if batches == at:
            Migration(mail).run()
            mail.enqueue({"new": True})

    Migration(mail).run(on_batch=migrate_too)
    assert batches <= at + 1
    (added,) = (name for name in stored(mail) if name not in before)
    core_of(mail).collections.tasks.delete_one({"payload": {"new": True}})
    assert added not in stored(mail)
    check_migrated(mail, before, now)


def test_migration_ends_if_its_schema_is_deleted(mail: Queue[Any]) -> None:
    def delete(_read: int, _changed: int) -> None:
        core_of(mail).collections.locks.delete_many({})

    with pytest.raises(SchemaTooOld):
        Migration(mail).run(on_batch=delete)


def test_migration_gives_up_if_old_processes_add_tasks_all_the_time(mail: Queue[Any]) -> None:
    tasks = core_of(mail).collections.tasks
    pattern = tasks.find_one("delayed")
    added: list[str] = []

    def add(_read: int, _changed: int) -> None:
        added.append(f"a{1000 - len(added)}")  # In front of the place where the migration is.
        tasks.insert_one({**pattern, "_id": added[-1]})

    with pytest.raises(MicroqueueError, match="stop them") as caught:
        Migration(mail).run(on_batch=add)
    assert not isinstance(caught.value, SchemaMismatch)
    assert Migration(mail).survey().resumed
    Migration(mail).run()
    assert not Migration(mail).survey().needed


# What a collection without its schema is


@pytest.mark.parametrize("ensured", [True, False])
@pytest.mark.parametrize(
    "only", ["delayed", "expiring", "done", "lease-live", "replayed", "snoozed-and-due"]
)
def test_restored_dump_without_its_indexes_is_rejected_and_migrated(
    microqueue_database: Any, microqueue_clock: FakeClock, only: str, *, ensured: bool
) -> None:
    restore(microqueue_database, "status", microqueue_clock.now())
    microqueue_database.tasks.drop_indexes()
    microqueue_database.tasks.delete_many({"_id": {"$nin": [only, "ready"]}})
    settings = QueueSettings(ensure_indexes=ensured)
    queue = Queue[Any](microqueue_database, "mail", settings=settings, clock=microqueue_clock)
    with pytest.raises(SchemaTooOld):
        queue.enqueue({})
    assert indexes(queue) == {"_id_"}
    Migration(queue).run()
    assert stored(queue)[only].get("deadline_at") == expected_deadlines(queue.now())[only]
    queue.enqueue({})


def test_collection_of_this_version_without_schema_and_indexes_is_used(
    microqueue_database: Any,
) -> None:
    settings = QueueSettings(ensure_indexes=False, visibility_timeout=60)
    queue = Queue[Any](microqueue_database, settings=settings)
    queue.enqueue_many([{}, {}, {}])
    queue.enqueue({}, delay=60)
    assert queue.pop() is not None
    queue.mark_done(queue.pop())  # type: ignore[arg-type]
    assert Queue[Any](microqueue_database, settings=settings).stats().ready == 1
    assert Queue[Any](microqueue_database).stats().delayed == 1


@pytest.mark.parametrize("version", [2, 2.0, Int64(2)])
def test_version_may_be_stored_as_any_whole_number(microqueue_database: Any, version: Any) -> None:
    microqueue_database.microqueue_locks.insert_one({"_id": "schema:tasks", "version": version})
    Queue[Any](microqueue_database).enqueue({})
    newer = {"$set": {"version": type(version)(3)}}
    microqueue_database.microqueue_locks.update_one({"_id": "schema:tasks"}, newer)
    with pytest.raises(SchemaTooNew) as caught:
        Queue[Any](microqueue_database).enqueue({})
    assert caught.value.found == 3


@pytest.mark.parametrize("version", [None, "2", 2.5, True, float("nan"), [2]])
def test_version_that_is_no_whole_number_is_an_error(
    microqueue_database: Any, version: Any
) -> None:
    microqueue_database.microqueue_locks.insert_one({"_id": "schema:tasks", "version": version})
    with pytest.raises(MicroqueueError, match="schema:tasks"):
        Queue[Any](microqueue_database).enqueue({})
    assert microqueue_database.tasks.count_documents({}) == 0
