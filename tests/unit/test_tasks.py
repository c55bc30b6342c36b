"""Named tasks: what is refused at once, what is stored, and what workers make of it."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import date, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel, Field
from pymongo import AsyncMongoClient

from microqueue import (
    AsyncQueue,
    BackoffPolicy,
    InvalidArgument,
    InvalidPayload,
    Queue,
    Task,
    TaskFailed,
    TaskStatus,
    WaitTimeout,
)
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from microqueue.testing import memory_async_queue, memory_queue
from microqueue.worker import AsyncContext, AsyncWorker, Context, Tasks, Worker
from microqueue.worker.handlers import router_for
from tests.rejection import rejecting

if TYPE_CHECKING:
    from nowhere import OnlyForCheckers  # type: ignore[import-not-found]  # The point.


class Colour(Enum):
    RED = "red"


class Address(BaseModel):
    street: str
    number: int


@pytest.fixture
def tasks() -> Tasks:
    return Tasks()


@pytest.fixture
async def async_queue(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> AsyncIterator[AsyncQueue[Any]]:
    async with AsyncMongoClient[Any](microqueue_server.uri) as client:
        yield AsyncQueue(client[microqueue_database.name])


def stored(queue: Queue[Any], task: Any) -> Any:
    found = queue.get(task.id)
    assert found is not None
    return found


# Registering


def test_function_stays_callable_and_keeps_its_name_and_doc(tasks: Tasks) -> None:
    @tasks.task("doubled")
    def double(n: int) -> int:
        """Give twice as much."""
        return 2 * n

    assert double(4) == 8
    assert (double.name, double.__name__, double.__doc__) == (
        "doubled", "double", "Give twice as much.",
    )  # fmt: skip


def test_task_without_a_name_takes_that_of_its_function(tasks: Tasks) -> None:
    @tasks.task()
    def send_email() -> None:
        """Do nothing."""

    assert tasks.names() == ["send_email"]


def test_name_that_is_taken_is_rejected_and_the_first_function_stays(tasks: Tasks) -> None:
    @tasks.task("send")
    def first() -> None:
        """Do nothing."""

    with rejecting("name", "send"):

        @tasks.task("send")
        def second() -> None:
            """Do nothing."""

    assert tasks.names() == ["send"]


def takes_any_arguments(*args: int) -> None: ...
def takes_any_names(**kwargs: int) -> None: ...
def takes_by_place(to: str, /) -> None: ...
def takes_context_by_place(context: Context, /) -> None: ...
def calls_its_context_otherwise(ctx: Context) -> None: ...
def wants_what_is_not_there(to: OnlyForCheckers) -> None: ...
def generates() -> Iterator[int]:
    yield 1


async def generates_later() -> AsyncIterator[int]:
    yield 1


class Mailer:
    def __call__(self) -> None: ...
    def send(self, to: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "code", "named"),
    [
        (takes_any_arguments, "wrong_parameters", "*args"),
        (takes_any_names, "wrong_parameters", "**kwargs"),
        (takes_by_place, "wrong_parameters", " to"),
        (takes_context_by_place, "wrong_parameters", "context"),
        (calls_its_context_otherwise, "context_name", "'ctx'"),
        (wants_what_is_not_there, "unreadable", "OnlyForCheckers"),
        (generates, "generator", "generates"),
        (generates_later, "generator", "generates_later"),
        (Mailer, "no_function", "Mailer"),
        (Mailer(), "no_function", "Mailer"),
        (Mailer().send, "no_function", "Mailer.send"),
        (Mailer.send, "method", "Mailer.send"),
        (functools.partial(print, 1), "no_function", "partial"),
        (print, "no_function", "print"),
    ],
)
def test_function_that_cannot_be_called_by_named_arguments_is_rejected(
    tasks: Tasks, function: Any, code: str, named: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        tasks.task()(function)
    error = caught.value
    assert (error.argument, error.value, error.code) == ("function", function, code)
    assert named in str(error)
    assert tasks.names() == []


def test_forgotten_parentheses_are_pointed_out(tasks: Tasks) -> None:
    with pytest.raises(InvalidArgument) as caught:
        tasks.task(print)  # type: ignore[arg-type]  # The point.
    assert (caught.value.argument, caught.value.code) == ("name", "no_parentheses")


@pytest.mark.parametrize(
    "options",
    [
        {"max_attempts": 0},
        {"priority": 256},
        {"timeout": 0},
        {"timeout": -1},
        {"visibility_timeout": 0},
        {"fatal": "ValueError"},
        {"retryable": ValueError},
    ],
)
def test_bad_option_of_a_task_is_rejected_by_name(tasks: Tasks, options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with rejecting(name, value):
        tasks.task("send", **options)


@pytest.mark.parametrize("fatal", ["ValueError", int])
def test_what_is_no_exception_is_rejected_by_its_place(tasks: Tasks, fatal: Any) -> None:
    with rejecting("fatal.0", fatal):
        tasks.task("send", fatal=(fatal,))


def test_annotations_of_context_and_result_are_left_to_type_checkers(tasks: Tasks) -> None:
    @tasks.task()
    def send(context: OnlyForCheckers, to: str) -> OnlyForCheckers:
        """Do nothing."""

    assert send.new(to="a").payload == {"to": "a"}


# Enqueueing


def test_arguments_are_stored_by_name_beside_the_name_of_the_task(
    tasks: Tasks, microqueue_queue: Queue[Any]
) -> None:
    @tasks.task("send_email")
    def send(to: str, *, copies: int = 1, urgent: bool = False) -> None:
        """Do nothing."""

    task = send.options(headers={"mine": 1}).enqueue(microqueue_queue, "a@b.c", urgent=True)
    found = stored(microqueue_queue, task)
    assert found.payload == {"to": "a@b.c", "urgent": True}
    assert (found.name, found.headers) == ("send_email", {"mine": 1})


def test_arguments_may_have_the_names_that_enqueue_and_pydantic_use(
    tasks: Tasks, microqueue_queue: Queue[Any]
) -> None:
    seen: list[Any] = []

    @tasks.task()
    def odd(self: int, queue: int, copy: int, model_config: int, _hidden: int) -> None:
        seen.append((self, queue, copy, model_config, _hidden))

    odd.enqueue(microqueue_queue, self=1, queue=2, copy=3, model_config=4, _hidden=5)
    Worker(microqueue_queue, tasks).run(burst=True)
    assert seen == [(1, 2, 3, 4, 5)]


def test_arguments_of_every_kind_arrive_as_they_were_annotated(
    tasks: Tasks, microqueue_queue: Queue[Any]
) -> None:
    seen: list[Any] = []

    @tasks.task()
    def ship(  # type: ignore[no-untyped-def]  # One has no annotation.
        address: Address,
        colours: set[Colour],
        day: date,
        price: Decimal,
        wait: timedelta,
        reference: ObjectId,
        pair: tuple[int, str],
        anything,
    ) -> None:
        seen.extend([address, colours, day, price, wait, reference, pair, anything])

    given: list[Any] = [
        Address(street="Elm", number=4), {Colour.RED}, date(2026, 1, 2), Decimal("1.10"),
        timedelta(seconds=5), ObjectId(), (1, "a"), {"n": [1]},
    ]  # fmt: skip
    ship.enqueue(microqueue_queue, *given)
    Worker(microqueue_queue, tasks).run(burst=True)
    assert seen == given


@pytest.mark.parametrize(
    ("arguments", "argument", "field", "named"),
    [
        ({}, "to", None, "'to'"),
        ({"to": 5}, "payload", "to", "to=5"),
        ({"to": "a", "copies": 0}, "payload", "copies", "copies=0"),
        ({"to": "a", "colour": 1}, "colour", None, "'colour'"),
        ({"to": "a", "context": 1}, "context", None, "'context'"),
        ({"to": "a", "other": object()}, "payload", None, "object"),
    ],
)
def test_bad_argument_is_rejected_by_name_and_nothing_is_written(
    tasks: Tasks,
    microqueue_queue: Queue[Any],
    arguments: dict[str, Any],
    argument: str,
    field: str | None,
    named: str,
) -> None:
    @tasks.task()
    def send(
        context: Context, to: str, copies: Annotated[int, Field(gt=0)] = 1, other: Any = None
    ) -> None:
        """Do nothing."""

    with pytest.raises(InvalidArgument) as caught:
        send.enqueue(microqueue_queue, **arguments)
    assert caught.value.argument == argument
    assert getattr(caught.value, "field", None) == field
    assert named in str(caught.value)
    assert microqueue_queue.peek() == []


def test_options_of_the_task_are_stored_and_those_of_the_call_win(
    tasks: Tasks, microqueue_queue: Queue[Any]
) -> None:
    backoff = BackoffPolicy(base_sec=3, max_sec=4)

    @tasks.task(max_attempts=7, backoff=backoff, priority=5, visibility_timeout=90)
    def send() -> None:
        """Do nothing."""

    usual = stored(microqueue_queue, send.enqueue(microqueue_queue))
    assert (usual.max_attempts, usual.backoff, usual.priority, usual.visibility_timeout_sec) == (
        7, backoff, 5, 90,
    )  # fmt: skip
    special = send.options(priority=9, task_id="mine").options(dedupe_key="x", delay=60)
    other = stored(microqueue_queue, special.enqueue(microqueue_queue))
    assert (other.id, other.priority, other.dedupe_key, other.max_attempts) == ("mine", 9, "x", 7)
    assert other.next_retry_at == other.created_at + timedelta(seconds=60)


@pytest.mark.parametrize(
    "options",
    [{"colour": 1}, {"delay": -1}, {"headers": {"task": "another"}}, {"name": "another"}],
)
def test_bad_option_of_a_call_is_rejected_by_name(tasks: Tasks, options: dict[str, Any]) -> None:
    @tasks.task()
    def send() -> None:
        """Do nothing."""

    ((name, value),) = options.items()
    with rejecting(name, value):
        send.options(**options)


def test_many_are_enqueued_as_new_tasks(tasks: Tasks, microqueue_queue: Queue[Any]) -> None:
    seen: list[int] = []

    @tasks.task("count", priority=3)
    def count(n: int) -> None:
        seen.append(n)

    report = microqueue_queue.enqueue_many([count.new(n) for n in range(5)])
    assert {(task.priority, task.name) for task in report.tasks} == {(3, "count")}
    Worker(microqueue_queue, tasks, concurrency=1).run(burst=True)
    assert seen == [0, 1, 2, 3, 4]


def test_session_takes_the_task_into_the_transaction_of_the_caller(
    tasks: Tasks, microqueue_queue: Queue[Any], microqueue_client: Any
) -> None:
    @tasks.task()
    def send() -> None:
        """Do nothing."""

    microqueue_queue.ensure_indexes()
    with microqueue_client.start_session() as session, session.start_transaction():
        send.options(session=session).enqueue(microqueue_queue)
        session.abort_transaction()
    assert microqueue_queue.peek() == []
    with rejecting("session"):
        send.options(session=object()).new()


async def test_async_queue_is_awaited(tasks: Tasks, async_queue: AsyncQueue[Any]) -> None:
    @tasks.task()
    def send(to: str) -> None:
        """Do nothing."""

    task = await send.options(priority=4).enqueue(async_queue, to="a")
    found = await async_queue.get(task.id)
    assert found is not None
    assert (found.payload, found.priority) == ({"to": "a"}, 4)
    with pytest.raises(InvalidPayload) as caught:
        await send.enqueue(async_queue, to=5)  # type: ignore[call-overload]  # The point.
    assert (caught.value.field, caught.value.value) == ("to", {"to": 5})
    assert len(await async_queue.peek()) == 1


# Running


def test_each_task_is_run_by_the_function_of_its_name(
    tasks: Tasks, microqueue_queue: Queue[Any]
) -> None:
    seen: list[Any] = []

    @tasks.task()
    def add(a: int, b: int = 10) -> None:
        seen.append(("add", a + b))

    @tasks.task("shout")
    def any_name(text: str, *, context: Context) -> None:
        seen.append((context.task.name, text.upper(), context.attempt))

    add.enqueue(microqueue_queue, 1)
    any_name.enqueue(microqueue_queue, text="hey")  # type: ignore[call-overload]  # The worker gives the context.
    assert Worker(microqueue_queue, tasks, concurrency=1).run(burst=True) == 2
    assert seen == [("add", 11), ("shout", "HEY", 1)]


def rename(queue: Queue[Any], fields: dict[str, Any]) -> None:
    change = {"$unset": {"name": ""}, "$set": fields} if "name" not in fields else {"$set": fields}
    core_of(queue).collections.database.tasks.update_one({}, change)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"headers": {}}, "failed"),
        ({"headers": {"task": 5}}, "failed"),
        ({"headers": {"task": ["send"]}}, "failed"),
        ({"name": 5}, "failed"),
        ({"name": ""}, "failed"),
        ({"headers": {"task": "sent"}}, "pending"),  # Another worker may know it.
        ({"name": "sent"}, "pending"),
        ({"name": "sent", "headers": {"task": "send"}}, "pending"),  # The field comes first.
    ],
)
def test_task_without_a_known_name_is_not_run(
    tasks: Tasks, microqueue_queue: Queue[Any], fields: dict[str, Any], status: str
) -> None:
    @tasks.task()
    def send() -> None:
        pytest.fail("it must not run")

    task = send.enqueue(microqueue_queue)
    rename(microqueue_queue, fields)
    Worker(microqueue_queue, tasks).run(burst=True)
    found = stored(microqueue_queue, task)
    assert (found.status, found.attempts, found.error.code) == (status, 1, "unknown_task")
    assert "send" in found.error.message  # What is registered.


def test_task_without_a_name_is_buried_with_how_to_give_one(tasks: Tasks) -> None:
    @tasks.task()
    def send() -> None:
        pytest.fail("it must not run")

    queue = memory_queue()
    nameless, strange = queue.enqueue({}), queue.enqueue({}, name="sent")
    Worker(queue, tasks).run(burst=True)
    found = stored(queue, nameless)
    assert (found.status, found.error.code) == ("failed", "unknown_task")
    assert "--name" in found.error.message
    assert "send" in found.error.message
    other = stored(queue, strange)
    assert (other.status, other.error.code) == ("pending", "unknown_task")
    assert "'sent'" in other.error.message
    assert "--name" not in other.error.message


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ({"n": 1, "to": "a"}, "'to'"),
        ({"n": "many"}, "n='many'"),
        ({}, "n="),
        (None, "payload=None"),
    ],
)
def test_payload_that_no_longer_fits_is_a_dead_letter_at_once(
    tasks: Tasks, microqueue_queue: Queue[Any], payload: Any, says: str
) -> None:
    @tasks.task()
    def send(n: int) -> None:
        pytest.fail("it must not run")

    task = send.enqueue(microqueue_queue, n=1)
    core_of(microqueue_queue).collections.database.tasks.update_one(
        {}, {"$set": {"payload": payload}}
    )
    Worker(microqueue_queue, tasks).run(burst=True)
    found = stored(microqueue_queue, task)
    assert (found.status, found.attempts, found.error.code) == ("failed", 1, "invalid_payload")
    assert says in found.error.message


@pytest.mark.parametrize(
    ("options", "error", "status"),
    [
        ({}, ValueError, "pending"),
        ({"fatal": (ValueError,)}, ValueError, "failed"),
        ({"fatal": (ValueError,)}, KeyError, "pending"),
        ({"retryable": (OSError,)}, ValueError, "failed"),
        ({"retryable": (OSError,)}, ConnectionError, "pending"),
        ({"max_attempts": 1}, ValueError, "failed"),
    ],
)
def test_exceptions_are_judged_as_the_task_declares(
    tasks: Tasks,
    microqueue_queue: Queue[Any],
    options: dict[str, Any],
    error: type[Exception],
    status: str,
) -> None:
    backoff = BackoffPolicy(base_sec=30, jitter="none")

    @tasks.task(backoff=backoff, **options)
    def send() -> None:
        raise error("no")

    task = send.enqueue(microqueue_queue)
    Worker(microqueue_queue, tasks).run(burst=True)
    assert stored(microqueue_queue, task).status == status


def test_result_is_kept_by_the_tasks_that_ask_for_it(
    tasks: Tasks, microqueue_queue: Queue[Any]
) -> None:
    @tasks.task(keep_result=True)
    def kept() -> int:
        return 5

    @tasks.task()
    def dropped() -> int:
        return 5

    both = [kept.enqueue(microqueue_queue), dropped.enqueue(microqueue_queue)]
    Worker(microqueue_queue, tasks).run(burst=True)
    assert [stored(microqueue_queue, task).result for task in both] == [5, None]


def test_task_out_of_its_own_time_is_tried_again(
    tasks: Tasks, microqueue_queue: Queue[Any]
) -> None:
    @tasks.task(timeout=0.2, backoff=BackoffPolicy(base_sec=30, jitter="none"))
    def hang(context: Context) -> None:
        while not context.cancelled:
            pass

    task = hang.enqueue(microqueue_queue)
    Worker(microqueue_queue, tasks).run(burst=True)
    found = stored(microqueue_queue, task)
    assert (found.status, found.error.code) == (TaskStatus.PENDING, "TimeoutError")
    assert "0.2 s" in found.error.message


async def test_coroutines_and_functions_run_in_one_async_worker(
    tasks: Tasks, async_queue: AsyncQueue[Any]
) -> None:
    seen: list[Any] = []

    @tasks.task()
    async def later(context: AsyncContext, n: int) -> None:
        await context.touch()
        seen.append(("later", n))

    @tasks.task()
    def now(context: Context, n: int) -> None:
        context.touch()
        seen.append(("now", n))

    await later.enqueue(async_queue, n=1)
    await now.enqueue(async_queue, n=2)
    bad = await later.enqueue(async_queue, n=3)
    await core_of(async_queue).collections.database.tasks.update_one(
        {"_id": bad.id}, {"$set": {"payload": {"n": "x"}}}
    )
    await AsyncWorker(async_queue, tasks, concurrency=1).run(burst=True)
    assert seen == [("later", 1), ("now", 2)]
    found = await async_queue.get(bad.id)
    assert found is not None
    assert found.error is not None
    assert found.error.code == "invalid_payload"


def test_threads_reject_coroutine_functions_and_name_them(
    tasks: Tasks, microqueue_queue: Queue[Any]
) -> None:
    @tasks.task()
    def plain() -> None:
        """Do nothing."""

    Worker(microqueue_queue, tasks)

    @tasks.task("later")
    async def coroutine() -> None:
        """Do nothing."""

    assert router_for(tasks).coroutines() == ["later"]
    with rejecting("handler", tasks, code="coroutine") as caught:
        Worker(microqueue_queue, tasks)
    assert "later" in str(caught.value)


def test_coroutine_registered_after_the_worker_was_made_never_passes_for_done(
    tasks: Tasks, microqueue_queue: Queue[Any]
) -> None:
    worker = Worker(microqueue_queue, tasks)

    @tasks.task()
    async def later() -> None:
        """Do nothing."""

    task = later.enqueue(microqueue_queue)
    worker.run(burst=True)
    found = stored(microqueue_queue, task)
    assert found.status == TaskStatus.PENDING
    assert "use AsyncWorker" in found.error.message


# Typing: mypy reads this file, and an ignore that is not needed is an error to it.


def test_type_checkers_know_the_signature(tasks: Tasks, microqueue_queue: Queue[Any]) -> None:
    @tasks.task()
    def double(context: Context, n: int) -> int:
        return 2 * n

    refused: list[Callable[[], Any]] = [
        lambda: double.enqueue(microqueue_queue, n="x"),  # type: ignore[call-overload]  # The point.
        lambda: double.enqueue(microqueue_queue, m=1),  # type: ignore[call-overload]  # The point.
        lambda: double.new(),  # type: ignore[call-arg]  # noqa: PLW0108 (as the others)
        lambda: double.options(colour=1),  # type: ignore[call-arg]  # The point.
        lambda: double.enqueue(5, n=1).id,  # type: ignore[call-overload]  # The point.
    ]
    for call in refused:
        with pytest.raises((InvalidArgument, AttributeError)):
            call()
    result: int = double(None, n=4)  # type: ignore[arg-type]  # It does not look at its context.
    attempts: int = double.enqueue(microqueue_queue, n=1).attempts
    assert (result, attempts) == (8, 0)


def test_worker_can_serve_one_named_task_alone() -> None:
    tasks = Tasks()
    seen: list[int] = []

    @tasks.task()
    def double(n: int) -> None:
        seen.append(n * 2)

    @tasks.task()
    def other() -> None:
        """Belong to another worker."""

    queue = memory_queue()
    double.enqueue(queue, n=4)
    stray = other.enqueue(queue)
    Worker(queue, double).run(burst=True)
    assert seen == [8]
    failed = queue.get(stray.id)
    assert failed is not None
    assert failed.error is not None
    assert failed.error.code == "unknown_task"


# Waiting


def test_enqueued_task_is_still_the_task_that_it_was(tasks: Tasks) -> None:
    @tasks.task()
    def double(n: int) -> int:
        return 2 * n

    queue = memory_queue()
    task = double.enqueue(queue, 4)
    plain = stored(queue, task)
    assert isinstance(task, Task)
    assert (task == plain, plain == task, task != plain) == (True, True, False)
    assert task != stored(queue, double.enqueue(queue, 4))
    assert (task.model_dump(), task.model_dump_json()) == (
        plain.model_dump(), plain.model_dump_json(),
    )  # fmt: skip
    copied = pickle.loads(pickle.dumps(task))
    assert (type(copied), copied) == (Task, plain)
    for again in (task.model_copy(), task.model_copy(deep=True), copy.deepcopy(task)):
        assert again == task
        with pytest.raises(WaitTimeout):
            again.wait(timeout=0)


def test_enqueued_task_returns_the_result_of_its_function(tasks: Tasks) -> None:
    @tasks.task(keep_result=True)
    def double(n: int) -> int:
        return 2 * n

    @tasks.task()
    def forget(n: int) -> int:
        return 2 * n

    @tasks.task(max_attempts=1)
    def divide(n: int) -> float:
        return 1 / n

    queue = memory_queue()
    kept, forgotten = double.enqueue(queue, 4), forget.enqueue(queue, 4)
    failed = divide.enqueue(queue, 0)
    with pytest.raises(WaitTimeout):
        kept.wait(timeout=0)
    Worker(queue, tasks).run(burst=True)
    assert (kept.wait(), forgotten.wait(timeout=1)) == (8, None)
    with pytest.raises(TaskFailed) as caught:
        failed.wait()
    assert (caught.value.code, caught.value.task.id) == ("ZeroDivisionError", failed.id)


async def test_task_enqueued_by_a_coroutine_returns_its_result(tasks: Tasks) -> None:
    @tasks.task(keep_result=True)
    async def double(n: int) -> int:
        return 2 * n

    queue = memory_async_queue()
    task = await double.enqueue(queue, 4)
    assert task == await queue.get(task.id)
    with pytest.raises(WaitTimeout):
        await task.wait(timeout=0)
    await AsyncWorker(queue, tasks).run(burst=True)
    assert await task.wait() == 8
