"""Errors as ``application/problem+json``, without addresses and passwords."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException

from microqueue.dashboard.task_views import FieldNote
from microqueue.errors import (
    DuplicateTask,
    InvalidArgument,
    InvalidPayload,
    LeaseLost,
    MicroqueueError,
    ScheduleNotFound,
    ServerUnavailable,
    TaskNotFound,
    TopicConflict,
    WrongStatus,
)
from microqueue.masking import without_fragments
from microqueue.model import UNKNOWN_OPTION, explain, shorten

STATUSES: dict[type[MicroqueueError], HTTPStatus] = {
    InvalidArgument: HTTPStatus.UNPROCESSABLE_ENTITY,
    ScheduleNotFound: HTTPStatus.NOT_FOUND,
    TaskNotFound: HTTPStatus.NOT_FOUND,
    LeaseLost: HTTPStatus.CONFLICT,
    WrongStatus: HTTPStatus.CONFLICT,
    DuplicateTask: HTTPStatus.CONFLICT,
    TopicConflict: HTTPStatus.CONFLICT,
    ServerUnavailable: HTTPStatus.SERVICE_UNAVAILABLE,
}
MAX_DETAIL_LENGTH = 1000
MAX_FIELD_ERRORS = 50
REQUEST_FIELDS = {
    name: f"{name}_sec"
    for name in (
        *("delay", "expires_in", "visibility_timeout", "dedupe_for"),
        *("every", "grace", "jitter"),
    )
}
"""Fields of a request whose names differ from the options of a task or schedule."""
_NAMES = "|".join(REQUEST_FIELDS)
PYTHON_NAMES = re.compile(rf"^({_NAMES})\b|\b({_NAMES})(?==)|(?<=\bor )({_NAMES})\b")
"""An option at the beginning, before its value, or as an alternative; not a word of a sentence."""
PYTHON_NULL = re.compile(r"\bNone\b")

logger = logging.getLogger("microqueue.dashboard")


class Problem(BaseModel):
    """An error as in RFC 9457; ``code`` is the name of the error.

    ``errors`` lists the invalid fields of a request, such as ``payload.to``.
    """

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    errors: list[FieldNote] = Field(default_factory=list)


class NothingReady(MicroqueueError):
    """No task of the queue is ready, or the queue is paused."""

    def __init__(self, *, queue: str, paused: bool = False) -> None:
        self.queue = queue
        paused_reason = f"queue {queue!r} is paused; resume it first"
        super().__init__(paused_reason if paused else f"queue {queue!r} has no ready task")


class ManualActionsOff(MicroqueueError):
    """Manual actions are off: only workers settle tasks."""

    def __init__(self) -> None:
        super().__init__(
            "manual actions are off; start the dashboard with manual_actions=True or "
            "--manual-actions to mark tasks as done or failed"
        )


class MessageNotFound(MicroqueueError):
    """A topic has no message at a position."""

    def __init__(self, *, topic: str, position: str) -> None:
        super().__init__(f"topic {topic!r} has no message {position!r}; it may be too old")


STATUSES[MessageNotFound] = HTTPStatus.NOT_FOUND
STATUSES[NothingReady] = HTTPStatus.CONFLICT
STATUSES[ManualActionsOff] = HTTPStatus.FORBIDDEN


def problem(
    status: int,
    detail: str,
    code: str,
    headers: dict[str, str] | None = None,
    errors: Sequence[FieldNote] = (),
) -> JSONResponse:
    """Return a response with a problem."""
    body = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=without_fragments(detail)[:MAX_DETAIL_LENGTH],
        code=code,
        errors=[
            FieldNote(path=one.path, message=without_fragments(one.message)[:MAX_DETAIL_LENGTH])
            for one in errors[:MAX_FIELD_ERRORS]
        ],
    )
    return JSONResponse(
        body.model_dump(), status, headers=headers, media_type="application/problem+json"
    )


def status_of(error: MicroqueueError) -> int:
    """Return the HTTP status of an error."""
    kinds = (status for kind, status in STATUSES.items() if isinstance(error, kind))
    return next(kinds, HTTPStatus.INTERNAL_SERVER_ERROR)


def install_handlers(app: FastAPI) -> None:
    """Make the app respond to all errors with a problem."""

    async def microqueue_error(request: Request, exc: Exception) -> JSONResponse:
        error = exc if isinstance(exc, MicroqueueError) else MicroqueueError(str(exc))
        status = status_of(error)
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            log_failure(request, error)
        return problem(status, _detail(error), type(error).__name__, errors=_notes_of(error))

    async def invalid_request(_request: Request, exc: Exception) -> JSONResponse:
        found = exc.errors() if isinstance(exc, RequestValidationError) else []
        notes = [FieldNote(path=_field(one), message=explain(one)[0]) for one in found]
        return problem(
            HTTPStatus.UNPROCESSABLE_ENTITY, _first_problem(exc), "InvalidArgument", errors=notes
        )

    async def http_error(_request: Request, exc: Exception) -> JSONResponse:
        status = exc.status_code if isinstance(exc, HTTPException) else 500
        detail = str(getattr(exc, "detail", "")) or HTTPStatus(status).phrase
        headers = getattr(exc, "headers", None)
        return problem(status, detail, HTTPStatus(status).phrase.replace(" ", ""), headers)

    async def unexpected(request: Request, exc: Exception) -> JSONResponse:
        log_failure(request, exc)
        return problem(500, "unexpected error; see the log of the dashboard", "InternalError")

    app.add_exception_handler(MicroqueueError, microqueue_error)
    app.add_exception_handler(RequestValidationError, invalid_request)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)


def log_failure(request: Request, error: Exception) -> None:
    """Log an unexpected error, whose details the response omits."""
    text = without_fragments(repr(error))
    logger.error("%s %s failed: %s", request.method, request.scope["path"], text)


def _notes_of(error: MicroqueueError) -> list[FieldNote]:
    """Return the fields that an error is about; of a payload, all that its model rejects."""
    if not isinstance(error, InvalidArgument) or error.argument is None:
        return []
    cause = error.__cause__
    if isinstance(error, InvalidPayload) and isinstance(cause, ValidationError):
        return [
            FieldNote(path=_path((error.argument, *one["loc"])), message=explain(one)[0])
            for one in cause.errors(include_url=False, include_input=False)
        ]
    path = REQUEST_FIELDS.get(error.argument, error.argument)
    return [FieldNote(path=path, message=_detail(error))]


def _detail(error: MicroqueueError) -> str:
    """Return the message of an error in the words of a request: its fields, and null."""
    text = str(error)
    if not isinstance(error, InvalidArgument) or error.argument is None:
        return text
    # The value stays as it was given.
    before, value, after = text.partition(shorten(error.value))
    if error.value is None:
        value = value and "null"
    return _as_in_a_request(before) + value + _as_in_a_request(after)


def _as_in_a_request(text: str) -> str:
    text = PYTHON_NAMES.sub(lambda match: REQUEST_FIELDS[match[0]], text)
    return PYTHON_NULL.sub("null", text)


def _path(location: Sequence[Any]) -> str:
    source = location[0] if location else None
    parts = location[1:] if source in {"body", "query", "path"} else location
    return ".".join(str(part) for part in parts)


def _field(found: Mapping[str, Any]) -> str:
    """Return the path of a rejected field; an unknown one is named by its body."""
    return _path((*found["loc"], *([name] if (name := _unknown_name(found)) else [])))


def _unknown_name(found: Mapping[str, Any]) -> str | None:
    cause = found.get("ctx", {}).get("error")
    unknown = isinstance(cause, InvalidArgument) and cause.code == UNKNOWN_OPTION
    return cause.argument if unknown else None


def _first_problem(exc: Exception) -> str:
    if not isinstance(exc, RequestValidationError):
        return f"the request is not valid: {exc}"
    first: dict[str, Any] = exc.errors()[0]
    if first["type"] == "json_invalid":
        *_, character = first["loc"]
        reason = first.get("ctx", {}).get("error", first["msg"])
        return f"the body is not JSON: {reason} at character {character}"
    reason, path, value = explain(first)[0], _field(first), first.get("input")
    if _unknown_name(first):
        return reason
    # The input of a missing field is the whole body, and a document would hide the reason.
    show_value = path and first["type"] != "missing" and isinstance(value, str | int | float)
    subject = f"{path}={shorten(value)}" if show_value else path or "the request"
    return f"{subject} is not valid: {reason}"
