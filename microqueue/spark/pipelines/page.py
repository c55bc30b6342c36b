"""One HTML page with everything in it: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from microqueue.spark.pipelines.charts import Chart, draw

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
class Tile:
    """One large number and what it is; ``good`` colours it."""

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
    """What stands on a page, from the top down."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    charts: Sequence[Chart]
    tables: Sequence[Table]
    footer: str = ""


def render(page: Page) -> str:
    """Write the page. Whatever it shows is escaped: queue names and errors come from users."""
    body = [
        f"<h1>{escape(page.title)}</h1>",
        f'<div class="soft">{escape(page.subtitle)}</div>',
        f'<section class="tiles">{"".join(map(_tile, page.tiles))}</section>',
        f'<section class="charts">{"".join(map(_chart, page.charts))}</section>',
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


def _chart(chart: Chart) -> str:
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
