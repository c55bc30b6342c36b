"""The command that deletes tasks."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from microqueue.cli import asking, formats, tasks
from microqueue.cli.dead_letters import DryRun, Yes
from microqueue.cli.session import Session
from microqueue.task import TaskStatus


def purge(
    session: Session,
    *,
    status: Annotated[
        TaskStatus, typer.Option("--status", help="Tasks that stand like this; not processing.")
    ] = TaskStatus.DONE,
    older_than: Annotated[
        timedelta | None,
        typer.Option(help="Only those that have not changed for so long: 7d.", **tasks.DURATION),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete tasks of one status for good; those that are done, unless told otherwise."""
    with session.connect() as queue:
        if not (dry_run or yes):
            asking.check_answerable()
        purged = 0
        if yes and not dry_run:  # Nobody wants to know how many, before.
            matched = purged = queue.purge(status=status, older_than=older_than)
        else:
            matched = queue.purge(status=status, older_than=older_than, dry_run=True)
        described = f"{formats.count(matched, f'{status.value} task')} of queue {queue.name!r}"
        if matched and not (dry_run or yes):
            asking.ask(f"Purge for good: {described}?")
            purged = queue.purge(status=status, older_than=older_than)
    if session.out.as_json:
        session.out.json({"matched": matched, "purged": purged, "dry_run": dry_run})
    elif dry_run:
        session.out.say(f"{described} would be purged.")
    elif matched:
        session.out.say(f"Purged {formats.count(purged, f'{status.value} task')}.")
    else:
        session.out.say("Nothing to purge.")
