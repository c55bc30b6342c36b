"""A task: a frozen model of its document in ``tasks``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, Protocol, TypeAlias, TypeGuard
from uuid import UUID

from bson import Code, ObjectId
from pydantic import Field, PlainSerializer
from typing_extensions import TypeVar

from microqueue.backoff import BackoffPolicy
from microqueue.clock import add_zones
from microqueue.errors import InvalidArgument
from microqueue.model import Model, trusted

TaskId: TypeAlias = Annotated[
    ObjectId | UUID | str | int,
    PlainSerializer(
        lambda value: value if isinstance(value, int) else str(value), when_used="json"
    ),
]
"""An ``ObjectId``, or an id that the caller chose: a string, an integer or a UUID."""

PayloadT = TypeVar("PayloadT", default=dict[str, Any])

DEFAULT_QUEUE = "default"
"""The queue of a task that names none."""
LARGEST_PRIORITY = 255
LONGEST_NAME = 120
LARGEST_COUNT = 2**31 - 1
"""The largest 32-bit integer, for MongoDB options of that type."""


class TaskStatus(StrEnum):
    """The status of a task. A dead letter is a task with status ``failed``."""

    PENDING = "pending"
    PROCESSING = "processing"
    DONE = "done"
    FAILED = "failed"


class Outcome(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    RETRIED = "retried"
    FAILED = "failed"
    RELEASED = "released"
    SNOOZED = "snoozed"
    LEASE_EXPIRED = "lease_expired"
    CRASHED = "crashed"
    CANCELLED = "cancelled"

    @property
    def is_refunded(self) -> bool:
        """Whether the attempt does not count: it is neither a success nor a failure."""
        return self in {Outcome.RELEASED, Outcome.SNOOZED}

    @property
    def is_reclaimed(self) -> bool:
        """Whether the task was taken from a worker that was lost."""
        return self in {Outcome.LEASE_EXPIRED, Outcome.CRASHED}


class TaskError(Model):
    """Why an attempt, or the whole task, failed."""

    message: str
    code: str | None = None
    at: datetime
    traceback: str | None = None
    """Where the handler raised, with secrets masked. ``None`` after a timeout, in the history, and
    after ``Fail`` and ``Retry`` that no other exception led to."""


class Attempt(Model):
    """One finished delivery of a task."""

    attempt: int
    worker_id: str | None
    started_at: datetime | None
    ended_at: datetime
    outcome: Outcome
    error: TaskError | None = None


class Progress(Model):
    """The progress that a handler reported: a fraction from 0 to 1, and a message."""

    fraction: float
    message: str | None = None
    at: datetime


class Lease(Model):
    """A worker's claim on a task until ``expires_at``.

    The token is random and new at every claim. It fences every later write: the token of a
    worker whose task was reclaimed no longer matches.
    """

    token: str
    worker_id: str
    started_at: datetime
    expires_at: datetime


NAME_HEADER = "task"
"""The header that names a task whose document has no ``name``."""


def is_text(value: Any) -> TypeGuard[str]:
    """Return whether a value is text; for Python, JavaScript code of BSON would be, too."""
    return isinstance(value, str) and not isinstance(value, Code)


def is_name(value: Any) -> bool:
    """Return whether a value can name a queue or a task: a short, printable string."""
    return is_text(value) and 0 < len(value) <= LONGEST_NAME and value.isprintable()


def name_of(document: Mapping[str, Any]) -> str | None:
    """Return the name of a stored task: its field, or otherwise the header ``task``."""
    name = document.get("name")
    return name if name and isinstance(name, str) else name_in(document.get("headers"))


def name_in(headers: Any) -> str | None:
    """Return the name of a task from its headers, or ``None``."""
    name = headers.get(NAME_HEADER) if isinstance(headers, Mapping) else None
    return name if name and isinstance(name, str) else None


class Task(Model, Generic[PayloadT]):
    """A task as it was when it was read; it never changes.

    ``error`` is the last failure; a done task has none. Errors of earlier attempts are in
    ``history``.
    """

    id: TaskId
    queue: str
    name: str | None = None
    """The name of a named task, see ``Tasks``, or the one that ``enqueue`` was given."""
    payload: PayloadT
    status: TaskStatus
    priority: int = 0
    attempts: int = 0
    max_attempts: int = 10
    redelivered: bool = False
    replays: int = 0
    crashes: int = 0
    error: TaskError | None = None
    history: tuple[Attempt, ...] = ()
    headers: Mapping[str, Any] = Field(default_factory=dict)
    created_at: datetime
    updated_at: datetime
    next_retry_at: datetime | None = None
    expires_at: datetime | None = None
    finished_at: datetime | None = None
    lease: Lease | None = None
    backoff: BackoffPolicy | None = None
    backoff_sec: float | None = None
    visibility_timeout_sec: float | None = None
    dedupe_key: str | None = None
    dedupe_until: datetime | None = None
    result: Any = None
    progress: Progress | None = None
    position: int = 0
    is_duplicate: bool = Field(default=False, exclude=True, repr=False)
    """Of the task that ``enqueue`` returned: it existed before, and was returned or replaced."""


_STATUSES: dict[str, Any] = {one.value: one for one in TaskStatus}
_OUTCOMES: dict[str, Any] = {one.value: one for one in Outcome}


def _known(names: Mapping[str, Any], value: Any) -> Any:
    """Return a status or outcome; an unknown one, of another version, as it is stored."""
    return names.get(value, value) if isinstance(value, str) else value


def read_task(
    document: Mapping[str, Any],
    payload: Any = None,
    *,
    lease: Lease | None = None,
    is_duplicate: bool = False,
) -> Task[Any]:
    """Read a stored document, without validation.

    A document that another version wrote, or that was edited manually, must be readable:
    otherwise it could not be repaired.

    Args:
        document: The stored document.
        payload: The payload, if it was read already.
        lease: The lease, if it was read already.
        is_duplicate: Whether it existed before it was enqueued.

    Returns:
        The task.
    """
    get: Any = document.get
    history, headers = get("history"), get("headers")
    status = _known(_STATUSES, get("status", "pending"))
    return trusted(
        Task,
        id=document["_id"],
        queue=get("queue", DEFAULT_QUEUE),
        name=name_of(document),
        payload=get("payload") if payload is None else payload,
        status=status,
        priority=get("priority", 0),
        attempts=read_count(get("attempts"), 0),
        max_attempts=read_count(get("max_attempts"), 10),
        redelivered=get("redelivered", False),
        replays=get("replays", 0),
        crashes=read_count(get("crashes"), 0),
        # Older versions left the error of an earlier attempt on tasks that are done.
        error=None if status is TaskStatus.DONE else _read_error(get("error")),
        history=_read_history(document) if history or status is TaskStatus.DONE else (),
        headers=headers if isinstance(headers, dict) else {},
        created_at=get("created_at"),
        updated_at=get("updated_at"),
        next_retry_at=get("next_retry_at"),
        expires_at=get("expires_at"),
        finished_at=get("finished_at"),
        lease=lease or _read_lease(document),
        backoff=_read_policy(get("backoff_policy")),
        backoff_sec=get("backoff_sec"),
        visibility_timeout_sec=get("visibility_timeout_sec"),
        dedupe_key=get("dedupe_key"),
        dedupe_until=get("dedupe_until"),
        result=get("result"),
        progress=_read_progress(get("progress")),
        position=get("position", 0),
        is_duplicate=is_duplicate,
    )


def _read_history(document: Mapping[str, Any]) -> tuple[Attempt, ...]:
    stored = document.get("history")
    entries = [one for one in stored if isinstance(one, dict)] if isinstance(stored, list) else []
    if (last := last_attempt(document)) is not None:
        entries.append(last)
    return tuple(_read_attempt(entry) for entry in entries)


def last_attempt(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the successful attempt of a done task, which its history does not store.

    The task has all of it: the last claim, and when it was done. ``None`` if the task is not done,
    or if its history has the attempt, as earlier versions stored it.
    """
    get: Any = document.get
    if get("status") != TaskStatus.DONE or get("started_at") is None:
        return None
    stored = get("history")
    last = stored[-1] if isinstance(stored, list) and stored else None
    if isinstance(last, Mapping) and last.get("outcome") == Outcome.DONE:
        return None
    return {
        "attempt": read_count(get("attempts"), 0),
        "worker_id": get("worker_id"),
        "started_at": get("started_at"),
        "ended_at": get("finished_at"),
        "outcome": Outcome.DONE.value,
    }


