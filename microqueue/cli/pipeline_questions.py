"""Commands of the Spark pipelines that answer questions, and change no task."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from microqueue.arguments import refused
from microqueue.backoff import BackoffPolicy
from microqueue.cli import pipeline_views as views
from microqueue.cli import tasks, values
from microqueue.cli.pipeline_options import (
    Archive,
    Live,
    Master,
    Since,
    Until,
    dry_run_option,
    instant,
    named_queues,
    settings_of,
)
from microqueue.cli.session import Session
from microqueue.cli.spark_progress import running


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
        typer.Option(help="The longest that a task should wait: 30s.", **tasks.DURATION),
    ] = None,
    dry_run: Annotated[bool, dry_run_option("print the figures, and write no files")] = False,
    master: Master = None,
) -> None:
    """Measure throughput, waits, run times and rates, over archive and live tasks together.

    Writes report.html, which needs nothing else, report.parquet and report.csv.
    """
    with running(session, master) as runner:
        from microqueue.spark.pipelines.report import as_document  # noqa: PLC0415 (slow)
        from microqueue.spark.pipelines.report import report as run  # noqa: PLC0415 (slow)

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
            tell=runner.tell,
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
        from microqueue.spark.pipelines.triage import triage as run  # noqa: PLC0415 (slow)

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
            tell=runner.tell,
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
        from microqueue.spark.pipelines.storms import storms as run  # noqa: PLC0415 (slow)

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
            tell=runner.tell,
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
        from microqueue.spark.pipelines.simulate import simulate as run  # noqa: PLC0415 (slow)

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
            tell=runner.tell,
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
