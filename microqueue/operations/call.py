"""An operation says what to ask of MongoDB; a driver asks it.

An operation is a generator. It yields calls, receives each one's reply, and returns a
typed result. It performs no I/O, so the same code serves pymongo, Motor, PyMongo's async
client and mongomock, and can be tested as the list of calls that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

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


def letters_collection(tasks: str) -> str:
    """Name the collection for the dead letters of a collection of tasks."""
    return f"{tasks}_dlq"


class Call:
    """One method of a collection or database, with its arguments.

    ``repeatable`` says that performing it twice leaves the same state as once, so that a
    driver may repeat it after a connection was lost without a reply. A call inside a
    caller's transaction is never repeated alone: the whole transaction is.

    ``each`` begins what is done with each document of a cursor as it arrives, so that few are
    held at a time; the reply is the list of what that gave. What gives ``ENOUGH`` ends it.
    """

    __slots__ = ("arguments", "each", "method", "options", "repeatable", "target")

    def __init__(
        self,
        method: str,
        *arguments: Any,
        target: Target = Target.TASKS,
        repeatable: bool = True,
        session: Any = None,
        each: Each | None = None,
        **options: Any,
    ) -> None:
        self.method = method
        self.arguments = arguments
        self.target = target
        self.each = each
        self.repeatable = repeatable and session is None
        self.options = options if session is None else {**options, "session": session}

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
