from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pymongo.errors import AutoReconnect, ExecutionTimeout

from microqueue import BackoffPolicy, Outcome, ServerUnavailable, TaskStatus
from microqueue.sweeper import JOBS, SweeperCore
from tests.contract.conftest import Harness
from tests.rejection import rejecting


async def test_expired_lease_returns_task_to_pending_with_backoff(harness: Harness) -> None:
    queue = harness.queue(visibility_timeout=30, backoff=BackoffPolicy(base_sec=4, jitter="none"))
    await queue.enqueue({"n": 1})
    task = await queue.pop(worker_id="gone")
    sweeper = harness.sweeper(queue)
    harness.clock.advance(29.999)
    assert await sweeper.reclaim_stuck() == 0
    harness.clock.advance(0.001)
    assert await sweeper.reclaim_stuck() == 1
    waiting = await queue.get(task.id)
    assert waiting.status is TaskStatus.PENDING
    assert waiting.redelivered is True
    assert waiting.next_retry_at == harness.clock.now() + timedelta(seconds=4)
    assert waiting.error.code == "lease_expired"
    assert "gone" in waiting.error.message
    assert waiting.history[0].outcome is Outcome.LEASE_EXPIRED
    assert waiting.history[0].worker_id == "gone"
    harness.clock.advance(4)
    assert (await queue.pop()).redelivered is True


async def test_delayed_first_delivery_is_not_a_redelivery(harness: Harness, queue: Any) -> None:
    await queue.enqueue({}, delay=1)
    harness.clock.advance(1)
    assert (await queue.pop()).redelivered is False


async def test_reclaim_respects_each_tasks_own_timeout(harness: Harness) -> None:
    queue = harness.queue(visibility_timeout=30)
    await queue.enqueue({"n": "short"}, visibility_timeout=5)
    await queue.enqueue({"n": "queue"})
    await queue.enqueue({"n": "long"}, visibility_timeout=90)
    await queue.pop_many(3)
    sweeper = harness.sweeper(queue)
    reclaimed = []
    for _ in range(10):
        harness.clock.advance(10)
        reclaimed.append(await sweeper.reclaim_stuck())
    assert reclaimed == [1, 0, 1, 0, 0, 0, 0, 0, 1, 0]


async def test_renewed_lease_is_not_reclaimed(harness: Harness) -> None:
    queue = harness.queue(visibility_timeout=10)
    await queue.enqueue({})
    task = await queue.pop()
    harness.clock.advance(9)
    await queue.touch(task)
    harness.clock.advance(9)
    assert await harness.sweeper(queue).reclaim_stuck() == 0


async def test_last_attempt_lost_with_its_worker_is_buried(harness: Harness) -> None:
    queue = harness.queue(visibility_timeout=10)
    await queue.enqueue({}, max_attempts=1)
    await queue.pop()
    harness.clock.advance(10)
    report = await harness.sweeper(queue).run_once()
    assert (report.reclaimed, report.buried) == (0, 1)
    (letter,) = await queue.dead_letters.list()
    assert (letter.error.code, letter.attempts) == ("lease_expired", 1)


async def test_due_tasks_of_all_queues_are_promoted_in_batches(harness: Harness) -> None:
    a, b = harness.queue("a", batch_size=3), harness.queue("b")
    await a.enqueue_many([{}] * 8, delay=5)
    await b.enqueue_many([{}] * 2, delay=5)
    await b.enqueue({}, delay=6)
    sweeper = harness.sweeper(a)
    assert await sweeper.promote_due() == 0
    harness.clock.advance(5)
    assert await sweeper.promote_due() == 10
    assert await sweeper.promote_due() == 0
    assert (await b.stats()).delayed == 1


async def test_sweeper_can_be_limited_to_some_queues(harness: Harness) -> None:
    queues = {name: harness.queue(name, visibility_timeout=5) for name in ("a", "b")}
    for queue in queues.values():
        await queue.enqueue({}, delay=1)
        await queue.enqueue({}, expires_in=1)
        await queue.enqueue({}, priority=9)
        await queue.pop()
    harness.clock.advance(5)
    report = await harness.sweeper(queues["a"], queues=["b"]).run_once()
    assert (report.reclaimed, report.promoted, report.expired) == (1, 1, 1)
    assert (await queues["a"].stats()).processing == 1
    assert (await queues["b"].stats()).processing == 0


async def test_waiting_task_without_attempts_left_is_buried(harness: Harness, queue: Any) -> None:
    spent = await queue.enqueue({}, max_attempts=2, delay=5)
    other = await queue.enqueue({}, max_attempts=5, delay=5)
    later = await queue.enqueue({}, max_attempts=2, delay=60)
    for task, attempts in ((spent, 2), (other, 4), (later, 2)):
        await harness.edit(task.id, attempts=attempts)
    harness.clock.advance(5)
    assert await harness.sweeper(queue).bury_exhausted() == 1
    buried = await queue.get(spent.id)
    assert (buried.status, buried.error.code) == (TaskStatus.FAILED, "max_attempts")
    assert (await queue.get(other.id)).status is TaskStatus.PENDING
    assert (await queue.get(later.id)).status is TaskStatus.PENDING


