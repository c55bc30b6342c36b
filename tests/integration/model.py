"""What the integration tests share: a queue as simple as can be, and a slow-motion driver.

:class:`Model` says what the queue should do, in plain Python over a dictionary. It shares no
code with ``microqueue`` but its errors and statuses, and knows nothing of MongoDB.

:class:`Steps` performs one call of the API a database call at a time, so that a test can do
anything else in between: what another process would do there, or nothing ever again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn, TypeAlias, cast

from bson import ObjectId
from pymongo.errors import PyMongoError

from microqueue import DuplicateTask, LeaseLost, Queue, Task, TaskNotFound, WrongStatus
from microqueue.core import core_of
from microqueue.errors import OperationFailed
from microqueue.operations.call import Call, Operation
from tests.tapping import tap

# TEST_EFFORT=20 looks 20 times as hard, with new examples each time, for as long as that takes.
EFFORT = int(os.environ.get("TEST_EFFORT", "1"))

PENDING, PROCESSING, DONE, FAILED = "pending", "processing", "done", "failed"

# Slow motion


class _Captured(BaseException):
    """Carries an operation out of the API call that was about to run it."""

    def __init__(self, operation: Operation[Any]) -> None:
        super().__init__()
        self.operation = operation


def _capture(_usual: Callable[..., Any], operation: Operation[Any]) -> NoReturn:
    raise _Captured(operation)


def operation_of(queue: Queue[Any], use: Callable[[Queue[Any]], object]) -> Operation[Any]:
    """Return the operation that a call of the API would run, without running it."""
    settings = queue.settings.model_copy(update={"ensure_indexes": False})
    twin = Queue[Any](
        core_of(queue).collections.tasks, queue.name, settings=settings, clock=queue.clock
    )
    tap(twin, _capture)
    try:
        use(twin)
    except _Captured as captured:
        return captured.operation
    raise AssertionError("the call ran no operation")


def perform(queue: Queue[Any], call: Call) -> Any:
    """Perform a single database call; a driver's error comes out as the driver raised it."""

    def single() -> Generator[Call, Any, Any]:
        return (yield call)

    try:
        return core_of(queue).run(single())
    except OperationFailed as exc:
        if isinstance(exc.__cause__, PyMongoError):
            raise exc.__cause__ from None
        raise


class Steps:
    """One call of the API, performed step by step."""

    def __init__(self, queue: Queue[Any], use: Callable[[Queue[Any]], object]) -> None:
        self.queue = queue
        self._operation = operation_of(queue, use)
        self.result: Any = None
        self.next: Call | None = None
        self._proceed(lambda: next(self._operation))

    def step(self) -> None:
        """Perform the next database call."""
        assert self.next is not None, "the operation is over"
        call = self.next
        try:
            reply = perform(self.queue, call)
        except PyMongoError as exc:
            error = exc  # The name of an except clause ends with it.
            self._proceed(lambda: self._operation.throw(error))
        else:
            self._proceed(lambda: self._operation.send(reply))

    def until(self, method: str) -> Steps:
        """Go on until the next database call is of this method, and stop before it."""
        while self.next is not None and self.next.method != method:
            self.step()
        assert self.next is not None, f"the operation never called {method}"
        return self

    def finish(self) -> Any:
        """Go on to the end and give the result."""
        while self.next is not None:
            self.step()
        return self.result

    def _proceed(self, resume: Callable[[], Call]) -> None:
        try:
            self.next = resume()
        except StopIteration as stop:
            self.next, self.result = None, stop.value


# The model


