"""Tasks as the page shows them: redacted, and as JSON that keeps MongoDB's types."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field

from microqueue.dashboard.payloads import LARGEST_EXACT, Redactor, preview, to_exact_json
from microqueue.extended_json import RELAXED
from microqueue.operations.matching import state_of
from microqueue.operations.stats import name_of
from microqueue.task import Progress, Task, TaskId
from microqueue.task_ids import reference

MANUAL = frozenset({"succeed", "fail"})
"""Actions that settle a task which no worker ran."""
ACTIONS: dict[str, tuple[str, ...]] = {
    "ready": ("cancel", "succeed", "fail"),
    "delayed": ("cancel", "retry", "succeed", "fail"),
    "processing": ("release", "cancel"),
    "overdue": ("release", "cancel"),
    "done": (),
    "failed": ("replay", "edit", "discard"),
}


class ErrorView(BaseModel):
    """Why an attempt, or the whole task, failed."""

    message: str | None
    code: str | None
    at: datetime | None


class AttemptView(BaseModel):
    """One finished attempt."""

    attempt: int
    worker_id: str | None
    started_at: datetime | None
    ended_at: datetime | None
    outcome: str
    error: ErrorView | None


class TaskRow(BaseModel):
    """A task in a list; ``state`` tells ready from delayed, and processing from overdue.

    ``reference`` is the id as text that means this task, also if another's looks alike.
    """

    id: str | int
    reference: str
    queue: str
    name: str | None
    status: str
    state: str
    priority: int
    attempts: int
    max_attempts: int
    created_at: datetime | None
    updated_at: datetime | None
    next_retry_at: datetime | None
    started_at: datetime | None
    lease_expires_at: datetime | None
    finished_at: datetime | None
    worker_id: str | None
    error: ErrorView | None
    preview: str


class TaskDetail(TaskRow):
    """All of a task; ``actions`` are those that its state allows."""

    at: datetime
    payload: Any
    headers: Any
    result: Any
    history: list[AttemptView]
    dedupe_key: str | None
    expires_at: datetime | None
    redelivered: bool
    replays: int
    crashes: int
    visibility_timeout_sec: float | None
    backoff: dict[str, Any] | None
    backoff_sec: float | None
    progress: Progress | None
    actions: list[str] = Field(default_factory=list)


class FieldNote(BaseModel):
    """What is to be said of one field of a request; ``path`` is as in ``payload.to``."""

    path: str
    message: str


class EnqueuedTask(TaskDetail):
    """A task that was added. ``warnings``: it is stored, but may not do what is wanted."""

    warnings: list[FieldNote] = Field(default_factory=list)


def shown_id(task_id: TaskId) -> str | int:
    """Write an id for a browser, whose numbers are exact up to 2^53."""
    if isinstance(task_id, int) and abs(task_id) <= LARGEST_EXACT:
        return task_id
    return str(task_id)


class Viewer:
    """Makes rows and details of documents."""

    def __init__(
        self, redactor: Redactor, *, read_only: bool, manual_actions: bool = False
    ) -> None:
        self._redactor = redactor
        self._read_only = read_only
        self._hidden = frozenset() if manual_actions else MANUAL

    def row(self, document: Mapping[str, Any], now: datetime) -> TaskRow:
        """Show a task in a list."""
        return TaskRow(**self._row_fields(document, now))

    def detail(self, document: Mapping[str, Any], now: datetime) -> TaskDetail:
        """Show all of a task."""
        task: Task[Any] = Task.from_document(document)
        fields = self._row_fields(document, now)
        actions = () if self._read_only else ACTIONS.get(fields["state"], ())
        return TaskDetail(
            **fields,
            at=now,
            payload=self._shown(task.payload),
            headers=self._shown(task.headers),
            result=self._shown(task.result),
            history=[
                AttemptView(
                    attempt=_int(one.attempt),
                    worker_id=_text(one.worker_id),
                    started_at=_instant(one.started_at),
                    ended_at=_instant(one.ended_at),
                    outcome=str(one.outcome),
                    error=self._error(one.error),
                )
                for one in task.history
            ],
            dedupe_key=_text(task.dedupe_key),
            expires_at=_instant(task.expires_at),
            redelivered=bool(task.redelivered),
            replays=_int(task.replays),
            crashes=_int(task.crashes),
            visibility_timeout_sec=_float(task.visibility_timeout_sec),
            backoff=None if task.backoff is None else task.backoff.model_dump(mode="json"),
            backoff_sec=_float(task.backoff_sec),
            progress=self.progress(task.progress),
            actions=[one for one in actions if one not in self._hidden],
        )

    def preview(self, payload: Any) -> str:
        """Show the beginning of a payload."""
        return preview(payload, self._redactor, RELAXED)

    def progress(self, progress: Progress | None) -> Progress | None:
        """Show how far a task is."""
        if progress is None:
            return None
        return progress.model_copy(update={"message": self._redactor.mask(progress.message)})

    def _row_fields(self, document: Mapping[str, Any], now: datetime) -> dict[str, Any]:
        task: Task[Any] = Task.from_document(document)
        expires_at = _instant(document.get("lease_expires_at"))
        return {
            "id": shown_id(task.id),
            "reference": reference(task.id),
            "queue": str(task.queue),
            "name": name_of(document),
            "status": str(task.status),
            "state": state_of(document, now),
            "priority": _int(task.priority),
            "attempts": task.attempts,
            "max_attempts": task.max_attempts,
            "created_at": _instant(task.created_at),
            "updated_at": _instant(task.updated_at),
            "next_retry_at": _instant(task.next_retry_at),
            "started_at": _instant(document.get("started_at")),
            "lease_expires_at": expires_at,
            "finished_at": _instant(task.finished_at),
            "worker_id": _text(document.get("worker_id")),
            "error": self._error(task.error),
            "preview": self.preview(task.payload),
        }

    def _error(self, error: Any) -> ErrorView | None:
        if error is None:
            return None
        message = _text(error.message)
        shown = None if message is None else self._redactor.text(message)
        return ErrorView(message=shown, code=_text(error.code), at=_instant(error.at))

    def _shown(self, value: Any) -> Any:
        return to_exact_json(self._redactor.mask(value))


# A document that another version wrote, or a hand edited, must still be shown.


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _int(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _instant(value: Any) -> datetime | None:
    return value if isinstance(value, datetime) else None