def read_count(value: Any, default: int) -> int:
    """Read a count; cut one that is too large to be stored again."""
    if not isinstance(value, (int, float)) or not value >= 0:
        return default
    return int(value) if value <= LARGEST_COUNT else LARGEST_COUNT


def _read_error(document: Any) -> TaskError | None:
    if not isinstance(document, dict):
        return None
    get: Any = document.get
    return trusted(
        TaskError,
        message=get("message"),
        code=get("code"),
        at=get("at"),
        traceback=get("traceback"),
    )


def _read_progress(document: Any) -> Progress | None:
    if not isinstance(document, dict):
        return None
    get: Any = document.get
    return trusted(Progress, fraction=get("fraction"), message=get("message"), at=get("at"))


def _read_policy(document: Any) -> BackoffPolicy | None:
    if not isinstance(document, dict):
        return None
    try:
        return BackoffPolicy(**document)
    except (InvalidArgument, TypeError):
        return None  # The queue's policy applies.


def _read_attempt(entry: Mapping[str, Any]) -> Attempt:
    get: Any = entry.get
    return trusted(
        Attempt,
        attempt=get("attempt", 0),
        worker_id=get("worker_id"),
        started_at=get("started_at"),
        ended_at=get("ended_at"),
        outcome=_known(_OUTCOMES, get("outcome")),
        error=_read_error(get("error")),
    )


