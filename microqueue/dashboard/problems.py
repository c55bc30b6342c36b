"""Errors as ``application/problem+json``; addresses and passwords stay out of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException

from microqueue.dashboard.views import FieldNote
from microqueue.errors import (
    DuplicateTask,
    InvalidArgument,
    InvalidPayload,
    LeaseLost,
    MicroqueueError,
    ServerUnavailable,
    TaskNotFound,
    WrongStatus,
)
from microqueue.masking import without_fragments
from microqueue.model import shorten

STATUSES: dict[type[MicroqueueError], HTTPStatus] = {
    InvalidArgument: HTTPStatus.UNPROCESSABLE_ENTITY,
    TaskNotFound: HTTPStatus.NOT_FOUND,
    LeaseLost: HTTPStatus.CONFLICT,
    WrongStatus: HTTPStatus.CONFLICT,
    DuplicateTask: HTTPStatus.CONFLICT,
    ServerUnavailable: HTTPStatus.SERVICE_UNAVAILABLE,
}
LONGEST_DETAIL = 1000
MOST_ERRORS = 50
FIELDS = {"delay": "delay_sec", "expires_in": "expires_in_sec"}
"""Options of a task that a request calls otherwise."""

logger = logging.getLogger("microqueue.dashboard")


class Problem(BaseModel):
    """What went wrong, as RFC 9457 has it; ``code`` is the name of the error.

    ``errors`` names the fields of a request that are not valid, as in ``payload.to``.
    """

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    errors: list[FieldNote] = Field(default_factory=list)


class NothingReady(MicroqueueError):
    """There is no ready task to process, or its queue is paused."""

    def __init__(self, *, queue: str, paused: bool = False) -> None:
        self.queue = queue
        reason = f"queue {queue!r} is paused; resume it first"
        super().__init__(reason if paused else f"no task of queue {queue!r} is ready")


class ManualActionsOff(MicroqueueError):
    """Tasks are settled by their workers alone here."""

    def __init__(self) -> None:
        super().__init__(
            "tasks are not marked as done or failed by hand here; start the dashboard with "
            "manual_actions=True, or --manual-actions"
        )


STATUSES[NothingReady] = HTTPStatus.CONFLICT
STATUSES[ManualActionsOff] = HTTPStatus.FORBIDDEN


def problem(
    status: int,
    detail: str,
    code: str,
    headers: dict[str, str] | None = None,
    errors: Sequence[FieldNote] = (),
) -> JSONResponse:
    """Make the reply that tells a problem."""
    found = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=without_fragments(detail)[:LONGEST_DETAIL],
        code=code,
        errors=[
            FieldNote(path=one.path, message=without_fragments(one.message)[:LONGEST_DETAIL])
            for one in errors[:MOST_ERRORS]
        ],
    )
    return JSONResponse(
        found.model_dump(), status, headers=headers, media_type="application/problem+json"
    )


def status_of(error: MicroqueueError) -> int:
    """Give the status that stands for an error."""
    kinds = (status for kind, status in STATUSES.items() if isinstance(error, kind))
    return next(kinds, HTTPStatus.INTERNAL_SERVER_ERROR)


def install(app: FastAPI) -> None:
    """Have the app tell all errors this way."""

    async def own(request: Request, exc: Exception) -> JSONResponse:
        error = exc if isinstance(exc, MicroqueueError) else MicroqueueError(str(exc))
        status = status_of(error)
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            log_failure(request, error)
        return problem(status, str(error), type(error).__name__, errors=_notes_of(error))

    async def invalid(_request: Request, exc: Exception) -> JSONResponse:
        found = exc.errors() if isinstance(exc, RequestValidationError) else []
        notes = [FieldNote(path=_path(one["loc"]), message=_reason(one)) for one in found]
        return problem(
            HTTPStatus.UNPROCESSABLE_ENTITY, _first_problem(exc), "InvalidArgument", errors=notes
        )

    async def http(_request: Request, exc: Exception) -> JSONResponse:
        status = exc.status_code if isinstance(exc, HTTPException) else 500
        detail = str(getattr(exc, "detail", "")) or HTTPStatus(status).phrase
        headers = getattr(exc, "headers", None)
        return problem(status, detail, HTTPStatus(status).phrase.replace(" ", ""), headers)

    async def unexpected(request: Request, exc: Exception) -> JSONResponse:
        log_failure(request, exc)
        return problem(500, "something went wrong; the log says what", "InternalError")

    app.add_exception_handler(MicroqueueError, own)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)


def log_failure(request: Request, error: Exception) -> None:
    """Log what nobody could foresee; the reply does not say it all."""
    text = without_fragments(repr(error))
    logger.error("%s %s failed: %s", request.method, request.scope["path"], text)


def _notes_of(error: MicroqueueError) -> list[FieldNote]:
    """Name the fields that an error is about: of a payload, all that its model refuses."""
    if not isinstance(error, InvalidArgument) or error.argument is None:
        return []
    cause = error.__cause__
    if isinstance(error, InvalidPayload) and isinstance(cause, ValidationError):
        return [
            FieldNote(path=_path((error.argument, *one["loc"])), message=_reason(one))
            for one in cause.errors(include_url=False, include_input=False)
        ]
    return [FieldNote(path=FIELDS.get(error.argument, error.argument), message=str(error))]


def _path(place: Sequence[Any]) -> str:
    parts = place[1:] if place and place[0] in {"body", "query", "path"} else place
    return ".".join(str(part) for part in parts)


def _reason(found: Mapping[str, Any]) -> str:
    return str(found.get("msg", "")).removeprefix("Value error, ")


def _first_problem(exc: Exception) -> str:
    first: dict[str, Any] = exc.errors()[0] if isinstance(exc, RequestValidationError) else {}
    reason = str(first.get("msg", exc)).removeprefix("Value error, ")
    if first.get("type") == "json_invalid":
        *_, character = first["loc"]
        reason = first.get("ctx", {}).get("error", reason)
        return f"the body is not JSON: {reason} at character {character}"
    place = _path(first.get("loc", ()))
    value = first.get("input")
    # Of what is missing, that is all the rest; and a document would hide the reason.
    told = place and first.get("type") != "missing" and isinstance(value, str | int | float)
    subject = f"{place}={shorten(value)}" if told else place or "the request"
    return f"{subject} is not valid: {reason}"
