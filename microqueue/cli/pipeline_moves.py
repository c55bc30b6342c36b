"""Commands of the Spark pipelines that move tasks: out of a queue, into one, and back."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from microqueue.cli import pipeline_views as views
from microqueue.cli import tasks, values
from microqueue.cli.loading import load
from microqueue.cli.pipeline_options import (
    Archive,
    Master,
    RunName,
    dry_run_option,
    named_queues,
    settings_of,
)
from microqueue.cli.session import AllQueues, Session
from microqueue.cli.spark_progress import running
from microqueue.worker.handlers import load_model


def archive(
    session: Session,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Where the archive is, or will be.")],
    *,
    older_than: Annotated[
        timedelta,
        typer.Option(help="Tasks that finished longer ago than that: 1d.", **tasks.DURATION),
    ] = timedelta(days=1),
    status: Annotated[
        list[str] | None, typer.Option(help="done or failed; repeatable. Else both.")
    ] = None,
    compact: Annotated[
        bool, typer.Option("--compact/--no-compact", help="Merge small files afterwards.")
    ] = True,
    all_queues: AllQueues = False,
    dry_run: Annotated[bool, dry_run_option("count what would be archived")] = False,
    master: Master = None,
) -> None:
    """Move finished tasks to Parquet: written, read back, and only then deleted.

    Needs --queue or --all-queues. Safe to kill at any point: run it again, and it finishes what
    was begun.
    """
    session.check_scope(all_queues=all_queues)
    with running(session, master) as runner:
        from microqueue.spark.pipelines.archive import archive as run  # noqa: PLC0415 (slow)

        summary = run(
            runner.spark,
            path,
            uri=session.options.uri,
            collection=session.collection,
            settings=settings_of(session),
            queues=named_queues(session),
            statuses=status or ("done", "failed"),
            older_than=older_than,
            compact=compact,
            dry_run=dry_run,
            tell=runner.tell,
        )
    views.show(session, summary, views.archive)


def ingest(
    session: Session,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A file, a directory, or a table's name.")
    ],
    *,
    source_format: Annotated[
        str | None, typer.Option("--format", help="csv, json (lines), parquet or table.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODULE:MODEL", help="The pydantic model of a row.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The column that tells rows apart.")] = None,
    rejects: Annotated[
        str | None, typer.Option(help="The file for rows that are refused, with reasons.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="name=value for Spark's reader; repeatable.")
    ] = None,
    priority: Annotated[int, typer.Option(help="0 to 255, higher first.")] = 0,
    run_name: RunName = None,
    dry_run: Annotated[bool, dry_run_option("validate all rows, and add none")] = False,
    master: Master = None,
) -> None:
    """Add a task to the queue for each row of CSV, JSON lines, Parquet or a table."""
    options = {name: str(value) for name, value in values.read_headers(option or ()).items()}
    if model is not None:
        load(model, by=load_model)  # A wrong one is told before Spark starts.
    with running(session, master) as runner:
        from microqueue.spark.pipelines.ingest import ingest as run  # noqa: PLC0415 (slow)

        summary = run(
            runner.spark,
            source,
            queue=session.queue_name,
            source_format=source_format,  # type: ignore[arg-type]  # It is checked there.
            model=model,
            key=key,
            rejects=rejects,
            options=options,
            priority=priority,
            run=run_name,
            uri=session.options.uri,
            collection=session.collection,
            settings=settings_of(session),
            dry_run=dry_run,
            tell=runner.tell,
        )
    views.show(session, summary, views.ingest)


def replay(
    session: Session,
    *,
    where: Annotated[
        str,
        typer.Option(help="A SQL condition: \"error.code = 'timeout' and priority > 3\"."),
    ],
    archive: Archive = None,
    letters: Annotated[
        bool, typer.Option("--letters/--no-letters", help="Dead letters in MongoDB, too.")
    ] = True,
    include_done: Annotated[
        bool,
        typer.Option("--include-done", help="Archived tasks that succeeded, too: they run again."),
    ] = False,
    to: Annotated[str | None, typer.Option(help="The queue they go to; else their own.")] = None,
    over: Annotated[
        timedelta, typer.Option(help="Spread them over so long: 30m.", **tasks.DURATION)
    ] = timedelta(0),
    run_name: RunName = None,
    all_queues: AllQueues = False,
    dry_run: Annotated[bool, dry_run_option("count what would be sent back")] = False,
    master: Master = None,
) -> None:
    """Send chosen dead letters back, those of an archive, too, once per run.

    Needs --queue or --all-queues: the queues that the tasks are of. Done tasks of an archive are
    left out, unless --include-done is given. The condition may use the columns of a task, payload
    (JSON text), fingerprint and archived.
    """
    session.check_scope(all_queues=all_queues)
    if session.options.queue is not None:
        quoted = session.options.queue.replace("\\", "\\\\").replace("'", "\\'")
        where = f"({where}) and queue = '{quoted}'"
    with running(session, master) as runner:
        from microqueue.spark.pipelines.replay import replay as run  # noqa: PLC0415 (slow)

        summary = run(
            runner.spark,
            where=where,
            archive=archive,
            letters=letters,
            include_done=include_done,
            to=to,
            over=over,
            run=run_name,
            uri=session.options.uri,
            collection=session.collection,
            settings=settings_of(session),
            dry_run=dry_run,
            tell=runner.tell,
        )
    views.show(session, summary, views.replay)
