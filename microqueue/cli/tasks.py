"""Commands about tasks: enqueue, peek, show, wait, cancel, purge."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any

import typer

from microqueue.cli import formats, output, prompts, values
from microqueue.cli.exit import NOT_FINISHED, TASK_FAILED
from microqueue.cli.options import (
    DURATION,
    TIME,
    AllQueues,
    Backoff,
    DryRun,
    HooksReference,
    Reveal,
    TaskName,
    VisibilityTimeout,
    Yes,
)
from microqueue.cli.session import Session
from microqueue.cli.task_output import (
    describe_error,
    find_task,
    masked,
    other_queues_hint,
    print_task,
    with_name_and_queue,
)
from microqueue.core import core_of
from microqueue.errors import (
    DuplicateTask,
    InvalidArgument,
    MicroqueueError,
    TaskFailed,
    WaitTimeout,
)
from microqueue.new_task import EnqueueOptions, OnDuplicate
from microqueue.queue import Queue
from microqueue.settings import QueueSettings
from microqueue.task import Task, TaskStatus
from microqueue.task_ids import new_id

PAYLOAD_LIMIT = 200
DEFAULT_MAX_ATTEMPTS = QueueSettings.model_fields["max_attempts"].default


class DuplicateChoice(StrEnum):
    """What to do with a task whose id or dedupe key another task has."""

    RAISE = "raise"
    RETURN = "return"
    REPLACE = "replace"


def enqueue(
    session: Session,
    payload: Annotated[
        str, typer.Argument(metavar="PAYLOAD", help="JSON object; - reads it from stdin.")
    ] = "-",
    *,
    many: Annotated[
        bool, typer.Option("--many", help="Enqueue one task per line of stdin, each a JSON object.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the task: the function that a worker runs."),
    ] = None,
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
    backoff: Backoff = None,
    visibility_timeout: VisibilityTimeout = None,
    dedupe_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Reject the task if an unfinished task has the same key."),
    ] = None,
    dedupe_for: Annotated[
        timedelta | None,
        typer.Option(
            help="With --dedupe-key: keep the key taken for this time, also after the task is "
            "finished.",
            **DURATION,
        ),
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
            "with status 0. The same as --on-duplicate return.",
        ),
    ] = False,
    on_duplicate: Annotated[
        DuplicateChoice | None,
        typer.Option(
            help="With --id or --dedupe-key, if the task exists already: raise exits with status "
            "1, return prints it, replace gives a pending one this payload and these options. "
            "\\[default: raise]"
        ),
    ] = None,
    wait_for_result: Annotated[
        bool,
        typer.Option("--wait", help="Wait until the task is finished, like the command wait."),
    ] = False,
    timeout: Annotated[
        timedelta | None,
        typer.Option(help="With --wait: exit with status 4 after this time.", **DURATION),
    ] = None,
) -> None:
    """Enqueue a task. It is stored when the command returns."""
    if timeout is not None and not wait_for_result:
        raise typer.BadParameter("--timeout needs --wait.")
    if many and wait_for_result:
        raise typer.BadParameter("--wait needs a single task: leave out --many.")
    choice = _duplicate_choice(on_duplicate, if_absent=if_absent)
    if choice != "raise" and task_id is None and dedupe_key is None:
        option = "--if-absent" if if_absent else f"--on-duplicate {choice}"
        raise typer.BadParameter(f"{option} needs --id or --dedupe-key.")
    options: EnqueueOptions = {
        "priority": priority,
        "delay": delay,
        "eta": eta,
        "max_attempts": max_attempts,
        "backoff": None if backoff is None else values.read_backoff(backoff),
        "visibility_timeout": visibility_timeout,
        "expires_in": expires_in,
        "headers": values.read_headers(header or ()),
        "name": name,
    }
    if many:
        if dedupe_key is not None or task_id is not None or dedupe_for is not None:
            raise InvalidArgument(
                "--id, --dedupe-key and --dedupe-for need a single task: leave out --many"
            )
        _enqueue_many(session, payload, options)
        return
    read = values.read_payload(values.read_stdin("PAYLOAD") if payload == "-" else payload)
    options["task_id"] = None if task_id is None else new_id(task_id)
    options["dedupe_key"] = dedupe_key
    options["dedupe_for"] = dedupe_for
    options["on_duplicate"] = choice
    with session.connect() as queue:
        try:
            task = queue.enqueue(read, **options)
        except DuplicateTask as exc:
            if choice != "return" or exc.held_until is None or wait_for_result:
                raise
            _print_held(session, exc)
            return
        if wait_for_result:
            session.out.hint(f"Waiting for task {task.id} of queue {task.queue!r}.")
            _print_result(session, queue, task.id, timeout)
            return
    if session.out.as_json:
        (shown,) = masked([task])
        fields = {name: value for name, value in shown if name != "is_duplicate"}
        added = {} if choice == "raise" else {"added": not task.is_duplicate}
        session.out.json({**fields, **added})
        return
    if task.is_duplicate and choice == "return":
        session.out.print(
            f"Task {task.id} exists already in queue {task.queue!r} and is {task.status}; "
            "nothing was enqueued."
        )
        return
    due = (
        ""
        if task.next_retry_at is None
        else f", due {formats.relative(task.next_retry_at, task.updated_at)}"
    )
    verb = "Replaced" if task.is_duplicate else "Enqueued"
    session.out.print(f"{verb} {task.id} in queue {task.queue!r}{due}.")


def _duplicate_choice(given: DuplicateChoice | None, *, if_absent: bool) -> OnDuplicate:
    """Return what to do with a duplicate; ``--if-absent`` is a short form."""
    if not if_absent:
        return "raise" if given is None else given.value
    if given not in {None, DuplicateChoice.RETURN}:
        raise typer.BadParameter("give --if-absent or --on-duplicate, not both.")
    return "return"


def _print_held(session: Session, duplicate: DuplicateTask) -> None:
    """Report a task that was deleted, and whose dedupe key is still taken."""
    if session.out.as_json:
        fields = {"id": duplicate.existing_id, "dedupe_until": duplicate.held_until}
        session.out.json({**fields, "added": False})
        return
    session.out.print(
        f"Task {duplicate.existing_id} had dedupe key {duplicate.dedupe_key!r}, which is taken "
        f"until {duplicate.held_until}; nothing was enqueued."
    )


def _enqueue_many(session: Session, payload: str, options: EnqueueOptions) -> None:
    if payload != "-":
        raise InvalidArgument("--many reads stdin: leave out PAYLOAD", argument="payload")
    payloads = values.read_payloads(values.read_stdin("PAYLOAD").split("\n"))
    with session.connect() as queue:
        report = queue.enqueue_many(payloads, **options)
    if session.out.as_json:
        session.out.json(masked(report.tasks))
    else:
        session.out.print(
            f"Enqueued {formats.count(report.added, 'task')} in queue {session.queue_name!r}."
        )


def peek(
    session: Session,
    *,
    status: Annotated[
        TaskStatus | None,
        typer.Option("--status", help="Only tasks with this status. \\[default: all]"),
    ] = None,
    name: TaskName = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="Number of tasks to show.")] = 10,
    reveal: Reveal = False,
) -> None:
    """List the newest tasks, without claiming them."""
    with session.connect() as queue:
        found = queue.peek(limit, status=status, name=name, all_queues=session.all_queues)
        tasks = masked(found, reveal=reveal)
        now = queue.now()
        queues = session.queues(queue)
        hint = "" if tasks or session.all_queues else other_queues_hint(queue)
    if session.out.as_json:
        session.note_queues(queues)
        session.out.json(tasks)
    elif not tasks:
        such = "No tasks" if status is None else f"No {status.value} tasks"
        if name is not None:
            such += f" named {name!r}" if name else " without a name"
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
    payload = formats.one_line(formats.json_text(task.payload))
    return [
        str(task.id),
        state,
        task.priority,
        f"{task.attempts}/{task.max_attempts}",
        formats.relative(task.created_at, now),
        formats.truncate(payload, PAYLOAD_LIMIT if session.out.for_people else None),
    ]


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


def wait(
    session: Session,
    task_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the task.")],
    *,
    timeout: Annotated[
        timedelta | None,
        typer.Option(help="Exit with status 4 after this time. \\[default: no limit]", **DURATION),
    ] = None,
    reveal: Reveal = False,
) -> None:
    """Wait until a task is finished, and print its result; secrets are masked.

    The exit status is 0 if the task is done, 3 if it failed, and 4 if it is not finished in time.
    """
    with session.connect() as queue:
        found = find_task(session, queue, task_id)
        _print_result(session, queue, found.id, timeout, reveal=reveal)


def _print_result(
    session: Session,
    queue: Queue[Any],
    task_id: Any,
    timeout: timedelta | None,
    *,
    reveal: bool = False,
) -> None:
    """Wait for a task, and print its result, or the whole task as JSON."""
    try:
        task = queue.wait_for(task_id, timeout=timeout)
    except WaitTimeout as exc:
        session.out.error(exc)
        raise typer.Exit(NOT_FINISHED) from None
    except TaskFailed as exc:
        if session.out.as_json:
            session.out.json(masked([exc.task], reveal=reveal)[0])
        shown = describe_error(masked([exc.task], reveal=reveal)[0].error) or "no error is stored"
        session.out.error(MicroqueueError(f"task {exc.task.id} failed: {shown}"))
        raise typer.Exit(TASK_FAILED) from None
    (task,) = masked([task], reveal=reveal)
    if session.out.as_json:
        session.out.json(task)
    else:
        session.out.print(formats.json_text(task.result, indent=2))


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
    """Permanently delete the tasks that have one status.

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
    *,
    hooks: HooksReference = None,
) -> None:
    """Cancel a pending or running task: it becomes a dead letter with code cancelled."""
    session.load_hooks(hooks)
    with session.connect() as queue:
        task = queue.cancel(find_task(session, queue, task_id).id)
        (task,) = masked([task])
        if session.out.as_json:
            session.out.json(task)
        else:
            reason = task.error.message if task.error else ""
            session.out.print(f"Cancelled {task.id} of queue {task.queue!r}: {reason}.")
