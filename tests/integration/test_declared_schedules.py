"""Schedules in code: a worker declares them when it starts."""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib.machinery import ModuleSpec
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from microqueue import InvalidArgument, InvalidCron, Queue, Sweeper, Tasks, Worker
from microqueue.core import core_of
from microqueue.operations.call import Call, Operation
from microqueue.schedule import run_id
from microqueue.schedules import declare
from microqueue.testing import FakeClock
from microqueue.worker.handlers import router_for
from microqueue.worker.registry import package_of
from tests.integration.killing import Killed, killed_before
from tests.integration.rig import Rig


def cleanup(days: int = 7) -> None: ...


def report() -> None: ...


def start(database: Any, tasks: Tasks, *names: str) -> None:
    """Start a worker with these tasks, and let it end."""
    queues: list[Queue[Any]] = [Queue(database, name) for name in names or ("default",)]
    Worker(queues, tasks).run(burst=True)


def stored(database: Any) -> dict[str, Any]:
    queue: Queue[Any] = Queue(database)
    return {one.name: one for one in queue.schedules.list(all_queues=True)}


def test_worker_declares_changes_and_removes(rig: Rig) -> None:
    tasks = Tasks()
    tasks.task(
        schedule="0 3 * * *", timezone="Europe/Berlin", catch_up="all", grace=60, overlap="skip",
        jitter=5, arguments={"days": 3}, priority=4, max_attempts=2,
        expires_in=90, headers={"tenant": "a"},
    )(cleanup)  # fmt: skip
    tasks.task("reporting", every=3600)(report)
    rig.queue.schedules.put("manual", every=60)
    rig.run(tasks)
    found = stored(rig.database)
    assert set(found) == {"cleanup", "reporting", "manual"}
    first = found["cleanup"]
    assert (first.source, first.app, first.task) == ("code", "tests", "cleanup")
    assert (first.cron, first.timezone) == ("0 3 * * *", "Europe/Berlin")
    assert (first.catch_up, first.grace, first.overlap) == ("all", timedelta(seconds=60), "skip")
    assert (first.jitter, first.payload) == (timedelta(seconds=5), {"days": 3})
    assert (first.priority, first.max_attempts) == (4, 2)
    assert (first.expires_in, first.headers) == (timedelta(seconds=90), {"tenant": "a"})
    assert found["reporting"].every == timedelta(hours=1)
    assert found["manual"].source == "api"

    rig.run(tasks)
    assert stored(rig.database) == found, "nothing was written"

    changed = Tasks()
    changed.task(schedule="0 4 * * *")(cleanup)
    changed.task()(report)
    rig.run(changed)
    found = stored(rig.database)
    assert set(found) == {"cleanup", "manual"}
    assert found["cleanup"].cron == "0 4 * * *"

    without = Tasks()
    without.task()(cleanup)
    rig.run(without)
    assert set(stored(rig.database)) == {"manual"}


def test_task_of_a_declared_schedule_runs_its_function(microqueue_database: Any) -> None:
    handled: list[int] = []
    tasks = Tasks()

    @tasks.task("count", every=3600, arguments={"n": 5})
    def count(n: int) -> None:
        handled.append(n)

    start(microqueue_database, tasks)
    Queue[Any](microqueue_database).schedules.trigger("count")
    start(microqueue_database, tasks)
    assert handled == [5]


def test_apps_that_share_a_queue_leave_each_other_alone(microqueue_database: Any) -> None:
    one, two = Tasks(app="one"), Tasks(app="two")
    one.task("a", every=60)(report)
    one.task("same", every=60)(report)
    two.task("b", every=60)(report)
    two.task("same", every=99)(report)
    start(microqueue_database, one)
    start(microqueue_database, two)
    start(microqueue_database, one)
    found = stored(microqueue_database)
    assert {name: one.app for name, one in found.items()} == {"a": "one", "b": "two", "same": "one"}
    assert found["same"].every == timedelta(seconds=60)


def test_app_that_has_a_name_and_no_function_left_removes_its_schedules(
    microqueue_database: Any,
) -> None:
    tasks = Tasks(app="billing")
    tasks.task(every=60)(report)
    start(microqueue_database, tasks)
    start(microqueue_database, Tasks())
    assert set(stored(microqueue_database)) == {"report"}
    start(microqueue_database, Tasks(app="billing"))
    assert stored(microqueue_database) == {}


