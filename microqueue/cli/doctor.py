"""The ``doctor`` command: check the server and the collection, and repair documents."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from microqueue.cli import formats, prompts
from microqueue.cli.options import HooksReference, Yes
from microqueue.cli.session import Session
from microqueue.doctor import Check, examine
from microqueue.repair import RepairReport, repair

EVERY = 20
"""After how many parts the progress is printed."""


def doctor(
    session: Session,
    *,
    mend: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Find documents of all queues that no healthy run makes, instead of the checks.",
        ),
    ] = False,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="With --repair: repair them. Without it, only show them."),
    ] = False,
    yes: Yes = False,
    hooks: HooksReference = None,
) -> None:
    """Check the server, clock, schema, indexes, retention, sweeper, documents and write concern.

    It is read-only, unless --repair --apply is given. The exit status is 1 if a check fails, or if
    a malformed document is left.
    """
    session.load_hooks(hooks)
    if mend:
        _repair(session, apply=apply, yes=yes)
        return
    if apply:
        raise typer.BadParameter("--apply needs --repair.")
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


def _repair(session: Session, *, apply: bool, yes: bool) -> None:
    session.reject_queue("a repair is for all queues of the collection")
    if apply and not yes:
        prompts.check_answerable(otherwise="leave --apply out to look first")
    with session.connect() as queue:
        parts = 0

        def progress(name: str, malformed: int) -> None:
            nonlocal parts
            parts += 1
            if parts % EVERY == 0:
                session.out.note(f"{name}: part {parts:,}; {malformed:,} malformed documents")

        if apply and not yes:
            report = repair(queue, on_part=progress)
            if report.documents:
                prompts.confirm(f"Repair {_documents(report.documents)} of all queues?")
        report = repair(queue, apply=apply, on_part=progress)
    if session.out.as_json:
        session.out.json({**dict(report), "clean": report.clean})
    else:
        _print(session, report)
    if not report.clean:
        raise typer.Exit(1)


def _print(session: Session, report: RepairReport) -> None:
    out = session.out
    for one in report.rules:
        ids = formats.listed([str(task_id) for task_id in one.ids])
        out.print(f"{one.rule}: {_documents(one.found)} of {one.collection}: {ids}")
        out.print(f"  {one.wrong}", "dim")
        left = f"; {one.left:,} left" if one.left else ""
        out.print(
            f"  {f'{one.repaired:,} repaired{left}: ' if report.applied else ''}{one.remedy}", "dim"
        )
    if report.unread:
        out.print(f"Not read or not changed, for lack of rights: {', '.join(report.unread)}.")
    if not report.documents:
        out.print(
            "The other collections have no malformed documents."
            if report.unread
            else "No malformed documents."
        )
    elif report.applied:
        repaired = report.documents - report.left
        left = f"; {_documents(report.left)} left" if report.left else ""
        out.print(f"Repaired {_documents(repaired)}{left}.")
    else:
        command = session.with_collection("microqueue doctor --repair")
        out.print(
            f"Found {_documents(report.documents)}. Nothing was changed. To repair what can be "
            f"repaired, run: {command} --apply"
        )


def _documents(count: int) -> str:
    return f"{count:,} malformed document{'' if count == 1 else 's'}"
