"""The command names: counts, failure rates and times by the names of tasks."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from microqueue.cli import formats
from microqueue.cli.options import DURATION, Exact
from microqueue.cli.output import Cell
from microqueue.cli.session import Session
from microqueue.insights import Insights, NameList, NameStats

UNNAMED = "(no name)"
COUNTS = ("waiting", "running", "done", "failed")
TIMES = ("wait_p50", "wait_p95", "run_p50", "run_p95")


def names(
    session: Session,
    *,
    since: Annotated[
        timedelta | None,
        typer.Option(
            help="Count and measure what ended in this period, up to now. \\[default: 1h]",
            **DURATION,
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", help="Number of names to show; the largest go first.")
    ] = 50,
    exact: Exact = False,
) -> None:
    """Count tasks by name, with failure rates, and median and p95 of wait and run times.

    Numbers with a ~ are estimates, used above $MICROQUEUE_COUNT_LIMIT tasks; see --exact.
    """
    period = timedelta(hours=1) if since is None else since
    with session.connect() as queue:
        chosen = None if session.all_queues else queue.name
        found = Insights(queue).by_name(chosen, since=period, limit=limit, exact=exact)
        queues = session.queues(queue)
    if session.out.as_json:
        session.out.json({**dict(found), "queues": queues})
        return
    if not found.names:
        where = "any queue" if session.all_queues else f"queue {session.queue_name!r}"
        session.out.print(f"No tasks in {where}.")
        return
    session.note_queues(queues)
    _print(session, found, period)


def _print(session: Session, found: NameList, period: timedelta) -> None:
    columns = ["name", *COUNTS, "failure rate", *(name.replace("_", " ") for name in TIMES)]
    session.out.table(columns, [_row(one) for one in found.names])
    lasted = formats.seconds(period.total_seconds())
    session.out.print(f"\nDone, failed and times are of the last {lasted}.", "dim")
    if found.total > len(found.names):
        session.out.print(f"{len(found.names):,} of {found.total:,} names: see --limit.", "dim")


def _row(one: NameStats) -> list[Cell]:
    return [
        UNNAMED if one.name is None else formats.one_line(one.name),
        *(formats.number(getattr(one, name), estimated=name in one.estimated) for name in COUNTS),
        _rate(one),
        *(_time(getattr(one, name)) for name in TIMES),
    ]


def _rate(one: NameStats) -> str:
    if one.failure_rate is None:
        return "-"
    mark = "~" if "failure_rate" in one.estimated else ""
    return f"{mark}{one.failure_rate:.1%}"


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else formats.seconds(seconds)
