"""Arguments that are refused before there is a connection."""

from __future__ import annotations

from typing import Any

import pytest

from microqueue import AsyncQueue, AsyncSweeper, InvalidArgument, Queue, Sweeper
from microqueue.arguments import check_collection
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
