"""Charts as SVG text, to stand in a page that needs nothing from anywhere else."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from microqueue.errors import MicroqueueError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point: TypeAlias = tuple[datetime | float, float | None]

COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#ca8a04", "#0891b2", "#db2777", "#64748b")
INK, GRID, TARGET = "#475569", "#e2e8f0", "#dc2626"
SIZE = (7.2, 2.7)
FEW_POINTS = 3


@dataclass(frozen=True)
class Chart:
    """Lines over time, one per name.

    ``target`` is a line to stay below; a ``ceiling`` makes several charts comparable.
    """

    title: str
    series: Mapping[str, Sequence[Point]]
    unit: str = ""
    target: float | None = None
    share: bool = False
    filled: bool = False
    note: str = ""
    x_label: str = ""
    ceiling: float | None = None


def draw(chart: Chart) -> str:
    """Draw a chart as one ``<svg>`` element."""
    figure = _figure(chart)
    text = io.StringIO()
    # Inline elements share their ids with the whole page, so each chart salts its own.
    with _style({"svg.hashsalt": chart.title, "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def _figure(chart: Chart) -> Figure:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (part of the extra)
    except ImportError as exc:
        raise MicroqueueError(
            "charts need matplotlib: run pip install 'microqueue[spark]'"
        ) from exc
    with _style({}):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        for number, (name, points) in enumerate(chart.series.items()):
            _draw_series(axes, chart, name, points, COLOURS[number % len(COLOURS)])
        _dress(axes, chart)
    return figure


def _draw_series(axes: Axes, chart: Chart, name: str, points: Sequence[Point], colour: str) -> None:
    xs: list[Any] = [x for x, _ in points]
    ys = [float("nan") if y is None else y for _, y in points]
    known = [number for number, (_, y) in enumerate(points) if y is not None]
    marked = known if len(known) <= FEW_POINTS else _alone(known)
    axes.plot(xs, ys, label=name, color=colour, linewidth=1.6)
    axes.plot(
        [xs[number] for number in marked],
        [ys[number] for number in marked],
        color=colour, linestyle="none", marker="o", markersize=4,
    )  # fmt: skip
    if chart.filled:
        axes.fill_between(xs, ys, color=colour, alpha=0.15, linewidth=0)


def _alone(known: Sequence[int]) -> list[int]:
    """Choose the points without a neighbour: no line would show them."""
    there = set(known)
    return [number for number in known if not there & {number - 1, number + 1}]


def _dress(axes: Axes, chart: Chart) -> None:
    if chart.target is not None:
        axes.axhline(chart.target, color=TARGET, linewidth=1, linestyle=(0, (4, 3)), label="target")
    if chart.share:
        axes.set_ylim(-0.02, 1.04)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    else:
        axes.set_ylim(bottom=0, top=chart.ceiling * 1.05 if chart.ceiling else None)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_ylabel(chart.unit)
    axes.set_xlabel(chart.x_label)
    if any(isinstance(x, datetime) for points in chart.series.values() for x, _ in points):
        _date_axis(axes)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(length=0)
    if len(chart.series) > 1 or chart.target is not None:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False)


def _date_axis(axes: Axes) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter  # noqa: PLC0415 (as above)

    # With fewer than three of a unit there are at most seven steps of the next smaller one.
    locator: Any = AutoDateLocator(minticks=3, maxticks=8)  # type: ignore[no-untyped-call]  # matplotlib's own.
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]  # As above.


def _style(more: dict[str, Any]) -> Any:
    import matplotlib as mpl  # noqa: PLC0415 (as above)

    plain: Any = {"font.size": 8.5, "text.color": INK, "axes.labelcolor": INK}
    plain |= {"xtick.color": INK, "ytick.color": INK, "font.family": "sans-serif"}
    return mpl.rc_context(plain | more)
