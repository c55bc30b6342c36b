"""Commands that maintain a collection: sweep, indexes, doctor."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any

import typer
from rich.text import Text

from microqueue.cli import formats, metrics, values
from microqueue.cli.dlq_detection import adopt
from microqueue.cli.exit import stop_on_signals
from microqueue.cli.options import DURATION
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
    once: Annotated[bool, typer.Option("--once", help="Sweep once; this is the default.")] = False,
    every: Annotated[
        timedelta | None,
        typer.Option(help="Sweep again and again, with this pause: 5, 30s.", **DURATION),
    ] = None,
    job: Annotated[
        list[str] | None, typer.Option(help=f"Do only this; repeatable. One of {', '.join(JOBS)}.")
    ] = None,
    lock_ttl: Annotated[
        timedelta | None,
        typer.Option(
            help="How long the sweeper's lock lives unless renewed; a sweeper that was killed "
            "delays others by no more. Else MICROQUEUE_LOCK_TTL, else 5s.",
            **DURATION,
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
    ] = metrics.LOCAL,
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
            metrics.sweep_metrics(metrics_host, metrics_port, queue) as count,
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
        former = _kept_sec(core_of(queue).run(list_indexes()))
        created = queue.ensure_indexes(adjust=bool(told))
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
