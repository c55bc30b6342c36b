"""The page of a simulation: a chart for each policy, and all figures side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microqueue.spark.pipelines.charts import Chart, Point
from microqueue.spark.pipelines.page import Page, Table, Tile, render
from microqueue.spark.pipelines.report_page import seconds

if TYPE_CHECKING:
    from microqueue.spark.pipelines.simulate import Outcome, Simulation

MOST_CHARTS = 24
MOST_POINTS = 600
COLUMNS = (
    "policy",
    "peak retries/s",
    "peak attempts/s",
    "recovers in",
    "wasted attempts",
    "done",
    "dead",
    "latency p95",
)


def simulation_page(simulation: Simulation) -> str:
    """Render a simulation as one HTML page."""
    outcomes = simulation.outcomes
    calmest, wildest = outcomes[0], outcomes[-1]
    recorded = "recorded tasks"
    if simulation.tasks < simulation.tasks_total:
        recorded = f"tasks, a sample of {simulation.tasks_total:,} recorded tasks"
    tiles = [
        Tile(f"{simulation.tasks:,}", recorded),
        Tile(f"{len(outcomes):,}", "scenarios"),
        Tile(f"{calmest.peak_retries_per_sec:,}/s", "calmest peak of retries", good=True),
        Tile(f"{wildest.peak_retries_per_sec:,}/s", "wildest peak of retries", good=False),
        Tile(f"{len(simulation.outages):,}", "outages in the recording"),
    ]
    end = max(max(one.retries_by_sec, default=0) for one in outcomes)
    top = wildest.peak_retries_per_sec
    return render(
        Page(
            title="microqueue simulation",
            subtitle=f"Recorded from {simulation.begun_at:%Y-%m-%d %H:%M} UTC on; the calmest first"
            if simulation.begun_at
            else "The calmest first",
            tiles=tiles,
            charts=[_chart(one, end, top) for one in outcomes[:MOST_CHARTS]],
            tables=[Table("Scenarios", COLUMNS, [_cells(one) for one in outcomes])],
            footer="Peaks are the worst of all seeds, the rest are means; charts show one seed.",
        )
    )


def _chart(outcome: Outcome, end: int, top: int) -> Chart:
    step = max(end // MOST_POINTS, 1)
    # The highest second of each step: a mean would hide the storm.
    peaks: dict[int, float] = {}
    for second, retries in outcome.retries_by_sec.items():
        place = second // step * step
        peaks[place] = max(peaks.get(place, 0), retries)
    points: list[Point] = [(place, peaks.get(place, 0)) for place in range(0, end + step, step)]
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


def _cells(outcome: Outcome) -> list[str]:
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
