"""Effects: what a worker does next, decided once for threads and for coroutines.

A generator yields effects and receives each one's reply. It performs none itself, so the same
decisions serve both kinds of worker: threads perform an effect, coroutines await it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from microqueue.core import QueueCore
from microqueue.operations.call import Operation
from microqueue.worker.in_flight import LeasedTask

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunOperation:
    """Run an operation on a queue; reply its result."""

    queue: QueueCore[Any]
    operation: Operation[Any]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Sleep."""

    seconds: float


# Fetching


@dataclass(frozen=True, slots=True)
class PutInBuffer:
    """Put claimed tasks into the task buffer, from which handlers take them."""

    tasks: Sequence[LeasedTask]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Remove the unwanted tasks from the task buffer; reply with them."""

    unwanted: Callable[[LeasedTask], bool]


@dataclass(frozen=True, slots=True)
class WaitForRoom:
    """Wait until fewer than ``unfinished`` and fewer than ``total`` are in flight, or time out."""

    unfinished: int
    total: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WaitForWork:
    """Wait until the change stream reports a change, or time out; reply whether it did."""

    seconds: float


# One run, from its registration to its end


@dataclass(frozen=True, slots=True)
class Register:
    """Register the worker as soon as MongoDB answers; reply whether the run begins."""

    burst: bool


@dataclass(frozen=True, slots=True)
class StartParts:
    """Start the background work: leases, handlers, settlement writer, fetcher."""

    burst: bool


@dataclass(frozen=True, slots=True)
class WaitForStop:
    """Wait until a stop is requested, or the fetcher has ended."""


@dataclass(frozen=True, slots=True)
class ReleaseUnstarted:
    """Start no more handlers, and release the tasks in the task buffer."""


@dataclass(frozen=True, slots=True)
class WaitForHandlers:
    """Wait until nothing is in flight, or time out."""

    seconds: float


@dataclass(frozen=True, slots=True)
class JoinFetcher:
    """Wait for the fetcher until the deadline; reply whether it has ended."""

    deadline: Callable[[], float]


@dataclass(frozen=True, slots=True)
class JoinSettlementWriter:
    """Write the buffered settlements until the deadline; reply whether all are written."""

    deadline: Callable[[], float]


@dataclass(frozen=True, slots=True)
class JoinThread:
    """Wait for a thread until the deadline; reply whether it has ended."""

    thread: Any
    deadline: Callable[[], float]


@dataclass(frozen=True, slots=True)
class JoinHooks:
    """Run the hook calls that are queued until the deadline."""

    deadline: Callable[[], float]


SettleEffect: TypeAlias = RunOperation | Sleep
FetchEffect: TypeAlias = RunOperation | Sleep | PutInBuffer | Withdraw | WaitForRoom | WaitForWork
RunEffect: TypeAlias = (
    Register
    | StartParts
    | WaitForStop
    | ReleaseUnstarted
    | WaitForHandlers
    | JoinFetcher
    | JoinSettlementWriter
    | JoinThread
    | JoinHooks
)
SettleEffects: TypeAlias = Generator[SettleEffect, Any, T]
FetchEffects: TypeAlias = Generator[FetchEffect, Any, T]
RunEffects: TypeAlias = Generator[RunEffect, Any, T]
