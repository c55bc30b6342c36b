"""New tasks: what to add, and the report of what was added."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    Self,
    TypeAlias,
    TypedDict,
    Unpack,
    overload,
)
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
from microqueue.errors import InvalidArgument
from microqueue.model import Model, reject_unknown, shorten
from microqueue.task import (
    LARGEST_PRIORITY,
    LONGEST_NAME,
    NAME_HEADER,
    PayloadT,
    Task,
    TaskId,
    is_name,
    is_text,
    name_in,
    read_task,
)

MOST_ATTEMPTS = 1_000_000
LONGEST_KEY = 1024
"""The length of a dedupe key, at most."""

OnDuplicate: TypeAlias = Literal["raise", "return", "replace"]
"""What to do with a task whose id or dedupe key another task has."""


class CommonOptions(TypedDict, total=False):
    """The options of a task that may be the same for many: for each run of a schedule, too."""

    priority: int
    """0 to 255; higher is delivered first. Default: 0."""
    max_attempts: int | None
    """Deliveries in all, before the task is a dead letter. Default: the queue's setting."""
    backoff: BackoffPolicy | None
    """The waits between attempts. Default: the queue's setting."""
    visibility_timeout: Duration | None
    """The length of a lease. Default: the queue's setting."""
    expires_in: Duration | None
    """Fail the task, with code ``expired``, if it is waiting after this time."""
    headers: dict[str, Any] | None
    """Values stored beside the payload, for middleware such as tracing."""


class EnqueueOptions(CommonOptions, total=False):
    """The options of one task: the one definition for everything that adds tasks.

    ``Queue.enqueue`` and ``enqueue_many``, :class:`NewTask`, named tasks, the command line, the
    REST API and Spark use it.
    """

    delay: Duration | None
    """Deliver the task this much later, at the earliest."""
    eta: datetime | None
    """Deliver the task at this instant at the earliest; it needs a timezone."""
    dedupe_key: str | None
    """Reject the task while a live one has the same key."""
    task_id: TaskId | None
    """The id of the task. Default: a new ``ObjectId``."""
    dedupe_for: Duration | None
    """Keep the ``dedupe_key`` taken for this long, also after the task is finished or deleted. It
    counts from this call, and is checked by calls that have it, too."""
    on_duplicate: OnDuplicate
    """If a task has the ``task_id``, or a live one the ``dedupe_key``: ``"raise"`` an error,
    ``"return"`` that task, or ``"replace"`` it if it is pending. Default: ``"raise"``."""
    name: str | None
    """What the task does, to filter and group by; a worker with ``Tasks`` finds its function."""


ENQUEUE_OPTIONS = (*EnqueueOptions.__annotations__, "session")
"""The names of what ``enqueue`` and ``enqueue_many`` accept beside payloads."""


