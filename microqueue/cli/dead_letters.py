"""The ``dlq`` commands: list, show, replay and discard dead letters."""

from __future__ import annotations

import shlex
from datetime import datetime, timedelta
from typing import Annotated, Any, TypeAlias

import typer

from microqueue.cli import formats, prompts, task_output, values
from microqueue.cli.options import DURATION, PAST, AllQueues, DryRun, Reveal, TaskName, Yes
from microqueue.cli.output import Cell
from microqueue.cli.session import Session
from microqueue.dead_letter_models import DeadLetterFilter
from microqueue.errors import WrongStatus
from microqueue.queue import Queue
from microqueue.task import Task, TaskStatus

Code: TypeAlias = Annotated[
    str | None, typer.Option(help="Only dead letters with this error code.")
]
Text: TypeAlias = Annotated[
    str | None, typer.Option(help="Only dead letters whose error message contains this text.")
]
# Any, because the parser returns an instant, or how long ago it was.
Since: TypeAlias = Annotated[
    Any,
    typer.Option(help="Only failures since this time: 2026-05-01T12:00:00Z, or 2h ago.", **PAST),
]
Until: TypeAlias = Annotated[
    Any, typer.Option(help="Only failures before this time, in the same formats.", **PAST)
]
Ids: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="Ids of dead letters.")
]
All: TypeAlias = Annotated[
    bool, typer.Option("--all", help="All dead letters of the chosen queues.")
]
Limit: TypeAlias = Annotated[
    int | None,
    typer.Option("--limit", "-n", help="Act on this many at most, the oldest failures first."),
]


def list_dead_letters(
    session: Session,
    *,
    name: TaskName = None,
    code: Code = None,
    text: Text = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", help="Number of dead letters to show.")
    ] = 50,
    cursor: Annotated[
        str | None, typer.Option(help="Show the next page; the previous page prints the cursor.")
    ] = None,
    reveal: Reveal = False,
) -> None:
    """List dead letters, the newest failure first."""
    out = session.out
    with session.connect() as queue:
        now = queue.now()
        which = _filter(now, name=name, code=code, text=text, since=since, until=until)
        dead_letters = session.dead_letters(queue)
        page = dead_letters.list(**which.model_dump(), limit=limit, cursor=cursor)
        found = task_output.masked(page.tasks, reveal=reveal)
        queues = session.queues(queue)
        counted = None if found else dead_letters.stats()
        others = "" if found or session.all_queues else task_output.other_queues_hint(queue)
    if out.as_json:
        out.json({"tasks": found, "next_cursor": page.next_cursor, "queues": queues})
        return
    if counted is not None:
        where = "any queue" if session.all_queues else f"queue {queue.name!r}"
        total = formats.number(counted.total, estimated=counted.estimated)
        out.print(
            f"No match among the {formats.figure(total)} dead letters of {session.scope}."
            if counted.total
            else f"No dead letters in {where}.{others}"
        )
        return
    session.note_queues(queues)
    out.table(
        *task_output.with_name_and_queue(
            ["id", "failed", "attempts", "code", "message"],
            [_row(task, now) for task in found],
            found,
            queues=session.all_queues,
        ),
        message="fold",
    )
    if page.next_cursor is not None:
        out.print(f"\nNext page: add --cursor {shlex.quote(page.next_cursor)}", "dim")


def _message_without(code: str, message: str) -> str:
    """Return the message of an error without its code, with which that of an exception begins."""
    left = "" if message == code else message.removeprefix(f"{code}: ")
    return formats.one_line(left) or "-"


def _row(task: Task[Any], now: datetime) -> list[Cell]:
    error = task.error
    code = (error.code if error else None) or "-"
    return [
        str(task.id),
        formats.relative(task.updated_at, now),
        f"{task.attempts}/{task.max_attempts}",
        code,
        _message_without(code, error.message) if error else "-",
    ]


def show(
    session: Session,
    task_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the dead letter.")],
    *,
    reveal: Reveal = False,
) -> None:
    """Show a dead letter with its payload, error and history; secrets are masked."""
    with session.connect() as queue:
        (task,) = _find_dead_letters(session, queue, [task_id])
        now = queue.now()
    task_output.print_task(session, task, now, reveal=reveal)