async def test_ready_task_without_attempts_left_is_buried_and_never_delivered(
    harness: Harness, queue: Any
) -> None:
    spent = await queue.enqueue({}, max_attempts=2)
    other = await queue.enqueue({}, max_attempts=5)
    await harness.edit(spent.id, attempts=2)
    await harness.edit(other.id, attempts=4)
    assert (await queue.pop()).id == other.id
    buried = await queue.get(spent.id)
    assert (buried.status, buried.error.code, buried.attempts) == ("failed", "max_attempts", 2)


async def test_due_task_without_attempts_left_is_buried_by_whoever_promotes_it(
    harness: Harness, queue: Any
) -> None:
    spent = await queue.enqueue({}, max_attempts=2, delay=5)
    await harness.edit(spent.id, attempts=2)
    harness.clock.advance(5)
    assert await queue.pop() is None
    assert (await queue.get(spent.id)).error.code == "max_attempts"


async def test_burying_never_touches_a_live_lease(harness: Harness, queue: Any) -> None:
    await queue.enqueue({}, max_attempts=1)
    task = await queue.pop()
    assert task.attempts == task.max_attempts
    assert await harness.sweeper(queue).bury_exhausted() == 0
    await queue.mark_done(task)


async def test_undelivered_task_expires_fresh_delayed_or_retried(
    harness: Harness, queue: Any
) -> None:
    await queue.enqueue({"n": "retried"}, expires_in=10)
    await queue.mark_retry(await queue.pop(), delay=60)
    await queue.enqueue({"n": "fresh"}, expires_in=10)
    await queue.enqueue({"n": "delayed"}, expires_in=10, delay=60)
    await queue.enqueue({"n": "held"}, expires_in=10, priority=9)
    held = await queue.pop()
    await queue.enqueue({"n": "later"}, expires_in=11)
    harness.clock.advance(10)
    assert await harness.sweeper(queue).expire_undelivered() == 3
    page = await queue.dead_letters.list(code="expired")
    assert {task.payload["n"] for task in page} == {"retried", "fresh", "delayed"}
    await queue.mark_done(held)


async def test_finished_tasks_are_purged_after_the_retention(harness: Harness) -> None:
    queue = harness.queue(retention=timedelta(hours=1), batch_size=2)
    await queue.enqueue_many([{}] * 5)
    await queue.mark_done_many(await queue.pop_many(5))
    await queue.enqueue({})
    await queue.mark_failure(await queue.pop(), "kept")
    sweeper = harness.sweeper(queue)
    harness.clock.advance(3599)
    assert await sweeper.purge_finished() == 0
    harness.clock.advance(1)
    assert await sweeper.purge_finished() == 5
    assert (await queue.stats()).failed == 1


async def test_without_retention_nothing_is_purged(harness: Harness) -> None:
    queue = harness.queue(retention=None)
    await queue.enqueue({})
    await queue.mark_done(await queue.pop())
    harness.clock.advance(timedelta(days=3650))
    assert await harness.sweeper(queue).purge_finished() == 0


async def test_report_tells_what_every_job_did(harness: Harness) -> None:
    queue = harness.queue(
        visibility_timeout=10, retention=1, backoff=BackoffPolicy(base_sec=60, jitter="none")
    )
    await queue.enqueue_many([{}, {}, {}])
    await queue.mark_done((await queue.pop_many(3))[0])
    await queue.enqueue({}, delay=5)
    await queue.enqueue({}, expires_in=5)
    spent = await queue.enqueue({}, max_attempts=1, delay=5)
    await harness.edit(spent.id, attempts=1)
    harness.clock.advance(10)
    reports: list[Any] = []
    report = await harness.sweeper(queue, on_report=reports.append).run_once()
    assert report.model_dump(include={"reclaimed", "promoted", "buried", "expired", "purged"}) == {
        "reclaimed": 2,
        "promoted": 1,
        "buried": 1,
        "expired": 1,
        "purged": 1,
    }
    assert report.ok
    assert not report.skipped
    assert report.at == harness.clock.now()
    assert reports == [report]


async def test_only_the_chosen_jobs_run(harness: Harness) -> None:
    queue = harness.queue(visibility_timeout=5)
    await queue.enqueue({}, delay=1)
    await queue.enqueue({})
    await queue.pop()
    harness.clock.advance(5)
    report = await harness.sweeper(queue, jobs=["promote_due"]).run_once()
    assert (report.promoted, report.reclaimed) == (1, 0)


async def test_sweep_is_skipped_while_another_holds_the_lock(harness: Harness, queue: Any) -> None:
    first, second = harness.sweeper(queue), harness.sweeper(queue)
    acquire, release = harness.lock(first)
    await acquire()
    assert (await second.run_once()).skipped
    assert not (await first.run_once()).skipped  # Its own lock; a finished sweep gives it back.
    assert not (await second.run_once()).skipped
    await acquire()
    harness.clock.advance(5)  # The owner died; the lock ends by itself.
    assert not (await second.run_once()).skipped
    await release()