class NewTask(Model, Generic[PayloadT]):
    """A task to add: its payload, and the options of this task.

    The options are those of :class:`EnqueueOptions`, as :meth:`Queue.enqueue` describes them.
    """

    payload: SkipValidation[PayloadT]  # The queue knows the model, and checks it.
    priority: int = Field(default=0, ge=0, le=LARGEST_PRIORITY, strict=True)
    max_attempts: int | None = Field(default=None, ge=1, le=MOST_ATTEMPTS, strict=True)
    backoff: BackoffPolicy | None = None
    visibility_timeout: PositiveDuration | None = None
    expires_in: PositiveDuration | None = None
    headers: dict[str, Any] = Field(default_factory=dict)
    delay: NonNegativeDuration | None = None
    eta: AwareDatetime | None = None
    dedupe_key: str | None = Field(default=None, min_length=1, max_length=LONGEST_KEY, strict=True)
    task_id: ObjectId | UUID | str | int | None = None
    dedupe_for: PositiveDuration | None = None
    on_duplicate: OnDuplicate = "raise"
    name: str | None = None

    if TYPE_CHECKING:  # Type checkers would ask for the stored types, not the accepted ones.

        def __init__(self, *, payload: PayloadT, **options: Unpack[EnqueueOptions]) -> None: ...

    @field_validator("headers", mode="before")
    @classmethod
    def _none_means_no_headers(cls, headers: Any) -> Any:
        return {} if headers is None else headers

    @field_validator("task_id", mode="before")
    @classmethod
    def _id_is_a_plain_value(cls, task_id: Any) -> Any:
        plain = is_text(task_id) or isinstance(task_id, ObjectId | UUID | int | None)
        if not plain or isinstance(task_id, bool) or task_id == "":
            raise ValueError("give an ObjectId, a UUID, a string or an integer")
        if isinstance(task_id, int) and not -(2**63) <= task_id < 2**63:
            raise ValueError("give an integer of at most 8 bytes")
        if isinstance(task_id, str):
            task_id.encode()  # Half of a surrogate pair is a ValueError.
        return task_id

    @field_validator("name", mode="before")
    @classmethod
    def _name_is_short_and_printable(cls, name: Any) -> Any:
        if name is not None and not is_name(name):
            raise ValueError(f"give a printable string of at most {LONGEST_NAME} characters")
        return name

    @model_validator(mode="after")
    def _one_name(self) -> Self:
        header = name_in(self.headers)
        if None not in {self.name, header} and self.name != header:
            reason = f"the header {NAME_HEADER!r} is another name: {header!r}"
            raise InvalidArgument(reason, argument="name", value=self.name)
        return self

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.delay is not None and self.eta is not None:
            reason = "give delay or eta, not both"
            raise InvalidArgument(reason, argument="delay", value=self.delay)
        if self.dedupe_for is not None and self.dedupe_key is None:
            reason = "dedupe_for needs a dedupe_key"
            raise InvalidArgument(reason, argument="dedupe_for", value=self.dedupe_for)
        if self.on_duplicate != "raise" and self.task_id is None and self.dedupe_key is None:
            raise InvalidArgument(
                f"on_duplicate={self.on_duplicate!r} needs a task_id or a dedupe_key: "
                "without them no task is a duplicate",
                argument="on_duplicate",
                value=self.on_duplicate,
            )
        return self


UNTYPED = NewTask[Any]
"""Kept, because pydantic refers to it weakly: building it again after a collection takes 5 ms."""


def new_task_of(payload: Any, options: EnqueueOptions) -> NewTask[Any]:
    """Return a payload with its options as a task to add; a :class:`NewTask` has its own options.

    Raises:
        InvalidArgument: An option is not valid, or is given beside a ``NewTask``.
    """
    reject_unknown("enqueue", options, ENQUEUE_OPTIONS)
    if not isinstance(payload, NewTask):
        return UNTYPED(payload=payload, **options)
    for option, value in options.items():
        raise InvalidArgument(
            f"{option}={shorten(value)} is not valid: the NewTask has its own options, "
            f"so give it {option}",
            argument=option,
            value=value,
        )
    return payload


class AddedTask(NamedTuple):
    """A task of a report, not built yet."""

    document: dict[str, Any]
    payload: Any
    is_duplicate: bool = False


class AddedTasks(Sequence[Task[Any]]):
    """The tasks that ``enqueue_many`` added, returned or replaced; each is built on access."""

    def __init__(self, added: list[AddedTask]) -> None:
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
        document, payload, is_duplicate = self._added[place]
        return read_task(document, payload, is_duplicate=is_duplicate)

    def count_new(self) -> int:
        """Return how many of them did not exist before."""
        return sum(not one.is_duplicate for one in self._added)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # As of any other sequence of models.

    def __repr__(self) -> str:
        return repr(list(self))


class EnqueueReport(Model, Generic[PayloadT]):
    """What ``enqueue_many`` did: the tasks that were added, and the duplicates.

    With ``on_duplicate="return"`` or ``"replace"``, the task that existed is one of ``tasks``, with
    ``is_duplicate`` set, unless it could not be replaced. ``duplicates`` are all other items.
    """

    tasks: Sequence[Task[PayloadT]]
    duplicates: Sequence[Duplicate]

    @property
    def added(self) -> int:
        """How many tasks were added; those that existed do not count."""
        tasks = self.tasks
        if isinstance(tasks, AddedTasks):  # It need not build them.
            return tasks.count_new()
        return sum(not task.is_duplicate for task in tasks)


class Duplicate(Model):
    """An item that ``enqueue_many`` did not add; ``index`` is its index among the items."""

    index: int
    task_id: TaskId
    dedupe_key: str | None = None