def replay(
    session: Session,
    ids: Ids = None,
    *,
    name: TaskName = None,
    code: Code = None,
    text: Text = None,
    since: Since = None,
    until: Until = None,
    everything: All = False,
    all_queues: AllQueues = False,
    delay: Annotated[
        timedelta | None,
        typer.Option(help="Deliver them after this time: 30s, 5m, 2h.", **DURATION),
    ] = None,
    spread: Annotated[
        timedelta | None,
        typer.Option(help="Spread the deliveries over this period, to avoid a burst.", **DURATION),
    ] = None,
    limit: Limit = None,
    keep_attempts: Annotated[
        bool, typer.Option("--keep-attempts", help="Do not reset attempts to zero.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Replay dead letters: make them pending again in their queues.

    Choose them by ids, by filters (--name, --code, --text, --since, --until), or with --all.
    Without ids, --queue or --all-queues is required.
    """
    given = {"name": name, "code": code, "text": text, "since": since, "until": until}
    _check_selection(session, ids, given, everything=everything, all_queues=all_queues)
    with session.connect() as queue:
        selection = Selection(session, queue, ids or [], given, limit=limit)

        if not dry_run:
            selection.confirm("Replay", yes=yes)
        report = selection.dead_letters.replay(
            selection.which,
            reset_attempts=not keep_attempts,
            delay=delay,
            spread=spread,
            limit=limit,
            dry_run=dry_run,
        )
    if session.out.as_json:
        session.out.json({**dict(report), "queues": selection.queues})
        return
    if dry_run:
        session.out.print(f"{_count(report.matched)} of {selection.scope} would be replayed.")
        return
    session.out.print(
        f"Replayed {_count(report.replayed)} of {selection.scope}."
        if report.matched
        else f"Nothing to replay in {selection.scope}."
    )
    if report.skipped:
        session.out.print(
            "Skipped, because an unfinished task has the same dedupe key or another caller is "
            f"replaying it: {', '.join(str(task_id) for task_id in report.skipped)}"
        )


def discard(
    session: Session,
    ids: Ids = None,
    *,
    name: TaskName = None,
    code: Code = None,
    text: Text = None,
    since: Since = None,
    until: Until = None,
    everything: All = False,
    all_queues: AllQueues = False,
    limit: Limit = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete dead letters permanently.

    Choose them by ids, by filters (--name, --code, --text, --since, --until), or with --all.
    Without ids, --queue or --all-queues is required.
    """
    given = {"name": name, "code": code, "text": text, "since": since, "until": until}
    _check_selection(session, ids, given, everything=everything, all_queues=all_queues)
    with session.connect() as queue:
        selection = Selection(session, queue, ids or [], given, limit=limit)
        matched, discarded = selection.count(), 0
        if not dry_run:
            selection.confirm("Permanently delete", yes=yes)
            discarded = selection.dead_letters.discard(selection.which, limit=limit)
    if session.out.as_json:
        counts = {"matched": matched, "discarded": discarded, "dry_run": dry_run}
        session.out.json({**counts, "queues": selection.queues})
    elif dry_run:
        session.out.print(f"{_count(matched)} of {selection.scope} would be discarded.")
    else:
        session.out.print(
            f"Discarded {_count(discarded)} of {selection.scope}."
            if matched
            else f"Nothing to discard in {selection.scope}."
        )


def _check_selection(
    session: Session,
    ids: list[str] | None,
    given: dict[str, Any],
    *,
    everything: bool,
    all_queues: bool,
) -> None:
    """Require exactly one way to select dead letters, and the queues unless ids are given."""
    filtered = any(value is not None for value in given.values())
    number = [bool(ids), filtered, everything].count(True)
    if number != 1:
        ways = "ids, or filters (--name, --code, --text, --since, --until), or --all"
        problem = "give only one of" if number else "which dead letters? Give"
        raise typer.BadParameter(f"{problem}: {ways}.")
    if not ids:  # Ids are unique across queues.
        session.check_scope(all_queues=all_queues)


class Selection:
    """The dead letters that a command acts on: given by ids, or matched by a filter."""

    def __init__(
        self,
        session: Session,
        queue: Queue[Any],
        ids: list[str],
        given: dict[str, Any],
        *,
        limit: int | None,
    ) -> None:
        self._named = bool(ids)
        self._limit = limit
        self.dead_letters = session.dead_letters(queue)
        self.which: Any
        if ids:
            found = _find_dead_letters(session, queue, ids)
            self.which = [task.id for task in found]
            self.queues = sorted({task.queue for task in found})
            self.scope = _of_queues(self.queues)
        else:
            self.which = _filter(queue.now(), **given)
            self.queues = session.queues(queue)
            self.scope = session.scope

    def count(self) -> int:
        """Count the selected dead letters."""
        return self.dead_letters.replay(self.which, dry_run=True, limit=self._limit).matched

    def confirm(self, verb: str, *, yes: bool) -> None:
        """Ask for confirmation, unless the dead letters were given by ids."""
        if yes or self._named:
            return
        prompts.check_answerable()
        matched = self.count()
        if matched:
            prompts.confirm(f"{verb} {_count(matched)} of {self.scope}?")


def _filter(
    now: datetime, *, name: Any, code: Any, text: Any, since: Any, until: Any
) -> DeadLetterFilter:
    return DeadLetterFilter(
        name=name,
        code=code,
        text=text,
        since=values.before(now, since),
        until=values.before(now, until),
    )


def _find_dead_letters(session: Session, queue: Queue[Any], texts: list[str]) -> list[Task[Any]]:
    """Find dead letters by their ids as typed.

    Raises:
        TaskNotFound: Some do not exist.
        WrongStatus: One is not a dead letter.
    """
    found = task_output.find_tasks(session, queue, list(dict.fromkeys(texts)))
    for task in found:
        if task.status is not TaskStatus.FAILED:
            status, needed = str(task.status), TaskStatus.FAILED.value
            raise WrongStatus(task_id=str(task.id), status=status, needed=needed)
    return found


def _of_queues(names: list[str]) -> str:
    listed = formats.listed([repr(one) for one in names])
    return f"queue {listed}" if len(names) == 1 else f"queues {listed}"


def _count(number: int) -> str:
    return formats.count(number, "dead letter")