def microseconds(instant: datetime) -> int:
    return (instant - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def in_whole_milliseconds(seconds: float) -> timedelta:
    """Round up, as a delayed task is never early."""
    return timedelta(milliseconds=math.ceil(round(seconds * 1000, 6)))


IdKey: TypeAlias = tuple[int, Any]


def id_key(task_id: Any) -> IdKey:
    """Order ids as MongoDB does: numbers, then text, then ObjectIds."""
    return ([int, str, ObjectId].index(type(task_id)), task_id)


@dataclass(frozen=True)
class Backoff:
    """Exponential, without a jitter."""

    base_sec: float
    factor: float
    max_sec: float

    def after(self, attempts: int) -> float:
        return float(min(self.base_sec * self.factor ** max(attempts - 1, 0), self.max_sec))


@dataclass(frozen=True)
class Rules:
    """The settings of the queue, as the model needs them."""

    max_attempts: int
    visibility_sec: float
    backoff: Backoff
    history_limit: int
    retention_sec: float
    moves_dead_letters: bool


@dataclass(frozen=True)
class Entry:
    """One line of a task's history; the token is not known of what never left the queue."""

    attempt: int
    outcome: str
    code: str | None
    token: str | None


@dataclass
class ModelTask:
    """A task, with what the tests compare and what the rules need."""

    id: Any
    queue: str
    priority: int
    position: int
    created_at: datetime
    updated_at: datetime
    max_attempts: int
    next_retry_at: datetime | None
    expires_at: datetime | None
    dedupe_key: str | None
    visibility_sec: float
    backoff: Backoff
    status: str = PENDING
    attempts: int = 0
    redelivered: bool = False
    replays: int = 0
    code: str | None = None
    finished_at: datetime | None = None
    token: str | None = None
    lease_expires_at: datetime | None = None
    history: list[Entry] = field(default_factory=list)
    moved: bool = False
    # Not stored by the queue: what it must never break.
    not_before: datetime | None = None
    deliveries: int = 0

    @property
    def ready(self) -> bool:
        return self.status == PENDING and self.next_retry_at is None

    @property
    def live(self) -> bool:
        return self.status in {PENDING, PROCESSING}


@dataclass(frozen=True)
class Item:
    """What is given to ``enqueue``."""

    task_id: Any = None
    priority: int = 0
    delay: float | None = None
    max_attempts: int | None = None
    expires_in: float | None = None
    dedupe_key: str | None = None
    visibility_timeout: float | None = None
    backoff: Backoff | None = None


class Model:
    """All queues of one collection, in a dictionary."""

    def __init__(self, rules: Rules, now: datetime) -> None:
        self.rules = rules
        self.now = now
        self.tasks: dict[Any, ModelTask] = {}
        self._next_position: dict[str, int] = {}

    def take_position(self, queue: str, count: int = 1) -> int:
        first = max(self._next_position.get(queue, 0), microseconds(self.now))
        self._next_position[queue] = first + count
        return first

    # Produce

    def is_duplicate(self, queue: str, item: Item) -> bool:
        return item.task_id in self.tasks or self.holder_of(queue, item.dedupe_key) is not None

    def holder_of(self, queue: str, dedupe_key: str | None) -> ModelTask | None:
        for task in self.tasks.values():
            if task.live and task.queue == queue and task.dedupe_key == dedupe_key is not None:
                return task
        return None

    def add(self, queue: str, item: Item, task_id: Any, position: int) -> None:
        if self.is_duplicate(queue, item):
            raise DuplicateTask(
                queue=queue, task_id=task_id, dedupe_key=item.dedupe_key, existing_id=None
            )
        later = self.now + in_whole_milliseconds(item.delay) if item.delay else None
        self.tasks[task_id] = ModelTask(
            id=task_id,
            queue=queue,
            priority=item.priority,
            position=position,
            created_at=self.now,
            updated_at=self.now,
            max_attempts=item.max_attempts or self.rules.max_attempts,
            next_retry_at=later,
            not_before=later,
            expires_at=self.now + in_whole_milliseconds(item.expires_in)
            if item.expires_in
            else None,
            dedupe_key=item.dedupe_key,
            visibility_sec=item.visibility_timeout or self.rules.visibility_sec,
            backoff=item.backoff or self.rules.backoff,
        )

    # Claim

    def pop(self, queue: str, limit: int = 1) -> list[ModelTask]:
        """Claim up to ``limit`` tasks; the caller adds the tokens."""
        while True:
            self.promote(queue)
            line = self.line(queue)[:limit]
            if not line:
                return []
            if delivered := [task for task in line if self._claim(task)]:
                return delivered
            self._bury_waiting(lambda task: task.queue == queue and self._expired(task), "expired")

    def line(self, queue: str) -> list[ModelTask]:
        """List what is ready, in the order in which it will be delivered."""
        ready = [task for task in self.tasks.values() if task.queue == queue and task.ready]
        return sorted(ready, key=lambda task: (-task.priority, task.position, id_key(task.id)))

    def _claim(self, task: ModelTask) -> bool:
        task.attempts += 1
        task.status = PROCESSING
        task.updated_at = self.now
        task.lease_expires_at = self.now + timedelta(seconds=task.visibility_sec)
        if task.expires_at is not None and task.expires_at <= self.now:
            self._end_attempt(task, "failed", "expired")
        elif task.attempts > task.max_attempts:
            self._end_attempt(task, "failed", "max_attempts")
        else:
            task.deliveries += 1
            return True
        task.attempts -= 1  # It was not delivered.
        self._bury(task)
        self._move(task)
        return False

    def promote(self, queue: str) -> int:
        """Make due tasks ready, and bury what expired or has no attempt left."""
        here = [task for task in self.tasks.values() if task.queue == queue]
        self._bury_waiting(self._expired, "expired", here)
        self._bury_waiting(self._due_and_used_up, "max_attempts", here)
        due = [task for task in here if self._due(task)]
        for task in due:
            task.next_retry_at, task.updated_at = None, self.now
        return len(due)

    def _due(self, task: ModelTask) -> bool:
        later = task.next_retry_at
        return task.status == PENDING and later is not None and later <= self.now

    def _due_and_used_up(self, task: ModelTask) -> bool:
        used_up = task.attempts >= max(task.max_attempts, 1)
        return used_up and self._due(task) and not self._expired(task)

    # Settle

    def holds(self, popped: Task[Any]) -> bool:
        """Return whether a claim still holds its task."""
        token = popped.lease.token if popped.lease else None
        task = self.tasks.get(popped.id)
        return task is not None and task.status == PROCESSING and task.token == token

    def held(self, popped: Task[Any], outcome: str | None) -> ModelTask | None:
        """Find the task of a claim that still holds; nothing if it was settled just so."""
        token = popped.lease.token if popped.lease else None
        task = self.tasks.get(popped.id)
        if self.holds(popped):
            return task
        settled = task is not None and any(
            entry.token == token and entry.outcome == outcome for entry in task.history
        )
        if settled:
            return None
        raise LeaseLost(task_id=popped.id, worker_id=None, reason="the model says so")

    def mark_done(self, popped: Task[Any]) -> None:
        if task := self.held(popped, "done"):
            self._end_attempt(task, "done")
            task.status, task.finished_at = DONE, self.now

    def mark_done_many(self, popped: Iterable[Task[Any]]) -> list[Any]:
        lost = []
        for one in popped:
            try:
                self.mark_done(one)
            except LeaseLost as exc:
                lost.append(exc.task_id)
        return lost

    def mark_retry(self, popped: Task[Any], code: str | None, delay: float | None) -> str:
        last = popped.attempts >= popped.max_attempts
        if task := self.held(popped, "failed" if last else "retried"):
            self._retry(task, "failed" if last else "retried", code, delay)
            self._move(task)
        return FAILED if last else PENDING

    def mark_failure(self, popped: Task[Any], code: str | None) -> None:
        if task := self.held(popped, "failed"):
            self._end_attempt(task, "failed", code)
            self._bury(task)
            self._move(task)

    def release(self, popped: Task[Any], *, front: bool) -> None:
        if task := self.held(popped, "released"):
            self._end_attempt(task, "released", keep_code=True)
            task.status, task.next_retry_at = PENDING, None
            task.attempts -= 1
            task.deliveries -= 1
            if front:
                task.position = -microseconds(self.now)
            else:
                self._leave_front(task)

    def touch(self, popped: Task[Any], extend: float | None) -> bool:
        """Return whether the task has no lease now."""
        task = self.held(popped, None)
        assert task is not None
        seconds = task.visibility_sec if extend is None else extend
        task.lease_expires_at = self.now + timedelta(seconds=seconds)
        task.updated_at = self.now
        return False

    def _retry(self, task: ModelTask, outcome: str, code: str | None, delay: float | None) -> None:
        if task.attempts >= task.max_attempts:
            self._end_attempt(task, outcome, code)
            self._bury(task)
            return
        wait = task.backoff.after(task.attempts) if delay is None else delay
        self._end_attempt(task, outcome, code)
        task.status = PENDING
        task.next_retry_at = self.now + in_whole_milliseconds(wait) if wait else None
        task.not_before = task.next_retry_at
        self._leave_front(task)

    def _leave_front(self, task: ModelTask) -> None:
        if task.position < 0:  # A turn at the front is for once.
            task.position = microseconds(task.created_at)

    def _end_attempt(
        self, task: ModelTask, outcome: str, code: str | None = None, *, keep_code: bool = False
    ) -> None:
        entry = Entry(task.attempts, outcome, code, task.token)
        # A success is not stored in the history, and so pushes nothing out of it.
        kept = self.rules.history_limit + (outcome == "done")
        task.history = [*task.history, entry][-kept:]
        if not keep_code:
            task.code = code
        task.updated_at = self.now
        task.token = task.lease_expires_at = None

    def _bury(self, task: ModelTask) -> None:
        task.status, task.finished_at, task.updated_at = FAILED, self.now, self.now

    def _move(self, task: ModelTask) -> None:
        task.moved = task.status == FAILED and self.rules.moves_dead_letters

    # Sweep

    def reclaim_stuck(self) -> tuple[int, int]:
        """Return how many wait again, and how many became dead letters."""
        stuck = [
            task
            for task in self.tasks.values()
            if task.status == PROCESSING
            and task.lease_expires_at is not None
            and task.lease_expires_at <= self.now
        ]
        for task in stuck:
            task.redelivered = True
            self._retry(task, "lease_expired", "lease_expired", None)
        buried = sum(task.status == FAILED for task in stuck)
        return len(stuck) - buried, buried

    def reclaim_orphaned(self) -> int:
        return 0  # Nobody registers here.

    def fire_schedules(self) -> int:
        return 0  # The model has none.

    def promote_due(self) -> int:
        return sum(self.promote(queue) for queue in {task.queue for task in self.tasks.values()})

    def bury_exhausted(self) -> int:
        return self._bury_waiting(self._due_and_used_up, "max_attempts")

    def expire_undelivered(self) -> int:
        return self._bury_waiting(self._expired, "expired")

    def _expired(self, task: ModelTask) -> bool:
        return task.expires_at is not None and task.expires_at <= self.now

    def _bury_waiting(
        self,
        condition: Callable[[ModelTask], bool],
        code: str,
        among: Sequence[ModelTask] | None = None,
    ) -> int:
        tasks = list(self.tasks.values()) if among is None else among
        chosen = [task for task in tasks if task.status == PENDING and condition(task)]
        for task in chosen:
            self._bury(task)
            task.code = code
        return len(chosen)

    def purge_finished(self) -> int:
        oldest = self.now - timedelta(seconds=self.rules.retention_sec)
        return self._delete(
            lambda task: task.status == DONE and cast("datetime", task.finished_at) <= oldest
        )

    def move_dead_letters(self) -> int:
        if not self.rules.moves_dead_letters:
            return 0
        letters = [t for t in self.tasks.values() if t.status == FAILED and not t.moved]
        for task in letters:
            task.moved = True
        return len(letters)

    def _delete(self, condition: Callable[[ModelTask], bool]) -> int:
        chosen = [task_id for task_id, task in self.tasks.items() if condition(task)]
        for task_id in chosen:
            del self.tasks[task_id]
        return len(chosen)

    # Administer

    def cancel(self, task_id: Any) -> None:
        task = self.tasks.get(task_id)
        if task is None:
            raise TaskNotFound(task_id=task_id)
        if task.status == PROCESSING:
            self._end_attempt(task, "cancelled", "cancelled")
        elif task.status != PENDING:
            needed = "pending or processing"
            raise WrongStatus(task_id=task_id, status=task.status, needed=needed)
        self._bury(task)
        task.code = "cancelled"
        self._move(task)

    def purge(self, queue: str, status: str, older_than: float | None) -> int:
        before = None if older_than is None else self.now - timedelta(seconds=older_than)
        return self._delete(
            lambda task: (
                task.queue == queue
                and task.status == status
                and (before is None or task.updated_at < before)
            )
        )

    def newest(self, queue: str, status: str | None) -> list[Any]:
        chosen = [
            task
            for task in self.tasks.values()
            if task.queue == queue and status in {None, task.status}
        ]
        ordered = sorted(chosen, key=lambda task: (task.created_at, id_key(task.id)))
        return [task.id for task in reversed(ordered)]

    # Dead letters

    def letters(
        self, queue: str, ids: Sequence[Any] | None = None, code: str | None = None
    ) -> list[ModelTask]:
        """List the chosen dead letters, newest first."""
        chosen = [
            task
            for task in self.tasks.values()
            if task.queue == queue
            and task.status == FAILED
            and (ids is None or task.id in ids)
            and code in {None, task.code}
        ]
        by_id = sorted(chosen, key=lambda task: id_key(task.id))
        return sorted(by_id, key=lambda task: task.updated_at, reverse=True)

    def oldest_letters(
        self, queue: str, ids: Sequence[Any] | None, code: str | None, limit: int | None
    ) -> list[ModelTask]:
        """List the chosen dead letters as replay and discard take them: the oldest first."""
        return list(reversed(self.letters(queue, ids, code)))[:limit]

    def missing(self, queue: str, ids: Sequence[Any]) -> list[Any]:
        """List those of the ids that the queue has no task with."""
        known = self.tasks
        return [one for one in ids if one not in known or known[one].queue != queue]

    def replay(
        self, queue: str, letters: Sequence[ModelTask], *, reset_attempts: bool, delay: float | None
    ) -> list[Any]:
        """Send letters back; give those that stay, because a live task has their key."""
        position = self.take_position(queue)
        skipped = []
        for task in letters:
            task.moved = False  # Also of one that stays: a sweep moves it again.
            if self.holder_of(queue, task.dedupe_key):
                skipped.append(task.id)
                continue
            if reset_attempts:
                task.attempts = 0
            else:
                task.max_attempts = max(task.max_attempts, task.attempts + 1)
            task.deliveries = task.attempts
            task.status, task.finished_at, task.updated_at = PENDING, None, self.now
            task.next_retry_at = self.now + in_whole_milliseconds(delay) if delay else None
            task.not_before = task.next_retry_at
            task.expires_at = None
            task.position = position
            task.replays += 1
        return skipped

    def discard(self, letters: Sequence[ModelTask]) -> int:
        gone = {task.id for task in letters}
        return self._delete(lambda task: task.id in gone)
