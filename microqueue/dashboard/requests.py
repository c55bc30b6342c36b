"""What requests may say, and what routes get made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from microqueue.arguments import is_encodable
from microqueue.dashboard.access import AnyLetters
from microqueue.dashboard.context import Context
from microqueue.dashboard.payloads import LARGEST_EXACT
from microqueue.dlq import DeadLetterFilter
from microqueue.operations import lookup
from microqueue.task import NAME_HEADER
from microqueue.task_filter import LONGEST_TEXT
from microqueue.task_ids import candidate_ids

LONGEST_CURSOR = 2000
MOST_IDS = 10_000
CENTURY_SEC = 36_500 * 86_400


def context_of(request: Request) -> Context:
    """Give the dashboard that a request is for."""
    context: Context = request.app.state.context
    return context


DashboardContext = Annotated[Context, Depends(context_of)]
QueueName = Annotated[str | None, Query(min_length=1, max_length=120)]
Text = Annotated[str | None, Query(max_length=LONGEST_TEXT)]
Instant = Annotated[AwareDatetime | None, Query()]
Limit = Annotated[int, Query(ge=1, le=1000)]
Cursor = Annotated[str | None, Query(max_length=LONGEST_CURSOR)]
Exact = Annotated[bool, Query(description="Count everything, however long it takes.")]
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
    """Dead letters by their ids, or all of a queue, or of all queues, that a filter matches.

    An id is given as it was shown, or as a task's ``reference``. It means a letter of any queue,
    unless one is named.
    """

    queue: str | None = Field(default=None, min_length=1, max_length=120)
    all_queues: bool = False
    ids: list[str | int] | None = Field(default=None, min_length=1, max_length=MOST_IDS)
    filter: LetterFilter | None = None
    limit: int | None = Field(default=None, ge=1, le=2**31 - 1)
    dry_run: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Selection:
        if (self.ids is None) == (self.filter is None):
            raise ValueError("give either ids or filter")
        if self.queue is not None and self.all_queues:
            raise ValueError("give either queue or all_queues=true")
        if self.ids is None and self.queue is None and not self.all_queues:
            raise ValueError("say which queue: give queue, or all_queues=true for all of them")
        return self

    def letters(self, context: Context) -> AnyLetters:
        """Return the dead letters of the queue, or of all queues."""
        letters = context.access.queue(self.queue).dead_letters
        return letters if self.queue is not None else letters.all_queues

    async def chosen(self, context: Context) -> Any:
        """Give it as the queue takes it: the filter, or the very ids that are meant."""
        if self.filter is not None:
            return self.filter.read(context.redactor.text)
        meant = [[one] if isinstance(one, int) else _meant(one) for one in self.ids or ()]
        return await context.access.run(lookup.first_existing(meant, context.access.settings))

    def described(self) -> str:
        """Name it for the audit log."""
        if self.filter is None:
            return ", ".join(str(one) for one in self.ids or ())
        given = self.filter.model_dump(exclude_none=True, mode="json")
        told = ", ".join(f"{name}={value!r}" for name, value in given.items()) or "all"
        return told if self.queue is not None else f"all queues: {told}"


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


def _printable(name: str) -> str:
    if not name.isprintable() or not is_encodable(name):
        raise ValueError("give a printable string")
    return name


PrintableName = Annotated[str, Field(min_length=1, max_length=120), AfterValidator(_printable)]


class NewTaskBody(Strict):
    """A task to add by hand. The payload may hold extended JSON, as in ``{"$date": ...}``.

    ``name`` is what named tasks are found by; it is stored in the header ``task``.
    """

    queue: PrintableName | None = None
    name: PrintableName | None = None
    payload: dict[str, Any] = Field(default_factory=dict)
    priority: int = Field(default=0, ge=0, le=255)
    delay_sec: Seconds | None = None
    max_attempts: int | None = Field(default=None, ge=1, le=1_000_000)
    dedupe_key: str | None = Field(default=None, min_length=1, max_length=1024)
    expires_in_sec: Seconds | None = Field(default=None, gt=0)
    task_id: str | int | None = None
    headers: dict[str, Any] = Field(default_factory=dict)

    @field_validator("headers")
    @classmethod
    def _name_is_given_once(cls, headers: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        name = info.data.get("name")
        if name is not None and headers.get(NAME_HEADER, name) != name:
            raise ValueError(f"{NAME_HEADER!r} holds the task's name, which is {name!r}")
        return headers

    def named_headers(self) -> dict[str, Any]:
        """Give the headers with the name among them."""
        return self.headers if self.name is None else {**self.headers, NAME_HEADER: self.name}


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
