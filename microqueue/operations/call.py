"""An operation says what to ask of MongoDB; a driver asks it.

An operation is a generator. It yields calls, receives each one's reply, and returns a
typed result. It performs no I/O, so the same code serves pymongo, Motor, PyMongo's async
client and mongomock, and can be tested as the list of calls that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import IntEnum, StrEnum, auto
from typing import Any, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")
Document: TypeAlias = dict[str, Any]
Each: TypeAlias = Callable[[], Callable[[Document], Any]]


class Target(StrEnum):
    """Where a call goes."""

    TASKS = "tasks"
    DEAD_LETTERS = "dead_letters"
    LOCKS = "locks"
    WORKERS = "workers"
    AUDIT = "audit"
    PAUSES = "pauses"
    LOADS = "loads"
    DATABASE = "database"


PAUSES_COLLECTION = "microqueue_pauses"
"""Named here and not by the driver alone: one pipeline reads it together with the tasks."""


def dlq_collection_name(tasks: str) -> str:
    """Name the collection for the dead letters of a collection of tasks."""
    return f"{tasks}_dlq"


class Span(IntEnum):
    """How long a call may take without anything being wrong."""

    BRIEF = auto()
    """It finds what it needs by an index, or by its id."""
    LONG = auto()
    """It may have to read the whole collection."""
    LONGEST = auto()
    """It may have to write to the whole collection, or to build an index."""


SPANS = {
    "aggregate": Span.LONG,
    "count_documents": Span.LONG,
    "distinct": Span.LONG,
    "create_indexes": Span.LONGEST,
}


class Timed(NamedTuple):
    """A reply, and when it was asked for and arrived by this machine's monotonic clock."""

    reply: Any
    sent: float
    received: float

    @property
    def took_sec(self) -> float:
        """How long the attempt took."""
        return self.received - self.sent


class RepeatDue(Exception):
    """A call with ``recheck`` failed for a passing reason, and there is time to repeat it.

    A driver throws it into the operation. The operation checks what has become of the first
    attempt, and yields a call with ``after`` set to this, which continues the same deadline.
    ``budget`` is the driver's.
    """

    def __init__(self, budget: Any) -> None:
        super().__init__("the call may be repeated")
        self.budget = budget


class Call:
    """One method of a collection or database, with its arguments.

    ``repeatable`` says that performing it twice leaves the same state as once, so that a
    driver may repeat it after a connection was lost without a reply. A call inside a
    caller's transaction is never repeated alone: the whole transaction is.

    ``recheck`` says that this holds only if the operation checks something before each repeat:
    the driver then throws :class:`RepeatDue` instead of repeating the call. The repeat is a new
    call, with that error as ``after``.

    ``each`` begins what is done with each document of a cursor as it arrives, so that few are
    held at a time; the reply is the list of what that gave. What gives ``ENOUGH`` ends it.

    ``span`` says how long it may take without anything being wrong. Left out, the method tells.

    ``timed`` asks for a :class:`Timed` reply, which tells when the attempt that succeeded was made.
    """

    __slots__ = (
        "after", "arguments", "each", "method", "options", "recheck", "repeatable", "span",
        "target", "timed",
    )  # fmt: skip

    def __init__(
        self,
        method: str,
        *arguments: Any,
        target: Target = Target.TASKS,
        repeatable: bool = True,
        recheck: bool = False,
        after: RepeatDue | None = None,
        session: Any = None,
        each: Each | None = None,
        timed: bool = False,
        span: Span | None = None,
        **options: Any,
    ) -> None:
        self.method = method
        self.arguments = arguments
        self.target = target
        self.each = each
        self.timed = timed
        self.span = SPANS.get(method, Span.BRIEF) if span is None else span
        self.repeatable = repeatable and session is None
        self.recheck = recheck
        self.after = after
        self.options = options if session is None else {**options, "session": session}

    @property
    def own_limit_sec(self) -> float | None:
        """How long the operation itself lets the server take, if it says so."""
        limit_ms = self.options.get("maxTimeMS") or self.options.get("max_time_ms")
        return None if limit_ms is None else limit_ms / 1000

    @property
    def in_transaction(self) -> bool:
        """Whether the call belongs to a session of the caller."""
        return "session" in self.options

    def __repr__(self) -> str:
        shown = [repr(argument) for argument in self.arguments]
        shown += [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.target}.{self.method}({', '.join(shown)})"


Operation: TypeAlias = Generator[Call, Any, T]

ENOUGH = object()
"""What ends the reading of a cursor, and the list of what was made of it."""
CURSORS = frozenset({"find", "aggregate"})
"""The methods that give a cursor; a driver replies with the list of all that it holds."""
