"""Commands about tasks: enqueue, peek, show."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from microqueue.arguments import refused
from microqueue.cli import formats, output, values
from microqueue.cli.session import Session
from microqueue.errors import InvalidArgument, TaskNotFound
from microqueue.operations.examine import queue_names
from microqueue.queue import Queue
from microqueue.task import Attempt, Task, TaskError, TaskStatus
from microqueue.task_ids import candidate_ids, new_id

PAYLOAD_CUT = 200
DURATION = {"parser": values.read_duration, "metavar": "DURATION"}
INSTANT = {"parser": values.read_instant, "metavar": "TIME"}


def enqueue(
    session: Session,
    payload: Annotated[
        str, typer.Argument(metavar="PAYLOAD", help="A JSON object, or - to read stdin.")
    ] = "-",
    *,
    many: Annotated[
        bool, typer.Option("--many", help="Read stdin: one JSON object per line, one task each.")
    ] = False,
    priority: Annotated[int, typer.Option(help="0 to 255, higher first.")] = 0,
    delay: Annotated[
        timedelta | None, typer.Option(help="Deliver it this much later: 30s, 5m, 2h.", **DURATION)
    ] = None,
    eta: Annotated[
        datetime | None,
        typer.Option(help="Deliver it not before then: 2026-05-01T12:00:00Z.", **INSTANT),
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option(help="Deliveries in all, before it is a dead letter.")
    ] = None,
    dedupe_key: Annotated[
        str | None, typer.Option(help="Refuse it if a live task has the same key.")
    ] = None,
    expires_in: Annotated[
        timedelta | None,
        typer.Option(help="Fail it if it was not delivered within that time.", **DURATION),
    ] = None,
    task_id: Annotated[
        str | None, typer.Option("--id", help="An id of your own; else one is made.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="key=value beside the payload; repeatable.")
    ] = None,
) -> None:
    """Add a task; when the command returns, it is stored."""
    options: dict[str, Any] = {
        "priority": priority,
        "delay": delay,
        "eta": eta,
        "max_attempts": max_attempts,
        "expires_in": expires_in,
        "headers": values.read_headers(header or ()),
    }
    if many:
        _enqueue_many(session, payload, options, dedupe_key=dedupe_key, task_id=task_id)
        return
    read = values.read_payload(_read_stdin() if payload == "-" else payload)
    options["task_id"] = None if task_id is None else new_id(task_id)
    with session.connect() as queue:
        task = queue.enqueue(read, dedupe_key=dedupe_key, **options)
    if session.out.as_json:
        session.out.json(task)
        return
    due = (
        ""
        if task.next_retry_at is None
        else f", due {formats.since(task.next_retry_at, task.created_at)}"
    )
    session.out.say(f"Enqueued {task.id} in queue {task.queue!r}{due}.")


def _enqueue_many(
    session: Session,
    payload: str,
    options: dict[str, Any],
    *,
    dedupe_key: str | None,
    task_id: str | None,
) -> None:
    if payload != "-":
        raise InvalidArgument("--many reads stdin; leave the payload out", argument="payload")
    if dedupe_key is not None or task_id is not None:
        raise InvalidArgument("--id and --dedupe-key are for a single task, not for --many")
    payloads = values.read_payloads(_read_stdin().split("\n"))
    with session.connect() as queue:
        report = queue.enqueue_many(payloads, **options)
    if session.out.as_json:
        session.out.json(report.tasks)
    else:
        session.out.say(
            f"Enqueued {formats.count(report.added, 'task')} in queue {session.queue_name!r}."
        )


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise InvalidArgument("there is no payload: give JSON, or send it through a pipe")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as exc:
        raise InvalidArgument(f"what came through stdin is not UTF-8: {exc}") from exc


def peek(
    session: Session,
    *,
    status: Annotated[
        TaskStatus | None, typer.Option("--status", help="Only tasks that stand like this.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="How many at most.")] = 10,
) -> None:
    """Look at the newest tasks of a queue; claims nothing, leaves no trace."""
    with session.connect() as queue:
        tasks = queue.peek(limit, status=status)
        now = queue.now()
        hint = "" if tasks else others(queue)
    if session.out.as_json:
        session.out.json(tasks)
    elif not tasks:
        such = "No tasks" if status is None else f"No {status.value} tasks"
        session.out.say(f"{such} in queue {session.queue_name!r}.{hint}")
    else:
        session.out.table(
            *with_names(
                ["id", "status", "prio", "attempts", "created", "payload"],
                [_row(session, task, now) for task in tasks],
                tasks,
            ),
            payload="ellipsis",
        )


def _row(session: Session, task: Task[Any], now: datetime) -> list[output.Cell]:
    state = output.status(task.status)
    if task.next_retry_at is not None and task.status is TaskStatus.PENDING:
        state.append(f" {formats.since(task.next_retry_at, now)}", style="dim")
    payload = formats.one_line(formats.to_json(task.payload))
    return [
        str(task.id),
        state,
        task.priority,
        f"{task.attempts}/{task.max_attempts}",
        formats.since(task.created_at, now),
        formats.cut(payload, PAYLOAD_CUT if session.out.for_people else None),
    ]


def with_names(
    columns: list[str], rows: list[list[output.Cell]], tasks: Sequence[Task[Any]]
) -> tuple[list[str], list[list[output.Cell]]]:
    """Add the names of named tasks to a table, after the ids, if any of its tasks has one."""
    names = [task.name for task in tasks]
    if not any(names):
        return columns, rows
    named = zip(rows, names, strict=True)
    return (
        [columns[0], "name", *columns[1:]],
        [[row[0], formats.one_line(name or "-"), *row[1:]] for row, name in named],
    )


def others(queue: Queue[Any]) -> str:
    """Say which other queues there are, to somebody who found this one empty."""
    names = [name for name in queue.run(queue_names()) if name != queue.name]
    return f" Other queues here: {', '.join(names)} (use -q)." if names else ""


def show(
    session: Session,
    task_id: Annotated[str, typer.Argument(metavar="ID", help="The id of a task of any queue.")],
) -> None:
    """Show one task with its payload, its error and the history of its attempts."""
    with session.connect() as queue:
        task = find(session, queue, task_id)
        now = queue.now()
    print_task(session, task, now)


def find(session: Session, queue: Queue[Any], text: str) -> Task[Any]:
    """Find a task by what somebody typed, whatever type its id has.

    In any queue, unless one was given: then a task of another one is refused.
    """
    wanted = session.options.queue
    elsewhere: str | None = None
    for task_id in candidate_ids(text):
        if (task := queue.get(task_id)) is not None:
            if wanted in {None, task.queue}:
                return task
            elsewhere = task.queue
    if elsewhere is not None:
        reason = f"task {text!r} is in queue {elsewhere!r}; give that one, or leave --queue out"
        raise refused("queue", wanted, reason)
    raise TaskNotFound(task_id=text)


def print_task(session: Session, task: Task[Any], now: datetime) -> None:
    """Print everything about one task."""
    out = session.out
    if out.as_json:
        out.json(task)
        return
    out.facts(_facts(task, now))
    out.heading("Payload")
    out.say(formats.to_json(task.payload, indent=2))
    if task.headers:
        out.heading("Headers")
        out.facts((key, formats.to_json(value)) for key, value in task.headers.items())
    if task.result is not None:
        out.heading("Result")
        out.say(formats.to_json(task.result, indent=2))
    out.heading("History")
    if not task.history:
        out.say("No attempt has ended yet." if task.attempts else "Not delivered yet.")
        return
    out.table(
        ["attempt", "outcome", "started", "took", "worker", "error"],
        [_attempt(one, now) for one in task.history],
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
        ("held by", lease.worker_id if lease else None),
        ("lease until", when(lease.expires_at) if lease else None),
        ("redelivered", "yes" if task.redelivered else None),
        ("error", _describe(error)),
    ]


def _attempt(attempt: Attempt, now: datetime) -> list[output.Cell]:
    took = "-"
    if attempt.started_at is not None and attempt.ended_at is not None:
        took = formats.seconds((attempt.ended_at - attempt.started_at).total_seconds())
    return [
        attempt.attempt,
        attempt.outcome.value,
        formats.since(attempt.started_at, now),
        took,
        attempt.worker_id or "-",
        formats.one_line(_describe(attempt.error) or "-"),
    ]


def _describe(error: TaskError | None) -> str | None:
    if error is None:
        return None
    told = error.code is None or error.message.startswith(f"{error.code}:")
    return error.message if told else f"{error.code}: {error.message}"
