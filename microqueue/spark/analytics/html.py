"""Self-contained HTML pages with charts: no scripts, fonts or images from elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Any, TypeAlias

from microqueue.errors import PipelineError
from microqueue.spark import error_codes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point: TypeAlias = tuple[datetime | float, float | None]

COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#ca8a04", "#0891b2", "#db2777", "#64748b")
INK, GRID, TARGET = "#475569", "#e2e8f0", "#dc2626"
SIZE = (7.2, 2.7)
FEW_POINTS = 3

STYLE = """
:root { color-scheme: light; --ink: #0f172a; --soft: #64748b; --line: #e2e8f0; --good: #059669;
  --bad: #dc2626; }
* { box-sizing: border-box; }
body { margin: 0; background: #f1f5f9; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 48px; }
h1 { font-size: 26px; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 15px; margin: 0 0 4px; }
.soft { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(136px, 1fr)); gap: 14px;
  margin: 22px 0; }
.tile, .card { background: #fff; border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 14px 16px; }
.tile b { display: block; font-size: 25px; line-height: 1.25; font-weight: 650;
  font-variant-numeric: tabular-nums; }
.tile.good b { color: var(--good); } .tile.bad b { color: var(--bad); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(470px, 1fr)); gap: 14px; }
.card { padding: 14px 16px 8px; overflow-x: auto; }
.card svg { width: 100%; height: auto; }
.card svg text { font-family: inherit !important; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--soft); font-size: 13px; }
th:first-child, td:first-child { text-align: left; }
td { text-align: right; border-top: 1px solid var(--line); }
th, td { padding: 7px 10px; white-space: nowrap; }
main > .card { margin-top: 14px; }
footer { margin-top: 22px; font-size: 13px; }
@media print { body { background: #fff; } .card, .tile { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Chart:
    """Lines over time, one per name.

    ``target`` draws a horizontal line; ``ceiling`` sets the top, so that charts are comparable.
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


@dataclass(frozen=True)
class Tile:
    """A large number with a label; ``good`` sets its colour."""

    value: str
    label: str
    good: bool | None = None


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Page:
    """The contents of a page, from top to bottom."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    charts: Sequence[Chart]
    tables: Sequence[Table]
    footer: str = ""


def render(page: Page) -> str:
    """Return the HTML of a page; all text is escaped, as queue names and errors come from users."""
    body = [
        f"<h1>{escape(page.title)}</h1>",
        f'<div class="soft">{escape(page.subtitle)}</div>',
        f'<section class="tiles">{"".join(map(_tile, page.tiles))}</section>',
        f'<section class="charts">{"".join(map(_chart_card, page.charts))}</section>',
        *map(_table, page.tables),
        f'<footer class="soft">{escape(page.footer)}</footer>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(page.title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{chr(10).join(body)}\n</main></body></html>\n"
    )


def _tile(tile: Tile) -> str:
    kind = {True: " good", False: " bad", None: ""}[tile.good]
    return (
        f'<div class="tile{kind}"><b>{escape(tile.value)}</b>'
        f'<span class="soft">{escape(tile.label)}</span></div>'
    )


def _chart_card(chart: Chart) -> str:
    note = f'<div class="soft">{escape(chart.note)}</div>' if chart.note else ""
    return f'<div class="card"><h2>{escape(chart.title)}</h2>{note}{draw(chart)}</div>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    return (
        f'<div class="card"><h2>{escape(table.title)}</h2><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


# Charts, drawn by matplotlib


def draw(chart: Chart) -> str:
    """Draw a chart as one ``<svg>`` element."""
    figure = _figure(chart)
    text = io.StringIO()
    # Ids must be unique in the page, so each chart has its own salt.
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
        raise PipelineError(
            "charts need matplotlib: run pip install 'microqueue[spark]'",
            code=error_codes.NO_MATPLOTLIB,
        ) from exc
    with _style({}):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        for number, (name, points) in enumerate(chart.series.items()):
            _draw_series(axes, chart, name, points, COLOURS[number % len(COLOURS)])
        _style_axes(axes, chart)
    return figure


def _draw_series(axes: Axes, chart: Chart, name: str, points: Sequence[Point], colour: str) -> None:
    xs: list[Any] = [x for x, _ in points]
    ys = [float("nan") if y is None else y for _, y in points]
    known = [number for number, (_, y) in enumerate(points) if y is not None]
    marked = known if len(known) <= FEW_POINTS else _isolated(known)
    axes.plot(xs, ys, label=name, color=colour, linewidth=1.6)
    axes.plot(
        [xs[number] for number in marked],
        [ys[number] for number in marked],
        color=colour, linestyle="none", marker="o", markersize=4,
    )  # fmt: skip
    if chart.filled:
        axes.fill_between(xs, ys, color=colour, alpha=0.15, linewidth=0)


def _isolated(known: Sequence[int]) -> list[int]:
    """Return the points without a neighbour, which no line would show."""
    there = set(known)
    return [number for number in known if not there & {number - 1, number + 1}]


def _style_axes(axes: Axes, chart: Chart) -> None:
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

    # At least three ticks: with fewer, matplotlib uses the next smaller unit.
    locator: Any = AutoDateLocator(minticks=3, maxticks=8)  # type: ignore[no-untyped-call]  # matplotlib's own.
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]  # As above.


def _style(more: dict[str, Any]) -> Any:
    import matplotlib as mpl  # noqa: PLC0415 (as above)

    plain: Any = {"font.size": 8.5, "text.color": INK, "axes.labelcolor": INK}
    plain |= {"xtick.color": INK, "ytick.color": INK, "font.family": "sans-serif"}
    return mpl.rc_context(plain | more)
