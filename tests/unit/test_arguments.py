"""Arguments that are refused before there is a connection."""

from __future__ import annotations

from typing import Any, Self

import pytest
from pydantic import field_validator, model_validator

from microqueue import AsyncQueue, AsyncSweeper, InvalidArgument, Queue, Sweeper
from microqueue.arguments import check_collection, check_name
from microqueue.model import Model
from microqueue.testing import FakeClock, memory_async_queue, memory_queue


@pytest.mark.parametrize("queue_class", [Queue, AsyncQueue])
@pytest.mark.parametrize("uri", [5, "", b"mongodb://127.0.0.1"], ids=repr)
def test_uri_that_is_no_text_or_empty_is_refused(queue_class: Any, uri: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        queue_class.from_uri(uri)
    assert str(caught.value).startswith(f"uri={uri!r} is not valid: give a string")


@pytest.mark.parametrize("name", ["a$b", 5, "", "a..b", ".a", "a.", "system.x", "a\0b", "x" * 121])
def test_collection_that_mongodb_does_not_allow_is_refused(name: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^collection="):
        Queue.from_uri("mongodb://127.0.0.1:1", collection=name)


@pytest.mark.parametrize("name", [None, "tasks", "mail.tasks"])
def test_usual_names_of_collections_are_taken(name: str | None) -> None:
    check_collection(name)


def test_sweepers_tell_the_kinds_of_queues_apart() -> None:
    blocking: Any = memory_queue()
    awaited: Any = memory_async_queue()
    text: Any = "x"
    for queue in (awaited, text):
        with pytest.raises(InvalidArgument, match="queue="):
            Sweeper(queue)
    for queue in (blocking, text):
        with pytest.raises(InvalidArgument, match="queue="):
            AsyncSweeper(queue)


def test_clock_is_not_moved_by_text() -> None:
    text: Any = "60"
    with pytest.raises(InvalidArgument, match="duration='60'"):
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
