"""Schedules on a real server: many processes fire the same ones, and some are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from microqueue import Queue, QueueSettings, ServerUnavailable, Sweeper, Worker
from microqueue.clock import as_utc
from microqueue.core import core_of
from microqueue.operations.call import Call, Operation, Target
from microqueue.operations.indexes import index_names
from microqueue.schedules import Firer
from microqueue.sweeper import SweeperCore, wait_for_next_sweep
from microqueue.testing import FakeClock, memory_queue
from tests.integration.killing import Killed, Stopped, killed_before
from tests.integration.rig import Rig
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
START = datetime(2036, 1, 1, tzinfo=UTC)


def is_advance(call: Call) -> bool:
    return call.target is Target.SCHEDULES and call.method == "update_one"


def is_insert(call: Call) -> bool:
    return call.target is Target.TASKS and call.method == "insert_one"


def at_start(clock: FakeClock) -> FakeClock:
    clock.advance(START - clock.now())
    return clock


@pytest.fixture
def queue(microqueue_database: Any) -> Queue[Any]:
    return Queue(microqueue_database, clock=at_start(FakeClock()))


def runs(database: Any) -> Counter[Any]:
    return Counter(
        (task["headers"]["schedule"], as_utc(task["headers"]["scheduled_at"]))
        for task in database.tasks.find()
    )


@pytest.mark.parametrize("retention", [None, 0], ids=["kept", "deleted"])
@pytest.mark.parametrize("doomed", [is_advance, is_insert], ids=["advance", "insert"])
def test_run_is_added_once_if_its_process_is_killed_between_the_writes(
    microqueue_database: Any, doomed: Callable[[Call], bool], retention: int | None
) -> None:
    clock = at_start(FakeClock())
    settings = QueueSettings(retention=retention)
    queue: Queue[Any] = Queue(microqueue_database, clock=clock, settings=settings)
    queue.ensure_indexes()
    queue.schedules.put("often", every=60)
    clock.advance(60)
    core = core_of(queue)
    with pytest.raises(Killed):
        core.run(killed_before(Firer(core).fire(), doomed))
    task = queue.pop()
    assert (task is not None) is (doomed is is_advance)
    if task is not None:
        queue.mark_done(task)  # Without a retention, any other task would be gone now.
    assert queue.schedules.get("often").runs == 0  # type: ignore[union-attr]
    assert Sweeper(queue).run_once().fired == 1
    assert Sweeper(queue).run_once().fired == 0
    assert runs(microqueue_database) == {("often", START + timedelta(seconds=60)): 1}
    assert (queue.pop() is None) is (doomed is is_advance), "it ran once"


def kill_before_advance(queue: Queue[Any]) -> None:
    core = core_of(queue)
    inserted = False

    def doomed(call: Call) -> bool:
        nonlocal inserted
        inserted = inserted or is_insert(call)
        return inserted and is_advance(call)

    with pytest.raises(Killed):
        core.run(killed_before(Firer(core).fire(), doomed))


def test_overlap_is_seen_after_a_process_was_killed_between_the_writes(
    queue: Queue[Any], microqueue_database: Any
) -> None:
    """After an outage, the task that it added is not that of the first missed run."""
    clock: Any = core_of(queue).clock
    queue.schedules.put("often", every=60, overlap="skip")
    clock.advance(310)
    kill_before_advance(queue)
    clock.advance(60)
    assert Sweeper(queue).run_once().fired == 1
    assert runs(microqueue_database) == {("often", START + timedelta(minutes=5)): 1}
    found = queue.schedules.get("often")
    assert found is not None
    assert (found.runs, found.next_at) == (1, START + timedelta(minutes=7))
    assert found.last_run is not None
    assert (found.last_run.at, found.last_run.fired_at) == (
        START + timedelta(minutes=5),
        START + timedelta(seconds=310),
    )
    assert found.last_skipped is not None
    assert (found.last_skipped.at, found.last_skipped.reason) == (
        START + timedelta(minutes=6),
        "overlap",
    )


@pytest.mark.parametrize(
    ("options", "fired", "skipped"),
    [
        ({"catch_up": "skip"}, 2, 2),
        ({"catch_up": "latest", "grace": 10}, 1, 2),
        ({"catch_up": "latest"}, 2, 2),
        ({"catch_up": "all", "grace": 100}, 3, 2),
        ({"catch_up": "all"}, 5, None),
    ],
    ids=str,
)
def test_run_of_a_process_that_was_killed_is_not_counted_as_late(
    queue: Queue[Any], options: Any, fired: int, skipped: int | None
) -> None:
    clock: Any = core_of(queue).clock
    queue.schedules.put("often", every=60, **options)
    clock.advance(61)
    kill_before_advance(queue)
    clock.advance(4 * 60 - 20)
    if options["catch_up"] == "all":
        clock.advance(20)
    assert Sweeper(queue).run_once().fired == fired
    found = queue.schedules.get("often")
    assert found is not None
    assert found.runs == fired
    at = found.last_skipped and found.last_skipped.at
    assert at == (None if skipped is None else START + timedelta(minutes=skipped))
    assert found.last_run is not None
    if fired == 1:
        assert found.last_run.at == START + timedelta(minutes=1)


@pytest.mark.parametrize("dead_letters", ["status", "collection"])
@pytest.mark.parametrize("end", ["done", "failed", "replayed"])
def test_process_that_stalled_before_its_insert_adds_nothing_later(
    microqueue_database: Any, end: str, dead_letters: Any
) -> None:
    clock = at_start(FakeClock())
    settings = QueueSettings(retention=0, dead_letters=dead_letters)
    queue: Queue[Any] = Queue(microqueue_database, clock=clock, settings=settings)
    queue.ensure_indexes()
    queue.schedules.put("often", every=60)
    clock.advance(60)
    core = core_of(queue)

    def stalling(operation: Operation[Any]) -> Operation[Any]:
        reply: Any = None
        while True:
            try:
                call = operation.send(reply)
            except StopIteration as stop:
                return stop.value
            if is_insert(call):  # Meanwhile the run is added, done or failed, and swept.
                assert Sweeper(queue).run_once().fired == 1
                task = queue.pop()
                assert task is not None
                if end == "done":
                    queue.mark_done(task)
                else:
                    queue.mark_failure(task, "no use")
                if end == "replayed":
                    assert queue.dead_letters.replay(task.id).replayed == 1
                    queue.mark_done(queue.pop())  # type: ignore[arg-type]
                Sweeper(queue).run_once()
            try:
                reply = yield call
            except Exception as exc:  # noqa: BLE001 (the operation decides)
                call = operation.throw(exc)
                reply = yield call

    firing = core.run(stalling(Firer(core).fire()))
    assert (firing.added, firing.next_at) == (0, START + timedelta(seconds=120))
    assert queue.pop() is None
    assert queue.schedules.get("often").runs == 1  # type: ignore[union-attr]
    clock.advance(3601)  # The dead letter moves when it need not prove the run any more.
    Sweeper(queue, jobs=["move_dead_letters"]).run_once()
    moved = microqueue_database.tasks_dlq.count_documents({"status": "failed"})
    assert moved == (1 if (end, dead_letters) == ("failed", "collection") else 0)


class Race:
    """A schedule with ``overlap="skip"``, and processes that fire it and stall."""

    def __init__(self, queue: Queue[Any]) -> None:
        self.queue = queue
        self.core = core_of(queue)
        self.clock: Any = self.core.clock
        self.schedules = queue.schedules
        self.schedules.put("often", every=60, overlap="skip")

    def stop(self, chosen: Callable[[Call], bool]) -> Stopped:
        return Stopped(self.core, Firer(self.core).fire(), chosen)

    def fire(self) -> int:
        return self.core.run(Firer(self.core).fire()).added

    def finish_task(self) -> None:
        self.queue.mark_done(self.queue.pop())  # type: ignore[arg-type]

    def check(self, instants: list[datetime]) -> None:
        """Check that all runs are noted once, and that the last one, which waits, is seen."""
        found = self.schedules.get("often")
        (document,) = self.core.collections.schedules.find()
        ids = {task.id for task in self.queue.peek(100, status="pending")}
        assert ids <= set(document["recent"])
        assert len(document["recent"]) == len(set(document["recent"]))
        assert found is not None
        assert found.runs == len(instants)
        assert found.last_run is not None
        assert found.last_run.at == instants[-1]
        if found.paused:
            self.schedules.resume("often")
        self.clock.advance(60)
        assert self.fire() == 0, "the last task is unfinished"


MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize("place", [is_insert, is_advance], ids=["insert", "advance"])
def test_run_that_another_process_skipped_is_noted_if_it_was_added(
    queue: Queue[Any], place: Callable[[Call], bool]
) -> None:
    race = Race(queue)
    race.clock.advance(60)
    assert race.fire() == 1
    race.clock.advance(60)
    skipping = race.stop(is_advance)  # The first task is unfinished.
    race.finish_task()
    adding = race.stop(place)
    assert skipping.finish().added == 0
    assert adding.finish().added == 1
    race.check([START + MINUTE, START + 2 * MINUTE])


@pytest.mark.parametrize("change", ["pause", "other timing", "paused by put"])
def test_run_is_noted_if_its_schedule_was_changed_after_the_insert(
    queue: Queue[Any], change: str
) -> None:
    race = Race(queue)
    race.clock.advance(60)
    adding = race.stop(is_advance)
    if change == "pause":
        race.schedules.pause("often")
    else:
        paused = change == "paused by put"
        race.schedules.put("often", every=60 if paused else 30, overlap="skip", paused=paused)
    assert adding.finish().added == 1
    race.check([START + MINUTE])


def test_run_is_noted_once_if_several_processes_added_it(queue: Queue[Any]) -> None:
    race = Race(queue)
    race.clock.advance(60)
    stalled = [race.stop(is_advance) for _ in range(3)]
    assert [one.finish().added for one in stalled] == [1, 0, 0]
    race.check([START + MINUTE])


def test_run_is_noted_once_if_its_schedule_was_put_again_after_the_insert(
    queue: Queue[Any],
) -> None:
    race = Race(queue)
    race.clock.advance(60)
    adding = race.stop(is_advance)
    race.schedules.put("often", every=60, overlap="skip", payload={"n": 2})
    assert adding.finish().added == 0
    assert race.fire() == 1
    race.check([START + MINUTE])


def test_run_is_noted_once_if_many_others_were_noted_since(queue: Queue[Any]) -> None:
    race = Race(queue)
    race.clock.advance(60)
    adding = race.stop(is_advance)
    for number in range(25):
        assert race.fire() == 1
        if number < 24:
            race.finish_task()
            race.clock.advance(60)
    assert adding.finish().added == 0
    race.check([START + n * MINUTE for n in range(1, 26)])


def test_run_that_is_noted_late_is_not_the_last_one(queue: Queue[Any]) -> None:
    race = Race(queue)
    race.clock.advance(60)
    adding = race.stop(is_advance)
    race.clock.advance(10)
    race.schedules.trigger("often")
    race.schedules.pause("often")
    assert adding.finish().added == 1
    race.check([START + MINUTE, START + MINUTE + timedelta(seconds=10)])


def test_run_of_a_killed_process_is_noted_if_its_schedule_is_paused(queue: Queue[Any]) -> None:
    race = Race(queue)
    race.clock.advance(60)
    kill_before_advance(queue)
    race.clock.advance(90)
    passing = race.stop(is_advance)  # It passes over the first run, and has found its task.
    race.schedules.pause("often")
    assert passing.finish().added == 1
    race.check([START + MINUTE])


def test_twenty_that_fire_and_are_killed_add_each_run_once(microqueue_database: Any) -> None:
    clock = at_start(FakeClock())
    names = [f"s{n}" for n in range(6)]
    queue: Queue[Any] = Queue(microqueue_database, clock=clock)
    for place, name in enumerate(names):
        queue.schedules.put(name, every=60 + place, catch_up="all")
    ended = threading.Event()
    errors: list[BaseException] = []
    kills = Counter[str]()

    def fire(seed: int) -> None:
        rng = random.Random(seed)
        own: Queue[Any] = Queue(microqueue_database, f"q{seed}", clock=clock)
        core = core_of(own)
        firer = Firer(core)
        while not ended.is_set():
            doomed = rng.choice([is_advance, is_insert, None])
            operation = firer.fire()
            try:
                core.run(operation if doomed is None else killed_before(operation, doomed))
            except Killed:
                kills[doomed.__name__ if doomed else ""] += 1
            except BaseException as exc:  # noqa: BLE001 (the test reports it)
                errors.append(exc)
                return

    threads = [threading.Thread(target=fire, args=[seed]) for seed in range(20)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            clock.advance(60)
            wait_for(
                lambda: (
                    not microqueue_database.microqueue_schedules.find_one(
                        {"next_at": {"$lte": clock.now()}}
                    )
                )
            )
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert kills["is_advance"] > 0
    assert kills["is_insert"] > 0
    expected = {
        (name, START + n * timedelta(seconds=60 + place))
        for place, name in enumerate(names)
        for n in range(1, 600 // (60 + place) + 1)
    }
    assert runs(microqueue_database) == dict.fromkeys(expected, 1)
    assert sum(one.runs for one in queue.schedules.list()) == len(expected)


@pytest.mark.timeout(700)
def test_processes_that_are_killed_between_their_writes_add_each_run_once(
    database_uri: str, microqueue_database: Any
) -> None:
    """Workers of both kinds and sweepers; each dies after it has inserted the task of a run."""
    queue: Queue[Any] = Queue(microqueue_database)
    queue.ensure_indexes()
    for name in ("a", "b", "c", "d"):
        queue.schedules.put(name, every=1, catch_up="all")
    program = [sys.executable, "-m", "tests.integration.firing", database_uri, "20", "2"]
    while min(one.runs for one in queue.schedules.list()) < 3:  # A fast machine needs another one.
        process = subprocess.Popen(program, cwd=ROOT, start_new_session=True)
        try:
            assert process.wait(300) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    schedules = [queue.schedules.pause(one.name) for one in queue.schedules.list()]
    found = runs(microqueue_database)
    assert set(found.values()) == {1}
    for schedule in schedules:
        instants = sorted(at for name, at in found if name == schedule.name)
        assert instants[0] - schedule.starts_at == timedelta(seconds=1)
        steps = {later - at for at, later in pairwise(instants)}
        assert steps == {timedelta(seconds=1)}, "none was missed"
        assert 0 <= len(instants) - schedule.runs <= 1, "the last one may not be noted"


def test_idle_worker_fires_in_time(rig: Rig) -> None:
    handled: list[Any] = []

    def handler(payload: Any) -> None:
        handled.append(payload)

    rig.queue.schedules.put("often", every=1, payload={"n": 1})
    thread = rig.start(handler, poll_interval=3600)
    try:
        wait_for(lambda: len(handled) >= 3)
        # The task of a run is there before the run is noted.
        wait_for(lambda: rig.queue.schedules.get("often").runs >= 3)  # type: ignore[union-attr]
    finally:
        rig.stop()
        thread.join()
    found = rig.queue.schedules.get("often")
    assert found is not None
    assert found.runs >= 3


def test_schedule_that_cannot_be_fired_delays_no_other(rig: Rig) -> None:
    rig.queue.schedules.put("bad", every=1)
    rig.queue.schedules.put("good", every=1)
    rig.database.microqueue_schedules.update_one({"name": "bad"}, {"$unset": {"catch_up": 1}})
    thread = rig.start(lambda payload: None, poll_interval=3600)
    try:
        wait_for(lambda: rig.queue.schedules.get("good").runs >= 3)  # type: ignore[union-attr]
    finally:
        rig.stop()
        thread.join()


def test_burst_leaves_out_what_comes_due_while_it_runs(queue: Queue[Any]) -> None:
    clock: Any = core_of(queue).clock
    queue.schedules.put("often", every=60, catch_up="all")
    clock.advance(190)

    def handler(_payload: Any) -> None:
        clock.advance(60)
        if clock.now() > START + timedelta(hours=1):
            worker.stop()  # It would not end.

    worker = Worker(queue, handler)
    assert worker.run(burst=True) == 3
    assert worker.run(burst=True) == 3, "of the next burst"


def test_full_worker_fires_too(rig: Rig) -> None:
    """No other process may be there, and other queues wait for the task."""
    started, ended = threading.Event(), threading.Event()

    def handler(_payload: Any) -> None:
        started.set()
        ended.wait()

    rig.queue.enqueue({})
    rig.queue.schedules.put("often", every=1)
    thread = rig.start(handler, concurrency=1, prefetch=1)
    try:
        wait_for(lambda: rig.queue.schedules.get("often").runs >= 2)  # type: ignore[union-attr]
        assert started.wait(40)
    finally:
        ended.set()
        rig.stop()
        thread.join()


def test_sweeper_fires_between_its_sweeps(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    reports: list[Any] = []
    sweeper = Sweeper(queue, on_report=reports.append)
    queue.schedules.put("often", every=1)
    thread = threading.Thread(target=sweeper.run_forever, kwargs={"every": 3600})
    thread.start()
    try:
        wait_for(lambda: queue.schedules.get("often").runs >= 2)  # type: ignore[union-attr]
    finally:
        sweeper.stop()
        thread.join()
    assert len(reports) == 1


def test_command_that_sweeps_again_and_again_fires_in_between_and_reports_it(
    microqueue_database: Any,
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    sweeper, stop = Sweeper(queue, jobs=["fire_schedules"]), threading.Event()
    queue.schedules.put("often", every=1)
    reports, errors = [sweeper.run_once()], list[Exception]()
    thread = threading.Thread(
        target=wait_for_next_sweep,
        args=(sweeper, 3600, stop),
        kwargs={"on_error": errors.append},
    )
    thread.start()
    try:
        wait_for(lambda: queue.schedules.get("often").runs >= 2)  # type: ignore[union-attr]
    finally:
        stop.set()
        thread.join()
    assert errors == []
    queue.schedules.pause("often")
    reports.append(sweeper.run_once())
    reports.append(sweeper.run_once())
    added = queue.schedules.get("often").runs  # type: ignore[union-attr]
    assert [one.fired for one in reports] == [added - reports[1].fired, reports[1].fired, 0]
    assert reports[1].fired >= 1


def test_schedules_that_cannot_be_fired_between_two_sweeps_wait_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def next_due(*_: Any) -> Any:
        raise ServerUnavailable("gone")

    waits: list[float] = []
    errors: list[Exception] = []

    def wait() -> None:
        wait_for_next_sweep(
            sweeper, 60, threading.Event(), on_error=errors.append, wait=waits.append
        )

    sweeper = Sweeper(memory_queue())
    sweeper.run_once()
    monkeypatch.setattr("microqueue.operations.schedules.next_due", next_due)
    wait()
    assert [str(one) for one in errors] == ["gone"]
    monkeypatch.setattr(SweeperCore, "acquire", next_due)
    with pytest.raises(ServerUnavailable):
        sweeper.run_once()
    wait()  # The sweep had the error already.
    assert len(errors) == 1
    assert [30 < one <= 60 for one in waits] == [True, True]


def test_poll_examines_one_key_for_schedules(queue: Queue[Any], microqueue_database: Any) -> None:
    for n in range(50):
        queue.schedules.put(f"s{n}", every=3600 + n, paused=n % 2 == 0)
    chosen = {"collection": "tasks", "next_at": {"$type": "date"}}
    cursor = microqueue_database.microqueue_schedules.find(chosen).sort("next_at", 1).limit(1)
    plan = cursor.explain()
    assert index_names(plan["queryPlanner"]["winningPlan"]) == ["due"]
    assert plan["executionStats"]["totalKeysExamined"] == 1
    assert plan["executionStats"]["totalDocsExamined"] == 1
