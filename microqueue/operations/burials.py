"""Burials: tell hooks which tasks became dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from microqueue.dead_letter_models import DeadLetter
from microqueue.model import trusted
from microqueue.operations import filters
from microqueue.operations.call import Buried, Call, Document, Operation
from microqueue.task import DEFAULT_QUEUE, Task, TaskError, name_of, read_count
from microqueue.task_ids import id_key

FIELDS = dict.fromkeys(["queue", "name", "headers.task", "attempts"], 1)
"""What a dead letter says about its task."""


def of_task(task: Task[Any], error: TaskError, *, refund: int = 0) -> DeadLetter:
    """Return the dead letter that a task became; ``refund`` are attempts that did not count."""
    return trusted(
        DeadLetter,
        id=task.id,
        queue=task.queue,
        name=task.name,
        attempts=max(task.attempts - refund, 0),
        error=error,
        source="",
    )


def of_document(document: Document, error: Document) -> DeadLetter:
    """Return the dead letter of a document that was read with :data:`FIELDS`."""
    return trusted(
        DeadLetter,
        id=document["_id"],
        queue=document.get("queue", DEFAULT_QUEUE),
        name=name_of(document),
        attempts=read_count(document.get("attempts"), 0),
        error=trusted(TaskError, **error, traceback=None),
        source="",
    )


def report_documents(
    group: Sequence[Document], error: Document, count: int
) -> Operation[list[Any]]:
    """Report documents that one write buried with an error; return their ids.

    If the write changed fewer than were read, or was repeated, this asks which ones it buried.
    """
    ids = [one["_id"] for one in group]
    if count < len(ids):
        ids = yield from find_buried(ids, error["at"], code=error["code"])
        known = set(map(id_key, ids))
        group = [one for one in group if id_key(one["_id"]) in known]
    if group:
        yield Buried([of_document(one, error) for one in group])
    return ids


def find_buried(
    ids: Sequence[Any], now: datetime, *, code: str | None = None
) -> Operation[list[Any]]:
    """Return which of these tasks became dead letters at this instant."""
    buried = {**filters.any_of(ids), **filters.DEAD, "finished_at": now}
    if code is not None:
        buried["error.code"] = code
    return [document["_id"] for document in (yield Call("find", buried, {"_id": 1}))]
