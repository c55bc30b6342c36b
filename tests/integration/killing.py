"""Operations that end before a call, as if their process was killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from microqueue.core import SyncCore
from microqueue.operations.call import Call, Operation


class Killed(Exception):
    """The process ended here."""


def killed_before(operation: Operation[Any], doomed: Callable[[Call], bool]) -> Operation[Any]:
    """Run an operation until its first call of a kind, which is not performed."""
    reply: Any = None
    error: Exception | None = None
    while True:
        try:
            call = operation.send(reply) if error is None else operation.throw(error)
        except StopIteration as stop:
            return stop.value
        if doomed(call):
            operation.close()
            raise Killed
        reply, error = None, None
        try:
            reply = yield call
        except Exception as exc:  # noqa: BLE001 (the operation decides)
            error = exc


class Stopped:
    """An operation that stops before its first call of a kind, and may continue later.

    It is as if its process stalled there.
    """

    def __init__(
        self, core: SyncCore[Any], operation: Operation[Any], chosen: Callable[[Call], bool]
    ) -> None:
        self._core = core
        self._operation = operation
        self._call = operation.send(None)
        while not chosen(self._call):
            self._step()

    def _step(self) -> None:
        reply, error = self._core.run(_one(self._call))
        if error is None:
            self._call = self._operation.send(reply)
        else:
            self._call = self._operation.throw(error)

    def finish(self) -> Any:
        """Run the rest, and return the result."""
        while True:
            try:
                self._step()
            except StopIteration as stop:
                return stop.value


def _one(call: Call) -> Operation[tuple[Any, Exception | None]]:
    try:
        return (yield call), None
    except Exception as exc:  # noqa: BLE001 (the operation decides)
        return None, exc
