"""An operation describes calls to MongoDB; a driver performs them.

An operation is a generator. It yields calls, receives the reply to each, and returns a typed
result. It performs no I/O, so the same code serves pymongo, Motor, PyMongo's async client and
mongomock, and can be tested as the list of calls that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from enum import IntEnum, StrEnum, auto
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote

from microqueue.dead_letter_models import DeadLetter

T = TypeVar("T")
Document: TypeAlias = dict[str, Any]
Each: TypeAlias = Callable[[], Callable[[Document], Any]]


class Target(StrEnum):
    """Where a call goes: the name of an attribute of a queue's collections."""

    TASKS = "tasks"
    CLAIMS = "claims"
    """The tasks, for a read whose dates may be without a timezone, see ``microqueue.clock``."""
    COMMITTED = "committed"
    """The tasks as a majority has them: what a failover cannot undo."""
    DEAD_LETTERS = "dead_letters"
    COMMITTED_DEAD_LETTERS = "committed_dead_letters"
    LOCKS = "locks"
    WORKERS = "workers"
    AUDIT = "audit"
    PAUSES = "pauses"
    LOADS = "loads"
    TOPIC = "topic"
    BINDINGS = "bindings"
    BROKER = "broker"
    SCHEDULES = "schedules"
    DEDUPE_KEYS = "dedupe_keys"
    DATABASE = "database"


PAUSES_COLLECTION = "microqueue_pauses"
SCHEDULES_COLLECTION = "microqueue_schedules"
DEDUPE_KEYS_COLLECTION = "microqueue_dedupe_keys"
"""Defined here because operations name them: in a pipeline, and in errors about indexes."""


def dlq_collection_name(tasks: str) -> str:
    """Return the name of the dead-letter collection of a collection of tasks."""
    return f"{tasks}_dlq"


def topic_collection_name(tasks: str, topic: str) -> str:
    """Return the name of the collection of a topic, beside a collection of tasks."""
    quoted = quote(topic, safe=" ").replace("..", ".%2E")
    return f"{tasks}_topic_{quoted[:-1] + '%2E' if quoted.endswith('.') else quoted}"


class Span(IntEnum):
    """How long a call may take."""

    BRIEF = auto()
    """It reads by an index, or by id."""
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
    """A reply, and when it was sent for and received by this machine's monotonic clock."""

    reply: Any
    sent: float
    received: float

    @property
    def took_sec(self) -> float:
        """How long the attempt took."""
        return self.received - self.sent


class RepeatDue(Exception):
    """A call with ``recheck`` failed with a transient error, and there is time to repeat it.

    A driver throws it into the operation. The operation checks whether the first attempt was
    performed. To repeat the call, it yields a new one with ``after`` set to this error, which
    continues the same deadline. If that is over by then, the driver raises ``error``, that of the
    attempt. ``budget`` belongs to the driver.
    """

    def __init__(self, error: Exception, budget: Any) -> None:
        super().__init__("the call may be repeated")
        self.error = error
        self.budget = budget


class Call:
    """One method of a collection or database, with its arguments.

    Args:
        method: The name of the method.
        *arguments: Its positional arguments.
        target: The collection or database.
        repeatable: Performing it twice leaves the same state as once, so a driver may repeat it
            after a reply was lost. A call inside a caller's transaction is never repeated alone:
            the whole transaction is.
        recheck: It is repeatable only after the operation has checked something, so the driver
            throws :class:`RepeatDue` instead of repeating it.
        after: The :class:`RepeatDue` that this call is the repeat for.
        atomic: Perform it in its own transaction where the server has transactions, so that all of
            it is done or nothing. A repeat after a lost reply may find that it is done.
        session: The caller's session, for a transaction.
        each: Returns a function that is called with each document of a cursor as it arrives, so
            that few documents are in memory at a time. The reply is the list of its results.
            A result of ``ENOUGH`` ends the reading.
        timed: Reply with :class:`Timed`, the times of the attempt that succeeded.
        span: How long it may take. By default, that of the method.
        **options: Its keyword arguments.
    """

    __slots__ = (
        "after", "arguments", "atomic", "each", "method", "options", "recheck", "repeatable",
        "span", "target", "timed",
    )  # fmt: skip

    def __init__(
        self,
        method: str,
        *arguments: Any,
        target: Target = Target.TASKS,
        repeatable: bool = True,
        recheck: bool = False,
        after: RepeatDue | None = None,
        atomic: bool = False,
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
        self.atomic = atomic and session is None
        self.options = options if session is None else {**options, "session": session}

    @property
    def own_limit_sec(self) -> float | None:
        """The time limit that the operation sets for the server, if any."""
        limit_ms = self.options.get("maxTimeMS") or self.options.get("max_time_ms")
        return None if limit_ms is None else limit_ms / 1000

    @property
    def in_transaction(self) -> bool:
        """Whether the call belongs to the caller's session."""
        return "session" in self.options

    def __repr__(self) -> str:
        shown = [repr(argument) for argument in self.arguments]
        shown += [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.target}.{self.method}({', '.join(shown)})"


class Buried(Call):
    """A note for hooks instead of a call: these tasks became dead letters. A driver ignores it."""

    __slots__ = ("letters",)

    def __init__(self, letters: Sequence[DeadLetter]) -> None:
        super().__init__("buried")
        self.letters = letters

    def __repr__(self) -> str:
        return f"Buried({self.letters!r})"


Operation: TypeAlias = Generator[Call, Any, T]

Report: TypeAlias = Callable[[Sequence[DeadLetter]], None]
"""Reports new dead letters."""


def reporting(operation: Operation[T], report: Report | None) -> Operation[T]:
    """Return the same operation; ``report`` gets the dead letters that it makes."""
    return operation if report is None else _reporting(operation, report)


def _reporting(operation: Operation[T], report: Report) -> Operation[T]:
    reply: Any = None
    error: Exception | None = None
    while True:
        try:
            call = operation.send(reply) if error is None else operation.throw(error)
        except StopIteration as stop:
            result: T = stop.value
            return result
        reply, error = None, None
        if isinstance(call, Buried):
            report(call.letters)
            continue
        try:
            reply = yield call
        except Exception as exc:  # noqa: BLE001 (the operation decides)
            error = exc


def resume(operation: Operation[T], call: Call) -> Operation[T]:
    """Return the rest of an operation that has begun; ``call`` is what it yielded last."""
    while True:
        reply: Any = None
        error: Exception | None = None
        try:
            reply = yield call
        except Exception as exc:  # noqa: BLE001 (the operation decides)
            error = exc
        try:
            call = operation.send(reply) if error is None else operation.throw(error)
        except StopIteration as stop:
            result: T = stop.value
            return result


ENOUGH = object()
"""A result of ``each`` that ends the reading of a cursor; it is the last of the reply."""
CURSORS = frozenset({"find", "aggregate"})
"""The methods that return a cursor; a driver replies with the list of its documents."""


def apply_each(documents: Iterable[Any], each: Callable[[Any], Any]) -> list[Any]:
    """Call ``each`` with the documents, until it returns ``ENOUGH``; return the results."""
    found: list[Any] = []
    for document in documents:
        found.append(each(document))
        if found[-1] is ENOUGH:
            break
    return found
