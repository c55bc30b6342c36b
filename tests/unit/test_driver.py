"""Drivers: what they do with the errors and the silence of a server, on both kinds of client."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pymongo.errors import AutoReconnect, ExecutionTimeout, NetworkTimeout, OperationFailure

from microqueue import InvalidArgument, OperationFailed, ServerUnavailable
from microqueue.drivers import driver as drivers
from microqueue.drivers.driver import AsyncDriver, SyncDriver
from microqueue.drivers.error_translation import translate
from microqueue.operations.call import Call, Operation, RepeatDue
from microqueue.settings import QueueSettings

KINDS = [SyncDriver, AsyncDriver]


class Server:
    """A collection whose calls give the next reply, or raise it."""

    def __init__(self, *replies: Any) -> None:
        self.in_memory = False
        self.timeout_sec = None
        self.selection_sec = 30.0
        self.client = SimpleNamespace(
            topology_description=SimpleNamespace(server_descriptions=dict)
        )
        self.tasks = self.database = self
        self.dropped = 0
        self._replies = list(replies)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_arguments, **_options: self._reply()

    def _reply(self) -> Any:
        reply = self._replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def pools(self) -> list[Any]:
        def reset() -> None:
            self.dropped += 1

        return [SimpleNamespace(reset_without_pause=reset)]


async def run(kind: Any, server: Server, operation: Operation[Any], **settings: Any) -> Any:
    driver = kind(server, settings=QueueSettings(**settings), on_retry=lambda: None)
    running = driver.run(operation)
    return await running if inspect.isawaitable(running) else running


@pytest.mark.parametrize("kind", KINDS)
async def test_limit_of_the_operation_itself_is_an_answer_of_the_server(kind: Any) -> None:
    def operation() -> Operation[str]:
        try:
            yield Call("count_documents", {}, maxTimeMS=100)
        except ExecutionTimeout:
            return "too many"
        return "counted"

    server = Server(NetworkTimeout("no answer"))
    assert await run(kind, server, operation()) == "too many"
    assert server.dropped == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_other_silence_closes_the_idle_connections(kind: Any) -> None:
    def operation() -> Operation[Any]:
        return (yield Call("count_documents", {}))

    server = Server("pong", NetworkTimeout("no answer"), 7)
    assert await run(kind, server, operation()) == 7
    assert server.dropped == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_error_inside_a_transaction_is_raised_unchanged(kind: Any) -> None:
    def operation() -> Operation[Any]:
        return (yield Call("insert_one", {}, session="session"))

    error = OperationFailure("conflict", 112)
    with pytest.raises(OperationFailure) as raised:
        await run(kind, Server(error), operation())
    assert raised.value is error
    with pytest.raises(OperationFailed):

        def outside() -> Operation[Any]:
            return (yield Call("insert_one", {}))

        await run(kind, Server(error), outside())


@pytest.mark.parametrize("kind", KINDS)
async def test_repeat_that_the_operation_checks_first_follows_its_check(kind: Any) -> None:
    calls: list[str] = []

    def operation() -> Operation[Any]:
        repeat: RepeatDue | None = None
        while True:
            calls.append("check")
            try:
                return (yield Call("insert_one", {}, recheck=True, after=repeat))
            except RepeatDue as exc:
                repeat = exc

    server = Server(AutoReconnect("lost"), AutoReconnect("lost"), "inserted")
    assert await run(kind, server, operation()) == "inserted"
    assert calls == ["check"] * 3


async def test_call_that_never_ends_is_a_server_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drivers, "GRACE_SEC", 0.01)
    server = Server(asyncio.Event().wait(), asyncio.Event().wait())

    def operation() -> Operation[Any]:
        return (yield Call("insert_one", {}))

    with pytest.raises(ServerUnavailable) as raised:
        await run(AsyncDriver, server, operation(), call_timeout=0.01, retry_deadline=0)
    assert isinstance(raised.value.__cause__, NetworkTimeout)
    server._replies[0].close()  # noqa: SLF001 (not awaited: nothing is repeated)


def test_value_that_the_encoder_rejects_is_an_invalid_argument() -> None:
    error = translate(OverflowError("MongoDB can only handle up to 8-byte ints"))
    assert isinstance(error, InvalidArgument)
    assert "8-byte" in str(error)
