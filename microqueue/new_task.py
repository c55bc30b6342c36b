"""New tasks: what to add, and the report of what was added."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, Unpack, overload
from uuid import UUID

from bson import ObjectId
from pydantic import Field, SkipValidation, field_validator, model_validator

from microqueue.backoff import BackoffPolicy
from microqueue.durations import (
    AwareDatetime,
    Duration,
    NonNegativeDuration,
    PositiveDuration,
)
from microqueue.model import Model
from microqueue.task import LARGEST_PRIORITY, PayloadT, Task, TaskId


class EnqueueOptions(TypedDict, total=False):
    """The options of one task: the one definition for everything that adds tasks.

    ``Queue.enqueue`` and ``enqueue_many``, :class:`NewTask`, named tasks, the command line, the
    REST interface and Spark use it.
    """

    priority: int
    """0 to 255; higher is delivered first. Default: 0."""
    delay: Duration | None
    """Deliver the task this much later, at the earliest."""
    eta: datetime | None
    """Deliver the task at this instant at the earliest; it needs a timezone."""
    max_attempts: int | None
    """Deliveries in all, before the task is a dead letter. Default: the queue's setting."""
    backoff: BackoffPolicy | None
    """The waits between attempts. Default: the queue's setting."""
    visibility_timeout: Duration | None
    """The length of a lease. Default: the queue's setting."""
    dedupe_key: str | None
    """Reject the task while a live one has the same key."""
    expires_in: Duration | None
    """Fail the task, with code ``expired``, if it is waiting after this time."""
    task_id: TaskId | None
    """The id of the task. Default: a new ``ObjectId``."""
    headers: dict[str, Any] | None
    """Values stored beside the payload, for middleware such as tracing."""


class NewTask(Model, Generic[PayloadT]):
    """A task to add: its payload, and the options of this task.

    The options are those of :class:`EnqueueOptions`, as :meth:`Queue.enqueue` describes them.
    """

    payload: SkipValidation[PayloadT]  # The queue knows the model, and checks it.
    priority: int = Field(default=0, ge=0, le=LARGEST_PRIORITY, strict=True)
    delay: NonNegativeDuration | None = None
    eta: AwareDatetime | None = None
    max_attempts: int | None = Field(default=None, ge=1, le=1_000_000, strict=True)
    backoff: BackoffPolicy | None = None
    visibility_timeout: PositiveDuration | None = None
    dedupe_key: str | None = Field(default=None, min_length=1, max_length=1024, strict=True)
    expires_in: PositiveDuration | None = None
    task_id: ObjectId | UUID | str | int | None = None
    headers: dict[str, Any] = Field(default_factory=dict)

    if TYPE_CHECKING:  # Type checkers would ask for the stored types, not the accepted ones.

        def __init__(self, *, payload: PayloadT, **options: Unpack[EnqueueOptions]) -> None: ...

    @field_validator("headers", mode="before")
    @classmethod
    def _none_means_no_headers(cls, headers: Any) -> Any:
        return {} if headers is None else headers

    @field_validator("task_id", mode="before")
    @classmethod
    def _id_is_a_plain_value(cls, task_id: Any) -> Any:
        plain = isinstance(task_id, ObjectId | UUID | str | int | None)
        if not plain or isinstance(task_id, bool) or task_id == "":
            raise ValueError("give an ObjectId, a UUID, a string or an integer")
        if isinstance(task_id, int) and not -(2**63) <= task_id < 2**63:
            raise ValueError("give an integer of at most 8 bytes")
        if isinstance(task_id, str):
            task_id.encode()  # Half of a surrogate pair is a ValueError.
        return task_id

    @model_validator(mode="after")
    def _delay_or_eta(self) -> Self:
        if self.delay is not None and self.eta is not None:
            raise ValueError("give delay or eta, not both")
        return self


class AddedTasks(Sequence[Task[Any]]):
    """The tasks that ``enqueue_many`` added; each is built on access."""

    def __init__(self, added: list[tuple[dict[str, Any], Any]]) -> None:
        self._added = added

    def __len__(self) -> int:
        return len(self._added)

    @overload
    def __getitem__(self, place: int) -> Task[Any]: ...

    @overload
    def __getitem__(self, place: slice) -> AddedTasks: ...

    def __getitem__(self, place: int | slice) -> Task[Any] | AddedTasks:
        if isinstance(place, slice):
            return AddedTasks(self._added[place])
        document, payload = self._added[place]
        return Task.from_document(document, payload)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # As of any other sequence of models.

    def __repr__(self) -> str:
        return repr(list(self))


class EnqueueReport(Model, Generic[PayloadT]):
    """What ``enqueue_many`` did: the tasks that were added, and the duplicates."""

    tasks: Sequence[Task[PayloadT]]
    duplicates: Sequence[Duplicate]

    @property
    def added(self) -> int:
        """How many tasks were added."""
        return len(self.tasks)


class Duplicate(Model):
    """An item that ``enqueue_many`` did not add; ``index`` is its index among the items."""

    index: int
    task_id: TaskId
    dedupe_key: str | None = None