def test_worker_with_a_single_function_of_an_app_declares_nothing(
    microqueue_database: Any,
) -> None:
    tasks = Tasks()
    tasks.task(every=60)(report)
    start(microqueue_database, tasks)
    single: Any = tasks.task("single", every=60)(cleanup)
    start(microqueue_database, single)
    assert set(stored(microqueue_database)) == {"report"}


def test_app_does_not_depend_on_the_order_of_functions() -> None:
    def helper() -> None: ...

    helper.__module__ = "other.helpers"
    for scheduled, plain in ((report, helper), (helper, report)):
        for first in (scheduled, plain):
            tasks = Tasks()
            second = plain if first is scheduled else scheduled
            options: Any = {scheduled: {"every": 60}, plain: {}}
            tasks.task(**options[first])(first)
            with pytest.raises(InvalidArgument) as caught:
                tasks.task(**options[second])(second)
            assert (caught.value.argument, caught.value.code) == ("app", "no_app")
            assert tasks.names() == [first.__name__]
            named = Tasks(app="both")
            for function in (first, second):
                named.task(**options[function])(function)
            app, declared = router_for(named).declarations() or ("", [])
            assert (app, [one.name for one in declared]) == ("both", [scheduled.__name__])
    without = Tasks()
    for function in (report, helper):
        without.task()(function)
    assert router_for(without).declarations() is None


@pytest.mark.parametrize(
    ("how", "expected"),
    [(["script.py"], "script"), (["-m", "package.inner"], "package"), (["-c"], "__main__")],
)
def test_app_of_a_program_is_its_package_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str], expected: str
) -> None:
    main = ModuleType("__main__")
    if how[0] == "script.py":
        main.__file__ = str(tmp_path / how[0])
    main.__spec__ = ModuleSpec(how[1], None) if how[0] == "-m" else None
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert package_of("__main__") == expected


