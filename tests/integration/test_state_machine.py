"""The whole API against a simple model: whatever is done in whatever order, both agree.

Hypothesis makes up sequences of calls and shrinks one that fails to its essence. The clock is
in the test's hand. Tasks popped long ago are used again and again, as stalled workers would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from microqueue import (
    BackoffPolicy,
    DeadLetterFilter,
    DuplicateTask,
    MicroqueueError,
    NewTask,
    Queue,
    QueueSettings,
    Sweeper,
    Task,
    TaskNotFound,
)
from microqueue.core import core_of
from microqueue.sweeper import JOBS
from microqueue.task import read_task
from microqueue.testing import FakeClock, memory_database
from tests.integration.model import (
    DONE,
    EFFORT,
    FAILED,
    PENDING,
    PROCESSING,
    Backoff,
    Item,
    Model,
    ModelTask,
    Rules,
    id_key,
)

# Far in the future, so that the server's own expiry of finished tasks never comes in between.
START = datetime(2100, 1, 1, tzinfo=UTC)
QUEUES = ("mail", "reports")

RULES = Rules(
    max_attempts=3,
    visibility_sec=10,
    backoff=Backoff(base_sec=2, factor=2, max_sec=6),
    history_limit=2,
    retention_sec=60,
    moves_dead_letters=False,
)


def policy(backoff: Backoff) -> BackoffPolicy:
    return BackoffPolicy(
        base_sec=backoff.base_sec, factor=backoff.factor, max_sec=backoff.max_sec, jitter="none"
    )


def queue_settings(mode: Any) -> QueueSettings:
    return QueueSettings(
        max_attempts=RULES.max_attempts,
        visibility_timeout=RULES.visibility_sec,
        backoff=policy(RULES.backoff),
        history_limit=RULES.history_limit,
        retention=RULES.retention_sec,
        dead_letters=mode,
        batch_size=3,  # So small that everything is done in several batches.
    )


queues = st.sampled_from([QUEUES[0], *QUEUES])  # Mostly the first, so that much happens in it.
codes = st.sampled_from([None, "timeout", "refused"])
limits = st.sampled_from([None, None, 1, 2])
items = st.builds(
    Item,
    task_id=st.sampled_from([None, None, None, "a", "b", "c", 7]),
    priority=st.sampled_from([0, 0, 0, 1, 2, 3]),
    delay=st.sampled_from([None, None, None, 0, 0.0015, 5]),
    max_attempts=st.sampled_from([None, None, 1, 2]),
    expires_in=st.sampled_from([None, None, None, 1, 8]),
    dedupe_key=st.sampled_from([None, None, "x"]),
    visibility_timeout=st.sampled_from([None, None, 3]),
    backoff=st.sampled_from([None, None, Backoff(0, 1, 0), Backoff(0.5, 3, 100)]),
)
batches = st.lists(items, min_size=1, max_size=4)

# What a worker can do with a task; numbers are seconds.
settlements = st.sampled_from(
    [
        "done",
        "failure",
        "retry",
        "retry 0",
        "retry 3",
        "release",
        "release to the front",
        "touch",
        "touch 0",
        "touch 4",
    ]
)

# A task is named by its place, counted from the latest one added, or popped.
places = st.integers(0, 9)

# What can happen, how often in comparison, and with which arguments. Separate rules would
# be drawn without weights, and Hypothesis would leave out half of them in each example.
ACTIONS: dict[str, tuple[int, dict[str, st.SearchStrategy[Any]]]] = {
    "enqueue": (5, {"queue": queues, "batch": batches}),
    "pop": (6, {"queue": queues, "limit": st.integers(1, 4)}),
    "settle": (8, {"place": places, "how": settlements, "code": codes}),
    "settle_what_was_popped_before": (
        4,
        {"place": places, "how": settlements, "code": codes},
    ),
    "mark_done_many": (1, {"chosen": st.lists(places, min_size=1, max_size=3)}),
    "cancel": (1, {"place": places}),
    "purge": (
        1,
        {"queue": queues, "status": st.sampled_from([PENDING, DONE, FAILED]), "age": limits},
    ),
    "allow_no_more_attempts_by_hand": (1, {"place": places, "sweep": st.booleans()}),
    "let_time_pass": (2, {"seconds": st.sampled_from([0.001, 0.5, 1, 3, 10, 61])}),
    "let_time_pass_until_something_is_due": (
        4,
        {"short": st.sampled_from([0, 0, 0.001]), "sweep": st.booleans()},
    ),
    "let_workers_stall_and_another_take_over": (2, {"queue": queues}),
    "sweep": (4, {"job": st.sampled_from([*JOBS, "run_once"])}),
    "replay": (
        3,
        {
            "queue": queues,
            "chosen": st.none() | st.lists(places, min_size=1, max_size=3),
            "code": st.sampled_from([None, None, None, "timeout", "expired"]),
            "reset_attempts": st.booleans(),
            "delay": st.sampled_from([None, None, 4]),
            "limit": limits,
        },
    ),
    "discard": (
        1,
        {"queue": queues, "chosen": st.lists(places, min_size=1, max_size=3), "limit": limits},
    ),
    "look": (
        2,
        {
            "place": places,
            "queue": queues,
            "status": st.sampled_from([PENDING, PROCESSING, DONE, FAILED, None]),
            "code": codes,
            "limit": st.integers(1, 3),
        },
    ),
}
actions = st.sampled_from(
    [name for name, (weight, _) in ACTIONS.items() for _ in range(weight)]
).flatmap(lambda name: st.tuples(st.just(name), st.fixed_dictionaries(ACTIONS[name][1])))


def options_of(item: Item) -> dict[str, Any]:
    return {
        "priority": item.priority,
        "delay": item.delay,
        "max_attempts": item.max_attempts,
        "expires_in": item.expires_in,
        "dedupe_key": item.dedupe_key,
        "task_id": item.task_id,
        "visibility_timeout": item.visibility_timeout,
        "backoff": None if item.backoff is None else policy(item.backoff),
    }


class QueueMachine(RuleBasedStateMachine):
    """Does everything twice: to the queue, and to the model."""

    def __init__(self, open_collection: Callable[[], Any], mode: str) -> None:
        super().__init__()
        self.clock = FakeClock(START)
        self.collection = open_collection()
        self.mode = mode
        self.queues: dict[str, Queue[Any]] = {
            name: Queue(self.collection, name, clock=self.clock, settings=queue_settings(mode))
            for name in QUEUES
        }
        self.any_queue = self.queues[QUEUES[0]]
        self.sweeper = Sweeper(self.any_queue)
        rules = RULES if mode == "status" else Rules(**{**vars(RULES), "moves_dead_letters": True})
        self.model = Model(rules, START)
        self.ids: list[Any] = []
        self.popped: list[Task[Any]] = []

    @initialize(queue=queues, batch=st.lists(items, min_size=3, max_size=6))
    def begin_with_a_few(self, queue: str, batch: list[Item]) -> None:
        self.enqueue(queue, batch)

    @rule(action=actions)
    def then(self, action: tuple[str, dict[str, Any]]) -> None:
        name, arguments = action
        getattr(self, name)(**arguments)

    def id_at(self, place: int, status: str | None = None) -> Any:
        """Return the id of a task in this status if there is one, else any, else an unknown id."""
        fitting = [task.id for task in self.model.tasks.values() if task.status == status]
        ids = [*self.ids, *fitting]
        return ids[-1 - place] if place < len(ids) else "unknown"

    # Produce

    def enqueue(self, queue: str, batch: list[Item]) -> None:
        if len(batch) > 1:
            self.enqueue_many(queue, batch)
            return
        (item,) = batch
        position = self.model.take_position(queue)
        if self.model.is_duplicate(queue, item):
            with pytest.raises(DuplicateTask):
                self.queues[queue].enqueue({}, **options_of(item))
        else:
            task = self.queues[queue].enqueue({}, **options_of(item))
            self.add(queue, item, task, position)

    def enqueue_many(self, queue: str, batch: list[Item]) -> None:
        first = self.model.take_position(queue, len(batch))
        news = [NewTask[Any](payload={}, **options_of(item)) for item in batch]
        report = self.queues[queue].enqueue_many(news)
        added = iter(report.tasks)
        refused = []
        for number, item in enumerate(batch):
            if self.model.is_duplicate(queue, item):
                refused.append(number)
            else:
                self.add(queue, item, next(added), first + number)
        assert [duplicate.index for duplicate in report.duplicates] == refused
        assert list(added) == []

    def add(self, queue: str, item: Item, task: Task[Any], position: int) -> None:
        self.model.add(queue, item, task.id, position)
        self.ids.append(task.id)

    # Claim

    def pop(self, queue: str, limit: int) -> None:
        expected = self.model.pop(queue, limit)
        if limit > 1:
            tasks = self.queues[queue].pop_many(limit)
        else:
            task = self.queues[queue].pop()
            tasks = [] if task is None else [task]
        assert [task.id for task in tasks] == [task.id for task in expected]
        for task, known in zip(tasks, expected, strict=True):
            known.token = token_of(task)
            assert_alike(task, known)
            assert known.not_before is None or known.not_before <= self.clock.now(), "too early"
            assert known.deliveries <= known.max_attempts, "delivered too often"
        self.popped += tasks

    # Settle

    def settle(self, place: int, how: str, code: str | None) -> None:
        """Settle what is held, as workers do."""
        held = [task for task in self.popped if self.model.holds(task)]
        if held:
            self.settle_as(how, held[-1 - place % len(held)], code)

    def settle_what_was_popped_before(self, place: int, how: str, code: str | None) -> None:
        """Settle what may have been settled, reclaimed, or taken by another since."""
        if self.popped:
            self.settle_as(how, self.popped[-1 - place % len(self.popped)], code)

    def settle_as(self, how: str, task: Task[Any], code: str | None) -> None:
        queue, model = self.any_queue, self.model
        match how.split():
            case ["done"]:
                self.both(lambda: queue.mark_done(task), lambda: model.mark_done(task))
            case ["failure"]:
                self.both(
                    lambda: queue.mark_failure(task, "broken", code=code),
                    lambda: model.mark_failure(task, code),
                )
            case ["retry", *delays]:
                delay = float(delays[0]) if delays else None
                self.both(
                    lambda: queue.mark_retry(task, "broken", code=code, delay=delay),
                    lambda: model.mark_retry(task, code, delay),
                )
            case ["release", *front]:
                self.both(
                    lambda: queue.release(task, front=bool(front)),
                    lambda: model.release(task, front=bool(front)),
                )
            case ["touch", *extensions]:
                extend = float(extensions[0]) if extensions else None
                self.both(
                    lambda: queue.touch(task, extend=extend).lease is None,
                    lambda: model.touch(task, extend),
                )

    def both(self, real: Callable[[], Any], expected: Callable[[], Any]) -> None:
        """Do the same to both, and see that the same comes of it, be it an error."""
        try:
            result = expected()
        except MicroqueueError as exc:
            with pytest.raises(type(exc)):
                real()
        else:
            assert real() == result

    def mark_done_many(self, chosen: list[int]) -> None:
        tasks = [self.popped[-1 - place] for place in set(chosen) if place < len(self.popped)]
        expected = self.model.mark_done_many(tasks)
        lost = self.any_queue.mark_done_many(tasks)
        assert Counter(error.task_id for error in lost) == Counter(expected)

    # Administer

    def cancel(self, place: int) -> None:
        task_id = self.id_at(place, PROCESSING if place % 2 else PENDING)

        def cancel() -> None:
            assert self.any_queue.cancel(task_id).status == FAILED

        self.both(cancel, lambda: self.model.cancel(task_id))

    def purge(self, queue: str, status: str, age: float | None) -> None:
        expected = self.model.purge(queue, status, age)
        assert self.queues[queue].purge(status=status, older_than=age) == expected

    def allow_no_more_attempts_by_hand(self, place: int, sweep: bool) -> None:
        """Edit a waiting task behind the queue's back: the backstop must catch it."""
        waiting = [task for task in self.model.tasks.values() if task.status == PENDING]
        retried = [task for task in waiting if task.attempts]
        if retried:
            task = retried[place % len(retried)]
            task.max_attempts = task.attempts
            change = {"$set": {"max_attempts": task.attempts}}
            self.collection.update_one({"_id": task.id}, change)
            if sweep:
                self.sweep("bury_exhausted")

    # Time, and the sweeper

    def let_time_pass(self, seconds: float) -> None:
        self.model.now = self.clock.advance(seconds)

    def let_time_pass_until_something_is_due(self, short: float, sweep: bool) -> None:
        """Go exactly to the next instant at which anything changes, or stop short of it."""
        now = self.clock.now()
        instants = [
            instant
            for task in self.model.tasks.values()
            if task.live
            for instant in (task.next_retry_at, task.expires_at, task.lease_expires_at)
            if instant is not None and instant > now
        ]
        if instants:
            self.let_time_pass((min(instants) - now).total_seconds() - short)
            if sweep:
                self.run_once()

    def let_workers_stall_and_another_take_over(self, queue: str) -> None:
        self.let_time_pass(30)
        self.sweep("reclaim_stuck")
        self.let_time_pass(10)
        self.pop(queue, 2)

    def sweep(self, job: str) -> None:
        if job == "run_once":
            self.run_once()
            return
        expected = getattr(self.model, job)()
        if isinstance(expected, tuple):
            expected = sum(expected)
        assert getattr(self.sweeper, job)() == expected

    def run_once(self) -> None:
        report = self.sweeper.run_once()
        reclaimed, buried = self.model.reclaim_stuck()
        assert report.ok
        assert not report.skipped
        assert report.reclaimed == reclaimed
        # One pass looks at all that is due: what expired or is used up fails there.
        assert report.expired == self.model.expire_undelivered()
        assert report.buried == buried + self.model.bury_exhausted()
        assert report.promoted == self.model.promote_due()
        assert report.purged == self.model.purge_finished()
        assert report.moved == self.model.move_dead_letters()

    # Dead letters

    def replay(
        self,
        queue: str,
        chosen: list[int] | None,
        code: str | None,
        reset_attempts: bool,
        delay: float | None,
        limit: int | None,
    ) -> None:
        which: DeadLetterFilter | list[Any]
        if chosen is None:
            which = DeadLetterFilter(code=code)
            letters = self.model.oldest_letters(queue, None, code, limit)
        else:
            which = [self.id_at(place, FAILED) for place in chosen]
            letters = self.model.oldest_letters(queue, which, None, limit)
        dead_letters = self.queues[queue].dead_letters
        missing = self.model.missing(queue, which) if isinstance(which, list) else []
        if missing:
            with pytest.raises(TaskNotFound) as caught:
                dead_letters.replay(which, limit=limit)
            assert caught.value.task_ids == missing
        options: dict[str, Any] = {"limit": limit, "missing_ok": bool(missing)}
        dry = dead_letters.replay(which, dry_run=True, **options)
        assert (dry.matched, dry.replayed, list(dry.missing)) == (len(letters), 0, missing)

        skipped = self.model.replay(queue, letters, reset_attempts=reset_attempts, delay=delay)
        options |= {"reset_attempts": reset_attempts, "delay": delay}
        report = dead_letters.replay(which, **options)

        assert (report.matched, list(report.missing)) == (len(letters), missing)
        assert report.replayed == len(letters) - len(skipped)
        assert Counter(report.skipped) == Counter(skipped)

    def discard(self, queue: str, chosen: list[int], limit: int | None) -> None:
        ids = [self.id_at(place, FAILED) for place in chosen]
        letters = self.model.oldest_letters(queue, ids, None, limit)
        dead_letters = self.queues[queue].dead_letters
        missing = self.model.missing(queue, ids)
        if missing:
            with pytest.raises(TaskNotFound) as caught:
                dead_letters.discard(ids, limit=limit)
            assert caught.value.task_ids == missing
        self.model.take_position(queue)
        discarded = dead_letters.discard(ids, limit=limit, missing_ok=bool(missing))
        assert discarded == len(letters)
        self.model.discard(letters)

    # Looking

    def look(
        self, place: int, queue: str, status: str | None, code: str | None, limit: int
    ) -> None:
        """Call every view: all are read-only, as the next steps show."""
        self.get(self.id_at(place))
        self.peek(queue, status)
        self.stats(queue)
        self.list_letters(queue, code, limit)
        self.letter_stats(queue)

    def list_letters(self, queue: str, code: str | None, limit: int) -> None:
        letters = self.queues[queue].dead_letters
        page = letters.list(code=code, limit=limit)
        listed = [task.id for task in page]
        while page.next_cursor is not None:
            page = letters.list(code=code, limit=limit, cursor=page.next_cursor)
            assert 0 < len(page) <= limit
            listed += [task.id for task in page]
        assert listed == [task.id for task in self.model.letters(queue, code=code)]

    def get(self, task_id: Any) -> None:
        task = self.any_queue.get(task_id)
        known = self.model.tasks.get(task_id)
        assert (task is None) == (known is None)
        if task is not None and known is not None:
            assert_alike(task, known)

    def peek(self, queue: str, status: str | None) -> None:
        expected = self.model.newest(queue, status)
        peeked = self.any_queue.peek(3, status=status, queue=queue)
        assert [task.id for task in peeked] == expected[:3]

    def stats(self, queue: str) -> None:
        stats = self.queues[queue].stats()
        now = self.clock.now()
        tasks = [task for task in self.model.tasks.values() if task.queue == queue]
        ready = [task for task in tasks if task.ready]
        due = [t.next_retry_at for t in tasks if t.status == PENDING and t.next_retry_at]
        held = [task for task in tasks if task.status == PROCESSING]
        assert stats.ready == len(ready)
        assert stats.delayed == len(due)
        assert stats.processing == len(held)
        assert stats.overdue == sum(
            task.lease_expires_at is not None and task.lease_expires_at <= now for task in held
        )
        assert stats.done == sum(task.status == DONE for task in tasks)
        assert stats.failed == sum(task.status == FAILED for task in tasks)
        assert stats.next_due_at == min(due, default=None)
        ages = [(now - task.updated_at).total_seconds() for task in ready]
        assert stats.oldest_ready_age_sec == max(ages, default=None)

    def letter_stats(self, queue: str) -> None:
        stats = self.queues[queue].dead_letters.stats()
        letters = self.model.letters(queue)
        failed_at = [task.updated_at for task in letters]
        assert stats.total == len(letters)
        assert Counter(stats.by_code) == Counter(task.code or "none" for task in letters)
        assert (stats.oldest_at, stats.newest_at) == (
            min(failed_at, default=None),
            max(failed_at, default=None),
        )

    # Always

    @invariant()
    def the_database_and_the_model_agree(self) -> None:
        collections = core_of(self.any_queue).collections
        stored = {document["_id"]: document for document in collections.tasks.find()}
        moved: dict[Any, dict[str, Any]] = {}
        if self.mode == "collection":
            found = collections.dead_letters.find({"retired_at": None})
            moved = {document["_id"]: document for document in found}
        assert not stored.keys() & moved.keys(), "a letter is in both places"
        expected = {task.id for task in self.model.tasks.values() if not task.moved}
        assert stored.keys() == expected
        assert moved.keys() == self.model.tasks.keys() - expected
        for task_id, document in {**stored, **moved}.items():
            assert_alike(read_task(document), self.model.tasks[task_id])
        for queue in QUEUES:
            assert self.line(queue, stored.values()) == [task.id for task in self.model.line(queue)]
        keys = [
            (document["queue"], document["dedupe_key"])
            for document in stored.values()
            if document["status"] in {PENDING, PROCESSING} and "dedupe_key" in document
        ]
        assert len(keys) == len(set(keys)), "a dedupe key is alive twice"

    @staticmethod
    def line(queue: str, documents: Iterable[dict[str, Any]]) -> list[Any]:
        """Return the ids of ready tasks, in the order in which they will be delivered."""
        ready = [
            document
            for document in documents
            if document["queue"] == queue
            and document["status"] == PENDING
            and document["next_retry_at"] is None
        ]
        ready.sort(key=lambda one: (-one["priority"], one["position"], id_key(one["_id"])))
        return [document["_id"] for document in ready]


