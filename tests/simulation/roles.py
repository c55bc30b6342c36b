"""The actors, as scripts that yield operations: producers, workers, sweepers and others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from microqueue.dead_letter_models import DeadLetterFilter
from microqueue.dead_letters import DeadLetterOperations
from microqueue.errors import DuplicateTask, LeaseLost, MicroqueueError, ServerUnavailable
from microqueue.new_task import NewTask
from microqueue.operations import dlq_collection, maintenance
from microqueue.operations.call import Operation
from microqueue.schedules import Firer, ScheduleOperations
from microqueue.task import Claimed, Task, TaskStatus
from microqueue.topic import TopicCore
from tests.simulation.ledger import Key, Timetable, key_of
from tests.simulation.world import QUEUES, Actor, Script, Wait, World

IDLE_MS = 200
OUTCOMES = ["done"] * 12 + ["retry"] * 3 + ["fail", "fail", "release", "abandon"]
ENQUEUES = ["plain"] * 10 + ["key", "return", "replace", "period", "period", "many", "expiring"]
PERIOD_SEC = 2.0
BACKOFF = {"base_sec": 0.1, "max_sec": 1.0}
"""Doubled after each attempt, and then half of that or more: ``jitter="equal"``."""
TOPIC = "news"
SCHEDULES = {"each": "all", "latest": "latest"}


# Producers


def producer(world: World, actor: Actor) -> Script:
    """Enqueue tasks with delays, priorities, ids and dedupe keys."""
    choose = actor.choices
    while not world.calm:
        kind = choose.choice(ENQUEUES)
        try:
            if kind == "many":
                yield from _enqueue_many(world, actor)
            else:
                yield from _enqueue(world, actor, kind)
        except MicroqueueError:
            yield Wait(IDLE_MS)
            continue
        yield Wait(choose.randrange(1, 300))


def _planned(world: World, actor: Actor, options: dict[str, Any]) -> tuple[int, NewTask[Any]]:
    choose = actor.choices
    number = world.ledger.number()
    delay_sec = choose.choice([0, 0, 0, 0.5, 3])
    attempts = choose.choice([1, 3, 3, 10])
    world.ledger.plan(
        number,
        not_before=world.now() + timedelta(seconds=delay_sec),
        max_attempts=attempts,
        can_expire="expires_in" in options or "dedupe_for" in options,
    )
    return number, NewTask(
        payload={"n": number},
        delay=delay_sec,
        priority=choose.choice([0, 0, 5]),
        max_attempts=attempts,
        **options,
    )


def _enqueue(world: World, actor: Actor, kind: str) -> Script:
    choose, ledger = actor.choices, world.ledger
    options: dict[str, Any] = {}
    if kind == "plain":
        options["task_id"] = choose.choice([None, f"task-{ledger.numbers + 1}"])
        options["visibility_timeout"] = choose.choice([None, None, None, 1])
    elif kind == "expiring":
        options["expires_in"] = choose.choice([0.5, 4])
    elif kind == "period":
        options |= {"dedupe_key": choose.choice(["p1", "p2"]), "dedupe_for": PERIOD_SEC}
    else:
        options["dedupe_key"] = choose.choice(["k1", "k2"])
        options["on_duplicate"] = "raise" if kind == "key" else kind
    number, new = _planned(world, actor, options)
    if "on_duplicate" in options:
        ledger.replaceable.add(number)
    try:
        task: Task[Any] = yield actor.core.enqueue(new, None)
    except DuplicateTask as exc:
        ledger.refuse(number, exc.existing_id)
        return
    if not task.is_duplicate:
        ledger.confirm(number)
    elif kind == "replace":
        ledger.replace(number, task.id)
    else:
        ledger.refuse(number, task.id)


def _enqueue_many(world: World, actor: Actor) -> Script:
    planned = [
        _planned(world, actor, {"dedupe_key": "k3"} if place == 1 else {}) for place in range(3)
    ]
    report = yield actor.core.enqueue_many([new for _, new in planned], {}, None)
    for task in report.tasks:
        world.ledger.confirm(task.payload["n"])
    for one in report.duplicates:
        world.ledger.refuse(planned[one.index][0])


# Workers


def worker(world: World, actor: Actor) -> Script:
    """Claim tasks, run their handlers, and settle them; fire schedules in between."""
    choose = actor.choices
    while True:
        core = actor.cores[choose.choice(QUEUES)]
        try:
            if choose.random() < 0.1:
                yield Firer(core).fire()
            claimed = yield core.claim_batch(choose.choice([1, 3, 8]), actor.name)
        except MicroqueueError:
            claimed = []
        if not claimed:
            yield Wait(IDLE_MS)
        for one in claimed:
            world.ledger.claim(key_of(one.document))
        if len(claimed) > 1 and choose.random() < 0.2:
            yield from _handle_together(world, actor, claimed)
            continue
        for one in claimed:
            yield from handle(world, actor, one)


def _start(world: World, actor: Actor, one: Claimed) -> Any:
    """Start the handler of a task, unless its lease is over: a worker does not start it then."""
    lease = one.task.lease
    if lease is None:
        raise AssertionError
    if world.now() >= lease.expires_at:
        return None
    run = world.ledger.start(one.document, actor.name, now=world.now(), ends_at=lease.expires_at)
    actor.runs.append(run)
    return run


def handle(world: World, actor: Actor, one: Claimed) -> Script:
    """Run the handler of a task, and settle it."""
    choose, core, task = actor.choices, actor.core, one.task
    key = key_of(one.document)
    run = _start(world, actor, one)
    if run is None:
        return
    yield Wait(choose.randrange(1, 400))
    try:
        if choose.random() < 0.3:
            task = yield core.touch(task, None)
            run.ends_at = task.lease.expires_at
            yield Wait(choose.randrange(1, 1200))
        outcome = "done" if world.calm else choose.choice(OUTCOMES)
        yield from settle(world, actor, task, key, outcome, run)
    except MicroqueueError:
        run.over = True


def _least_backoff_sec(attempts: int) -> float:
    """Return the least backoff of a task, by what the settings say of it."""
    return min(BACKOFF["base_sec"] * 2.0 ** (attempts - 1), BACKOFF["max_sec"]) / 2


def settle(world: World, actor: Actor, task: Task[Any], key: Key, outcome: str, run: Any) -> Script:
    """Settle a task, and note the answer that its worker gets."""
    choose, core, ledger = actor.choices, actor.core, world.ledger
    actor.runs.remove(run)
    run.over = True
    replays = ledger.entries[key].replays
    match outcome:
        case "done":
            yield core.mark_done(task, None, None)
            ledger.end(key, "done", replays)
        case "retry":
            delay_sec = choose.choice([None, 0, 0.2])
            asked_at = world.now()
            status = yield core.mark_retry(task, "try again", None, delay_sec)
            if status is TaskStatus.FAILED:
                ledger.end(key, "failed", replays)
            else:
                least_sec = _least_backoff_sec(task.attempts) if delay_sec is None else delay_sec
                delay = timedelta(seconds=least_sec)
                ledger.retry(key, asked_at=asked_at, delay=delay, replays=replays)
        case "fail":
            ledger.fail(key)
            yield core.mark_failure(task, "no use", None)
            ledger.end(key, "failed", replays)
        case "release":
            ledger.refund(key)
            yield core.release(task, front=choose.random() < 0.5)


def _handle_together(world: World, actor: Actor, claimed: list[Claimed]) -> Script:
    """Run the handlers of several tasks, and mark them done with one call."""
    ledger = world.ledger
    runs = [(one, run) for one in claimed if (run := _start(world, actor, one)) is not None]
    yield Wait(actor.choices.randrange(1, 400))
    for _, run in runs:
        actor.runs.remove(run)
        run.over = True
    try:
        lost: list[LeaseLost] = yield actor.core.mark_done_many([one.task for one, _ in runs])
    except MicroqueueError:
        return
    without_lease = {one.task_id for one in lost}
    for one, _ in runs:
        if one.id not in without_lease:
            ledger.end(key_of(one.document), "done", 0)


# Sweepers


Job = Callable[[World, Actor, datetime], Operation[Any]]
JOBS: dict[str, Job] = {
    "reclaim": lambda world, _actor, now: maintenance.reclaim_stuck(now, world.settings),
    "promote": lambda world, _actor, now: maintenance.promote_all_due(now, world.settings),
    "expire": lambda world, _actor, now: maintenance.expire_undelivered(now, world.settings),
    "bury": lambda world, _actor, now: maintenance.bury_exhausted(now, world.settings),
    "purge": lambda world, _actor, now: maintenance.purge_finished("tasks", now, world.settings),
    "fire": lambda _world, actor, _now: Firer(actor.core).fire(),
}
DLQ_JOBS: dict[str, Job] = {
    "move": lambda _world, _actor, now: dlq_collection.move_all_out(now),
    "finish": lambda _world, _actor, now: dlq_collection.finish_abandoned(now),
}
DUE = {"reclaim": "processing", "promote": "pending"}
"""The jobs that handle what is due by its deadline, and its status."""


def sweeper(world: World, actor: Actor) -> Script:
    """Reclaim, promote, expire, bury, purge, move and fire, without a lock: sweeps may overlap."""
    jobs = JOBS | (DLQ_JOBS if world.settings.separate_dlq else {})
    while True:
        chosen = ["reclaim", "promote", *actor.choices.sample(sorted(jobs), 2)]
        for name in chosen:
            try:
                now = yield actor.core.begin()
                due = _due(world, name, now)
                yield jobs[name](world, actor, now)
            except MicroqueueError:
                continue
            stored = world.server.tasks.documents
            for one in due:
                # The model replaces a document when it changes.
                world.ledger.check_swept(key_of(one), unchanged=stored.get(one["_id"]) is one)
        yield Wait(IDLE_MS)


def _due(world: World, job: str, now: datetime) -> list[dict[str, Any]]:
    """Return the stored tasks that a job must handle."""
    if job not in DUE:
        return []
    found = world.server.tasks.by_status.get(DUE[job], {}).values()
    return [one for one in found if (at := one.get("deadline_at")) is not None and at <= now]


# Schedules, topics and dead letters


def scheduler(world: World, actor: Actor) -> Script:
    """Put two schedules again and again, and pause them at the end."""
    every = timedelta(seconds=1)
    operations = ScheduleOperations(actor.core)
    for name, catch_up in SCHEDULES.items():
        world.ledger.schedules.setdefault(name, Timetable(every, catch_up == "all"))
    stopped: set[str] = set()
    while len(stopped) < len(SCHEDULES):
        for name, catch_up in SCHEDULES.items():
            options: dict[str, Any] = {"catch_up": catch_up}
            try:
                if world.calm:
                    yield operations.put(
                        name, cron=None, every=every, payload={"n": 0}, task=None,
                        timetable=options, paused=True, options={},  # type: ignore[arg-type]
                    )  # fmt: skip
                    stopped.add(name)
                else:
                    yield operations.put(
                        name, cron=None, every=every, payload={"n": 0}, task=None,
                        timetable=options, paused=None,  # type: ignore[arg-type]
                        options={"max_attempts": 3},
                    )  # fmt: skip
            except MicroqueueError:
                yield Wait(IDLE_MS)
        yield Wait(actor.choices.randrange(500, 1500))


def publisher(world: World, actor: Actor) -> Script:
    """Bind two queues to a topic, and publish messages; try again with the same id."""
    choose, ledger = actor.choices, world.ledger
    topic = TopicCore(actor.core, TOPIC, max_messages=100, max_bytes=10_000, live=False)
    bound: list[str] = []
    while len(bound) < len(QUEUES):
        try:
            yield topic.bind(QUEUES[len(bound)], None, {"max_attempts": 3})
        except MicroqueueError:
            yield Wait(IDLE_MS)
        else:
            bound.append(QUEUES[len(bound)])
    while not world.calm:
        number = ledger.number()
        keys: list[Key] = [f"{number}@{queue}" for queue in QUEUES]
        for key in keys:
            ledger.plan(key, not_before=world.now(), max_attempts=3)
        ledger.publish(number, keys)
        for _ in range(3):
            try:
                yield topic.publish({"n": number}, "", None, f"m{number}", None)
            except ServerUnavailable:
                for key in keys:
                    ledger.entries[key].repeatable = True
                yield Wait(choose.randrange(1, 1000))
            else:
                for key in keys:
                    ledger.confirm(key)
                break
        yield Wait(choose.randrange(100, 1000))


def operator(world: World, actor: Actor) -> Script:
    """Replay some dead letters, and discard others."""
    choose, ledger = actor.choices, world.ledger
    while not world.calm:
        yield Wait(choose.randrange(100, 1000))
        operations = DeadLetterOperations(actor.cores[choose.choice(QUEUES)])
        try:
            page = yield operations.page(DeadLetterFilter(), 5, None)
            ids = [one.id for one in page.tasks]
            if not ids:
                continue
            if choose.random() < 0.3:
                ids = [choose.choice(ids)]
                ledger.ask_discard(ids)
                count = yield operations.discard(ids, None, missing_ok=True)
                if count:
                    ledger.discard(ids[0])
                continue
            ledger.replay(ids)
            asked = ledger.replays_of(ids)
            yield operations.replay(
                ids,
                reset_attempts=choose.random() < 0.7,
                delay=choose.choice([None, 1]),
                limit=None,
                dry_run=False,
                missing_ok=True,
            )
            ledger.end_replay(ids, asked)
        except MicroqueueError:
            continue
