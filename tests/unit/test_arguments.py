"""Arguments that are refused before there is a connection."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Self

import pytest
from pydantic import field_validator, model_validator

from microqueue import (
    AsyncQueue,
    AsyncSweeper,
    AsyncWorker,
    BackoffPolicy,
    Hooks,
    InvalidArgument,
    Queue,
    Sweeper,
    Task,
    Worker,
)
from microqueue.arguments import check_collection, check_name
from microqueue.model import UNKNOWN_OPTION, Model
from microqueue.task import TaskStatus, read_task
from microqueue.testing import FakeClock, memory_async_queue, memory_database, memory_queue
from tests.rejection import rejecting


@pytest.mark.parametrize("queue_class", [Queue, AsyncQueue])
@pytest.mark.parametrize("uri", [5, "", b"mongodb://127.0.0.1"], ids=repr)
def test_uri_that_is_no_text_or_empty_is_rejected(queue_class: Any, uri: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        queue_class.from_uri(uri)
    assert str(caught.value).startswith(f"uri={uri!r} is not valid: give a string")


def test_copy_of_a_model_has_valid_values() -> None:
    policy = BackoffPolicy(base_sec=2)
    assert policy.model_copy(update={"base_sec": 3}) == BackoffPolicy(base_sec=3)
    with rejecting("base_sec"):
        policy.model_copy(update={"base_sec": {"$ne": 0}})
    with pytest.raises(InvalidArgument) as caught:
        policy.model_copy(update={"bas_sec": 3})
    assert caught.value.code == UNKNOWN_OPTION


def test_copy_of_a_malformed_task_keeps_what_it_does_not_change() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    malformed: Any = {"_id": 1, "status": "pending", "priority": "high", "created_at": 5}
    copy: Any = read_task(malformed, payload=object()).model_copy(update={"updated_at": now})
    assert (copy.priority, copy.created_at, copy.updated_at) == ("high", 5, now)
    with rejecting("status"):
        copy.model_copy(update={"status": "gone"})
    changes = {"status": "done", "history": [], "attempts": "3", "payload": "any"}
    converted = copy.model_copy(update={**changes, "backoff": {"base_sec": 2}})
    assert converted.status is TaskStatus.DONE
    assert (converted.history, converted.attempts, converted.payload) == ((), 3, "any")
    assert converted.backoff == BackoffPolicy(base_sec=2)
    assert converted.priority == "high"


@pytest.mark.parametrize("queue_class", [Queue, AsyncQueue])
@pytest.mark.parametrize(
    ("option", "value"), [("tlsCAFile", "missing.pem"), ("datetime_conversion", "x")]
)
def test_option_of_the_client_is_refused_by_name(queue_class: Any, option: str, value: str) -> None:
    with rejecting(option):  # However the driver says so.
        queue_class.from_uri("mongodb://127.0.0.1:1", **{option: value})


@pytest.mark.parametrize("queue_class", [Queue, AsyncQueue])
def test_number_of_an_error_is_no_option(queue_class: Any) -> None:
    """A missing file is error 2."""
    with rejecting("tlsCAFile"):
        queue_class.from_uri("mongodb://127.0.0.1:1", w=2, tls=True, tlsCAFile="missing.pem")


@pytest.mark.parametrize("name", ["a$b", 5, "", "a..b", ".a", "a.", "system.x", "a\0b", "x" * 121])
def test_collection_that_mongodb_does_not_allow_is_rejected(name: Any) -> None:
    with rejecting("collection"):
        Queue.from_uri("mongodb://127.0.0.1:1", collection=name)


@pytest.mark.parametrize("name", [None, "tasks", "mail.tasks"])
def test_usual_names_of_collections_are_taken(name: str | None) -> None:
    check_collection(name)


def test_sweepers_tell_the_kinds_of_queues_apart() -> None:
    blocking: Any = memory_queue()
    awaited: Any = memory_async_queue()
    text: Any = "x"
    for queue in (awaited, text):
        with rejecting("queue"):
            Sweeper(queue)
    for queue in (blocking, text):
        with rejecting("queue"):
            AsyncSweeper(queue)


@pytest.mark.parametrize("several", [False, True])
def test_workers_tell_the_kinds_of_queues_apart(several: bool) -> None:
    blocking, awaited = memory_queue(), memory_async_queue()
    wrong: list[tuple[Any, Any, str]] = [
        (Worker, [blocking, awaited] if several else awaited, "AsyncWorker"),
        (AsyncWorker, [awaited, blocking] if several else blocking, "Worker"),
    ]
    for kind, queue, instead in wrong:
        with rejecting("queue", queue, naming=[instead]):
            kind(queue, print)
    Worker([blocking, memory_queue("b")] if several else blocking, print)
    AsyncWorker([awaited, memory_async_queue("b")] if several else awaited, print)


@pytest.mark.parametrize("kind", [Worker, AsyncWorker])
@pytest.mark.parametrize("queue", ["mail", b"mail", {}, None, 5, ["mail"], []], ids=repr)
def test_what_is_no_queue_is_reported_whole(kind: Any, queue: Any) -> None:
    with rejecting("queue", queue):
        kind(queue, print)


@pytest.mark.parametrize("worker_id", [7, "", "x\ny", "x" * 201, b"x"])
def test_worker_is_not_created_with_a_malformed_id(worker_id: Any) -> None:
    with rejecting("worker_id", worker_id):
        Worker(memory_queue(), print, worker_id=worker_id)
    with rejecting("worker_id", worker_id):
        AsyncWorker(memory_async_queue(), print, worker_id=worker_id)


class Misspelled:
    def on_sucess(self, task: Task[Any], *, took_sec: float) -> None: ...


class Duck:
    def __init__(self) -> None:
        self.called: list[Any] = []

    def on_success(self, task: Task[Any], *, took_sec: float) -> None:
        self.called.append(task.id)


TAKING_HOOKS: list[Callable[..., Any]] = [
    lambda **options: Worker(memory_queue(), print, **options),
    lambda **options: AsyncWorker(memory_async_queue(), print, **options),
    lambda **options: Queue(memory_database(), **options),
    lambda **options: Sweeper(memory_queue(), **options),
    lambda **options: AsyncSweeper(memory_async_queue(), **options),
]


@pytest.mark.parametrize("make", TAKING_HOOKS)
@pytest.mark.parametrize(
    "wrong",
    [3, "on_success", None, print, Hooks, Duck, [Hooks()]],
    ids=["number", "text", "None", "function", "Hooks", "another class", "list"],
)
def test_what_has_no_method_of_hooks_is_rejected(make: Callable[..., Any], wrong: Any) -> None:
    hooks = [Hooks(), wrong]
    with rejecting("hooks", hooks):
        make(hooks=hooks)
    make(hooks=[Hooks(), Duck()])


def test_misspelled_hook_names_the_closest_one() -> None:
    hooks: Any = [Misspelled()]
    with rejecting("hooks", hooks, closest="on_success"):
        Worker(memory_queue(), print, hooks=hooks)


def test_hooks_need_not_have_all_methods(caplog: pytest.LogCaptureFixture) -> None:
    queue, duck = memory_queue(), Duck()
    task = queue.enqueue({})
    hooks: Any = [duck]
    Worker(queue, lambda _payload: None, hooks=hooks).run(burst=True)
    assert duck.called == [task.id]
    assert [one for one in caplog.records if one.name == "microqueue.hooks"] == []


def test_clock_is_not_moved_by_text() -> None:
    text: Any = "60"
    with rejecting("duration", "60"):
        FakeClock().advance(text)


class Chosen(Model):
    name: str
    uri: str = "mongodb://u:secret@localhost"

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        return check_name(value)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.name == "half":
            raise ValueError("not whole")
        return self


def test_an_error_of_a_field_names_the_value_once() -> None:
    with pytest.raises(InvalidArgument) as caught:
        Chosen(name="")
    assert caught.value.argument == "name"
    assert str(caught.value).count("name=") == 1


def test_an_error_of_a_whole_model_carries_no_other_field() -> None:
    with pytest.raises(InvalidArgument) as caught:
        Chosen(name="half", uri="mongodb://u:secret@localhost")
    assert caught.value.value is None
