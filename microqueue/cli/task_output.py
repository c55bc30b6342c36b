"""What commands about tasks share: find tasks by their ids as typed, mask them, and print them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from microqueue.arguments import invalid_argument
from microqueue.cli import formats, output
from microqueue.cli.session import Session
from microqueue.core import core_of
from microqueue.errors import TaskNotFound
from microqueue.masking import REDACTED_KEYS, Masker
from microqueue.operations.diagnostics import queue_names
from microqueue.queue import Queue
from microqueue.task import Attempt, Task, TaskError
from microqueue.task_ids import candidate_ids


def find_task(session: Session, queue: Queue[Any], text: str) -> Task[Any]:
    """Find a task by the id as typed; see :func:`find_tasks`."""
    (task,) = find_tasks(session, queue, [text])
    return task


def find_tasks(session: Session, queue: Queue[Any], texts: Sequence[str]) -> list[Task[Any]]:
    """Find tasks by their ids as typed, whatever type the stored ids have.

    Raises:
        TaskNotFound: Some do not exist; all of those are named.
        InvalidArgument: One is in another queue than the one given with ``--queue``.
    """
    found = [_find_one(session, queue, text) for text in texts]
    missing = [text for text, task in zip(texts, found, strict=True) if task is None]
    if missing:
        raise TaskNotFound(task_ids=missing)
    return [task for task in found if task is not None]


def _find_one(session: Session, queue: Queue[Any], text: str) -> Task[Any] | None:
    wanted = session.options.queue
    elsewhere: str | None = None
    for task_id in candidate_ids(text):
        if (task := queue.get(task_id)) is not None:
            if wanted in {None, task.queue}:
                return task
            elsewhere = task.queue
    if elsewhere is not None:
        reason = f"task {text!r} is in queue {elsewhere!r}; give that queue, or leave --queue out"
        raise invalid_argument("queue", wanted, reason)
    return None


def masked(tasks: Iterable[Task[Any]], *, reveal: bool = False) -> list[Task[Any]]:
    """Return tasks with secrets masked as the dashboard does, unless revealed."""
    masker = Masker(None if reveal else REDACTED_KEYS)
    return [masker.task(task) for task in tasks]


def print_task(session: Session, task: Task[Any], now: datetime, *, reveal: bool = False) -> None:
    """Print all fields of a task, with secrets masked unless revealed."""
    out = session.out
    (task,) = masked([task], reveal=reveal)
    if out.as_json:
        out.json(task)
        return
    out.facts(_facts(task, now))
    out.heading("Payload")
    out.print(formats.json_text(task.payload, indent=2))
    if task.headers:
        out.heading("Headers")
        out.facts((key, formats.json_text(value)) for key, value in task.headers.items())
    if task.result is not None:
        out.heading("Result")
        out.print(formats.json_text(task.result, indent=2))
    if task.error is not None and task.error.traceback is not None:
        out.heading("Traceback")
        out.print(str(task.error.traceback))
    out.heading("History")
    if not task.history:
        out.print("No attempt has finished yet." if task.attempts else "Not delivered yet.")
        return
    out.table(
        ["attempt", "outcome", "started", "duration", "worker", "error"],
        [_attempt_row(one, now) for one in task.history],
        worker="fold",
        error="fold",
    )


def _facts(task: Task[Any], now: datetime) -> list[tuple[str, output.Cell | None]]:
    def when(value: datetime | None) -> str | None:
        return None if value is None else formats.instant(value, now)

    lease, error = task.lease, task.error
    return [
        ("id", str(task.id)),
        ("queue", task.queue),
        ("name", task.name),
        ("status", output.status(task.status)),
        ("priority", task.priority),
        ("attempts", f"{task.attempts} of {task.max_attempts}"),
        ("replays", task.replays or None),
        ("created", when(task.created_at)),
        ("updated", when(task.updated_at)),
        ("due", when(task.next_retry_at)),
        ("expires", when(task.expires_at)),
        ("finished", when(task.finished_at)),
        ("dedupe key", task.dedupe_key),
        ("key taken until", when(task.dedupe_until)),
        ("worker", lease.worker_id if lease else None),
        ("lease expires", when(lease.expires_at) if lease else None),
        ("redelivered", "yes" if task.redelivered else None),
        ("error", describe_error(error)),
    ]


def _attempt_row(attempt: Attempt, now: datetime) -> list[output.Cell]:
    took = "-"
    if attempt.started_at is not None and attempt.ended_at is not None:
        took = formats.seconds((attempt.ended_at - attempt.started_at).total_seconds())
    return [
        attempt.attempt,
        str(attempt.outcome),
        formats.relative(attempt.started_at, now),
        took,
        attempt.worker_id or "-",
        formats.one_line(describe_error(attempt.error) or "-"),
    ]


def describe_error(error: TaskError | None) -> str | None:
    """Return the message of an error, with its code unless the message begins with it."""
    if error is None:
        return None
    begins = f"{error.message}:".startswith(f"{error.code}:")  # Without a text, it is the type.
    included = error.code is None or begins
    return error.message if included else f"{error.code}: {error.message}"


def with_name_and_queue(
    columns: list[str], rows: list[list[output.Cell]], tasks: Sequence[Task[Any]], *, queues: bool
) -> tuple[list[str], list[list[output.Cell]]]:
    """Insert columns after the id: ``name`` if any task has one, and ``queue`` on request."""
    names = [task.name for task in tasks]
    added: list[tuple[str, list[str]]] = []
    if any(names):
        added.append(("name", [formats.one_line(name or "-") for name in names]))
    if queues:
        added.append(("queue", [formats.one_line(str(task.queue)) for task in tasks]))
    return (
        [columns[0], *(name for name, _ in added), *columns[1:]],
        [
            [row[0], *(cells[place] for _, cells in added), *row[1:]]
            for place, row in enumerate(rows)
        ],
    )


def other_queues_hint(queue: Queue[Any]) -> str:
    """Return a sentence with the names of the other queues, if there are any."""
    names = [name for name in core_of(queue).run(queue_names()) if name != queue.name]
    return f" Other queues: {', '.join(names)} (use -q)." if names else ""
