"""The models of the dead-letter queue: the filter, and what its methods return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, Generic

from pydantic import Field, field_validator

from microqueue.arguments import invalid_argument, is_encodable
from microqueue.durations import AwareDatetime
from microqueue.model import Model, revalidated
from microqueue.task import PayloadT, Task, TaskError, TaskId


class DeadLetterFilter(Model):
    """Selects dead letters by name, error code, text in the message, and time of failure.

    An empty filter selects all dead letters of the queue.
    """

    name: str | None = None
    """The name of the task; the empty string selects dead letters without a name."""
    code: str | None = None
    """The error code; the empty string selects dead letters without a code."""
    text: str | None = None
    """Plain text in the error message, not a pattern. Case is ignored."""
    group: str | None = None
    """The message of a group that ``dead_letters.groups()`` returned."""
    since: AwareDatetime | None = None
    """The earliest time of the failure, inclusive."""
    until: AwareDatetime | None = None
    """The latest time of the failure, exclusive."""
    shown: Callable[[str], str] | None = Field(default=None, exclude=True, repr=False)
    """A function that masks secrets in a message; ``text`` and ``group`` see its result."""

    @field_validator("name", "code", "text", "group")
    @classmethod
    def _can_be_asked(cls, value: str | None) -> str | None:
        if value is not None and not is_encodable(value):
            raise ValueError("MongoDB cannot store this text")
        return value

    @field_validator("text")
    @classmethod
    def _can_be_searched(cls, value: str | None) -> str | None:
        if value is not None and "\0" in value:
            raise ValueError("MongoDB cannot search for a null character")
        return value


def check_dead_letter_filter(which: Any) -> DeadLetterFilter:
    """Reject anything but a filter of dead letters."""
    if not isinstance(which, DeadLetterFilter):
        raise invalid_argument("which", which, "give a DeadLetterFilter")
    return revalidated(which)


class DeadLetter(Model):
    """A task that has just become a dead letter, for hooks.

    It has no payload; ``queue.get(letter.id)`` returns the whole task.
    """

    id: TaskId
    queue: str
    name: str | None
    """The name of a named task."""
    attempts: int
    error: TaskError
    """Why, with a code such as ``expired`` or ``poison``."""
    source: str = "queue"
    """What made it a dead letter: ``worker``, ``sweeper``, ``supervisor``, ``dashboard``,
    ``command``, ``celery``, or ``queue`` for a call by your code."""


class DeadLetterPage(Model, Generic[PayloadT]):
    """A page of dead letters, newest first, with the cursor of the next page."""

    tasks: Sequence[Task[PayloadT]]
    next_cursor: str | None = None

    def __iter__(self) -> Iterator[Task[PayloadT]]:  # type: ignore[override]  # A page is its tasks.
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Task[PayloadT]:
        return self.tasks[index]


class DeadLetterStats(Model):
    """The number of dead letters, in total and by error code.

    Above ``settings.count_limit`` the ``total`` is ``estimated``, and ``by_code`` counts the
    newest ``examined`` dead letters.
    """

    total: int
    by_code: dict[str, int]
    oldest_at: datetime | None
    newest_at: datetime | None
    estimated: bool = False
    examined: int = 0


class ReplayReport(Model):
    """What a replay did.

    ``skipped`` dead letters were not replayed: a live task has their dedupe key, or another
    caller is replaying them. ``missing`` are the given ids that no task has.
    """

    matched: int
    replayed: int
    skipped: Sequence[TaskId] = ()
    missing: Sequence[TaskId] = ()
    dry_run: bool = False


class DeadLetterGroup(Model):
    """Dead letters with one error code whose messages differ only in numbers and names."""

    code: str | None
    message: str
    sample: str
    count: int
    first_at: datetime | None
    last_at: datetime | None
    latest_id: TaskId


class DeadLetterGroups(Model):
    """Groups of dead letters, the largest first. If ``truncated``, older ones were not counted."""

    total: int
    truncated: bool
    groups: Sequence[DeadLetterGroup]