def _read_lease(document: Mapping[str, Any]) -> Lease | None:
    get: Any = document.get
    if get("status") != TaskStatus.PROCESSING or not get("lease_token"):
        return None
    return trusted(
        Lease,
        token=get("lease_token"),
        worker_id=get("worker_id"),
        started_at=get("started_at"),
        expires_at=get("deadline_at"),
    )


class Claim(Protocol):
    """A task and its lease: the two that fence a write."""

    @property
    def id(self) -> Any:
        """The task's id."""

    @property
    def attempts(self) -> int:
        """The number of this delivery."""

    @property
    def lease(self) -> Lease | None:
        """The lease, if the task was popped."""


class Claimed:
    """A task that was just claimed. Its :class:`Task` is built on first use.

    Most handlers need the payload alone, and building tasks would take most of a worker's time.
    """

    __slots__ = ("_task", "attempts", "document", "id", "lease", "own_timeout_sec", "payload")

    def __init__(self, document: dict[str, Any], lease: Lease, payload: Any) -> None:
        self.document = document
        self._task: Task[Any] | None = None
        self.id = document["_id"]
        attempts = document["attempts"]
        usual = type(attempts) is int and 0 <= attempts <= LARGEST_COUNT
        self.attempts: int = attempts if usual else read_count(attempts, 0)
        self.lease: Lease | None = lease
        self.own_timeout_sec: float | None = document.get("visibility_timeout_sec")
        self.payload = payload

    @property
    def task(self) -> Task[Any]:
        """The task as it was claimed."""
        if self._task is None:
            add_zones(self.document)  # A claim leaves its dates as the driver returned them.
            self._task = read_task(self.document, self.payload, lease=self.lease)
        return self._task

    def replace(self, task: Task[Any]) -> None:
        """Replace the task, after its lease was renewed."""
        self._task, self.lease = task, task.lease
