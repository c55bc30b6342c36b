"""The options of a worker, and what completion shows on it."""

from __future__ import annotations

from typing import Any, get_type_hints

import mongomock
import pytest

from microqueue import AsyncQueue, InvalidArgument, Queue
from microqueue.worker import AsyncWorker, Worker, WorkerOptions, WorkerOptionsDict


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
    with pytest.raises(InvalidArgument, match=repr(meant)) as caught:
        Worker(Queue(mongomock.MongoClient().db), print, **options)
    assert caught.value.argument == typo
