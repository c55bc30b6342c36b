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

from microqueue.cli import formats, tasks
from microqueue.cli.exit import stop_on_signals
from microqueue.cli.options import DURATION, EXACT_HELP
from microqueue.cli.output import Cell
from microqueue.cli.session import Session
from microqueue.core import core_of
from microqueue.dlq import DeadLetterStats
from microqueue.insights import Insights
from microqueue.operations.diagnostics import every_queue
from microqueue.operations.pauses import list_paused
from microqueue.queue import Queue
from microqueue.reports import Pause, QueueStats
from microqueue.sweeper import (
    check_every,
)


def pause(
    session: Session,
    *,
    reason: Annotated[str | None, typer.Option(help="Why, for those who wonder.")] = None,
) -> None:
    """Stop deliveries from a queue, for all workers; what runs goes on."""
    with session.connect() as queue:
        found = queue.pause(reason=reason)
        if session.out.as_json:
            session.out.json(found)
            return
        since = formats.since(found.paused_at, queue.now())
        session.out.say(
            f"Queue {queue.name!r} is paused (since {since}). "
            f"`{resume_command(session, queue.name)}` ends it."
        )


def resume_command(session: Session, queue: str) -> str:
    """Write the command that ends a pause, as it is typed."""
    return session.with_collection(f"microqueue resume -q {shlex.quote(queue)}")


def resume(session: Session) -> None:
    """Deliver from a queue again."""
    with session.connect() as queue:
        was_paused = queue.resume()
        if session.out.as_json:
            session.out.json({"queue": queue.name, "was_paused": was_paused})
        else:
            state = "goes on" if was_paused else "was not paused"
            session.out.say(f"Queue {queue.name!r} {state}.")


COUNTS = ("ready", "delayed", "processing", "overdue", "done", "failed")


def stats(
    session: Session,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    every: Annotated[
        timedelta | None, typer.Option(help="With --watch, the pause; else 1s.", **DURATION)
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help=EXACT_HELP)] = False,
) -> None:
    """Show how many tasks wait, run, are done and failed, and why they failed.

    Of all queues, or of the one given with -q. A number with a ~ is an estimate: there are more
    than MICROQUEUE_COUNT_LIMIT.
    """
    if every is not None and not watch:
        raise typer.BadParameter("--every is of use with --watch only.")
    pause = check_every(timedelta(seconds=1) if every is None else every)
    with session.connect() as queue:
        if not watch:
            _print_stats(session, queue, exact=exact)
            return
        with stop_on_signals() as stop:
            _watch_stats(session, queue, stop, pause, exact=exact)


def _print_stats(session: Session, queue: Queue[Any], *, exact: bool) -> None:
    if session.all_queues:
        every = _read_all_stats(queue, exact=exact)
        if session.out.as_json:
            session.out.json(_all_as_document(every))
        else:
            session.out.console.print(_all_stats_view(session, every))
        return
    found, letters, pause = _read_stats(queue, exact=exact)
    if session.out.as_json:
        session.out.json(_as_document(found, letters, pause))
        return
    session.out.console.print(_stats_view(session, found, letters, pause))
    if not found.pending + found.processing + found.done + found.failed:
        session.out.say(f"\nThe queue is empty.{tasks.others(queue)}")


def _watch_stats(
    session: Session, queue: Queue[Any], stop: threading.Event, pause: float, *, exact: bool
) -> None:
    if session.out.for_people:
        with Live(console=session.out.console, auto_refresh=False) as live:
            while not stop.is_set():
                if session.all_queues:
                    view = _all_stats_view(session, _read_all_stats(queue, exact=exact))
                else:
                    view = _stats_view(session, *_read_stats(queue, exact=exact))
                live.update(Group(view, Text("\nCtrl-C ends this.", style="dim")), refresh=True)
                stop.wait(pause)
        return
    while not stop.is_set():
        if session.all_queues:
            every = _read_all_stats(queue, exact=exact)
            if session.out.as_json:
                session.out.json(_all_as_document(every), stream=True)
            for one in every.queues:
                session.out.say(_stats_line(one, paused=one.queue in every.pauses))
        else:
            found, letters, paused = _read_stats(queue, exact=exact)
            if session.out.as_json:
                session.out.json(_as_document(found, letters, paused), stream=True)
            session.out.say(_stats_line(found, paused=paused is not None))
        stop.wait(pause)


def _stats_line(found: QueueStats, *, paused: bool) -> str:
    counts = [
        f"{name}={'~' if name in found.estimated else ''}{getattr(found, name)}" for name in COUNTS
    ]
    state = " paused" if paused else ""
    return f"{found.at:%H:%M:%S} queue={found.queue} {' '.join(counts)}{state}"


