"""The public classes show their API and nothing else, and each async class mirrors its sync one."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Generator
from datetime import timedelta
from types import ModuleType
from typing import Any, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

import microqueue
from microqueue import (
    AsyncQueue,
    AsyncSubscription,
    AsyncSweeper,
    AsyncTopic,
    AsyncWorker,
    BackoffPolicy,
    EnqueueReport,
    InvalidArgument,
    NewTask,
    Queue,
    QueueSettings,
    Subscription,
    Sweeper,
    Task,
    Tasks,
    Topic,
    Worker,
    dead_letters,
    insights,
    schedules,
    sweeper,
    topic,
    worker,
)
from microqueue.core import core_of
from microqueue.dashboard import dashboard
from microqueue.dead_letters import AsyncDeadLetters, DeadLetters
from microqueue.insights import AsyncInsights, Insights
from microqueue.reports import WorkerInfo
from microqueue.schedules import AsyncSchedules, Schedules
from microqueue.sweeper import JOBS
from microqueue.testing import memory_async_queue, memory_queue
from microqueue.worker import (
    AsyncBatchContext,
    AsyncContext,
    AsyncEnqueuedTask,
    BatchContext,
    Context,
    EnqueuedTask,
    WorkerOptions,
)
from microqueue.worker.registry import NamedTask
from tests.rejection import rejecting

PUBLIC = {
    Queue: """cancel clock close dead_letters enqueue enqueue_many ensure_indexes from_uri get
        mark_done mark_done_many mark_failure mark_retry name now pause paused peek pop pop_many
        purge release resume schedules settings stats touch wait_for workers""",
    DeadLetters: """all_queues count discard edit_and_replay groups list missing replay stats""",
    Schedules: "get list next_runs pause put remove resume trigger",
    Insights: """by_name dead_letters find last_sweeps latency overview queue_names running stats
        tasks topics""",
    Worker: "options run stop worker_id",
    Topic: "bind bindings get name peek publish subscribe unbind",
    Subscription: "close gaps position read",
    Sweeper: """bury_exhausted expire_undelivered fire_schedules jobs lock_ttl move_dead_letters
        promote_due
        purge_finished reclaim_orphaned reclaim_stuck run_forever run_once stop sweeper_id""",
    Context: "attempt cancelled enqueue progress queue task touch transaction",
    BatchContext: "cancelled enqueue is_cancelled progress queue tasks",
    EnqueuedTask: "wait",
    Tasks: "check names task",
    NamedTask: "check enqueue names new options",
}
PAIRS = [
    (Queue, AsyncQueue),
    (DeadLetters, AsyncDeadLetters),
    (Schedules, AsyncSchedules),
    (Insights, AsyncInsights),
    (Sweeper, AsyncSweeper),
    (Worker, AsyncWorker),
    (Topic, AsyncTopic),
    (Subscription, AsyncSubscription),
]
"""The classes that users create, or get from one; test_hostile_api.py calls all they have."""
ALL_PAIRS = [
    *PAIRS,
    (Context, AsyncContext),
    (BatchContext, AsyncBatchContext),
    (EnqueuedTask, AsyncEnqueuedTask),
]
CLASSES: list[type] = [*(kind for pair in ALL_PAIRS for kind in pair), Tasks, NamedTask]
SYNC: dict[type, type] = {awaited: blocking for blocking, awaited in ALL_PAIRS}
EXPECTED = [(kind, PUBLIC[SYNC.get(kind, kind)].split()) for kind in CLASSES]


def public(thing: object) -> list[str]:
    """Return the names that completion shows; of a subclass of Task, those that Task lacks."""
    known = dir(Task) if thing in {EnqueuedTask, AsyncEnqueuedTask} else ()
    return [name for name in dir(thing) if not name.startswith("_") and name not in known]


@pytest.mark.parametrize(("kind", "names"), EXPECTED)
def test_completion_shows_the_public_names_and_no_others(kind: type, names: list[str]) -> None:
    assert public(kind) == names


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Task, ""),
        (NewTask, ""),
        (QueueSettings, "from_environment separate_dlq"),
        (WorkerOptions, "max_running"),
        (BackoffPolicy, "delay_seconds"),
        (WorkerInfo, "gone_at late_at"),
        (EnqueueReport, "added"),
    ],
)
def test_completion_on_a_model_shows_its_fields_and_its_public_names(
    model: type[BaseModel], names: str
) -> None:
    shown = set(public(model)) - set(public(BaseModel)) - model.model_fields.keys()
    assert sorted(shown) == names.split()


def test_completion_on_an_instance_shows_the_same_names() -> None:
    queue, async_queue = memory_queue(), memory_async_queue()
    instances: list[Any] = [
        queue,
        queue.dead_letters,
        queue.schedules,
        Insights(queue),
        Sweeper(queue),
        Worker(queue, print),
        async_queue,
        async_queue.dead_letters,
        async_queue.schedules,
        AsyncInsights(async_queue),
        AsyncSweeper(async_queue),
        AsyncWorker(async_queue, print),
        Topic(queue, "news"),
        AsyncTopic(async_queue, "news"),
        Tasks(),
    ]
    for one in instances:
        assert public(one) == public(type(one)), type(one)


@pytest.mark.parametrize("kind", CLASSES)
def test_no_public_method_returns_an_unrun_generator(kind: type) -> None:
    for name in public(kind):
        method = inspect.getattr_static(kind, name)
        function = getattr(method, "fget", None) or getattr(method, "__func__", method)
        assert not inspect.isgeneratorfunction(function), name
        assert not inspect.isasyncgenfunction(function), name
        # Queues name the classes of schedules, and import them on first use.
        returned = get_type_hints(function, localns=vars(schedules)).get("return")
        assert get_origin(returned) not in {Generator, AsyncGenerator, Awaitable}, name


@pytest.mark.parametrize("module", [dead_letters, insights, schedules, sweeper, topic, worker])
def test_no_class_of_a_public_module_has_operations(module: ModuleType) -> None:
    for kind in (getattr(module, name) for name in vars(module)["__all__"]):
        for name in public(kind) if inspect.isclass(kind) else []:
            function = function_of(inspect.getattr_static(kind, name, None))
            assert not inspect.isgeneratorfunction(function), (kind, name)


@pytest.mark.parametrize("kind", [Sweeper, AsyncSweeper])
def test_jobs_and_lock_ttl_of_a_sweeper_can_be_read_only(kind: Any) -> None:
    queue: Any = memory_queue() if kind is Sweeper else memory_async_queue()
    sweeper = kind(queue, jobs=["promote_due", "reclaim_stuck"], lock_ttl=7)
    assert sweeper.jobs == ("reclaim_stuck", "promote_due")
    assert sweeper.lock_ttl == timedelta(seconds=7)
    assert kind(queue).jobs == JOBS
    assert kind(queue).lock_ttl == queue.settings.lock_ttl
    for name in ("jobs", "lock_ttl"):
        with pytest.raises(AttributeError):
            setattr(sweeper, name, None)


def test_every_error_can_be_imported_from_the_package() -> None:
    found = {
        name
        for name, value in vars(microqueue.errors).items()
        if inspect.isclass(value) and issubclass(value, microqueue.MicroqueueError)
    }
    assert found
    assert found - set(microqueue.__all__) == set()


# Pairs


def normalised(text: str) -> str:
    """Make the text of an async class comparable with that of its sync one."""
    text = re.sub(r"\bawait |\basync |\bcoroutine (?=function)|A?[Ss]ync(?=[A-Z])", "", text)
    text = re.sub(r"Awaitable\[(\w+)\]", r"\1", text)
    return re.sub(r"\ban (?=``?[A-Z]|:class:)", "a ", text)


def methods(kind: type) -> dict[str, Any]:
    return {name: inspect.getattr_static(kind, name) for name in public(kind)}


def function_of(member: Any) -> Any:
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


@pytest.mark.parametrize(("blocking", "awaited"), ALL_PAIRS)
def test_sync_and_async_have_the_same_names(blocking: type, awaited: type) -> None:
    here, there = methods(blocking), methods(awaited)
    assert list(here) == list(there)
    assert {name: type(one) for name, one in here.items()} == {
        name: type(one) for name, one in there.items()
    }


@pytest.mark.parametrize(("blocking", "awaited"), ALL_PAIRS)
def test_sync_and_async_take_and_return_the_same(blocking: type, awaited: type) -> None:
    def signatures(kind: type) -> dict[str, str]:
        members = {"__init__": inspect.getattr_static(kind, "__init__"), **methods(kind)}
        return {
            name: normalised(str(inspect.signature(function_of(one))))
            for name, one in members.items()
        }

    assert signatures(blocking) == signatures(awaited)


@pytest.mark.parametrize(("blocking", "awaited"), ALL_PAIRS)
def test_sync_and_async_have_the_same_documentation(blocking: type, awaited: type) -> None:
    def documentation(kind: type) -> dict[str, str]:
        found = {name: inspect.getdoc(function_of(one)) for name, one in methods(kind).items()}
        return {name: " ".join(normalised(text or "").split()) for name, text in found.items()}

    assert documentation(blocking) == documentation(awaited)
    assert all(documentation(blocking).values())


IMMEDIATE: dict[type, set[str]] = {
    AsyncQueue: {"from_uri"},
    AsyncDeadLetters: set(),
    AsyncSchedules: set(),
    AsyncInsights: set(),
    AsyncSweeper: {"stop"},
    AsyncWorker: {"stop"},
    AsyncTopic: set(),
    AsyncSubscription: set(),
    AsyncContext: {"progress"},
    AsyncBatchContext: {"is_cancelled", "progress"},
    AsyncEnqueuedTask: set(),
}
"""Methods of async classes that do no I/O, and so are not awaited."""


@pytest.mark.parametrize("kind", IMMEDIATE)
def test_async_methods_are_coroutine_functions(kind: type) -> None:
    functions = {
        name: function_of(one)
        for name, one in methods(kind).items()
        if not isinstance(one, property)
    }
    plain = {name for name, one in functions.items() if not inspect.iscoroutinefunction(one)}
    assert plain == IMMEDIATE[kind]


@pytest.mark.parametrize("kind", CLASSES)
def test_public_methods_document_their_arguments_and_result(kind: type) -> None:
    for name, member in methods(kind).items():
        function = function_of(member)
        if isinstance(member, property):
            continue
        text = inspect.getdoc(function) or ""
        parameters = [
            one for one in inspect.signature(function).parameters if one not in {"self", "cls"}
        ]
        assert ("Args:" in text) == bool(parameters), name
        arguments = text.partition("Args:")[2].partition("Returns:")[0].partition("Raises:")[0]
        documented = re.findall(r"^    \*{0,2}(\w+): ", arguments, re.MULTILINE)
        assert documented == parameters, name
        returned = str(inspect.signature(function).return_annotation)
        assert ("Returns:" in text) == (returned != "None"), name


# Options


@pytest.mark.parametrize(
    "add",
    [
        lambda queue: queue.enqueue({}, prioritty=3),
        lambda queue: queue.enqueue_many([{}], prioritty=3),
        lambda _queue: NewTask(payload={}, prioritty=3),  # type: ignore[call-arg]  # The point.
        lambda _queue: Tasks().task("send")(lambda: None).options(prioritty=3),  # type: ignore[call-arg]
    ],
    ids=["enqueue", "enqueue_many", "NewTask", "named task"],
)
def test_unknown_enqueue_option_is_rejected_with_the_closest_one(add: Any) -> None:
    queue = memory_queue()
    with rejecting("prioritty", 3, code="unknown_option", closest="priority"):
        add(queue)
    assert queue.peek() == []


@pytest.mark.parametrize(
    ("call", "function", "option", "closest"),
    [
        (lambda queue: queue.enqueue({}, timeout=3), "enqueue", "timeout", None),
        (lambda queue: queue.enqueue({}, sesion=3), "enqueue", "sesion", "session"),
        (lambda queue: queue.enqueue_many([], timeout=3), "enqueue_many", "timeout", None),
        (lambda queue: queue.schedules.put("a", cronn=3), "schedules.put", "cronn", "cron"),
        (lambda queue: queue.schedules.put("a", timezne=3), "schedules.put", "timezne", "timezone"),
        (lambda _queue: Tasks().task("a", quue=3), "Tasks.task", "quue", "queue"),  # type: ignore[call-arg]
        (
            lambda _queue: Tasks().task("a")(lambda: None).options(sesion=3),  # type: ignore[call-arg]
            "NamedTask.options",
            "sesion",
            "session",
        ),
        (lambda queue: Worker(queue, print, hook=3), "Worker", "hook", "hooks"),  # type: ignore[call-arg]
        (lambda queue: Worker(queue, print, worker_idd=3), "Worker", "worker_idd", "worker_id"),  # type: ignore[call-arg]
        (lambda queue: Worker(queue, print, poll=3), "Worker", "poll", "poll_interval"),  # type: ignore[call-arg]
        (
            lambda _queue: AsyncWorker(memory_async_queue(), print, hook=3),  # type: ignore[call-arg]
            "AsyncWorker",
            "hook",
            "hooks",
        ),
        (lambda queue: Topic(queue, "a").bind("q", filtr=3), "bind", "filtr", "filter"),  # type: ignore[call-arg]
        (lambda _queue: Tasks().task(nam=3), "Tasks.task", "nam", "name"),  # type: ignore[call-arg]
        (lambda _queue: dashboard(memory_queue(), tokn=3), "dashboard", "tokn", "token"),  # type: ignore[call-arg]
    ],
)
def test_unknown_option_names_the_function_it_was_given_to(
    call: Any, function: str, option: str, closest: str | None
) -> None:
    with rejecting(option, 3, code="unknown_option", closest=closest) as caught:
        call(memory_queue())
    assert str(caught.value).startswith(f"{function} has no option ")


def test_unknown_option_like_no_other_is_rejected_with_named_parameters_too() -> None:
    with rejecting("patern", "x", code="unknown_option") as caught:
        Topic(memory_queue(), "a").bind("q", patern="x")  # type: ignore[call-arg]
    assert caught.value.closest == []
    assert all(name in str(caught.value) for name in ("filter", "priority"))


def test_worker_warns_where_it_is_created_of_an_option_with_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="hot_poll_period") as caught:
        worker = Worker(memory_queue(), print, brisk_period=2)  # type: ignore[call-arg]
    assert worker.options.hot_poll_period == timedelta(seconds=2)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("kind", [Queue, AsyncQueue])
@pytest.mark.parametrize(
    ("option", "closest", "code"),
    [
        ("colection", ["collection"], "unknown_option"),
        ("max_attemts", ["max_attempts"], "unknown_option"),
        ("maxPoolSiz", [], "unknown_option"),
        ("maxPoolSize", [], None),
    ],
)
def test_option_of_from_uri_that_the_driver_rejects_is_named(
    kind: Any, option: str, closest: list[str], code: str | None
) -> None:
    with rejecting(option, code=code) as caught:
        kind.from_uri("mongodb://127.0.0.1:1", connect=False, **{option: "x"})
    assert caught.value.closest == closest


async def test_unknown_option_of_an_async_queue_is_rejected_with_the_closest_one() -> None:
    queue: Any = memory_async_queue()
    for adding in (queue.enqueue({}, dedup_key="x"), queue.enqueue_many([{}], dedup_key="x")):
        with rejecting("dedup_key", "x", code="unknown_option", closest="dedupe_key"):
            await adding


def test_headers_may_be_left_out_by_none() -> None:
    assert memory_queue().enqueue({}, headers=None).headers == {}


# The package


def test_workers_are_imported_on_first_use() -> None:
    program = """
import sys, microqueue
assert "microqueue.worker" not in sys.modules
assert set(microqueue.__all__) <= set(dir(microqueue))
assert "microqueue.worker" not in sys.modules, "dir() imported it"
from microqueue import AsyncWorker, Fail, Retry, Snooze, Tasks, Worker
from microqueue import worker
for one in (AsyncWorker, Fail, Retry, Snooze, Tasks, Worker):
    assert one is getattr(worker, one.__name__)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="Wroker"):
        _ = microqueue.Wroker  # type: ignore[attr-defined]  # The point.


def test_core_of_something_else_is_rejected() -> None:
    with pytest.raises(InvalidArgument) as caught:
        core_of(object())  # type: ignore[arg-type]
    assert caught.value.argument == "queue"
