"""The parameters and bodies of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from microqueue import error_codes
from microqueue.arguments import is_encodable
from microqueue.backoff import BackoffPolicy
from microqueue.dashboard.access import AnyDeadLetters
from microqueue.dashboard.context import DashboardState
from microqueue.dashboard.payloads import MAX_SAFE_INTEGER, from_extended_json
from microqueue.dead_letter_models import DeadLetterFilter
from microqueue.model import reject_unknown
from microqueue.new_task import LONGEST_KEY, MOST_ATTEMPTS, OnDuplicate
from microqueue.operations import lookup
from microqueue.task import LARGEST_PRIORITY, LONGEST_NAME, TaskId
from microqueue.task_filter import LONGEST_TEXT
from microqueue.task_ids import candidate_ids

API = "/api/v1"
MAX_CURSOR_LENGTH = 2000
MAX_IDS = 10_000
MAX_WAIT_SEC = 30
CENTURY_SEC = 36_500 * 86_400


def context_of(request: Request) -> DashboardState:
    """Return the context of the dashboard that serves a request."""
    context: DashboardState = request.app.state.context
    return context


async def reject_unknown_query(request: Request) -> None:
    """Reject a parameter in the query that the route does not have."""
    if request.query_params:
        # Not all versions of FastAPI include the prefix.
        path = API + request.scope["route"].path_format.removeprefix(API)
        operation = request.app.openapi()["paths"][path][request.method.lower()]
        names = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
        reject_unknown(f"{request.method} {path}", request.query_params, names)


DashboardContext = Annotated[DashboardState, Depends(context_of)]
QueueName = Annotated[str | None, Query(min_length=1, max_length=LONGEST_NAME)]
Text = Annotated[str | None, Query(max_length=LONGEST_TEXT)]
Instant = Annotated[AwareDatetime | None, Query()]
Limit = Annotated[int, Query(ge=1, le=1000)]
Cursor = Annotated[str | None, Query(max_length=MAX_CURSOR_LENGTH)]
Exact = Annotated[
    bool, Query(description="Count everything instead of estimating, which may take long.")
]
WaitSec = Annotated[
    float,
    Query(
        ge=0, le=MAX_WAIT_SEC, allow_inf_nan=False, description="How long to wait for the result."
    ),
]
Seconds = Annotated[float, Field(ge=0, le=CENTURY_SEC, allow_inf_nan=False)]
PositiveSeconds = Annotated[Seconds, Field(gt=0)]
Priority = Annotated[int, Field(ge=0, le=LARGEST_PRIORITY)]
MaxAttempts = Annotated[int, Field(ge=1, le=MOST_ATTEMPTS)]


class Strict(BaseModel):
    """A body that rejects unknown fields, with the closest one that exists."""

    model_config = ConfigDict(extra="forbid")  # So the schema says it, too.

    @model_validator(mode="before")
    @classmethod
    def _has_known_fields(cls, body: Any) -> Any:
        if isinstance(body, Mapping):
            reject_unknown("the body", body, cls.model_fields)
        return body


class DeadLetterFilterBody(Strict):
    """A filter of dead letters; an empty filter matches all."""

    name: str | None = Field(default=None, max_length=LONGEST_TEXT)
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

    queue: str | None = Field(default=None, min_length=1, max_length=LONGEST_NAME)
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

    def dead_letters(self, context: DashboardState) -> AnyDeadLetters:
        """Return the dead letters of the queue, or of all queues."""
        dead_letters = context.access.queue(self.queue).dead_letters
        return dead_letters if self.queue is not None else dead_letters.all_queues

    async def resolve(self, context: DashboardState) -> DeadLetterFilter | list[TaskId]:
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


PrintableName = Annotated[
    str, Field(min_length=1, max_length=LONGEST_NAME), AfterValidator(_printable)
]


class TaskBody(Strict):
    """The options of a task that may be the same for many, as in ``CommonOptions``."""

    priority: Priority = 0
    max_attempts: MaxAttempts | None = None
    backoff: BackoffPolicy | None = None
    visibility_timeout_sec: PositiveSeconds | None = None
    expires_in_sec: PositiveSeconds | None = None
    headers: dict[str, Any] = Field(default_factory=dict)

    def arguments(self, *excluded: str) -> dict[str, Any]:
        """Return the fields as arguments of the Python API: ``eta``, ``expires_in``."""
        given = {
            name.removesuffix("_sec"): getattr(self, name)
            for name in type(self).model_fields
            if name not in excluded
        }
        return given | {"headers": from_extended_json(self.headers, name="headers")}


class NewTaskBody(TaskBody):
    """A task to enqueue. The payload may contain extended JSON, such as ``{"$date": ...}``.

    ``name`` is what the task does: workers with named tasks find its function by it. Give
    ``delay_sec`` or ``eta``, not both. ``on_duplicate`` needs a ``dedupe_key`` or a ``task_id``.
    """

    queue: PrintableName | None = None
    name: PrintableName | None = None
    payload: dict[str, Any] = Field(default_factory=dict)
    delay_sec: Seconds | None = None
    eta: AwareDatetime | None = None
    dedupe_key: str | None = Field(default=None, min_length=1, max_length=LONGEST_KEY)
    task_id: str | int | None = None
    dedupe_for_sec: PositiveSeconds | None = None
    on_duplicate: OnDuplicate = "raise"


class Success(Strict):
    """The result of a task that is marked as done."""

    result: Any = None


class Failure(Strict):
    """The error of a task that is marked as failed."""

    message: str = Field(default="marked as failed", min_length=1, max_length=2000)
    code: str | None = Field(default=error_codes.BY_HAND, min_length=1, max_length=200)


class DeadLetterQuery:
    """A filter of dead letters in the query of a URL."""

    def __init__(
        self,
        *,
        queue: QueueName = None,
        name: Text = None,
        code: Text = None,
        text: Text = None,
        group: Annotated[str | None, Query(max_length=400)] = None,
        since: Instant = None,
        until: Instant = None,
    ) -> None:
        self.queue = queue
        self.filter = DeadLetterFilter(
            name=name, code=code, text=text, group=group, since=since, until=until
        )