@dataclass(frozen=True)
class AllStats:
    """The counts of every queue, the dead letters of all, and the pauses by queue."""

    at: datetime
    queues: list[QueueStats]
    letters: DeadLetterStats
    pauses: dict[str, Pause]


def _read_all_stats(queue: Queue[Any], *, exact: bool) -> AllStats:
    pauses = {
        one.queue: one for one in core_of(queue).run(list_paused(core_of(queue).collections.name))
    }
    names = sorted({*core_of(queue).run(every_queue(queue.settings)), *pauses})
    return AllStats(
        at=queue.now(),
        queues=Insights(queue).stats(names, exact=exact) if names else [],
        letters=queue.dead_letters.all_queues.stats(exact=exact),
        pauses=pauses,
    )


def _all_as_document(every: AllStats) -> dict[str, Any]:
    """Write the sums of all queues, named as for one, and each queue's own counts."""
    ages = [one.oldest_ready_age_sec for one in every.queues]
    dues = [one.next_due_at for one in every.queues]
    return {
        "queue": None,
        "at": every.at,
        **{name: sum(getattr(one, name) for one in every.queues) for name in (*COUNTS, "pending")},
        "oldest_ready_age_sec": max((one for one in ages if one is not None), default=None),
        "next_due_at": min((one for one in dues if one is not None), default=None),
        "estimated": sorted({name for one in every.queues for name in one.estimated}),
        "dead_letters": every.letters,
        "queues": [
            {**one.model_dump(), "pending": one.pending, "paused": every.pauses.get(one.queue)}
            for one in every.queues
        ],
    }


def _total(queues: Sequence[QueueStats], name: str) -> int:
    """Add up a count of queues; with one estimate among them the sum is an estimate."""
    return formats.number(
        sum(getattr(one, name) for one in queues),
        estimated=any(name in one.estimated for one in queues),
    )


def _all_stats_view(session: Session, every: AllStats) -> Any:
    if not every.queues:
        return Text("There are no tasks in any queue.")
    if len(every.queues) == 1:
        (only,) = every.queues
        return _stats_view(session, only, every.letters, every.pauses.get(only.queue))
    rows: list[list[Cell]] = []
    for one in every.queues:
        paused = every.pauses.get(one.queue)
        state = "" if paused is None else f"paused {formats.since(paused.paused_at, every.at)}"
        rows.append([one.queue, *(_total([one], name) for name in COUNTS), state])
    sums = (_total(every.queues, name) for name in COUNTS)
    rows.append([Text("all queues", style="bold"), *sums, ""])
    table = session.out.new_table(["queue", *COUNTS, ""], rows)
    reasons = ", ".join(f"{number:,} {code}" for code, number in every.letters.by_code.items())
    if reasons and every.letters.estimated:
        reasons = f"of the newest {every.letters.examined:,}: {reasons}"
    return Group(table, Text(f"\nfailed: {formats.printable(reasons)}")) if reasons else table


def _read_stats(
    queue: Queue[Any], *, exact: bool
) -> tuple[QueueStats, DeadLetterStats, Pause | None]:
    return queue.stats(exact=exact), queue.dead_letters.stats(exact=exact), queue.paused()


def _as_document(
    found: QueueStats, letters: DeadLetterStats, paused: Pause | None
) -> dict[str, Any]:
    counted = {**found.model_dump(), "pending": found.pending}
    return {**counted, "dead_letters": letters, "paused": paused}


def _stats_view(
    session: Session, found: QueueStats, letters: DeadLetterStats, paused: Pause | None
) -> Any:
    age, due = found.oldest_ready_age_sec, found.next_due_at

    def shown(name: str) -> int:
        return formats.number(getattr(found, name), estimated=name in found.estimated)

    at_least = "at least " if "oldest_ready_age_sec" in found.estimated else ""
    codes = ", ".join(f"{number:,} {code}" for code, number in letters.by_code.items())
    notes = {
        "ready": "" if age is None else f"the oldest for {at_least}{formats.seconds(age)}",
        "delayed": "" if due is None else f"the next {formats.since(due, found.at)}",
        "processing": f"{formats.figure(shown('overdue'))} overdue: the sweeper takes them back"
        if found.overdue
        else "",
        "failed": f"of the newest {letters.examined:,}: {codes}" if letters.estimated else codes,
    }
    colours = {"ready": "blue", "delayed": "blue", "processing": "yellow"}
    colours |= {"done": "green", "failed": "red"}
    state = "" if paused is None else f"paused {formats.since(paused.paused_at, found.at)}"
    if paused is not None and paused.reason:
        state += f": {formats.one_line(paused.reason)}"
    return session.out.new_table(
        [f"queue {found.queue}", "tasks", state],
        [
            [Text(name, style=colour), shown(name), notes.get(name, "")]
            for name, colour in colours.items()
        ],
    )
