"""Tasks as the API returns them: secrets masked, MongoDB's types kept."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field

from microqueue.dashboard.payloads import (
    MAX_SAFE_INTEGER,
    Redactor,
    preview,
    to_browser_json,
)
from microqueue.model import changed
from microqueue.operations.matching import state_of
from microqueue.task import Progress, TaskId, read_task
from microqueue.task_ids import reference

MANUAL_ACTIONS = frozenset({"succeed", "fail"})
"""Actions that settle a task without running it."""
ACTIONS: dict[str, tuple[str, ...]] = {
    "ready": ("cancel", "succeed", "fail"),
    "delayed": ("cancel", "retry", "succeed", "fail"),
    "processing": ("release", "cancel"),
    "overdue": ("release", "cancel"),
    "done": (),
    "failed": ("replay", "edit", "discard"),
}


class ErrorView(BaseModel):
    """The error of an attempt, or of a task."""

    message: str | None
    code: str | None
    at: datetime | None


class LastErrorView(ErrorView):
    """The last error of a task, with its traceback."""

    traceback: str | None


class AttemptView(BaseModel):
    """One finished attempt."""

    attempt: int
    worker_id: str | None
    started_at: datetime | None
    ended_at: datetime | None
    outcome: str
    error: ErrorView | None


class TaskRow(BaseModel):
    """A task in a list.

    ``state`` refines ``status``: a pending task is ready or delayed, and a processing task whose
    lease has expired is overdue. ``reference`` is the id as unambiguous text. ``worker_id`` and
    ``started_at`` are those of the last claim, also while the task waits or after it has ended.
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
    """A task with all fields; ``actions`` are those that its state allows."""

    at: datetime
    error: LastErrorView | None
    payload: Any
    headers: Any
    result: Any
    history: list[AttemptView]
    dedupe_key: str | None
    dedupe_until: datetime | None
    expires_at: datetime | None
    redelivered: bool
    replays: int
    crashes: int
    visibility_timeout_sec: float | None
    backoff: dict[str, Any] | None
    backoff_sec: float | None
    progress: Progress | None
    actions: list[str] = Field(default_factory=list)


class TaskResult(BaseModel):
    """The result or error of a task, if it is ``finished``; its status otherwise."""

    at: datetime
    id: str | int
    reference: str
    queue: str
    status: str
    finished: bool
    finished_at: datetime | None
    result: Any
    error: LastErrorView | None


class FieldNote(BaseModel):
    """An error or a warning about one field of a request; ``path`` is as in ``payload.to``."""

    path: str
    message: str


class EnqueuedTask(TaskDetail):
    """An enqueued task. ``warnings`` say why workers may not run it.

    ``is_duplicate``: it existed before, and was returned or replaced.
    """

    warnings: list[FieldNote] = Field(default_factory=list)
    is_duplicate: bool = False


def shown_id(task_id: TaskId) -> str | int:
    """Return an id for JSON; browsers round integers beyond 2^53, so these become text."""
    if isinstance(task_id, int) and abs(task_id) <= MAX_SAFE_INTEGER:
        return task_id
    return str(task_id)


class TaskViews:
    """Builds rows and details from stored documents."""

    def __init__(
        self, redactor: Redactor, *, read_only: bool, manual_actions: bool = False
    ) -> None:
        self._redactor = redactor
        self._read_only = read_only
        self._hidden = frozenset() if manual_actions else MANUAL_ACTIONS

    def row(self, document: Mapping[str, Any], now: datetime) -> TaskRow:
        """Return a task as a row of a list."""
        return TaskRow(**self._row_fields(document, now))

    def detail(self, document: Mapping[str, Any], now: datetime) -> TaskDetail:
        """Return a task with all fields."""
        task = read_task(document)
        fields = self._row_fields(document, now)
        actions = () if self._read_only else ACTIONS.get(fields["state"], ())
        return TaskDetail(
            **(fields | {"error": self._last_error(task.error)}),
            at=now,
            payload=self._masked_json(task.payload),
            headers=self._masked_json(task.headers),
            result=self._masked_json(task.result),
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
            dedupe_until=_instant(task.dedupe_until),
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
        """Return the beginning of a payload, masked."""
        return preview(payload, self._redactor)

    def progress(self, progress: Progress | None) -> Progress | None:
        """Return the progress of a task, its message masked."""
        if progress is None:
            return None
        return changed(progress, message=self._redactor.mask(progress.message))

    def _row_fields(self, document: Mapping[str, Any], now: datetime) -> dict[str, Any]:
        task = read_task(document)
        return {
            "id": shown_id(task.id),
            "reference": reference(task.id),
            "queue": str(task.queue),
            "name": task.name,
            "status": str(task.status),
            "state": state_of(document, now),
            "priority": _int(task.priority),
            "attempts": task.attempts,
            "max_attempts": task.max_attempts,
            "created_at": _instant(task.created_at),
            "updated_at": _instant(task.updated_at),
            "next_retry_at": _instant(task.next_retry_at),
            "started_at": _instant(document.get("started_at")),
            "lease_expires_at": _instant(task.lease.expires_at if task.lease else None),
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

    def _last_error(self, error: Any) -> LastErrorView | None:
        shown = self._error(error)
        if shown is None:
            return None
        text = _text(error.traceback)
        traceback = None if text is None else self._redactor.traceback(text)
        return LastErrorView(**dict(shown), traceback=traceback)

    def _masked_json(self, value: Any) -> Any:
        return to_browser_json(self._redactor.mask(value))


# Documents may be malformed: written by another version, or edited manually.


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _int(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _instant(value: Any) -> datetime | None:
    return value if isinstance(value, datetime) else None
