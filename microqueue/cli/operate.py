"""Commands that run and watch things: sweep, stats, indexes, doctor."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from microqueue.cli import formats, serving, tasks, values
from microqueue.cli.adopting import adopt
from microqueue.cli.output import Cell
from microqueue.cli.session import Session
from microqueue.cli.signals import stop_on_signals
from microqueue.dlq import DeadLetterStats
from microqueue.doctor import Check, describe_expiry, examine
from microqueue.errors import MicroqueueError
from microqueue.insights import Insights
from microqueue.operations.diagnostics import every_queue, explain_pop, list_indexes
from microqueue.operations.indexes import NEVER_SEC
from microqueue.operations.pauses import list_paused
from microqueue.queue import Queue
from microqueue.reports import Pause, QueueStats
from microqueue.sweeper import (
    COUNTERS,
    JOBS,
    Sweeper,
    SweepReport,
    check_every,
    describe_burials,
)

COUNTS = ("ready", "delayed", "processing", "overdue", "done", "failed")


def sweep(
    session: Session,
    *,
    once: Annotated[bool, typer.Option("--once", help="Sweep once; this is the default.")] = False,
    every: Annotated[
        timedelta | None,
        typer.Option(help="Sweep again and again, with this pause: 5, 30s.", **tasks.DURATION),
    ] = None,
    job: Annotated[
        list[str] | None, typer.Option(help=f"Do only this; repeatable. One of {', '.join(JOBS)}.")
    ] = None,
    lock_ttl: Annotated[
        timedelta | None,
        typer.Option(
            help="How long the sweeper's lock lives unless renewed; a sweeper that was killed "
            "delays others by no more. Else MICROQUEUE_LOCK_TTL, else 5s.",
            **tasks.DURATION,
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", help="For cron: print only if something was done, or failed."),
    ] = False,
    metrics_port: Annotated[
        int | None, typer.Option(help="With --every, serve Prometheus metrics here.")
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="The address on which metrics are served.")
    ] = serving.LOCAL,
) -> None:
    """Heal what crashes left behind, in all queues, or in the one given with -q."""
    if once and every is not None:
        raise typer.BadParameter("give --once or --every, not both.")
    if metrics_port is not None and every is None:
        raise typer.BadParameter("--metrics-port is of use with --every only.")
    queues = None if session.options.queue is None else [session.options.queue]
    with session.open() as queue:
        sweeper = Sweeper(queue, queues=queues, jobs=job or JOBS, lock_ttl=lock_ttl)
        if every is None:
            adopt(queue)
            report = sweeper.run_once()
            print_sweep(session, report, quiet=quiet)
            if not report.ok:
                raise typer.Exit(1)
            return
        pause = check_every(every)
        with (
            serving.sweep_metrics(metrics_host, metrics_port, queue) as count,
            stop_on_signals() as stop,
        ):
            while not stop.is_set():
                try:
                    adopt(queue)  # Each time: a service may have started meanwhile.
                    report = sweeper.run_once()
                except MicroqueueError as exc:  # The next sweep may find the server back.
                    session.out.error(exc)
                else:
                    print_sweep(session, report, quiet=quiet, stream=True)
                    if count is not None:
                        count(report)
                stop.wait(pause)


def print_sweep(
    session: Session, report: SweepReport, *, quiet: bool = False, stream: bool = False
) -> None:
    """Print what a sweep did; with ``quiet``, only if it did something, or something failed."""
    if quiet and not report.active:
        return
    if session.out.as_json:
        session.out.json(report, stream=stream)
        return
    session.out.say(describe_sweep(report, session.scope))
    for line in describe_burials(report.buried_tasks):
        session.out.say(f"  {line}")
    for name, message in report.errors.items():
        session.out.error(MicroqueueError(f"{name}: {message}"))


def describe_sweep(report: SweepReport, scope: str) -> str:
    """Describe what a sweep did, and in which queues, in one sentence."""
    if report.skipped:
        return "Skipped: another sweeper is at it."
    done = [f"{getattr(report, name):,} {name}" for name in COUNTERS if getattr(report, name)]
    end = "; another sweeper took over" if report.taken_over else ""
    what = ", ".join(done) or "nothing to do"
    return f"Swept in {formats.seconds(report.took_sec)}, {scope}: {what}{end}."


def stats(
    session: Session,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    every: Annotated[
        timedelta | None, typer.Option(help="With --watch, the pause; else 1s.", **tasks.DURATION)
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help=tasks.EXACT_HELP)] = False,
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
    pauses = {one.queue: one for one in queue.run(list_paused(queue.collections.name))}
    names = sorted({*queue.run(every_queue(queue.settings)), *pauses})
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


def indexes(
    session: Session,
    *,
    retention: Annotated[
        timedelta | None,
        typer.Option(
            help="From now on, keep done tasks so long: 30d, or forever.",
            parser=values.read_retention,
            metavar="DURATION",
        ),
    ] = None,
) -> None:
    """Create missing indexes, list them, and show which one a pop uses.

    How long done tasks are kept changes only with --retention.
    """
    told: dict[str, Any] = {} if retention is None else {"retention": retention}
    with session.connect(**told) as queue:
        former = _kept_sec(queue.run(list_indexes()))
        created = queue.ensure_indexes(adjust=bool(told))
        found = queue.run(list_indexes())
        used = queue.run(explain_pop(queue.name, queue.collections.name))
    listed: list[dict[str, Any]] = [
        {
            "name": name,
            "keys": dict(index["key"]),
            "unique": bool(index.get("unique")),
            "only": index.get("partialFilterExpression"),
            "expire_after_sec": index.get("expireAfterSeconds"),
            "created": name in created,
        }
        for name, index in found.items()
    ]
    if session.out.as_json:
        document = {"created": created, "indexes": listed, "pop_uses": used}
        session.out.json({**document, **_retention(former, _kept_sec(found))})
        return
    session.out.table(
        ["index", "keys", "only tasks with"],
        [
            [
                Text(one["name"], style="green" if one["created"] else ""),
                ", ".join(f"{'-' if order < 0 else ''}{key}" for key, order in one["keys"].items()),
                formats.to_json(one["only"]) if one["only"] else "-",
            ]
            for one in listed
        ],
        keys="fold",
        only_tasks_with="fold",
    )
    session.out.say(f"\nCreated: {', '.join(created)}." if created else "\nAll were there.")
    session.out.say(f"A pop uses: {', '.join(used)}.")
    kept = _kept_sec(found)
    before = "" if former in {None, kept} else f"; until now, {describe_expiry(former)}"
    session.out.say(f"Done tasks are kept {describe_expiry(kept)}{before}.")


def _kept_sec(found: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Read how long done tasks are kept from the index that says so, if it is there."""
    seconds: int | None = found.get("finished", {}).get("expireAfterSeconds")
    return seconds


def _retention(former: int | None, kept: int | None) -> dict[str, int | None]:
    """Tell for programs how long done tasks are kept, and were if that is new; null: for good."""
    told = {"retention_sec": kept}
    if former not in {None, kept}:
        told["former_retention_sec"] = former
    return {name: None if value == NEVER_SEC else value for name, value in told.items()}


def doctor(session: Session) -> None:
    """Examine the server, the clock, the indexes, the sweeper and the writes; changes nothing."""
    with session.open() as queue:
        checks = examine(queue)
    healthy = all(check.ok for check in checks)
    if session.out.as_json:
        session.out.json({"ok": healthy, "checks": checks})
    else:
        for check in checks:
            session.out.console.print(_verdict(check), soft_wrap=True)
    if not healthy:
        raise typer.Exit(1)


def _verdict(check: Check) -> Text:
    mark, style = ("✓", "green") if check.ok else ("✗", "red")
    if check.ok and check.advice:
        mark, style = "!", "yellow"
    text = Text(f"{mark} ", style=style).append(f"{check.name}: ", style="bold")
    text.append(formats.printable(check.detail), style="")
    return text.append(f"\n  {check.advice}", style=style) if check.advice else text
