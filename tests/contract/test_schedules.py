"""``queue.schedules``: put, read, change and fire schedules, with a clock that the test moves."""

from __future__ import annotations

import inspect
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from microqueue import (
    BackoffPolicy,
    InvalidArgument,
    InvalidCron,
    InvalidPayload,
    NewTask,
    OperationFailed,
    ScheduleNotFound,
)
from microqueue.core import core_of
from microqueue.operations.call import Call, Target
from microqueue.schedule import jitter_at
from microqueue.schedules import Firer
from tests.contract.conftest import Harness
from tests.rejection import rejecting

NOON = datetime(2036, 3, 10, 12, 0, tzinfo=UTC)


@pytest.fixture
def at_noon(harness: Harness) -> Harness:
    harness.clock.advance(NOON - harness.clock.now())
    return harness


async def fire(harness: Harness, queue: Any) -> int:
    fired: int = await harness.sweeper(queue).fire_schedules()
    return fired


async def tasks_of(queue: Any) -> list[Any]:
    return sorted(await queue.peek(1000), key=lambda task: str(task.id))


async def test_put_returns_the_schedule_with_its_next_run(at_noon: Harness) -> None:
    queue = at_noon.queue("mail")
    put = await queue.schedules.put(
        "nightly",
        cron="0 3 * * *",
        payload={"n": 1},
        timezone="Europe/Berlin",
        catch_up="all",
        grace=timedelta(hours=2),
        overlap="skip",
        jitter=30,
        priority=7,
        max_attempts=4,
        backoff=BackoffPolicy(base_sec=1),
        visibility_timeout=90,
        expires_in=3600,
        headers={"tenant": "a"},
    )
    assert put == await queue.schedules.get("nightly")
    assert (put.name, put.queue, put.cron, put.every) == ("nightly", "mail", "0 3 * * *", None)
    assert put.next_at == datetime(2036, 3, 11, 2, 0, tzinfo=UTC)
    assert (put.catch_up, put.grace, put.overlap) == ("all", timedelta(hours=2), "skip")
    assert (put.jitter, put.timezone) == (timedelta(seconds=30), "Europe/Berlin")
    assert (put.priority, put.max_attempts, put.backoff.base_sec) == (7, 4, 1)
    assert (put.source, put.app, put.paused, put.runs, put.last_run) == (
        "api",
        None,
        False,
        0,
        None,
    )
    assert await queue.schedules.list() == [put]
    assert await queue.schedules.get("other") is None


async def test_due_schedule_adds_one_task_with_its_options(at_noon: Harness) -> None:
    queue = at_noon.queue("mail", max_attempts=3)
    options: Any = {"priority": 7, "visibility_timeout": 90, "headers": {"tenant": "a"}}
    await queue.schedules.put("often", every=60, payload={"n": 1}, **options)
    assert await fire(at_noon, queue) == 0
    at_noon.clock.advance(61)
    other = at_noon.queue("other")  # Whoever sweeps fires, with whatever settings.
    assert await fire(at_noon, other) == 1
    assert await fire(at_noon, queue) == 0
    (task,) = await tasks_of(queue)
    instant = NOON + timedelta(seconds=60)
    assert task.id == "schedule:mail:often:2036-03-10T12:01:00Z"
    assert (task.payload, task.priority, task.max_attempts) == ({"n": 1}, 7, 3)
    assert task.headers == {"tenant": "a", "schedule": "often", "scheduled_at": instant}
    assert task.visibility_timeout_sec == 90
    found = await queue.schedules.get("often")
    assert (found.runs, found.next_at) == (1, NOON + timedelta(seconds=120))
    last = found.last_run
    assert (last.at, last.task_id, last.late_sec, last.status) == (instant, task.id, 1, "pending")
    assert (await queue.pop()).id == task.id