def token_of(task: Task[Any]) -> str | None:
    return task.lease.token if task.lease else None


def assert_alike(task: Task[Any], known: ModelTask) -> None:
    assert task.queue == known.queue
    assert task.status == known.status
    assert task.priority == known.priority
    assert task.attempts == known.attempts
    assert task.max_attempts == known.max_attempts
    assert task.redelivered == known.redelivered
    assert task.replays == known.replays
    assert task.dedupe_key == known.dedupe_key
    assert (task.error.code if task.error else None) == known.code
    assert task.created_at == known.created_at
    assert task.updated_at == known.updated_at
    assert task.next_retry_at == known.next_retry_at
    assert task.expires_at == known.expires_at
    assert task.finished_at == known.finished_at
    lease = (task.lease.token, task.lease.expires_at) if task.lease else (None, None)
    assert lease == (known.token, known.lease_expires_at)
    history = [
        (entry.attempt, entry.outcome, entry.error.code if entry.error else None)
        for entry in task.history
    ]
    assert history == [(entry.attempt, entry.outcome, entry.code) for entry in known.history]


def run(open_collection: Callable[[], Any], mode: str, *, examples: int, shrink: bool) -> None:
    machine = cast("type[QueueMachine]", partial(QueueMachine, open_collection, mode))
    profile = settings(
        max_examples=examples * EFFORT,
        stateful_step_count=50,
        derandomize=EFFORT == 1,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=profile)


@pytest.mark.timeout(400 * EFFORT)  # Shrinking a failure takes up to five minutes.
@pytest.mark.parametrize("mode", ["status", "collection"])
def test_in_memory_the_queue_does_what_the_model_does(mode: str) -> None:
    run(lambda: memory_database().tasks, mode, examples=40, shrink=True)


@pytest.mark.timeout(400 * EFFORT)  # Shrinking a failure takes up to five minutes.
@pytest.mark.parametrize("mode", ["status", "collection"])
def test_on_a_server_the_queue_does_what_the_model_does(
    mode: str, microqueue_database: Any
) -> None:
    def emptied() -> Any:
        # The indexes stay: building them for every example would take most of the time.
        for name in ("tasks", "tasks_dlq"):
            microqueue_database[name].delete_many({})
        return microqueue_database.tasks

    # Shrinking takes minutes on a server; most of what goes wrong does so in memory, too.
    run(emptied, mode, examples=12, shrink=EFFORT > 1)
