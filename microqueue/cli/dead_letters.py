"""Commands about dead letters: list, show, replay, discard."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Annotated, Any, TypeAlias

import typer

from microqueue.cli import asking, formats, tasks, values
from microqueue.cli.output import Cell
from microqueue.cli.session import Session
from microqueue.errors import WrongStatus
from microqueue.operations.dead_letters import DeadLetterFilter, ReplayReport
from microqueue.queue import Queue
from microqueue.task import Task, TaskStatus

PAST: dict[str, Any] = {"parser": values.read_past, "metavar": "TIME"}

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
All: TypeAlias = Annotated[bool, typer.Option("--all", help="All dead letters of the queue.")]
Limit: TypeAlias = Annotated[
    int | None, typer.Option("--limit", "-n", help="How many at most, the oldest failures first.")
]
DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Only count them.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


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
) -> None:
    """List dead letters, the newest failure first."""
    out = session.out
    with session.connect() as queue:
        now = queue.now()
        which = _filter(now, code=code, text=text, since=since, until=until)
        page = queue.dead_letters.list(**which.model_dump(), limit=limit, cursor=cursor)
        total = queue.dead_letters.stats().total
        others = "" if total else tasks.others(queue)
    if out.as_json:
        out.json({"tasks": page.tasks, "next_cursor": page.next_cursor})
        return
    if not page.tasks:
        none = f"No dead letters in queue {queue.name!r}.{others}"
        out.say(none if not total else f"None of the {total:,} dead letters match.")
        return
    out.table(
        *tasks.with_names(
            ["id", "failed", "attempts", "code", "message"],
            [_row(task, now) for task in page.tasks],
            page.tasks,
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
) -> None:
    """Show one dead letter with its payload, its error and its history."""
    with session.connect() as queue:
        task = _find_letter(session, queue, task_id)
        now = queue.now()
    tasks.print_task(session, task, now)


def replay(
    session: Session,
    ids: Ids = None,
    *,
    code: Code = None,
    text: Text = None,
    since: Since = None,
    until: Until = None,
    everything: All = False,
    delay: Annotated[
        timedelta | None,
        typer.Option(help="Deliver them this much later: 30s, 5m, 2h.", **tasks.DURATION),
    ] = None,
    spread: Annotated[
        timedelta | None,
        typer.Option(help="Distribute them over a period, not to make a storm.", **tasks.DURATION),
    ] = None,
    limit: Limit = None,
    keep_attempts: Annotated[
        bool, typer.Option("--keep-attempts", help="Count on, instead of from zero.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Send dead letters back into the queue: by id, by a filter, or --all."""
    given = {"code": code, "text": text, "since": since, "until": until}
    check_choice(ids, given, everything=everything)
    with session.connect() as queue:
        chosen = Choice(session, queue, ids or [], given, limit=limit)

        def act(owner: Queue[Any], which: Any) -> ReplayReport:
            return owner.dead_letters.replay(
                which,
                reset_attempts=not keep_attempts,
                delay=delay,
                spread=spread,
                limit=limit,
                dry_run=dry_run,
            )

        if not dry_run:
            chosen.confirm("Replay", yes=yes)
        reports = chosen.each(act)
    total = ReplayReport(
        matched=sum(report.matched for report in reports),
        replayed=sum(report.replayed for report in reports),
        skipped=[task_id for report in reports for task_id in report.skipped],
        dry_run=dry_run,
    )
    if session.out.as_json:
        session.out.json(total)
        return
    if dry_run:
        session.out.say(f"{_letters(total.matched)} would be replayed.")
        return
    session.out.say(
        f"Replayed {_letters(total.replayed)}." if total.matched else "Nothing to replay."
    )
    if total.skipped:
        session.out.say(
            "Not replayed, because a live task has the same dedupe key, or somebody else replays "
            f"it: {', '.join(str(task_id) for task_id in total.skipped)}"
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
    limit: Limit = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete dead letters for good: by id, by a filter, or --all."""
    given = {"code": code, "text": text, "since": since, "until": until}
    check_choice(ids, given, everything=everything)
    with session.connect() as queue:
        chosen = Choice(session, queue, ids or [], given, limit=limit)
        matched, discarded = chosen.count(), 0
        if not dry_run:
            chosen.confirm("Discard for good", yes=yes)
            discarded = sum(
                chosen.each(lambda owner, which: owner.dead_letters.discard(which, limit=limit))
            )
    if session.out.as_json:
        session.out.json({"matched": matched, "discarded": discarded, "dry_run": dry_run})
    elif dry_run:
        session.out.say(f"{_letters(matched)} would be discarded.")
    else:
        session.out.say(f"Discarded {_letters(discarded)}." if matched else "Nothing to discard.")


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
        self._queue = queue
        self._named = bool(ids)
        self._limit = limit
        if not ids:
            self._parts: list[tuple[Queue[Any], Any]] = [(queue, _filter(queue.now(), **given))]
            return
        # An id names its task whatever its queue, so each is handled in its own.
        letters: dict[str, list[Any]] = defaultdict(list)
        for text in dict.fromkeys(ids):
            task = _find_letter(session, queue, text)
            letters[task.queue].append(task.id)
        collection, settings = queue.collections.tasks, queue.settings
        self._parts = [
            (Queue(collection, name, settings=settings), found) for name, found in letters.items()
        ]

    def each(self, act: Callable[[Queue[Any], Any], Any]) -> list[Any]:
        """Do something to the chosen letters, queue by queue."""
        return [act(queue, which) for queue, which in self._parts]

    def count(self) -> int:
        """Count the chosen letters."""
        reports = self.each(
            lambda queue, which: queue.dead_letters.replay(which, dry_run=True, limit=self._limit)
        )
        return sum(report.matched for report in reports)

    def confirm(self, verb: str, *, yes: bool) -> None:
        """Ask before something happens to letters that nobody named one by one."""
        if yes or self._named:
            return
        asking.check_answerable()
        matched = self.count()
        if matched:
            asking.ask(f"{verb}: {_letters(matched)} of queue {self._queue.name!r}?")


def _filter(now: datetime, *, code: Any, text: Any, since: Any, until: Any) -> DeadLetterFilter:
    return DeadLetterFilter(
        code=code, text=text, since=values.before(now, since), until=values.before(now, until)
    )


def _find_letter(session: Session, queue: Queue[Any], text: str) -> Task[Any]:
    task = tasks.find(session, queue, text)
    if task.status is not TaskStatus.FAILED:
        raise WrongStatus(task_id=text, status=task.status.value, needed=TaskStatus.FAILED.value)
    return task


def _letters(number: int) -> str:
    return formats.count(number, "dead letter")