@pytest.mark.parametrize(
    ("options", "minutes", "skipped"),
    [
        ({"catch_up": "latest"}, [60], 5),
        ({"catch_up": "all"}, list(range(5, 65, 5)), None),
        ({"catch_up": "skip"}, [], 5),
        ({"catch_up": "latest", "grace": 60}, [], 5),
        ({"catch_up": "all", "grace": 20 * 60}, [45, 50, 55, 60], 5),
        ({"catch_up": "skip", "grace": 10 * 60}, [55, 60], 5),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
async def test_outage_of_an_hour_is_caught_up(
    at_noon: Harness, options: Any, minutes: list[int], skipped: int | None
) -> None:
    queue = at_noon.queue()
    await queue.schedules.put("five", every=300, **options)
    at_noon.clock.advance(62 * 60)
    assert await fire(at_noon, queue) == len(minutes)
    assert await fire(at_noon, queue) == 0
    added = [task.headers["scheduled_at"] for task in await tasks_of(queue)]
    assert added == [NOON + timedelta(minutes=one) for one in minutes]
    found = await queue.schedules.get("five")
    assert found.next_at == NOON + timedelta(minutes=65)
    at = found.last_skipped and found.last_skipped.at
    assert at == (None if skipped is None else NOON + timedelta(minutes=skipped))
    at_noon.clock.advance(4 * 60)
    assert await fire(at_noon, queue) == 1, "on time again"


HALF_HOUR, DAY = timedelta(minutes=30), timedelta(days=1)
GAP, FOLD = "2036-03-30T00:00", "2036-10-26T00:00"
"""In Berlin, the clock goes forward and back an hour later."""
BERLIN, NIGHTLY, HALF_HOURS = "Europe/Berlin", "30 2 * * *", "*/30 * * * *"


@pytest.mark.one_driver
@pytest.mark.parametrize(
    ("expression", "zone", "start", "step", "steps", "expected"),
    [
        (NIGHTLY, BERLIN, GAP, HALF_HOUR, 50, ["03-30T01:00", "03-31T00:30"]),
        (HALF_HOURS, BERLIN, GAP, HALF_HOUR, 3, ["03-30T00:30", "03-30T01:00", "03-30T01:30"]),
        (NIGHTLY, BERLIN, FOLD, HALF_HOUR, 52, ["10-26T00:30", "10-27T01:30"]),
        ("30 2-3 * * *", BERLIN, FOLD, HALF_HOUR, 6, ["10-26T00:30", "10-26T02:30"]),
        (HALF_HOURS, BERLIN, FOLD, HALF_HOUR, 3, ["10-26T00:30", "10-26T01:00", "10-26T01:30"]),
        ("0 12 29 2 *", "UTC", "2036-02-20T00:00", DAY, 30, ["02-29T12:00"]),
        ("0 12 29 2 *", "UTC", "2037-02-20T00:00", DAY, 30, []),
        ("0 12 29 * *", "UTC", "2037-02-20T00:00", DAY, 40, ["03-29T12:00"]),
        ("0 0 31 * *", "UTC", "2036-01-30T12:00", DAY, 92, ["01-31T00:00", "03-31T00:00"]),
        ("0 0 L * *", "UTC", "2036-01-30T12:00", DAY, 62,
         ["01-31T00:00", "02-29T00:00", "03-31T00:00"]),
    ],
)  # fmt: skip
async def test_cron_schedule_fires_at_each_instant_as_the_clock_moves(
    harness: Harness,
    expression: str,
    zone: str,
    start: str,
    step: timedelta,
    steps: int,
    expected: list[str],
) -> None:
    begun = datetime.fromisoformat(start).replace(tzinfo=UTC)
    harness.clock.advance(begun - harness.clock.now())
    queue = harness.queue("mail")
    await queue.schedules.put("c", cron=expression, timezone=zone, catch_up="skip", grace=DAY)
    sweeper = harness.sweeper(queue)
    fired = 0
    for _ in range(steps):
        harness.clock.advance(step)
        fired += await sweeper.fire_schedules()
    ids = [task.id for task in await tasks_of(queue)]
    assert ids == [f"schedule:mail:c:{start[:4]}-{one}:00Z" for one in expected]
    assert fired == len(expected)


@pytest.mark.one_driver
@pytest.mark.parametrize(
    ("expression", "options", "expected"),
    [
        (HALF_HOURS, {"catch_up": "latest"}, ["01:30"]),
        (HALF_HOURS, {"catch_up": "all"}, ["01:00", "01:30"]),
        (HALF_HOURS, {"catch_up": "skip"}, []),
        (HALF_HOURS, {"catch_up": "skip", "grace": 900}, ["01:30"]),
        (NIGHTLY, {"catch_up": "latest"}, ["01:00"]),
        (NIGHTLY, {"catch_up": "all", "grace": 3000}, ["01:00"]),
        (NIGHTLY, {"catch_up": "latest", "grace": 900}, []),
        (NIGHTLY, {"catch_up": "skip"}, []),
    ],
    ids=str,
)
async def test_outage_of_an_hour_across_the_gap(
    harness: Harness, expression: str, options: Any, expected: list[str]
) -> None:
    begun = datetime.fromisoformat(GAP).replace(tzinfo=UTC)
    harness.clock.advance(begun + timedelta(minutes=40) - harness.clock.now())
    queue = harness.queue("mail")
    await queue.schedules.put("c", cron=expression, timezone=BERLIN, **options)
    harness.clock.advance(3600)
    assert await fire(harness, queue) == len(expected)
    ids = [task.id for task in await tasks_of(queue)]
    assert ids == [f"schedule:mail:c:2036-03-30T{one}:00Z" for one in expected]
    found = await queue.schedules.get("c")
    assert (found.last_skipped is None) is ("01:00" in expected)
    assert found.next_at > harness.clock.now()


async def test_very_long_outage_is_caught_up_in_batches(at_noon: Harness) -> None:
    queue = at_noon.queue()
    await queue.schedules.put("second", every=1, catch_up="all")
    at_noon.clock.advance(250.5)
    assert [await fire(at_noon, queue) for _ in range(4)] == [100, 100, 50, 0]
    assert len({task.id for task in await tasks_of(queue)}) == 250


async def test_overlap_skip_leaves_out_runs_while_a_task_is_unfinished(at_noon: Harness) -> None:
    queue = at_noon.queue()
    await queue.schedules.put("slow", every=60, overlap="skip")
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 1
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 0, "it is pending"
    task = await queue.pop()
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 0, "it is running"
    found = await queue.schedules.get("slow")
    assert found.last_skipped.reason == "overlap"
    assert found.last_skipped.at == NOON + timedelta(minutes=3)
    assert found.next_at == NOON + timedelta(minutes=4)
    await queue.mark_done(task)
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 1
    await queue.schedules.put("slow", every=60, overlap="allow")
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 1


async def test_overlap_skip_counts_triggered_tasks_too(at_noon: Harness) -> None:
    queue = at_noon.queue()
    await queue.schedules.put("slow", every=60, overlap="skip")
    task = await queue.schedules.trigger("slow")
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 0
    await queue.mark_done(await queue.pop())
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 1
    assert task.id != (await queue.pop()).id


async def test_overlap_skip_sees_a_long_run_behind_many_finished_ones(at_noon: Harness) -> None:
    queue = at_noon.queue(visibility_timeout=36_000)
    await queue.schedules.put("slow", every=60, overlap="skip")
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 1
    long = await queue.pop()
    for _ in range(3):
        for _ in range(25):
            await queue.schedules.trigger("slow")
            await queue.mark_done(await queue.pop())
        at_noon.clock.advance(60)
        assert await fire(at_noon, queue) == 0, "the first is running"
    (stored,) = await at_noon.stored("microqueue_schedules")
    assert long.id in stored["recent"]
    assert len(stored["recent"]) <= 60, "finished tasks are forgotten"
    await queue.mark_done(long)
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 1
    assert (await queue.schedules.get("slow")).runs == 77


async def test_overlap_skip_sees_a_long_run_behind_many_unfinished_ones(at_noon: Harness) -> None:
    queue = at_noon.queue(visibility_timeout=36_000)
    await queue.schedules.put("slow", every=60, overlap="skip")
    for _ in range(45):
        await queue.schedules.trigger("slow")
    long, *others = [await queue.pop() for _ in range(45)]
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 0
    await queue.mark_done_many(others)
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 0, "the first is running"
    await queue.mark_done(long)
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 1


@pytest.mark.one_driver
async def test_finished_tasks_are_forgotten_once_for_all_missed_runs(at_noon: Harness) -> None:
    queue = at_noon.queue()
    await queue.schedules.put("slow", every=60, overlap="skip", catch_up="all")
    for _ in range(39):
        await queue.schedules.trigger("slow")
    await queue.mark_done_many([await queue.pop() for _ in range(39)])
    at_noon.clock.advance(600)
    sweeper = at_noon.sweeper(queue)
    calls: list[Call] = []
    core_of(sweeper)._driver.before_call = calls.append  # noqa: SLF001 (its fault point)
    assert await sweeper.fire_schedules() == 1
    updates = [one.arguments[1] for one in calls if one.method == "update_one"]
    assert sum("$pull" in update for update in updates) == 1
    (stored,) = await at_noon.stored("microqueue_schedules")
    assert len(stored["recent"]) == 20


@pytest.mark.one_driver
async def test_list_does_not_read_the_recent_tasks(at_noon: Harness) -> None:
    queue = at_noon.queue()
    put = await queue.schedules.put("slow", every=60, overlap="skip")
    calls: list[Call] = []
    core_of(queue)._driver.before_call = calls.append  # noqa: SLF001 (its fault point)
    assert await queue.schedules.list() == [put]
    (found,) = (one for one in calls if one.target is Target.SCHEDULES)
    assert found.arguments[1] == {"recent": 0}


@pytest.mark.one_driver
async def test_overlap_allow_remembers_only_the_last_tasks(at_noon: Harness) -> None:
    queue = at_noon.queue()
    await queue.schedules.put("often", every=60)
    for _ in range(25):
        await queue.schedules.trigger("often")
    (stored,) = await at_noon.stored("microqueue_schedules")
    assert len(stored["recent"]) == 20


async def test_jitter_delays_delivery_by_the_same_for_everyone(at_noon: Harness) -> None:
    queue = at_noon.queue()
    put = await queue.schedules.put("spread", every=60, jitter=30, catch_up="all")
    runs = [NOON + timedelta(seconds=60 * n) for n in range(1, 6)]
    delays = [jitter_at(put, run).total_seconds() for run in runs]
    assert len(set(delays)) == 5
    assert all(0 <= one < 30 for one in delays)
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 1
    (task,) = await tasks_of(queue)
    assert 0 <= (task.next_retry_at - runs[0]).total_seconds() - delays[0] <= 0.001
    assert await queue.pop() is None
    at_noon.clock.advance(31)
    assert await queue.pop() is not None


async def test_put_again_keeps_the_next_run_unless_the_timing_changes(at_noon: Harness) -> None:
    queue = at_noon.queue()
    first = await queue.schedules.put("hourly", every=3600, payload={"n": 1})
    at_noon.clock.advance(1800)
    same = await queue.schedules.put("hourly", every=3600, payload={"n": 1})
    assert same == first, "nothing was written"
    changed = await queue.schedules.put("hourly", every=3600, payload={"n": 2})
    assert (changed.next_at, changed.created_at) == (first.next_at, first.created_at)
    assert changed.payload == {"n": 2}
    sooner = await queue.schedules.put("hourly", every=60)
    assert sooner.next_at == NOON + timedelta(seconds=1860)
    cron = await queue.schedules.put("hourly", cron="0 * * * *")
    assert cron.next_at == NOON + timedelta(hours=1)
    assert (cron.every, cron.created_at) == (None, first.created_at)
    zone = await queue.schedules.put("hourly", cron="0 * * * *", timezone="Asia/Kathmandu")
    assert zone.next_at == NOON + timedelta(minutes=75)


async def test_pause_and_resume(at_noon: Harness) -> None:
    queue = at_noon.queue()
    await queue.schedules.put("often", every=60, catch_up="all")
    for _ in range(2):
        paused = await queue.schedules.pause("often")
        assert (paused.paused, paused.next_at) == (True, None)
    again = await queue.schedules.put("often", every=60, payload={"n": 1}, catch_up="all")
    assert (again.paused, again.next_at) == (True, None), "a deployment does not resume it"
    at_noon.clock.advance(600)
    assert await fire(at_noon, queue) == 0
    for _ in range(2):
        resumed = await queue.schedules.resume("often")
        assert (resumed.paused, resumed.next_at) == (False, NOON + timedelta(seconds=660))
    assert await fire(at_noon, queue) == 0, "what was missed is left out"
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 1
    put = await queue.schedules.put("often", every=60, paused=True)
    assert (put.paused, put.next_at) == (True, None)
    put = await queue.schedules.put("often", every=60, paused=False)
    assert (put.paused, put.next_at) == (False, NOON + timedelta(seconds=720))


async def test_trigger_runs_a_schedule_now_and_leaves_the_next_run(at_noon: Harness) -> None:
    queue = at_noon.queue()
    put = await queue.schedules.put("often", every=60, payload={"n": 1}, paused=True)
    tasks = [await queue.schedules.trigger("often") for _ in range(2)]
    assert len({task.id for task in tasks}) == 2
    assert tasks[0].payload == {"n": 1}
    assert tasks[0].headers["schedule"] == "often"
    found = await queue.schedules.get("often")
    assert (found.runs, found.next_at, found.paused) == (2, put.next_at, True)
    assert (found.last_run.task_id, found.last_run.triggered) == (tasks[1].id, True)
    await queue.mark_done(await queue.pop())
    assert (await queue.schedules.get("often")).last_run.status in {"done", "pending"}


async def test_removed_schedule_runs_no_more(at_noon: Harness) -> None:
    queue = at_noon.queue()
    await queue.schedules.put("often", every=60)
    at_noon.clock.advance(60)
    await fire(at_noon, queue)
    assert await queue.schedules.remove("often") is True
    assert await queue.schedules.remove("often") is False
    at_noon.clock.advance(600)
    assert await fire(at_noon, queue) == 0
    assert len(await tasks_of(queue)) == 1


async def test_schedules_of_queues_are_apart(at_noon: Harness) -> None:
    one, two = at_noon.queue("one"), at_noon.queue("two")
    await one.schedules.put("same", every=60)
    await two.schedules.put("same", every=60)
    await two.schedules.put("a:b", every=60)
    assert [s.queue for s in await one.schedules.list()] == ["one"]
    everywhere = await one.schedules.list(all_queues=True)
    assert [(s.queue, s.name) for s in everywhere] == [
        ("one", "same"), ("two", "a:b"), ("two", "same")
    ]  # fmt: skip
    at_noon.clock.advance(60)
    assert await at_noon.sweeper(one, queues=["two"]).fire_schedules() == 2
    assert await fire(at_noon, one) == 1
    assert {task.queue for task in await one.peek(9, all_queues=True)} == {"one", "two"}


async def test_next_runs_are_in_the_zone_of_the_schedule(at_noon: Harness) -> None:
    queue = at_noon.queue()
    await queue.schedules.put("nightly", cron="30 2 * * *", timezone="Europe/Berlin", paused=True)
    runs = await queue.schedules.next_runs("nightly", 3)
    assert [run.isoformat() for run in runs] == [
        "2036-03-11T02:30:00+01:00", "2036-03-12T02:30:00+01:00", "2036-03-13T02:30:00+01:00"
    ]  # fmt: skip
    assert len(await queue.schedules.next_runs("nightly")) == 5


@pytest.mark.one_driver
@pytest.mark.parametrize(
    "timing", [{"every": timedelta(days=36_500)}, {"cron": "0 0 29 2 */6"}], ids=str
)
async def test_runs_end_with_the_last_year(at_noon: Harness, timing: Any) -> None:
    queue = at_noon.queue()
    await queue.schedules.put("rare", **timing)
    runs = await queue.schedules.next_runs("rare", 1000)
    assert 70 <= len(runs) < 1000
    assert runs[-1].year > 9900


@pytest.mark.one_driver
@pytest.mark.parametrize("task", ["", "x" * 1000, 5])
async def test_wrong_name_of_the_task_names_the_argument(harness: Harness, task: Any) -> None:
    with rejecting("task", task):
        await harness.queue().schedules.put("often", every=60, task=task)


async def test_new_task_as_payload_has_the_options(at_noon: Harness) -> None:
    queue = at_noon.queue()
    new = NewTask(payload={"n": 3}, priority=9, headers={"task": "resize"})
    put = await queue.schedules.put("often", every=60, payload=new)
    assert (put.payload, put.priority, put.headers) == ({"n": 3}, 9, {"task": "resize"})
    with pytest.raises(InvalidArgument) as caught:
        await queue.schedules.put("often", every=60, payload=new, priority=3)
    assert caught.value.argument == "priority"
    assert (await queue.schedules.trigger("often")).name == "resize"
    await queue.schedules.put("other", every=60, task="scale")
    assert (await queue.schedules.get("other")).task == "scale"
    assert (await queue.schedules.trigger("other")).name == "scale"


class Mail(BaseModel):
    to: str


async def test_payload_is_checked_by_the_model(at_noon: Harness) -> None:
    queue = at_noon.queue(model=Mail)
    with pytest.raises(InvalidPayload):
        await queue.schedules.put("often", every=60)
    with pytest.raises(InvalidPayload):
        await at_noon.queue().schedules.put("often", every=60, payload={"n": object()})
    assert await queue.schedules.list() == []
    await queue.schedules.put("often", every=60, payload=Mail(to="a"))
    assert (await queue.schedules.trigger("often")).payload == Mail(to="a")


@pytest.mark.one_driver
@pytest.mark.parametrize("name", ["pause", "resume", "trigger", "next_runs"])
async def test_unknown_name_is_an_error(harness: Harness, name: str) -> None:
    queue = harness.queue("mail")
    with pytest.raises(ScheduleNotFound) as caught:
        await getattr(queue.schedules, name)("nightly")
    assert (caught.value.name, caught.value.queue) == ("nightly", "mail")


@pytest.mark.one_driver
async def test_period_beside_an_expression_is_cut_in_the_error(harness: Harness) -> None:
    timing: Any = {"cron": "0 3 * * *", "every": "9" * 5000}
    with rejecting("cron", "0 3 * * *", code="two_timings") as caught:
        await harness.queue().schedules.put("nightly", **timing)
    assert len(str(caught.value)) < 1000


@pytest.mark.one_driver
@pytest.mark.parametrize(
    ("options", "code"), [({}, "no_timing"), ({"cron": "0 3 * * *", "every": 5}, "two_timings")]
)
async def test_schedule_has_a_cron_expression_or_a_period(
    harness: Harness, options: Any, code: str
) -> None:
    with rejecting("cron", options.get("cron"), code=code, naming=["every"]):
        await harness.queue().schedules.put("a", **options)


@pytest.mark.one_driver
@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({}, "cron"),
        ({"cron": "0 3 * * *", "every": 5}, "cron"),
        ({"every": 0.5}, "every"),
        ({"every": -5}, "every"),
        ({"every": 60, "timezone": "Europe/Berlin"}, "timezone"),
        ({"cron": "0 3 * * *", "timezone": "Europe/Berlni"}, "timezone"),
        ({"every": 60, "catch_up": "some"}, "catch_up"),
        ({"every": 60, "overlap": "some"}, "overlap"),
        ({"every": 60, "grace": -1}, "grace"),
        ({"every": 60, "grace": 0}, "grace"),
        ({"cron": "0 3 * * *", "grace": 0.999}, "grace"),
        ({"every": 60, "jitter": "x"}, "jitter"),
        ({"every": 60, "paused": 1}, "paused"),
        ({"every": 60, "delay": 5}, "delay"),
        ({"every": 60, "task_id": 5}, "task_id"),
        ({"every": 60, "dedupe_key": "x"}, "dedupe_key"),
        ({"every": 60, "prioritty": 5}, "prioritty"),
        ({"every": 60, "priority": 500}, "priority"),
    ],
    ids=str,
)
async def test_bad_option_is_rejected_and_nothing_is_stored(
    harness: Harness, options: Any, argument: str
) -> None:
    queue = harness.queue()
    with pytest.raises(InvalidArgument) as caught:
        await queue.schedules.put("bad", **options)
    assert caught.value.argument == argument
    assert await queue.schedules.list() == []


