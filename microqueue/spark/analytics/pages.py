"""The HTML pages of the report and of the simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeAlias

from microqueue.spark.analytics.html import Chart, Page, Point, Table, Tile, render

if TYPE_CHECKING:
    from microqueue.spark.analytics.report import Report, ReportRow
    from microqueue.spark.analytics.simulate import ScenarioResult, Simulation

MOST_LINES = 6
OTHERS = "others"
UNNAMED = "no name"
MINUTE = 60
GOOD_SHARE = 0.95

MOST_CHARTS = 24
MOST_POINTS = 600
OUTCOME_COLUMNS = (
    "policy",
    "peak retries/s",
    "peak attempts/s",
    "recovers in",
    "wasted attempts",
    "done",
    "dead",
    "latency p95",
)

Series: TypeAlias = dict[str, list[Point]]


def percent(share: float | None) -> str:
    """Format a share; less than all is never shown as 100 %."""
    if share is None:
        return "-"
    return f"{min(share, 0.999) if share < 1 else share:.1%}"


def seconds(value: float | None) -> str:
    """Format a time in seconds."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.3g} s" if value < 10 * MINUTE else f"{value / MINUTE:.0f} min"


# The page of a report


def report_page(report: Report, now: datetime) -> str:
    """Render a report as one HTML page."""
    period = f"{_instant(report.since)} to {_instant(report.until)} UTC"
    return render(
        Page(
            title="microqueue report",
            subtitle=f"{period}, by {report.bucket}",
            tiles=_report_tiles(report),
            charts=charts_of(report),
            tables=[_queue_table(report), *_name_tables(report)],
            footer=f"Created {_instant(now)} UTC from archived and live tasks. A wait is the time "
            "from enqueueing to the first start, including requested delays.",
        )
    )


def _instant(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M}"


def _report_tiles(report: Report) -> list[Tile]:
    total = report.total
    kept = total.target_kept
    tiles = [
        Tile(f"{total.done:,}", "tasks done"),
        Tile(f"{total.done / total.seconds * MINUTE:,.1f}", "done per minute"),
        Tile(percent(total.success_rate), "succeeded", _good(total.success_rate)),
        Tile(percent(total.retry_rate), "attempts retried"),
        Tile(seconds(total.wait_p95), "wait, p95"),
        Tile(seconds(total.run_p95), "run time, p95"),
    ]
    if report.target_wait_sec is not None:
        label = f"started within {seconds(report.target_wait_sec)}"
        tiles.append(Tile(percent(kept), label, _good(kept)))
    return tiles


def _good(value: float | None) -> bool | None:
    return None if value is None else value >= GOOD_SHARE


def charts_of(report: Report) -> list[Chart]:
    """Return the charts of a report."""
    per_bucket = f"per {report.bucket}"
    charts = [
        Chart("Done", _by_queue(report, lambda row: row.done), per_bucket, filled=True),
        Chart(
            "Enqueued and finished",
            _sums(
                report,
                {
                    "enqueued": lambda row: row.enqueued,
                    "done": lambda row: row.done,
                    "failed": lambda row: row.failed,
                },
            ),
            per_bucket,
        ),
        Chart(
            "Wait, p95",
            _by_queue(report, lambda row: row.wait_p95, worst=True),
            "seconds",
            target=report.target_wait_sec,
        ),
        Chart("Run time, p95", _by_queue(report, lambda row: row.run_p95, worst=True), "seconds"),
        Chart(
            "Attempts retried",
            _by_queue(report, lambda row: row.retry_rate, worst=True),
            share=True,
        ),
    ]
    if report.target_wait_sec is not None:
        charts.append(
            Chart(
                f"Started within {seconds(report.target_wait_sec)}",
                _by_queue(report, lambda row: row.target_kept, least=True),
                share=True,
            )
        )
    else:
        failures = _by_queue(report, lambda row: row.failure_rate, worst=True)
        charts.append(Chart("Finished tasks that failed", failures, share=True))
    return charts


def _by_queue(
    report: Report,
    value: Callable[[ReportRow], float | None],
    *,
    worst: bool = False,
    least: bool = False,
) -> Series:
    """Return a line for each of the busiest queues, and one for all others together.

    The values of the others are added up. If they cannot be added, the line shows the worst.
    """
    rows = report.buckets
    busy: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        busy[row.queue or ""] += row.attempts + row.enqueued
    shown = sorted(busy, key=lambda name: -busy[name])
    own = sorted(shown if len(shown) <= MOST_LINES else shown[: MOST_LINES - 1])
    found: dict[str, dict[datetime, list[float]]] = {name: {} for name in own}
    for row in rows:
        number = value(row)
        if row.start is not None and number is not None:
            name = row.queue if row.queue in found and row.queue else OTHERS
            found.setdefault(name, {}).setdefault(row.start, []).append(number)
    merge: Callable[[list[float]], float] = max if worst else min if least else sum
    nothing = None if worst or least else 0
    return {
        name: _with_gaps(report, {at: merge(points[at]) for at in points}, nothing)
        for name, points in found.items()
    }


