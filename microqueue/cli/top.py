"""The ``top`` command: a live view of queues, rates, workers and running tasks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from microqueue.cli import formats
from microqueue.cli.exit import stop_on_signals
from microqueue.cli.options import DURATION, Exact, renamed
from microqueue.cli.output import Cell
from microqueue.cli.session import Session
from microqueue.insights import (
    MOST_RUNNING,
    Insights,
    MinuteCounts,
    Overview,
    QueueOverview,
    RunningTask,
)
from microqueue.masking import Masker
from microqueue.model import changed
from microqueue.operations.stats import MINUTES
from microqueue.sweeper import COUNTERS, SweepReport, check_every, describe_burials

RATE_MINUTES = 5
RUNNING_SHOWN = 15
WORKERS_SHOWN = 15
RATE_NAMES = ("done_per_minute", "failed_per_minute")


def top(
    session: Session,
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Print once. This is the default without a terminal.")
    ] = False,
    every: Annotated[
        timedelta,
        typer.Option(
            help="Time between two refreshes. \\[default: 2s]", show_default=False, **DURATION
        ),
    ] = timedelta(seconds=2),
    interval: Annotated[timedelta | None, renamed("--interval", "--every", **DURATION)] = None,
    exact: Exact = False,
) -> None:
    """Live view of queues, rates, workers and running tasks. Read-only.

    Numbers with a ~ are estimates, used above $MICROQUEUE_COUNT_LIMIT tasks; see --exact.
    """
    pause = check_every(every if interval is None else interval)
    with session.connect() as queue:
        insights = Insights(queue)
        if once or not session.out.for_people:
            _print(session, _read_overview(session, insights, exact=exact))
            return
        with stop_on_signals() as stop:
            _watch(session, insights, stop, pause, exact=exact)


def _read_overview(session: Session, insights: Insights, *, exact: bool) -> Overview:
    """Return an overview of the given queue, or of all queues."""
    overview, wanted = insights.overview(exact=exact), session.options.queue
    if wanted is None:
        return overview
    minutes = overview.minutes
    counts = {
        name: {wanted: row[wanted]} if wanted in row else {}
        for name, row in (("done", minutes.done), ("failed", minutes.failed))
    }
    return changed(
        overview,
        queues=[one for one in overview.queues if one.queue == wanted],
        minutes=changed(minutes, **counts),
        workers=[one for one in overview.workers if wanted in one.queues],
        # Read separately: the overview lists a limited number, perhaps only of other queues.
        running=insights.running(wanted, limit=MOST_RUNNING),
    )


def _print(session: Session, overview: Overview) -> None:
    if session.out.as_json:
        session.out.json(_as_document(overview))
    else:
        session.out.console.print(_view(session, overview))


def _watch(
    session: Session, insights: Insights, stop: threading.Event, pause: float, *, exact: bool
) -> None:
    with Live(console=session.out.console, auto_refresh=False, screen=True) as live:
        while not stop.is_set():
            view = _view(session, _read_overview(session, insights, exact=exact))
            live.update(Group(view, Text("\nPress Ctrl-C to quit.", style="dim")), refresh=True)
            stop.wait(pause)


def _as_document(overview: Overview) -> dict[str, Any]:
    queues = [
        {**one.model_dump(), **dict(zip(RATE_NAMES, _rates(overview, one.queue), strict=True))}
        for one in overview.queues
    ]
    fields = {name: getattr(overview, name) for name in Overview.model_fields}
    return {**fields, "queues": queues, "running": [_masked(one) for one in overview.running]}


def _masked(running: RunningTask) -> RunningTask:
    """Mask secrets in the progress message, as the dashboard does."""
    if running.progress is None:
        return running
    message = Masker().mask(running.progress.message)
    return changed(running, progress=changed(running.progress, message=message))


def _rates(overview: Overview, queue: str) -> tuple[float, float]:
    """Return tasks done and failed per minute, averaged over the last full minutes."""
    minutes: MinuteCounts = overview.minutes
    rows = (minutes.done.get(queue, ()), minutes.failed.get(queue, ()))
    done, failed = (sum(row[-RATE_MINUTES - 1 : -1]) / RATE_MINUTES for row in rows)
    return done, failed


def _view(session: Session, overview: Overview) -> RenderableType:
    queues = session.out.new_table(
        [
            "queue",
            "ready",
            "oldest",
            "delayed",
            "running",
            "overdue",
            "done 1h",
            "done/min",
            "failed/min",
            "dead",
        ],
        [_queue_row(overview, one) for one in overview.queues],
    )
    sweep = Text(f"\n{_sweep_line(overview.last_sweep, overview.at)}", style="dim")
    return Group(queues, *_workers(session, overview), *_running(session, overview), sweep)


def _queue_row(overview: Overview, one: QueueOverview) -> list[Cell]:
    done, failed = _rates(overview, one.queue)
    age = one.oldest_ready_age_sec
    minutes = overview.minutes

    def shown(field: str) -> int:
        return formats.number(getattr(one, field), estimated=field in one.estimated)

    def red(field: str) -> Text:
        return Text(formats.figure(shown(field)), style="red" if shown(field) else "")

    name = Text(one.queue, style="bold")
    return [
        name.append(" (paused)", style="yellow") if one.paused else name,
        shown("ready"),
        "-" if age is None else _mark(one.estimated, "oldest_ready_age_sec", formats.seconds(age)),
        shown("delayed"),
        shown("processing"),
        red("overdue"),
        shown("done_last_hour"),
        f"{'~' if _is_rate_estimated(minutes.done_estimated) else ''}{done:,.1f}",
        f"{'~' if _is_rate_estimated(minutes.failed_estimated) else ''}{failed:,.1f}",
        red("failed"),
    ]


def _mark(estimated: Sequence[str], field: str, text: str) -> str:
    """Append a + to an age that is a lower bound."""
    return f"{text}+" if field in estimated else text


def _is_rate_estimated(estimated: Sequence[int]) -> bool:
    """Return whether a rate includes a minute that is an estimate."""
    return any(MINUTES - RATE_MINUTES - 1 <= place < MINUTES - 1 for place in estimated)


def _workers(session: Session, overview: Overview) -> list[RenderableType]:
    now = overview.at
    rows: list[list[Cell]] = []
    for one in overview.workers[:WORKERS_SHOWN]:
        busy = f"{len(one.holds)} of {one.concurrency}"
        started = formats.relative(one.started_at, now)
        handled = int(one.handled or 0)
        heartbeat = Text(formats.relative(one.heartbeat_at, now), style="green")
        if not one.alive:
            heartbeat = Text(f"{heartbeat.plain} (gone)", style="red")
        rows.append([one.id, ", ".join(one.queues), busy, handled, started, heartbeat])
    heading = _section("Workers", len(overview.workers), len(rows))
    if not rows:
        return [heading]
    columns = ["worker", "queues", "busy", "handled", "started", "last heartbeat"]
    return [heading, session.out.new_table(columns, rows)]


def _running(session: Session, overview: Overview) -> list[RenderableType]:
    now = overview.at
    total = formats.number(
        sum(one.processing for one in overview.queues),
        estimated=any("processing" in one.estimated for one in overview.queues),
    )
    rows: list[list[Cell]] = []
    for one in overview.running[:RUNNING_SHOWN]:
        lasted = "-" if one.started_at is None else _elapsed(one.started_at, now)
        ends = Text("overdue", style="red") if one.overdue else _left(one.lease_expires_at, now)
        attempt = f"{one.attempt} of {one.max_attempts}"
        rows.append(
            [str(one.id), one.queue, one.name or "-", one.worker_id or "-", attempt, lasted, ends]
        )
    heading = _section("Running", total, len(rows))
    if not rows:
        return [heading]
    columns = ["task", "queue", "name", "worker", "attempt", "running for", "lease"]
    return [heading, session.out.new_table(columns, rows)]


def _section(name: str, total: int, shown: int) -> Text:
    text = Text(f"\n{name}: {formats.figure(total)}", style="bold")
    return text.append(f" ({shown} shown)", style="dim") if shown < total else text


def _elapsed(since: datetime, now: datetime) -> str:
    return formats.seconds(max((now - since).total_seconds(), 0.0))


def _left(until: datetime | None, now: datetime) -> str:
    return "-" if until is None else f"{_elapsed(now, until)} left"


def _sweep_line(report: SweepReport | None, now: datetime) -> str:
    if report is None:
        return "No sweep yet: run `microqueue sweep --every 5s`."
    counts = [f"{getattr(report, name):,} {name}" for name in COUNTERS if getattr(report, name)]
    changes = ", ".join(counts) or "no changes"
    buried = "".join(f"; {formats.one_line(one)}" for one in describe_burials(report.buried_tasks))
    return (
        f"Last sweep {formats.relative(report.at, now)} by {report.sweeper_id}: {changes}{buried}."
    )
