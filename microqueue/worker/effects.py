"""Steps: what a worker is to do next, decided in one place for threads and for coroutines.

A generator yields steps and receives each one's reply. It does nothing itself, so the same
decisions serve both kinds of worker: threads perform a step, coroutines await it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias, TypeVar

from microqueue.operations.call import Operation

T = TypeVar("T")


class Do(Enum):
    """What a worker is asked to do next."""

    RUN = auto()
    """Run ``operation`` on ``queue``; reply its result."""
    AWAIT_ROOM = auto()
    """Wait until fewer than ``limit`` are unfinished, ``most`` are held; or for ``seconds``."""
    SLEEP = auto()
    """Sleep for ``seconds``, or until the stream brings news; reply whether it did."""
    PAUSE = auto()
    """Sleep for ``seconds``."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do, with what it needs."""

    do: Do
    queue: Any = None
    operation: Operation[Any] | None = None
    limit: int = 0
    most: int = 0
    seconds: float = 0.0


Steps: TypeAlias = Generator[Step, Any, T]


def run_on(queue: Any, operation: Operation[T]) -> Steps[T]:
    """Ask for an operation to be run, and give its result."""
    result: T = yield Step(Do.RUN, queue, operation)
    return result


def perform(steps: Steps[Any], do: Callable[[Step], Any]) -> None:
    """Do step after step. An error is thrown into them, as they may know what it means."""
    try:
        step = next(steps)
        while True:
            try:
                reply = do(step)
            except BaseException as exc:  # noqa: BLE001 (it comes out again if it is not known)
                step = steps.throw(exc)
            else:
                step = steps.send(reply)
    except StopIteration:
        return


async def perform_async(steps: Steps[Any], do: Callable[[Step], Awaitable[Any]]) -> None:
    """Do step after step, as :func:`perform` does, awaited."""
    try:
        step = next(steps)
        while True:
            try:
                reply = await do(step)
            except BaseException as exc:  # noqa: BLE001 (it comes out again if it is not known)
                step = steps.throw(exc)
            else:
                step = steps.send(reply)
    except StopIteration:
        return
