"""The parameters and bodies of requests."""

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
from microqueue.dashboard.access import AnyDeadLetters
from microqueue.dashboard.context import Context
from microqueue.dashboard.payloads import MAX_SAFE_INTEGER
from microqueue.dlq import DeadLetterFilter
from microqueue.operations import lookup
from microqueue.task import NAME_HEADER, TaskId
from microqueue.task_filter import LONGEST_TEXT
from microqueue.task_ids import candidate_ids

MAX_CURSOR_LENGTH = 2000
MAX_IDS = 10_000
CENTURY_SEC = 36_500 * 86_400


def context_of(request: Request) -> Context:
    """Return the context of the dashboard that serves a request."""
    context: Context = request.app.state.context
    return context


DashboardContext = Annotated[Context, Depends(context_of)]
QueueName = Annotated[str | None, Query(min_length=1, max_length=120)]
Text = Annotated[str | None, Query(max_length=LONGEST_TEXT)]
Instant = Annotated[AwareDatetime | None, Query()]
Limit = Annotated[int, Query(ge=1, le=1000)]
Cursor = Annotated[str | None, Query(max_length=MAX_CURSOR_LENGTH)]
Exact = Annotated[
    bool, Query(description="Count everything instead of estimating, which may take long.")
]
Seconds = Annotated[float, Field(ge=0, le=CENTURY_SEC, allow_inf_nan=False)]


class Strict(BaseModel):
    """A body that rejects unknown fields."""

    model_config = ConfigDict(extra="forbid")


class DeadLetterFilterBody(Strict):
    """A filter of dead letters; an empty filter matches all."""

    code: str | None = Field(default=None, max_length=LONGEST_TEXT)
    text: str | None = Field(default=None, max_length=LONGEST_TEXT)
    group: str | None = Field(default=None, max_length=400)
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None

    def to_filter(self, shown: Callable[[str], str]) -> DeadLetterFilter:
        """Return the filter; ``shown`` masks messages, which match as they are shown."""
        return DeadLetterFilter(**self.model_dump(), shown=shown)


class Selection(Strict):
    """Dead letters by ``ids``, or all of one queue or of all queues that match ``filter``.

    An id is a task's ``id`` or ``reference``, of any queue unless ``queue`` is given.
    """

    queue: str | None = Field(default=None, min_length=1, max_length=120)
    all_queues: bool = False
    ids: list[str | int] | None = Field(default=None, min_length=1, max_length=MAX_IDS)
    filter: DeadLetterFilterBody | None = None
    limit: int | None = Field(default=None, ge=1, le=2**31 - 1)
    dry_run: bool = False

    @model_validator(mode="after")
    def _is_unambiguous(self) -> Selection:
        if (self.ids is None) == (self.filter is None):
            raise ValueError("give either ids or filter")
        if self.queue is not None and self.all_queues:
            raise ValueError("give either queue or all_queues=true")
        if self.ids is None and self.queue is None and not self.all_queues:
            raise ValueError("give queue, or all_queues=true for all queues")
        return self

    def dead_letters(self, context: Context) -> AnyDeadLetters:
        """Return the dead letters of the queue, or of all queues."""
        dead_letters = context.access.queue(self.queue).dead_letters
        return dead_letters if self.queue is not None else dead_letters.all_queues

    async def resolve(self, context: Context) -> DeadLetterFilter | list[TaskId]:
        """Return the filter, or for each of ``ids`` the reading that exists."""
        if self.filter is not None:
            return self.filter.to_filter(context.redactor.text)
        readings = [[one] if isinstance(one, int) else _readings(one) for one in self.ids or ()]
        ids: list[TaskId] = await context.access.run(
            lookup.first_existing(readings, context.access.settings)
        )
        return ids

    def describe(self) -> str:
        """Return the selection as text for the audit log."""
        if self.filter is None:
            return ", ".join(str(one) for one in self.ids or ())
        given = self.filter.model_dump(exclude_none=True, mode="json")
        text = ", ".join(f"{name}={value!r}" for name, value in given.items()) or "all"
        return text if self.queue is not None else f"all queues: {text}"


def _readings(text: str) -> list[Any]:
    """Return the ids that a text may mean; small integers last, as these are JSON numbers."""
    candidates = candidate_ids(text) or [text]
    return sorted(candidates, key=_is_json_number)


def _is_json_number(task_id: Any) -> bool:
    return isinstance(task_id, int) and abs(task_id) <= MAX_SAFE_INTEGER


class Replay(Selection):
    """A selection of dead letters, and how to replay them."""

    delay_sec: Seconds = 0
    spread_sec: Seconds = 0
    reset_attempts: bool = True


class EditAndReplay(Strict):
    """A new payload for a dead letter to replay; masked values keep what is stored."""

    payload: dict[str, Any]
    delay_sec: Seconds = 0


def _printable(name: str) -> str:
    if not name.isprintable() or not is_encodable(name):
        raise ValueError("give a printable string")
    return name


PrintableName = Annotated[str, Field(min_length=1, max_length=120), AfterValidator(_printable)]


class NewTaskBody(Strict):
    """A task to enqueue. The payload may contain extended JSON, such as ``{"$date": ...}``.

    ``name`` is the name of the task's handler. It is stored in the header ``task``.
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
            raise ValueError(f"header {NAME_HEADER!r} contradicts the task name {name!r}")
        return headers

    def named_headers(self) -> dict[str, Any]:
        """Return the headers, including the name."""
        return self.headers if self.name is None else {**self.headers, NAME_HEADER: self.name}


class Success(Strict):
    """The result of a task that is marked as done."""

    result: Any = None


class Failure(Strict):
    """The error of a task that is marked as failed."""

    message: str = Field(default="marked as failed", min_length=1, max_length=2000)
    code: str | None = Field(default="by_hand", min_length=1, max_length=200)


class DeadLetterQuery:
    """A filter of dead letters in the query of a URL."""

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
        self.filter = DeadLetterFilter(code=code, text=text, group=group, since=since, until=until)