def test_schedule_made_at_run_time_is_not_changed_by_code(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.schedules.put("cleanup", every=5)
    tasks = Tasks()
    tasks.task(schedule="0 3 * * *")(cleanup)
    start(microqueue_database, tasks)
    assert stored(microqueue_database)["cleanup"].source == "api"
    queue.schedules.remove("cleanup")
    start(microqueue_database, tasks)
    assert stored(microqueue_database)["cleanup"].source == "code"
    queue.schedules.put("cleanup", every=5)
    start(microqueue_database, Tasks())
    assert stored(microqueue_database)["cleanup"].source == "api", "put took it over"


def test_pause_outlives_a_deployment(microqueue_database: Any) -> None:
    tasks = Tasks()
    tasks.task(every=60)(report)
    start(microqueue_database, tasks)
    Queue[Any](microqueue_database).schedules.pause("report")
    start(microqueue_database, tasks)
    assert stored(microqueue_database)["report"].paused


def test_schedule_is_in_one_queue_however_many_pools_share_the_code(
    microqueue_database: Any,
) -> None:
    tasks = Tasks()
    tasks.task(every=60)(report)
    start(microqueue_database, tasks, "mail", "slow")
    start(microqueue_database, tasks, "slow")
    schedules = Queue[Any](microqueue_database).schedules
    assert [one.queue for one in schedules.list(all_queues=True)] == ["mail"]
    moved = Tasks()
    moved.task(every=60, queue="slow")(report)
    start(microqueue_database, moved, "mail")
    assert [one.queue for one in schedules.list(all_queues=True)] == ["slow"]


class Move:
    """A schedule with some state, and two workers whose code moves it to another queue."""

    def __init__(self, database: Any, *, paused: bool = False) -> None:
        self.clock = FakeClock()
        self.clock.advance(datetime(2036, 1, 1, tzinfo=UTC) - self.clock.now())
        queues = [Queue[Any](database, name, clock=self.clock) for name in ("a", "b")]
        self.cores = [core_of(queue) for queue in queues]
        schedules: Any = queues[0].schedules
        self.cores[0].run(self.begin(queue=None))
        self.clock.advance(60)
        assert Sweeper(queues[0]).fire_schedules() == 1
        schedules.trigger("report")
        if paused:
            schedules.pause("report")
        self.clock.advance(150)
        self.before = schedules.get("report")
        assert self.before.runs == 2

    def begin(self, worker: int = 0, queue: str | None = "slow") -> Operation[None]:
        tasks = Tasks(app="x")
        tasks.task(every=60, overlap="skip", catch_up="all", queue=queue)(report)
        app, declared = router_for(tasks).declarations() or ("", [])
        return declare(self.cores[worker], app, declared)

    def run_first(self, place: int, *, killed: bool) -> bool:
        """Let the other worker move it before a call of the first one; whether there was one."""
        calls = count()

        def doomed(_call: Call) -> bool:
            if next(calls) != place:
                return False
            self.cores[1].run(self.begin(1))
            return killed

        with suppress(Killed):
            self.cores[0].run(killed_before(self.begin(), doomed))
        return next(calls) > place


@pytest.mark.parametrize("paused", [False, True], ids=["active", "paused"])
@pytest.mark.parametrize("killed", [False, True], ids=["at once", "killed"])
def test_moved_schedule_keeps_its_state(
    microqueue_database: Any, *, paused: bool, killed: bool
) -> None:
    """Also if a worker is killed before any of its calls, or another one moves it at once."""
    for place in range(5):
        for name in microqueue_database.list_collection_names():
            microqueue_database[name].delete_many({})
        move = Move(microqueue_database, paused=paused)
        assert move.run_first(place, killed=killed)
        (after,) = stored(microqueue_database).values()
        assert after.queue == "slow"
        same = {"exclude": {"queue", "updated_at"}}
        assert after.model_dump(**same) == move.before.model_dump(**same), place


def test_run_that_a_killed_process_added_is_not_added_again_after_a_move(
    microqueue_database: Any,
) -> None:
    move = Move(microqueue_database)
    next_at = move.before.next_at
    task_id = run_id(move.before, next_at)
    microqueue_database.tasks.insert_one({"_id": task_id, "created_at": move.clock.now()})
    move.cores[0].run(move.begin())
    (after,) = stored(microqueue_database).values()
    assert (after.runs, after.next_at) == (3, next_at + timedelta(seconds=60))
    assert after.last_run.task_id == task_id


def test_malformed_schedule_is_declared_again_when_it_moves(microqueue_database: Any) -> None:
    move = Move(microqueue_database)
    microqueue_database.microqueue_schedules.update_one({}, {"$unset": {"catch_up": 1}})
    move.cores[0].run(move.begin())
    (after,) = stored(microqueue_database).values()
    assert (after.queue, after.runs) == ("slow", 0)
    assert after.next_at > move.before.next_at


def test_two_workers_that_declare_at_once_keep_one(microqueue_database: Any) -> None:
    tasks = Tasks(app="x")
    tasks.task(every=60)(report)
    app, declared = router_for(tasks).declarations() or ("", [])
    cores = [core_of(Queue[Any](microqueue_database, name)) for name in ("one", "two")]
    first = declare(cores[0], app, declared)
    reply: Any = None
    ran = False
    while True:
        try:
            call = first.send(reply)
        except StopIteration:
            break
        if not ran and call.method == "insert_one":
            ran = True
            cores[1].run(declare(cores[1], app, declared))

        def one_call(call: Any = call) -> Any:
            return (yield call)

        reply = cores[0].run(one_call())
    assert ran
    schedules = Queue[Any](microqueue_database).schedules
    assert [one.queue for one in schedules.list(all_queues=True)] == ["one"]


def edit(database: Any, name: str, edit: dict[str, Any]) -> None:
    database.microqueue_schedules.update_one({"name": name}, edit)


@pytest.mark.parametrize(
    "change",
    [{"$unset": {"catch_up": 1}}, {"$set": {"app": 5, "source": "code"}}, {"$set": {"last": 5}}],
    ids=str,
)
def test_malformed_schedule_of_another_owner_stops_no_worker(rig: Rig, change: Any) -> None:
    rig.queue.schedules.put("cleanup", every=30)
    edit(rig.database, "cleanup", change)
    before = rig.database.microqueue_schedules.find_one()
    handled: list[str] = []
    tasks = Tasks()
    tasks.task(every=60)(cleanup)
    tasks.task(every=60)(report)

    @tasks.task()
    def other() -> None:
        handled.append("other")

    rig.queue.enqueue({}, name="other")
    assert rig.run(tasks) == 1
    assert handled == ["other"]
    assert rig.database.microqueue_schedules.find_one({"name": "cleanup"}) == before
    assert stored(rig.database)["report"].source == "code"


@pytest.mark.parametrize(
    "change",
    [
        {"$unset": {"name": 1}},
        {"$unset": {"queue": 1}},
        {"$set": {"name": 5, "queue": ["x"]}},
        {"$set": {"starts_at": "today"}},
        {"$set": {"last": {"task_id": "x"}}},
        {"$set": {"next_at": "tomorrow"}},
        {"$set": {"skipped": 5}},
    ],
    ids=str,
)
@pytest.mark.parametrize("kept", [True, False], ids=["declared", "removed"])
def test_own_malformed_schedule_is_stored_again_or_removed(
    rig: Rig, change: Any, *, kept: bool
) -> None:
    tasks = Tasks()
    tasks.task(every=60)(report)
    tasks.task(every=60)(cleanup)
    rig.run(tasks)
    edit(rig.database, "report", change)
    rig.queue.enqueue({"days": 1}, name="cleanup")
    if not kept:
        tasks = Tasks()
        tasks.task(every=60)(cleanup)
    assert rig.run(tasks) == 1
    assert set(stored(rig.database)) == {"cleanup", *(["report"] if kept else [])}
    if kept:
        assert stored(rig.database)["report"].next_at is not None
    assert rig.database.microqueue_schedules.count_documents({}) == 1 + kept


def test_document_with_an_id_of_another_program_stops_no_worker(rig: Rig) -> None:
    tasks = Tasks()
    tasks.task(every=60)(report)
    rig.run(tasks)
    own = {"collection": "tasks", "source": "code", "app": "tests"}
    ids = [5, "x", {"a": 1}, '["tasks", ["a"], "b"]', '["other", "a", "report"]']
    rig.database.microqueue_schedules.insert_many([{"_id": one, **own} for one in ids])
    rig.queue.enqueue({}, name="report")
    assert rig.run(tasks) == 1
    assert rig.database.microqueue_schedules.count_documents({}) == 1 + len(ids)
    assert set(stored(rig.database)) == {"report"}


class Days(BaseModel):
    days: int


def test_declaration_that_cannot_be_stored_stops_no_other(
    microqueue_database: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = Tasks(app="x")
    tasks.task(every=60)(report)
    start(microqueue_database, tasks)
    changed = Tasks(app="x")
    changed.task(every=70)(report)
    changed.task(every=60, arguments={"days": 1})(cleanup)
    queue = Queue[Any](microqueue_database, payload_model=Days)
    Worker(queue, changed).run(burst=True)
    found = stored(microqueue_database)
    assert set(found) == {"report", "cleanup"}
    assert found["report"].every == timedelta(seconds=60), "as it was: its payload has no days"
    assert [one.levelname for one in caplog.records if "report" in one.getMessage()] == ["ERROR"]


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"schedule": "0 3 * * *", "every": 5}, "cron"),
        ({"every": 0.1}, "every"),
        ({"every": 5, "grace": 0}, "grace"),
        ({"timezone": "Europe/Berlin"}, "timezone"),
        ({"arguments": {"days": 1}}, "arguments"),
        ({"every": 5, "arguments": 3}, "arguments"),
        ({"every": 5, "queue": ""}, "name"),
        ({"schedule": "0 3 * * *", "timezone": "Nowhere"}, "timezone"),
        ({"every": 5, "catch_up": "x"}, "catch_up"),
    ],
)
def test_bad_schedule_is_rejected_where_it_is_written(options: Any, argument: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Tasks().task(**options)(cleanup)
    assert caught.value.argument == argument


def test_bad_expression_and_arguments_are_rejected_where_they_are_written() -> None:
    tasks = Tasks()
    with pytest.raises(InvalidCron) as caught:
        tasks.task(schedule="0 99 * * *")(cleanup)
    assert (caught.value.field, caught.value.position) == ("hour", 3)
    with pytest.raises(InvalidArgument):
        tasks.task(every=5, arguments={"weeks": 1})(cleanup)

    def needs(n: int) -> None: ...

    with pytest.raises(InvalidArgument):
        tasks.task(every=5)(needs)
    assert tasks.names() == []
