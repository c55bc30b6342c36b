"""Commands about dead letters: list, show, replay, discard."""

from __future__ import annotations

import shlex
from datetime import datetime, timedelta
from typing import Annotated, Any, TypeAlias

import typer

from microqueue.cli import formats, prompts, tasks, values
from microqueue.cli.options import DURATION, PAST, AllQueues, Reveal
from microqueue.cli.output import Cell
from microqueue.cli.prompts import DryRun, Yes
from microqueue.cli.session import Session
from microqueue.dlq import DeadLetterFilter
from microqueue.errors import WrongStatus
from microqueue.queue import Queue
from microqueue.task import Task, TaskStatus

Code: TypeAlias = Annotated[str | None, typer.Option(help="Only those with this error code.")]
Text: TypeAlias = Annotated[
    str | None, typer.Option(help="Only those with this text in their error message.")
]
# Any: a duration ago, or an instant; the parser gives either.
Since: TypeAlias = Annotated[
    Any, typer.Option(help="Only those that failed since: 2026-05-01T12:00:00Z, or 2h ago.", **PAST)
]
Until: TypeAlias = Annotated[
    Any, typer.Option(help="Only those that failed before, likewise.", **PAST)
]
Ids: TypeAlias = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Which ones.")]
All: TypeAlias = Annotated[bool, typer.Option("--all", help="All dead letters of these queues.")]
Limit: TypeAlias = Annotated[
    int | None, typer.Option("--limit", "-n", help="How many at most, the oldest failures first.")
]


def list_letters(
    session: Session,
    *,
    code: Code = None,
    text: Text = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="How many at most.")] = 50,
    cursor: Annotated[
        str | None, typer.Option(help="Go on where the last page ended, which says with what.")
    ] = None,
    reveal: Reveal = False,
) -> None:
    """List dead letters of all queues, or of the one given with -q, the newest failure first."""
    out = session.out
    with session.connect() as queue:
        now = queue.now()
        which = _filter(now, code=code, text=text, since=since, until=until)
        letters = session.letters(queue)
        page = letters.list(**which.model_dump(), limit=limit, cursor=cursor)
        found = tasks.shown(page.tasks, reveal=reveal)
        queues = session.queues(queue)
        counted = None if found else letters.stats()
        others = "" if found or session.all_queues else tasks.others(queue)
    if out.as_json:
        out.json({"tasks": found, "next_cursor": page.next_cursor, "queues": queues})
        return
    if counted is not None:
        where = "any queue" if session.all_queues else f"queue {queue.name!r}"
        total = formats.number(counted.total, estimated=counted.estimated)
        out.say(
            f"None of the {formats.figure(total)} dead letters of {session.scope} match."
            if counted.total
            else f"No dead letters in {where}.{others}"
        )
        return
    session.note_queues(queues)
    out.table(
        *tasks.described(
            ["id", "failed", "attempts", "code", "message"],
            [_row(task, now) for task in found],
            found,
            queues=session.all_queues,
        ),
        message="fold",
    )
    if page.next_cursor is not None:
        out.say(f"\nThe next page: add --cursor {shlex.quote(page.next_cursor)}", "dim")


def _row(task: Task[Any], now: datetime) -> list[Cell]:
    error = task.error
    code = (error.code if error else None) or "-"
    return [
        str(task.id),
        formats.since(task.updated_at, now),
        f"{task.attempts}/{task.max_attempts}",
        code,
        formats.one_line(error.message.removeprefix(f"{code}: ")) if error else "-",
    ]


def show_letter(
    session: Session,
    task_id: Annotated[str, typer.Argument(metavar="ID", help="The id of a dead letter.")],
    *,
    reveal: Reveal = False,
) -> None:
    """Show one dead letter with its payload, its error and its history; secrets are masked."""
    with session.connect() as queue:
        (task,) = _find_letters(session, queue, [task_id])
        now = queue.now()
    tasks.print_task(session, task, now, reveal=reveal)


