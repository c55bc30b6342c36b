"""A task: a frozen model of its document in ``tasks``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, Protocol, TypeAlias
from uuid import UUID

from bson import ObjectId
from pydantic import Field, PlainSerializer
from typing_extensions import TypeVar

from microqueue.backoff import BackoffPolicy
from microqueue.errors import InvalidArgument
from microqueue.model import Model

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


class TaskError(Model):
    """Why an attempt, or the whole task, failed."""

    message: str
    code: str | None = None
    at: datetime


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
"""The header that holds a named task's name."""


def name_in(headers: Any) -> str | None:
    """Return the name of a named task from its headers, or ``None``."""
    name = headers.get(NAME_HEADER) if isinstance(headers, Mapping) else None
    return name if isinstance(name, str) else None


class Task(Model, Generic[PayloadT]):
    """A task as it was when it was read; it never changes.

    ``error`` is the last failure; a done task has none. Errors of earlier attempts are in
    ``history``.
    """

    id: TaskId
    queue: str
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
    result: Any = None
    progress: Progress | None = None
    position: int = 0

    @property
    def name(self) -> str | None:
        """The name of a named task, see ``Tasks``; ``None`` for others."""
        return name_in(self.headers)

    @classmethod
    def from_document(
        cls, document: Mapping[str, Any], payload: Any = None, *, lease: Lease | None = None
    ) -> Task[Any]:
        """Read a stored document, without validation.

        A document that another version wrote, or that was edited manually, must be readable:
        otherwise it could not be repaired.

        Args:
            document: The stored document.
            payload: The payload, if it was read already.
            lease: The lease, if it was read already.
        """
        get: Any = document.get
        history, headers = get("history"), get("headers")
        status = _known(_STATUSES, get("status", "pending"))
        return cls.trusted(
            id=document["_id"],
            queue=get("queue", DEFAULT_QUEUE),
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
            history=_read_history(history) if history else (),
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
            result=get("result"),
            progress=_read_progress(get("progress")),
            position=get("position", 0),
        )


_STATUSES: dict[str, Any] = {one.value: one for one in TaskStatus}
_OUTCOMES: dict[str, Any] = {one.value: one for one in Outcome}


def _known(names: Mapping[str, Any], value: Any) -> Any:
    """Return a status or outcome; an unknown one, of another version, as it is stored."""
    return names.get(value, value) if isinstance(value, str) else value


def _read_history(entries: Any) -> tuple[Attempt, ...]:
    if not isinstance(entries, list):
        return ()
    return tuple(_read_attempt(entry) for entry in entries if isinstance(entry, dict))


def read_count(value: Any, default: int) -> int:
    """Read a count; cut one that is too large to be stored again."""
    if not isinstance(value, (int, float)) or not value >= 0:
        return default
    return int(value) if value <= LARGEST_COUNT else LARGEST_COUNT


def _read_error(document: Any) -> TaskError | None:
    if not isinstance(document, dict):
        return None
    get: Any = document.get
    return TaskError.trusted(message=get("message"), code=get("code"), at=get("at"))


def _read_progress(document: Any) -> Progress | None:
    if not isinstance(document, dict):
        return None
    get: Any = document.get
    return Progress.trusted(fraction=get("fraction"), message=get("message"), at=get("at"))


def _read_policy(document: Any) -> BackoffPolicy | None:
    if not isinstance(document, dict):
        return None
    try:
        return BackoffPolicy(**document)
    except (InvalidArgument, TypeError):
        return None  # The queue's policy applies.


def _read_attempt(entry: Mapping[str, Any]) -> Attempt:
    get: Any = entry.get
    return Attempt.trusted(
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
    return Lease.trusted(
        token=get("lease_token"),
        worker_id=get("worker_id"),
        started_at=get("started_at"),
        expires_at=get("lease_expires_at"),
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
        self.attempts = read_count(document["attempts"], 0)
        self.lease: Lease | None = lease
        self.own_timeout_sec: float | None = document.get("visibility_timeout_sec")
        self.payload = payload

    @property
    def task(self) -> Task[Any]:
        """The task as it was claimed."""
        if self._task is None:
            self._task = Task.from_document(self.document, self.payload, lease=self.lease)
        return self._task

    def replace(self, task: Task[Any]) -> None:
        """Replace the task, after its lease was renewed."""
        self._task, self.lease = task, task.lease
