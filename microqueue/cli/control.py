"""Commands that steer: pause and resume a queue, cancel a task."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from microqueue.cli import formats, tasks
from microqueue.cli.session import Session


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


def cancel(
    session: Session,
    task_id: Annotated[str, typer.Argument(metavar="ID", help="The task's id.")],
) -> None:
    """Fail a waiting or running task with code cancelled; its handler is told."""
    with session.connect() as queue:
        task = queue.cancel(tasks.find(session, queue, task_id).id)
        (task,) = tasks.shown([task])
        if session.out.as_json:
            session.out.json(task)
        else:
            why = task.error.message if task.error else ""
            session.out.say(f"Cancelled {task.id} of queue {task.queue!r}: {why}.")
