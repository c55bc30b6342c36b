"""Commands about tasks: enqueue, peek, show, cancel, purge."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from microqueue.arguments import refused
from microqueue.cli import formats, output, prompts, values
from microqueue.cli.options import DURATION, INSTANT, AllQueues, Reveal
from microqueue.cli.prompts import DryRun, Yes
from microqueue.cli.session import Session
from microqueue.core import core_of
from microqueue.errors import DuplicateTask, InvalidArgument, TaskNotFound
from microqueue.masking import TELLING_KEYS, Masker
from microqueue.operations.diagnostics import queue_names
from microqueue.queue import Queue
from microqueue.task import Attempt, Task, TaskError, TaskStatus
from microqueue.task_ids import candidate_ids, new_id

PAYLOAD_CUT = 200
ABSENT_TRIES = 5
"""How often to add a task whose id or dedupe key is taken by a task that then cannot be found."""


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
    if_absent: Annotated[
        bool,
        typer.Option(
            "--if-absent",
            help="With --id or --dedupe-key: if such a task is there already, say which, and "
            "exit with status 0.",
        ),
    ] = False,
) -> None:
    """Add a task; when the command returns, it is stored."""
    if if_absent and task_id is None and dedupe_key is None:
        raise typer.BadParameter("--if-absent is of use with --id or --dedupe-key only.")
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
        options["dedupe_key"] = dedupe_key
        if if_absent:
            task, added = _add_if_absent(queue, read, options)
        else:
            task, added = queue.enqueue(read, **options), True
    if session.out.as_json:
        (task,) = shown([task])
        session.out.json({**dict(task), "added": added} if if_absent else task)
        return
    if not added:
        session.out.say(
            f"Task {task.id} is in queue {task.queue!r} already, {task.status}; nothing was added."
        )
        return
    due = (
        ""
        if task.next_retry_at is None
        else f", due {formats.since(task.next_retry_at, task.created_at)}"
    )
    session.out.say(f"Enqueued {task.id} in queue {task.queue!r}{due}.")


def _add_if_absent(
    queue: Queue[Any], payload: dict[str, Any], options: dict[str, Any]
) -> tuple[Task[Any], bool]:
    """Add a task, or find the one that has its id or dedupe key; return whether it was added."""
    for remaining in reversed(range(ABSENT_TRIES)):
        try:
            return queue.enqueue(payload, **options), True
        except DuplicateTask as exc:
            taken_by = exc.task_id if exc.dedupe_key is None else exc.existing_id
            there = None if taken_by is None else queue.get(taken_by)
            # A task of another queue is another task: this queue has none.
            if there is not None and there.queue == queue.name:
                return there, False
            if there is not None or not remaining:
                raise
            # It is gone meanwhile, finished or deleted: now there may be room.
    raise AssertionError("unreachable")


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
        session.out.json(shown(report.tasks))
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
    reveal: Reveal = False,
) -> None:
    """Show the newest tasks of all queues, or of the one given with -q; read-only."""
    with session.connect() as queue:
        found = queue.peek(limit, status=status, all_queues=session.all_queues)
        tasks = shown(found, reveal=reveal)
        now = queue.now()
        queues = session.queues(queue)
        hint = "" if tasks or session.all_queues else others(queue)
    if session.out.as_json:
        session.note_queues(queues)
        session.out.json(tasks)
    elif not tasks:
        such = "No tasks" if status is None else f"No {status.value} tasks"
        where = "any queue" if session.all_queues else f"queue {session.queue_name!r}"
        session.out.say(f"{such} in {where}.{hint}")
    else:
        session.note_queues(queues)
        session.out.table(
            *described(
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


def described(
    columns: list[str], rows: list[list[output.Cell]], tasks: Sequence[Task[Any]], *, queues: bool
) -> tuple[list[str], list[list[output.Cell]]]:
    """Add columns to a table, after the ids: names if any task has one, and queues if asked."""
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


def shown(tasks: Iterable[Task[Any]], *, reveal: bool = False) -> list[Task[Any]]:
    """Return tasks as they may be printed: what the dashboard masks is masked, unless revealed."""
    masker = Masker(None if reveal else TELLING_KEYS)
    return [masker.task(task) for task in tasks]


def others(queue: Queue[Any]) -> str:
    """Say which other queues there are, to somebody who found this one empty."""
    names = [name for name in core_of(queue).run(queue_names()) if name != queue.name]
    return f" Other queues here: {', '.join(names)} (use -q)." if names else ""


def show(
    session: Session,
    task_id: Annotated[str, typer.Argument(metavar="ID", help="The id of a task of any queue.")],
    *,
    reveal: Reveal = False,
) -> None:
    """Show one task with its payload, error and history; secrets are masked."""
    with session.connect() as queue:
        task = find(session, queue, task_id)
        now = queue.now()
    print_task(session, task, now, reveal=reveal)


def find(session: Session, queue: Queue[Any], text: str) -> Task[Any]:
    """Find a task by what was typed; see :func:`find_all`."""
    (task,) = find_all(session, queue, [text])
    return task


def find_all(session: Session, queue: Queue[Any], texts: Sequence[str]) -> list[Task[Any]]:
    """Find tasks by what was typed, whatever types their ids have.

    In any queue, unless one was given: then a task of another one is rejected. If some do not
    exist, all of those are named.
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
        reason = f"task {text!r} is in queue {elsewhere!r}; give that one, or leave --queue out"
        raise refused("queue", wanted, reason)
    return None


def print_task(session: Session, task: Task[Any], now: datetime, *, reveal: bool = False) -> None:
    """Print everything about one task, with secrets masked unless revealed."""
    out = session.out
    (task,) = shown([task], reveal=reveal)
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


def purge(
    session: Session,
    *,
    status: Annotated[
        TaskStatus, typer.Option("--status", help="Tasks that stand like this; not processing.")
    ] = TaskStatus.DONE,
    older_than: Annotated[
        timedelta | None,
        typer.Option(help="Only those that have not changed for so long: 7d.", **DURATION),
    ] = None,
    all_queues: AllQueues = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete tasks of one status for good; those that are done, unless told otherwise.

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
        if yes and not dry_run:  # How many there are need not be known before.
            matched = purged = purge_all()
        else:
            matched = purge_all(dry_run=True)
        if matched and not (dry_run or yes):
            prompts.ask(f"Purge for good: {described(matched)}?")
            purged = purge_all()
    if session.out.as_json:
        counts = {"matched": matched, "purged": purged, "dry_run": dry_run}
        session.out.json({**counts, "queues": names})
    elif dry_run:
        session.out.say(f"{described(matched)} would be purged.")
    elif matched:
        session.out.say(f"Purged {described(purged)}.")
    else:
        session.out.say(f"Nothing to purge in {session.scope}.")


def cancel(
    session: Session,
    task_id: Annotated[str, typer.Argument(metavar="ID", help="The task's id.")],
) -> None:
    """Fail a waiting or running task with code cancelled; its handler is told."""
    with session.connect() as queue:
        task = queue.cancel(find(session, queue, task_id).id)
        (task,) = shown([task])
        if session.out.as_json:
            session.out.json(task)
        else:
            why = task.error.message if task.error else ""
            session.out.say(f"Cancelled {task.id} of queue {task.queue!r}: {why}.")
