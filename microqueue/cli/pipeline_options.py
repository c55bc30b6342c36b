"""The options that the commands of Spark pipelines share."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any, TypeAlias

import typer

from microqueue.cli import values
from microqueue.cli.adopting import adopted
from microqueue.cli.dead_letters import PAST
from microqueue.cli.session import Session
from microqueue.settings import QueueSettings

Master: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Spark's master: local[4], spark://host:7077; else all cores here."),
]
Archive: TypeAlias = Annotated[
    str | None, typer.Option(help="The archive to read, too: a directory, or any path of Spark's.")
]
Live: TypeAlias = Annotated[
    bool, typer.Option("--live/--no-live", help="Read the tasks in MongoDB.")
]
# Any: a duration ago, or an instant; the parser gives either.
Since: TypeAlias = Annotated[
    Any, typer.Option(help="From then on: 2026-05-01T12:00:00Z, or 7d ago.", **PAST)
]
Until: TypeAlias = Annotated[Any, typer.Option(help="Up to then, likewise.", **PAST)]
RunName: TypeAlias = Annotated[
    str | None, typer.Option("--run", help="The run's name: what has its name is done once.")
]


def dry_run_option(what: str) -> Any:
    """Make the option that only looks; say what it looks at."""
    return typer.Option("--dry-run", help=f"Only look: {what}.")


def named_queues(session: Session) -> list[str] | None:
    """Give the queue that was named; without a name, pipelines take all of them."""
    return None if session.options.queue is None else [session.options.queue]


def settings_of(session: Session, *, live: bool = True) -> QueueSettings:
    """Give the environment's settings, with dead letters where the collection has them.

    Where the collection is not read, nobody is asked.
    """
    settings = QueueSettings.from_environment()
    if not live:
        return settings
    from microqueue.spark.pipelines.place import locate, primary  # noqa: PLC0415 (optional, slow)
    from microqueue.spark.place import place_of  # noqa: PLC0415 (as above)

    session.tell_embedded()
    place = place_of(primary(locate(session.options.uri, collection=session.collection)))
    return adopted(settings, place.run, session.collection)


def instant(past: timedelta | datetime | None) -> datetime | None:
    """Give the instant that is meant by one, or by so long ago."""
    return values.before(datetime.now().astimezone(), past)
