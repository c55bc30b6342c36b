"""The ``schedule`` commands: list, put, show, next, pause, resume, trigger, remove."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import typer

from microqueue.backoff import BackoffPolicy
from microqueue.cli import formats, output, values
from microqueue.cli.options import DURATION, Backoff, Reveal, VisibilityTimeout
from microqueue.cli.session import Session
from microqueue.durations import write_duration
from microqueue.errors import OperationFailed, ScheduleNotFound, ServerUnavailable
from microqueue.masking import REDACTED_KEYS, Masker
from microqueue.model import changed
from microqueue.queue import Queue
from microqueue.schedule import Schedule, on_change_of_code, on_removal_of_code

ScheduleName: TypeAlias = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the schedule.")
]


class CatchUpChoice(StrEnum):
    """What to do with runs that were missed."""

    LATEST = "latest"
    ALL = "all"
    SKIP = "skip"


class OverlapChoice(StrEnum):
    """What to do with a run while a task of the schedule is unfinished."""

    ALLOW = "allow"
    SKIP = "skip"


def list_schedules(session: Session, *, reveal: Reveal = False) -> None:
    """List the schedules: when each runs, its next and last run, and the outcome of that."""
    with session.connect() as queue:
        now = queue.now()
        found = queue.schedules.list(all_queues=session.all_queues)
    if session.out.as_json:
        session.out.json([_masked(one, reveal=reveal) for one in found])
        return
    if not found:
        where = "any queue" if session.all_queues else session.scope
        session.out.print(f"No schedules in {where}.")
        return
    session.note_queues(sorted({one.queue for one in found}))
    session.out.table(
        ["queue", "schedule", "when", "next", "last", "outcome", "source"],
        [_row(one, now) for one in found],
        when="fold",
    )


def put(
    session: Session,
    name: ScheduleName,
    payload: Annotated[
        str, typer.Argument(metavar="PAYLOAD", help="JSON object; - reads it from stdin.")
    ] = "{}",
    *,
    cron: Annotated[
        str | None,
        typer.Option(
            metavar="EXPRESSION", help="Cron expression, as in '0 3 * * *', or @daily, @hourly."
        ),
    ] = None,
    every: Annotated[
        timedelta | None, typer.Option(help="Period instead: 30s, 5m, 2h.", **DURATION)
    ] = None,
    timezone: Annotated[
        str, typer.Option(metavar="ZONE", help="Time zone of --cron, as Europe/Berlin.")
    ] = "UTC",
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="NAME", help="Name of the tasks: the function to run."),
    ] = None,
    catch_up: Annotated[
        CatchUpChoice, typer.Option(help="After an outage, run this of what was missed.")
    ] = CatchUpChoice.LATEST,
    grace: Annotated[
        timedelta | None,
        typer.Option(
            help="Leave out runs that are later than this, 1s or more. "
            "\\[default: none; 1m with --catch-up skip]",
            **DURATION,
        ),
    ] = None,
    overlap: Annotated[
        OverlapChoice,
        typer.Option(help="skip leaves out a run while a task of the schedule is unfinished."),
    ] = OverlapChoice.ALLOW,
    jitter: Annotated[
        timedelta | None,
        typer.Option(help="Deliver each task up to this much later.", **DURATION),
    ] = None,
    paused: Annotated[
        bool | None,
        typer.Option("--paused/--not-paused", help="Pause it, or not. \\[default: as it is]"),
    ] = None,
    priority: Annotated[int, typer.Option(help="Priority of the tasks, 0 to 255.")] = 0,
    max_attempts: Annotated[
        int | None,
        typer.Option(
            help="Deliveries before a task becomes a dead letter. "
            "\\[default: $MICROQUEUE_MAX_ATTEMPTS, or 10]"
        ),
    ] = None,
    backoff: Backoff = None,
    visibility_timeout: VisibilityTimeout = None,
    expires_in: Annotated[
        timedelta | None,
        typer.Option(help="Fail a task that is not delivered within this time.", **DURATION),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Header to store with each task; repeatable."),
    ] = None,
) -> None:
    """Add a schedule, or change the one with this name: options that are left out get defaults."""
    if (cron is None) is (every is None):
        raise typer.BadParameter("give --cron or --every, one of them.")
    text = values.read_stdin("PAYLOAD") if payload == "-" else payload
    body = values.read_payload(text, where="the payload")
    headers = values.read_headers(header or ())
    policy = None if backoff is None else values.read_backoff(backoff)
    with session.connect() as queue:
        now = queue.now()
        replaced = _stored(queue, name)
        found = queue.schedules.put(
            name,
            cron=cron,
            every=every,
            payload=body,
            task=task,
            timezone=timezone,
            catch_up=catch_up.value,
            grace=grace,
            overlap=overlap.value,
            jitter=jitter,
            paused=paused,
            priority=priority,
            max_attempts=max_attempts,
            backoff=policy,
            visibility_timeout=visibility_timeout,
            expires_in=expires_in,
            headers=headers,
        )
    _warn(session, on_change_of_code(replaced))
    if session.out.as_json:
        session.out.json(_masked(found, reveal=False))
    else:
        when = f"{_when(found)}, next run {_next(found, now)}"
        session.out.print(f"Schedule {name!r} of queue {found.queue!r}: {when}.")


def show(session: Session, name: ScheduleName, *, reveal: Reveal = False) -> None:
    """Show a schedule with its options, its next and last run."""
    with session.connect() as queue:
        now = queue.now()
        found = queue.schedules.get(name)
    if found is None:
        raise ScheduleNotFound(name=name, queue=session.queue_name)
    found = _masked(found, reveal=reveal)
    if session.out.as_json:
        session.out.json(found)
        return
    for label, value in _details(found, now):
        session.out.print(f"{label + ':':<14}{value}")


def next_runs(
    session: Session,
    name: ScheduleName,
    *,
    number: Annotated[int, typer.Option("--limit", "-n", help="Number of runs to show.")] = 5,
) -> None:
    """Show the next runs of a schedule, in its time zone."""
    with session.connect() as queue:
        found = queue.schedules.next_runs(name, number)
    if session.out.as_json:
        session.out.json([one.isoformat() for one in found])
        return
    for one in found:
        session.out.print(f"{one:%a} {one.isoformat()}")


def pause(session: Session, name: ScheduleName) -> None:
    """Pause a schedule: nothing runs until resume."""
    with session.connect() as queue:
        found = queue.schedules.pause(name)
    _print_state(session, found, f"Schedule {name!r} of queue {found.queue!r} is paused.")


def resume(session: Session, name: ScheduleName) -> None:
    """Resume a paused schedule. Runs that were missed during the pause are left out."""
    with session.connect() as queue:
        now = queue.now()
        found = queue.schedules.resume(name)
    text = f"Schedule {name!r} of queue {found.queue!r} is resumed; next run {_next(found, now)}."
    _print_state(session, found, text)


def trigger(session: Session, name: ScheduleName) -> None:
    """Run a schedule now. Its next run stays as it is."""
    with session.connect() as queue:
        task = queue.schedules.trigger(name)
    if session.out.as_json:
        session.out.json({"schedule": name, "queue": task.queue, "task_id": task.id})
    else:
        session.out.print(f"Enqueued {task.id} in queue {task.queue!r}.")


def remove(session: Session, name: ScheduleName) -> None:
    """Remove a schedule. Tasks that it added stay."""
    with session.connect() as queue:
        removed = _stored(queue, name)
        was_there = queue.schedules.remove(name)
    _warn(session, on_removal_of_code(removed))
    if session.out.as_json:
        session.out.json({"schedule": name, "queue": session.queue_name, "removed": was_there})
    elif was_there:
        session.out.print(f"Removed schedule {name!r} of queue {session.queue_name!r}.")
    else:
        session.out.print(f"Queue {session.queue_name!r} has no schedule {name!r}.")


def _stored(queue: Queue[Any], name: str) -> Schedule | None:
    """Return a schedule that is about to be put or removed, unless it is malformed."""
    try:
        return queue.schedules.get(name)
    except ServerUnavailable:
        raise
    except OperationFailed:
        return None


def _warn(session: Session, warning: str | None) -> None:
    if warning is not None:
        session.out.note(f"Warning: {warning}.")


def _print_state(session: Session, schedule: Schedule, text: str) -> None:
    if session.out.as_json:
        session.out.json(_masked(schedule, reveal=False))
    else:
        session.out.print(text)


def _masked(schedule: Schedule, *, reveal: bool) -> Schedule:
    masker = Masker(None if reveal else REDACTED_KEYS)
    changes: dict[str, Any] = {
        "payload": masker.mask(schedule.payload),
        "headers": masker.mask(schedule.headers),
    }
    return changed(schedule, **changes)


def _row(schedule: Schedule, now: datetime) -> list[output.Cell]:
    last = schedule.last_run
    return [
        formats.one_line(schedule.queue),
        formats.one_line(schedule.name),
        _when(schedule),
        _next(schedule, now),
        formats.relative(None if last is None else last.fired_at, now),
        _outcome(schedule),
        schedule.source if schedule.app is None else f"{schedule.source} ({schedule.app})",
    ]


def _when(schedule: Schedule) -> str:
    if schedule.every is not None:
        return f"every {write_duration(schedule.every)}"
    zone = "" if schedule.timezone == "UTC" else f" {schedule.timezone}"
    return f"{schedule.cron}{zone}"


def _next(schedule: Schedule, now: datetime) -> str:
    return "paused" if schedule.paused else formats.instant(schedule.next_at, now)


def _outcome(schedule: Schedule) -> str:
    last = schedule.last_run
    if last is None:
        return "-"
    return "deleted" if last.status is None else last.status.value


def _details(schedule: Schedule, now: datetime) -> list[tuple[str, str]]:
    last, skipped = schedule.last_run, schedule.last_skipped
    found: list[tuple[str, Any]] = [
        ("Schedule", formats.one_line(schedule.name)),
        ("Queue", formats.one_line(schedule.queue)),
        ("When", _when(schedule)),
        ("Next run", _next(schedule, now)),
        ("Catch up", schedule.catch_up),
        ("Grace", schedule.grace and write_duration(schedule.grace)),
        ("Overlap", schedule.overlap),
        ("Jitter", schedule.jitter and write_duration(schedule.jitter)),
        ("Task", schedule.task and formats.one_line(schedule.task)),
        ("Payload", formats.one_line(formats.json_text(schedule.payload))),
        ("Priority", schedule.priority),
        ("Max attempts", schedule.max_attempts),
        ("Backoff", _backoff(schedule.backoff)),
        ("Lease", schedule.visibility_timeout and write_duration(schedule.visibility_timeout)),
        ("Expires in", schedule.expires_in and write_duration(schedule.expires_in)),
        ("Headers", schedule.headers and formats.one_line(formats.json_text(schedule.headers))),
        ("Source", schedule.source if schedule.app is None else f"code of {schedule.app}"),
        ("Runs", schedule.runs),
    ]
    if last is not None:
        how = "triggered" if last.triggered else f"{last.late_sec:.3f} s late"
        when = formats.instant(last.fired_at, now)
        found.append(("Last run", f"{when}, {how}: task {last.task_id}, {_outcome(schedule)}"))
    if skipped is not None:
        found.append(("Last skipped", f"{formats.instant(skipped.at, now)} ({skipped.reason})"))
    return [(label, str(value)) for label, value in found if value is not None]


def _backoff(policy: BackoffPolicy) -> str:
    """Return a policy as ``--backoff`` takes it."""
    return (
        f"base={policy.base_sec:.12g},factor={policy.factor:.12g},max={policy.max_sec:.12g},"
        f"jitter={policy.jitter}"
    )
