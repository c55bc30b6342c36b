"""Commands that run the Spark pipelines."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from microqueue.arguments import refused
from microqueue.backoff import BackoffPolicy
from microqueue.cli import pipeline_output as views
from microqueue.cli import values
from microqueue.cli.dlq_detection import with_detected_dlq
from microqueue.cli.loading import load
from microqueue.cli.options import DURATION, PAST, AllQueues
from microqueue.cli.session import Session
from microqueue.cli.spark_runner import running
from microqueue.settings import QueueSettings
from microqueue.worker.handlers import load_model

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
    from microqueue.spark.location import (  # noqa: PLC0415 (optional, slow)
        locate,
        location_of,
        primary,
    )

    session.note_embedded_server()
    place = location_of(primary(locate(session.options.uri, collection=session.collection)))
    return with_detected_dlq(settings, place.run, session.collection)


def instant(past: timedelta | datetime | None) -> datetime | None:
    """Give the instant that is meant by one, or by so long ago."""
    return values.before(datetime.now().astimezone(), past)


def archive(
    session: Session,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Where the archive is, or will be.")],
    *,
    older_than: Annotated[
        timedelta,
        typer.Option(help="Tasks that finished longer ago than that: 1d.", **DURATION),
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
        from microqueue.spark.archive.job import archive as run  # noqa: PLC0415 (slow)

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
            progress=runner.tell,
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
        from microqueue.spark.ingest.job import ingest as run  # noqa: PLC0415 (slow)

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
            progress=runner.tell,
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
        timedelta, typer.Option(help="Spread them over so long: 30m.", **DURATION)
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
        from microqueue.spark.replay.job import replay as run  # noqa: PLC0415 (slow)

        summary = run(
            runner.spark,
            where=where,
            archive=archive,
            dead_letters=letters,
            include_done=include_done,
            to=to,
            over=over,
            run=run_name,
            uri=session.options.uri,
            collection=session.collection,
            settings=settings_of(session),
            dry_run=dry_run,
            progress=runner.tell,
        )
    views.show(session, summary, views.replay)


def report(
    session: Session,
    output: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Where the report's files go.")
    ] = Path("report"),
    *,
    archive: Archive = None,
    live: Live = True,
    since: Since = None,
    until: Until = None,
    bucket: Annotated[
        str | None, typer.Option(help="minute, hour or day; else what fits the period.")
    ] = None,
    target_wait: Annotated[
        timedelta | None,
        typer.Option(help="The longest that a task should wait: 30s.", **DURATION),
    ] = None,
    dry_run: Annotated[bool, dry_run_option("print the figures, and write no files")] = False,
    master: Master = None,
) -> None:
    """Measure throughput, waits, run times and rates, over archive and live tasks together.

    Writes report.html, which needs nothing else, report.parquet and report.csv.
    """
    with running(session, master) as runner:
        from microqueue.spark.analytics.report import as_document  # noqa: PLC0415 (slow)
        from microqueue.spark.analytics.report import report as run  # noqa: PLC0415 (slow)

        made = run(
            runner.spark,
            output=None if dry_run else output,
            archive=archive,
            live=live,
            uri=session.options.uri,
            collection=session.collection,
            settings=settings_of(session, live=live),
            queues=named_queues(session),
            since=instant(since),
            until=instant(until),
            bucket=bucket,  # type: ignore[arg-type]  # It is checked there.
            target_wait=target_wait,
            progress=runner.tell,
        )
    views.show(session, made, views.report, document=as_document(made))


def triage(
    session: Session,
    *,
    archive: Archive = None,
    live: Live = True,
    since: Since = None,
    top: Annotated[int, typer.Option(help="How many kinds to show.")] = 10,
    samples: Annotated[int, typer.Option(help="How many letters to show of each.")] = 2,
    state: Annotated[
        Path | None, typer.Option(help="The file that remembers which kinds were seen.")
    ] = None,
    dry_run: Annotated[bool, dry_run_option("leave the state file as it is")] = False,
    master: Master = None,
) -> None:
    """Group dead letters by kind of error, with the command that replays each kind."""
    with running(session, master) as runner:
        from microqueue.spark.analytics.triage import triage as run  # noqa: PLC0415 (slow)

        found = run(
            runner.spark,
            archive=archive,
            live=live,
            uri=session.options.uri,
            collection=session.collection,
            settings=settings_of(session, live=live),
            queues=named_queues(session),
            since=instant(since),
            top=top,
            samples=samples,
            state=state,
            dry_run=dry_run,
            progress=runner.tell,
        )
    views.show(session, found, views.triage)


def storms(
    session: Session,
    *,
    archive: Archive = None,
    live: Live = True,
    since: Since = None,
    until: Until = None,
    factor: Annotated[float, typer.Option(help="How many times the usual is a storm.")] = 5.0,
    least: Annotated[int, typer.Option(help="Fewer retries per minute are none.")] = 30,
    top: Annotated[int, typer.Option(help="How many to explain.")] = 5,
    dry_run: Annotated[bool, dry_run_option("detect, and simulate nothing")] = False,
    master: Master = None,
) -> None:
    """Detect retry storms, and find the backoff that would have smoothed them."""
    with running(session, master) as runner:
        from microqueue.spark.analytics.storms import storms as run  # noqa: PLC0415 (slow)

        found = run(
            runner.spark,
            archive=archive,
            live=live,
            uri=session.options.uri,
            collection=session.collection,
            settings=settings_of(session, live=live),
            queues=named_queues(session),
            since=instant(since),
            until=instant(until),
            factor=factor,
            least=least,
            top=top,
            dry_run=dry_run,
            progress=runner.tell,
        )
    views.show(session, found, views.storms)


def simulate(
    session: Session,
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="base=5,factor=2,max=1800,jitter=full, or a part; repeatable."),
    ] = None,
    workers: Annotated[
        list[int] | None, typer.Option(help="Attempts at the same time; repeatable.")
    ] = None,
    visibility_timeout: Annotated[
        list[str] | None, typer.Option(help="How long leases last: 60s; repeatable.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="How many seeds each scenario gets.")] = 3,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    archive: Archive = None,
    live: Live = True,
    since: Since = None,
    output: Annotated[
        Path | None, typer.Option(help="A directory for a page with a chart per policy.")
    ] = None,
    dry_run: Annotated[bool, dry_run_option("record, and count the scenarios")] = False,
    master: Master = None,
) -> None:
    """Replay recorded arrivals and failures under other policies, workers and timeouts."""
    timeouts = [values.read_duration(text) for text in visibility_timeout or ()]
    policies = [read_policy(text) for text in policy or ()]
    with running(session, master) as runner:
        from microqueue.spark.analytics.simulate import simulate as run  # noqa: PLC0415 (slow)

        made = run(
            runner.spark,
            policies=policies or None,
            workers=workers or None,
            visibility_timeouts=timeouts or None,
            repeat=repeat,
            seed=seed,
            archive=archive,
            live=live,
            uri=session.options.uri,
            collection=session.collection,
            settings=settings_of(session, live=live),
            queues=named_queues(session),
            since=instant(since),
            output=output,
            dry_run=dry_run,
            progress=runner.tell,
        )
    views.show(session, made, views.simulate)


def read_policy(text: str) -> BackoffPolicy:
    """Read ``base=5,jitter=full``; what is not named is as by default."""
    names = {"base": "base_sec", "factor": "factor", "max": "max_sec", "jitter": "jitter"}
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in names or not value:
            raise refused("policy", text, "give base=, factor=, max= and jitter=")
        try:
            found[names[name]] = value if name == "jitter" else float(value)
        except ValueError:
            raise refused("policy", text, f"{value!r} is not a number") from None
    return BackoffPolicy(**found)
