"""Commands about queues: pause, resume, stats."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from microqueue.cli import formats, task_output
from microqueue.cli.exit import stop_on_signals
from microqueue.cli.options import DURATION, Exact
from microqueue.cli.output import Cell
from microqueue.cli.session import Session
from microqueue.core import core_of
from microqueue.dead_letter_models import DeadLetterStats
from microqueue.insights import Insights
from microqueue.operations.diagnostics import every_queue
from microqueue.operations.pauses import list_paused
from microqueue.queue import Queue
from microqueue.reports import Pause, QueueStats
from microqueue.sweeper import check_every


def pause(
    session: Session,
    *,
    reason: Annotated[
        str | None, typer.Option(help="Why; shown by stats and the dashboard.")
    ] = None,
) -> None:
    """Pause a queue: workers claim no more tasks from it. Running tasks finish."""
    with session.connect() as queue:
        found = queue.pause(reason=reason)
        if session.out.as_json:
            session.out.json(found)
            return
        when = formats.relative(found.paused_at, queue.now())
        session.out.print(
            f"Queue {queue.name!r} is paused (since {when}). "
            f"Run `{resume_command(session, queue.name)}` to resume it."
        )


def resume_command(session: Session, queue: str) -> str:
    """Return the command that resumes a queue."""
    return session.with_collection(f"microqueue resume -q {shlex.quote(queue)}")


def resume(session: Session) -> None:
    """Resume a paused queue."""
    with session.connect() as queue:
        was_paused = queue.resume()
        if session.out.as_json:
            session.out.json({"queue": queue.name, "was_paused": was_paused})
        else:
            state = "resumed" if was_paused else "was not paused"
            session.out.print(f"Queue {queue.name!r} {state}.")


COUNTS = ("ready", "delayed", "processing", "overdue", "done", "failed")


def stats(
    session: Session,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    every: Annotated[
        timedelta | None,
        typer.Option(help="With --watch: time between two refreshes. \\[default: 1s]", **DURATION),
    ] = None,
    exact: Exact = False,
) -> None:
    """Count tasks by status, and dead letters by error code.

    Numbers with a ~ are estimates, used above $MICROQUEUE_COUNT_LIMIT tasks; see --exact.
    """
    if every is not None and not watch:
        raise typer.BadParameter("--every needs --watch.")
    every_sec = check_every(timedelta(seconds=1) if every is None else every)
    with session.connect() as queue:
        if not watch:
            _print_stats(session, queue, exact=exact)
            return
        with stop_on_signals() as stop:
            _watch_stats(session, queue, stop, every_sec, exact=exact)


def _print_stats(session: Session, queue: Queue[Any], *, exact: bool) -> None:
    if session.all_queues:
        all_stats = _read_all_stats(queue, exact=exact)
        if session.out.as_json:
            session.out.json(_all_as_document(all_stats))
        else:
            session.out.console.print(_all_stats_view(session, all_stats))
        return
    found, dead_letters, paused = _read_stats(queue, exact=exact)
    if session.out.as_json:
        session.out.json(_as_document(found, dead_letters, paused))
        return
    session.out.console.print(_stats_view(session, found, dead_letters, paused))
    if not found.pending + found.processing + found.done + found.failed:
        session.out.print(f"\nThe queue is empty.{task_output.other_queues_hint(queue)}")


def _watch_stats(
    session: Session, queue: Queue[Any], stop: threading.Event, every_sec: float, *, exact: bool
) -> None:
    if session.out.for_people:
        with Live(console=session.out.console, auto_refresh=False) as live:
            while not stop.is_set():
                if session.all_queues:
                    view = _all_stats_view(session, _read_all_stats(queue, exact=exact))
                else:
                    view = _stats_view(session, *_read_stats(queue, exact=exact))
                live.update(Group(view, Text("\nPress Ctrl-C to quit.", style="dim")), refresh=True)
                stop.wait(every_sec)
        return
    while not stop.is_set():
        if session.all_queues:
            all_stats = _read_all_stats(queue, exact=exact)
            if session.out.as_json:
                session.out.json(_all_as_document(all_stats), stream=True)
            for one in all_stats.queues:
                session.out.print(_stats_line(one, paused=one.queue in all_stats.pauses))
        else:
            found, dead_letters, paused = _read_stats(queue, exact=exact)
            if session.out.as_json:
                session.out.json(_as_document(found, dead_letters, paused), stream=True)
            session.out.print(_stats_line(found, paused=paused is not None))
        stop.wait(every_sec)


def _stats_line(found: QueueStats, *, paused: bool) -> str:
    counts = [
        f"{name}={'~' if name in found.estimated else ''}{getattr(found, name)}" for name in COUNTS
    ]
    state = " paused" if paused else ""
    return f"{found.at:%H:%M:%S} queue={found.queue} {' '.join(counts)}{state}"


@dataclass(frozen=True)
class AllStats:
    """The stats of each queue, the dead letters of all queues, and the pauses by queue."""

    at: datetime
    queues: list[QueueStats]
    dead_letters: DeadLetterStats
    pauses: dict[str, Pause]


def _read_all_stats(queue: Queue[Any], *, exact: bool) -> AllStats:
    pauses = {
        one.queue: one for one in core_of(queue).run(list_paused(core_of(queue).collections.name))
    }
    names = sorted({*core_of(queue).run(every_queue(queue.settings)), *pauses})
    return AllStats(
        at=queue.now(),
        queues=Insights(queue).stats(names, exact=exact) if names else [],
        dead_letters=queue.dead_letters.all_queues.stats(exact=exact),
        pauses=pauses,
    )


def _all_as_document(all_stats: AllStats) -> dict[str, Any]:
    """Return the sums over all queues, with the fields of a single queue, and each queue."""
    ages = [one.oldest_ready_age_sec for one in all_stats.queues]
    dues = [one.next_due_at for one in all_stats.queues]
    return {
        "queue": None,
        "at": all_stats.at,
        **{
            name: sum(getattr(one, name) for one in all_stats.queues)
            for name in (*COUNTS, "pending")
        },
        "oldest_ready_age_sec": max((one for one in ages if one is not None), default=None),
        "next_due_at": min((one for one in dues if one is not None), default=None),
        "estimated": sorted({name for one in all_stats.queues for name in one.estimated}),
        "dead_letters": all_stats.dead_letters,
        "queues": [
            {**one.model_dump(), "pending": one.pending, "paused": all_stats.pauses.get(one.queue)}
            for one in all_stats.queues
        ],
    }


def _total(queues: Sequence[QueueStats], name: str) -> int:
    """Return the sum of a count; it is an estimate if any summand is."""
    return formats.number(
        sum(getattr(one, name) for one in queues),
        estimated=any(name in one.estimated for one in queues),
    )


def _all_stats_view(session: Session, all_stats: AllStats) -> Any:
    if not all_stats.queues:
        return Text("No tasks in any queue.")
    if len(all_stats.queues) == 1:
        (only,) = all_stats.queues
        return _stats_view(session, only, all_stats.dead_letters, all_stats.pauses.get(only.queue))
    rows: list[list[Cell]] = []
    for one in all_stats.queues:
        paused = all_stats.pauses.get(one.queue)
        state = (
            "" if paused is None else f"paused {formats.relative(paused.paused_at, all_stats.at)}"
        )
        rows.append([one.queue, *(_total([one], name) for name in COUNTS), state])
    sums = (_total(all_stats.queues, name) for name in COUNTS)
    rows.append([Text("all queues", style="bold"), *sums, ""])
    table = session.out.new_table(["queue", *COUNTS, ""], rows)
    reasons = ", ".join(
        f"{number:,} {code}" for code, number in all_stats.dead_letters.by_code.items()
    )
    if reasons and all_stats.dead_letters.estimated:
        reasons = f"of the newest {all_stats.dead_letters.examined:,}: {reasons}"
    return Group(table, Text(f"\nfailed: {formats.printable(reasons)}")) if reasons else table


def _read_stats(
    queue: Queue[Any], *, exact: bool
) -> tuple[QueueStats, DeadLetterStats, Pause | None]:
    return queue.stats(exact=exact), queue.dead_letters.stats(exact=exact), queue.paused()


def _as_document(
    found: QueueStats, dead_letters: DeadLetterStats, paused: Pause | None
) -> dict[str, Any]:
    counted = {**found.model_dump(), "pending": found.pending}
    return {**counted, "dead_letters": dead_letters, "paused": paused}


def _stats_view(
    session: Session, found: QueueStats, dead_letters: DeadLetterStats, paused: Pause | None
) -> Any:
    age, due = found.oldest_ready_age_sec, found.next_due_at

    def shown(name: str) -> int:
        return formats.number(getattr(found, name), estimated=name in found.estimated)

    at_least = "at least " if "oldest_ready_age_sec" in found.estimated else ""
    codes = ", ".join(f"{number:,} {code}" for code, number in dead_letters.by_code.items())
    newest = f"of the newest {dead_letters.examined:,}: " if dead_letters.estimated else ""
    notes = {
        "ready": "" if age is None else f"oldest: {at_least}{formats.seconds(age)}",
        "delayed": "" if due is None else f"next {formats.relative(due, found.at)}",
        "processing": f"{formats.figure(shown('overdue'))} overdue, to be reclaimed by the sweeper"
        if found.overdue
        else "",
        "failed": f"{newest}{codes}",
    }
    colours = {"ready": "blue", "delayed": "blue", "processing": "yellow"}
    colours |= {"done": "green", "failed": "red"}
    state = "" if paused is None else f"paused {formats.relative(paused.paused_at, found.at)}"
    if paused is not None and paused.reason:
        state += f": {formats.one_line(paused.reason)}"
    return session.out.new_table(
        [f"queue {found.queue}", "tasks", state],
        [
            [Text(name, style=colour), shown(name), notes.get(name, "")]
            for name, colour in colours.items()
        ],
    )
