"""What requests may say, and what routes get made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from microqueue.dashboard.context import Context
from microqueue.dashboard.extended import LARGEST_EXACT
from microqueue.operations import inspect
from microqueue.operations.dead_letters import DeadLetterFilter
from microqueue.operations.matching import LONGEST_TEXT
from microqueue.task_ids import candidate_ids

LONGEST_CURSOR = 2000
MOST_IDS = 10_000
CENTURY_SEC = 36_500 * 86_400


def context_of(request: Request) -> Context:
    """Give the dashboard that a request is for."""
    context: Context = request.app.state.context
    return context


Shared = Annotated[Context, Depends(context_of)]
QueueName = Annotated[str | None, Query(min_length=1, max_length=120)]
Text = Annotated[str | None, Query(max_length=LONGEST_TEXT)]
Instant = Annotated[AwareDatetime | None, Query()]
Limit = Annotated[int, Query(ge=1, le=1000)]
Cursor = Annotated[str | None, Query(max_length=LONGEST_CURSOR)]
Seconds = Annotated[float, Field(ge=0, le=CENTURY_SEC, allow_inf_nan=False)]


class Strict(BaseModel):
    """A body in which unknown names are refused."""

    model_config = ConfigDict(extra="forbid")


class LetterFilter(Strict):
    """Which dead letters; an empty filter means all of the queue."""

    code: str | None = Field(default=None, max_length=LONGEST_TEXT)
    text: str | None = Field(default=None, max_length=LONGEST_TEXT)
    group: str | None = Field(default=None, max_length=400)
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None

    def read(self, shown: Callable[[str], str]) -> DeadLetterFilter:
        """Give it as the queue takes it, for messages as they are shown."""
        return DeadLetterFilter(**self.model_dump(), shown=shown)


class Selection(Strict):
    """Dead letters by their ids, or all that a filter matches.

    An id is given as it was shown, or as a task's ``reference``.
    """

    queue: str | None = Field(default=None, min_length=1, max_length=120)
    ids: list[str | int] | None = Field(default=None, min_length=1, max_length=MOST_IDS)
    filter: LetterFilter | None = None
    limit: int | None = Field(default=None, ge=1, le=2**31 - 1)
    dry_run: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Selection:
        if (self.ids is None) == (self.filter is None):
            raise ValueError("give either ids or filter")
        return self

    async def chosen(self, shared: Context) -> Any:
        """Give it as the queue takes it: the filter, or the very ids that are meant."""
        if self.filter is not None:
            return self.filter.read(shared.redactor.text)
        meant = [[one] if isinstance(one, int) else _meant(one) for one in self.ids or ()]
        return await shared.access.run(inspect.first_existing(meant, shared.access.settings))

    def described(self) -> str:
        """Name it for the audit log."""
        if self.filter is None:
            return ", ".join(str(one) for one in self.ids or ())
        given = self.filter.model_dump(exclude_none=True, mode="json")
        return ", ".join(f"{name}={value!r}" for name, value in given.items()) or "all"


def _meant(text: str) -> list[Any]:
    """Read an id that was shown as text: a small integer would have been a number."""
    candidates = candidate_ids(text) or [text]
    return sorted(candidates, key=lambda one: isinstance(one, int) and abs(one) <= LARGEST_EXACT)


class Replay(Selection):
    """How to send dead letters back."""

    delay_sec: Seconds = 0
    spread_sec: Seconds = 0
    reset_attempts: bool = True


class EditAndReplay(Strict):
    """A new payload for a dead letter that is sent back; masked values stay as they are."""

    payload: dict[str, Any]
    delay_sec: Seconds = 0


class NewTaskBody(Strict):
    """A task to add by hand. The payload may hold extended JSON, as in ``{"$date": ...}``."""

    queue: str | None = Field(default=None, min_length=1, max_length=120)
    payload: dict[str, Any] = Field(default_factory=dict)
    priority: int = Field(default=0, ge=0, le=255)
    delay_sec: Seconds | None = None
    max_attempts: int | None = Field(default=None, ge=1, le=1_000_000)
    dedupe_key: str | None = Field(default=None, min_length=1, max_length=1024)
    expires_in_sec: Seconds | None = Field(default=None, gt=0)
    task_id: str | int | None = None
    headers: dict[str, Any] = Field(default_factory=dict)


class Success(Strict):
    """What a task that is processed by hand gives."""

    result: Any = None


class Failure(Strict):
    """Why a task that is processed by hand fails."""

    message: str = Field(default="failed by hand", min_length=1, max_length=2000)
    code: str | None = Field(default="by_hand", min_length=1, max_length=200)


class LetterQuery:
    """A filter of dead letters that stands in an address."""

    def __init__(
        self,
        *,
        queue: QueueName = None,
        code: Text = None,
        text: Text = None,
        group: Annotated[str | None, Query(max_length=400)] = None,
        since: Instant = None,
        until: Instant = None,
    ) -> None:
        self.queue = queue
        self.which = DeadLetterFilter(code=code, text=text, group=group, since=since, until=until)