@pytest.mark.one_driver
async def test_bad_expression_is_rejected_with_its_place(harness: Harness) -> None:
    queue = harness.queue()
    with pytest.raises(InvalidCron) as caught:
        await queue.schedules.put("bad", cron="0 25 * * *")
    assert (caught.value.field, caught.value.position) == ("hour", 3)


@pytest.mark.one_driver
async def test_schedule_that_cannot_be_read_does_not_stop_the_others(harness: Harness) -> None:
    queue = harness.queue()
    for name in ("a", "b", "c"):
        await queue.schedules.put(name, every=60)
    harness.database.microqueue_schedules.update_one(
        {"name": "b"}, {"$set": {"every_sec": None, "cron": "0 25 * * *"}}
    )
    harness.clock.advance(61)
    assert await fire(harness, queue) == 2
    harness.database.microqueue_schedules.update_one({"name": "b"}, {"$unset": {"catch_up": 1}})
    assert await fire(harness, queue) == 0
    assert [one.name for one in await queue.schedules.list()] == ["a", "c"]
    assert await queue.schedules.remove("b") is True


@pytest.mark.one_driver
@pytest.mark.parametrize(
    "edit",
    [
        {"catch_up": None},
        {"every_sec": None, "cron": "0 3 * * *", "timezone": "../x"},
        {"every_sec": None, "cron": "0 3 * * *", "timezone": "Nowhere"},
        {"every_sec": 1e300},
        {"max_attempts": 2**40},
        {"headers": {"a": {"b": [None]}}, "payload": None, "backoff_policy": {"base_sec": "x"}},
    ],
    ids=str,
)
async def test_many_that_cannot_be_fired_starve_no_other(
    harness: Harness, edit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("microqueue.schedules.BATCH", 2)
    queue = harness.queue()
    for place, name in enumerate("abcde"):
        await queue.schedules.put(name, every=60 + place)
    await queue.schedules.put("good", every=100)
    stored = harness.database.microqueue_schedules
    stored.update_many({"name": {"$ne": "good"}}, {"$set": edit})
    stored.insert_one({"_id": {"x": 1}, "collection": "tasks", "next_at": harness.clock.now()})
    sweeper = harness.sweeper(queue)
    harness.clock.advance(101)
    assert [await sweeper.fire_schedules() for _ in range(3)] == [1, 0, 0]
    errors = [one for one in caplog.records if one.levelname == "ERROR"]
    assert len(errors) == 6, "one for each, and not for each attempt"
    stored.update_one({"name": "a"}, {"$set": {"revision": "other"}})
    await sweeper.fire_schedules()
    assert len([one for one in caplog.records if one.levelname == "ERROR"]) == 7
    core = core_of(queue._blocking)  # noqa: SLF001 (what it wraps)
    firing = core.run(Firer(core).fire())
    good = await queue.schedules.get("good")
    assert (firing.added, firing.next_at, firing.failed) == (0, good.next_at, True)


@pytest.mark.parametrize("edit", [{"recent": 5, "runs": "3"}, {"recent": None, "runs": None}, {}])
@pytest.mark.parametrize("first", ["trigger", "fire"])
async def test_malformed_state_of_the_runs_is_mended(
    at_noon: Harness, edit: Any, first: str
) -> None:
    queue = at_noon.queue()
    await queue.schedules.put("often", every=60, overlap="skip")
    change = {"$set": edit} if edit else {"$unset": {"recent": 1, "runs": 1}}
    reply = at_noon.database.microqueue_schedules.update_one({"name": "often"}, change)
    if inspect.isawaitable(reply):
        await reply
    at_noon.clock.advance(60)
    if first == "trigger":
        await queue.schedules.trigger("often")
    assert await fire(at_noon, queue) == (first == "fire")
    at_noon.clock.advance(60)
    assert await fire(at_noon, queue) == 0, "it overlaps"
    found = await queue.schedules.get("often")
    assert found.runs == (4 if edit.get("runs") else 1)
    assert len(await tasks_of(queue)) == 1


@pytest.mark.one_driver
@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize(
    "edit",
    [
        {"timezone": "Nowhere"},
        {"timezone": "Nowhere", "every_sec": None, "cron": "0 3 * * *"},
        {"timezone": None},
        {"timezone": ["UTC"]},
        {"runs": "x"},
        {"last": {"task_id": 5, "at": "x"}},
        {"next_at": "tomorrow"},
        {"headers": 5},
    ],
    ids=str,
)
async def test_malformed_schedule_is_an_error_of_each_method(
    at_noon: Harness, edit: Any, *, paused: bool
) -> None:
    queue = at_noon.queue()
    await queue.schedules.put("often", every=60, paused=paused)
    at_noon.database.microqueue_schedules.update_one({"name": "often"}, {"$set": edit})
    for method in ("get", "next_runs", "trigger", *(["resume"] if paused else [])):
        with pytest.raises(OperationFailed):
            await getattr(queue.schedules, method)("often")
    assert await queue.schedules.list() == []
    assert await tasks_of(queue) == []
    put = await queue.schedules.put("often", every=60)
    assert put.paused is paused
    assert await queue.schedules.list() == [put]


@pytest.mark.one_driver
@pytest.mark.parametrize(
    "edit", [{"cron": "*/90 * * * *"}, {"cron": "5/70 * * * *"}, {"timezone": "localtime"}], ids=str
)
async def test_stored_timing_that_put_rejects_is_fired(
    at_noon: Harness, monkeypatch: pytest.MonkeyPatch, edit: dict[str, str]
) -> None:
    """It was put before there was such a rule."""
    monkeypatch.setattr("microqueue.timing.zone_of", lambda _: UTC)  # Not every machine has it.
    queue = at_noon.queue()
    await queue.schedules.put("hourly", cron="0 * * * *")
    at_noon.database.microqueue_schedules.update_one({"name": "hourly"}, {"$set": edit})
    at_noon.clock.advance(3600)
    assert await fire(at_noon, queue) == 1
    found = await queue.schedules.get("hourly")
    assert found.next_at > at_noon.clock.now()
    [(argument, value)] = edit.items()
    with rejecting(argument, value):
        await queue.schedules.put("hourly", **{"cron": "0 * * * *", **edit})


@pytest.mark.one_driver
@pytest.mark.parametrize("last", [5, "x", [1], {"task": 1}], ids=str)
async def test_malformed_last_run_is_left_out(at_noon: Harness, last: Any) -> None:
    queue = at_noon.queue()
    await queue.schedules.put("often", every=60)
    at_noon.database.microqueue_schedules.update_one({"name": "often"}, {"$set": {"last": last}})
    assert [one.last_run for one in await queue.schedules.list()] == [None]
    await queue.schedules.trigger("often")
    assert (await queue.schedules.get("often")).last_run.triggered


@pytest.mark.one_driver
@pytest.mark.parametrize(("late", "expected"), [(0, 60), (7200, 3660)], ids=["on time", "late"])
async def test_task_of_a_run_expires_after_its_delivery(
    at_noon: Harness, late: int, expected: int
) -> None:
    """The time that jitter takes does not count."""
    queue = at_noon.queue()
    put = await queue.schedules.put("spread", every=3600, jitter=3600, expires_in=60)
    delay = jitter_at(put, put.next_at)
    assert delay > timedelta(seconds=60)
    at_noon.clock.advance(3600 + late)
    if late:
        await queue.schedules.put("spread", every=3600, expires_in=3660)
    assert await fire(at_noon, queue) == 1
    (task,) = await tasks_of(queue)
    eta = at_noon.clock.now() if late else put.next_at + delay
    assert abs(task.expires_at - eta - timedelta(seconds=expected)) <= timedelta(milliseconds=1)
    if not late:
        at_noon.clock.advance(delay + timedelta(seconds=1))
        assert (await queue.pop()).id == task.id


async def test_run_of_a_queue_without_retention_is_kept_as_proof(at_noon: Harness) -> None:
    queue = at_noon.queue(retention=0)
    await queue.ensure_indexes()
    await queue.schedules.put("often", every=60)
    for settle in ("mark_done", "mark_done_many"):
        at_noon.clock.advance(60)
        assert await fire(at_noon, queue) == 1
        task = await queue.pop()
        await getattr(queue, settle)(task if settle == "mark_done" else [task])
        await queue.enqueue({"other": 1})
        await queue.mark_done(await queue.pop())
    sweeper = at_noon.sweeper(queue, jobs=["purge_finished"])
    await sweeper.run_once()
    assert [task.status for task in await tasks_of(queue)] == ["done", "done"]
    at_noon.clock.advance(3600)
    await sweeper.run_once()
    assert await tasks_of(queue) == []


@pytest.mark.parametrize("name", ["often", "täg:lich %", "a.b-c_d~e"])
async def test_run_of_any_name_is_kept_as_proof(at_noon: Harness, name: str) -> None:
    queue = at_noon.queue(name, retention=0)
    await queue.schedules.put(name, every=1.5)
    for _ in range(2):
        at_noon.clock.advance(1.5)
        assert await fire(at_noon, queue) == 1
        await queue.mark_done(await queue.pop())
    await at_noon.sweeper(queue, jobs=["purge_finished"]).run_once()
    assert [task.status for task in await tasks_of(queue)] == ["done", "done"]


@pytest.mark.parametrize("task_id", ["schedule:import-7", "schedule:mail:nightly", "schedule:"])
async def test_id_that_begins_like_that_of_a_run_is_no_run(harness: Harness, task_id: str) -> None:
    queue = harness.queue(retention=0)
    for settle in ("mark_done", "mark_done_many"):
        await queue.enqueue({}, task_id=task_id)
        task = await queue.pop()
        await getattr(queue, settle)(task if settle == "mark_done" else [task])
        assert await queue.get(task_id) is None


async def test_sweeps_treat_an_id_that_begins_like_that_of_a_run_as_any_other(
    harness: Harness,
) -> None:
    queue = harness.queue(retention=60, dead_letters="collection")
    await queue.enqueue({}, task_id="schedule:import-7")
    await queue.mark_done(await queue.pop())
    await queue.enqueue({}, task_id="schedule:import-8")
    await queue.mark_failure(await queue.pop(), "no use")
    assert [one["_id"] for one in await harness.stored("tasks_dlq")] == ["schedule:import-8"]
    harness.clock.advance(61)
    await harness.sweeper(queue, jobs=["purge_finished"]).run_once()
    assert await harness.stored() == []


async def test_dead_letter_with_such_an_id_is_moved_by_the_next_sweep(harness: Harness) -> None:
    await (kept := harness.queue()).enqueue({}, task_id="schedule:import-9")
    await kept.mark_failure(await kept.pop(), "no use")
    queue = harness.queue(dead_letters="collection")
    await harness.sweeper(queue, jobs=["move_dead_letters"]).run_once()
    assert [one["_id"] for one in await harness.stored("tasks_dlq")] == ["schedule:import-9"]


async def test_sweep_fires_first_and_reports_it(at_noon: Harness) -> None:
    queue = at_noon.queue()
    await queue.schedules.put("often", every=60)
    at_noon.clock.advance(60)
    report = await at_noon.sweeper(queue).run_once()
    assert (report.fired, report.active, report.errors) == (1, True, {})