LIMITS: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"jobs": ["purge_finished"]}, {"jobs": ["promote_due"]}, False),
    ({"queues": ["a"]}, {"queues": ["b"]}, False),
    ({"queues": ["a,b"]}, {"queues": ["a", "b"]}, False),
    ({"jobs": ["promote_due"], "queues": ["a"]}, {"jobs": ["promote_due"]}, False),
    ({}, {"jobs": ["promote_due"]}, False),
    (
        {"jobs": ["promote_due", "purge_finished"]},
        {"jobs": ["purge_finished", "promote_due"]},
        True,
    ),
    ({"queues": ["a", "b"]}, {"queues": ["b", "a", "b"]}, True),
]


@pytest.mark.parametrize(("held", "wanted", "skipped"), LIMITS)
async def test_sweepers_of_other_jobs_or_queues_do_not_wait_for_each_other(
    harness: Harness, queue: Any, held: Any, wanted: Any, skipped: bool
) -> None:
    first, second = harness.sweeper(queue, **held), harness.sweeper(queue, **wanted)
    acquire, _ = harness.lock(first)
    await acquire()
    assert (await second.run_once()).skipped is skipped


async def test_abandoned_replay_of_another_queue_is_left_alone(harness: Harness) -> None:
    queues = {name: harness.queue(name, dead_letters="collection") for name in ("a", "b")}
    intent = {"at": harness.clock.now(), "changes": {"status": "pending", "next_retry_at": None}}
    for queue in queues.values():
        await queue.enqueue({})
        await queue.mark_failure(await queue.pop(), "no")
    marked = harness.database.tasks_dlq.update_many({}, {"$set": {"replaying": intent}})
    if not harness.blocking:
        await marked
    harness.clock.advance(60)
    await harness.sweeper(queues["a"], queues=["a"]).move_dead_letters()
    assert [(await queue.stats()).pending for queue in queues.values()] == [1, 0]


@pytest.mark.one_driver
@pytest.mark.parametrize("jobs", [["reclaim"], ["promote_due", "x"]])
async def test_unknown_jobs_are_rejected_by_name(harness: Harness, queue: Any, jobs: Any) -> None:
    with rejecting("jobs", jobs[-1:]) as caught:
        harness.sweeper(queue, jobs=jobs)
    assert "promote_due" in str(caught.value)  # One of those that exist.


@pytest.mark.one_driver
@pytest.mark.parametrize("every", [0, -1, "often"])
async def test_sweeping_without_a_pause_is_rejected(
    harness: Harness, queue: Any, every: Any
) -> None:
    with rejecting("every"):
        await harness.sweeper(queue).run_forever(every=every)


async def test_reclaim_waits_as_the_queue_says_whatever_the_sweeper_has(harness: Harness) -> None:
    stiff = BackoffPolicy(base_sec=300, factor=1, jitter="none")
    patient = harness.queue("patient", backoff=stiff, visibility_timeout=5)
    task = await patient.enqueue({})
    await patient.pop()
    harness.clock.advance(5)
    await harness.sweeper(harness.queue("other")).run_once()
    waiting = await patient.get(task.id)
    assert waiting.next_retry_at == harness.clock.now() + timedelta(seconds=300)


@pytest.mark.parametrize(
    ("cause", "tried"),
    [(None, 1), (AutoReconnect("gone"), 1), (ExecutionTimeout("slow"), len(JOBS))],
    ids=["away", "gone", "slow"],
)
async def test_sweep_ends_with_the_first_job_that_finds_the_server_away(
    harness: Harness, queue: Any, monkeypatch: pytest.MonkeyPatch, cause: Any, tried: int
) -> None:
    asked: list[str] = []

    def job(_sweeper: Any, name: str, _progress: Any) -> Any:
        asked.append(name)
        raise ServerUnavailable("no server") from cause

    monkeypatch.setattr(SweeperCore, "job", job)
    report = await harness.sweeper(queue).run_once()
    assert asked == list(JOBS[:tried])
    assert report.errors == dict.fromkeys(asked, "no server")


async def test_sweep_that_fails_is_logged_in_a_line_and_followed_by_the_next(
    harness: Harness, queue: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sweeper = harness.sweeper(queue)
    tries = 0

    def acquire(_sweeper: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 2:
            getattr(sweeper, "_blocking", sweeper).stop()
        raise ServerUnavailable("no server")

    monkeypatch.setattr(SweeperCore, "acquire", acquire)
    await sweeper.run_forever(every=0.01)
    failures = [
        (record.name, record.levelname, record.__dict__["wait_sec"], record.exc_info)
        for record in caplog.records
    ]
    assert failures == [("microqueue.sweeper", "ERROR", 0.01, None)] * 2
    assert all("no server" in record.getMessage() for record in caplog.records)


async def test_sweeper_is_named_in_its_reports_and_jobs_can_be_run_alone(
    harness: Harness, queue: Any
) -> None:
    assert await queue.workers() == []
    sweeper = harness.sweeper(queue)
    assert (await sweeper.run_once()).sweeper_id == sweeper.sweeper_id
    assert await sweeper.reclaim_orphaned() == 0
