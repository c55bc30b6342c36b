"""The ``pipeline`` commands, which run the Spark pipelines.

``archive``, ``ingest`` and ``replay`` move tasks; ``report``, ``triage``, ``storms`` and
``simulate`` only read.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypedDict

import typer

from microqueue.cli import pipeline_output as views
from microqueue.cli import values
from microqueue.cli.dlq_detection import with_detected_dlq
from microqueue.cli.loading import load
from microqueue.cli.options import DURATION, PAST, AllQueues, renamed
from microqueue.cli.session import Session
from microqueue.cli.spark_runner import Runner, running
from microqueue.settings import QueueSettings
from microqueue.worker.handlers import load_model

if TYPE_CHECKING:
    from microqueue.spark.progress import Step

Master: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Spark master, such as local\\[4] or spark://host:7077. \\[default: all local cores]",
    ),
]
Archive: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", help="Archive to read: a directory, or any path that Spark reads."
    ),
]
Live: TypeAlias = Annotated[bool, typer.Option("--live/--no-live", help="Read tasks from MongoDB.")]
# Any, because the parser returns an instant, or how long ago it was.
Since: TypeAlias = Annotated[
    Any, typer.Option(help="Start of the period: 2026-05-01T12:00:00Z, or 7d ago.", **PAST)
]
Until: TypeAlias = Annotated[
    Any, typer.Option(help="End of the period, in the same formats. \\[default: now]", **PAST)
]
RunName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="NAME",
        help="Name of the run. Running it again under the same name adds nothing twice.",
    ),
]


def dry_run_option(effect: str) -> Any:
    """Declare ``--dry-run``; ``effect`` describes what it does instead."""
    return typer.Option("--dry-run", help=f"{effect}.")


def settings_of(session: Session, *, live: bool = True) -> QueueSettings:
    """Return the settings of the environment, with a separate DLQ if one is detected.

    The collection is not contacted unless ``live``.
    """
    settings = QueueSettings.from_environment()
    if not live:
        return settings
    from microqueue.spark.location import (  # noqa: PLC0415 (optional, slow)
        locate,
        location_of,
        primary,
    )

    location = location_of(primary(locate(session.options.uri, collection=session.collection)))
    return with_detected_dlq(settings, location.run, session.collection)


class CommonArguments(TypedDict):
    """The arguments that every pipeline takes from the command line."""

    uri: str | None
    collection: str
    settings: QueueSettings
    progress: Callable[[Step], None]


class QueuesArguments(CommonArguments):
    """The arguments of a pipeline over several queues; ``None``: over all."""

    queues: list[str] | None


def common_arguments(session: Session, runner: Runner, *, live: bool = True) -> CommonArguments:
    """Return the arguments of every pipeline; MongoDB is not contacted unless ``live``."""
    return {
        "uri": session.options.uri,
        "collection": session.collection,
        "settings": settings_of(session, live=live),
        "progress": runner.show_step,
    }


def queues_arguments(session: Session, runner: Runner, *, live: bool = True) -> QueuesArguments:
    """Return the arguments of a pipeline over the queues of ``--queue``, or over all."""
    return {**common_arguments(session, runner, live=live), "queues": session.named_queues}


def instant_before_now(past: timedelta | datetime | None) -> datetime | None:
    """Return an instant, computed from now if it was given as a duration."""
    return values.before(datetime.now().astimezone(), past)


def archive(
    session: Session,
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Directory of the archive; created if missing.")
    ],
    *,
    older_than: Annotated[
        timedelta,
        typer.Option(
            help="Only tasks that finished longer ago than this. \\[default: 1d]",
            show_default=False,
            **DURATION,
        ),
    ] = timedelta(days=1),
    status: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATUS",
            help="Only tasks with this status, done or failed; repeatable. \\[default: both]",
        ),
    ] = None,
    compact: Annotated[
        bool, typer.Option("--compact/--no-compact", help="Merge small files after archiving.")
    ] = True,
    all_queues: AllQueues = False,
    dry_run: Annotated[bool, dry_run_option("Count the matching tasks, and archive none")] = False,
    master: Master = None,
) -> None:
    """Move finished tasks to Parquet files: write, verify, then delete.

    Needs --queue or --all-queues. It may be killed at any time; the next run completes it.
    """
    session.check_scope(all_queues=all_queues)
    with running(session, master) as runner:
        from microqueue.spark.archive.job import archive as run  # noqa: PLC0415 (slow)

        summary = run(
            runner.spark,
            path,
            statuses=status or ("done", "failed"),
            older_than=older_than,
            compact=compact,
            dry_run=dry_run,
            **queues_arguments(session, runner),
        )
    views.show(session, summary, views.archive)


def ingest(
    session: Session,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="File, directory, or name of a table.")
    ],
    *,
    source_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="csv, json (JSON lines), parquet or table. \\[default: by the name of SOURCE]",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:MODEL", help="Pydantic model that validates each row."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="Column that identifies a row. \\[default: the whole row]"
        ),
    ] = None,
    rejects: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="File to write rejected rows to, with reasons."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Option of Spark's reader; repeatable."),
    ] = None,
    priority: Annotated[int, typer.Option(help="0 to 255; higher runs first.")] = 0,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the tasks: the function that a worker runs."),
    ] = None,
    run_name: RunName = None,
    dry_run: Annotated[bool, dry_run_option("Validate all rows, and add none")] = False,
    master: Master = None,
) -> None:
    """Enqueue a task for each row of a CSV, JSON lines or Parquet source, or of a table."""
    options = {one: str(value) for one, value in values.read_headers(option or ()).items()}
    if model is not None:
        load(model, by=load_model)  # A wrong model is reported before Spark starts.
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
            name=name,
            run=run_name,
            dry_run=dry_run,
            **common_arguments(session, runner),
        )
    views.show(session, summary, views.ingest, names_queue=True)


def replay(
    session: Session,
    *,
    where: Annotated[
        str,
        typer.Option(
            metavar="CONDITION",
            help="SQL condition, as in \"error.code = 'timeout' and priority > 3\".",
        ),
    ],
    archive: Archive = None,
    dead_letters: Annotated[
        bool,
        typer.Option("--dead-letters/--no-dead-letters", help="Replay dead letters in MongoDB."),
    ] = True,
    letters: Annotated[
        bool | None,
        renamed("--letters/--no-letters", "--dead-letters or --no-dead-letters"),
    ] = None,
    include_done: Annotated[
        bool,
        typer.Option("--include-done", help="Also replay archived tasks that are done."),
    ] = False,
    to: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Queue to replay into. \\[default: each task's own]"),
    ] = None,
    spread: Annotated[
        timedelta,
        typer.Option(
            help="Spread the deliveries over this period: 30m. \\[default: 0s]",
            show_default=False,
            **DURATION,
        ),
    ] = timedelta(0),
    over: Annotated[timedelta | None, renamed("--over", "--spread", **DURATION)] = None,
    run_name: RunName = None,
    all_queues: AllQueues = False,
    dry_run: Annotated[bool, dry_run_option("Count the matching tasks, and replay none")] = False,
    master: Master = None,
) -> None:
    """Replay dead letters that match a condition, from MongoDB and from an archive.

    Needs --queue or --all-queues, which select the tasks by their original queue. The condition
    may use all columns of a task, and payload (JSON text), fingerprint and archived.
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
            dead_letters=dead_letters if letters is None else letters,
            include_done=include_done,
            to=to,
            spread=spread if over is None else over,
            run=run_name,
            dry_run=dry_run,
            **common_arguments(session, runner),
        )
    views.show(session, summary, views.replay)


