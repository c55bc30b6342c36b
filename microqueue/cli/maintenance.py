"""Commands that maintain a collection: sweep, indexes, doctor."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any

import typer
from rich.text import Text

from microqueue.cli import formats, metrics, values
from microqueue.cli.dlq_detection import detect_dlq
from microqueue.cli.exit import stop_on_signals
from microqueue.cli.options import DURATION, MetricsHost
from microqueue.cli.session import Session
from microqueue.core import core_of
from microqueue.doctor import Check, describe_expiry, examine
from microqueue.errors import MicroqueueError
from microqueue.operations.diagnostics import explain_pop, list_indexes
from microqueue.operations.indexes import NEVER_SEC
from microqueue.sweeper import (
    COUNTERS,
    JOBS,
    Sweeper,
    SweepReport,
    check_every,
    describe_burials,
)


def sweep(
    session: Session,
    *,
    once: Annotated[bool, typer.Option("--once", help="Sweep once. This is the default.")] = False,
    every: Annotated[
        timedelta | None,
        typer.Option(help="Sweep repeatedly, with this pause: 5s.", **DURATION),
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
) -> None:
    """Recover tasks after crashes, promote due tasks, fail expired ones, delete old ones.

    Any number of sweepers may run at once.
    """
    if once and every is not None:
        raise typer.BadParameter("give --once or --every, not both.")
    if metrics_port is not None and every is None:
        raise typer.BadParameter("--metrics-port needs --every.")
    queues = None if session.options.queue is None else [session.options.queue]
    with session.open() as queue:
        sweeper = Sweeper(queue, queues=queues, jobs=job or JOBS, lock_ttl=lock_ttl)
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
                stop.wait(pause)


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


def indexes(
    session: Session,
    *,
    retention: Annotated[
        timedelta | None,
        typer.Option(
            help="Change how long done tasks are kept: 30d, or forever. \\[default: unchanged]",
            parser=values.read_retention,
            metavar="DURATION",
        ),
    ] = None,
) -> None:
    """Create missing indexes, list all, and show which one a claim uses."""
    changed: dict[str, Any] = {} if retention is None else {"retention": retention}
    with session.connect(**changed) as queue:
        former = _kept_sec(core_of(queue).run(list_indexes()))
        created = queue.ensure_indexes(adjust=bool(changed))
        found = core_of(queue).run(list_indexes())
        used = core_of(queue).run(explain_pop(queue.name, core_of(queue).collections.name))
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
        ["index", "keys", "filter"],
        [
            [
                Text(one["name"], style="green" if one["created"] else ""),
                ", ".join(f"{'-' if order < 0 else ''}{key}" for key, order in one["keys"].items()),
                formats.to_json(one["only"]) if one["only"] else "-",
            ]
            for one in listed
        ],
        keys="fold",
        filter="fold",
    )
    session.out.print(f"\nCreated: {', '.join(created)}." if created else "\nAll indexes exist.")
    session.out.print(f"A claim uses: {', '.join(used)}.")
    kept = _kept_sec(found)
    before = "" if former in {None, kept} else f" (before: {describe_expiry(former)})"
    session.out.print(f"Done tasks are kept {describe_expiry(kept)}{before}.")


def _kept_sec(found: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Return the retention of done tasks from its TTL index, if that exists."""
    seconds: int | None = found.get("finished", {}).get("expireAfterSeconds")
    return seconds


def _retention(former: int | None, kept: int | None) -> dict[str, int | None]:
    """Return the JSON fields of the retention, and the former one if it changed; null: forever."""
    fields = {"retention_sec": kept}
    if former not in {None, kept}:
        fields["former_retention_sec"] = former
    return {name: None if value == NEVER_SEC else value for name, value in fields.items()}


def doctor(session: Session) -> None:
    """Check the server, clock, indexes, sweeper and write concern. Read-only.

    The exit status is 1 if a check fails.
    """
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
