"""The options of a worker, and what completion shows on it."""

from __future__ import annotations

from typing import Any, get_type_hints

import mongomock
import pytest

from microqueue import AsyncQueue, Queue
from microqueue.new_task import EnqueueOptions
from microqueue.worker import AsyncWorker, Tasks, Worker, WorkerOptions, WorkerOptionsDict
from microqueue.worker.registry import SCHEDULE_OPTIONS, RunOptions, TaskOptions
from tests.rejection import rejecting


@pytest.mark.parametrize("kind", [Worker, AsyncWorker])
def test_completion_shows_the_public_api_alone(kind: Any) -> None:
    queue: Any = (Queue if kind is Worker else AsyncQueue)(mongomock.MongoClient().db)
    shown = [name for name in dir(kind(queue, print)) if not name.startswith("_")]
    assert shown == ["options", "run", "stop", "worker_id"]


def test_options_are_typed_as_the_model_has_them() -> None:
    assert set(get_type_hints(WorkerOptionsDict)) == set(WorkerOptions.model_fields)


@pytest.mark.parametrize(
    ("typo", "meant"), [("concurency", "concurrency"), ("poll_intervall", "poll_interval")]
)
def test_unknown_option_names_the_closest_one(typo: str, meant: str) -> None:
    options: Any = {typo: 4}
    with rejecting(typo, 4, code="unknown_option", closest=meant):
        Worker(Queue(mongomock.MongoClient().db), print, **options)


def test_options_of_a_named_task_are_those_it_is_stored_and_run_with() -> None:
    stored = {"max_attempts", "backoff", "priority", "visibility_timeout"}
    stored |= {"expires_in", "headers"}
    scheduled = {"schedule", "every", *SCHEDULE_OPTIONS}
    assert set(TaskOptions.__annotations__) == stored | set(RunOptions.model_fields) | scheduled
    assert stored <= set(EnqueueOptions.__annotations__)


def test_unknown_option_of_a_named_task_names_the_closest_one() -> None:
    options: Any = {"max_attempt": 4}
    with rejecting("max_attempt", 4, code="unknown_option", closest="max_attempts"):
        Tasks().task("send", **options)
