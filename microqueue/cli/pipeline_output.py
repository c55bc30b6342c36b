"""Show the summaries of the Spark pipelines."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.text import Text

from microqueue.backoff import BackoffPolicy
from microqueue.cli import formats
from microqueue.cli.session import Session

if TYPE_CHECKING:
    from microqueue.spark.analytics.report import Report, ReportRow
    from microqueue.spark.analytics.simulate import Simulation
    from microqueue.spark.analytics.storms import Storm, Storms
    from microqueue.spark.analytics.triage import Triage
    from microqueue.spark.archive.job import ArchiveSummary
    from microqueue.spark.ingest.job import IngestSummary
    from microqueue.spark.replay.job import ReplaySummary

KIB = 1024


def show(
    session: Session,
    summary: Any,
    view: Callable[[Session, Any], None],
    *,
    document: Any = None,
    names_queue: bool = False,
) -> None:
    """Print a summary as JSON, or as text with the queues that it covers.

    With ``names_queue``, the summary itself names the queue.
    """
    if session.out.as_json:
        written = formats.jsonable(summary if document is None else document)
        named = session.options.queue
        used = {} if names_queue else {"queues": None if named is None else [named]}
        session.out.json({**used, **written})
        return
    if not names_queue:
        session.note_queues()
    view(session, summary)


def archive(session: Session, summary: ArchiveSummary) -> None:
    """Print what was archived."""
    out = session.out
    before = f"that finished before {_instant(summary.cutoff)}"
    if summary.dry_run:
        total = sum(summary.found.values())
        out.print(f"{formats.count(total, 'task')} {before} would be archived in {summary.path}.")
        if total:
            out.table(["queue/status", "tasks"], [[*pair] for pair in summary.found.items()])
        return
    if summary.recovered:
        out.print(f"Finished an earlier run: deleted {formats.count(summary.recovered, 'task')}.")
    if not summary.archived:
        out.print(f"No tasks {before}.")
    else:
        speed = summary.archived / max(summary.write_sec, 0.001)
        out.print(
            f"Archived {formats.count(summary.archived, 'task')} in "
            f"{formats.seconds(summary.write_sec)} ({speed:,.0f}/s): "
            f"{formats.count(summary.files, 'file')}, {_size(summary.size)}, verified."
        )
        out.print(
            f"Deleted {formats.count(summary.deleted, 'task')} from MongoDB in "
            f"{formats.seconds(summary.purge_sec)}."
        )
    if summary.superseded:
        out.print(f"{formats.count(summary.superseded, 'task')} changed since and were kept.")
    if summary.compacted:
        out.print(f"Merged {formats.count(summary.compacted, 'small file')}.")


def ingest(session: Session, summary: IngestSummary) -> None:
    """Print what was enqueued."""
    out = session.out
    if summary.repeated:
        would = "would be" if summary.dry_run else "was"
        out.print(
            f"Run {summary.run} is finished already: nothing {would} added now. "
            "Give another name with --run to ingest the source again. The result was:"
        )
    verb = "would be added" if summary.dry_run and not summary.repeated else "added"
    out.print(
        f"{formats.count(summary.added, 'task')} {verb} to queue {summary.queue!r}, "
        f"{summary.duplicates:,} existed already, {summary.rejected:,} rejected."
    )
    if summary.rejects:
        out.print(f"Rejected rows, with reasons: {summary.rejects}")


def replay(session: Session, summary: ReplaySummary) -> None:
    """Print what was replayed."""
    out = session.out
    if summary.dry_run:
        out.print(f"{formats.count(summary.matched, 'task')} would be replayed.")
        if summary.matched_by:
            rows: list[list[str | int | Text]] = [
                [*key.rsplit("/", 1), count] for key, count in summary.matched_by.items()
            ]
            out.table(["from", "status", "tasks"], rows)
        _print_done_left_out(session, summary)
        return
    if summary.repeated:
        out.print(
            f"Run {summary.run} is finished already: nothing was replayed now. The result was:"
        )
    out.print(
        f"Run {summary.run}: {formats.count(summary.letters, 'dead letter')} and "
        f"{formats.count(summary.archived, 'archived task')} replayed, due until "
        f"{_instant(summary.until)}; {summary.skipped:,} skipped."
    )
    _print_done_left_out(session, summary)


def _print_done_left_out(session: Session, summary: ReplaySummary) -> None:
    if summary.done_left_out:
        tasks = formats.count(summary.done_left_out, "done task")
        session.out.print(
            f"Left out: {tasks} of the archive that match the condition. "
            "--include-done runs them again."
        )


def report(session: Session, made: Report) -> None:
    """Print the figures of each queue, and of each name if there are any."""
    out = session.out
    out.print(f"{_instant(made.since)} to {_instant(made.until)}, by {made.bucket}\n")
    columns = ["enqueued", "done", "failed", "success", "retried"]
    columns += ["wait p50", "p95", "p99", "run p50", "p95", "p99"]
    timed = made.target_wait_sec is not None
    if made.target_wait_sec is not None:
        columns.append(f"in {formats.seconds(made.target_wait_sec)}")
    queues = [(row.queue or "all", row) for row in [*made.queues, made.total]]
    out.table(["queue", *columns], [[one, *_figures(row, timed=timed)] for one, row in queues])
    names = made.names
    if any(row.name for row in names):
        out.print("")
        rows = [(formats.one_line(row.name or "(no name)"), row) for row in names]
        out.table(["name", *columns], [[one, *_figures(row, timed=timed)] for one, row in rows])
    if made.files:
        out.print(f"\nWritten: {', '.join(made.files)}")


def _figures(row: ReportRow, *, timed: bool) -> list[str | int | Text]:
    cells: list[str | int | Text] = [row.enqueued, row.done, row.failed]
    cells += [_percent(row.success_rate), _percent(row.retry_rate)]
    waits = (row.wait_p50, row.wait_p95, row.wait_p99)
    runs = (row.run_p50, row.run_p95, row.run_p99)
    cells += ["-" if value is None else formats.seconds(value) for value in (*waits, *runs)]
    return [*cells, _percent(row.target_kept)] if timed else cells


def triage(session: Session, found: Triage) -> None:
    """Print the kinds of dead letters, with the commands that replay them."""
    out = session.out
    if not found.total:
        out.print("No dead letters.")
        return
    kinds = formats.count(found.kinds, "kind")
    out.print(f"{formats.count(found.total, 'dead letter')} of {kinds}, {found.new:,} of them new.")
    for cluster in found.clusters:
        mark = "NEW " if cluster.new else ""
        where = f"queue {cluster.queue}, code {cluster.code or '-'}"
        out.heading(formats.one_line(f"{mark}{cluster.count:,} x {cluster.pattern or '-'}"))
        out.print(
            f"  {where}, {cluster.live:,} live, {cluster.archived:,} archived, "
            f"{_when(cluster.first_at)} to {_when(cluster.last_at)}",
            "dim",
        )
        for sample in cluster.samples:
            out.print(
                f"  {sample.id}  {formats.truncate(formats.one_line(sample.message), 120)}", "dim"
            )
        if cluster.replay is not None:
            out.print(f"  {cluster.replay.text}", "cyan")
        if cluster.replay_archived is not None:
            out.print(f"  {cluster.replay_archived.text}", "cyan")


def storms(session: Session, found: Storms) -> None:
    """Print storms with their causes, and a better policy."""
    out = session.out
    if not found.storms:
        out.print(f"No retry storms from {_instant(found.since)} to {_instant(found.until)}.")
    for storm in found.storms:
        out.heading(f"{storm.queue}: {_instant(storm.start)} to {_instant(storm.end)}")
        out.facts(_facts(storm))
    for coming in found.coming:
        out.print(
            f"Upcoming: {formats.count(coming.tasks, 'retry', 'retries')} of queue "
            f"{coming.queue!r} are due in the same second, {_instant(coming.at, seconds=True)}.",
            "yellow",
        )


def _facts(storm: Storm) -> list[tuple[str, str | int | Text | None]]:
    return [
        (
            "retries",
            f"{storm.retries:,}; {storm.peak_per_min:,} in the peak minute; usual are "
            f"{storm.baseline_per_min:,.0f}",
        ),
        (
            "peak",
            f"{storm.peak_per_sec:,} in the peak second, {storm.synchrony:.0%} of its minute",
        ),
        (
            "error",
            f"{storm.code or '-'}: {storm.error or '-'} ({storm.error_share:.0%} of failures)",
        ),
        ("policy", describe(storm.policy)),
        ("better", _better(storm)),
    ]


def _better(storm: Storm) -> str | None:
    """Describe a better policy, or why there is none."""
    better, known = storm.suggestion, storm.reproduction
    if better is not None:
        return (
            f"{describe(better.policy)}: a peak of {better.peak_retries_per_sec:,}/s instead "
            f"of {better.instead_of_per_sec:,}/s, recovers in "
            f"{formats.seconds(better.recovery_sec)} instead of "
            f"{formats.seconds(better.instead_of_sec)}, by simulation of "
            f"{_sampled(better.tasks, better.tasks_total)}"
        )
    if known is None:
        return None
    by = f"by simulation of {_sampled(known.tasks, known.tasks_total)}"
    if known.reproduced:
        return f"no other base or jitter is calmer and recovers about as soon, {by}"
    return (
        "no recommendation, because the policy does not explain this storm: it makes "
        f"{known.simulated_retries:,.0f} retries, a peak of {known.simulated_peak_per_sec:,.0f}/s "
        f"and {known.simulated_peak_per_min:,.0f} in the peak minute, {by}; observed were "
        f"{known.retries:,} retries, a peak of {known.peak_per_sec:,}/s and "
        f"{known.peak_per_min:,} in the peak minute"
    )


def simulate(session: Session, made: Simulation) -> None:
    """Print the scenarios in a table, the lowest peak first."""
    out = session.out
    outages = formats.count(len(made.outages), "outage")
    tasks = _sampled(made.tasks, made.tasks_total)
    recorded = f"{tasks[0].upper()}{tasks[1:]} and {outages} recorded"
    if made.dry_run:
        out.print(f"{recorded}; {formats.count(made.scenarios, 'run')} to simulate.")
        return
    out.print(f"{recorded}, {formats.count(made.scenarios, 'run')} simulated.\n")
    columns = ["scenario", "peak retries/s", "peak attempts/s", "recovers in"]
    columns += ["wasted", "done", "dead", "latency p95"]
    out.table(
        columns,
        [
            [
                one.name,
                one.peak_retries_per_sec,
                one.peak_attempts_per_sec,
                formats.seconds(one.recovery_sec),
                round(one.wasted_attempts),
                round(one.done),
                round(one.dead),
                formats.seconds(one.latency_p95_sec),
            ]
            for one in made.outcomes
        ],
        scenario="fold",
    )
    if made.files:
        out.print(f"\nWritten: {', '.join(made.files)}")


def _sampled(tasks: int, total: int) -> str:
    """Describe how many tasks were examined, and of how many."""
    if tasks == total:
        return formats.count(tasks, "task")
    return f"a sample of {tasks:,} of {formats.count(total, 'task')}"


def describe(policy: BackoffPolicy) -> str:
    """Describe a policy in a few words."""
    return (
        f"base {policy.base_sec:g}s, factor {policy.factor:g}, at most {policy.max_sec:g}s, "
        f"jitter {policy.jitter}"
    )


def _instant(at: datetime, *, seconds: bool = False) -> str:
    form = "%Y-%m-%d %H:%M:%S UTC" if seconds else "%Y-%m-%d %H:%M UTC"
    return f"{at.astimezone(UTC):{form}}"


def _when(at: datetime | None) -> str:
    return "-" if at is None else _instant(at)


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{min(share, 0.999) if share < 1 else share:.1%}"


def _size(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < KIB:
            return f"{size:,.4g} {unit}"
        size /= KIB
    return f"{size:,.4g} GiB"