def report(
    session: Session,
    output: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Directory for the files of the report.")
    ] = Path("report"),
    *,
    archive: Archive = None,
    live: Live = True,
    since: Since = None,
    until: Until = None,
    bucket: Annotated[
        str | None,
        typer.Option(help="minute, hour or day. \\[default: chosen by the length of the period]"),
    ] = None,
    target_wait: Annotated[
        timedelta | None,
        typer.Option(
            help="Target wait: report the share of tasks that started within it.", **DURATION
        ),
    ] = None,
    dry_run: Annotated[bool, dry_run_option("Print the figures, and write no files")] = False,
    master: Master = None,
) -> None:
    """Report throughput, wait times, run times, and success and retry rates.

    Covers MongoDB and an archive. Writes report.html (self-contained), report.parquet and
    report.csv.
    """
    with running(session, master, live=live) as runner:
        from microqueue.spark.analytics.report import as_document  # noqa: PLC0415 (slow)
        from microqueue.spark.analytics.report import report as run  # noqa: PLC0415 (slow)

        made = run(
            runner.spark,
            output=None if dry_run else output,
            archive=archive,
            live=live,
            since=instant_before_now(since),
            until=instant_before_now(until),
            bucket=bucket,  # type: ignore[arg-type]  # It is checked there.
            target_wait=target_wait,
            **queues_arguments(session, runner, live=live),
        )
    views.show(session, made, views.report, document=as_document(made))


