"""How a subscription reads a topic and resumes, without a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import bson
import pytest
from bson import CodecOptions, ObjectId
from pymongo.errors import AutoReconnect, CursorNotFound, OperationFailure

from microqueue.drivers.driver import AsyncDriver, Run, SyncDriver
from microqueue.errors import MicroqueueError, OperationFailed, ServerUnavailable, TopicConflict
from microqueue.operations.mongo_errors import BAD_VALUE
from microqueue.topic_reader import (
    EMPTY_SEC,
    NOTHING,
    PAUSE_SEC,
    CursorEffect,
    LoopReader,
    MemoryCursor,
    PositionLost,
    ReadPause,
    SyncReader,
    Tail,
)

OPEN, FETCH, CLOSE = CursorEffect.OPEN, CursorEffect.FETCH, CursorEffect.CLOSE
AT = datetime(2026, 1, 1, tzinfo=UTC)
COLLECTIONS: Any = SimpleNamespace(
    codec_options=CodecOptions(tz_aware=True), topic=SimpleNamespace(name="news")
)


def document(n: int) -> dict[str, Any]:
    return {"_id": ObjectId(f"{n:024x}"), "body": {"n": n}, "published_at": AT}


def raw(*numbers: int) -> bytes:
    return b"".join(bson.encode(document(n)) for n in numbers)


def tail(after: int | None = None) -> Tail:
    return Tail("news", COLLECTIONS, None if after is None else document(after)["_id"])


def follow(tail: Tail, replies: Iterable[Any], deadline: float | None = 0.0) -> tuple[Any, Any]:
    """Answer the effects of one read: return the effects, and what it read."""
    effects: list[Any] = []
    reading = tail.read(deadline)
    answers = iter(replies)
    effect = next(reading)
    try:
        while True:
            effects.append("run" if isinstance(effect, Run) else effect)
            if isinstance(effect, ReadPause) or effect in {OPEN, CLOSE}:
                effect = reading.send(None)
                continue
            answer = next(answers)
            failed = isinstance(answer, Exception)
            effect = reading.throw(answer) if failed else reading.send(answer)
    except StopIteration as end:
        return effects, end.value


def numbers(batch: Any) -> list[int]:
    return [message.body["n"] for message in batch.messages]


def test_a_subscription_from_a_position_skips_what_it_has_read() -> None:
    effects, batch = follow(tail(after=2), [True, raw(1), raw(2, 3), True], deadline=None)
    assert effects == ["run", OPEN, FETCH, FETCH, "run"]
    assert (batch.gap, numbers(batch)) == (None, [3])


def test_a_position_that_is_gone_is_reported_as_a_gap_once() -> None:
    reading = tail(after=2)
    _, batch = follow(reading, [False, raw(7, 8), True])
    assert batch.gap is not None
    assert (batch.gap.topic, batch.gap.first) == ("news", batch.messages[0].position)
    assert numbers(batch) == [7, 8]
    _, batch = follow(reading, [raw(9), True])
    assert (batch.gap, numbers(batch)) == (None, [9])


def test_messages_that_were_rolled_back_are_not_delivered() -> None:
    effects, batch = follow(tail(), [raw(1), False])
    assert effects == [OPEN, FETCH, "run", CLOSE]
    assert batch == NOTHING


@pytest.mark.parametrize(
    ("after", "fetched", "pause_sec"),
    [(None, None, EMPTY_SEC), (2, b"", 0.0)],
    ids=["no collection", "replaced while it was looked for"],
)
def test_a_cursor_that_found_nothing_is_opened_again(
    after: int | None, fetched: Any, pause_sec: float
) -> None:
    replies = [fetched] if after is None else [True, fetched]
    effects, batch = follow(tail(after), replies)
    assert effects[-3:] == [FETCH, CLOSE, ReadPause(pause_sec)]
    assert batch == NOTHING


@pytest.mark.parametrize(
    ("error", "pause_sec"),
    [
        (CursorNotFound("killed", 43), 0.0),
        (PositionLost(), 0.0),
        (AutoReconnect("away"), PAUSE_SEC[0]),
        (ServerUnavailable("away"), PAUSE_SEC[0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_read_resumes_after_an_error_that_another_cursor_mends(
    error: Exception, pause_sec: float, caplog: pytest.LogCaptureFixture
) -> None:
    reading = tail()
    with caplog.at_level(logging.INFO, "microqueue.topic"):
        effects, batch = follow(reading, [error])
        assert (effects, batch) == ([OPEN, FETCH, CLOSE, ReadPause(pause_sec)], NOTHING)
        _, batch = follow(reading, [raw(1), True])
    assert numbers(batch) == [1]
    levels = [record.levelname for record in caplog.records]
    assert levels == (["WARNING", "INFO"] if pause_sec else [])  # An outage, and its end.


def test_an_outage_is_logged_once_and_looked_at_less_and_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reading = tail()
    pauses = [follow(reading, [AutoReconnect("away")])[0][-1].seconds for _ in range(8)]
    first, longest = PAUSE_SEC
    assert pauses == [min(first * 2**n, longest) for n in range(8)]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OperationFailure("not capped", BAD_VALUE), TopicConflict),
        (OperationFailure("not allowed", 13), OperationFailed),
    ],
    ids=["not capped", "not allowed"],
)
def test_an_error_that_another_cursor_does_not_mend_is_raised(
    error: Exception, raised: type[MicroqueueError]
) -> None:
    with pytest.raises(raised) as caught:
        follow(tail(), [error])
    assert caught.value.__cause__ is error


def test_a_cursor_in_memory_loses_its_position_when_it_is_deleted() -> None:
    cursor = MemoryCursor()
    assert cursor.unread([document(1), document(2)]) == [document(1), document(2)]
    assert cursor.unread([document(2), document(3)]) == [document(3)]
    with pytest.raises(PositionLost):
        cursor.unread([document(4)])


def closes(reader: Any) -> type[Any]:
    """Return a driver whose calls fail because the reader is closed in the meantime."""

    class Closing:
        def run(self, operation: Any) -> Any:
            operation.close()
            reader._closed.set()  # noqa: SLF001 (another thread would)
            raise AutoReconnect("closed")

    return Closing


def test_a_read_that_fails_because_it_is_closed_returns_nothing() -> None:
    driver: Any = object.__new__(SyncDriver)
    reader = SyncReader(driver, COLLECTIONS, tail(after=1), None)
    reader._driver = closes(reader)()  # noqa: SLF001 (instead of a server)
    assert reader.read() == NOTHING
    assert reader.read() == NOTHING  # It stays closed.


async def test_an_async_read_that_fails_because_it_is_closed_returns_nothing() -> None:
    driver: Any = object.__new__(AsyncDriver)
    reader = LoopReader(driver, COLLECTIONS, tail(after=1), None)
    reader._driver = closes(reader)()  # noqa: SLF001 (instead of a server)
    assert await asyncio.wait_for(reader.read(), 60) == NOTHING
    assert reader.is_closed
    assert await reader.read() == NOTHING