def replay(
    session: Session,
    ids: Ids = None,
    *,
    code: Code = None,
    text: Text = None,
    since: Since = None,
    until: Until = None,
    everything: All = False,
    all_queues: AllQueues = False,
    delay: Annotated[
        timedelta | None,
        typer.Option(help="Deliver them this much later: 30s, 5m, 2h.", **DURATION),
    ] = None,
    spread: Annotated[
        timedelta | None,
        typer.Option(help="Distribute them over a period, not to make a storm.", **DURATION),
    ] = None,
    limit: Limit = None,
    keep_attempts: Annotated[
        bool, typer.Option("--keep-attempts", help="Count on, instead of from zero.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Send dead letters back into their queues: by id, by a filter, or --all.

    A filter and --all need --queue or --all-queues.
    """
    given = {"code": code, "text": text, "since": since, "until": until}
    check_choice(ids, given, everything=everything)
    if not ids:  # An id names its task whatever its queue.
        session.check_scope(all_queues=all_queues)
    with session.connect() as queue:
        chosen = Choice(session, queue, ids or [], given, limit=limit)

        if not dry_run:
            chosen.confirm("Replay", yes=yes)
        report = chosen.letters.replay(
            chosen.which,
            reset_attempts=not keep_attempts,
            delay=delay,
            spread=spread,
            limit=limit,
            dry_run=dry_run,
        )
    if session.out.as_json:
        session.out.json({**dict(report), "queues": chosen.queues})
        return
    if dry_run:
        session.out.say(f"{_letters(report.matched)} of {chosen.scope} would be replayed.")
        return
    session.out.say(
        f"Replayed {_letters(report.replayed)} of {chosen.scope}."
        if report.matched
        else f"Nothing to replay in {chosen.scope}."
    )
    if report.skipped:
        session.out.say(
            "Not replayed, because a live task has the same dedupe key, or another caller replays "
            f"it: {', '.join(str(task_id) for task_id in report.skipped)}"
        )


def discard(
    session: Session,
    ids: Ids = None,
    *,
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
    """Delete dead letters for good: by id, by a filter, or --all.

    A filter and --all need --queue or --all-queues.
    """
    given = {"code": code, "text": text, "since": since, "until": until}
    check_choice(ids, given, everything=everything)
    if not ids:  # An id names its task whatever its queue.
        session.check_scope(all_queues=all_queues)
    with session.connect() as queue:
        chosen = Choice(session, queue, ids or [], given, limit=limit)
        matched, discarded = chosen.count(), 0
        if not dry_run:
            chosen.confirm("Discard for good", yes=yes)
            discarded = chosen.letters.discard(chosen.which, limit=limit)
    if session.out.as_json:
        counts = {"matched": matched, "discarded": discarded, "dry_run": dry_run}
        session.out.json({**counts, "queues": chosen.queues})
    elif dry_run:
        session.out.say(f"{_letters(matched)} of {chosen.scope} would be discarded.")
    else:
        session.out.say(
            f"Discarded {_letters(discarded)} of {chosen.scope}."
            if matched
            else f"Nothing to discard in {chosen.scope}."
        )


def check_choice(ids: list[str] | None, given: dict[str, Any], *, everything: bool) -> None:
    """Refuse to guess when no way of choosing was given, or several."""
    filtered = any(value is not None for value in given.values())
    number = [bool(ids), filtered, everything].count(True)
    if number != 1:
        ways = "ids, or a filter (--code, --text, --since, --until), or --all"
        raise typer.BadParameter(f"{'give only one of' if number else 'say which'}: {ways}.")


class Choice:
    """Which dead letters a command is about: some ids, or what a filter matches."""

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
        self.letters = session.letters(queue)
        self.which: Any
        if ids:
            found = _find_letters(session, queue, ids)
            self.which = [task.id for task in found]
            self.queues = sorted({task.queue for task in found})
            self.scope = _of_queues(self.queues)
        else:
            self.which = _filter(queue.now(), **given)
            self.queues = session.queues(queue)
            self.scope = session.scope

    def count(self) -> int:
        """Count the chosen letters."""
        return self.letters.replay(self.which, dry_run=True, limit=self._limit).matched

    def confirm(self, verb: str, *, yes: bool) -> None:
        """Ask before something happens to letters that nobody named one by one."""
        if yes or self._named:
            return
        prompts.check_answerable()
        matched = self.count()
        if matched:
            prompts.ask(f"{verb}: {_letters(matched)} of {self.scope}?")


def _filter(now: datetime, *, code: Any, text: Any, since: Any, until: Any) -> DeadLetterFilter:
    return DeadLetterFilter(
        code=code, text=text, since=values.before(now, since), until=values.before(now, until)
    )


def _find_letters(session: Session, queue: Queue[Any], texts: list[str]) -> list[Task[Any]]:
    """Find dead letters by what was typed; if any is missing, or not dead, none is returned."""
    found = tasks.find_all(session, queue, list(dict.fromkeys(texts)))
    for task in found:
        if task.status is not TaskStatus.FAILED:
            status, needed = str(task.status), TaskStatus.FAILED.value
            raise WrongStatus(task_id=str(task.id), status=status, needed=needed)
    return found


def _of_queues(names: list[str]) -> str:
    listed = formats.listed([repr(one) for one in names])
    return f"queue {listed}" if len(names) == 1 else f"queues {listed}"


def _letters(number: int) -> str:
    return formats.count(number, "dead letter")
