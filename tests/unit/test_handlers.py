"""Which functions a worker takes as its handler, before any task is claimed for them."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from microqueue import TaskStatus
from microqueue.testing import memory_queue
from microqueue.worker import Context, Worker
from tests.rejection import rejecting

seen: list[Any] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    seen.clear()


def plain(payload: Any) -> None:
    seen.append(payload)


def with_context(payload: Any, context: Context) -> None:
    seen.append({**payload, "n": context.attempt})


def with_named_context(payload: Any, *, context: Context) -> None:
    seen.append({**payload, "n": context.attempt})


def with_a_default(payload: Any, x: int = 1) -> None:
    seen.append({**payload, "n": x})


def by_place(payload: Any, /) -> None:
    seen.append(payload)


def with_any_arguments(*args: Any) -> None:
    seen.extend(args)


def with_any_names(payload: Any, **names: Any) -> None:
    seen.append({**payload, **names})


def with_two(first: Any, payload: Any) -> None:
    seen.append(payload)


class Noter:
    """Callable, with a method that will do as well; and so will the class itself."""

    def __init__(self, payload: Any = None) -> None:
        if payload is not None:
            seen.append(payload)

    def __call__(self, payload: Any) -> None:
        seen.append(payload)

    def note(self, payload: Any) -> None:
        seen.append(payload)


ACCEPTED = [
    plain,
    with_context,
    with_named_context,
    with_a_default,
    by_place,
    with_any_arguments,
    with_any_names,
    lambda payload: plain(payload),  # noqa: PLW0108 (its own signature)
    functools.partial(with_two, "first"),
    functools.partial(with_context),
    functools.partial(with_a_default, x=1),
    Noter,
    Noter(),
    Noter().note,
    functools.partial(Noter()),
]


def without_parameters() -> None: ...
def with_two_required(payload: Any, more: Any) -> None: ...
def with_a_required_name(payload: Any, *, more: Any) -> None: ...
def with_names_only(**names: Any) -> None: ...
def with_a_context_by_place(payload: Any, context: Context, /) -> None: ...
def with_a_context_only(context: Context) -> None: ...
async def later_without_parameters() -> None: ...


class Empty:
    """Made without arguments; the method needs an instance."""

    def note(self, payload: Any) -> None: ...


class Uncalled:
    def __call__(self) -> None: ...


REFUSED = [
    (without_parameters, "too many positional arguments"),
    (with_two_required, "missing a required argument: 'more'"),
    (with_a_required_name, "missing a required.* argument: 'more'"),
    (with_names_only, "too many positional arguments"),
    (with_a_context_by_place, "'context'"),
    (with_a_context_only, "multiple values for argument 'context'"),
    (later_without_parameters, "too many positional arguments"),
    (functools.partial(plain, {}), "too many positional arguments"),
    (Empty, "too many positional arguments"),
    (Empty.note, "missing a required argument: 'payload'"),
    (Uncalled(), "too many positional arguments"),
]


@pytest.mark.parametrize("function", ACCEPTED)
def test_function_that_can_be_called_with_a_payload_is_a_handler(function: Any) -> None:
    queue = memory_queue()
    task = queue.enqueue({"n": 1})
    Worker(queue, function).run(burst=True)
    found = queue.get(task.id)
    assert found is not None
    assert (found.status, seen) == (TaskStatus.DONE, [{"n": 1}])


@pytest.mark.parametrize(("function", "reason"), REFUSED)
def test_function_that_cannot_be_called_with_a_payload_alone_is_rejected(
    function: Any, reason: str
) -> None:
    with rejecting("handler", function, code="wrong_parameters") as caught:
        Worker(memory_queue(), function)
    # What Python says about the attempt to bind the payload.
    assert isinstance(caught.value.__cause__, TypeError)
    assert re.search(reason, str(caught.value.__cause__))
    assert str(caught.value.__cause__) in str(caught.value)


def test_callable_whose_arguments_cannot_be_read_is_rejected() -> None:
    with rejecting("handler", dict, code="unreadable"):
        Worker(memory_queue(), dict)
