"""The ``sweep`` command: run the sweeper once, or repeatedly."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from microqueue.cli import formats, metrics
from microqueue.cli.dlq_detection import detect_dlq
from microqueue.cli.exit import stop_on_signals
from microqueue.cli.options import DURATION, HooksReference, MetricsHost
from microqueue.cli.session import Session
from microqueue.errors import MicroqueueError
from microqueue.sweeper import (
    COUNTERS,
    JOBS,
    Sweeper,
    SweepReport,
    check_every,
    describe_burials,
    wait_for_next_sweep,
)


def sweep(
    session: Session,
    *,
    once: Annotated[bool, typer.Option("--once", help="Sweep once. This is the default.")] = False,
    every: Annotated[
        timedelta | None,
        typer.Option(help="Sweep until Ctrl-C; time between two sweeps: 5s.", **DURATION),
    ] = None,
    job: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOB",
            help=f"Run only this job; repeatable. One of {', '.join(JOBS)}. \\[default: all]",
        ),
    ] = None,
    lock_ttl: Annotated[
        timedelta | None,
        typer.Option(
            help="Lifetime of the sweeper's lock. After a sweeper was killed, others wait this "
            "long at most. \\[default: $MICROQUEUE_LOCK_TTL, or 5s]",
            **DURATION,
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", help="For cron: print only changes and errors."),
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="With --every: serve Prometheus metrics on this port."),
    ] = None,
    metrics_host: MetricsHost = metrics.LOCAL,
    hooks: HooksReference = None,
) -> None:
    """Recover tasks after crashes, promote due tasks, fail expired ones, delete old ones.

    Any number of sweepers may run at once.
    """
    if once and every is not None:
        raise typer.BadParameter("give --once or --every, not both.")
    if metrics_port is not None and every is None:
        raise typer.BadParameter("--metrics-port needs --every.")
    session.load_hooks(hooks)
    with session.open() as queue:
        sweeper = Sweeper(queue, queues=session.named_queues, jobs=job or JOBS, lock_ttl=lock_ttl)
        if every is None:
            detect_dlq(queue)
            report = sweeper.run_once()
            print_sweep(session, report, quiet=quiet)
            if not report.ok:
                raise typer.Exit(1)
            return
        pause = check_every(every)
        with (
            metrics.serve_sweep_metrics(metrics_host, metrics_port, queue) as record,
            stop_on_signals() as stop,
        ):
            while not stop.is_set():
                try:
                    detect_dlq(queue)  # Each time, because a service may have created it since.
                    report = sweeper.run_once()
                except MicroqueueError as exc:  # The server may be back at the next sweep.
                    session.out.error(exc)
                else:
                    print_sweep(session, report, quiet=quiet, stream=True)
                    if record is not None:
                        record(report)
                wait_for_next_sweep(sweeper, pause, stop, on_error=session.out.error)


def print_sweep(
    session: Session, report: SweepReport, *, quiet: bool = False, stream: bool = False
) -> None:
    """Print a report; with ``quiet``, only if there were changes or errors."""
    if quiet and not report.active:
        return
    if session.out.as_json:
        session.out.json(report, stream=stream)
        return
    session.out.print(describe_sweep(report, session.scope))
    for line in describe_burials(report.buried_tasks):
        session.out.print(f"  {line}")
    for name, message in report.errors.items():
        session.out.error(MicroqueueError(f"{name}: {message}"))


def describe_sweep(report: SweepReport, scope: str) -> str:
    """Return one sentence about a sweep and its queues."""
    if report.skipped:
        return "Skipped: another sweeper is running."
    done = [f"{getattr(report, name):,} {name}" for name in COUNTERS if getattr(report, name)]
    end = "; another sweeper took over" if report.taken_over else ""
    changes = ", ".join(done) or "no changes"
    return f"Swept in {formats.seconds(report.took_sec)}, {scope}: {changes}{end}."
