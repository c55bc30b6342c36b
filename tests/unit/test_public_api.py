"""The public classes show their API and nothing else, and each async class mirrors its sync one."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Generator
from datetime import timedelta
from typing import Any, get_origin, get_type_hints

import pytest

import microqueue
from microqueue import (
    AsyncQueue,
    AsyncSweeper,
    AsyncWorker,
    InvalidArgument,
    NewTask,
    Queue,
    Sweeper,
    Tasks,
    Worker,
)
from microqueue.core import core_of
from microqueue.dead_letters import AsyncDeadLetters, DeadLetters
from microqueue.insights import AsyncInsights, Insights
from microqueue.sweeper import JOBS
from microqueue.testing import memory_async_queue, memory_queue

PUBLIC = {
    Queue: """cancel clock close dead_letters enqueue enqueue_many ensure_indexes from_uri get
        mark_done mark_done_many mark_failure mark_retry name now pause paused peek pop pop_many
        purge release resume settings stats touch workers""",
    DeadLetters: """all_queues count discard edit_and_replay groups list missing replay stats""",
    Insights: """dead_letters find last_sweeps latency overview queue_names running stats tasks""",
    Worker: "options run stop worker_id",
    Sweeper: """bury_exhausted expire_undelivered jobs lock_ttl move_dead_letters promote_due
        purge_finished reclaim_orphaned reclaim_stuck run_forever run_once stop sweeper_id""",
}
PAIRS = [
    (Queue, AsyncQueue),
    (DeadLetters, AsyncDeadLetters),
    (Insights, AsyncInsights),
    (Sweeper, AsyncSweeper),
    (Worker, AsyncWorker),
]
EXPECTED = [(kind, PUBLIC[pair[0]].split()) for pair in PAIRS for kind in pair]
CLASSES: list[type] = [kind for pair in PAIRS for kind in pair]


def public(thing: object) -> list[str]:
    return [name for name in dir(thing) if not name.startswith("_")]


@pytest.mark.parametrize(("kind", "names"), EXPECTED)
def test_completion_shows_the_public_names_and_no_others(kind: type, names: list[str]) -> None:
    assert public(kind) == names


def test_completion_on_an_instance_shows_the_same_names() -> None:
    queue, async_queue = memory_queue(), memory_async_queue()
    instances: list[Any] = [
        queue,
        queue.dead_letters,
        Insights(queue),
        Sweeper(queue),
        Worker(queue, print),
        async_queue,
        async_queue.dead_letters,
        AsyncInsights(async_queue),
        AsyncSweeper(async_queue),
        AsyncWorker(async_queue, print),
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
        returned = get_type_hints(function).get("return")
        assert get_origin(returned) not in {Generator, AsyncGenerator, Awaitable}, name


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


# Pairs


def normalised(text: str) -> str:
    """Make the text of an async class comparable with that of its sync one."""
    text = re.sub(r"\bawait |\basync |A?[Ss]ync(?=[A-Z])", "", text)
    return re.sub(r"\ban (?=``?[A-Z]|:class:)", "a ", text)


def methods(kind: type) -> dict[str, Any]:
    return {name: inspect.getattr_static(kind, name) for name in public(kind)}


def function_of(member: Any) -> Any:
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS)
def test_sync_and_async_have_the_same_names(blocking: type, awaited: type) -> None:
    here, there = methods(blocking), methods(awaited)
    assert list(here) == list(there)
    assert {name: type(one) for name, one in here.items()} == {
        name: type(one) for name, one in there.items()
    }


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS)
def test_sync_and_async_take_and_return_the_same(blocking: type, awaited: type) -> None:
    def signatures(kind: type) -> dict[str, str]:
        members = {"__init__": inspect.getattr_static(kind, "__init__"), **methods(kind)}
        return {
            name: normalised(str(inspect.signature(function_of(one))))
            for name, one in members.items()
        }

    assert signatures(blocking) == signatures(awaited)


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS)
def test_sync_and_async_have_the_same_documentation(blocking: type, awaited: type) -> None:
    def documentation(kind: type) -> dict[str, str]:
        found = {name: inspect.getdoc(function_of(one)) for name, one in methods(kind).items()}
        return {name: " ".join(normalised(text or "").split()) for name, text in found.items()}

    assert documentation(blocking) == documentation(awaited)
    assert all(documentation(blocking).values())


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
        documented = re.findall(r"^    (?:\*\*)?(\w+): ", arguments, re.MULTILINE)
        assert documented == parameters, name


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
    with pytest.raises(InvalidArgument, match="did you mean 'priority'") as caught:
        add(queue)
    assert caught.value.argument == "prioritty"
    assert queue.peek() == []


async def test_unknown_option_of_an_async_queue_is_rejected_with_the_closest_one() -> None:
    queue: Any = memory_async_queue()
    for adding in (queue.enqueue({}, dedup_key="x"), queue.enqueue_many([{}], dedup_key="x")):
        with pytest.raises(InvalidArgument, match="did you mean 'dedupe_key'") as caught:
            await adding
        assert caught.value.argument == "dedup_key"


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
