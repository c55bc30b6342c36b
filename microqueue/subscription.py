"""Subscriptions: the messages of a topic, one after the other, and the gaps between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal, Self, TypeAlias

from microqueue.arguments import invalid_argument
from microqueue.errors import MessagesLost
from microqueue.message import Gap, Message
from microqueue.operations import topics
from microqueue.topic_reader import AsyncReader, Batch, SyncReader, logger

OnGap: TypeAlias = Literal["report", "raise"] | Callable[[Gap], object]


def check_on_gap(on_gap: Any) -> OnGap:
    """Reject anything but the two words and a function."""
    if callable(on_gap) or (isinstance(on_gap, str) and on_gap in {"report", "raise"}):
        return on_gap  # type: ignore[no-any-return]
    raise invalid_argument("on_gap", on_gap, "give 'report', 'raise' or a function")


class Buffer:
    """What both kinds of subscriptions share: messages that were read and not yet delivered."""

    def __init__(self, topic: str, after: Any, on_gap: OnGap) -> None:
        self._topic = topic
        self._on_gap = check_on_gap(on_gap)
        self._messages: deque[Message] = deque()
        self._position = None if after is None else topics.position_of(after)
        self._gaps: list[Gap] = []

    def add(self, batch: Batch) -> None:
        """Add what was read; report a gap as the caller chose."""
        self._messages.extend(batch.messages)
        gap = batch.gap
        if gap is None:
            return
        self._gaps.append(gap)
        if self._on_gap == "raise":
            raise MessagesLost(topic=gap.topic, after=gap.after, first=gap.first)
        if callable(self._on_gap):
            self._on_gap(gap)
        else:
            logger.warning(
                "topic %r: the messages between %s and %s are lost; read faster, or keep more",
                gap.topic, gap.after, gap.first,
            )  # fmt: skip

    def take(self) -> Message | None:
        """Return the next message; None if there is none."""
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._position = message.position
        return message

    def take_all(self) -> list[Message]:
        """Return all messages."""
        found = list(self._messages)
        self._messages.clear()
        if found:
            self._position = found[-1].position
        return found

    @property
    def position(self) -> str | None:
        """The position of the last message that was taken, or where it started."""
        return self._position

    @property
    def gaps(self) -> list[Gap]:
        """The gaps so far."""
        return list(self._gaps)


class Subscription:
    """The messages of a topic, in order. Read it in one thread; any thread may close it.

    Iteration waits for the next message. It ends after the ``timeout`` of
    :meth:`Topic.subscribe`, or when the subscription is closed. After a timeout, it can be
    iterated again, and continues with the next message.
    """

    def __init__(self, reader: SyncReader, buffer: Buffer) -> None:
        self._reader = reader
        self._buffer = buffer

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        while not self._reader.is_closed:
            if (message := self._buffer.take()) is not None:
                return message
            batch = self._reader.read()
            if not batch.messages:
                break
            self._buffer.add(batch)
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def position(self) -> str | None:
        """The position of the last message that was delivered, or where the subscription started.

        ``None`` before the first message from the start. Pass it to :meth:`Topic.subscribe` to
        resume.
        """
        return self._buffer.position

    @property
    def gaps(self) -> list[Gap]:
        """The gaps that were found so far."""
        return self._buffer.gaps

    def read(self) -> list[Message]:
        """Wait for messages, and return all that have arrived.

        Returns:
            The messages; none after the timeout, or if the subscription was closed.

        Raises:
            MessagesLost: The subscription fell behind, and ``on_gap`` is ``"raise"``.
        """
        if self._reader.is_closed:
            return []
        found = self._buffer.take_all()
        if not found:
            self._buffer.add(self._reader.read())
            found = self._buffer.take_all()
        return found

    def close(self) -> None:
        """Stop reading. A read under way ends within about a second."""
        self._reader.close()


class AsyncSubscription:
    """The messages of a topic, in order. Read it in one task; any task may close it.

    Iteration waits for the next message. It ends after the ``timeout`` of
    :meth:`AsyncTopic.subscribe`, or when the subscription is closed. After a timeout, it can be
    iterated again, and continues with the next message.
    """

    def __init__(self, reader: AsyncReader, buffer: Buffer) -> None:
        self._reader = reader
        self._buffer = buffer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        while not self._reader.is_closed:
            if (message := self._buffer.take()) is not None:
                return message
            batch = await self._reader.read()
            if not batch.messages:
                break
            self._buffer.add(batch)
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def position(self) -> str | None:
        """The position of the last message that was delivered, or where the subscription started.

        ``None`` before the first message from the start. Pass it to :meth:`AsyncTopic.subscribe`
        to resume.
        """
        return self._buffer.position

    @property
    def gaps(self) -> list[Gap]:
        """The gaps that were found so far."""
        return self._buffer.gaps

    async def read(self) -> list[Message]:
        """Wait for messages, and return all that have arrived.

        Returns:
            The messages; none after the timeout, or if the subscription was closed.

        Raises:
            MessagesLost: The subscription fell behind, and ``on_gap`` is ``"raise"``.
        """
        if self._reader.is_closed:
            return []
        found = self._buffer.take_all()
        if not found:
            self._buffer.add(await self._reader.read())
            found = self._buffer.take_all()
        return found

    async def close(self) -> None:
        """Stop reading. A read under way ends within about a second."""
        await self._reader.close()
