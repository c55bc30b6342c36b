"""The command that deletes tasks."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import typer

from microqueue.cli import asking, formats, tasks
from microqueue.cli.dead_letters import DryRun, Yes
from microqueue.cli.session import AllQueues, Session
from microqueue.queue import Queue
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
    all_queues: AllQueues = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete tasks of one status for good; those that are done, unless told otherwise.

    Needs --queue or --all-queues.
    """
    session.check_scope(all_queues=all_queues)
    with session.connect() as queue:
        if not (dry_run or yes):
            asking.check_answerable()
        names = session.queues(queue)
        collection, settings = queue.collections.tasks, queue.settings
        chosen: list[Queue[Any]] = [Queue(collection, one, settings=settings) for one in names]

        def purge_all(*, dry_run: bool = False) -> int:
            options: dict[str, Any] = {"status": status, "older_than": older_than}
            return sum(one.purge(**options, dry_run=dry_run) for one in chosen)

        def described(number: int) -> str:
            return f"{formats.count(number, f'{status.value} task')} of {session.scope}"

        purged = 0
        if yes and not dry_run:  # How many there are need not be known before.
            matched = purged = purge_all()
        else:
            matched = purge_all(dry_run=True)
        if matched and not (dry_run or yes):
            asking.ask(f"Purge for good: {described(matched)}?")
            purged = purge_all()
    if session.out.as_json:
        counts = {"matched": matched, "purged": purged, "dry_run": dry_run}
        session.out.json({**counts, "queues": names})
    elif dry_run:
        session.out.say(f"{described(matched)} would be purged.")
    elif matched:
        session.out.say(f"Purged {described(purged)}.")
    else:
        session.out.say(f"Nothing to purge in {session.scope}.")
