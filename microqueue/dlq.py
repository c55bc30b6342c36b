"""The models of the dead-letter queue: what to select, and what its methods return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Generic

from pydantic import Field, field_validator

from microqueue.arguments import is_encodable
from microqueue.durations import AwareDatetime
from microqueue.model import Model
from microqueue.task import PayloadT, Task, TaskId


class DeadLetterFilter(Model):
    """Which dead letters: by error code, text in the message, and time of failure.

    An empty filter means all of the queue. ``text`` is plain text, not a pattern, and upper
    and lower case are the same. ``code=""`` means those without a code; ``group`` is the
    message of a group of letters, as :mod:`microqueue.operations.search` writes it. With
    ``shown``, which masks secrets, both are looked for in what it leaves of a message.
    """

    code: str | None = None
    text: str | None = None
    group: str | None = None
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    shown: Callable[[str], str] | None = Field(default=None, exclude=True, repr=False)

    @field_validator("code", "text", "group")
    @classmethod
    def _can_be_asked(cls, value: str | None) -> str | None:
        if value is not None and not is_encodable(value):
            raise ValueError("MongoDB cannot hold such a text")
        return value

    @field_validator("text")
    @classmethod
    def _can_be_searched(cls, value: str | None) -> str | None:
        if value is not None and "\0" in value:
            raise ValueError("MongoDB cannot search for a null character")
        return value


class DeadLetterPage(Model, Generic[PayloadT]):
    """Some dead letters, newest first; ``next_cursor`` leads to the following page."""

    tasks: Sequence[Task[PayloadT]]
    next_cursor: str | None = None

    def __iter__(self) -> Iterator[Task[PayloadT]]:  # type: ignore[override]  # A page is its tasks.
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Task[PayloadT]:
        return self.tasks[index]


class DeadLetterStats(Model):
    """How many dead letters there are, and why.

    Above ``settings.count_limit`` the ``total`` is ``estimated``, and ``by_code`` counts the
    newest ``examined`` letters.
    """

    total: int
    by_code: dict[str, int]
    oldest_at: datetime | None
    newest_at: datetime | None
    estimated: bool = False
    examined: int = 0


class ReplayReport(Model):
    """What a replay did.

    Letters that were ``skipped`` stay dead: a live task has their dedupe key, or another caller
    replays them. ``missing`` are the ids that were given and that no task has.
    """

    matched: int
    replayed: int
    skipped: Sequence[TaskId] = ()
    missing: Sequence[TaskId] = ()
    dry_run: bool = False


class LetterGroup(Model):
    """Dead letters with one error code whose messages differ only in numbers and names."""

    code: str | None
    message: str
    sample: str
    count: int
    first_at: datetime | None
    last_at: datetime | None
    latest_id: TaskId


class LetterGroups(Model):
    """The groups, the largest first; ``truncated``: there are letters older than those counted."""

    total: int
    truncated: bool
    groups: Sequence[LetterGroup]