def triage(
    session: Session,
    *,
    archive: Archive = None,
    live: Live = True,
    since: Since = None,
    top: Annotated[int, typer.Option(help="Number of kinds to show.")] = 10,
    samples: Annotated[int, typer.Option(help="Number of dead letters to show per kind.")] = 2,
    state: Annotated[
        Path | None,
        typer.Option(help="File that stores the known kinds; others are marked as new."),
    ] = None,
    dry_run: Annotated[bool, dry_run_option("Do not change the state file")] = False,
    master: Master = None,
) -> None:
    """Group dead letters by kind of error, and print the command that replays each kind."""
    with running(session, master, live=live) as runner:
        from microqueue.spark.analytics.triage import triage as run  # noqa: PLC0415 (slow)

        found = run(
            runner.spark,
            archive=archive,
            live=live,
            since=instant_before_now(since),
            top=top,
            samples=samples,
            state=state,
            dry_run=dry_run,
            **queues_arguments(session, runner, live=live),
        )
    views.show(session, found, views.triage)


def storms(
    session: Session,
    *,
    archive: Archive = None,
    live: Live = True,
    since: Since = None,
    until: Until = None,
    factor: Annotated[
        float, typer.Option(help="How many times the usual retries per minute make a storm.")
    ] = 5.0,
    min_retries: Annotated[
        int, typer.Option(help="How many retries within a minute a storm has at least.")
    ] = 30,
    least: Annotated[int | None, renamed("--least", "--min-retries")] = None,
    top: Annotated[int, typer.Option(help="Number of storms to explain.")] = 5,
    dry_run: Annotated[bool, dry_run_option("Detect storms, and simulate nothing")] = False,
    master: Master = None,
) -> None:
    """Detect retry storms, and recommend a backoff policy that avoids them."""
    with running(session, master, live=live) as runner:
        from microqueue.spark.analytics.storms import storms as run  # noqa: PLC0415 (slow)

        found = run(
            runner.spark,
            archive=archive,
            live=live,
            since=instant_before_now(since),
            until=instant_before_now(until),
            factor=factor,
            min_retries=min_retries if least is None else least,
            top=top,
            dry_run=dry_run,
            **queues_arguments(session, runner, live=live),
        )
    views.show(session, found, views.storms)


def simulate(
    session: Session,
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help="Backoff policy to simulate, as in base=5,factor=2,max=1800,jitter=full; parts "
            "may be left out; repeatable.",
        ),
    ] = None,
    workers: Annotated[
        list[int] | None,
        typer.Option(metavar="NUMBER", help="Number of attempts that run at once; repeatable."),
    ] = None,
    visibility_timeout: Annotated[
        list[str] | None,
        typer.Option(metavar="DURATION", help="Visibility timeout to simulate; repeatable."),
    ] = None,
    repeat: Annotated[
        int, typer.Option(help="Number of runs per scenario, each with its own seed.")
    ] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the first run.")] = 0,
    archive: Archive = None,
    live: Live = True,
    since: Since = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY", help="Directory for simulation.html: a table and charts."
        ),
    ] = None,
    dry_run: Annotated[bool, dry_run_option("Count the scenarios, and simulate none")] = False,
    master: Master = None,
) -> None:
    """Simulate recorded tasks with other backoff policies, concurrency and timeouts."""
    timeouts = [values.read_duration(text) for text in visibility_timeout or ()]
    policies = [values.read_backoff(text, "policy") for text in policy or ()]
    with running(session, master, live=live) as runner:
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
            since=instant_before_now(since),
            output=output,
            dry_run=dry_run,
            **queues_arguments(session, runner, live=live),
        )
    views.show(session, made, views.simulate)
