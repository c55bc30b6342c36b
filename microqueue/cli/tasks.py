"""Commands about tasks: enqueue, peek, show, cancel, purge."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from microqueue.arguments import refused
from microqueue.cli import formats, output, prompts, values
from microqueue.cli.options import DURATION, TIME, AllQueues, DryRun, Reveal, Yes
from microqueue.cli.session import Session
from microqueue.core import core_of
from microqueue.errors import DuplicateTask, InvalidArgument, TaskNotFound
from microqueue.masking import REDACTED_KEYS, Masker
from microqueue.new_task import EnqueueOptions
from microqueue.operations.diagnostics import queue_names
from microqueue.queue import Queue
from microqueue.settings import QueueSettings
from microqueue.task import Attempt, Task, TaskError, TaskStatus
from microqueue.task_ids import candidate_ids, new_id

PAYLOAD_LIMIT = 200
DEFAULT_MAX_ATTEMPTS = QueueSettings.model_fields["max_attempts"].default
ABSENT_TRIES = 5
"""How often to retry when a duplicate is reported and then cannot be found."""


def enqueue(
    session: Session,
    payload: Annotated[
        str, typer.Argument(metavar="PAYLOAD", help="JSON object; - reads it from stdin.")
    ] = "-",
    *,
    many: Annotated[
        bool, typer.Option("--many", help="Enqueue one task per line of stdin, each a JSON object.")
    ] = False,
    priority: Annotated[int, typer.Option(help="0 to 255; higher runs first.")] = 0,
    delay: Annotated[
        timedelta | None,
        typer.Option(help="Deliver the task after this time: 30s, 5m, 2h.", **DURATION),
    ] = None,
    eta: Annotated[
        datetime | None,
        typer.Option(help="Deliver the task at this time: 2026-05-01T12:00:00Z.", **TIME),
    ] = None,
    max_attempts: Annotated[
        int | None,
        typer.Option(
            help="Deliveries before the task becomes a dead letter. "
            f"\\[default: $MICROQUEUE_MAX_ATTEMPTS, or {DEFAULT_MAX_ATTEMPTS}]"
        ),
    ] = None,
    dedupe_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Reject the task if an unfinished task has the same key."),
    ] = None,
    expires_in: Annotated[
        timedelta | None,
        typer.Option(help="Fail the task if it is not delivered within this time.", **DURATION),
    ] = None,
    task_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Id of the task. \\[default: a new ObjectId]"),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Header to store with the task; repeatable."),
    ] = None,
    if_absent: Annotated[
        bool,
        typer.Option(
            "--if-absent",
            help="With --id or --dedupe-key: if the task exists already, print its id and exit "
            "with status 0.",
        ),
    ] = False,
) -> None:
    """Enqueue a task. It is stored when the command returns."""
    if if_absent and task_id is None and dedupe_key is None:
        raise typer.BadParameter("--if-absent needs --id or --dedupe-key.")
    options: EnqueueOptions = {
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
        options["dedupe_key"] = dedupe_key
        if if_absent:
            task, added = _add_if_absent(queue, read, options)
        else:
            task, added = queue.enqueue(read, **options), True
    if session.out.as_json:
        (task,) = masked([task])
        session.out.json({**dict(task), "added": added} if if_absent else task)
        return
    if not added:
        session.out.print(
            f"Task {task.id} exists already in queue {task.queue!r} and is {task.status}; "
            "nothing was enqueued."
        )
        return
    due = (
        ""
        if task.next_retry_at is None
        else f", due {formats.relative(task.next_retry_at, task.created_at)}"
    )
    session.out.print(f"Enqueued {task.id} in queue {task.queue!r}{due}.")


def _add_if_absent(
    queue: Queue[Any], payload: dict[str, Any], options: EnqueueOptions
) -> tuple[Task[Any], bool]:
    """Add a task, or find the one with its id or dedupe key.

    Returns:
        The task, and whether it was added.
    """
    for remaining in reversed(range(ABSENT_TRIES)):
        try:
            return queue.enqueue(payload, **options), True
        except DuplicateTask as exc:
            taken_by = exc.task_id if exc.dedupe_key is None else exc.existing_id
            existing = None if taken_by is None else queue.get(taken_by)
            # A task in another queue does not count as existing here.
            if existing is not None and existing.queue == queue.name:
                return existing, False
            if existing is not None or not remaining:
                raise
            # The task has finished or was deleted since: try again.
    raise AssertionError("unreachable")


def _enqueue_many(
    session: Session,
    payload: str,
    options: EnqueueOptions,
    *,
    dedupe_key: str | None,
    task_id: str | None,
) -> None:
    if payload != "-":
        raise InvalidArgument("--many reads stdin: leave out PAYLOAD", argument="payload")
    if dedupe_key is not None or task_id is not None:
        raise InvalidArgument("--id and --dedupe-key need a single task: leave out --many")
    payloads = values.read_payloads(_read_stdin().split("\n"))
    with session.connect() as queue:
        report = queue.enqueue_many(payloads, **options)
    if session.out.as_json:
        session.out.json(masked(report.tasks))
    else:
        session.out.print(
            f"Enqueued {formats.count(report.added, 'task')} in queue {session.queue_name!r}."
        )


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise InvalidArgument("PAYLOAD is missing: give a JSON object, or pipe it to stdin")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as exc:
        raise InvalidArgument(f"stdin is not UTF-8: {exc}") from exc


def peek(
    session: Session,
    *,
    status: Annotated[
        TaskStatus | None,
        typer.Option("--status", help="Only tasks with this status. \\[default: all]"),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="Number of tasks to show.")] = 10,
    reveal: Reveal = False,
) -> None:
    """List the newest tasks, without claiming them."""
    with session.connect() as queue:
        found = queue.peek(limit, status=status, all_queues=session.all_queues)
        tasks = masked(found, reveal=reveal)
        now = queue.now()
        queues = session.queues(queue)
        hint = "" if tasks or session.all_queues else other_queues_hint(queue)
    if session.out.as_json:
        session.note_queues(queues)
        session.out.json(tasks)
    elif not tasks:
        such = "No tasks" if status is None else f"No {status.value} tasks"
        where = "any queue" if session.all_queues else f"queue {session.queue_name!r}"
        session.out.print(f"{such} in {where}.{hint}")
    else:
        session.note_queues(queues)
        session.out.table(
            *with_name_and_queue(
                ["id", "status", "prio", "attempts", "created", "payload"],
                [_row(session, task, now) for task in tasks],
                tasks,
                queues=session.all_queues,
            ),
            payload="ellipsis",
        )


def _row(session: Session, task: Task[Any], now: datetime) -> list[output.Cell]:
    state = output.status(task.status)
    if task.next_retry_at is not None and task.status is TaskStatus.PENDING:
        state.append(f" {formats.relative(task.next_retry_at, now)}", style="dim")
    payload = formats.one_line(formats.to_json(task.payload))
    return [
        str(task.id),
        state,
        task.priority,
        f"{task.attempts}/{task.max_attempts}",
        formats.relative(task.created_at, now),
        formats.truncate(payload, PAYLOAD_LIMIT if session.out.for_people else None),
    ]


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


def masked(tasks: Iterable[Task[Any]], *, reveal: bool = False) -> list[Task[Any]]:
    """Return tasks with secrets masked as the dashboard does, unless revealed."""
    masker = Masker(None if reveal else REDACTED_KEYS)
    return [masker.task(task) for task in tasks]


def other_queues_hint(queue: Queue[Any]) -> str:
    """Return a sentence with the names of the other queues, if there are any."""
    names = [name for name in core_of(queue).run(queue_names()) if name != queue.name]
    return f" Other queues: {', '.join(names)} (use -q)." if names else ""


def show(
    session: Session,
    task_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the task.")],
    *,
    reveal: Reveal = False,
) -> None:
    """Show a task with its payload, error and history; secrets are masked."""
    with session.connect() as queue:
        task = find_task(session, queue, task_id)
        now = queue.now()
    print_task(session, task, now, reveal=reveal)


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
        raise refused("queue", wanted, reason)
    return None


def print_task(session: Session, task: Task[Any], now: datetime, *, reveal: bool = False) -> None:
    """Print all fields of a task, with secrets masked unless revealed."""
    out = session.out
    (task,) = masked([task], reveal=reveal)
    if out.as_json:
        out.json(task)
        return
    out.facts(_facts(task, now))
    out.heading("Payload")
    out.print(formats.to_json(task.payload, indent=2))
    if task.headers:
        out.heading("Headers")
        out.facts((key, formats.to_json(value)) for key, value in task.headers.items())
    if task.result is not None:
        out.heading("Result")
        out.print(formats.to_json(task.result, indent=2))
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
        ("worker", lease.worker_id if lease else None),
        ("lease expires", when(lease.expires_at) if lease else None),
        ("redelivered", "yes" if task.redelivered else None),
        ("error", _describe(error)),
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
        formats.one_line(_describe(attempt.error) or "-"),
    ]


def _describe(error: TaskError | None) -> str | None:
    if error is None:
        return None
    included = error.code is None or error.message.startswith(f"{error.code}:")
    return error.message if included else f"{error.code}: {error.message}"


def purge(
    session: Session,
    *,
    status: Annotated[
        TaskStatus, typer.Option("--status", help="Status of the tasks to delete; not processing.")
    ] = TaskStatus.DONE,
    older_than: Annotated[
        timedelta | None,
        typer.Option(help="Only tasks that last changed longer ago than this: 7d.", **DURATION),
    ] = None,
    all_queues: AllQueues = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete all tasks with one status permanently.

    Needs --queue or --all-queues.
    """
    session.check_scope(all_queues=all_queues)
    with session.connect() as queue:
        if not (dry_run or yes):
            prompts.check_answerable()
        names = session.queues(queue)
        collection, settings = core_of(queue).collections.tasks, queue.settings
        chosen: list[Queue[Any]] = [Queue(collection, one, settings=settings) for one in names]

        def purge_all(*, dry_run: bool = False) -> int:
            options: dict[str, Any] = {"status": status, "older_than": older_than}
            return sum(one.purge(**options, dry_run=dry_run) for one in chosen)

        def described(number: int) -> str:
            return f"{formats.count(number, f'{status.value} task')} of {session.scope}"

        purged = 0
        if yes and not dry_run:  # No need to count first.
            matched = purged = purge_all()
        else:
            matched = purge_all(dry_run=True)
        if matched and not (dry_run or yes):
            prompts.confirm(f"Permanently delete {described(matched)}?")
            purged = purge_all()
    if session.out.as_json:
        counts = {"matched": matched, "purged": purged, "dry_run": dry_run}
        session.out.json({**counts, "queues": names})
    elif dry_run:
        session.out.print(f"{described(matched)} would be purged.")
    elif matched:
        session.out.print(f"Purged {described(purged)}.")
    else:
        session.out.print(f"Nothing to purge in {session.scope}.")


def cancel(
    session: Session,
    task_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the task.")],
) -> None:
    """Cancel a pending or running task: it becomes a dead letter with code cancelled."""
    with session.connect() as queue:
        task = queue.cancel(find_task(session, queue, task_id).id)
        (task,) = masked([task])
        if session.out.as_json:
            session.out.json(task)
        else:
            reason = task.error.message if task.error else ""
            session.out.print(f"Cancelled {task.id} of queue {task.queue!r}: {reason}.")
