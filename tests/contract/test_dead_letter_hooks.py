"""Whatever makes a dead letter, a hook sees it: every path through a queue and a sweeper."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pydantic import BaseModel

from microqueue import DeadLetter, Hooks, Task, TaskStatus
from microqueue.core import core_of
from microqueue.drivers.driver import awaited
from microqueue.operations import workers
from microqueue.reports import WorkerInfo
from tests.contract.conftest import Harness
from tests.rejection import rejecting


class Recorder(Hooks):
    """Keeps the dead letters that it is notified of."""

    def __init__(self) -> None:
        self.letters: list[DeadLetter] = []

    def on_dead_letter(self, letter: DeadLetter) -> None:
        self.letters.append(letter)


class Mail(BaseModel):
    to: str


Path = Callable[[Harness, Any], Awaitable[None]]


async def popped(queue: Any, **options: Any) -> Any:
    await queue.enqueue({}, name="mail", **options)
    return await queue.pop(worker_id="w")


async def expiring(harness: Harness, queue: Any, **options: Any) -> None:
    await queue.enqueue({}, name="mail", expires_in=5, **options)
    harness.clock.advance(6)


async def exhausted(harness: Harness, queue: Any, **options: Any) -> None:
    task = await queue.enqueue({}, name="mail", max_attempts=3, **options)
    await harness.edit(task.id, attempts=3)


async def marked(harness: Harness, queue: Any) -> None:
    await queue.mark_failure(await popped(queue), "no", code="own")


async def retried(harness: Harness, queue: Any) -> None:
    await queue.mark_retry(await popped(queue, max_attempts=1), "no", code="own")


async def cancelled_waiting(harness: Harness, queue: Any) -> None:
    await queue.cancel((await queue.enqueue({}, name="mail")).id)


async def cancelled_running(harness: Harness, queue: Any) -> None:
    await queue.cancel((await popped(queue)).id)


async def expired_at_claim(harness: Harness, queue: Any) -> None:
    await expiring(harness, queue)
    assert await queue.pop() is None


async def expired_in_a_batch(harness: Harness, queue: Any) -> None:
    await expiring(harness, queue)
    assert await queue.pop_many(5) == []


async def delayed_expired_at_claim(harness: Harness, queue: Any) -> None:
    await expiring(harness, queue, delay=4)
    assert await queue.pop() is None


async def exhausted_at_claim(harness: Harness, queue: Any) -> None:
    await exhausted(harness, queue)
    assert await queue.pop() is None


async def exhausted_when_due(harness: Harness, queue: Any) -> None:
    await exhausted(harness, queue, delay=5)
    harness.clock.advance(6)
    assert await queue.pop() is None


async def malformed(harness: Harness, queue: Any) -> None:
    task = await queue.enqueue({}, name="mail")
    await harness.edit(task.id, visibility_timeout_sec="long")
    assert await queue.pop() is None


async def unclaimable(harness: Harness, queue: Any) -> None:
    if harness.in_memory:
        pytest.skip("mongomock adds to what is no number")
    task = await queue.enqueue({}, name="mail")
    await harness.edit(task.id, attempts="many")
    assert await queue.pop() is None


async def unclaimable_in_a_batch(harness: Harness, queue: Any) -> None:
    if harness.in_memory:
        pytest.skip("mongomock adds to what is no number")
    tasks = [await queue.enqueue({}, name="mail") for _ in range(3)]
    await harness.edit(tasks[1].id, attempts="many")
    assert await queue.pop_many(3)


async def invalid_payload(harness: Harness, queue: Any) -> None:
    await queue.enqueue({}, name="mail")
    assert await harness.queue(model=Mail, hooks=core_hooks(queue)).pop() is None


def core_hooks(queue: Any) -> Any:
    return core(queue).hooks


def core(queue: Any) -> Any:
    return core_of(getattr(queue, "_blocking", queue))


QUEUE_PATHS = [
    (marked, "own"),
    (retried, "own"),
    (cancelled_waiting, "cancelled"),
    (cancelled_running, "cancelled"),
    (expired_at_claim, "expired"),
    (expired_in_a_batch, "expired"),
    (delayed_expired_at_claim, "expired"),
    (exhausted_at_claim, "max_attempts"),
    (exhausted_when_due, "max_attempts"),
    (malformed, "invalid_task"),
    (unclaimable, "invalid_task"),
    (unclaimable_in_a_batch, "invalid_task"),
    (invalid_payload, "invalid_payload"),
]


@pytest.mark.parametrize("separate", [False, True], ids=["status", "collection"])
@pytest.mark.parametrize(
    ("path", "code"), QUEUE_PATHS, ids=lambda one: getattr(one, "__name__", "")
)
async def test_dead_letters_of_a_queue(
    harness: Harness, path: Path, code: str, separate: bool
) -> None:
    recorder = Recorder()
    where: Any = {"dead_letters": "collection"} if separate else {}
    queue = harness.queue(hooks=[recorder], **where)
    await path(harness, queue)
    await check(queue, recorder, code, "queue")


async def check(queue: Any, recorder: Recorder, code: str, source: str) -> None:
    """Check that each dead letter was reported once, as it is stored."""
    (stored,) = [one for one in await queue.peek(10) if one.status is TaskStatus.FAILED]
    (letter,) = recorder.letters
    assert (letter.id, letter.queue, letter.name) == (stored.id, "default", "mail")
    assert (letter.error.code, letter.source) == (code, source)
    assert letter.error.message == stored.error.message
    assert letter.attempts == stored.attempts


async def lease_expired(harness: Harness, queue: Any) -> str:
    await popped(queue, max_attempts=1)
    harness.clock.advance(1000)
    return "reclaim_stuck"


async def register(harness: Harness, queue: Any) -> None:
    now = harness.clock.now()
    info = WorkerInfo(
        id="w",
        collection=core(queue).collections.name,
        host="h",
        pid=1,
        queues=["default"],
        concurrency=1,
        running=1,
        handled=0,
        started_at=now,
        heartbeat_at=now,
        heartbeat_sec=1,
    )
    await awaited(core(queue).run(workers.beat(info)))


async def poison(harness: Harness, queue: Any) -> str:
    await register(harness, queue)
    await harness.edit((await popped(queue)).id, crashes=1)
    harness.clock.advance(10)
    await harness.sweeper(queue).reclaim_orphaned()  # It notes that the worker is late.
    harness.clock.advance(10)
    return "reclaim_orphaned"


async def worker_gone(harness: Harness, queue: Any) -> str:
    await register(harness, queue)
    await popped(queue, max_attempts=1)
    harness.clock.advance(10)
    await harness.sweeper(queue).reclaim_orphaned()
    harness.clock.advance(10)
    return "reclaim_orphaned"


async def expired(harness: Harness, queue: Any) -> str:
    await expiring(harness, queue)
    return "expire_undelivered"


async def expired_delayed(harness: Harness, queue: Any) -> str:
    await expiring(harness, queue, delay=3)
    return "promote_due"


async def exhausted_due(harness: Harness, queue: Any) -> str:
    await exhausted(harness, queue, delay=5)
    harness.clock.advance(6)
    return "promote_due"


async def exhausted_backstop(harness: Harness, queue: Any) -> str:
    await exhausted(harness, queue, delay=5)
    harness.clock.advance(6)
    return "bury_exhausted"


async def malformed_history(harness: Harness, queue: Any) -> str:
    if harness.in_memory:
        pytest.skip("mongomock pushes to what is no list")
    task = await popped(queue, max_attempts=1)
    await harness.edit(task.id, history="none")
    harness.clock.advance(1000)
    return "reclaim_stuck"


SWEEPS = [
    (lease_expired, "lease_expired"),
    (poison, "poison"),
    (worker_gone, "worker_gone"),
    (expired, "expired"),
    (expired_delayed, "expired"),
    (exhausted_due, "max_attempts"),
    (exhausted_backstop, "max_attempts"),
    (malformed_history, "lease_expired"),
]


@pytest.mark.parametrize("whole", [False, True], ids=["one_job", "sweep"])
@pytest.mark.parametrize(("path", "code"), SWEEPS, ids=lambda one: getattr(one, "__name__", ""))
async def test_dead_letters_of_a_sweep(
    harness: Harness, path: Callable[..., Awaitable[str]], code: str, whole: bool
) -> None:
    recorder = Recorder()
    queue = harness.queue(max_crashes=2)
    job = await path(harness, queue)
    sweeper = harness.sweeper(queue, hooks=[recorder])
    if whole:
        report = await sweeper.run_once()
        assert report.buried_tasks[code].ids == [one.id for one in recorder.letters]
    else:
        await getattr(sweeper, job)()
    await check(queue, recorder, code, "sweeper")


async def test_hooks_of_the_queue_see_its_sweeps_each_once(harness: Harness) -> None:
    recorder, other = Recorder(), Recorder()
    queue = harness.queue(hooks=[recorder])
    for _ in range(5):
        await queue.enqueue({}, expires_in=5)
    harness.clock.advance(6)
    sweeper = harness.sweeper(queue, hooks=[recorder, other])
    await sweeper.run_once()
    await sweeper.run_once()
    assert len({one.id for one in recorder.letters}) == len(recorder.letters) == 5
    assert other.letters == recorder.letters


async def test_what_others_buried_is_not_reported_again(harness: Harness) -> None:
    if not harness.blocking:
        pytest.skip("the other call runs in between, and blocks")
    ours, theirs = Recorder(), Recorder()
    queue, other = harness.queue(), harness.queue(hooks=[theirs])
    tasks = [await queue.enqueue({}, expires_in=5) for _ in range(3)]
    harness.clock.advance(6)
    driver = core(queue)._driver  # noqa: SLF001 (its fault point)

    def cancel_one_first(call: Any) -> None:
        if call.method == "update_many":
            driver.before_call = None
            core(other).run(core(other).cancel(tasks[0].id))

    driver.before_call = cancel_one_first
    assert await harness.sweeper(queue, hooks=[ours]).expire_undelivered() == 2
    assert {one.id for one in ours.letters} == {one.id for one in tasks[1:]}
    assert [one.id for one in theirs.letters] == [tasks[0].id]


async def test_a_write_whose_reply_was_lost_is_reported(harness: Harness) -> None:
    if not harness.blocking:
        pytest.skip("the lost write runs in between, and blocks")
    recorder = Recorder()
    queue = harness.queue()
    tasks = [await queue.enqueue({}, expires_in=5) for _ in range(3)]
    harness.clock.advance(6)
    driver = core(queue)._driver  # noqa: SLF001 (its fault point)

    def write_it_before(call: Any) -> None:
        if call.method == "update_many":
            driver.before_call = None
            harness.database.tasks.update_many(*call.arguments)

    driver.before_call = write_it_before
    await harness.sweeper(queue, hooks=[recorder]).expire_undelivered()
    assert {one.id for one in recorder.letters} == {one.id for one in tasks}


class Broken(Hooks):
    def on_dead_letter(self, letter: DeadLetter) -> None:
        raise RuntimeError("no")


class Older:
    """Hooks as they were written before there was ``on_dead_letter``."""

    def on_failure(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:
        """Of a worker."""


async def test_a_hook_that_raises_changes_nothing(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    queue = harness.queue(hooks=[Broken(), Older(), Hooks(), recorder])
    await marked(harness, queue)
    await check(queue, recorder, "own", "queue")
    fields = {(vars(one).get("hook"), vars(one).get("method")) for one in caplog.records}
    assert fields == {("Broken", "on_dead_letter")}


@pytest.mark.one_driver
async def test_no_report_is_made_where_no_hook_wants_it(harness: Harness) -> None:
    queue = core(harness.queue(hooks=[Older(), Hooks()]))
    assert queue.report_to([Hooks()], source="worker") is None
    assert queue.report_to([Recorder()], source="worker") is not None


@pytest.mark.one_driver
@pytest.mark.parametrize("hooks", [Recorder(), "hooks", None])
async def test_hooks_that_are_no_list_are_rejected(harness: Harness, hooks: Any) -> None:
    with rejecting("hooks"):
        harness.queue(hooks=hooks)
    with rejecting("hooks"):
        harness.sweeper(harness.queue(), hooks=hooks)