def _sums(report: Report, values: Mapping[str, Callable[[ReportRow], int]]) -> Series:
    found: dict[str, defaultdict[datetime, int]] = {name: defaultdict(int) for name in values}
    for row in report.buckets:
        for name, value in values.items():
            if row.start is not None:
                found[name][row.start] += value(row)
    return {name: _with_gaps(report, points, 0) for name, points in found.items()}


def _with_gaps(
    report: Report, points: Mapping[datetime, float], nothing: float | None
) -> list[Point]:
    """Add the empty buckets at both ends of each gap, and of the period.

    Between them the line is at zero, or interrupted. Empty buckets within a gap would change
    nothing, and a year has half a million minutes.
    """
    size = report.bucket_sec
    step = timedelta(seconds=size)
    last_moment = report.until - timedelta(microseconds=1)
    first, last = (
        datetime.fromtimestamp(at.timestamp() // size * size, UTC)
        for at in (report.since, last_moment)
    )
    shown = {first, last, *points}
    shown |= {at + change for at in points for change in (-step, step)}
    return [(at, points.get(at, nothing)) for at in sorted(shown) if first <= at <= last]


def _queue_table(report: Report) -> Table:
    rows = [(row.queue or "all", row) for row in [*report.queues, report.total]]
    return _table("Queues", "queue", rows, timed=report.target_wait_sec is not None)


def _name_tables(report: Report) -> list[Table]:
    """Return the table by name; none if no task has a name."""
    rows = [(row.name or UNNAMED, row) for row in report.names]
    if not any(row.name for _, row in rows):
        return []
    return [_table("Names", "name", rows, timed=report.target_wait_sec is not None)]


def _table(title: str, kind: str, rows: Sequence[tuple[str, ReportRow]], *, timed: bool) -> Table:
    columns = [kind, "enqueued", "done", "failed", "succeeded", "retried"]
    columns += ["wait p50", "p95", "p99", "run p50", "p95", "p99"]
    if timed:
        columns.append("in time")
    return Table(title, columns, [_report_cells(label, row, timed=timed) for label, row in rows])


def _report_cells(label: str, row: ReportRow, *, timed: bool) -> list[str]:
    cells = [label, f"{row.enqueued:,}", f"{row.done:,}", f"{row.failed:,}"]
    cells += [percent(row.success_rate), percent(row.retry_rate)]
    cells += [seconds(value) for value in (row.wait_p50, row.wait_p95, row.wait_p99)]
    cells += [seconds(value) for value in (row.run_p50, row.run_p95, row.run_p99)]
    return [*cells, percent(row.target_kept)] if timed else cells


# The page of a simulation


def simulation_page(simulation: Simulation) -> str:
    """Render a simulation as one HTML page."""
    outcomes = simulation.outcomes
    lowest, highest = outcomes[0], outcomes[-1]
    recorded = "recorded tasks"
    if simulation.tasks < simulation.tasks_total:
        recorded = f"tasks, a sample of {simulation.tasks_total:,} recorded tasks"
    tiles = [
        Tile(f"{simulation.tasks:,}", recorded),
        Tile(f"{len(outcomes):,}", "scenarios"),
        Tile(f"{lowest.peak_retries_per_sec:,}/s", "lowest peak of retries", good=True),
        Tile(f"{highest.peak_retries_per_sec:,}/s", "highest peak of retries", good=False),
        Tile(f"{len(simulation.outages):,}", "outages in the recording"),
    ]
    end = max(max(one.retries_by_sec, default=0) for one in outcomes)
    top = highest.peak_retries_per_sec
    return render(
        Page(
            title="microqueue simulation",
            subtitle=f"Recorded from {simulation.begun_at:%Y-%m-%d %H:%M} UTC; lowest peak first"
            if simulation.begun_at
            else "Lowest peak first",
            tiles=tiles,
            charts=[_outcome_chart(one, end, top) for one in outcomes[:MOST_CHARTS]],
            tables=[Table("Scenarios", OUTCOME_COLUMNS, [_outcome_cells(one) for one in outcomes])],
            footer="Peaks are the highest of all seeds, the rest are means. Charts show one seed.",
        )
    )


def _outcome_chart(outcome: ScenarioResult, end: int, top: int) -> Chart:
    step = max(end // MOST_POINTS, 1)
    # The highest second of each step, as a mean would hide the storm.
    peaks: dict[int, float] = {}
    for second, retries in outcome.retries_by_sec.items():
        start = second // step * step
        peaks[start] = max(peaks.get(start, 0), retries)
    points: list[Point] = [(start, peaks.get(start, 0)) for start in range(0, end + step, step)]
    return Chart(
        outcome.name,
        {"retries": points},
        "retries/s",
        filled=True,
        x_label="seconds",
        ceiling=float(top),
        note=f"peak {outcome.peak_retries_per_sec:,}/s, recovers in "
        f"{seconds(outcome.recovery_sec)}, {outcome.wasted_attempts:,.0f} attempts wasted",
    )


def _outcome_cells(outcome: ScenarioResult) -> list[str]:
    return [
        outcome.name,
        f"{outcome.peak_retries_per_sec:,}",
        f"{outcome.peak_attempts_per_sec:,}",
        seconds(outcome.recovery_sec),
        f"{outcome.wasted_attempts:,.0f}",
        f"{outcome.done:,.0f}",
        f"{outcome.dead:,.0f}",
        seconds(outcome.latency_p95_sec),
    ]
