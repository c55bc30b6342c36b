"""The filter of a search for tasks."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from microqueue.arguments import is_encodable
from microqueue.durations import AwareDatetime
from microqueue.model import Model

LONGEST_TEXT = 200
"""The most characters of a text to search for."""

State = Literal["pending", "ready", "delayed", "processing", "overdue", "done", "failed"]


class TaskFilter(Model):
    """Selects tasks.

    ``name`` is the whole name of a task; the empty string selects tasks without a name. ``text`` is
    plain text in the payload or the error; case is ignored. ``since`` and ``until`` bound the time
    of creation, and for failed tasks the time of the failure.
    """

    queue: str | None = None
    name: str | None = None
    status: State | None = None
    code: str | None = None
    text: str | None = None
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None

    @field_validator("queue", "name", "code", "text")
    @classmethod
    def _can_be_asked(cls, value: str | None) -> str | None:
        if value is not None and (len(value) > LONGEST_TEXT or not is_encodable(value)):
            raise ValueError(f"give a text of at most {LONGEST_TEXT} characters")
        return value
